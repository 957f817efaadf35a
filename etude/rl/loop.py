"""The loop of reinforcement learning, as the trainer goes through it.

Take the groups that are ready, settle what every token is worth, pack, one step, say which prompts it used up, publish,
repeat. Meanwhile samplers, workers and the orchestrator do their part in processes of their own: nobody here starts a
rollout or waits for an upload. What a step used is written down before its checkpoint, so that a checkpoint never holds
a group that the table does not call trained; going back to one makes the later groups ready again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.harness.trace import Segment, Trace
from etude.harness.trace_store import load_trace
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.checkpoint import views
from etude.model.transformer import Transformer
from etude.recipe.sections import RlStage
from etude.rl.advantages import Estimator, advantages, k1, k3, worths
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rl.packing import Piece, pack
from etude.rollouts.queue import ReadyGroup, Slots
from etude.runs.layout import GivenUp, Place
from etude.train.trainer import StepResult, Trainer
from etude.weights.publisher import Publisher

POLL_S = 0.05
CUT_OFF = frozenset({"length", "tokens", "turns", "time", "context"})  # endings of rollouts that are overlong


class Stalled(GivenUp):
    """Nothing has moved for too long; the message says what was waited for."""


class Diverged(GivenUp):
    """A step that is not a number. It would be the same again: the same groups and the same weights."""


@dataclass
class Loop:
    """Everything a step needs."""

    place: Place
    section: RlStage
    estimator: Estimator
    trainer: Trainer
    objective: PolicyGradient
    slots: Slots
    evaluations: Slots | None  # told which step a version stands for
    publisher: Publisher
    reference: Transformer | None  # for the divergence
    padding: int
    version: int  # of the newest weights that were published
    held: Callable[[], str] = lambda: ""  # what a step must wait for beside groups; "" is nothing
    tell: Callable[..., None] = lambda **facts: None  # how the trainer is
    record: Callable[[int, dict[str, Any]], None] = lambda step, facts: None
    checkpoint: Callable[[], None] = lambda: None


def learn(loop: Loop) -> None:
    """Take the steps that are left, or as many as there are prompts for."""
    section, trainer = loop.section, loop.trainer
    while (step := trainer.step_count) < section.steps:
        started = time.monotonic()
        groups, waited = wait_for_groups(loop, step)
        if groups is None:
            if step % section.checkpoint_every:  # what was learned since the last one is the end of it
                loop.checkpoint()
            break
        loop.tell(state="working", step=step)
        pieces = taught(loop, groups)
        (batches,) = pack(pieces, trainer.model.config, length=section.length, rows=section.rows, padding=loop.padding)
        factor = min(1.0, (step + 1) / section.warmup) if section.warmup else 1.0
        rollouts = section.groups_per_step * section.group_size
        # a constant: neither long rollouts nor long steps count less
        result = trainer.step(batches, loop.objective, factor, divisor=rollouts * section.length)
        check(loop, result, step + 1)
        loop.slots.mark_trained(groups, step + 1)
        publish(loop)
        loop.record(step + 1, facts_of(loop, groups, pieces, result, waited, time.monotonic() - started))
        if trainer.step_count == section.steps or trainer.step_count % section.checkpoint_every == 0:
            loop.checkpoint()


def wait_for_groups(loop: Loop, step: int) -> tuple[list[ReadyGroup] | None, dict[str, float]]:
    """The groups of the next step, or None when there will never be enough; and how long it took to wait for what.

    Stalled when nothing moves any more.
    """
    seen: object = None
    deadline = 0.0
    waited: dict[str, float] = {}
    last = time.monotonic()
    while True:
        held = loop.held()
        groups = None if held else loop.slots.take(step)
        now = time.monotonic()
        if groups is not None or (not held and exhausted(loop)):
            return groups, waited
        late = [] if held else loop.slots.awaited(step)
        what = "measurement" if held else "slow_groups" if late else "rollouts"
        waited[what] = waited.get(what, 0.0) + now - last
        last = now
        counts = loop.slots.counts()
        # a slow group is no stall for as long as its worker is alive; its session has limits of its own
        moves = counts, held, loop.slots.last_sign() if late else 0.0
        if moves != seen:
            seen, deadline = moves, now + loop.section.stall_s
        waiting = held or loop.slots.waiting_for(time.time())
        if late:
            waiting = f"{', '.join(late[:3])}, or they would be older than rl.max_staleness; {waiting}"
        if now > deadline:
            raise Stalled(f"the trainer has waited {loop.section.stall_s:.0f} s for groups: {waiting}")
        loop.tell(state="waiting", step=step, waiting_for=waiting)
        time.sleep(POLL_S)


def exhausted(loop: Loop) -> bool:
    """Whether the prompts are used up, and fewer are under way than a step takes."""
    return (loop.place.root / "exhausted").exists() and loop.slots.outstanding() < loop.section.groups_per_step


# ------------------------------------------------------------------------------------------- what is learned


def taught(loop: Loop, groups: Sequence[ReadyGroup]) -> list[Piece]:
    """The segments of all rollouts with what their tokens are worth; those that are worth nothing are left out."""
    pieces: list[Piece] = []
    for group in groups:
        rewards = [float((slot.reward or {})["total"]) for slot in group.slots]
        above = advantages(rewards, divide_by_std=loop.estimator.divide_by_std)
        for slot, advantage in zip(group.slots, above, strict=True):
            if not advantage and loop.estimator.kl == "none":
                continue  # its gradient is exactly zero
            pieces += rollout_pieces(loop, load_trace(loop.place.root / slot.trace), advantage)
    return pieces


def rollout_pieces(loop: Loop, trace: Trace, advantage: float) -> list[Piece]:
    """The final reward of a chain is on every token the model made in it, its summaries included."""
    estimator = loop.estimator
    segments = [segment for segment in trace.segments if segment.kind != "compaction" and segment.made.any()]
    if not loop.section.estimator.replay:
        segments = [replace(segment, routing=None) for segment in segments]
    if estimator.mask_overlong and trace.ending in CUT_OFF:
        return []
    divergence = None
    if loop.reference is not None:
        form = k1 if estimator.kl == "k1" else k3
        known = reference_logprobs(loop, segments)
        divergence = [
            form(segment.raw_logprobs[segment.made], logprobs)
            for segment, logprobs in zip(segments, known, strict=True)
        ]
    parts = worths(
        advantage,
        [int(segment.made.sum()) for segment in segments],
        kl=divergence,
        kl_weight=estimator.kl_weight,
        divide_by_length=estimator.divide_by_length,
    )
    return [Piece(segment, part) for segment, part in zip(segments, parts, strict=True)]


@torch.no_grad()
def reference_logprobs(loop: Loop, segments: Sequence[Segment]) -> list[npt.NDArray[np.float32]]:
    """What the reference policy thinks of the made tokens of each segment."""
    assert loop.reference is not None
    sizes = [int(segment.made.sum()) for segment in segments]
    # numbered, so that the answers find home from wherever packing puts them
    numbers = np.split(np.arange(sum(sizes), dtype=np.float32), np.cumsum(sizes)[:-1])
    pieces = [Piece(replace(s, routing=None), part) for s, part in zip(segments, numbers, strict=True)]
    config, section = loop.reference.config, loop.section
    (batches,) = pack(pieces, config, length=section.length, rows=section.rows, padding=loop.padding)
    found = np.zeros(sum(sizes), np.float32)
    for batch in batches:
        moved = batch.to(loop.trainer.device)
        assert isinstance(moved, RolloutBatch)
        hidden = loop.reference.hidden(moved.tokens, documents=moved.documents).flatten(0, 1)
        targets = moved.targets.flatten()
        logprobs = token_logprobs(hidden, loop.reference.head_weight, targets)
        made = targets != IGNORE
        found[moved.worths.flatten()[made].long().cpu().numpy()] = logprobs[made].float().cpu().numpy()
    return np.split(found, np.cumsum(sizes)[:-1])


# ------------------------------------------------------------------------------------------- what comes of it


def publish(loop: Loop) -> None:
    """Send the weights on their way; the step they stand for is known before anybody can sample with them."""
    dtype = getattr(torch, loop.section.weights.dtype)
    loop.version += 1
    for table in filter(None, (loop.slots, loop.evaluations)):
        table.published(loop.version, loop.trainer.step_count)
    with torch.no_grad():
        weights = {name: tensor.to(dtype) for name, tensor in views(loop.trainer.model).items()}
    loop.publisher.publish_soon(loop.version, weights)


def check(loop: Loop, result: StepResult, step: int) -> None:
    """A step that is not a number must not reach samplers or checkpoints."""
    values = {**result.values, **{f"gradient norm of {name}": norm for name, norm in result.gradient_norms.items()}}
    with torch.no_grad():
        values["norm of the weights"] = float(torch.nn.utils.get_total_norm(loop.trainer.model.parameters()))
    bad = [name for name, value in values.items() if not np.isfinite(value)]
    if bad:
        advice = (
            "begin another run with a lower rl.learning_rate, if you like with rl.model = one of the checkpoints in"
        )
        raise Diverged(f"rl: step {step}: {bad[0]} is {values[bad[0]]}; {advice} {loop.place.trainer}")


def facts_of(
    loop: Loop,
    groups: Sequence[ReadyGroup],
    pieces: Sequence[Piece],
    result: StepResult,
    waited: Mapping[str, float],
    took: float,
) -> dict[str, Any]:
    """What the trainer alone knows of its step."""
    mean, high = loop.objective.mismatch()
    seen = {"mismatch_mean": mean, "mismatch_p99": high} if pieces else {}  # of groups all alike nothing is looked at
    uploads = loop.publisher.history[-1:]
    return {
        **seen,
        "groups": [group.id for group in groups],
        "version": loop.version,
        "values": result.values,
        "gradient_norm": result.gradient_norms["model"],
        "trained_tokens": result.trained if pieces else 0,
        "tokens": result.tokens,
        "pieces": len(pieces),
        "step_s": result.seconds,
        "waited_s": sum(waited.values()),
        "waited_for": dict(waited),
        "wall_s": took,
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
