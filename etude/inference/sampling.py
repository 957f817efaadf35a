"""From logits to tokens: temperature, top-k, top-p and min-p, deterministic in (seed, position).

Random numbers depend on the request's seed and the token's position in the output, never on what else is in the batch:
a request alone or among five hundred draws the same ones. Every token comes with two log-probabilities: under the
distribution it was sampled from, and under the model's own (temperature 1, untruncated), which a trainer recomputes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from etude.errors import InputError
from etude.kernels.draw import Drawn, apply_temperature, draw_from, draw_untruncated

MAX_SAMPLES = 1024  # of one prompt
# Every new token of every completion is searched for every stop text.
MAX_STOPS, MAX_STOP_LENGTH = 64, 1024
StopText = Annotated[str, Field(max_length=MAX_STOP_LENGTH)]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to complete a prompt. Temperature 0 is greedy."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")  # as JSON, in requests to a server

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    samples: int = 1  # completions of the prompt; number i uses seed + i
    stop: frozenset[int] = field(default_factory=frozenset)  # token ids that end it; they are part of the completion
    # needs an engine with a tokenizer
    stop_text: Annotated[tuple[StopText, ...], Field(max_length=MAX_STOPS)] = ()
    since: int | None = None  # oldest weight version that cached keys and values may come from; None: the current one

    def __post_init__(self) -> None:
        valid_temperature = self.temperature == 0 or 1e-3 <= self.temperature <= 1e3
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, valid_temperature, "0, or 0.001 to 1000"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", self.top_k, 0 <= self.top_k < 2**31, "0 (all), or below 2^31"),
            ("min_p", self.min_p, 0 <= self.min_p < 1, "from 0 to below 1"),
            ("seed", self.seed, 0 <= self.seed < 2**62, "between 0 and 2^62"),
            ("samples", self.samples, 1 <= self.samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
            ("since", self.since, self.since is None or self.since >= 0, "a version, 0 or more"),
        )
        for name, value, good, expected in checks:
            if not good:
                raise InputError(f"sampling: {name} is {value!r}; expected {expected}")
        if any(not text for text in self.stop_text):
            raise InputError("sampling: a stop text is empty; it would end every completion at once")

    @property
    def untruncated(self) -> bool:
        """Return whether top-k, top-p and min-p are all off."""
        return self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling parameters of a batch as tensors [n]; `truncated` holds the rows with top-k, top-p or min-p."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seeds: Tensor
    truncated: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[Sampling], seeds: Sequence[int], device: torch.device | str) -> "SamplingTensors":
        truncated = [index for index, row in enumerate(rows) if not row.untruncated]
        return cls(
            torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device),
            torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor(list(seeds), dtype=torch.int64, device=device),
            torch.tensor(truncated, device=device) if truncated else None,
        )

    def truncated_rows(self, index: Tensor) -> "SamplingTensors":
        """Return the parameters of some rows, all of them truncated."""
        return self.select(index, torch.arange(len(index), device=index.device))

    def select(self, index: Tensor, truncated: Tensor | None) -> "SamplingTensors":
        """Return the parameters of some rows, which may repeat; `truncated` refers to the new rows."""
        temperature, top_p, top_k = self.temperature[index], self.top_p[index], self.top_k[index]
        return SamplingTensors(temperature, top_p, top_k, self.min_p[index], self.seeds[index], truncated)


def draw(logits: Tensor, tensors: SamplingTensors, positions: Tensor) -> Drawn:
    """Sample one token for each row of logits [n, vocabulary]; `positions` [n] are the tokens' places in the output."""
    drawn = draw_untruncated(logits, tensors.temperature, tensors.seeds, positions)
    if tensors.truncated is None:
        return drawn
    # Row by row, so that a neighbour with top-p never changes how an untruncated row is sampled.
    rows = tensors.truncated_rows(tensors.truncated)
    raw = logits[tensors.truncated].float().log_softmax(dim=-1)
    found = draw_from(sampling_probabilities(raw, rows), raw, rows.seeds, positions[tensors.truncated])
    return Drawn(*(whole.index_copy(0, tensors.truncated, part) for whole, part in zip(drawn, found, strict=True)))


def sampling_probabilities(raw: Tensor, tensors: SamplingTensors) -> Tensor:
    """Return the probabilities to sample with, from the model's log-probabilities."""
    probabilities = apply_temperature(raw, tensors.temperature)
    rows = tensors.truncated
    if rows is None:
        return probabilities
    return probabilities.index_copy(0, rows, _truncate(probabilities[rows], tensors.truncated_rows(rows)))


def _truncate(probabilities: Tensor, tensors: SamplingTensors) -> Tensor:
    """Keep the top k, of those the smallest set with top_p of the mass, of those all within min_p of the best."""
    best, order = probabilities.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(probabilities.shape[-1], device=probabilities.device)
    limit = torch.where(tensors.top_k > 0, tensors.top_k, probabilities.shape[-1])[:, None]
    best = best.masked_fill(ranks >= limit, 0.0)
    before = best.cumsum(dim=-1) - best  # mass of everything likelier: the first token always stays
    mass = tensors.top_p[:, None] * best.sum(dim=-1, keepdim=True)
    best = best.masked_fill((before >= mass) & (ranks > 0), 0.0)  # rank 0 stays even if top_p rounds to nothing
    best = best.masked_fill(best < tensors.min_p[:, None] * best[:, :1], 0.0)
    kept = torch.zeros_like(probabilities).scatter_(1, order, best)
    return kept / kept.sum(dim=-1, keepdim=True)
