"""Pods of an ordinary user give the rewards of root: recorded sessions are replayed there, and the demo runs."""

import asyncio
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.runs.run import Run
from etude.tasks.harbor import find_tasks, read_task
from etude.tasks.task import Task
from etude_nano.sides import Split
from etude_nano.source import generate_nano
from tests.pipeline.test_whole_run import STAGES, small_demo
from tests.pods.test_conformance import OVERFLOW_ID, ROOT, command_of
from tests.rollouts.recorded_sessions import ATTACKS, Session, attacks, demonstrates, gives_up, nano_model, record

DEMO_S = 3600.0
WEAKER = """
import asyncio, json
from etude.pods.diagnosis import diagnose
from etude.pods.runtime.probe import strongest_backend
(found,) = asyncio.run(diagnose(None, "namespace"))["backends"]
print(json.dumps({**found, "summary": asyncio.run(strongest_backend()).summary()}))
"""


@contextmanager
def ordinary_user() -> Iterator[tuple[list[str], dict[str, str], Path]]:
    """Give the command of an ordinary user's interpreter, its environment and a directory of that user; or skip."""
    prefix, environment, reason = command_of("nobody")
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="etude-users-") as directory:
        if os.geteuid() == 0:
            os.chown(directory, OVERFLOW_ID, OVERFLOW_ID)
        yield prefix, {**environment, "HOME": directory, "TMPDIR": directory}, Path(directory)


@pytest.fixture
def recording() -> Iterator[Path]:
    """A directory that other users can read, for tasks and traces."""
    if reason := command_of("root")[2]:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="etude-recording-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def nano_tasks(recording: Path, **counts: int) -> list[Task]:
    """Write tasks of the demo's two test sets."""
    seeds: dict[Split, int] = {"new": 600_000, "unseen": 0}
    for name, seed in seeds.items():
        if name in counts:
            generate_nano(recording / name, counts[name], name, seed, (1, 2, 3))
    (recording / "tasks").mkdir()
    for task in [task for name in counts for task in find_tasks(recording / name)]:
        task.rename(recording / "tasks" / task.name)
    return [read_task(task) for task in find_tasks(recording / "tasks")]


def editing(tasks: Sequence[Task]) -> list[Task]:
    """Return the tasks that ask for a change of Python files."""
    return [task for task in tasks if any((task.directory / "solution/repo").rglob("*.py"))]


def replayed(recording: Path) -> list[dict[str, Any]]:
    """Replay a recording as an ordinary user; return the recorded and the replayed reward of each session."""
    with ordinary_user() as (prefix, environment, directory):
        command = [*prefix, "-m", "tests.rollouts.recorded_sessions", str(recording)]
        options = [f"--out={directory / 'rows'}", f"--state={directory / 'state'}"]
        done = subprocess.run([*command, *options], env=environment, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in (directory / "rows").read_text().splitlines()]


def check_same(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Check that total, parts, hack and verifier score of every session are those recorded; return the recorded."""
    assert len(rows) == count
    assert [row for row in rows if row["replayed"] != row["recorded"]] == []
    return [row["recorded"] for row in rows]


def test_doctor_says_what_an_ordinary_users_pods_lack() -> None:
    with ordinary_user() as (prefix, environment, _):
        done = subprocess.run([*prefix, "-c", WEAKER], env=environment, cwd="/", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    can = found["capabilities"]
    notes = "; ".join(can["notes"])
    assert found["summary"] == f"namespace, without {'; '.join(found['lacks'])}"
    assert "users besides its root" in found["lacks"]
    assert "one user in a pod" in notes
    for limit in ("memory", "pids", "cpu"):  # a delegated control group can enforce all of them
        unlimited = limit not in can["limits"]
        assert any(each.startswith("limits on") and limit in each for each in found["lacks"]) == unlimited
        assert (
            any(note.startswith("no limit on") and limit in note.partition(":")[0] for note in can["notes"])
            == unlimited
        )
    assert ("live snapshots" in found["lacks"]) == ("no live snapshot" in notes)


def test_recorded_sessions_get_the_same_rewards_as_an_ordinary_user(recording: Path) -> None:
    tasks = nano_tasks(recording, new=4)
    task = editing(tasks)[0]
    sessions: list[Session] = [(task, demonstrates(task)), (task, gives_up())]
    sessions += [(task, attacks(task, ATTACKS[name])) for name in ("writes a reward file", "kills its parent")]
    asyncio.run(record(recording, sessions, recording / "state"))
    rewards = check_same(replayed(recording), len(sessions))
    assert [reward["total"] for reward in rewards] == [1.0, 0.0, 0.0, 0.0]
    assert "forged_reward" in rewards[2]["hack"]


@pytest.mark.slow
def test_two_hundred_recorded_sessions_get_the_same_rewards_as_an_ordinary_user(recording: Path) -> None:
    tasks = nano_tasks(recording, new=80, unseen=100)

    async def go() -> None:
        async with nano_model() as model:
            sessions: list[Session] = [(task, model) for task in tasks]
            sessions += [(task, attacks(task, code)) for code in ATTACKS.values() for task in editing(tasks)[:4]]
            await record(recording, sessions, recording / "state")

    asyncio.run(go())
    rewards = check_same(replayed(recording), 200)
    solved, hacks = sum(reward["total"] > 0 for reward in rewards), sum(bool(reward["hack"]) for reward in rewards)
    print(f"{solved} of 200 sessions solved, {hacks} hacks")
    assert 60 <= solved <= 140
    assert hacks >= 8


@pytest.mark.slow
def test_the_demo_runs_to_its_end_as_an_ordinary_user() -> None:
    sizes = {"group_size": "4", "in_flight": "8", "budget.turns": "10", "budget.max_turn_tokens": "200"}
    with ordinary_user() as (prefix, environment, directory):
        recipe, run = small_demo(directory), directory / "run"
        command = [*prefix, "-m", "etude.cli", "run", str(recipe), "--out", str(run)]
        command += [word for key, value in sizes.items() for word in ("--set", f"rl.{key}={value}")]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=DEMO_S)
        assert done.returncode == 0, done.stderr[-3000:]
        finished = Run.read(run)
        assert all(finished.stage_done(stage) for stage in STAGES)
        records = [record for record in finished.metrics("rl") if not record.get("evaluation")]
        assert len(records) == 2
        assert max(record["reward"] for record in records) > 0, records
        assert "rl: pods: namespace, without " in done.stderr
        assert "limits on memory" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", ["tasks", "nano", "rollouts", "harness", "pods"])
def test_the_tests_of_a_package_pass_as_an_ordinary_user(package: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("this user runs them itself")
    with ordinary_user() as (prefix, environment, directory):
        environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(directory / "hypothesis")
        command = [*prefix, "-m", "pytest", "-p", "no:cacheprovider", f"tests/{package}"]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-5000:]
