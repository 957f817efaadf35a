"""What a step minimises: small functions from a model and a batch to sums over tokens.

An objective returns the sum to be minimised and further sums worth showing; the trainer divides all of them by the
number of trained tokens of the whole step, so that micro-batches of unequal weight count right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from etude.data.packing import Batch
from etude.kernels.distill import Distance, distill
from etude.kernels.loss import linear_cross_entropy
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


def next_token(model: Transformer, batch: Batch) -> Sums:
    """Pretraining and fine-tuning: -log p of every target that is not ignored."""
    hidden = model.hidden(batch.tokens, documents=batch.documents)
    loss = linear_cross_entropy(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten())
    return Sums(loss, {"loss": loss.detach()})


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
