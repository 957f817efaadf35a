"""Balance the load of experts, so that the router does not come to use a few of them only.

Two mechanisms. A router with a correction bias (deepseek_v3) adds `rate` to the bias of every expert whose load in a
step was below the mean and subtracts it above (DeepSeek-V3, section 2.1.2): no gradient is involved. For any router an
auxiliary loss, experts x sum of load share x mean gate score (Switch Transformer, equation 4), pushes the scores of
overloaded experts down; it is 1 for equal loads. Tokens after the last loss token of a row, which may be padding, do
not count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.data.packing import Batch, until_last_target
from etude.errors import InputError
from etude.model.config import ModelConfig
from etude.model.moe import MoE, Routing
from etude.model.transformer import Block, Transformer
from etude.parallel.context import ContextGroup
from etude.train.settings import BalanceSettings


def check_balance(settings: BalanceSettings, config: ModelConfig, stage: str) -> None:
    """Refuse keys that would have no effect on this model."""
    if stage == "mtp" and (settings.bias_rate or settings.loss_weight):
        raise InputError("mtp.balance would not be used: the main model is frozen in this stage")
    if settings.bias_rate and (config.moe is None or config.moe.scoring != "sigmoid"):
        raise InputError(
            f"{stage}.balance.bias_rate would not be used: the model has no routers with a correction bias"
        )
    if settings.loss_weight and config.moe is None:
        raise InputError(f"{stage}.balance.loss_weight would not be used: the model has no experts")


def counted_tokens(batch: Batch) -> Tensor:
    """Return which tokens count as load [rows, length]: those up to the last loss token of their row."""
    return until_last_target(batch.targets) if batch.counted is None else batch.counted


def expert_loads(routing: Routing, counted: Tensor, experts: int) -> Tensor:
    """Return how many tokens each expert of each layer got, [moe layers, experts]; integers, so the sum is exact."""
    assert routing.chosen is not None
    layers, k = routing.chosen.shape[2:]
    chosen = routing.chosen.long().permute(2, 0, 1, 3).reshape(layers, -1)
    weights = counted.long()[..., None].expand(*counted.shape, k).reshape(1, -1).expand_as(chosen)
    return torch.zeros(layers, experts, dtype=torch.int64, device=chosen.device).scatter_add_(1, chosen, weights)


def balance_loss(routing: Routing, counted: Tensor, loads: Tensor, context: ContextGroup | None = None) -> Tensor:
    """Return the auxiliary loss, averaged over layers: 1 for equal loads or equal scores, up to `experts`.

    With a `context`, that is the sum over its ranks, each with its own tokens, and each returns its share of it.
    """
    assert routing.scores is not None
    counts = counted.sum()
    if context is not None:
        loads, counts = context.sum(loads), context.sum(counts)
    scores = routing.scores / (routing.scores.sum(dim=-1, keepdim=True) + 1e-20)
    mask = counted[..., None, None].to(scores.dtype)
    means = (scores * mask).sum(dim=(0, 1)) / counts.clamp(min=1)  # [moe layers, experts]
    shares = loads / loads.sum(dim=1, keepdim=True).clamp(min=1)
    return loads.shape[1] * (shares * means).sum(dim=1).mean()


@torch.no_grad()
def update_biases(model: Transformer, loads: Tensor, rate: float) -> None:
    """Move the correction bias of every router towards equal loads. A frozen router is left alone."""
    layers = [block.mlp for block in model.blocks if isinstance(block, Block) and isinstance(block.mlp, MoE)]
    for moe, load in zip(layers, loads.float(), strict=True):
        if moe.router.config.scoring == "sigmoid" and moe.router.weight.requires_grad:
            moe.router.bias += rate * torch.sign(load.mean() - load)


def load_metrics(loads: Tensor) -> dict[str, Tensor]:
    """Return the load of the busiest expert relative to the mean, the share of experts without a token, and the entropy
    of the loads (1: equal), each the worst layer's."""
    shares = loads.double() / loads.sum(dim=1, keepdim=True).clamp(min=1)
    experts = loads.shape[1]
    entropy = torch.special.entr(shares).sum(dim=1) / torch.tensor(float(experts)).log()
    return {
        "expert_load_max": shares.max() * experts,
        "experts_unused": (loads == 0).double().mean(dim=1).max(),
        "expert_entropy": entropy.min(),
    }
