"""Packed weights and fused kernels give the same as plain torch, and follow the weight when it changes."""

import pytest
import torch

from etude.kernels.fused import rms_norm, rotate
from etude.kernels.linear import can_pack, linear, pack


def weight_of(out: int, width: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(out, width, generator=torch.Generator().manual_seed(out)))


@pytest.mark.parametrize("shape", [(1, 1, 24), (1, 7, 24), (33, 24), (2, 5, 24)])
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_weight_gives_the_plain_product(shape: tuple[int, ...], biased: bool) -> None:
    weight, bias = weight_of(17, 24), torch.randn(17) if biased else None
    x = torch.randn(shape)
    with torch.inference_mode():
        want = linear(x, weight, bias)
        if not can_pack(weight):
            pytest.skip("no oneDNN here")
        pack(weight)
        assert torch.allclose(linear(x, weight, bias), want, atol=1e-5)


def test_a_weight_that_changed_in_place_is_packed_again() -> None:
    weight, x = weight_of(16, 24), torch.randn(8, 24)
    if not can_pack(weight):
        pytest.skip("no oneDNN here")
    pack(weight)
    with torch.no_grad():
        weight.mul_(2)
        assert torch.allclose(linear(x, weight), x @ weight.T, atol=1e-5)


def test_gradients_flow_through_a_weight_that_is_packed() -> None:
    weight, x = weight_of(16, 24), torch.randn(8, 24)
    if can_pack(weight):
        pack(weight)
    linear(x, weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("interleaved", [True, False])
def test_inference_on_a_cpu_gives_the_same_numbers_with_fewer_calls(interleaved: bool) -> None:
    x, weight = torch.randn(2, 5, 3, 8), torch.rand(8)
    cos, sin = torch.randn(2, 5, 1, 4), torch.randn(2, 5, 1, 4)
    plain = rms_norm(x, weight, 1e-5), rotate(x, cos, sin, interleaved)
    with torch.inference_mode():
        quick = rms_norm(x, weight, 1e-5), rotate(x, cos, sin, interleaved)
    for one, other in zip(plain, quick, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
