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
from etude.model.transformer import Transformer
from etude.train.objectives import Objective
from etude.train.optim import AdamSettings, MasterAdamW


@dataclass(frozen=True)
class StepResult:
    metrics: dict[str, float]  # means per token of the objective's metrics
    gradient_norms: dict[str, float]  # of the model and of each extra module, before clipping
    loss_tokens: int  # tokens with a target
    tokens: int  # all tokens of the forward passes
    seconds: float


@dataclass
class Trainer:
    model: Transformer
    settings: AdamSettings
    extra_modules: dict[str, nn.Module] = field(default_factory=dict)  # trained with the model, such as MTP layers
    step_count: int = 0

    def __post_init__(self) -> None:
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
        for batch in batches:
            found = objective(self.model, batch.to(self.device))
            (found.loss / (divisor or loss_tokens)).backward()
            self.optimizer.accumulate_gradients()
            for total, new in ((sums, found.metrics), (counts, found.metric_counts)):
                for name, value in new.items():
                    total[name] = total[name] + value if name in total else value
        norms = self.optimizer.step(lr_factor)
        self.step_count += 1
        scalars = [*sums.values(), *counts.values(), *norms.values()]
        # The only device synchronization of a step.
        numbers = torch.stack([value.to(self.device).float() for value in scalars]).tolist()
        divisors = dict(zip(counts, numbers[len(sums) :], strict=False))
        return StepResult(
            metrics={
                name: value / (divisors.get(name, loss_tokens) or 1)
                for name, value in zip(sums, numbers[: len(sums)], strict=True)
            },
            gradient_norms=dict(zip(norms, numbers[len(sums) + len(counts) :], strict=True)),
            loss_tokens=loss_tokens,
            tokens=sum(batch.tokens.numel() for batch in batches),
            seconds=time.perf_counter() - start,
        )

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device
