"""Parameter counts against published figures and transformers' own; the mesh arithmetic against its definition."""

from __future__ import annotations

import pytest
import torch
import transformers
from families import FAMILIES, small_config, twin

from etude.errors import InputError
from etude.model import KVCache, ModelConfig
from etude.model.describe import Mesh, count_parameters, find_config, kv_bytes_per_token, memory_per_gpu
from etude.model.known import KNOWN_MODELS


@pytest.mark.parametrize("family", FAMILIES)
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


def test_more_gpus_hold_less_each() -> None:
    config = find_config("kimi-k2.5")
    counted = count_parameters(config)
    small = memory_per_gpu(config, counted, Mesh(gpus=64, ep=8, cp=8))
    large = memory_per_gpu(config, counted, Mesh(gpus=512, ep=8, cp=8))
    assert small.optimizer == pytest.approx(8 * large.optimizer, rel=1e-6)
    assert small.gathered_layers == large.gathered_layers
    wide = memory_per_gpu(config, counted, Mesh(gpus=64, ep=64, cp=8))
    assert wide.gathered_layers < small.gathered_layers / 4
    assert small.total == sum(vars(small).values())


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (Mesh(gpus=64, ep=7), "do not divide"),
        (Mesh(gpus=0), "at least 1"),
        (Mesh(gpus=5, ep=5), "384 experts do not divide over EP 5"),
        (Mesh(gpus=3, cp=3, sequence=32_768), "does not divide over CP 3"),
        (Mesh(gpus=8, sequence=300_000), "exceeds the model's 262144"),
    ],
)
def test_an_impossible_mesh_is_refused(mesh: Mesh, words: str) -> None:
    config = find_config("kimi-k2.5")
    with pytest.raises(InputError, match=words):
        memory_per_gpu(config, count_parameters(config), mesh)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"kimi-k2\.5"):
        find_config("kimi-k3")
