"""One process against a mesh: loss and every gradient of a whole model, computed on each rank and compared there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from etude.data.packing import Batch
from etude.kernels.loss import IGNORE
from etude.model.adapters import add_adapters
from etude.model.config import ModelConfig
from etude.model.moe import shard_experts
from etude.model.mtp import initialize_mtp
from etude.model.settings import LoraSettings
from etude.model.transformer import Transformer, initialize
from etude.parallel.mesh import TrainingMesh, open_mesh
from etude.parallel.settings import ParallelSettings
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.train.balance import balance_loss, counted_tokens, expert_loads
from etude.train.objectives import Objective, next_token, with_mtp

PACKED = ((3, 14, 7), (24,), (11, 13), (1, 22, 1))  # documents that cross every chunk of 4 and of 2 ranks
WHOLE = ((24,),) * 4
UNEVEN = ((3, 13, 6), (22,), (9, 13), (1, 20, 1))  # 22 tokens: no mesh divides them


@dataclass(frozen=True)
class Case:
    config: dict[str, Any]  # of Hugging Face
    lengths: tuple[tuple[int, ...], ...] = PACKED
    objective: str = "next_token"  # or policy_gradient, mtp
    replay: bool = False
    recompute: bool = False
    lora: bool = False
    balance: float = 0.0
    idle_targets: bool = False  # the second half of every row has no loss tokens
    seed: int = 0


def parity(settings: ParallelSettings, case: Case) -> dict[str, float]:
    """Return the relative error of the loss, the expert loads and the gradient of every parameter on this rank."""
    with open_mesh(settings, torch.device("cpu")) as mesh:
        assert mesh is not None
        batch = rollout_batch(case)
        one, many = modules(case), modules(case)
        each = len(case.lengths) // settings.data_ranks
        micro_batches = [rows_of(batch, slice(at, at + each)) for at in range(0, len(case.lengths), each)]
        losses, counts = zip(*(backward(one, part, case, batch.loss_tokens) for part in micro_batches), strict=True)
        loss, loads = sum(losses), None if counts[0] is None else sum(counts)
        for module in many.values():
            shard_experts(module, mesh)
        part = micro_batches[mesh.data_rank].for_context(mesh.context)
        own_loss, own_loads = backward(many, part, case, batch.loss_tokens)
        # a mean over tokens; relative to 1, because terms of a policy gradient cancel
        errors = {"loss": float((mesh.sum(own_loss) - loss).abs()) / max(1.0, abs(float(loss)))}
        if loads is not None and own_loads is not None:
            errors["loads"] = relative(mesh.sum(own_loads).double(), loads.double())
        for name, module in one.items():
            errors |= {f"{name}.{key}": value for key, value in gradient_errors(module, many[name], mesh).items()}
        return errors


def modules(case: Case) -> dict[str, nn.Module]:
    config = ModelConfig.from_hugging_face(case.config)
    model = initialize(config, case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    for name, buffer in model.named_buffers():
        if name.endswith("router.bias"):
            buffer += torch.randn(buffer.shape, generator=generator)
    model.recompute, model.keep_scores = case.recompute, case.balance > 0
    if case.lora:
        add_adapters(model, LoraSettings(rank=2, alpha=4))
        for name, parameter in model.named_parameters():
            if name.endswith("adapter.up"):  # zero at first, and so would be the gradient of `down`
                nn.init.normal_(parameter, std=0.2, generator=generator)
    if case.objective == "mtp":
        return {"model": model, "mtp": initialize_mtp(config, 2, case.seed + 1, torch.float32)}
    return {"model": model}


def rollout_batch(case: Case) -> RolloutBatch:
    config = ModelConfig.from_hugging_face(case.config)
    generator = torch.Generator().manual_seed(case.seed)
    shape = len(case.lengths), sum(case.lengths[0])
    tokens = torch.randint(config.vocab_size, shape, generator=generator)
    targets = torch.randint(config.vocab_size, shape, generator=generator)
    targets[torch.rand(shape, generator=generator) < 0.3] = IGNORE
    targets[:, -2:] = IGNORE  # tokens that may be padding
    if case.idle_targets:
        targets[:, shape[1] // 4 :] = IGNORE
    routing = None
    if config.moe is not None and case.replay:
        choices = torch.rand(*shape, len(config.moe.layers), config.moe.experts, generator=generator)
        routing = choices.topk(config.moe.per_token, dim=-1).indices.to(torch.int16)
        routing[torch.rand(shape, generator=generator) < 0.2] = -1
    return RolloutBatch(
        tokens,
        targets,
        case.lengths,
        (),
        int((targets != IGNORE).sum()),
        token_advantages=torch.randn(shape, generator=generator),
        sampler_logprobs=-torch.rand(shape, generator=generator),
        sampler_versions=torch.zeros(shape, dtype=torch.int32),
        temperatures=0.5 + torch.rand(shape, generator=generator),
        routing=routing,
    )


def rows_of(batch: RolloutBatch, rows: slice) -> RolloutBatch:
    values = {name: value[rows] for name, value in batch._token_values().items()}
    return replace(
        batch,
        **values,
        lengths=batch.lengths[rows],
        loss_tokens=int((batch.targets[rows] != IGNORE).sum()),
    )


def backward(found: dict[str, nn.Module], batch: Batch, case: Case, divisor: int) -> tuple[Tensor, Tensor | None]:
    """Run forward and backward; return this process's share of the loss and of the loads of the experts."""
    model = found["model"]
    assert isinstance(model, Transformer)
    objective: Objective = next_token
    if case.objective == "policy_gradient":
        objective = PolicyGradient(max_importance_ratio=2.0)
    elif case.objective == "mtp":
        objective = with_mtp(found["mtp"])  # type: ignore[arg-type]
    sums = objective(model, batch)
    loss, loads = sums.loss / divisor, None
    if sums.routing is not None:
        assert model.config.moe is not None
        counted = counted_tokens(batch)
        loads = expert_loads(sums.routing, counted, model.config.moe.experts)
        if case.balance:
            weight = case.balance * (batch.row_loss_tokens or batch.loss_tokens) / divisor
            loss = loss + weight * balance_loss(sums.routing, counted, loads, batch.context)
    loss.backward()
    return loss.detach(), loads


def gradient_errors(one: nn.Module, many: nn.Module, mesh: TrainingMesh) -> dict[str, float]:
    """Return the relative errors of gradients summed over the ranks that have the same parameter."""
    errors = {}
    same = dict(many.named_parameters())
    for name, parameter in one.named_parameters():
        own, want = same[name], parameter.grad
        if not parameter.requires_grad:
            assert own.grad is None
            continue
        if want is None:
            assert own.grad is None, name
            continue
        assert own.grad is not None, name
        gradient = own.grad
        if hasattr(gradient, "to_local"):  # of experts: scatter it into the whole, which is then summed like all others
            ep, rank = mesh.settings.ep, mesh.expert_rank
            local = gradient.to_local()
            gradient = torch.zeros_like(want)
            gradient.chunk(ep)[rank].copy_(local)
        errors[name] = relative(mesh.sum(gradient), want)
    return errors


def relative(found: Tensor, want: Tensor) -> float:
    return float((found - want).norm() / want.norm().clamp(min=1e-6))
