"""Multi-token-prediction layers: right targets, no gradient into the main model, equal after saving and loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES, random_tokens, small_config

from etude.errors import InputError
from etude.kernels.loss import IGNORE
from etude.model import Documents, ModelConfig, initialize
from etude.model.mtp import MTP, initialize_mtp, load_mtp, save_mtp, shifted


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
    save_mtp(mtp, tmp_path)
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
