"""Output head and loss fused, a chunk of tokens at a time: the full logits [tokens, vocabulary] never exist.

`linear_cross_entropy` knows each token's weight beforehand, so it turns a chunk of logits into its gradient at once and
needs no second product: the loss of pretraining and fine-tuning and, with the log-probabilities computed on the way
(`weighted_logprobs`), of the policy gradient. `token_logprobs` returns log p(target) per token for objectives that
decide later how to use it, and recomputes a chunk in the backward. The softmax of a chunk runs in place in one Triton
kernel on CUDA (`kernels/softmax.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from etude.kernels.softmax import logprobs, logprobs_and_gradient_

IGNORE = -100  # target of a token that is not in the loss; torch's default ignore_index
CHUNK_ELEMENTS = 2**28  # logits held at once; 512 MiB in bfloat16


def linear_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the sum of weight x -log p(target), float32. hidden [n, width], head [vocabulary, width], targets [n]."""
    if weights is None:
        weights = torch.ones(targets.shape, dtype=torch.float32, device=targets.device)
    return weighted_logprobs(hidden, head, targets, weights)[0]


def weighted_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return that sum, and log p(target) per token, float32 [n], without a gradient; 0 where the target is IGNORE."""
    _check(hidden, head, targets, weights)
    # contiguous: the kernels index targets and weights directly
    found: tuple[Tensor, Tensor] = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head, targets.contiguous(), weights.detach().float().contiguous()
    )
    return found


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Return log p(target) of every token, float32 [n]; 0 where the target is IGNORE."""
    _check(hidden, head, targets, targets)
    found: Tensor = _TokenLogprobs.apply(hidden, head, targets.contiguous())  # type: ignore[no-untyped-call]
    return found


def _check(hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> None:
    """Check shapes: one that broadcasts would silently give a wrong loss."""
    tokens, width = hidden.shape
    if head.shape[1] != width or targets.shape != (tokens,) or weights.shape != (tokens,):
        shapes = [list(t.shape) for t in (hidden, head, targets, weights)]
        raise ValueError(f"hidden [n, width], head [vocabulary, width], targets [n], weights [n]; got {shapes}")
    if weights.requires_grad:
        raise ValueError("weights are constants here; use token_logprobs where they must have a gradient")


def token_chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    """Return slices of tokens whose logits may be held at once."""
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    size = size // 128 * 128 or size  # whole tiles
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        wants_hidden, wants_head = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        seen = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        hidden_grad = torch.empty_like(hidden) if wants_hidden else None
        # float32: many chunks are summed here, and bfloat16 would lose the small ones
        head_grad = torch.zeros(head.shape, dtype=torch.float32, device=head.device) if wants_head else None
        for rows in token_chunks(*_sizes(hidden, head)):
            logits = hidden[rows] @ head.T
            if not (wants_hidden or wants_head):
                seen[rows] = logprobs(logits, targets[rows])
                loss -= (seen[rows] * weights[rows]).sum()
                continue
            seen[rows], gradient = logprobs_and_gradient_(logits, targets[rows], weights[rows])
            loss -= (seen[rows] * weights[rows]).sum()
            if hidden_grad is not None:
                torch.mm(gradient, head, out=hidden_grad[rows])
            if head_grad is not None:
                head_grad += gradient.T @ hidden[rows]
        ctx.save_for_backward(hidden_grad, None if head_grad is None else head_grad.to(head.dtype))
        ctx.mark_non_differentiable(seen)
        return loss, seen

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_grad, head_grad = (None if g is None else g * upstream.to(g.dtype) for g in ctx.saved_tensors)
        return hidden_grad, head_grad, None, None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, head, targets)
        found = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for rows in token_chunks(*_sizes(hidden, head)):
            found[rows] = logprobs(hidden[rows] @ head.T, targets[rows])
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, head, targets = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        head_grad = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for rows in token_chunks(*_sizes(hidden, head)):
            _, gradient = logprobs_and_gradient_(hidden[rows] @ head.T, targets[rows], -upstream[rows].contiguous())
            torch.mm(gradient, head, out=hidden_grad[rows])
            head_grad += gradient.T @ hidden[rows]
        return hidden_grad, head_grad.to(head.dtype), None


def _sizes(hidden: Tensor, head: Tensor) -> tuple[int, int]:
    return hidden.shape[0], head.shape[0]
