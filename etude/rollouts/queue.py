"""The rollout queue: a durable table (SQLite) in which every rollout is a slot and every change is one transaction.

    queued -> starting -> running -> grading -> ready -> trained
       ^---------'----------'----------'   dead worker, expired lease, failed verifier: requeued, never a reward

The slots of one prompt form a group. A group whose rewards are all alike has no gradient: the trainer judges complete
groups when it takes a step, and those alike are consumed with the step without counting towards its size. A claim has
an attempt number that later reports must carry, so a duplicate report, or one of an expired lease, changes
nothing. The current time and policy step are arguments, so that a simulation can run years of operation in a second.
Workers claim and report, the trainer takes groups and marks them as trained, and `reconcile` requeues what was lost.

In a run, the run service is the only process that opens its queues for writing (`run_service.py`); the others reach it
through `QueueClient`. Requests may arrive twice or late there: a claim that is asked for again is the same claim, and a
worker's heartbeat requeues what that worker was given and does not know.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from etude.errors import EtudeError, InputError
from etude.rollouts.leases import LEASE_S, EvaluationLease
from etude.rollouts.queue_reader import AFTER_ANY, QueueReader
from etude.rollouts.queue_reader import IN_FLIGHT as IN_FLIGHT
from etude.rollouts.queue_records import HeldSlot, ReadyGroup, Slot, StepOffer
from etude.rollouts.queue_schema import (
    FIRST_VERSION,
    INDEXES,
    LAST_VERSION,
    OLDEST_STEP,
    OUTSTANDING,
    SCHEMA,
    SHARED_STEP,
    TRIGGERS,
    VERSION,
)
from etude.rollouts.settings import QueueSettings
from etude.rollouts.step_choice import GroupAge, choose_groups

SlotState = Literal["queued", "starting", "running", "grading", "ready"]
REQUEUE = "state='queued', worker='', lease=0"
REPLACED = "this trainer was replaced: another process trains the run"
CLAIMED_BY = "worker = ? AND worker != ''"  # as the index of workers needs it


class StaleClaim(EtudeError):
    """A report for a claim that has expired or been replaced; it must be discarded."""


class SupersededWorker(EtudeError):
    """Another process has taken the name of this worker, or the place of this trainer."""


class RolloutQueue(QueueReader):
    """The rollout queue of one run."""

    def __init__(self, path: Path | str, settings: QueueSettings) -> None:
        """Open a queue. What the trainer marks survives a power cut.

        Others may lose their last seconds in one: those rollouts run again.
        """
        self.settings, self._history = settings, {}
        self._db = sqlite3.connect(str(path), isolation_level=None, timeout=30.0)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        if not self._scalar("SELECT COUNT(*) FROM sqlite_master"):
            self._db.executescript(f"BEGIN IMMEDIATE; {SCHEMA} {TRIGGERS} PRAGMA user_version={VERSION}; COMMIT")
        self._check_version(path)
        self._db.executescript(INDEXES)
        self._check_group_size()

    def _check_group_size(self) -> None:
        """Refuse another group size than the recorded one; other settings may change during a run."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO plan VALUES ('group_size', ?)", (str(self.settings.group_size),))
            (size,) = db.execute("SELECT value FROM plan WHERE key = 'group_size'").fetchone()
        if int(size) != self.settings.group_size:
            raise InputError(f"this run has groups of {size}; group_size cannot become {self.settings.group_size}")

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """Apply changes together or not at all; a `durable` one is on disk afterwards, and all before it."""
        if durable:
            self._db.execute("PRAGMA synchronous=FULL")
        try:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        finally:
            if durable:
                self._db.execute("PRAGMA synchronous=NORMAL")

    # ------------------------------------------------------------------------------------------ adding groups

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
                    rows = [(found.lastrowid, number, expected) for number in range(size)]
                    db.executemany("INSERT INTO slots (grp, number, expected) VALUES (?, ?, ?)", rows)
        return added

    def set_served_step(self, step: int, newest: int | None = None) -> None:
        """Record that all samplers have the weights of this step: rollouts claimed from now on are not older.

        `newest` is the step of the newest weights that any of them has. While even these are too old to train on,
        because the store cannot be read say, no slot can be claimed.
        """
        with self._transaction() as db:
            for key, value in (("served", step), ("served_newest", newest)):
                if value is not None:
                    db.execute("INSERT OR REPLACE INTO plan VALUES (?, ?)", (key, str(value)))

    # ------------------------------------------------------------------------------------------ leases of samplers

    def set_lease(self, lease: EvaluationLease | None, now: float | None = None) -> None:
        """Lease samplers to an evaluation for `LEASE_S` from now, in place of any earlier lease; None: end it."""
        now = time.time() if now is None else now
        with self._transaction() as db:
            if lease is None:
                db.execute("DELETE FROM plan WHERE key = 'lease'")
            else:
                text = json.dumps(vars(replace(lease, expires=now + LEASE_S)))
                db.execute("INSERT OR REPLACE INTO plan VALUES ('lease', ?)", (text,))

    # ------------------------------------------------------------------------------------------ workers

    def enlist(self, worker: str, session: str) -> int:
        """Begin a session of a worker: requeue what an earlier process of its name held; return how many slots."""
        with self._transaction() as db:
            known = db.execute("SELECT session FROM workers WHERE name = ?", (worker,)).fetchone()
            if known is not None and known["session"] == session:
                return 0  # asked twice
            db.execute("INSERT OR REPLACE INTO workers VALUES (?, ?)", (worker, session))
            return db.execute(f"UPDATE slots SET {REQUEUE} WHERE {CLAIMED_BY} AND {IN_FLIGHT}", (worker,)).rowcount

    def dismiss(self, worker: str, session: str) -> int:
        """End a session of a worker: requeue what it holds; a claim of it that comes late is refused."""
        with self._transaction() as db:
            ended = "UPDATE workers SET session = '' WHERE name = ? AND session = ?"
            if not db.execute(ended, (worker, session)).rowcount:
                return 0
            return db.execute(f"UPDATE slots SET {REQUEUE} WHERE {CLAIMED_BY} AND {IN_FLIGHT}", (worker,)).rowcount

    def _check_session(self, worker: str, session: str) -> None:
        row = self._db.execute("SELECT session FROM workers WHERE name = ?", (worker,)).fetchone()
        if session and row is not None and row["session"] != session:
            now = "has ended" if not row["session"] else "was replaced: another process has its name"
            raise SupersededWorker(f"this session of {worker} {now}")

    def claim(self, worker: str, now: float) -> Slot | None:
        """Claim a queued slot until its lease expires; None if none is queued, or enough are in flight."""
        found = self.claim_many(worker, 1, now)
        return found[0] if found else None

    def claim_many(
        self, worker: str, count: int, now: float, *, session: str = "", request: int = 0, prefix: str = ""
    ) -> list[Slot]:
        """Claim at most `count` queued slots, of tasks with this prefix, until their leases expire.

        Slots of started groups come first; among new groups, those expected to take longest. A request of a session
        that was handled before returns the same slots again, as far as they are still claimed.
        """
        if session:
            self._check_session(worker, session)
            asked = self._db.execute(
                f"""SELECT id FROM slots INDEXED BY slots_by_worker
                    WHERE {CLAIMED_BY} AND session = ? AND request = ? AND {IN_FLIGHT} ORDER BY id""",
                (worker, session, request),
            ).fetchall()
            if asked:
                return [self.slot(row["id"]) for row in asked]
        if count < 1 or not self.claimable():
            return []  # without taking the lock
        with self._transaction() as db:
            among = "AND grp IN (SELECT id FROM groups WHERE task >= ? AND task < ?)" if prefix else ""
            rows = db.execute(
                f"""SELECT id FROM slots INDEXED BY slots_to_claim WHERE state = 'queued' AND fate = 'open' {among}
                    ORDER BY started DESC, attempt > 0 DESC, expected DESC, grp, number LIMIT ?""",
                (*((prefix, prefix + AFTER_ANY) if prefix else ()), min(count, self.claimable())),
            ).fetchall()
            for row in rows:
                db.execute(
                    """UPDATE slots SET state='starting', attempt=attempt+1, worker=?, session=?, request=?, lease=?,
                           note='', oldest=
                           CASE WHEN resume = '' THEN
                               COALESCE((SELECT CAST(value AS INTEGER) FROM plan WHERE key='served'), 0)
                           ELSE oldest END WHERE id=?""",
                    (worker, session, request, now + self.settings.lease_s, row["id"]),
                )
        return [self.slot(row["id"]) for row in rows]

    def heartbeat(self, slot: Slot, now: float, state: SlotState = "running") -> None:
        """Renew the lease of a slot; StaleClaim if the claim is no longer valid."""
        self._report(slot, "state=?, lease=?", (state, now + self.settings.lease_s))

    def renew(
        self, worker: str, held: Sequence[HeldSlot], now: float, *, session: str = "", answered: int = 0
    ) -> list[HeldSlot]:
        """Renew the leases of all slots that a worker holds; return those it has lost.

        Slots that it was given and does not hold are requeued: the response with them was lost. `answered` is the
        number of its last request that it has a response to; slots of later ones may still be on their way.
        """
        lost: list[HeldSlot] = []
        with self._transaction() as db:
            self._check_session(worker, session)
            for each in held:
                found = db.execute(
                    f"UPDATE slots SET state=?, lease=? WHERE id=? AND attempt=? AND {IN_FLIGHT}",
                    (each.state, now + self.settings.lease_s, each.id, each.attempt),
                )
                if not found.rowcount:
                    lost.append(each)
            if session:
                known = {(each.id, each.attempt) for each in held}
                rows = db.execute(
                    f"""SELECT id, attempt FROM slots INDEXED BY slots_by_worker
                        WHERE {CLAIMED_BY} AND {IN_FLIGHT} AND (session != ? OR request <= ?)""",
                    (worker, session, answered),
                ).fetchall()
                unknown = [(row["id"],) for row in rows if (row["id"], row["attempt"]) not in known]
                db.executemany(f"UPDATE slots SET {REQUEUE}, note='its claim did not arrive' WHERE id=?", unknown)
        return lost

    def extend_leases(self, now: float) -> None:
        """Let no claim expire because heartbeats could not arrive until now."""
        with self._transaction() as db:
            db.execute("UPDATE slots SET lease = MAX(lease, ?) WHERE lease > 0", (now + self.settings.lease_s,))

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
        try:
            self._report(
                slot,
                f"state='ready', reward=?, trace=?, {steps}, resume='', worker='', lease=0",
                (json.dumps({**reward, "versions": [oldest, newest]}), trace, oldest, newest, oldest, *(newest,) * 3),
            )
        except StaleClaim:
            same = "SELECT COUNT(*) FROM slots WHERE id=? AND attempt=? AND state='ready' AND trace=?"
            if not self._scalar(same, slot.id, slot.attempt, trace):  # else the same report arrives a second time
                raise

    def fail(self, slot: Slot, why: str, *, keep_resume: bool = True) -> None:
        """Requeue a slot after an infrastructure failure; after too many of them its group is dropped."""
        resume = "" if keep_resume else ", resume=''"
        self._report(slot, f"failures=failures+1, note=?, {REQUEUE}{resume}", (why,))
        self._drop_failed_groups()

    def release_slot(self, slot: Slot, why: str, *, keep_resume: bool = True) -> None:
        """Requeue a slot that its worker cannot run, or whose result cannot be used, without counting a failure."""
        resume = "" if keep_resume else ", resume=''"
        self._report(slot, f"note=?, {REQUEUE}{resume}", (why,))

    def release(self, worker: str = "") -> int:
        """Requeue the slots of a worker (or of all) that has ended, without counting a failure; return how many."""
        claimed = CLAIMED_BY if worker else "lease > 0 AND ? = ''"
        with self._transaction() as db:
            return db.execute(f"UPDATE slots SET {REQUEUE} WHERE {claimed} AND {IN_FLIGHT}", (worker,)).rowcount

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
                f"""UPDATE slots INDEXED BY slots_by_lease SET failures=failures+1, note='its lease expired', {REQUEUE}
                    WHERE lease > 0 AND lease < ? AND {IN_FLIGHT}""",
                (now,),
            ).rowcount
            stale = db.execute(
                """UPDATE slots INDEXED BY slots_by_age SET state='queued', reward=NULL, trace='', oldest=NULL,
                          newest=NULL, resume='', note='too stale to train on'
                   WHERE state='ready' AND fate='open' AND oldest < ?
                     AND (SELECT informative FROM groups WHERE id = grp) IS NOT 0""",
                (step - self.settings.max_staleness,),
            ).rowcount
            if stale:  # such a group is judged again when it is complete again
                db.execute(
                    """UPDATE groups SET informative=NULL WHERE step IS NULL AND dropped IS NULL AND informative = 1
                       AND EXISTS (SELECT 1 FROM slots WHERE grp = groups.id AND state = 'queued')"""
                )
        return {"lost": lost, "stale": stale, "dropped": self._drop_failed_groups()}

    def _drop_failed_groups(self) -> int:
        """Drop groups with a slot that failed too often: a group has one size, and a missing rollout is not a zero."""
        failed = "failures > 0 AND failures >= ? AND fate = 'open'"
        limit = self.settings.max_attempts
        if not self._scalar(f"SELECT COUNT(*) FROM slots INDEXED BY slots_by_failures WHERE {failed}", limit):
            return 0
        with self._transaction() as db:
            return db.execute(
                f"""UPDATE groups SET dropped = (
                       SELECT 'slot ' || number || ' failed ' || failures || ' times: ' || note
                       FROM slots WHERE grp = groups.id AND failures >= ? LIMIT 1)
                    WHERE id IN (SELECT grp FROM slots INDEXED BY slots_by_failures WHERE {failed})""",
                (limit, limit),
            ).rowcount

    # ------------------------------------------------------------------------------------------ the trainer

    def trainer_session(self) -> int:
        """Return the number of the trainer's present session; 0 before the first."""
        return self._trainer()[0]

    def begin_session(self, session: int) -> None:
        """Begin a session of the trainer: from now on requests of those with lower numbers are refused."""
        with self._transaction(durable=True) as db:
            present, *_ = self._trainer()
            if session < present:
                raise SupersededWorker(REPLACED)
            if session > present:  # else asked twice
                db.execute("INSERT OR REPLACE INTO plan VALUES ('trainer', ?)", (json.dumps((session, 0, None)),))

    def apply_once(self, session: int, request: int, apply: Callable[[], Any]) -> Any:
        """Apply a numbered request of the trainer's session; return its result, also when it is asked again.

        A request may arrive long after its sender has died, or has sent others: it is refused. A late `rewind` would
        have groups trained twice, a late `mark_trained` would lose them.
        """
        present, last, result = self._trainer()
        if session != present:
            raise SupersededWorker(REPLACED)
        if request < last:
            raise SupersededWorker(f"request {request} of the trainer comes late: {last} was handled before")
        if request > last:
            result = apply()
            with self._transaction() as db:
                db.execute("UPDATE plan SET value=? WHERE key='trainer'", (json.dumps((session, request, result)),))
        return result

    def _trainer(self) -> tuple[int, int, Any]:
        """Return the trainer's session, its last request, and the result of that."""
        row = self._db.execute("SELECT value FROM plan WHERE key='trainer'").fetchone()
        return tuple(json.loads(row["value"])) if row is not None else (0, 0, None)

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
        offer = self.offer(step)
        if offer.unjudged:
            self.judge((group.id, is_informative(group)) for group in offer.unjudged)
            offer = self.offer(step)
        return None if offer.groups is None else list(offer.groups)

    def offer(self, step: int) -> StepOffer:
        """Return complete groups that must be judged before the step after `step`; if there are none, its groups."""
        trainable = self._trainable(step)
        if unjudged := [row["grp"] for row in trainable if not row["missing"] and row["informative"] is None]:
            return StepOffer(unjudged=tuple(self.groups(unjudged)))
        chosen, awaited = self._choose(step, trainable)
        limit = self.settings.groups_limit
        alike = self._db.execute(
            """SELECT id FROM groups INDEXED BY groups_open
               WHERE step IS NULL AND dropped IS NULL AND informative = 0 ORDER BY id LIMIT ?""",
            (limit - len(chosen),),
        ).fetchall()
        enough = len(chosen) == self.settings.groups_per_step or len(chosen) + len(alike) >= limit
        if enough and not awaited:
            return StepOffer(groups=tuple(self.groups([*chosen, *(row["id"] for row in alike)])))
        return StepOffer()

    def awaited_tasks(self, step: int) -> list[str]:
        """Return the tasks of slow groups that the next step waits for although enough others are ready."""
        chosen, awaited = self._choose(step, self._trainable(step))
        return awaited if len(chosen) == self.settings.groups_per_step else []

    def judge(self, verdicts: Iterable[tuple[int, bool]]) -> None:
        """Record for complete groups, by id, whether their rewards differ; others have become stale meanwhile."""
        rows = [(informative, id) for id, informative in verdicts]
        with self._transaction(durable=True) as db:
            db.executemany(
                """UPDATE groups SET informative=? WHERE id=? AND step IS NULL
                   AND NOT EXISTS (SELECT 1 FROM slots WHERE grp = groups.id AND state != 'ready')""",
                rows,
            )

    def _choose(self, step: int, trainable: Sequence[sqlite3.Row]) -> tuple[list[int], list[str]]:
        """Return the stalest ready groups for one step, and the tasks of staler unfinished groups to wait for."""
        chosen, awaited = choose_groups([GroupAge(**row) for row in trainable], step, self.settings)
        return [group.grp for group in chosen], [group.task for group in awaited]

    def _trainable(self, step: int) -> list[sqlite3.Row]:
        """Return groups that are neither too stale nor alike, with their unfinished slots and oldest step (age)."""
        return self._db.execute(
            f"""SELECT grp, task, informative, SUM(state != 'ready') AS missing,
                      MAX((state != 'ready') * attempt) AS tries,
                      MIN(CASE WHEN state != 'queued' OR resume != '' THEN oldest END) AS age
               FROM groups INDEXED BY groups_open CROSS JOIN slots ON grp = groups.id WHERE {OUTSTANDING}
               GROUP BY grp HAVING age >= ? ORDER BY age, grp""",
            (step - self.settings.max_staleness,),
        ).fetchall()

    def mark_trained(self, groups: Iterable[ReadyGroup], step: int) -> None:
        """Record durably that these groups were consumed by this step, with these rewards."""
        with self._transaction(durable=True) as db:
            for group in groups:
                found = db.execute(
                    "UPDATE groups SET step=? WHERE id=? AND (step IS NULL OR step = ?) AND dropped IS NULL",
                    (step, group.id, step),
                )
                if not found.rowcount:
                    raise EtudeError(f"group {group.id} of {group.task} was trained or dropped before")
                rewards = [(json.dumps(slot.record), slot.id) for slot in group.slots]
                db.executemany("UPDATE slots SET reward=? WHERE id=?", rewards)

    def record_version(self, number: int, step: int) -> None:
        """Record durably the policy step of a weight version. An unknown one counts as the step of the same number."""
        with self._transaction(durable=True) as db:
            db.execute("INSERT OR REPLACE INTO versions VALUES (?, ?)", (number, step))

    def rewind(self, step: int) -> int:
        """Go back to the checkpoint after `step`: groups that were trained later are ready again, not resampled.

        Returns how many groups are ready again.
        """
        with self._transaction(durable=True) as db:
            newest, later = "(SELECT MAX(number) FROM versions)", "(SELECT MAX(step) FROM versions) > ?"
            db.execute(f"INSERT INTO rewinds SELECT {newest}, ? WHERE {later}", (step, step))
            back = db.execute("UPDATE groups SET step=NULL WHERE step > ?", (step,)).rowcount
            # Rollouts in progress have only a lower bound yet.
            for name in ("oldest", "newest"):
                later = f"{name} > ? AND fate = 'open'"
                db.execute(f"UPDATE slots INDEXED BY slots_open SET {name} = 2*? - {name} WHERE {later}", (step, step))
            db.execute(
                f"""UPDATE slots INDEXED BY slots_open
                    SET oldest = COALESCE({OLDEST_STEP % (FIRST_VERSION, LAST_VERSION)}, oldest),
                        newest = COALESCE({OLDEST_STEP % (LAST_VERSION, LAST_VERSION)}, newest)
                    WHERE reward IS NOT NULL AND fate = 'open'"""
            )
            served = "UPDATE plan SET value = 2 * ? - value WHERE key LIKE 'served%' AND CAST(value AS INTEGER) > ?"
            db.execute(served, (step, step))
            return back

    def requeue_lost(self, prefix: str = "") -> int:
        """Requeue finished rollouts of tasks with this prefix that have a token of a lost version; return how many."""
        if not self.lineage():
            return 0
        with self._transaction() as db:
            return db.execute(
                f"""UPDATE slots SET state='queued', reward=NULL, trace='', oldest=NULL, newest=NULL, resume='',
                           note='sampled by weights that were lost'
                    WHERE grp IN (SELECT id FROM groups WHERE task >= ? AND task < ?) AND state='ready'
                      AND EXISTS (SELECT 1 FROM versions v WHERE v.step > {SHARED_STEP}
                                  AND v.number BETWEEN {FIRST_VERSION} AND {LAST_VERSION})""",
                (prefix, prefix + AFTER_ANY),
            ).rowcount

    def discard(self, group: int, reason: str) -> None:
        """Drop a group and free its name, so that its prompt can be used again; running claims become invalid."""
        with self._transaction() as db:
            name = "task='lost-' || id || '/' || task"
            db.execute(f"UPDATE groups SET dropped=?, {name} WHERE id=? AND dropped IS NOT ?", (reason, group, reason))
            db.execute(f"UPDATE slots SET {REQUEUE} WHERE grp=? AND {IN_FLIGHT}", (group,))
