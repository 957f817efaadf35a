"""Small random models, engines around them, and the plain forward they are compared with."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import torch
from families import FAMILIES, small_config

from etude.inference.engine import Engine
from etude.inference.request import SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model.config import ModelConfig
from etude.model.generate import generate
from etude.model.moe import Routing
from etude.model.mtp import MTP
from etude.model.transformer import Transformer, draw_weights

__all__ = ["FAMILIES", "GREEDY"]
GREEDY = Sampling(max_tokens=20, temperature=0.0)
SIZES = {"kv_cache_tokens": 2048, "page_size": 8, "max_sequences": 8}


@functools.cache
def weights_of(family: str, seed: int = 0, vocabulary: int = 61, **changes: Any) -> Transformer:
    model = Transformer(ModelConfig.from_hugging_face(small_config(family, vocab_size=vocabulary, **changes))).eval()
    draw_weights(model, 0.15, seed)  # at the usual 0.02 bugs stay hidden
    return model


def model_of(family: str, seed: int = 0, **changes: Any) -> Transformer:
    """Return a new model, into which tests may load other weights."""
    source = weights_of(family, seed, **changes)
    model = Transformer(source.config).eval()
    model.load_state_dict(source.state_dict())
    return model


def engine_of(family: str, seed: int = 0, drafts: int = 0, model: Transformer | None = None, **options: Any) -> Engine:
    model = model or model_of(family, seed)
    mtp = mtp_of(model) if drafts else None
    return Engine(model, EngineOptions(**{**SIZES, "drafts": drafts, **options}), mtp=mtp)


def mtp_of(model: Transformer) -> MTP:
    mtp = MTP(model.config)
    draw_weights(mtp, 0.15, 3)
    return mtp


def prompts_of(lengths: Sequence[int], vocabulary: int = 61, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


@functools.cache
def likeliest(family: str, seed: int, prompt: tuple[int, ...], count: int) -> list[int]:
    return list(generate(weights_of(family, seed), prompt, max_tokens=count))


def finish(engine: Engine) -> None:
    """Run to the end, checking the page pool after every step."""
    while engine.step():
        engine.pool.check_invariants()
    assert not engine.busy
    assert engine.pool.held == 0


def plain_logprobs(model: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).float().log_softmax(-1)[0]


def gap(model: Transformer, sequence: SequenceState, start: int = 0) -> float:
    """Return the largest difference of a sequence's log-probabilities, from `start` on, to those of a plain forward."""
    logprobs = plain_logprobs(model, sequence.prompt + sequence.output)
    first = len(sequence.prompt) - 1
    pairs = [
        (logprobs[first + i, sequence.output[i]].item(), sequence.raw_logprobs[i])
        for i in range(start, len(sequence.output))
    ]
    return max(abs(a - b) for a, b in pairs)


def plain_routing(model: Transformer, tokens: Sequence[int]) -> torch.Tensor:
    routing = Routing()
    with torch.no_grad():
        model.hidden(torch.tensor([list(tokens)]), routing=routing)
    assert routing.chosen is not None
    return routing.chosen[0]


def surprise(counts: Sequence[float], expected: Sequence[float]) -> float:
    """Return how many standard deviations a chi-square statistic lies above its mean; rare outcomes are merged."""
    pairs = sorted(zip(expected, counts, strict=True), reverse=True)
    assert all(seen == 0 for want, seen in pairs if want == 0), "an outcome of probability zero was drawn"
    cells: list[list[float]] = [[0.0, 0.0]]
    for want, seen in pairs:
        if cells[-1][0] >= 8:
            cells.append([0.0, 0.0])
        cells[-1][0] += want
        cells[-1][1] += seen
    if len(cells) > 1 and cells[-1][0] < 8:
        want, seen = cells.pop()
        cells[-1][0] += want
        cells[-1][1] += seen
    freedom = len(cells) - 1
    statistic = sum((seen - want) ** 2 / want for want, seen in cells)
    return (statistic - freedom) / math.sqrt(2 * freedom) if freedom else 0.0
