"""Log-softmax at the target and its gradient over rows of logits, in float32 whatever type the logits have.

On CUDA one program per row reads the row from cache twice and writes the gradient over the logits, so the pass costs
one read and one write of memory. Everywhere else the same two functions are a few lines of torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BLOCK = 4096


def logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Return log softmax(logits)[target] of every row, float32; 0 where the target is negative (ignored)."""
    if logits.is_cuda:
        return _triton_logprobs(logits, targets)
    kept = targets >= 0
    wide = logits.float()
    at = wide.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return torch.where(kept, at - wide.logsumexp(dim=-1), 0.0)


def logprobs_and_gradient_(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return `logprobs`, and write weight x (softmax - onehot(target)) over the logits; 0 for negative targets."""
    if logits.is_cuda:
        return _triton_logprobs_and_gradient(logits, targets, weights)
    found, kept = logprobs(logits, targets), targets >= 0
    gradient = logits.float().softmax(dim=-1)
    gradient[torch.arange(len(targets)), targets.clamp(min=0)] -= 1
    gradient *= torch.where(kept, weights, 0.0)[:, None]
    return found, logits.copy_(gradient)


def _kernels() -> Any:
    from etude.kernels import softmax_triton

    return softmax_triton


def _triton_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    found = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _kernels().logprobs_kernel[(logits.shape[0],)](
        logits, logits.stride(0), targets, found, logits.shape[1], BLOCK=_BLOCK, num_warps=8
    )
    return found


def _triton_logprobs_and_gradient(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    _kernels().logprobs_and_gradient_kernel[(logits.shape[0],)](
        logits, logits.stride(0), targets, weights, found, logits.shape[1], BLOCK=_BLOCK, num_warps=8
    )
    return found, logits
