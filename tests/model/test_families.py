"""Every family against transformers on small random checkpoints: logits, gradients, cached decoding, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import engine_of, finish
from families import FAMILIES, VARIANTS, pair, random_tokens, small_config

from etude.errors import InputError
from etude.inference.sampling import Sampling
from etude.model import ModelConfig, load, save
from etude.model.adapters import add_adapters, merge_adapters
from etude.model.checkpoint import checkpoint_views
from etude.model.config import with_rope
from etude.model.peft import load_beside, write_adapter
from etude.model.settings import LoraSettings

# What each family has that the others do not, in a second config of it.
OTHERS: dict[str, dict[str, Any]] = {
    "mistral": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
    "mixtral": {"head_dim": 10, "num_experts_per_tok": 1},
    "qwen2": {"tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 16},
    "smollm3": {"no_rope_layers": [0, 1, 1, 0, 1], "attention_bias": True, "tie_word_embeddings": True},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "glm4_moe": {
        "use_qk_norm": False,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
    },
}
CONFIGS = [(family, {}) for family in (*FAMILIES, *VARIANTS)] + list(OTHERS.items())


def gradients_by_name(theirs: transformers.PreTrainedModel, directory: Path) -> dict[str, torch.Tensor]:
    """Return the gradients of transformers' model by checkpoint name: saved like weights, so it renames and splits."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    theirs.save_pretrained(directory)
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


@pytest.mark.parametrize(("family", "changes"), CONFIGS)
def test_a_family_computes_what_transformers_computes(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config = small_config(family, **changes)
    theirs, ours = pair(config, 7, tmp_path / "theirs")
    tokens = random_tokens(config, 2, 33, seed=7)
    wanted, got = theirs(tokens).logits, ours(tokens)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)

    save(ours, tmp_path / "ours")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, experts_implementation="eager"
    )
    assert type(again) is type(theirs)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, theirs(tokens).logits)

    greedy = Sampling(max_tokens=12, temperature=0.0)
    engine = engine_of(family, model=ours)
    sequences = [engine.submit(row[:9].tolist(), greedy)[0] for row in tokens]
    finish(engine)
    for sequence in sequences:
        text = torch.tensor([sequence.prompt + sequence.output])
        with torch.no_grad():
            logprobs = theirs(text).logits[0].log_softmax(-1)
        at = torch.arange(len(sequence.prompt) - 1, text.shape[1] - 1)
        expected = logprobs[at, text[0, 1:][at]]
        torch.testing.assert_close(torch.tensor(sequence.raw_logprobs), expected, atol=2e-4, rtol=0)
        assert torch.equal(logprobs[at].argmax(-1), text[0, 1:][at])

    for logits in (wanted, got):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for parameter in ours.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    expected_gradients = gradients_by_name(theirs, tmp_path / "gradients")
    names = [name for name in checkpoint_views(ours) if not name.endswith("e_score_correction_bias")]
    assert set(names) <= set(expected_gradients)
    assert max(expected_gradients[name].abs().max() for name in names) > 0.05
    for name in names:
        gradient = checkpoint_views(ours)[name]
        torch.testing.assert_close(gradient, expected_gradients[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("family", VARIANTS)
def test_adapters_of_a_family_come_back_and_merge(family: str, tmp_path: Path) -> None:
    """The matrices that PEFT's file names are those of the checkpoint, whatever the family calls them."""
    config = small_config(family)
    theirs, ours = pair(config, 3, tmp_path / "base")
    add_adapters(ours, LoraSettings(rank=2), seed=1)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if parameter.requires_grad and name.endswith("up"):
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
    (tmp_path / "adapter").mkdir()
    write_adapter(ours, tmp_path / "adapter", "../base")
    tokens = random_tokens(config, 2, 9)
    with torch.no_grad():
        wanted = ours(tokens)
        assert not torch.allclose(wanted, theirs(tokens).logits, atol=1e-2)
        torch.testing.assert_close(load(tmp_path / "adapter")(tokens), wanted)
        torch.testing.assert_close(load_beside(ours, tmp_path / "adapter")(tokens), wanted)
        torch.testing.assert_close(merge_adapters(ours)(tokens), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["mistral", "mixtral", "phi3", "qwen2"])
def test_a_context_ends_with_the_sliding_window(family: str, tmp_path: Path) -> None:
    """Up to the window the network is that of transformers, which attends to no more; beyond it, it would differ."""
    used = {"use_sliding_window": True, "max_window_layers": 1} if family == "qwen2" else {}
    config = small_config(family, sliding_window=24, **used)
    theirs, ours = pair(config, 5, tmp_path / "m")
    assert ours.config.max_length == 24
    tokens = random_tokens(config, 1, 40, seed=5)
    with torch.no_grad():
        assert (theirs(tokens[:, :24]).logits - ours(tokens[:, :24])).abs().max() < 1e-4
        assert (theirs(tokens).logits - ours(tokens)).abs().max() > 1e-2
    with pytest.raises(InputError, match=r"context of 32 tokens is longer than the window of 24"):
        with_rope(ours.config, length=32)
    assert json.loads((tmp_path / "m/config.json").read_text())["sliding_window"] == 24


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "LongRoPE"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "'longrope' is not supported"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("glm4_moe", {"partial_rotary_factor": 0.3}, "partial_rotary_factor is 0.3, of 12 dimensions"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "expected one entry for each of 5 layers"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("qwen2", {"sliding_window": -1, "use_sliding_window": True}, "sliding_window is -1"),
    ],
)
def test_what_a_family_cannot_do_is_one_line(family: str, changes: dict[str, Any], words: str) -> None:
    config = {**small_config(family), **changes}
    with pytest.raises(InputError, match=words) as caught:
        ModelConfig.from_hugging_face(config)
    assert "\n" not in str(caught.value)
