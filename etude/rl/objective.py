"""The policy gradient: minus the sum over made tokens of worth x log p, one epoch, divided by a constant.

What a token is worth was settled before (`advantages.py`), so the loss is a weighted cross-entropy and costs what
fine-tuning does. The log-probabilities the trainer sees on the way are held against the sampler's, always: the
difference is the first thing to look at when a run goes wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from etude.data.packing import Batch
from etude.kernels.loss import token_logprobs, weighted_logprobs
from etude.model.moe import Routing
from etude.model.transformer import Transformer
from etude.train.objectives import Sums, taught_places


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """Segments of rollouts as rows. The arrays are by token, and say what they do of the token's target."""

    worths: Tensor = field(default_factory=lambda: torch.empty(0))  # [rows, length] float32
    sampler: Tensor = field(default_factory=lambda: torch.empty(0))  # the sampler's own log-probabilities
    routing: Tensor | None = None  # [rows, length, moe layers, experts per token] of the token itself; -1: not known

    def to(self, device: torch.device | str) -> RolloutBatch:
        moved = super().to(device)
        routing = None if self.routing is None else self.routing.to(device)
        return replace(moved, worths=self.worths.to(device), sampler=self.sampler.to(device), routing=routing)  # type: ignore[call-arg,return-value]


@dataclass
class PolicyGradient:
    """An objective that keeps what it saw of the difference between trainer and sampler until it is asked for."""

    correction: float = 0.0  # the largest importance ratio; 0: none is applied
    plausibility: float = 0.0  # of replayed experts
    differences: list[Tensor] = field(default_factory=list)

    def __call__(self, model: Transformer, batch: Batch) -> Sums:
        assert isinstance(batch, RolloutBatch)
        routing = None if batch.routing is None else Routing(batch.routing, self.plausibility)
        hidden = model.hidden(batch.tokens, documents=batch.documents, routing=routing).flatten(0, 1)
        made = taught_places(batch)
        hidden = hidden.index_select(0, made)
        targets, worths, sampler = (part.flatten()[made] for part in (batch.targets, batch.worths, batch.sampler))
        if self.correction:
            logprobs = token_logprobs(hidden, model.head_weight, targets)
            seen = logprobs.detach()
            ratio = (seen - sampler).exp().clamp(max=self.correction)  # truncated: a huge one is noise, not news
            loss = -(ratio * worths * logprobs).sum()
        else:
            loss, seen = weighted_logprobs(hidden, model.head_weight, targets, worths)
        difference = seen - sampler
        self.differences.append(difference.abs().float())  # where it is: looking would make the host wait
        shown = {
            "loss": loss.detach(),
            "entropy_seen": -seen.sum(),  # of sampled tokens: its mean estimates the policy's entropy
            "mismatch": difference.abs().sum(),
            "ratio": difference.exp().sum(),
        }
        return Sums(loss, shown)

    def mismatch(self) -> tuple[float, float]:
        """Mean and 99th percentile of |log p - log p| since the last call."""
        if not self.differences:
            return 0.0, 0.0
        seen = torch.cat(self.differences).cpu()
        self.differences = []
        return float(seen.mean()), float(seen.quantile(0.99)) if len(seen) < 1 << 24 else float(seen.max())
