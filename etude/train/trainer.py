"""One training step for any objective: micro-batches in, one optimizer step, metrics out.

The trainer owns the model, the optimizer and the step count. Data, schedules, evaluation, checkpoints and the handling
of bad steps belong to the stages that call it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from etude.data.packing import Batch
from etude.model.moe import Routing
from etude.model.transformer import Transformer
from etude.parallel.tensors import local_part, total_norm
from etude.train.balance import balance_loss, counted_tokens, expert_loads, load_metrics, update_biases
from etude.train.objectives import Objective
from etude.train.optim import AdamSettings, MasterAdamW
from etude.train.settings import BIAS_RATE, BalanceSettings

if TYPE_CHECKING:
    from etude.parallel.mesh import TrainingMesh


@dataclass(frozen=True)
class StepResult:
    metrics: dict[str, float]  # means per token of the objective's metrics
    gradient_norms: dict[str, float]  # of the model and of each extra module, before clipping
    clipped: bool  # whether one of them was above its limit
    loss_tokens: int  # tokens with a target
    tokens: int  # all tokens of the forward passes
    seconds: float


@dataclass
class Trainer:
    model: Transformer
    settings: AdamSettings
    extra_modules: dict[str, nn.Module] = field(default_factory=dict)  # trained with the model, such as MTP layers
    step_count: int = 0
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    mesh: TrainingMesh | None = None  # that the modules are sharded over
    stored_dtype: torch.dtype = torch.float32  # of the weights in checkpoints

    def __post_init__(self) -> None:
        self.model.keep_scores = self.balance.loss_weight > 0
        group = self.mesh.replica_group if self.mesh else None
        self.optimizer = MasterAdamW(
            {"model": self.model, **self.extra_modules}, self.settings, group, self.stored_dtype
        )

    def step(
        self, batches: Sequence[Batch], objective: Objective, lr_factor: float = 1.0, divisor: float | None = None
    ) -> StepResult:
        """Run forward and backward on every micro-batch, then one optimizer step at `lr_factor` of the learning rate.

        The minimised value is the mean over loss tokens or, with a `divisor`, the sum divided by that. On a mesh, each
        rank passes its own micro-batches, all equally many; tokens and metrics are those of all ranks.
        """
        start = time.perf_counter()
        batches = [batch.for_context(self.mesh.context if self.mesh else None) for batch in batches]
        loss_tokens, all_tokens = self._counts(batches)
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        loads: Tensor | None = None  # of the experts, [moe layers, experts]
        for batch in batches:
            moved = batch.to(self.device)
            found = objective(self.model, moved)
            loss = found.loss / (divisor or loss_tokens)
            if found.routing is not None:
                balance, own = self._balance(found.routing, moved)
                of_rows = batch.loss_tokens if batch.row_loss_tokens is None else batch.row_loss_tokens
                loss = loss + balance * (of_rows / loss_tokens)
                loads = own if loads is None else loads + own
            loss.backward()
            self.optimizer.accumulate_gradients()
            for total, new in ((sums, found.metrics), (counts, found.metric_counts)):
                for name, value in new.items():
                    total[name] = total[name] + value if name in total else value
        norms = self.optimizer.step(lr_factor)
        self.release()
        if loads is not None:
            loads = self._sum(loads)
            rate = self.balance.bias_rate
            update_biases(self.model, loads, BIAS_RATE if rate is None else rate)
        self.step_count += 1
        summed = self._sum(self._stack([*sums.values(), *counts.values()]))
        # The only device synchronization of a step.
        same = {**norms, **(load_metrics(loads) if loads is not None else {})}  # on all ranks
        numbers = torch.cat((summed, self._stack(same.values()))).tolist()
        divisors = dict(zip(counts, numbers[len(sums) :], strict=False))
        means = {
            name: value / (divisors.get(name, loss_tokens) or 1)
            for name, value in zip(sums, numbers[: len(sums)], strict=True)
        }
        given = dict(zip(same, numbers[len(summed) :], strict=True))
        gradient_norms = {name: given.pop(name) for name in norms}
        return StepResult(
            metrics={**means, **given},
            gradient_norms=gradient_norms,
            clipped=any(norm > self.optimizer.limits[name] for name, norm in gradient_norms.items()),
            loss_tokens=loss_tokens,
            tokens=all_tokens,
            seconds=time.perf_counter() - start,
        )

    def _balance(self, routing: Routing, batch: Batch) -> tuple[Tensor | float, Tensor]:
        """Return the weighted balance loss of a micro-batch, and the loads of the experts."""
        moe = self.model.config.moe
        assert moe is not None
        counted = counted_tokens(batch)
        loads = expert_loads(routing, counted, moe.experts)
        weight = self.balance.loss_weight
        return weight * balance_loss(routing, counted, loads, batch.context) if weight else 0.0, loads

    def release(self) -> None:
        """Drop the weights that forward passes have gathered: the next one gathers current ones."""
        if self.mesh is not None:
            from etude.train.sharding import release

            release(self.model, *self.extra_modules.values())

    @torch.no_grad()
    def weight_norm(self) -> float:
        """Return the norm of all weights; every rank calls this."""
        group = self.mesh.replica_group if self.mesh else None
        return total_norm((local_part(parameter) for parameter in self.model.parameters()), group).item()

    def _counts(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """Return loss tokens, at least one, and all tokens of the step."""
        loss_tokens, tokens = sum(batch.loss_tokens for batch in batches), sum(b.tokens.numel() for b in batches)
        if self.mesh is not None:
            loss_tokens, tokens = self._sum(torch.tensor([loss_tokens, tokens], device=self.device)).tolist()
        return max(1, loss_tokens), tokens

    def _sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks."""
        return tensor if self.mesh is None else self.mesh.sum(tensor)

    def _stack(self, scalars: Iterable[Tensor]) -> Tensor:
        values = [value.to(self.device).float() for value in scalars]
        return torch.stack(values) if values else torch.empty(0, device=self.device)

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device
