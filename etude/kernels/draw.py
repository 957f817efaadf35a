"""A token from each row of logits at a temperature, by luck that depends on the row's own seed and place only.

On CUDA one pass over the logits does all: Gumbel noise added to each, the largest wins. On a CPU the running sum of the
probabilities is searched. The two are equal in distribution, not token for token; each is the same in any batch.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.kernels.native import serves

DRAW, ACCEPT, REDRAW, DRAFT = 0, 1, 2, 3  # what luck is used for: independent streams

Whole = TypeVar("Whole", Tensor, npt.NDArray[np.int64])  # signed 64 bits that wrap around


class Drawn(NamedTuple):
    """Tokens [n] and their log-probabilities: as they were drawn, and under the model's own distribution."""

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor


def draw_plain(logits: Tensor, temperatures: Tensor, seeds: Tensor, places: Tensor) -> Drawn:
    """One token for each row of logits [n, vocabulary]; temperature 0 takes the likeliest."""
    if logits.is_cuda:
        from etude.kernels import draw_triton

        return Drawn(*draw_triton.draw(logits, temperatures, seeds, places))  # type: ignore[no-untyped-call]
    if (native := serves(logits)) is not None and logits.is_contiguous():
        n, size = logits.shape
        tokens, lucks = torch.empty(n, dtype=torch.int64), luck(seeds, places, DRAW)
        logprobs, raws, room = logits.new_empty(n), logits.new_empty(n), torch.empty_like(logits)
        made = tokens.data_ptr(), logprobs.data_ptr(), raws.data_ptr(), room.data_ptr()
        native.draw(logits.data_ptr(), temperatures.data_ptr(), lucks.data_ptr(), *made, n, size)
        return Drawn(tokens, logprobs, raws)
    raw = logits.float().log_softmax(dim=-1)
    return draw_from(warmed(raw, temperatures), raw, seeds, places)


def draw_from(odds: Tensor, raw: Tensor, seeds: Tensor, places: Tensor) -> Drawn:
    """A token for each row of probabilities; `raw` are the model's own log-probabilities."""
    tokens = pick(odds, luck(seeds, places, DRAW))
    chosen = tokens[:, None]
    return Drawn(tokens, odds.gather(1, chosen)[:, 0].log(), raw.gather(1, chosen)[:, 0])


def warmed(raw: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities at a temperature from log-probabilities; at temperature 0 all weight is on the likeliest."""
    greedy = temperatures == 0
    odds = (raw / torch.where(greedy, 1.0, temperatures)[:, None]).softmax(dim=-1)
    if not raw.is_cuda and not greedy.any():  # on CUDA the look would cost more than what it saves
        return odds
    likeliest = torch.zeros_like(odds).scatter_(1, raw.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], likeliest, odds)


def pick(odds: Tensor, lucks: Tensor) -> Tensor:
    """The token at which the running sum of the odds passes each row's luck; one of weight zero is never picked."""
    # In float64: in float32 a vocabulary of 150,000 leaves the tail of the sum a multiple of 6e-8.
    sums = odds.double().cumsum(dim=-1)
    aim = lucks.double()[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, aim, right=True)
    # luck may round up to the whole: then it is the last token that weighs anything
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(found, last)[:, 0].clamp(max=odds.shape[-1] - 1)  # of odds that are no numbers, any token


def luck(seeds: Tensor, places: Tensor, stream: int) -> Tensor:
    """A number in [0, 1) for each (seed, place, stream): splitmix64's finaliser, 53 bits of it, as float64."""
    if seeds.device.type == "cpu":  # fifteen little operations: in numpy they cost a quarter
        return torch.from_numpy(_bits(seeds.numpy(), places.numpy(), stream).astype(np.float64) * 2.0**-53)
    return _bits(seeds, places, stream).double() * 2.0**-53


def _bits(seeds: Whole, places: Whole, stream: int) -> Whole:
    mixed = _mix(seeds * -7046029254386353131 + _mix(places * 4 + stream))  # 0x9E3779B97F4A7C15, signed
    return mixed >> 11 & (1 << 53) - 1


def _mix(x: Whole) -> Whole:
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ (x >> 31 & (1 << 33) - 1)
