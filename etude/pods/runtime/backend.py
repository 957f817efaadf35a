"""The contract of a backend: it creates pods from a full specification, adopts running ones, and cleans up.

The pods of every backend are processes of its zygote; a backend adds what they are made from and confined by.
"""

import asyncio
import contextlib
import hashlib
import math
import os
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol

from etude.pods.guest import protocol
from etude.pods.guest.client import CONNECT_S, GuestClient, Link, SocketLink, connect_unix, listen_unix
from etude.pods.guest.guest_pod import GuestPod
from etude.pods.images import trees
from etude.pods.images.records import Image, Layer
from etude.pods.images.store import Store
from etude.pods.network.policy import EgressPolicy
from etude.pods.network.proxy import EgressProxy
from etude.pods.pod import Capabilities, Egress, Limits, Pod, PodError, PodGone, Snapshot, SnapshotKind
from etude.pods.runtime import zygote_protocol
from etude.pods.runtime.cgroups import CONTROLLERS, PodCgroup, find_layout, list_groups, remove_base_groups
from etude.pods.runtime.zygote_client import Mode, ZygoteClient

Storage = Literal["memory", "disk"]
SOFT_DISK_LIMITS = (
    "limits on disk and inodes are soft: what a pod has written is measured, 1 to 50 times a second, and a pod that is "
    "over a limit is ended"
)
OVER_LIMIT = "over-limit"  # the file in which the watcher of a pod leaves the reason why it ended the pod
GUEST_SOCKET = "agent.sock"  # this name does not change, so that pods of other versions can be adopted


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

    host: PodHost

    def __init__(
        self, backend: "Backend", spec: PodSpec, environment: Mapping[str, str], workdir: str, user: str = ""
    ) -> None:
        super().__init__(spec.id, environment, workdir, user)
        self.backend, self.spec = backend, spec
        self.image, self.limits, self.egress = spec.image.name, spec.limits, spec.egress
        self.policy = EgressPolicy.from_egress(spec.egress)
        self.directory = backend.state / "pods" / spec.id
        self.group = PodCgroup(backend.layout, spec.id)
        self.proxy: EgressProxy | None = None
        self.closed = False

    # ------------------------------------------------------------------------------------------- starting

    @abstractmethod
    async def boot(self) -> None:
        """Create the pod's files and its first process, and connect to its guest init."""

    async def create_process(
        self, fields: Iterable[tuple[int, protocol.Value]], descriptors: Sequence[int] = ()
    ) -> None:
        """Let the zygote create the pod's first process, in its control group, and connect to it."""
        self.group.create(self.limits)
        with listen_unix(self.directory, GUEST_SOCKET) as listener:
            await self.backend.zygote.request(
                zygote_protocol.CREATE,
                (zygote_protocol.ID, self.id.encode()),
                (zygote_protocol.WORKDIR, os.fsencode(self.workdir)),
                *((zygote_protocol.GROUP, os.fsencode(group)) for group in [self.group.unified] if group),
                *((zygote_protocol.CGROUP, os.fsencode(file)) for file in self.group.legacy_procs),
                *fields,
                descriptors=[listener.fileno(), *descriptors],
            )
        await self.connect()
        self.record("created", {"image": self.image})

    async def connect(self, timeout: float = CONNECT_S, own: bool = True) -> None:
        """Connect to the guest init; with `own`, claim the pod, as its owner if it is attached."""
        self.connection = GuestClient(await self.open_link(), self.id, self.over_limit)
        await self.connection.wait_until_ready(timeout)
        sockets = [socket.socket(fileno=descriptor) for descriptor in self.connection.link.descriptors]
        if own:
            if sockets:  # the pod's connections arrive at these
                self.proxy = EgressProxy(self.policy, lambda facts: self.record("egress", facts))
                await self.proxy.start(list(zip(self.policy.listen_specs(), sockets, strict=False)))
            await self.claim(self.spec)
        else:  # its owner is alive and serves the egress proxy
            for sock in sockets:
                sock.close()

    async def open_link(self) -> Link:
        return SocketLink(connect_unix(self.directory, GUEST_SOCKET))

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
        if self.proxy is not None:  # the next owner of the pod serves its connections
            proxy, self.proxy = self.proxy, None
            self.backend.run_in_background(proxy.close())

    # ------------------------------------------------------------------------------------------- snapshots, end

    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        return await self.host.snapshot_pod(self, kind)

    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        return await self.host.fork_pod(self, n, kind)

    async def close(self) -> None:
        await self.host.close_pod(self)

    async def end(self) -> None:
        """End every process and remove the pod's files; idempotent."""
        if self.closed:
            return
        self.closed = True
        self.release()
        await self.backend.remove_pod(self.id)
        self.record("closed", {})

    async def seal(self, kind: SnapshotKind | None) -> tuple[tuple[Layer, ...], SnapshotKind]:
        """Turn the pod's writes into a layer; return all layers, bottom first, and the kind of snapshot taken.

        After `fs` the pod is stopped until `restart`, so that its forks can be created at the same time.
        """
        if kind is None:
            kind = "fs-live" if await self.processes() else "fs"
        can = self.backend.capabilities
        can.require(f"a snapshot of kind {kind}", kind in can.snapshots, f"it can do {sorted(can.snapshots)}")
        layers = await self.take_layers(kind)
        self.record("snapshot", {"kind": kind, "layer": layers[-1].id})
        return layers, kind

    @abstractmethod
    async def take_layers(self, kind: SnapshotKind) -> tuple[Layer, ...]:
        """Seal the pod's writes; return all its layers, bottom first."""

    async def restart(self) -> None:
        """Start the pod again, over its new layers, after a `seal` of kind `fs`; not where that does not stop it."""

    # ------------------------------------------------------------------------------------------- measuring

    def memory_ran_out(self) -> bool:
        return self.group.new_oom_kills() > 0

    def over_limit(self) -> str:
        """Return why the pod was ended for a soft limit; empty if it was not."""
        with contextlib.suppress(OSError):
            return (self.directory / OVER_LIMIT).read_text()
        return ""

    def memory_used(self) -> int:
        return int(self.group.memory())

    async def processes(self) -> int:
        """Return the number of processes besides the guest init."""
        ((_, fields),) = await (await self.ready()).request(protocol.PROCESSES)
        return protocol.number(fields, protocol.SIZE)

    async def stats(self) -> Mapping[str, float]:
        await self.ready()
        usage = await asyncio.to_thread(self.group.usage)
        return usage if "pids" in usage else {**usage, "pids": await self.processes() + 1.0}


class Backend(ABC):
    """A way to run pods on this machine, for the pods of one state directory, by a zygote."""

    name: str
    mode: Mode
    capabilities: Capabilities
    owner: str = ""  # the service that uses it; the prefix of its in-memory layers' ids

    def __init__(self, state: Path, store: Store, helper: Path, mark: str, socket_name: str) -> None:
        self.state, self.store = state, store
        self.layout = find_layout(f"etude-{hashlib.sha256(os.fsencode(mark)).hexdigest()[:12]}")
        self.zygote = ZygoteClient(state, helper, socket_name, self.mode)
        self.background: set[asyncio.Task[None]] = set()

    def layout_notes(self, other_limits: Collection[str] = ()) -> list[str]:
        """Return what the control groups of this machine do not allow; `other_limits` need none."""
        notes = []
        if missing := [name for name in CONTROLLERS if name not in {*self.layout.controllers, *other_limits}]:
            why = self.layout.reason or "no such controller"
            notes.append(f"no limit on {', '.join(missing)}: a pod can take all that this machine has ({why})")
        if self.layout.unified is None:
            notes.append(f"no live snapshot: no cgroup v2 group ({self.layout.reason})")
        return notes

    @property
    def snapshots(self) -> frozenset[str]:
        return frozenset({"fs", "fs-live"} if self.layout.unified else {"fs"})

    # ------------------------------------------------------------------------------------------- pods

    @abstractmethod
    def make_pod(self, spec: PodSpec) -> LocalPod:
        """Return a pod that is not started yet; raise Unsupported for what the backend cannot do."""

    async def start(self, spec: PodSpec) -> LocalPod:
        """Create a pod; on failure leave nothing behind."""
        pod = self.make_pod(spec)
        try:
            try:
                await pod.boot()
            except PodGone:  # the zygote had just died: start another
                await pod.boot()
        except BaseException:
            await pod.end()
            raise
        return pod

    async def adopt(self, spec: PodSpec) -> LocalPod | None:
        """Connect to a running pod that another process created; None when it has ended. Attachment stays as it is."""
        pod = self.make_pod(spec)
        try:
            await asyncio.to_thread(pod.group.thaw)  # its service may have died during a live snapshot
            await pod.connect(timeout=1.0, own=not spec.attached)
        except (OSError, PodError):
            pod.release()
            return None
        return pod

    async def request(self, op: int, *fields: tuple[int, protocol.Value]) -> protocol.Fields:
        """Send an idempotent request to the zygote; repeat it to a new one if the current one just died."""
        try:
            reply, _ = await self.zygote.request(op, *fields)
        except PodGone:
            reply, _ = await self.zygote.request(op, *fields)
        return reply

    # ------------------------------------------------------------------------------------------- cleanup

    def pod_directories(self) -> set[str]:
        """Return the names of the pods that have a directory."""
        return {entry.name for entry in (self.state / "pods").iterdir()}

    async def reap(self, known: Iterable[str]) -> list[str]:
        """Remove the remains of pods that are not in `known`, and return their names. Iterate `known` only after
        listing what exists: it is lazy, so that it contains pods created meanwhile."""
        status = await self.request(zygote_protocol.STATUS)
        found = {name.decode() for name in status.get(zygote_protocol.ID, [])}
        found |= list_groups(self.layout) | self.pod_directories()
        found -= set(known)
        for name in sorted(found):
            await self.remove_pod(name, orphaned=True)
        return sorted(found)

    async def remove_pod(self, name: str, orphaned: bool = False) -> None:
        """Remove a pod's processes, groups and directories. `orphaned`: its zygote may be dead as well."""
        try:
            await self.zygote.request(zygote_protocol.KILL, (zygote_protocol.ID, name.encode()))
        except PodGone:
            orphaned = True
        group = PodCgroup(self.layout, name)
        if not group.remove():
            group.kill()
            await self.remove_group(group)
        await self.remove_files(name, orphaned)

    async def remove_files(self, name: str, orphaned: bool) -> None:
        """Remove the directories of a pod whose processes are gone."""
        self.delete(self.state / "pods" / name, self.state / "trash")

    async def remove_group(self, group: PodCgroup) -> None:
        """Remove the control group of a pod that ended."""
        for _ in range(400):  # its last process leaves the group a moment later
            if group.remove():
                return
            await asyncio.sleep(0.005)
        raise PodError(f"the control group of pod {group.name} is still in use; see {group.directories[0]}")

    def delete(self, directory: Path, trash: Path) -> None:
        """Move a directory to the trash at once and remove it in the background."""
        target = trash / f".{directory.name}-{secrets.token_hex(8)}"
        with contextlib.suppress(FileNotFoundError):
            trash.mkdir(mode=0o700, exist_ok=True)
            directory.rename(target)
            self.run_in_background(asyncio.to_thread(trees.remove_tree, target))

    def run_in_background(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine in the background; `close` waits for it."""
        task = asyncio.create_task(work)
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    # ------------------------------------------------------------------------------------------- layers

    async def memory_layers(self) -> set[str]:
        """Return the ids (`owner.random`) of the layers held in memory, of all owners."""
        return set()

    async def persist(self, layer: Layer) -> Layer:
        """Copy a layer held in memory to the store and return the copy."""
        return layer

    async def drop(self, layer: Layer) -> None:  # noqa: B027  nothing is held unless layers are in memory
        """Free what the backend holds for a layer that is no longer used."""

    # ------------------------------------------------------------------------------------------- the end

    async def close(self) -> None:
        """Close the connections; detached pods run on."""
        if self.background:
            await asyncio.wait(self.background)
        remove_base_groups(self.layout)
        self.zygote.close()

    async def shutdown(self) -> None:
        """End every pod of the state directory, of all services, and the zygote."""
        with contextlib.suppress(PodError):
            await self.zygote.request(zygote_protocol.STOP)
        for name in list_groups(self.layout):
            await self.remove_group(PodCgroup(self.layout, name))
        await self.close()
