"""The trainer process: `python -m etude.rl.trainer_process RUN`. Builds the learning loop and keeps its checkpoints.

A checkpoint is a Hugging Face directory with the optimizer's tensors, the step and a digest. After a restart the
trainer continues from the newest intact checkpoint, rewinds the queue to it, and publishes its weights as a new
version: version numbers only ever grow.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from etude.chat.tokenizer import Tokenizer
from etude.config import read_toml
from etude.data.packing import Batch
from etude.errors import EtudeError
from etude.evaluation import held_out
from etude.files import commit_directory, files_digest, write_atomically
from etude.harness.profile import AgentProfile
from etude.kernels import usable_device
from etude.model.checkpoint import load, training_file, write_model, write_training_file
from etude.model.config import PROFILE_FILE
from etude.model.mtp import MTP_FILE, mtp_file
from etude.model.transformer import Transformer, compile_blocks
from etude.rewards.live_weights import LiveWeights
from etude.rl.best_checkpoint import kept_steps, read_scores
from etude.rl.imitation import demonstration_steps, open_mixture
from etude.rl.loop import RlLoop, learn, publish
from etude.rl.objective import PolicyGradient
from etude.rl.settings import OBJECTIVES, RlSettings, open_rl_run
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import evaluation_queue, load_evaluation
from etude.runs.layout import RunLayout
from etude.runs.service_status import write_status
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.train.balance import check_balance
from etude.train.optim import AdamSettings
from etude.train.phase import OPTIMIZER_FILE, STATE_FILE, set_damaged_aside
from etude.train.settings import BalanceSettings
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher
from etude.weights.versions import latest

SERVICE = "trainer"
STATUS_S = 1.0
RL_BIAS_RATE = 1e-4


def main() -> None:
    die_with_parent(parent_process())
    layout, settings = open_rl_run(sys.argv[1])
    if settings.threads:
        torch.set_num_threads(settings.threads)
    try:
        with open_loop(layout, settings) as loop:
            learn(loop)
            loop.publisher.flush(settings.stall_s)
    except (EtudeError, OSError) as error:
        say(f"etude: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)


@contextmanager
def open_loop(layout: RunLayout, settings: RlSettings) -> Iterator[RlLoop]:
    """Give the learning loop, restored from the newest intact checkpoint, with its weights being published."""
    with reporting_status(layout) as report_status:
        report_status(state="starting")
        device = usable_device(settings.device)
        found = intact_checkpoints(layout)
        origin = found[-1][1] if found else layout.model
        model = load(origin, dtype=getattr(torch, settings.precision), device=device)
        if settings.recompute:
            model.recompute = True
        if settings.compile:
            compile_blocks(model)
        check_balance(settings.balance, model.config, "rl")
        trainer = Trainer(model, adam_settings(settings), balance=balance_settings(settings))
        if found:
            trainer.step_count = found[-1][0]
            trainer.optimizer.load_state_dict(load_file(training_file(origin, OPTIMIZER_FILE)))
        queue = RolloutQueue(layout.slots, settings, durable=True)
        evaluations, every = None, 0
        if evaluation := load_evaluation(layout):
            every = evaluation.every
            evaluations = RolloutQueue(layout.evaluations, evaluation_queue(settings, evaluation.validation_samples))
        # Before the queues are rewound: ready groups must not look stale to the orchestrator.
        remove_later_steps(layout, trainer.step_count)
        queue.rewind(trainer.step_count)
        if evaluations is not None:
            held_out.rewind(evaluations, trainer.step_count)
        store = ObjectStore(layout.store)
        tokenizer = Tokenizer.load(layout.model)
        try:
            stored = latest(store)
        except OSError:  # away: the queue knows the numbers too
            stored = None
        weights = settings.weights
        run, seed = layout.run_id(), int(read_toml(layout.recipe).get("seed", 0))
        with Publisher(store, full_every=weights.full_every, keep=weights.keep, run=run) as publisher:
            loop = RlLoop(
                layout,
                settings,
                trainer,
                open_objective(settings),
                queue,
                evaluations,
                publisher,
                load_reference(layout, settings, device),
                tokenizer.end_of_text,
                max(queue.newest_version(), -1 if stored is None else stored),
                seed=seed,
                demonstrations=open_demonstrations(layout, settings, trainer.step_count, seed, tokenizer.end_of_text),
                reward_weights=LiveWeights(layout.run, settings.rewards).at,
                validate_every=every,
                blocked_by=evaluation_blocker(evaluations, partial(blocking_evaluation, settings, every, trainer)),
                report_status=report_status,
                record_step=partial(record_step, layout),
                checkpoint=lambda: write_checkpoint(layout, trainer, tokenizer, settings, every),
            )
            publish(loop)
            try:
                yield loop
            finally:
                queue.close()


def adam_settings(settings: RlSettings) -> AdamSettings:
    """Return the optimizer's settings.

    A float32 trainer that publishes bfloat16 weights computes with rounded ones: it trains what the samplers run.
    """
    rounded = settings.precision == "float32" and settings.weights.dtype == "bfloat16"
    s = settings
    return AdamSettings(
        s.learning_rate,
        s.betas,
        s.eps,
        s.weight_decay,
        s.max_grad_norm,
        s.max_grad_norm_ratio,
        round_to_bfloat16=rounded,
    )


def balance_settings(settings: RlSettings) -> BalanceSettings:
    """Return the settings of balancing experts. A policy step has few tokens, all alike: the bias moves slowly."""
    given = settings.balance
    return given if given.bias_rate is not None else given.model_copy(update={"bias_rate": RL_BIAS_RATE})


def open_objective(settings: RlSettings) -> PolicyGradient:
    """Return the objective that the settings choose."""
    loss = None
    if settings.objective != "policy_gradient":
        loss = partial(OBJECTIVES[settings.objective], **settings.objective_options)
    estimator = settings.estimator
    return PolicyGradient(estimator.max_importance_ratio, estimator.plausibility, loss, settings.temperature)


def load_reference(layout: RunLayout, settings: RlSettings, device: torch.device) -> Transformer | None:
    """Load the KL reference policy; None if there is no KL penalty."""
    estimator = settings.estimator
    if estimator.kl == "none":
        return None
    directory = layout.model if estimator.reference == "start" else Path(estimator.reference)
    return load(directory, dtype=getattr(torch, settings.precision), device=device).requires_grad_(False)


def open_demonstrations(
    layout: RunLayout, settings: RlSettings, step: int, seed: int, padding: int
) -> Iterator[list[Batch]] | None:
    """Return the demonstrations of the steps after `step`, if the control imitation learns from them."""
    if settings.control != "imitation":
        return None
    return demonstration_steps(open_mixture(layout, seed), settings, step, padding)


def blocking_evaluation(settings: RlSettings, validate_every: int, trainer: Trainer) -> int:
    """Return the step whose evaluation must end before the next step: the first or, with imitation, the last due.

    RL waits for rollouts of its own. Steps of imitation take no time: later weights would answer the evaluation.
    """
    step = trainer.step_count
    return step - step % validate_every if settings.control == "imitation" and validate_every else 0


def evaluation_blocker(evaluations: RolloutQueue | None, due: Callable[[], int]) -> Callable[[], str]:
    """Return a function that says which evaluation blocks the next step: that of exactly the weights of step `due`."""
    finished: set[int] = set()

    def blocked_by() -> str:
        if evaluations is None or (step := due()) in finished:
            return ""
        if held_out.is_finished(evaluations, step):
            finished.add(step)
            return ""
        return f"the evaluation at step {step}: {evaluations.waiting_for(time.time())}"

    return blocked_by


@contextmanager
def reporting_status(layout: RunLayout) -> Iterator[Callable[..., None]]:
    """Report the trainer's status every second, also during a long step."""
    facts: dict[str, Any] = {"state": "starting"}
    ended = threading.Event()

    def update(**changes: Any) -> None:
        facts.update({"waiting_for": "", **changes})

    def report() -> None:
        while True:
            write_status(layout, SERVICE, **facts)
            if ended.wait(STATUS_S):
                return

    thread = threading.Thread(target=report, name="status", daemon=True)
    thread.start()
    try:
        yield update
    finally:
        update(state="ended")
        ended.set()
        thread.join()
        write_status(layout, SERVICE, **facts)


# ------------------------------------------------------------------------------------------ checkpoints


def checkpoints(layout: RunLayout) -> list[tuple[int, Path]]:
    """Return the trainer's checkpoints with their steps, oldest first."""
    return sorted((int(path.name), path) for path in layout.trainer.glob("[0-9]*") if path.name.isdigit())


def intact_checkpoints(layout: RunLayout) -> list[tuple[int, Path]]:
    """Return the checkpoints after setting damaged newest ones aside; InputError if all are damaged."""
    set_damaged_aside([path for _, path in checkpoints(layout)], _is_intact)
    return checkpoints(layout)


def _is_intact(checkpoint: Path) -> bool:
    try:
        state = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))
    except ValueError:
        return False
    return bool(state == {"step": int(checkpoint.name), "digest": _digest(checkpoint)})


def _digest(checkpoint: Path) -> str:
    """Return a digest of all files but the one that records it."""
    files = {path.relative_to(checkpoint).as_posix(): path for path in checkpoint.rglob("*") if path.is_file()}
    files.pop(STATE_FILE, None)
    return files_digest(sorted(files.items()))


def write_checkpoint(
    layout: RunLayout, trainer: Trainer, tokenizer: Tokenizer, settings: RlSettings, validate_every: int
) -> None:
    """Write a checkpoint under a temporary name, rename it when it is complete, and delete old ones."""
    step = trainer.step_count
    draft = layout.trainer / f".{step:06d}.making"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        write_model(trainer.model, draft)
        tokenizer.save(draft)
        profile = AgentProfile.of(settings, tuple(read_toml(layout.recipe).get("plugins", ())))
        (draft / PROFILE_FILE).write_text(profile.to_json(), encoding="utf-8")
        write_training_file(draft, OPTIMIZER_FILE, trainer.optimizer.state_dict())
        if layers := mtp_file(layout.model):  # MTP layers are not trained here, only carried along
            shutil.copy(layers, training_file(draft, MTP_FILE))
        (draft / STATE_FILE).write_text(json.dumps({"step": step, "digest": _digest(draft)}))
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise EtudeError(f"{draft}: the checkpoint cannot be written: {error}") from error
    final = layout.trainer / f"{step:06d}"
    commit_directory(draft, final)
    found = dict(checkpoints(layout))
    for old in found.keys() - kept_steps(found.keys(), settings, read_scores(layout), validate_every):
        shutil.rmtree(found[old])


def record_step(layout: RunLayout, step: int, facts: dict[str, Any]) -> None:
    """Write the facts of a step; durably, because the checkpoint that follows it is durable too."""
    write_atomically(layout.step_file(step), json.dumps(facts), durable=True)


def remove_later_steps(layout: RunLayout, step: int) -> None:
    """Remove the facts of steps that will be taken again."""
    for path in layout.steps.glob("[0-9]*.json"):
        if int(path.stem) > step:
            path.unlink()


if __name__ == "__main__":
    main()
