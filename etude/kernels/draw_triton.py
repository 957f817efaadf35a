"""The Triton side of `draw`: a token, and its probability under two distributions, in one pass over the logits."""

# mypy: ignore-errors
import torch
import triton
import triton.language as tl


@triton.jit
def _draw_kernel(
    logits, stride, temperatures, seeds, places, tokens, logprobs, raw_logprobs, size, BLOCK: tl.constexpr
):
    """One pass over a row: the running sums of both softmaxes, and the largest of logit + Gumbel noise."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    temperature = tl.load(temperatures + index)
    greedy = temperature == 0.0
    cool = tl.where(greedy, 1.0, 1.0 / tl.where(greedy, 1.0, temperature))
    seed = (tl.load(seeds + index) * 1000003 + tl.load(places + index)).to(tl.int64)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    plain = tl.zeros((BLOCK,), tl.float32)
    warm = tl.zeros((BLOCK,), tl.float32)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = tl.zeros((BLOCK,), tl.int32)
    value = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        gone = higher == float("-inf")
        plain = tl.where(gone, 0.0, plain * tl.exp(top - higher) + tl.exp(x - higher))
        warm = tl.where(gone, 0.0, warm * tl.exp((top - higher) * cool) + tl.exp((x - higher) * cool))
        top = higher
        luck = tl.maximum(tl.rand(seed, at), 5.9604645e-08)  # never 0: its logarithm is taken twice
        noise = tl.where(greedy, 0.0, -tl.log(-tl.log(luck)))
        score = tl.where(at < size, x * cool + noise, float("-inf"))
        better = score > best
        best = tl.where(better, score, best)
        chosen = tl.where(better, at, chosen)
        value = tl.where(better, x, value)
    highest = tl.max(top, axis=0)
    plain_sum = tl.sum(plain * tl.exp(top - highest), axis=0)
    warm_sum = tl.sum(warm * tl.exp((top - highest) * cool), axis=0)
    winner = tl.max(best, axis=0)
    # of equals the lowest token, as argmax does
    token = tl.min(tl.where(best == winner, chosen, 2147483647), axis=0)
    at_token = tl.max(tl.where((best == winner) & (chosen == token), value, float("-inf")), axis=0)
    tl.store(tokens + index, token.to(tl.int64))
    tl.store(logprobs + index, tl.where(greedy, 0.0, (at_token - highest) * cool - tl.log(warm_sum)))
    tl.store(raw_logprobs + index, at_token - highest - tl.log(plain_sum))


def draw(logits, temperatures, seeds, places):
    """A token for each row of logits, its log-probability as drawn and under the model's own distribution."""
    n, size = logits.shape
    tokens = torch.empty(n, dtype=torch.int64, device=logits.device)
    logprobs, raw = (torch.empty(n, dtype=torch.float32, device=logits.device) for _ in range(2))
    _draw_kernel[(n,)](
        logits, logits.stride(0), temperatures, seeds, places, tokens, logprobs, raw, size, BLOCK=2048, num_warps=8
    )
    return tokens, logprobs, raw
