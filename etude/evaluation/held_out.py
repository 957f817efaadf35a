"""Measuring on held-out tasks: K samples of each through the same slots and sessions as training, and what they say.

An evaluation is groups of a table of its own, named STEP/TASK. It is answered by whatever weights are there, so it
says which they were. Tasks are what was drawn from the world, samples of one task are not independent: every interval
is a bootstrap over tasks. A rollout that the infrastructure lost is no failure of the agent: a task with one that
could not be had is left out of every mean, and counted beside it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import EtudeError, InputError
from etude.rollouts.queue import ReadyGroup, RolloutQueue, Slot

DRAWS = 2000  # of a bootstrap: its own error in a bound is then a few hundredths of the interval's width
AT_ONCE = 1 << 20  # numbers drawn at once, for the memory's sake
LEVEL = 0.95

Floats = npt.NDArray[np.float64]


# ------------------------------------------------------------------------------------------- asking


def choose_tasks(tasks: Iterable[str], most: int | None) -> list[str]:
    """At most so many of the tasks, evenly over their sorted names: the same at every evaluation."""
    names = sorted(tasks)
    count = len(names) if most is None else min(most, len(names))
    return [names[index * len(names) // count] for index in range(count)]


def start(evaluations: RolloutQueue, step: int, tasks: Iterable[str], expected: Mapping[str, float] | None = None) -> int:
    """Queue the samples of every task; how many tasks are new. To begin again what was begun changes nothing."""
    names = list(tasks)
    if not names:
        raise InputError(f"evaluation at step {step}: there are no held-out tasks")
    seconds = expected or {}
    return evaluations.add((f"{_prefix(step)}{name}", seconds.get(name, 0.0)) for name in names)


def reconcile(evaluations: RolloutQueue, now: float) -> dict[str, int]:
    """Queue what its worker lost. Answers do not grow too old here, whatever the trainer's version is by now."""
    return evaluations.reconcile(now, -1)  # below every version, also of a rollout in which no token was made


@dataclass(frozen=True)
class EvaluationProgress:
    """How far an evaluation is, in samples. Those of tasks that were given up are not wanted any more."""

    ready: int
    wanted: int
    given_up: int  # tasks

    @property
    def finished(self) -> bool:
        return self.ready >= self.wanted


def started(evaluations: RolloutQueue) -> list[int]:
    """The steps that have an evaluation."""
    return sorted({int(task.partition("/")[0]) for task in evaluations.tasks()})


def progress(evaluations: RolloutQueue, step: int) -> EvaluationProgress:
    found = evaluations.progress(_prefix(step))
    going = [group_progress for group_progress in found if not group_progress.dropped]
    return EvaluationProgress(sum(s.ready for s in going), sum(s.size for s in going), len(found) - len(going))


def is_finished(evaluations: RolloutQueue, step: int) -> bool:
    """Whether an evaluation was begun, and nothing more will come of it."""
    found = evaluations.progress(_prefix(step))
    return bool(found) and all(group_progress.is_finished for group_progress in found)


def _prefix(step: int) -> str:
    return f"{step:06d}/"


# ------------------------------------------------------------------------------------------- what came of it


@dataclass(frozen=True)
class Evaluation:
    """The answers of one evaluation: whole groups under the names of their tasks."""

    step: int
    groups: tuple[ReadyGroup, ...]
    given_up: Mapping[str, str] = field(default_factory=dict)  # task to why
    failures: int = 0  # of the infrastructure, over all samples: retried, or given up


def results(evaluations: RolloutQueue, step: int) -> Evaluation:
    """What an evaluation that is finished came to."""
    found = evaluations.progress(_prefix(step))
    if waiting := [group_progress.task for group_progress in found if not group_progress.is_finished] if found else ["all of it"]:
        raise EtudeError(f"evaluation at step {step} is not finished: {len(waiting)} to come, such as {waiting[0]}")
    names = {group_progress.id: group_progress.task.removeprefix(_prefix(step)) for group_progress in found}
    groups = (evaluations.group(group_progress.id) for group_progress in found if not group_progress.dropped)
    return Evaluation(
        step,
        tuple(replace(group, task=names[group.id]) for group in groups),
        {names[group_progress.id]: group_progress.dropped for group_progress in found if group_progress.dropped},
        sum(group_progress.failures for group_progress in found),
    )


def subset(evaluation: Evaluation, prefix: str) -> Evaluation:
    """The tasks whose names begin so."""
    groups = tuple(group for group in evaluation.groups if group.task.startswith(prefix))
    given_up = {task: why for task, why in evaluation.given_up.items() if task.startswith(prefix)}
    return replace(evaluation, groups=groups, given_up=given_up)


def summarise(evaluation: Evaluation, *, seed: int = 0) -> dict[str, Any]:
    """One flat line of an evaluation: all rates are means over tasks, with the bounds of their intervals beside."""
    beside = {
        "infrastructure/given_up": len(evaluation.given_up),
        "infrastructure/failures": evaluation.failures,
    }
    if not evaluation.groups:  # every task was given up: there is no mean, and none is made up
        return {"tasks": 0, "samples": 0, **beside}
    table = _table(evaluation)
    samples = [slot for group in evaluation.groups for slot in group.slots]
    line: dict[str, Any] = {"tasks": len(table), "samples": len(samples), **beside}
    for name, rows in (("solved", [row.solved for row in table]), ("score", [row.scores for row in table])):
        line |= _with_bounds(name, np.array([np.mean(row) for row in rows]), seed)
    size = min(len(row.solved) for row in table)
    for k in ladder(size):
        line |= _with_bounds(f"best/{k}", np.array([best_of(row.solved, k) for row in table]), seed)
        line[f"best_score/{k}"] = float(np.mean([best_of(row.scores, k) for row in table]))
    return line | _by_category(table, size) | _prices(samples) | _endings(samples) | _versions(samples)


def compare(before: Evaluation, after: Evaluation, *, seed: int = 0) -> dict[str, Any]:
    """What changed, task by task: only tasks that both answered count, so that hard ones are not held against easy."""
    old, new = ({row.task: row for row in _table(evaluation)} for evaluation in (before, after))
    shared = sorted(old.keys() & new.keys())
    if not shared:
        raise InputError(f"evaluations at steps {before.step} and {after.step} share no task that both answered")
    size = min(len(rows[task].solved) for rows in (old, new) for task in shared)
    line: dict[str, Any] = {"from": before.step, "to": after.step, "tasks": len(shared)}
    line["tasks_of_one_only"] = len(old.keys() ^ new.keys())
    measures: dict[str, Callable[[_Row], float]] = {
        "solved": lambda row: float(np.mean(row.solved)),
        "score": lambda row: float(np.mean(row.scores)),
        f"best/{size}": lambda row: best_of(row.solved, size),
    }
    for name, measure in measures.items():
        line |= _with_bounds(name, np.array([measure(new[task]) - measure(old[task]) for task in shared]), seed)
    return line


# ------------------------------------------------------------------------------------------- estimators


def ladder(size: int) -> list[int]:
    """1, 2, 4, ... and the size itself."""
    return [*(1 << power for power in range(size.bit_length()) if 1 << power < size), size]


def best_of(values: Sequence[float], k: int) -> float:
    """The best of k samples, as all subsets of the samples that are there have it on average: nothing is drawn.

    With i values below it, a value is the best of C(i, k - 1) subsets. Of values that are 0 or 1, c ones among n, that
    makes 1 - C(n - c, k) / C(n, k), the usual unbiased estimate of success in k attempts.
    """
    n = len(values)
    if not 1 <= k <= n:
        raise InputError(f"best of {k}: there are {n} samples; expected from 1 to as many")
    whole = math.comb(n, k)
    return math.fsum(math.comb(i, k - 1) / whole * value for i, value in enumerate(sorted(map(float, values))))


def interval(values: Floats, *, seed: int = 0, draws: int = DRAWS, level: float = LEVEL) -> tuple[float, float] | None:
    """Where the mean lies, by drawing tasks anew, with replacement; None from one task, which tells nothing of others.

    Resampled means spread too little by a factor of sqrt(1 - 1/n), which matters for few tasks, so they are widened.
    Tasks that are all alike give an interval of no width: a bootstrap knows only what it has seen.
    """
    count = len(values)
    if count < 2:
        return None
    chance = np.random.default_rng(seed)
    centre, rows = values.mean(), max(1, AT_ONCE // count)
    parts = (min(rows, draws - at) for at in range(0, draws, rows))
    means = np.concatenate([values[chance.integers(count, size=(part, count))].mean(axis=1) for part in parts])
    low, high = np.quantile(
        centre + (means - centre) * math.sqrt(count / (count - 1)), [(1 - level) / 2, (1 + level) / 2]
    )
    return float(low), float(high)


def _with_bounds(name: str, values: Floats, seed: int) -> dict[str, float | None]:
    low, high = interval(values, seed=seed) or (None, None)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}


# ------------------------------------------------------------------------------------------- parts of the line


@dataclass(frozen=True)
class _Row:
    """A task's samples."""

    task: str
    category: str
    solved: list[float]
    scores: list[float]


def _table(evaluation: Evaluation) -> list[_Row]:
    return [
        _Row(
            group.task,
            str(_said(group.slots[0]).get("category", "")) or "none",
            [float(bool(_said(slot)["solved"])) for slot in group.slots],
            [float(_said(slot)["score"]) for slot in group.slots],
        )
        for group in evaluation.groups
    ]


def _said(slot: Slot) -> dict[str, Any]:
    if slot.reward is None:
        raise EtudeError(f"slot {slot.id} of {slot.task} is {slot.state}: it has no reward to be counted")
    return slot.reward


def _by_category(table: Sequence[_Row], size: int) -> dict[str, Any]:
    categories: defaultdict[str, list[_Row]] = defaultdict(list)
    for row in table:
        categories[row.category].append(row)
    line: dict[str, Any] = {}
    for name, rows in sorted(categories.items()):
        line[f"category/{name}/tasks"] = len(rows)
        line[f"category/{name}/solved"] = float(np.mean([np.mean(row.solved) for row in rows]))
        line[f"category/{name}/best/{size}"] = float(np.mean([best_of(row.solved, size) for row in rows]))
    return line


def _prices(samples: Sequence[Slot]) -> dict[str, float | None]:
    """What a success costs, failures paid for too; and what a session that succeeded took itself."""
    solved = [slot for slot in samples if _said(slot)["solved"]]
    line: dict[str, float | None] = {}
    prices: dict[str, Callable[[Slot], float]] = {
        "tokens": lambda slot: float(_said(slot)["made"]),
        "turns": lambda slot: float(_said(slot)["cost"]["turns"]),
    }
    for name, price in prices.items():
        everywhere, there = math.fsum(map(price, samples)), math.fsum(map(price, solved))
        line[name] = everywhere / len(samples)
        line[f"{name}_per_solved"] = everywhere / len(solved) if solved else None
        line[f"{name}_when_solved"] = there / len(solved) if solved else None
    return line


def _endings(samples: Sequence[Slot]) -> dict[str, float]:
    counted = Counter(str(_said(slot)["ending"]) for slot in samples)
    return {f"ending/{name}": count / len(samples) for name, count in sorted(counted.items())}


def _versions(samples: Sequence[Slot]) -> dict[str, int]:
    """The weights that answered: an evaluation goes on while the trainer does."""
    oldest = [slot.oldest_step for slot in samples if slot.oldest_step is not None and slot.oldest_step >= 0]
    newest = [slot.newest_step for slot in samples if slot.newest_step is not None and slot.newest_step >= 0]
    return {"versions/oldest": min(oldest), "versions/newest": max(newest)} if oldest and newest else {}
