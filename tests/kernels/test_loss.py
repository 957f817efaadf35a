"""Chunked head-and-loss against torch's own cross entropy over full logits, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.kernels import loss as kernel
from etude.kernels.loss import IGNORE, linear_cross_entropy, token_logprobs


def problem(n: int, width: int, vocabulary: int, seed: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    hidden, head = torch.randn(n, width, generator=g), torch.randn(vocabulary, width, generator=g)
    targets = torch.randint(vocabulary, (n,), generator=g)
    targets[torch.rand(n, generator=g) < 0.2] = IGNORE
    weights = torch.randn(n, generator=g)
    return tuple(t.to(device) for t in (hidden, head, targets, weights))


def reference(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy(hidden.double() @ head.double().T, targets, ignore_index=IGNORE, reduction="none")


def gradients(value: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(value, inputs)


@settings(max_examples=25, deadline=None)
@given(n=st.integers(1, 40), width=st.integers(1, 20), vocabulary=st.integers(2, 50), seed=st.integers(0, 999))
def test_both_losses_equal_the_plain_ones(n: int, width: int, vocabulary: int, seed: int) -> None:
    hidden, head, targets, weights = problem(n, width, vocabulary, seed)
    hidden.requires_grad_(), head.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK_ELEMENTS", vocabulary * 7)  # several chunks, and a last one that is short
        wanted = reference(hidden, head, targets)
        want_loss = -(wanted * weights).sum()
        want = gradients(want_loss, hidden, head)
        loss = linear_cross_entropy(hidden, head, targets, weights)
        torch.testing.assert_close(loss.double(), want_loss, atol=1e-4, rtol=1e-5)
        for ours, theirs in zip(gradients(3 * loss, hidden, head), want, strict=True):
            torch.testing.assert_close(ours, 3 * theirs.float(), atol=1e-4, rtol=1e-4)
        found = token_logprobs(hidden, head, targets)
        torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-5)
        for ours, theirs in zip(gradients((found * -weights).sum(), hidden, head), want, strict=True):
            torch.testing.assert_close(ours, theirs.float(), atol=1e-4, rtol=1e-4)


def test_shapes_that_would_broadcast_are_refused() -> None:
    hidden, head, targets, weights = problem(6, 8, 40, 0)
    for wrong in (
        (hidden[:2], head, targets, weights),
        (hidden, head, targets, weights[:1]),
        (hidden, head[:, :3], targets, weights),
    ):
        with pytest.raises(ValueError, match="hidden"):
            linear_cross_entropy(*wrong)
    with pytest.raises(ValueError, match="hidden"):
        token_logprobs(hidden, head, targets[:5])
    with pytest.raises(ValueError, match="constants"):
        linear_cross_entropy(hidden, head, targets, weights.requires_grad_())
    assert token_logprobs(hidden[:0], head, targets[:0]).shape == (0,)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_strided_targets_and_weights_count_the_same(device: str) -> None:
    hidden, head, targets, weights = problem(30, 8, 40, 0, device)
    hidden.requires_grad_()
    plain = linear_cross_entropy(hidden, head, targets, torch.full_like(weights, 0.5))
    spread = torch.stack((targets.flip(0), targets), dim=1)[:, 1]
    strided = linear_cross_entropy(hidden, head, spread, torch.tensor(0.5, device=device).expand(30))
    torch.testing.assert_close(strided, plain)
    torch.testing.assert_close(*(torch.autograd.grad(loss, hidden)[0] for loss in (strided, plain)))
    torch.testing.assert_close(token_logprobs(hidden, head, spread), token_logprobs(hidden, head, targets))


@pytest.mark.gpu
def test_a_target_outside_the_vocabulary_is_nan_on_a_gpu() -> None:
    hidden, head, targets, _ = problem(5, 8, 40, 0, "cuda")
    targets[2] = 45
    assert linear_cross_entropy(hidden, head, targets).isnan()
    assert token_logprobs(hidden, head, targets).isnan().tolist() == [False, False, True, False, False]


def test_without_gradients_nothing_is_kept() -> None:
    hidden, head, targets, _ = problem(30, 8, 40, 0)
    loss = linear_cross_entropy(hidden, head, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), -reference(hidden, head, targets).sum(), atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocabulary"), [(300, 49152), (77, 5001), (5, 100)])
def test_the_triton_kernel_equals_the_reference(dtype: torch.dtype, n: int, vocabulary: int) -> None:
    from etude.kernels.softmax import logprobs, logprobs_and_gradient_

    g = torch.Generator().manual_seed(1)
    logits = (4 * torch.randn(n, vocabulary, generator=g)).to(dtype)
    targets = torch.randint(vocabulary, (n,), generator=g)
    targets[::5] = IGNORE
    weights = torch.randn(n, generator=g)
    on_gpu = [t.cuda() for t in (logits, targets, weights)]
    torch.testing.assert_close(logprobs(*on_gpu[:2]).cpu(), logprobs(logits, targets), atol=1e-4, rtol=1e-5)
    want_found, want = logprobs_and_gradient_(logits, targets, weights)
    found, got = logprobs_and_gradient_(*on_gpu)
    torch.testing.assert_close(found.cpu(), want_found, atol=1e-4, rtol=1e-5)
    assert got.data_ptr() == on_gpu[0].data_ptr()
    torch.testing.assert_close(got.cpu(), want, atol=1e-6, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4)
