"""Measuring: estimators against brute force, intervals against repetition, and the table of evaluations."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import EtudeError, InputError
from etude.evaluation.held_out import (
    Evaluation,
    begin,
    begun,
    best_of,
    choose_tasks,
    compare,
    evaluation_plan,
    finished,
    interval,
    ladder,
    progress,
    results,
    summarise,
    upkeep,
)
from etude.rollouts.queue import Plan, ReadyGroup, Slot, Slots

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1), min_size=1, max_size=8)


def said(score: float, category: str = "debugging", **facts: Any) -> dict[str, Any]:
    plain = {"total": score, "score": score, "solved": score >= 1, "category": category, "ending": "final"}
    return plain | {"made": 100, "cost": {"turns": 4}} | facts


def group(task: str, scores: list[float], **facts: Any) -> ReadyGroup:
    slots = (
        Slot(n, 0, task, n, 1, "ready", oldest=3, newest=5, reward=said(score, **facts))
        for n, score in enumerate(scores)
    )
    return ReadyGroup(0, task, tuple(slots))


@pytest.fixture
def evaluations(tmp_path: Path) -> Slots:
    plan = Plan(ahead=1.5, in_flight=100, lease_s=10.0, attempts=2)
    return Slots(tmp_path / "evaluations.sqlite", evaluation_plan(plan, 2))


def answer(evaluations: Slots, score: float = 1.0) -> None:
    while (slot := evaluations.claim("w", 0.0)) is not None:
        evaluations.finish(slot, said(score), "t", (3, 4))


# ------------------------------------------------------------------------------------------- estimators


@given(SCORES, st.data())
def test_the_best_of_k_is_the_mean_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = [max(subset) for subset in itertools.combinations(scores, k)]
    assert best_of(scores, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@given(st.integers(1, 16), st.data())
def test_of_zeros_and_ones_it_is_the_chance_of_a_success(samples: int, data: st.DataObject) -> None:
    solved, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    values = data.draw(st.permutations([1.0] * solved + [0.0] * (samples - solved)))
    expected = 1 - math.comb(samples - solved, k) / math.comb(samples, k)
    assert best_of(values, k) == pytest.approx(expected, abs=1e-12)


@given(SCORES)
def test_more_attempts_are_never_worse_and_one_is_the_mean(scores: list[float]) -> None:
    curve = [best_of(scores, k) for k in range(1, len(scores) + 1)]
    assert curve[0] == pytest.approx(sum(scores) / len(scores), abs=1e-12)
    assert curve[-1] == max(scores)
    assert all(later >= earlier - 1e-12 for earlier, later in itertools.pairwise(curve))


def test_the_best_of_k_is_unbiased() -> None:
    chance, p, n, k = np.random.default_rng(0), 0.2, 6, 3
    found = [best_of((chance.random(n) < p).astype(float).tolist(), k) for _ in range(4000)]
    assert np.mean(found) == pytest.approx(1 - (1 - p) ** k, abs=0.02)


def test_the_best_of_more_than_there_are_is_an_error() -> None:
    with pytest.raises(InputError, match="best of 3: there are 2 samples"):
        best_of([0.0, 1.0], 3)


@given(st.integers(1, 64))
def test_the_ladder_doubles_and_ends_at_the_top(size: int) -> None:
    steps = ladder(size)
    assert steps[-1] == size
    assert steps[0] == 1
    assert steps == sorted(set(steps))
    assert all(2 * low >= high for low, high in itertools.pairwise(steps))
    assert ladder(16) == [1, 2, 4, 8, 16]
    assert ladder(1) == [1]


@pytest.mark.parametrize(("tasks", "least"), [(10, 0.88), (50, 0.91)])
def test_intervals_hold_the_truth_about_as_often_as_they_say(tasks: int, least: float) -> None:
    """Tasks of different difficulty, four samples each; the truth is the mean difficulty of all tasks there are."""
    chance, repetitions = np.random.default_rng(7), 600
    held = 0
    for _ in range(repetitions):
        rates = chance.beta(1.0, 2.0, tasks)
        low, high = interval(chance.binomial(4, rates) / 4, draws=400) or (math.nan, math.nan)
        held += low <= 1 / 3 <= high
    assert least <= held / repetitions <= 0.98, held / repetitions


def test_samples_of_the_same_tasks_do_not_make_an_interval_narrow() -> None:
    """Sixteen samples of a task that is always solved or never say what one does."""
    rates = np.array([0.0, 1.0] * 10)
    low, high = interval(rates) or (0.0, 0.0)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(20), rel=0.2)


def test_an_interval_is_the_same_every_time_and_large_sets_fit_the_memory() -> None:
    values = np.random.default_rng(1).random(3000)
    assert interval(values, seed=3) == interval(values, seed=3)
    assert interval(values, seed=3) != interval(values, seed=4)
    assert interval(np.array([0.5])) is None


# ------------------------------------------------------------------------------------------- the line


def test_a_summary_says_averages_bests_prices_and_who_answered() -> None:
    groups = (
        group("a", [1, 1, 0, 0], made=50),
        group("b", [0, 0, 0, 0], category="docs", made=150, ending="turns"),
        group("c", [0.5, 1, 0, 0], category="docs"),
    )
    line = summarise(Evaluation(6, groups, {"d": "its pod died"}, failures=9))
    assert (line["tasks"], line["samples"]) == (3, 12)
    assert line["solved"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert line["score"] == pytest.approx((0.5 + 0 + 0.375) / 3)
    assert line["solved_low"] <= line["solved"] <= line["solved_high"]
    assert [line[f"best/{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, (5 / 6 + 0.5) / 3, 2 / 3])
    assert line["best_score/4"] == pytest.approx(2 / 3)
    assert (line["category/docs/tasks"], line["category/docs/solved"]) == (2, 0.125)
    assert (line["category/debugging/best/4"], line["category/docs/best/4"]) == (1.0, 0.5)
    assert line["tokens_per_solved"] == (4 * 50 + 4 * 150 + 4 * 100) / 3
    assert line["tokens_when_solved"] == pytest.approx((50 + 50 + 100) / 3)
    assert line["turns_per_solved"] == 16
    assert (line["ending/final"], line["ending/turns"]) == (8 / 12, 4 / 12)
    assert (line["versions/oldest"], line["versions/newest"]) == (3, 5)
    assert (line["infrastructure/given_up"], line["infrastructure/failures"]) == (1, 9)
    assert line == summarise(Evaluation(6, groups, {"d": "its pod died"}, failures=9))


def test_what_is_solved_never_has_no_price_and_no_task_has_no_mean() -> None:
    assert summarise(Evaluation(1, (group("a", [0, 0]),)))["tokens_per_solved"] is None
    line = summarise(Evaluation(1, (), {"a": "x"}, failures=4))
    assert line == {"tasks": 0, "samples": 0, "infrastructure/given_up": 1, "infrastructure/failures": 4}


def test_a_comparison_is_by_task_so_that_hard_tasks_hide_nothing() -> None:
    chance = np.random.default_rng(2)
    hard = chance.random(40) * 0.8

    def run(rise: float) -> Evaluation:
        scores = (np.r_[np.ones(round(16 * (h + rise))), np.zeros(16)][:16].tolist() for h in hard)
        return Evaluation(0, tuple(group(f"t{n}", row) for n, row in enumerate(scores)))

    before, after = run(0.0), run(0.1)
    line = compare(before, after)
    assert line["solved"] == pytest.approx(0.1, abs=0.02)
    assert line["solved_low"] > 0.05
    apart = summarise(before)["solved_high"], summarise(after)["solved_low"]
    assert apart[0] > apart[1], "unpaired intervals overlap: this is what pairing is for"
    assert compare(before, before)["solved"] == 0
    turned = compare(after, before)
    assert (turned["solved"], turned["solved_low"]) == pytest.approx((-line["solved"], -line["solved_high"]), abs=0.01)


def test_only_tasks_that_both_answered_are_compared() -> None:
    one = Evaluation(0, (group("a", [0, 0]), group("b", [0, 1])))
    other = Evaluation(5, (group("b", [1, 1]), group("c", [1, 1])))
    line = compare(one, other)
    assert (line["from"], line["to"], line["tasks"], line["tasks_of_one_only"]) == (0, 5, 1, 2)
    assert (line["solved"], line["solved_low"]) == (0.5, None)
    with pytest.raises(InputError, match="share no task"):
        compare(one, Evaluation(5, (group("c", [1, 1]),)))


# ------------------------------------------------------------------------------------------- the table


def test_an_evaluation_is_finished_when_every_sample_is_graded(evaluations: Slots) -> None:
    assert not finished(evaluations, 10)
    assert begin(evaluations, 10, ["org/a", "b"]) == 2
    assert begin(evaluations, 10, ["org/a", "b"]) == 0  # a restarted orchestrator asks again
    assert begin(evaluations, 20, ["b"]) == 1
    assert begun(evaluations) == [10, 20]
    assert progress(evaluations, 10).wanted == 4
    with pytest.raises(EtudeError, match="step 10 is not finished: 2 to come, such as 000010/org/a"):
        results(evaluations, 10)
    answer(evaluations)
    assert finished(evaluations, 10)
    assert progress(evaluations, 10).finished
    found = results(evaluations, 10)
    assert [group.task for group in found.groups] == ["org/a", "b"]
    assert summarise(found)["solved"] == 1.0


def test_a_task_the_infrastructure_lost_is_counted_beside_the_mean(evaluations: Slots) -> None:
    begin(evaluations, 0, ["a", "b"])
    for _ in range(2):
        while (slot := evaluations.claim("w", 0.0)) is not None and slot.task != "000000/b":
            evaluations.finish(slot, said(1.0), "t", (0, 0))
        assert slot is not None
        evaluations.fail(slot, "the verifier crashed")
    assert finished(evaluations, 0)
    assert progress(evaluations, 0).given_up == 1
    found = results(evaluations, 0)
    assert "the verifier crashed" in found.given_up["b"]
    line = summarise(found)
    assert (line["solved"], line["tasks"]) == (1.0, 1)
    assert (line["infrastructure/given_up"], line["infrastructure/failures"]) == (1, 2)


def test_answers_do_not_grow_too_old_but_lost_ones_are_asked_again(evaluations: Slots) -> None:
    begin(evaluations, 0, ["a"])
    slot = evaluations.claim("w", 0.0)
    assert slot is not None
    evaluations.finish(slot, said(0.0), "t", (-1, -1))  # not one token was made
    assert evaluations.claim("w", 0.0) is not None
    assert upkeep(evaluations, 100.0) == {"lost": 1, "stale": 0, "dropped": 0}
    answer(evaluations)
    assert finished(evaluations, 0)


def test_no_held_out_tasks_are_an_error_not_an_empty_evaluation(evaluations: Slots) -> None:
    with pytest.raises(InputError, match="evaluation at step 3: there are no held-out tasks"):
        begin(evaluations, 3, [])


@given(st.sets(st.text("ab/0", min_size=1, max_size=6), max_size=30), st.integers(1, 40))
def test_chosen_tasks_are_spread_evenly_and_do_not_depend_on_order(tasks: set[str], most: int) -> None:
    chosen = choose_tasks(tasks, most)
    assert chosen == choose_tasks(sorted(tasks, reverse=True), most)
    assert len(chosen) == len(set(chosen)) == min(most, len(tasks))
    places = [sorted(tasks).index(name) for name in chosen]
    gaps = [high - low for low, high in itertools.pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert choose_tasks(tasks, None) == sorted(tasks)
