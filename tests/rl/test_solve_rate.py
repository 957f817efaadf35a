"""The curriculum by solve rate: expected informativeness, reuse, rest and retirement, on a simulated policy."""

import random
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import product
from pathlib import Path

import pytest
from pydantic import ValidationError

from etude.rl.curriculum import Curriculum, CurriculumSettings
from etude.rl.prompt_history import PromptHistory, PromptRules
from etude.rl.solve_rate import GROUP_PRIOR, KIND_PRIOR, TASK_PRIOR, SolveRates, informativeness
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import GroupEffort, GroupRecord
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


def history_of(efforts: list[GroupEffort], tasks: Mapping[str, str] = TASKS, half_life: float = 8.0) -> PromptHistory:
    history = PromptHistory(tasks, half_life)
    history.update(GroupRecord(n, each.task, each.step, False, n, each) for n, each in enumerate(efforts, 1))
    return history


def plain_rates(groups: Iterable[GroupRecord], kinds: Mapping[str, str], step: int, half_life: float) -> SolveRates:
    """Measure everything anew from all groups: the definition that the history keeps sums of."""

    def total(tasks: Collection[str], part: Callable[[GroupEffort, float], float]) -> float:
        found = 0.0
        for group in groups:
            if group.task in tasks and group.effort is not None and group.effort.solved is not None:
                age = 0 if group.step is None else max(0, step - group.step)
                found += 0.5 ** (age / half_life) * part(group.effort, group.effort.solved)
        return found

    def rate(tasks: Collection[str], prior: float, count: float) -> float:
        solved = total(tasks, lambda effort, rate: effort.rollouts * rate)
        return (solved + count * prior) / (total(tasks, lambda effort, rate: effort.rollouts) + count)

    groups, mean = list(groups), 0.0
    mean = rate(kinds, 0.5, 2.0)
    known = {group.task for group in groups if group.effort is not None and group.effort.solved is not None} & {*kinds}
    of_kind = {kind: [task for task in kinds if kinds[task] == kind] for kind in {kinds[task] for task in known}}
    rates = {kind: rate(tasks, mean, KIND_PRIOR) for kind, tasks in of_kind.items()}
    expected = {
        kind: (total(tasks, lambda effort, rate: 0 < rate < 1) + GROUP_PRIOR * informativeness(rates[kind], SIZE))
        / (total(tasks, lambda effort, rate: 1.0) + GROUP_PRIOR)
        for kind, tasks in of_kind.items()
    }
    own = {task: informativeness(rate([task], rates[kinds[task]], TASK_PRIOR), SIZE) for task in known}
    return SolveRates(SIZE, mean, expected, own)


def test_sums_that_follow_every_change_are_those_of_all_groups() -> None:
    """Groups are started, scored slot by slot, consumed, dropped, and given back by a trainer that went back."""
    rng = random.Random(3)
    kinds = {f"{kind}-{number}": kind for kind in "abc" for number in range(6)}
    history, groups, step = PromptHistory(kinds, 5.0), dict[int, GroupRecord](), 0
    for change in range(1, 1500):
        id = rng.randint(1, 40)
        task = groups[id].task if id in groups else rng.choice([*kinds, "unknown"])
        consumed = rng.choice([None, None, rng.randint(0, step)])
        values = (rng.choice([None, rng.random()]), rng.random(), rng.choice([None, 0.0, 0.5, 1.0]), rng.random())
        effort = GroupEffort(task, consumed, rng.randint(1, SIZE), *values) if rng.random() < 0.9 else None
        groups[id] = GroupRecord(id, task, consumed, consumed is None and rng.random() < 0.2, change, effort)
        history.update([groups[id]])
        step += rng.random() < 0.1
        if change % 50:
            continue
        plain, found = plain_rates(groups.values(), kinds, step, 5.0), history.rates(SIZE, step, [*kinds])
        assert found.mean == pytest.approx(plain.mean)
        assert dict(found.tasks) == pytest.approx(dict(plain.tasks))
        assert {kind: found.kinds[kind] for kind in plain.kinds} == pytest.approx(dict(plain.kinds))
        again = PromptHistory(kinds, 5.0)
        again.update(groups.values())
        for kind, statistics in again.kind_statistics().items():
            same = history.kind_statistics()[kind]
            assert (same.rollouts, same.effort) == (statistics.rollouts, pytest.approx(statistics.effort))
            assert (same.solved, same.seconds) == pytest.approx((statistics.solved, statistics.seconds))
        rules = PromptRules(3, 2, 4, 2)
        assert history.states(step, rules) == again.states(step, rules)


def test_a_mixed_kind_is_measured_by_its_groups_not_by_its_mean() -> None:
    efforts = [GroupEffort(f"mixed-{n}", 1, SIZE, None, None, true_rate(f"mixed-{n}"), None) for n in range(40)]
    rates = history_of(efforts).rates(SIZE, 1, ())
    assert rates.of_kind("mixed") < 0.05 < 0.8 < informativeness(0.5, SIZE)
    old = [
        GroupEffort(f"middle-{n}", step, SIZE, None, None, solved, None)
        for n in range(8)
        for step, solved in ((1, 0.0), (9, 1.0))
    ]
    # A group that is eight steps old counts half: the rate is 2/3, and no group was informative.
    assert history_of(old).rates(SIZE, 9, ()).mean == pytest.approx((8 * SIZE + 1) / (12 * SIZE + 2))


def test_prompts_are_reused_retire_and_rest_by_the_rules() -> None:
    rules = PromptRules(reuse=3, rest_steps=4, unsolved_rest_steps=10, retire_after=2)
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
    known = PromptHistory(dict.fromkeys(history, ""), 8.0)
    uses = [(task, step, rate) for task, found in history.items() for step, rate in found]
    known.update(
        GroupRecord(n, task, step, False, n, GroupEffort(task, step, SIZE, None, None, rate, None))
        for n, (task, step, rate) in enumerate(uses, 1)
    )
    states = known.states(20, rules)
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
