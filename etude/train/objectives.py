"""What a step minimises: small functions from a model and a batch to sums over tokens.

An objective returns the sum to be minimised and further sums worth showing; the trainer divides all of them by the
number of trained tokens of the whole step, so that micro-batches of unequal weight count right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from etude.data.packing import Batch
from etude.kernels.distill import Distance, distill
from etude.kernels.loss import IGNORE, linear_cross_entropy
from etude.model.mtp import MTP
from etude.model.transformer import Transformer


@dataclass(frozen=True)
class Sums:
    total: Tensor  # has the gradient
    shown: dict[str, Tensor]
    counts: dict[str, Tensor] = field(
        default_factory=dict
    )  # of those that are means over other tokens than the trained


Objective = Callable[[Transformer, Batch], Sums]
SPARSE = 0.75  # share of targets that count below which picking them out is cheaper than predicting them all


def next_token(model: Transformer, batch: Batch) -> Sums:
    """Pretraining and fine-tuning: -log p of every target that is not ignored."""
    hidden = model.hidden(batch.tokens, documents=batch.documents).flatten(0, 1)
    targets = batch.targets.flatten()
    if batch.trained < SPARSE * targets.numel():
        places = taught_places(batch)
        hidden, targets = hidden.index_select(0, places), targets[places]
    loss = linear_cross_entropy(hidden, model.head_weight, targets)
    return Sums(loss, {"loss": loss.detach()})


def taught_places(batch: Batch) -> Tensor:
    """Where the targets are that count: most of an agent's session is prompt and tool results, and the head need not
    read those. Their number is known; with `nonzero` alone the host would wait for the device to count them."""
    return torch.nonzero_static(batch.targets.flatten() != IGNORE, size=batch.trained)[:, 0]


def with_mtp(mtp: MTP, *, distance: Distance = "kl", joint: bool = True) -> Objective:
    """Next token and, beside it, the multi-token-prediction layers' distance to the main head; `joint=False` trains
    those layers alone."""

    def objective(model: Transformer, batch: Batch) -> Sums:
        hidden = model.hidden(batch.tokens, documents=batch.documents)
        loss = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten())
        total, shown = loss if joint else loss.detach(), {"loss": loss.detach()}
        counts: dict[str, Tensor] = {}
        drafts = mtp.drafts(model, hidden, batch.tokens, batch.targets, batch.documents)
        for ahead, draft in enumerate(drafts, start=1):
            found = distill(
                draft.hidden.flatten(0, 1),
                draft.teacher.flatten(0, 1),
                model.head_weight,
                draft.weights.flatten(),
                distance,
            )
            total = total + found.loss
            sums = {distance: found.loss.detach(), "overlap": found.overlap, "agreement": found.agreement}
            shown |= {f"mtp_{ahead}_{name}": value for name, value in sums.items()}
            counts |= dict.fromkeys((f"mtp_{ahead}_{name}" for name in sums), draft.weights.sum())
        return Sums(total, shown, counts)

    return objective
