"""Norm, gate and rotation between matrix products, each fused into one pass in uncompiled inference.

Decoding runs hundreds of them for one token: in eager torch a norm is four kernels and a rotation seven. In inference
on CUDA each is one kernel; training and compiled code use plain torch with the same rounding: float32 inside, rounded
where transformers and vLLM round. In float32 inference on a CPU each is one call of `decode.c`, equal except for the
last bits; without a C compiler it is plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.kernels.native import native_kernels_for


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, round, then scale, as transformers and vLLM do, so that bfloat16 logits agree."""
    if uses_fused_kernels(x):
        return _kernels().rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    if (native := native_kernels_for(x)) is not None and x.is_contiguous():
        out = torch.empty_like(x)
        native.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], eps)
        return out
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(first half) times second half."""
    if uses_fused_kernels(gate_up):
        return _kernels().swiglu(gate_up)  # type: ignore[no-any-return]
    if (native := native_kernels_for(gate_up)) is not None and gate_up.is_contiguous():
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        native.swiglu(gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair of dimensions by its angle. Interleaved pairs come out as halves, in queries and keys alike."""
    half = x.shape[-1] // 2
    if uses_fused_kernels(x) and not interleaved and half & (half - 1) == 0:
        return _kernels().rotate(x, cos, sin)  # type: ignore[no-any-return]
    if not interleaved and (native := native_kernels_for(x)) is not None and _rows_of_heads(x, cos):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        pointers = x.data_ptr(), x.stride(1), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        native.rotate(*pointers, x.shape[1], x.shape[2], x.shape[3])
        return out
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def uses_fused_kernels(x: Tensor) -> bool:
    """Return whether the fused kernels are used: on CUDA, without gradients and outside torch.compile."""
    return x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _rows_of_heads(x: Tensor, cos: Tensor) -> bool:
    """Return whether x is one row of tokens [1, tokens, heads, dim] with contiguous heads and an angle per token."""
    return x.dim() == 4 and x.shape[0] == 1 and x.stride()[2:] == (x.shape[3], 1) and cos.is_contiguous()


def _kernels() -> Any:
    from etude.kernels import fused_triton

    return fused_triton
