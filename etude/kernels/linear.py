"""A product with a weight, which a CPU in inference may keep once more in the order its matrix units read it in.

For a few rows (a decode step) most of a product's time is reading the weight: packed by oneDNN, 32 rows of the nano
shape take 1.5 ms instead of 3.2 on two cores with cold caches. Packing is asked for, weight by weight; it costs the
weight's memory once more. A weight that changed in place since is packed again. Everywhere else this is torch's own
`linear`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FEW = 4  # rows below which the packed product is slower than a plain one


class _Packed(NamedTuple):
    tensor: Tensor
    version: int  # of the weight it was made from


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times weight [out, in], plus bias."""
    packed: _Packed | None = getattr(weight, "packed", None)
    if packed is None or torch.is_grad_enabled() or x.numel() < FEW * x.shape[-1]:
        return F.linear(x, weight, bias)
    if packed.version != weight._version:
        packed = pack(weight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed.tensor, bias, "none", [], "")
    return out


def can_pack(weight: Tensor) -> bool:
    """On a CPU with oneDNN, in float32; half precision takes a fast path of its own."""
    fits = weight.device.type == "cpu" and weight.dtype == torch.float32 and not weight.is_inference()
    return fits and torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack(weight: Tensor) -> _Packed:
    """Keep a packed copy beside a weight, for `linear`."""
    with torch.no_grad():
        packed = _Packed(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None), weight._version)
    weight.packed = packed  # type: ignore[attr-defined]
    return packed
