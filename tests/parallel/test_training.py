"""A model on a mesh makes the same steps as one process: losses, gradients, weights; and its parts make the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from families import small_config
from ranks import Ranks, open_ranks
from stores import Memory
from torch import Tensor

from etude.data.mixture import Mixture, MixtureSource
from etude.data.packing import Batch, next_batch
from etude.model import ModelConfig, Transformer, initialize
from etude.model.checkpoint import checkpoint_views
from etude.model.layout import checkpoint_pieces
from etude.model.mtp import initialize_mtp
from etude.parallel.mesh import open_mesh
from etude.parallel.settings import ParallelSettings
from etude.train.objectives import next_token, with_mtp
from etude.train.optim import AdamSettings
from etude.train.settings import BalanceSettings
from etude.train.sharding import collect_tensors, read_parts, shard_model, shard_mtp
from etude.train.trainer import Trainer

CPU = torch.device("cpu")
# Large eps: without it Adam turns the last bit of a vanishing gradient into a whole step.
ADAM = AdamSettings(learning_rate=1e-2, max_grad_norm=0.5, eps=1e-3)


@dataclass(frozen=True)
class Case:
    """One training run of a few steps: it says what one process and what the ranks of a mesh compute."""

    family: str
    settings: ParallelSettings
    mtp: bool = False
    recompute: bool = False
    dtype: str = "float32"
    steps: int = 3
    packed: bool = True
    balance: float = 0.0


def fresh(case: Case) -> Transformer:
    config = ModelConfig.from_hugging_face(small_config(case.family, initializer_range=0.1))
    model = initialize(config, 0)
    model.recompute = case.recompute
    return model


def step_batches(case: Case) -> list[list[Batch]]:
    """Return the micro-batches of each step, twice as many as ranks that divide them."""
    generator = torch.Generator().manual_seed(3)
    sizes = (30, 7, 50, 19, 12, 25) if case.packed else (17,) * 12
    documents = [torch.randint(61, (n,), generator=generator).tolist() for n in sizes]
    mixture = Mixture([MixtureSource("s", Memory(documents), 1.0)], length=16, seed=0)
    return [[next_batch(mixture, 2, padding=0) for _ in range(4)] for _ in range(case.steps)]


def train_case(case: Case, mesh: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metrics and norms of every step, and the checkpoint's tensors that this process has at the end."""
    model, dtype = fresh(case), getattr(torch, case.dtype)
    extra, objective = {}, next_token
    if case.mtp:
        mtp = initialize_mtp(model.config, 2, 1, torch.float32)
        extra, objective = {"mtp": mtp}, with_mtp(mtp)
    if mesh is not None:
        shard_model(model, mesh, dtype)
        for layers in extra.values():
            shard_mtp(layers, mesh, dtype)
    elif case.dtype != "float32":
        model = model.to(dtype)
    trainer = Trainer(model, ADAM, extra, balance=BalanceSettings(loss_weight=case.balance), mesh=mesh)
    records: dict[str, Any] = {}
    for step, batches in enumerate(step_batches(case)):
        own = batches if mesh is None else batches[mesh.data_rank :: case.settings.data_ranks]
        result = trainer.step(own, objective)
        records |= {f"{step}/{name}": value for name, value in {**result.metrics, **result.gradient_norms}.items()}
        records[f"{step}/counts"] = (result.loss_tokens, result.tokens)
    if mesh is None:
        return records, {name: view.detach() for name, view in checkpoint_views(model).items()}
    pieces = checkpoint_pieces(model.config)
    return records, {name: part.clone() for name, part in collect_tensors(model, mesh, pieces, torch.float32)}


def train_on_mesh(case: Case) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with open_mesh(case.settings, CPU) as mesh:
        return train_case(case, mesh)


def assert_same_training(ranks: Ranks, case: Case) -> None:
    want_records, want = train_case(case, None)
    found = ranks.run(train_on_mesh, case)
    tensors: dict[str, Tensor] = {}
    for records, own in found:
        assert records.keys() == want_records.keys()
        for name, value in records.items():
            assert value == pytest.approx(want_records[name], rel=2e-5, abs=1e-6), name
        assert not tensors.keys() & own.keys()  # each tensor is collected by one rank
        tensors |= own
    assert tensors.keys() == want.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with open_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with open_ranks(4) as ranks:
        yield ranks


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_sharded_training_equals_one_process(two: Ranks, family: str) -> None:
    assert_same_training(two, Case(family, ParallelSettings(dp_shard=2), recompute=family == "llama"))


def test_mtp_layers_follow_the_mesh(two: Ranks) -> None:
    assert_same_training(two, Case("qwen3", ParallelSettings(dp_shard=2), mtp=True))


def test_experts_and_tokens_are_divided_independently(four: Ranks) -> None:
    assert_same_training(four, Case("deepseek_v3", ParallelSettings(dp_shard=2, cp=2, ep=2), mtp=True))


FAMILIES = ["llama", "qwen2", "qwen3_moe", "deepseek_v3"]
SHAPES = [
    {"dp_shard": 4},
    {"dp_replicate": 4},
    {"dp_replicate": 2, "dp_shard": 2},
    {"cp": 4},
    {"dp_shard": 2, "cp": 2},
    {"dp_replicate": 2, "cp": 2},
]
EXPERT_SHAPES = [
    {"dp_shard": 4, "ep": 2},
    {"dp_shard": 4, "ep": 4},
    {"cp": 4, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 4},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_replicate": 2, "cp": 2, "ep": 2},
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", [*SHAPES, *EXPERT_SHAPES], ids=str)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "whole"])
def test_every_mesh_equals_one_process(four: Ranks, family: str, shape: dict[str, int], packed: bool) -> None:
    if shape in EXPERT_SHAPES and family not in ("qwen3_moe", "deepseek_v3"):
        pytest.skip("a dense model")
    settings = ParallelSettings(**shape)
    balance = 0.1 if family == "qwen3_moe" else 0.0
    assert_same_training(four, Case(family, settings, mtp=True, recompute=packed, balance=balance, packed=packed))


def parts_of(case: Case, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Read a checkpoint's tensors into a model without weights, and collect them again."""
    with open_mesh(case.settings, CPU) as mesh:
        assert mesh is not None
        config = ModelConfig.from_hugging_face(small_config(case.family))
        with torch.device("meta"):
            model = Transformer(config)
        shard_model(model, mesh, torch.float32)
        model.to_empty(device="cpu")
        pieces = checkpoint_pieces(config)
        read_parts(model, pieces, lambda name, index: tensors[name][index])
        return {name: part.clone() for name, part in collect_tensors(model, mesh, pieces, torch.float32)}


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3"])
def test_parts_that_are_read_make_the_whole_again(two: Ranks, family: str) -> None:
    case = Case(family, ParallelSettings(dp_shard=2, ep=1 if family == "qwen3" else 2))
    want = {name: view.detach() for name, view in checkpoint_views(fresh(case)).items()}
    found = two.run(parts_of, case, want)
    tensors = {name: part for each in found for name, part in each.items()}
    assert tensors.keys() == want.keys()
    assert all(torch.equal(tensors[name], want[name]) for name in want)
    sizes = [sum(part.numel() for part in each.values()) for each in found]
    assert max(sizes) < 0.75 * sum(sizes)  # both have a share
