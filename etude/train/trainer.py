"""One training step for any objective: micro-batches in, one optimizer step, metrics out.

The trainer owns the model, the optimizer and the step count. Data, schedules, evaluation, checkpoints and the handling
of bad steps belong to the stages that call it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from etude.data.packing import Batch
from etude.model.moe import Routing
from etude.model.transformer import Transformer
from etude.train.balance import balance_loss, counted_tokens, expert_loads, load_metrics, update_biases
from etude.train.objectives import Objective
from etude.train.optim import AdamSettings, MasterAdamW
from etude.train.settings import BIAS_RATE, BalanceSettings


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

    def __post_init__(self) -> None:
        self.model.keep_scores = self.balance.loss_weight > 0
        self.optimizer = MasterAdamW({"model": self.model, **self.extra_modules}, self.settings)

    def step(
        self, batches: Sequence[Batch], objective: Objective, lr_factor: float = 1.0, divisor: float | None = None
    ) -> StepResult:
        """Run forward and backward on every micro-batch, then one optimizer step at `lr_factor` of the learning rate.

        The minimised value is the mean over loss tokens or, with a `divisor`, the sum divided by that.
        """
        start = time.perf_counter()
        loss_tokens = max(1, sum(batch.loss_tokens for batch in batches))
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        loads: Tensor | None = None  # of the experts, [moe layers, experts]
        for batch in batches:
            moved = batch.to(self.device)
            found = objective(self.model, moved)
            loss = found.loss / (divisor or loss_tokens)
            if found.routing is not None:
                balance, own = self._balance(found.routing, moved)
                loss = loss + balance * (batch.loss_tokens / loss_tokens)
                loads = own if loads is None else loads + own
            loss.backward()
            self.optimizer.accumulate_gradients()
            for total, new in ((sums, found.metrics), (counts, found.metric_counts)):
                for name, value in new.items():
                    total[name] = total[name] + value if name in total else value
        norms = self.optimizer.step(lr_factor)
        if loads is not None:
            rate = self.balance.bias_rate
            update_biases(self.model, loads, BIAS_RATE if rate is None else rate)
            sums |= load_metrics(loads)
            counts |= dict.fromkeys(load_metrics(loads), torch.ones(()))
        self.step_count += 1
        scalars = [*sums.values(), *counts.values(), *norms.values()]
        # The only device synchronization of a step.
        numbers = torch.stack([value.to(self.device).float() for value in scalars]).tolist()
        divisors = dict(zip(counts, numbers[len(sums) :], strict=False))
        gradient_norms = dict(zip(norms, numbers[len(sums) + len(counts) :], strict=True))
        return StepResult(
            metrics={
                name: value / (divisors.get(name, loss_tokens) or 1)
                for name, value in zip(sums, numbers[: len(sums)], strict=True)
            },
            gradient_norms=gradient_norms,
            clipped=any(norm > self.optimizer.limits[name] for name, norm in gradient_norms.items()),
            loss_tokens=loss_tokens,
            tokens=sum(batch.tokens.numel() for batch in batches),
            seconds=time.perf_counter() - start,
        )

    def _balance(self, routing: Routing, batch: Batch) -> tuple[Tensor | float, Tensor]:
        """Return the weighted balance loss of a micro-batch, and the loads of the experts."""
        moe = self.model.config.moe
        assert moe is not None
        counted = counted_tokens(batch)
        loads = expert_loads(routing, counted, moe.experts)
        weight = self.balance.loss_weight
        return weight * balance_loss(routing, counted, loads) if weight else 0.0, loads

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device
