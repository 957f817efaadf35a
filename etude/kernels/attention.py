"""Causal attention over whole rows or packed documents; the hardware decides only which kernel runs.

Tensors are [rows, tokens, heads, dim]; fewer key heads than query heads means grouped queries. Values may be narrower
than keys (latent attention). Packed documents on a CPU run one by one: a dense mask costs 3 to 10 times as much there
and FlexAttention has no backward. On CUDA they go to torch's variable-length flash kernel. With context parallelism the
queries are a few chunks of the rows whose keys are given (`QueryChunks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Lazy, unlike torch.compiler.disable: importing the compiler takes seconds, and few processes need it.
from torch._compile import _disable_dynamo
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


@dataclass(frozen=True)
class QueryChunk:
    """Neighbouring queries of a row and the keys they attend to: a slice from the start of the first query's document.

    The documents in it follow each other in both; the last key of a document is that of its last query here. So query
    i of m may see n - m + i + 1 of the document's n keys: a causal mask aligned at the bottom right.
    """

    row: int
    queries: slice  # in the row's queries
    keys: slice  # in the row's keys
    query_lengths: tuple[int, ...]  # by document
    key_lengths: tuple[int, ...]
    query_starts: Tensor  # int32, 0 and then the cumulative sum
    key_starts: Tensor

    @classmethod
    def cut(cls, row: int, at: int, start: int, stop: int, lengths: Sequence[int], device: torch.device) -> QueryChunk:
        """Return the chunk of the tokens start..stop of a row with these documents; its queries begin at `at`."""
        ends = list(accumulate(lengths))
        inside = [(end - n, end) for n, end in zip(lengths, ends, strict=True) if end > start and end - n < stop]
        query_lengths = tuple(min(end, stop) - max(begin, start) for begin, end in inside)
        key_lengths = tuple(min(end, stop) - begin for begin, end in inside)
        query_starts, key_starts = (
            torch.tensor([0, *accumulate(sizes)], dtype=torch.int32, device=device)
            for sizes in (query_lengths, key_lengths)
        )
        queries, keys = slice(at, at + stop - start), slice(inside[0][0], stop)
        return cls(row, queries, keys, query_lengths, key_lengths, query_starts, key_starts)


@dataclass(frozen=True)
class QueryChunks:
    """Rows of which only some tokens are queries: chunk by chunk in order, the same number in every row."""

    positions: Tensor  # [rows, queries], within the documents
    chunks: tuple[QueryChunk, ...]  # row by row


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, documents: Documents | QueryChunks | None = None
) -> Tensor:
    """Attend from each token to itself and to the tokens before it in its row, or in its document.

    With `QueryChunks`, k and v are those of the rows from their first token on, as far as a chunk sees.
    """
    if documents is None:
        return _whole_rows(q, k, v, scale)
    variable_length = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if isinstance(documents, QueryChunks):
        return _chunks(q, k, v, scale, documents, variable_length)
    if variable_length:
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


@_disable_dynamo  # the sizes of chunks are others in each batch, and would be compiled into the code
def _chunks(q: Tensor, k: Tensor, v: Tensor, scale: float, queries: QueryChunks, variable_length: bool) -> Tensor:
    attend_chunk = _chunk_variable_length if variable_length else _chunk_per_document
    out = [attend_chunk(q[c.row, c.queries], k[c.row, c.keys], v[c.row, c.keys], scale, c) for c in queries.chunks]
    return torch.cat(out).view(*q.shape[:-1], v.shape[-1])


def _chunk_per_document(q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: QueryChunk) -> Tensor:
    queries, keys, values = q.split(chunk.query_lengths), k.split(chunk.key_lengths), v.split(chunk.key_lengths)
    out = []
    for a, b, c in zip(queries, keys, values, strict=True):
        if len(a) == len(b):
            out.append(_whole_rows(a[None], b[None], c[None], scale)[0])
        else:  # torch's `is_causal` would align the mask at the top left
            mask = torch.ones(len(a), len(b), dtype=torch.bool, device=q.device).tril(len(b) - len(a))
            out.append(attend_masked(a[None], b[None], c[None], scale=scale, mask=mask[None])[0])
    return torch.cat(out)


def _chunk_variable_length(q: Tensor, k: Tensor, v: Tensor, scale: float, chunk: QueryChunk) -> Tensor:
    longest = max(chunk.query_lengths), max(chunk.key_lengths)
    return _flash(q, k, v, (chunk.query_starts, chunk.key_starts), longest, scale)


def _variable_length(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Documents) -> Tensor:
    starts, bound = documents.starts, documents.bound
    rows, tokens = q.shape[:2]
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = _flash(q, k, v, (starts, starts), (bound, bound), scale)
    return out.view(rows, tokens, *out.shape[1:])


def _flash(
    q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], longest: tuple[int, int], scale: float
) -> Tensor:
    """Attend within documents of q [queries, heads, dim] and k, v; its causal mask is aligned at the bottom right."""
    from torch.nn.attention.varlen import varlen_attn  # imports the compiler, which takes a second

    narrow = v.shape[-1]
    if narrow != q.shape[-1]:
        v = F.pad(v, (0, q.shape[-1] - narrow))  # the flash kernel needs keys and values of one width
    out = varlen_attn(q, k, v, *starts, *longest, scale=scale, window_size=(-1, 0), **GROUPED)
    assert isinstance(out, Tensor)
    return out[..., :narrow]
