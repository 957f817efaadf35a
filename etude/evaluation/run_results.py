"""The results of a run on held-out task sets, task by task: what a comparison of runs needs.

    evaluation/MODEL/evaluations.sqlite    the evaluation of the model of a stage, as the table `[evaluation]` asks
    rl/evaluations.sqlite                  evaluations during RL: of the model before the first step, and the last one

Both are rollout queues with groups named STEP/SET/TASK. Only finished evaluations count. The model of a stage that was
evaluated for itself is not taken from RL.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
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


def validations(records: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the records of validations among the metrics of RL; those of further sets name their `benchmark`."""
    return (record for record in records if record.get("evaluation") and not record.get("benchmark"))


def measured_sets(recipe: Mapping[str, Any], validation: str | None = None) -> list[MeasuredSet]:
    """Return the held-out sets of a recipe, given as plain values, with all defaults filled in.

    `validation` names the set that choices use, where the recipe does not say.
    """
    table = recipe.get("evaluation")
    if table is None:
        return []
    chosen = validation or Path(table["validation"]).name
    found = []
    for path in (table["validation"], *table["test"]):
        name, size = Path(path).name, _set_size(recipe, path)
        key = "validation_samples" if path == table["validation"] else "samples"
        tasks = min(size, table.get("max_tasks") or size)
        found.append(MeasuredSet(name, tasks, int(table[key]), name == chosen))
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
    recipe = read_toml(layout.recipe)
    sets = [each.name for each in measured_sets(recipe)]
    found: dict[str, dict[str, TaskSamples]] = {}
    if layout.evaluations.exists():
        made = [each.name for each in Run.read(run).artefacts("checkpoint") if each.stage == "rl"]
        with closing(RolloutQueue.open_read_only(layout.evaluations)) as queue:
            found[BEFORE_RL] = _results_at(queue, 0, sets)
            if made:
                found["rl"] = _results_at(queue, int(made[-1].rpartition("-")[2]), sets)
    alone = sorted((layout.run / "evaluation").glob("*/evaluations.sqlite"), key=lambda path: _order(path, recipe))
    for path in alone:
        with closing(RolloutQueue.open_read_only(path)) as queue:
            found.pop(path.parent.name, None)  # the last place in the order is that of the last stage
            found[path.parent.name] = _results_at(queue, 0, sets)
    return {model: results for model, results in found.items() if results}


def _order(path: Path, recipe: Mapping[str, Any]) -> int:
    """Return the place of an evaluated model in the pipeline; one that no stage has made comes first."""
    stages = list(recipe["stages"])
    return stages.index(path.parent.name) if path.parent.name in stages else -1


def _results_at(queue: RolloutQueue, step: int, sets: Sequence[str]) -> dict[str, TaskSamples]:
    """Return the results of the evaluation of a step by set; empty if it is not finished."""
    found: dict[str, dict[str, list[float]]] = {}
    for name in sets:
        progress = held_out.progress(queue, step, name)
        if not progress.wanted or not progress.finished:
            continue
        for group in held_out.results(queue, step, name).groups:
            samples = [float(bool(slot.record["solved"])) for slot in group.slots]
            found.setdefault(name, {})[group.task.partition("/")[2]] = samples
    return dict(found)
