"""Multi-token-prediction layers: right targets, no gradient into the main model, equal after saving and loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, random_tokens, small_config
from safetensors.torch import load_file, save_file

from etude.chat.tokenizer import train_tokenizer
from etude.errors import InputError
from etude.inference.engine import open_engine
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.kernels.loss import IGNORE
from etude.model import Documents, ModelConfig, Transformer, initialize
from etude.model.checkpoint import write_model
from etude.model.convert import import_directory
from etude.model.mtp import (
    MTP,
    carried_mtp,
    count_mtp_layers,
    initialize_mtp,
    load_mtp,
    save_mtp,
    shifted,
    write_model_with_mtp,
)


def lively(family: str) -> tuple[ModelConfig, object, MTP]:
    config = ModelConfig.from_hugging_face(small_config(family, initializer_range=0.2))
    return config, initialize(config, 0), initialize_mtp(config, 2, 1, torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_target_is_the_main_heads_distribution_one_step_ahead(family: str) -> None:
    """Read off document by document, position by position."""
    _, model, mtp = lively(family)
    rows = [[5, 7], [12]]
    tokens = random_tokens({"vocab_size": 61}, 2, 12)
    documents = Documents.pack(rows)
    targets = tokens.roll(-1, 1)
    hidden = model.hidden(tokens, documents=documents)
    for ahead, draft in enumerate(mtp.drafts(model, hidden, tokens, targets, documents), start=1):
        for row, lengths in enumerate(rows):
            start = 0
            for length in lengths:
                for i in range(length):
                    inside = i + ahead < length
                    assert draft.weights[row, start + i] == float(inside)
                    if inside:
                        assert torch.equal(draft.teacher[row, start + i], hidden[row, start + i + ahead])
                start += length


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_sees_its_document_up_to_the_token_it_continues(family: str) -> None:
    """Layer 1 at position i knows its document up to token i + 1; changing a later or foreign one changes nothing."""
    _, model, mtp = lively(family)
    tokens = random_tokens({"vocab_size": 61}, 1, 12)
    documents = Documents.pack([[5, 7]])

    def first_layer(t: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            hidden = model.hidden(t, documents=documents)
            return next(iter(mtp.drafts(model, hidden, t, t, documents))).hidden

    before = first_layer(tokens)
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 61
    after = first_layer(changed)
    apart = (before - after).abs().amax(dim=-1)[0]
    assert apart[:7].max() < 1e-5  # experts of other sizes may round the last bit differently
    assert apart[7] > 1e-2  # it reads token 8 as the one just sampled


def test_no_gradient_reaches_the_main_model_and_ignored_targets_have_no_weight() -> None:
    _, model, mtp = lively("qwen3")
    tokens = random_tokens({"vocab_size": 61}, 1, 9)
    targets = tokens.roll(-1, 1)
    targets[0, 4:] = IGNORE
    hidden = model.hidden(tokens)
    drafts = list(mtp.drafts(model, hidden, tokens, targets))
    sum(draft.hidden.sum() for draft in drafts).backward()
    assert all(p.grad is None for p in model.parameters())
    assert drafts[0].weights.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0, 0]]
    assert drafts[1].weights.tolist() == [[1, 1, 0, 0, 0, 0, 0, 0, 0]]


def test_shifted_fills_with_zeros() -> None:
    assert shifted(torch.tensor([[1, 2, 3]]), 2).tolist() == [[3, 0, 0]]
    assert shifted(torch.ones(1, 3, 2), 1)[0].tolist() == [[1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_layers_load_equal_and_misfits_are_named(family: str, tmp_path: Path) -> None:
    config, _, mtp = lively(family)
    save_mtp(mtp.state_dict(), len(mtp.layers), tmp_path)
    again = load_mtp(tmp_path, config, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(mtp.state_dict().values(), again.state_dict().values(), strict=True))
    other = ModelConfig.from_hugging_face({**config.source, "hidden_size": 48})
    with pytest.raises(InputError, match=r"tensor layers\.0\.\S+ does not fit"):
        load_mtp(tmp_path, other, torch.float32)
    (tmp_path / "training/mtp.safetensors").rename(tmp_path / "mtp.safetensors")  # where it was once
    assert load_mtp(tmp_path, config, torch.float32).state_dict().keys() == again.state_dict().keys()
    (tmp_path / "mtp.safetensors").write_bytes(b"x")
    with pytest.raises(InputError, match="not readable"):
        load_mtp(tmp_path, config, torch.float32)


PUBLISHED = ("deepseek_v3", "glm4_moe")


def published(family: str, directory: Path, layers: int = 1) -> tuple[Transformer, MTP]:
    """Write a checkpoint with MTP layers where the family has them; return what was written."""
    config = ModelConfig.from_hugging_face(small_config(family, initializer_range=0.2, num_nextn_predict_layers=layers))
    model, mtp = initialize(config, 0), initialize_mtp(config, layers, 1, torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *mtp.named_parameters(), *mtp.named_buffers()]:
            if "norm" in name or name.endswith("bias"):
                tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) / 5)
    directory.mkdir()
    write_model_with_mtp(model, mtp, directory)
    return model, mtp


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_layers_compute_what_transformers_computes(family: str, tmp_path: Path) -> None:
    """transformers reads the layers that we write, by their published names, and we read them again."""
    from transformers.modeling_layers import MtpModel

    model, mtp = published(family, tmp_path / "m")
    assert not (tmp_path / "m/training").exists()
    assert count_mtp_layers(tmp_path / "m") == 1
    main = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "m", dtype=torch.float32, experts_implementation="eager"
    ).eval()
    # transformers knows the layers of the published sizes by number; this model has three
    main._keys_to_ignore_on_load_unexpected = {r"model\.layers\.3.*"}
    theirs = MtpModel.from_pretrained(main).eval()
    tokens = random_tokens({"vocab_size": 61}, 2, 14)
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state
        positions = torch.arange(1, 14)[None].expand(2, -1)
        wanted = theirs.forward_layer(0, hidden[:, :-1], positions, None, input_ids=tokens[:, 1:])
        again = load_mtp(tmp_path / "m", model.config, torch.float32)
        for layers in (mtp, again):
            got = next(iter(layers.drafts(model, model.hidden(tokens), tokens, tokens.roll(-1, 1)))).hidden
            torch.testing.assert_close(got[:, :-1], wanted, atol=1e-4, rtol=0)
    assert all(torch.equal(a, b) for a, b in zip(mtp.state_dict().values(), again.state_dict().values(), strict=True))


def test_published_layers_draft_and_follow_a_conversion(tmp_path: Path) -> None:
    """The engine drafts with them, and a copy in another dtype has them too, with the names of the original."""
    tokenizer = train_tokenizer(["a b c d"] * 3, 300)
    config = small_config("deepseek_v3", vocab_size=len(tokenizer), num_nextn_predict_layers=1, initializer_range=0.2)
    model = initialize(ModelConfig.from_hugging_face(config), 0)
    (tmp_path / "m").mkdir()
    write_model_with_mtp(model, initialize_mtp(model.config, 1, 1, torch.float32), tmp_path / "m")
    tokenizer.save(tmp_path / "m")
    import_directory(tmp_path / "m", tmp_path / "copy", torch.bfloat16)
    names = load_file(tmp_path / "m/model.safetensors").keys()
    copy = load_file(tmp_path / "copy/model.safetensors")
    assert copy.keys() == names
    assert {name.removeprefix("model.layers.3.") for name in names} >= {
        *("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "self_attn.o_proj.weight"),
        *("embed_tokens.weight", "shared_head.head.weight", "mlp.experts.7.up_proj.weight"),
    }
    assert copy["model.layers.3.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert copy["model.layers.3.eh_proj.weight"].dtype == torch.bfloat16
    engine = open_engine(tmp_path / "m", EngineOptions(drafts=1, kv_cache_tokens=512), device="cpu")
    sequence = engine.submit([1, 2, 3], Sampling(max_tokens=9, temperature=0.0))[0]
    while engine.step():
        pass
    assert engine.speculator is not None
    assert engine.speculator.acceptance.rounds > 0
    with torch.no_grad():
        whole = torch.tensor([sequence.prompt + sequence.output])
        assert whole[0, 3:].tolist() == model(whole)[0, 2:-1].argmax(-1).tolist()


def test_layers_are_carried_with_a_model_that_was_trained_on(tmp_path: Path) -> None:
    model, mtp = published("deepseek_v3", tmp_path / "m", layers=2)
    with torch.no_grad():
        model.embed.weight.add_(1.0)
    (tmp_path / "later").mkdir()
    write_model(model, tmp_path / "later", extra=carried_mtp(tmp_path / "m", model))
    again = load_mtp(tmp_path / "later", model.config, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(mtp.state_dict().values(), again.state_dict().values(), strict=True))
    (tmp_path / "own").mkdir()
    write_model_with_mtp(model, MTP(model.config, 1), tmp_path / "own")  # not as many as the family has: their own file
    assert (tmp_path / "own/training/mtp.safetensors").exists()
    assert count_mtp_layers(tmp_path / "own") == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop("model.layers.3.mlp.experts.2.up_proj.weight"), r"layers\.3\.\S+ is missing; deepseek_v3"),
        (lambda t: t.update({"model.layers.3.hnorm.weight": torch.ones(3)}), r"hnorm\.weight has shape \[3\]"),
        (lambda t: t["model.layers.3.shared_head.head.weight"].add_(1), r"head\.weight differs from lm_head\.weight"),
    ],
)
def test_damaged_published_layers_are_named(
    tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    model, _ = published("deepseek_v3", tmp_path / "m")
    tensors = load_file(tmp_path / "m/model.safetensors")
    damage(tensors)
    save_file(tensors, tmp_path / "m/model.safetensors")
    with pytest.raises(InputError, match=words):
        load_mtp(tmp_path / "m", model.config, torch.float32)
