"""The Triton side of `paged`: decode attention over pages, and keys and values into their slots. GPU only.

One program reads a run of one stream's tokens for one key head and all the query heads that share it, so every key and
value crosses from memory once. Runs have a fixed length, whatever the batch: with `exact` the order of every sum is the
same for a stream alone or among many. Without, a full grid reads each stream in one run.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl

RUN = 512  # tokens of one program when streams are cut into runs
BLOCK = 128  # tokens read at once; 3.4 TB/s on an H200, 64 gives 3.2


@triton.jit
def _decode_kernel(
    q,
    keys,
    values,
    tables,
    lengths,
    out,
    weight,
    scale,
    table_stride,
    key_stride,
    value_stride,
    heads,
    kv_heads,
    runs,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LENGTH: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    stream = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    run = tl.program_id(2)
    length = tl.load(lengths + stream).to(tl.int32)
    first = run * LENGTH if SPLIT else 0
    last = tl.minimum(length, first + LENGTH) if SPLIT else length
    row = tl.arange(0, ROWS)
    at = tl.arange(0, DIM)
    mine = row < GROUP
    asks = q + (stream * heads + head * GROUP + row[:, None]) * DIM + at[None, :]
    query = tl.load(asks, mask=mine[:, None], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < last
        page = tl.load(tables + stream * table_stride + token // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        k = tl.load(keys + slot[:, None] * key_stride + head * DIM + at[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k)).to(tl.float32) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        odds = tl.exp(scores - higher[:, None])
        fade = tl.exp(top - higher)
        v = tl.load(values + slot[:, None] * value_stride + head * DIM + at[None, :], mask=inside[:, None], other=0.0)
        sums = sums * fade[:, None] + tl.dot(odds.to(v.dtype), v).to(tl.float32)
        total = total * fade + tl.sum(odds, axis=1)
        top = higher
    place = stream * heads + head * GROUP + row
    if SPLIT:
        # a run past the end has weight zero
        tl.store(weight + place * runs + run, tl.where(first < length, top + tl.log(total), float("-inf")), mask=mine)
        sums = tl.where(first < length, sums / total[:, None], 0.0)
        tl.store(out + (place[:, None] * runs + run) * DIM + at[None, :], sums, mask=mine[:, None])
    else:
        sums = sums / total[:, None]
        tl.store(out + place[:, None] * DIM + at[None, :], sums.to(out.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _join_kernel(parts, weight, out, runs, DIM: tl.constexpr, RUNS: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    run = tl.arange(0, RUNS)
    at = tl.arange(0, DIM)
    logs = tl.load(weight + place * runs + run, mask=run < runs, other=float("-inf"))
    share = tl.exp(logs - tl.max(logs, axis=0))
    share = share / tl.sum(share, axis=0)
    part = tl.load(parts + (place * runs + run[:, None]) * DIM + at[None, :], mask=(run < runs)[:, None], other=0.0)
    tl.store(out + place * DIM + at, tl.sum(part * share[:, None], axis=0).to(out.dtype.element_ty))


def decode(q, keys, values, tables, lengths, size, scale, exact):
    """q [n, heads, dim] over pages -> [n, heads, dim]."""
    n, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = q.contiguous()
    out = torch.empty_like(q)
    split = exact or n * kv_heads < 512  # too few programs for the device's 132 multiprocessors: cut the streams
    runs = triton.cdiv(tables.shape[1] * size, RUN) if split else 1
    target, weight = out, out
    if split:
        target = torch.empty((n, heads, runs, dim), dtype=torch.float32, device=q.device)
        weight = torch.empty((n, heads, runs), dtype=torch.float32, device=q.device)
    _decode_kernel[(n, kv_heads, runs)](
        q,
        keys,
        values,
        tables,
        lengths,
        target,
        weight,
        scale,
        tables.stride(0),
        keys.stride(0),
        values.stride(0),
        heads,
        kv_heads,
        runs,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        PAGE=size,
        LENGTH=RUN,
        TOKENS=BLOCK,
        SPLIT=split,
        num_warps=4,
        num_stages=3,
    )
    if split:
        _join_kernel[(n * heads,)](target, weight, out, runs, DIM=dim, RUNS=triton.next_power_of_2(runs))
    return out


@triton.jit
def _store_kernel(k, v, keys, values, slots, k_stride, v_stride, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    slot = tl.load(slots + token).to(tl.int64)
    tl.store(keys + slot * size + at, tl.load(k + token * k_stride + at, mask=inside), mask=inside)
    tl.store(values + slot * size + at, tl.load(v + token * v_stride + at, mask=inside), mask=inside)


def store(k, v, keys, values, slots):
    """k and v [n, heads, dim] into their slots, both in one pass."""
    size = k.shape[1] * k.shape[2]
    k = k if k[0].is_contiguous() else k.contiguous()
    v = v if v[0].is_contiguous() else v.contiguous()
    block = triton.next_power_of_2(size)
    _store_kernel[(k.shape[0],)](k, v, keys, values, slots, k.stride(0), v.stride(0), size, BLOCK=block)
