"""State tracking: reconstruct a file after a series of diffs, similar to LoCoDiff.

A task shows a file and then a series of diffs; the model must write the file as it is after the last one. The score is
the mean character-level edit distance to the correct file: exact match would count a single wrong character like a page
of nonsense. Histories come from a git repository, or are generated from plain files with a seed.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rapidfuzz.distance import Levenshtein

from etude.errors import InputError
from etude.system.git import run_git

END = "=== end of file ==="
MAX_LINES = 40  # of a file that is edited at random
MAX_CHARACTERS = 4000  # of a file from git
Complete = Callable[[str, int], str]  # (prompt, maximum characters) -> the model's continuation


@dataclass(frozen=True)
class StateTask:
    """A file and its versions after every change."""

    name: str
    versions: tuple[str, ...]  # oldest first

    @property
    def prompt(self) -> str:
        """The first version in full, every later one as a diff, and a heading for the last one in full."""
        parts = [
            f"The file {self.name}, and every change made to it.\n",
            heading("first version"),
            self.versions[0],
            END,
        ]
        for number, (before, after) in enumerate(zip(self.versions, self.versions[1:], strict=False), start=1):
            lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
            parts += [heading(f"change {number}"), *list(lines)[2:]]  # without the two lines that name the files
        return "\n".join([*parts, heading(f"after all {len(self.versions) - 1} changes"), ""])


@dataclass(frozen=True)
class StateScore:
    """Means over state-tracking tasks."""

    distance: float  # mean edit distance in characters; lower is better
    unchanged: float  # the same for the first version, repeated unchanged
    exact: float  # share of tasks with distance 0
    tasks: int
    changes: float  # mean number of diffs per task


def heading(text: str) -> str:
    return f"=== {text} ==="


def track_state(tasks: Sequence[StateTask], complete: Complete, progress: Callable[[int, int], None]) -> StateScore:
    """Complete every task and return the mean distance from the correct file."""
    if not tasks:
        raise InputError("there are no state-tracking tasks; give files with some lines, or a git repository")
    distances, unchanged = [], []
    for done, task in enumerate(tasks, start=1):
        correct = task.versions[-1].rstrip("\n")
        answer = complete(task.prompt, len(correct) * 5 // 4 + 64).split(END)[0].rstrip("\n")
        distances.append(Levenshtein.distance(answer, correct))
        unchanged.append(Levenshtein.distance(task.versions[0].rstrip("\n"), correct))
        progress(done, len(tasks))
    count = len(tasks)
    exact = sum(distance == 0 for distance in distances) / count
    changes = sum(len(task.versions) - 1 for task in tasks) / count
    return StateScore(sum(distances) / count, sum(unchanged) / count, exact, count, changes)


def tasks_from_files(files: Sequence[Path], *, count: int, changes: int, seed: int = 0) -> list[StateTask]:
    """Return tasks from files cut to MAX_LINES, with random edits: lines dropped, doubled, swapped, words renamed."""
    rng = random.Random(seed)
    tasks = []
    for file in files:
        lines = file.read_text(encoding="utf-8").splitlines()[:MAX_LINES]
        if len([line for line in lines if line.strip()]) < 8:
            continue
        versions = [lines]
        while len(versions) <= changes:
            edited = _edit(versions[-1], rng)
            if edited != versions[-1]:
                versions.append(edited)
        tasks.append(StateTask(file.name, tuple("\n".join(version) + "\n" for version in versions)))
        if len(tasks) == count:
            break
    return tasks


def _edit(lines: list[str], rng: random.Random) -> list[str]:
    at, kind = rng.randrange(len(lines)), rng.choice(("drop", "double", "swap", "rename"))
    if kind == "drop" and len(lines) > 6:
        return lines[:at] + lines[at + 1 :]
    if kind == "double":
        return [*lines[: at + 1], lines[at], *lines[at + 1 :]]
    if kind == "swap" and at:
        return [*lines[: at - 1], lines[at], lines[at - 1], *lines[at + 1 :]]
    words = [word for word in lines[at].split() if word.isidentifier()]
    if not words:
        return lines
    old = rng.choice(words)
    return [line.replace(old, f"{old}_{rng.randrange(10)}") if i == at else line for i, line in enumerate(lines)]


def tasks_from_git(repository: Path, *, count: int, changes: int) -> list[StateTask]:
    """Return tasks from the last `changes` changes of small files, the most often changed files first."""
    log = run_git(repository, "log", "--no-renames", "--name-only", "--format=%x00%H").decode()
    history: dict[str, list[str]] = {}
    for entry in log.split("\0")[1:]:
        commit, *names = entry.strip().splitlines()
        for name in filter(None, names):
            history.setdefault(name, []).append(commit)
    tasks: list[StateTask] = []
    for name, commits in sorted(history.items(), key=lambda item: (-len(item[1]), item[0])):
        if len(commits) <= changes or len(tasks) == count:
            break
        versions = [_version(repository, commit, name) for commit in reversed(commits[: changes + 1])]
        if all(version is not None and 0 < len(version) <= MAX_CHARACTERS for version in versions):
            tasks.append(StateTask(name, tuple(version for version in versions if version is not None)))
    return tasks


def _version(repository: Path, commit: str, name: str) -> str | None:
    try:
        return run_git(repository, "cat-file", "blob", f"{commit}:{name}").decode()
    except (InputError, UnicodeDecodeError):
        return None  # deleted in this commit, or not text
