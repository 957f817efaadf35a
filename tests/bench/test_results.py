"""Statistics of trials: compared with brute force on random outcomes, and infrastructure failures."""

import itertools
import json
import math
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.bench.policies import TokenPrice
from etude.bench.results import (
    PolicyResults,
    difference,
    policy_summary,
    read_results,
    summarize,
    task_name,
    task_rows,
    trial_rows,
)
from etude.evaluation.held_out import start
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import QueueSettings

PRICE = TokenPrice(2.0, 8.0, 0.5)


def trial(score: float, category: str = "debugging", **facts: Any) -> dict[str, Any]:
    cost = {"prompt": 1000, "cached": 600, "turns": 4, "calls": 3, "wall_s": 2.0, "model_s": 1.0}
    known = {"total": score, "score": score, "solved": score >= 1, "category": category, "ending": "final", "hack": ""}
    return {**known, "made": 100, "errors": {}, "cost": cost, **facts}


def fill(path: Path, outcomes: dict[str, list[dict[str, Any] | str]], size: int) -> Path:
    """Fill a policy's queue: a record is a result, a string an infrastructure failure of every attempt."""
    with closing(RolloutQueue(path, QueueSettings(group_size=size, in_flight=1000, max_attempts=2))) as slots:
        start(slots, 0, outcomes)
        while (slot := slots.claim("w", 0.0)) is not None:
            found = outcomes[task_name(slot.task)][slot.number]
            if isinstance(found, str):
                slots.fail(slot, found)
            else:
                slots.finish(slot, found, f"traces/{slot.task}/{slot.number}", (0, 0))
    return path


def results(name: str, outcomes: dict[str, list[Any]], size: int) -> PolicyResults:
    with tempfile.TemporaryDirectory() as directory:
        table = fill(Path(directory) / "slots.sqlite", outcomes, size)
        return read_results(name, table, len(outcomes), size)


SIZES = st.tuples(st.integers(1, 5), st.integers(1, 4))  # tasks, samples


@st.composite
def two_policies(draw: st.DrawFn) -> tuple[int, dict[str, list[float]], dict[str, list[float]]]:
    tasks, size = draw(SIZES)
    scores = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=size, max_size=size)
    before, after = ({f"t{task}": draw(scores) for task in range(tasks)} for _ in range(2))
    return size, before, after


# ------------------------------------------------------------------------------------------- brute force


@settings(max_examples=25, deadline=None)
@given(two_policies())
def test_means_pass_at_k_and_best_of_k_are_those_of_all_subsets(
    drawn: tuple[int, dict[str, list[float]], dict[str, list[float]]],
) -> None:
    size, scores, _ = drawn
    summary = policy_summary(results("a", {t: [trial(s) for s in row] for t, row in scores.items()}, size))
    solved = {task: [float(score >= 1) for score in row] for task, row in scores.items()}
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean([np.mean(row) for row in solved.values()]))
    assert summary["score"]["mean"] == pytest.approx(np.mean([np.mean(row) for row in scores.values()]))
    assert str(size) in summary["pass_at"]
    for k, estimate in summary["pass_at"].items():
        assert estimate["mean"] == pytest.approx(np.mean([subsets_best(row, int(k)) for row in solved.values()]))
        best = np.mean([subsets_best(row, int(k)) for row in scores.values()])
        assert summary["best_of"][k] == pytest.approx(best)
        if estimate["low"] is not None:
            assert 0 <= estimate["low"] <= estimate["mean"] + 1e-9
            assert estimate["mean"] - 1e-9 <= estimate["high"] <= 1


def subsets_best(row: list[float], k: int) -> float:
    return float(np.mean([max(subset) for subset in itertools.combinations(row, k)]))


@settings(max_examples=25, deadline=None)
@given(two_policies())
def test_a_difference_is_taken_task_by_task(
    drawn: tuple[int, dict[str, list[float]], dict[str, list[float]]],
) -> None:
    size, before, after = drawn
    a, b = (
        results(name, {t: [trial(s) for s in row] for t, row in scores.items()}, size)
        for name, scores in (("a", before), ("b", after))
    )
    summary = difference(a, b)
    rates = {t: np.mean([s >= 1 for s in after[t]]) - np.mean([s >= 1 for s in before[t]]) for t in before}
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(list(rates.values())))
    assert summary["better"] == sum(rate > 0 for rate in rates.values())
    assert summary["worse"] == sum(rate < 0 for rate in rates.values())
    turned = difference(b, a)
    assert turned["accuracy"]["mean"] == pytest.approx(-summary["accuracy"]["mean"])


def test_an_interval_is_that_of_all_ways_to_draw_three_tasks() -> None:
    """Three tasks can be drawn in 27 ways: the bounds are quantiles of those means, widened as the estimator does."""
    rates = [0.0, 0.5, 1.0]
    scores = {f"t{task}": [float(sample < rate * 4) for sample in range(4)] for task, rate in enumerate(rates)}
    summary = policy_summary(results("a", {t: [trial(s) for s in row] for t, row in scores.items()}, 4))
    means = np.array([np.mean(ways) for ways in itertools.product(rates, repeat=3)])
    wide = 0.5 + (means - 0.5) * math.sqrt(3 / 2)
    low, high = np.quantile(np.repeat(wide, 50), [0.025, 0.975])
    assert summary["accuracy"]["low"] == pytest.approx(max(0.0, low), abs=0.03)
    assert summary["accuracy"]["high"] == pytest.approx(min(1.0, high), abs=0.03)


def test_pairing_takes_the_difficulty_of_tasks_out_of_a_difference() -> None:
    """Half of the tasks are hard for both; the second policy is better by a quarter on each."""
    base = {f"t{i}": [float(sample < (0 if i % 2 else 3)) for sample in range(4)] for i in range(20)}
    lifted = {task: [1.0, *row[:3]] for task, row in base.items()}
    a, b = (
        results(name, {t: [trial(s) for s in row] for t, row in scores.items()}, 4)
        for name, scores in (("a", base), ("b", lifted))
    )
    alone, paired = policy_summary(b)["accuracy"], difference(a, b)["accuracy"]
    assert paired["mean"] == pytest.approx(0.25)
    assert paired["high"] - paired["low"] < 0.01 < 0.2 < alone["high"] - alone["low"]


# ------------------------------------------------------------------------------------------- infrastructure failures


def test_infrastructure_failures_are_counted_separately_and_never_as_zeros() -> None:
    outcomes: dict[str, list[Any]] = {
        "good": [trial(1.0), trial(1.0)],
        "lost": [trial(1.0), "sandbox: the pod was lost"],
        "bad": [trial(0.0), trial(0.0)],
    }
    found = results("a", outcomes, 2)
    summary = policy_summary(found)
    assert summary["accuracy"]["mean"] == 0.5
    assert (summary["tasks"], summary["trials"]) == (2, {"graded": 5, "wanted": 6, "counted": 4})
    about = summary["infrastructure"]
    assert about["failures"] == 2
    assert about["by_class"] == {"sandbox": 2}
    assert list(about["given_up"]) == ["lost"]
    assert [row["counted"] for row in trial_rows(found)] == [True, True, True, True, False]
    assert found.finished


def test_only_tasks_that_both_finished_are_compared() -> None:
    a = results("a", {"x": [trial(0.0)], "y": ["sandbox: lost"], "z": [trial(1.0)]}, 1)
    b = results("b", {"x": [trial(1.0)], "y": [trial(1.0)], "z": ["sandbox: lost"]}, 1)
    summary = difference(a, b)
    assert (summary["tasks"], summary["tasks_of_one_only"]) == (1, 2)
    assert summary["accuracy"] == {"mean": 1.0, "low": None, "high": None}
    assert difference(a, results("c", {"y": [trial(1.0)]}, 1))["tasks"] == 0


def test_a_policy_without_trials_has_no_mean(tmp_path: Path) -> None:
    nothing = read_results("a", tmp_path / "slots.sqlite", 3, 2)
    assert not nothing.finished
    summary = summarize([nothing], {})
    assert "accuracy" not in summary["policies"][0]
    assert not summary["finished"]
    assert json.loads(json.dumps(summary)) == summary


def test_unfinished_tasks_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "slots.sqlite"
    with closing(RolloutQueue(path, QueueSettings(group_size=2))) as slots:
        start(slots, 0, ["x", "y"])
        for score in (1.0, 1.0, 0.0):
            slot = slots.claim("w", 0.0)
            assert slot is not None
            slots.finish(slot, trial(score), "t", (0, 0))
        found = read_results("a", path, 2, 2)  # while the queue is open for writing
    summary = policy_summary(found)
    assert (summary["tasks"], summary["accuracy"]["mean"], found.finished) == (1, 1.0, False)
    assert [len(row["policies"]["a"]["solved"]) for row in task_rows([found])] == [2, 1]


# ------------------------------------------------------------------------------------------- tokens, time and cost


def test_tokens_time_and_cost_are_per_trial_and_per_solved_trial() -> None:
    dear = {"prompt": 3000, "cached": 1000, "turns": 8, "calls": 5, "wall_s": 4.0, "model_s": 3.0}
    outcomes = {"x": [trial(1.0), trial(0.0)], "y": [trial(0.0, made=300, cost=dear)] * 2}
    summary = policy_summary(results("a", outcomes, 2), PRICE)
    assert summary["spent"]["made"]["mean"] == 200
    assert summary["spent"]["prompt"]["mean"] == 2000
    assert summary["spent"]["seconds"]["mean"] == 3.0
    cheap, high = (400 * 2 + 600 * 0.5 + 100 * 8) / 1e6, (2000 * 2 + 1000 * 0.5 + 300 * 8) / 1e6
    assert summary["spent"]["dollars"]["mean"] == pytest.approx((cheap + high) / 2)
    assert summary["per_solved"]["dollars"] == pytest.approx(2 * cheap + 2 * high)
    assert summary["per_solved"]["made"] == 800
    unpriced = policy_summary(results("a", outcomes, 2))
    assert "dollars" not in unpriced["spent"]
    none = policy_summary(results("a", {"x": [trial(0.0)] * 2}, 2), PRICE)
    assert none["per_solved"]["dollars"] is None


def test_categories_endings_errors_and_cheats_are_counted() -> None:
    outcomes = {
        "x": [trial(1.0, errors={"timeout": 1}), trial(0.0, ending="turns")],
        "y": [trial(0.0, "review", hack="went for the reward files"), trial(0.0, "review", errors={"timeout": 2})],
    }
    summary = policy_summary(results("a", outcomes, 2))
    assert summary["by_category"]["debugging"] == {"tasks": 1, "accuracy": 0.5, "pass_at": {"2": 1.0}}
    assert summary["by_category"]["review"]["accuracy"] == 0.0
    assert summary["endings"] == {"final": 0.75, "turns": 0.25}
    assert summary["errors"] == {"calls": 12, "failed": {"timeout": 3}}
    assert summary["hacks"] == 1
