"""The small steps between matrix products, each in one pass where nothing is differentiated and nobody compiles.

Decoding runs hundreds of them for one token: in eager torch a norm is four kernels and a rotation seven. On CUDA, in
inference, each is one here; in training and compiled code they are the plain lines, and the rounding is the same:
float32 inside, rounded where transformers and vLLM round. On a CPU in inference, in float32, they are half as many
calls, equal but for the last bits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, round, then scale: where transformers and vLLM round, so that bfloat16 logits agree."""
    if fusing(x):
        return _kernels().rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    if _in_place(x):
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(_constant(eps), length, length, value=1 / x.shape[-1]).rsqrt_()
        return torch.mul(x, scale).mul_(weight)
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) times second half."""
    if fusing(gate_up):
        return _kernels().swiglu(gate_up)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn each pair of dimensions by its angle. Interleaved pairs come out as halves, in queries and keys alike."""
    half = x.shape[-1] // 2
    if fusing(x) and not interleaved and half & (half - 1) == 0:
        return _kernels().rotate(x, cos, sin)  # type: ignore[no-any-return]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    if _in_place(x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        first, second = out.chunk(2, dim=-1)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=second).addcmul_(a, sin)
        return out
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def fusing(x: Tensor) -> bool:
    """Whether the one-pass kernels are used: on CUDA, with no gradient to come and no compiler that fuses itself."""
    return x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _in_place(x: Tensor) -> bool:
    """Whether results may be written where they belong: float32 on a CPU in inference, where calls are what costs."""
    plain = x.device.type == "cpu" and x.dtype == torch.float32
    return plain and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


@functools.cache
def _constant(value: float) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value)


def _kernels() -> Any:
    from etude.kernels import fused_triton

    return fused_triton
