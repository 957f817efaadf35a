"""Triton kernels of `paged`: attention over pages, and storing keys and values in their slots. GPU only.

In decoding, one program reads a run of one sequence's tokens for one key head and all the query heads that share it, so
every key and value is loaded once. Runs have a fixed length, whatever the batch: with `exact` the order of every sum is
the same for a sequence alone or among many. Otherwise a full grid reads each sequence in one run. In prefill, one
program has a block of queries of one sequence, again for one key head; a tensor says which block.
"""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl

RUN = 512  # tokens of one program when sequences are split into runs
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
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    run = tl.program_id(2)
    length = tl.load(lengths + sequence).to(tl.int32)
    first = run * LENGTH if SPLIT else 0
    last = tl.minimum(length, first + LENGTH) if SPLIT else length
    row = tl.arange(0, ROWS)
    at = tl.arange(0, DIM)
    mine = row < GROUP
    pointers = q + (sequence * heads + head * GROUP + row[:, None]) * DIM + at[None, :]
    query = tl.load(pointers, mask=mine[:, None], other=0.0)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM), tl.float32)
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < last
        page = tl.load(tables + sequence * table_stride + token // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        k = tl.load(keys + slot[:, None] * key_stride + head * DIM + at[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k)).to(tl.float32) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        rescale = tl.exp(top - higher)
        v = tl.load(values + slot[:, None] * value_stride + head * DIM + at[None, :], mask=inside[:, None], other=0.0)
        sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v).to(tl.float32)
        total = total * rescale + tl.sum(weights, axis=1)
        top = higher
    target = sequence * heads + head * GROUP + row
    if SPLIT:
        # a run past the end has weight zero
        tl.store(weight + target * runs + run, tl.where(first < length, top + tl.log(total), float("-inf")), mask=mine)
        sums = tl.where(first < length, sums / total[:, None], 0.0)
        tl.store(out + (target[:, None] * runs + run) * DIM + at[None, :], sums, mask=mine[:, None])
    else:
        sums = sums / tl.where(total > 0, total, 1.0)[:, None]  # a sequence of no tokens gives zeros
        tl.store(out + target[:, None] * DIM + at[None, :], sums.to(out.dtype.element_ty), mask=mine[:, None])


@triton.jit
def _join_kernel(parts, weight, out, runs, DIM: tl.constexpr, RUNS: tl.constexpr):
    target = tl.program_id(0).to(tl.int64)
    run = tl.arange(0, RUNS)
    at = tl.arange(0, DIM)
    logs = tl.load(weight + target * runs + run, mask=run < runs, other=float("-inf"))
    top = tl.max(logs, axis=0)
    share = tl.exp(logs - tl.where(top > float("-inf"), top, 0.0))
    total = tl.sum(share, axis=0)
    share = share / tl.where(total > 0, total, 1.0)
    part = tl.load(parts + (target * runs + run[:, None]) * DIM + at[None, :], mask=(run < runs)[:, None], other=0.0)
    tl.store(out + target * DIM + at, tl.sum(part * share[:, None], axis=0).to(out.dtype.element_ty))


def decode(q, keys, values, tables, lengths, size, scale, exact, out=None):
    """Attend with q [n, heads, dim] over pages -> [n, heads, dim]; where a length is 0, zeros."""
    n, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = q.contiguous()
    out = torch.empty_like(q) if out is None else out
    split = exact or n * kv_heads < 512  # too few programs for the device's 132 multiprocessors: split sequences
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
def _prefill_kernel(
    q,
    keys,
    values,
    tables,
    blocks,
    out,
    scale,
    table_stride,
    key_stride,
    value_stride,
    heads,
    QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    block = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(blocks + block * 4).to(tl.int64)
    first = tl.load(blocks + block * 4 + 1).to(tl.int64)
    count = tl.load(blocks + block * 4 + 2)
    position = tl.load(blocks + block * 4 + 3)
    last = tl.where(count > 0, position + count, 0)  # an unused block attends to nothing
    row = tl.arange(0, QUERIES * WIDE)
    index = row // WIDE
    member = row % WIDE
    at = tl.arange(0, DIM)
    mine = (index < count) & (member < GROUP)
    offset = ((first + index) * heads + head * GROUP + member)[:, None] * DIM + at[None, :]
    query = tl.load(q + offset, mask=mine[:, None], other=0.0)
    top = tl.full((QUERIES * WIDE,), float("-inf"), tl.float32)
    total = tl.zeros((QUERIES * WIDE,), tl.float32)
    sums = tl.zeros((QUERIES * WIDE, DIM), tl.float32)
    for start in range(0, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        inside = token < last
        page = tl.load(tables + sequence * table_stride + token // PAGE, mask=inside, other=0)
        slot = page.to(tl.int64) * PAGE + token % PAGE
        k = tl.load(keys + slot[:, None] * key_stride + head * DIM + at[None, :], mask=inside[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k)).to(tl.float32) * scale
        # every row sees the first token, so no maximum is -inf
        scores = tl.where(token[None, :] <= (position + index)[:, None], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        rescale = tl.exp(top - higher)
        v = tl.load(values + slot[:, None] * value_stride + head * DIM + at[None, :], mask=inside[:, None], other=0.0)
        sums = sums * rescale[:, None] + tl.dot(weights.to(v.dtype), v).to(tl.float32)
        total = total * rescale + tl.sum(weights, axis=1)
        top = higher
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + offset, sums.to(out.dtype.element_ty), mask=mine[:, None])


def decode_and_prefill(q, keys, values, tables, lengths, blocks, queries, size, scale):
    """Attend with the first `len(lengths)` of q [n, heads, dim] as in `decode`, then with each of `blocks`."""
    q = q.contiguous()
    out = torch.zeros_like(q)
    n, heads, dim = len(lengths), *q.shape[1:]
    decode(q[:n], keys, values, tables, lengths, size, scale, False, out[:n])
    group = heads // keys.shape[1]
    _prefill_kernel[(len(blocks), keys.shape[1])](
        q,
        keys,
        values,
        tables,
        blocks,
        out,
        scale,
        tables.stride(0),
        keys.stride(0),
        values.stride(0),
        heads,
        QUERIES=queries,
        GROUP=group,
        WIDE=max(triton.next_power_of_2(group), triton.cdiv(16, queries)),
        DIM=dim,
        PAGE=size,
        TOKENS=64,
        num_warps=4,
        num_stages=3 if dim <= 128 else 2,  # keys and values of all stages lie in shared memory
    )
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
    """Store k and v [n, heads, dim] in their slots, both in one pass."""
    size = k.shape[1] * k.shape[2]
    k = k if k[0].is_contiguous() else k.contiguous()
    v = v if v[0].is_contiguous() else v.contiguous()
    block = triton.next_power_of_2(size)
    _store_kernel[(k.shape[0],)](k, v, keys, values, slots, k.stride(0), v.stride(0), size, BLOCK=block)
