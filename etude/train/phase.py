"""A phase of training, start to end: read, step, check, log, evaluate, checkpoint; and resume to the same result.

A checkpoint is a Hugging Face directory with three more files: the optimizer's tensors, the MTP layers if there are
any, and `training.json` (step, tokens, the reader's position). Metrics written after the last checkpoint are dropped
on resume, because those steps are taken again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from etude.data.mixture import Mixture
from etude.data.packing import next_batch
from etude.errors import EtudeError
from etude.runs.run import Artefact, Run, content_digest
from etude.system.progress import Report
from etude.train.guard import Guard
from etude.train.objectives import Objective
from etude.train.optim import Schedule
from etude.train.trainer import StepResult, Trainer

OPTIMIZER_FILE, STATE_FILE = "optimizer.safetensors", "training.json"


@dataclass
class Phase:
    """Everything the loop needs, put together by `stages`."""

    name: str
    trainer: Trainer
    objective: Objective
    schedule: Schedule
    mixture: Mixture
    guard: Guard
    rows: int
    micro_batches: int
    padding: int
    flops_per_token: float
    milestones: frozenset[int]  # steps that get a checkpoint whatever checkpoint_every says
    evaluate: Callable[[], dict[str, Any]]
    evaluate_every: int
    checkpoint_every: int
    keep: int
    open_checkpoint: Callable[[int], AbstractContextManager[Path]]
    save_weights: Callable[[Path], None]

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.micro_batches * self.mixture.length


def train(run: Run, phase: Phase, report: Report) -> dict[str, Any]:
    """Take the steps that are left. Returns the facts worth telling."""
    trainer, steps = phase.trainer, phase.schedule.steps
    resume(run, phase)
    if trainer.step_count == 0:
        log_evaluation(run, phase)
    while (step := trainer.step_count) < steps:
        batches = [next_batch(phase.mixture, phase.rows, phase.padding) for _ in range(phase.micro_batches)]
        factor = phase.schedule.factor(step)
        result = trainer.step(batches, phase.objective, factor)
        phase.guard.check(step + 1, result, batches)
        log_step(run, phase, result, factor, report)
        last = trainer.step_count == steps
        if last or (phase.evaluate_every and trainer.step_count % phase.evaluate_every == 0):
            log_evaluation(run, phase)
        due = phase.checkpoint_every and trainer.step_count % phase.checkpoint_every == 0
        if last or due or trainer.step_count in phase.milestones:
            write_checkpoint(run, phase)
    return summary(run, phase)


def log_step(run: Run, phase: Phase, result: StepResult, factor: float, report: Report) -> None:
    step, rate = phase.trainer.step_count, result.tokens / result.seconds
    device = phase.trainer.device
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    mfu = rate * phase.flops_per_token / peak_flops(device)
    values = {
        **result.values,
        "tokens": step * phase.tokens_per_step,
        "trained": result.trained,
        "learning_rate": phase.trainer.settings.learning_rate * factor,
        **{"gradient_norm" if n == "model" else f"{n}_gradient_norm": v for n, v in result.gradient_norms.items()},
        "tokens_per_second": round(rate, 1),
    }
    if device.type == "cuda":
        values |= {"mfu": round(mfu, 4), "memory": memory}
    run.log(phase.name, step, **values)
    shown = f"{phase.guard.watch} {result.values[phase.guard.watch]:.3f}  {rate:,.0f} tok/s"
    if device.type == "cuda":
        shown += f"  MFU {mfu:.0%}  {memory / 2**30:.1f} GiB"
    report(step, phase.schedule.steps, shown)


def peak_flops(device: torch.device) -> float:
    """bfloat16 products per second by the data sheet; MFU is a share of it. Unknown GPUs count as an H100."""
    names = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "B300": 2250e12}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in names.items() if part in name), 989e12)


def log_evaluation(run: Run, phase: Phase) -> None:
    found = phase.evaluate()
    if found:
        step = phase.trainer.step_count
        run.log(phase.name, step, tokens=step * phase.tokens_per_step, evaluation=True, **found)


def summary(run: Run, phase: Phase) -> dict[str, Any]:
    records, watch = run.metrics(phase.name), phase.guard.watch
    steps = [record for record in records if "loss" in record]
    scores = [record for record in records if record.get("evaluation")]
    facts: dict[str, Any] = {"steps": len(steps), "tokens": steps[-1]["tokens"] if steps else 0}
    if steps:
        edge = max(1, len(steps) // 20)
        for word, some in (("first", steps[:edge]), ("last", steps[-edge:])):
            facts[f"{word}_{watch}"] = round(sum(record[watch] for record in some) / len(some), 4)
    for measure in ("held_out_nats", "held_out_overlap"):
        if scores and measure in scores[0]:
            facts |= {f"{measure}_before": scores[0][measure], f"{measure}_after": scores[-1][measure]}
    if phase.mixture.cut:
        facts["documents_cut"] = phase.mixture.cut
    return facts


# ------------------------------------------------------------------------------------------------ checkpoints


def write_checkpoint(run: Run, phase: Phase) -> None:
    trainer = phase.trainer
    try:
        with phase.open_checkpoint(trainer.step_count) as place:
            phase.save_weights(place)
            tensors = {name: value.cpu().contiguous() for name, value in trainer.optimizer.state().items()}
            save_file(tensors, place / OPTIMIZER_FILE)
            state = {"step": trainer.step_count, "mixture": phase.mixture.state(), "recent": list(phase.guard.recent)}
            (place / STATE_FILE).write_text(json.dumps(state))
    except SafetensorError as problem:  # a full disk, in safetensors' words
        where = f"{run.path}: the checkpoint of step {trainer.step_count} could not be written"
        raise EtudeError(f"{where} ({problem}); free some space, then continue with --resume") from None
    _forget_old(run, phase)


def checkpoints_of(run: Run, stage: str) -> list[tuple[int, Artefact]]:
    """A stage's checkpoints with their steps, in order."""
    found = [a for a in run.artefacts() if a.stage == stage and (a.path / STATE_FILE).exists()]
    return sorted((int(a.name.rpartition("-")[2]), a) for a in found)


def _forget_old(run: Run, phase: Phase) -> None:
    """Keep the newest few, and the one at half the way: the MTP layers start from it."""
    found = checkpoints_of(run, phase.name)
    half = next((step for step, _ in found if 2 * step >= phase.schedule.steps), None)
    for step, artefact in found[: -phase.keep]:
        if step != half:
            run.remove(artefact)


def resume(run: Run, phase: Phase) -> None:
    """Stand where the newest checkpoint of this stage stands; a damaged one is an error, not a silent step back."""
    found = checkpoints_of(run, phase.name)
    if not found:
        run.rewind(phase.name)
        return
    step, artefact = found[-1]
    if content_digest(artefact.path) != artefact.digest:
        raise EtudeError(
            f"{artefact.path}: the checkpoint is damaged (digest differs); remove it to go on from the one before"
        )
    state = json.loads((artefact.path / STATE_FILE).read_text())
    phase.mixture.restore(state["mixture"])
    phase.guard.recent.extend(state["recent"])
    phase.trainer.optimizer.restore(load_file(artefact.path / OPTIMIZER_FILE))
    phase.trainer.step_count = step
    run.rewind(phase.name, step)
