"""Triton kernel of `draw`: a token and its probability under two distributions, in one pass over the logits."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def _draw_kernel(
    logits, stride, temperatures, seeds, positions, tokens, logprobs, raw_logprobs, size, BLOCK: tl.constexpr
):
    """Accumulate, in one pass over a row, the sums of both softmaxes and the largest of logit + Gumbel noise."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    temperature = tl.load(temperatures + index)
    greedy = temperature == 0.0
    inverse = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    seed = (tl.load(seeds + index) * 1000003 + tl.load(positions + index)).to(tl.int64)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    raw = tl.zeros((BLOCK,), tl.float32)
    tempered = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = tl.zeros((BLOCK,), tl.int32)
    value = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        empty = higher == float("-inf")
        raw = tl.where(empty, 0.0, raw * tl.exp(top - higher) + tl.exp(x - higher))
        tempered = tl.where(empty, 0.0, tempered * tl.exp((top - higher) * inverse) + tl.exp((x - higher) * inverse))
        top = higher
        uniform = tl.maximum(tl.rand(seed, at), 5.9604645e-08)  # never 0: its logarithm is taken twice
        noise = tl.where(greedy, 0.0, -tl.log(-tl.log(uniform)))
        score = tl.where(at < size, x * inverse + noise, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        chosen = tl.where(better, at, chosen)
        value = tl.where(better, x, value)
    highest = tl.max(top, axis=0)
    raw_sum = tl.sum(raw * tl.exp(top - highest), axis=0)
    tempered_sum = tl.sum(tempered * tl.exp((top - highest) * inverse), axis=0)
    winner = tl.max(best, axis=0)
    # among equals the lowest token, as argmax does
    token = tl.min(tl.where(best == winner, chosen, 2147483647), axis=0)
    at_token = tl.max(tl.where((best == winner) & (chosen == token), value, float("-inf")), axis=0)
    tl.store(tokens + index, token.to(tl.int64))
    tl.store(logprobs + index, tl.where(greedy, 0.0, (at_token - highest) * inverse - tl.log(tempered_sum)))
    tl.store(raw_logprobs + index, at_token - highest - tl.log(raw_sum))


def draw(logits, temperatures, seeds, positions):
    """Return a token for each row of logits, and its log-probability as sampled and under the model's distribution."""
    n, size = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs, raw = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    _draw_kernel[(n,)](
        logits, logits.stride(0), temperatures, seeds, positions, tokens, logprobs, raw, size, BLOCK=2048, num_warps=8
    )
    return tokens, logprobs, raw
