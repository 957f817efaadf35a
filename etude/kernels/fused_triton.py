"""Triton kernels of `fused`: one program per row. Imported only where there is a GPU."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(x, out, weight, stride, size, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(x + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / size + eps)
    kind = out.dtype.element_ty
    normal = (value * scale).to(kind)
    scaled = normal.to(tl.float32) * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, scaled.to(kind), mask=inside)


def rms_norm(x, weight, eps):
    size = x.shape[-1]
    rows = x.reshape(-1, size)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    warps = 1 if block <= 256 else 4 if block <= 2048 else 8
    _rms_norm_kernel[(rows.shape[0],)](rows, out, weight, rows.stride(0), size, eps, BLOCK=block, num_warps=warps)
    return out.view(x.shape)


@triton.jit
def _swiglu_kernel(gate_up, out, stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind = out.dtype.element_ty
    gate = tl.load(gate_up + row * stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + size + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind)  # torch rounds between the two
    tl.store(out + row * size + at, (silu.to(tl.float32) * up).to(kind), mask=inside)


def swiglu(gate_up):
    size = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * size)
    out = torch.empty((rows.shape[0], size), dtype=rows.dtype, device=rows.device)
    block = min(1024, triton.next_power_of_2(size))
    _swiglu_kernel[(rows.shape[0], triton.cdiv(size, block))](rows, out, rows.stride(0), size, BLOCK=block)
    return out.view(*gate_up.shape[:-1], size)


@triton.jit
def _rotate_kernel(x, out, cos, sin, stride_t, stride_h, heads, HALF: tl.constexpr, HEADS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF)[None, :]
    inside = head < heads
    kind = out.dtype.element_ty
    a = tl.load(x + token * stride_t + head * stride_h + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + token * stride_t + head * stride_h + HALF + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + at).to(tl.float32)
    s = tl.load(sin + token * HALF + at).to(tl.float32)
    # every product and sum is rounded, as in plain torch
    first = ((a * c).to(kind).to(tl.float32) - (b * s).to(kind).to(tl.float32)).to(kind)
    second = ((b * c).to(kind).to(tl.float32) + (a * s).to(kind).to(tl.float32)).to(kind)
    base = out + (token * heads + head) * (2 * HALF) + at
    tl.store(base, first, mask=inside)
    tl.store(base + HALF, second, mask=inside)


def rotate(x, cos, sin):
    """Rotate x [rows, tokens, heads, dim] by cos and sin [rows, tokens, 1, dim / 2]."""
    rows, tokens, heads, dim = x.shape
    flat = x.flatten(0, 1)
    if flat.stride(-1) != 1:
        flat = flat.contiguous()
    out = torch.empty((rows * tokens, heads, dim), dtype=x.dtype, device=x.device)
    cos, sin = (t.expand(rows, tokens, 1, dim // 2).reshape(-1, dim // 2).contiguous() for t in (cos, sin))
    _rotate_kernel[(rows * tokens,)](
        flat,
        out,
        cos,
        sin,
        flat.stride(0),
        flat.stride(1),
        heads,
        HALF=dim // 2,
        HEADS=triton.next_power_of_2(heads),
        enable_fp_fusion=False,  # a fused multiply-add would skip a rounding
    )
    return out.view(rows, tokens, heads, dim)
