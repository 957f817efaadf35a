"""Plain token-by-token generation for one prompt, to inspect a model. Serving is in `etude.inference`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from etude.chat.incremental_text import IncrementalDetokenizer
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.model.cache import KVCache
from etude.model.transformer import Transformer


def generate(
    model: Transformer,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop: frozenset[int] = frozenset(),
) -> Iterator[int]:
    """Yield new token ids, without the stop token; temperature 0 is greedy."""
    if not prompt:
        raise InputError("the prompt is empty; a model needs at least one token to continue")
    if max_tokens < 1:
        raise InputError(f"max_tokens {max_tokens} must be at least 1")
    if temperature and not 1e-6 <= temperature <= 1e6:
        raise InputError(f"temperature {temperature} must be 0, or between 1e-6 and 1e6")
    if not 0 <= seed < 2**63:
        raise InputError(f"seed {seed} must be between 0 and 2^63 - 1")
    length, limit = len(prompt) + max_tokens, model.config.max_length
    if length > limit:
        raise InputError(f"{len(prompt)} prompt tokens and {max_tokens} new ones exceed the model's {limit}")
    device, dtype = model.head_weight.device, model.head_weight.dtype
    cache = KVCache(model.config, rows=1, length=length, dtype=dtype, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)
    for _ in range(max_tokens):
        with torch.inference_mode():
            logits = model.logits(model.hidden(tokens, cache=cache)[:, -1]).float()
            if temperature:
                tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            else:
                tokens = logits.argmax(-1, keepdim=True)
        token = int(tokens)
        if token in stop:
            return
        yield token


def stream_text(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the text of a token stream; an incomplete UTF-8 character is held back until its last byte."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=False)
    yield from (detokenizer.feed([token]) for token in tokens)
    yield detokenizer.feed((), last=True)
