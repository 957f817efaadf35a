"""The trainer process: `python -m etude.rl.trainer_process RUN`. Builds the learning loop and keeps its checkpoints.

A checkpoint is a Hugging Face directory with the optimizer's tensors, the step and a digest. After a restart the
trainer continues from the newest intact checkpoint, rewinds the queue to it, and publishes its weights as a new
version: version numbers only ever grow. With `rl.parallel` it is several processes, the ranks of one job: their
supervisor starts them with the environment that torchrun would give them, and ends all when one has died.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from etude.chat.tokenizer import Tokenizer
from etude.config import read_toml
from etude.data.packing import Batch
from etude.errors import EtudeError, InputError
from etude.evaluation import held_out
from etude.files import commit_directory, files_digest, write_atomically
from etude.harness.profile import AgentProfile
from etude.harness.trace import Trace
from etude.kernels import usable_device
from etude.model.checkpoint import TRAINING, load, training_file
from etude.model.config import PROFILE_FILE, base_directory
from etude.model.mtp import MTP_FILE, mtp_file
from etude.model.peft import load_beside, relative_base
from etude.model.trainer_parts import check_expert_ranks
from etude.model.transformer import Transformer, compile_blocks, compile_forwards
from etude.parallel.led import led
from etude.rl.best_checkpoint import kept_steps, read_scores
from etude.rl.imitation import demonstration_steps, open_mixture
from etude.rl.learner import Learner
from etude.rl.loop import RlLoop, finish_publishing, learn, publish
from etude.rl.objective import PolicyGradient
from etude.rl.services import TRAINER
from etude.rl.settings import OBJECTIVES, RlSettings, open_rl_run
from etude.rollouts.live_settings import LiveSettings, differing, record_changes
from etude.rollouts.queue import REPLACED
from etude.rollouts.queue_client import AnyQueue, QueueClient
from etude.rollouts.settings import EvaluationSettings, QueueName, load_evaluation, load_queues
from etude.rollouts.stored_traces import StoredTraces
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.runs.service_status import StatusReader
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.train.balance import check_balance
from etude.train.checkpoint_files import OPTIMIZER, copy_to_host, read_optimizer, write_state, write_weights
from etude.train.optim import AdamSettings
from etude.train.phase import STATE_FILE, set_damaged_aside
from etude.train.settings import BalanceSettings
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher
from etude.weights.versions import WHOLE, Part, latest

if TYPE_CHECKING:
    from etude.parallel.mesh import TrainingMesh

STATUS_S = 1.0
MIN_STORE_DELAY_S, MAX_STORE_DELAY_S = 0.5, 60.0  # before a trace is read again, doubled each time
RL_BIAS_RATE = 1e-4


def main() -> None:
    die_with_parent(parent_process())
    layout, settings = open_rl_run(sys.argv[1])
    if settings.threads:
        torch.set_num_threads(settings.threads)
    follows = settings.parallel.processes > 1 and os.environ.get("RANK", "0") != "0"
    try:
        (follow if follows else lead)(layout, settings)
    except (EtudeError, OSError) as error:
        say(f"etude: {error}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)


def lead(layout: RunLayout, settings: RlSettings) -> None:
    """Run the learning loop to its end, with all ranks."""
    with (
        closing(StatusReader(layout)) as statuses,
        reporting_status(statuses) as report_status,
        joined_mesh(settings) as mesh,
        open_loop(layout, settings, mesh) as loop,
    ):
        loop.report_status = report_status
        learn(loop)
        finish_publishing(loop)
        loop.learner.dismiss()


def follow(layout: RunLayout, settings: RlSettings) -> None:
    """Take part as another rank than the first."""
    with joined_mesh(settings) as mesh, open_learner(layout, settings, mesh) as learner:
        learner.follow()


@contextmanager
def joined_mesh(settings: RlSettings) -> Iterator[TrainingMesh | None]:
    """Join the other ranks and give the mesh; None for one process."""
    if settings.parallel.processes == 1:
        yield None
        return
    from etude.parallel.mesh import open_mesh

    with open_mesh(settings.parallel, usable_device(settings.device)) as mesh:
        yield mesh


@contextmanager
def open_loop(layout: RunLayout, settings: RlSettings, mesh: TrainingMesh | None = None) -> Iterator[RlLoop]:
    """Give the learning loop, restored from the newest intact checkpoint, with its weights being published."""
    with closing(RunClient.beside(layout, on_problem=say_problem)) as client:
        queues, session = take_over(layout, client)
        with open_learner(layout, settings, mesh, session) as learner:
            yield resumed_loop(layout, settings, learner, queues, session)


def take_over(layout: RunLayout, client: RunClient) -> tuple[dict[QueueName, QueueClient], int]:
    """Begin a session of the trainer; return the queues, and its number.

    An earlier trainer may still run, on a node that the cluster has given up: from now on nothing that it asks of the
    queues is done, and it neither writes nor removes checkpoints and facts of steps. The file is on their disk: the
    trainer that has written it last has the highest number, in whatever order their requests arrive.
    """
    client.connect()
    queues = {name: QueueClient(client, name, found) for name, found in load_queues(layout).items()}
    known = [queue.trainer_session() for queue in queues.values()]
    with suppress(FileNotFoundError):
        known.append(int(layout.trainer_session.read_text(encoding="ascii")))
    session = max(known) + 1
    write_atomically(layout.trainer_session, str(session))
    for queue in queues.values():
        queue.begin_session(session)
    return queues, session


def check_session(layout: RunLayout, session: int) -> None:
    """Raise EtudeError if a later session of the trainer has begun."""
    if int(layout.trainer_session.read_text(encoding="ascii")) != session:
        raise EtudeError(REPLACED)


def resumed_loop(
    layout: RunLayout,
    settings: RlSettings,
    learner: Learner,
    queues: Mapping[QueueName, QueueClient],
    session: int,
) -> RlLoop:
    """Return the loop that continues with a learner; the queues go back to its step, and its weights are published."""
    queue, evaluation = queues["training"], load_evaluation(layout)
    evaluations = queues["evaluation"] if evaluation else None
    trainer = learner.trainer
    # Before the queues are rewound: ready groups must not look stale to the orchestrator.
    remove_later_steps(layout, session, trainer.step_count)
    queue.rewind(trainer.step_count)
    if evaluations is not None:
        held_out.rewind(evaluations, trainer.step_count)
    try:
        stored = latest(learner.publisher.store)
    except OSError:  # away: the queue knows the numbers too
        stored = None
    loop = RlLoop(
        layout,
        settings,
        learner,
        queue,
        evaluations,
        max(queue.newest_version(), -1 if stored is None else stored),
        seed=run_seed(layout),
        reward_weights=live_rewards(LiveSettings(layout, RlSettings)),
        evaluation=evaluation,
        lineage=evaluations.lineage() if evaluations is not None else 0,
        pins=needed_versions(evaluation, evaluations, trainer.step_count),
        record_step=partial(record_step, layout, session),
        clock=learner.publisher.clock,
    )
    publish(loop)
    return loop


@contextmanager
def open_learner(
    layout: RunLayout, settings: RlSettings, mesh: TrainingMesh | None, session: int = 0
) -> Iterator[Learner]:
    """Give this rank of the trainer, restored from the newest intact checkpoint; the first one has a `session`."""
    trainer = open_trainer(layout, settings, mesh)
    tokenizer, weights = Tokenizer.load(layout.model), settings.weights
    evaluation, live = load_evaluation(layout), LiveSettings(layout, RlSettings)
    with Publisher(
        ObjectStore(layout.store),
        full_every=weights.full_every,
        keep=weights.keep,
        run=layout.run_id(),
        part=Part(mesh.rank, mesh.size) if mesh else WHOLE,
    ) as publisher:
        yield Learner(
            settings,
            trainer,
            open_objective(settings),
            publisher,
            load_reference(layout, settings, trainer.model, mesh),
            tokenizer.end_of_text,
            load_trace=trace_loader(layout),
            demonstrations=open_demonstrations(layout, settings, trainer, tokenizer.end_of_text),
            save=lambda: write_checkpoint(layout, trainer, tokenizer, live.current(), evaluation, session),
        )


def live_rewards(live: LiveSettings[RlSettings]) -> Callable[[int], Mapping[str, float]]:
    """Return a function that gives the reward weights of a policy step, and records a change with the step."""

    def at(step: int) -> Mapping[str, float]:
        before = live.settings
        changed = {key: each for key, each in differing(before, live.current()).items() if key == "rewards"}
        record_changes(live.layout, step, changed)
        return live.settings.rewards

    return at


def trace_loader(layout: RunLayout) -> Callable[[str], Trace]:
    """Return a function that loads traces from their store, which may be away for a while."""
    traces = StoredTraces(layout)

    def load_trace(name: str) -> Trace:
        delay = MIN_STORE_DELAY_S
        while delay <= MAX_STORE_DELAY_S and traces.store.directory is None:
            try:
                return traces.load(name)
            except InputError:
                time.sleep(delay)
                delay *= 2
        return traces.load(name)

    return load_trace


def say_problem(problem: str) -> None:
    """Say why the run service does not answer, and that it does again."""
    say(f"{TRAINER}: {problem or 'the run service answers again'}", file=sys.stderr)


def open_trainer(layout: RunLayout, settings: RlSettings, mesh: TrainingMesh | None) -> Trainer:
    """Return the trainer with the newest intact checkpoint, or with the model that the run starts from."""
    found = led(mesh, lambda: intact_checkpoints(layout))
    step, origin = found[-1] if found else (0, layout.model)
    dtype = getattr(torch, settings.precision)
    if mesh is None:
        model = load(origin, dtype=dtype, device=usable_device(settings.device))
        if settings.compile:
            compile_blocks(model)
    else:
        from etude.train.sharding import load_sharded

        model = load_sharded(origin, mesh, dtype, lora=settings.lora)
        if settings.compile:
            compile_forwards(model.blocks)
    model.recompute = settings.recompute
    check_balance(settings.balance, model.config, "rl")
    check_expert_ranks(settings.parallel, model.config)
    adam, balance = adam_settings(settings), balance_settings(settings)
    trainer = Trainer(model, adam, step_count=step, balance=balance, mesh=mesh, stored_dtype=dtype)
    if found:
        read_optimizer(origin, trainer.optimizer, mesh)
    return trainer


def run_seed(layout: RunLayout) -> int:
    return int(read_toml(layout.recipe).get("seed", 0))


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
    return PolicyGradient(estimator.max_importance_ratio, estimator.plausibility, loss)


def load_reference(
    layout: RunLayout, settings: RlSettings, model: Transformer, mesh: TrainingMesh | None
) -> Transformer | None:
    """Load the KL reference policy; None if there is no KL penalty.

    In one process it shares the frozen weights of adapters; on a mesh it is sharded like the model.
    """
    estimator, starts = settings.estimator, settings.estimator.reference == "start"
    if estimator.kl == "none":
        return None
    directory, dtype = layout.model if starts else Path(estimator.reference), getattr(torch, settings.precision)
    if mesh is not None:
        from etude.train.sharding import load_sharded

        reference = load_sharded(directory, mesh, dtype, lora=settings.lora if starts else None, frozen=True)
    elif starts and model.lora is not None:
        return load_beside(model, directory)
    else:
        reference = load(directory, dtype=dtype, device=model.head_weight.device)
    return reference.requires_grad_(False)


def open_demonstrations(
    layout: RunLayout, settings: RlSettings, trainer: Trainer, padding: int
) -> Iterator[list[Batch]] | None:
    """Return this rank's demonstrations of the remaining steps, if the control imitation learns from them."""
    if settings.control != "imitation":
        return None
    mixture, config, step = open_mixture(layout, run_seed(layout)), trainer.model.config, trainer.step_count
    mesh = trainer.mesh
    ranks = (mesh.data_rank, mesh.settings.data_ranks) if mesh else (0, 1)
    return demonstration_steps(mixture, settings, config, step, padding, *ranks)


def needed_versions(
    evaluation: EvaluationSettings | None, evaluations: AnyQueue | None, step: int
) -> dict[int, list[int]]:
    """Return the weight versions of all evaluated steps up to `step`, whether their evaluations have ended or not."""
    if evaluation is None or evaluations is None:
        return {}
    return {each: evaluations.versions_of(each) for each in range(step + 1) if evaluation.due_sets(each)}


@contextmanager
def reporting_status(statuses: StatusReader) -> Iterator[Callable[..., None]]:
    """Report the trainer's status every second, also during a long step."""
    facts: dict[str, Any] = {"state": "starting"}
    ended = statuses.clock.event()

    def update(**changes: Any) -> None:
        facts.update({"waiting_for": "", **changes})

    def report() -> None:
        while True:
            statuses.report(TRAINER, **facts)
            if ended.wait(STATUS_S):
                return

    thread = statuses.clock.start_thread(report, "status")
    try:
        yield update
    finally:
        update(state="ended")
        ended.set()
        thread.join()
        statuses.report(TRAINER, **facts)


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
    layout: RunLayout,
    trainer: Trainer,
    tokenizer: Tokenizer,
    settings: RlSettings,
    evaluation: EvaluationSettings | None,
    session: int,
) -> None:
    """Write a checkpoint under a temporary name, rename it when it is complete, and delete old ones.

    Every rank writes its parts; the leading one all else.
    """
    step, mesh, model = trainer.step_count, trainer.mesh, trainer.model
    draft = layout.trainer / f".{step:06d}.making"
    base = relative_base(draft, base_directory(layout.model), layout.run) if model.lora else None
    try:
        led(mesh, partial(new_draft, draft))
        write_weights(model, None, draft, trainer.stored_dtype, mesh, base, carried=layout.model)
        write_state(draft / TRAINING / OPTIMIZER, copy_to_host(trainer.optimizer.state_dict()), mesh)
        if mesh is not None and not mesh.leads:
            return
        tokenizer.save(draft)
        profile = AgentProfile.of(settings, tuple(read_toml(layout.recipe).get("plugins", ())))
        (draft / PROFILE_FILE).write_text(profile.to_json(), encoding="utf-8")
        if layers := mtp_file(layout.model):  # MTP layers are not trained here, only carried along
            shutil.copy(layers, training_file(draft, MTP_FILE))
        seal_draft(draft, step)
    except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a full disk
        raise EtudeError(f"{draft}: the checkpoint cannot be written: {error}") from error
    commit_checkpoint(layout, draft, step, settings, evaluation, session)


def seal_draft(draft: Path, step: int) -> None:
    """Write what shows that a checkpoint is intact: its step, and a digest of its other files."""
    (draft / STATE_FILE).write_text(json.dumps({"step": step, "digest": _digest(draft)}))


def commit_checkpoint(
    layout: RunLayout,
    draft: Path,
    step: int,
    settings: RlSettings,
    evaluation: EvaluationSettings | None,
    session: int,
) -> None:
    """Give a complete checkpoint its name, and delete old ones; EtudeError if another process trains the run now."""
    check_session(layout, session)
    final = layout.trainer / f"{step:06d}"
    commit_directory(draft, final)
    found = dict(checkpoints(layout))
    every = evaluation.every if evaluation else 0
    for old in found.keys() - kept_steps(found.keys(), settings, read_scores(layout), every):
        shutil.rmtree(found[old])


def new_draft(draft: Path) -> None:
    """Make an empty directory."""
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)


def record_step(layout: RunLayout, session: int, step: int, facts: dict[str, Any]) -> None:
    """Write the facts of a step; durably, because the checkpoint that follows it is durable too."""
    check_session(layout, session)
    write_atomically(layout.step_file(step), json.dumps(facts), durable=True)


def remove_later_steps(layout: RunLayout, session: int, step: int) -> None:
    """Remove the facts of steps that will be taken again."""
    check_session(layout, session)
    for path in layout.steps.glob("[0-9]*.json"):
        if int(path.stem) > step:
            path.unlink()


if __name__ == "__main__":
    main()
