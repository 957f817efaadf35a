"""One step, against torch's own optimizer and the plain gradient; accumulation, masters, recomputation, restoring."""

from __future__ import annotations

import math
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES, small_config
from hypothesis import given
from hypothesis import strategies as st
from stores import Memory

from etude.data.mixture import Mixture, MixtureSource
from etude.data.packing import Batch, next_batch
from etude.errors import EtudeError, InputError
from etude.model import ModelConfig, Transformer, initialize
from etude.model.mtp import initialize_mtp
from etude.train.checkpoint_files import TrainingCheckpoints
from etude.train.guard import LossSpikeGuard
from etude.train.objectives import next_token, with_mtp
from etude.train.optim import AdamSettings, LRSchedule, MasterAdamW
from etude.train.trainer import StepResult, Trainer


def fresh(family: str = "qwen3", dtype: torch.dtype = torch.float32) -> Transformer:
    return initialize(ModelConfig.from_hugging_face(small_config(family, initializer_range=0.1)), 0, dtype)


def batches(count: int, rows: int = 4, seed: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    documents = [torch.randint(61, (n,), generator=generator).tolist() for n in (30, 7, 50, 19, 12, 25)]
    mixture = Mixture([MixtureSource("s", Memory(documents), 1.0)], length=16, seed=seed)
    return [next_batch(mixture, rows, padding=0) for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_equal_torch_adamw_on_the_plain_loss(family: str) -> None:
    ours, theirs = fresh(family), fresh(family)
    # A large eps: without it Adam turns the last bit of a vanishing gradient into a whole step.
    settings = AdamSettings(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.7, eps=1e-3)
    trainer = Trainer(ours, settings)
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    plain = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-3)
    for batch in batches(3):
        result = trainer.step([batch], next_token)
        logits = theirs(batch.tokens, documents=batch.documents)
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.7)
        plain.step()
        plain.zero_grad()
        assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert result.gradient_norms["model"] == pytest.approx(norm.item(), rel=1e-4)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_micro_batches_of_unequal_weight_count_token_by_token() -> None:
    one_batch, three_batches = fresh(), fresh()
    (batch,) = batches(1, rows=6)
    parts = [
        Batch(batch.tokens[a:b], batch.targets[a:b], batch.lengths[a:b], (), int((batch.targets[a:b] >= 0).sum()))
        for a, b in ((0, 1), (1, 4), (4, 6))
    ]
    settings = AdamSettings(learning_rate=1e-2)
    one = Trainer(one_batch, settings).step([batch], next_token)
    three = Trainer(three_batches, settings).step(parts, next_token)
    assert one.metrics["loss"] == pytest.approx(three.metrics["loss"], rel=1e-6)
    assert one.gradient_norms["model"] == pytest.approx(three.gradient_norms["model"], rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_activations_changes_no_gradient(family: str) -> None:
    plain, saving = fresh(family), fresh(family)
    saving.recompute = True
    (batch,) = batches(1)
    for model in (plain, saving):
        next_token(model, batch).loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), saving.parameters(), strict=True))  # type: ignore[arg-type]


def test_masters_remember_steps_too_small_for_bfloat16() -> None:
    model = fresh(dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = MasterAdamW({"model": model}, AdamSettings(learning_rate=1e-5, weight_decay=0.0))
    for _ in range(300):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.accumulate_gradients()
        optimizer.step(1.0)
    name = "blocks.0.mlp_norm.weight"  # ones: a single step of 1e-5 vanishes in bfloat16, 300 of them do not
    assert before[name][0] > model.get_parameter(name)[0]
    assert optimizer.masters[f"model.{name}"][0].item() == pytest.approx(1 - 300e-5, abs=1e-5)
    assert torch.equal(model.get_parameter(name), optimizer.masters[f"model.{name}"].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_to_the_bit(dtype: torch.dtype) -> None:
    some = batches(6)
    settings = AdamSettings(learning_rate=1e-2, max_grad_norm_ratio=0.5)  # the limit depends on the steps before
    through = Trainer(fresh(dtype=dtype), settings)
    for batch in some:
        through.step([batch], next_token)
    first = Trainer(fresh(dtype=dtype), settings)
    for batch in some[:3]:
        first.step([batch], next_token)
    second = Trainer(fresh(dtype=dtype), settings)
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict({name: value.clone() for name, value in first.optimizer.state_dict().items()})
    for batch in some[3:]:
        second.step([batch], next_token)
    assert all(torch.equal(a, b) for a, b in zip(through.model.parameters(), second.model.parameters(), strict=True))


def test_the_relative_limit_is_a_multiple_of_the_median_of_recent_norms() -> None:
    model = fresh()
    optimizer = MasterAdamW({"model": model}, AdamSettings(max_grad_norm=0.0, max_grad_norm_ratio=1.5))
    scales = [1.0, 2.0, 0.0, 4.0, 3.0, 9.0, 3.5, 0.0, 20.0]
    size = sum(p.numel() for p in model.parameters()) ** 0.5
    clipped, limits, seen = [], [], []
    for scale in scales:
        for p in model.parameters():
            p.grad = torch.full_like(p, scale)
        known = [norm for norm in seen if norm]
        expected = 1.5 * statistics.median(known) if len(known) >= 4 else math.inf
        norm = optimizer.step(1.0)["model"].item()
        limits.append(optimizer.limits["model"] == pytest.approx(expected, rel=1e-5))
        clipped.append(norm > optimizer.limits["model"])
        seen.append(scale * size)
        assert norm == pytest.approx(seen[-1], rel=1e-5)
    assert all(limits)
    # After 1, 2, 4, 3 the median is 2.5; steps without a gradient do not count.
    assert clipped == [False] * 5 + [True, False, False, True]


def test_training_mtp_jointly_does_not_change_the_main_model() -> None:
    config = fresh().config
    alone = Trainer(fresh(), AdamSettings(learning_rate=1e-2, max_grad_norm=0.5))
    mtp = initialize_mtp(config, 2, 1, torch.float32)
    along = Trainer(fresh(), AdamSettings(learning_rate=1e-2, max_grad_norm=0.5), {"mtp": mtp})
    before = [p.detach().clone() for p in mtp.parameters()]
    for batch in batches(3):
        alone.step([batch], next_token)
        result = along.step([batch], with_mtp(mtp))
    assert all(torch.equal(a, b) for a, b in zip(alone.model.parameters(), along.model.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, mtp.parameters(), strict=True))
    assert {"loss", "mtp_1_kl", "mtp_2_overlap", "mtp_1_agreement"} <= result.metrics.keys()


@pytest.mark.parametrize("distance", ["kl", "tv"])
def test_distillation_alone_brings_the_draft_nearer(distance: str) -> None:
    model = fresh()
    model.requires_grad_(False)
    mtp = initialize_mtp(model.config, 1, 1, torch.float32)
    trainer = Trainer(model, AdamSettings(learning_rate=3e-3), {"mtp": mtp})
    (batch,) = batches(1)
    overlaps = [
        trainer.step([batch], with_mtp(mtp, distance=distance, joint=False)).metrics["mtp_1_overlap"] for _ in range(40)
    ]
    assert overlaps[-1] > overlaps[0] + 0.1


@given(steps=st.integers(1, 500), warmup=st.floats(0, 1), decay=st.sampled_from(["cosine", "linear", "constant"]))
def test_the_schedule_goes_up_then_down_to_its_end(steps: int, warmup: float, decay: str) -> None:
    schedule = LRSchedule(steps, round(warmup * steps), decay, final_fraction=0.1)  # type: ignore[arg-type]
    factors = [schedule.factor(step) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    up, down = factors[: schedule.warmup], factors[schedule.warmup :]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    if down:
        assert down[-1] == pytest.approx(1.0 if decay == "constant" else 0.1)


def result_of(loss: float, norm: float = 1.0) -> StepResult:
    return StepResult({"loss": loss}, {"model": norm}, False, 10, 10, 1.0)


def test_a_bad_step_stops_and_keeps_its_batch(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    some = batches(1)
    guard = LossSpikeGuard(threshold=2.0, directory=tmp_path)
    for step in range(30):
        guard.check(step, result_of(3.0 + 0.1 * (step % 3)), some)
    with pytest.raises(EtudeError, match="nats above the recent median"):
        guard.check(31, result_of(5.3), some)
    with pytest.raises(EtudeError, match="loss nan"):
        guard.check(32, result_of(math.nan), some)
    with pytest.raises(EtudeError, match=r"gradient norms \{'model': inf"):
        guard.check(33, result_of(3.0, math.inf), some)
    kept = load_file(tmp_path / "step-31/batch.safetensors")
    assert torch.equal(kept["0.tokens"], some[0].tokens)
    assert "document" in (tmp_path / "step-31/batch.json").read_text()


def test_nothing_to_train_is_an_error() -> None:
    model = fresh()
    model.requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train"):
        Trainer(model, AdamSettings())


def test_a_checkpoint_that_was_begun_is_completed_when_training_is_interrupted(tmp_path: Path) -> None:
    model = fresh()
    trainer, interrupted, done = Trainer(model, AdamSettings()), threading.Event(), list[str]()

    @contextmanager
    def opened() -> Iterator[Path]:
        (tmp_path / "making").mkdir()
        yield tmp_path / "making"
        (tmp_path / "making").rename(tmp_path / "whole")

    def finish(directory: Path) -> None:
        interrupted.wait()  # so that the interruption comes first
        (directory / "last").touch()

    def train() -> None:
        with TrainingCheckpoints() as writer:
            writer.write(opened(), lambda _: None, trainer.optimizer, finish, lambda: done.append("then"))
            threading.Timer(0.2, interrupted.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert (tmp_path / "whole" / "last").is_file()
    assert done == ["then"]
