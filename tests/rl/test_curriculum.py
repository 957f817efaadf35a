"""Which prompts come next: each once, in an order that a restart does not change, hard kinds sooner when it is late."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import InputError
from etude.rl.curriculum import Curriculum, kind_of
from etude.rollouts.queue import Plan, Slots
from etude.tasks.task import Machine, Phase, Task

PLAN = Plan(group_size=2, groups_per_step=4, max_staleness=1, ahead=1, in_flight=1000, attempts=2)
KINDS = ("easy", "middle", "hard")

TASKS = {f"{kind}-{number}": kind for number in range(60) for kind in KINDS}


def did(kind: str, solved: float = 0.5) -> dict[str, object]:
    """What a rollout of each kind took."""
    turns, thinking, seconds = {"easy": (2, 10, 1.0), "middle": (4, 40, 2.0), "hard": (12, 200, 9.0)}[kind]
    won = {"total": solved, "solved": solved > 0, "cost": {"turns": turns, "thinking": thinking}}
    return {**won, "seconds": {"ground": 0.5, "session": seconds, "grading": 0.5}}


def finish_all(slots: Slots, solved: dict[str, tuple[float, float]] | None = None) -> None:
    """Finish what is queued; of each group one is solved and one is not, unless said otherwise."""
    while (slot := slots.claim("w", 0.0)) is not None:
        kind = TASKS[slot.task]
        slots.finish(slot, did(kind, (solved or {}).get(kind, (1.0, 0.0))[slot.number]), "t", (0, 0))


def train(slots: Slots, step: int) -> None:
    slots.mark_trained(slots.take(0) or [], step)


def drawn(curriculum: Curriculum, slots: Slots, count: int, done: float = 0.0) -> list[str]:
    """Draw prompts and begin them."""
    found = curriculum.next(slots, count, done).prompts
    assert slots.add(found) == len(found)
    return [name for name, _ in found]


# ------------------------------------------------------------------------------------------- one epoch


@given(st.integers(0, 2**31), st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_prompt_comes_once_however_they_are_asked_for(seed: int, portions: list[int]) -> None:
    curriculum, slots = Curriculum(TASKS, seed), Slots(":memory:", PLAN)
    order = [name for portion in portions for name in drawn(curriculum, slots, portion)]
    assert len(order) == len(set(order)) == min(sum(portions), len(TASKS))
    at_once = drawn(curriculum, Slots(":memory:", PLAN), sum(portions))
    assert order == at_once, f"seed {seed}"


def test_another_seed_is_another_order_and_kinds_are_mixed() -> None:
    orders = [drawn(Curriculum(TASKS, seed), Slots(":memory:", PLAN), 180) for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    early = Counter(TASKS[name] for order in orders for name in order[:45])
    assert all(abs(early[kind] - 300) < 60 for kind in KINDS), early
    first = Counter(order[0] for order in orders)
    assert max(first.values()) <= 3


def test_a_restart_goes_on_as_the_run_would_have(tmp_path: Path) -> None:
    def begin(path: Path, restarts: bool) -> list[str]:
        slots, order = Slots(path, PLAN), list[str]()
        for step in range(20):
            curriculum = Curriculum(dict(reversed(TASKS.items())) if restarts else TASKS, seed=5, hard_after=0.3)
            order += drawn(curriculum, slots, slots.wanted(), step / 20)
            finish_all(slots)
            train(slots, step + 1)
            if restarts:
                slots.close()
                slots = Slots(path, PLAN)
        return order

    order = begin(tmp_path / "one.sqlite", restarts=False)
    assert len(order) == len(set(order)) == 20 * 4 + 4  # one step's prompts are under way
    assert begin(tmp_path / "other.sqlite", restarts=True) == order


def test_tasks_that_are_added_move_no_others() -> None:
    more = {**TASKS, **{f"new-{number}": "new" for number in range(30)}}
    few, many = (drawn(Curriculum(tasks, 3), Slots(":memory:", PLAN), 300) for tasks in (TASKS, more))
    for kind in KINDS:
        assert [name for name in few if TASKS[name] == kind] == [name for name in many if more[name] == kind]


# ------------------------------------------------------------------------------------------- hard kinds


def late_share(hard_weight: float, done: float, solved: dict[str, tuple[float, float]] | None = None) -> float:
    """How many of the prompts drawn after a first part of the run are hard, over several seeds."""
    hard = 0
    for seed in range(12):
        curriculum = Curriculum(TASKS, seed, hard_after=0.6, hard_weight=hard_weight)
        slots = Slots(":memory:", PLAN)
        drawn(curriculum, slots, 60)
        finish_all(slots, solved)
        hard += sum(TASKS[name] == "hard" for name in drawn(curriculum, slots, 40, done))
    return hard / (12 * 40)


def test_late_in_training_hard_kinds_come_more_often() -> None:
    assert late_share(2.0, done=0.5) == pytest.approx(1 / 3, abs=0.06)
    assert late_share(0.0, done=0.9) == pytest.approx(1 / 3, abs=0.06)
    assert late_share(2.0, done=0.6) > 0.48  # three times the weight of the others, and more are left of those
    assert late_share(1.0, done=0.9) > 0.40


@pytest.mark.parametrize("outcome", [(0.0, 0.0), (1.0, 1.0)])
def test_what_is_never_solved_or_always_does_not_come_more_often(outcome: tuple[float, float]) -> None:
    assert late_share(4.0, done=1.0, solved={"hard": outcome}) == pytest.approx(1 / 3, abs=0.06)


def test_one_epoch_holds_in_late_training_too() -> None:
    curriculum, slots = Curriculum(TASKS, 1, hard_after=0.0, hard_weight=5.0), Slots(":memory:", PLAN)
    order = []
    for _ in range(30):
        order += drawn(curriculum, slots, 7, 1.0)
        finish_all(slots)
    assert sorted(order) == sorted(TASKS)


def test_rewards_that_say_nothing_of_effort_weigh_nothing() -> None:
    curriculum, slots = Curriculum(TASKS, 0, hard_after=0.0, hard_weight=3.0), Slots(":memory:", PLAN)
    drawn(curriculum, slots, 30)
    while (slot := slots.claim("w", 0.0)) is not None:
        slots.finish(slot, {"total": 1.0}, "t", (0, 0))
    assert all(seconds == 0.0 for _, seconds in curriculum.next(slots, 30, 1.0).prompts)


# ------------------------------------------------------------------------------------------- how long


def test_prompts_are_expected_to_take_what_their_kind_took() -> None:
    tasks = {**TASKS, "odd": "never seen"}
    curriculum, slots = Curriculum(tasks, 0), Slots(":memory:", PLAN)
    slots.add([("easy-0", 0), ("middle-0", 0), ("hard-0", 0)])
    finish_all(slots)
    expected = dict(curriculum.next(slots, len(tasks), 0.0).prompts)
    assert (expected["easy-1"], expected["middle-1"], expected["hard-1"]) == (2.0, 3.0, 10.0)
    assert expected["odd"] == 5.0
    slots.add([(name, expected[name]) for name in ("easy-1", "hard-1", "middle-1")])
    claimed = [slot.task for slot in iter(lambda: slots.claim("w", 0.0), None)]
    assert claimed == ["hard-1"] * 2 + ["middle-1"] * 2 + ["easy-1"] * 2


# ------------------------------------------------------------------------------------------- running out


def test_a_draw_says_how_many_prompts_are_missing() -> None:
    curriculum, slots = Curriculum({"a": "x", "b": "x", "c": "y"}), Slots(":memory:", PLAN)
    found = curriculum.next(slots, slots.wanted(), 0.0)
    assert (len(found.prompts), found.wanted, found.missing) == (3, 8, 5)
    slots.add(found.prompts)
    assert curriculum.next(slots, 2, 0.0).missing == 2
    assert curriculum.next(slots, 0, 0.0).missing == 0


def test_a_run_ends_when_what_is_left_makes_no_step() -> None:
    tasks = {name: TASKS[name] for name in list(TASKS)[:9]}
    curriculum, slots = Curriculum(tasks), Slots(":memory:", PLAN)
    steps = 0
    while not curriculum.over(slots):
        slots.add(curriculum.next(slots, slots.wanted(), 0.0).prompts)
        finish_all(slots)
        train(slots, steps + 1)
        steps += 1
    assert steps == 2
    assert curriculum.over(slots) == (
        "the prompts have run out: of 9 tasks 8 were trained on, 0 dropped, and the 1 left make no step of 4"
    )
    slots.rewind(1)  # the trainer is back: there is a step to be made again
    assert curriculum.over(slots) == ""


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(InputError, match="no tasks to learn from"):
        Curriculum({})
    with pytest.raises(InputError, match="expected a share of the steps"):
        Curriculum(TASKS, hard_after=60)


def test_a_kind_is_what_tasks_share() -> None:
    def task(**metadata: object) -> Task:
        return Task(Path("t"), "t", "", Machine(), Phase(), Phase(), Phase(), metadata=metadata)

    assert kind_of(task(category="debugging", family="off-by-one", difficulty=0, seed=3)) == "debugging/off-by-one/0"
    assert kind_of(task(category="docs")) == "docs"
    assert kind_of(task()) == "any"
