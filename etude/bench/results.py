"""Statistics of the trials: accuracy, pass@k, best of k, tokens, time and cost of every policy, and their differences.

The estimators are those of `etude.evaluation.held_out`: tasks are the independent samples, so means and bootstrap
intervals are over tasks, and policies are compared task by task. Only tasks whose trials are all scored count.
Infrastructure failures do not count as zeros; they are reported separately.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from etude.bench.policies import TokenPrice
from etude.evaluation.held_out import Evaluation
from etude.evaluation.statistics import bootstrap_interval, compare, summarise
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import GroupProgress, Incident, ReadyGroup, Slot

FORMAT = 1  # of summary.json
SEED = 0  # of the bootstrap: the same trials give the same intervals

JsonObject = dict[str, Any]
Estimate = dict[str, float | None]
Measure = Callable[[JsonObject], float]

# Resources used by a trial, from its record.
SPENT: Mapping[str, Measure] = {
    "made": lambda trial: trial["made"],
    "thinking": lambda trial: trial["cost"].get("thinking", 0),
    "prompt": lambda trial: trial["cost"]["prompt"],
    "cached": lambda trial: trial["cost"]["cached"],
    "turns": lambda trial: trial["cost"]["turns"],
    "calls": lambda trial: trial["cost"]["calls"],
    "seconds": lambda trial: trial["cost"]["wall_s"],
    "model_seconds": lambda trial: trial["cost"]["model_s"],
}


@dataclass(frozen=True)
class PolicyResults:
    """The trials of one policy so far."""

    name: str
    tasks: int  # requested
    samples: int  # per task
    evaluation: Evaluation  # tasks whose trials are all scored, and those that were given up
    graded: tuple[Slot, ...] = ()  # every scored trial, including those of tasks that do not count (yet)
    incidents: tuple[Incident, ...] = ()

    @property
    def counted(self) -> frozenset[str]:
        """The tasks that count."""
        return frozenset(group.task for group in self.evaluation.groups)

    @property
    def finished(self) -> bool:
        """Whether every task is scored or given up."""
        return len(self.evaluation.groups) + len(self.evaluation.dropped) == self.tasks


def latest_groups(slots: RolloutQueue) -> dict[str, GroupProgress]:
    """Return the latest group of every task. A task that was given up is queued again by a resume; the last counts."""
    return {task_name(group.task): group for group in slots.progress()}


def task_name(task: str) -> str:
    """Return a task's name from that of its group, ROUND/TASK."""
    return task.partition("/")[2]


def read_results(name: str, table: Path, tasks: int, samples: int) -> PolicyResults:
    """Read the results of a policy from its queue, which may be in use; a queue that does not exist is empty."""
    if not table.exists():
        return PolicyResults(name, tasks, samples, Evaluation(0, ()))
    with closing(RolloutQueue.open_read_only(table)) as slots:
        progress = latest_groups(slots)
        groups = {task: _renamed(slots.group(each.id), task) for task, each in progress.items() if each.ready}
        incidents = tuple(slots.incidents())
        failures = sum(group.failures for group in slots.progress())
    evaluation = Evaluation(
        0,
        tuple(groups[task] for task, each in progress.items() if each.ready == each.size and not each.dropped),
        {task: each.dropped for task, each in progress.items() if each.dropped},
        failures,
    )
    graded = tuple(slot for group in groups.values() for slot in group.slots if slot.reward is not None)
    return PolicyResults(name, tasks, samples, evaluation, graded, incidents)


def _renamed(group: ReadyGroup, task: str) -> ReadyGroup:
    return ReadyGroup(group.id, task, tuple(replace(slot, task=task) for slot in group.slots))


# ------------------------------------------------------------------------------------------- the summary


def summarize(found: Sequence[PolicyResults], prices: Mapping[str, TokenPrice]) -> JsonObject:
    """Return the statistics of all policies as JSON."""
    return {
        "format": FORMAT,
        "finished": all(results.finished for results in found),
        "samples": found[0].samples if found else 0,
        "policies": [policy_summary(results, prices.get(results.name)) for results in found],
        "differences": [difference(before, after) for before, after in combinations(found, 2)],
        "tasks": task_rows(found),
    }


def policy_summary(results: PolicyResults, price: TokenPrice | None = None) -> JsonObject:
    """Return the statistics of one policy."""
    evaluation = results.evaluation
    line = summarise(evaluation, seed=SEED)
    trials = [slot.record for group in evaluation.groups for slot in group.slots]
    about: JsonObject = {
        "name": results.name,
        "price": None if price is None else asdict(price),
        "tasks": line["tasks"],
        "trials": {"graded": len(results.graded), "wanted": results.tasks * results.samples, "counted": len(trials)},
        "infrastructure": _infrastructure(results),
    }
    if not trials:
        return about
    steps = sorted(int(name.removeprefix("best_score/")) for name in line if name.startswith("best_score/"))
    return about | {
        "accuracy": _estimate(line, "solved", 0.0, 1.0),
        "score": _estimate(line, "score"),
        "pass_at": {str(k): _estimate(line, f"best/{k}", 0.0, 1.0) for k in steps},
        "best_of": {str(k): line[f"best_score/{k}"] for k in steps},
        "spent": _mean_resources(evaluation, price),
        "per_solved": _per_solved(trials, price),
        "by_category": _by_category(line, steps[-1]),
        "endings": _shares(line, "ending/"),
        "errors": _errors(trials),
        "hacks": sum(bool(trial.get("hack")) for trial in trials),
    }


def difference(before: PolicyResults, after: PolicyResults) -> JsonObject:
    """Return how much better `after` is than `before`, over the tasks that both have finished."""
    about: JsonObject = {"from": before.name, "to": after.name}
    shared = before.counted & after.counted
    if not shared:
        return about | {"tasks": 0, "tasks_of_one_only": len(before.counted ^ after.counted)}
    line = compare(before.evaluation, after.evaluation, seed=SEED)
    (best,) = (name for name in line if name.startswith("best/") and name.removeprefix("best/").isdigit())
    old, new = (
        {group.task: np.mean([slot.record["solved"] for slot in group.slots]) for group in each.evaluation.groups}
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


def task_rows(found: Sequence[PolicyResults]) -> list[JsonObject]:
    """Return a row per task with the results of each policy's trials; tasks without any result are left out."""
    rows: dict[str, JsonObject] = {}
    for results in found:
        for slot in results.graded:
            row = rows.setdefault(slot.task, {"task": slot.task, "category": "", "policies": {}})
            row["category"] = row["category"] or str(slot.record.get("category") or "")
            cell = row["policies"].setdefault(results.name, {"solved": [], "score": [], "given_up": ""})
            cell["solved"].append(bool(slot.record["solved"]))
            cell["score"].append(float(slot.record["score"]))
        for task, why in results.evaluation.dropped.items():
            row = rows.setdefault(task, {"task": task, "category": "", "policies": {}})
            cell = row["policies"].setdefault(results.name, {"solved": [], "score": []})
            cell["given_up"] = why
    return [rows[task] for task in sorted(rows)]


def trial_rows(results: PolicyResults, price: TokenPrice | None = None) -> list[JsonObject]:
    """Return a row per scored trial of a policy."""
    rows = []
    for slot in sorted(results.graded, key=lambda slot: (slot.task, slot.number)):
        trial = slot.record
        rows.append(
            {
                "policy": results.name,
                "task": slot.task,
                "sample": slot.number,
                "counted": slot.task in results.counted,
                "attempts": slot.attempt,
                "trace": slot.trace,
                "dollars": None if price is None else price.dollars(trial["cost"], trial["made"]),
                **trial,
            }
        )
    return rows


# ------------------------------------------------------------------------------------------- parts of the summary


def _estimate(line: Mapping[str, Any], name: str, least: float = -np.inf, most: float = np.inf) -> Estimate:
    """Return a mean with its interval, clipped to the possible range; a single task has no interval."""
    low, high = line[f"{name}_low"], line[f"{name}_high"]
    if low is None or high is None:
        return {"mean": line[name], "low": None, "high": None}
    return {"mean": line[name], "low": max(low, least), "high": min(high, most)}


def _mean_resources(evaluation: Evaluation, price: TokenPrice | None) -> dict[str, Estimate]:
    """Return mean resources per trial, with intervals over tasks."""
    measures = dict(SPENT)
    if price is not None:
        measures["dollars"] = lambda trial: price.dollars(trial["cost"], trial["made"])
    found = {}
    for name, measure in measures.items():
        means = np.array(
            [np.mean([float(measure(slot.record)) for slot in group.slots]) for group in evaluation.groups]
        )
        low, high = bootstrap_interval(means, seed=SEED) or (None, None)
        found[name] = _estimate({name: float(means.mean()), f"{name}_low": low, f"{name}_high": high}, name, 0.0)
    return found


def _per_solved(trials: Sequence[JsonObject], price: TokenPrice | None) -> dict[str, float | None]:
    """Return resources of all trials divided by the number of solved trials; None if none is solved."""
    solved = sum(bool(trial["solved"]) for trial in trials)
    totals: dict[str, float] = {name: sum(SPENT[name](trial) for trial in trials) for name in ("made", "seconds")}
    if price is not None:
        totals["dollars"] = sum(price.dollars(trial["cost"], trial["made"]) for trial in trials)
    return {name: total / solved if solved else None for name, total in totals.items()}


def _by_category(line: Mapping[str, Any], most: int) -> dict[str, JsonObject]:
    keys = [key for key in line if key.startswith("category/") and key.endswith("/tasks")]
    names = [key.removeprefix("category/").removesuffix("/tasks") for key in keys]
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


def _errors(trials: Sequence[JsonObject]) -> JsonObject:
    """Return the number of tool calls, and of failed ones by class."""
    counted = sum((Counter(trial["errors"]) for trial in trials), Counter[str]())
    return {"calls": sum(trial["cost"]["calls"] for trial in trials), "failed": dict(sorted(counted.items()))}


def _infrastructure(results: PolicyResults) -> JsonObject:
    """Return infrastructure failures by class, which were retried, and the tasks that were given up."""
    failed = [incident.why for incident in results.incidents if incident.kind in ("failed", "lost")]
    classes = Counter(why.partition(":")[0][:60] for why in failed)
    return {
        "failures": results.evaluation.failures,
        "by_class": dict(classes.most_common()),
        "last": failed[-1] if failed else "",
        "given_up": dict(results.evaluation.dropped),
    }
