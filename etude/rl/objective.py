"""The policy-gradient objective: minus the sum over sampled tokens of advantage x log p, divided by a constant.

The token advantages are computed beforehand (`advantages.py`), so the loss is a weighted cross-entropy and costs as
much as fine-tuning. The trainer's log-probabilities are always compared with the sampler's: their mismatch is the first
thing to look at when a run goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from etude.data.packing import Batch
from etude.harness.trace import NO_VERSION
from etude.kernels.loss import token_logprobs, weighted_logprobs
from etude.model.transformer import Transformer
from etude.train.objectives import ObjectiveSums, loss_positions, record_routing

if TYPE_CHECKING:
    from etude.parallel.mesh import TrainingMesh

# Minus the objective, summed over the given tokens: a function of the trainer's log-probabilities, which have a
# gradient, the sampler's, and the token advantages.
TokenLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """Training sequences as rows. Advantages and log-probabilities at a position are those of its target token."""

    token_advantages: Tensor = field(default_factory=lambda: torch.empty(0))  # [rows, length] float32
    sampler_logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    sampler_versions: Tensor = field(default_factory=lambda: torch.empty(0))  # of weights, int32; -1: not sampled
    temperatures: Tensor | None = None  # at which the tokens were sampled; None: 1
    routing: Tensor | None = None  # [rows, length, moe layers, experts per token] of the token itself; -1: unknown

    TOKEN_FIELDS: ClassVar[dict[str, int | float]] = {
        **Batch.TOKEN_FIELDS,
        "token_advantages": 0.0,
        "sampler_logprobs": 0.0,
        "sampler_versions": NO_VERSION,
        "temperatures": 1.0,
        "routing": -1,
    }


def tempered(hidden: Tensor, temperatures: Tensor | None) -> Tensor:
    """Return hidden states divided by temperatures, which divides the logits.

    The policy is the distribution that was sampled. Dividing bfloat16 logits would round more.
    """
    return hidden if temperatures is None else (hidden.float() / temperatures.unsqueeze(-1)).to(hidden.dtype)


def policy_gradient(
    logprobs: Tensor, sampler_logprobs: Tensor, advantages: Tensor, *, max_importance_ratio: float = 0.0
) -> Tensor:
    """Return minus the sum of advantage x log p, weighted by the ratio trainer / sampler up to a maximum (0: by 1)."""
    if max_importance_ratio:
        ratio = (logprobs.detach() - sampler_logprobs).exp().clamp(max=max_importance_ratio)  # a huge one is noise
        advantages = ratio * advantages
    return -(advantages * logprobs).sum()


@dataclass
class PolicyGradient:
    """The objective of a step; it collects the mismatch of trainer and sampler until `mismatch` is called."""

    max_importance_ratio: float = 0.0  # 0: no importance correction
    plausibility: float = 0.0  # see `etude.model.moe.Routing`
    loss: TokenLoss | None = None  # another loss than `policy_gradient`
    differences: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # |trainer - sampler|, sampler's version

    def __call__(self, model: Transformer, batch: Batch) -> ObjectiveSums:
        assert isinstance(batch, RolloutBatch)
        routing = record_routing(model, batch.routing, self.plausibility)
        hidden = model.hidden(batch.tokens, documents=batch.documents, routing=routing).flatten(0, 1)
        positions = loss_positions(batch)
        temperatures = None if batch.temperatures is None else batch.temperatures.flatten()[positions]
        hidden = tempered(hidden.index_select(0, positions), temperatures)
        targets, advantages, sampler_logprobs = (
            part.flatten()[positions] for part in (batch.targets, batch.token_advantages, batch.sampler_logprobs)
        )
        if self.loss or self.max_importance_ratio:
            logprobs = token_logprobs(hidden, model.head_weight, targets)
            token_loss = self.loss or partial(policy_gradient, max_importance_ratio=self.max_importance_ratio)
            loss, detached = token_loss(logprobs, sampler_logprobs, advantages), logprobs.detach()
        else:  # the same as policy_gradient, with less memory
            loss, detached = weighted_logprobs(hidden, model.head_weight, targets, advantages)
        difference = detached - sampler_logprobs
        # They stay on the device: reading them would make the host wait.
        self.differences.append((difference.abs().float(), batch.sampler_versions.flatten()[positions]))
        shown = {
            "loss": loss.detach(),
            "entropy_seen": -detached.sum(),  # its mean over sampled tokens estimates the policy's entropy
            "mismatch": difference.abs().sum(),
            "ratio": difference.exp().sum(),
        }
        return ObjectiveSums(loss, shown, routing=routing)

    def mismatch(self, version: int, mesh: TrainingMesh | None = None) -> dict[str, float]:
        """Return mean and 99th percentile of |trainer - sampler| log-probability since the last call.

        Apart for tokens that the trainer's own weight version sampled, where the difference is one of numerics, and
        for tokens of other versions, where it is mostly staleness. Without such tokens there is no number. On a mesh
        the leading rank gets those of all ranks, the others nothing.
        """
        found = [(differences.cpu(), versions.cpu()) for differences, versions in self.differences]
        self.differences = []
        if mesh is not None:
            found = [part for parts in mesh.gather(found) or [] for part in parts]
        if not found:
            return {}
        differences, versions = (torch.cat(parts) for parts in zip(*found, strict=True))
        facts: dict[str, float] = {}
        for name, counted in (("numerics", versions == version), ("staleness", versions != version)):
            if len(part := differences[counted]):
                p99 = part.quantile(0.99) if len(part) < 1 << 24 else part.max()
                facts |= {f"mismatch_{name}_mean": float(part.mean()), f"mismatch_{name}_p99": float(p99)}
        return facts
