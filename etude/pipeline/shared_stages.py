"""Which finished stages two runs share: the same inputs of the recipe up to a stage, and the same seed.

The key of a stage is everything of the resolved recipe that may change its result: all of it but the run's name, its
loggers and the tables of later stages. Training stages also read from later tables; that part is in their keys too.
"""

from typing import Any

from etude.config import settings_data
from etude.harness.profile import AgentProfile
from etude.recipe.recipe import Recipe, stage_settings
from etude.runs.run import Run

# Stages whose results are artefacts, metrics and facts, and nothing else. RL keeps queues, traces and weights besides.
COPIED_STAGES = ("tokenizer", "base", "init", "tasks", "corpus", "pretrain", "mtp", "extend", "sft")
TRAINING_STAGES = ("pretrain", "mtp", "extend", "sft")


def stage_key(recipe: Recipe, stage: str) -> dict[str, Any]:
    """Return the part of a recipe that the result of a stage depends on."""
    until = recipe.stages[: recipe.stages.index(stage) + 1]
    omitted = (*COPIED_STAGES, "control", "rl", "nll")
    later = {name for name in stage_settings() if name not in until and name in omitted}
    key = {
        name: value
        for name, value in settings_data(recipe).items()
        if name not in {"name", "loggers", "stages"} and name not in later
    }
    key["stages"] = list(until)
    if any(name in TRAINING_STAGES for name in until):  # pretrain keeps a checkpoint for mtp; later stages train it too
        key["mtp"] = settings_data(recipe.mtp) if recipe.mtp else None
    if "sft" in until:  # its checkpoints say how the model is used
        key["sessions"] = AgentProfile.of(recipe.rl, recipe.plugins).to_json() if recipe.rl else None
    return key


def shared_stages(first: Recipe, second: Recipe) -> tuple[str, ...]:
    """Return the leading stages whose results are the same in both recipes and can be copied."""
    shared: list[str] = []
    for one, other in zip(first.stages, second.stages, strict=False):
        if one != other or one not in COPIED_STAGES or stage_key(first, one) != stage_key(second, other):
            break
        shared.append(one)
    return tuple(shared)


def finished_stages(run: Run, stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the leading ones of these stages that a run has finished."""
    unfinished = next((number for number, stage in enumerate(stages) if not run.stage_done(stage)), len(stages))
    return stages[:unfinished]
