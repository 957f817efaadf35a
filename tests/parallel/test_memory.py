"""The memory plan and the communication plan of a trainer against what processes hold, allocate and receive."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, open_ranks
from torch import Tensor
from torch_memory import AllocationPeak, held_bytes

from etude.data.packing import Batch
from etude.model import ModelConfig, initialize
from etude.model.adapters import adapters, add_adapters
from etude.model.communication import step_communication
from etude.model.describe import find_config
from etude.model.mtp import initialize_mtp
from etude.model.settings import LoraSettings
from etude.model.trainer_memory import trainer_memory
from etude.model.trainer_parts import TrainerSpec
from etude.parallel.mesh import TrainingMesh, open_mesh
from etude.parallel.settings import ParallelSettings
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings
from etude.train.sharding import shard_model, shard_mtp
from etude.train.trainer import Trainer

CPU = torch.device("cpu")
TOLERANCE = 0.15  # of the peak; what is always held is planned to the byte
SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "vocab_size": 2000,
    "max_position_embeddings": 1024,
    "intermediate_size": 384,
    "num_attention_heads": 4,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 32}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 4}
LATENT = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 48, "kv_lora_rank": 32}
CONFIGS = {
    "llama": SIZES | GROUPED,
    "qwen3_moe": SIZES | GROUPED | EXPERTS | {"num_experts": 16},
    "deepseek_v3": SIZES | LATENT | EXPERTS | {"n_routed_experts": 16, "n_group": 1, "topk_group": 1},
}
PLAIN = TrainerSpec(length=256, rows=2, device="cpu")


def config_of(family: str) -> dict[str, Any]:
    from families import small_config  # it imports transformers, which the ranks do not need

    sizes = dict(CONFIGS[family])
    if family == "deepseek_v3":
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return small_config(family, **sizes)


def parsed(family: str) -> ModelConfig:
    return ModelConfig.from_hugging_face(config_of(family))


def build_trainer(config: ModelConfig, spec: TrainerSpec, mesh: TrainingMesh | None) -> tuple[Trainer, Objective]:
    """Return a trainer as the stages build it: float32 shards on a mesh, else weights of the precision."""
    dtype = getattr(torch, spec.precision)
    model = initialize(config, 0)
    model.recompute = spec.recompute
    if mesh is None or spec.lora or spec.frozen:
        model = model.to(dtype)
    if spec.frozen:
        model.requires_grad_(False)
    if spec.lora is not None:
        add_adapters(model, spec.lora)
        for adapter in adapters(model):
            adapter.float()
    extra, objective = {}, next_token
    if spec.mtp_layers:
        mtp = initialize_mtp(config, spec.mtp_layers, 1, dtype if mesh is None else torch.float32)
        extra, objective = {"mtp": mtp}, with_mtp(mtp, joint=not spec.frozen)
    if mesh is not None:
        shard_model(model, mesh, dtype)
        for module in extra.values():
            shard_mtp(module, mesh, dtype)
    return Trainer(model, AdamSettings(), extra, mesh=mesh), objective


def batches(config: ModelConfig, spec: TrainerSpec) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    tokens = [
        torch.randint(config.vocab_size, (spec.rows, spec.length), generator=generator)
        for _ in range(spec.own_micro_batches)
    ]
    return [Batch(each, each.clone(), ((spec.length,),) * spec.rows, (), each.numel()) for each in tokens]


def measured(hugging_face: dict[str, Any], spec: TrainerSpec) -> dict[str, int]:
    """Return the bytes of weights and optimizer, and the peak of a step after the first."""
    config = ModelConfig.from_hugging_face(hugging_face)
    with open_mesh(spec.parallel, CPU) as mesh, AllocationPeak() as peak:
        trainer, objective = build_trainer(config, spec, mesh)
        steps = batches(config, spec)
        trainer.step(steps, objective)
        optimizer = trainer.optimizer
        moments = [value for state in optimizer.adam.state.values() for value in state.values() if value.dim()]
        found = {
            "weights": held_bytes(p for m in (trainer.model, *trainer.extra_modules.values()) for p in m.parameters()),
            "optimizer": held_bytes([*moments, *(optimizer.masters[name] for name in optimizer.copied)]),
        }
        peak.mark()
        trainer.step(steps, objective)
    return {**found, "total": peak.bytes}


def check(found: dict[str, int], config: ModelConfig, spec: TrainerSpec, tolerance: float = TOLERANCE) -> None:
    plan = trainer_memory(config, spec)
    print(f"{config.family} {spec.precision}: planned {plan.total:,}, measured {found['total']:,} bytes,", end=" ")
    print(f"ratio {plan.total / found['total']:.2f}")
    assert (found["weights"], found["optimizer"]) == (plan.weights, plan.optimizer)
    assert plan.total == pytest.approx(found["total"], rel=tolerance), (plan, found)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with open_ranks(2) as ranks:
        yield ranks


SHARD, EXPERT, CONTEXT = ParallelSettings(dp_shard=2), ParallelSettings(dp_shard=2, ep=2), ParallelSettings(cp=2)
FAST = [
    ("llama", replace(PLAIN, parallel=SHARD)),
    ("qwen3_moe", replace(PLAIN, parallel=EXPERT, recompute=True, micro_batches=4)),
    ("deepseek_v3", replace(PLAIN, parallel=CONTEXT, precision="float32", mtp_layers=1)),
]


@pytest.mark.parametrize(("family", "spec"), FAST, ids=["llama", "qwen3_moe", "deepseek_v3"])
def test_a_rank_holds_what_is_planned(two: Ranks, family: str, spec: TrainerSpec) -> None:
    for found in two.run(measured, config_of(family), spec):
        check(found, parsed(family), spec)


def test_one_process_holds_what_is_planned() -> None:
    for precision in ("float32", "bfloat16"):
        spec = replace(PLAIN, precision=precision)
        check(measured(config_of("llama"), spec), parsed("llama"), spec)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recompute": {"recompute": True, "micro_batches": 4},
    "few tokens": {"length": 16, "rows": 1},
    "mtp": {"mtp_layers": 1},
    "mtp alone": {"mtp_layers": 1, "frozen": True},
    "adapters": {"lora": LoraSettings(rank=4)},
}
MESHES = [SHARD, CONTEXT, ParallelSettings(dp_replicate=2), EXPERT]


@pytest.mark.slow
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_every_option_is_planned(two: Ranks, family: str, option: str, precision: str) -> None:
    spec = replace(PLAIN, precision=precision, **OPTIONS[option])
    for parallel in MESHES if option != "few tokens" else (SHARD, EXPERT):
        if parallel.ep > 1 and family == "llama":
            continue
        case = replace(spec, parallel=parallel)
        for found in two.run(measured, config_of(family), case):
            check(found, parsed(family), case, tolerance=0.25)


WIDE = {
    "smollm2-135m": ({}, replace(PLAIN, precision="float32", parallel=SHARD)),
    # the widths of the real model, with fewer layers, experts and tokens of the vocabulary
    "qwen3-30b-a3b-base": (
        {"num_hidden_layers": 2, "num_experts": 16, "vocab_size": 20_000},
        replace(PLAIN, parallel=EXPERT, recompute=True),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_models_of_real_widths_are_planned(two: Ranks, name: str) -> None:
    changes, spec = WIDE[name]
    config = find_config(name).evolve(**changes)
    for found in two.run(measured, config.source, spec):
        check(found, config, spec)


# ------------------------------------------------------------------------------------------------ communication


def received(hugging_face: dict[str, Any], spec: TrainerSpec) -> dict[str, int]:
    """Return the bytes that FSDP's collectives give this rank from others in a step."""
    config = ModelConfig.from_hugging_face(hugging_face)
    counts = {"weights": 0, "gradients": 0}

    def counting(collective: Any, kind: str) -> Any:
        def call(*arguments: Any, group: dist.ProcessGroup, **options: Any) -> Any:
            whole = max(each.nbytes for each in (*arguments, *options.values()) if isinstance(each, Tensor))
            counts[kind] += whole * (group.size() - 1) // group.size()
            return collective(*arguments, group=group, **options)

        return call

    with open_mesh(spec.parallel, CPU) as mesh, pytest.MonkeyPatch.context() as patch:
        trainer, objective = build_trainer(config, spec, mesh)
        reduce = dist.all_reduce

        def reduced(tensor: Tensor, *rest: Any, **options: Any) -> Any:
            if "op" in options:  # FSDP's; the trainer's own sums are of a few numbers
                size = options["group"].size()
                counts["gradients"] += 2 * tensor.nbytes * (size - 1) // size
            return reduce(tensor, *rest, **options)

        patch.setattr(dist, "all_gather_single", counting(dist.all_gather_single, "weights"))
        patch.setattr(dist, "reduce_scatter_single", counting(dist.reduce_scatter_single, "gradients"))
        patch.setattr(dist, "all_reduce", reduced)
        trainer.step(batches(config, spec), objective)
    return counts


@pytest.mark.parametrize("option", ["recompute", "mtp", "mtp alone", "adapters"])
def test_the_communication_of_fsdp_is_what_its_collectives_move(two: Ranks, option: str) -> None:
    for parallel in (EXPERT, ParallelSettings(dp_replicate=2), CONTEXT):
        spec = replace(PLAIN, length=16, parallel=parallel, **{"micro_batches": 4, **OPTIONS[option]})
        plan = step_communication(parsed("qwen3_moe"), spec)
        for found in two.run(received, config_of("qwen3_moe"), spec):
            assert found == {"weights": plan.weights, "gradients": plan.gradients}, parallel
