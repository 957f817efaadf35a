"""Expert parallelism: each rank of a group holds some experts of every layer, and tokens travel to them and back.

Rows (one for each token and chosen expert) go to the rank of their expert by an all-to-all with uneven splits, and the
results come back by its reverse. Each of the two is the gradient of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Lazy, unlike torch.compiler.disable: importing the compiler takes seconds, and few processes need it.
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from etude.errors import InputError


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that divide the experts, as one of them sees it: rank r has the r-th part of them in order."""

    group: dist.ProcessGroup
    size: int

    @_disable_dynamo
    def plan(self, ends: Tensor) -> Exchange:
        """Tell the ranks how many rows each expert gets from this one, whose sorted rows end at `ends` [experts]."""
        sent = ends.long().diff(prepend=ends.new_zeros(1)).view(self.size, -1)
        received = torch.empty_like(sent)  # [source rank, local expert]
        dist.all_to_all_single(received, sent, group=self.group)
        # the only wait of the host: collectives need their sizes there
        splits, own_splits = torch.stack((sent.sum(dim=1), received.sum(dim=1))).tolist()
        experts = torch.arange(received.shape[1], device=ends.device).repeat(self.size)
        by_source = experts.repeat_interleave(received.flatten(), output_size=sum(own_splits))
        order = by_source.sort(stable=True).indices
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = received.sum(dim=0).cumsum(dim=0, dtype=torch.int32)
        return Exchange(self.group, splits, own_splits, order, back, ends)


@dataclass(frozen=True)
class Exchange:
    """One layer's exchange of rows: which go where, and how those that arrive are sorted by local expert."""

    group: dist.ProcessGroup
    splits: list[int]  # of this rank's rows, by rank
    own_splits: list[int]  # of the rows for this rank's experts, by the rank they come from
    order: Tensor  # sorts the arrived rows, which come rank by rank, by expert
    back: Tensor  # its inverse
    ends: Tensor  # int32 [local experts]: bounds of each expert's sorted rows

    @_disable_dynamo
    def to_experts(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks for this rank's experts, sorted by expert; `rows` are sorted by expert."""
        found: Tensor = _ToExperts.apply(rows, self)  # type: ignore[no-untyped-call]
        return found

    @_disable_dynamo
    def to_tokens(self, rows: Tensor) -> Tensor:
        """Return the results for this rank's rows, in their order: the reverse of `to_experts`."""
        found: Tensor = _ToTokens.apply(rows, self)  # type: ignore[no-untyped-call]
        return found

    def _send(self, rows: Tensor) -> Tensor:
        found = rows.new_empty(sum(self.own_splits), *rows.shape[1:])
        dist.all_to_all_single(found, rows.contiguous(), self.own_splits, self.splits, group=self.group)
        return found[self.order]

    def _return(self, rows: Tensor) -> Tensor:
        found = rows.new_empty(sum(self.splits), *rows.shape[1:])
        dist.all_to_all_single(found, rows[self.back], self.splits, self.own_splits, group=self.group)
        return found


class _ToExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._send(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange._return(gradient), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange._return(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange._send(gradient), None


def shard_stacks(module: nn.Module, mesh: DeviceMesh) -> None:
    """Keep this rank's part of dimension 0 of every parameter of a module, as DTensors over a mesh of one dimension."""
    from torch.distributed.tensor import DTensor, Shard  # imports the compiler, which takes seconds

    size, rank = mesh.size(), mesh.get_local_rank()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if len(parameter) % size:
                raise InputError(f"ep = {size} must divide the number of experts, {len(parameter)}")
            local = parameter.detach().chunk(size)[rank].clone()  # of the part only: the whole can be freed
            divided = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
            setattr(owner, name, nn.Parameter(divided, parameter.requires_grad))


def local_experts(parameter: Tensor) -> Tensor:
    """Return this rank's part of a divided parameter, with its gradient; of another tensor, all."""
    if type(parameter) in (Tensor, nn.Parameter):  # instead of isinstance: importing DTensor takes seconds
        return parameter
    found: Tensor = cast(Any, parameter).to_local()
    return found


def exchanged_bytes(
    rows: int, width: int, size: int, itemsize: int, *, forwards: int = 1, backward: bool = True
) -> int:
    """Return the bytes that a rank sends in one layer's forward and backward of its `rows`, with equal loads.

    A row of `width` numbers, one for each token and chosen expert, goes out and back if its expert is on another rank,
    and so does its gradient; with recomputation there are two forwards.
    """
    return rows * (size - 1) // size * width * itemsize * 2 * (forwards + backward)
