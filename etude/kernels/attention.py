"""Causal attention over whole rows or packed documents; the hardware decides only which kernel runs.

Tensors are [rows, tokens, heads, dim]; fewer key heads than query heads means grouped queries. Values may be narrower
than keys (latent attention). Packed documents on a CPU run one by one: a dense mask costs 3 to 10 times as much there
and FlexAttention has no backward. On CUDA they go to torch's variable-length flash kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from etude.errors import InputError

# cuDNN first: on Hopper its causal kernel beats flash (0.89 against 1.45 ms forward and backward, SmolLM2-135M,
# 16 x 2048 tokens); the others run what it does not support.
_PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Option of the variable-length kernel: torch 2.11 accepts grouped queries without it; later versions require it.
GROUPED: dict[str, Any] = {} if torch.__version__.startswith("2.11.") else {"enable_gqa": True}


@dataclass(frozen=True)
class Documents:
    """Several documents in one row: attention stays within a document and positions restart at each."""

    lengths: tuple[int, ...]  # of all documents, row by row
    positions: Tensor  # [rows, tokens]
    starts: Tensor  # int32, 0 and then the cumulative sum of the lengths
    bound: int  # at least the longest length; a power of two, so that compiled code sees few different values

    @classmethod
    def pack(cls, rows: Sequence[Sequence[int]], device: torch.device | str | None = None) -> Documents:
        """Pack the document lengths of each row; every row must add up to the same number of tokens."""
        sizes = {sum(row) for row in rows}
        lengths = tuple(chain.from_iterable(rows))
        if len(sizes) != 1 or min(lengths, default=0) < 1:
            raise InputError(f"packed rows must have one length and documents at least one token; got {list(rows)}")
        positions = torch.cat([torch.arange(n) for n in lengths]).view(len(rows), sizes.pop())
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        bound = 1 << (max(lengths) - 1).bit_length()
        return cls(lengths, positions.to(device), starts.to(device), bound)


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, documents: Documents | None = None) -> Tensor:
    """Attend from each token to itself and to the tokens before it in its row, or in its document."""
    if documents is None:
        return _whole_rows(q, k, v, scale)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _variable_length(q, k, v, scale, documents)
    return _per_document(q, k, v, scale, documents)


def attend_masked(q: Tensor, k: Tensor, v: Tensor, *, scale: float, mask: Tensor) -> Tensor:
    """Attend where `mask` [rows, queries, keys] is true; for a KV cache whose rows have unequal lengths."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _whole_rows(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if not q.is_cuda:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        with sdpa_kernel(_PREFERRED, set_priority=True):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)


def _per_document(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Documents) -> Tensor:
    rows, tokens = q.shape[:2]
    parts = [t.flatten(0, 1).split(documents.lengths) for t in (q, k, v)]
    out = [_whole_rows(a[None], b[None], c[None], scale)[0] for a, b, c in zip(*parts, strict=True)]
    return torch.cat(out).view(rows, tokens, *out[0].shape[1:])


def _variable_length(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Documents) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes a second

    rows, tokens, narrow = *q.shape[:2], v.shape[-1]
    if narrow != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - narrow))  # the flash kernel needs keys and values of one width
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    starts, bound = documents.starts, documents.bound
    out = varlen_attn(q, k, v, starts, starts, bound, bound, scale=scale, window_size=(-1, 0), **GROUPED)
    assert isinstance(out, Tensor)
    return out.view(rows, tokens, *out.shape[1:])[..., :narrow]
