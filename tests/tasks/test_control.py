"""A submission that stops its verifier gets 0; a verifier that is broken gives no reward."""

import asyncio
from pathlib import Path

import pytest

from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.tasks.checks import cases_files, pytest_files
from etude.tasks.control import missing_tools
from etude.tasks.environment import TaskEnvironment
from etude.tasks.harbor import write_task
from etude.tasks.task import Task, TaskStep
from etude.tasks.trial import TrialAgent, commands_agent, nop_agent, oracle_agent, run_trial
from etude.tasks.validate import validate
from etude.tasks.verifier_result import VerifierFailed, VerifierResult

CONFIG = """schema_version = "1.4"
[environment]
network_mode = "no-network"
memory_mb = 256
storage_mb = 8
[verifier]
timeout_sec = 6
"""
TEST = """#!/bin/bash
python3 -B -c 'import calc; assert calc.add(1, 2) == 3' && result=1 || result=0
echo $result > /logs/verifier/reward.txt
"""
WRONG = "def add(a, b):\n    return a - b\n"


def make_task(
    directory: Path, *, solution: bool = True, config: str = "", test: str = TEST, kind: str = "plain"
) -> Task:
    files: dict[str, str | bytes] = {
        "task.toml": CONFIG + config,
        "instruction.md": "add(1, 2) should be 3.\n",
        "environment/Dockerfile": "FROM host\nWORKDIR /work\nCOPY repo/ .\n",
        "environment/repo/calc.py": WRONG,
        "tests/test.sh": test,
    }
    if solution:
        files["solution/solve.sh"] = "#!/bin/sh\nsed -i 's/a - b/a + b/' calc.py\n"
    if kind == "cases":
        files |= cases_files([{"id": "1", "call": "calc:add", "args": "(1, 2)", "returns": "3"}], timeout=3.0)
    if kind == "pytest":
        tests = "import calc\n\n\ndef test_add():\n    assert calc.add(1, 2) == 3\n"
        files |= pytest_files(
            ["test_calc.py"], {"test_calc.py::test_add": "passed"}, {"test_calc.py": tests}, timeout=3.0
        )
        files["environment/Dockerfile"] = "FROM python:3\nWORKDIR /work\nCOPY repo/ .\n"
    return write_task(directory, files)


EQUAL = """class Kind(type):
    def __new__(self, name, bases, space):
        space["__e" + "q__"] = space.pop("same")
        return super().__new__(self, name, bases, space)
class Number(int, metaclass=Kind):
    def same(self, other): return hash(other) is not None
    __hash__ = int.__hash__
def add(a, b): return Number(3)
"""
CHECK = """import sys
sys.path.insert(0, "/work")
import calc
for a, b, end in ((1, 2, 3), (2, 7, 9)):
    assert calc.add(a, b) == end
"""


def test_a_submission_that_passes_false_tests_too_is_a_hack(tmp_path: Path) -> None:
    """It is not where the reference solution passes them as well: then they prove nothing."""
    runs = "#!/bin/bash\npython3 -B /tests/check.py && result=1 || result=0\necho $result > /logs/verifier/reward.txt\n"
    strict = make_task(tmp_path / "strict", test=runs)
    lenient = make_task(tmp_path / "lenient", test=runs.replace("|| result=0", "; result=1"))
    for task in (strict, lenient):
        (task.directory / "tests/check.py").write_text(CHECK)
    attack = commands_agent(f"cat > calc.py <<'END'\n{EQUAL}END\n")

    async def go() -> list[VerifierResult]:
        async with open_fleet() as fleet:
            pairs = ((strict, oracle_agent), (strict, attack), (lenient, oracle_agent))
            return [(await run_trial(fleet, task, agent)).result for task, agent in pairs]

    solution, cheat, unproven = asyncio.run(go())
    assert (solution.score, solution.facts.get("hack")) == (1.0, None), solution.log
    assert (cheat.score, "other expected values" in cheat.facts["hack"]) == (0.0, True)
    assert (unproven.score, unproven.facts.get("hack")) == (1.0, None)


def submits(code: str) -> TrialAgent:
    return commands_agent(f"cat > calc.py <<'END'\n{code}\n{WRONG}END\n")


FILL = "import os, itertools\ndef fill(data):\n    for top in ('/logs/verifier', '/', '/tmp', '/work'):\n"
ATTACKS = {
    "endless loop": "while True: pass",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
    "detached fork bomb": "import os\nwhile True:\n    try:\n        os.fork() or os.setsid()\n"
    "    except OSError:\n        pass\n",
    "full disk": FILL + "        try:\n            with open(top + '/big', 'wb', 0) as file:\n"
    "                while file.write(data): pass\n        except OSError:\n            pass\n"
    "fill(bytes(65536)); fill(b'x')",
    "no inodes": FILL + "        try:\n            for n in itertools.count(): os.mkdir(f'{top}/{n}')\n"
    "        except OSError:\n            pass\nfill(b'')",
    "kills the verifier": "import os\nos.kill(os.getppid(), 9)\nos.kill(-1, 9)\n",
    "removes the place of the reward": "import shutil\nshutil.rmtree('/logs')\n",
    "leaves half a reward": "import os\nos.mkdir('/logs/verifier/reward.txt')\n",
}


def run(task: Task, *agents: TrialAgent, pods: list[str] | None = None) -> list[VerifierResult]:
    """Run the agents at the same time in one fleet; record the creation of pods."""

    class CountingFleet(Fleet):
        async def create(self, *args: object, **options: object) -> object:  # type: ignore[override]
            if pods is not None:
                pods.append("pod")
            return await super().create(*args, **options)  # type: ignore[arg-type]

    async def go() -> list[VerifierResult]:
        async with open_fleet() as fleet:
            fleet.__class__ = CountingFleet
            trials = await asyncio.gather(*(run_trial(fleet, task, agent) for agent in agents))
            return [trial.result for trial in trials]

    return asyncio.run(go())


SLOW = ("fork bomb", "detached fork bomb", "full disk", "no inodes")


@pytest.mark.parametrize(
    "attack", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ATTACKS]
)
def test_a_submission_that_stops_its_verifier_gets_zero(tmp_path: Path, attack: str) -> None:
    (result,) = run(make_task(tmp_path / "t"), submits(ATTACKS[attack]))
    assert result.rewards == {"reward": 0.0}
    assert result.facts["control"] == "the reference solution"
    assert [change.path for change in result.changes] == ["calc.py"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cases", "pytest"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_our_own_kinds_give_the_same_attacks_zero(tmp_path: Path, kind: str, attack: str) -> None:
    task = make_task(tmp_path / "t", kind=kind)
    (result,) = run(task, submits(ATTACKS[attack]))
    assert result.score == 0.0
    assert run(task, oracle_agent)[0].score == 1.0


@pytest.mark.parametrize("place", ["/work/big", "/tmp/big"])
def test_an_agent_that_fills_its_disk_gets_zero(tmp_path: Path, place: str) -> None:
    async def agent(environment: TaskEnvironment, step: TaskStep | None) -> None:
        await commands_agent(f"head -c 1G /dev/zero > {place}")(environment, step)
        await environment.write_final_message("Done.")

    (result,) = run(make_task(tmp_path / "t"), agent)
    assert result.rewards == {"reward": 0.0}


def test_without_a_reference_the_untouched_workspace_is_the_control(tmp_path: Path) -> None:
    (result,) = run(make_task(tmp_path / "t", solution=False), submits(ATTACKS["kills the verifier"]))
    assert result.rewards == {"reward": 0.0}
    assert result.facts["control"] == "the untouched workspace"


def test_in_place_and_after_earlier_steps_it_is_the_same(tmp_path: Path) -> None:
    attack = submits(ATTACKS["kills the verifier"])
    (result,) = run(make_task(tmp_path / "t", config='[metadata]\ngrading = "in-place"\n'), attack)
    assert result.rewards == {"reward": 0.0}
    stepped = write_task(
        tmp_path / "s",
        {
            "task.toml": CONFIG + '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n',
            "environment/Dockerfile": "FROM host\nWORKDIR /work\n",
            "tests/test.sh": "#!/bin/bash\ntest -e answer; result=$?\n[ -e stop ] && kill -9 $$\n"
            "echo $((1 - result)) > /logs/verifier/reward.txt\n",
            "steps/one/instruction.md": "One.\n",
            "steps/two/instruction.md": "Two.\n",
            "steps/one/solution/solve.sh": "#!/bin/sh\ntouch answer\n",
            "steps/two/solution/solve.sh": "#!/bin/sh\ntest -e answer\n",
        },
    )
    (result,) = run(stepped, commands_agent("[ -e answer ] && touch stop; touch answer"))
    assert result.facts["steps"] == {"one": {"reward": 1.0}, "two": {"reward": 0.0}}


def test_a_hostile_group_costs_one_control(tmp_path: Path) -> None:
    """Four pods and a control of two: each trial has its own pod and one for its verifier."""
    pods: list[str] = []
    results = run(make_task(tmp_path / "t"), *[submits(ATTACKS["kills the verifier"])] * 3, pods=pods)
    assert [result.score for result in results] == [0.0] * 3
    assert len(pods) == 3 * 2 + 2


@pytest.mark.parametrize("solution", [True, False])
def test_a_verifier_that_never_completes_gives_no_reward(tmp_path: Path, solution: bool) -> None:
    task = make_task(tmp_path / "t", solution=solution, test="#!/bin/bash\nkill -9 $$\n")
    with pytest.raises(VerifierFailed, match=r"does not complete on the (reference|untouched).*either") as error:
        run(task, submits(ATTACKS["kills the verifier"]))
    assert error.value.cause == "no-reward"


def test_a_verifier_that_cannot_be_built_is_not_the_submissions_fault(tmp_path: Path) -> None:
    config = '[verifier.environment]\nnetwork_mode = "no-network"\n'
    task = make_task(tmp_path / "t", config=config)
    (tmp_path / "t/tests/Dockerfile").write_text("FROM host\nRUN false\n")
    with pytest.raises(VerifierFailed) as error:
        run(task, oracle_agent)
    assert error.value.cause == "build"


# ------------------------------------------------------------------------------------------------- missing tools

NO_TOOL = TEST.replace("python3 -B", "a-tool-that-is-not-there run python3 -B")


def test_a_reference_that_fails_for_want_of_a_tool_shows_a_broken_verifier(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", test=NO_TOOL)
    for agent in (oracle_agent, nop_agent):
        with pytest.raises(
            VerifierFailed, match=r"reference solution 0 .*a-tool-that-is-not-there: command not"
        ) as error:
            run(task, agent)
        assert error.value.cause == "no-tools"

    async def go() -> list[str]:
        async with open_fleet() as fleet:
            return [reason.code for reason in (await validate(fleet, task.directory)).reasons]

    assert asyncio.run(go()) == ["verifier-broken"]


def test_a_submission_that_pretends_to_lack_a_tool_keeps_its_zero(tmp_path: Path) -> None:
    (result,) = run(make_task(tmp_path / "t"), submits("print('bash: line 1: uvx: command not found')"))
    assert result.rewards == {"reward": 0.0}


@pytest.mark.parametrize(
    "log",
    [
        "/tests/test.sh: line 4: uvx: command not found",
        "/tests/test.sh: 3: curl: not found",
        "curl: (6) Could not resolve host: astral.sh",
        "Err:1 http://mirror.example/debian bookworm InRelease\n  Temporary failure resolving 'mirror.example'",
        "E: Unable to locate package curl",
        "ERROR: Could not find a version that satisfies the requirement x\nERROR: No matching distribution found for x",
        "/usr/bin/python3: No module named pytest",
        "npm error code EAI_AGAIN",
        "env: 'node': No such file or directory",
    ],
)
def test_a_missing_tool_is_seen_in_the_log_unless_a_test_ran(log: str) -> None:
    assert missing_tools(f"installing\n{log}\nmore\n") in log
    assert missing_tools(log)
    assert not missing_tools(f"{log}\n===== 1 failed in 0.10s =====\n")
    assert not missing_tools("FAILED test_a.py::test - AssertionError\n")
