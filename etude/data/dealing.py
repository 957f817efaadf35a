"""Deal the rows of a step to ranks: equally many rows each, with as equal work as possible.

A sequence costs linearly in its tokens for matrix products and quadratically for attention, so rows of equal length are
not equal work, and dealing by tokens would make every rank wait for the one with the longest sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from etude.data.mixture import Mixture
from etude.data.packing import Batch, pack_rows
from etude.errors import InputError
from etude.model.config import ModelConfig


def sequence_cost(config: ModelConfig, tokens: int) -> float:
    """Return the multiplications of one sequence's forward pass, up to a constant factor."""
    width = config.heads * config.head_dim
    mlp = config.mlp_size
    if config.moe is not None:
        mlp = config.moe.expert_size * config.moe.per_token + config.moe.shared_size
    per_token = config.layers * (4 * config.hidden_size * width + 3 * config.hidden_size * mlp)
    per_token += config.hidden_size * config.vocab_size
    return tokens * per_token + config.layers * width * tokens * tokens  # half of all pairs, twice: scores and sums


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the indices for each rank: the most expensive first, each to the rank with the least work and room left.

    No rank has more than its share of the number, rounded up, so that all have equally many forward passes. Each
    rank's are in order of cost: what ranks compute at the same time is alike.
    """
    if ranks < 1:
        raise InputError(f"dealing: {ranks} ranks; expected at least 1")
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    work, room = [0.0] * ranks, -(-len(costs) // ranks)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < room), key=lambda r: (work[r], r))
        dealt[rank].append(index)
        work[rank] += costs[index]
    return dealt


def imbalance(costs: Sequence[float], dealt: Sequence[Sequence[int]]) -> float:
    """Return the work of the busiest rank relative to the mean; 1: all have the same."""
    work = [sum(costs[index] for index in each) for each in dealt]
    return max(work) * len(work) / (sum(work) or 1.0)


def step_batches(
    mixture: Mixture,
    config: ModelConfig,
    *,
    rows: int,
    micro_batches: int,
    padding: int,
    rank: int = 0,
    ranks: int = 1,
) -> tuple[list[Batch], float]:
    """Return a rank's micro-batches of the next step, and the imbalance. Every rank draws all rows and reads its own.

    Rows and their order in the mixture are the same for any number of ranks.
    """
    drawn = [mixture.next_row() for _ in range(rows * micro_batches)]
    own, unequal = list(range(len(drawn))), 1.0
    if ranks > 1:
        costs = [sum(sequence_cost(config, span.stop - span.start) for span in row) for row in drawn]
        dealt = deal(costs, ranks)
        own, unequal = dealt[rank], imbalance(costs, dealt)
    batches = [[drawn[index] for index in own[at : at + rows]] for at in range(0, len(own), rows)]
    return [pack_rows(mixture, batch, padding) for batch in batches], unequal
