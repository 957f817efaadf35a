"""The curriculum by solve rate: expected informativeness, reuse, rest and retirement, on a simulated policy."""

import random
from itertools import product
from pathlib import Path

import pytest
from pydantic import ValidationError

from etude.rl.curriculum import Curriculum, CurriculumSettings
from etude.rl.solve_rate import informativeness, measure, prompt_states
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import GroupEffort, GroupUse
from etude.rollouts.settings import QueueSettings

SIZE = 4
QUEUE = QueueSettings(group_size=SIZE, groups_per_step=4, max_staleness=0, in_flight=1000)
# Four kinds: never solved, always solved, sometimes solved, and one of tasks that are either trivial or impossible.
TASKS = {f"{kind}-{number}": kind for kind in ("hard", "easy", "middle", "mixed") for number in range(60)}


def true_rate(task: str) -> float:
    kind, number = task.rsplit("-", 1)
    return {"hard": 0.0, "easy": 1.0, "middle": 0.4, "mixed": float(int(number) % 2)}[kind]


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.5, 1.0])
def test_informativeness_is_the_probability_that_a_group_differs(rate: float) -> None:
    exact = 0.0
    for outcome in product((0, 1), repeat=SIZE):
        probability = rate ** sum(outcome) * (1 - rate) ** (SIZE - sum(outcome))
        exact += probability * (0 < sum(outcome) < SIZE)
    assert informativeness(rate, SIZE) == pytest.approx(exact)


def simulate(settings: CurriculumSettings, steps: int, seed: int, path: str = ":memory:") -> tuple[RolloutQueue, float]:
    """Run a policy with fixed solve rates; return the queue and the share of informative groups after four steps."""
    queue, rng, informative = RolloutQueue(path, QUEUE), random.Random(seed), []
    for step in range(steps):
        curriculum = Curriculum(TASKS, seed, settings)  # as after a restart
        queue.add(curriculum.next(queue, 4, step / steps).prompts, max_uses=settings.reuse)
        while (slot := queue.claim("w", 0.0)) is not None:
            solved = rng.random() < true_rate(slot.task)
            queue.finish(slot, {"total": float(solved), "solved": solved}, "t", (step, step))
        groups = queue.ready(0)
        queue.mark_trained(groups, step + 1)
        informative += [0 < sum(slot.record["solved"] for slot in group.slots) < SIZE for group in groups]
    return queue, sum(informative[16:]) / len(informative[16:])


def test_prompts_of_informative_kinds_are_drawn_more_often() -> None:
    plain, chosen = (
        sum(simulate(settings, 20, seed)[1] for seed in range(6)) / 6
        for settings in (CurriculumSettings(hard_weight=0.0), CurriculumSettings(order="solve_rate", half_life=100))
    )
    print("informative share", plain, chosen)
    assert plain == pytest.approx(0.21, abs=0.06)  # a quarter of the prompts, 84 % of whose groups differ
    assert chosen > 0.45


def test_every_kind_is_explored_and_a_restart_draws_the_same(tmp_path: Path) -> None:
    settings = CurriculumSettings(order="solve_rate", floor=0.1)
    queue, _ = simulate(settings, 20, 1, str(tmp_path / "one"))
    again, _ = simulate(settings, 20, 1, str(tmp_path / "two"))
    assert queue.tasks() == again.tasks()
    assert len(set(queue.tasks())) == 80  # reuse = 1: every prompt once
    assert {TASKS[task] for task in queue.tasks()[40:]} == {"hard", "easy", "middle", "mixed"}


def test_a_mixed_kind_is_measured_by_its_groups_not_by_its_mean() -> None:
    efforts = [GroupEffort(f"mixed-{n}", 1, SIZE, None, None, true_rate(f"mixed-{n}"), None) for n in range(40)]
    rates = measure(efforts, TASKS, SIZE, 1, 8.0)
    assert rates.of_kind("mixed") < 0.05 < 0.8 < informativeness(0.5, SIZE)
    old = [
        GroupEffort(f"middle-{n}", step, SIZE, None, None, solved, None)
        for n in range(8)
        for step, solved in ((1, 0.0), (9, 1.0))
    ]
    # A group that is eight steps old counts half: the rate is 2/3, and no group was informative.
    assert measure(old, TASKS, SIZE, 9, 8.0).mean == pytest.approx((8 * SIZE + 1) / (12 * SIZE + 2))


def test_prompts_are_reused_retire_and_rest_by_the_rules() -> None:
    rules = {"reuse": 3, "rest_steps": 4, "unsolved_rest_steps": 10, "retire_after": 2}
    history = {  # steps of use, and solve rates
        "new": [],
        "recent": [(17, 0.5)],
        "rested": [(16, 0.5)],
        "unsolved": [(5, 0.0), (11, 0.0)],
        "woken": [(10, 0.0)],
        "once-solved": [(3, 1.0)],
        "retired": [(3, 1.0), (9, 1.0)],
        "used up": [(1, 0.5), (6, 0.5), (11, 0.5)],
        "busy": [(1, 0.5), (None, None)],
    }
    uses = [GroupUse(task, step, False) for task, found in history.items() for step, _ in found]
    efforts = [
        GroupEffort(t, step, SIZE, None, None, rate, None) for t, found in history.items() for step, rate in found
    ]
    states = prompt_states(history, uses, efforts, 20, **rules)
    assert states.unused == {"new"}
    assert states.reusable == ("once-solved", "rested", "woken")
    assert states.waiting == ("recent", "unsolved")
    assert (states.resting, states.retired) == ({"unsolved"}, {"retired"})


def test_a_run_does_not_stop_while_a_prompt_may_be_used_again() -> None:
    """With fewer rested prompts than a step needs, those used longest ago come back early; then none is left."""
    settings = CurriculumSettings(order="solve_rate", reuse=2, rest_steps=50)
    tasks = {f"middle-{number}": "middle" for number in range(8)}
    queue, steps = RolloutQueue(":memory:", QUEUE), 0
    curriculum = Curriculum(tasks, 0, settings)
    while not curriculum.exhausted(queue):
        draw = curriculum.next(queue, 4, 0.0)
        assert queue.add(draw.prompts, max_uses=2) == 4
        while (slot := queue.claim("w", 0.0)) is not None:
            queue.finish(slot, {"total": 0.0, "solved": slot.number == 0}, "t", (steps, steps))
        steps += 1
        queue.mark_trained(queue.ready(0), steps)
    assert steps == 4
    assert sorted(queue.tasks()) == sorted([*tasks, *tasks])
    first, second = queue.tasks()[:8], queue.tasks()[8:]
    assert {*first[:4]} == {*second[:4]}


def test_keys_of_another_order_are_refused() -> None:
    with pytest.raises(ValidationError, match="reuse would not be used: the order is hard_kinds_late"):
        CurriculumSettings(reuse=2)
    with pytest.raises(ValidationError, match="hard_weight would not be used: the order is solve_rate"):
        CurriculumSettings(order="solve_rate", hard_weight=2.0)
