"""List the stored rollouts of a run, and export them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.harness.atif import to_atif
from etude.harness.trace_store import SUFFIX
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import ReadyGroup
from etude.rollouts.settings import QueueName
from etude.rollouts.stored_traces import DIRECTORIES, StoredTraces, attempt_of
from etude.runs.layout import RunLayout

Facts = dict[str, Any]


@dataclass(frozen=True)
class StoredRollout:
    """A stored rollout. One that was resampled keeps its trace but has no reward: it was not trained on."""

    url: str  # of the trace: a path in the run directory, or an object elsewhere
    name: str  # of the trace without suffix: traces/000012/03-1
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
            "path": self.url,
        }


def list_rollouts(layout: RunLayout, prefix: str = "") -> list[StoredRollout]:
    """Return the stored rollouts whose names have this prefix: training first, by group and number."""
    found: list[StoredRollout] = []
    if not layout.root.is_dir():
        raise InputError(f"{layout.run} has no rollouts; name a run with the stage rl")
    traces = StoredTraces(layout)
    queues: tuple[tuple[QueueName, Path], ...] = (("training", layout.slots), ("evaluation", layout.evaluations))
    for name, database in queues:
        groups = traces.groups(name)
        if not database.exists():
            if groups:
                raise EtudeError(f"{database} is missing: without it the rollouts in {traces.store.url} are not listed")
            continue
        with closing(RolloutQueue.open_read_only(database)) as queue:
            known = {each.id: (each.task, each.step) for each in queue.progress()}
            for id in groups:
                found += _of_group(traces, name, queue.group(id), *known[id], prefix) if id in known else ()
    return found


def _of_group(
    traces: StoredTraces, queue: QueueName, group: ReadyGroup, task: str, step: int | None, prefix: str
) -> Iterator[StoredRollout]:
    """Yield the stored rollouts of a group whose names have this prefix."""
    shown = DIRECTORIES[queue] + f"/{group.id:06d}/"
    if not (shown.startswith(prefix) or prefix.startswith(shown)):
        return
    for name in traces.of_group(queue, group.id):
        if not name.removesuffix(SUFFIX).startswith(prefix):
            continue
        number, attempt = attempt_of(name)
        (slot,) = (slot for slot in group.slots if slot.number == number)
        current = slot.reward is not None and slot.trace == name
        trained, of_task = step if current else None, task  # else another attempt was trained on, if any
        if queue == "evaluation":
            evaluated, _, of_task = task.partition("/")
            trained = int(evaluated) if evaluated.isdigit() else None  # else of weights that were lost
        reward = slot.reward if current else None
        shown_name = name.removesuffix(SUFFIX)
        yield StoredRollout(traces.url(name), shown_name, trained, group.id, number, attempt, of_task, reward)


def rollouts_table(rollouts: Iterable[StoredRollout]) -> Table:
    """Return a table of rollouts for the terminal."""
    columns = ("name", "step", "total", "solved", "ending", "turns", "task")
    table = Table(*columns, box=None, header_style="bold")
    for rollout in rollouts:
        row = rollout.row | {"ending": rollout.row["ending"] or "resampled"}
        table.add_row(*("" if row[name] is None else escape(_format(row[name])) for name in columns))
    return table


def export_rollouts(layout: RunLayout, rollouts: Iterable[StoredRollout], directory: Path) -> tuple[int, list[str]]:
    """Write rollouts of a run as documents of the Agent Trajectory Interchange Format (ATIF), one file each.

    Returns how many were written, and the errors of those that cannot be read.
    """
    count, problems, traces = 0, [], StoredTraces(layout)
    for rollout in rollouts:
        try:
            document = to_atif(traces.load(f"{rollout.name}{SUFFIX}"))
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
