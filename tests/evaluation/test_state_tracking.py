"""State tracking: the diffs of a task lead to the expected file, and the score of perfect, idle and empty models."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.evaluation.state_tracking import END, StateTask, tasks_from_files, tasks_from_git, track_state

CODE = "\n".join(f"def f{i}(x):\n    return x + {i}" for i in range(12)) + "\n"


def quiet(_done: int, _total: int) -> None:
    pass


@pytest.fixture
def tasks(tmp_path: Path) -> list[StateTask]:
    for name in ("a.py", "b.py", "short.py"):
        (tmp_path / name).write_text(CODE if name != "short.py" else "x = 1\n")
    return tasks_from_files(sorted(tmp_path.glob("*.py")), count=5, changes=6, seed=3)


def test_the_diffs_of_a_prompt_lead_to_the_last_version(tasks: list[StateTask], tmp_path: Path) -> None:
    """`git apply` applies the diffs of the prompt to the first version."""
    assert [task.name for task in tasks] == ["a.py", "b.py"]
    for task in tasks:
        file = tmp_path / "work"
        file.write_text(task.versions[0])
        changes = task.prompt.split("=== change ")[1:]
        assert len(changes) == 6
        for change in changes:
            body = change.split("\n", 1)[1].split("=== after all")[0]
            diff = f"--- work\n+++ work\n{body.rstrip()}\n"
            subprocess.run(["git", "apply", "-p0", "-"], input=diff, text=True, check=True, cwd=tmp_path)
        assert file.read_text() == task.versions[-1]


def test_a_perfect_model_has_distance_zero_and_an_idle_one_that_of_the_changes(tasks: list[StateTask]) -> None:
    answers = {task.prompt: task.versions[-1] for task in tasks}
    perfect = track_state(tasks, lambda prompt, _: answers[prompt] + END + "\nmore", quiet)
    assert (perfect.distance, perfect.exact, perfect.changes) == (0.0, 1.0, 6.0)
    idle = track_state(tasks, lambda prompt, _: prompt.split("first version ===\n")[1].split(END)[0], quiet)
    assert idle.distance == idle.unchanged > 0
    empty = track_state(tasks, lambda *_: "", quiet)
    assert empty.distance == sum(len(t.versions[-1].rstrip("\n")) for t in tasks) / len(tasks)


def test_histories_come_from_git(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@t"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    git("init", "-q")
    for version in range(5):
        (tmp_path / "often.py").write_text(CODE + f"version = {version}\n")
        (tmp_path / "once.py").write_text("x\n")
        git("add", "-A")
        git("commit", "-qm", f"v{version}")
    (task,) = tasks_from_git(tmp_path, count=3, changes=4)
    assert task.name == "often.py"
    assert task.versions == tuple(CODE + f"version = {v}\n" for v in range(5))
    assert tasks_from_git(tmp_path, count=3, changes=5) == []
    with pytest.raises(InputError, match="git log failed"):
        tasks_from_git(tmp_path / "nowhere", count=1, changes=1)
    with pytest.raises(InputError, match="no state-tracking tasks"):
        track_state([], lambda *_: "", quiet)
