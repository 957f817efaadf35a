"""The training loop of one stage: next batch, step, guard, log, evaluate, checkpoint. A resumed run repeats it exactly.

A checkpoint is a Hugging Face directory with further files: in `training/` the optimizer's tensors and any MTP layers,
and `training.json` (step, mixture position, recent losses). Metrics logged after the last checkpoint are dropped on
resume, because those steps run again. On a mesh every rank runs this loop; one of them writes the run.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from etude.data.dealing import step_batches
from etude.data.mixture import Mixture
from etude.data.packing import Batch
from etude.errors import EtudeError, InputError
from etude.files import content_digest
from etude.parallel.led import led
from etude.runs.run import Artefact, Run
from etude.system.progress import ProgressCallback
from etude.system.terminal import say
from etude.train.checkpoint_files import TrainingCheckpoints, read_optimizer
from etude.train.guard import LossSpikeGuard
from etude.train.objectives import Objective
from etude.train.optim import LRSchedule
from etude.train.trainer import StepResult, Trainer

MERGED = "merged"  # kind of an artefact: the weights to which the adapters of a stage belong
STATE_FILE = "training.json"


@dataclass
class TrainingPhase:
    """The objects and settings of one training loop; `stages.build_phase` makes it."""

    name: str
    trainer: Trainer
    objective: Objective
    schedule: LRSchedule
    mixture: Mixture
    guard: LossSpikeGuard
    rows: int
    micro_batches: int
    padding: int
    flops_per_token: float
    milestones: frozenset[int]  # steps that get a checkpoint in addition to checkpoint_every
    evaluate: Callable[[], dict[str, Any]]
    evaluate_every: int
    checkpoint_every: int
    keep: int
    open_checkpoint: Callable[[int], AbstractContextManager[Path]]
    save_weights: Callable[[Path], None]

    @property
    def leads(self) -> bool:
        """Whether this process writes the run."""
        return self.trainer.mesh is None or self.trainer.mesh.leads

    def next_batches(self) -> tuple[list[Batch], float]:
        """Return this rank's micro-batches of the next step, and how unequal the work of all ranks is."""
        mesh = self.trainer.mesh
        place = {"rank": mesh.data_rank, "ranks": mesh.settings.data_ranks} if mesh else {}
        return step_batches(
            self.mixture,
            self.trainer.model.config,
            rows=self.rows,
            micro_batches=self.micro_batches,
            padding=self.padding,
            **place,
        )

    @property
    def tokens_per_step(self) -> int:
        return self.rows * self.micro_batches * self.mixture.length


def train(run: Run, phase: TrainingPhase, report: ProgressCallback) -> dict[str, Any]:
    """Run the remaining steps and return the stage's summary."""
    trainer, steps = phase.trainer, phase.schedule.steps
    load_checkpoint(run, phase)
    if trainer.step_count == 0:
        log_evaluation(run, phase)
    with TrainingCheckpoints(trainer.mesh) as writer:
        while (step := trainer.step_count) < steps:
            batches, unequal = phase.next_batches()
            lr_factor = phase.schedule.factor(step)
            result = trainer.step(batches, phase.objective, lr_factor)
            phase.guard.check(step + 1, result, batches)
            if phase.leads:
                log_step(run, phase, result, unequal, lr_factor, report)
            last = trainer.step_count == steps
            if last or (phase.evaluate_every and trainer.step_count % phase.evaluate_every == 0):
                log_evaluation(run, phase)
            due = phase.checkpoint_every and trainer.step_count % phase.checkpoint_every == 0
            if last or due or trainer.step_count in phase.milestones:
                save_checkpoint(run, phase, writer)
    return summarize(run, phase) if phase.leads else {}


def log_step(
    run: Run, phase: TrainingPhase, result: StepResult, unequal: float, lr_factor: float, report: ProgressCallback
) -> None:
    step, rate = phase.trainer.step_count, result.tokens / result.seconds
    device = phase.trainer.device
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    mesh = phase.trainer.mesh
    mfu = rate * phase.flops_per_token / (peak_flops(device) * (mesh.size if mesh else 1))
    values = {
        **result.metrics,
        "tokens": step * phase.tokens_per_step,
        "trained": result.loss_tokens,
        "learning_rate": phase.trainer.settings.learning_rate * lr_factor,
        **{"gradient_norm" if n == "model" else f"{n}_gradient_norm": v for n, v in result.gradient_norms.items()},
        "clipped": float(result.clipped),
        "tokens_per_second": round(rate, 1),
    }
    if mesh is not None:
        values["imbalance"] = round(unequal, 4)
    if device.type == "cuda":
        values |= {"mfu": round(mfu, 4), "memory": memory}
    run.log(phase.name, step, **values)
    metric = phase.guard.metric
    note = f"{metric} {result.metrics[metric]:.3f}  {rate:,.0f} tok/s"
    if device.type == "cuda":
        note += f"  MFU {mfu:.0%}  {memory / 2**30:.1f} GiB"
    report(step, phase.schedule.steps, note)


def peak_flops(device: torch.device) -> float:
    """Return the data-sheet bfloat16 FLOP/s of the device, for MFU. Unknown GPUs count as an H100."""
    names = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12, "B300": 2250e12}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for part, flops in names.items() if part in name), 989e12)


def log_evaluation(run: Run, phase: TrainingPhase) -> None:
    metrics = phase.evaluate()
    phase.trainer.release()
    if metrics and phase.leads:
        step = phase.trainer.step_count
        run.log(phase.name, step, tokens=step * phase.tokens_per_step, evaluation=True, **metrics)


def summarize(run: Run, phase: TrainingPhase) -> dict[str, Any]:
    """Return steps, tokens, first and last loss and the held-out scores, from the logged metrics."""
    records, metric = run.metrics(phase.name), phase.guard.metric
    steps = [record for record in records if "loss" in record]
    scores = [record for record in records if record.get("evaluation")]
    summary: dict[str, Any] = {"steps": len(steps), "tokens": steps[-1]["tokens"] if steps else 0}
    if steps:
        edge = max(1, len(steps) // 20)
        for word, some in (("first", steps[:edge]), ("last", steps[-edge:])):
            summary[f"{word}_{metric}"] = round(sum(record[metric] for record in some) / len(some), 4)
        summary["clipped_share"] = round(sum(record.get("clipped", 0.0) for record in steps) / len(steps), 4)
    for score in ("held_out_nats", "held_out_overlap"):
        if scores and score in scores[0]:
            summary |= {f"{score}_before": scores[0][score], f"{score}_after": scores[-1][score]}
    if phase.mixture.truncated:
        summary["documents_cut"] = phase.mixture.truncated
    return summary


# ------------------------------------------------------------------------------------------------ checkpoints


def save_checkpoint(run: Run, phase: TrainingPhase, writer: TrainingCheckpoints) -> None:
    """Begin to write weights, optimizer and position as a new artefact; then old checkpoints are removed."""
    step = phase.trainer.step_count
    state = {"step": step, "mixture": phase.mixture.state_dict(), "recent": list(phase.guard.recent)}

    def finish(directory: Path) -> None:
        (directory / STATE_FILE).write_text(json.dumps(state))

    opened = phase.open_checkpoint(step) if phase.leads else None
    try:
        writer.write(
            opened, phase.save_weights, phase.trainer.optimizer, finish, lambda: _remove_old_checkpoints(run, phase)
        )
    except SafetensorError as problem:  # safetensors reports a full disk this way
        where = f"{run.path}: the checkpoint of step {step} could not be written"
        raise EtudeError(f"{where} ({problem}); free some space, then continue with --resume") from None


def list_checkpoints(run: Run, stage: str) -> list[tuple[int, Artefact]]:
    """Return a stage's checkpoints with their steps, in order."""
    found = [a for a in run.artefacts() if a.stage == stage and a.kind != MERGED]
    return sorted((int(a.name.rpartition("-")[2]), a) for a in found)


def _remove_old_checkpoints(run: Run, phase: TrainingPhase) -> None:
    """Keep the newest `keep` checkpoints, and the one at half of the steps: the MTP layers start from it."""
    found = list_checkpoints(run, phase.name)
    half = next((step for step, _ in found if 2 * step >= phase.schedule.steps), None)
    for step, artefact in found[: -phase.keep]:
        if step != half:
            run.remove(artefact)


def intact_checkpoints(run: Run, stage: str) -> list[tuple[int, Artefact]]:
    """Return a stage's checkpoints after setting damaged newest ones aside; InputError if all are damaged."""
    digests = {artefact.path: artefact.digest for _, artefact in list_checkpoints(run, stage)}
    set_damaged_aside(list(digests), lambda path: content_digest(path) == digests[path])
    return list_checkpoints(run, stage)


def set_damaged_aside(paths: Sequence[Path], is_intact: Callable[[Path], bool]) -> None:
    """Rename checkpoints after the newest intact one to `damaged-NAME`, and say so; InputError if all are damaged."""
    damaged: list[Path] = []
    for path in reversed(paths):
        try:
            if is_intact(path):
                break
        except OSError as error:  # a bad block, for instance
            say(f"etude: {error}", file=sys.stderr)
        damaged.append(path)
    if damaged and len(damaged) == len(paths):
        names = ", ".join(path.name for path in paths)
        raise InputError(
            f"{paths[0].parent}: every checkpoint is damaged ({names}: the digest differs or a file cannot be read); "
            "restore one from a copy, or remove them to start the stage again"
        )
    for path in damaged:
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        say(
            f"etude: WARNING: {path}: the checkpoint is damaged (its digest differs or a file cannot be read); kept "
            f"as {aside.name}, and training goes back to {paths[-1 - len(damaged)].name}",
            file=sys.stderr,
        )


def load_checkpoint(run: Run, phase: TrainingPhase) -> None:
    """Restore the newest checkpoint of this stage, if there is one; `intact_checkpoints` has verified it."""
    mesh, step = phase.trainer.mesh, -1
    if found := led(mesh, lambda: list_checkpoints(run, phase.name)):
        step, artefact = found[-1]
        state = json.loads((artefact.path / STATE_FILE).read_text())
        phase.mixture.load_state_dict(state["mixture"])
        phase.guard.recent.extend(state["recent"])
        read_optimizer(artefact.path, phase.trainer.optimizer, mesh)
        phase.trainer.step_count = step
    if phase.leads:
        run.rewind(phase.name, step)
