"""Split mined tasks by the time of their commits: the newer part is the benchmark, the older part is for training."""

import os
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.tasks.leaks import find_leaks, measured_answers
from etude.tasks.mining.duplicates import ChangeFingerprint

BENCH, TRAIN = "bench", "train"


@dataclass(frozen=True)
class TimeSplit:
    """Where to split: at a date, or so that the benchmark is a fraction of the tasks."""

    date: str = ""
    fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "TimeSplit":
        """Parse an ISO date, or a number between 0 and 1."""
        if re.fullmatch(r"\d{4}(-\d{2}(-\d{2})?)?", text):
            try:
                date.fromisoformat(f"{text}-01-01"[:10] if len(text) != 7 else f"{text}-01")
            except ValueError:
                raise InputError(f"--split {text}: there is no such date; expected YYYY-MM-DD") from None
            return cls(date=text)
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if not 0 < fraction < 1:
            raise InputError(
                f"--split {text}: expected a date (2025-01-31), or the benchmark's fraction of the tasks, "
                "between 0 and 1"
            )
        return cls(fraction=fraction)

    def bench_count(self, dates: Sequence[str]) -> int:
        """Return how many tasks, newest first, are the benchmark."""
        if self.date:
            return sum(each[: len(self.date)] >= self.date for each in dates)
        return max(1, round(self.fraction * len(dates))) if dates else 0


@dataclass(frozen=True)
class SplitResult:
    """The tasks of both parts, and those left out of the training part with the benchmark task that they give away."""

    bench: tuple[str, ...]
    train: tuple[str, ...] = ()
    dropped: Mapping[str, str] | None = None


def split_names(
    dates: Mapping[str, str], split: TimeSplit | None, fingerprints: Mapping[str, ChangeFingerprint]
) -> SplitResult:
    """Assign tasks by the dates of their commits; training tasks that resemble one of the benchmark are dropped."""
    names = sorted(dates, key=lambda name: (dates[name], name), reverse=True)
    if split is None:
        return SplitResult(tuple(names))
    count = split.bench_count([dates[name] for name in names])
    bench, train = names[:count], names[count:]
    dropped = {}
    for name in train:
        twin = next((each for each in bench if fingerprints[each].resembles(fingerprints[name])), "")
        if twin:
            dropped[name] = twin
    return SplitResult(tuple(bench), tuple(name for name in train if name not in dropped), dropped)


def write_split(tasks: Path, out: Path, result: SplitResult, split: bool) -> SplitResult:
    """Link the tasks of each part into its directory; training tasks with an answer of the benchmark are dropped."""
    bench, train = (out / BENCH, out / TRAIN) if split else (out, None)
    _place(tasks, bench, result.bench)
    if train is None:
        return result
    answers = measured_answers(tasks / name for name in result.bench)
    leaks = {Path(leak.source).name: leak.task for leak in find_leaks(answers, (tasks / name for name in result.train))}
    kept = tuple(name for name in result.train if name not in leaks)
    _place(tasks, train, kept)
    return SplitResult(result.bench, kept, {**(result.dropped or {}), **leaks})


def _place(tasks: Path, target: Path, names: Sequence[str]) -> None:
    """Make hard-linked copies of tasks in a directory, and remove mined tasks that do not belong there."""
    target.mkdir(parents=True, exist_ok=True)
    for old in sorted(target.iterdir()):
        if (old / "task.toml").is_file() and old.name not in names and (tasks / old.name).is_dir():
            shutil.rmtree(old)
    for name in names:
        if not (target / name).is_dir():
            staging = target / f".{name}"
            shutil.rmtree(staging, ignore_errors=True)
            shutil.copytree(tasks / name, staging, symlinks=True, copy_function=_hard_link)
            staging.rename(target / name)


def _hard_link(source: str, target: str) -> str:
    os.link(source, target, follow_symlinks=False)
    return target


def task_metadata(directory: Path) -> Mapping[str, Any]:
    """Return the metadata of a task directory."""
    found: Mapping[str, Any] = tomllib.loads((directory / "task.toml").read_text())["metadata"]
    return found
