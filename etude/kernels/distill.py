"""Distance of a draft's next-token distribution from the main head's, without the full logits of either.

Both share the output head, so a chunk of tokens costs two tiles of logits. Only the draft is trained: the teacher and
the head are constants here, and the gradient of a chunk is computed in the forward, as in `loss`.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from etude.kernels.loss import token_chunks

Distance = Literal["kl", "tv"]


class Distillation(NamedTuple):
    loss: Tensor  # weighted sum of the distance; has a gradient
    overlap: Tensor  # weighted sum of sum_v min(p, q): the probability that a sampled draft is accepted
    agreement: Tensor  # weighted sum of "same likeliest token": the probability that a greedy draft is accepted


def distill(draft: Tensor, teacher: Tensor, head: Tensor, weights: Tensor, distance: Distance = "kl") -> Distillation:
    """Compare draft and teacher [n, width] through head [vocabulary, width]; weights [n] are 0 for ignored tokens.

    "kl" is KL(teacher || draft). "tv" is total variation: 1 - tv is exactly the acceptance rate of speculative
    sampling, so it optimises what decoding measures, but far from the teacher its gradient is weak.
    """
    found: tuple[Tensor, Tensor, Tensor] = _Distill.apply(  # type: ignore[no-untyped-call]
        draft, teacher.detach(), head.detach(), weights.float(), distance
    )
    return Distillation(*found)


class _Distill(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, teacher: Tensor, head: Tensor, weights: Tensor, distance: Distance
    ) -> tuple[Tensor, ...]:
        sums = torch.zeros(3, dtype=torch.float32, device=draft.device)
        gradient = torch.zeros_like(draft)
        for rows in token_chunks(draft.shape[0], 8 * head.shape[0]):  # about eight float32 tiles are alive at once
            log_p = (teacher[rows] @ head.T).float().log_softmax(dim=-1)
            log_q = (draft[rows] @ head.T).float().log_softmax(dim=-1)
            p, q, weight = log_p.exp(), log_q.exp(), weights[rows]
            overlap = torch.minimum(p, q).sum(dim=-1)
            if distance == "kl":
                lost = (p * (log_p - log_q)).sum(dim=-1)
                by_logit = q - p
            else:
                lost = 1 - overlap
                toward = 0.5 * torch.sign(q - p)
                by_logit = q * (toward - (q * toward).sum(dim=-1, keepdim=True))
            same = (log_p.argmax(dim=-1) == log_q.argmax(dim=-1)).float()
            sums += torch.stack([(weight * value).sum() for value in (lost, overlap, same)])
            gradient[rows] = (by_logit * weight[:, None]).to(head.dtype) @ head
        ctx.save_for_backward(gradient)
        loss, *measures = (value.clone() for value in sums)
        ctx.mark_non_differentiable(*measures)
        return loss, *measures

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream.to(gradient.dtype), None, None, None, None
