"""The contract of a backend: it creates pods from a full specification, adopts running ones, and cleans up."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from etude.pods.guest import protocol
from etude.pods.guest.guest_pod import GuestPod
from etude.pods.images.records import Image, Layer
from etude.pods.pod import Capabilities, Egress, Limits, Pod, PodError, Snapshot, SnapshotKind
from etude.pods.runtime.cgroups import CgroupLayout, PodCgroup, remove_base_groups

Storage = Literal["memory", "disk"]


@dataclass(frozen=True)
class PodSpec:
    """The full specification of a pod. Written to disk before the pod is created, so that no pod is ever lost."""

    id: str
    image: Image  # the image or snapshot it starts from, after a snapshot with its own writes on top
    limits: Limits
    egress: Egress = field(default_factory=Egress)
    storage: Storage = "memory"
    ttl: float | None = None  # seconds
    attached: bool = True  # ends with the process that created it
    owner: str = ""  # the service that created or adopted it
    lease: float = 0.0  # seconds after which it ends unless renewed; 0: no lease
    created: float = 0.0  # seconds since 1970
    own_layers: int = 0  # the topmost layers of `image` that it wrote itself

    @property
    def base_layers(self) -> tuple[Layer, ...]:
        """The layers it was created from."""
        return self.image.layers[: len(self.image.layers) - self.own_layers]

    def with_sealed(self, layers: tuple[Layer, ...]) -> "PodSpec":
        """Return the specification of the pod after its writes were sealed into the last of `layers`."""
        own = sum(layer not in self.base_layers for layer in layers)
        return replace(self, image=self.image.with_(layers=layers), own_layers=own)

    def remaining(self) -> float | None:
        """Return the seconds left of its time to live."""
        return None if self.ttl is None else max(0.001, self.created + self.ttl - time.time())

    def lifetime(self) -> float:
        """Return the seconds it may live from now on unless renewed: its lease or remaining TTL; 0 means forever."""
        left = self.remaining()
        return min(self.lease or left, left) if left is not None else self.lease


class PodHost(Protocol):
    """The host of a pod: it stores snapshots and creates forks."""

    async def snapshot_pod(self, pod: "LocalPod", kind: SnapshotKind | None) -> Snapshot: ...
    async def fork_pod(self, pod: "LocalPod", n: int, kind: SnapshotKind | None) -> Sequence[Pod]: ...
    async def close_pod(self, pod: "LocalPod") -> None: ...


class LocalPod(GuestPod):
    """A pod of a backend on this machine. `host` is set by the host that created it."""

    spec: PodSpec
    host: PodHost
    backend: "Backend"
    group: PodCgroup

    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        return await self.host.snapshot_pod(self, kind)

    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        return await self.host.fork_pod(self, n, kind)

    async def close(self) -> None:
        await self.host.close_pod(self)

    async def claim(self, spec: PodSpec) -> None:
        """Set the pod's lifetime; the guest init ends the pod when it is over or, if attached, when we disconnect."""
        self.spec = spec
        time_ms = math.ceil(spec.lifetime() * 1000)
        await self.guest.request(
            protocol.OWN, (protocol.TIME, time_ms), (protocol.FLAGS, protocol.ATTACHED if spec.attached else 0)
        )

    def release(self) -> None:
        """Disconnect from the pod: an attached pod ends, a detached one runs on."""
        if self.connection is not None:
            client, self.connection = self.connection, None
            client.close()

    def memory_ran_out(self) -> bool:
        return self.group.new_oom_kills() > 0

    def memory_used(self) -> int:
        return int(self.group.memory())

    async def processes(self) -> int:
        """Return the number of processes besides the guest init."""
        ((_, fields),) = await (await self.ready()).request(protocol.PROCESSES)
        return protocol.number(fields, protocol.SIZE)

    async def choose_snapshot_kind(self, kind: SnapshotKind | None) -> SnapshotKind:
        """Return the kind of snapshot to take: the requested one, or by whether processes are running."""
        if kind is None:
            kind = "fs-live" if await self.processes() else "fs"
        can = self.backend.capabilities
        can.require(f"a snapshot of kind {kind}", kind in can.snapshots, f"it can do {sorted(can.snapshots)}")
        return kind

    async def stats(self) -> Mapping[str, float]:
        await self.ready()
        return await asyncio.to_thread(self.group.usage)

    @abstractmethod
    async def end(self) -> None:
        """End every process and remove the pod's files; idempotent."""

    @abstractmethod
    async def seal(self, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        """Turn the pod's writes into a layer; return all layers, bottom first, and the kind of snapshot taken.

        After `fs` the pod is stopped until `restart`, so that its forks can be created at the same time.
        """

    async def restart(self, layers: tuple[Layer, ...]) -> None:
        """Start the pod again over these layers after a `seal` of kind `fs`; a no-op where sealing does not stop it."""


class Backend(ABC):
    """A way to run pods on this machine."""

    name: str
    capabilities: Capabilities
    layout: CgroupLayout

    def __init__(self) -> None:
        self.background: set[asyncio.Task[None]] = set()

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine in the background; `close` waits for it."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def drain_background(self) -> None:
        """Wait for the background tasks and remove the base control groups if no pod is left."""
        if self.background:
            await asyncio.wait(self.background)
        remove_base_groups(self.layout)

    async def remove_group(self, group: PodCgroup) -> None:
        """Remove the control group of a pod that ended."""
        for _ in range(400):  # its last process leaves the group a moment later
            if group.remove():
                return
            await asyncio.sleep(0.005)
        raise PodError(f"the control group of pod {group.name} is still in use; see {group.directories[0]}")

    owner: str = ""  # the service that uses it; the prefix of its in-memory layers' ids

    @abstractmethod
    async def start(self, spec: PodSpec) -> LocalPod:
        """Create a pod; on failure leave nothing behind."""

    @abstractmethod
    async def adopt(self, spec: PodSpec) -> LocalPod | None:
        """Connect to a running pod that another process created; None when it has ended. Attachment stays as it is."""

    @abstractmethod
    async def reap(self, known: Iterable[str]) -> list[str]:
        """Remove the remains of pods that are not in `known`, and return their names. Iterate `known` only after
        listing what exists: it is lazy, so that it contains pods created meanwhile."""

    async def memory_layers(self) -> set[str]:
        """Return the ids (`owner.random`) of the layers held in memory, of all owners."""
        return set()

    @abstractmethod
    async def persist(self, layer: Layer) -> Layer:
        """Copy a layer held in memory to the store and return the copy."""

    @abstractmethod
    async def drop(self, layer: Layer) -> None:
        """Free what the backend holds for a layer that is no longer used."""

    @abstractmethod
    async def close(self) -> None:
        """Close the connections; detached pods run on."""

    async def shutdown(self) -> None:
        """End every pod of the state directory, of all services, and the zygote."""
        await self.close()
