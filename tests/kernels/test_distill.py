"""Distances between draft and teacher against plain torch: values, gradients and acceptance rates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.kernels import loss as kernel
from etude.kernels.distill import Distance, distill


@settings(max_examples=30, deadline=None)
@given(
    distance=st.sampled_from(["kl", "tv"]),
    n=st.integers(1, 20),
    vocabulary=st.integers(2, 40),
    seed=st.integers(0, 999),
)
def test_distances_equal_the_plain_ones(distance: Distance, n: int, vocabulary: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    draft, teacher = (torch.randn(n, 6, generator=g, dtype=torch.float64) for _ in range(2))
    head, weights = torch.randn(vocabulary, 6, generator=g, dtype=torch.float64), torch.rand(n, generator=g)
    draft.requires_grad_(), teacher.requires_grad_(), head.requires_grad_()
    p, q = (teacher @ head.T).softmax(-1), (draft @ head.T).softmax(-1)
    each = (p * (p / q).log()).sum(-1) if distance == "kl" else 0.5 * (p - q).abs().sum(-1)
    want = (each * weights).sum()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK_ELEMENTS", 8 * vocabulary * 3)
        found = distill(draft, teacher, head, weights, distance)
    torch.testing.assert_close(found.loss.double(), want, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        found.overlap.double(), (torch.minimum(p, q).sum(-1) * weights).sum(), atol=1e-4, rtol=1e-4
    )
    same = ((p.argmax(-1) == q.argmax(-1)) * weights).sum()
    torch.testing.assert_close(found.agreement, same, atol=1e-4, rtol=1e-4)
    (got,) = torch.autograd.grad(found.loss, draft)
    torch.testing.assert_close(got, torch.autograd.grad(want, draft)[0], atol=1e-4, rtol=1e-3)


def test_only_the_draft_gets_a_gradient() -> None:
    draft, teacher, head = (torch.randn(4, 6, requires_grad=True) for _ in range(3))
    found = distill(draft, teacher, head, torch.ones(4))
    found.loss.backward()
    assert draft.grad is not None
    assert teacher.grad is None
    assert head.grad is None
    assert not found.overlap.requires_grad
