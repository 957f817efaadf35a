"""The plan of reinforcement learning: prompts and rollouts, processes and their memory, and the time it takes.

The length and speed of sessions are known only after some have run. A run that has taken steps is extrapolated; before
that the time is a guess from the reference runs below, and is labelled so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from etude.kernels import usable_device
from etude.model.config import ModelConfig
from etude.model.describe import count_parameters
from etude.pipeline.dry_run.measure import BUDGET_S, TimeEstimate, step_seconds
from etude.pipeline.dry_run.memory import (
    POD_BYTES,
    WORKER_BYTES,
    ProcessMemory,
    checkpoint_bytes,
    max_checkpoints,
    sampler_memory,
    store_bytes,
    training_memory,
)
from etude.rl.settings import RlSettings

TRACE_BYTES = 5_000  # on disk, of a rollout of about 500 tokens
POD_STORE_BYTES = 40 << 20  # images and records of the pods
STARTUP_S = 10.0  # until the processes have loaded the model
# Tokens of a session on nano tasks: those that were sampled or prefilled without the cache, and its final length.
UNCACHED_TOKENS, SESSION_TOKENS = 375, 460
EQUAL_REWARD_SHARE = 0.4  # share of groups without advantages, because all their rewards are equal


@dataclass(frozen=True)
class ReferenceRun:
    """A run in which sessions on nano tasks were measured."""

    where: str
    harness_s: float  # core seconds per session: harness, tools, pod, verifier
    token_s: float  # sampler seconds per token and parameter; for a CPU, of one core


REFERENCE_RUNS = {
    "cpu": ReferenceRun("a 3.4M model on 2 cores of an AMD EPYC", 0.15, 1.7e-10),
    "cuda": ReferenceRun("SmolLM2-135M on an H200 with 16 cores", 0.8, 7.4e-14),
}


def evaluation_count(settings: RlSettings) -> int:
    """Return the number of held-out evaluations: before, after, and in between."""
    evaluation = settings.evaluation
    if evaluation is None:
        return 0
    return 2 + (max(0, settings.steps - 1) // evaluation.every if evaluation.every else 0)


def held_out_tasks(settings: RlSettings, sizes: Mapping[str, int]) -> int:
    """Return the number of tasks of one evaluation, given the sizes of the task sets."""
    evaluation = settings.evaluation
    if evaluation is None:
        return 0
    return sum(min(sizes[name], evaluation.max_tasks or sizes[name]) for name in evaluation.tasks)


def rl_lines(settings: RlSettings, prompts: int, held_out: int) -> list[str]:
    """Return lines that describe the work of the stage."""
    groups = settings.steps * settings.groups_per_step
    lines = [
        f"{settings.steps:,} steps of {settings.groups_per_step} groups of {settings.group_size}: "
        f"{groups * settings.group_size:,} rollouts, at most {settings.in_flight} at once, tokens at most "
        f"{settings.max_staleness} steps old",
        f"{groups:,} of {prompts:,} prompts, each trained on once",
    ]
    if (evaluation := settings.evaluation) is not None:
        sessions = f"{evaluation.samples} sessions on each of {held_out:,} held-out tasks"
        lines.append(f"{evaluation_count(settings)} evaluations, each {sessions}")
    return lines


def rl_launches(settings: RlSettings, pods: str) -> list[str]:
    """Return the processes that the stage starts."""
    trainer, sampler = usable_device(settings.device), usable_device(settings.sampler.device)
    return [
        f"1 trainer on {trainer}",
        f"{settings.sampler.count} sampler{'s' if settings.sampler.count > 1 else ''} on {sampler}",
        f"{settings.workers} worker{'s' if settings.workers > 1 else ''}, with at most {settings.in_flight} pods "
        f"({pods or 'not tried'})",
    ]


def rl_memory(settings: RlSettings, config: ModelConfig) -> list[ProcessMemory]:
    """Return the memory of every process; the first is the trainer."""
    trainer, sampler = str(usable_device(settings.device)), str(usable_device(settings.sampler.device))
    processes = [training_memory(config, settings, trainer)]
    processes += [sampler_memory(config, settings, sampler)] * settings.sampler.count
    sessions = {"workers": settings.workers * WORKER_BYTES, "pods": settings.in_flight * POD_BYTES}
    return [*processes, ProcessMemory("sessions", "cpu", sessions)]


def rl_disk(settings: RlSettings, config: ModelConfig, held_out: int) -> int:
    """Return the bytes of checkpoints, weight versions, traces and pods."""
    checkpoint = checkpoint_bytes(config, settings, mtp_layers=0, frozen=False)
    evaluation = settings.evaluation
    sessions = settings.steps * settings.groups_per_step * settings.group_size
    sessions += evaluation_count(settings) * evaluation.samples * held_out if evaluation else 0
    weights = store_bytes(config, settings) if not settings.weights.store else 0
    kept = max_checkpoints(settings, settings.steps, halfway=False)
    return kept * checkpoint + weights + sessions * TRACE_BYTES + POD_STORE_BYTES


def rl_seconds(
    settings: RlSettings,
    config: ModelConfig,
    cores: float,
    held_out: int,
    records: Sequence[Mapping[str, Any]] = (),
    step: int = 0,
    *,
    max_tokens: int | None = None,
    budget: float = BUDGET_S,
) -> TimeEstimate:
    """Return the time from `step` to the end, from the metrics `records` of earlier steps, or else a guess."""
    steps = [record for record in records if not record.get("evaluation")]
    evaluated = sum(1 for record in records if record.get("evaluation"))
    evaluations = max(0, evaluation_count(settings) - evaluated)
    if len(steps) > 1:
        # The first step waited for the evaluation before it.
        evaluation_s = max((record.get("waited/measurement", 0.0) for record in steps), default=0.0)
        step_s = median(record["wall_s"] - record.get("waited/measurement", 0.0) for record in steps)
        seconds = STARTUP_S + (settings.steps - step) * step_s + evaluations * evaluation_s
        return TimeEstimate(seconds, f"from the {len(steps)} earlier steps of this run")
    on_cpu = usable_device(settings.sampler.device).type == "cpu"
    reference = REFERENCE_RUNS["cpu" if on_cpu else "cuda"]
    session_s = session_seconds(reference, settings, config, cores)
    rollouts = settings.groups_per_step * settings.group_size
    forwards = rollouts * SESSION_TOKENS * (1 - EQUAL_REWARD_SHARE) / (settings.rows * settings.length)
    train_s = step_seconds(config, settings, forwards, max_tokens=max_tokens, budget=budget).seconds
    # On a CPU trainer and sampler share the cores; with a GPU the slower of the two decides.
    step_s = train_s + rollouts * session_s if on_cpu else max(train_s, rollouts * session_s)
    sessions = settings.evaluation.samples * held_out if settings.evaluation else 0
    seconds = STARTUP_S + (settings.steps - step) * step_s + evaluations * sessions * session_s
    return TimeEstimate(seconds, f"a guess: as if sessions were those of the nano tasks, with {reference.where}")


def session_seconds(reference: ReferenceRun, settings: RlSettings, config: ModelConfig, cores: float) -> float:
    """Return the time of one session among many that run at once."""
    harness = reference.harness_s / cores
    sampling = UNCACHED_TOKENS * count_parameters(config).active * reference.token_s
    if reference is REFERENCE_RUNS["cpu"]:
        return harness + sampling / cores
    return max(harness, sampling / settings.sampler.count)
