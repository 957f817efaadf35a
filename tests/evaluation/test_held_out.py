"""Held-out evaluation: estimators against brute force, intervals against repetition, and the evaluation queue."""

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
    choose_tasks,
    is_finished,
    progress,
    results,
    start,
    started,
)
from etude.evaluation.statistics import best_of, bootstrap_interval, compare, powers_of_two, summarise
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import ReadyGroup, Slot
from etude.rollouts.settings import QueueSettings, evaluation_queue

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]) | st.floats(0, 1), min_size=1, max_size=8)


def reward(score: float, category: str = "debugging", **facts: Any) -> dict[str, Any]:
    plain = {"total": score, "score": score, "solved": score >= 1, "category": category, "ending": "final"}
    return plain | {"made": 100, "cost": {"turns": 4}} | facts


def group(task: str, scores: list[float], **facts: Any) -> ReadyGroup:
    slots = (
        Slot(n, 0, task, n, 1, "ready", oldest_step=3, newest_step=5, reward=reward(score, **facts))
        for n, score in enumerate(scores)
    )
    return ReadyGroup(0, task, tuple(slots))


@pytest.fixture
def evaluations(tmp_path: Path) -> RolloutQueue:
    settings = QueueSettings(prefetch_steps=1.5, in_flight=100, lease_s=10.0, max_attempts=2)
    return RolloutQueue(tmp_path / "evaluations.sqlite", evaluation_queue(settings, 2))


def finish_all(evaluations: RolloutQueue, score: float = 1.0) -> None:
    while (slot := evaluations.claim("w", 0.0)) is not None:
        evaluations.finish(slot, reward(score), "t", (3, 4))


# ------------------------------------------------------------------------------------------- estimators


@given(SCORES, st.data())
def test_the_best_of_k_is_the_mean_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = [max(subset) for subset in itertools.combinations(scores, k)]
    assert best_of(scores, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


@given(st.integers(1, 16), st.data())
def test_for_zeros_and_ones_it_is_pass_at_k(samples: int, data: st.DataObject) -> None:
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
    rng, p, n, k = np.random.default_rng(0), 0.2, 6, 3
    found = [best_of((rng.random(n) < p).astype(float).tolist(), k) for _ in range(4000)]
    assert np.mean(found) == pytest.approx(1 - (1 - p) ** k, abs=0.02)


def test_the_best_of_more_than_there_are_is_an_error() -> None:
    with pytest.raises(InputError, match="best of 3: there are 2 samples"):
        best_of([0.0, 1.0], 3)


@given(st.integers(1, 64))
def test_powers_of_two_double_and_end_at_the_size(size: int) -> None:
    steps = powers_of_two(size)
    assert steps[-1] == size
    assert steps[0] == 1
    assert steps == sorted(set(steps))
    assert all(2 * low >= high for low, high in itertools.pairwise(steps))
    assert powers_of_two(16) == [1, 2, 4, 8, 16]
    assert powers_of_two(1) == [1]


@pytest.mark.parametrize(("tasks", "least"), [(10, 0.88), (50, 0.91)])
def test_intervals_have_their_nominal_coverage(tasks: int, least: float) -> None:
    """Tasks of different difficulty, four samples each; the true value is the mean difficulty of all tasks."""
    rng, repetitions = np.random.default_rng(7), 600
    covered = 0
    for _ in range(repetitions):
        rates = rng.beta(1.0, 2.0, tasks)
        low, high = bootstrap_interval(rng.binomial(4, rates) / 4, resamples=400) or (math.nan, math.nan)
        covered += low <= 1 / 3 <= high
    assert least <= covered / repetitions <= 0.98, covered / repetitions


def test_samples_of_the_same_tasks_do_not_make_an_interval_narrow() -> None:
    """Many samples of a task that is always or never solved say as much as one."""
    rates = np.array([0.0, 1.0] * 10)
    low, high = bootstrap_interval(rates) or (0.0, 0.0)
    assert high - low == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(20), rel=0.2)


def test_an_interval_is_deterministic_also_for_large_sets() -> None:
    values = np.random.default_rng(1).random(3000)
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)
    assert bootstrap_interval(np.array([0.5])) is None


# ------------------------------------------------------------------------------------------- the record


def test_a_summary_has_means_best_of_k_costs_and_versions() -> None:
    groups = (
        group("a", [1, 1, 0, 0], made=50),
        group("b", [0, 0, 0, 0], category="docs", made=150, ending="turns"),
        group("c", [0.5, 1, 0, 0], category="docs"),
    )
    record = summarise(Evaluation(6, groups, {"d": "its pod died"}, failures=9))
    assert (record["tasks"], record["samples"]) == (3, 12)
    assert record["solved"] == pytest.approx((0.5 + 0 + 0.25) / 3)
    assert record["score"] == pytest.approx((0.5 + 0 + 0.375) / 3)
    assert record["solved_low"] <= record["solved"] <= record["solved_high"]
    assert [record[f"best/{k}"] for k in (1, 2, 4)] == pytest.approx([0.25, (5 / 6 + 0.5) / 3, 2 / 3])
    assert record["best_score/4"] == pytest.approx(2 / 3)
    assert (record["category/docs/tasks"], record["category/docs/solved"]) == (2, 0.125)
    assert (record["category/debugging/best/4"], record["category/docs/best/4"]) == (1.0, 0.5)
    assert record["tokens_per_solved"] == (4 * 50 + 4 * 150 + 4 * 100) / 3
    assert record["tokens_when_solved"] == pytest.approx((50 + 50 + 100) / 3)
    assert record["turns_per_solved"] == 16
    assert (record["ending/final"], record["ending/turns"]) == (8 / 12, 4 / 12)
    assert (record["versions/oldest"], record["versions/newest"]) == (3, 5)
    assert (record["infrastructure/given_up"], record["infrastructure/failures"]) == (1, 9)
    assert record == summarise(Evaluation(6, groups, {"d": "its pod died"}, failures=9))


def test_without_a_solved_sample_there_is_no_cost_per_solved_and_without_tasks_no_mean() -> None:
    assert summarise(Evaluation(1, (group("a", [0, 0]),)))["tokens_per_solved"] is None
    record = summarise(Evaluation(1, (), {"a": "x"}, failures=4))
    assert record == {"tasks": 0, "samples": 0, "infrastructure/given_up": 1, "infrastructure/failures": 4}


def test_a_comparison_is_paired_by_task() -> None:
    rng = np.random.default_rng(2)
    hard = rng.random(40) * 0.8

    def run(rise: float) -> Evaluation:
        scores = (np.r_[np.ones(round(16 * (h + rise))), np.zeros(16)][:16].tolist() for h in hard)
        return Evaluation(0, tuple(group(f"t{n}", row) for n, row in enumerate(scores)))

    before, after = run(0.0), run(0.1)
    record = compare(before, after)
    assert record["solved"] == pytest.approx(0.1, abs=0.02)
    assert record["solved_low"] > 0.05
    apart = summarise(before)["solved_high"], summarise(after)["solved_low"]
    assert apart[0] > apart[1], "unpaired intervals overlap: this is what pairing is for"
    assert compare(before, before)["solved"] == 0
    reverse, negated = compare(after, before), (-record["solved"], -record["solved_high"])
    assert (reverse["solved"], reverse["solved_low"]) == pytest.approx(negated, abs=0.01)


def test_only_tasks_of_both_evaluations_are_compared() -> None:
    one = Evaluation(0, (group("a", [0, 0]), group("b", [0, 1])))
    other = Evaluation(5, (group("b", [1, 1]), group("c", [1, 1])))
    record = compare(one, other)
    assert (record["from"], record["to"], record["tasks"], record["tasks_of_one_only"]) == (0, 5, 1, 2)
    assert (record["solved"], record["solved_low"]) == (0.5, None)
    with pytest.raises(InputError, match="no task in common"):
        compare(one, Evaluation(5, (group("c", [1, 1]),)))


# ------------------------------------------------------------------------------------------- the queue


def test_an_evaluation_is_finished_when_every_sample_is_scored(evaluations: RolloutQueue) -> None:
    assert not is_finished(evaluations, 10)
    assert start(evaluations, 10, ["org/a", "b"]) == 2
    assert start(evaluations, 10, ["org/a", "b"]) == 0  # as a restarted orchestrator does
    assert start(evaluations, 20, ["b"]) == 1
    assert started(evaluations) == [10, 20]
    assert progress(evaluations, 10).wanted == 4
    with pytest.raises(EtudeError, match="step 10 is not finished: 2 missing, such as 000010/org/a"):
        results(evaluations, 10)
    finish_all(evaluations)
    assert is_finished(evaluations, 10)
    assert progress(evaluations, 10).finished
    found = results(evaluations, 10)
    assert [group.task for group in found.groups] == ["org/a", "b"]
    assert summarise(found)["solved"] == 1.0


def test_a_dropped_task_is_left_out_of_the_mean_and_counted(evaluations: RolloutQueue) -> None:
    start(evaluations, 0, ["a", "b"])
    for _ in range(2):
        while (slot := evaluations.claim("w", 0.0)) is not None and slot.task != "000000/b":
            evaluations.finish(slot, reward(1.0), "t", (0, 0))
        assert slot is not None
        evaluations.fail(slot, "the verifier crashed")
    assert is_finished(evaluations, 0)
    assert progress(evaluations, 0).dropped == 1
    found = results(evaluations, 0)
    assert "the verifier crashed" in found.dropped["b"]
    record = summarise(found)
    assert (record["solved"], record["tasks"]) == (1.0, 1)
    assert (record["infrastructure/given_up"], record["infrastructure/failures"]) == (1, 2)


def test_evaluation_rollouts_do_not_become_stale_but_lost_ones_are_requeued(evaluations: RolloutQueue) -> None:
    start(evaluations, 0, ["a"])
    slot = evaluations.claim("w", 0.0)
    assert slot is not None
    evaluations.finish(slot, reward(0.0), "t", (-1, -1))  # without a sampled token
    assert evaluations.claim("w", 0.0) is not None
    assert evaluations.reconcile(100.0, -1) == {"lost": 1, "stale": 0, "dropped": 0}
    finish_all(evaluations)
    assert is_finished(evaluations, 0)


def test_no_held_out_tasks_are_an_error_not_an_empty_evaluation(evaluations: RolloutQueue) -> None:
    with pytest.raises(InputError, match="evaluation at step 3: there are no held-out tasks"):
        start(evaluations, 3, [])


@given(st.sets(st.text("ab/0", min_size=1, max_size=6), max_size=30), st.integers(1, 40))
def test_chosen_tasks_are_spread_evenly_and_do_not_depend_on_order(tasks: set[str], max_tasks: int) -> None:
    chosen = choose_tasks(tasks, max_tasks)
    assert chosen == choose_tasks(sorted(tasks, reverse=True), max_tasks)
    assert len(chosen) == len(set(chosen)) == min(max_tasks, len(tasks))
    indices = [sorted(tasks).index(name) for name in chosen]
    gaps = [high - low for low, high in itertools.pairwise(indices)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert choose_tasks(tasks, None) == sorted(tasks)
