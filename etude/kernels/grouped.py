"""One matrix product for all experts: rows sorted by expert times each expert's own matrix.

torch's `grouped_mm` does the work, on CPU and on CUDA, forward and backward. It needs 16-byte aligned rows, so the odd
sizes of toy models are padded here.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def grouped_matmul(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [n, in], sorted by expert, by weights [experts, out, in]; ends int32 [experts] bound their rows."""
    wide = 16 // rows.element_size()
    out, inner = weights.shape[1:]
    if short := -inner % wide:
        rows, weights = F.pad(rows, (0, short)), F.pad(weights, (0, short))
    if short := -out % wide:
        weights = F.pad(weights, (0, 0, 0, short))
    product: Tensor = F.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    return product[:, :out]
