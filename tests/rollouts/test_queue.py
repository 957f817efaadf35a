"""The table of slots: what may happen to one, and what may not."""

from pathlib import Path

import pytest

from etude.errors import EtudeError, InputError
from etude.rollouts.queue import Plan, ReadyGroup, Slot, Slots, StaleClaim

PLAN = Plan(group_size=2, groups_per_step=2, max_staleness=1, ahead=1, in_flight=100, lease_s=10.0, attempts=3)
WON = {"total": 1.0}


@pytest.fixture
def slots(tmp_path: Path) -> Slots:
    return Slots(tmp_path / "slots.db", PLAN)


def claim(slots: Slots, now: float = 0.0, worker: str = "w") -> Slot:
    slot = slots.claim(worker, now)
    assert slot is not None
    return slot


def finish_all(slots: Slots, version: int = 0) -> None:
    while (slot := slots.claim("w", 0.0)) is not None:
        slots.finish(slot, WON, f"{slot.task}-{slot.number}", (version, version))


def test_a_group_is_ready_when_all_its_slots_are(slots: Slots) -> None:
    slots.add([("a", 0), ("b", 0)])
    for done in range(3):
        assert slots.take(0) is None, done
        slots.finish(claim(slots), WON, "t", (0, 0))
    slots.finish(claim(slots), WON, "t", (0, 0))
    groups = slots.take(0)
    assert groups is not None
    assert [group.task for group in groups] == ["a", "b"]
    assert [slot.number for slot in groups[0].slots] == [0, 1]


def test_a_prompt_has_one_turn_only(slots: Slots) -> None:
    assert slots.add([("a", 0), ("b", 0), ("a", 0)]) == 2
    assert slots.add([("b", 0), ("c", 0)]) == 1
    assert slots.used("a")
    assert not slots.used("d")
    assert slots.wanted() == 4 - 3


def test_samplers_without_the_newest_weights_get_a_step_less_to_begin(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "s.db", PLAN)
    assert (slots.wanted(), slots.wanted(fresh=False)) == (4, 2)
    slots.add([("a", 0), ("b", 0), ("c", 0)])
    assert (slots.wanted(), slots.wanted(fresh=False)) == (1, 0)
    synchronous = Slots(":memory:", Plan(group_size=2, groups_per_step=2, max_staleness=0))
    assert (synchronous.wanted(), synchronous.wanted(fresh=False)) == (2, 0)


def test_groups_that_began_go_first_and_long_ones_start_early(slots: Slots) -> None:
    slots.add([("short", 1), ("long", 9), ("middle", 5)])
    order = [claim(slots).task for _ in range(6)]
    assert order == ["long", "long", "middle", "middle", "short", "short"]
    slots.add([("longest", 99)])
    broken = slots.slot(1)
    slots.fail(broken, "the pod died")
    assert claim(slots).task == broken.task  # its group waits for it


def test_no_more_run_at_once_than_planned(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "s.db", Plan(group_size=4, in_flight=3))
    slots.add([("a", 0)])
    held = [claim(slots) for _ in range(3)]
    assert slots.claim("w", 0.0) is None
    slots.finish(held[0], WON, "t", (0, 0))
    assert slots.claim("w", 0.0) is not None


def test_a_silent_worker_loses_its_slot_and_its_late_answer_counts_for_nothing(slots: Slots) -> None:
    slots.add([("a", 0)])
    first = claim(slots, now=0.0, worker="dead")
    slots.beat(first, now=8.0)
    assert slots.reconcile(15.0, 0)["lost"] == 0
    assert slots.reconcile(18.1, 0)["lost"] == 1
    second = claim(slots, now=19.0, worker="alive")
    assert (second.id, second.attempt) == (first.id, 2)
    for report in (
        lambda: slots.finish(first, WON, "late", (0, 0)),
        lambda: slots.fail(first, "x"),
        lambda: slots.beat(first, 20),
    ):
        with pytest.raises(StaleClaim, match="attempt 1 does not hold it"):
            report()
    slots.finish(second, WON, "right", (0, 0))
    with pytest.raises(StaleClaim):
        slots.finish(second, {"total": 0.0}, "twice", (0, 0))
    assert slots.slot(first.id).trace == "right"


def test_an_infrastructure_failure_is_no_reward_and_too_many_drop_the_group(slots: Slots) -> None:
    slots.add([("a", 0), ("b", 0)])
    for _ in range(PLAN.attempts):
        slot = next(s for s in iter(lambda: claim(slots), None) if s.number == 0 and s.task == "a")
        slots.fail(slot, "the verifier crashed")
        for id in range(1, 5):  # give the others back
            row = slots.slot(id)
            if row.state == "starting":
                slots._report(row, "state='queued'", ())
    assert slots.counts()["dropped"] == 2
    assert slots.wanted() == 4 - 1
    finish_all(slots)
    assert [group.task for group in slots.ready(0)] == ["b"]


def test_a_rollout_checkpoint_outlives_its_worker(slots: Slots) -> None:
    slots.add([("a", 0)])
    slot = claim(slots)
    slots.checkpoint(slot, {"trace": "half.trace", "snapshot": "s1"}, now=1.0)
    slots.reconcile(100.0, 0)
    again = claim(slots, now=100.0)
    assert again.resume == {"trace": "half.trace", "snapshot": "s1"}
    slots.finish(again, WON, "t", (0, 0))
    assert slots.slot(slot.id).resume is None


def test_what_is_too_old_is_sampled_again_not_trained(slots: Slots) -> None:
    slots.add([("a", 0), ("b", 0)])
    slots.finish(claim(slots), WON, "old", (0, 3))
    finish_all(slots, version=2)
    assert slots.take(2) is None  # the bound is one version, and a's oldest token is two behind
    assert slots.reconcile(0.0, 2)["stale"] == 1
    finish_all(slots, version=2)
    assert slots.take(2) is not None


def test_trained_once_and_a_rewound_trainer_uses_the_groups_again(slots: Slots) -> None:
    slots.add([("a", 0), ("b", 0)])
    finish_all(slots)
    groups = slots.take(0)
    assert groups is not None
    slots.mark_trained(groups, step=1)
    assert slots.take(0) is None
    with pytest.raises(EtudeError, match="trained or dropped before"):
        slots.mark_trained(groups, step=2)
    assert slots.trained() == [("a", 1), ("b", 1)]
    assert slots.rewind(1) == 0
    assert slots.rewind(0) == 2
    again = slots.take(0)
    assert again is not None
    assert [slot.trace for group in again for slot in group.slots] == [
        slot.trace for group in groups for slot in group.slots
    ]


def test_half_a_mark_is_no_mark(slots: Slots) -> None:
    slots.add([("a", 0), ("b", 0)])
    finish_all(slots)
    groups = slots.take(0)
    assert groups is not None
    with pytest.raises(EtudeError):
        slots.mark_trained([*groups, ReadyGroup(99, "nobody", ())], step=1)
    assert slots.trained() == []


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    slots = Slots(tmp_path / "s.db", PLAN)
    slots.add([("a", 0), ("b", 0)])
    finish_all(slots)
    slots.close()
    assert Slots(tmp_path / "s.db", PLAN).take(0) is not None
    with pytest.raises(InputError, match="groups of 2"):
        Slots(tmp_path / "s.db", Plan(group_size=3))


def test_a_stall_says_what_it_waits_for(slots: Slots) -> None:
    slots.add([("a", 0)])
    claim(slots, worker="host-3")
    assert "starting at host-3, given up in 6 s" in slots.waiting_for(4.0)
