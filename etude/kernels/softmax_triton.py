"""Triton kernels of `softmax`: one program per row, float32 inside. Imported only where there is a GPU."""

# mypy: ignore-errors
import triton
import triton.language as tl


@triton.jit
def _log_sum_exp(row, size, BLOCK: tl.constexpr):
    """Return log(sum(exp(row))) from a running maximum and sum per lane, combined at the end."""
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # lanes past the end stay at -inf; exp(-inf - -inf) would be NaN
        total = tl.where(higher == float("-inf"), 0.0, total * tl.exp(top - higher) + tl.exp(x - higher))
        top = higher
    highest = tl.max(top, axis=0)
    return highest + tl.log(tl.sum(total * tl.exp(top - highest), axis=0))


@triton.jit
def logprobs_kernel(logits, stride, targets, found, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    target = tl.load(targets + index)
    if target < 0:
        tl.store(found + index, 0.0)
    else:
        # a target outside the vocabulary has no probability: NaN makes the error visible
        at_target = tl.load(row + target, mask=target < size, other=float("nan")).to(tl.float32)
        tl.store(found + index, at_target - _log_sum_exp(row, size, BLOCK))


@triton.jit
def logprobs_and_gradient_kernel(logits, stride, targets, weights, found, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    target = tl.load(targets + index)
    weight = tl.where(target < 0, 0.0, tl.load(weights + index))
    log_sum = _log_sum_exp(row, size, BLOCK)
    at_target = tl.load(row + tl.maximum(target, 0), mask=target < size, other=float("nan")).to(tl.float32)
    tl.store(found + index, tl.where(target < 0, 0.0, at_target - log_sum))
    tl.debug_barrier()  # the target's logit is read before any thread writes over it
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < size
        x = tl.load(row + at, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = (tl.exp(x - log_sum) - tl.where(at == target, 1.0, 0.0)) * weight
        tl.store(row + at, gradient.to(row.dtype.element_ty), mask=inside)
