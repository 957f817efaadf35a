"""The trainer's loop: what it teaches, and what it leaves behind when it is killed."""

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

from etude.errors import EtudeError, InputError
from etude.model import load
from etude.model.checkpoint import views
from etude.recipe.recipe import load_recipe, render_toml
from etude.rl import loop as loops
from etude.rl.advantages import Estimator
from etude.rl.loop import Diverged, Loop, Stalled, learn, rollout_pieces
from etude.rl.objective import PolicyGradient
from etude.rl.orchestrator import check_ledger, tables
from etude.rl.packing import pack
from etude.rl.settings import plan_of
from etude.rl.trainer_process import checkpoints, opened
from etude.rollouts.queue import Slots
from etude.runs.layout import Place, place_and_section
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude.weights.bucket import Bucket
from etude.weights.publisher import Publisher
from etude.weights.versions import follow


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tasks=8)


def begin(recipe: Path, run: Path, *overrides: str) -> Place:
    """A run directory as the orchestrator would have made it."""
    run.mkdir()
    (run / "recipe.toml").write_text(render_toml(load_recipe(recipe, overrides)))
    place, _, _ = place_and_section(run)
    place.make()
    make_model(place.model)
    return place


def fill(place: Place, groups: int, seed: int = 0, version: int = 0) -> Slots:
    slots = Slots(place.slots, plan_of(place_and_section(place.run)[1]))
    slots.add((f"task-{number}", 1.0) for number in range(groups))
    finish_slots(place, slots, np.random.default_rng(seed), version)
    return slots


def plain_loop(place: Place, estimator: Estimator | None = None, reference: bool = False) -> Loop:
    section = place_and_section(place.run)[1]
    publisher = Publisher(Bucket("memory://loop"))
    trainer = Trainer(tiny_model(), AdamSettings())
    return Loop(
        place,
        section,
        estimator or Estimator(),
        trainer,
        PolicyGradient(),
        Slots(place.slots, plan_of(section)),
        None,
        publisher,
        tiny_model(7).requires_grad_(False) if reference else None,
        0,
        0,
    )


def test_a_run_takes_its_steps_and_publishes_what_it_trained(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run")
    slots = fill(place, 6)
    with opened(place, place_and_section(place.run)[1]) as loop:
        before = {name: tensor.clone() for name, tensor in views(loop.trainer.model).items()}
        learn(loop)
        loop.publisher.flush(30)
        after = {name: tensor.clone() for name, tensor in views(loop.trainer.model).items()}
    assert sorted(step for _, step in slots.trained()) == [1, 1, 2, 2, 3, 3]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    version, published = follow(Bucket(place.store))
    assert version.number == 3
    for name, tensor in published.items():  # what samples is, to the bit, what is trained
        assert torch.equal(tensor.float(), after[name]), name
    facts = [json.loads((place.steps / f"{step:06d}.json").read_text()) for step in (1, 2, 3)]
    assert all(len(fact["groups"]) == 2 and fact["gradient_norm"] >= 0 for fact in facts)


def test_a_killed_trainer_goes_on_with_nothing_lost_and_nothing_twice(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run", "rl.checkpoint_every=2", "rl.steps=4")
    slots = fill(place, 6)  # enough for three steps: it will wait for the fourth
    environment = {**os.environ, "ETUDE_PARENT": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "etude.rl.trainer_process", str(place.run)]
    first = subprocess.Popen(command, env=environment)
    try:
        _until(lambda: (place.steps / "000003.json").exists(), first)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    assert len(slots.trained()) == 6
    assert checkpoints(place)[-1][0] == 2
    newest = follow(Bucket(place.store))[0].number
    slots.add([("task-6", 1.0), ("task-7", 1.0)])
    finish_slots(place, slots, np.random.default_rng(9), version=3)
    second = subprocess.run(command, env=environment, timeout=120, check=False)
    assert second.returncode == 0
    ledger = slots.trained()
    assert len(ledger) == len({task for task, _ in ledger}) == 8
    assert sorted(step for _, step in ledger) == [1, 1, 2, 2, 3, 3, 4, 4]
    # step 3 was taken again from the groups that were there, and versions only grew
    assert follow(Bucket(place.store))[0].number == newest + 3
    assert checkpoints(place)[-1][0] == 4


def _until(there: object, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while not there():  # type: ignore[operator]
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_resuming_from_a_checkpoint_gives_the_same_weights(recipe: Path, tmp_path: Path) -> None:
    whole, parts = (begin(recipe, tmp_path / name) for name in ("whole", "parts"))
    for place in (whole, parts):
        fill(place, 6)
    section = place_and_section(whole.run)[1]
    with opened(whole, section) as loop:
        learn(loop)
    for steps in (1, 3):
        with opened(parts, section.model_copy(update={"steps": steps})) as loop:
            learn(loop)
    first, second = (load(checkpoints(place)[-1][1]) for place in (whole, parts))
    for name, tensor in views(first).items():
        assert torch.equal(tensor, views(second)[name]), name


def test_a_step_waits_for_groups_and_says_for_what_when_none_come(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run", "rl.stall_s=0.3")
    slots = Slots(place.slots, plan_of(place_and_section(place.run)[1]))
    slots.add([("lonely", 1.0)])
    slots.claim("worker-7", time.time())
    with opened(place, place_and_section(place.run)[1]) as loop, pytest.raises(Stalled, match=r"lonely.* at worker-7"):
        learn(loop)


def test_a_step_waits_for_a_slow_group_that_it_would_make_too_old_and_says_so(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run", "rl.stall_s=0.3", "rl.max_staleness=1")
    slots = fill(place, 2)
    section = place_and_section(place.run)[1]
    with opened(place, section.model_copy(update={"steps": 1})) as loop:
        learn(loop)
    slots.serve(0)
    slots.add([("slow", 0.0)])
    for _ in range(section.group_size):
        assert slots.claim("worker", time.time()) is not None
    slots.serve(1)
    slots.add([("quick", 0.0), ("quicker", 0.0)])
    finish_slots(place, slots, np.random.default_rng(1), version=1)
    with opened(place, section) as loop, pytest.raises(Stalled, match=r"groups: slow, or .*rl\.max_staleness; "):
        learn(loop)
    slots.release()  # whoever had it is gone, and another begins anew
    finish_slots(place, slots, np.random.default_rng(0), version=1)
    with opened(place, section.model_copy(update={"steps": 2})) as loop:
        learn(loop)
        assert loop.trainer.step_count == 2


def test_it_ends_early_when_every_prompt_has_had_its_turn(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run", "rl.checkpoint_every=10")
    fill(place, 3)
    (place.root / "exhausted").write_text("")
    with opened(place, place_and_section(place.run)[1]) as loop:
        learn(loop)
        assert loop.trainer.step_count == 1
    assert [step for step, _ in checkpoints(place)] == [1]  # what it has learned is kept


def test_weights_that_are_no_numbers_reach_nobody(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run")
    slots = fill(place, 2, seed=1)
    assert any(len({slot.reward["total"] for slot in group.slots if slot.reward}) > 1 for group in slots.ready(0))
    section = place_and_section(place.run)[1].model_copy(update={"learning_rate": math.inf})
    with opened(place, section) as loop, pytest.raises(Diverged, match=r"step 1: norm of the weights is .*another run"):
        learn(loop)
    assert slots.trained() == []
    assert checkpoints(place) == []
    assert follow(Bucket(place.store))[0].number == 0  # what it began with


def test_a_trainer_that_stalls_says_so_and_is_not_to_be_started_again(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run", "rl.stall_s=0.3")
    environment = {**os.environ, "ETUDE_PARENT": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "etude.rl.trainer_process", str(place.run)]
    done = subprocess.run(command, env=environment, timeout=120, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (4, "etude: the trainer has waited 0 s for groups: no slots\n")


def test_a_run_without_the_table_of_what_it_has_learned_from_does_not_go_on(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run")
    fill(place, 2).close()
    section = place_and_section(place.run)[1].model_copy(update={"steps": 1})
    with opened(place, section) as loop:
        learn(loop)
    with tables(place, section) as (slots, _):
        check_ledger(place, slots)
    for path in place.root.glob("slots.sqlite*"):
        path.unlink()
    with tables(place, section) as (slots, _), pytest.raises(InputError, match=r"knows of 0 steps, .* is of step 1: "):
        check_ledger(place, slots)
    for path in place.root.glob("slots.sqlite*"):
        path.unlink()
    place.slots.write_bytes(b"no table" * 1000)
    with pytest.raises(InputError, match="file is not a database; put them back"), tables(place, section):
        pass


def test_a_checkpoint_that_cannot_be_written_says_where(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run")
    fill(place, 2)
    with opened(place, place_and_section(place.run)[1].model_copy(update={"steps": 1})) as loop:
        shutil.rmtree(place.trainer)
        place.trainer.write_text("in the way")
        loop.record = lambda step, facts: None
        with pytest.raises(EtudeError, match=r"trainer/\.000001\.making: the checkpoint cannot be written: "):
            learn(loop)


def test_groups_of_equal_rewards_teach_nothing(recipe: Path, tmp_path: Path) -> None:
    place = begin(recipe, tmp_path / "run")
    slots = fill(place, 2)
    for group in slots.ready(0):
        equal = [replace(slot, reward={"total": 0.7}) for slot in group.slots]
        assert loops.taught(plain_loop(place), [replace(group, slots=tuple(equal))]) == []


def test_splitting_a_rollout_into_segments_does_not_change_its_gradient(recipe: Path, tmp_path: Path) -> None:
    """Two segments in one chain against the same two as one document each: every made token counts the same."""
    rng = np.random.default_rng(3)
    one, two = random_segment(rng), random_segment(rng, kind="summary")
    loop = plain_loop(begin(recipe, tmp_path / "run"))
    chain = rollout_pieces(loop, random_trace(rng, one, two), 0.5)
    apart = [piece for part in (one, two) for piece in rollout_pieces(loop, random_trace(rng, part), 0.5)]
    found = []
    for pieces, length in ((chain, 1024), (apart, 40)):  # in one row, and in a row each
        (batches,) = pack(pieces, loop.trainer.model.config, length=length, rows=8, padding=0)
        loss = sum(PolicyGradient()(loop.trainer.model, batch).total for batch in batches)
        assert isinstance(loss, torch.Tensor)
        found.append(torch.autograd.grad(loss, list(loop.trainer.model.parameters())))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_compactions_are_not_trained_and_overlong_rollouts_are_unless_masked(recipe: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    place = begin(recipe, tmp_path / "run")
    trace = random_trace(rng, random_segment(rng), random_segment(rng, kind="compaction"), ending="turns")
    assert [piece.segment.kind for piece in rollout_pieces(plain_loop(place), trace, 1.0)] == ["start"]
    assert rollout_pieces(plain_loop(place, Estimator(mask_overlong=True)), trace, 1.0) == []


@pytest.mark.parametrize("form", ["k1", "k3"])
def test_the_divergence_is_from_the_reference_and_counts_for_what_led_to_it(
    form: str, recipe: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    segments = [random_segment(rng, 30), random_segment(rng, 50, kind="summary")]
    place = begin(recipe, tmp_path / "run")
    loop = plain_loop(place, Estimator(kl=form, kl_weight=0.1), reference=True)  # type: ignore[arg-type]
    pieces = rollout_pieces(loop, random_trace(rng, *segments), 0.25)
    assert loop.reference is not None
    estimates = []
    for segment in segments:
        tokens = torch.from_numpy(segment.tokens.astype(np.int64))[None]
        logprobs = loop.reference(tokens)[0, :-1].log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0].detach().numpy()
        made = segment.made[1:]
        log_ratio = segment.raw_logprobs[1:][made] - logprobs[made]
        estimates.append(log_ratio if form == "k1" else np.exp(-log_ratio) - 1 + log_ratio)
    whole = np.concatenate(estimates)
    expected = 0.25 - 0.1 * np.array([whole[index:].sum() for index in range(len(whole))])
    np.testing.assert_allclose(np.concatenate([piece.worths for piece in pieces]), expected, rtol=1e-3, atol=1e-4)
