"""Parameter counts against published figures and transformers' own; what the command says of a mesh."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, VARIANTS, small_config, twin
from typer.testing import CliRunner

from etude.cli import app
from etude.errors import InputError
from etude.model import KVCache, ModelConfig
from etude.model.describe import count_parameters, find_config, kv_bytes_per_token
from etude.model.known import KNOWN_MODELS


@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_counts_equal_transformers(family: str) -> None:
    config = small_config(family)
    theirs = sum(p.numel() for p in twin(config, 0).state_dict().values())
    assert count_parameters(ModelConfig.from_hugging_face(config)).total == theirs


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("smollm2-135m", 134_515_008, 134_515_008),
        ("qwen3-coder-30b-a3b", 30_532_122_624, 3_353_032_704),
        ("kimi-k2.5", 1_026_408_232_448, 32_861_500_928),
    ],
)
def test_known_models_have_their_published_sizes(name: str, total: int, active: int) -> None:
    counted = count_parameters(find_config(name))
    assert (counted.total, counted.active) == (total, active)


def test_the_published_figures_follow_from_the_counts() -> None:
    kimi, qwen = (count_parameters(find_config(name)) for name in ("kimi-k2.5", "qwen3-coder-30b-a3b"))
    assert (
        KNOWN_MODELS["kimi-k2.5"].published == f"{(kimi.total + kimi.mtp_layer) / 1e12:.2f}T / {kimi.active // 10**9}B"
    )
    assert KNOWN_MODELS["qwen3-coder-30b-a3b"].published == f"{qwen.total / 1e9:.1f}B / {qwen.active // 10**8 / 10}B"


def test_known_configs_are_what_transformers_calls_them() -> None:
    for known in KNOWN_MODELS.values():
        text = dict(known.config.get("text_config", known.config))
        family = {"kimi_k2": "deepseek_v3"}.get(text.pop("model_type"), known.config["model_type"])
        config = transformers.AutoConfig.for_model(family, **text)
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        size = sum(p.numel() for p in theirs.parameters())
        size += sum(b.numel() for n, b in theirs.named_buffers() if n.endswith("e_score_correction_bias"))
        assert size == count_parameters(ModelConfig.from_hugging_face(known.config)).total


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_bytes_are_those_of_the_cache(family: str) -> None:
    config = ModelConfig.from_hugging_face(small_config(family))
    cache = KVCache(config, rows=1, length=10, dtype=torch.bfloat16)
    held = sum(t.numel() * t.element_size() for t in [*cache.keys, *cache.values])
    assert held == 10 * kv_bytes_per_token(config)


def describe(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["model", "describe", *options, "--json"])
    if result.exception is not None:
        raise result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_mesh_follows_from_the_options() -> None:
    mesh = describe("qwen3-coder-30b-a3b", "--gpus", "16", "--cp", "4", "--ep", "8")["mesh"]
    assert mesh == {"gpus": 16, "dp_replicate": 1, "dp_shard": 4, "cp": 4, "ep": 8}
    assert describe("smollm2-135m", "--dp-shard", "2", "--dp-replicate", "3")["mesh"]["gpus"] == 6
    assert "mesh" not in describe("smollm2-135m")


def test_more_gpus_hold_less_each() -> None:
    small, large, wide = (
        describe("kimi-k2.5", "--gpus", gpus, "--ep", ep, "--cp", "8")["bytes_per_gpu"]
        for gpus, ep in (("64", "8"), ("512", "8"), ("64", "64"))
    )
    for part in ("weights", "optimizer"):
        assert small[part] == pytest.approx(8 * large[part], rel=1e-3)
    assert large["gathered"] == pytest.approx(small["gathered"], rel=0.01)  # but for padding
    assert wide["gathered"] < 0.75 * small["gathered"]  # the rest is embedding, head and attention
    assert small["total"] == sum(size for part, size in small.items() if part != "total")


def test_the_table_shows_memory_and_communication() -> None:
    result = CliRunner().invoke(app, ["model", "describe", "qwen3-coder-30b-a3b", "--gpus", "8", "--ep", "8"])
    assert result.exit_code == 0, result.exception
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["8", "GPUs", "dp_shard", "8,", "ep", "8"] in lines
    assert [line[0] for line in lines if line[-1:] == ["GiB"]][-5:] == [
        "total",
        "weights",
        "gradients",
        "experts",
        "total",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--gpus 64 --ep 7", r"--ep 7 must divide dp-shard x cp = 64"),
        ("--gpus 5 --ep 5", "ep = 5 must divide the number of experts, 384"),
        ("--gpus 3 --cp 3", r"--length 32768 must be a multiple of 2 x cp = 6"),
        ("--gpus 8 --length 300000", "--length 300000 exceeds the model's 262144 positions"),
        ("--gpus 8 --dp-shard 3", r"--gpus 8 must be dp-replicate 1 x dp-shard 3 x cp 1; leave out"),
        ("--gpus 8 --dp-replicate 3", r"--gpus 8 must be dp-replicate 3 x dp-shard x cp 1; leave out"),
        ("--cp 2", "give --gpus or --dp-shard too"),
        ("--gpus 4 --micro-batches 2", r"--micro-batches 2 must be a multiple of dp-replicate x dp-shard = 4"),
        ("--gpus 4 --precision float16", "--precision float16: expected float32 or bfloat16"),
    ],
)
def test_an_impossible_mesh_is_refused(options: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        describe("kimi-k2.5", *options.split())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"kimi-k2\.5"):
        find_config("kimi-k3")
