"""The stage `evaluation`: scores the model of every stage on validation and test sets, and compares them.

It is the only one that looks at test sets. Its records in the metrics are one for each model and set; its facts are the
main figures of each, the gains over the best earlier model, and how often each set was scored.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from etude.chat.dialects import dialect_for
from etude.evaluation.held_out import Evaluation
from etude.evaluation.scorings import count_scorings
from etude.evaluation.stage_comparison import main_figures, stage_gains, summary_lines
from etude.evaluation.statistics import summarise
from etude.pipeline.cluster_plan import find_cluster, is_elsewhere, missing_resources, session_cores
from etude.pipeline.data_stages import fix_task_sets
from etude.pipeline.measure import TimeEstimate
from etude.pipeline.model_evaluation import (
    START,
    EvaluationProgressLine,
    ModelScoring,
    check_windows,
    chosen_tasks,
    measured_models,
    model_names,
    sessions_of,
)
from etude.pipeline.pod_check import usable_pods
from etude.pipeline.rl_stage import (
    POD_STORE_BYTES,
    STARTUP_S,
    TRACE_BYTES,
    check_sampler_program,
    check_task_set,
    launched_samplers_and_workers,
    session_seconds,
    sessions_memory,
)
from etude.pipeline.stage import (
    Facts,
    PlanContext,
    RecipeInputs,
    Stage,
    StageModel,
    StagePlan,
    inspect_model,
    planned_device,
    planned_gpus,
)
from etude.recipe.recipe import Recipe
from etude.rollouts.settings import EvaluationSettings
from etude.runs.run import Run
from etude.system.progress import ProgressCallback


class EvaluationStage(Stage[EvaluationSettings]):
    """Measure every model of the run."""

    def check(self, inputs: RecipeInputs) -> None:
        recipe, settings = inputs.recipe, self.settings(inputs.recipe)
        for key, name in _set_keys(settings):
            check_task_set(inputs, key, name)
        sessions = sessions_of(recipe)
        with inputs.problems_of("evaluation"):
            planned_device(sessions.sampler.device)
            if recipe.rl is None:
                check_sampler_program(inputs, "evaluation.sessions.sampler", sessions.sampler)
            models = self.models(inputs)
            check_windows({name: model.config for name, model in models.items()}, sessions.window)
            for model in models.values():
                if model.tokenizer is not None:
                    dialect_for(model.tokenizer, sessions.dialect)
            if sessions.workers and not is_elsewhere(recipe):
                inputs.pods = inputs.pods or usable_pods(sessions.pods)
        find_cluster(inputs)

    def models(self, inputs: RecipeInputs) -> dict[str, StageModel]:
        """Return the models to score, as far as they can be known."""
        found = {}
        for name in model_names(inputs.recipe):
            model = inputs.models.get(name)
            if name == START:
                tables = (getattr(inputs.recipe, stage) for stage in inputs.recipe.stages)
                model = inspect_model(next(path for each in tables if (path := getattr(each, "model", None))))
            if model is not None:
                found[name] = model
        return found

    def needed_artefacts(self, recipe: Recipe) -> list[tuple[str, str]]:
        return [("tasks", name) for _, name in _set_keys(self.settings(recipe))]

    def plan(self, context: PlanContext) -> StagePlan:
        settings, recipe = self.settings(context.recipe), context.recipe
        names, sessions, run = model_names(recipe), sessions_of(recipe), context.inputs.run
        sizes = {
            key: min(context.inputs.tasks[name], settings.max_tasks or context.inputs.tasks[name])
            for key, name in settings.task_sets().items()
        }
        per_model = sum(size * settings.samples_of(key) for key, size in sizes.items())
        scored = {record["model"] for record in run.metrics("evaluation")} if run is not None else set()
        left = [name for name in names if name not in scored]
        shown = ", ".join(f"{key} {size:,} x {settings.samples_of(key)}" for key, size in sizes.items())
        lines = [f"models of {', '.join(names)}, each on {shown}: {len(names) * per_model:,} sessions"]
        lines += [f"{', '.join(sorted(scored))} done before"] if scored else []
        models = self.models(context.inputs)
        estimate, model = None, list(models.values())[-1]
        alone = session_seconds(context, model, sessions, settings.validation)
        if isinstance(alone, str):
            lines.append(alone)
        else:
            each = STARTUP_S + per_model * alone / max(1.0, min(sessions.in_flight, session_cores(context)))
            estimate = TimeEstimate(len(left) * each, "predicted from one rollout here")
        disk = len(left) * per_model * TRACE_BYTES + POD_STORE_BYTES
        launches, cluster = tuple(launched_samplers_and_workers(sessions, context.inputs)), context.inputs.cluster
        memory = tuple(sessions_memory(sessions, model.config, planned_gpus(context.recipe), cluster=cluster))
        lacking = tuple(missing_resources(recipe, sessions, cluster)) if recipe.rl is None else ()
        return StagePlan("evaluation", tuple(lines), estimate, memory, disk, launches, cluster, lacking)

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        settings, started = self.settings(recipe), time.monotonic()
        models, tasks = measured_models(run, recipe), chosen_tasks(run, settings)
        fix_task_sets(run, settings)
        run.rewind("evaluation")  # the records are made from the queues, which are kept
        per_model = sum(len(each) * settings.samples_of(name) for name, each in tasks.items())
        line = EvaluationProgressLine(report, len(models) * per_model)
        results: dict[str, dict[str, Evaluation]] = {}
        figures: dict[str, dict[str, Any]] = {}
        for number, model in enumerate(models):
            results[model.name] = ModelScoring(run, recipe, model, tasks, line).score()
            records = {name: summarise(each) for name, each in results[model.name].items()}
            for name, record in records.items():
                run.log("evaluation", number, model=model.name, set=name, **record)
            figures[model.name] = {name: main_figures(record) for name, record in records.items()}
        gains = stage_gains(results, Path(settings.validation).name)
        seconds = run.facts("evaluation").get("seconds", 0.0) + time.monotonic() - started
        control = {"control": recipe.control.kind} if recipe.control else {}
        return {"models": figures, "gains": gains, "scored": count_scorings(run.layout), "seconds": seconds, **control}

    def summarize(self, facts: Facts) -> str:
        return "\n  ".join(["solved by the model of each stage, same tasks and seeds", *summary_lines(facts)])


def _set_keys(settings: EvaluationSettings) -> list[tuple[str, str]]:
    return [("evaluation.validation", settings.validation), *(("evaluation.test", name) for name in settings.test)]


EVALUATION = EvaluationStage("evaluation")
