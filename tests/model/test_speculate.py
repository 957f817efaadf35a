"""Speculative decoding does not change the output: greedy text is equal, sampled text has the same distribution."""

from __future__ import annotations

import itertools

import pytest
import torch
from families import FAMILIES, small_config

from etude.model import ModelConfig, initialize
from etude.model.generate import generate
from etude.model.mtp import MTP, initialize_mtp
from etude.model.speculate import speculate
from etude.model.transformer import Transformer


def models(family: str, **changes: object) -> tuple[Transformer, MTP]:
    config = ModelConfig.from_hugging_face(small_config(family, initializer_range=0.2, **changes))
    return initialize(config, 0), initialize_mtp(config, 1, 1, torch.float32)


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_the_main_models_own(family: str, drafts: int) -> None:
    model, mtp = models(family)
    prompts = [[5, 9, 2], [7, 7, 1, 30, 12, 4, 9], [3, 4]]
    got = speculate(model, mtp, prompts, new_tokens=24, drafts=drafts)
    for prompt, tokens in zip(prompts, got.tokens, strict=True):
        assert tokens[:24] == list(generate(model, prompt, max_tokens=24))
    assert len(got.accepted_by_depth) == drafts


def test_a_perfect_draft_is_always_accepted() -> None:
    """An MTP layer that predicts what the main model predicts, because every hidden state is made alike."""
    model, mtp = models("llama", tie_word_embeddings=False)
    with torch.no_grad():
        for norm in (model.norm, mtp.layers[0].norm):
            norm.weight.zero_()
    for temperature in (0.0, 1.0):
        got = speculate(model, mtp, [[5, 9, 2]] * 4, new_tokens=30, drafts=3, temperature=temperature)
        assert got.accepted_by_depth == [1.0, 1.0, 1.0]
        assert got.acceptance_length == 4.0


@pytest.mark.parametrize("drafts", [1, 2])
def test_sampled_text_follows_the_main_models_distribution(drafts: int) -> None:
    """Chi-square over all pairs of the first two tokens, fixed seed, small vocabulary."""
    model, mtp = models("qwen3", vocab_size=5)
    rows, vocabulary, prompt = 6000, 5, [1, 3, 0]
    got = speculate(model, mtp, [prompt] * rows, new_tokens=3, drafts=drafts, temperature=1.0, seed=11)
    assert 0.02 < got.accepted_by_depth[0] < 0.98  # both branches are exercised
    seen = torch.zeros(vocabulary, vocabulary, vocabulary)
    for tokens in got.tokens:
        seen[tuple(tokens[:3])] += 1
    with torch.no_grad():
        expected = torch.zeros_like(seen)
        first = model(torch.tensor([prompt]))[0, -1].softmax(-1)
        for a, b in itertools.product(range(vocabulary), repeat=2):
            second = model(torch.tensor([[*prompt, a]]))[0, -1].softmax(-1)
            third = model(torch.tensor([[*prompt, a, b]]))[0, -1].softmax(-1)
            expected[a, b] = rows * first[a] * second[b] * third
    keep = expected > 5
    statistic = ((seen - expected)[keep] ** 2 / expected[keep]).sum().item()
    freedom = int(keep.sum())
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # about four standard deviations
