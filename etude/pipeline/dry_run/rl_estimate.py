"""Reinforcement learning in a plan: its prompts and rollouts, its processes and their memory, and how long it takes.

How long sessions are and how fast they go is known when some have run: a run that has taken steps is believed. Before
that the time is a guess from runs elsewhere, named below, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from etude.kernels import usable_device
from etude.model.config import ModelConfig
from etude.model.describe import count_parameters
from etude.pipeline.dry_run.measure import SECONDS, Measured, step_seconds
from etude.pipeline.dry_run.memory import (
    POD,
    WORKER,
    Memory,
    checkpoint_bytes,
    kept_checkpoints,
    sampler_memory,
    store_bytes,
    training_memory,
)
from etude.rl.settings import RlSettings

TRACE = 5_000  # bytes of a rollout of some 500 tokens on disk
PODS = 40 << 20  # bytes of the pods' images and records
STARTING_S = 10.0  # processes that load a model
# Of the nano tasks: a session reads or makes so many tokens that were not cached, and is so long in the end.
SAMPLED, LENGTH = 375, 460
ALIKE = 0.4  # share of groups that teach nothing, because their rewards are all alike


@dataclass(frozen=True)
class Seen:
    """A run in which sessions of the nano tasks were measured."""

    where: str
    harness_s: float  # seconds of one core for a session: harness, tools, pod, verifier
    token_s: float  # seconds of the sampler for a token, for each parameter; on a CPU of one core


SEEN = {
    "cpu": Seen("a 3.4M model on 2 cores of an AMD EPYC", 0.15, 1.7e-10),
    "cuda": Seen("SmolLM2-135M on an H200 with 16 cores", 0.8, 7.4e-14),
}


def measurements(section: RlSettings) -> int:
    """How often the held-out tasks are tried: before, after, and in between."""
    table = section.evaluation
    if table is None:
        return 0
    return 2 + (max(0, section.steps - 1) // table.every if table.every else 0)


def held_out_tasks(section: RlSettings, sizes: Mapping[str, int]) -> int:
    """How many tasks are measured with, of sets of these sizes."""
    table = section.evaluation
    return sum(min(sizes[name], table.max_tasks or sizes[name]) for name in table.tasks) if table else 0


def rl_lines(section: RlSettings, prompts: int, held_out: int) -> list[str]:
    """What would be done."""
    plan = section.steps * section.groups_per_step
    lines = [
        f"{section.steps:,} steps of {section.groups_per_step} groups of {section.group_size}: "
        f"{plan * section.group_size:,} rollouts, at most {section.in_flight} at once, tokens at most "
        f"{section.max_staleness} steps old",
        f"{plan:,} of {prompts:,} prompts, each trained on once",
    ]
    if (table := section.evaluation) is not None:
        sessions = f"{table.samples} sessions on each of {held_out:,} held-out tasks"
        lines.append(f"{measurements(section)} measurements, each {sessions}")
    return lines


def rl_launches(section: RlSettings, pods: str) -> list[str]:
    """The processes beside this one."""
    trainer, sampler = usable_device(section.device), usable_device(section.sampler.device)
    return [
        f"1 trainer on {trainer}",
        f"{section.sampler.count} sampler{'s' if section.sampler.count > 1 else ''} on {sampler}",
        f"{section.workers} worker{'s' if section.workers > 1 else ''}, with at most {section.in_flight} pods "
        f"({pods or 'not tried'})",
    ]


def rl_memory(section: RlSettings, config: ModelConfig) -> list[Memory]:
    """Of every process."""
    trainer, sampler = str(usable_device(section.device)), str(usable_device(section.sampler.device))
    found = [training_memory(config, section, trainer)]
    found += [sampler_memory(config, section, sampler)] * section.sampler.count
    beside = {"workers": section.workers * WORKER, "pods": section.in_flight * POD}
    return [*found, Memory("sessions", "cpu", beside)]


def rl_disk(section: RlSettings, config: ModelConfig, held_out: int) -> int:
    one = checkpoint_bytes(config, section, layers=0, frozen=False)
    table = section.evaluation
    sessions = section.steps * section.groups_per_step * section.group_size
    sessions += measurements(section) * table.samples * held_out if table else 0
    weights = store_bytes(config, section) if not section.weights.store else 0
    kept = kept_checkpoints(section, section.steps, half_way=False)
    return kept * one + weights + sessions * TRACE + PODS


def rl_seconds(
    section: RlSettings,
    config: ModelConfig,
    cores: float,
    held_out: int,
    records: Sequence[Mapping[str, Any]] = (),
    at: int = 0,
    *,
    most: int | None = None,
    budget: float = SECONDS,
) -> Measured:
    """From step `at` to the end, by the lines of metrics of the steps before, or a guess."""
    steps = [record for record in records if not record.get("evaluation")]
    measured = sum(1 for record in records if record.get("evaluation"))
    again = max(0, measurements(section) - measured)
    table = section.evaluation
    sessions = table.samples * held_out if table else 0
    if len(steps) > 1:
        # what the first step waited for is the measurement before it
        tried = max((record.get("waited/measurement", 0.0) for record in steps), default=0.0)
        each = median(record["wall_s"] - record.get("waited/measurement", 0.0) for record in steps)
        seconds = STARTING_S + (section.steps - at) * each + again * tried
        return Measured(seconds, f"as the {len(steps)} steps of this run before went")
    seen = SEEN["cpu" if usable_device(section.sampler.device).type == "cpu" else "cuda"]
    session = session_seconds(seen, section, config, cores)
    rollouts = section.groups_per_step * section.group_size
    forwards = rollouts * LENGTH * (1 - ALIKE) / (section.rows * section.length)
    step = step_seconds(config, section, forwards, most=most, budget=budget).seconds
    # on a CPU trainer and sampler share the cores; beside a GPU the slower of the two decides
    together = step + rollouts * session if seen is SEEN["cpu"] else max(step, rollouts * session)
    seconds = STARTING_S + (section.steps - at) * together + again * sessions * session
    return Measured(seconds, f"a guess: as if sessions were those of the nano tasks, with {seen.where}")


def session_seconds(seen: Seen, section: RlSettings, config: ModelConfig, cores: float) -> float:
    """One session among many at once."""
    harness, sampling = seen.harness_s / cores, SAMPLED * count_parameters(config).active * seen.token_s
    if seen is SEEN["cpu"]:
        return harness + sampling / cores
    return max(harness, sampling / section.sampler.count)
