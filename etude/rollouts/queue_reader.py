"""Reading a rollout queue: slots, groups, their progress and history. `RolloutQueue` adds all that changes it.

What is asked while a run is active takes the same work however long the run has been: counts are kept by triggers, and
every other query walks an index over what is outstanding (`queue_schema.py`).
"""

import json
import math
import sqlite3
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from etude.errors import InputError
from etude.rollouts.leases import EvaluationLease
from etude.rollouts.queue_records import (
    GroupEffort,
    GroupProgress,
    GroupRecord,
    Incident,
    QueueState,
    ReadyGroup,
    Slot,
)
from etude.rollouts.queue_schema import LAST_STEP, OLDEST_STEP, SHARED_STEP, VERSION
from etude.rollouts.settings import QueueSettings

IN_FLIGHT_STATES = ("starting", "running", "grading")
IN_FLIGHT = f"state IN {IN_FLIGHT_STATES}"
SHARE_STEPS = 8  # policy steps' worth of judged groups that the informative share is measured on
AFTER_ANY = "\U0010ffff"  # sorts after every other text


class QueueReader:
    """The reading half of a rollout queue."""

    settings: QueueSettings
    _db: sqlite3.Connection
    _history: dict[int, GroupRecord]

    @classmethod
    def open_read_only(cls, path: Path | str) -> Self:
        """Open an existing queue for reading, without disturbing the process that writes to it."""
        queue = cls.__new__(cls)
        try:
            queue._db = sqlite3.connect(f"{Path(path).absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)
            queue._db.row_factory = sqlite3.Row
            size = int(queue._scalar("SELECT value FROM plan WHERE key = 'group_size'"))
            queue.settings, queue._history = QueueSettings(group_size=size), {}
        except (sqlite3.Error, TypeError) as error:
            raise InputError(f"{path} is not a rollout queue, or not yet: {error}") from error
        queue._check_version(path)
        return queue

    def _check_version(self, path: Path | str) -> None:
        if (version := int(self._scalar("PRAGMA user_version"))) != VERSION:
            age = "an older" if version < VERSION else "a newer"
            raise InputError(f"{path} was made by {age} version of Etude; use that one, or start another run")

    def close(self) -> None:
        self._db.close()

    # ------------------------------------------------------------------------------------------ figures

    def state(self, now: float | None = None) -> QueueState:
        """Return the figures that a running trainer and orchestrator look at."""
        return QueueState(
            self._db.total_changes,
            self.counts(),
            self.outstanding(),
            self.last_step(),
            self.last_heartbeat(),
            self.lineage(),
            self.waiting_for(now),
        )

    def counts(self) -> dict[str, int]:
        """Return the number of slots by state; those of trained and dropped groups count as such."""
        return {row["name"]: row["slots"] for row in self._db.execute("SELECT * FROM tally WHERE slots > 0")}

    def in_flight(self) -> int:
        """Return how many slots are claimed."""
        return sum(count for state, count in self.counts().items() if state in IN_FLIGHT_STATES)

    def claimable(self) -> int:
        """Return how many slots could be claimed now."""
        counts = self.counts()
        room = self.settings.in_flight - sum(counts.get(state, 0) for state in IN_FLIGHT_STATES)
        found = max(0, min(room, counts.get("queued", 0)))
        return 0 if found and self.samplers_too_old() else found

    def samplers_too_old(self) -> bool:
        """Return whether what the samplers can sample now would be too stale for the next step."""
        newest = self._db.execute(
            "SELECT CAST(value AS INTEGER) AS step FROM plan WHERE key='served_newest'"
        ).fetchone()
        return newest is not None and newest["step"] < self.last_step() - self.settings.max_staleness

    def outstanding(self) -> int:
        """Return how many groups were started and neither consumed, dropped, nor found to be alike."""
        return int(self._scalar("SELECT value FROM figures WHERE name = 'outstanding'"))

    def alike_groups(self) -> int:
        """Return how many groups are complete and have rewards without a difference, and are not consumed yet."""
        return int(
            self._scalar(
                """SELECT COUNT(*) FROM groups INDEXED BY groups_open
                   WHERE step IS NULL AND dropped IS NULL AND informative = 0"""
            )
        )

    def informative_share(self) -> float:
        """Return the share of informative groups among those judged last; 1 before any is judged.

        One step of informative groups is counted in addition, so that a few groups do not make an estimate of 0.
        """
        size = self.settings.groups_per_step
        judged, informative = self._db.execute(
            """SELECT COUNT(*), COALESCE(SUM(informative), 0) FROM (
                   SELECT informative FROM groups INDEXED BY groups_judged
                   WHERE informative IS NOT NULL ORDER BY id DESC LIMIT ?)""",
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
        ready = int(
            self._scalar(
                """SELECT COUNT(*) FROM groups INDEXED BY groups_open
                   WHERE step IS NULL AND dropped IS NULL AND informative = 1"""
            )
        )
        expected = ready + math.ceil(max(0, useful - ready) / self.informative_share())
        return max(0, min(expected, (1 + self.settings.max_staleness) * size - late) - self.outstanding())

    def last_heartbeat(self) -> float:
        """Return the latest lease end of all slots in flight: it grows while any worker is alive."""
        leases = "slots INDEXED BY slots_by_lease WHERE lease > 0"
        return float(self._scalar(f"SELECT COALESCE(MAX(lease), 0) FROM {leases}"))

    def waiting_for(self, now: float | None = None) -> str:
        """Describe what a waiting trainer waits for."""
        now = time.time() if now is None else now
        row = self._db.execute(
            f"""SELECT slots.*, task FROM slots INDEXED BY slots_by_lease JOIN groups ON groups.id = grp
                WHERE lease > 0 AND {IN_FLIGHT} ORDER BY lease LIMIT 1"""
        ).fetchone()
        counts = ", ".join(f"{n} {name}" for name, n in sorted(self.counts().items())) or "no slots"
        if self.samplers_too_old():
            counts = f"newer weights at the samplers; {counts}"
        if row is None:
            return counts
        silent = f"slot {row['id']} of {row['task']}, {row['state']} at {row['worker']}"
        return f"{counts}; longest without a heartbeat: {silent}, its lease expires in {row['lease'] - now:.0f} s"

    # ------------------------------------------------------------------------------------------ weights

    def last_step(self) -> int:
        """Return the newest step that trained a group; 0 before the first."""
        return int(self._scalar(f"SELECT COALESCE({LAST_STEP}, 0)"))

    def step_of(self, number: int) -> int:
        """Return the policy step that a weight version counts as."""
        return int(self._scalar(f"SELECT COALESCE({OLDEST_STEP % ('?', '?')}, ?)", number, number, number))

    def newest_version(self) -> int:
        """Return the newest weight version, whether its upload has finished or not; -1 before the first."""
        return int(self._scalar("SELECT COALESCE(MAX(number), -1) FROM versions"))

    def versions_of(self, step: int) -> list[int]:
        """Return the weight versions of a policy step that were not lost, oldest first; uploaded or not."""
        rows = self._db.execute(
            f"SELECT number FROM versions v WHERE v.step = ? AND {SHARED_STEP} = v.step ORDER BY number", (step,)
        ).fetchall()
        return [row["number"] for row in rows]

    def lease(self, now: float | None = None) -> EvaluationLease | None:
        """Return the lease of samplers to an evaluation; None if there is none, or it has expired."""
        row = self._db.execute("SELECT value FROM plan WHERE key = 'lease'").fetchone()
        if row is None:
            return None
        found = json.loads(row["value"])
        lease = EvaluationLease(**found | {"samplers": tuple(found["samplers"])})
        return lease if lease.expires > (time.time() if now is None else now) else None

    def lineage(self) -> int:
        """Return how often the trainer has gone back to a checkpoint."""
        return int(self._scalar("SELECT COUNT(*) FROM rewinds"))

    # ------------------------------------------------------------------------------------------ slots and groups

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

    def needed_snapshots(self, snapshots: Iterable[str]) -> set[str]:
        """Return those of the pod snapshots from which a rollout may be resumed: its group was not dropped."""
        query = """SELECT EXISTS (SELECT 1 FROM slots INDEXED BY slots_by_snapshot
                   WHERE resume != '' AND fate = 'open' AND json_extract(resume, '$.snapshot') = ?)"""
        return {snapshot for snapshot in snapshots if self._scalar(query, snapshot)}

    def progress(self, prefix: str = "") -> list[GroupProgress]:
        """Return the progress of every group whose task has this prefix, in the order they were started."""
        rows = self._db.execute(
            """SELECT groups.id AS id, task, step, COALESCE(dropped, '') AS dropped, COUNT(*) AS size,
                      SUM(state = 'ready') AS ready, SUM(failures) AS failures
               FROM groups INDEXED BY groups_by_task CROSS JOIN slots ON grp = groups.id WHERE task >= ? AND task < ?
               GROUP BY groups.id ORDER BY groups.id""",
            (prefix, prefix + AFTER_ANY),
        ).fetchall()
        return [GroupProgress(**row) for row in rows]

    def numbers(self) -> list[int]:
        """Return all N of the tasks that are named N/..., without visiting each of them."""
        found: list[int] = []
        task = self._scalar("SELECT MIN(task) FROM groups WHERE task < ':'")
        while task is not None:
            number = task.partition("/")[0]
            found += [int(number)] if number.isdigit() else []
            task = self._scalar("SELECT MIN(task) FROM groups WHERE task >= ? AND task < ':'", f"{number}/{AFTER_ANY}")
        return sorted(set(found))

    # ------------------------------------------------------------------------------------------ history

    def changed_groups(self, since: int, limit: int = 1000) -> list[GroupRecord]:
        """Return the groups that have changed after the change with this number, in the order of their last change."""
        rows = self._db.execute(
            """SELECT groups.id AS id, task, step, dropped IS NOT NULL AS dropped, changed,
                      SUM(state = 'ready') AS rollouts,
                      AVG(json_extract(reward, '$.cost.turns')) AS turns,
                      AVG(json_extract(reward, '$.cost.thinking')) AS thinking,
                      AVG(json_extract(reward, '$.solved')) AS solved,
                      MAX((SELECT SUM(value) FROM json_each(reward, '$.seconds'))) AS seconds
               FROM (SELECT * FROM groups INDEXED BY groups_by_change WHERE changed > ? ORDER BY changed LIMIT ?) groups
               LEFT JOIN slots ON grp = groups.id AND state = 'ready' GROUP BY groups.id ORDER BY changed""",
            (since, limit),
        ).fetchall()
        return [_record(row) for row in rows]

    def efforts(self) -> list[GroupEffort]:
        """Return the mean effort of each group's finished rollouts, in the order the groups were started."""
        since = max((record.change for record in self._history.values()), default=0)
        while changed := self.changed_groups(since):
            self._history |= {record.id: record for record in changed}
            since = changed[-1].change
        return [record.effort for _, record in sorted(self._history.items()) if record.effort is not None]

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

    def trained_rewards(self, step: int, limit: int) -> list[dict[str, Any]]:
        """Return the rewards of the last `limit` rollouts trained on up to a step, oldest first."""
        rows = self._db.execute(
            """SELECT reward FROM groups INDEXED BY groups_by_step CROSS JOIN slots ON grp = groups.id
               WHERE step IS NOT NULL AND step <= ? AND reward IS NOT NULL
               ORDER BY step DESC, groups.id DESC, number DESC LIMIT ?""",
            (step, limit),
        ).fetchall()
        return [json.loads(row["reward"]) for row in reversed(rows)]

    def incidents(self, step: int | None = None) -> list[Incident]:
        """Return incidents, oldest first: all of them, or those between the previous step and this one."""
        where, values = ("1", ()) if step is None else ("COALESCE(troubles.step, 0) = ?", (step - 1,))
        rows = self._db.execute(
            f"""SELECT task, number, kind, why FROM troubles JOIN groups ON groups.id = grp
                WHERE {where} ORDER BY troubles.id""",
            values,
        ).fetchall()
        return [Incident(**row) for row in rows]

    def _scalar(self, query: str, *values: Any) -> Any:
        return self._db.execute(query, values).fetchone()[0]


def _slot(row: sqlite3.Row) -> Slot:
    slot = Slot(row["id"], row["grp"], row["task"], row["number"], row["attempt"], row["state"], row["oldest"])
    reward, resume = (json.loads(row[name]) if row[name] else None for name in ("reward", "resume"))
    return replace(slot, newest_step=row["newest"], reward=reward, trace=row["trace"], resume=resume, note=row["note"])


def _record(row: sqlite3.Row) -> GroupRecord:
    effort = None
    if row["rollouts"]:
        means = (row[name] for name in ("turns", "thinking", "solved", "seconds"))
        effort = GroupEffort(row["task"], row["step"], row["rollouts"], *means)
    return GroupRecord(row["id"], row["task"], row["step"], bool(row["dropped"]), row["changed"], effort)
