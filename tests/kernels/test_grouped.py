"""One grouped product equals a product per expert, gradients too, for all sizes and for empty groups."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.kernels.grouped import grouped_matmul


def by_loop(rows: torch.Tensor, weights: torch.Tensor, counts: list[int]) -> torch.Tensor:
    return torch.cat([part @ w.T for part, w in zip(rows.split(counts), weights, strict=True)])


@settings(max_examples=40, deadline=None)
@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any),
    inner=st.integers(1, 20),
    out=st.integers(1, 20),
    seed=st.integers(0, 999),
)
def test_grouped_equals_a_loop(counts: list[int], inner: int, out: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(sum(counts), inner, generator=g, requires_grad=True)
    weights = torch.randn(len(counts), out, inner, generator=g, requires_grad=True)
    upstream = torch.randn(sum(counts), out, generator=g)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    ours, theirs = grouped_matmul(rows, weights, ends), by_loop(rows, weights, counts)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    got = torch.autograd.grad(ours, (rows, weights), upstream)
    want = torch.autograd.grad(theirs, (rows, weights), upstream)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_on_a_gpu_equals_the_cpu(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    counts = [100, 0, 37, 263]
    rows, weights = torch.randn(400, 72, generator=g), torch.randn(4, 50, 72, generator=g) / 8
    want = by_loop(rows.to(dtype).float(), weights.to(dtype).float(), counts)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32).cuda()
    got = grouped_matmul(rows.to(dtype).cuda(), weights.to(dtype).cuda(), ends).float().cpu()
    torch.testing.assert_close(got, want, atol=2e-2 if dtype == torch.bfloat16 else 1e-4, rtol=2e-2)
