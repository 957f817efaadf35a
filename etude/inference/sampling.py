"""From logits to tokens: temperature, top-k, top-p, min-p, and luck that belongs to the request.

Luck is a function of the request's seed and the token's place, never of what else is in the batch: a request drawn
alone or among five hundred gets the same numbers. Every token comes with two log-probabilities: under the distribution
it was drawn from, and under the model's own (temperature 1, nothing cut), which is what a trainer recomputes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.errors import InputError
from etude.kernels.draw import Drawn, draw_from, draw_plain, warmed

MAX_SAMPLES = 1024  # of one prompt


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to continue a prompt. Temperature 0 takes the likeliest token."""

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    seed: int = 0
    samples: int = 1  # sample i uses seed + i
    stop: frozenset[int] = field(default_factory=frozenset)  # token ids that end it; they are part of the result
    stop_text: tuple[str, ...] = ()  # needs an engine with a tokenizer
    since: int | None = None  # a version: keys and values may be of weights as old as it; None: of the present ones

    def __post_init__(self) -> None:
        warm = self.temperature == 0 or 1e-3 <= self.temperature <= 1e3
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, warm, "0, or 0.001 to 1000"),
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
            raise InputError("sampling: a stop text is empty; it would end everything at once")

    @property
    def plain(self) -> bool:
        """Nothing is cut off: the distribution is the model's own at this temperature."""
        return self.top_p == 1.0 and self.top_k == 0 and self.min_p == 0.0


@dataclass(frozen=True)
class Knobs:
    """The sampling of a batch as tensors [n]; `cut` are the rows whose distribution is cut off, if any."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seeds: Tensor
    cut: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[Sampling], seeds: Sequence[int], device: torch.device | str) -> "Knobs":
        cut = [index for index, row in enumerate(rows) if not row.plain]
        return cls(
            torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device),
            torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor(list(seeds), dtype=torch.int64, device=device),
            torch.tensor(cut, device=device) if cut else None,
        )

    def rows(self, index: Tensor) -> "Knobs":
        """The knobs of some rows, all of them cut."""
        return self.spread(index, torch.arange(len(index), device=index.device))

    def spread(self, index: Tensor, cut: Tensor | None) -> "Knobs":
        """The knobs of some rows, which may stand several times; `cut` of the new rows are cut."""
        warmth, top_p, top_k = self.temperature[index], self.top_p[index], self.top_k[index]
        return Knobs(warmth, top_p, top_k, self.min_p[index], self.seeds[index], cut)


def draw(logits: Tensor, knobs: Knobs, places: Tensor) -> Drawn:
    """One token for each row of logits [n, vocabulary]; `places` [n] count the tokens each row has made before."""
    drawn = draw_plain(logits, knobs.temperature, knobs.seeds, places)
    if knobs.cut is None:
        return drawn
    # Row by row, so that a neighbour with top-p never changes how a plain row is drawn.
    mine = knobs.rows(knobs.cut)
    raw = logits[knobs.cut].float().log_softmax(dim=-1)
    found = draw_from(distribution(raw, mine), raw, mine.seeds, places[knobs.cut])
    return Drawn(*(whole.index_copy(0, knobs.cut, part) for whole, part in zip(drawn, found, strict=True)))


def distribution(raw: Tensor, knobs: Knobs) -> Tensor:
    """The probabilities tokens are drawn with, from the model's log-probabilities."""
    odds = warmed(raw, knobs.temperature)
    if knobs.cut is None:
        return odds
    return odds.index_copy(0, knobs.cut, _cut(odds[knobs.cut], knobs.rows(knobs.cut)))


def _cut(odds: Tensor, knobs: Knobs) -> Tensor:
    """Keep the top k, then the smallest head with top_p of the weight, then what is within min_p of the best."""
    best, order = odds.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(odds.shape[-1], device=odds.device)
    limit = torch.where(knobs.top_k > 0, knobs.top_k, odds.shape[-1])[:, None]
    best = best.masked_fill(ranks >= limit, 0.0)
    before = best.cumsum(dim=-1) - best  # weight of everything likelier: the first token always stays
    head = knobs.top_p[:, None] * best.sum(dim=-1, keepdim=True)
    best = best.masked_fill((before >= head) & (ranks > 0), 0.0)  # rank 0 stays even if top_p rounds to nothing
    best = best.masked_fill(best < knobs.min_p[:, None] * best[:, :1], 0.0)
    kept = torch.zeros_like(odds).scatter_(1, order, best)
    return kept / kept.sum(dim=-1, keepdim=True)
