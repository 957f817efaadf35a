"""Latency histograms with fixed buckets: time to first token, and time per output token after it."""

from bisect import bisect_left
from dataclasses import dataclass, field, replace
from itertools import accumulate

# Seconds: from a cached prompt on a GPU to a full queue, and from a captured graph to a large model on a CPU.
FIRST_TOKEN_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0)
OUTPUT_TOKEN_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


@dataclass
class Histogram:
    """Counts of values by bucket: (previous bound, bound], and a last one for values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = list(self.counts) or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def lines(self) -> list[tuple[str, float]]:
        """Return the cumulative counts, their sum and their number, as Prometheus names them."""
        counts = list(accumulate(self.counts))
        bounds = (*(f"{bound:g}" for bound in self.bounds), "+Inf")
        lines = [(f'_bucket{{le="{bound}"}}', float(count)) for bound, count in zip(bounds, counts, strict=True)]
        return [*lines, ("_sum", self.total), ("_count", float(counts[-1]))]

    def copy(self) -> "Histogram":
        return replace(self)
