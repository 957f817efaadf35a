"""transformers is the reference: the same logits in float32, the same top tokens in bfloat16, in both directions."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, configs, pair, random_tokens, small_config, twin
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from etude.model import ModelConfig, Transformer, initialize, load, save

relaxed = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def max_difference(theirs: transformers.PreTrainedModel, ours: Transformer, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        return (theirs(tokens).logits - ours(tokens)).abs().max().item()


def reload(directory: Path) -> transformers.PreTrainedModel:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(directory, dtype=torch.float32, experts_implementation="eager").eval()


@pytest.mark.parametrize("family", FAMILIES)
@relaxed
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_logits_equal_transformers_on_random_configs(family: str, data: st.DataObject, seed: int) -> None:
    config = data.draw(configs(family))
    tokens = random_tokens(config, 2, 33, seed)
    with tempfile.TemporaryDirectory() as place:
        theirs, ours = pair(config, seed, Path(place) / "theirs")
        assert max_difference(theirs, ours, tokens) < 1e-4
        save(ours, Path(place) / "ours")
        again = reload(Path(place) / "ours")
        note(f"seed {seed}")
        assert max_difference(again, ours, tokens) < 1e-4
        assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_makes_the_same_choices(family: str, tied: bool, tmp_path: Path) -> None:
    """The difference to float32 is no larger than that of transformers, so it is rounding."""
    same, our_error, their_error = [], 0.0, 0.0
    for seed in range(4):
        config = small_config(family, tie_word_embeddings=tied)
        theirs = twin(config, seed, lively=False)
        theirs.save_pretrained(tmp_path / f"{seed}")
        tokens = random_tokens(config, 8, 96, seed)
        with torch.no_grad():
            exact = theirs(tokens).logits
            rounded = theirs.to(torch.bfloat16)(tokens).logits
            ours = load(tmp_path / f"{seed}", dtype=torch.bfloat16)(tokens)
        same.append(rounded.argmax(-1) == ours.argmax(-1))
        our_error += (ours - exact).abs().mean().item()
        their_error += (rounded - exact).abs().mean().item()
    assert torch.stack(same).float().mean() >= 0.99
    assert our_error < 1.1 * their_error


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_model_is_one_that_transformers_loads(family: str, tmp_path: Path) -> None:
    config = small_config(family)
    ours = initialize(ModelConfig.from_hugging_face(config), seed=5)
    save(ours, tmp_path / "m")
    theirs = reload(tmp_path / "m")
    assert max_difference(theirs, ours, random_tokens(config, 2, 20)) < 1e-4
    again = initialize(ModelConfig.from_hugging_face(config), seed=5)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


def test_published_rope_spelling_means_the_same_as_the_new_one(tmp_path: Path) -> None:
    yarn = {"factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 1.0}
    new = small_config("deepseek_v3", rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, **yarn})
    old = {k: v for k, v in new.items() if k != "rope_parameters"}
    old |= {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **yarn}}
    assert ModelConfig.from_hugging_face(old) == ModelConfig.from_hugging_face(new)


def test_kimi_k25_is_the_text_model_under_another_name(tmp_path: Path) -> None:
    """Rename a DeepSeek-V3 checkpoint the way Kimi K2.5 nests it, add a vision tensor: same logits."""
    from safetensors.torch import load_file, save_file

    config = small_config("deepseek_v3")
    theirs, _ = pair(config, 1, tmp_path / "text")
    tensors = {f"language_model.{k}": v for k, v in load_file(tmp_path / "text/model.safetensors").items()}
    nested = tmp_path / "kimi"
    nested.mkdir()
    save_file({**tensors, "vision_tower.patch_embed.proj.weight": torch.ones(3, 3)}, nested / "model.safetensors")
    write_config(nested, {"model_type": "kimi_k25", "text_config": {**config, "model_type": "kimi_k2"}})
    assert max_difference(theirs, load(nested), random_tokens(config, 2, 20)) < 1e-4


def write_config(directory: Path, config: dict[str, Any]) -> None:
    import json

    (directory / "config.json").write_text(json.dumps(config))
