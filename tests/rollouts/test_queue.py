"""The rollout queue: claims, leases, retries, staleness, training and rewinding."""

from pathlib import Path

import pytest

from etude.errors import EtudeError, InputError
from etude.rollouts.queue import RolloutQueue, StaleClaim, SupersededWorker
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.rollouts.settings import QueueSettings

SETTINGS = QueueSettings(
    group_size=2, groups_per_step=2, max_staleness=1, prefetch_steps=1, in_flight=100, lease_s=10.0, max_attempts=3
)
WON = {"total": 1.0}


@pytest.fixture
def queue(tmp_path: Path) -> RolloutQueue:
    return RolloutQueue(tmp_path / "slots.db", SETTINGS)


def claim(queue: RolloutQueue, now: float = 0.0, worker: str = "w") -> Slot:
    slot = queue.claim(worker, now)
    assert slot is not None
    return slot


def finish_all(queue: RolloutQueue, version: int = 0) -> None:
    while (slot := queue.claim("w", 0.0)) is not None:
        queue.finish(slot, WON, f"{slot.task}-{slot.number}", (version, version))


def test_a_group_is_ready_when_all_its_slots_are(queue: RolloutQueue) -> None:
    queue.add([("a", 0), ("b", 0)])
    for done in range(3):
        assert queue.take(0) is None, done
        queue.finish(claim(queue), WON, "t", (0, 0))
    queue.finish(claim(queue), WON, "t", (0, 0))
    groups = queue.take(0)
    assert groups is not None
    assert [group.task for group in groups] == ["a", "b"]
    assert [slot.number for slot in groups[0].slots] == [0, 1]


def test_a_prompt_is_used_once(queue: RolloutQueue) -> None:
    assert queue.add([("a", 0), ("b", 0), ("a", 0)]) == 2
    assert queue.add([("b", 0), ("c", 0)]) == 1
    assert queue.groups_to_start() == 4 - 3


def test_fewer_groups_start_while_samplers_have_older_weights(tmp_path: Path) -> None:
    queue = RolloutQueue(tmp_path / "s.db", SETTINGS)
    assert (queue.groups_to_start(), queue.groups_to_start(fresh=False)) == (4, 2)
    queue.add([("a", 0), ("b", 0), ("c", 0)])
    assert (queue.groups_to_start(), queue.groups_to_start(fresh=False)) == (1, 0)
    synchronous = RolloutQueue(":memory:", QueueSettings(group_size=2, groups_per_step=2, max_staleness=0))
    assert (synchronous.groups_to_start(), synchronous.groups_to_start(fresh=False)) == (2, 0)


def test_started_groups_come_first_and_long_ones_start_early(queue: RolloutQueue) -> None:
    queue.add([("short", 1), ("long", 9), ("middle", 5)])
    order = [claim(queue).task for _ in range(6)]
    assert order == ["long", "long", "middle", "middle", "short", "short"]
    queue.add([("longest", 99)])
    broken = queue.slot(1)
    queue.fail(broken, "the pod died")
    assert claim(queue).task == broken.task  # its group waits for it


def test_in_flight_limits_claims(tmp_path: Path) -> None:
    queue = RolloutQueue(tmp_path / "s.db", QueueSettings(group_size=4, in_flight=3))
    queue.add([("a", 0)])
    held = [claim(queue) for _ in range(3)]
    assert queue.claim("w", 0.0) is None
    queue.finish(held[0], WON, "t", (0, 0))
    assert queue.claim("w", 0.0) is not None


def test_an_expired_lease_requeues_the_slot_and_a_late_report_is_refused(queue: RolloutQueue) -> None:
    queue.add([("a", 0)])
    first = claim(queue, now=0.0, worker="dead")
    queue.heartbeat(first, now=8.0)
    assert queue.reconcile(15.0, 0)["lost"] == 0
    assert queue.reconcile(18.1, 0)["lost"] == 1
    second = claim(queue, now=19.0, worker="alive")
    assert (second.id, second.attempt) == (first.id, 2)
    for report in (
        lambda: queue.finish(first, WON, "late", (0, 0)),
        lambda: queue.fail(first, "x"),
        lambda: queue.heartbeat(first, 20),
    ):
        with pytest.raises(StaleClaim, match="the claim of attempt 1 is no longer valid"):
            report()
    queue.finish(second, WON, "right", (0, 0))
    with pytest.raises(StaleClaim):
        queue.finish(second, {"total": 0.0}, "twice", (0, 0))
    assert queue.slot(first.id).trace == "right"


def test_a_failure_has_no_reward_and_too_many_drop_the_group(queue: RolloutQueue) -> None:
    queue.add([("a", 0), ("b", 0)])
    for _ in range(SETTINGS.max_attempts):
        slot = next(s for s in iter(lambda: claim(queue), None) if s.number == 0 and s.task == "a")
        queue.fail(slot, "the verifier crashed")
        for id in range(1, 5):  # requeue the others
            row = queue.slot(id)
            if row.state == "starting":
                queue._report(row, "state='queued'", ())
    assert queue.counts()["dropped"] == 2
    assert queue.groups_to_start() == 4 - 1
    finish_all(queue)
    assert [group.task for group in queue.ready(0)] == ["b"]


def test_a_rollout_checkpoint_outlives_its_worker(queue: RolloutQueue) -> None:
    queue.add([("a", 0)])
    slot = claim(queue)
    queue.checkpoint(slot, {"trace": "half.trace", "snapshot": "s1"}, now=1.0)
    queue.reconcile(100.0, 0)
    again = claim(queue, now=100.0)
    assert again.resume == {"trace": "half.trace", "snapshot": "s1"}
    queue.finish(again, WON, "t", (0, 0))
    assert queue.slot(slot.id).resume is None


def test_stale_rollouts_are_resampled_not_trained(queue: RolloutQueue) -> None:
    queue.add([("a", 0), ("b", 0)])
    queue.finish(claim(queue), WON, "old", (0, 3))
    finish_all(queue, version=2)
    assert queue.take(2) is None  # max_staleness is 1, and the oldest token of a is 2 steps old
    assert queue.reconcile(0.0, 2)["stale"] == 1
    finish_all(queue, version=2)
    assert queue.take(2) is not None


def test_groups_are_trained_once_and_ready_again_after_a_rewind(queue: RolloutQueue) -> None:
    queue.add([("a", 0), ("b", 0)])
    finish_all(queue)
    groups = queue.take(0)
    assert groups is not None
    queue.mark_trained(groups, step=1)
    assert queue.take(0) is None
    with pytest.raises(EtudeError, match="trained or dropped before"):
        queue.mark_trained(groups, step=2)
    assert queue.trained() == [("a", 1), ("b", 1)]
    assert queue.rewind(1) == 0
    assert queue.rewind(0) == 2
    again = queue.take(0)
    assert again is not None
    assert [slot.trace for group in again for slot in group.slots] == [
        slot.trace for group in groups for slot in group.slots
    ]


def test_marking_groups_as_trained_is_atomic(queue: RolloutQueue) -> None:
    queue.add([("a", 0), ("b", 0)])
    finish_all(queue)
    groups = queue.take(0)
    assert groups is not None
    with pytest.raises(EtudeError):
        queue.mark_trained([*groups, ReadyGroup(99, "unknown", ())], step=1)
    assert queue.trained() == []


def test_the_queue_is_durable(tmp_path: Path) -> None:
    queue = RolloutQueue(tmp_path / "s.db", SETTINGS)
    queue.add([("a", 0), ("b", 0)])
    finish_all(queue)
    queue.close()
    assert RolloutQueue(tmp_path / "s.db", SETTINGS).take(0) is not None
    with pytest.raises(InputError, match="groups of 2"):
        RolloutQueue(tmp_path / "s.db", QueueSettings(group_size=3))


def test_waiting_for_names_the_slot_without_heartbeat(queue: RolloutQueue) -> None:
    queue.add([("a", 0)])
    claim(queue, worker="host-3")
    assert "starting at host-3, its lease expires in 6 s" in queue.waiting_for(4.0)


def test_a_request_of_the_trainer_is_applied_once_in_order_and_only_for_the_present_one() -> None:
    queue, applied = RolloutQueue(":memory:", QueueSettings()), list[str]()

    def request(session: int, number: int, what: str) -> int:
        def apply() -> int:
            applied.append(what)
            return len(applied)

        return int(queue.apply_once(session, number, apply))

    with pytest.raises(SupersededWorker, match="another process trains the run"):
        request(1, 1, "before its session has begun")
    queue.begin_session(1)
    assert [request(1, 1, "rewind"), request(1, 2, "mark"), request(1, 2, "mark again")] == [1, 2, 2]
    queue.begin_session(1)  # that request, too, may arrive twice
    with pytest.raises(SupersededWorker, match="comes late"):
        request(1, 1, "rewind again")
    queue.begin_session(2)
    with pytest.raises(SupersededWorker, match="another process trains the run"):
        request(1, 3, "mark")
    assert request(2, 1, "rewind of two") == 3
    with pytest.raises(SupersededWorker, match="another process trains the run"):
        queue.begin_session(1)  # a request that was on its way for long
    assert applied == ["rewind", "mark", "rewind of two"]


def test_a_verdict_on_a_group_that_has_become_stale_meanwhile_is_not_recorded() -> None:
    queue = RolloutQueue(":memory:", QueueSettings(group_size=2, groups_per_step=1, max_staleness=0))
    queue.add([("task", 0.0)])
    for _ in range(2):
        slot = queue.claim("w", 0.0)
        assert slot is not None
        queue.finish(slot, {"total": 1.0}, "t", (0, 0))
    (group,) = queue.offer(0).unjudged
    queue.reconcile(0.0, 1)
    queue.judge([(group.id, False)])
    assert queue.alike_groups() == 0
