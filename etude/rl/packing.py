"""Rollouts as rows for the trainer: segments side by side, equal work for every rank.

A segment is one document: it attends to itself only. Its cost is linear in its tokens for the products and quadratic
for attention, so rows of equal length are not equal work; whoever balances by tokens waits for the rank with the
longest documents. Here rows are filled by length, because that is what must fit, and dealt out by cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from etude.errors import InputError
from etude.harness.trace import Segment
from etude.kernels.loss import IGNORE
from etude.model.config import ModelConfig
from etude.rl.objective import RolloutBatch


@dataclass(frozen=True)
class Piece:
    """A segment, and what each of its made tokens is worth."""

    segment: Segment
    worths: npt.NDArray[np.float32]  # one for each made token, in order

    def __post_init__(self) -> None:
        made = int(self.segment.made.sum())
        if len(self.worths) != made:
            raise InputError(f"packing: {len(self.worths)} worths for {made} made tokens")

    def __len__(self) -> int:
        return len(self.segment)


def document_cost(config: ModelConfig, tokens: int) -> float:
    """Multiplications of one document's forward, up to a factor: products per token, and attention per pair."""
    width = config.heads * config.head_dim
    mlp = config.mlp_size
    if config.moe is not None:
        mlp = config.moe.expert_size * config.moe.per_token + config.moe.shared_size
    per_token = config.layers * (4 * config.hidden_size * width + 3 * config.hidden_size * mlp)
    per_token += config.hidden_size * config.vocab_size
    return tokens * per_token + config.layers * width * tokens * tokens  # half of all pairs, twice: scores and sums


def fill_rows(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Indices in rows of at most `length` tokens, largest first, each into the fullest row; one too long is alone."""
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


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for each rank: the dearest first, each to whoever has least so far."""
    if ranks < 1:
        raise InputError(f"packing: {ranks} ranks")
    hands: list[list[int]] = [[] for _ in range(ranks)]
    heap = [(0.0, rank) for rank in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = heapq.heappop(heap)
        hands[rank].append(index)
        heapq.heappush(heap, (total + costs[index], rank))
    return hands


def pack(
    pieces: Sequence[Piece], config: ModelConfig, *, length: int, rows: int, padding: int, ranks: int = 1
) -> list[list[RolloutBatch]]:
    """Micro-batches of at most `rows` rows for each rank. Pieces in which the model made nothing teach nothing."""
    taught = [piece for piece in pieces if len(piece.worths)]
    filled = fill_rows([len(piece) for piece in taught], length)
    costs = [sum(document_cost(config, len(taught[index])) for index in row) for row in filled]
    batches = []
    for hand in deal(costs, ranks):
        mine = [[taught[index] for index in filled[row]] for row in hand]
        batches.append([_batch(mine[at : at + rows], config, padding) for at in range(0, len(mine), rows)])
    return batches


def _batch(rows: Sequence[Sequence[Piece]], config: ModelConfig, padding: int) -> RolloutBatch:
    length = max(sum(map(len, row)) for row in rows)
    shape = len(rows), length
    tokens, targets = np.full(shape, padding, np.int64), np.full(shape, IGNORE, np.int64)
    worths, sampler = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    routing = _no_routing(rows, config, shape)
    lengths = []
    for number, row in enumerate(rows):
        at = 0
        for piece in row:
            segment, size = piece.segment, len(piece)
            place, made = slice(at, at + size - 1), segment.made[1:]
            tokens[number, at : at + size] = segment.tokens
            targets[number, place] = np.where(made, segment.tokens[1:].astype(np.int64), IGNORE)
            sampler[number, place] = np.where(made, segment.raw_logprobs[1:], 0.0)
            spread = np.zeros(size, np.float32)
            spread[segment.made] = piece.worths
            worths[number, place] = spread[1:]
            if routing is not None and segment.routing is not None:
                read = len(segment.routing)
                routing[number, at : at + read] = segment.routing
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
        worths=torch.from_numpy(worths),
        sampler=torch.from_numpy(sampler),
        routing=None if routing is None else torch.from_numpy(routing),
    )


def _no_routing(
    rows: Sequence[Sequence[Piece]], config: ModelConfig, shape: tuple[int, int]
) -> npt.NDArray[np.int16] | None:
    """Room for the experts of a batch, all unknown; None where the model has none, or nobody recorded any."""
    if config.moe is None or all(piece.segment.routing is None for row in rows for piece in row):
        return None
    return np.full((*shape, len(config.moe.layers), config.moe.per_token), -1, np.int16)
