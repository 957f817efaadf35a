"""The trainer's process: `python -m etude.rl.trainer_process RUN`. Puts the loop together, keeps its checkpoints.

A checkpoint is a Hugging Face directory with the optimizer's tensors and the step. Starting again, it stands where the
newest one stands, tells the table so, and publishes what it has as a new version: versions only ever grow.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError
from etude.evaluation import held_out
from etude.kernels import usable_device
from etude.model.checkpoint import load, write_model
from etude.model.mtp import FILE as MTP_FILE
from etude.model.transformer import Transformer, compile_blocks
from etude.recipe.sections import RlStage
from etude.rl.loop import Loop, learn, publish
from etude.rl.objective import PolicyGradient
from etude.rl.settings import adam_of, estimator_of, evaluation_plan, plan_of
from etude.rollouts.queue import Slots
from etude.runs.layout import Place, die_with_parent, parent_process, place_and_section, write_status, write_whole
from etude.train.phase import OPTIMIZER_FILE, STATE_FILE
from etude.train.trainer import Trainer
from etude.weights.bucket import Bucket
from etude.weights.publisher import Publisher
from etude.weights.versions import latest

NAME = "trainer"


def main() -> None:
    die_with_parent(parent_process())
    place, section, _ = place_and_section(sys.argv[1])
    if section.threads:
        torch.set_num_threads(section.threads)
    try:
        with opened(place, section) as loop:
            learn(loop)
            loop.publisher.flush(section.stall_s)
    except (EtudeError, OSError) as error:
        print(f"etude: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)


@contextmanager
def opened(place: Place, section: RlStage) -> Iterator[Loop]:
    """The loop, standing at the newest checkpoint, with its weights on their way to the samplers."""
    with telling(place) as tell:
        tell(state="starting")
        device = usable_device(section.device)
        found = checkpoints(place)
        origin = found[-1][1] if found else place.model
        model = load(origin, dtype=getattr(torch, section.precision), device=device)
        if section.recompute:
            model.recompute = True
        if section.compile:
            compile_blocks(model)
        trainer = Trainer(model, adam_of(section))
        if found:
            trainer.step_count = json.loads((origin / STATE_FILE).read_text())["step"]
            trainer.optimizer.restore(load_file(origin / OPTIMIZER_FILE))
        slots = Slots(place.slots, plan_of(section))
        evaluations = Slots(place.evaluations, evaluation_plan(section)) if section.evaluation else None
        forget_steps(place, trainer.step_count)  # before the table: what is ready must not look old to anybody
        for table in filter(None, (slots, evaluations)):
            table.rewind(trainer.step_count)
        bucket = Bucket(place.store)
        tokenizer = Tokenizer.load(place.model)
        newest = latest(bucket)
        with Publisher(bucket, full_every=section.weights.full_every, keep=section.weights.keep) as publisher:
            loop = Loop(
                place,
                section,
                estimator_of(section),
                trainer,
                PolicyGradient(section.estimator.correction, section.estimator.plausibility),
                slots,
                evaluations,
                publisher,
                reference_of(place, section, device),
                tokenizer.end_of_text,
                -1 if newest is None else newest,
                held=holding(evaluations),
                tell=tell,
                record=lambda step, facts: write_whole(place.steps / f"{step:06d}.json", json.dumps(facts)),
                checkpoint=lambda: write_checkpoint(place, trainer, tokenizer, section.keep),
            )
            publish(loop)
            try:
                yield loop
            finally:
                slots.close()


def reference_of(place: Place, section: RlStage, device: torch.device) -> Transformer | None:
    """The policy that the divergence is from; None where there is none to be held to."""
    table = section.estimator
    if table.kl == "none":
        return None
    directory = place.model if table.reference == "start" else Path(table.reference)
    return load(directory, dtype=getattr(torch, section.precision), device=device).requires_grad_(False)


def holding(evaluations: Slots | None) -> Callable[[], str]:
    """Before the first step there is the measurement of what the run began with: exactly that, and nothing newer."""
    over = evaluations is None

    def held() -> str:
        nonlocal over
        if over or evaluations is None:
            return ""
        over = held_out.finished(evaluations, 0)
        return "" if over else f"the first measurement: {evaluations.waiting_for(time.time())}"

    return held


@contextmanager
def telling(place: Place) -> Iterator[Any]:
    """Says once a second how the trainer is, also in the middle of a long step."""
    facts: dict[str, Any] = {"state": "starting"}
    over = threading.Event()

    def tell(**news: Any) -> None:
        facts.update({"waiting_for": "", **news})

    def keep_telling() -> None:
        while True:
            write_status(place, NAME, **facts)
            if over.wait(1.0):
                return

    thread = threading.Thread(target=keep_telling, name="status", daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        tell(state="ended")
        over.set()
        thread.join()
        write_status(place, NAME, **facts)


# ------------------------------------------------------------------------------------------- checkpoints


def checkpoints(place: Place) -> list[tuple[int, Path]]:
    """The trainer's checkpoints with their steps, oldest first."""
    found = [path for path in place.trainer.glob("[0-9]*") if (path / STATE_FILE).exists()]
    return sorted((int(path.name), path) for path in found)


def write_checkpoint(place: Place, trainer: Trainer, tokenizer: Tokenizer, keep: int) -> None:
    """Written beside and renamed: a checkpoint is there or not."""
    step = trainer.step_count
    making = place.trainer / f".{step:06d}.making"
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir(parents=True)
        write_model(trainer.model, making)
        tokenizer.save(making)
        if (place.model / MTP_FILE).exists():  # they do not learn here, and draft for what has moved a little
            shutil.copy(place.model / MTP_FILE, making / MTP_FILE)
        tensors = {name: value.cpu().contiguous() for name, value in trainer.optimizer.state().items()}
        save_file(tensors, making / OPTIMIZER_FILE)
        (making / STATE_FILE).write_text(json.dumps({"step": step}))
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise EtudeError(f"{making}: the checkpoint cannot be written: {error}") from error
    final = place.trainer / f"{step:06d}"
    shutil.rmtree(final, ignore_errors=True)
    making.rename(final)
    for _, old in checkpoints(place)[:-keep]:
        shutil.rmtree(old)


def forget_steps(place: Place, step: int) -> None:
    """Facts of steps that will be taken again."""
    for path in place.steps.glob("[0-9]*.json"):
        if int(path.stem) > step:
            path.unlink()


if __name__ == "__main__":
    main()
