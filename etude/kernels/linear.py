"""Linear layers, on a CPU in inference with an optional packed copy of the weight in the order oneDNN reads it.

For a few rows (a decode step) most of a product's time is reading the weight: packed by oneDNN, 32 rows of the nano
shape take 1.5 ms instead of 3.2 on two AMD cores with cold caches. On Intel processors MKL reads a plain weight faster
(1.2 ms against 2.5), and a small one everywhere. Callers pack weight by weight; a packed copy doubles its memory. A
weight changed in place since is packed again. Everywhere else this is torch's own `linear`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 4  # rows below which the packed product is slower than a plain one
SMALL = 1 << 16  # values of a weight, below which packing does not pay


class _Packed(NamedTuple):
    tensor: Tensor
    version: int  # of the weight it was made from


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] times weight [out, in], plus bias."""
    packed: _Packed | None = getattr(weight, "packed", None)
    if packed is None or torch.is_grad_enabled() or x.numel() < FEW * x.shape[-1]:
        return F.linear(x, weight, bias)
    if packed.version != weight._version:
        packed = pack(weight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.tensor, bias, "none", [], "")
    return out


def can_pack(weight: Tensor) -> bool:
    """Return whether a weight can be packed: float32 on a CPU with oneDNN. Half precision has its own fast path."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.is_inference()
    return fits and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pays_to_pack(weight: Tensor) -> bool:
    """Return whether a packed copy would be faster here."""
    return can_pack(weight) and weight.numel() >= SMALL and not _on_intel()


@functools.cache
def _on_intel() -> bool:
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def pack(weight: Tensor) -> _Packed:
    """Attach a packed copy to a weight, for `linear`."""
    with torch.no_grad():
        packed = _Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), weight._version)
    weight.packed = packed  # type: ignore[attr-defined]
    return packed
