"""Sampling against exact distributions on a small vocabulary; random numbers that depend on (seed, position) alone."""

import math
import random
from typing import Any

import pytest
import torch
from engines import surprise
from torch import Tensor

from etude.errors import InputError
from etude.inference.sampling import Sampling, SamplingTensors, draw
from etude.kernels.draw import ACCEPT, DRAFT, DRAW, REDRAW, invert_cdf, uniform

LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, 0.0, -0.5, -1.0, -3.0, -9.0, -30.0])
DRAWS = 20_000
WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 99},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.1},
]


def exact(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """Compute the distribution token by token."""
    weights = [math.exp(logit / temperature) for logit in LOGITS.tolist()]
    probabilities = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])[: top_k or None]
    whole, kept, weight = sum(probabilities[token] for token in order), [], 0.0
    for token in order:
        if weight < top_p * whole:
            kept.append(token)
        weight += probabilities[token]
    kept = [token for token in kept if probabilities[token] >= min_p * probabilities[order[0]]]
    total = sum(probabilities[token] for token in kept)
    return [probabilities[token] / total if token in kept else 0.0 for token in range(len(probabilities))]


def drawn(rows: list[Sampling], seeds: list[int], positions: list[int], logits: Tensor | None = None) -> Any:
    logits = LOGITS.expand(len(rows), -1) if logits is None else logits
    return draw(logits, SamplingTensors.of(rows, seeds, "cpu"), torch.tensor(positions))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_follow_the_exact_distribution(way: dict[str, Any]) -> None:
    found = drawn([Sampling(**way)] * DRAWS, list(range(DRAWS)), [3] * DRAWS)
    probabilities = exact(**way)
    counts = torch.bincount(found.tokens, minlength=len(probabilities)).tolist()
    assert surprise(counts, [chance * DRAWS for chance in probabilities]) < 4
    assert torch.allclose(found.logprobs, torch.tensor(probabilities).log()[found.tokens], atol=1e-5)
    assert torch.allclose(found.raw_logprobs, LOGITS.log_softmax(0)[found.tokens], atol=1e-5)


def test_positions_of_one_seed_are_as_random_as_seeds() -> None:
    found = drawn([Sampling()] * DRAWS, [77] * DRAWS, list(range(DRAWS)))
    counts = torch.bincount(found.tokens, minlength=len(LOGITS)).tolist()
    assert surprise(counts, [chance * DRAWS for chance in exact()]) < 4


def test_temperature_zero_takes_the_first_of_the_likeliest_with_certainty() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [9.0, 1.0, 2.0, 3.0]])
    for way in ({}, {"top_p": 0.1}, {"top_k": 2}, {"min_p": 0.5}):
        found = drawn([Sampling(temperature=0.0, **way)] * 2, [1, 2], [0, 0], logits)
        assert found.tokens.tolist() == [1, 0]
        assert found.logprobs.tolist() == [0.0, 0.0]
        assert torch.allclose(found.raw_logprobs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_a_row_is_sampled_the_same_to_the_last_bit_whatever_its_neighbours_are() -> None:
    rng = random.Random(5)
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(1)) * 3
    rows = [Sampling(**rng.choice(WAYS)) for _ in range(6)] + [
        Sampling(),
        Sampling(temperature=0.0),
        Sampling(top_p=0.3),
    ]
    seeds, positions = [rng.randrange(2**62) for _ in rows], [rng.randrange(2000) for _ in rows]
    together = drawn(rows, seeds, positions, logits)
    for row in range(len(rows)):
        alone = drawn(rows[row : row + 1], seeds[row : row + 1], positions[row : row + 1], logits[row : row + 1])
        for whole, part in zip(together, alone, strict=True):
            assert whole[row].item() == part[0].item(), f"seed 5, row {row}"


def test_the_same_seed_and_position_give_the_same_token_and_others_do_not() -> None:
    first = drawn([Sampling()] * 64, list(range(64)), [0] * 64).tokens
    assert torch.equal(first, drawn([Sampling()] * 64, list(range(64)), [0] * 64).tokens)
    assert not torch.equal(first, drawn([Sampling()] * 64, list(range(64)), [1] * 64).tokens)
    assert not torch.equal(first, drawn([Sampling()] * 64, list(range(64, 128)), [0] * 64).tokens)


@pytest.mark.parametrize("top_p", [1e-46, 1e-9])
def test_the_likeliest_token_stays_even_when_top_p_rounds_to_nothing(top_p: float) -> None:
    found = drawn([Sampling(top_p=top_p)], [1], [0])
    assert found.tokens.tolist() == [0]
    assert found.logprobs.tolist() == [0.0]


def test_a_token_of_probability_zero_is_never_sampled() -> None:
    probabilities = torch.tensor([[0.0, 0.0, 1.0, 0.0, 2.0, 0.0]] * 4)
    uniforms = torch.tensor([0.0, 0.33333, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    assert invert_cdf(probabilities, uniforms).tolist() == [2, 2, 4, 4]


def test_uniforms_are_even_and_independent_between_seeds_positions_and_purposes() -> None:
    seeds, positions = torch.meshgrid(torch.arange(300), torch.arange(300), indexing="ij")
    by_purpose = [uniform(seeds, positions, purpose) for purpose in (DRAW, ACCEPT, REDRAW, DRAFT)]
    for values in by_purpose:
        assert values.min() >= 0
        assert values.max() < 1
        counts = torch.histc(values.float(), 64, 0, 1).tolist()
        assert surprise(counts, [values.numel() / 64] * 64) < 4
    first = by_purpose[0]
    pairs = [(first, other) for other in by_purpose[1:]]
    pairs += [(first[1:], first[:-1]), (first[:, 1:], first[:, :-1]), (first[1:, :-1], first[:-1, 1:])]
    for one, other in pairs:
        together = (one * 8).long() * 8 + (other * 8).long()
        counts = torch.bincount(together.flatten(), minlength=64).tolist()
        assert surprise(counts, [one.numel() / 64] * 64) < 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": 1e-9},
        {"top_p": 0.0},
        {"top_p": math.nan},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 2**70},
        {"min_p": 1.0},
        {"min_p": math.nan},
        {"seed": -1},
        {"seed": 2**62},
        {"samples": 0},
        {"samples": 10**6},
        {"stop_text": ("",)},
    ],
    ids=str,
)
def test_invalid_values_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="stop text" if "stop_text" in wrong else next(iter(wrong))):
        Sampling(**wrong)
