"""The rollout queue: a durable table (SQLite) in which every rollout is a slot and every change is one transaction.

    queued -> starting -> running -> grading -> ready -> trained
       ^---------'----------'----------'   dead worker, expired lease, failed verifier: requeued, never a reward

The slots of one prompt form a group. A group whose rewards are all alike has no gradient: the trainer judges complete
groups when it takes a step, and those alike are consumed with the step without counting towards its size. A claim has
an attempt number that later reports must carry, so a duplicate report, or one of an expired lease, changes
nothing. The current time and policy step are arguments, so that a simulation can run years of operation in a second.
Workers claim and report, the trainer takes groups and marks them as trained, and `reconcile` requeues what was lost.
"""

import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from etude.errors import EtudeError, InputError
from etude.rollouts.queue_records import GroupEffort as GroupEffort
from etude.rollouts.queue_records import GroupProgress as GroupProgress
from etude.rollouts.queue_records import GroupUse as GroupUse
from etude.rollouts.queue_records import Incident as Incident
from etude.rollouts.queue_records import ReadyGroup as ReadyGroup
from etude.rollouts.queue_records import Slot as Slot
from etude.rollouts.queue_schema import FIRST_VERSION, LAST_VERSION, OLDEST_STEP, SCHEMA, SHARED_STEP
from etude.rollouts.settings import QueueSettings
from etude.rollouts.step_choice import GroupAge, choose_groups

SlotState = Literal["queued", "starting", "running", "grading", "ready"]
IN_FLIGHT = "state IN ('starting', 'running', 'grading')"
# Groups that may still be trained on.
OUTSTANDING = "step IS NULL AND dropped IS NULL AND informative IS NOT 0"
SHARE_STEPS = 8  # policy steps' worth of judged groups that the informative share is measured on


class StaleClaim(EtudeError):
    """A report for a claim that has expired or been replaced; it must be discarded."""


class RolloutQueue:
    """The rollout queue of one run."""

    def __init__(self, path: Path | str, settings: QueueSettings, *, durable: bool = False) -> None:
        """Open a queue. The trainer's is `durable`: what it marks as trained survives a power cut.

        Other processes may lose their last seconds in one: those rollouts run again.
        """
        self.settings = settings
        self._efforts: dict[int, tuple[tuple[int, int], tuple[Any, ...]]] = {}
        self._db = sqlite3.connect(str(path), isolation_level=None, timeout=30.0)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self._db.executescript(SCHEMA)
        if "informative" not in [row["name"] for row in self._db.execute("PRAGMA table_info(groups)")]:
            raise InputError(f"{path} was made by an older version of Etude; go on with that one, or start another run")
        self._check_group_size()

    @classmethod
    def open_read_only(cls, path: Path | str) -> "RolloutQueue":
        """Open an existing queue for reading, without disturbing the processes that write to it."""
        queue = cls.__new__(cls)
        try:
            queue._db = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
            queue._db.row_factory = sqlite3.Row
            size = int(queue._scalar("SELECT value FROM plan WHERE key = 'group_size'"))
            queue.settings, queue._efforts = QueueSettings(group_size=size), {}
        except (sqlite3.Error, TypeError) as error:
            raise InputError(f"{path} is not a rollout queue, or not yet: {error}") from error
        return queue

    def close(self) -> None:
        self._db.close()

    def _check_group_size(self) -> None:
        """Refuse another group size than the recorded one; other settings may change during a run."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO plan VALUES ('group_size', ?)", (str(self.settings.group_size),))
            (size,) = db.execute("SELECT value FROM plan WHERE key = 'group_size'").fetchone()
        if int(size) != self.settings.group_size:
            raise InputError(f"this run has groups of {size}; group_size cannot become {self.settings.group_size}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # ------------------------------------------------------------------------------------------ adding groups

    def outstanding(self) -> int:
        """Return how many groups were started and neither consumed, dropped, nor found to be alike."""
        return int(self._scalar(f"SELECT COUNT(*) FROM groups WHERE {OUTSTANDING}"))

    def alike_groups(self) -> int:
        """Return how many groups are complete and have rewards without a difference."""
        return int(
            self._scalar("SELECT COUNT(*) FROM groups WHERE step IS NULL AND dropped IS NULL AND informative = 0")
        )

    def informative_share(self) -> float:
        """Return the share of informative groups among those judged last; 1 before any is judged.

        One step of informative groups is counted in addition, so that a few groups do not make an estimate of 0.
        """
        size = self.settings.groups_per_step
        judged, informative = self._db.execute(
            """SELECT COUNT(*), COALESCE(SUM(informative), 0) FROM (
                   SELECT informative FROM groups WHERE informative IS NOT NULL ORDER BY id DESC LIMIT ?)""",
            (SHARE_STEPS * size,),
        ).fetchone()
        return float((informative + size) / (judged + size))

    def groups_to_start(self, *, fresh: bool = True, steps_left: int | None = None) -> int:
        """Return how many new groups to start, with at most `steps_left` policy steps to come.

        So many that the expected number of informative ones fills the next step and the prefetched ones. If all of them
        turn out to be informative, none may become too stale: never more than those of 1 + max_staleness steps.
        While the samplers do not have the weights of the last step yet (not `fresh`), both limits are lower by the
        groups of one step: groups started then would be one step staler, and others are in flight meanwhile.
        """
        size, late = self.settings.groups_per_step, 0 if fresh else self.settings.groups_per_step
        useful = self.settings.max_outstanding_groups - late
        if steps_left is not None:
            useful = min(useful, steps_left * size)
        ready = int(self._scalar(f"SELECT COUNT(*) FROM groups WHERE {OUTSTANDING} AND informative"))
        expected = ready + math.ceil(max(0, useful - ready) / self.informative_share())
        return max(0, min(expected, (1 + self.settings.max_staleness) * size - late) - self.outstanding())

    def add(self, tasks: Iterable[tuple[str, float]], size: int | None = None, *, max_uses: int = 1) -> int:
        """Start groups for prompts, given with their expected seconds; skip prompts that were used `max_uses` times.

        `size` is the number of rollouts of each, where it is another than that of training.
        """
        added, size = 0, size or self.settings.group_size
        with self._transaction() as db:
            for task, expected in tasks:
                (uses,) = db.execute("SELECT COUNT(*) FROM groups WHERE task = ?", (task,)).fetchone()
                if uses < max_uses:
                    row = (task, uses + 1, expected)
                    found = db.execute("INSERT INTO groups (task, use, expected) VALUES (?, ?, ?)", row)
                    added += 1
                    rows = [(found.lastrowid, number) for number in range(size)]
                    db.executemany("INSERT INTO slots (grp, number) VALUES (?, ?)", rows)
        return added

    def set_served_step(self, step: int) -> None:
        """Record that all samplers have the weights of this step: rollouts claimed from now on are not older."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO plan VALUES ('served', ?)", (str(step),))

    def _in_flight_full(self) -> bool:
        return bool(self._scalar(f"SELECT COUNT(*) FROM slots WHERE {IN_FLIGHT}") >= self.settings.in_flight)

    # ------------------------------------------------------------------------------------------ workers

    def claim(self, worker: str, now: float) -> Slot | None:
        """Claim a queued slot until its lease expires; None if none is queued, or enough are in flight.

        Slots of started groups come first; among new groups, the one expected to take longest.
        """
        if self._in_flight_full() or not self._scalar("SELECT EXISTS (SELECT 1 FROM slots WHERE state = 'queued')"):
            return None  # without taking the lock: idle workers poll many times a second
        with self._transaction() as db:
            if self._in_flight_full():
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
                (worker, now + self.settings.lease_s, row["id"]),
            )
        return self.slot(row["id"])

    def heartbeat(self, slot: Slot, now: float, state: SlotState = "running") -> None:
        """Renew the lease of a slot; StaleClaim if the claim is no longer valid."""
        self._report(slot, "state=?, lease=?", (state, now + self.settings.lease_s))

    def heartbeat_all(self, slots: Iterable[tuple[Slot, SlotState]], now: float) -> list[Slot]:
        """Renew the leases of all slots of a worker in one transaction; return those it has lost."""
        lost = []
        with self._transaction() as db:
            for slot, state in slots:
                found = db.execute(
                    f"UPDATE slots SET state=?, lease=? WHERE id=? AND attempt=? AND {IN_FLIGHT}",
                    (state, now + self.settings.lease_s, slot.id, slot.attempt),
                )
                if not found.rowcount:
                    lost.append(slot)
        return lost

    def add_note(self, slot: Slot, note: str) -> None:
        """Record a note about how the rollout was sampled."""
        self._report(slot, "note=?", (note,))

    def checkpoint(self, slot: Slot, resume: dict[str, Any], now: float) -> None:
        """Record a rollout checkpoint, from which another worker can continue if this one dies."""
        self._report(slot, "resume=?, lease=?", (json.dumps(resume), now + self.settings.lease_s))

    def finish(self, slot: Slot, reward: dict[str, Any], trace: str, versions: tuple[int, int]) -> None:
        """Store a scored rollout with its oldest and newest weight version. Only the first report of a claim counts."""
        # A rollout without a sampled token counts as the newest version: otherwise it would be resampled for ever.
        oldest, newest = versions if versions[0] >= 0 else (max(0, self.newest_version()),) * 2
        steps = ", ".join(f"{name}=COALESCE({OLDEST_STEP % ('?', '?')}, ?)" for name in ("oldest", "newest"))
        self._report(
            slot,
            f"state='ready', reward=?, trace=?, {steps}, resume='', worker='', lease=0",
            (json.dumps({**reward, "versions": [oldest, newest]}), trace, oldest, newest, oldest, *(newest,) * 3),
        )

    def fail(self, slot: Slot, why: str, *, keep_resume: bool = True) -> None:
        """Requeue a slot after an infrastructure failure; after too many of them its group is dropped."""
        resume = "" if keep_resume else ", resume=''"
        self._report(slot, f"state='queued', failures=failures+1, note=?, worker='', lease=0{resume}", (why,))
        self._drop_failed_groups()

    def release(self, worker: str = "") -> int:
        """Requeue the slots of a worker (or of all) that has ended, without counting a failure; return how many."""
        with self._transaction() as db:
            return db.execute(
                f"UPDATE slots SET state='queued', worker='', lease=0 WHERE {IN_FLIGHT} AND ? IN ('', worker)",
                (worker,),
            ).rowcount

    def _report(self, slot: Slot, change: str, values: Sequence[Any]) -> None:
        with self._transaction() as db:
            found = db.execute(
                f"UPDATE slots SET {change} WHERE id=? AND attempt=? AND {IN_FLIGHT}",
                (*values, slot.id, slot.attempt),
            )
            if not found.rowcount:
                raise StaleClaim(
                    f"slot {slot.id} of {slot.task}: the claim of attempt {slot.attempt} is no longer valid"
                )

    # ------------------------------------------------------------------------------------------ reconciling

    def reconcile(self, now: float, step: int) -> dict[str, int]:
        """Requeue slots whose lease expired, and rollouts too stale for the trainer at `step`; return the counts.

        Groups that are alike have no gradient: they are consumed at any age.
        """
        with self._transaction() as db:
            lost = db.execute(
                f"""UPDATE slots SET state='queued', failures=failures+1, worker='', note='its lease expired'
                    WHERE {IN_FLIGHT} AND lease < ?""",
                (now,),
            ).rowcount
            stale = db.execute(
                """UPDATE slots SET state='queued', reward=NULL, trace='', oldest=NULL, newest=NULL, resume='',
                          note='too stale to train on'
                   WHERE state='ready' AND oldest < ? AND grp IN (
                       SELECT id FROM groups WHERE step IS NULL AND informative IS NOT 0)""",
                (step - self.settings.max_staleness,),
            ).rowcount
            if stale:  # such a group is judged again when it is complete again
                db.execute(
                    """UPDATE groups SET informative=NULL WHERE step IS NULL AND informative = 1
                       AND id IN (SELECT grp FROM slots WHERE state = 'queued')"""
                )
        return {"lost": lost, "stale": stale, "dropped": self._drop_failed_groups()}

    def _drop_failed_groups(self) -> int:
        """Drop groups with a slot that failed too often: a group has one size, and a missing rollout is not a zero."""
        with self._transaction() as db:
            return db.execute(
                """UPDATE groups SET dropped = (
                       SELECT 'slot ' || number || ' failed ' || failures || ' times: ' || note
                       FROM slots WHERE grp = groups.id AND failures >= ? LIMIT 1)
                   WHERE dropped IS NULL AND step IS NULL
                     AND EXISTS (SELECT 1 FROM slots WHERE grp = groups.id AND failures >= ?)""",
                (self.settings.max_attempts, self.settings.max_attempts),
            ).rowcount

    # ------------------------------------------------------------------------------------------ the trainer

    def ready(self, step: int) -> list[ReadyGroup]:
        """Return the groups that are complete and not too stale for the trainer at `step`, the stalest first."""
        return self.groups(row["grp"] for row in self._trainable(step) if not row["missing"])

    def take(
        self, step: int, is_informative: Callable[[ReadyGroup], bool] = lambda group: True
    ) -> list[ReadyGroup] | None:
        """Return the groups of the step after `step`; None while there are not enough, or slow ones are awaited.

        Complete groups are judged first, once each. The step has `groups_per_step` informative groups, and after them
        the groups that are alike so far; at `max_groups_per_step` of both kinds it has the informative ones there are.

        Every step makes unfinished groups one step staler. Instead of discarding those that become too stale and
        starting them again, which for long tasks would never end, the trainer waits for them.
        """
        unjudged = [row["grp"] for row in self._trainable(step) if not row["missing"] and row["informative"] is None]
        if verdicts := [(is_informative(group), group.id) for group in self.groups(unjudged)]:
            with self._transaction() as db:
                db.executemany("UPDATE groups SET informative=? WHERE id=?", verdicts)
        chosen, awaited = self._choose(step)
        limit = self.settings.groups_limit
        alike = self._db.execute(
            "SELECT id FROM groups WHERE step IS NULL AND dropped IS NULL AND informative = 0 ORDER BY id LIMIT ?",
            (limit - len(chosen),),
        ).fetchall()
        enough = len(chosen) == self.settings.groups_per_step or len(chosen) + len(alike) >= limit
        return self.groups([*chosen, *(row["id"] for row in alike)]) if enough and not awaited else None

    def awaited_tasks(self, step: int) -> list[str]:
        """Return the tasks of slow groups that the next step waits for although enough others are ready."""
        chosen, awaited = self._choose(step)
        return awaited if len(chosen) == self.settings.groups_per_step else []

    def _choose(self, step: int) -> tuple[list[int], list[str]]:
        """Return the stalest ready groups for one step, and the tasks of staler unfinished groups to wait for."""
        chosen, awaited = choose_groups([GroupAge(**row) for row in self._trainable(step)], step, self.settings)
        return [group.grp for group in chosen], [group.task for group in awaited]

    def _trainable(self, step: int) -> list[sqlite3.Row]:
        """Return groups that are neither too stale nor alike, with their unfinished slots and oldest step (age)."""
        return self._db.execute(
            f"""SELECT grp, task, informative, SUM(state != 'ready') AS missing,
                      MAX((state != 'ready') * attempt) AS tries,
                      MIN(CASE WHEN state != 'queued' OR resume != '' THEN oldest END) AS age
               FROM slots JOIN groups ON groups.id = grp WHERE {OUTSTANDING}
               GROUP BY grp HAVING age >= ? ORDER BY age, grp""",
            (step - self.settings.max_staleness,),
        ).fetchall()

    def mark_trained(self, groups: Iterable[ReadyGroup], step: int) -> None:
        """Record that these groups were consumed by this step, with these rewards."""
        with self._transaction() as db:
            for group in groups:
                found = db.execute(
                    "UPDATE groups SET step=? WHERE id=? AND step IS NULL AND dropped IS NULL", (step, group.id)
                )
                if not found.rowcount:
                    raise EtudeError(f"group {group.id} of {group.task} was trained or dropped before")
                rewards = [(json.dumps(slot.record), slot.id) for slot in group.slots]
                db.executemany("UPDATE slots SET reward=? WHERE id=?", rewards)

    def record_version(self, number: int, step: int) -> None:
        """Record the policy step of a weight version. An unknown version counts as the step of the same number."""
        with self._transaction() as db:
            db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (number, step))

    def step_of(self, number: int) -> int:
        """Return the policy step that a weight version counts as."""
        return int(self._scalar(f"SELECT COALESCE({OLDEST_STEP % ('?', '?')}, ?)", number, number, number))

    def last_heartbeat(self) -> float:
        """Return the latest lease end of all slots in flight: it grows while any worker is alive."""
        return float(self._scalar(f"SELECT COALESCE(MAX(lease), 0) FROM slots WHERE {IN_FLIGHT}"))

    def newest_version(self) -> int:
        """Return the newest weight version, whether its upload has finished or not; -1 before the first."""
        return int(self._scalar("SELECT COALESCE(MAX(number), -1) FROM versions"))

    def rewind(self, step: int) -> int:
        """Go back to the checkpoint after `step`: groups that were trained later are ready again, not resampled.

        Returns how many groups are ready again.
        """
        with self._transaction() as db:
            db.execute("INSERT INTO rewinds SELECT MAX(number), ? FROM versions HAVING MAX(step) > ?", (step, step))
            back = db.execute("UPDATE groups SET step=NULL WHERE step > ?", (step,)).rowcount
            # Rollouts in progress have only a lower bound yet, and those of older Etudes no versions.
            for name in ("oldest", "newest"):
                db.execute(f"UPDATE slots SET {name} = 2 * ? - {name} WHERE {name} > ?", (step, step))
            db.execute(
                f"""UPDATE slots SET oldest = COALESCE({OLDEST_STEP % (FIRST_VERSION, LAST_VERSION)}, oldest),
                                     newest = COALESCE({OLDEST_STEP % (LAST_VERSION, LAST_VERSION)}, newest)
                    WHERE reward IS NOT NULL AND grp IN (SELECT id FROM groups WHERE step IS NULL)"""
            )
            served = "UPDATE plan SET value = 2 * ? - value WHERE key='served' AND CAST(value AS INTEGER) > ?"
            db.execute(served, (step, step))
            return back

    def lineage(self) -> int:
        """Return how often the trainer has gone back to a checkpoint."""
        return int(self._scalar("SELECT COUNT(*) FROM rewinds"))

    def requeue_lost(self) -> int:
        """Requeue finished rollouts with a token of a lost version; return how many."""
        if not self.lineage():
            return 0
        with self._transaction() as db:
            return db.execute(
                f"""UPDATE slots SET state='queued', reward=NULL, trace='', oldest=NULL, newest=NULL, resume='',
                           note='sampled by weights that were lost'
                    WHERE state='ready' AND EXISTS (SELECT 1 FROM versions v WHERE v.step > {SHARED_STEP}
                                                    AND v.number BETWEEN {FIRST_VERSION} AND {LAST_VERSION})"""
            ).rowcount

    def discard(self, group: int, reason: str) -> None:
        """Drop a group and free its name, so that its prompt can be used again; running claims become invalid."""
        with self._transaction() as db:
            db.execute("UPDATE groups SET dropped=?, task='lost-' || id || '/' || task WHERE id=?", (reason, group))
            db.execute(f"UPDATE slots SET state='queued', worker='', lease=0 WHERE grp=? AND {IN_FLIGHT}", (group,))

    # ------------------------------------------------------------------------------------------ reading

    def slot(self, id: int) -> Slot:
        row = self._db.execute(
            "SELECT slots.*, task FROM slots JOIN groups ON groups.id = grp WHERE slots.id = ?", (id,)
        ).fetchone()
        return _slot(row)

    def group(self, id: int) -> ReadyGroup:
        """Return all slots of a group, whatever their state."""
        rows = self._db.execute(
            "SELECT slots.*, task FROM slots JOIN groups ON groups.id = grp WHERE grp = ? ORDER BY number", (id,)
        ).fetchall()
        return ReadyGroup(id, rows[0]["task"], tuple(_slot(row) for row in rows))

    def groups(self, ids: Iterable[int]) -> list[ReadyGroup]:
        return [self.group(id) for id in ids]

    def counts(self) -> dict[str, int]:
        """Return the number of slots by state; those of trained and dropped groups count as such."""
        rows = self._db.execute(
            """SELECT CASE WHEN dropped IS NOT NULL THEN 'dropped' WHEN step IS NOT NULL THEN 'trained' ELSE state END
                      AS name, COUNT(*) AS n FROM slots JOIN groups ON groups.id = grp GROUP BY name"""
        ).fetchall()
        return {row["name"]: row["n"] for row in rows}

    def rollout_checkpoints(self) -> list[dict[str, Any]]:
        """Return the checkpoints of rollouts whose group was not dropped."""
        rows = self._db.execute(
            "SELECT resume FROM slots JOIN groups ON groups.id = grp WHERE resume != '' AND dropped IS NULL"
        ).fetchall()
        return [json.loads(row["resume"]) for row in rows]

    def waiting_for(self, now: float) -> str:
        """Describe what a waiting trainer waits for."""
        row = self._db.execute(
            f"""SELECT slots.*, task FROM slots JOIN groups ON groups.id = grp
                WHERE {IN_FLIGHT} ORDER BY lease LIMIT 1"""
        ).fetchone()
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self.counts().items())) or "no slots"
        if row is None:
            return counts
        silent = f"slot {row['id']} of {row['task']}, {row['state']} at {row['worker']}"
        return f"{counts}; longest without a heartbeat: {silent}, its lease expires in {row['lease'] - now:.0f} s"

    def last_step(self) -> int:
        """Return the newest step that trained a group; 0 before the first."""
        return int(self._scalar("SELECT COALESCE(MAX(step), 0) FROM groups"))

    def trained(self) -> list[tuple[str, int]]:
        """Return every prompt that was trained on, with its step."""
        rows = self._db.execute("SELECT task, step FROM groups WHERE step IS NOT NULL ORDER BY step, id").fetchall()
        return [(row["task"], row["step"]) for row in rows]

    def dropped(self) -> dict[str, int]:
        """Return the prompts that were dropped, with the number of failures of their worst slot."""
        rows = self._db.execute(
            """SELECT task, MAX(failures) AS failures FROM slots JOIN groups ON groups.id = grp
               WHERE dropped IS NOT NULL GROUP BY task"""
        ).fetchall()
        return {row["task"]: row["failures"] for row in rows}

    def tasks(self) -> list[str]:
        """Return the prompts that were used, in the order they were started."""
        return [row["task"] for row in self._db.execute("SELECT task FROM groups ORDER BY id")]

    def progress(self, prefix: str = "") -> list[GroupProgress]:
        """Return the progress of every group whose task has this prefix, in the order they were started."""
        rows = self._db.execute(
            """SELECT groups.id AS id, task, step, COALESCE(dropped, '') AS dropped, COUNT(*) AS size,
                      SUM(state = 'ready') AS ready, SUM(failures) AS failures
               FROM groups JOIN slots ON grp = groups.id WHERE substr(task, 1, ?) = ?
               GROUP BY groups.id ORDER BY groups.id""",
            (len(prefix), prefix),
        ).fetchall()
        return [GroupProgress(**row) for row in rows]

    def uses(self) -> list[GroupUse]:
        """Return every use of a prompt, in the order the groups were started."""
        rows = self._db.execute("SELECT task, step, dropped IS NOT NULL AS dropped FROM groups ORDER BY id").fetchall()
        return [GroupUse(row["task"], row["step"], bool(row["dropped"])) for row in rows]

    def efforts(self) -> list[GroupEffort]:
        """Return the mean effort of each group's finished rollouts, in the order the groups were started.

        Reading rewards takes long in a long run: only those of groups that have changed since the last call are read.
        """
        rows = self._db.execute(
            """SELECT grp, task, step, COUNT(*) AS rollouts, SUM(attempt) AS attempts
               FROM slots JOIN groups ON groups.id = grp WHERE state = 'ready' GROUP BY grp ORDER BY grp"""
        ).fetchall()
        for row in rows:
            known = (row["rollouts"], row["attempts"])
            if self._efforts.get(row["grp"], ((0, 0), ()))[0] != known:
                self._efforts[row["grp"]] = known, self._effort(row["grp"])
        return [GroupEffort(row["task"], row["step"], row["rollouts"], *self._efforts[row["grp"]][1]) for row in rows]

    def _effort(self, group: int) -> tuple[Any, ...]:
        """Return mean turns, thinking and solved of a group's finished rollouts, and the seconds of the slowest."""
        return tuple(
            self._db.execute(
                """SELECT AVG(json_extract(reward, '$.cost.turns')), AVG(json_extract(reward, '$.cost.thinking')),
                          AVG(json_extract(reward, '$.solved')),
                          MAX((SELECT SUM(value) FROM json_each(reward, '$.seconds')))
                   FROM slots WHERE state = 'ready' AND grp = ?""",
                (group,),
            ).fetchone()
        )

    def trained_rewards(self, step: int, limit: int) -> list[dict[str, Any]]:
        """Return the rewards of the last `limit` rollouts trained on up to a step, oldest first."""
        rows = self._db.execute(
            """SELECT reward FROM slots JOIN groups ON groups.id = grp WHERE step <= ? AND reward IS NOT NULL
               ORDER BY step DESC, grp DESC, number DESC LIMIT ?""",
            (step, limit),
        ).fetchall()
        return [json.loads(row["reward"]) for row in reversed(rows)]

    def incidents(self, step: int | None = None) -> list[Incident]:
        """Return incidents, oldest first: all of them, or those between the previous step and this one."""
        rows = self._db.execute(
            """SELECT task, number, kind, why FROM troubles JOIN groups ON groups.id = grp
               WHERE ? IS NULL OR COALESCE(troubles.step, 0) = ? - 1 ORDER BY troubles.id""",
            (step, step),
        ).fetchall()
        return [Incident(**row) for row in rows]

    def _scalar(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()[0]


def _slot(row: sqlite3.Row) -> Slot:
    slot = Slot(row["id"], row["grp"], row["task"], row["number"], row["attempt"], row["state"], row["oldest"])
    reward, resume = (json.loads(row[name]) if row[name] else None for name in ("reward", "resume"))
    return replace(slot, newest_step=row["newest"], reward=reward, trace=row["trace"], resume=resume, note=row["note"])
