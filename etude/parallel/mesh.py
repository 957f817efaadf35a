"""The device mesh of a training job: which rank has which rows, tokens, parameters and experts.

    ranks in order         replicate x shard x context          (the context ranks of a row are neighbours)
    dense parameters       sharded over shard x context, replicated over `replicate`
    experts                dimension 0 over `expert` ranks, sharded over the rest of shard x context (`expert_shard`)

Expert groups are neighbours in shard x context whatever `cp` is: the two are independent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from etude.errors import InputError
from etude.parallel.context import ContextGroup
from etude.parallel.launch import Followers, open_store, rendezvous
from etude.parallel.settings import ParallelSettings

T = TypeVar("T")
EXPERT = "expert"  # name of the mesh dimension that divides experts
# A rank may wait for one that samples, evaluates or writes a checkpoint; the launcher notices dead ranks.
TIMEOUT = timedelta(hours=4)


@dataclass(frozen=True)
class TrainingMesh:
    """The mesh as one rank sees it."""

    settings: ParallelSettings
    device: torch.device
    dense: DeviceMesh  # (replicate, shard), or one of them: of dense parameters
    experts: DeviceMesh  # (replicate, expert_shard), or one of them: of the experts of one `expert` rank
    expert: DeviceMesh  # (expert,): ranks that divide the experts and exchange tokens with all-to-all
    expert_group: dist.ProcessGroup  # the same
    context_group: dist.ProcessGroup  # ranks that share the tokens of a row
    replica_group: dist.ProcessGroup  # ranks that have one copy of the parameters together
    host_group: dist.ProcessGroup  # all ranks, without the devices: for a thread beside training, and for long waits

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def size(self) -> int:
        return self.settings.processes

    @property
    def leads(self) -> bool:
        """Return whether this rank writes files, logs and reports."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Return which share of a step's rows this rank gets, of `settings.data_ranks`."""
        return self.rank // self.settings.cp

    @property
    def context_rank(self) -> int:
        return self.rank % self.settings.cp

    @property
    def context(self) -> ContextGroup | None:
        """Return the ranks that share this rank's rows; None if no rows are shared."""
        s = self.settings
        return None if s.cp == 1 else ContextGroup(self.context_group, self.context_rank, s.cp)

    @property
    def expert_rank(self) -> int:
        return self.rank % self.settings.ep

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks."""
        total = tensor.detach().clone()
        dist.all_reduce(total)
        return total

    def share(self, value: T | None) -> T:
        """Return rank 0's value on every rank; the others pass None. A pickle, between ranks of one job only."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        found: T = box[0]
        return found

    def announce(self, value: T | None) -> T:
        """Return rank 0's value like `share`, over the host: waiting for it, however long, keeps no GPU busy."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        found: T = box[0]
        return found

    def exchange(self, value: T) -> list[T]:
        """Return the values of all ranks on every rank, over the host. Pickles, between ranks of one job only."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.host_group)
        return found

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks on rank 0, None on the others. Pickles, between ranks of one job only."""
        found: list[Any] | None = [None] * self.size if self.leads else None
        dist.gather_object(value, found, dst=0)
        return found

    def barrier(self) -> None:
        dist.barrier()


@contextmanager
def open_mesh(
    settings: ParallelSettings, device: torch.device, environment: Mapping[str, str] = os.environ, name: str = "job"
) -> Iterator[TrainingMesh | None]:
    """Join the job that the environment describes, as torchrun sets it (RANK, WORLD_SIZE); None for one process.

    Jobs that meet at one address after each other have different names.
    """
    if settings.processes == 1:
        yield None
        return
    world = int(environment.get("WORLD_SIZE", "1"))
    if world != settings.processes:
        raise InputError(
            f"[parallel] describes {settings.processes} processes (dp_replicate {settings.dp_replicate} x dp_shard "
            f"{settings.dp_shard} x cp {settings.cp}), but the job has {world}"
        )
    if device.type == "cuda":
        local, found = int(environment.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local >= found:
            raise InputError(f"each process needs a GPU of its own: this host has {found}, and a process {local + 1}")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(name, open_store(environment)),
        rank=int(environment["RANK"]),
        world_size=world,
        timeout=TIMEOUT,
    )
    try:
        yield build_mesh(settings, device)
    finally:
        dist.destroy_process_group()


@contextmanager
def started_mesh(
    settings: ParallelSettings, device: torch.device, command: Sequence[str], logs: Path
) -> Iterator[TrainingMesh | None]:
    """Start the other ranks of a job on this host, `python -m COMMAND`, and lead them; None for one process."""
    if settings.processes == 1:
        yield None
        return
    with (
        rendezvous(settings.processes) as environments,
        Followers(command, environments, logs),
        open_mesh(settings, device, environments[0]) as mesh,
    ):
        yield mesh


def build_mesh(settings: ParallelSettings, device: torch.device) -> TrainingMesh:
    """Build the mesh over the default process group; every rank calls it."""
    s, kind = settings, device.type
    shards = s.dp_shard * s.cp
    dense = init_device_mesh(kind, (s.dp_replicate, shards), mesh_dim_names=("replicate", "shard"))
    rows = init_device_mesh(kind, (s.data_ranks, s.cp), mesh_dim_names=("data", "context"))
    sparse = init_device_mesh(
        kind, (s.dp_replicate, shards // s.ep, s.ep), mesh_dim_names=("replicate", "expert_shard", EXPERT)
    )
    return TrainingMesh(
        settings,
        device,
        dense if s.dp_replicate > 1 else dense["shard"],
        sparse["replicate", "expert_shard"] if s.dp_replicate > 1 else sparse["expert_shard"],
        sparse[EXPERT],
        sparse.get_group(EXPERT),
        rows.get_group("context"),
        dense.get_group("shard"),
        dist.new_group(backend="gloo", timeout=TIMEOUT),
    )
