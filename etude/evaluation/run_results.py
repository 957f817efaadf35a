"""The results of a run on held-out task sets, task by task: what a comparison of runs needs.

The evaluation queue of the stage `rl` has groups named STEP/TASK, or STEP/SET/TASK where several sets are evaluated. It
evaluates the model before the first step and the one that RL ends with. Only finished evaluations count.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import read_toml
from etude.evaluation import held_out
from etude.evaluation.paired import TaskSamples
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.tasks.harbor import find_tasks

BEFORE_RL = "before rl"  # the model that RL starts from, as RL evaluates it

ModelResults = Mapping[str, Mapping[str, TaskSamples]]  # by model and task set


@dataclass(frozen=True)
class MeasuredSet:
    """A task set that a recipe evaluates models on."""

    name: str
    tasks: int
    samples: int  # sessions per task
    is_validation: bool


def measured_sets(recipe: Mapping[str, Any], validation: str) -> list[MeasuredSet]:
    """Return the held-out sets of a recipe, given as plain values; `validation` names the one that choices use."""
    table = recipe.get("rl", {}).get("evaluation")
    if table is None:
        return []
    limit = table.get("max_tasks")
    found = []
    for path in table["tasks"]:
        size = _set_size(recipe, path)
        name = Path(path).name
        found.append(MeasuredSet(name, min(size, limit or size), table["samples"], name == validation))
    return found


def _set_size(recipe: Mapping[str, Any], name: str) -> int:
    """Return the number of tasks of a set that the recipe builds, or of a directory."""
    for each in recipe.get("tasks", {}).get("build", ()):
        if each["name"] == name:
            return int(each["count"]) if "count" in each else sum(1 for _ in find_tasks(Path(each["path"])))
    return sum(1 for _ in find_tasks(Path(name)))


def task_results(run: Path) -> ModelResults:
    """Return the samples of every task by model and task set; models in the order in which the run makes them."""
    layout = RunLayout.of_run(run)
    sets = [each.name for each in measured_sets(read_toml(layout.recipe), "")]
    results: dict[str, Mapping[str, TaskSamples]] = {}
    if layout.evaluations.exists():
        made = [each.name for each in Run.read(run).artefacts("checkpoint") if each.stage == "rl"]
        with closing(RolloutQueue.open_read_only(layout.evaluations)) as queue:
            results[BEFORE_RL] = _results_at(queue, 0, sets)
            if made:
                results["rl"] = _results_at(queue, int(made[-1].rpartition("-")[2]), sets)
    return {model: found for model, found in results.items() if found}


def _results_at(queue: RolloutQueue, step: int, sets: Sequence[str]) -> dict[str, TaskSamples]:
    """Return the results of the evaluation of a step by set; empty if it is not finished."""
    progress = held_out.progress(queue, step)
    if not progress.wanted or not progress.finished:
        return {}
    found: dict[str, dict[str, list[float]]] = {}
    for group in held_out.results(queue, step).groups:
        name, _, task = group.task.partition("/")
        if name not in sets or len(sets) == 1:  # a single set has no label
            name, task = sets[0], group.task
        found.setdefault(name, {})[task] = [float(bool(slot.record["solved"])) for slot in group.slots]
    return dict(found)
