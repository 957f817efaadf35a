"""RL with adapters: samplers get nothing else, a restarted trainer continues, the run's checkpoint is PEFT's."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rl_runs import finish_slots, make_recipe, open_loop

from etude.config import render_toml
from etude.model import load
from etude.model.adapters import adapter_views, adapters
from etude.model.checkpoint import checkpoint_views
from etude.recipe.recipe import load_recipe
from etude.rl.loop import learn
from etude.rl.settings import open_rl_run
from etude.rl.starting_model import make_starting_model
from etude.rl.trainer_process import checkpoints
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed
from etude.weights.versions import follow

LORA = ("rl.lora.rank=2", "rl.lora.alpha=4.0", 'rl.estimator.kl="k1"', "rl.estimator.kl_weight=0.01")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tasks=12)


def prepare_run(recipe: Path, path: Path) -> RunLayout:
    """Create a run directory with its starting model and six finished groups, as the orchestrator does."""
    resolved = load_recipe(recipe, LORA)
    with Run.create_or_resume(path, resolved) as run:
        (path / "recipe.toml").write_text(render_toml(resolved))
        layout, settings = open_rl_run(path)
        assert settings.model is not None
        make_starting_model(run, settings.model, layout, settings.lora, seed=0)
    queue = RolloutQueue(layout.slots, settings)
    queue.add((f"task-{number}", 1.0) for number in range(6))
    finish_slots(layout, queue, np.random.default_rng(0))
    return layout


def test_only_adapters_are_trained_published_and_saved(recipe: Path, tmp_path: Path) -> None:
    whole, parts = (prepare_run(recipe, tmp_path / name) for name in ("whole", "parts"))
    settings = open_rl_run(whole.run)[1]
    with claimed(ObjectStore(whole.store), whole.run_id(), inside=True), open_loop(whole, settings) as loop:
        assert loop.learner.reference is not None
        assert loop.learner.reference.embed.weight.data_ptr() == loop.learner.trainer.model.embed.weight.data_ptr()
        learn(loop)
        loop.learner.publisher.flush(30)
        trained = {name: view.clone() for name, view in adapter_views(loop.learner.trainer.model).items()}
        assert all(not adapter.up.any() for adapter in adapters(loop.learner.reference))
    version, published = follow(ObjectStore(whole.store))
    assert version.number == 3
    assert published.keys() == trained.keys()
    assert all(torch.equal(published[name], trained[name]) for name in trained)
    for steps in (1, 3):
        with (
            claimed(ObjectStore(parts.store), parts.run_id(), inside=True),
            open_loop(parts, settings.model_copy(update={"steps": steps})) as loop,
        ):
            learn(loop)
    first, second = (load(checkpoints(layout)[-1][1]) for layout in (whole, parts))
    base = load(settings.model or "")
    for name, tensor in adapter_views(first).items():
        assert torch.equal(tensor, adapter_views(second)[name]), name
        assert torch.equal(tensor, trained[name])
    assert any(adapter.up.any() for adapter in adapters(first))
    for name, tensor in checkpoint_views(base).items():
        assert torch.equal(tensor, checkpoint_views(first)[name]), name


@pytest.mark.slow
def test_a_run_with_adapters_ends_with_an_adapter_that_can_be_trained_further(recipe: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--json"]
    rest = [option for each in LORA for option in ("--set", each)]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "run"), *rest], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    run = Run.read(tmp_path / "run")
    records = [record for record in run.metrics("rl") if not record.get("evaluation")]
    assert records[0].get("mismatch_numerics_p99", 0.0) < 1e-4
    final = run.find("checkpoint").path
    assert json.loads((final / "adapter_config.json").read_text())["base_model_name_or_path"] == "../../rl/base"
    further = ["--out", str(tmp_path / "further"), *rest, "--set", f"rl.model={json.dumps(str(final))}"]
    again = subprocess.run([*command, *further], capture_output=True, text=True, timeout=600, check=False)
    assert again.returncode == 0, again.stderr
    start, end = load(tmp_path / "further/rl/model"), load(Run.read(tmp_path / "further").find("checkpoint").path)
    for name, view in adapter_views(load(final)).items():
        assert torch.equal(view, adapter_views(start)[name])
    assert any(not torch.equal(view, adapter_views(end)[name]) for name, view in adapter_views(start).items())
