"""Lossless compressed deltas between two sets of weights.

A training step changes about a hundredth of the bfloat16 weights, most of them to a neighbouring value. So a delta is
the indices that changed, as gaps between them, and by how many steps of the number format: both are small numbers,
split into byte planes, which zstd packs to a bit or two each. Values are compared as bits, so -0.0 and every NaN are
preserved. A delta applies only to the weights it was made from; checksums of both ends guarantee that.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import zstandard
from torch import Tensor

from etude.errors import EtudeError
from etude.weights.hashed import (
    DIGEST,
    HashedWeights,
    bits_of,
    checksum,
    integer_of,
    map_in_threads,
    type_of,
    with_digests,
)

MAGIC = b"ETUDEDELTA\x02\n"
LEVEL = 3  # higher levels save a few percent for several times the time
DENSE = 0.5  # share of changed values above which a tensor is sent whole

_TYPES = {str(kind).removeprefix("torch."): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
HEADER: dict[str, type] = {"base": str, "result": str, "gone": list, "tensors": dict, "values": int, "changed": int}
_WIDTHS = {4: np.uint32, 8: np.uint64}  # of gaps, in bytes


class DeltaError(EtudeError):
    """A delta is damaged, or is not for these weights."""


@dataclass(frozen=True)
class DeltaStats:
    """Size of a delta: values in all, values changed, bytes."""

    values: int
    changed: int
    bytes: int


def encode_delta(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> bytes:
    """Return the bytes that turn `old` into `new`. Tensors may be added, removed, and change their shape or type."""
    old, new = with_digests(old), with_digests(new)
    names = sorted(new)
    encoded = map_in_threads(lambda name: _encode(old.get(name), new[name]), names, lambda name: new[name].nbytes)
    parts: list[bytes] = []
    entries: dict[str, Any] = {}
    for name, (entry, data, _) in zip(names, encoded, strict=True):
        if entry["kind"] != "same":
            entries[name] = entry
            parts += data
    header = {
        "base": checksum(old),
        "result": checksum(new),
        "gone": sorted(set(old) - set(new)),
        "tensors": entries,
        "values": sum(tensor.numel() for tensor in new.values()),
        "changed": sum(changed for _, _, changed in encoded),
    }
    text = json.dumps(header, sort_keys=True).encode()
    return b"".join([MAGIC, _digest(text), struct.pack("<I", len(text)), text, *parts])


def apply_delta(old: Mapping[str, Tensor], delta: bytes) -> HashedWeights:
    """Return the new weights, bit for bit; `old` is not changed. Raise DeltaError if the delta does not fit."""
    old = with_digests(old)
    header, body = _open(delta)
    if checksum(old) != header["base"]:
        raise DeltaError("the delta was made from other weights; start again from a full version")
    entries: dict[str, Any] = header["tensors"]
    try:
        blocks = {name: [body.take(size) for size in entry["sizes"]] for name, entry in entries.items()}

        def size(name: str) -> int:
            return old[name].nbytes if name in old else sum(map(len, blocks[name]))

        new = map_in_threads(lambda name: _decode(old.get(name), entries[name], blocks[name]), list(entries), size)
    except (LookupError, ValueError, TypeError, OverflowError, zstandard.ZstdError) as error:
        raise DeltaError(f"the delta is damaged: {error}") from error
    gone = set(header["gone"])
    kept = {name: tensor for name, tensor in old.items() if name not in entries and name not in gone}
    result = HashedWeights(kept | dict(zip(entries, new, strict=True)), {name: old.digests[name] for name in kept})
    if checksum(result) != header["result"]:
        raise DeltaError("the delta is damaged: it does not give the weights it was made for")
    return result


def delta_stats(delta: bytes) -> DeltaStats:
    """Return the size of a delta without applying it."""
    header, _ = _open(delta)
    return DeltaStats(header["values"], header["changed"], len(delta))


def _encode(old: Tensor | None, new: Tensor) -> tuple[dict[str, Any], list[bytes], int]:
    """Return the encoding of one tensor: its header entry, its blocks, and how many values differ."""
    entry: dict[str, Any] = {"type": type_of(new), "shape": list(new.shape)}
    after = bits_of(new)
    if old is None or type_of(old) != entry["type"] or old.shape != new.shape:
        data = _pack(after)
        return entry | {"kind": "whole", "sizes": [len(data)]}, [data], new.numel()
    before = bits_of(old)
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return entry | {"kind": "same"}, [], 0
    if len(changed) > DENSE * len(after):
        data = _pack(after)
        return entry | {"kind": "whole", "sizes": [len(data)]}, [data], len(changed)
    gaps = np.diff(changed, prepend=-1) - 1
    steps = after[changed] - before[changed]  # wraps around: adding it wraps back
    blocks = [_pack(gaps.astype(np.uint32 if gaps.max() < 1 << 32 else np.uint64)), _pack(_zigzag(steps))]
    wide = 4 if gaps.max() < 1 << 32 else 8
    entry |= {"kind": "sparse", "count": len(changed), "wide": wide, "sizes": [len(block) for block in blocks]}
    return entry, blocks, len(changed)


def _decode(old: Tensor | None, entry: Mapping[str, Any], blocks: Sequence[bytes]) -> Tensor:
    dtype, shape = _TYPES[entry["type"]], tuple(entry["shape"])
    kind = integer_of(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if entry["kind"] == "whole":
        values = _unpack(blocks[0], kind, count)
    elif entry["kind"] != "sparse":
        raise ValueError(f"unknown kind {entry['kind']!r:.40}; expected whole or sparse")
    else:
        if old is None or tuple(old.shape) != shape or type_of(old) != entry["type"]:
            raise ValueError("it changes a tensor that is missing or has another shape or type")
        gaps = _unpack(blocks[0], _WIDTHS[entry["wide"]], entry["count"])
        steps = _unzigzag(_unpack(blocks[1], kind, entry["count"]))
        changed = np.cumsum(gaps.astype(np.int64) + 1) - 1
        values = bits_of(old).copy()
        values[changed] += steps
    return torch.from_numpy(values.view(np.uint8)).view(dtype).reshape(shape)


def _zigzag(steps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Encode small steps up and down as small numbers: 0, -1, 1, -2, 2 become 0, 1, 2, 3, 4."""
    signed = steps.view(f"i{steps.itemsize}")
    encoded: npt.NDArray[Any] = ((signed << 1) ^ (signed >> (8 * steps.itemsize - 1))).view(steps.dtype)
    return encoded


def _unzigzag(encoded: npt.NDArray[Any]) -> npt.NDArray[Any]:
    signs = ~(encoded & 1) + 1  # 0, or all ones
    steps: npt.NDArray[Any] = (encoded >> 1) ^ signs
    return steps


def _pack(values: npt.NDArray[Any]) -> bytes:
    """Compress byte planes: for small numbers all planes but the lowest are zeros."""
    planes = np.ascontiguousarray(values.view(np.uint8).reshape(-1, values.itemsize).T)
    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(planes.tobytes())


def _unpack(data: bytes, kind: Any, count: int) -> npt.NDArray[Any]:
    size = np.dtype(kind).itemsize
    planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data, max_output_size=count * size), np.uint8)
    if len(planes) != count * size:
        raise ValueError(f"a block has {len(planes)} bytes, expected {count * size}")
    values: npt.NDArray[Any] = np.array(planes.reshape(size, count).T, order="C").view(kind).reshape(count)
    return values


class _BlockReader:
    """Reads consecutive blocks."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        block = self._data[self._at : self._at + size]
        if size < 0 or len(block) != size:
            raise ValueError("it ends too early")
        self._at += size
        return bytes(block)


def _open(delta: bytes) -> tuple[dict[str, Any], _BlockReader]:
    """Return the verified header and a reader of the blocks, each of which has its own checksum."""
    if not delta.startswith(MAGIC):
        raise DeltaError("this is not a delta, or one of another format version")
    start = len(MAGIC) + DIGEST + 4
    try:
        (size,) = struct.unpack_from("<I", delta, start - 4)
        text = delta[start : start + size]
        if _digest(text) != delta[len(MAGIC) : len(MAGIC) + DIGEST]:
            raise ValueError("its header does not match its digest")
        header = json.loads(text)
        if not isinstance(header, dict) or not all(isinstance(header.get(key), HEADER[key]) for key in HEADER):
            raise ValueError(f"its header has not the fields {', '.join(HEADER)}")
        return header, _BlockReader(memoryview(delta)[start + size :])
    except (ValueError, struct.error) as error:
        raise DeltaError(f"the delta is damaged: {error}") from error


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=DIGEST).digest()
