"""The learning loop: what it trains on, and its state after the trainer is killed."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rl_runs import finish_slots, make_model, make_recipe, random_segment, random_trace, tiny_model

from etude.config import render_toml
from etude.errors import EtudeError, InputError
from etude.model import load
from etude.model.checkpoint import checkpoint_views
from etude.recipe.recipe import load_recipe
from etude.rl.advantages import EstimatorSettings
from etude.rl.loop import RlDiverged, RlLoop, RlStalled, build_training_sequences, learn, rollout_sequences
from etude.rl.objective import PolicyGradient
from etude.rl.orchestrator import check_queue_matches_checkpoint, open_queues
from etude.rl.packing import pack
from etude.rl.settings import open_rl_run
from etude.rl.trainer_process import checkpoints, open_loop
from etude.rollouts.queue import RolloutQueue
from etude.runs.layout import RunLayout
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore
from etude.weights.publisher import Publisher
from etude.weights.versions import follow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tasks=8)


def prepare_run(recipe: Path, run: Path, *overrides: str) -> RunLayout:
    """Create a run directory as the orchestrator does."""
    run.mkdir()
    (run / "recipe.toml").write_text(render_toml(load_recipe(recipe, overrides)))
    layout, _ = open_rl_run(run)
    layout.make()
    make_model(layout.model)
    return layout


def fill(layout: RunLayout, groups: int, seed: int = 0, version: int = 0) -> RolloutQueue:
    queue = RolloutQueue(layout.slots, open_rl_run(layout.run)[1])
    queue.add((f"task-{number}", 1.0) for number in range(groups))
    finish_slots(layout, queue, np.random.default_rng(seed), version)
    return queue


def plain_loop(layout: RunLayout, estimator: EstimatorSettings | None = None, reference: bool = False) -> RlLoop:
    settings = open_rl_run(layout.run)[1]
    if estimator is not None:
        settings = settings.model_copy(update={"estimator": estimator})
    publisher = Publisher(ObjectStore("memory://loop"))
    trainer = Trainer(tiny_model(), AdamSettings())
    return RlLoop(
        layout,
        settings,
        trainer,
        PolicyGradient(),
        RolloutQueue(layout.slots, settings),
        None,
        publisher,
        tiny_model(7).requires_grad_(False) if reference else None,
        0,
        0,
    )


def test_a_run_takes_its_steps_and_publishes_the_trained_weights(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run")
    queue = fill(layout, 6)
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        before = {name: tensor.clone() for name, tensor in checkpoint_views(loop.trainer.model).items()}
        learn(loop)
        loop.publisher.flush(30)
        after = {name: tensor.clone() for name, tensor in checkpoint_views(loop.trainer.model).items()}
    assert sorted(step for _, step in queue.trained()) == [1, 1, 2, 2, 3, 3]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    version, published = follow(ObjectStore(layout.store))
    assert version.number == 3
    for name, tensor in published.items():  # bit for bit
        assert torch.equal(tensor.float(), after[name]), name
    facts = [json.loads((layout.steps / f"{step:06d}.json").read_text()) for step in (1, 2, 3)]
    assert all(len(fact["groups"]) == 2 and fact["gradient_norm"] >= 0 for fact in facts)


def test_a_killed_trainer_continues_and_trains_every_group_once(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.checkpoint_every=2", "rl.steps=4")
    queue = fill(layout, 6)  # enough for three steps: it will wait for the fourth
    environment = {**os.environ, "ETUDE_PARENT": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "etude.rl.trainer_process", str(layout.run)]
    first = subprocess.Popen(command, env=environment)
    try:
        _until(lambda: (layout.steps / "000003.json").exists(), first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert len(queue.trained()) == 6
    assert checkpoints(layout)[-1][0] == 2
    newest = follow(ObjectStore(layout.store))[0].number
    queue.add([("task-6", 1.0), ("task-7", 1.0)])
    finish_slots(layout, queue, np.random.default_rng(9), version=3)
    second = subprocess.run(command, env=environment, timeout=120, check=False)
    assert second.returncode == 0
    trained = queue.trained()
    assert len(trained) == len({task for task, _ in trained}) == 8
    assert sorted(step for _, step in trained) == [1, 1, 2, 2, 3, 3, 4, 4]
    # step 3 was taken again with the same groups, and version numbers only grow
    assert follow(ObjectStore(layout.store))[0].number == newest + 3
    assert checkpoints(layout)[-1][0] == 4


def _until(condition: object, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not condition():  # type: ignore[operator]
        assert process.poll() is None, "the trainer ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_resuming_from_a_checkpoint_gives_the_same_weights(recipe: Path, tmp_path: Path) -> None:
    whole, parts = (prepare_run(recipe, tmp_path / name) for name in ("whole", "parts"))
    for layout in (whole, parts):
        fill(layout, 6)
    settings = open_rl_run(whole.run)[1]
    with open_loop(whole, settings) as loop:
        learn(loop)
    for steps in (1, 3):
        with open_loop(parts, settings.model_copy(update={"steps": steps})) as loop:
            learn(loop)
    first, second = (load(checkpoints(layout)[-1][1]) for layout in (whole, parts))
    for name, tensor in checkpoint_views(first).items():
        assert torch.equal(tensor, checkpoint_views(second)[name]), name


def test_a_stalled_step_says_what_it_waited_for(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.stall_s=0.3")
    queue = RolloutQueue(layout.slots, open_rl_run(layout.run)[1])
    queue.add([("lonely", 1.0)])
    queue.claim("worker-7", time.time())
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop, pytest.raises(RlStalled, match=r"lonely.* at worker-7"):
        learn(loop)


def test_a_step_waits_for_a_slow_group_that_would_become_stale(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.stall_s=0.3", "rl.max_staleness=1")
    queue = fill(layout, 2)
    settings = open_rl_run(layout.run)[1]
    with open_loop(layout, settings.model_copy(update={"steps": 1})) as loop:
        learn(loop)
    queue.set_served_step(0)
    queue.add([("slow", 0.0)])
    for _ in range(settings.group_size):
        assert queue.claim("worker", time.time()) is not None
    queue.set_served_step(1)
    queue.add([("quick", 0.0), ("quicker", 0.0)])
    finish_slots(layout, queue, np.random.default_rng(1), version=1)
    with (
        open_loop(layout, settings) as loop,
        pytest.raises(RlStalled, match=r"groups: slow, which would .*rl\.max_staleness; "),
    ):
        learn(loop)
    queue.release()  # its worker died; another starts it again
    finish_slots(layout, queue, np.random.default_rng(0), version=1)
    with open_loop(layout, settings.model_copy(update={"steps": 2})) as loop:
        learn(loop)
        assert loop.trainer.step_count == 2


def test_learning_ends_early_when_the_prompts_are_exhausted(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.checkpoint_every=10")
    fill(layout, 3)
    (layout.root / "exhausted").write_text("")
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        learn(loop)
        assert loop.trainer.step_count == 1
    assert [step for step, _ in checkpoints(layout)] == [1]  # the last step is saved


def test_weights_that_are_not_finite_are_not_published(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run")
    queue = fill(layout, 2, seed=1)
    assert any(len({slot.reward["total"] for slot in group.slots if slot.reward}) > 1 for group in queue.ready(0))
    settings = open_rl_run(layout.run)[1].model_copy(update={"learning_rate": math.inf})
    with (
        open_loop(layout, settings) as loop,
        pytest.raises(RlDiverged, match=r"step 1: norm of the weights is .*another run"),
    ):
        learn(loop)
    assert queue.trained() == []
    assert checkpoints(layout) == []
    assert follow(ObjectStore(layout.store))[0].number == 0  # the initial weights


def test_a_stalled_trainer_exits_with_the_final_exit_code(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.stall_s=0.3")
    environment = {**os.environ, "ETUDE_PARENT": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "etude.rl.trainer_process", str(layout.run)]
    done = subprocess.run(command, env=environment, timeout=120, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (4, "etude: the trainer has waited 0 s for groups: no slots\n")


def test_a_run_whose_queue_is_lost_does_not_continue(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run")
    fill(layout, 2).close()
    settings = open_rl_run(layout.run)[1].model_copy(update={"steps": 1})
    with open_loop(layout, settings) as loop:
        learn(loop)
    with open_queues(layout, settings) as (queue, _):
        check_queue_matches_checkpoint(layout, queue)
    for path in layout.root.glob("slots.sqlite*"):
        path.unlink()
    lost = pytest.raises(InputError, match=r"records 0 steps, .* is of step 1: ")
    with open_queues(layout, settings) as (queue, _), lost:
        check_queue_matches_checkpoint(layout, queue)
    for path in layout.root.glob("slots.sqlite*"):
        path.unlink()
    layout.slots.write_bytes(b"no table" * 1000)
    with pytest.raises(InputError, match="file is not a database; restore them"), open_queues(layout, settings):
        pass


def test_a_checkpoint_that_cannot_be_written_says_where(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run")
    fill(layout, 2)
    with open_loop(layout, open_rl_run(layout.run)[1].model_copy(update={"steps": 1})) as loop:
        shutil.rmtree(layout.trainer)
        layout.trainer.write_text("in the way")
        loop.record_step = lambda step, facts: None
        with pytest.raises(EtudeError, match=r"trainer/\.000001\.making: the checkpoint cannot be written: "):
            learn(loop)


def test_groups_of_equal_rewards_have_no_training_sequences(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run")
    queue = fill(layout, 2)
    for group in queue.ready(0):
        equal = [replace(slot, reward={"total": 0.7}) for slot in group.slots]
        assert build_training_sequences(plain_loop(layout), [replace(group, slots=tuple(equal))]) == []


def test_splitting_a_rollout_into_segments_does_not_change_its_gradient(recipe: Path, tmp_path: Path) -> None:
    """Two segments of one rollout have the same gradient as two rollouts of one segment each."""
    rng = np.random.default_rng(3)
    one, two = random_segment(rng), random_segment(rng, kind="summary")
    loop = plain_loop(prepare_run(recipe, tmp_path / "run"))
    chain = rollout_sequences(loop, random_trace(rng, one, two), 0.5)
    apart = [sequence for part in (one, two) for sequence in rollout_sequences(loop, random_trace(rng, part), 0.5)]
    found = []
    for sequences, length in ((chain, 1024), (apart, 40)):  # in one row, and in a row each
        (batches,) = pack(sequences, loop.trainer.model.config, length=length, rows=8, padding=0)
        loss = sum(PolicyGradient()(loop.trainer.model, batch).loss for batch in batches)
        assert isinstance(loss, torch.Tensor)
        found.append(torch.autograd.grad(loss, list(loop.trainer.model.parameters())))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_compactions_are_not_trained_and_overlong_rollouts_are_unless_masked(recipe: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    layout = prepare_run(recipe, tmp_path / "run")
    trace = random_trace(rng, random_segment(rng), random_segment(rng, kind="compaction"), ending="turns")
    assert [sequence.segment.kind for sequence in rollout_sequences(plain_loop(layout), trace, 1.0)] == ["start"]
    assert rollout_sequences(plain_loop(layout, EstimatorSettings(mask_overlong=True)), trace, 1.0) == []


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_the_kl_penalty_is_that_of_a_token_and_all_later_ones(form: str, recipe: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    segments = [random_segment(rng, 30), random_segment(rng, 50, kind="summary")]
    layout = prepare_run(recipe, tmp_path / "run")
    loop = plain_loop(layout, EstimatorSettings(kl=form, kl_weight=0.1), reference=True)  # type: ignore[arg-type]
    sequences = rollout_sequences(loop, random_trace(rng, *segments), 0.25)
    assert loop.reference is not None
    estimates = []
    for segment in segments:
        tokens = torch.from_numpy(segment.tokens.astype(np.int64))[None]
        logprobs = loop.reference(tokens)[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].detach().numpy()
        sampled = segment.sampled[1:]
        log_ratio = segment.raw_logprobs[1:][sampled] - logprobs[sampled]
        estimates.append(log_ratio if form == "k1" else np.exp(-log_ratio) - 1 + log_ratio)
    whole = np.concatenate(estimates)
    expected = 0.25 - 0.1 * np.array([whole[index:].sum() for index in range(len(whole))])
    found = np.concatenate([sequence.token_advantages for sequence in sequences])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)
