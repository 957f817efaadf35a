"""List the stored rollouts of a run, and export them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.harness.atif import to_atif
from etude.harness.trace_store import SUFFIX, load_trace
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import ReadyGroup
from etude.runs.layout import RunLayout

Facts = dict[str, Any]


@dataclass(frozen=True)
class StoredRollout:
    """A rollout on disk. One that was resampled keeps its file but has no reward: it was not trained on."""

    path: Path
    name: str  # of the file below the run's rl directory, without suffix: traces/000012/03-1
    step: int | None  # policy step that trained it, or that it evaluates; None: not trained yet
    group: int
    number: int
    attempt: int
    task: str
    reward: Mapping[str, Any] | None

    @property
    def row(self) -> Facts:
        """The facts shown in a list."""
        reward = self.reward or {}
        cost = reward.get("cost", {})
        facts = {key: reward.get(key) for key in ("total", "score", "solved", "ending", "hack")}
        return {
            "name": self.name,
            "step": self.step,
            "group": self.group,
            "slot": self.number,
            "attempt": self.attempt,
            "task": self.task,
            **facts,
            "turns": cost.get("turns"),
            "path": str(self.path),
        }


def list_rollouts(layout: RunLayout, prefix: str = "") -> list[StoredRollout]:
    """Return the stored rollouts whose names have this prefix: training first, by group and number."""
    found: list[StoredRollout] = []
    if not layout.root.is_dir():
        raise InputError(f"{layout.run} has no rollouts; name a run with the stage rl")
    for database, traces in ((layout.slots, layout.traces), (layout.evaluations, layout.evaluation_traces)):
        if not database.exists():
            if any(traces.glob("[0-9]*")):
                raise EtudeError(f"{database} is missing: without it the rollouts in {traces} cannot be listed")
            continue
        with closing(RolloutQueue.open_read_only(database)) as queue:
            groups = {each.id: (each.task, each.step) for each in queue.progress()}
            for directory in sorted(traces.glob("[0-9]*")):
                paths = [
                    path for path in sorted(directory.glob(f"*{SUFFIX}")) if _name(layout, path).startswith(prefix)
                ]
                if paths and int(directory.name) in groups:
                    group = queue.group(int(directory.name))
                    found += [_stored(layout, path, group, *groups[group.id]) for path in paths]
    return found


def _stored(layout: RunLayout, path: Path, group: ReadyGroup, task: str, step: int | None) -> StoredRollout:
    number, _, attempt = path.stem.partition("-")
    (slot,) = (slot for slot in group.slots if slot.number == int(number))
    current = slot.reward is not None and layout.root / slot.trace == path
    if path.is_relative_to(layout.evaluation_traces):
        evaluated_step, _, task = task.partition("/")
        step = int(evaluated_step) if evaluated_step.isdigit() else None  # else of weights that were lost
    elif not current:
        step = None  # another attempt was trained on, if any
    reward = slot.reward if current else None
    return StoredRollout(path, _name(layout, path), step, group.id, slot.number, int(attempt), task, reward)


def _name(layout: RunLayout, path: Path) -> str:
    return path.relative_to(layout.root).with_suffix("").as_posix()


def rollouts_table(rollouts: Iterable[StoredRollout]) -> Table:
    """Return a table of rollouts for the terminal."""
    columns = ("name", "step", "total", "solved", "ending", "turns", "task")
    table = Table(*columns, box=None, header_style="bold")
    for rollout in rollouts:
        row = rollout.row | {"ending": rollout.row["ending"] or "resampled"}
        table.add_row(*("" if row[name] is None else escape(_format(row[name])) for name in columns))
    return table


def export_rollouts(rollouts: Iterable[StoredRollout], directory: Path) -> tuple[int, list[str]]:
    """Write rollouts as documents of the Agent Trajectory Interchange Format (ATIF), one file each.

    Returns how many were written, and the errors of those that cannot be read.
    """
    count, problems = 0, []
    for rollout in rollouts:
        try:
            document = to_atif(load_trace(rollout.path))
        except InputError as error:
            problems.append(str(error))
            continue
        document["extra"]["rollout"] = rollout.row | {"path": rollout.name, "reward": rollout.reward}
        text = json.dumps(document, ensure_ascii=False, allow_nan=False)
        write_atomically(directory / f"{rollout.name.replace('/', '-')}.json", text)
        count += 1
    return count, problems


def _format(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)
