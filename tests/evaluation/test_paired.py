"""Paired comparisons over seeds and tasks, and the difference that they can detect."""

import numpy as np
import pytest

from etude.errors import InputError
from etude.evaluation.paired import (
    DifferenceVariance,
    SeedSamples,
    assumed_variance,
    compare_arms,
    detectable_difference,
    measured_variance,
)


def draw_arms(
    rng: np.random.Generator,
    *,
    tasks: int,
    samples: int,
    seeds: int,
    effect: float = 0.0,
    between_seeds: float = 0.0,
    spread: float = 0.15,
) -> tuple[SeedSamples, SeedSamples]:
    """Return binary samples of two arms; solve probabilities vary over tasks, and differ by `effect` on average."""
    arms: tuple[dict[int, dict[str, list[float]]], ...] = ({}, {})
    for seed in range(seeds):
        shift = effect + rng.normal(0, between_seeds)
        base = rng.uniform(0.25, 0.65, tasks)
        for arm, probabilities in zip(arms, (base, base + shift + rng.uniform(-spread, spread, tasks)), strict=True):
            solved = rng.random((tasks, samples)) < probabilities[:, None]
            arm[seed] = {f"task-{number}": row.astype(float).tolist() for number, row in enumerate(solved)}
    return arms[0], arms[1]


def known_variance(between_seeds: float = 0.0, spread: float = 0.15) -> DifferenceVariance:
    """Return the variance of `draw_arms` without an effect."""
    # p is uniform in (0.25, 0.65): E[p (1 - p)] = 0.45 - 0.45 ** 2 - 0.4 ** 2 / 12
    within = 0.45 - 0.45**2 - 0.4**2 / 12
    return DifferenceVariance(spread**2 / 3, within + within - spread**2 / 3, between_seeds**2, "known")


def test_the_difference_is_that_of_the_same_tasks_of_the_same_seeds() -> None:
    before = {0: {"a": [0.0, 1.0], "b": [0.0, 0.0], "only": [1.0]}, 1: {"a": [1.0], "c": [1.0]}}
    after = {0: {"a": [1.0, 1.0], "b": [0.0, 1.0]}, 1: {"a": [1.0], "c": [0.0]}, 2: {"a": [0.0]}}
    found = compare_arms(before, after)
    assert found.by_seed == {0: 0.5, 1: -0.5}
    assert (found.mean, found.pairs, found.unpaired) == (0.0, 4, 2)
    assert found.over_seeds is None
    best = compare_arms(before, after, max)
    assert best.by_seed == {0: 0.5, 1: -0.5}
    with pytest.raises(InputError, match="no task of the same seed"):
        compare_arms({0: {"a": [1.0]}}, {1: {"a": [1.0]}})


def test_pairing_removes_the_difficulty_of_tasks() -> None:
    """Each task gains exactly 0.25 over its own base rate, however different the rates are."""
    before = {0: {str(n): [float(k < n % 4) for k in range(4)] for n in range(20)}}
    after = {0: {str(n): [float(k < n % 4 + 1) for k in range(4)] for n in range(20)}}
    found = compare_arms(before, after)
    assert found.mean == 0.25
    assert found.over_tasks == pytest.approx((0.25, 0.25))


@pytest.mark.parametrize(("seeds", "between"), [(1, 0.0), (2, 0.0), (3, 0.0), (4, 0.04)])
def test_the_detectable_difference_is_detected_four_times_in_five(seeds: int, between: float) -> None:
    rng = np.random.default_rng(1)
    effect = detectable_difference(known_variance(between), 50, 4, seeds)
    found = 0
    for _ in range(200):
        arms = draw_arms(rng, tasks=50, samples=4, seeds=seeds, effect=effect, between_seeds=between)
        interval = compare_arms(*arms, resamples=300).interval
        found += interval is not None and interval[0] > 0
    assert 0.72 <= found / 200 <= 0.9  # the standard error of the simulation is 0.03


@pytest.mark.parametrize(("seeds", "between", "least"), [(1, 0.0, 0.91), (3, 0.0, 0.93), (3, 0.05, 0.9), (5, 0.1, 0.9)])
def test_the_interval_contains_the_difference(seeds: int, between: float, least: float) -> None:
    rng = np.random.default_rng(2)
    inside = 0
    for _ in range(200):
        arms = draw_arms(rng, tasks=50, samples=2, seeds=seeds, effect=0.05, between_seeds=between)
        interval = compare_arms(*arms, resamples=300).interval
        inside += interval is not None and interval[0] <= 0.05 <= interval[1]
    assert inside / 200 >= least


def test_the_variance_of_earlier_results_predicts_another_number_of_samples() -> None:
    rng = np.random.default_rng(3)
    known = known_variance(0.05)
    pairs = [draw_arms(rng, tasks=100, samples=4, seeds=20, between_seeds=0.05) for _ in range(5)]
    found = measured_variance(pairs, "earlier")
    assert found is not None
    assert found.of_task(1) == pytest.approx(known.of_task(1), rel=0.1)
    assert found.of_task(16) == pytest.approx(known.of_task(16), rel=0.3)
    assert found.seeds == pytest.approx(known.seeds, rel=0.4)
    assert measured_variance([({0: {"a": [1.0]}}, {0: {"a": [1.0]}})], "one task") is None


def test_more_tasks_samples_or_seeds_detect_less() -> None:
    assumed = assumed_variance()
    first = detectable_difference(assumed, 100, 4, 1)
    assert first == pytest.approx(0.121, abs=0.001)
    assert detectable_difference(assumed, 400, 4, 1) == pytest.approx(first / 2)
    assert detectable_difference(assumed, 100, 16, 1) < first
    assert detectable_difference(assumed, 100, 4, 2) < first
