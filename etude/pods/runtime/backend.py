"""What a backend is to the fleet: it makes pods from a full description, finds them again, and cleans up."""

import asyncio
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from etude.pods.guest import protocol
from etude.pods.guest.guest_pod import AgentPod
from etude.pods.images.records import Image, Layer
from etude.pods.pod import Capabilities, Egress, Limits, Pod, PodError, Snapshot, SnapshotKind
from etude.pods.runtime.cgroups import Group, Layout, leave

Storage = Literal["memory", "disk"]


@dataclass(frozen=True)
class PodSpec:
    """A pod to be made: every decision taken. Written to disk before the pod is, so that nothing is ever lost."""

    id: str
    image: Image  # the image or snapshot it starts from
    limits: Limits
    egress: Egress = field(default_factory=Egress)
    storage: Storage = "memory"
    ttl: float | None = None  # seconds
    attached: bool = True  # ends with the process that made it
    key: str = ""  # idempotency
    tenant: str = ""
    owner: str = ""  # the service that made it, or took it up since
    lease: float = 0.0  # seconds after which it ends unless somebody renews it; 0: needs no renewing
    created: float = 0.0  # seconds since 1970

    def remaining(self) -> float | None:
        """Seconds of its time to live that are left."""
        return None if self.ttl is None else max(0.001, self.created + self.ttl - time.time())

    def granted(self) -> float:
        """Seconds it may live from now on if nobody says more: its lease or what is left to it; 0 is for ever."""
        left = self.remaining()
        return min(self.lease or left, left) if left is not None else self.lease


class Home(Protocol):
    """The host a pod lives on: it keeps snapshots and makes the children."""

    async def snapshot_pod(self, pod: "LocalPod", kind: SnapshotKind | None) -> Snapshot: ...
    async def fork_pod(self, pod: "LocalPod", n: int, kind: SnapshotKind | None) -> Sequence[Pod]: ...
    async def close_pod(self, pod: "LocalPod") -> None: ...


class LocalPod(AgentPod):
    """A pod of a backend on this machine. `home` is set by the host that asked for it."""

    spec: PodSpec
    home: Home
    backend: "Backend"
    group: Group
    paused: bool

    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        return await self.home.snapshot_pod(self, kind)

    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        return await self.home.fork_pod(self, n, kind)

    async def close(self) -> None:
        await self.home.close_pod(self)

    async def own(self, spec: PodSpec) -> None:
        """Take the pod with this lifetime; the agent itself ends it when that is over or, if attached, we are."""
        self.spec = spec
        time_ms = math.ceil(spec.granted() * 1000)
        await self.line.ask(
            protocol.OWN, (protocol.TIME, time_ms), (protocol.FLAGS, protocol.ATTACHED if spec.attached else 0)
        )

    def release(self) -> None:
        """Let go of the pod: an attached one ends by that, another goes on."""
        if self.agent is not None:
            agent, self.agent = self.agent, None
            agent.close()

    def memory_ran_out(self) -> bool:
        return self.group.out_of_memory() > 0

    def memory_used(self) -> int:
        return int(self.group.memory())

    async def pause(self) -> None:
        self.backend.capabilities.require("pausing a pod", self.backend.capabilities.pause)
        await self.ready()
        await asyncio.to_thread(self.group.freeze, True)
        self.paused = True
        self.record("paused", {})

    async def resume(self) -> None:
        self.backend.capabilities.require("pausing a pod", self.backend.capabilities.pause)
        await self.ready()
        await asyncio.to_thread(self.group.freeze, False)
        self.paused = False
        self.record("resumed", {})

    async def processes(self) -> int:
        """How many run beside the agent."""
        ((_, fields),) = await (await self.ready()).ask(protocol.PROCESSES)
        return protocol.number(fields, protocol.SIZE)

    async def choose_kind(self, kind: SnapshotKind | None) -> SnapshotKind:
        """The kind of snapshot to take: the one asked for, or what the pod's processes allow."""
        if kind is None:
            kind = "fs-live" if self.paused or await self.processes() else "fs"
        can = self.backend.capabilities
        can.require(f"a snapshot of kind {kind}", kind in can.snapshots, f"it can do {sorted(can.snapshots)}")
        return kind

    async def stats(self) -> Mapping[str, float]:
        await self.ready()
        return await asyncio.to_thread(self.group.usage)

    @abstractmethod
    async def end(self) -> None:
        """End every process and remove what the pod wrote; twice is fine."""

    @abstractmethod
    async def seal(self, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        """Keep what was written as a layer: all layers of the state, bottom first, and how it was done.

        After `fs` the pod stands still until `restart`, so that its children can be made at the same time.
        """

    async def restart(self, layers: tuple[Layer, ...]) -> None:
        """Go on over these layers after `seal` has said `fs`; nothing to do where sealing stops nothing."""


class Backend(ABC):
    """One way to run pods on this machine."""

    name: str
    capabilities: Capabilities
    layout: Layout

    def __init__(self) -> None:
        self.background: set[asyncio.Task[None]] = set()

    def later(self, work: Coroutine[None, None, None]) -> None:
        """Do it in the background; `close` waits for it."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def settle(self) -> None:
        """Wait for the background, and leave the control groups if no pod is in them."""
        if self.background:
            await asyncio.wait(self.background)
        leave(self.layout)

    async def remove_group(self, group: Group) -> None:
        """Remove a dead pod's control group."""
        for _ in range(400):  # its last process leaves the group a moment later
            if group.remove():
                return
            await asyncio.sleep(0.005)
        raise PodError(f"the control group of pod {group.name} is still in use; see {group.directories[0]}")

    owner: str = ""  # the service that uses it; layers it makes in memory are named after it

    @abstractmethod
    async def start(self, spec: PodSpec) -> LocalPod:
        """Make a pod; on any failure nothing of it is left."""

    @abstractmethod
    async def adopt(self, spec: PodSpec) -> LocalPod | None:
        """A pod that another process made and that still runs; None when it does not. One attached to it stays so."""

    @abstractmethod
    async def reap(self, known: Iterable[str]) -> list[str]:
        """Remove what is left of pods that are not in `known`, and name them. Read `known` after looking what there is:
        it is lazy, so that a pod made meanwhile is in it."""

    async def memory_layers(self) -> set[str]:
        """Ids of the layers that are held in memory, `owner.something`; of whomever."""
        return set()

    @abstractmethod
    async def persist(self, layer: Layer) -> Layer:
        """A layer held in memory, copied to the store."""

    @abstractmethod
    async def drop(self, layer: Layer) -> None:
        """A layer is not used any more: let go of what the backend holds for it."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections; pods that are not attached go on."""

    async def shut(self) -> None:
        """End every pod, whoever made it, and all that serves them."""
        await self.close()
