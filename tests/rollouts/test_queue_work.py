"""The work of a queue does not grow with the run: SQLite's steps are counted for a short past and a long one."""

import json
import sqlite3
from collections.abc import Callable
from typing import Any

import pytest

from etude.evaluation import held_out
from etude.rl.curriculum import Curriculum, CurriculumSettings
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import HeldSlot, Slot
from etude.rollouts.settings import QueueSettings

SIZE = 8
SETTINGS = QueueSettings(group_size=SIZE, groups_per_step=4, max_staleness=2, in_flight=64, lease_s=100.0)
REWARD = json.dumps({"total": 1.0, "solved": True, "cost": {"turns": 3, "thinking": 9}, "versions": [0, 0]})


def queue_after(groups: int) -> RolloutQueue:
    """Return a queue that has consumed `groups` groups, or dropped a tenth of them, with two steps' worth queued."""
    queue = RolloutQueue(":memory:", SETTINGS)
    with queue._transaction() as db:
        count = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
        db.execute(f"{count} INSERT INTO groups (task) SELECT printf('old-%d', i) FROM n", (groups,))
        db.execute(
            f"""{count} INSERT INTO slots (grp, number, attempt, state, reward, trace, oldest, newest, note)
                SELECT 1 + (i - 1) / {SIZE}, (i - 1) % {SIZE}, 1, 'ready', ?, 't', (i - 1) / 32, (i - 1) / 32, ''
                FROM n""",
            (groups * SIZE, REWARD),
        )
        db.execute("UPDATE groups SET informative = id % 3 != 0, step = 1 + id / 4 WHERE id % 10 != 0")
        db.execute("UPDATE groups SET dropped = 'failed' WHERE id % 10 = 0")
        db.execute(f"{count} INSERT INTO versions SELECT i, i FROM n", (1 + groups // 4,))
        db.execute("UPDATE troubles SET step = grp / 4")
        step = int(db.execute("SELECT MAX(step) FROM groups").fetchone()[0])
        db.execute("INSERT OR REPLACE INTO plan VALUES ('served', ?)", (str(step),))
    queue.add((f"new-{number}", float(number)) for number in range(8))
    return queue


class StepCounter:
    """Counts the instructions of SQLite's virtual machine that calls take."""

    def __init__(self, queue: RolloutQueue) -> None:
        self.queue, self.steps = queue, dict[str, int]()

    def __call__(self, name: str, work: Callable[[], Any]) -> Any:
        count = 0

        def step() -> int:
            nonlocal count
            count += 1
            return 0

        self.queue._db.set_progress_handler(step, 1)
        try:
            found = work()
        finally:
            self.queue._db.set_progress_handler(None, 0)
        self.steps[name] = self.steps.get(name, 0) + count
        return found


def session(queue: RolloutQueue) -> dict[str, int]:
    """Return the steps of everything that a run asks of its queue."""
    count = StepCounter(queue)
    step, tasks = queue.last_step(), {f"new-{number}": "kind" for number in range(20)}
    last = max(record.change for record in queue.changed_groups(0, 1 << 30))
    count("groups_to_start", lambda: queue.groups_to_start(steps_left=9))
    count("enlist", lambda: queue.enlist("w", "one"))
    slots: list[Slot] = count("claim", lambda: queue.claim_many("w", 12, 0.0, session="one", request=1))
    assert len(slots) == 12
    count("claim again", lambda: queue.claim_many("w", 12, 0.0, session="one", request=1))
    held = [HeldSlot(slot.id, slot.attempt, "running") for slot in slots]
    count("renew", lambda: queue.renew("w", held, 1.0, session="one", answered=1))
    count("checkpoint", lambda: queue.checkpoint(slots[0], {"snapshot": "s"}, 1.0))
    assert count("needed_snapshots", lambda: queue.needed_snapshots(["r", "s"])) == {"s"}
    count("fail", lambda: queue.fail(slots[8], "its pod died"))
    count("state", lambda: queue.state(2.0))
    while slots:
        for slot in slots:
            if slot.attempt > 1 or slot.id != held[8].id:
                reward = {"total": float(slot.number), "solved": False, "cost": {"turns": 2, "thinking": 1}}
                count("finish", lambda slot=slot, reward=reward: queue.finish(slot, reward, "t", (step, step)))
        slots = count("claim", lambda: queue.claim_many("w", 12, 0.0))
    count("reconcile", lambda: queue.reconcile(1e9, step))
    offer = count("offer", lambda: queue.offer(step))
    count("judge", lambda: queue.judge((group.id, group.id % 4 != 0) for group in offer.unjudged))
    groups = count("offer", lambda: queue.offer(step)).groups
    count("awaited_tasks", lambda: queue.awaited_tasks(step))
    count("mark_trained", lambda: queue.mark_trained(groups, step + 1))
    count("record_version", lambda: queue.record_version(10**6, step + 1))
    count("step_of", lambda: queue.step_of(10**6))
    count("newest_version", queue.newest_version)
    count("set_served_step", lambda: queue.set_served_step(step + 1))
    count("add", lambda: queue.add([("new-8", 1.0)]))
    count("changed_groups", lambda: queue.changed_groups(last))
    count("incidents", lambda: queue.incidents(step + 1))
    count("trained_rewards", lambda: queue.trained_rewards(step + 1, 50))
    count("release", lambda: queue.release("w"))
    count("release all", queue.release)
    count("informative_share", queue.informative_share)
    count("alike_groups", queue.alike_groups)
    curriculum = Curriculum(tasks, 0, CurriculumSettings(order="solve_rate", reuse=3))
    curriculum.next(queue, 4, 0.5)  # the first time reads the past
    queue.add([("new-9", 1.0)])
    count("curriculum", lambda: curriculum.next(queue, 4, 0.5))
    count("curriculum facts", lambda: curriculum.facts(queue))
    count("exhausted", lambda: curriculum.exhausted(queue))
    count("rewind", lambda: queue.rewind(step))
    count("requeue_lost", lambda: queue.requeue_lost("new-"))
    return count.steps


def test_the_work_of_training_does_not_grow_with_the_run() -> None:
    short, long = (session(queue_after(slots // SIZE)) for slots in (1_000, 100_000))
    print(json.dumps({name: (steps, long[name]) for name, steps in short.items()}, indent=1))
    grown = {name: (steps, long[name]) for name, steps in short.items() if long[name] > 1.2 * steps + 50}
    assert not grown, "steps after 1,000 slots and after 100,000"


@pytest.mark.parametrize("rewound", [False, True])
def test_the_work_of_an_evaluation_does_not_grow_with_those_before(rewound: bool) -> None:
    def steps(evaluations: int) -> dict[str, int]:
        queue = RolloutQueue(":memory:", QueueSettings(group_size=2, groups_per_step=1, max_staleness=0))
        for number in range(evaluations):
            held_out.start(queue, number, [f"task-{task}" for task in range(10)])
        with queue._transaction() as db:
            db.execute("UPDATE slots SET state = 'ready', reward = ?, attempt = 1", (REWARD,))
            if rewound:
                db.execute("INSERT INTO rewinds VALUES (10, 0)")
        count = StepCounter(queue)
        count("start", lambda: held_out.start(queue, 9000, ["a", "b"]))
        while slots := count("claim", lambda: queue.claim_many("w", 4, 0.0)):
            for slot in slots:
                count("finish", lambda slot=slot: queue.finish(slot, {"total": 1.0}, "t", (0, 0)))
        count("is_finished", lambda: held_out.is_finished(queue, 9000))
        count("progress", lambda: held_out.progress(queue, 9000))
        count("results", lambda: held_out.results(queue, 9000))
        count("state", lambda: queue.state(0.0))
        count("reconcile", lambda: queue.reconcile(0.0, -1))
        count("discard", lambda: held_out.discard_later(queue, 8000))
        return count.steps

    short, long = steps(5), steps(500)
    print(json.dumps({name: (found, long[name]) for name, found in short.items()}, indent=1))
    # Which evaluations there are is asked with a step for each, not for each of their samples.
    allowed = {"discard": 500 * 60}
    grown = {n: (found, long[n]) for n, found in short.items() if long[n] > 1.2 * found + 50 + allowed.get(n, 0)}
    assert not grown


def test_counts_are_those_of_the_tables_after_every_change() -> None:
    queue = queue_after(20)

    def counted() -> dict[str, int]:
        rows = queue._db.execute(
            """SELECT CASE WHEN dropped IS NOT NULL THEN 'dropped' WHEN step IS NOT NULL THEN 'trained' ELSE state END
                      AS name, COUNT(*) AS n FROM slots JOIN groups ON groups.id = grp GROUP BY name"""
        )
        outstanding = "SELECT COUNT(*) FROM groups WHERE step IS NULL AND dropped IS NULL AND informative IS NOT 0"
        assert queue.outstanding() == queue._scalar(outstanding)
        return {row["name"]: row["n"] for row in rows}

    assert queue.counts() == counted()
    slots = queue.claim_many("w", 40, 0.0)
    assert queue.counts() == counted()
    for slot in slots[:30]:
        queue.finish(slot, {"total": float(slot.number)}, "t", (5, 5))
    queue.fail(slots[31], "its pod died")
    assert queue.counts() == counted()
    queue.reconcile(1e9, 0)
    assert queue.counts() == counted()
    step = queue.last_step()
    queue.mark_trained(queue.take(step) or [], step + 1)
    assert queue.counts() == counted()
    queue.rewind(2)
    assert queue.counts() == counted()
    queue.discard(25, "no longer wanted")
    assert queue.counts() == counted()


def test_a_queue_of_another_version_is_refused(tmp_path: Any) -> None:
    with sqlite3.connect(tmp_path / "old.sqlite") as db:
        db.executescript("CREATE TABLE plan (key TEXT, value TEXT); INSERT INTO plan VALUES ('group_size', '8')")
    for opened in (lambda path: RolloutQueue(path, SETTINGS), RolloutQueue.open_read_only):
        with pytest.raises(Exception, match="was made by an older version of Etude"):
            opened(tmp_path / "old.sqlite")
