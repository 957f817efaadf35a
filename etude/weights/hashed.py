"""Immutable weights with a digest of each tensor, computed once.

Making or applying a delta needs the checksums of both its ends, and one end is always the other end of the delta
before. Reading all weights to hash them takes longer than everything else about a delta.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.errors import InputError
from etude.system.cores import usable_cores

DIGEST = 16  # bytes
THREADS = 16  # at most: more do not read memory faster
SMALL = 4 << 20  # bytes below which threads cost more than they save

Item = TypeVar("Item")
Result = TypeVar("Result")

_INTEGERS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class HashedWeights(Mapping[str, Tensor]):
    """Tensors by name, which must not change. `known` digests are trusted; others are computed when first needed."""

    def __init__(self, tensors: Mapping[str, Tensor], known: Mapping[str, bytes] | None = None) -> None:
        self._tensors = dict(tensors)
        self._digests = {name: digest for name, digest in (known or {}).items() if name in self._tensors}

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def digests(self) -> Mapping[str, bytes]:
        missing = [name for name in self._tensors if name not in self._digests]
        found = map_in_threads(lambda name: _digest(self[name]), missing, lambda name: self[name].nbytes)
        self._digests |= dict(zip(missing, found, strict=True))
        return self._digests

    def subset(self, names: Sequence[str]) -> "HashedWeights":
        return HashedWeights({name: self[name] for name in names}, self._digests)


def with_digests(weights: Mapping[str, Tensor]) -> HashedWeights:
    """Return the same weights, which must not change from now on, with their digests."""
    return weights if isinstance(weights, HashedWeights) else HashedWeights(weights)


def merge_parts(parts: Sequence[HashedWeights]) -> HashedWeights:
    """Return several subsets of some weights as one."""
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    return HashedWeights(tensors, {name: digest for part in parts for name, digest in part.digests.items()})


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Return a checksum of names, types, shapes and bits."""
    digests = with_digests(weights).digests
    whole = hashlib.blake2b(digest_size=DIGEST)
    for name in sorted(digests):
        text = name.encode()
        whole.update(len(text).to_bytes(8, "little") + text + digests[name])
    return whole.hexdigest()


def bits_of(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor's values as integers of the same width, in order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    bits: npt.NDArray[Any] = flat.view(torch.uint8).numpy().view(integer_of(tensor.dtype))
    return bits


def integer_of(dtype: torch.dtype) -> type[np.unsignedinteger[Any]]:
    return _INTEGERS[dtype.itemsize]


def type_of(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype.itemsize not in _INTEGERS or tensor.is_complex():
        raise InputError(f"weights of type {name} cannot be encoded as a delta; use a real type of 1, 2, 4 or 8 bytes")
    return name


def map_in_threads(
    function: Callable[[Item], Result], items: Sequence[Item], size: Callable[[Item], int]
) -> list[Result]:
    """Return `function` of every item, in order; on all cores if there are enough bytes, the largest first."""
    sizes = [size(item) for item in items]
    if len(items) < 2 or sum(sizes) < SMALL:
        return [function(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, usable_cores(), len(items)), thread_name_prefix="weights") as pool:
        order = sorted(range(len(items)), key=lambda index: -sizes[index])
        running = {index: pool.submit(function, items[index]) for index in order}
        return [running[index].result() for index in range(len(items))]


def _digest(tensor: Tensor) -> bytes:
    digest = hashlib.blake2b(f"{type_of(tensor)}\0{list(tensor.shape)}\0".encode(), digest_size=DIGEST)
    digest.update(bits_of(tensor).data)
    return digest.digest()
