"""Describe benchmarks: size of the reference changes, length of the requests, categories, difficulty and age.

lines, files    of the reference solution: added and removed lines, and changed files
request         characters of the instruction as the agent sees it
difficulty      solve rate of each task in given results, matched by the task's digest
age             the metadata key `commit_date` of tasks from history, against a model's cutoff
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np

from etude.bench.compare import ComparedResult, read_results_of
from etude.errors import InputError
from etude.pods.workspace import FileChange, FileState
from etude.rewards.diff import line_changes
from etude.system.progress import ProgressCallback
from etude.tasks.harbor import find_tasks, read_task, task_digest
from etude.tasks.task import Task

DIFFICULTY_BINS = ((0.0, 0.0), (0.0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1.0), (1.0, 1.0))  # of the solve rate
MAX_SCRIPT_BYTES = 1 << 20  # a longer solution script is not searched for a diff


@dataclass(frozen=True)
class ReferenceChange:
    """Added and removed lines, and changed files, of a reference solution."""

    lines: int
    files: int


@dataclass(frozen=True)
class TaskFacts:
    """What is known of one task."""

    name: str
    digest: str
    category: str
    repository: str
    request: int  # characters
    change: ReferenceChange | None  # None: the solution is a program whose changes cannot be read from it
    committed: date | None


def task_facts(name: str, task: Task) -> TaskFacts:
    """Return the facts of a task that was read."""
    given = task.metadata.get("commit_date")
    return TaskFacts(
        name,
        task_digest(task.directory),
        task.category or "none",
        str(task.metadata.get("repository", "")),
        sum(len(text.strip()) for text in (task.instruction, *(step.instruction for step in task.steps))),
        reference_change(task.directory),
        None if given is None else read_date(str(given), f"{task.directory}/task.toml: metadata.commit_date"),
    )


def read_date(text: str, where: str) -> date:
    """Return the day of an ISO date or time, in UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{where}: {text!r} is not a date; expected one such as 2026-01-31") from None
    return (found if found.tzinfo is None else found.astimezone(UTC)).date()


# ------------------------------------------------------------------------------------------- the reference


def reference_change(directory: Path) -> ReferenceChange | None:
    """Return the size of a task's reference solution, read from its files; None if they do not show it.

    The solution is a copy of the changed files (`solution/repo`, with removals in solve.sh), a patch, or a script that
    has a diff in it.
    """
    solution = directory / "solution"
    script = _text(solution / "solve.sh")
    if (solution / "repo").is_dir():
        changes = list(line_changes(_copied_changes(directory, script)))
        return ReferenceChange(sum(len(each.added) + each.removed for each in changes), len(changes))
    patches = [_text(path) for path in sorted(solution.rglob("*")) if path.suffix in (".patch", ".diff")]
    diffs = patches or ([script] if "\n+++ " in script else [])
    if diffs:
        return _diff_size("\n".join(diffs))
    if (removed := _removed_paths(script)) and "cp " not in script:
        changes = list(line_changes(_removals(directory, removed)))
        return ReferenceChange(sum(each.removed for each in changes), len(changes))
    if (solution / "final.txt").is_file():  # a question: the answer is a message
        return ReferenceChange(0, 0)
    return None


def _copied_changes(directory: Path, script: str) -> Iterator[FileChange]:
    top = directory / "solution/repo"
    for path in sorted(top.rglob("*")):
        if path.is_file():
            name = path.relative_to(top).as_posix()
            yield FileChange(name, _state(_original(directory, name)), _state(path))
    yield from _removals(directory, _removed_paths(script))


def _removals(directory: Path, names: Sequence[str]) -> Iterator[FileChange]:
    for name in names:
        if (before := _state(_original(directory, name))) is not None:
            yield FileChange(name, before, None)


def _original(directory: Path, name: str) -> Path:
    inside = directory / "environment/repo"
    return (inside if inside.is_dir() else directory / "environment") / name


def _state(path: Path) -> FileState | None:
    return FileState.file(path.read_bytes()) if path.is_file() else None


def _removed_paths(script: str) -> list[str]:
    """Return the paths that `rm` lines of a solution script remove."""
    found = []
    for line in script.splitlines():
        if line.startswith("rm "):
            try:
                found += [word for word in shlex.split(line)[1:] if not word.startswith("-")]
            except ValueError:
                continue
    return found


def _diff_size(text: str) -> ReferenceChange:
    """Return the size of the unified diffs in a text."""
    lines, old, new, files, before = 0, 0, 0, set[str](), ""
    for line in text.splitlines():
        if old > 0 or new > 0:  # inside a hunk
            lines += line[:1] in ("+", "-")
            old, new = old - (line[:1] not in ("+", "\\")), new - (line[:1] not in ("-", "\\"))
        elif header := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            old, new = (int(count or 1) for count in header.groups())
        elif header := re.match(r"(---|\+\+\+) (?:[ab]/)?([^\t]+)", line):
            if header[1] == "---":
                before = header[2]
            else:
                files.add(before if header[2] == "/dev/null" else header[2])
    return ReferenceChange(lines, len(files))


def _text(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > MAX_SCRIPT_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace")


# ------------------------------------------------------------------------------------------- statistics


def describe_benchmarks(
    directories: Sequence[Path],
    results: Sequence[str] = (),
    cutoff: date | None = None,
    progress: ProgressCallback = lambda done, total, note="": None,
) -> dict[str, Any]:
    """Return the statistics of benchmarks as JSON, one entry each, and how many tasks they have in common."""
    scored = [each for text in results for each in read_results_of(text)]
    found = []
    for number, directory in enumerate(directories):
        progress(number, len(directories), str(directory))
        found.append(_describe(directory, read_facts(directory), scored, cutoff))
    progress(len(directories), len(directories))
    digests = [{task["digest"] for task in each["per_task"]} for each in found]
    return {
        "cutoff": None if cutoff is None else cutoff.isoformat(),
        "results": [each.name for each in scored],
        "benchmarks": found,
        "common": len(set.intersection(*digests)) if len(digests) > 1 else None,
    }


def read_facts(directory: Path) -> list[TaskFacts]:
    """Return the facts of all tasks at and below a directory."""
    paths = list(find_tasks(directory))
    if not paths:
        raise InputError(f"{directory}: no task found (a directory with a task.toml)")
    named = ((path.relative_to(directory).as_posix() if path != directory else path.name, path) for path in paths)
    return [task_facts(name, read_task(path)) for name, path in named]


def solve_rates(scored: Sequence[ComparedResult]) -> dict[str, float]:
    """Return the solve rate of every task by its digest: the mean over policies of the mean over their trials."""
    rates: dict[str, list[float]] = {}
    for each in scored:
        for digest, samples in each.samples.items():
            rates.setdefault(digest.partition("-")[0], []).append(float(np.mean(samples)))
    return {digest: float(np.mean(values)) for digest, values in rates.items()}


def _describe(
    directory: Path, tasks: Sequence[TaskFacts], scored: Sequence[ComparedResult], cutoff: date | None
) -> dict[str, Any]:
    rates = solve_rates(scored)
    known = {task.name: rates[task.digest] for task in tasks if task.digest in rates}
    changes = [task.change for task in tasks if task.change is not None]
    return {
        "name": str(directory),
        "tasks": len(tasks),
        "repositories": len({task.repository for task in tasks if task.repository}),
        "lines": quartiles([change.lines for change in changes]),
        "files": quartiles([change.files for change in changes]),
        "several_files": float(np.mean([change.files > 1 for change in changes])) if changes else None,
        "unknown_changes": len(tasks) - len(changes),
        "request": quartiles([task.request for task in tasks]),
        "categories": dict(Counter(task.category for task in tasks).most_common()),
        "difficulty": _difficulty(list(known.values())) if scored else None,
        "age": _age(tasks, known, cutoff),
        "per_task": [
            {
                "task": task.name,
                "digest": task.digest,
                "category": task.category,
                "request": task.request,
                "lines": task.change.lines if task.change else None,
                "files": task.change.files if task.change else None,
                "commit_date": task.committed.isoformat() if task.committed else None,
                "solve_rate": known.get(task.name),
            }
            for task in tasks
        ],
    }


def quartiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return quartiles, extremes and number of values; None if there are none."""
    if not values:
        return None
    low, q1, median, q3, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1]).tolist()
    return {"median": median, "q1": q1, "q3": q3, "least": low, "most": high, "tasks": len(values)}


def _difficulty(rates: Sequence[float]) -> dict[str, Any]:
    """Return the distribution of solve rates. A bin has its upper bound and not its lower one, except 0 and 1 alone."""
    counts = []
    for low, high in DIFFICULTY_BINS:
        inside = [rate for rate in rates if (rate == low if low == high else low < rate <= high and rate < 1)]
        counts.append({"from": low, "to": high, "tasks": len(inside)})
    return {"tasks": len(rates), "mean": float(np.mean(rates)) if rates else None, "bins": counts}


def _age(tasks: Sequence[TaskFacts], rates: Mapping[str, float], cutoff: date | None) -> dict[str, Any]:
    """Return the dates of tasks, and on which side of the cutoff they are, with their solve rates."""
    dated = sorted((task.committed, task.name) for task in tasks if task.committed is not None)
    days = [day for day, _ in dated]
    age: dict[str, Any] = {
        "dated": len(dated),
        "oldest": days[0].isoformat() if days else None,
        "median": days[len(days) // 2].isoformat() if days else None,
        "newest": days[-1].isoformat() if days else None,
    }
    if cutoff is None:
        return age
    for key, names in (
        ("before_cutoff", [name for day, name in dated if day <= cutoff]),
        ("after_cutoff", [name for day, name in dated if day > cutoff]),
    ):
        solved = [rates[name] for name in names if name in rates]
        age[key] = {"tasks": len(names), "solve_rate": float(np.mean(solved)) if solved else None}
    return age
