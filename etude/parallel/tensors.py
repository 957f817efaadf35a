"""Sharded tensors: this rank's part of a DTensor, where it is in the whole, and sums over shards.

Importing torch's DTensor takes as long as torch itself, so it is imported for tensors that are sharded only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Box:
    """A block of a tensor: the first index and the size in every dimension."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]

    def intersect(self, other: Box) -> Box | None:
        """Return the block that both have, or None."""
        pairs = list(zip(self.start, self.sizes, other.start, other.sizes, strict=True))
        start = [max(a, b) for a, _, b, _ in pairs]
        stop = [min(a + n, b + m) for a, n, b, m in pairs]
        if any(last <= first for first, last in zip(start, stop, strict=True)):
            return None
        return Box(tuple(start), tuple(last - first for first, last in zip(start, stop, strict=True)))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return the index of this block in a tensor that holds `outer`."""
        offsets = [a - b for a, b in zip(self.start, outer.start, strict=True)]
        return tuple(slice(at, at + size) for at, size in zip(offsets, self.sizes, strict=True))


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, without a gradient and with the same memory; any other tensor as it is."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_box(tensor: Tensor) -> Box:
    """Return where this rank's part is in the whole tensor."""
    start, sizes = [0] * tensor.dim(), list(tensor.shape)
    if is_sharded(tensor):
        from torch.distributed.tensor import Shard

        for axis, placement in enumerate(tensor.placements):
            if isinstance(placement, Shard):  # in even parts of the size rounded up; the last ones may be empty
                dim, parts = placement.dim, tensor.device_mesh.size(axis)
                step = math.ceil(sizes[dim] / parts)
                first = min(sizes[dim], step * tensor.device_mesh.get_local_rank(axis))
                start[dim], sizes[dim] = start[dim] + first, min(step, sizes[dim] - first)
    return Box(tuple(start), tuple(sizes))


def like(part: Tensor, whole: Tensor) -> Tensor:
    """Return this rank's part of a tensor that is sharded as `whole` is."""
    if not is_sharded(whole):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def total_norm(parts: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the norm over all tensors, of which every rank of the group has a part."""
    norm = torch.nn.utils.get_total_norm(list(parts))
    if group is None:
        return norm
    square = norm.square()
    dist.all_reduce(square, group=group)
    return square.sqrt()
