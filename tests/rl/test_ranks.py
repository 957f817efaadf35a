"""RL in a trainer of several processes: steps, publications and checkpoints of one process, and the same guarantees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import small_config
from pydantic import ValidationError
from ranks import Ranks, follower_of, open_ranks
from rl_runs import finish_slots, make_recipe, random_trace
from run_services import threaded_service
from safetensors.torch import load_file

from etude.cluster.cluster import ServiceSpec
from etude.cluster.local import LocalCluster
from etude.cluster.supervisor import ServiceSupervisor
from etude.config import render_toml
from etude.harness.trace import NO_VERSION, Segment, Trace
from etude.model import ModelConfig, initialize, load, save
from etude.model.checkpoint import checkpoint_views
from etude.model.mtp import count_mtp_layers, initialize_mtp, write_model_with_mtp
from etude.parallel.mesh import TrainingMesh, open_mesh
from etude.parallel.settings import ParallelSettings
from etude.recipe.recipe import load_recipe
from etude.rl.advantages import EstimatorSettings
from etude.rl.learner import Learner, StepOrder, StepOutcome
from etude.rl.loop import RlLoop, finish_publishing
from etude.rl.objective import PolicyGradient
from etude.rl.settings import RlSettings, open_rl_run
from etude.rl.starting_model import make_starting_model
from etude.rl.trainer_process import checkpoints
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import load_queues
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.runs.service_status import StatusReader
from etude.train.checkpoint_files import write_weights
from etude.train.optim import AdamSettings
from etude.train.sharding import load_sharded
from etude.train.trainer import Trainer
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed
from etude.weights.publisher import Publisher
from etude.weights.settings import WeightSyncSettings
from etude.weights.versions import WHOLE, Part, follow, version_numbers

CPU = torch.device("cpu")
FSDP, CONTEXT = ParallelSettings(dp_shard=2), ParallelSettings(cp=2)
EXPERTS = ParallelSettings(dp_shard=2, ep=2)
# Large eps: without it Adam turns the last bit of a vanishing gradient into a whole step.
ADAM = AdamSettings(learning_rate=1e-2, eps=1e-4)


@dataclass(frozen=True)
class Case:
    """Policy steps of a small model on random rollouts."""

    family: str
    settings: ParallelSettings = field(default_factory=ParallelSettings)
    kl: bool = False
    replay: bool = False
    rollouts: tuple[int, ...] = (6, 5, 1)  # of each step; a rank without any takes part with padding


def random_rollouts(config: ModelConfig, case: Case) -> list[Trace]:
    """Return rollouts of one or two segments of unequal length."""
    rng = np.random.default_rng(1)
    found = []
    for _ in range(sum(case.rollouts)):
        segments = []
        for size in rng.integers(5, 40, rng.integers(1, 3)):
            sampled = rng.random(size) < 0.5
            sampled[0], sampled[-1] = False, True
            logprobs = np.where(sampled, -4 * rng.random(size), 0).astype(np.float32)
            routing = None
            if case.replay and config.moe is not None:
                shape = (size - 1, len(config.moe.layers))
                chosen = rng.random((*shape, config.moe.experts)).argsort(-1)[..., : config.moe.per_token]
                routing = chosen.astype(np.uint8)
            versions = np.where(sampled, rng.integers(2), NO_VERSION).astype(np.int32)
            tokens = rng.integers(3, 60, size).astype(np.uint32)
            segments.append(Segment("start", tokens, sampled, logprobs, logprobs, versions, routing))
        found.append(random_trace(rng, *segments))
    return found


def open_learner(case: Case, place: Path, mesh: TrainingMesh | None, publisher: Publisher) -> Learner:
    def model_at(name: str, frozen: bool = False) -> Any:
        if mesh is None:
            return load(place / name).requires_grad_(not frozen)
        return load_sharded(place / name, mesh, torch.float32, frozen=frozen)

    estimator = EstimatorSettings(replay=case.replay, **({"kl": "k1", "kl_weight": 0.1} if case.kl else {}))
    settings = RlSettings(
        tasks="./tasks",
        steps=3,
        length=64,
        rows=2,
        estimator=estimator,
        weights=WeightSyncSettings(dtype="float32"),
        parallel=case.settings,
    )
    trainer = Trainer(model_at("model"), ADAM, mesh=mesh)
    reference = model_at("reference", frozen=True) if case.kl else None
    traces = random_rollouts(trainer.model.config, case)
    return Learner(settings, trainer, PolicyGradient(), publisher, reference, 0, lambda name: traces[int(name)])


def orders_of(case: Case) -> list[StepOrder]:
    advantages = np.random.default_rng(2).standard_normal(sum(case.rollouts))
    ends = np.cumsum(case.rollouts)
    return [
        StepOrder(1.0, step, [(str(i), float(advantages[i])) for i in range(end - count, end)], 200.0)
        for step, (count, end) in enumerate(zip(case.rollouts, ends, strict=True))
    ]


def take_steps(case: Case, place: Path, store: Path) -> list[StepOutcome]:
    """Take all steps and publish after each: in one process, or as one rank of a job."""
    with ExitStack() as stack:
        mesh = stack.enter_context(open_mesh(case.settings, CPU))
        part = Part(mesh.rank, mesh.size) if mesh else WHOLE
        publisher = stack.enter_context(Publisher(ObjectStore(store), part=part))
        learner = open_learner(case, place, mesh, publisher)
        if mesh is not None and not mesh.leads:
            learner.follow()
            return []
        found = []
        for number, order in enumerate(orders_of(case)):
            found.append(learner.lead("step", order))
            learner.lead("publish", number)
            learner.lead("flush", 60.0)
        learner.dismiss()
        return found


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with open_ranks(2) as ranks:
        yield ranks


def check_equal(case: Case, ranks: Ranks, place: Path) -> None:
    """Steps on the mesh have the results of one process, and publish the same weights."""
    config = ModelConfig.from_hugging_face(small_config(case.family, initializer_range=0.1))
    save(initialize(config, 0), place / "model")
    save(initialize(config, 1), place / "reference")
    one = take_steps(Case(case.family, ParallelSettings(), case.kl, case.replay, case.rollouts), place, place / "one")
    many = ranks.run(take_steps, case, place, place / "many")[0]
    assert len(one) == len(many) == len(case.rollouts)
    for whole, divided in zip(one, many, strict=True):
        assert divided.result.loss_tokens == whole.result.loss_tokens
        assert divided.sequences == whole.sequences
        assert divided.imbalance >= 1
        assert divided.mismatch == pytest.approx(whole.mismatch, rel=1e-4, abs=1e-5)
        assert divided.weight_norm == pytest.approx(whole.weight_norm, rel=1e-5)
        assert divided.result.gradient_norms == pytest.approx(whole.result.gradient_norms, rel=1e-4)
        for name, value in whole.result.metrics.items():
            assert divided.result.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-4), name
    (version, expected), (published, found) = (follow(ObjectStore(place / name)) for name in ("one", "many"))
    assert version.number == published.number == len(case.rollouts) - 1
    assert not published.full
    assert len({shard.name.split("-")[1] for shard in published.shards}) > 1, "one rank wrote everything"
    assert found.keys() == expected.keys() == checkpoint_views(load(place / "model")).keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, atol=1e-5), name


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", FSDP, kl=True),
        Case("qwen3_moe", EXPERTS, replay=True),
        Case("deepseek_v3", CONTEXT, kl=True, replay=True),
    ],
    ids=lambda case: case.family,
)
def test_steps_on_a_mesh_are_those_of_one_process(case: Case, ranks: Ranks, tmp_path: Path) -> None:
    check_equal(case, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "shape",
    [{"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "cp": 2}, {"cp": 4}],
    ids=lambda shape: "-".join(f"{name}{size}" for name, size in shape.items()),
)
def test_steps_on_every_mesh_of_four_are_those_of_one_process(
    shape: dict[str, int], family: str, tmp_path: Path
) -> None:
    experts = 2 if family in ("qwen3_moe", "deepseek_v3") else 1
    settings = ParallelSettings(**shape, ep=experts)
    with open_ranks(4) as four:
        check_equal(Case(family, settings, kl=True, replay=experts > 1), four, tmp_path)


def publish_while_a_rank_is_busy(place: Path) -> tuple[list[int | None], int]:
    """Publish three versions, of which rank 1 can write none before the third; return what waited and was overtaken."""
    released, case = place / "released", Case("llama", FSDP)
    with open_mesh(case.settings, CPU) as mesh:
        assert mesh is not None
        store = ObjectStore(place / "store")
        put = store.put

        def slow(name: str, data: bytes) -> None:
            while mesh.rank and not released.exists():
                time.sleep(0.01)
            put(name, data)

        store.put = slow  # type: ignore[method-assign]
        with Publisher(store, part=Part(mesh.rank, mesh.size)) as publisher:
            learner = open_learner(case, place, mesh, publisher)
            if not mesh.leads:
                learner.follow()
                return [], 0
            waited = []
            for number in range(3):
                learner.lead("publish", number)
                waited.append(learner.pending)
            released.touch()
            nothing: Any = None  # no queue is used
            finish_publishing(RlLoop(RunLayout(place), learner.settings, learner, nothing, nothing, 2))
            learner.dismiss()
            return waited, publisher.history[-1].skipped


def test_weights_wait_until_every_rank_has_written_the_last_ones(ranks: Ranks, tmp_path: Path) -> None:
    save(initialize(ModelConfig.from_hugging_face(small_config("llama")), 0), tmp_path / "model")
    waited, overtaken = ranks.run(publish_while_a_rank_is_busy, tmp_path)[0]
    assert waited == [None, 1, 2]
    assert overtaken == 1
    store = ObjectStore(tmp_path / "store")
    assert version_numbers(store) == [0, 2]
    version, found = follow(store)
    assert version.number == 2
    expected = checkpoint_views(load(tmp_path / "model"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def save_with_carried_layers(place: Path) -> None:
    with open_mesh(EXPERTS, CPU) as mesh:
        assert mesh is not None
        model = load_sharded(place / "model", mesh, torch.float32)
        write_weights(model, None, place / "many", torch.float32, mesh, carried=place / "model")


def test_a_checkpoint_of_a_mesh_has_the_published_layers_that_rl_does_not_train(ranks: Ranks, tmp_path: Path) -> None:
    config = ModelConfig.from_hugging_face(small_config("deepseek_v3", num_nextn_predict_layers=1))
    for name in ("model", "many", "one"):
        (tmp_path / name).mkdir()
    write_model_with_mtp(initialize(config, 0), initialize_mtp(config, 1, 1, torch.float32), tmp_path / "model")
    ranks.run(save_with_carried_layers, tmp_path)
    write_weights(load(tmp_path / "model"), None, tmp_path / "one", torch.float32, None, carried=tmp_path / "model")
    files = {name: sorted((tmp_path / name).glob("*.safetensors")) for name in ("model", "one", "many")}
    assert len(files["many"]) == 3, "the ranks' files, and one of the layers"
    tensors = {name: {k: v for path in found for k, v in load_file(path).items()} for name, found in files.items()}
    assert tensors["many"].keys() == tensors["one"].keys() == tensors["model"].keys()
    for name, tensor in tensors["model"].items():
        assert torch.equal(tensors["many"][name], tensor), name
        assert torch.equal(tensors["one"][name], tensor), name
    assert count_mtp_layers(tmp_path / "many") == 1


def test_one_device_for_several_processes_is_refused() -> None:
    with pytest.raises(ValidationError, match="device = cuda:1 is one device, but parallel has 2 processes"):
        RlSettings(tasks="./tasks", steps=1, device="cuda:1", parallel=FSDP)


# ------------------------------------------------------------------------------------------- whole trainer processes


def prepare_run(recipe: Path, path: Path, *overrides: str) -> RunLayout:
    """Create a run directory with its starting model, as the orchestrator does."""
    resolved = load_recipe(recipe, overrides)
    with Run.create_or_resume(path, resolved) as run:
        write_recipe(path, *overrides, recipe=recipe)
        layout, settings = open_rl_run(path)
        assert settings.model is not None
        make_starting_model(run, settings.model, layout, settings.lora, seed=0)
    return layout


def write_recipe(path: Path, *overrides: str, recipe: Path) -> None:
    (path / "recipe.toml").write_text(render_toml(load_recipe(recipe, overrides)))


def add_groups(layout: RunLayout, start: int, count: int) -> None:
    """Finish `count` groups with random tokens and rewards."""
    queue = RolloutQueue(layout.slots, open_rl_run(layout.run)[1])
    queue.add((f"task-{number}", 1.0) for number in range(start, start + count))
    finish_slots(layout, queue, np.random.default_rng(start))


def start_trainer(layout: RunLayout) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "etude.rl.trainer_process", str(layout.run)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def finish_run(layout: RunLayout) -> None:
    trainer = start_trainer(layout)
    _, problem = trainer.communicate()
    assert trainer.returncode == 0, problem


def supervise_until(supervisor: ServiceSupervisor, done: Callable[[], bool]) -> None:
    while not done():
        supervisor.tick()
        time.sleep(0.05)


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["all weights", "adapters"])
def test_a_trainer_whose_rank_is_killed_continues_in_one_process(lora: bool, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe", tasks=12)
    given = ["rl.eps=1e-3", *(["rl.lora.rank=2", "rl.lora.alpha=4.0"] if lora else [])]
    one = prepare_run(recipe, tmp_path / "one", *given)
    add_groups(one, 0, 2)
    add_groups(one, 2, 4)
    with claimed(ObjectStore(one.store), one.run_id(), inside=True), threaded_service(one, load_queues(one)):
        finish_run(one)
    many = prepare_run(recipe, tmp_path / "many", *given, "rl.parallel.dp_shard=2")
    add_groups(many, 0, 2)
    with claimed(ObjectStore(many.store), many.run_id(), inside=True), threaded_service(many, load_queues(many)):
        deaths: list[str] = []
        statuses = StatusReader(many)
        with ServiceSupervisor(LocalCluster(), many.logs, statuses, lambda _, why: deaths.append(why)) as supervisor:
            supervisor.add(ServiceSpec("trainer", "etude.rl.trainer_process", (str(many.run),), finishes=True, ranks=2))
            supervise_until(supervisor, (many.trainer / "000001").exists)
            assert not deaths
            os.kill(follower_of(os.getpid(), "etude.rl.trainer_process"), signal.SIGKILL)
            supervise_until(supervisor, lambda: bool(deaths))
        assert deaths == ["rank 1 of 2 ended with signal 9"]
        write_recipe(many.run, *given, recipe=recipe)
        add_groups(many, 2, 4)
        finish_run(many)
    facts = [json.loads((many.steps / f"{step:06d}.json").read_text()) for step in (1, 2, 3)]
    assert ["imbalance" in fact for fact in facts] == [True, False, False]
    models = [load(checkpoints(layout)[-1][1]) for layout in (one, many)]
    expected, found = (dict(model.named_parameters()) for model in models)
    for name, parameter in expected.items():
        assert torch.allclose(found[name], parameter, atol=1e-5), name
    published = follow(ObjectStore(many.store))[1]
    assert published.keys() == follow(ObjectStore(one.store))[1].keys()
