"""The plan of a recipe: every stage, the problems, the warnings, and the totals.

`make_plan` is the entry point. Problems are raised together as one InputError; inadvisable settings become warnings of
the plan. In an existing run, stages that are done cost nothing and the interrupted one continues from its state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.files import lock_holder
from etude.pipeline.measure import BUDGET_S
from etude.pipeline.memory import ProcessMemory
from etude.pipeline.stage import FreeResources, PlanContext, RecipeInputs, Stage, StagePlan, inspect_model
from etude.pipeline.stages import STAGES, chosen_stages
from etude.pods.scheduling.pressure import read_pressure
from etude.recipe.recipe import Recipe
from etude.runs.layout import RunLayout
from etude.runs.run import Run, check_resumable, check_usable
from etude.system.progress import ProgressCallback
from etude.tasks.harbor import find_tasks


@dataclass(frozen=True)
class RunPlan:
    """The work of a run, the resources it needs and the time it takes."""

    recipe: str
    machine: FreeResources
    stages: tuple[StagePlan, ...]
    warnings: tuple[str, ...]
    run: str = ""  # the existing run that it would continue

    @property
    def seconds(self) -> float:
        return sum(stage.time.seconds for stage in self.stages if stage.time)

    @property
    def disk(self) -> int:
        return sum(stage.disk for stage in self.stages)


def make_plan(
    recipe: Recipe,
    out: Path | None = None,
    only: str | None = None,
    *,
    budget: float = BUDGET_S,
    report: ProgressCallback | None = None,
) -> RunPlan:
    """Return the plan of a recipe, or of the stage `only`, in the run `out`; InputError if it cannot run.

    `budget` limits the seconds of measuring per stage.
    """
    stages = chosen_stages(recipe, only)
    problems: list[str] = []
    run = _existing_run(out, recipe, problems)
    left = [stage for stage in stages if run is None or not run.stage_done(stage)]
    inputs = check_recipe(recipe, left, run)
    if only is not None and out is not None and not problems:
        problems += _missing_inputs(STAGES[only], recipe, run)
    problems += inputs.problems
    if problems:
        raise InputError("\n".join(problems))
    context = PlanContext(inputs, free_resources(out), budget)
    plans = []
    for number, stage in enumerate(stages):
        if report is not None:
            report(number, len(stages), stage)
        done = StagePlan(stage, ("done before, skipped",), done=True)
        plans.append(STAGES[stage].plan(context) if stage in left else done)
    warnings = [*_lock_warnings(run), *_resource_warnings(plans, context)]
    return RunPlan(recipe.name, context.machine, tuple(plans), tuple(warnings), str(run.path) if run else "")


def check_recipe(recipe: Recipe, stages: Sequence[str], run: Run | None = None) -> RecipeInputs:
    """Find the inputs of a recipe, and all problems with those of `stages`; `run` is the run that it would continue.

    Outputs of earlier stages of the same run are assumed to be there, as far as the recipe determines them.
    """
    inputs = RecipeInputs(recipe, run)
    for tool in recipe.loggers:
        if find_spec(tool) is None:
            line = f"loggers names {tool}, which is not installed; pip install {tool}, or leave it out"
            inputs.problems.append(line)
    for stage in recipe.stages:
        made = run.artefacts("checkpoint") if run is not None and run.stage_done(stage) else []
        newest = [artefact.path for artefact in made if artefact.stage == stage]
        with inputs.problems_of(f"run {run.path}" if run and newest else STAGES[stage].model_key):
            if (model := inspect_model(newest[-1]) if newest else STAGES[stage].find_model(inputs)) is not None:
                inputs.models[stage] = model
    inputs.tokenizer = _find_tokenizer(inputs)
    for artefact in run.artefacts("tasks") if run is not None else ():
        inputs.tasks[artefact.name.removeprefix("tasks-")] = sum(1 for _ in find_tasks(artefact.path))
    for stage in recipe.stages:
        if stage in stages:
            STAGES[stage].check(inputs)
    return inputs


def _find_tokenizer(inputs: RecipeInputs) -> Tokenizer | None:
    """Return the tokenizer of this run's corpora and sessions, if it exists."""
    corpus, run = inputs.recipe.corpus, inputs.run
    if corpus is not None and corpus.tokenizer is not None:
        with inputs.problems_of("corpus.tokenizer"):
            return Tokenizer.load(corpus.tokenizer)
    if run is not None and run.stage_done("tokenizer"):
        return Tokenizer.load(run.find("tokenizer").path)
    return next((model.tokenizer for model in inputs.models.values()), None)


# --------------------------------------------------------------------------------------------- an existing run


def _existing_run(out: Path | None, recipe: Recipe, problems: list[str]) -> Run | None:
    """Return the run to continue, if there is one; add a problem if it cannot be continued with this recipe."""
    if out is None:
        return None
    path = Path(os.path.abspath(out))
    try:
        check_usable(RunLayout(path))
        if not RunLayout(path).recipe.exists():
            return None
        check_resumable(RunLayout(path), recipe, resume=True, allow_changes=False)
        return Run.read(path)
    except InputError as error:
        problems.append(str(error))
        return None


def _lock_warnings(run: Run | None) -> list[str]:
    """Return a warning if another process writes the run."""
    holder = lock_holder(run.layout.lock) if run is not None else None
    return [f"the run is in use by {holder}: it would have to end first"] if holder else []


def _missing_inputs(stage: Stage[Any], recipe: Recipe, run: Run | None) -> list[str]:
    """Return a line for every input of the stage that its run does not have yet."""
    artefacts = run.artefacts() if run is not None else []
    names, lines = {artefact.name for artefact in artefacts}, []
    makers = [name for name in stage.model_makers() if name in recipe.stages]
    if makers and not any(artefact.kind == "checkpoint" and artefact.stage in makers for artefact in artefacts):
        lines.append(f"{stage.name} starts from the weights of {' or '.join(makers)}; run that stage first")
    for kind, name in dict.fromkeys(stage.needed_artefacts(recipe)):
        if not os.path.isabs(name) and f"{kind}-{name}" not in names:
            lines.append(f"{stage.name} needs {name}, which the stage {kind} makes; run that stage first")
    return lines


# ------------------------------------------------------------------------------------------------ the machine


def free_resources(out: Path | None) -> FreeResources:
    """Return the free resources of this machine, with the disk that `out` is or would be on."""
    directory = Path(os.path.abspath(out or "."))
    while not directory.exists():
        directory = directory.parent
    pressure = read_pressure(directory)
    memory, names = {"cpu": pressure.memory_available}, {}
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        memory[f"cuda:{number}"] = torch.cuda.mem_get_info(number)[0]
        names[f"cuda:{number}"] = torch.cuda.get_device_name(number)
    return FreeResources(pressure.cores, memory, names, pressure.disk_free)


def _resource_warnings(plans: Sequence[StagePlan], context: PlanContext) -> list[str]:
    lines: list[str] = []
    for plan in plans:
        lines += plan.warnings
        if plan.cluster is None:
            lines += _memory_warnings(plan, context)
        settings = getattr(context.recipe, plan.stage)
        on_cpu = plan.memory and plan.memory[0].device == "cpu"
        if not plan.done and on_cpu and getattr(settings, "precision", "") == "bfloat16":
            lines.append(f"{plan.stage}.precision is bfloat16, which is several times slower than float32 on most CPUs")
    disk, free_disk = sum(plan.disk for plan in plans), context.machine.disk
    if disk > free_disk:
        lines.append(f"the run needs about {disk / 1e9:,.1f} GB of disk, where {free_disk / 1e9:,.1f} are free")
    return lines


def _memory_warnings(plan: StagePlan, context: PlanContext) -> Iterator[str]:
    """Yield a line for each device with less free memory than a stage needs, and one for GPUs that are not here."""
    by_device: dict[str, list[ProcessMemory]] = {}
    for each in plan.memory:
        by_device.setdefault("cuda:0" if each.device == "cuda" else each.device, []).append(each)
    for device, processes in by_device.items():
        total = sum(each.total for each in processes)
        if total <= (free := context.machine.available(device, total)):
            continue
        advice = []
        if any(each.process == "trainer" for each in processes):
            advice.append("fewer rows, a shorter length or recompute = true")
        elif any(each.process == "checkpoint" for each in processes):
            advice.append("adapters (the optimizer's state is copied for a checkpoint)")
        if plan.stage in ("rl", "evaluation"):
            advice.append("fewer sampler.kv_cache_tokens and in_flight")
        less = f": {', '.join(advice)} take less" if advice else ""
        yield f"{plan.stage} needs about {total / 2**30:,.1f} GiB on {device}, where {free / 2**30:,.1f} are free{less}"
    gpus = [device for device in by_device if device.startswith("cuda")]
    if lacking := [gpu for gpu in gpus if not context.has_device(gpu)]:
        yield (
            f"{plan.stage} is planned for {len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, of which this host lacks "
            f"{len(lacking)} (several hosts: docs/parallel.md#several-hosts)"
        )
