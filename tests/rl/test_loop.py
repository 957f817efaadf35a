"""The learning loop: what it trains on, and its state after the trainer is killed."""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from engines import engine_of, finish, model_of, plain_routing, prompts_of
from pydantic import ValidationError
from rl_runs import finish_slots, make_model, make_recipe, open_loop, random_segment, random_trace, tiny_model
from run_services import threaded_service

from etude.config import render_toml
from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.harness.trace_store import load_trace, save_trace
from etude.inference.sampling import Sampling
from etude.model import load
from etude.model.checkpoint import checkpoint_views
from etude.model.moe import MoE
from etude.recipe.recipe import load_recipe
from etude.rl.advantages import EstimatorSettings
from etude.rl.learner import Learner, trained_segments, training_sequences
from etude.rl.loop import (
    RlDiverged,
    RlLoop,
    RlStalled,
    learn,
    mismatch_alarms,
    publish,
    trained_rollouts,
)
from etude.rl.objective import PolicyGradient
from etude.rl.orchestrator import check_queues
from etude.rl.packing import pack
from etude.rl.settings import RlSettings, open_rl_run
from etude.rl.trainer_process import checkpoints
from etude.rollouts.live_settings import LiveSettings, recorded_changes
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import RolloutSettings, load_queues
from etude.runs.layout import RunLayout
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed
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


def fill(
    layout: RunLayout, groups: int, seed: int = 0, version: int = 0, *, may_be_alike: bool = False
) -> RolloutQueue:
    queue = RolloutQueue(layout.slots, open_rl_run(layout.run)[1])
    queue.add((f"task-{number}", 1.0) for number in range(groups))
    finish_slots(layout, queue, np.random.default_rng(seed), version, may_be_alike=may_be_alike)
    return queue


def plain_loop(
    layout: RunLayout,
    estimator: EstimatorSettings | None = None,
    reference: bool = False,
    store: str = "memory://loop",
) -> RlLoop:
    settings = open_rl_run(layout.run)[1]
    if estimator is not None:
        settings = settings.model_copy(update={"estimator": estimator})
    publisher = Publisher(ObjectStore(store))
    trainer = Trainer(tiny_model(), AdamSettings())
    learner = Learner(
        settings,
        trainer,
        PolicyGradient(),
        publisher,
        tiny_model(7).requires_grad_(False) if reference else None,
        0,
        lambda name: load_trace(layout.root / name),
    )
    return RlLoop(layout, settings, learner, RolloutQueue(layout.slots, settings), None, 0)


def test_a_run_takes_its_steps_and_publishes_the_trained_weights(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run")
    queue = fill(layout, 6)
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        before = {name: tensor.clone() for name, tensor in checkpoint_views(loop.learner.trainer.model).items()}
        learn(loop)
        loop.learner.publisher.flush(30)
        after = {name: tensor.clone() for name, tensor in checkpoint_views(loop.learner.trainer.model).items()}
    assert sorted(step for _, step in queue.trained()) == [1, 1, 2, 2, 3, 3]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    version, published = follow(ObjectStore(layout.store))
    assert version.number == 3
    for name, tensor in published.items():  # bit for bit
        assert torch.equal(tensor.float(), after[name]), name
    facts = [json.loads((layout.steps / f"{step:06d}.json").read_text()) for step in (1, 2, 3)]
    assert all(len(fact["groups"]) == 2 and fact["gradient_norm"] >= 0 for fact in facts)


def test_a_mismatch_beyond_its_limit_is_an_alarm_that_says_what_to_do(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.steps=2", "rl.max_staleness_mismatch=0.5")
    fill(layout, 4, seed=1)  # random log-probabilities, of version 0
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        learn(loop)
    first, second = (json.loads((layout.steps / f"{step:06d}.json").read_text()) for step in (1, 2))
    named = [{name for name in facts if name.startswith("mismatch")} for facts in (first, second)]
    assert named == [{f"mismatch_{kind}_{form}" for form in ("mean", "p99")} for kind in ("numerics", "staleness")]
    (numerics,), (staleness,) = first["alarms"], second["alarms"]
    assert re.search(r"p99 [\d.]+ nats, limit 0\.2 \(rl\.max_numerics_mismatch\); set rl\.precision", numerics)
    assert re.search(r"limit 0\.5 \(rl\.max_staleness_mismatch\); lower rl\.max_staleness", staleness)
    settings = RlSettings(tasks="./tasks", steps=1, max_numerics_mismatch=0.0)
    assert mismatch_alarms({"mismatch_numerics_p99": 9.0, "mismatch_staleness_p99": 0.9}, settings) == []


def one_step(recipe: Path, run: Path, *overrides: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """Take one policy step on the same groups; return the change of all weights, and the facts of the step."""
    changes = "rl.steps=1", "rl.weights.dtype=float32", "rl.informative_groups=false"
    layout = prepare_run(recipe, run, *changes, *overrides)
    fill(layout, 2, seed=1, may_be_alike=True)
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        before = torch.cat([p.detach().flatten().clone() for p in loop.learner.trainer.model.parameters()])
        learn(loop)
        after = torch.cat([p.detach().flatten() for p in loop.learner.trainer.model.parameters()])
    return after - before, json.loads((layout.steps / "000001.json").read_text())


def test_packing_changes_no_gradient(recipe: Path, tmp_path: Path) -> None:
    short, one = one_step(recipe, tmp_path / "short", "rl.length=1024")  # all sequences in one row
    long, two = one_step(recipe, tmp_path / "long", "rl.length=40", "rl.rows=1")  # each in a row of its own
    assert one["gradient_norm"] == pytest.approx(two["gradient_norm"], rel=1e-4)
    assert torch.nn.functional.cosine_similarity(short, long, dim=0) > 0.999
    _, tenth = one_step(recipe, tmp_path / "tenth", "rl.loss_tokens=10240")
    assert tenth["gradient_norm"] == pytest.approx(one["gradient_norm"] / 10, rel=1e-4)


def test_the_default_epsilon_of_adam_is_small_against_gradients(recipe: Path, tmp_path: Path) -> None:
    default, facts = one_step(recipe, tmp_path / "default")
    vanishing, _ = one_step(recipe, tmp_path / "vanishing", "rl.eps=1e-20")
    large, _ = one_step(recipe, tmp_path / "large", "rl.eps=1e-4")
    assert facts["gradient_norm"] > 0
    assert float(default.norm() / vanishing.norm()) == pytest.approx(1.0, abs=0.05)
    assert float(large.norm() / vanishing.norm()) < 0.9  # the measure sees an epsilon that is too large


def test_the_learning_rate_warms_up_by_default(recipe: Path, tmp_path: Path) -> None:
    warm, _ = one_step(recipe, tmp_path / "warm")
    cold, _ = one_step(recipe, tmp_path / "cold", "rl.warmup=0")
    assert float(warm.norm() / cold.norm()) == pytest.approx(0.5, abs=0.01)
    settings = RlSettings(tasks="./tasks", steps=12)
    assert [settings.model_copy(update={"steps": steps}).warmup_steps for steps in (3, 12, 80, 1000)] == [2, 2, 8, 10]
    with pytest.raises(ValidationError, match=r"warmup = 4 is more than the 3 steps"):
        RlSettings(tasks="./tasks", steps=3, warmup=4)


@pytest.mark.parametrize("around", [0.05, 1.0, 8.0])
def test_samplers_choose_the_trainers_experts_without_replay(around: float, recipe: Path, tmp_path: Path) -> None:
    """Published in bfloat16, the router's correction bias stays float32: no expert choice of a token differs."""
    loop = plain_loop(prepare_run(recipe, tmp_path / "run"), store=f"memory://bias-{around}")
    loop.learner.trainer = Trainer(model_of("deepseek_v3"), AdamSettings(round_to_bfloat16=True))
    generator = torch.Generator().manual_seed(0)
    for block in loop.learner.trainer.model.blocks:
        if isinstance(block.mlp, MoE):
            router = block.mlp.router
            router.bias.copy_(around + 0.1 * torch.rand(router.bias.shape, generator=generator))
    publish(loop)
    loop.learner.publisher.flush(30)
    version, published = follow(ObjectStore(f"memory://bias-{around}"))
    engine = engine_of("deepseek_v3", seed=1)
    engine.load(published, version.number)
    sequences = [engine.submit(prompt, Sampling(max_tokens=40, seed=7))[0] for prompt in prompts_of((50, 60, 70, 80))]
    finish(engine)
    for sequence in sequences:
        routing = sequence.result().routing
        assert routing is not None
        tokens = (sequence.prompt + sequence.output)[:-1]
        np.testing.assert_array_equal(routing, plain_routing(loop.learner.trainer.model, tokens).numpy())
    assert {str(tensor.dtype) for tensor in published.values()} == {"torch.bfloat16", "torch.float32"}


def test_a_killed_trainer_continues_and_trains_every_group_once(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.checkpoint_every=2", "rl.steps=4")
    queue = fill(layout, 6)  # enough for three steps: it will wait for the fourth
    environment = {**os.environ, "ETUDE_PARENT": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "etude.rl.trainer_process", str(layout.run)]
    with threaded_service(layout, load_queues(layout)):
        first = subprocess.Popen(command, env=environment)
        try:
            _until(lambda: (layout.steps / "000003.json").exists(), first)
        finally:
            first.send_signal(signal.SIGKILL)
            first.wait()
    assert len(queue.trained()) == 6
    assert checkpoints(layout)[-1][0] == 2
    newest = queue.newest_version()
    queue.add([("task-6", 1.0), ("task-7", 1.0)])
    finish_slots(layout, queue, np.random.default_rng(9), version=3)
    with threaded_service(layout, load_queues(layout)):
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


def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = prepare_run(recipe, tmp_path / "whole")
    fill(whole, 6).close()
    settings = open_rl_run(whole.run)[1]
    with open_loop(whole, settings) as loop:
        learn(loop)
    intact = {path.relative_to(whole.trainer / "000003") for path in (whole.trainer / "000003").rglob("*.*")}
    assert {
        "training.json",
        "model.safetensors",
        "training/optimizer/shard-00001-model-00001-of-00001.safetensors",
    } <= set(map(str, intact))
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    for number, name in enumerate(sorted(intact)):
        layout = RunLayout(tmp_path / f"damaged-{number}")
        shutil.copytree(whole.run, layout.run)
        file, kind = layout.trainer / "000003" / name, ("cut", "bit", "remove")[number % 3]
        data = bytearray(file.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(7)
        if kind == "remove":
            file.unlink()
        else:
            file.write_bytes(data if kind == "bit" else data[: len(data) // 2])
        with open_loop(layout, settings) as loop:
            said = capsys.readouterr().err
            assert f"{layout.trainer / '000003'}: the checkpoint is damaged" in said, (name, kind)
            assert "kept as damaged-000003, and training goes back to 000002" in said
            assert loop.learner.trainer.step_count == loop.queue.last_step() == 2
            assert len(loop.queue.take(2) or ()) == 2  # those of the lost step
            assert not layout.step_file(3).exists()
            learn(loop)
        first, second = (checkpoint_views(load(checkpoints(each)[-1][1])) for each in (whole, layout))
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items()), (name, kind)
        assert [step for step, _ in checkpoints(layout)] == [2, 3]
    for _, path in checkpoints(whole):
        (path / "config.json").unlink()
    with (
        pytest.raises(InputError, match=r"trainer: every checkpoint is damaged \(000002, 000003: .*; restore one"),
        open_loop(whole, settings),
    ):
        pass
    assert RolloutQueue(whole.slots, settings).last_step() == 3


def test_weights_edited_between_two_members_of_a_group_do_not_become_advantage(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.steps=1", "rl.informative_groups=false")
    settings = open_rl_run(layout.run)[1]
    queue, workers = RolloutQueue(layout.slots, settings), LiveSettings(layout, RolloutSettings)
    queue.add([("a", 1.0), ("b", 1.0)])
    evidence = {"correctness": {"value": 1.0}, "effort_spent": {"value": -0.5}}  # the same in every rollout
    layout.traces.mkdir(parents=True, exist_ok=True)
    rng, totals = np.random.default_rng(0), []
    while (slot := queue.claim("worker", 0.0)) is not None:
        weights = workers.current().rewards  # as a worker scores it
        parts = {name: weights[name] * evidence[name]["value"] for name in weights}
        name = f"traces/{slot.id}.trace"
        save_trace(random_trace(rng), layout.root / name)
        record = {"total": sum(parts.values()), "parts": parts, "evidence": evidence, "hack": ""}
        queue.finish(slot, record, name, (0, 0))
        totals.append(record["total"])
        changed = {"correctness": len(totals) + 0.5, "effort_spent": 0.25}
        write_atomically(layout.live, tomli_w.dumps({"rl": {"rewards": changed}}))
    assert len(set(totals)) == len(totals) == 4
    with open_loop(layout, settings) as loop:
        before = {name: tensor.clone() for name, tensor in checkpoint_views(loop.learner.trainer.model).items()}
        learn(loop)
        for name, tensor in checkpoint_views(loop.learner.trainer.model).items():
            assert torch.equal(tensor, before[name]), name
    rewards = [slot.record for id in (1, 2) for slot in queue.group(id).slots]
    assert [reward["total"] for reward in rewards] == [4.5 - 0.125] * 4  # with the weights in force when it was taken
    assert [reward["parts"] for reward in rewards] == [{"correctness": 4.5, "effort_spent": -0.125}] * 4
    (entry,) = recorded_changes(layout)
    assert (entry["step"], entry["key"], entry["before"]["correctness"]) == (1, "rl.rewards", 1.0)
    assert entry["value"] == {"correctness": 4.5, "effort_spent": 0.25}


def test_a_store_that_is_away_costs_no_step(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.weights.publisher.WAIT_S", 0.02)
    place = tmp_path / "store"
    layout = prepare_run(recipe, tmp_path / "run", "rl.max_staleness=2", f"rl.weights.store={place}")
    layout.id.write_text("this run")
    fill(layout, 6)
    seen: list[int] = []
    with claimed(ObjectStore(place), "this run", inside=False), open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        loop.learner.publisher.flush(60)
        place.rename(tmp_path / "away")

        def report_status(**facts: object) -> None:
            if "the weight store" in str(facts.get("waiting_for")):
                seen.append(loop.learner.trainer.step_count)
                if len(seen) == 3:
                    assert not place.exists(), "something was written where the store is away"
                    (tmp_path / "away").rename(place)

        loop.report_status = report_status
        learn(loop)
        loop.learner.publisher.flush(60)
        assert loop.learner.trainer.step_count == 3
    assert set(seen) == {2}  # it went on up to max_staleness, waited there, and went on
    version, published = follow(ObjectStore(place))
    assert version.number == 3
    last = load(checkpoints(layout)[-1][1])
    assert all(torch.equal(published[name], tensor.bfloat16()) for name, tensor in checkpoint_views(last).items())
    facts = [json.loads(layout.step_file(step).read_text()) for step in (1, 2, 3)]
    assert [len(fact["groups"]) for fact in facts] == [2, 2, 2]
    assert sum(fact["waited_for"].get("store", 0.0) > 0 for fact in facts) == 1


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
        assert loop.learner.trainer.step_count == 2


def test_learning_ends_early_when_the_prompts_are_exhausted(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.checkpoint_every=10")
    fill(layout, 3)
    (layout.root / "exhausted").write_text("")
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        learn(loop)
        assert loop.learner.trainer.step_count == 1
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
    with threaded_service(layout, load_queues(layout)):
        done = subprocess.run(command, env=environment, timeout=120, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (4, "etude: the trainer has waited 0 s for groups: no slots\n")


def test_a_run_whose_queue_is_lost_does_not_continue(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run")
    fill(layout, 2).close()
    settings = open_rl_run(layout.run)[1].model_copy(update={"steps": 1})
    with open_loop(layout, settings) as loop:
        learn(loop)
    check_queues(layout, settings)
    for path in layout.root.glob("slots.sqlite*"):
        path.unlink()
    with pytest.raises(InputError, match=r"records 0 steps, .* is of step 1: "):
        check_queues(layout, settings)
    for path in layout.root.glob("slots.sqlite*"):
        path.unlink()
    layout.slots.write_bytes(b"no table" * 1000)
    with pytest.raises(InputError, match="file is not a database; restore it"):
        check_queues(layout, settings)


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
        assert trained_rollouts(plain_loop(layout), [replace(group, slots=tuple(equal))]) == []


def test_splitting_a_rollout_into_segments_does_not_change_its_gradient(recipe: Path, tmp_path: Path) -> None:
    """Two segments of one rollout have the same gradient as two rollouts of one segment each."""
    rng = np.random.default_rng(3)
    one, two = random_segment(rng), random_segment(rng, kind="summary")
    loop = plain_loop(prepare_run(recipe, tmp_path / "run"))
    chain = training_sequences([one, two], 0.5, loop.settings.estimator)
    apart = [sequence for part in (one, two) for sequence in training_sequences([part], 0.5, loop.settings.estimator)]
    found = []
    for sequences, length in ((chain, 1024), (apart, 40)):  # in one row, and in a row each
        batches = pack(sequences, loop.learner.trainer.model.config, length=length, rows=8, padding=0)
        loss = sum(PolicyGradient()(loop.learner.trainer.model, batch).loss for batch in batches)
        assert isinstance(loss, torch.Tensor)
        found.append(torch.autograd.grad(loss, list(loop.learner.trainer.model.parameters())))
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_compactions_are_not_trained_and_overlong_rollouts_are_unless_masked() -> None:
    rng = np.random.default_rng(4)
    trace = random_trace(rng, random_segment(rng), random_segment(rng, kind="compaction"), ending="turns")
    assert [segment.kind for segment in trained_segments(trace, EstimatorSettings())] == ["start"]
    assert trained_segments(trace, EstimatorSettings(mask_overlong=True)) == []
