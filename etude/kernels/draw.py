"""Sample a token from each row of logits at a temperature, deterministic in the row's own (seed, position).

On CUDA one pass over the logits adds Gumbel noise to each and takes the largest. On a CPU the cumulative distribution
is searched. The two are equal in distribution, not token for token; each gives the same tokens in any batch.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.kernels.native import native_kernels_for

DRAW, ACCEPT, REDRAW, DRAFT = 0, 1, 2, 3  # purposes of a random number: each has an independent sequence

Int64 = TypeVar("Int64", Tensor, npt.NDArray[np.int64])  # signed 64 bits that wrap around


class Drawn(NamedTuple):
    """Tokens [n] and their log-probabilities: as sampled, and under the model's own distribution."""

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor


def draw_untruncated(logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Drawn:
    """Sample one token for each row of logits [n, vocabulary]; temperature 0 takes the likeliest."""
    if logits.is_cuda:
        from etude.kernels import draw_triton

        return Drawn(*draw_triton.draw(logits, temperatures, seeds, positions))  # type: ignore[no-untyped-call]
    if (native := native_kernels_for(logits)) is not None and logits.is_contiguous():
        n, size = logits.shape
        tokens, uniforms = torch.empty(n, dtype=torch.int64), uniform(seeds, positions, DRAW)
        logprobs, raws, scratch = logits.new_empty(n), logits.new_empty(n), torch.empty_like(logits)
        outputs = tokens.data_ptr(), logprobs.data_ptr(), raws.data_ptr(), scratch.data_ptr()
        native.draw(logits.data_ptr(), temperatures.data_ptr(), uniforms.data_ptr(), *outputs, n, size)
        return Drawn(tokens, logprobs, raws)
    raw = logits.float().log_softmax(dim=-1)
    return draw_from(apply_temperature(raw, temperatures), raw, seeds, positions)


def draw_from(probabilities: Tensor, raw: Tensor, seeds: Tensor, positions: Tensor) -> Drawn:
    """Sample a token from each row of probabilities; `raw` are the model's own log-probabilities."""
    tokens = invert_cdf(probabilities, uniform(seeds, positions, DRAW))
    chosen = tokens[:, None]
    return Drawn(tokens, probabilities.gather(1, chosen)[:, 0].log(), raw.gather(1, chosen)[:, 0])


def apply_temperature(raw: Tensor, temperatures: Tensor) -> Tensor:
    """Return probabilities at a temperature from log-probabilities; at temperature 0 the likeliest token has it all."""
    greedy = temperatures == 0
    probabilities = (raw / torch.where(greedy, 1.0, temperatures)[:, None]).softmax(dim=-1)
    if not raw.is_cuda and not greedy.any():  # on CUDA the check would cost more than it saves
        return probabilities
    likeliest = torch.zeros_like(probabilities).scatter_(1, raw.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], likeliest, probabilities)


def invert_cdf(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token at which each row's cumulative sum passes its uniform; never one of probability zero."""
    # In float64: in float32 a vocabulary of 150,000 leaves the tail of the sum a multiple of 6e-8.
    sums = probabilities.double().cumsum(dim=-1)
    target = uniforms.double()[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, target, right=True)
    # the target may round up to the total: then take the last token with any probability
    last = torch.searchsorted(sums, sums[:, -1:].contiguous())
    return torch.minimum(found, last)[:, 0].clamp(max=probabilities.shape[-1] - 1)  # a valid token even for NaN rows


def uniform(seeds: Tensor, positions: Tensor, purpose: int) -> Tensor:
    """Return a number in [0, 1) for each (seed, position, purpose): 53 bits of splitmix64's finaliser, as float64."""
    if seeds.device.type == "cpu":  # fifteen small operations: in numpy they cost a quarter
        return torch.from_numpy(_bits(seeds.numpy(), positions.numpy(), purpose).astype(np.float64) * 2.0**-53)
    return _bits(seeds, positions, purpose).double() * 2.0**-53


def _bits(seeds: Int64, positions: Int64, purpose: int) -> Int64:
    mixed = _mix(seeds * -7046029254386353131 + _mix(positions * 4 + purpose))  # 0x9E3779B97F4A7C15, signed
    return mixed >> 11 & (1 << 53) - 1


def _mix(x: Int64) -> Int64:
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ (x >> 31 & (1 << 33) - 1)
