"""Statistics of held-out evaluations: means over tasks, best of k, bootstrap intervals, paired comparison.

Tasks are independent samples, but several rollouts of one task are not. Every mean is therefore a mean over tasks, and
every interval a bootstrap over tasks.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import InputError
from etude.evaluation.held_out import Evaluation
from etude.rollouts.queue import Slot

RESAMPLES = 2000  # of a bootstrap: its own error in a bound is then a few hundredths of the interval's width
MAX_DRAWN = 1 << 20  # numbers drawn at once, to bound memory
LEVEL = 0.95

Floats = npt.NDArray[np.float64]


def summarise(evaluation: Evaluation, *, seed: int = 0) -> dict[str, Any]:
    """Return the metrics of an evaluation as one flat record. Rates are means over tasks, with interval bounds."""
    infrastructure = {
        "infrastructure/given_up": len(evaluation.dropped),
        "infrastructure/failures": evaluation.failures,
    }
    if not evaluation.groups:  # every task was dropped: there is no mean
        return {"tasks": 0, "samples": 0, **infrastructure}
    table = _by_task(evaluation)
    samples = [slot for group in evaluation.groups for slot in group.slots]
    record: dict[str, Any] = {"tasks": len(table), "samples": len(samples), **infrastructure}
    for name, rows in (("solved", [row.solved for row in table]), ("score", [row.scores for row in table])):
        record |= _with_bounds(name, np.array([np.mean(row) for row in rows]), seed)
    size = min(len(row.solved) for row in table)
    for k in powers_of_two(size):
        record |= _with_bounds(f"best/{k}", np.array([best_of(row.solved, k) for row in table]), seed)
        record[f"best_score/{k}"] = float(np.mean([best_of(row.scores, k) for row in table]))
    return record | _by_category(table, size) | _costs(samples) | _endings(samples) | _versions(samples)


def compare(before: Evaluation, after: Evaluation, *, seed: int = 0) -> dict[str, Any]:
    """Return the paired differences between two evaluations, over the tasks that both have results for."""
    old, new = ({row.task: row for row in _by_task(evaluation)} for evaluation in (before, after))
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise InputError(f"evaluations at steps {before.step} and {after.step} have no task in common")
    size = min(len(rows[task].solved) for rows in (old, new) for task in shared)
    record: dict[str, Any] = {"from": before.step, "to": after.step, "tasks": len(shared)}
    record["tasks_of_one_only"] = len(old.keys() ^ new.keys())
    measures: dict[str, Callable[[_TaskSamples], float]] = {
        "solved": lambda row: float(np.mean(row.solved)),
        "score": lambda row: float(np.mean(row.scores)),
        f"best/{size}": lambda row: best_of(row.solved, size),
    }
    for name, measure in measures.items():
        record |= _with_bounds(name, np.array([measure(new[task]) - measure(old[task]) for task in shared]), seed)
    return record


# ------------------------------------------------------------------------------------------- estimators


def powers_of_two(size: int) -> list[int]:
    """Return 1, 2, 4, ... below `size`, and `size` itself."""
    return [*(1 << power for power in range(size.bit_length()) if 1 << power < size), size]


def best_of(values: Sequence[float], k: int) -> float:
    """Return the expected best of k samples: the mean over all subsets of size k, computed exactly.

    With i values below it, a value is the best of C(i, k - 1) subsets. For values that are 0 or 1, c ones among n, the
    result is 1 - C(n - c, k) / C(n, k), the usual unbiased estimate of pass@k.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise InputError(f"best of {k}: there are {n} samples; expected k from 1 to {n}")
    subsets = math.comb(n, k)
    return math.fsum(math.comb(i, k - 1) / subsets * value for i, value in enumerate(sorted(map(float, values))))


def bootstrap_interval(
    values: Floats, *, seed: int = 0, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float] | None:
    """Return a bootstrap interval of the mean over tasks; None for a single task.

    Resampled means spread too little by a factor of sqrt(1 - 1/n), which matters for few tasks, so they are widened.
    Equal values give an interval of width zero: a bootstrap resamples only the given values.
    """
    count = len(values)
    if count < 2:
        return None
    rng = np.random.default_rng(seed)
    centre, rows = values.mean(), max(1, MAX_DRAWN // count)
    parts = (min(rows, resamples - at) for at in range(0, resamples, rows))
    means = np.concatenate([values[rng.integers(count, size=(part, count))].mean(axis=1) for part in parts])
    low, high = np.quantile(
        centre + (means - centre) * math.sqrt(count / (count - 1)), [(1 - level) / 2, (1 + level) / 2]
    )
    return float(low), float(high)


def _with_bounds(name: str, values: Floats, seed: int) -> dict[str, float | None]:
    low, high = bootstrap_interval(values, seed=seed) or (None, None)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


# ------------------------------------------------------------------------------------------- parts of the record


@dataclass(frozen=True)
class _TaskSamples:
    """The samples of one task."""

    task: str
    category: str
    solved: list[float]
    scores: list[float]


def _by_task(evaluation: Evaluation) -> list[_TaskSamples]:
    return [
        _TaskSamples(
            group.task,
            str(group.slots[0].record.get("category", "")) or "none",
            [float(bool(slot.record["solved"])) for slot in group.slots],
            [float(slot.record["score"]) for slot in group.slots],
        )
        for group in evaluation.groups
    ]


def _by_category(table: Sequence[_TaskSamples], size: int) -> dict[str, Any]:
    categories: defaultdict[str, list[_TaskSamples]] = defaultdict(list)
    for row in table:
        categories[row.category].append(row)
    record: dict[str, Any] = {}
    for name, rows in sorted(categories.items()):
        record[f"category/{name}/tasks"] = len(rows)
        record[f"category/{name}/solved"] = float(np.mean([np.mean(row.solved) for row in rows]))
        record[f"category/{name}/best/{size}"] = float(np.mean([best_of(row.solved, size) for row in rows]))
    return record


def _costs(samples: Sequence[Slot]) -> dict[str, float | None]:
    """Return tokens and turns: per sample, per solved sample with all failures included, and of solved samples only."""
    solved = [slot for slot in samples if slot.record["solved"]]
    record: dict[str, float | None] = {}
    costs: dict[str, Callable[[Slot], float]] = {
        "tokens": lambda slot: float(slot.record["made"]),
        "turns": lambda slot: float(slot.record["cost"]["turns"]),
    }
    for name, cost in costs.items():
        total, total_solved = math.fsum(map(cost, samples)), math.fsum(map(cost, solved))
        record[name] = total / len(samples)
        record[f"{name}_per_solved"] = total / len(solved) if solved else None
        record[f"{name}_when_solved"] = total_solved / len(solved) if solved else None
    return record


def _endings(samples: Sequence[Slot]) -> dict[str, float]:
    counts = Counter(str(slot.record["ending"]) for slot in samples)
    return {f"ending/{name}": count / len(samples) for name, count in sorted(counts.items())}


def _versions(samples: Sequence[Slot]) -> dict[str, int]:
    """Return the oldest and newest policy step that sampled: training continues during an evaluation."""
    oldest = [slot.oldest_step for slot in samples if slot.oldest_step is not None and slot.oldest_step >= 0]
    newest = [slot.newest_step for slot in samples if slot.newest_step is not None and slot.newest_step >= 0]
    return {"versions/oldest": min(oldest), "versions/newest": max(newest)} if oldest and newest else {}
