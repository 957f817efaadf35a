"""Pack training sequences into rows for the trainer, with equal work for every rank.

A training sequence attends to itself only. Rows are filled by length, which must fit, and dealt to ranks by cost
(`etude.data.dealing`). All ranks get equally many micro-batches, because each forward pass is one of all together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from etude.data.dealing import deal, imbalance, sequence_cost
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
    temperature: float = 1.0  # of sampling

    def __post_init__(self) -> None:
        sampled = int(self.segment.sampled.sum())
        if len(self.token_advantages) != sampled:
            raise InputError(f"packing: {len(self.token_advantages)} token advantages for {sampled} sampled tokens")

    def __len__(self) -> int:
        return len(self.segment)


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


@dataclass(frozen=True)
class PackingPlan:
    """Which sequences share a row, and which rank has which rows."""

    rows: list[list[list[int]]]  # of each rank: rows of indices
    imbalance: float  # work of the busiest rank relative to the mean


def plan_packing(sizes: Sequence[int], config: ModelConfig, *, length: int, ranks: int = 1) -> PackingPlan:
    """Return a plan for sequences of these sizes; every rank that makes it makes the same."""
    filled = fill_rows(sizes, length)
    costs = [sum(sequence_cost(config, sizes[index]) for index in row) for row in filled]
    dealt = deal(costs, ranks)
    return PackingPlan([[filled[row] for row in own] for own in dealt], imbalance(costs, dealt) if costs else 1.0)


def pack_planned(
    plan: PackingPlan,
    sequences: Mapping[int, TrainingSequence],
    config: ModelConfig,
    *,
    rows: int,
    padding: int,
    rank: int = 0,
) -> list[RolloutBatch]:
    """Return a rank's micro-batches of at most `rows` rows; `sequences` has those of its rows.

    All ranks get equally many: one without a row left takes part with padding.
    """
    own, most = plan.rows[rank], max(map(len, plan.rows))
    batches = []
    for at in range(0, most, rows):
        some = [[sequences[index] for index in row] for row in own[at : at + rows]]
        batches.append(_batch(some or [[]], config, padding))
    return batches


def pack(
    sequences: Sequence[TrainingSequence], config: ModelConfig, *, length: int, rows: int, padding: int
) -> list[RolloutBatch]:
    """Return sequences as micro-batches of at most `rows` rows; those without a sampled token are left out."""
    trained = dict(enumerate(sequence for sequence in sequences if len(sequence.token_advantages)))
    plan = plan_packing([len(sequence) for sequence in trained.values()], config, length=length)
    return pack_planned(plan, trained, config, rows=rows, padding=padding)


def _batch(rows: Sequence[Sequence[TrainingSequence]], config: ModelConfig, padding: int) -> RolloutBatch:
    length = max(1, *(sum(map(len, row)) for row in rows))
    shape = len(rows), length
    tokens, targets = np.full(shape, padding, np.int64), np.full(shape, IGNORE, np.int64)
    advantages, sampler_logprobs = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    versions = np.full(shape, NO_VERSION, np.int32)
    temperatures = np.ones(shape, np.float32)
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
            temperatures[number, span] = sequence.temperature
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
        temperatures=None if (temperatures == 1.0).all() else torch.from_numpy(temperatures),
        routing=None if routing is None else torch.from_numpy(routing),
    )


def _empty_routing(
    rows: Sequence[Sequence[TrainingSequence]], config: ModelConfig, shape: tuple[int, int]
) -> npt.NDArray[np.int16] | None:
    """Return an array for the routed experts of a batch, all unknown; None for a model or rollouts without any."""
    if config.moe is None or all(sequence.segment.routing is None for row in rows for sequence in row):
        return None
    return np.full((*shape, len(config.moe.layers), config.moe.per_token), -1, np.int16)
