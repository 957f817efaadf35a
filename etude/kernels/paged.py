"""Attention over pages of keys and values: one query each for many streams, or a run of queries for a few.

Keys and values are [slots, heads, dim]; a page is `size` slots in a row. Values may be a narrower view of the keys
(latent attention). The plain versions here run anywhere; on CUDA the one-query case goes to a Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one stream in a step: rows `first` to `first + count`, the last of those in `slots`."""

    first: int
    count: int
    slots: Tensor  # where every token up to the last of the span lies


def attend_pages(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    size: int,
    *,
    scale: float,
    exact: bool = False,
) -> Tensor:
    """One query per stream: q [n, heads, dim] over the first `lengths` tokens of its pages -> [n, heads, value dim].

    `exact` computes each stream by itself: what else is in the batch cannot change a bit of it.
    """
    if _fits_kernel(q, keys, values):
        return _kernels().decode(q, keys, values, tables, lengths, size, scale, exact)  # type: ignore[no-any-return]
    if exact:
        rows = []
        for row, length in enumerate(lengths.tolist()):
            pages = tables[row : row + 1, : -(-length // size)]
            rows.append(_gathered(q[row : row + 1], keys, values, pages, lengths[row : row + 1], size, scale))
        return torch.cat(rows)
    return _gathered(q, keys, values, tables, lengths, size, scale)


def store_pages(k: Tensor, v: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """New keys and values [n, heads, dim] into their slots; without values only keys."""
    if v is not None and _fits_kernel(k, keys, values):
        _kernels().store(k, v, keys, values, slots)
        return
    keys[slots] = k
    if v is not None:
        values[slots] = v


def _fits_kernel(x: Tensor, keys: Tensor, values: Tensor) -> bool:
    """On CUDA, for heads of a power of two up to 256 with keys and values alike; latents take the plain path."""
    dim = keys.shape[-1]
    return x.is_cuda and dim == values.shape[-1] and dim in (16, 32, 64, 128, 256) and x.dtype != torch.float32


def _kernels() -> Any:
    from etude.kernels import paged_triton

    return paged_triton


def _gathered(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, size: int, scale: float
) -> Tensor:
    n, heads, dim = q.shape
    k = _pages(keys, tables, size)  # [n, tokens, kv heads, dim]
    v = _pages(values, tables, size)
    grouped = q.view(n, k.shape[2], -1, dim)
    scores = (grouped * scale) @ k.permute(0, 2, 3, 1)
    hidden = torch.arange(k.shape[1], device=q.device) >= lengths[:, None]
    scores = scores.float().masked_fill(hidden[:, None, None], float("-inf"))
    out: Tensor = scores.softmax(dim=-1).to(q.dtype) @ v.permute(0, 2, 1, 3)
    return out.reshape(n, heads, v.shape[-1])


def _pages(slab: Tensor, tables: Tensor, size: int) -> Tensor:
    pages = slab.unflatten(0, (-1, size))[tables]
    return pages.flatten(1, 2)


def attend_spans(q: Tensor, keys: Tensor, values: Tensor, spans: list[Span], *, first: int, scale: float) -> Tensor:
    """Runs of queries, each over everything its stream has up to itself; `first` is the row q begins at."""
    outs = []
    for span in spans:
        rows = q[span.first - first : span.first - first + span.count]
        k, v = keys[span.slots], values[span.slots]
        grouped = rows.shape[1] != k.shape[1]
        a, b, c = (t.transpose(0, 1)[None] for t in (rows, k, v))
        if span.count == len(span.slots):
            out = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=grouped)
        else:
            ends = torch.arange(len(span.slots) - span.count, len(span.slots), device=q.device)
            mask = torch.arange(len(span.slots), device=q.device) <= ends[:, None]
            out = F.scaled_dot_product_attention(a, b, c, attn_mask=mask, scale=scale, enable_gqa=grouped)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)
