"""The stage `control`: a control of RL, from the same start and with as many updates, in a run of its own.

That run is the directory `control` of this one, with copies of the stages before it; `etude status` and `etude view`
show it like any other. Its model is scored beside RL's in the stage `evaluation`; no stage starts from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from etude.errors import EtudeError
from etude.pipeline.rl_stage import CONTROLS, RL, control_recipe
from etude.pipeline.shared_stages import COPIED_STAGES
from etude.pipeline.stage import Facts, PlanContext, RecipeInputs, Stage, StageModel, StagePlan
from etude.pipeline.validation_plan import validation_plan
from etude.recipe.recipe import Recipe
from etude.rl.settings import ControlSettings
from etude.rl.starting_model import copy_checkpoint
from etude.runs.copy_stages import copy_stages
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.system.progress import ProgressCallback
from etude.train.stages import initial_weights


class ControlStage(Stage[ControlSettings]):
    """Run RL's loop with the signal of a control."""

    def find_model(self, inputs: RecipeInputs) -> StageModel | None:
        return RL.find_model(inputs)

    def needed_artefacts(self, recipe: Recipe) -> list[tuple[str, str]]:
        return RL.needed_artefacts(recipe)

    def notices(self, recipe: Recipe) -> list[str]:
        return RL.notices(recipe)

    def plan(self, context: PlanContext) -> StagePlan:
        recipe, kind = control_recipe(context.recipe), self.settings(context.recipe).kind
        assert recipe.rl is not None
        if kind != "imitation":
            inputs = replace(context.inputs, recipe=recipe, run=None)
            return replace(RL.plan(PlanContext(inputs, context.machine, context.budget)), stage=self.name)
        sessions = recipe.rl.groups_per_step * recipe.rl.group_size
        validation = validation_plan(recipe, context.inputs.tasks)
        lines = [f"a control: {CONTROLS[kind]}", f"{recipe.rl.steps:,} steps of {sessions:,} demonstrations"]
        if validation.count:
            lines.append(f"{validation.count} validations, each {validation.sessions:,} sessions")
        return StagePlan(self.name, tuple(lines))

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        inner_recipe, path = control_recipe(recipe), run.layout.control
        if not RunLayout(path).recipe.exists():
            copy_stages(run.path, path, inner_recipe, [stage for stage in recipe.stages if stage in COPIED_STAGES])
        with Run.create_or_resume(path, inner_recipe, resume=True) as inner:
            if not inner.stage_done("rl"):
                inner.finish_stage("rl", **RL.run(inner, inner_recipe, report))
            facts = inner.facts("rl")
            adopt_result(run, recipe, inner, facts["result_step"])
        return facts

    def summarize(self, facts: Facts) -> str:
        return RL.summarize(facts)


def adopt_result(run: Run, recipe: Recipe, inner: Run, step: int) -> None:
    """Make the model of the control's run a checkpoint of this run."""
    name = f"control-{step}"
    if any(artefact.name == name for artefact in run.artefacts("checkpoint")):
        return
    found = [artefact for artefact in inner.artefacts("checkpoint") if artefact.name == f"rl-{step}"]
    if not found:
        raise EtudeError(f"{inner.path} has no checkpoint rl-{step}, its result; delete that directory to repeat it")
    assert recipe.rl is not None
    origin = recipe.rl.model or initial_weights(run, "rl")
    with run.checkpoint("control", step, parents=[origin]) as directory:
        copy_checkpoint(found[0].path, directory, run.path)


CONTROL = ControlStage("control")
