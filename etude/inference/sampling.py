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

MAX_SAMPLES = 1024  # of one prompt
GREEDY = 0.0  # as a temperature: take the likeliest
DRAW, ACCEPT, REDRAW = 0, 1, 2  # what luck is used for: three independent streams


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

    def __post_init__(self) -> None:
        warm = self.temperature == 0 or 1e-3 <= self.temperature <= 1e3
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, warm, "0, or 0.001 to 1000"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0 and at most 1"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (all) or more"),
            ("min_p", self.min_p, 0 <= self.min_p < 1, "from 0 to below 1"),
            ("seed", self.seed, 0 <= self.seed < 2**62, "between 0 and 2^62"),
            ("samples", self.samples, 1 <= self.samples <= MAX_SAMPLES, f"1 to {MAX_SAMPLES}"),
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
    """The sampling of a batch as tensors [n]; `cut` says whether any row needs sorting."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seeds: Tensor
    cut: bool

    @classmethod
    def of(cls, rows: Sequence[Sampling], seeds: Sequence[int], device: torch.device | str) -> "Knobs":
        return cls(
            torch.tensor([row.temperature for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device),
            torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
            torch.tensor(list(seeds), dtype=torch.int64, device=device),
            not all(row.plain for row in rows),
        )


@dataclass(frozen=True)
class Drawn:
    """Tokens [n] and their log-probabilities: as they were drawn, and under the model's own distribution."""

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor


def draw(logits: Tensor, knobs: Knobs, places: Tensor) -> Drawn:
    """One token for each row of logits [n, vocabulary]; `places` [n] count the tokens each row has made before."""
    raw = logits.float().log_softmax(dim=-1)
    odds = distribution(raw, knobs)
    tokens = pick(odds, luck(knobs.seeds, places, DRAW))
    chosen = tokens[:, None]
    return Drawn(tokens, odds.gather(1, chosen)[:, 0].log(), raw.gather(1, chosen)[:, 0])


def distribution(raw: Tensor, knobs: Knobs) -> Tensor:
    """The probabilities tokens are drawn with, from the model's log-probabilities; a greedy row is all on one."""
    greedy = knobs.temperature == GREEDY
    warm = torch.where(greedy, 1.0, knobs.temperature)[:, None]
    odds = (raw / warm).softmax(dim=-1)
    if knobs.cut:
        odds = _cut(odds, knobs)
    likeliest = torch.zeros_like(odds).scatter_(1, raw.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(greedy[:, None], likeliest, odds)


def _cut(odds: Tensor, knobs: Knobs) -> Tensor:
    """Keep the top k, then the smallest head with top_p of the weight, then what is within min_p of the best."""
    best, order = odds.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(odds.shape[-1], device=odds.device)
    limit = torch.where(knobs.top_k > 0, knobs.top_k, odds.shape[-1])[:, None]
    best = best.masked_fill(ranks >= limit, 0.0)
    before = best.cumsum(dim=-1) - best  # weight of everything likelier: the first token always stays
    best = best.masked_fill(before >= knobs.top_p[:, None] * best.sum(dim=-1, keepdim=True), 0.0)
    best = best.masked_fill(best < knobs.min_p[:, None] * best[:, :1], 0.0)
    kept = torch.zeros_like(odds).scatter_(1, order, best)
    return kept / kept.sum(dim=-1, keepdim=True)


def pick(odds: Tensor, lucks: Tensor) -> Tensor:
    """The token at which the running sum of the odds passes each row's luck; one of weight zero is never picked."""
    # In float64: in float32 a vocabulary of 150,000 leaves the tail of the sum a multiple of 6e-8.
    sums = odds.double().cumsum(dim=-1)
    aim = lucks.double()[:, None] * sums[:, -1:]
    found = torch.searchsorted(sums, aim, right=True)
    return found.clamp(max=odds.shape[-1] - 1)[:, 0]


def luck(seeds: Tensor, places: Tensor, stream: int) -> Tensor:
    """A number in [0, 1) for each (seed, place, stream): splitmix64's finaliser, 53 bits of it, as float64."""
    mixed = _mix(seeds * -7046029254386353131 + _mix(places * 4 + stream))  # 0x9E3779B97F4A7C15, signed
    return (mixed >> 11 & (1 << 53) - 1).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ (x >> 31 & (1 << 33) - 1)
