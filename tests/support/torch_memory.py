"""Bytes of torch's tensors: those that are held, and the most that exist at once while a block runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from etude.parallel.tensors import local_part


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, of sharded ones this process's; a shared one counts once."""
    storages = [local_part(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class AllocationPeak(TorchDispatchMode):
    """A context manager whose `bytes` are the most that the storages of all tensors had at once, since the last `mark`.

    It looks after every operation of torch at the storages that exist, whatever refers to them; tensors must have been
    made inside. torch's profiler cannot say it: it does not see what gloo's threads free.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # its operations on local tensors come here
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, found)):
            if isinstance(tensor, Tensor):
                self._storages.add(tensor.untyped_storage())
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in self._storages))
        return found

    def mark(self) -> None:
        """Begin to measure, without what Python has not collected yet."""
        gc.collect()
        self.bytes = 0
