"""Pack training sequences into rows for the trainer, with equal work for every rank.

A training sequence attends to itself only. Its cost is linear in its tokens for matrix products and quadratic for
attention, so rows of equal length are not equal work, and balancing by tokens makes every rank wait for the one with
the longest sequences. Rows are therefore filled by length, which must fit, and assigned to ranks by cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from etude.errors import InputError
from etude.harness.trace import NO_VERSION, Segment
from etude.kernels.loss import IGNORE
from etude.model.config import ModelConfig
from etude.rl.objective import RolloutBatch


@dataclass(frozen=True)
class TrainingSequence:
    """A segment with its token advantages."""

    segment: Segment
    token_advantages: npt.NDArray[np.float32]  # one for each sampled token, in order

    def __post_init__(self) -> None:
        sampled = int(self.segment.sampled.sum())
        if len(self.token_advantages) != sampled:
            raise InputError(f"packing: {len(self.token_advantages)} token advantages for {sampled} sampled tokens")

    def __len__(self) -> int:
        return len(self.segment)


def sequence_cost(config: ModelConfig, tokens: int) -> float:
    """Return the multiplications of one sequence's forward pass, up to a constant factor."""
    width = config.heads * config.head_dim
    mlp = config.mlp_size
    if config.moe is not None:
        mlp = config.moe.expert_size * config.moe.per_token + config.moe.shared_size
    per_token = config.layers * (4 * config.hidden_size * width + 3 * config.hidden_size * mlp)
    per_token += config.hidden_size * config.vocab_size
    return tokens * per_token + config.layers * width * tokens * tokens  # half of all pairs, twice: scores and sums


def fill_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return indices in rows of at most `length` tokens: largest first, each into the fullest row that it fits.

    A sequence longer than `length` gets a row of its own.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        fitting = [row for row in range(len(rows)) if room[row] >= sizes[index]]
        if fitting:
            row = min(fitting, key=lambda r: (room[r], r))
            rows[row].append(index)
            room[row] -= sizes[index]
        else:
            rows.append([index])
            room.append(max(0, length - sizes[index]))
    return rows


def assign_to_ranks(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return the indices for each rank: the most expensive first, each to the rank with the least work so far."""
    if ranks < 1:
        raise InputError(f"packing: {ranks} ranks; expected at least 1")
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(heap)
        assigned[rank].append(index)
        heapq.heappush(heap, (total + costs[index], rank))
    return assigned


def pack(
    sequences: Sequence[TrainingSequence],
    config: ModelConfig,
    *,
    length: int,
    rows: int,
    padding: int,
    ranks: int = 1,
) -> list[list[RolloutBatch]]:
    """Return micro-batches of at most `rows` rows for each rank. Sequences without a sampled token are left out."""
    trained = [sequence for sequence in sequences if len(sequence.token_advantages)]
    filled = fill_rows([len(sequence) for sequence in trained], length)
    costs = [sum(sequence_cost(config, len(trained[index])) for index in row) for row in filled]
    batches = []
    for assigned in assign_to_ranks(costs, ranks):
        own = [[trained[index] for index in filled[row]] for row in assigned]
        batches.append([_batch(own[at : at + rows], config, padding) for at in range(0, len(own), rows)])
    return batches


def _batch(rows: Sequence[Sequence[TrainingSequence]], config: ModelConfig, padding: int) -> RolloutBatch:
    length = max(sum(map(len, row)) for row in rows)
    shape = len(rows), length
    tokens, targets = np.full(shape, padding, np.int64), np.full(shape, IGNORE, np.int64)
    advantages, sampler_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    versions = np.full(shape, NO_VERSION, np.int32)
    routing = _empty_routing(rows, config, shape)
    lengths = []
    for number, row in enumerate(rows):
        at = 0
        for sequence in row:
            segment, size = sequence.segment, len(sequence)
            span, sampled = slice(at, at + size - 1), segment.sampled[1:]
            tokens[number, at : at + size] = segment.tokens
            targets[number, span] = np.where(sampled, segment.tokens[1:].astype(np.int64), IGNORE)
            sampler_logprobs[number, span] = np.where(sampled, segment.logprobs[1:], 0.0)
            versions[number, span] = segment.versions[1:]
            by_token = np.zeros(size, np.float32)
            by_token[segment.sampled] = sequence.token_advantages
            advantages[number, span] = by_token[1:]
            if routing is not None and segment.routing is not None:
                routed = len(segment.routing)
                routing[number, at : at + routed] = segment.routing
            at += size
        sizes = tuple(map(len, row))
        lengths.append((*sizes, length - at) if at < length else sizes)
    trained = int((targets != IGNORE).sum())
    return RolloutBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        tuple(lengths),
        (),
        trained,
        token_advantages=torch.from_numpy(advantages),
        sampler_logprobs=torch.from_numpy(sampler_logprobs),
        sampler_versions=torch.from_numpy(versions),
        routing=None if routing is None else torch.from_numpy(routing),
    )


def _empty_routing(
    rows: Sequence[Sequence[TrainingSequence]], config: ModelConfig, shape: tuple[int, int]
) -> npt.NDArray[np.int16] | None:
    """Return an array for the routed experts of a batch, all unknown; None for a model or rollouts without any."""
    if config.moe is None or all(sequence.segment.routing is None for row in rows for sequence in row):
        return None
    return np.full((*shape, len(config.moe.layers), config.moe.per_token), -1, np.int16)
