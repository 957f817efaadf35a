"""The verifier has Harbor's semantics and runs in a clean copy of the environment."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from etude.errors import InputError
from etude.pods import open_fleet
from etude.pods.workspace import FileChange, FileState
from etude.tasks.base_images import HostSettings
from etude.tasks.checks import cases_files
from etude.tasks.harbor import write_task
from etude.tasks.reward_file import parse_json, parse_text
from etude.tasks.task import Task
from etude.tasks.trial import TrialAgent, commands_agent, nop_agent, run_trial
from etude.tasks.verifier import combine_step_results, verify
from etude.tasks.verifier_result import VerifierFailed, VerifierResult

CONFIG = 'schema_version = "1.4"\n[environment]\nnetwork_mode = "no-network"\n'


def make_task(directory: Path, test: str, config: str = "", **files: str) -> Task:
    return write_task(
        directory,
        {
            "task.toml": CONFIG + config,
            "instruction.md": "Do it.\n",
            "environment/Dockerfile": "FROM host\nWORKDIR /work\nCOPY repo/ .\n",
            "environment/repo/a.txt": "a\n",
            "tests/test.sh": f"#!/bin/bash\n{test}\n",
            **files,
        },
    )


def run_agent(task: Task, agent: TrialAgent = nop_agent, **options: Any) -> VerifierResult:
    async def go() -> VerifierResult:
        async with open_fleet() as fleet:
            return (await run_trial(fleet, task, agent, **options)).result

    return asyncio.run(go())


# ------------------------------------------------------------------------------------------------- reward files


@pytest.mark.parametrize(
    ("text", "rewards"),
    [("0.5\n", {"reward": 0.5}), (" 1 ", {"reward": 1.0}), ("-2e3", {"reward": -2000.0})],
)
def test_reward_txt_is_one_number(text: str, rewards: dict[str, float]) -> None:
    assert parse_text(text.encode()) == rewards


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ('{"reward": 1}', {"reward": 1.0}),
        ('{"a": 0.25, "b": -1}', {"a": 0.25, "b": -1.0}),
        ("0.75", {"reward": 0.75}),
        ("{}", {}),
    ],
)
def test_reward_json_is_a_flat_object_or_a_number(text: str, rewards: dict[str, float]) -> None:
    assert parse_json(text.encode()) == rewards


@pytest.mark.parametrize("text", ["", " \n", "nan", "inf", "-Infinity", "1e309", "one", "1 2", "\xff"])
def test_no_other_text_is_a_reward(text: str) -> None:
    with pytest.raises(ValueError, match=r"empty|not a"):
        parse_text(text.encode("latin-1"))


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[1]", '"1"', "null", "true", "NaN", "Infinity", "1e309", '{"a": NaN}', '{"a": 1e309}'),
        *('{"a": "1"}', '{"a": true}', '{"a": null}', '{"a": {"b": 1}}', '{"a": [1]}', "1" * 400, "[" * 100_000),
    ],
)
def test_no_other_json_is_a_reward(text: str) -> None:
    with pytest.raises(ValueError, match=r"empty|not JSON|expected a number|not a finite"):
        parse_json(text.encode())


def test_json_takes_precedence_over_text_and_the_exit_code_is_ignored(tmp_path: Path) -> None:
    test = (
        'echo 0 > /logs/verifier/reward.txt; echo \'{"reward": 0.5, "speed": 3}\' > /logs/verifier/reward.json; exit 7'
    )
    found = run_agent(make_task(tmp_path / "t", test))
    assert found.rewards == {"reward": 0.5, "speed": 3.0}
    assert found.score == 0.5


def test_without_the_key_reward_the_score_is_the_mean(tmp_path: Path) -> None:
    test = 'echo \'{"style": 1, "speed": 0}\' > /logs/verifier/reward.json'
    assert run_agent(make_task(tmp_path / "t", test)).score == 0.5


@pytest.mark.parametrize(
    ("test", "cause"),
    [
        ("echo nothing here; exit 0", "no-reward"),
        ("echo nan > /logs/verifier/reward.txt", "bad-reward"),
        (": > /logs/verifier/reward.txt", "bad-reward"),
        ("echo 1 > /logs/verifier/reward.txt; echo '{' > /logs/verifier/reward.json", "bad-reward"),
        ("sleep 30", "verifier-timeout"),
    ],
)
def test_a_verifier_that_fails_gives_no_reward(tmp_path: Path, test: str, cause: str) -> None:
    task = make_task(tmp_path / "t", test, "[verifier]\ntimeout_sec = 0.5\n")
    with pytest.raises(VerifierFailed) as error:
        run_agent(task)
    assert error.value.cause == cause
    if cause == "no-reward":
        assert "nothing here" in str(error.value)


def test_an_environment_that_cannot_be_built_gives_no_reward(tmp_path: Path) -> None:
    task = make_task(tmp_path / "t", "true", **{"environment/Dockerfile": "FROM host\nWORKDIR /work\nRUN false\n"})
    with pytest.raises(VerifierFailed) as error:
        run_agent(task)
    assert error.value.cause == "build"


# ------------------------------------------------------------------------------------------------- running test.sh

FACTS = """
pwd; id -un; echo $KEY; ls /tests; cat /tests/helper; stat -c %a /tests/test.sh; ls /logs/verifier; ls /solution
ls /tmp/left
echo to-stderr >&2
cat a.txt new.txt
echo 1 > /logs/verifier/reward.txt
"""


def test_the_verifier_runs_as_the_format_specifies(tmp_path: Path) -> None:
    user = "nobody" if os.geteuid() == 0 else "root"  # without root a pod has no other users
    config = f'[verifier]\nuser = "{user}"\nenv = {{ KEY = "${{GIVEN:-default}}" }}\n'
    files = {"tests/helper": "help\n", ".harborignore": "tests/ignored\n", "tests/ignored": ""}
    task = make_task(tmp_path / "t", FACTS, config, **files)
    agent = commands_agent(
        "echo new > new.txt; touch /tmp/left; mkdir -p /tests; echo mine > /tests/helper; echo 9 > a.txt"
    )
    found = run_agent(task, agent, host_settings=HostSettings(variables={"GIVEN": "given"}))
    lines = found.log.splitlines()
    assert lines[:7] == ["/work", user, "given", "helper", "test.sh", "help", "755"]
    assert lines[7] == "test-stdout.txt"
    assert "to-stderr" in lines
    assert lines[-2:] == ["9", "new"]
    assert [(change.path, change.text("before"), change.text("after")) for change in found.changes] == [
        ("a.txt", b"a\n", b"9\n"),
        ("new.txt", b"", b"new\n"),
    ]
    assert found.changes[1].before is None
    assert set(found.facts["seconds"]) >= {"pod", "fill", "apply", "upload", "run"}


def test_a_reward_file_of_the_image_is_ignored(tmp_path: Path) -> None:
    dockerfile = "FROM host\nWORKDIR /work\nCOPY repo/ .\nCOPY repo/a.txt /logs/verifier/reward.txt\n"
    with pytest.raises(VerifierFailed) as error:
        run_agent(make_task(tmp_path / "t", "true", **{"environment/Dockerfile": dockerfile}))
    assert error.value.cause == "no-reward"


def test_protected_files_are_as_the_task_has_them(tmp_path: Path) -> None:
    config = '[metadata]\nprotected = ["checks/", "conftest.py", "test_*.py"]\n'
    test = "cat checks/one checks/two conftest.py; ls checks; echo 1 > /logs/verifier/reward.txt"
    files = {"environment/repo/checks/one": "one\n", "environment/repo/checks/two": "two\n"}
    task = make_task(tmp_path / "t", test, config, **files)
    left = run_agent(task)
    agent = commands_agent(
        "echo no > checks/one; rm checks/two; echo plant > conftest.py; mkdir lib; echo plant > lib/test_b.py; "
        "echo more > checks/three; echo b > a.txt"
    )
    found = run_agent(task, agent)
    assert found.log == left.log
    assert found.facts["protected"] == ["checks/one", "checks/three", "checks/two", "conftest.py", "lib/test_b.py"]
    assert len(found.changes) == 6, "refused changes are still reported"


def test_protected_changes_are_named_in_place_too(tmp_path: Path) -> None:
    config = '[metadata]\ngrading = "in-place"\nprotected = ["checks/**"]\n'
    test = "echo 1 > /logs/verifier/reward.txt"
    task = make_task(tmp_path / "t", test, config, **{"environment/repo/checks/one": "one\n"})
    moved = run_agent(task, commands_agent("mv checks old; ln -s old checks"))
    assert moved.facts["protected"] == ["checks"]
    assert "protected" not in run_agent(task, commands_agent("echo b > a.txt")).facts


def test_an_in_place_verifier_sees_files_outside_the_workspace(tmp_path: Path) -> None:
    test = "test -e /srv/done && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    agent = commands_agent("touch /srv/done; mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.json")
    assert run_agent(make_task(tmp_path / "clean", test), agent).score == 0.0
    assert run_agent(make_task(tmp_path / "clean", test), agent, in_place=True).rewards == {"reward": 1.0}
    in_place = make_task(tmp_path / "here", test, '[metadata]\ngrading = "in-place"\n')
    assert run_agent(in_place, agent).score == 1.0
    carrying = make_task(tmp_path / "carry", test, '[metadata]\ncarry = ["/srv/done"]\n')
    assert run_agent(carrying, agent).score == 1.0


def test_a_forged_reward_is_zero(tmp_path: Path) -> None:
    """Observing submitted code writes no reward file: one that exists was written by that code, right or wrong."""
    task = make_task(tmp_path / "t", "", **cases_files([{"id": "one", "call": "a:one", "returns": "1"}]))  # type: ignore[arg-type]
    right, pay = "def one(): return 1", "open('/logs/verifier/reward.txt', 'w').write('1')"
    assert run_agent(task, commands_agent(f"echo '{right}' > a.py")).score == 1.0
    forged = run_agent(task, commands_agent(f'echo "{pay}" > a.py; echo "{right}" >> a.py'))
    assert forged.score == 0.0
    assert forged.facts["forged"] is True


def test_changes_are_verified_without_the_pod_they_were_made_in(tmp_path: Path) -> None:
    test = "grep -q b a.txt; echo $((1 - $?)) > /logs/verifier/reward.txt"
    task = make_task(tmp_path / "t", test)

    async def go() -> list[float]:
        async with open_fleet() as fleet:
            a, b = FileState.file(b"a\n"), FileState.file(b"b\n")
            change = FileChange("a.txt", a, b)
            foreign = [FileChange(path, None, b) for path in ("../work/a.txt", "/work/a.txt", "__pycache__/a.pyc")]
            return [(await verify(fleet, task, changes)).score for changes in ((), (change,), foreign)]

    assert asyncio.run(go()) == [0.0, 1.0, 0.0]


# ------------------------------------------------------------------------------------------------- artifacts


def test_artifacts_are_collected(tmp_path: Path) -> None:
    config = """
[verifier]
collect = [{ command = "echo collected > hook.txt" }]
"""
    out = '{ source = "/work/out", destination = "results/out", exclude = ["*.tmp"] }'
    top = f'artifacts = ["hook.txt", {out}, "/none"]\n'
    task = make_task(tmp_path / "t", "echo 1 > /logs/verifier/reward.txt", **{"task.toml": top + CONFIG + config})
    agent = commands_agent("mkdir out; echo x > out/x; echo y > out/y.tmp; echo z > /logs/artifacts/z")
    run_agent(task, agent, artifacts=tmp_path / "kept")
    kept = {path.relative_to(tmp_path / "kept").as_posix() for path in (tmp_path / "kept").rglob("*") if path.is_file()}
    assert kept == {"manifest.json", "artifacts/z", "hook.txt", "results/out/x"}
    listed = json.loads((tmp_path / "kept/manifest.json").read_text())
    assert [entry["source"] for entry in listed] == ["/logs/artifacts", "/work/hook.txt", "/work/out"]


def test_a_separate_verifier_sees_the_artifacts_and_nothing_else(tmp_path: Path) -> None:
    config = 'artifacts = ["/work/answer"]\n' + CONFIG + '[verifier.environment]\nnetwork_mode = "no-network"\n'
    test = """#!/bin/sh
[ -e /work/a.txt ] || [ -e /work/other ] && exit 1
grep -q 42 /work/answer && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""
    files = {
        "task.toml": config,
        "tests/Dockerfile": "FROM host\nWORKDIR /elsewhere\nCOPY --chmod=755 test.sh /tests/test.sh\n",
        "tests/test.sh": test,
    }
    task = make_task(tmp_path / "t", "", **files)
    assert task.verifier_machine is not None
    assert run_agent(task, commands_agent("echo 42 > answer; touch other")).score == 1.0
    assert run_agent(task, commands_agent("echo 41 > answer")).score == 0.0


# ------------------------------------------------------------------------------------------------- steps

STEPS = """
[[steps]]
name = "one"
min_reward = 0.5
[[steps]]
name = "two"
[steps.verifier]
env = { WANT = "two" }
"""


def stepped(directory: Path, strategy: str = "mean") -> Task:
    shared = "#!/bin/sh\n/tests/check.sh\n"
    return write_task(
        directory,
        {
            "task.toml": f'multi_step_reward_strategy = "{strategy}"\n' + CONFIG + STEPS,
            "environment/Dockerfile": "FROM host\nWORKDIR /work\n",
            "tests/test.sh": shared,
            "steps/one/instruction.md": "One.\n",
            "steps/one/tests/check.sh": "#!/bin/sh\ncat one > /logs/verifier/reward.txt\n",
            "steps/two/instruction.md": "Two.\n",
            "steps/two/workdir/given.txt": "given\n",
            "steps/two/workdir/setup.sh": "echo set up > made.txt\n",
            "steps/two/tests/check.sh": "#!/bin/sh\n"
            'r=0; [ -e one ] && [ -e given.txt ] && [ -e made.txt ] && [ "$(cat said)" = "$WANT" ] && r=1\n'
            'echo "{\\"reward\\": $r, \\"second\\": 1}" > /logs/verifier/reward.json\n',
        },
    )


@pytest.mark.parametrize(
    ("strategy", "one", "rewards"),
    [
        ("mean", "0.6", {"reward": 0.8, "second": 0.5}),
        ("final", "0.6", {"reward": 1.0, "second": 1.0}),
        ("mean", "0.4", {"reward": 0.4}),
        ("final", "0.4", {"reward": 0.4}),
    ],
)
def test_steps_are_verified_in_order_and_a_low_reward_ends_the_trial(
    tmp_path: Path, strategy: str, one: str, rewards: dict[str, float]
) -> None:
    async def act(environment: Any, step: Any) -> None:
        assert (await environment.pod.exec("test -e setup.sh")).exit_code == 1, "setup.sh is not left for the agent"
        await environment.pod.exec(f"echo {one} > one" if step.name == "one" else "echo two > said")

    found = run_agent(stepped(tmp_path / "t", strategy), act)
    assert found.rewards == pytest.approx(rewards)
    assert ("stopped" in found.facts) == (one == "0.4")


def test_what_one_step_found_is_kept(tmp_path: Path) -> None:
    """The gates of the rewards see an attack in any step, not only in the last."""
    task = stepped(tmp_path / "t")
    first = VerifierResult({"reward": 0.0}, facts={"forged": True, "protected": ["tests"], "seconds": {}})
    combined = combine_step_results(task, [first, VerifierResult({"reward": 1.0})])
    assert combined.facts["forged"] is True
    assert combined.facts["protected"] == ["tests"]


def test_a_multi_step_task_is_verified_step_by_step_only(tmp_path: Path) -> None:
    task = stepped(tmp_path / "t")

    async def go() -> None:
        async with open_fleet() as fleet:
            await verify(fleet, task, ())

    with pytest.raises(InputError, match="has steps"):
        asyncio.run(go())
    with pytest.raises(InputError, match="no step"):
        combine_step_results(task, [])
