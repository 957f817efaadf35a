"""Mixture of experts: a router, experts as one grouped matrix product, a shared expert, and routing replay.

Replay overrides which experts run, never their weights: gate scores are always computed, so gradients reach the router.
A replayed expert is kept only if it is plausible to this router (see `Routing`); dropped ones are replaced by the
router's own candidates, best first. Chosen experts are sorted, so the result does not depend on their order: replaying
the router's own choice is bit-identical to no replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.errors import InputError
from etude.kernels.fused import swiglu
from etude.kernels.grouped import grouped_matmul
from etude.model.config import ModelConfig, MoEConfig
from etude.model.layers import MLP
from etude.model.lora import Adapter
from etude.parallel.experts import ExpertGroup, local_experts, shard_stacks
from etude.parallel.mesh import TrainingMesh


class Routing:
    """Expert choices of one forward: `replay` is the input, `chosen` the output.

    `replay` holds expert ids, [rows, tokens, moe layers, experts per token], in any integer dtype; -1 leaves the choice
    to the router. A replayed expert is kept if its gate score is at least `plausibility` times the lowest score among
    the router's own choice: 0 keeps all, and up to 1 the router's own choice is always kept. With `keep_scores` the
    gate scores, which have a gradient, are a second output: a loss can balance the experts with them.
    """

    def __init__(self, replay: Tensor | None = None, plausibility: float = 0.0, *, keep_scores: bool = False) -> None:
        if not 0.0 <= plausibility <= 1.0:
            raise InputError(f"routing plausibility must be between 0 and 1, got {plausibility}")
        if replay is not None and replay.dim() != 4:
            raise InputError(f"replayed experts must be [rows, tokens, moe layers, k], got {list(replay.shape)}")
        self.replay, self.plausibility = replay, plausibility
        self.keep_scores = keep_scores
        self.chosen: Tensor | None = None
        self.scores: Tensor | None = None  # [rows, tokens, moe layers, experts]

    def check(self, config: ModelConfig, rows: int, tokens: int) -> None:
        if config.moe is None:
            raise InputError(f"a {config.family} model without experts has no routing to replay or record")
        if self.replay is None:
            return
        want = (rows, tokens, len(config.moe.layers), config.moe.per_token)
        if tuple(self.replay.shape) != want:
            raise InputError(f"replayed experts have shape {list(self.replay.shape)}; this forward needs {list(want)}")
        if not self.replay.is_cuda:  # on a GPU this would synchronize; there `filter_replay` ignores invalid ids
            low, high = int(self.replay.min()), int(self.replay.max())
            if low < -1 or high >= config.moe.experts:
                raise InputError(f"replayed expert ids span {low}..{high}; expected -1..{config.moe.experts - 1}")


class Router(nn.Module):
    bias: Tensor

    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.experts, hidden))
        if config.scoring == "sigmoid":
            self.register_buffer("bias", torch.zeros(config.experts, dtype=torch.float32))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keep the correction bias in float32 whatever the model's dtype: rounding it would change expert choices."""
        before = self._buffers.get("bias")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None:
            device = self.bias.device
            self.bias = torch.zeros_like(before, device=device) if before.is_meta else before.to(device)
        return self

    def forward(self, x: Tensor, replay: Tensor | None, plausibility: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return the chosen experts [n, k] of tokens [n, hidden], sorted, their weights, and the scores of all."""
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.softmax(dim=-1) if self.config.scoring == "softmax" else logits.sigmoid()
        with torch.no_grad():
            own = self._select_experts(scores)
            chosen = own if replay is None else filter_replay(scores, own, replay, plausibility)
            chosen = chosen.sort(dim=-1).values
        weights = scores.gather(1, chosen)
        if self.config.normalize:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.scale, scores

    def _select_experts(self, scores: Tensor) -> Tensor:
        """Return the top k experts, best first; with groups, only experts of the best groups."""
        c = self.config
        choice = scores + self.bias if c.scoring == "sigmoid" else scores
        if c.groups > c.groups_per_token:
            grouped = choice.unflatten(-1, (c.groups, -1))
            group_scores = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
            kept = torch.zeros_like(group_scores, dtype=torch.bool)
            kept.scatter_(1, group_scores.topk(c.groups_per_token, dim=-1).indices, True)
            choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
        return choice.topk(c.per_token, dim=-1).indices


def filter_replay(scores: Tensor, own: Tensor, replay: Tensor, plausibility: float) -> Tensor:
    """Return k experts: the plausible replayed ones, then the router's own candidates in order. All are [n, k]."""
    n, k = own.shape
    given = replay.to(torch.int64)
    threshold = plausibility * scores.gather(1, own).min(dim=-1, keepdim=True).values
    known = (given >= 0) & (given < scores.shape[1])
    plausible = known & (scores.gather(1, torch.where(known, given, 0)) >= threshold)
    # One priority per expert: kept replays first, then the router's candidates in order, then all others.
    priority = torch.zeros(n, scores.shape[1] + 1, dtype=torch.int32, device=scores.device)
    ranks = torch.arange(k, 0, -1, dtype=torch.int32, device=scores.device).expand(n, k)
    priority.scatter_(1, own, ranks)
    discard = scores.shape[1]  # an extra column for ids that are not kept, so duplicates and invalid ids are harmless
    priority.scatter_(1, torch.where(plausible, given, discard), k + 1)
    return priority[:, :discard].topk(k, dim=-1).indices


class Experts(nn.Module):
    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.expert_size, hidden))
        self.down = nn.Parameter(torch.empty(config.experts, hidden, config.expert_size))
        self.gate_up_adapter: Adapter | None = None
        self.down_adapter: Adapter | None = None
        self.group: ExpertGroup | None = None  # the ranks that divide the experts

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sort (token, expert) pairs by expert, run two grouped products and restore the order, without a loop."""
        n, k = chosen.shape
        by_expert, order = chosen.flatten().sort(stable=True)
        experts = torch.arange(self.gate_up.shape[0], device=x.device)
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        rows = x[order // k]
        if self.group is None:
            rows = self._products(rows, ends)
        else:
            exchange = self.group.plan(ends)
            rows = exchange.to_tokens(self._products(exchange.to_experts(rows), exchange.ends))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(n * k, device=x.device))
        # A gather and a sum in fixed order instead of index_add, so that the result does not depend on thread timing.
        return (rows[back].view(n, k, x.shape[-1]).float() * weights[..., None]).sum(dim=1).to(x.dtype)

    def _products(self, rows: Tensor, ends: Tensor) -> Tensor:
        inner = swiglu(_adapted(rows, local_experts(self.gate_up), self.gate_up_adapter, ends))
        return _adapted(inner, local_experts(self.down), self.down_adapter, ends)


def _adapted(rows: Tensor, weights: Tensor, adapter: Adapter | None, ends: Tensor) -> Tensor:
    y = grouped_matmul(rows, weights, ends)
    return y if adapter is None else y + adapter(rows, ends)


class MoE(nn.Module):
    def __init__(self, hidden: int, config: MoEConfig) -> None:
        super().__init__()
        self.router = Router(hidden, config)
        self.experts = Experts(hidden, config)
        self.shared = MLP(hidden, config.shared_size) if config.shared_size else None

    def forward(self, x: Tensor, replay: Tensor | None, plausibility: float) -> tuple[Tensor, Tensor, Tensor]:
        flat = x.flatten(0, 1)
        given = None if replay is None else replay.flatten(0, 1)
        chosen, weights, scores = self.router(flat, given, plausibility)
        y = self.experts(flat, chosen, weights)
        if self.shared is not None:
            y = y + self.shared(flat)
        return y.view_as(x), chosen.view(*x.shape[:2], chosen.shape[-1]), scores.view(*x.shape[:2], scores.shape[-1])


def shard_experts(model: nn.Module, mesh: TrainingMesh) -> None:
    """Divide the experts of all layers, and their adapters, over the ranks of the mesh's expert groups, in place."""
    if mesh.settings.ep == 1:
        return
    for experts in [module for module in model.modules() if isinstance(module, Experts)]:
        shard_stacks(experts, mesh.expert)
        experts.group = ExpertGroup(mesh.expert_group, mesh.settings.ep)
