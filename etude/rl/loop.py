"""The learning loop of the trainer.

    take ready groups -> score -> token advantages -> pack -> one step -> mark trained -> publish -> checkpoint

Samplers, workers and the orchestrator run in processes of their own: the trainer starts no rollout and waits for no
upload. Groups are marked as trained before the checkpoint is written, so a checkpoint never contains a group that the
queue does not know as trained; going back to a checkpoint makes the later groups ready again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from etude.cluster.supervisor import ServiceGaveUp
from etude.rewards.reward import rescore
from etude.rl.best_checkpoint import finished_steps
from etude.rl.controls import rollout_advantages, used_rewards
from etude.rl.learner import Learner, StepOrder, StepOutcome
from etude.rl.settings import RlSettings
from etude.rollouts.queue_client import AnyQueue
from etude.rollouts.queue_records import ReadyGroup
from etude.rollouts.settings import EvaluationSettings
from etude.runs.layout import RunLayout
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.train.optim import LRSchedule
from etude.weights.publisher import PublishingFailed

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


class RlStalled(ServiceGaveUp):
    """The trainer made no progress for too long; the message says what it waited for."""


class RlDiverged(ServiceGaveUp):
    """A step is not finite. Repeating it would give the same: the groups and the weights are the same."""


@dataclass
class RlLoop:
    """Everything a policy step needs."""

    layout: RunLayout
    settings: RlSettings
    learner: Learner
    queue: AnyQueue
    evaluation_queue: AnyQueue | None  # records which policy step a weight version belongs to
    version: int  # newest published weight version
    seed: int = 0  # of the run
    evaluation: EvaluationSettings | None = None  # of the policy while the run goes on
    lineage: int = 0  # of the weights
    pins: dict[int, list[int]] = field(default_factory=dict)  # versions that evaluations need, by policy step
    reward_weights: Callable[[int], Mapping[str, float]] | None = None  # in force at a policy step
    report_status: Callable[..., None] = lambda **facts: None
    record_step: Callable[[int, dict[str, Any]], None] = lambda step, facts: None
    clock: Clock = MACHINE_CLOCK

    @property
    def step_count(self) -> int:
        return self.learner.trainer.step_count

    def checkpoint(self) -> None:
        self.learner.lead("checkpoint")


@dataclass(frozen=True)
class StepMaterial:
    """What one policy step learns from."""

    groups: Sequence[ReadyGroup] = ()  # consumed by the step
    rollouts: Sequence[tuple[str, float]] | None = None  # traces and advantages; None: demonstrations
    divisor: float | None = None  # of the summed loss; None: its mean over tokens
    scale: float = 1.0  # factor of the learning rate
    waited: Mapping[str, float] = field(default_factory=dict)  # seconds by reason


def learn(loop: RlLoop) -> None:
    """Take the remaining policy steps, or as many as there is material for."""
    settings = loop.settings
    schedule = LRSchedule(settings.steps, settings.warmup_steps, "constant")
    while (step := loop.step_count) < settings.steps:
        started = loop.clock.monotonic()
        try:
            material = demonstrations(loop, step) if settings.control == "imitation" else rollouts(loop, step)
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
        order = StepOrder(rate, loop.version, material.rollouts, material.divisor)
        outcome: StepOutcome = loop.learner.lead("step", order)
        check_finite(loop, outcome, step + 1)
        loop.queue.mark_trained(material.groups, step + 1)
        publish(loop)
        loop.record_step(step + 1, step_facts(loop, material, outcome, loop.clock.monotonic() - started))
        done = loop.step_count
        validated = settings.keep_best and loop.evaluation is not None and loop.evaluation.is_validated(done)
        if done == settings.steps or done % settings.checkpoint_every == 0 or validated:
            loop.checkpoint()


def rollouts(loop: RlLoop, step: int) -> StepMaterial | None:
    """Wait for the groups of the next step and return their rollouts; None if there will never be enough."""
    settings = loop.settings
    groups, waited = wait_for_groups(loop, step)
    if groups is None:
        return None
    groups = score_groups(loop, groups, step + 1)
    # Only groups that are alike can have waited longer: the trainer went back to a checkpoint meanwhile.
    fresh = [group for group in groups if step - group.oldest_step <= settings.max_staleness]
    # Divided by a constant, so that neither long rollouts nor long steps count less.
    divisor = settings.groups_per_step * settings.group_size * settings.loss_tokens
    return StepMaterial(groups, trained_rollouts(loop, fresh), divisor, step_scale(settings, groups), waited)


def demonstrations(loop: RlLoop, step: int) -> StepMaterial:
    """Wait for the weight store if it is too far behind; demonstrations are always there."""
    started, last, deadline = loop.clock.monotonic(), "", 0.0
    while blocker := store_blocker(loop):
        publish_pending(loop)
        if blocker != last:
            last, deadline = blocker, loop.clock.monotonic() + loop.settings.stall_s
        if loop.clock.monotonic() > deadline:
            raise RlStalled(f"the trainer has waited {loop.settings.stall_s:.0f} s for {blocker}")
        loop.report_status(state="waiting", step=step, waiting_for=blocker)
        loop.clock.sleep(POLL_S)
    publish_pending(loop)
    return StepMaterial(waited={"store": loop.clock.monotonic() - started} if last else {})


def wait_for_groups(loop: RlLoop, step: int) -> tuple[list[ReadyGroup] | None, dict[str, float]]:
    """Return the groups of the next step, or None if there will never be enough; and the seconds waited, by reason.

    Raises RlStalled when nothing makes progress any more.
    """
    last_progress: object = None
    seen: object = None
    deadline = 0.0
    waited: dict[str, float] = {}
    slow: list[str] = []
    last = loop.clock.monotonic()
    while True:
        publish_pending(loop)
        blocker = store_blocker(loop)
        state = loop.queue.state()
        if (looked := (state.changes, blocker)) != seen:
            groups = None if blocker else take_groups(loop, step)
            if groups is not None:
                return groups, waited
            slow, seen = [] if blocker else loop.queue.awaited_tasks(step), looked
        if not blocker and loop.layout.exhausted.exists() and state.outstanding < loop.settings.groups_per_step:
            return None, waited
        now = loop.clock.monotonic()
        reason = "store" if blocker else "slow_groups" if slow else "rollouts"
        waited[reason] = waited.get(reason, 0.0) + now - last
        last = now
        # A slow group is no stall while its worker sends heartbeats: its session has time limits of its own.
        progress = state.counts, blocker, state.last_heartbeat if slow else 0.0
        if progress != last_progress:
            last_progress, deadline = progress, now + loop.settings.stall_s
        waiting_for = blocker or state.waiting_for
        if slow:
            waiting_for = f"{', '.join(slow[:3])}, which would otherwise exceed rl.max_staleness; {waiting_for}"
        if now > deadline:
            raise RlStalled(f"the trainer has waited {loop.settings.stall_s:.0f} s for groups: {waiting_for}")
        loop.report_status(state="waiting", step=step, waiting_for=waiting_for)
        loop.clock.sleep(POLL_S)


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
    publisher = loop.learner.publisher
    if not publisher.problem or publisher.behind < max(1, loop.settings.max_staleness):
        return ""
    return f"the weight store, which is {publisher.behind} versions behind: {publisher.problem}"


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


def trained_rollouts(loop: RlLoop, groups: Sequence[ReadyGroup]) -> list[tuple[str, float]]:
    """Return the traces of all rollouts with their advantages; those without a gradient are left out."""
    found: list[tuple[str, float]] = []
    for group in groups:
        advantages = rollout_advantages(group, loop.settings, loop.seed)
        for slot, advantage in zip(group.slots, advantages, strict=True):
            if advantage or loop.settings.estimator.kl != "none":  # without an advantage the KL penalty has one
                found.append((slot.trace, advantage))
    return found


# ------------------------------------------------------------------------------------------ after a step


def publish(loop: RlLoop) -> None:
    """Upload the weights in the background. The queues learn their policy step before a sampler can use them."""
    loop.version += 1
    for queue in (loop.queue, loop.evaluation_queue):
        if queue is not None:
            queue.record_version(loop.version, loop.step_count)
    pinned = loop.evaluation is not None and bool(loop.evaluation.due_sets(loop.step_count))
    if pinned:
        loop.pins.setdefault(loop.step_count, []).append(loop.version)
    finished = finished_steps(loop.layout, loop.lineage)
    loop.pins = {step: versions for step, versions in loop.pins.items() if step not in finished}
    loop.learner.publisher.pinned = [version for versions in loop.pins.values() for version in versions]
    loop.learner.lead("publish", loop.version, pinned)


def publish_pending(loop: RlLoop) -> None:
    """Publish weights that waited for an earlier upload, if this rank has finished it; raise its failure."""
    learner = loop.learner
    learner.publisher.check()
    if learner.waits and not learner.publisher.busy:
        learner.lead("publish_pending")


def finish_publishing(loop: RlLoop) -> None:
    """Wait until the newest weights are in the store."""
    deadline = loop.clock.monotonic() + loop.settings.stall_s
    while loop.learner.waits:
        publish_pending(loop)
        if loop.clock.monotonic() > deadline:
            problem = loop.learner.publisher.problem or "the upload is slow"
            raise PublishingFailed(f"{loop.layout.store}: not written after {loop.settings.stall_s:.0f} s: {problem}")
        loop.clock.sleep(POLL_S)
    loop.learner.lead("flush", loop.settings.stall_s)


def check_finite(loop: RlLoop, outcome: StepOutcome, step: int) -> None:
    """Raise RlDiverged before a step that is not finite reaches samplers or checkpoints."""
    result = outcome.result
    values = {**result.metrics, **{f"gradient norm of {name}": norm for name, norm in result.gradient_norms.items()}}
    values["norm of the weights"] = outcome.weight_norm
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


def step_facts(loop: RlLoop, material: StepMaterial, outcome: StepOutcome, wall_s: float) -> dict[str, Any]:
    """Return the facts of a step that the trainer records: metrics, tokens, times, mismatch and upload."""
    publisher, settings, result, mismatch = loop.learner.publisher, loop.settings, outcome.result, outcome.mismatch
    shuffled: dict[int, float] = {}
    if settings.control == "placebo":  # the reward that each rollout was given
        for group in material.groups:
            rewards = used_rewards(group, settings, loop.seed)
            shuffled |= {slot.id: reward for slot, reward in zip(group.slots, rewards, strict=True)}
    return {
        **({"placebo": shuffled} if shuffled else {}),
        **mismatch,
        **({"store_problem": publisher.problem} if publisher.problem else {}),
        **({"imbalance": round(outcome.imbalance, 4)} if loop.learner.mesh else {}),
        "alarms": mismatch_alarms(mismatch, settings),
        "groups": [group.id for group in material.groups],
        "step_scale": material.scale,
        "version": loop.version,
        "values": result.metrics,
        "gradient_norm": result.gradient_norms["model"],
        "clipped": float(result.clipped),
        "trained_tokens": result.loss_tokens if outcome.sequences or material.rollouts is None else 0,
        "tokens": result.tokens,
        "pieces": outcome.sequences,
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
            for upload in publisher.history[-1:]
        ],
    }
