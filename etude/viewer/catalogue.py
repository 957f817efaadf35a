"""The rollouts of a run as rows, read from its two rollout queues (training and evaluation).

Fast with many thousands of rollouts: a group that has not changed is not read again. The queues are opened read only,
so their writers are not disturbed.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from etude.errors import EtudeError, InputError
from etude.rollouts.group_advantages import group_advantages
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import GroupProgress, ReadyGroup, Slot
from etude.rollouts.stored_traces import StoredTrace, StoredTraces, attempt_of, trace_name
from etude.runs.layout import RunLayout
from etude.viewer.run_reader import JsonObject, ReportProblem, as_number

RolloutSet = Literal["training", "evaluation"]
SETS: tuple[RolloutSet, ...] = get_args(RolloutSet)


@dataclass(frozen=True)
class RolloutRow:
    """A scored rollout, with the columns of the list page."""

    set: RolloutSet
    step: int | None  # that trained on it, or at which it was evaluated
    group: int
    number: int
    attempt: int
    task: str
    category: str
    total: float | None
    advantage: float | None
    score: float | None
    solved: bool | None
    ending: str
    turns: float | None
    calls: float | None
    made: float | None  # sampled tokens
    seconds: float | None  # of the session
    errors: str  # by class: "environment 2, timeout 1"
    hack: bool
    oldest: int | None
    newest: int | None


COLUMNS = tuple(RolloutRow.__dataclass_fields__)
CODED_COLUMNS = ("set", "task", "category", "ending", "errors")  # few distinct values: sent as indices into a list


@dataclass(frozen=True)
class RolloutGroup:
    """A prompt, the progress of its group, and its scored rollouts."""

    set: RolloutSet
    progress: GroupProgress
    rows: tuple[RolloutRow, ...]

    @property
    def task(self) -> str:
        return split_task_name(self.set, self.progress.task)[0]

    @property
    def step(self) -> int | None:
        return split_task_name(self.set, self.progress.task)[1] if self.set == "evaluation" else self.progress.step


def split_task_name(rollout_set: RolloutSet, name: str) -> tuple[str, int | None]:
    """Split the task name of a queue into task and step; only evaluation names have the form STEP/TASK."""
    if rollout_set == "training":
        return name, None
    step, _, task = name.partition("/")
    return (task, int(step)) if step.isdigit() else (name, None)


@dataclass
class RolloutCatalogue:
    """Reads the rollouts of one run and caches unchanged groups."""

    layout: RunLayout
    divide_by_std: bool = False  # setting of the run's advantage estimator
    _cache: dict[tuple[RolloutSet, int], tuple[object, RolloutGroup]] = field(default_factory=dict)

    @cached_property
    def traces(self) -> StoredTraces:
        return StoredTraces(self.layout)

    def path(self, rollout_set: RolloutSet) -> Path:
        return self.layout.slots if rollout_set == "training" else self.layout.evaluations

    def groups(self, report_problem: ReportProblem) -> list[RolloutGroup]:
        """Return all groups, training first, in the order in which they were started."""
        found: list[RolloutGroup] = []
        for rollout_set in SETS:
            if not self.path(rollout_set).exists():
                continue
            try:
                with closing(RolloutQueue.open_read_only(self.path(rollout_set))) as slots:
                    found += self._groups(rollout_set, slots)
            except (EtudeError, sqlite3.Error, ValueError, TypeError, KeyError, IndexError) as error:
                report_problem(f"{self.path(rollout_set).name} cannot be read: {error}")
        return found

    def _groups(self, rollout_set: RolloutSet, slots: RolloutQueue) -> list[RolloutGroup]:
        # A group that became stale can be ready again with new rollouts: only the incidents tell the two apart.
        stale = Counter(incident.task for incident in slots.incidents() if incident.kind == "stale")
        found = []
        for progress in slots.progress():
            version = (progress, stale[progress.task])
            cached = self._cache.get((rollout_set, progress.id))
            if cached is None or cached[0] != version:
                rows = self.rows(rollout_set, progress, slots.group(progress.id)) if progress.ready else ()
                cached = version, RolloutGroup(rollout_set, progress, rows)
                self._cache[rollout_set, progress.id] = cached
            found.append(cached[1])
        return found

    def rows(self, rollout_set: RolloutSet, progress: GroupProgress, group: ReadyGroup) -> tuple[RolloutRow, ...]:
        """Return the scored rollouts of a group; they have advantages only when all of them are scored."""
        task, measured = split_task_name(rollout_set, progress.task)
        step = measured if rollout_set == "evaluation" else progress.step
        advantages = self.advantages(rollout_set, group)
        return tuple(
            _row(rollout_set, step, task, slot, advantages.get(slot.number))
            for slot in group.slots
            if slot.reward is not None
        )

    def advantages(self, rollout_set: RolloutSet, group: ReadyGroup) -> dict[int, float]:
        """Return the advantage of each rollout as training computes it; empty for evaluations and unfinished groups."""
        if rollout_set == "evaluation":
            return {}
        totals = [as_number((slot.reward or {}).get("total")) for slot in group.slots]
        scored = [total for total in totals if total is not None]
        if len(scored) != len(totals):
            return {}
        found = group_advantages(scored, divide_by_std=self.divide_by_std)
        return {slot.number: value for slot, value in zip(group.slots, found, strict=True)}

    # --------------------------------------------------------------------------------------- single groups

    def group(self, rollout_set: RolloutSet, id: int) -> tuple[GroupProgress, ReadyGroup]:
        """Return a group with its progress and all its slots."""
        if not self.path(rollout_set).exists():
            raise InputError(f"this run has no {rollout_set} rollouts")
        try:
            with closing(RolloutQueue.open_read_only(self.path(rollout_set))) as slots:
                group = slots.group(id)
                return next(each for each in slots.progress(group.task) if each.id == id), group
        except (sqlite3.Error, ValueError) as error:
            raise EtudeError(f"{self.path(rollout_set).name}: group {id} cannot be read: {error}") from error
        except IndexError:  # a group without slots does not exist
            raise InputError(f"no {rollout_set} group {id}") from None

    def trace(self, rollout_set: RolloutSet, slot: Slot, attempt: int) -> StoredTrace | None:
        """Return the trace of an attempt; None if there is none."""
        name = trace_name(rollout_set, slot.group, slot.number, attempt)
        try:
            return self.traces.find(slot.trace if slot.trace and attempt == slot.attempt else name)
        except OSError:  # a store that is away
            return None

    def attempts(self, rollout_set: RolloutSet, slot: Slot) -> list[int]:
        """Return the attempts of a slot that have a trace, including the current one."""
        try:
            names = [attempt_of(name) for name in self.traces.of_group(rollout_set, slot.group)]
        except (OSError, ValueError):
            names = []
        found = {attempt for number, attempt in names if number == slot.number}
        if slot.reward is not None and self.trace(rollout_set, slot, slot.attempt):
            found.add(slot.attempt)
        return sorted(found)

    def incidents(self, report_problem: ReportProblem) -> list[JsonObject]:
        """Return infrastructure incidents, equal ones counted together, the most frequent first."""
        counted: Counter[tuple[str, str, str]] = Counter()
        for rollout_set in SETS:
            if not self.path(rollout_set).exists():
                continue
            try:
                with closing(RolloutQueue.open_read_only(self.path(rollout_set))) as slots:
                    counted.update((rollout_set, incident.kind, incident.why) for incident in slots.incidents())
            except (EtudeError, sqlite3.Error) as error:
                report_problem(f"{self.path(rollout_set).name} cannot be read: {error}")
        return [
            {"set": rollout_set, "kind": kind, "why": why, "times": times}
            for (rollout_set, kind, why), times in counted.most_common(50)
        ]


def _row(rollout_set: RolloutSet, step: int | None, task: str, slot: Slot, advantage: float | None) -> RolloutRow:
    record = slot.reward or {}
    cost = record.get("cost") if isinstance(record.get("cost"), dict) else {}
    errors = record.get("errors") if isinstance(record.get("errors"), dict) else {}
    seconds = record.get("seconds") if isinstance(record.get("seconds"), dict) else {}
    assert isinstance(cost, dict)
    assert isinstance(errors, dict)
    assert isinstance(seconds, dict)
    solved = record.get("solved")
    return RolloutRow(
        set=rollout_set,
        step=step,
        group=slot.group,
        number=slot.number,
        attempt=slot.attempt,
        task=task,
        category=str(record.get("category") or ""),
        total=as_number(record.get("total")),
        advantage=advantage,
        score=as_number(record.get("score")),
        solved=None if solved is None else bool(solved),
        ending=str(record.get("ending") or ""),
        turns=as_number(cost.get("turns")),
        calls=as_number(cost.get("calls")),
        made=as_number(record.get("made")),
        seconds=as_number(seconds.get("session", cost.get("wall_s"))),
        errors=", ".join(f"{name} {count}" for name, count in sorted(errors.items())),
        hack=bool(record.get("hack")),
        oldest=slot.oldest_step,
        newest=slot.newest_step,
    )


def to_columns(rows: Sequence[RolloutRow]) -> JsonObject:
    """Return rows as columns, repeated strings as indices into a list: a third of the bytes, and fast to parse."""
    columns: JsonObject = {}
    for name in COLUMNS:
        values: list[Any] = [getattr(row, name) for row in rows]
        if name in CODED_COLUMNS:
            words: dict[Any, int] = {}
            coded = [words.setdefault(value, len(words)) for value in values]
            columns[name] = {"words": list(words), "at": coded}
        else:
            columns[name] = [round(value, 4) if isinstance(value, float) else value for value in values]
    return {"count": len(rows), "columns": columns}


def all_rows(groups: Iterable[RolloutGroup]) -> list[RolloutRow]:
    return [row for group in groups for row in group.rows]


def queue_stamp(layout: RunLayout) -> list[float]:
    """Return times and sizes of the queues' files, which change whenever the queues do."""
    found: list[float] = []
    for path in (layout.slots, layout.evaluations):
        for each in (path, path.with_name(f"{path.name}-wal")):
            try:
                info = each.stat()
                found += [info.st_mtime, info.st_size]
            except OSError:
                found += [0, 0]
    return found
