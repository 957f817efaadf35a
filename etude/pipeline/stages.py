"""Run a recipe: its stages in order, in one run directory.

A run can be interrupted anywhere: a resume skips finished stages and starts the unfinished one again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.config import Registry
from etude.errors import InputError, Interrupted
from etude.recipe.recipe import Recipe
from etude.runs.loggers import attach_loggers
from etude.runs.run import Run
from etude.system.progress import progress_bars, progress_line

if TYPE_CHECKING:
    from etude.pipeline.stage import Stage

_MODULES = {
    "model_stages": ("tokenizer", "base", "init", "nll"),
    "data_stages": ("tasks", "corpus"),
    "training_stages": ("pretrain", "mtp", "extend", "sft"),
    "control_stage": ("control",),
    "rl_stage": ("rl",),
    "evaluation_stage": ("evaluation",),
}
# A stage is imported when it is used, because it loads torch.
STAGES: "Registry[Stage[Any]]" = Registry(
    "stage",
    lazy={name: f"etude.pipeline.{module}:{name.upper()}" for module, names in _MODULES.items() for name in names},
)


def chosen_stages(recipe: Recipe, only: str | None) -> tuple[str, ...]:
    """Return the stages of the recipe, or the one named; InputError if the recipe does not have it."""
    if only is not None and only not in recipe.stages:
        raise InputError(f'the recipe has no stage "{only}"; its stages are {", ".join(recipe.stages)}')
    return recipe.stages if only is None else (only,)


def run_recipe(recipe: Recipe, out: Path, resume: bool = False, only: str | None = None) -> dict[str, dict[str, Any]]:
    """Run the stages that are not done yet, or one of them; return the facts of each. Progress goes to stderr."""
    stages = chosen_stages(recipe, only)
    position, is_new = "", resume and not out.exists()
    try:
        with (
            Run.create_or_resume(out, recipe, resume=resume) as run,
            attach_loggers(run, recipe.loggers),
            progress_bars() as progress,
        ):
            if is_new:
                progress.console.print(f"{out}: there is no run to resume, so a new one starts")
            for stage in stages:
                if run.stage_done(stage):
                    progress.console.print(f"{stage}: done before, skipped")
                    continue
                position = f" in stage {stage}"
                for line in STAGES[stage].notices(recipe):
                    progress.console.print(f"{stage}: {line}", markup=False, soft_wrap=True)
                with progress_line(stage, progress) as report:
                    facts = STAGES[stage].run(run, recipe, report)
                run.finish_stage(stage, **facts)
            return {stage: run.facts(stage) for stage in stages}
    except KeyboardInterrupt:
        raise Interrupted(f"stopped{position}; the same command with --resume continues") from None


def summarize_stage(stage: str, facts: Mapping[str, Any]) -> str:
    """Return the summary of a finished stage; the first line begins with its name."""
    return f"{stage}: {STAGES[stage].summarize(facts)}"
