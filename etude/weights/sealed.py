"""Weights that are not written to any more, and the digest of each tensor, computed once.

Whoever makes a delta or applies one needs the checksum of both its ends, and one end is always the other end of the
delta before. Reading all weights to hash them takes longer than everything else about a delta.
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
THREADS = 16  # at most: memory has no more to give
SMALL = 4 << 20  # bytes below which threads cost more than they save

Item = TypeVar("Item")
Result = TypeVar("Result")

_INTEGERS: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Sealed(Mapping[str, Tensor]):
    """Tensors by name. What is `known` of their digests is believed; the rest is computed when first asked for."""

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
        found = in_threads(lambda name: _digest(self[name]), missing, lambda name: self[name].nbytes)
        self._digests |= dict(zip(missing, found, strict=True))
        return self._digests

    def part(self, names: Sequence[str]) -> "Sealed":
        return Sealed({name: self[name] for name in names}, self._digests)


def seal(weights: Mapping[str, Tensor]) -> Sealed:
    """The same weights; they must stay as they are."""
    return weights if isinstance(weights, Sealed) else Sealed(weights)


def joined(parts: Sequence[Sealed]) -> Sealed:
    """Parts of some weights as one."""
    tensors = {name: tensor for part in parts for name, tensor in part.items()}
    return Sealed(tensors, {name: digest for part in parts for name, digest in part.digests.items()})


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Of names, types, shapes and bits."""
    digests = seal(weights).digests
    whole = hashlib.blake2b(digest_size=DIGEST)
    for name in sorted(digests):
        text = name.encode()
        whole.update(len(text).to_bytes(8, "little") + text + digests[name])
    return whole.hexdigest()


def bits_of(tensor: Tensor) -> npt.NDArray[Any]:
    """A tensor's values as integers of their width, in order."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    bits: npt.NDArray[Any] = flat.view(torch.uint8).numpy().view(integer_of(tensor.dtype))
    return bits


def integer_of(dtype: torch.dtype) -> type[np.unsignedinteger[Any]]:
    return _INTEGERS[dtype.itemsize]


def type_of(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype.itemsize not in _INTEGERS or tensor.is_complex():
        raise InputError(f"weights of type {name} cannot be sent as a delta")
    return name


def in_threads(function: Callable[[Item], Result], items: Sequence[Item], size: Callable[[Item], int]) -> list[Result]:
    """`function` of every item, in order; on all cores if there are bytes enough, the large ones first."""
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
