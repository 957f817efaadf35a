"""Attention over pages of keys and values: one query each for many sequences, or a run of queries for a few.

Keys and values are [slots, heads, dim]; a page is `size` consecutive slots. Values may be a narrower view of the keys
(latent attention). The plain versions here run anywhere; the one-query case goes to a Triton kernel on CUDA and to
`decode.c` on a CPU, which both follow the page table instead of gathering the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from etude.kernels.attention import GROUPED
from etude.kernels.native import native_kernels_for


@dataclass(frozen=True)
class Spans:
    """Runs of consecutive tokens of sequences in one step, concatenated: queries, and the keys they may attend to."""

    counts: tuple[int, ...]  # queries of each
    lengths: tuple[int, ...]  # tokens of each sequence up to its last query
    slots: Tensor  # of all those tokens, sequence after sequence
    query_starts: Tensor  # int32, 0 and the cumulative sum of the counts
    key_starts: Tensor  # int32, likewise of the lengths

    @classmethod
    def of(cls, counts: Sequence[int], slots: Sequence[npt.NDArray[np.int64]], device: torch.device | str) -> Spans:
        """Return runs of `counts` queries at the end of sequences that lie in `slots`."""
        lengths = tuple(map(len, slots))
        starts = [torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(device) for sizes in (counts, lengths)]
        return cls(tuple(counts), lengths, torch.from_numpy(np.concatenate(slots)).to(device), starts[0], starts[1])


@dataclass(frozen=True)
class Blocks:
    """Spans split into blocks of queries, so that a captured graph can have a fixed number of them.

    A graph has room for a number of blocks and reads different ones from it each time.
    """

    rows: Tensor  # int32 [blocks, 4]: row of the page table, first query, number of queries, position in the sequence
    queries: int  # of a block, at most

    @staticmethod
    def queries_of(heads: int, kv_heads: int) -> int:
        """Return the queries of a block: with the heads that share a key head, 64 rows of the kernel's products."""
        group = heads // kv_heads
        return max(1, 64 >> (group - 1).bit_length())

    @staticmethod
    def split(row: int, first: int, count: int, position: int, queries: int) -> list[tuple[int, int, int, int]]:
        """Return the blocks of one run."""
        starts = range(0, count, queries)
        return [(row, first + start, min(queries, count - start), position + start) for start in starts]


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
    """Attend with one query per sequence: q [n, heads, dim] over the first `lengths` tokens of its pages -> [n, heads,
    value dim].

    `exact` computes each sequence by itself, so that the batch cannot change a bit of it.
    """
    if _fits_kernel(q, keys, values):
        return _kernels().decode(q, keys, values, tables, lengths, size, scale, exact)  # type: ignore[no-any-return]
    if (native := native_kernels_for(q)) is not None and q.is_contiguous():
        (n, heads, dim), kv_heads, value_dim, longest = q.shape, keys.shape[1], values.shape[-1], int(lengths.max())
        out, scratch = q.new_empty(n, heads, value_dim), q.new_empty(n * heads * longest)
        slabs = keys.data_ptr(), values.data_ptr(), keys.stride(0)
        table = tables.data_ptr(), tables.shape[1], lengths.data_ptr(), size
        shape = n, heads, kv_heads, dim, value_dim, scale
        native.attend_pages(q.data_ptr(), *slabs, *table, out.data_ptr(), scratch.data_ptr(), longest, *shape)
        return out
    if exact:
        rows = []
        for row, length in enumerate(lengths.tolist()):
            pages = tables[row : row + 1, : -(-length // size)]
            rows.append(_gathered(q[row : row + 1], keys, values, pages, lengths[row : row + 1], size, scale))
        return torch.cat(rows)
    return _gathered(q, keys, values, tables, lengths, size, scale)


def store_pages(k: Tensor, v: Tensor | None, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store new keys and values [n, heads, dim] in their slots; without values only keys."""
    if v is not None and _fits_kernel(k, keys, values):
        _kernels().store(k, v, keys, values, slots)
        return
    if (native := native_kernels_for(k)) is not None and _heads_dense(k) and (v is None or _heads_dense(v)):
        new = k.data_ptr(), k.stride(0), *((None, 0) if v is None else (v.data_ptr(), v.stride(0)))
        slabs = keys.data_ptr(), values.data_ptr(), slots.data_ptr()
        native.store_pages(*new, *slabs, len(slots), keys.stride(0))
        return
    keys[slots] = k
    if v is not None:
        values[slots] = v


def _heads_dense(x: Tensor) -> bool:
    """Return whether the heads of a token are contiguous in [n, heads, dim]."""
    return x.stride()[1:] == (x.shape[2], 1)


def _fits_kernel(x: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether the Triton kernel applies: CUDA, half precision, keys and values of one power of two up to 256."""
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
    pages: Tensor = slab.unflatten(0, (-1, size))[tables]
    return pages.flatten(1, 2)


def attend_spans(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, *, scale: float) -> Tensor:
    """Attend with each query of q [n, heads, dim] to all tokens of its sequence up to itself."""
    k, v = keys[spans.slots], values[spans.slots]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _variable_length(q, k, v, spans, scale)
    runs = zip(q.split(spans.counts), k.split(spans.lengths), v.split(spans.lengths), strict=True)
    return torch.cat([_causal(a, b, c, scale) for a, b, c in runs])


def attend_blocks(
    q: Tensor, keys: Tensor, values: Tensor, tables: Tensor, lengths: Tensor, blocks: Blocks, size: int, *, scale: float
) -> Tensor:
    """Attend with the first `len(lengths)` queries of q [n, heads, dim] as in `attend_pages`, and with those of the
    blocks to all tokens of their sequences up to themselves; a query of length 0 and in no block gets zeros."""
    if _fits_kernel(q, keys, values):
        where = tables, lengths, blocks.rows, blocks.queries, size
        return _kernels().decode_and_prefill(q, keys, values, *where, scale)  # type: ignore[no-any-return]
    out = q.new_zeros(*q.shape[:-1], values.shape[-1])
    decoding = lengths.nonzero()[:, 0]
    if len(decoding):
        table = tables[decoding], lengths[decoding], size
        out[decoding] = attend_pages(q[decoding], keys, values, *table, scale=scale)
    for row, first, count, position in blocks.rows.tolist():
        if count:
            at = torch.arange(position + count, device=q.device)
            slots = tables[row, at // size].long() * size + at % size
            out[first : first + count] = _causal(q[first : first + count], keys[slots], values[slots], scale)
    return out


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    queries, tokens = len(q), len(k)
    grouped = q.shape[1] != k.shape[1]
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    if queries == tokens:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        ends = torch.arange(tokens - queries, tokens, device=q.device)
        mask = torch.arange(tokens, device=q.device) <= ends[:, None]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def _variable_length(q: Tensor, k: Tensor, v: Tensor, spans: Spans, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes a second

    narrow, wide = v.shape[-1], -(-q.shape[-1] // 8) * 8
    # the flash kernel needs queries, keys and values of one width, a multiple of eight
    q, k, v = (F.pad(t, (0, wide - t.shape[-1])) if t.shape[-1] != wide else t for t in (q, k, v))
    most = max(spans.counts), max(spans.lengths)
    # With fewer queries than keys the kernel takes the queries to be the last tokens, which they are.
    starts = spans.query_starts, spans.key_starts
    out = varlen_attn(q, k, v, *starts, *most, scale=scale, window_size=(-1, 0), **GROUPED)
    assert isinstance(out, Tensor)
    return out[..., :narrow]
