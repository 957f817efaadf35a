"""The learning loop of the trainer.

    take ready groups -> token advantages -> pack -> one step -> mark trained -> publish -> checkpoint

Samplers, workers and the orchestrator run in processes of their own: the trainer starts no rollout and waits for no
upload. Groups are marked as trained before the checkpoint is written, so a checkpoint never contains a group that the
queue does not know as trained; going back to a checkpoint makes the later groups ready again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.cluster.local import ServiceGaveUp
from etude.harness.trace import Segment, Trace
from etude.harness.trace_store import load_trace
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.checkpoint import checkpoint_views
from etude.model.transformer import Transformer
from etude.rl.advantages import KL_FORMS, token_advantages
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rl.packing import TrainingSequence, pack
from etude.rl.settings import RlSettings
from etude.rollouts.group_advantages import ADVANTAGES
from etude.rollouts.queue import ReadyGroup, RolloutQueue
from etude.runs.layout import RunLayout
from etude.train.trainer import StepResult, Trainer
from etude.weights.publisher import Publisher

POLL_S = 0.05
OVERLONG_ENDINGS = frozenset({"length", "tokens", "turns", "time", "context"})


class RlStalled(ServiceGaveUp):
    """The trainer made no progress for too long; the message says what it waited for."""


class RlDiverged(ServiceGaveUp):
    """A step is not finite. Repeating it would give the same: the groups and the weights are the same."""


@dataclass
class RlLoop:
    """Everything a policy step needs."""

    layout: RunLayout
    settings: RlSettings
    trainer: Trainer
    objective: PolicyGradient
    queue: RolloutQueue
    evaluation_queue: RolloutQueue | None  # records which policy step a weight version belongs to
    publisher: Publisher
    reference: Transformer | None  # KL reference policy
    padding: int
    version: int  # newest published weight version
    blocked_by: Callable[[], str] = lambda: ""  # what else a step waits for, apart from groups; "": nothing
    report_status: Callable[..., None] = lambda **facts: None
    record_step: Callable[[int, dict[str, Any]], None] = lambda step, facts: None
    checkpoint: Callable[[], None] = lambda: None


def learn(loop: RlLoop) -> None:
    """Take the remaining policy steps, or as many as there are prompts for."""
    settings, trainer = loop.settings, loop.trainer
    while (step := trainer.step_count) < settings.steps:
        started = time.monotonic()
        groups, waited = wait_for_groups(loop, step)
        if groups is None:
            if step % settings.checkpoint_every:  # the run ends here: keep the steps since the last checkpoint
                loop.checkpoint()
            break
        loop.report_status(state="working", step=step)
        sequences = build_training_sequences(loop, groups)
        (batches,) = pack(
            sequences, trainer.model.config, length=settings.length, rows=settings.rows, padding=loop.padding
        )
        lr_factor = min(1.0, (step + 1) / settings.warmup) if settings.warmup else 1.0
        rollouts = settings.groups_per_step * settings.group_size
        # Divided by a constant, so that neither long rollouts nor long steps count less.
        result = trainer.step(batches, loop.objective, lr_factor, divisor=rollouts * settings.length)
        check_finite(loop, result, step + 1)
        loop.queue.mark_trained(groups, step + 1)
        publish(loop)
        wall_s = time.monotonic() - started
        loop.record_step(step + 1, step_facts(loop, groups, sequences, result, waited, wall_s))
        if trainer.step_count == settings.steps or trainer.step_count % settings.checkpoint_every == 0:
            loop.checkpoint()


def wait_for_groups(loop: RlLoop, step: int) -> tuple[list[ReadyGroup] | None, dict[str, float]]:
    """Return the groups of the next step, or None if there will never be enough; and the seconds waited, by reason.

    Raises RlStalled when nothing makes progress any more.
    """
    last_progress: object = None
    deadline = 0.0
    waited: dict[str, float] = {}
    last = time.monotonic()
    while True:
        blocker = loop.blocked_by()
        groups = None if blocker else loop.queue.take(step)
        now = time.monotonic()
        if groups is not None or (not blocker and prompts_exhausted(loop)):
            return groups, waited
        slow = [] if blocker else loop.queue.awaited_tasks(step)
        reason = "measurement" if blocker else "slow_groups" if slow else "rollouts"
        waited[reason] = waited.get(reason, 0.0) + now - last
        last = now
        # A slow group is no stall while its worker sends heartbeats: its session has time limits of its own.
        progress = loop.queue.counts(), blocker, loop.queue.last_heartbeat() if slow else 0.0
        if progress != last_progress:
            last_progress, deadline = progress, now + loop.settings.stall_s
        waiting_for = blocker or loop.queue.waiting_for(time.time())
        if slow:
            waiting_for = f"{', '.join(slow[:3])}, which would otherwise exceed rl.max_staleness; {waiting_for}"
        if now > deadline:
            raise RlStalled(f"the trainer has waited {loop.settings.stall_s:.0f} s for groups: {waiting_for}")
        loop.report_status(state="waiting", step=step, waiting_for=waiting_for)
        time.sleep(POLL_S)


def prompts_exhausted(loop: RlLoop) -> bool:
    """Return whether all prompts are used and fewer groups are in progress than a step needs."""
    return loop.layout.exhausted.exists() and loop.queue.outstanding() < loop.settings.groups_per_step


# ------------------------------------------------------------------------------------------ training sequences


def build_training_sequences(loop: RlLoop, groups: Sequence[ReadyGroup]) -> list[TrainingSequence]:
    """Return the segments of all rollouts with their token advantages; rollouts without gradient are left out."""
    estimator = loop.settings.estimator
    sequences: list[TrainingSequence] = []
    for group in groups:
        rewards = [float((slot.reward or {})["total"]) for slot in group.slots]
        advantages = ADVANTAGES[estimator.advantage](rewards, **estimator.all_advantage_options)
        for slot, advantage in zip(group.slots, advantages, strict=True):
            if not advantage and estimator.kl == "none":
                continue  # its gradient is exactly zero
            sequences += rollout_sequences(loop, load_trace(loop.layout.root / slot.trace), advantage)
    return sequences


def rollout_sequences(loop: RlLoop, trace: Trace, advantage: float) -> list[TrainingSequence]:
    """Return the training sequences of one rollout: the final reward counts for every sampled token of the chain of
    segments, self-summaries included."""
    estimator = loop.settings.estimator
    segments = [segment for segment in trace.segments if segment.kind != "compaction" and segment.sampled.any()]
    if not estimator.replay:
        segments = [replace(segment, routing=None) for segment in segments]
    if estimator.mask_overlong and trace.ending in OVERLONG_ENDINGS:
        return []
    kl = None
    if loop.reference is not None:
        kl_form = KL_FORMS[estimator.kl]
        kl = [
            kl_form(segment.raw_logprobs[segment.sampled], logprobs)
            for segment, logprobs in zip(segments, reference_logprobs(loop, segments), strict=True)
        ]
    parts = token_advantages(
        advantage,
        [int(segment.sampled.sum()) for segment in segments],
        kl=kl,
        kl_weight=estimator.kl_weight,
        divide_by_length=estimator.divide_by_length,
    )
    return [TrainingSequence(segment, part) for segment, part in zip(segments, parts, strict=True)]


@torch.no_grad()
def reference_logprobs(loop: RlLoop, segments: Sequence[Segment]) -> list[npt.NDArray[np.float32]]:
    """Return the reference policy's log-probabilities of the sampled tokens of each segment."""
    assert loop.reference is not None
    sizes = [int(segment.sampled.sum()) for segment in segments]
    # The "advantage" of a token is its index here, so that results can be put back in order after packing.
    indices = np.split(np.arange(sum(sizes), dtype=np.float32), np.cumsum(sizes)[:-1])
    sequences = [TrainingSequence(replace(s, routing=None), part) for s, part in zip(segments, indices, strict=True)]
    config, settings = loop.reference.config, loop.settings
    (batches,) = pack(sequences, config, length=settings.length, rows=settings.rows, padding=loop.padding)
    found = np.zeros(sum(sizes), np.float32)
    for batch in batches:
        moved = batch.to(loop.trainer.device)
        assert isinstance(moved, RolloutBatch)
        hidden = loop.reference.hidden(moved.tokens, documents=moved.documents).flatten(0, 1)
        targets = moved.targets.flatten()
        logprobs = token_logprobs(hidden, loop.reference.head_weight, targets)
        sampled = targets != IGNORE
        positions = moved.token_advantages.flatten()[sampled].long().cpu().numpy()
        found[positions] = logprobs[sampled].float().cpu().numpy()
    return np.split(found, np.cumsum(sizes)[:-1])


# ------------------------------------------------------------------------------------------ after a step


def publish(loop: RlLoop) -> None:
    """Upload the weights in the background. The queues learn their policy step before a sampler can use them."""
    dtype = getattr(torch, loop.settings.weights.dtype)
    loop.version += 1
    for queue in filter(None, (loop.queue, loop.evaluation_queue)):
        queue.record_version(loop.version, loop.trainer.step_count)
    with torch.no_grad():
        weights = {name: tensor.to(dtype) for name, tensor in checkpoint_views(loop.trainer.model).items()}
    loop.publisher.publish_soon(loop.version, weights)


def check_finite(loop: RlLoop, result: StepResult, step: int) -> None:
    """Raise RlDiverged before a step that is not finite reaches samplers or checkpoints."""
    values = {**result.metrics, **{f"gradient norm of {name}": norm for name, norm in result.gradient_norms.items()}}
    with torch.no_grad():
        values["norm of the weights"] = float(torch.nn.utils.get_total_norm(loop.trainer.model.parameters()))
    bad = [name for name, value in values.items() if not np.isfinite(value)]
    if bad:
        advice = "start another run with a lower rl.learning_rate, for instance from one of the checkpoints in"
        raise RlDiverged(f"rl: step {step}: {bad[0]} is {values[bad[0]]}; {advice} {loop.layout.trainer}")


def step_facts(
    loop: RlLoop,
    groups: Sequence[ReadyGroup],
    sequences: Sequence[TrainingSequence],
    result: StepResult,
    waited: Mapping[str, float],
    wall_s: float,
) -> dict[str, Any]:
    """Return the facts of a step that the trainer records: metrics, tokens, times, mismatch and upload."""
    mean, p99 = loop.objective.mismatch()
    mismatch = {"mismatch_mean": mean, "mismatch_p99": p99} if sequences else {}  # nothing was computed otherwise
    uploads = loop.publisher.history[-1:]
    return {
        **mismatch,
        "groups": [group.id for group in groups],
        "version": loop.version,
        "values": result.metrics,
        "gradient_norm": result.gradient_norms["model"],
        "trained_tokens": result.loss_tokens if sequences else 0,
        "tokens": result.tokens,
        "pieces": len(sequences),
        "step_s": result.seconds,
        "waited_s": sum(waited.values()),
        "waited_for": dict(waited),
        "wall_s": wall_s,
        "upload": [
            {
                "version": upload.version.number,
                "full": upload.version.full,
                "bytes": upload.version.bytes,
                "values": upload.version.values,
                "changed": upload.version.changed,
                "seconds": upload.seconds,
                "skipped": upload.skipped,
            }
            for upload in uploads
        ],
    }
