"""The curriculum: every prompt once, in an order that survives restarts, hard kinds earlier late in training."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from etude.errors import InputError
from etude.rl.curriculum import Curriculum, CurriculumSettings, kind_of
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import QueueSettings
from etude.tasks.task import MachineSpec, Task, TaskPhase

SETTINGS = QueueSettings(
    group_size=2, groups_per_step=4, max_staleness=1, prefetch_steps=1, in_flight=1000, max_attempts=2
)
KINDS = ("easy", "middle", "hard")

TASKS = {f"{kind}-{number}": kind for number in range(60) for kind in KINDS}


def reward(kind: str, solved: float = 0.5) -> dict[str, object]:
    """Return the reward of a rollout of a kind, with its effort."""
    turns, thinking, seconds = {"easy": (2, 10, 1.0), "middle": (4, 40, 2.0), "hard": (12, 200, 9.0)}[kind]
    won = {"total": solved, "solved": solved > 0, "cost": {"turns": turns, "thinking": thinking}}
    return {**won, "seconds": {"ground": 0.5, "session": seconds, "grading": 0.5}}


def finish_all(queue: RolloutQueue, solved: dict[str, tuple[float, float]] | None = None) -> None:
    """Finish all queued slots; by default one of each group is solved and one is not."""
    while (slot := queue.claim("w", 0.0)) is not None:
        kind = TASKS[slot.task]
        queue.finish(slot, reward(kind, (solved or {}).get(kind, (1.0, 0.0))[slot.number]), "t", (0, 0))


def train(queue: RolloutQueue, step: int) -> None:
    queue.mark_trained(queue.take(0) or [], step)


def drawn(curriculum: Curriculum, queue: RolloutQueue, count: int, done: float = 0.0) -> list[str]:
    """Draw prompts and add them to the queue."""
    found = curriculum.next(queue, count, done).prompts
    assert queue.add(found) == len(found)
    return [name for name, _ in found]


# ------------------------------------------------------------------------------------------- one epoch


@given(st.integers(0, 2**31), st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_every_prompt_is_drawn_once_for_any_batch_sizes(seed: int, portions: list[int]) -> None:
    curriculum, queue = Curriculum(TASKS, seed), RolloutQueue(":memory:", SETTINGS)
    order = [name for portion in portions for name in drawn(curriculum, queue, portion)]
    assert len(order) == len(set(order)) == min(sum(portions), len(TASKS))
    at_once = drawn(Curriculum(TASKS, seed), RolloutQueue(":memory:", SETTINGS), sum(portions))
    assert order == at_once, f"seed {seed}"


def test_the_seed_sets_the_order_and_kinds_are_mixed() -> None:
    orders = [drawn(Curriculum(TASKS, seed), RolloutQueue(":memory:", SETTINGS), 180) for seed in range(20)]
    assert len({tuple(order) for order in orders}) == 20
    early = Counter(TASKS[name] for order in orders for name in order[:45])
    assert all(abs(early[kind] - 300) < 60 for kind in KINDS), early
    first = Counter(order[0] for order in orders)
    assert max(first.values()) <= 3


def test_a_restarted_run_draws_the_same_prompts(tmp_path: Path) -> None:
    def draw_all(path: Path, restarts: bool) -> list[str]:
        queue, order = RolloutQueue(path, SETTINGS), list[str]()
        for step in range(20):
            curriculum = Curriculum(
                dict(reversed(TASKS.items())) if restarts else TASKS,
                seed=5,
                settings=CurriculumSettings(hard_after=0.3),
            )
            order += drawn(curriculum, queue, queue.groups_to_start(), step / 20)
            finish_all(queue)
            train(queue, step + 1)
            if restarts:
                queue.close()
                queue = RolloutQueue(path, SETTINGS)
        return order

    order = draw_all(tmp_path / "one.sqlite", restarts=False)
    assert len(order) == len(set(order)) == 20 * 4 + 4  # one step's prompts are in flight
    assert draw_all(tmp_path / "other.sqlite", restarts=True) == order


def test_added_tasks_keep_the_order_of_the_others() -> None:
    more = {**TASKS, **{f"new-{number}": "new" for number in range(30)}}
    few, many = (drawn(Curriculum(tasks, 3), RolloutQueue(":memory:", SETTINGS), 300) for tasks in (TASKS, more))
    for kind in KINDS:
        assert [name for name in few if TASKS[name] == kind] == [name for name in many if more[name] == kind]


# ------------------------------------------------------------------------------------------- hard kinds


def late_share(hard_weight: float, done: float, solved: dict[str, tuple[float, float]] | None = None) -> float:
    """Return the share of hard prompts drawn after a first part of the run, over several seeds."""
    hard = 0
    for seed in range(12):
        curriculum = Curriculum(TASKS, seed, settings=CurriculumSettings(hard_after=0.6, hard_weight=hard_weight))
        queue = RolloutQueue(":memory:", SETTINGS)
        drawn(curriculum, queue, 60)
        finish_all(queue, solved)
        hard += sum(TASKS[name] == "hard" for name in drawn(curriculum, queue, 40, done))
    return hard / (12 * 40)


def test_late_in_training_hard_kinds_are_drawn_more_often() -> None:
    assert late_share(2.0, done=0.5) == pytest.approx(1 / 3, abs=0.06)
    assert late_share(0.0, done=0.9) == pytest.approx(1 / 3, abs=0.06)
    assert late_share(2.0, done=0.6) > 0.48  # three times the weight, but more prompts are left of the others
    assert late_share(1.0, done=0.9) > 0.40


@pytest.mark.parametrize("outcome", [(0.0, 0.0), (1.0, 1.0)])
def test_kinds_that_are_never_or_always_solved_are_not_drawn_more_often(outcome: tuple[float, float]) -> None:
    assert late_share(4.0, done=1.0, solved={"hard": outcome}) == pytest.approx(1 / 3, abs=0.06)


def test_one_epoch_holds_in_late_training_too() -> None:
    curriculum, queue = (
        Curriculum(TASKS, 1, settings=CurriculumSettings(hard_after=0.0, hard_weight=5.0)),
        RolloutQueue(":memory:", SETTINGS),
    )
    order = []
    for _ in range(30):
        order += drawn(curriculum, queue, 7, 1.0)
        finish_all(queue)
    assert sorted(order) == sorted(TASKS)


def test_rewards_without_effort_have_no_influence() -> None:
    curriculum, queue = (
        Curriculum(TASKS, 0, settings=CurriculumSettings(hard_after=0.0, hard_weight=3.0)),
        RolloutQueue(":memory:", SETTINGS),
    )
    drawn(curriculum, queue, 30)
    while (slot := queue.claim("w", 0.0)) is not None:
        queue.finish(slot, {"total": 1.0}, "t", (0, 0))
    assert all(seconds == 0.0 for _, seconds in curriculum.next(queue, 30, 1.0).prompts)


# ------------------------------------------------------------------------------------------- expected duration


def test_the_expected_duration_is_that_of_the_kind() -> None:
    tasks = {**TASKS, "odd": "never seen"}
    curriculum, queue = Curriculum(tasks, 0), RolloutQueue(":memory:", SETTINGS)
    queue.add([("easy-0", 0), ("middle-0", 0), ("hard-0", 0)])
    finish_all(queue)
    expected = dict(curriculum.next(queue, len(tasks), 0.0).prompts)
    assert (expected["easy-1"], expected["middle-1"], expected["hard-1"]) == (2.0, 3.0, 10.0)
    assert expected["odd"] == 5.0
    queue.add([(name, expected[name]) for name in ("easy-1", "hard-1", "middle-1")])
    claimed = [slot.task for slot in iter(lambda: queue.claim("w", 0.0), None)]
    assert claimed == ["hard-1"] * 2 + ["middle-1"] * 2 + ["easy-1"] * 2


# ------------------------------------------------------------------------------------------- exhaustion


def test_a_draw_counts_missing_prompts() -> None:
    curriculum, queue = Curriculum({"a": "x", "b": "x", "c": "y"}), RolloutQueue(":memory:", SETTINGS)
    found = curriculum.next(queue, queue.groups_to_start(), 0.0)
    assert (len(found.prompts), found.wanted, found.missing) == (3, 8, 5)
    queue.add(found.prompts)
    assert curriculum.next(queue, 2, 0.0).missing == 2
    assert curriculum.next(queue, 0, 0.0).missing == 0


def test_a_run_is_exhausted_when_the_rest_does_not_fill_a_step() -> None:
    tasks = {name: TASKS[name] for name in list(TASKS)[:9]}
    curriculum, queue = Curriculum(tasks), RolloutQueue(":memory:", SETTINGS)
    steps = 0
    while not curriculum.exhausted(queue):
        queue.add(curriculum.next(queue, queue.groups_to_start(), 0.0).prompts)
        finish_all(queue)
        train(queue, steps + 1)
        steps += 1
    assert steps == 2
    assert curriculum.exhausted(queue) == (
        "the prompts are exhausted: of 9 tasks 8 were trained on, 0 had rewards without a difference, and 0 were "
        "dropped; the 1 left do not fill a step of 4. Give more tasks or fewer steps"
    )
    queue.rewind(1)  # after a rewind there are groups to train again
    assert curriculum.exhausted(queue) == ""


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(InputError, match="no tasks to train on"):
        Curriculum({})
    with pytest.raises(ValidationError, match="hard_after"):
        CurriculumSettings(hard_after=60)


def test_a_kind_is_category_family_and_difficulty() -> None:
    def task(**metadata: object) -> Task:
        return Task(Path("t"), "t", "", MachineSpec(), TaskPhase(), TaskPhase(), TaskPhase(), metadata=metadata)

    assert kind_of(task(category="debugging", family="off-by-one", difficulty=0, seed=3)) == "debugging/off-by-one/0"
    assert kind_of(task(category="docs")) == "docs"
    assert kind_of(task()) == "any"
