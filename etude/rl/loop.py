"""The learning loop of the trainer.

    take ready groups -> score -> token advantages -> pack -> one step -> mark trained -> publish -> checkpoint

Samplers, workers and the orchestrator run in processes of their own: the trainer starts no rollout and waits for no
upload. Groups are marked as trained before the checkpoint is written, so a checkpoint never contains a group that the
queue does not know as trained; going back to a checkpoint makes the later groups ready again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.cluster.local import ServiceGaveUp
from etude.data.packing import Batch
from etude.harness.trace import Segment, Trace
from etude.harness.trace_store import load_trace
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.checkpoint import rounded_views
from etude.model.transformer import Transformer
from etude.rewards.reward import rescore
from etude.rl.advantages import KL_FORMS, kl_penalties, token_advantages
from etude.rl.best_checkpoint import is_validated
from etude.rl.controls import rollout_advantages, used_rewards
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rl.packing import TrainingSequence, pack
from etude.rl.settings import RlSettings
from etude.rollouts.queue import ReadyGroup, RolloutQueue
from etude.runs.layout import RunLayout
from etude.train.objectives import Objective, next_token
from etude.train.optim import LRSchedule
from etude.train.trainer import StepResult, Trainer
from etude.weights.publisher import Publisher

POLL_S = 0.05
MISMATCHES = {
    "numerics": "trainer and samplers compute different probabilities with the same weights",
    "staleness": "the policy has moved far from the weights that sampled",
}
MISMATCH_ADVICE = {
    "numerics": 'set rl.precision = "float32", keep rl.estimator.replay on for MoE models, '
    'or recompute caches (rl.sampler.on_swap = "recompute")',
    "staleness": "lower rl.max_staleness or rl.learning_rate, or set rl.estimator.max_importance_ratio",
}
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
    seed: int = 0  # of the run
    demonstrations: Iterator[list[Batch]] | None = None  # of the control imitation: instead of rollouts
    reward_weights: Callable[[int], Mapping[str, float]] | None = None  # in force at a policy step
    blocked_by: Callable[[], str] = lambda: ""  # what else a step waits for, apart from groups; "": nothing
    report_status: Callable[..., None] = lambda **facts: None
    record_step: Callable[[int, dict[str, Any]], None] = lambda step, facts: None
    checkpoint: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class StepMaterial:
    """What one policy step learns from."""

    batches: Sequence[Batch]
    objective: Objective
    groups: Sequence[ReadyGroup] = ()  # consumed by the step
    sequences: int = 0
    divisor: float | None = None  # of the summed loss; None: its mean over tokens
    scale: float = 1.0  # factor of the learning rate
    waited: Mapping[str, float] = field(default_factory=dict)  # seconds by reason


def learn(loop: RlLoop) -> None:
    """Take the remaining policy steps, or as many as there is material for."""
    settings, trainer = loop.settings, loop.trainer
    schedule = LRSchedule(settings.steps, settings.warmup_steps, "constant")
    while (step := trainer.step_count) < settings.steps:
        started = time.monotonic()
        try:
            material = demonstrations(loop, step) if loop.demonstrations else rollouts(loop, step)
        except RlStalled:
            if step % settings.checkpoint_every:  # a resumed run must not repeat these steps
                loop.checkpoint()
            raise
        if material is None:
            if step % settings.checkpoint_every:  # the run ends here: keep the steps since the last checkpoint
                loop.checkpoint()
            break
        loop.report_status(state="working", step=step)
        rate = schedule.factor(step) * material.scale
        result = trainer.step(material.batches, material.objective, rate, material.divisor)
        check_finite(loop, result, step + 1)
        mismatch = loop.objective.mismatch(loop.version)
        loop.queue.mark_trained(material.groups, step + 1)
        publish(loop)
        wall_s = time.monotonic() - started
        loop.record_step(step + 1, step_facts(loop, material, result, mismatch, wall_s))
        done = trainer.step_count
        validated = settings.keep_best and is_validated(settings, done)
        if done == settings.steps or done % settings.checkpoint_every == 0 or validated:
            loop.checkpoint()


def rollouts(loop: RlLoop, step: int) -> StepMaterial | None:
    """Wait for the groups of the next step and return them as packed sequences; None if there will never be enough."""
    settings = loop.settings
    groups, waited = wait_for_groups(loop, step)
    if groups is None:
        return None
    groups = score_groups(loop, groups, step + 1)
    # Only groups that are alike can have waited longer: the trainer went back to a checkpoint meanwhile.
    fresh = [group for group in groups if step - group.oldest_step <= settings.max_staleness]
    sequences = build_training_sequences(loop, fresh)
    (batches,) = pack(
        sequences, loop.trainer.model.config, length=settings.length, rows=settings.rows, padding=loop.padding
    )
    # Divided by a constant, so that neither long rollouts nor long steps count less.
    divisor = settings.groups_per_step * settings.group_size * settings.loss_tokens
    scale = step_scale(settings, groups)
    return StepMaterial(batches, loop.objective, groups, len(sequences), divisor, scale, waited)


def demonstrations(loop: RlLoop, step: int) -> StepMaterial:
    """Return the next demonstrations, after the evaluation that is due: nothing else keeps pace with such steps."""
    assert loop.demonstrations is not None
    started, last, deadline = time.monotonic(), "", 0.0
    while blocker := loop.blocked_by() or store_blocker(loop):
        if blocker != last:
            last, deadline = blocker, time.monotonic() + loop.settings.stall_s
        if time.monotonic() > deadline:
            raise RlStalled(f"the trainer has waited {loop.settings.stall_s:.0f} s for {blocker}")
        loop.report_status(state="waiting", step=step, waiting_for=blocker)
        time.sleep(POLL_S)
    waited = {"measurement": time.monotonic() - started} if last else {}
    return StepMaterial(next(loop.demonstrations), next_token, waited=waited)


def wait_for_groups(loop: RlLoop, step: int) -> tuple[list[ReadyGroup] | None, dict[str, float]]:
    """Return the groups of the next step, or None if there will never be enough; and the seconds waited, by reason.

    Raises RlStalled when nothing makes progress any more.
    """
    last_progress: object = None
    deadline = 0.0
    waited: dict[str, float] = {}
    last = time.monotonic()
    while True:
        blocker = loop.blocked_by() or store_blocker(loop)
        groups = None if blocker else take_groups(loop, step)
        now = time.monotonic()
        if groups is not None or (not blocker and prompts_exhausted(loop)):
            return groups, waited
        slow = [] if blocker else loop.queue.awaited_tasks(step)
        reason = "store" if store_blocker(loop) else "measurement" if blocker else "slow_groups" if slow else "rollouts"
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


def take_groups(loop: RlLoop, step: int) -> list[ReadyGroup] | None:
    """Return the groups of the next step, or None if there are not enough yet."""
    if not loop.settings.informative_groups:
        return loop.queue.take(step)
    return loop.queue.take(step, lambda group: is_informative(*score_groups(loop, [group], step + 1)))


def is_informative(group: ReadyGroup) -> bool:
    """Return whether the rewards of a group differ. If they are all alike, its policy gradient is exactly zero."""
    totals = [float(slot.record["total"]) for slot in group.slots]
    return min(totals) < max(totals)


def step_scale(settings: RlSettings, groups: Sequence[ReadyGroup]) -> float:
    """Return the factor of a step's learning rate: the share of its informative groups in `groups_per_step`.

    Adam divides the gradient by its own recent size: where most steps have little signal, the constant divisor of the
    loss cancels out, and a step with one informative group would move the weights as far as one full of them.
    """
    if not settings.informative_groups:
        return 1.0
    return min(1.0, sum(map(is_informative, groups)) / settings.groups_per_step)


def store_blocker(loop: RlLoop) -> str:
    """Return why no step may be taken while the weight store is away, or "".

    Steps go on as long as rollouts of the weights that samplers have stay within max_staleness after them; beyond, new
    rollouts would be too stale to train on before they are finished.
    """
    publisher = loop.publisher
    if not publisher.problem or publisher.behind < max(1, loop.settings.max_staleness):
        return ""
    return f"the weight store, which is {publisher.behind} versions behind: {publisher.problem}"


def prompts_exhausted(loop: RlLoop) -> bool:
    """Return whether all prompts are used and fewer groups are in progress than a step needs."""
    return loop.layout.exhausted.exists() and loop.queue.outstanding() < loop.settings.groups_per_step


# ------------------------------------------------------------------------------------------ training sequences


def score_groups(loop: RlLoop, groups: Sequence[ReadyGroup], step: int) -> list[ReadyGroup]:
    """Score all rollouts of a step with the reward weights in force now, whatever they were when each rollout ended."""
    if loop.reward_weights is None:
        return list(groups)
    weights, found = loop.reward_weights(step), []
    for group in groups:
        records = rescore([slot.record for slot in group.slots], weights)
        slots = zip(group.slots, records, strict=True)
        found.append(replace(group, slots=tuple(replace(slot, reward=record) for slot, record in slots)))
    return found


def build_training_sequences(loop: RlLoop, groups: Sequence[ReadyGroup]) -> list[TrainingSequence]:
    """Return the segments of all rollouts with their token advantages; rollouts without gradient are left out."""
    estimator = loop.settings.estimator
    sequences: list[TrainingSequence] = []
    for group in groups:
        advantages = rollout_advantages(group, loop.settings, loop.seed)
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
    penalties = None
    if loop.reference is not None and segments:
        own = np.concatenate([segment.logprobs[segment.sampled] for segment in segments])
        reference = np.concatenate(reference_logprobs(loop, segments))
        penalties = estimator.kl_weight * kl_penalties(KL_FORMS[estimator.kl], own, reference)
    parts = token_advantages(
        advantage,
        [int(segment.sampled.sum()) for segment in segments],
        penalties=penalties,
        divide_by_length=estimator.divide_by_length,
    )
    return [TrainingSequence(segment, part) for segment, part in zip(segments, parts, strict=True)]


@torch.no_grad()
def reference_logprobs(loop: RlLoop, segments: Sequence[Segment]) -> list[npt.NDArray[np.float32]]:
    """Return the reference policy's log-probabilities of the sampled tokens of each segment, at the temperature."""
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
        logprobs = token_logprobs(hidden / settings.temperature, loop.reference.head_weight, targets)
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
        loop.publisher.publish_soon(loop.version, rounded_views(loop.trainer.model, dtype))


def check_finite(loop: RlLoop, result: StepResult, step: int) -> None:
    """Raise RlDiverged before a step that is not finite reaches samplers or checkpoints."""
    values = {**result.metrics, **{f"gradient norm of {name}": norm for name, norm in result.gradient_norms.items()}}
    with torch.no_grad():
        values["norm of the weights"] = float(torch.nn.utils.get_total_norm(loop.trainer.model.parameters()))
    bad = [name for name, value in values.items() if not np.isfinite(value)]
    if bad:
        advice = "start another run with a lower rl.learning_rate, for instance from one of the checkpoints in"
        raise RlDiverged(f"rl: step {step}: {bad[0]} is {values[bad[0]]}; {advice} {loop.layout.trainer}")


def mismatch_alarms(mismatch: Mapping[str, float], settings: RlSettings) -> list[str]:
    """Return what is wrong and what to do where a mismatch of trainer and sampler exceeds its limit."""
    limits = {"numerics": settings.max_numerics_mismatch, "staleness": settings.max_staleness_mismatch}
    found = {name: mismatch.get(f"mismatch_{name}_p99", 0.0) for name in limits}
    return [
        f"{what}: p99 {found[name]:.2g} nats, limit {limits[name]:g} (rl.max_{name}_mismatch); {MISMATCH_ADVICE[name]}"
        for name, what in MISMATCHES.items()
        if limits[name] and found[name] > limits[name]
    ]


def step_facts(
    loop: RlLoop, material: StepMaterial, result: StepResult, mismatch: Mapping[str, float], wall_s: float
) -> dict[str, Any]:
    """Return the facts of a step that the trainer records: metrics, tokens, times, mismatch and upload."""
    uploads, settings, shuffled = loop.publisher.history[-1:], loop.settings, dict[int, float]()
    if settings.control == "placebo":  # the reward that each rollout was given
        for group in material.groups:
            rewards = used_rewards(group, settings, loop.seed)
            shuffled |= {slot.id: reward for slot, reward in zip(group.slots, rewards, strict=True)}
    return {
        **({"placebo": shuffled} if shuffled else {}),
        **mismatch,
        **({"store_problem": loop.publisher.problem} if loop.publisher.problem else {}),
        "alarms": mismatch_alarms(mismatch, loop.settings),
        "groups": [group.id for group in material.groups],
        "step_scale": material.scale,
        "version": loop.version,
        "values": result.metrics,
        "gradient_norm": result.gradient_norms["model"],
        "clipped": float(result.clipped),
        "trained_tokens": result.loss_tokens if material.batches else 0,
        "tokens": result.tokens,
        "pieces": material.sequences,
        "step_s": result.seconds,
        "waited_s": sum(material.waited.values()),
        "waited_for": dict(material.waited),
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
