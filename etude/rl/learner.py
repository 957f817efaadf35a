"""What all ranks of RL's trainer do together: steps, publication, checkpoints.

Rank 0 runs the learning loop (`loop.py`) and decides. `Learner.lead` shares a decision with the other ranks, which
`follow`, and every rank runs the same method. In one process nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from etude.data.packing import Batch
from etude.harness.trace import NO_VERSION, Segment, Trace
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.adapters import published_views
from etude.model.layout import adapter_pieces, checkpoint_pieces
from etude.model.transformer import Transformer
from etude.rl.advantages import KL_FORMS, EstimatorSettings, kl_penalties, token_advantages
from etude.rl.objective import PolicyGradient, RolloutBatch, tempered
from etude.rl.packing import PackingPlan, TrainingSequence, pack_planned, plan_packing
from etude.rl.settings import RlSettings
from etude.train.objectives import next_token
from etude.train.trainer import StepResult, Trainer
from etude.weights.publisher import Publisher, copied

if TYPE_CHECKING:
    from etude.parallel.mesh import TrainingMesh

OVERLONG_ENDINGS = frozenset({"length", "tokens", "turns", "time", "context"})
Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class StepOrder:
    """What a policy step learns from: rollouts, each a trace and its advantage; None: the next demonstrations."""

    rate: float  # factor of the learning rate
    version: int  # newest number of the weights that the trainer has
    rollouts: Sequence[tuple[str, float]] | None = None
    divisor: float | None = None  # of the summed loss; None: its mean over tokens


@dataclass(frozen=True)
class StepOutcome:
    """What became of a policy step, over all ranks."""

    result: StepResult
    weight_norm: float  # of the weights after it
    mismatch: Mapping[str, float]  # of trainer and sampler; on the leading rank
    sequences: int  # training sequences
    imbalance: float  # work of the busiest rank relative to the mean


@dataclass
class Learner:
    """A rank of the trainer, with its part of the model."""

    settings: RlSettings
    trainer: Trainer
    objective: PolicyGradient
    publisher: Publisher
    reference: Transformer | None  # KL reference policy
    padding: int
    load_trace: Callable[[str], Trace]
    demonstrations: Iterator[list[Batch]] | None = None  # of the control imitation: instead of rollouts
    save: Callable[[], None] = lambda: None
    # Versions that wait until all ranks have written the last one: copies of pinned ones, then the newest.
    held: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict, init=False)
    pending: int | None = field(default=None, init=False)

    @property
    def mesh(self) -> TrainingMesh | None:
        return self.trainer.mesh

    # -------------------------------------------------------------------------------------------- ranks

    def lead(self, method: str, *arguments: Any) -> Any:
        """Run a method on all ranks and return this rank's result; the leading rank calls it."""
        if self.mesh is not None:
            self.mesh.announce((method, arguments))
        return getattr(self, method)(*arguments)

    def follow(self) -> None:
        """Run what the leading rank announces, until it ends."""
        assert self.mesh is not None
        announced: tuple[str, tuple[Any, ...]] | None
        while (announced := self.mesh.announce(None)) is not None:
            method, arguments = announced
            getattr(self, method)(*arguments)

    def dismiss(self) -> None:
        """Let the other ranks end."""
        if self.mesh is not None:
            self.mesh.announce(None)

    # -------------------------------------------------------------------------------------------- steps

    def step(self, order: StepOrder) -> StepOutcome:
        """Take a policy step."""
        trainer, sequences, unequal = self.trainer, 0, 1.0
        if order.rollouts is None:
            assert self.demonstrations is not None
            result = trainer.step(next(self.demonstrations), next_token, order.rate, order.divisor)
        else:
            batches, plan = self.pack(order.rollouts)
            sequences, unequal = sum(len(row) for rank in plan.rows for row in rank), plan.imbalance
            result = trainer.step(batches, self.objective, order.rate, order.divisor)
        mismatch = self.objective.mismatch(order.version, self.mesh)
        return StepOutcome(result, trainer.weight_norm(), mismatch, sequences, unequal)

    def pack(self, rollouts: Sequence[tuple[str, float]]) -> tuple[list[RolloutBatch], PackingPlan]:
        """Return this rank's micro-batches of a step, and the plan of all ranks.

        Each rank reads the traces of its own rows and, for the sizes of all, an equal share of the others.
        """

        @cache
        def load(index: int) -> tuple[list[Segment], float]:
            trace = self.load_trace(rollouts[index][0])
            temperature = float(trace.facts.get("temperature", self.settings.temperature))
            return trained_segments(trace, self.settings.estimator), temperature

        def segments(index: int) -> list[Segment]:
            return load(index)[0]

        sizes = self._sizes(len(rollouts), segments)
        places = [(rollout, number) for rollout, each in enumerate(sizes) for number in range(len(each))]
        config, rank, ranks = self.trainer.model.config, 0, 1
        if self.mesh is not None:
            rank, ranks = self.mesh.data_rank, self.mesh.settings.data_ranks
        lengths = [sizes[rollout][number][0] for rollout, number in places]
        plan = plan_packing(lengths, config, length=self.settings.length, ranks=ranks)
        own = {}
        for index in (index for row in plan.rows[rank] for index in row):
            rollout, number = places[index]
            own[index] = segments(rollout)[number], load(rollout)[1]
        sampled = [sizes[rollout][number][1] for rollout, number in places]
        reference = self._reference_logprobs(plan, own, sampled, rank) if self.reference is not None else None
        first = {rollout: index for index, (rollout, number) in enumerate(places) if number == 0}

        @cache
        def sequences(rollout: int) -> list[TrainingSequence]:
            at, count = first[rollout], len(sizes[rollout])
            chain = np.concatenate(reference[at : at + count]) if reference is not None else None
            trained, temperature = load(rollout)
            return training_sequences(trained, rollouts[rollout][1], self.settings.estimator, chain, temperature)

        trained = {index: sequences(places[index][0])[places[index][1]] for index in own}
        return self._batches(plan, trained, rank), plan

    def _sizes(self, count: int, segments: Callable[[int], list[Segment]]) -> list[list[tuple[int, int]]]:
        """Return the tokens and sampled tokens of every segment of `count` rollouts."""
        rank, ranks = (self.mesh.rank, self.mesh.size) if self.mesh else (0, 1)
        read = {
            index: [(len(segment), int(segment.sampled.sum())) for segment in segments(index)]
            for index in range(rank, count, ranks)
        }
        shares = self.mesh.exchange(read) if self.mesh else [read]
        return [shares[index % ranks][index] for index in range(count)]

    def _batches(self, plan: PackingPlan, own: Mapping[int, TrainingSequence], rank: int) -> list[RolloutBatch]:
        rows, padding = self.settings.rows, self.padding
        return pack_planned(plan, own, self.trainer.model.config, rows=rows, padding=padding, rank=rank)

    @torch.no_grad()
    def _reference_logprobs(
        self, plan: PackingPlan, own: Mapping[int, tuple[Segment, float]], sampled: Sequence[int], rank: int
    ) -> list[Array]:
        """Return the reference policy's log-probabilities of the sampled tokens of all sequences, at the temperature
        of each. Each rank computes those of its rows, which `own` has with their temperatures.
        """
        assert self.reference is not None
        ends = np.cumsum(sampled)
        sequences = {}
        for index, (segment, temperature) in own.items():
            # The "version" of a token is its index here, so that results can be put in order after packing.
            numbers = np.full(len(segment), NO_VERSION, np.int32)
            numbers[segment.sampled] = np.arange(ends[index] - sampled[index], ends[index])
            numbered = replace(segment, versions=numbers, routing=None)
            sequences[index] = TrainingSequence(numbered, np.zeros(sampled[index], np.float32), temperature)
        found = torch.zeros(int(sum(sampled)), device=self.trainer.device)
        for batch in self._batches(plan, sequences, rank):
            moved = batch.for_context(self.mesh.context if self.mesh else None).to(self.trainer.device)
            assert isinstance(moved, RolloutBatch)
            hidden = self.reference.hidden(moved.tokens, documents=moved.documents).flatten(0, 1)
            targets = moved.targets.flatten()
            temperatures = None if moved.temperatures is None else moved.temperatures.flatten()
            logprobs = token_logprobs(tempered(hidden, temperatures), self.reference.head_weight, targets)
            counted = targets != IGNORE
            found[moved.sampler_versions.flatten()[counted].long()] = logprobs[counted].float()
        if self.mesh is not None:
            from etude.train.sharding import release

            release(self.reference)
            found = self.mesh.sum(found)
        return np.split(found.cpu().numpy(), ends[:-1])

    # -------------------------------------------------------------------------------------------- weights

    def publish(self, number: int, pinned: bool = False) -> None:
        """Upload the weights in the background, each rank its part.

        While a rank is busy with an earlier version, they stay `pending`: all ranks must write the same versions. A
        `pinned` version is uploaded even if the trainer has newer weights by then.
        """
        if self.mesh is not None and (self.held or any(self.mesh.exchange(self.publisher.busy))):
            self.publisher.skip(number)
            self.pending = None if pinned else number
            if pinned:
                self.held[number] = copied(self._published())
            return
        self.pending = None
        with torch.no_grad():
            self.publisher.publish_soon(number, self._published(), pinned=pinned)

    def publish_pending(self) -> None:
        """Publish the oldest version that waits, unless a rank is still busy."""
        assert self.mesh is not None
        if any(self.mesh.exchange(self.publisher.busy)):
            return
        if self.held:
            number = min(self.held)
            self.publisher.publish_soon(number, self.held.pop(number), pinned=True)
        elif self.pending is not None:
            self.publish(self.pending)

    @property
    def waits(self) -> bool:
        """Whether a version waits to be published."""
        return bool(self.held) or self.pending is not None

    def _published(self) -> Mapping[str, torch.Tensor] | Iterator[tuple[str, torch.Tensor]]:
        """Return this rank's share of the published tensors."""
        model, dtype = self.trainer.model, getattr(torch, self.settings.weights.dtype)
        if self.mesh is None:
            return published_views(model, dtype)
        from etude.train.sharding import collect_tensors

        pieces = checkpoint_pieces(model.config) if model.lora is None else adapter_pieces(model.config, model.lora)
        return collect_tensors(model, self.mesh, pieces, dtype)

    def flush(self, timeout: float) -> None:
        """Wait until this rank's part of all published weights is in the store."""
        self.publisher.flush(timeout)

    def checkpoint(self) -> None:
        """Write a checkpoint."""
        self.save()


# ------------------------------------------------------------------------------------------ training sequences


def trained_segments(trace: Trace, estimator: EstimatorSettings) -> list[Segment]:
    """Return the segments of a rollout that are trained on."""
    if estimator.mask_overlong and trace.ending in OVERLONG_ENDINGS:
        return []
    segments = [segment for segment in trace.segments if segment.kind != "compaction" and segment.sampled.any()]
    return segments if estimator.replay else [replace(segment, routing=None) for segment in segments]


def training_sequences(
    segments: Sequence[Segment],
    advantage: float,
    estimator: EstimatorSettings,
    reference: Array | None = None,
    temperature: float = 1.0,
) -> list[TrainingSequence]:
    """Return the training sequences of one rollout: the final reward counts for every sampled token of the chain of
    segments, self-summaries included. `reference` has the reference policy's log-probabilities of these tokens."""
    penalties = None
    if reference is not None and segments:
        own = np.concatenate([segment.logprobs[segment.sampled] for segment in segments])
        penalties = estimator.kl_weight * kl_penalties(KL_FORMS[estimator.kl], own, reference)
    parts = token_advantages(
        advantage,
        [int(segment.sampled.sum()) for segment in segments],
        penalties=penalties,
        divide_by_length=estimator.divide_by_length,
    )
    return [TrainingSequence(segment, part, temperature) for segment, part in zip(segments, parts, strict=True)]
