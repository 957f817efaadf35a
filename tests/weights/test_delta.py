"""Deltas are lossless, for these weights only, and small when little changed."""

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.errors import InputError
from etude.weights.delta import DeltaError, apply_delta, checksum, delta_facts, encode_delta

TYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.float8_e4m3fn,
]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Bit for bit, names, types and shapes included."""
    return checksum(a) == checksum(b) and {n: (t.dtype, t.shape) for n, t in a.items()} == {
        n: (t.dtype, t.shape) for n, t in b.items()
    }


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
    dtype = dtype or draw(st.sampled_from(TYPES))
    shape = shape if shape is not None else draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
    raw = draw(hnp.arrays(np.uint8, int(np.prod(shape)) * dtype.itemsize))
    return torch.from_numpy(raw).view(dtype).reshape(shape) if raw.size else torch.empty(shape, dtype=dtype)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after: changed in a few places, replaced, added, removed."""
    old, new = {}, {}
    for name in draw(st.lists(st.text(min_size=1, max_size=6), max_size=4, unique=True)):
        before = draw(tensors())
        fate = draw(st.sampled_from(["same", "touched", "replaced", "added", "gone"]))
        if fate != "added":
            old[name] = before
        if fate == "same":
            new[name] = before.clone()
        elif fate == "touched":
            new[name] = draw(tensors(before.dtype, tuple(before.shape)))
        elif fate in ("replaced", "added"):
            new[name] = draw(tensors())
    return old, new


@settings(max_examples=300, deadline=None)
@given(pairs())
def test_applying_a_delta_gives_the_new_weights_to_the_bit(pair: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    old, new = pair
    before = checksum(old)
    assert equal(apply_delta(old, encode_delta(old, new)), new)
    assert checksum(old) == before


def step_of_training(values: int = 200_000, share: float = 0.02) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    old = {"w": (torch.randn(values) * 0.02).bfloat16()}
    bits = old["w"].view(torch.int16).clone()
    chosen = torch.rand(values) < share
    bits[chosen] += torch.where(torch.rand(values) < 0.5, 1, -1).to(torch.int16)[chosen]
    return old, {"w": bits.view(torch.bfloat16)}


def test_a_step_of_training_takes_a_hundredth_of_the_weights() -> None:
    old, new = step_of_training()
    delta = encode_delta(old, new)
    assert equal(apply_delta(old, delta), new)
    facts = delta_facts(delta)
    assert facts.changed / facts.values == pytest.approx(0.02, rel=0.1)
    assert facts.bytes < 0.013 * 2 * facts.values  # gaps of about fifty take some eight bits, the steps one


def test_a_delta_for_other_weights_is_refused() -> None:
    old, new = step_of_training(1000)
    delta = encode_delta(old, new)
    other = {"w": new["w"]}
    with pytest.raises(DeltaError, match="for other weights"):
        apply_delta(other, delta)


def test_every_damage_is_noticed() -> None:
    old, new = step_of_training(2000)
    new["extra"] = torch.arange(10.0)
    delta = encode_delta(old, new)
    for place in range(0, len(delta), 7):
        damaged = bytearray(delta)
        damaged[place] ^= 0x20
        try:
            result = apply_delta(old, bytes(damaged))
        except DeltaError:
            continue
        assert equal(result, new), f"byte {place}"
    for size in range(0, len(delta), 11):
        with pytest.raises(DeltaError):
            apply_delta(old, delta[:size])


def test_views_and_odd_strides_are_what_they_show() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    old, new = {"w": base.T}, {"w": (base + (base == 5)).T}
    assert equal(apply_delta(old, encode_delta(old, new)), {"w": new["w"].contiguous()})


def test_what_has_no_plain_bits_is_refused() -> None:
    with pytest.raises(InputError, match="complex64"):
        encode_delta({}, {"w": torch.zeros(2, dtype=torch.complex64)})
