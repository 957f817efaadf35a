"""One training step, whatever is being learned: the objective is an argument, the batches are given.

The trainer owns the model, the optimizer and the step count, and nothing else: data, schedules, evaluation, files and
what to do about a bad step belong to the stages around it.
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
    values: dict[str, float]  # means per token of what the objective shows
    gradient_norms: dict[str, float]  # of the model, and of each module beside it
    trained: int  # tokens with a target
    tokens: int  # all tokens the forward saw
    seconds: float


@dataclass
class Trainer:
    model: Transformer
    settings: AdamSettings
    beside: dict[str, nn.Module] = field(default_factory=dict)  # further modules to train, by name: the MTP layers
    step_count: int = 0

    def __post_init__(self) -> None:
        self.optimizer = MasterAdamW({"model": self.model, **self.beside}, self.settings)

    def step(
        self, batches: Sequence[Batch], objective: Objective, factor: float = 1.0, divisor: float | None = None
    ) -> StepResult:
        """Forward and backward every micro-batch, then one optimizer step at `factor` of the learning rate.

        What is minimised is the mean over trained tokens or, with a `divisor`, the sum divided by that.
        """
        start = time.perf_counter()
        trained = max(1, sum(batch.trained for batch in batches))
        sums: dict[str, Tensor] = {}
        counts: dict[str, Tensor] = {}
        for batch in batches:
            found = objective(self.model, batch.to(self.device))
            (found.total / (divisor or trained)).backward()
            self.optimizer.collect()
            for kept, new in ((sums, found.shown), (counts, found.counts)):
                for name, value in new.items():
                    kept[name] = kept[name] + value if name in kept else value
        norms = self.optimizer.step(factor)
        self.step_count += 1
        everything = [*sums.values(), *counts.values(), *norms.values()]
        numbers = torch.stack([value.to(self.device).float() for value in everything]).tolist()  # the one wait
        shown, over = numbers[: len(sums)], dict(zip(counts, numbers[len(sums) :], strict=False))
        return StepResult(
            values={name: value / (over.get(name, trained) or 1) for name, value in zip(sums, shown, strict=True)},
            gradient_norms=dict(zip(norms, numbers[len(sums) + len(counts) :], strict=True)),
            trained=trained,
            tokens=sum(batch.tokens.numel() for batch in batches),
            seconds=time.perf_counter() - start,
        )

    @property
    def device(self) -> torch.device:
        return self.model.head_weight.device
