"""Every rollout of a run as a row, from its two tables of slots. Fast with many thousands: a group that has not changed
is not read again. Read only: whoever fills the tables is not disturbed.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from etude.errors import EtudeError, InputError
from etude.harness.trace_store import SUFFIX
from etude.rl.advantages import advantages
from etude.rollouts.queue import ReadyGroup, Slot, Slots, Standing
from etude.runs.layout import Place
from etude.viewer.run_reader import Complain, Facts, number

SetName = Literal["training", "evaluation"]
SETS: tuple[SetName, ...] = get_args(SetName)


@dataclass(frozen=True)
class Row:
    """A graded rollout, in as few words as a list needs."""

    set: SetName
    step: int | None  # that trained it, or at which it was measured
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
    made: float | None  # tokens
    seconds: float | None  # of the session
    errors: str  # by class: "environment 2, timeout 1"
    hack: bool
    oldest: int | None
    newest: int | None


COLUMNS = tuple(Row.__dataclass_fields__)
CODED = ("set", "task", "category", "ending", "errors")  # few different words: each is told once


@dataclass(frozen=True)
class Group:
    """A prompt and how far its rollouts are."""

    set: SetName
    standing: Standing
    rows: tuple[Row, ...]

    @property
    def task(self) -> str:
        return task_of(self.set, self.standing.task)[0]

    @property
    def step(self) -> int | None:
        return task_of(self.set, self.standing.task)[1] if self.set == "evaluation" else self.standing.step


def task_of(table: SetName, name: str) -> tuple[str, int | None]:
    """The task that a table's name means; a measurement has the step before it."""
    if table == "training":
        return name, None
    step, _, task = name.partition("/")
    return (task, int(step)) if step.isdigit() else (name, None)


@dataclass
class Catalogue:
    """The rollouts of one run."""

    place: Place
    divide_by_std: bool = False  # as the run's estimator does
    _known: dict[tuple[SetName, int], tuple[object, Group]] = field(default_factory=dict)

    def path(self, table: SetName) -> Path:
        return self.place.slots if table == "training" else self.place.evaluations

    def groups(self, complain: Complain) -> list[Group]:
        """All groups, training first, in the order they were begun."""
        found: list[Group] = []
        for table in SETS:
            if not self.path(table).exists():
                continue
            try:
                with closing(Slots.look(self.path(table))) as slots:
                    found += self._groups(table, slots)
            except (EtudeError, sqlite3.Error, ValueError, TypeError, KeyError, IndexError) as error:
                complain(f"{self.path(table).name} cannot be read: {error}")
        return found

    def _groups(self, table: SetName, slots: Slots) -> list[Group]:
        # What was ready and became too old is ready again one day: only the record of troubles tells it apart.
        stale = Counter(trouble.task for trouble in slots.troubles() if trouble.kind == "stale")
        found = []
        for standing in slots.standings():
            mark = (standing, stale[standing.task])
            known = self._known.get((table, standing.id))
            if known is None or known[0] != mark:
                rows = self.rows(table, standing, slots.group(standing.id)) if standing.ready else ()
                known = mark, Group(table, standing, rows)
                self._known[table, standing.id] = known
            found.append(known[1])
        return found

    def rows(self, table: SetName, standing: Standing, group: ReadyGroup) -> tuple[Row, ...]:
        """The rollouts of a group that have a reward; an advantage only when all have."""
        task, measured = task_of(table, standing.task)
        step = measured if table == "evaluation" else standing.step
        above = self.advantages(table, group)
        return tuple(
            _row(table, step, task, slot, above.get(slot.number)) for slot in group.slots if slot.reward is not None
        )

    def advantages(self, table: SetName, group: ReadyGroup) -> dict[int, float]:
        """By how much each rollout did better than its group, as training has it; nothing before all are there, and
        nothing of a measurement: nobody learns from it."""
        if table == "evaluation":
            return {}
        totals = [number((slot.reward or {}).get("total")) for slot in group.slots]
        known = [total for total in totals if total is not None]
        if len(known) != len(totals):
            return {}
        found = advantages(known, divide_by_std=self.divide_by_std)
        return {slot.number: value for slot, value in zip(group.slots, found, strict=True)}

    # --------------------------------------------------------------------------------------- one of them

    def group(self, table: SetName, id: int) -> tuple[Standing, ReadyGroup]:
        """A group as it is now, with all its slots."""
        if not self.path(table).exists():
            raise InputError(f"this run has no table of {table} rollouts")
        try:
            with closing(Slots.look(self.path(table))) as slots:
                group = slots.group(id)
                return next(each for each in slots.standings(group.task) if each.id == id), group
        except (sqlite3.Error, ValueError) as error:
            raise EtudeError(f"{self.path(table).name}: group {id} cannot be read: {error}") from error
        except IndexError:  # no slot, no group
            raise InputError(f"there is no {table} group {id}") from None

    def trace(self, table: SetName, slot: Slot, attempt: int) -> Path | None:
        """The file of an attempt, always inside the run; None if there is none."""
        directory = self.place.traces if table == "training" else self.place.evaluation_traces
        name = f"{slot.group:06d}/{slot.number:02d}-{attempt}{SUFFIX}"
        path = self.place.root / slot.trace if slot.trace and attempt == slot.attempt else directory / name
        inside = path.resolve().is_relative_to(self.place.root.resolve())
        return path if inside and path.is_file() else None

    def attempts(self, table: SetName, slot: Slot) -> list[int]:
        """The attempts of a slot whose files are there, the one that counts included."""
        directory = (self.place.traces if table == "training" else self.place.evaluation_traces) / f"{slot.group:06d}"
        names = [path.stem.partition("-") for path in directory.glob(f"{slot.number:02d}-*{SUFFIX}")]
        found = {int(attempt) for _, _, attempt in names if attempt.isdigit()}
        if slot.reward is not None and self.trace(table, slot, slot.attempt):
            found.add(slot.attempt)
        return sorted(found)

    def troubles(self, complain: Complain) -> list[Facts]:
        """What the infrastructure did, the same things together, the most frequent first."""
        counted: Counter[tuple[str, str, str]] = Counter()
        for table in SETS:
            if not self.path(table).exists():
                continue
            try:
                with closing(Slots.look(self.path(table))) as slots:
                    counted.update((table, trouble.kind, trouble.why) for trouble in slots.troubles())
            except (EtudeError, sqlite3.Error) as error:
                complain(f"{self.path(table).name} cannot be read: {error}")
        return [
            {"set": table, "kind": kind, "why": why, "times": times}
            for (table, kind, why), times in counted.most_common(50)
        ]


def _row(table: SetName, step: int | None, task: str, slot: Slot, advantage: float | None) -> Row:
    said = slot.reward or {}
    cost = said.get("cost") if isinstance(said.get("cost"), dict) else {}
    errors = said.get("errors") if isinstance(said.get("errors"), dict) else {}
    seconds = said.get("seconds") if isinstance(said.get("seconds"), dict) else {}
    assert isinstance(cost, dict)
    assert isinstance(errors, dict)
    assert isinstance(seconds, dict)
    solved = said.get("solved")
    return Row(
        set=table,
        step=step,
        group=slot.group,
        number=slot.number,
        attempt=slot.attempt,
        task=task,
        category=str(said.get("category") or ""),
        total=number(said.get("total")),
        advantage=advantage,
        score=number(said.get("score")),
        solved=None if solved is None else bool(solved),
        ending=str(said.get("ending") or ""),
        turns=number(cost.get("turns")),
        calls=number(cost.get("calls")),
        made=number(said.get("made")),
        seconds=number(seconds.get("session", cost.get("wall_s"))),
        errors=", ".join(f"{name} {count}" for name, count in sorted(errors.items())),
        hack=bool(said.get("hack")),
        oldest=slot.oldest,
        newest=slot.newest,
    )


def in_columns(rows: Sequence[Row]) -> Facts:
    """Rows column by column, words as numbers of a list: a third of the bytes, and fast to read."""
    columns: Facts = {}
    for name in COLUMNS:
        values: list[Any] = [getattr(row, name) for row in rows]
        if name in CODED:
            words: dict[Any, int] = {}
            coded = [words.setdefault(value, len(words)) for value in values]
            columns[name] = {"words": list(words), "at": coded}
        else:
            columns[name] = [round(value, 4) if isinstance(value, float) else value for value in values]
    return {"count": len(rows), "columns": columns}


def rows_of(groups: Iterable[Group]) -> list[Row]:
    return [row for group in groups for row in group.rows]


def stamp(place: Place) -> list[float]:
    """What changes when the tables do, for the price of a look at their files."""
    found: list[float] = []
    for path in (place.slots, place.evaluations):
        for each in (path, path.with_name(f"{path.name}-wal")):
            try:
                about = each.stat()
                found += [about.st_mtime, about.st_size]
            except OSError:
                found += [0, 0]
    return found
