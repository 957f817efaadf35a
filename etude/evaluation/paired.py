"""Paired comparison of two arms over seeds and tasks, and the smallest difference that a plan can detect.

Two arms are compared on the same tasks of the same seeds: the difference of a task is that of its means over samples.
The estimate is the mean over seeds of the mean over tasks. Two intervals belong to it:

    over tasks             resamples the tasks within each seed: how sure the difference of these seeds is
    over tasks and seeds   resamples seeds, then tasks within each; only with three seeds or more

docs/sweeps.md derives the formula of `detectable_difference`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from etude.errors import InputError
from etude.evaluation.statistics import LEVEL, RESAMPLES, Floats

MIN_SEEDS = 3  # from which on seeds are resampled
POWER = 0.8
# Assumed where nothing was measured: every arm solves half of the samples, which is the largest variance.
ASSUMED_SOLVED = 0.5
ASSUMED_TASK_SHARE = 0.5  # of the variance of a sample lies between tasks
ASSUMED_CORRELATION = 0.5  # between the solve probabilities of two arms over tasks

TaskSamples = Mapping[str, Sequence[float]]  # by task: 1.0 for a solved sample, 0.0 otherwise
SeedSamples = Mapping[int, TaskSamples]


@dataclass(frozen=True)
class PairedDifference:
    """How much one arm is better than another. Bounds are None where there are too few tasks or seeds."""

    mean: float
    by_seed: Mapping[int, float]
    pairs: int  # of seed and task
    unpaired: int  # tasks that only one of the two arms has results for
    over_tasks: tuple[float, float] | None
    over_seeds: tuple[float, float] | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The wider claim that the data allow: over tasks and seeds, or else over the tasks of these seeds."""
        return self.over_seeds or self.over_tasks


def mean_of(samples: Sequence[float]) -> float:
    return float(np.mean(samples))


def compare_arms(
    before: SeedSamples,
    after: SeedSamples,
    measure: Callable[[Sequence[float]], float] = mean_of,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> PairedDifference:
    """Return the difference of `after` to `before`, paired by seed and task; `measure` is of the samples of a task."""
    shared = {each: sorted(before[each].keys() & after[each].keys()) for each in sorted(before.keys() & after.keys())}
    shared = {each: tasks for each, tasks in shared.items() if tasks}
    if not shared:
        raise InputError("the arms have no task of the same seed in common")
    values = [
        np.array([measure(after[each][task]) - measure(before[each][task]) for task in tasks])
        for each, tasks in shared.items()
    ]
    means = np.array([each.mean() for each in values])
    both = {*before, *after}
    unpaired = sum(len(before.get(each, {}).keys() ^ after.get(each, {}).keys()) for each in both)
    few = any(len(each) < 2 for each in values)
    return PairedDifference(
        float(means.mean()),
        dict(zip(shared, means.tolist(), strict=True)),
        sum(map(len, values)),
        unpaired,
        None if few else _interval(values, False, seed, resamples),
        None if few or len(values) < MIN_SEEDS else _interval(values, True, seed, resamples),
    )


def _interval(values: Sequence[Floats], over_seeds: bool, seed: int, resamples: int) -> tuple[float, float]:
    """Return a bootstrap interval of the mean over seeds of the mean over tasks.

    As in `bootstrap_interval`, deviations are widened by sqrt(n / (n - 1)), those of tasks and those of seeds.
    """
    rng = np.random.default_rng(seed)
    seeds = len(values)
    means = np.array([each.mean() for each in values])
    deviation = np.zeros(resamples)
    for position in range(seeds):
        drawn = rng.integers(seeds, size=resamples) if over_seeds else np.full(resamples, position)
        for number in np.unique(drawn):
            rows, sample = drawn == number, values[number]
            count = len(sample)
            chosen = sample[rng.integers(count, size=(int(rows.sum()), count))].mean(axis=1)
            deviation[rows] += (chosen - means[number]) * math.sqrt(count / (count - 1)) / seeds
        if over_seeds:
            deviation += (means[drawn] - means.mean()) * math.sqrt(seeds / (seeds - 1)) / seeds
    low, high = np.quantile(means.mean() + deviation, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


# ------------------------------------------------------------------------------------------- power


@dataclass(frozen=True)
class DifferenceVariance:
    """The variance of a paired difference in its parts, and where the figures come from."""

    tasks: float  # between tasks, of the difference of the solve probabilities
    samples: float  # of one sample of each arm, within a task
    seeds: float  # between seeds, of the difference
    origin: str

    def of_task(self, samples: int) -> float:
        """Return the variance of the difference of a task whose means are over `samples`."""
        return self.tasks + self.samples / samples


def assumed_variance() -> DifferenceVariance:
    """Return the variance of binary samples under the stated assumptions."""
    sample = ASSUMED_SOLVED * (1 - ASSUMED_SOLVED)
    between = 2 * sample * ASSUMED_TASK_SHARE * (1 - ASSUMED_CORRELATION)
    within = 2 * sample * (1 - ASSUMED_TASK_SHARE)
    words = (
        f"assumed: {ASSUMED_SOLVED:.0%} solved, {ASSUMED_TASK_SHARE:.0%} of the variance between tasks, correlation "
        f"{ASSUMED_CORRELATION:g} of the arms over tasks, no variance between seeds"
    )
    return DifferenceVariance(between, within, 0.0, words)


def measured_variance(pairs: Sequence[tuple[SeedSamples, SeedSamples]], origin: str) -> DifferenceVariance | None:
    """Return the mean variance of earlier differences, of pairs of arms; None without a pair of two tasks or more."""
    found = [each for before, after in pairs if (each := _variance_of(before, after)) is not None]
    if not found:
        return None
    tasks, samples, seeds = (float(np.mean(column)) for column in zip(*found, strict=True))
    return DifferenceVariance(tasks, samples, seeds, origin)


def _variance_of(before: SeedSamples, after: SeedSamples) -> tuple[float, float, float] | None:
    """Return the variance between tasks, of one sample of each arm, and between seeds, by the method of moments."""
    totals, noises, pair_noises, errors, means = [], [], [], [], []
    for each in sorted(before.keys() & after.keys()):
        shared = sorted(before[each].keys() & after[each].keys())
        if len(shared) < 2:
            continue
        sides = [[np.asarray(arm[each][task], float) for task in shared] for arm in (before, after)]
        differences = np.array([new.mean() - old.mean() for old, new in zip(*sides, strict=True)])
        # One sample of a task does not tell its noise: then all variance counts as that between tasks.
        spread = [[row.var(ddof=1) if len(row) > 1 else 0.0 for row in side] for side in sides]
        noises.append(np.mean(spread[0]) + np.mean(spread[1]))
        in_means = [[v / len(row) for v, row in zip(*both, strict=True)] for both in zip(spread, sides, strict=True)]
        pair_noises.append(np.mean(in_means[0]) + np.mean(in_means[1]))
        totals.append(differences.var(ddof=1))
        errors.append(differences.var(ddof=1) / len(shared))
        means.append(differences.mean())
    if not totals:
        return None
    between_tasks = max(0.0, float(np.mean(totals) - np.mean(pair_noises)))
    between_seeds = max(0.0, float(np.var(means, ddof=1) - np.mean(errors))) if len(means) > 1 else 0.0
    return between_tasks, float(np.mean(noises)), between_seeds


def detectable_difference(variance: DifferenceVariance, tasks: int, samples: int, seeds: int) -> float:
    """Return the difference whose interval excludes zero with a probability of 80 %, two-sided at 5 %.

    With v the variance of a task's difference and t that between seeds, the mean has the variance
    v / (seeds tasks) + t / seeds. The interval over tasks and seeds counts v twice, because the means of seeds that it
    resamples contain the noise of tasks, which it then resamples again.
    """
    noise = variance.of_task(samples) / (seeds * tasks)
    between = variance.seeds / seeds
    assumed_by_interval = 2 * noise + between if seeds >= MIN_SEEDS else noise
    normal = NormalDist()
    return normal.inv_cdf((1 + LEVEL) / 2) * math.sqrt(assumed_by_interval) + normal.inv_cdf(POWER) * math.sqrt(
        noise + between
    )
