"""Objectives: functions from a model and a batch to a loss and metrics, each summed over tokens.

The trainer divides the sums by the number of loss tokens of the whole step, so that micro-batches with unequal numbers
of loss tokens are weighted correctly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.data.packing import Batch
from etude.kernels.distill import Distance, distill
from etude.kernels.loss import IGNORE, linear_cross_entropy
from etude.model.moe import Routing
from etude.model.mtp import MTP
from etude.model.transformer import Transformer


@dataclass(frozen=True)
class ObjectiveSums:
    """Sums over the tokens of one micro-batch."""

    loss: Tensor  # carries the gradient
    metrics: dict[str, Tensor]
    metric_counts: dict[str, Tensor] = field(default_factory=dict)  # divisors of metrics not averaged over loss tokens
    routing: Routing | None = None  # of a MoE model


Objective = Callable[[Transformer, Batch], ObjectiveSums]
SPARSE_TARGETS = 0.75  # below this share of loss tokens, gathering their hidden states is cheaper than scoring all


def record_routing(model: Transformer, replay: Tensor | None = None, plausibility: float = 0.0) -> Routing | None:
    """Return what records the experts of a forward, which the trainer balances; None for a dense model."""
    return Routing(replay, plausibility, keep_scores=model.keep_scores) if model.config.moe else None


def next_token(model: Transformer, batch: Batch) -> ObjectiveSums:
    """Return the cross-entropy of every target that is not ignored: the objective of pretraining and fine-tuning."""
    routing = record_routing(model)
    hidden = model.hidden(batch.tokens, documents=batch.documents, routing=routing).flatten(0, 1)
    targets = batch.targets.flatten()
    if batch.loss_tokens < SPARSE_TARGETS * targets.numel():
        positions = loss_positions(batch)
        hidden, targets = hidden.index_select(0, positions), targets[positions]
    loss = linear_cross_entropy(hidden, model.head_weight, targets)
    return ObjectiveSums(loss, {"loss": loss.detach()}, routing=routing)


def loss_positions(batch: Batch) -> Tensor:
    """Return the flat positions of the loss tokens, so that the head can skip all others (most of an agent's session
    is prompt and tool results). The static size avoids the device synchronization that plain `nonzero` needs."""
    return torch.nonzero_static(batch.targets.flatten() != IGNORE, size=batch.loss_tokens)[:, 0]


def with_mtp(mtp: MTP, *, distance: Distance = "kl", joint: bool = True) -> Objective:
    """Return an objective that adds the distance of each multi-token-prediction layer to the main head.

    With `joint=False` only those layers are trained; the next-token loss is reported without a gradient.
    """

    def objective(model: Transformer, batch: Batch) -> ObjectiveSums:
        routing = record_routing(model)
        hidden = model.hidden(batch.tokens, documents=batch.documents, routing=routing)
        next_token_loss = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten())
        loss = next_token_loss if joint else next_token_loss.detach()
        metrics: dict[str, Tensor] = {"loss": next_token_loss.detach()}
        counts: dict[str, Tensor] = {}
        drafts = mtp.drafts(model, hidden, batch.tokens, batch.targets, batch.documents)
        for depth, draft in enumerate(drafts, start=1):
            distilled = distill(
                draft.hidden.flatten(0, 1),
                draft.teacher.flatten(0, 1),
                model.head_weight,
                draft.weights.flatten(),
                distance,
            )
            loss = loss + distilled.loss
            sums = {
                distance: distilled.loss.detach(),
                "overlap": distilled.overlap,
                "agreement": distilled.agreement,
            }
            metrics |= {f"mtp_{depth}_{name}": value for name, value in sums.items()}
            counts |= dict.fromkeys((f"mtp_{depth}_{name}" for name in sums), draft.weights.sum())
        return ObjectiveSums(loss, metrics, counts, routing if joint else None)

    return objective
