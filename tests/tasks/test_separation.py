"""Expected results and reporting channels are out of reach of submitted code, as root and as an ordinary user."""

import asyncio
import json
import os
import random
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from etude.pods import open_fleet
from etude.tasks.checks.inside import judges
from etude.tasks.checks.inside.probes import Planted
from etude.tasks.checks.inside.swe_log import NoResult
from etude.tasks.environment import TaskEnvironment, copy_files, open_environment
from etude.tasks.harbor import files_to_upload
from etude.tasks.trial import oracle_agent
from tests.pods.test_conformance import OVERFLOW_ID, ROOT, command_of
from tests.tasks.separation_trials import CHEATS, SECRET, make_task, plant

SOLVED = ("cases: solves it", "mutants: solves it")


@cache
def trials(user: str) -> dict[str, list[Any]]:
    """Run all trials in a process of a user; skip the test if that is not possible here."""
    prefix, environment, reason = command_of(user)
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="etude-separation-") as directory:
        if user == "nobody":
            os.chown(directory, OVERFLOW_ID, OVERFLOW_ID)
        command = [*prefix, str(ROOT / "tests/tasks/separation_trials.py"), directory]
        environment = {**environment, "HOME": directory, "TMPDIR": directory}
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_a_solution_is_rewarded_and_doing_nothing_is_not(user: str) -> None:
    found = trials(user)
    assert [found[name][0] for name in SOLVED] == [1.0, 1.0], found
    assert [found[name.replace("solves it", "does nothing")][0] for name in SOLVED] == [0.0, 0.0], found


@pytest.mark.parametrize("user", ["root", "nobody"])
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_not_rewarded(cheat: str, user: str) -> None:
    score, note = trials(user)[cheat]
    assert score == 0.0, note


def test_the_own_test_script_of_a_task_gives_the_same_rewards_to_root(tmp_path: Path) -> None:
    """Other runners of Harbor tasks start test.sh in the pod, with the expected results beside it."""
    searching = plant("cases", CHEATS["searches frames, files and memory"][1])

    async def score(environment: TaskEnvironment) -> dict[str, float]:
        pod, task = environment.pod, environment.task
        await pod.make_directory("/tests")
        await copy_files(pod, files_to_upload(task, "tests", "/tests", "test.sh"), "/tests")
        assert SECRET.encode() in await pod.read("/tests/expected.json")
        done = await pod.exec(["bash", "/tests/test.sh"], cwd=environment.workspace)
        assert done.ok, done.stderr
        found: dict[str, float] = json.loads(await pod.read("/logs/verifier/reward.json"))
        return found

    async def go() -> list[float]:
        task = make_task(tmp_path, "cases")
        found = []
        async with open_fleet() as fleet:
            if fleet.local is None or not fleet.local.backend.capabilities.users:
                pytest.skip("needs pods with several users")
            for agent in (oracle_agent, None, searching):
                async with open_environment(fleet, task) as environment:
                    if agent is not None:
                        await agent(environment, None)
                    found.append((await score(environment))["reward"])
        return found

    assert asyncio.run(go()) == [1.0, 0.0, 0.0]


# ------------------------------------------------------------------------------------------------- hostile data

VALUES: list[Any] = [None, True, 0, -1, 10**400, 0.5, "", "x", [], {}, [[]], {"a": {}}, ["passed"], {"statuses": 3}]
SOURCES = [b"(" * 100_000, b"-" * 200_000 + b"1", b"a." * 100_000, b"\0", b"\xff\xfe", b"f'{" * 500, b"if 1:\n " * 300]
SOURCES += [b"x = " + b"[" * 5000, b"lambda: " * 20_000, b"0x" + b"f" * 200_000, b"9" * 100_000, b"'" * 99_999]


def hostile(rng: random.Random, depth: int = 3) -> Any:
    """Draw an observation: objects with the observers' keys and values of any type."""
    keys = ("results", "secret", "add", "value", "raised", "statuses", "runs", "tests", "ended", "names", "metadata")
    if depth == 0 or rng.random() < 0.3:
        return rng.choice(VALUES)
    if rng.random() < 0.3:
        return [hostile(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(keys): hostile(rng, depth - 1) for _ in range(rng.randrange(6))}


def test_observations_of_any_form_are_worth_nothing() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    expected = {
        "cases": {"results": {"add": {"returns": "3"}, "secret": {"raises": "ValueError"}}},
        "pytest": {"statuses": {"t.py::a": "passed"}},
        "mutants": {"versions": 2, "correct": [0], "least": 1},
        "wheel": {"names": ["a"], "metadata": {"Name": ["a"]}, "entry": [], "roots": ["."]},
        "log": {"parser": "pytest", "fail_to_pass": ["t.py::a"], "pass_to_pass": []},
    }
    for _ in range(3000):
        kind = rng.choice(sorted(expected))
        given = hostile(rng)
        try:
            (observed,) = judges.parse_observations(json.dumps([given]).encode(), 1)
            secret = judges.Secret(["test_probe"], Planted([]))
            rewards = judges.judge([{"kind": kind}], [expected[kind]], [observed], [secret], {}).rewards
        except NoResult:
            continue
        assert rewards["reward"] == 0.0, (seed, kind, given)
    for data in (b"", b"[", b"{}", b"[1]", b"[{}, {}]", b"[" * 1_000_000, b"[" + b"9" * 100_000 + b"]"):
        with pytest.raises(NoResult):
            judges.parse_observations(data, 1)


@pytest.mark.parametrize("kind", ["names", "code", "docstrings", "patterns"])
def test_sources_of_any_form_are_judged(kind: str) -> None:
    expected: dict[str, dict[str, Any]] = {
        "names": {"gone": ["old"], "defined": [["a.py", "f"]], "undefined": []},
        "code": {"files": {"a.py": "def f(): pass\n"}},
        "docstrings": {"items": [{"file": "a.py", "name": "f", "words": 1, "has": ["x"]}]},
        "patterns": {"family": "percent", "files": {"a.py": -1}},
    }
    for source in SOURCES:
        rewards = judges.judge([{"kind": kind}], [expected[kind]], [], [], {"a.py": source}).rewards
        assert rewards["reward"] == 0.0, source[:20]
    right = b'def f():\n    """About x."""\n'
    judgement = judges.judge([{"kind": "docstrings"}], [expected["docstrings"]], [], [], {"a.py": right})
    assert judgement.rewards["reward"] == 1.0
