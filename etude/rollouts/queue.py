"""The reconciler's table: every sample is a slot, every slot is a row, every change is one transaction.

    queued -> starting -> running -> grading -> ready -> trained
       ^---------'----------'----------'   a death, a lost lease, a broken verifier: back in the queue, never a reward

Slots belong to groups, one prompt each; a prompt is used once. A claim comes with an attempt number, and whoever
reports must show it: an answer that comes twice, or from a worker given up for dead, changes nothing. Time and the
trainer's version are arguments, so that a simulation can run years of it in a second. Nobody talks to anybody here:
workers claim and report, the trainer takes and marks, and `reconcile` compares what should be with what is.
"""

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from etude.errors import EtudeError, InputError

SlotState = Literal["queued", "starting", "running", "grading", "ready"]
IN_FLIGHT = ("starting", "running", "grading")
TroubleKind = Literal["failed", "lost", "stale", "dropped"]

SCHEMA = """
CREATE TABLE IF NOT EXISTS plan (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (
    id INTEGER PRIMARY KEY,
    task TEXT NOT NULL UNIQUE,           -- a prompt is used once, whatever happens
    expected REAL NOT NULL DEFAULT 0,    -- how long it is expected to take: long ones start early
    step INTEGER,                        -- that trained it; NULL: none has
    dropped TEXT                         -- why it will never be trained
);
CREATE TABLE IF NOT EXISTS slots (
    id INTEGER PRIMARY KEY,
    grp INTEGER NOT NULL REFERENCES groups(id),
    number INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    attempt INTEGER NOT NULL DEFAULT 0,  -- counts claims; the fencing token of whoever holds it
    failures INTEGER NOT NULL DEFAULT 0,
    worker TEXT NOT NULL DEFAULT '',
    lease REAL NOT NULL DEFAULT 0,       -- when it is given up for dead
    oldest INTEGER,                      -- steps of the weights that made its tokens; until then: that it is not older
    newest INTEGER,
    reward TEXT,                         -- JSON
    trace TEXT NOT NULL DEFAULT '',
    resume TEXT NOT NULL DEFAULT '',     -- a rollout checkpoint: JSON
    note TEXT NOT NULL DEFAULT '',
    UNIQUE (grp, number)
);
CREATE TABLE IF NOT EXISTS versions (
    number INTEGER PRIMARY KEY,          -- of published weights: they only ever grow, also over a restart
    step INTEGER NOT NULL                -- of the trainer that they stand for
);
CREATE TABLE IF NOT EXISTS troubles (     -- the table keeps this record itself: no change can forget to
    id INTEGER PRIMARY KEY,
    grp INTEGER NOT NULL REFERENCES groups(id),
    number INTEGER,                      -- of the slot; NULL: the whole group
    kind TEXT NOT NULL,
    why TEXT NOT NULL,
    step INTEGER                         -- the last that was trained when it came; NULL: none was
);
CREATE TRIGGER IF NOT EXISTS slot_failed AFTER UPDATE OF failures ON slots WHEN NEW.failures > OLD.failures BEGIN
    INSERT INTO troubles (grp, number, kind, why, step) SELECT NEW.grp, NEW.number,
        CASE NEW.note WHEN 'its worker was not heard of' THEN 'lost' ELSE 'failed' END, NEW.note, MAX(step) FROM groups;
END;
CREATE TRIGGER IF NOT EXISTS slot_stale AFTER UPDATE OF state ON slots
WHEN OLD.state = 'ready' AND NEW.state = 'queued' BEGIN
    INSERT INTO troubles (grp, number, kind, why, step)
    SELECT NEW.grp, NEW.number, 'stale', NEW.note, MAX(step) FROM groups;
END;
CREATE TRIGGER IF NOT EXISTS group_dropped AFTER UPDATE OF dropped ON groups
WHEN OLD.dropped IS NULL AND NEW.dropped IS NOT NULL BEGIN
    INSERT INTO troubles (grp, kind, why, step) SELECT NEW.id, 'dropped', NEW.dropped, MAX(step) FROM groups;
END;
CREATE INDEX IF NOT EXISTS slots_by_state ON slots (state, grp);
"""


class StaleClaim(EtudeError):
    """A report about a slot by somebody who does not hold it any more; what it says is not needed."""


@dataclass(frozen=True)
class Plan:
    """How a run samples and trains."""

    group_size: int = 8
    groups_per_step: int = 8
    max_staleness: int = 2  # versions between the oldest token of a group and the trainer when it takes it
    ahead: float | None = None  # steps' groups that are begun beside those of the next; None: half the staleness
    in_flight: int = 64  # slots at once
    lease_s: float = 120.0  # without a sign of life after which a worker is dead
    attempts: int = 4  # failures of a slot after which its group is given up

    def __post_init__(self) -> None:
        small = [name for name in ("group_size", "groups_per_step", "in_flight", "attempts") if getattr(self, name) < 1]
        if small or self.max_staleness < 0 or self.lease_s <= 0:
            raise InputError(f"slots: {self}; expected numbers of at least 1, and a staleness not below 0")
        if self.ahead is not None and not 0 <= self.ahead <= self.max_staleness:
            raise InputError(f"slots: {self.ahead:g} steps ahead; expected 0 to max_staleness = {self.max_staleness}")

    @property
    def outstanding(self) -> int:
        """Groups that may be begun and not trained. Each step's worth of them makes samples one step older."""
        ahead = self.max_staleness / 2 if self.ahead is None else self.ahead
        return math.ceil((1 + ahead) * self.groups_per_step)


@dataclass(frozen=True)
class Slot:
    """One sample of a group, as its row is now."""

    id: int
    group: int
    task: str
    number: int
    attempt: int
    state: str
    oldest: int | None = None
    newest: int | None = None
    reward: dict[str, Any] | None = None
    trace: str = ""
    resume: dict[str, Any] | None = None
    note: str = ""


@dataclass(frozen=True)
class ReadyGroup:
    """The finished rollouts of one prompt."""

    id: int
    task: str
    slots: tuple[Slot, ...]

    @property
    def oldest(self) -> int:
        return min(slot.oldest for slot in self.slots if slot.oldest is not None)


@dataclass(frozen=True)
class Standing:
    """How far a group is. Its failures are those of the infrastructure, over all its slots."""

    id: int
    task: str
    step: int | None
    dropped: str
    size: int
    ready: int
    failures: int

    @property
    def over(self) -> bool:
        """Nothing more will come of it: all is graded, or it was given up."""
        return bool(self.dropped) or self.ready == self.size


@dataclass(frozen=True)
class Effort:
    """What the finished rollouts of a group took, on average; None where they do not say. Seconds: of the slowest."""

    task: str
    rollouts: int
    turns: float | None
    thinking: float | None
    solved: float | None
    seconds: float | None


@dataclass(frozen=True)
class Trouble:
    """A slot that had to be sampled again, or a group (without a number) that was given up, and why."""

    task: str
    number: int | None
    kind: TroubleKind
    why: str


class Slots:
    """The table of one run."""

    def __init__(self, path: Path | str, plan: Plan) -> None:
        self.plan = plan
        self._db = sqlite3.connect(str(path), isolation_level=None, timeout=30.0)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")  # a crash of the process loses nothing; of the machine, seconds
        self._db.executescript(SCHEMA)
        self._check_plan()

    @classmethod
    def look(cls, path: Path | str) -> "Slots":
        """Open a table that is there for reading only; whoever works on it is not disturbed."""
        table = cls.__new__(cls)
        try:
            table._db = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
            table._db.row_factory = sqlite3.Row
            table.plan = Plan(group_size=int(table._one("SELECT value FROM plan WHERE key = 'group_size'")))
        except (sqlite3.Error, TypeError) as error:
            raise InputError(f"{path}: no table of slots, or not yet: {error}") from error
        return table

    def close(self) -> None:
        self._db.close()

    def _check_plan(self) -> None:
        """A group's size cannot change under a run; the rest may."""
        with self._change() as db:
            db.execute("INSERT OR IGNORE INTO plan VALUES ('group_size', ?)", (str(self.plan.group_size),))
            (size,) = db.execute("SELECT value FROM plan WHERE key = 'group_size'").fetchone()
        if int(size) != self.plan.group_size:
            raise InputError(f"slots: this run has groups of {size}; group_size cannot become {self.plan.group_size}")

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ------------------------------------------------------------------------------------------- filling

    def outstanding(self) -> int:
        """Groups that are begun, and neither trained nor dropped."""
        return int(self._one("SELECT COUNT(*) FROM groups WHERE step IS NULL AND dropped IS NULL"))

    def wanted(self, *, fresh: bool = True) -> int:
        """How many new groups there should be; a step's fewer while the samplers are not `fresh`, without the weights
        of the last step: what is begun then is a step older for ever, and others are in flight to go on with."""
        most = self.plan.outstanding - (0 if fresh else self.plan.groups_per_step)
        return max(0, most - self.outstanding())

    def add(self, tasks: Iterable[tuple[str, float]]) -> int:
        """Begin groups for prompts, each with how long it is expected to take; prompts used before are passed over."""
        added = 0
        with self._change() as db:
            for task, expected in tasks:
                found = db.execute("INSERT OR IGNORE INTO groups (task, expected) VALUES (?, ?)", (task, expected))
                if found.rowcount:
                    added += 1
                    rows = [(found.lastrowid, number) for number in range(self.plan.group_size)]
                    db.executemany("INSERT INTO slots (grp, number) VALUES (?, ?)", rows)
        return added

    def serve(self, step: int) -> None:
        """All samplers have the weights of this step by now: what is begun from here on is not older."""
        with self._change() as db:
            db.execute("INSERT OR REPLACE INTO plan VALUES ('served', ?)", (str(step),))

    def _full(self) -> bool:
        marks = ", ".join("?" * len(IN_FLIGHT))
        return bool(
            self._one(f"SELECT COUNT(*) FROM slots WHERE state IN ({marks})", *IN_FLIGHT) >= self.plan.in_flight
        )

    def used(self, task: str) -> bool:
        """Whether a prompt has had its turn."""
        return bool(self._one("SELECT COUNT(*) FROM groups WHERE task = ?", task))

    # ------------------------------------------------------------------------------------------- workers

    def claim(self, worker: str, now: float) -> Slot | None:
        """A queued slot, now this worker's until its lease is over; None when there is none, or enough are running.

        Groups that were begun first come first; among new ones the longest.
        """
        if self._full() or not self._one("SELECT EXISTS (SELECT 1 FROM slots WHERE state = 'queued')"):
            return None  # without taking the lock: idle workers ask many times a second
        with self._change() as db:
            if self._full():
                return None
            row = db.execute(
                """SELECT slots.id FROM slots JOIN groups ON groups.id = grp
                   WHERE state = 'queued' AND dropped IS NULL
                   ORDER BY (SELECT COUNT(*) FROM slots s WHERE s.grp = groups.id AND s.attempt > 0) = 0,
                            CASE WHEN slots.attempt > 0 THEN 0 ELSE 1 END, expected DESC, groups.id, number LIMIT 1"""
            ).fetchone()
            if row is None:
                return None
            db.execute(
                """UPDATE slots SET state='starting', attempt=attempt+1, worker=?, lease=?, note='', oldest=
                       CASE WHEN resume = '' THEN
                           COALESCE((SELECT CAST(value AS INTEGER) FROM plan WHERE key='served'), 0)
                       ELSE oldest END WHERE id=?""",
                (worker, now + self.plan.lease_s, row["id"]),
            )
        return self.slot(row["id"])

    def beat(self, slot: Slot, now: float, state: SlotState = "running") -> None:
        """A sign of life; StaleClaim when the slot is not this worker's any more."""
        self._report(slot, "state=?, lease=?", (state, now + self.plan.lease_s))

    def beat_all(self, slots: Iterable[tuple[Slot, SlotState]], now: float) -> list[Slot]:
        """A sign of life for all that a worker holds, in one go; those that are not its own any more."""
        lost = []
        marks = ", ".join("?" * len(IN_FLIGHT))
        with self._change() as db:
            for slot, state in slots:
                found = db.execute(
                    f"UPDATE slots SET state=?, lease=? WHERE id=? AND attempt=? AND state IN ({marks})",
                    (state, now + self.plan.lease_s, slot.id, slot.attempt, *IN_FLIGHT),
                )
                if not found.rowcount:
                    lost.append(slot)
        return lost

    def remark(self, slot: Slot, note: str) -> None:
        """Something to know about how a slot came to be filled."""
        self._report(slot, "note=?", (note,))

    def checkpoint(self, slot: Slot, resume: dict[str, Any], now: float) -> None:
        """Where the rollout could go on if its worker died now."""
        self._report(slot, "resume=?, lease=?", (json.dumps(resume), now + self.plan.lease_s))

    def finish(self, slot: Slot, reward: dict[str, Any], trace: str, versions: tuple[int, int]) -> None:
        """A graded rollout, and the oldest and newest version in it. Only the first report of a claim counts."""
        step = "COALESCE((SELECT step FROM versions WHERE versions.number=?), ?)"
        # one in which no token was made is nobody's, and as old as what is newest: it must not be sampled for ever
        oldest, newest = versions if versions[0] >= 0 else (self.newest_version(),) * 2
        self._report(
            slot,
            f"state='ready', reward=?, trace=?, oldest={step}, newest={step}, resume='', worker='', lease=0",
            (json.dumps(reward), trace, oldest, oldest, newest, newest),
        )

    def fail(self, slot: Slot, why: str, *, keep_resume: bool = True) -> None:
        """The infrastructure failed, not the agent: the slot is queued again; after too often its group is dropped."""
        resume = "" if keep_resume else ", resume=''"
        self._report(slot, f"state='queued', failures=failures+1, note=?, worker='', lease=0{resume}", (why,))
        self._give_up()

    def release(self, worker: str = "") -> int:
        """Queue what a worker held (or all of them) that is known to be gone: nobody's failure; how many."""
        marks = ", ".join("?" * len(IN_FLIGHT))
        with self._change() as db:
            return db.execute(
                f"UPDATE slots SET state='queued', worker='', lease=0 WHERE state IN ({marks}) AND ? IN ('', worker)",
                (*IN_FLIGHT, worker),
            ).rowcount

    def _report(self, slot: Slot, change: str, values: Sequence[Any]) -> None:
        marks = ", ".join("?" * len(IN_FLIGHT))
        with self._change() as db:
            found = db.execute(
                f"UPDATE slots SET {change} WHERE id=? AND attempt=? AND state IN ({marks})",
                (*values, slot.id, slot.attempt, *IN_FLIGHT),
            )
            if not found.rowcount:
                raise StaleClaim(f"slot {slot.id} of {slot.task}: attempt {slot.attempt} does not hold it any more")

    # ------------------------------------------------------------------------------------------- reconciling

    def reconcile(self, now: float, version: int) -> dict[str, int]:
        """Queue what its worker lost, and what has grown too old to be trained; how many of each."""
        marks = ", ".join("?" * len(IN_FLIGHT))
        with self._change() as db:
            lost = db.execute(
                f"""UPDATE slots SET state='queued', failures=failures+1, worker='', note='its worker was not heard of'
                    WHERE state IN ({marks}) AND lease < ?""",
                (*IN_FLIGHT, now),
            ).rowcount
            stale = db.execute(
                """UPDATE slots SET state='queued', reward=NULL, trace='', oldest=NULL, newest=NULL, resume='',
                          note='too old to be trained'
                   WHERE state='ready' AND oldest < ? AND grp IN (SELECT id FROM groups WHERE step IS NULL)""",
                (version - self.plan.max_staleness,),
            ).rowcount
        return {"lost": lost, "stale": stale, "dropped": self._give_up()}

    def _give_up(self) -> int:
        """Drop groups of which a slot failed too often: groups have one size, and a missing member is no zero."""
        with self._change() as db:
            return db.execute(
                """UPDATE groups SET dropped = (
                       SELECT 'slot ' || number || ' failed ' || failures || ' times: ' || note
                       FROM slots WHERE grp = groups.id AND failures >= ? LIMIT 1)
                   WHERE dropped IS NULL AND step IS NULL
                     AND EXISTS (SELECT 1 FROM slots WHERE grp = groups.id AND failures >= ?)""",
                (self.plan.attempts, self.plan.attempts),
            ).rowcount

    # ------------------------------------------------------------------------------------------- the trainer

    def ready(self, version: int) -> list[ReadyGroup]:
        """Groups whose rollouts are all graded and young enough for this version, the oldest tokens first."""
        return self.groups(row["grp"] for row in self._begun(version) if not row["missing"])

    def take(self, version: int) -> list[ReadyGroup] | None:
        """The groups of the next step; None while there are not enough, or others are awaited.

        A step ages all that is under way. Rather than throw away what is then too old and begin it again, which for
        long tasks would never end, it waits: samplers have other groups to go on with.
        """
        chosen, awaited = self._choose(version)
        return None if awaited or len(chosen) < self.plan.groups_per_step else self.groups(chosen)

    def awaited(self, version: int) -> list[str]:
        """The tasks for which a step waits that has all the groups it needs."""
        chosen, awaited = self._choose(version)
        return awaited if len(chosen) == self.plan.groups_per_step else []

    def _choose(self, version: int) -> tuple[list[int], list[str]]:
        """The oldest groups that are ready, as many as a step takes, and the tasks of older ones to wait for, where
        fewer are too old in the steps to come if those go first."""
        size, rows = self.plan.groups_per_step, self._begun(version)
        chosen = [row for row in rows if not row["missing"]][:size]
        # one that has taken its workers along time and again is not waited for
        under_way = [row for row in rows if row["missing"] and row["tries"] <= self.plan.attempts]
        first = sorted((*chosen, *under_way), key=lambda row: int(row["age"]))[:size]
        awaited = [row["task"] for row in first if row["missing"]]
        if awaited and self._lost(rows, first, version) >= self._lost(rows, chosen, version):
            awaited = []
        return [row["grp"] for row in chosen], awaited

    def _lost(self, rows: Sequence[sqlite3.Row], taken: Sequence[sqlite3.Row], version: int) -> int:
        """How many are too old when their turn comes in the steps after the next, which takes some, at best."""
        size, least = self.plan.groups_per_step, version + 1 - self.plan.max_staleness
        left = [row["age"] for row in rows if row not in taken]  # the oldest first
        kept = 0
        for age in left:
            kept += age >= least + kept // size
        return len(left) - kept

    def _begun(self, version: int) -> list[sqlite3.Row]:
        """Groups that this version can train, as far as is known: how many slots are missing, and how old the rest."""
        return self._db.execute(
            """SELECT grp, task, SUM(state != 'ready') AS missing, MAX((state != 'ready') * attempt) AS tries,
                      MIN(CASE WHEN state != 'queued' OR resume != '' THEN oldest END) AS age
               FROM slots JOIN groups ON groups.id = grp WHERE step IS NULL AND dropped IS NULL
               GROUP BY grp HAVING age >= ? ORDER BY age, grp""",
            (version - self.plan.max_staleness,),
        ).fetchall()

    def mark_trained(self, groups: Iterable[ReadyGroup], step: int) -> None:
        """These groups are in the weights from this step on."""
        with self._change() as db:
            for group in groups:
                found = db.execute(
                    "UPDATE groups SET step=? WHERE id=? AND step IS NULL AND dropped IS NULL", (step, group.id)
                )
                if not found.rowcount:
                    raise EtudeError(f"slots: group {group.id} of {group.task} was trained or dropped before")

    def published(self, number: int, step: int) -> None:
        """Weights of this number stand for the trainer after `step`. Unknown numbers stand for the step they name."""
        with self._change() as db:
            db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (number, step))

    def step_of(self, number: int) -> int:
        """What weights of this number stand for."""
        return int(self._one("SELECT COALESCE((SELECT step FROM versions WHERE number=?), ?)", number, number))

    def last_sign(self) -> float:
        """When the lease ends that was renewed last, of all that are in flight: it grows while anybody is alive."""
        marks = ", ".join("?" * len(IN_FLIGHT))
        return float(self._one(f"SELECT COALESCE(MAX(lease), 0) FROM slots WHERE state IN ({marks})", *IN_FLIGHT))

    def newest_version(self) -> int:
        """Of the weights that were published; 0 before any was."""
        return int(self._one("SELECT COALESCE(MAX(number), 0) FROM versions"))

    def rewind(self, step: int) -> int:
        """The trainer is back at the checkpoint after `step`: what was trained later is ready again, not resampled.

        Tokens of the steps that are lost now count as this step's: the trainer will be there again.
        """
        with self._change() as db:
            db.execute("UPDATE versions SET step=? WHERE step > ?", (step, step))
            newer = "WHERE oldest > ? OR newest > ?"
            db.execute(f"UPDATE slots SET oldest=MIN(oldest, ?), newest=MIN(newest, ?) {newer}", (step,) * 4)
            db.execute("UPDATE plan SET value=? WHERE key='served' AND CAST(value AS INTEGER) > ?", (str(step), step))
            return db.execute("UPDATE groups SET step=NULL WHERE step > ?", (step,)).rowcount

    # ------------------------------------------------------------------------------------------- looking

    def slot(self, id: int) -> Slot:
        row = self._db.execute(
            "SELECT slots.*, task FROM slots JOIN groups ON groups.id = grp WHERE slots.id = ?", (id,)
        ).fetchone()
        return _slot(row)

    def group(self, id: int) -> ReadyGroup:
        """All slots of a group, whatever their state."""
        rows = self._db.execute(
            "SELECT slots.*, task FROM slots JOIN groups ON groups.id = grp WHERE grp = ? ORDER BY number", (id,)
        ).fetchall()
        return ReadyGroup(id, rows[0]["task"], tuple(_slot(row) for row in rows))

    def groups(self, ids: Iterable[int]) -> list[ReadyGroup]:
        return [self.group(id) for id in ids]

    def counts(self) -> dict[str, int]:
        """Slots by state, and groups trained and dropped."""
        rows = self._db.execute(
            """SELECT CASE WHEN dropped IS NOT NULL THEN 'dropped' WHEN step IS NOT NULL THEN 'trained' ELSE state END
                      AS name, COUNT(*) AS n FROM slots JOIN groups ON groups.id = grp GROUP BY name"""
        ).fetchall()
        return {row["name"]: row["n"] for row in rows}

    def resumes(self) -> list[dict[str, Any]]:
        """The rollout checkpoints that somebody may still need."""
        rows = self._db.execute(
            "SELECT resume FROM slots JOIN groups ON groups.id = grp WHERE resume != '' AND dropped IS NULL"
        ).fetchall()
        return [json.loads(row["resume"]) for row in rows]

    def waiting_for(self, now: float) -> str:
        """What a stalled run waits for, in words."""
        row = self._db.execute(
            f"""SELECT slots.*, task FROM slots JOIN groups ON groups.id = grp
                WHERE state IN ({", ".join("?" * len(IN_FLIGHT))}) ORDER BY lease LIMIT 1""",
            IN_FLIGHT,
        ).fetchone()
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self.counts().items())) or "no slots"
        if row is None:
            return counts
        silent = f"slot {row['id']} of {row['task']}, {row['state']} at {row['worker']}"
        return f"{counts}; longest silent: {silent}, given up in {row['lease'] - now:.0f} s"

    def last_step(self) -> int:
        """The newest step that trained a group; 0 before any has."""
        return int(self._one("SELECT COALESCE(MAX(step), 0) FROM groups"))

    def trained(self) -> list[tuple[str, int]]:
        """The ledger: every prompt that was trained on, with its step."""
        rows = self._db.execute("SELECT task, step FROM groups WHERE step IS NOT NULL ORDER BY step, id").fetchall()
        return [(row["task"], row["step"]) for row in rows]

    def given_up(self) -> dict[str, int]:
        """Prompts that were dropped, with how often their worst slot failed."""
        rows = self._db.execute(
            """SELECT task, MAX(failures) AS failures FROM slots JOIN groups ON groups.id = grp
               WHERE dropped IS NOT NULL GROUP BY task"""
        ).fetchall()
        return {row["task"]: row["failures"] for row in rows}

    def tasks(self) -> list[str]:
        """The prompts that have had their turn, in the order they were begun."""
        return [row["task"] for row in self._db.execute("SELECT task FROM groups ORDER BY id")]

    def standings(self, prefix: str = "") -> list[Standing]:
        """How far every group is whose task begins so, in the order they were begun."""
        rows = self._db.execute(
            """SELECT groups.id AS id, task, step, COALESCE(dropped, '') AS dropped, COUNT(*) AS size,
                      SUM(state = 'ready') AS ready, SUM(failures) AS failures
               FROM groups JOIN slots ON grp = groups.id WHERE substr(task, 1, ?) = ?
               GROUP BY groups.id ORDER BY groups.id""",
            (len(prefix), prefix),
        ).fetchall()
        return [Standing(**row) for row in rows]

    def efforts(self) -> list[Effort]:
        """What the rollouts of each group took that are finished, in the order the groups were begun."""
        rows = self._db.execute(
            """SELECT task, COUNT(*) AS rollouts, AVG(json_extract(reward, '$.cost.turns')) AS turns,
                      AVG(json_extract(reward, '$.cost.thinking')) AS thinking,
                      AVG(json_extract(reward, '$.solved')) AS solved,
                      MAX((SELECT SUM(value) FROM json_each(reward, '$.seconds'))) AS seconds
               FROM slots JOIN groups ON groups.id = grp WHERE state = 'ready' GROUP BY grp ORDER BY grp"""
        ).fetchall()
        return [Effort(**row) for row in rows]

    def trained_rewards(self, step: int, most: int) -> list[dict[str, Any]]:
        """The rewards of the last rollouts that were trained on up to a step, oldest first."""
        rows = self._db.execute(
            """SELECT reward FROM slots JOIN groups ON groups.id = grp WHERE step <= ? AND reward IS NOT NULL
               ORDER BY step DESC, grp DESC, number DESC LIMIT ?""",
            (step, most),
        ).fetchall()
        return [json.loads(row["reward"]) for row in reversed(rows)]

    def troubles(self, step: int | None = None) -> list[Trouble]:
        """What went wrong, oldest first: ever, or on the way from the step before to this one."""
        rows = self._db.execute(
            """SELECT task, number, kind, why FROM troubles JOIN groups ON groups.id = grp
               WHERE ? IS NULL OR COALESCE(troubles.step, 0) = ? - 1 ORDER BY troubles.id""",
            (step, step),
        ).fetchall()
        return [Trouble(**row) for row in rows]

    def _one(self, question: str, *values: Any) -> Any:
        return self._db.execute(question, values).fetchone()[0]


def _slot(row: sqlite3.Row) -> Slot:
    slot = Slot(row["id"], row["grp"], row["task"], row["number"], row["attempt"], row["state"], row["oldest"])
    reward, resume = (json.loads(row[name]) if row[name] else None for name in ("reward", "resume"))
    return replace(slot, newest=row["newest"], reward=reward, trace=row["trace"], resume=resume, note=row["note"])
