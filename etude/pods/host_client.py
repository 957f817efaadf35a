"""One interface to a host, in this process or over HTTP, for fleets and for the command line."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from etude.errors import InputError
from etude.pods.host import Host, PodOptions
from etude.pods.host_system import HostSystem
from etude.pods.images.builder import LayerBuilder
from etude.pods.images.records import Image, SnapshotRecord, check_travelled
from etude.pods.images.transfer import LayerPeer, StorePeer
from etude.pods.pod import Egress, Event, Limits, Pod, PodError, Snapshot
from etude.pods.runtime.backend import LocalPod, PodSpec, Storage
from etude.pods.scheduling.router import HostReport

if TYPE_CHECKING:
    from etude.pods.distribution import Distribution

TOKEN_FILE = "serve-token"  # in the state directory


class HostGone(PodError):
    """A host does not answer: its pods are unreachable, and new ones are created elsewhere."""


class HostRefused(HostGone):
    """A host answers, but cannot be used: another token or release, or a certificate that is not trusted."""

    exit_code = InputError.exit_code


@dataclass(frozen=True)
class PodDescription:
    """A pod as lists show it, with what a client needs to use it."""

    id: str
    image: str
    limits: Limits
    egress: Egress
    storage: Storage
    ttl: float | None
    remaining: float | None  # seconds of its ttl
    lease: float
    attached: bool
    created: float
    owner: str
    workdir: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    command: tuple[str, ...] = ()  # of its image
    state: str = "running"
    stats: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageDescription:
    """An image as lists show it."""

    id: str
    name: str
    layers: int
    workdir: str


class HostClient(ABC):
    """A host and its pods, snapshots and images."""

    name: str
    url: str  # its address; empty for the host in this process
    layers: LayerPeer  # of its store

    @abstractmethod
    async def report(self) -> HostReport:
        """Return the host's state for the router."""

    @abstractmethod
    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        detached: bool = False,
        **options: Unpack[PodOptions],
    ) -> Pod:
        """Create a pod, which ends with this process unless it is detached."""

    @abstractmethod
    async def find(self, id: str) -> Pod:
        """Return a running pod by its id or a unique prefix of it."""

    @abstractmethod
    async def pods(self) -> list[PodDescription]: ...

    @abstractmethod
    async def events(self, id: str) -> Sequence[Event]: ...

    @abstractmethod
    async def snapshots(self, owner: str = "") -> list[Snapshot]:
        """Return the snapshots that were taken for an owner, or all."""

    @abstractmethod
    async def images(self) -> list[ImageDescription]: ...

    @abstractmethod
    async def image(self, name: str) -> Image:
        """Return an image by its name or id, as other hosts can have it."""

    @abstractmethod
    def builder(self, distribution: "Distribution", system: HostSystem) -> LayerBuilder:
        """Return a builder of images on the host, which has a system; `distribution` brings what a build needs."""

    @abstractmethod
    async def portable_snapshot(self, id: str) -> SnapshotRecord:
        """Return the record of a snapshot as other hosts can have it."""

    @abstractmethod
    async def add_snapshot(self, record: SnapshotRecord) -> None:
        """Add a snapshot of another host, whose layers are here."""

    @abstractmethod
    async def persist(self, id: str) -> Snapshot:
        """Write a snapshot that is held in memory to disk."""

    @abstractmethod
    async def export(self, id: str, file: Path) -> None:
        """Write a snapshot or an image to one file."""

    @abstractmethod
    async def import_(self, file: Path) -> str:
        """Add the snapshot or image of a file written by `export`, and return its id."""

    @abstractmethod
    async def remove_snapshot(self, id: str) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """Disconnect, and close the pods that were created here and are not detached."""


class LocalHostClient(HostClient):
    """Client of the host in this process."""

    def __init__(self, host: Host) -> None:
        self.host, self.name, self.url, self.layers = host, host.name, "", StorePeer(host.store)

    async def report(self) -> HostReport:
        return self.host.report()

    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        detached: bool = False,
        **options: Unpack[PodOptions],
    ) -> Pod:
        if detached and (egress := options.get("egress")) and egress.allow:
            raise InputError(
                "a pod's connections are forwarded by the process that created it, and this one is about to exit; "
                "start `etude pods serve` and create the pod there with --host"
            )
        return await self.host.create(image, attached=not detached, ttl=ttl, timeout=timeout, **options)

    async def find(self, id: str) -> Pod:
        return await self.host.find(id)

    async def pods(self) -> list[PodDescription]:
        spare = {pod.id for pool in self.host.pools.values() for pod in pool.ready}
        specs = [spec for spec in self.host.registry.records() if spec.id not in spare]
        found = await asyncio.gather(*map(self._describe, specs))
        return sorted(found, key=lambda pod: pod.created)

    async def _describe(self, spec: PodSpec) -> PodDescription:
        try:
            pod = await self.host.adopt(spec)
            return replace(describe(pod), stats=dict(await pod.stats()))
        except (PodError, OSError):
            return describe_spec(spec, state="does not answer")

    async def events(self, id: str) -> Sequence[Event]:
        pod = await self.host.find(id)
        created = Event(pod.spec.created, "created", {"image": pod.image})
        return [created, *(event for event in pod.events() if event.kind != "created")]

    async def snapshots(self, owner: str = "") -> list[Snapshot]:
        found = await asyncio.to_thread(self.host.store.snapshots)
        return [saved.snapshot for saved in found if owner in ("", saved.owner)]

    async def images(self) -> list[ImageDescription]:
        found = self.host.store.images()
        return [ImageDescription(image.id, image.name, len(image.layers), image.workdir) for image in found]

    async def image(self, name: str) -> Image:
        return (await self.host.portable(self.host.resolve(name))).named(name)

    def builder(self, distribution: "Distribution", system: HostSystem) -> LayerBuilder:
        return self.host.builder

    async def portable_snapshot(self, id: str) -> SnapshotRecord:
        return await self.host.portable_snapshot(id)

    async def add_snapshot(self, record: SnapshotRecord) -> None:
        image = check_travelled(record.image, f"snapshot {record.snapshot.id}")
        save = self.host.store.save_snapshot
        await asyncio.to_thread(save, record.snapshot, image, owner=record.owner, lease=record.lease)

    async def persist(self, id: str) -> Snapshot:
        return await self.host.persist(id)

    async def export(self, id: str, file: Path) -> None:
        with contextlib.suppress(InputError):  # an image is on disk already
            await self.host.persist(id)
        await asyncio.to_thread(self.host.store.export, id, file)

    async def import_(self, file: Path) -> str:
        return await asyncio.to_thread(self.host.store.import_, file)

    async def remove_snapshot(self, id: str) -> None:
        await self.host.remove_snapshot(id)

    async def close(self) -> None:
        await self.host.close()


def describe(pod: LocalPod) -> PodDescription:
    """Return the description of a running pod, without its resource usage."""
    own = {"workdir": pod.workdir, "environment": dict(pod.environment), "user": pod.user}
    return describe_spec(pod.spec, command=tuple(pod.default_command), **own)


def describe_spec(spec: PodSpec, **more: object) -> PodDescription:
    same = {name: getattr(spec, name) for name in PodDescription.__dataclass_fields__ if hasattr(spec, name)}
    image = spec.image.name or spec.image.id
    return PodDescription(**{**same, "image": image, "remaining": spec.remaining(), **more})
