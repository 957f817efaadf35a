"""TensorBoard gets a copy of the metrics, read back with its own reader; a tool that is not installed is an error."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from etude.errors import InputError
from etude.recipe.recipe import load_recipe
from etude.runs.loggers import attach_loggers
from etude.runs.run import Run

SCRATCH = Path(__file__).parents[2] / "recipes" / "scratch.toml"


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    with Run.create_or_resume(tmp_path, load_recipe(SCRATCH)) as run:
        with attach_loggers(run, ["tensorboard"]):
            for step in range(1, 4):
                run.log("pretrain", step, loss=5.0 - step, note="words are left out", evaluation=True)
            run.log("rl", 2, solved=0.5, evaluation=True)
            run.log("rl", 2, solved=0.25, evaluation=True, benchmark="more")
        run.log("pretrain", 4, loss=0.0)  # after the end: only in metrics.jsonl
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(found.Tags()["scalars"]) == ["pretrain/loss", "rl/more/solved", "rl/solved"]
    assert [event.value for event in found.Scalars("rl/more/solved")] == [0.25]
    assert [(event.step, event.value) for event in found.Scalars("pretrain/loss")] == [(1, 4.0), (2, 3.0), (3, 2.0)]
    assert len(Run.read(tmp_path).metrics()) == 6


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed here")
def test_a_tool_that_is_not_installed_is_named(tmp_path: Path) -> None:
    recipe = load_recipe(SCRATCH, ['loggers=["wandb"]'])
    with Run.create_or_resume(tmp_path, recipe) as run:  # noqa: SIM117
        with (
            pytest.raises(InputError, match="loggers names wandb, which is not installed"),
            attach_loggers(run, recipe.loggers),
        ):
            pass
