"""Statistics of held-out evaluations: means over tasks, best of k, bootstrap intervals, paired comparison.

Tasks are independent samples, but several rollouts of one task are not. Every mean is therefore a mean over tasks, and
every interval a bootstrap over tasks.

A proper session has valid calls and a proper ending (`is_proper`). The solve rate among proper sessions, beside their
share, tells a better solver from a model that only learned the format: it is a ratio of sums over tasks, because a task
may have no proper session.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import InputError
from etude.evaluation.held_out import Evaluation
from etude.rollouts.queue_records import Slot
from etude.tasks.task import TASK_LABELS

RESAMPLES = 2000  # of a bootstrap: its own error in a bound is then a few hundredths of the interval's width
MAX_DRAWN = 1 << 20  # numbers drawn at once, to bound memory
LEVEL = 0.95

INVALID_CALLS = ("malformed_call", "unknown_tool", "bad_arguments", "denied")  # error classes of calls that never ran

Floats = npt.NDArray[np.float64]


def is_proper(record: Mapping[str, Any]) -> bool:
    """Return whether a session ended with a final message and all its calls were valid, from its rollout's record."""
    errors = record.get("errors", {})
    return record.get("ending") == "final" and not any(errors.get(name) for name in INVALID_CALLS)


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
    record |= _with_bounds("proper", np.array([row.proper / len(row.solved) for row in table]), seed)
    record |= _ratio("proper_solved", table, seed)
    labels = [part for name in TASK_LABELS for part in _by_label(name, table, size, seed)]
    return record | dict(labels) | _costs(samples) | _endings(samples) | _versions(samples)


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
        "proper": lambda row: row.proper / len(row.solved),
    }
    for name, measure in measures.items():
        record |= _with_bounds(name, np.array([measure(new[task]) - measure(old[task]) for task in shared]), seed)
    return record | _ratio("proper_solved", [new[task] for task in shared], seed, [old[task] for task in shared])


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
    return _bootstrap(len(values), lambda drawn: values[drawn].mean(axis=-1), seed, resamples, level)


def _bootstrap(
    count: int, statistic: Callable[[Any], Floats], seed: int, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float] | None:
    """Return the interval of a statistic of tasks, which is given their indices; resamples without a value are left
    out."""
    if count < 2:
        return None
    rng = np.random.default_rng(seed)
    centre, rows = statistic(np.arange(count)), max(1, MAX_DRAWN // count)
    parts = (min(rows, resamples - at) for at in range(0, resamples, rows))
    found = np.concatenate([statistic(rng.integers(count, size=(part, count))) for part in parts])
    found = found[~np.isnan(found)]
    low, high = np.quantile(
        centre + (found - centre) * math.sqrt(count / (count - 1)), [(1 - level) / 2, (1 + level) / 2]
    )
    return float(low), float(high)


def _ratio(
    name: str, table: Sequence["_TaskSamples"], seed: int, minus: Sequence["_TaskSamples"] = ()
) -> dict[str, float | None]:
    """Return the solve rate among proper sessions, or its difference from that of `minus`, task by task; None for
    none."""
    sides = [
        (np.array([row.proper_solved for row in rows], float), np.array([row.proper for row in rows], float))
        for rows in (table, minus)
        if rows
    ]

    def statistic(drawn: Any) -> Floats:
        with np.errstate(invalid="ignore"):
            rates = [solved[drawn].sum(axis=-1) / proper[drawn].sum(axis=-1) for solved, proper in sides]
        return np.asarray(rates[0] - rates[1] if len(rates) > 1 else rates[0])

    if not all(proper.sum() for _, proper in sides):
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    low, high = _bootstrap(len(table), statistic, seed) or (None, None)
    return {name: float(statistic(np.arange(len(table)))), f"{name}_low": low, f"{name}_high": high}


def _with_bounds(name: str, values: Floats, seed: int) -> dict[str, float | None]:
    low, high = bootstrap_interval(values, seed=seed) or (None, None)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


# ------------------------------------------------------------------------------------------- parts of the record


@dataclass(frozen=True)
class _TaskSamples:
    """The samples of one task."""

    task: str
    solved: list[float]
    scores: list[float]
    proper: int  # sessions
    proper_solved: int
    labels: Mapping[str, str] = field(default_factory=dict)  # category, family and difficulty


def _by_task(evaluation: Evaluation) -> list[_TaskSamples]:
    found = []
    for group in evaluation.groups:
        records = [slot.record for slot in group.slots]
        proper = [record for record in records if is_proper(record)]
        found.append(
            _TaskSamples(
                group.task,
                [float(bool(record["solved"])) for record in records],
                [float(record["score"]) for record in records],
                len(proper),
                sum(bool(record["solved"]) for record in proper),
                {name: str(records[0].get(name, "")) for name in TASK_LABELS},
            )
        )
    return found


def _by_label(label: str, table: Sequence[_TaskSamples], size: int, seed: int) -> Iterator[tuple[str, Any]]:
    """Yield the figures of the tasks of each category, family or difficulty; of no label only the category "none"."""
    groups: defaultdict[str, list[_TaskSamples]] = defaultdict(list)
    for row in table:
        if row.labels.get(label) or label == "category":
            groups[row.labels.get(label) or "none"].append(row)
    for name, rows in sorted(groups.items()):
        yield f"{label}/{name}/tasks", len(rows)
        solved = _with_bounds("solved", np.array([np.mean(row.solved) for row in rows]), seed)
        yield from ((f"{label}/{name}/{key}", value) for key, value in solved.items())
        yield f"{label}/{name}/best/{size}", float(np.mean([best_of(row.solved, size) for row in rows]))


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
