"""What the trials say: accuracy, pass@k and best-of-K, tokens, time and cost of every policy, and how two differ.

The estimators are those of `etude.evaluation.held_out`: tasks are what was drawn from the world, so every mean is over
tasks and every interval a bootstrap over them; policies are compared task by task. Only tasks whose trials are all
graded count. What the infrastructure lost is no zero: it stands beside the means.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from etude.bench.candidates import Price
from etude.errors import EtudeError
from etude.evaluation.held_out import Evaluation, compare, interval, summarise
from etude.rollouts.queue import ReadyGroup, Slot, Slots, Standing, Trouble

FORMAT = 1  # of summary.json
SEED = 0  # of the bootstraps: the same trials give the same intervals

Facts = dict[str, Any]
Estimate = dict[str, float | None]
Measure = Callable[[Facts], float]

# What a trial took, from its record.
SPENT: Mapping[str, Measure] = {
    "made": lambda trial: trial["made"],
    "prompt": lambda trial: trial["cost"]["prompt"],
    "cached": lambda trial: trial["cost"]["cached"],
    "turns": lambda trial: trial["cost"]["turns"],
    "calls": lambda trial: trial["cost"]["calls"],
    "seconds": lambda trial: trial["cost"]["wall_s"],
    "model_seconds": lambda trial: trial["cost"]["model_s"],
}


@dataclass(frozen=True)
class Results:
    """The trials of one policy, as far as they are."""

    name: str
    tasks: int  # that were asked for
    samples: int  # of each
    evaluation: Evaluation  # tasks whose trials are all graded, and those that were given up
    graded: tuple[Slot, ...] = ()  # every graded trial, also of tasks that do not count, or not yet
    troubles: tuple[Trouble, ...] = ()

    @property
    def counted(self) -> frozenset[str]:
        """The tasks that count."""
        return frozenset(group.task for group in self.evaluation.groups)

    @property
    def over(self) -> bool:
        """Nothing more will come."""
        return len(self.evaluation.groups) + len(self.evaluation.given_up) == self.tasks


def last_chances(slots: Slots) -> dict[str, Standing]:
    """How far every task is. What was given up may be given another chance later; the last is the one that counts."""
    return {plain_name(standing.task): standing for standing in slots.standings()}


def plain_name(task: str) -> str:
    """A task's name from that of its group, which has the number of the chance before it, as evaluations do."""
    return task.partition("/")[2]


def read_results(name: str, table: Path, tasks: int, samples: int) -> Results:
    """What the table of a policy holds by now; somebody may be working on it. One that is not there holds nothing."""
    if not table.exists():
        return Results(name, tasks, samples, Evaluation(0, ()))
    with closing(Slots.look(table)) as slots:
        standings = last_chances(slots)
        groups = {task: _named(slots.group(each.id), task) for task, each in standings.items() if each.ready}
        troubles = tuple(slots.troubles())
        failures = sum(standing.failures for standing in slots.standings())
    evaluation = Evaluation(
        0,
        tuple(groups[task] for task, each in standings.items() if each.ready == each.size and not each.dropped),
        {task: each.dropped for task, each in standings.items() if each.dropped},
        failures,
    )
    graded = tuple(slot for group in groups.values() for slot in group.slots if slot.reward is not None)
    return Results(name, tasks, samples, evaluation, graded, troubles)


def _named(group: ReadyGroup, task: str) -> ReadyGroup:
    return ReadyGroup(group.id, task, tuple(replace(slot, task=task) for slot in group.slots))


# ------------------------------------------------------------------------------------------- the summary


def summary(found: Sequence[Results], prices: Mapping[str, Price]) -> Facts:
    """Everything that the trials say, as JSON."""
    return {
        "format": FORMAT,
        "finished": all(results.over for results in found),
        "samples": found[0].samples if found else 0,
        "policies": [policy_summary(results, prices.get(results.name)) for results in found],
        "differences": [difference(before, after) for before, after in combinations(found, 2)],
        "tasks": task_rows(found),
    }


def policy_summary(results: Results, price: Price | None = None) -> Facts:
    """What one policy did."""
    evaluation = results.evaluation
    line = summarise(evaluation, seed=SEED)
    trials = [_said(slot) for group in evaluation.groups for slot in group.slots]
    about: Facts = {
        "name": results.name,
        "price": None if price is None else asdict(price),
        "tasks": line["tasks"],
        "trials": {"graded": len(results.graded), "wanted": results.tasks * results.samples, "counted": len(trials)},
        "infrastructure": _infrastructure(results),
    }
    if not trials:  # no mean of nothing
        return about
    steps = sorted(int(name.removeprefix("best_score/")) for name in line if name.startswith("best_score/"))
    return about | {
        "accuracy": _estimate(line, "solved", 0.0, 1.0),
        "score": _estimate(line, "score"),
        "pass_at": {str(k): _estimate(line, f"best/{k}", 0.0, 1.0) for k in steps},
        "best_of": {str(k): line[f"best_score/{k}"] for k in steps},
        "spent": _spent(evaluation, price),
        "per_solved": _per_solved(trials, price),
        "by_category": _by_category(line, steps[-1]),
        "endings": _shares(line, "ending/"),
        "errors": _errors(trials),
        "hacks": sum(bool(trial.get("hack")) for trial in trials),
    }


def difference(before: Results, after: Results) -> Facts:
    """How much better `after` is than `before`, over the tasks that both have answered."""
    about: Facts = {"from": before.name, "to": after.name}
    shared = before.counted & after.counted
    if not shared:
        return about | {"tasks": 0, "tasks_of_one_only": len(before.counted ^ after.counted)}
    line = compare(before.evaluation, after.evaluation, seed=SEED)
    (best,) = (name for name in line if name.startswith("best/") and name.removeprefix("best/").isdigit())
    old, new = (
        {group.task: np.mean([_said(slot)["solved"] for slot in group.slots]) for group in each.evaluation.groups}
        for each in (before, after)
    )
    return about | {
        "tasks": line["tasks"],
        "tasks_of_one_only": line["tasks_of_one_only"],
        "accuracy": _estimate(line, "solved", -1.0, 1.0),
        "score": _estimate(line, "score"),
        "pass_at": {best.removeprefix("best/"): _estimate(line, best, -1.0, 1.0)},
        "better": sum(bool(new[task] > old[task]) for task in shared),
        "worse": sum(bool(new[task] < old[task]) for task in shared),
    }


def task_rows(found: Sequence[Results]) -> list[Facts]:
    """Every task that somebody has answered or given up: what each policy's samples came to."""
    rows: dict[str, Facts] = {}
    for results in found:
        for slot in results.graded:
            row = rows.setdefault(slot.task, {"task": slot.task, "category": "", "policies": {}})
            row["category"] = row["category"] or str(_said(slot).get("category") or "")
            cell = row["policies"].setdefault(results.name, {"solved": [], "score": [], "given_up": ""})
            cell["solved"].append(bool(_said(slot)["solved"]))
            cell["score"].append(float(_said(slot)["score"]))
        for task, why in results.evaluation.given_up.items():
            row = rows.setdefault(task, {"task": task, "category": "", "policies": {}})
            cell = row["policies"].setdefault(results.name, {"solved": [], "score": []})
            cell["given_up"] = why
    return [rows[task] for task in sorted(rows)]


def trial_rows(results: Results, price: Price | None = None) -> list[Facts]:
    """Every graded trial of a policy, for people and programs that want more than means."""
    rows = []
    for slot in sorted(results.graded, key=lambda slot: (slot.task, slot.number)):
        trial = _said(slot)
        rows.append(
            {
                "policy": results.name,
                "task": slot.task,
                "sample": slot.number,
                "counted": slot.task in results.counted,
                "attempts": slot.attempt,
                "trace": slot.trace,
                "dollars": None if price is None else price.of(trial["cost"], trial["made"]),
                **trial,
            }
        )
    return rows


# ------------------------------------------------------------------------------------------- parts of it


def _estimate(line: Mapping[str, Any], name: str, least: float = -np.inf, most: float = np.inf) -> Estimate:
    """A mean and the bounds of its interval, which one task alone does not have; within what is possible at all."""
    low, high = line[f"{name}_low"], line[f"{name}_high"]
    if low is None or high is None:
        return {"mean": line[name], "low": None, "high": None}
    return {"mean": line[name], "low": max(low, least), "high": min(high, most)}


def _spent(evaluation: Evaluation, price: Price | None) -> dict[str, Estimate]:
    """Means of a trial, with intervals over tasks."""
    measures = dict(SPENT)
    if price is not None:
        measures["dollars"] = lambda trial: price.of(trial["cost"], trial["made"])
    found = {}
    for name, measure in measures.items():
        means = np.array(
            [np.mean([float(measure(_said(slot))) for slot in group.slots]) for group in evaluation.groups]
        )
        low, high = interval(means, seed=SEED) or (None, None)
        found[name] = _estimate({name: float(means.mean()), f"{name}_low": low, f"{name}_high": high}, name, 0.0)
    return found


def _per_solved(trials: Sequence[Facts], price: Price | None) -> dict[str, float | None]:
    """What a success costs, the failures on the way to it paid for too; None where there is none."""
    solved = sum(bool(trial["solved"]) for trial in trials)
    totals: dict[str, float] = {name: sum(SPENT[name](trial) for trial in trials) for name in ("made", "seconds")}
    if price is not None:
        totals["dollars"] = sum(price.of(trial["cost"], trial["made"]) for trial in trials)
    return {name: total / solved if solved else None for name, total in totals.items()}


def _by_category(line: Mapping[str, Any], most: int) -> dict[str, Facts]:
    names = [name.split("/", 1)[1].rpartition("/")[0] for name in line if name.endswith("/tasks")]
    return {
        name: {
            "tasks": line[f"category/{name}/tasks"],
            "accuracy": line[f"category/{name}/solved"],
            "pass_at": {str(most): line[f"category/{name}/best/{most}"]},
        }
        for name in names
    }


def _shares(line: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}


def _errors(trials: Sequence[Facts]) -> Facts:
    """Calls that failed, by class: how many, and of how many calls."""
    counted = sum((Counter(trial["errors"]) for trial in trials), Counter[str]())
    return {"calls": sum(trial["cost"]["calls"] for trial in trials), "failed": dict(sorted(counted.items()))}


def _infrastructure(results: Results) -> Facts:
    """What was no trial: failures by class, which were tried again, and the tasks that were given up."""
    failed = [trouble.why for trouble in results.troubles if trouble.kind in ("failed", "lost")]
    classes = Counter(why.partition(":")[0][:60] for why in failed)
    return {
        "failures": results.evaluation.failures,
        "by_class": dict(classes.most_common()),
        "last": failed[-1] if failed else "",
        "given_up": dict(results.evaluation.given_up),
    }


def _said(slot: Slot) -> Facts:
    if slot.reward is None:
        raise EtudeError(f"slot {slot.id} of {slot.task} is {slot.state}: it has no result to be counted")
    return slot.reward
