"""The small steps between matrix products, each in one pass where nothing is differentiated and nobody compiles.

Decoding runs hundreds of them for one token: in eager torch a norm is four kernels and a rotation seven. On CUDA, in
inference, each is one here; in training and compiled code they are the plain lines, and the rounding is the same:
float32 inside, rounded where transformers and vLLM round. On a CPU in inference, in float32, each is one call of
`decode.c`, equal but for the last bits; without a compiler it is the plain lines.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.kernels.native import serves


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise in float32, round, then scale: where transformers and vLLM round, so that bfloat16 logits agree."""
    if fusing(x):
        return _kernels().rms_norm(x, weight, eps)  # type: ignore[no-any-return]
    if (native := serves(x)) is not None and x.is_contiguous():
        out = torch.empty_like(x)
        native.rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], eps)
        return out
    return F.rms_norm(x.float(), weight.shape, eps=eps).to(x.dtype) * weight


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(first half) times second half."""
    if fusing(gate_up):
        return _kernels().swiglu(gate_up)  # type: ignore[no-any-return]
    if (native := serves(gate_up)) is not None and gate_up.is_contiguous():
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        native.swiglu(gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn each pair of dimensions by its angle. Interleaved pairs come out as halves, in queries and keys alike."""
    half = x.shape[-1] // 2
    if fusing(x) and not interleaved and half & (half - 1) == 0:
        return _kernels().rotate(x, cos, sin)  # type: ignore[no-any-return]
    if not interleaved and (native := serves(x)) is not None and _rows_of_heads(x, cos):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        where = x.data_ptr(), x.stride(1), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        native.rotate(*where, x.shape[1], x.shape[2], x.shape[3])
        return out
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def fusing(x: Tensor) -> bool:
    """Whether the one-pass kernels are used: on CUDA, with no gradient to come and no compiler that fuses itself."""
    return x.is_cuda and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _rows_of_heads(x: Tensor, cos: Tensor) -> bool:
    """One row of tokens [1, tokens, heads, dim], heads side by side, with an angle for each token."""
    return x.dim() == 4 and x.shape[0] == 1 and x.stride()[2:] == (x.shape[3], 1) and cos.is_contiguous()


def _kernels() -> Any:
    from etude.kernels import fused_triton

    return fused_triton
