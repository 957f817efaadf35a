"""Expert parallelism against one process: the exchange of rows, layers without any token, and whole models."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mesh_parity
import pytest
import torch
import torch.distributed as dist
from mesh_parity import PACKED, UNEVEN, WHOLE, Case, parity, relative, rollout_batch
from ranks import Ranks, open_ranks
from torch import Tensor

from etude.errors import InputError
from etude.model.adapters import add_adapters
from etude.model.communication import step_communication
from etude.model.config import ModelConfig
from etude.model.moe import Experts, shard_experts
from etude.model.settings import LoraSettings
from etude.model.trainer_parts import TrainerSpec
from etude.model.transformer import initialize
from etude.parallel.experts import shard_stacks
from etude.parallel.mesh import open_mesh
from etude.parallel.settings import ParallelSettings

CPU = torch.device("cpu")
TOLERANCE = 1e-5
EP2, EP4 = ParallelSettings(dp_shard=4, ep=2), ParallelSettings(dp_shard=4, ep=4)


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with open_ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with open_ranks(2) as ranks:
        yield ranks


def lively(family: str, **changes: Any) -> dict[str, Any]:
    from families import small_config  # it imports transformers, which the ranks do not need

    return small_config(family, initializer_range=0.2, **changes)


def experts_of(config: ModelConfig, seed: int) -> Experts:
    assert config.moe is not None
    experts = Experts(config.hidden_size, config.moe)
    for number, parameter in enumerate(experts.parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(seed + number))
    return experts


def exchange_errors(settings: ParallelSettings, config: dict[str, Any], kind: str) -> dict[str, float]:
    """Compare one layer of experts for given choices: of no rank's tokens, of one expert only, or random ones."""
    parsed = ModelConfig.from_hugging_face(config)
    assert parsed.moe is not None
    k, count = parsed.moe.per_token, parsed.moe.experts
    tokens = [0, 5, 0, 3] if kind != "none" else [0] * 4
    inputs = []
    for rank in range(4):
        generator = torch.Generator().manual_seed(rank)
        choices = torch.rand(tokens[rank], count, generator=generator).topk(k).indices.sort(-1).values
        if kind == "one rank":
            choices = torch.arange(k).expand(tokens[rank], k)
        x = torch.randn(tokens[rank], parsed.hidden_size, generator=generator)
        inputs.append((x, choices, torch.rand(tokens[rank], k, generator=generator)))
    one, many = experts_of(parsed, 5), experts_of(parsed, 5)
    x, choices, weights = (torch.cat(parts) for parts in zip(*inputs, strict=True))
    x.requires_grad_()
    weights.requires_grad_()
    if len(x):  # one process has no products of nothing
        want = one(x, choices, weights)
        (want * torch.linspace(-1, 1, want.numel()).view_as(want)).sum().backward()
    with open_mesh(settings, CPU) as mesh:
        assert mesh is not None
        shard_experts(many, mesh)
        own = slice(sum(tokens[: mesh.rank]), sum(tokens[: mesh.rank + 1]))
        own_x, own_weights = (t.detach()[own].clone().requires_grad_() for t in (x, weights))
        found = many(own_x, choices[own], own_weights)
        upstream = torch.linspace(-1, 1, x.numel()).view_as(x)[own]
        (found * upstream).sum().backward()
        if not len(x):
            assert all(not p.grad.to_local().any() for p in many.parameters())
            return {"out": float(found.numel())}
        assert x.grad is not None
        assert weights.grad is not None
        errors = {
            "out": relative(found, want[own]),
            "x": relative(own_x.grad, x.grad[own]),
            "weights": relative(own_weights.grad, weights.grad[own]),
        }
        return errors | mesh_parity.gradient_errors(one, many, mesh)


@pytest.mark.parametrize("settings", [EP2, EP4], ids=["ep2", "ep4"])
@pytest.mark.parametrize("kind", ["random", "one rank", "none"])
def test_rows_travel_to_their_experts_and_back(four: Ranks, settings: ParallelSettings, kind: str) -> None:
    """Ranks without tokens, and experts that nobody chose, take part."""
    for errors in four.run(exchange_errors, settings, lively("qwen3_moe"), kind):
        assert max(errors.values()) < TOLERANCE, errors


FAST = [
    (EP4, Case({}, replay=True, objective="policy_gradient", recompute=True), "qwen3_moe"),
    (EP2, Case({}, WHOLE, balance=0.3), "deepseek_v3"),
    (ParallelSettings(dp_shard=2, cp=2, ep=4), Case({}, UNEVEN, lora=True, idle_targets=True), "deepseek_v3"),
    (ParallelSettings(dp_replicate=2, cp=2, ep=2), Case({}, PACKED, "mtp"), "qwen3_moe"),
]


def check(ranks: Ranks, settings: ParallelSettings, case: Case) -> None:
    for errors in ranks.run(parity, settings, case):
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < TOLERANCE, (worst, errors[worst], case)


@pytest.mark.parametrize(("settings", "case", "family"), FAST, ids=lambda each: each if isinstance(each, str) else "")
def test_a_model_equals_one_process(four: Ranks, settings: ParallelSettings, case: Case, family: str) -> None:
    """Also with all experts divided (ep = all ranks), where gradients are easily scaled by 1 / ep."""
    check(four, settings, replace(case, config=lively(family)))


def sharded_names(settings: ParallelSettings, config: dict[str, Any]) -> tuple[set[str], int]:
    """Return the parameters that are divided, and how many numbers this rank stores of them."""
    model = initialize(ModelConfig.from_hugging_face(config), 0)
    add_adapters(model, LoraSettings(rank=2))
    with open_mesh(settings, CPU) as mesh:
        assert mesh is not None
        shard_experts(model, mesh)
        divided = {n: p for n, p in model.named_parameters() if hasattr(p, "to_local")}
        trained = {name for name, parameter in divided.items() if parameter.requires_grad}
        assert all("adapter" in name for name in trained)
        return set(divided), sum(p.to_local().untyped_storage().nbytes() // 4 for p in divided.values())


def test_only_experts_and_their_adapters_are_divided_and_the_rest_is_freed(four: Ranks) -> None:
    config = lively("qwen3_moe", num_hidden_layers=1)
    model = add_adapters(initialize(ModelConfig.from_hugging_face(config), 0), LoraSettings(rank=2))
    experts = {name: p.numel() for name, p in model.named_parameters() if ".experts." in name}
    assert len(experts) == 6
    assert four.run(sharded_names, EP4, config) == [(set(experts), sum(experts.values()) // 4)] * 4


def test_experts_that_do_not_divide_are_refused() -> None:
    class Three:
        def size(self) -> int:
            return 3

        def get_local_rank(self) -> int:
            return 0

    experts = experts_of(ModelConfig.from_hugging_face(lively("qwen3_moe")), 0)
    with pytest.raises(InputError, match="ep = 3 must divide the number of experts, 8"):
        shard_stacks(experts, Three())  # type: ignore[arg-type]


def sent(settings: ParallelSettings, config: dict[str, Any], recompute: bool) -> int:
    """Return the bytes of rows that one rank sends to others in a forward and a backward: counted as they leave."""
    count = 0
    exchange = dist.all_to_all_single

    def counting(found: Tensor, rows: Tensor, *splits: list[int], group: dist.ProcessGroup) -> None:
        nonlocal count
        if splits:  # the counts of rows travel without
            to_others = sum(splits[1]) - splits[1][group.rank()]
            count += to_others * rows[:1].nbytes if len(rows) else 0
        exchange(found, rows, *splits, group=group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counting)
        with open_mesh(settings, CPU) as mesh:
            assert mesh is not None
            case = Case(config, lengths=((24,),), recompute=recompute, seed=mesh.rank)
            found = mesh_parity.modules(case)
            shard_experts(found["model"].bfloat16(), mesh)
            mesh_parity.backward(found, rollout_batch(case), case, 1)
    return count


def test_the_communication_volume_is_what_the_collectives_move(four: Ranks) -> None:
    """The formula is for equal loads; with every token at every expert, loads are equal."""
    config = lively("qwen3_moe", num_experts_per_tok=8)
    for recompute in (False, True):
        parsed = ModelConfig.from_hugging_face(config)
        expected = step_communication(parsed, TrainerSpec(24, parallel=EP4, recompute=recompute)).experts
        assert four.run(sent, EP4, config, recompute) == [expected] * 4


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("lengths", [PACKED, WHOLE, UNEVEN], ids=["packed", "whole", "uneven"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_the_product_of_meshes_and_options_equals_one_process(
    two: Ranks, four: Ranks, family: str, lengths: tuple[tuple[int, ...], ...], recompute: bool
) -> None:
    case = Case(lively(family), lengths, recompute=recompute, seed=4)
    options = [
        replace(case, balance=0.3),
        replace(case, objective="mtp"),
        replace(case, lora=True, idle_targets=True),
        replace(case, objective="policy_gradient", replay=True),
    ]
    meshes = [EP2, EP4, *(ParallelSettings(cp=4, ep=ep) for ep in (2, 4))]
    meshes += [ParallelSettings(dp_shard=2, cp=2, ep=4), ParallelSettings(dp_replicate=2, dp_shard=2, ep=2)]
    for option in options:
        check(two, ParallelSettings(dp_shard=2, ep=2), option)
        for settings in meshes:
            check(four, settings, option)
