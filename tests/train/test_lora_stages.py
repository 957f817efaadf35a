"""Stages that train adapters: small checkpoints that name their base, continue, resume and move."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_stages import RECIPE, start

from etude.errors import InputError
from etude.model import load
from etude.model.adapters import adapters
from etude.model.checkpoint import checkpoint_views
from etude.pipeline.stages import run_recipe
from etude.recipe.recipe import load_recipe
from etude.runs.run import Run

LORA = "lora = { rank = 2, alpha = 4.0 }\nlearning_rate = 1e-2\ncheckpoint_every = 1\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("lora")
    (place / "code/one").mkdir(parents=True)
    (place / "code/away").mkdir()
    for package in ("one", "away"):
        text = "".join(f"def {package}_{i}(x, y):\n    return x * {i} + y\n\n" for i in range(40))
        (place / f"code/{package}/a.py").write_text(text)
    turns = [[{"role": "user", "content": f"add {i}"}, {"role": "assistant", "content": f"{2 * i}"}] for i in range(30)]
    (place / "chat.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    stages = '["tokenizer", "init", "corpus", "pretrain", "extend", "sft"]'
    tables = RECIPE[: RECIPE.index("[mtp]")] + RECIPE[RECIPE.index("[extend]") :]
    tables = tables.replace('["tokenizer", "init", "corpus", "pretrain", "mtp", "extend", "sft"]', stages)
    (place / "tiny.toml").write_text(
        tables.replace("[extend]\n", f"[extend]\n{LORA}").replace("[sft]\n", f"[sft]\n{LORA}")
    )
    return place


@pytest.fixture(scope="module")
def whole(place: Path) -> Run:
    run_recipe(load_recipe(place / "tiny.toml"), place / "whole")
    return Run.read(place / "whole")


def losses(run: Run, stage: str) -> list[float]:
    return [record["loss"] for record in run.metrics(stage) if "loss" in record]


def test_checkpoints_hold_only_adapters_and_a_later_stage_trains_them_further(whole: Run) -> None:
    base = load(whole.path / "checkpoints/pretrain-20")
    last = {stage: whole.path / f"checkpoints/{stage}-4" for stage in ("extend", "sft")}
    for directory in last.values():
        assert not (directory / "model.safetensors").exists()
        described = json.loads((directory / "adapter_config.json").read_text())
        assert described["base_model_name_or_path"] == "../pretrain-20"
        model = load(directory)
        assert model.config.rope.theta == 40000.0  # of the stage, not of the base
        assert len(adapters(model)) == 4 * len(model.blocks)
        for name, tensor in checkpoint_views(base).items():
            assert torch.equal(checkpoint_views(model)[name], tensor)
    first, second = (load_file(each / "adapter_model.safetensors") for each in last.values())
    changed = [name for name in first if not torch.equal(first[name], second[name])]
    assert len(changed) == len(first)
    assert losses(whole, "sft")[-1] < losses(whole, "sft")[0]


@pytest.mark.parametrize("until", ["checkpoints/extend-2", pytest.param("checkpoints/sft-1", marks=pytest.mark.slow)])
def test_a_killed_run_with_adapters_resumes_to_the_same_bits_in_another_place(
    place: Path, whole: Run, tmp_path: Path, until: str
) -> None:
    process = start(place, tmp_path / "cut")
    deadline = time.monotonic() + 120
    while not (tmp_path / "cut" / until).exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    shutil.copytree(tmp_path / "cut", tmp_path / "moved")
    shutil.rmtree(tmp_path / "cut")
    run_recipe(load_recipe(place / "tiny.toml"), tmp_path / "moved", resume=True)
    moved = Run.read(tmp_path / "moved")
    for stage in ("extend", "sft"):
        assert losses(moved, stage) == losses(whole, stage)
    ours, theirs = (load_file(run.find("checkpoint").path / "adapter_model.safetensors") for run in (moved, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("lora", ["lora = { rank = 1 }\ncheckpoint_every = 1\n", ""])
def test_other_adapters_and_full_training_start_from_merged_weights(
    place: Path, whole: Run, tmp_path: Path, lora: str
) -> None:
    origin, corpus = whole.path / "checkpoints/extend-4", whole.path / "artefacts/corpus-chat"
    table = RECIPE[RECIPE.index("[sft]") :].replace('corpus = "chat"', f'corpus = "{corpus}"')
    table = table.replace("[sft]\n", f'[sft]\nmodel = "{origin}"\nlearning_rate = 1e-12\n{lora}')
    (tmp_path / "r.toml").write_text('name = "r"\nstages = ["sft"]\n' + table)
    run_recipe(load_recipe(tmp_path / "r.toml"), tmp_path / "run")
    run = Run.read(tmp_path / "run")
    final = run.find("checkpoint")
    assert final.name == "sft-4"
    tokens = torch.arange(3, 40)[None]
    with torch.no_grad():  # at this learning rate the stage has changed nothing
        torch.testing.assert_close(load(final.path)(tokens), load(origin)(tokens), atol=1e-4, rtol=0)
    assert bool(adapters(load(final.path))) == bool(lora)
    if lora:
        described = json.loads((final.path / "adapter_config.json").read_text())
        assert described["base_model_name_or_path"] == "../../artefacts/sft-base"
        assert described["r"] == 1


def test_settings_that_adapters_leave_without_effect_are_refused(place: Path) -> None:
    for change, message in (
        ("sft.balance.loss_weight=0.1", "balance would not be used: with lora, routers are frozen"),
        ("sft.lora.rank=0", "rank"),
        ('sft.lora.targets=["router"]', "targets"),
    ):
        with pytest.raises(InputError, match=message):
            load_recipe(place / "tiny.toml", [change])
