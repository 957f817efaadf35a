"""Deltas are lossless, apply only to their base weights, and are small when little changed."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.errors import InputError
from etude.weights import delta as delta_module
from etude.weights import hashed
from etude.weights.delta import DeltaError, apply_delta, delta_stats, encode_delta
from etude.weights.hashed import checksum
from etude.weights.object_store import ObjectStore
from etude.weights.versions import read_version, write_version

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


def equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return whether two sets of weights are equal bit for bit, names, types and shapes included."""
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
    """Draw weights before and after: changed in a few places, replaced, added, removed."""
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
    stats = delta_stats(delta)
    assert stats.changed / stats.values == pytest.approx(0.02, rel=0.1)
    assert stats.bytes < 0.013 * 2 * stats.values  # gaps of about fifty take some eight bits, the steps one


def test_a_delta_for_other_weights_is_refused() -> None:
    old, new = step_of_training(1000)
    delta = encode_delta(old, new)
    other = {"w": new["w"]}
    with pytest.raises(DeltaError, match="made from other weights"):
        apply_delta(other, delta)


def test_all_damage_is_detected() -> None:
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


def test_views_and_odd_strides_are_encoded_by_value() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    old, new = {"w": base.T}, {"w": (base + (base == 5)).T}
    assert equal(apply_delta(old, encode_delta(old, new)), {"w": new["w"].contiguous()})


def test_complex_tensors_are_refused() -> None:
    with pytest.raises(InputError, match="complex64"):
        encode_delta({}, {"w": torch.zeros(2, dtype=torch.complex64)})


def test_on_many_cores_a_delta_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    old = {f"w{index}": torch.randn(3 + 17 * index, 8).bfloat16() for index in range(40)}
    new = {name: (tensor + 0.01 * (torch.rand_like(tensor) < 0.1)).bfloat16() for name, tensor in old.items()}
    alone = encode_delta(old, new)
    monkeypatch.setattr(hashed, "SMALL", 0)
    monkeypatch.setattr(hashed, "usable_cores", lambda: 5)
    assert encode_delta(old, new) == alone
    assert equal(apply_delta(old, alone), new)
    for place in range(len(alone) // 2, len(alone), 97):  # in a block, which a thread reads
        damaged = bytearray(alone)
        damaged[place] ^= 0x20
        with pytest.raises(DeltaError):
            apply_delta(old, bytes(damaged))


def counting(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Return a list of the tensors whose digests are computed from now on."""
    computed: list[Tensor] = []
    digest = hashed._digest

    def counted(tensor: Tensor) -> bytes:
        computed.append(tensor)
        return digest(tensor)

    monkeypatch.setattr(hashed, "_digest", counted)
    return computed


def test_publisher_and_reader_each_hash_every_version_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    computed = counting(monkeypatch)
    store, versions = ObjectStore(tmp_path), 5
    last = None
    for number in range(versions):
        state = hashed.with_digests({name: torch.arange(6.0) + number for name in "abc"})
        last = write_version(store, number, state, last, limit=30), state
        assert len(last[0].shards) == 3
    assert len(computed) == versions * 3
    computed.clear()
    theirs = None
    for number in range(versions):
        theirs = read_version(store, number, theirs)
    assert len(computed) == versions * 3


@pytest.mark.parametrize(
    "change",
    [
        {"base": None},
        {"tensors": []},
        {"values": "many"},
        {"tensors": {"w": {"type": "float32", "shape": [3], "kind": "odd", "sizes": []}}},
        {"tensors": {"w": {"type": "float32", "shape": [1 << 62], "kind": "whole", "sizes": [4]}}},
        {"tensors": {"w": []}},
    ],
)
def test_an_invalid_header_is_damage(change: dict[str, object]) -> None:
    delta = encode_delta({}, {"w": torch.arange(3.0)})
    header, _ = delta_module._open(delta)
    text = json.dumps(header | change).encode()
    start = len(delta_module.MAGIC) + hashed.DIGEST + 4
    (size,) = struct.unpack_from("<I", delta, start - 4)
    head = delta_module.MAGIC + delta_module._digest(text) + struct.pack("<I", len(text))
    with pytest.raises(DeltaError):
        apply_delta({}, head + text + delta[start + size :])


def test_digests_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = counting(monkeypatch)
    states = [{"still": torch.arange(5.0), "moves": torch.arange(5.0) + step} for step in range(4)]
    mine, theirs = (
        hashed.with_digests(states[0]),
        hashed.with_digests({name: t.clone() for name, t in states[0].items()}),
    )
    for state in states[1:]:
        before, mine = mine, hashed.with_digests(state)
        theirs = apply_delta(theirs, encode_delta(before, mine))
    assert equal(theirs, states[-1])
    # The sender hashes both tensors of all four, the receiver those of the first and each one that moved.
    assert len(computed) == 4 * 2 + 2 + 3 + len(states[-1])  # the last: of the plain weights it is compared with


def test_a_checksum_is_of_names_types_shapes_and_bits() -> None:
    plain = {"a": torch.zeros(6), "b": torch.ones(2)}
    others: list[dict[str, Tensor]] = [
        {"a": torch.zeros(6)},
        {"b": torch.zeros(6), "a": torch.ones(2)},
        {"a": torch.zeros(2, 3), "b": torch.ones(2)},
        {"a": torch.zeros(6, dtype=torch.int32), "b": torch.ones(2)},
        {"a": -torch.zeros(6), "b": torch.ones(2)},
    ]
    assert len({checksum(each) for each in (plain, *others)}) == 1 + len(others)
    assert checksum(dict(reversed(plain.items()))) == checksum(plain)
