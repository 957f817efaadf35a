"""Where a command acts: the pods of a state directory on this machine, or of a host behind HTTP. One face for both."""

import asyncio
import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.errors import InputError
from etude.pods.fleet import default_state, open_host
from etude.pods.host import Host
from etude.pods.pod import Egress, Event, Limits, Pod, PodError, PodGone, Snapshot, SnapshotKind
from etude.pods.remote import messages
from etude.pods.runtime.backend import LocalPod, PodSpec

if TYPE_CHECKING:
    from etude.pods.remote.client import RemoteHostClient, RemotePod

TOKEN = "ETUDE_PODS_TOKEN"


class PodService(ABC):
    """Pods, snapshots and images, here or there."""

    @abstractmethod
    async def create(
        self,
        image: str | Snapshot,
        *,
        limits: Limits | None = None,
        egress: Egress | None = None,
        storage: Any = "memory",
        ttl: float | None = None,
        detach: bool = False,
    ) -> Pod:
        """A new pod, which ends with this process unless it is detached."""

    @abstractmethod
    async def find(self, id: str) -> Pod:
        """A running pod, by its id or the beginning of it."""

    @abstractmethod
    async def pods(self) -> list[dict[str, Any]]:
        """Every pod, as JSON, with what it uses and how it is."""

    @abstractmethod
    async def events(self, id: str) -> Sequence[Event]: ...

    @abstractmethod
    async def snapshots(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    async def images(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    async def persist(self, snapshot: str) -> None:
        """Have a snapshot on disk."""

    @abstractmethod
    async def export(self, id: str, file: Path) -> None: ...

    @abstractmethod
    async def import_(self, file: Path) -> str: ...

    @abstractmethod
    async def forget(self, snapshot: str) -> None: ...

    @abstractmethod
    def command_of(self, pod: Pod) -> list[str]:
        """What the pod's image starts when it is told nothing."""

    async def fork(self, pod: Pod, n: int, kind: SnapshotKind | None, ttl: float) -> Sequence[Pod]:
        """Detached pods that start where this one is, all of them or none."""
        snapshot = await pod.snapshot(kind)
        options: dict[str, Any] = {"limits": pod.limits, "egress": pod.egress, "ttl": ttl, "detach": True}
        try:
            made = [asyncio.create_task(self.create(snapshot, **options)) for _ in range(n)]
            done = await asyncio.gather(*made, return_exceptions=True)
        finally:
            await self.forget(snapshot.id)
        if failed := [each for each in done if isinstance(each, BaseException)]:
            await asyncio.gather(*(each.close() for each in done if isinstance(each, Pod)))
            raise failed[0]
        return [each for each in done if isinstance(each, Pod)]


class LocalPodService(PodService):
    """This machine."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def create(self, image: str | Snapshot, **options: Any) -> Pod:
        detach, egress = options.pop("detach", False), options.get("egress")
        if detach and egress and egress.allow:
            raise InputError(
                "the connections of a pod are carried by the process that made it, and this one is about to end; "
                "start `etude pods serve` and make the pod there with --host"
            )
        return await self.host.create(image, attached=not detach, **options)

    async def find(self, id: str) -> Pod:
        return await self.host.find(id)

    async def pods(self) -> list[dict[str, Any]]:
        found = await asyncio.gather(*map(self._describe, self.host.registry.records()))
        return sorted(found, key=lambda pod: float(pod["created"]))

    async def _describe(self, spec: PodSpec) -> dict[str, Any]:
        told = {**messages.spec_to_json(spec), "owner": spec.owner, "state": "running", "stats": {}}
        try:
            pod = await self.host.adopt(spec)
            told["stats"] = dict(await pod.stats())
        except (PodError, OSError):
            told["state"] = "does not answer"
        return told

    async def events(self, id: str) -> Sequence[Event]:
        pod = await self.host.find(id)
        created = Event(pod.spec.created, "created", {"image": pod.image})
        return [created, *(event for event in pod.events() if event.kind != "created")]

    async def snapshots(self) -> list[dict[str, Any]]:
        return [asdict(saved.snapshot) for saved in self.host.store.snapshots()]

    async def images(self) -> list[dict[str, Any]]:
        return [messages.image_to_json(image) for image in self.host.store.images()]

    async def persist(self, snapshot: str) -> None:
        await self.host.persist(snapshot)

    async def export(self, id: str, file: Path) -> None:
        with contextlib.suppress(InputError):  # an image is on disk already
            await self.host.persist(id)
        await asyncio.to_thread(self.host.store.export, id, file)

    async def import_(self, file: Path) -> str:
        return await asyncio.to_thread(self.host.store.import_, file)

    async def forget(self, snapshot: str) -> None:
        await self.host.remove_snapshot(snapshot)

    def command_of(self, pod: Pod) -> list[str]:
        assert isinstance(pod, LocalPod)
        return [*pod.spec.image.entrypoint, *pod.spec.image.command]


class RemotePodService(PodService):
    """A host behind HTTP."""

    def __init__(self, door: "RemoteHostClient") -> None:
        self.door = door

    async def create(self, image: str | Snapshot, **options: Any) -> Pod:
        if not options.pop("detach", False):
            return await self.door.create(image, **options)
        pod = await self.door.create(image, lease=0.0, **options)
        self.door.pods.pop(pod.id)  # not ours to close
        return pod

    async def find(self, id: str) -> Pod:
        return await self._attach(id)

    async def _attach(self, id: str) -> "RemotePod":
        try:
            return await self.door.attach(id)
        except PodGone as error:
            raise InputError(str(error)) from None

    async def pods(self) -> list[dict[str, Any]]:
        return [{**pod, "state": "running"} for pod in await self.door.list_pods()]

    async def events(self, id: str) -> Sequence[Event]:
        pod = await self._attach(id)
        await pod.refresh()
        return pod.events()

    async def snapshots(self) -> list[dict[str, Any]]:
        return [asdict(snapshot) for snapshot in await self.door.snapshots()]

    async def images(self) -> list[dict[str, Any]]:
        return await self.door.images()

    async def persist(self, snapshot: str) -> None:
        await self.door.persist(snapshot)

    async def export(self, id: str, file: Path) -> None:
        await self.door.export(id, file)

    async def import_(self, file: Path) -> str:
        return await self.door.import_(file)

    async def forget(self, snapshot: str) -> None:
        await self.door.remove_snapshot(snapshot)

    def command_of(self, pod: Pod) -> list[str]:
        return list(pod.described["command"])  # type: ignore[attr-defined]


@asynccontextmanager
async def open_place(state: Path | None, url: str | None, backend: str = "auto") -> AsyncIterator[PodService]:
    """The place a command line names. Leaving it ends what was made there and not detached."""
    if url is not None:
        from etude.pods.remote.client import RemoteHostClient

        if state is not None:
            raise InputError("--host and --state: a host has its own state directory; give one of them")
        door = await RemoteHostClient.open(url, os.environ.get(TOKEN, ""))
        try:
            yield RemotePodService(door)
        finally:
            await door.close()
        return
    place = state or default_state()
    host = await open_host(recall_backend(place) if backend == "auto" else backend, place)
    with contextlib.suppress(OSError):  # only a matter of time saved
        (host.state / "backend").write_text(f"{host.backend.name} {this_boot()}")
    try:
        yield LocalPodService(host)
    finally:
        await host.close()


def recall_backend(state: Path) -> str:
    """The backend last used in a state directory since this machine was started: trying them all costs a second."""
    try:
        name, boot = (state / "backend").read_text().split()
    except (OSError, ValueError):
        return "auto"
    return name if boot == this_boot() else "auto"


def this_boot() -> str:
    """A name of this start of the machine, for this user; what a backend can do is as good as fixed for it."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.geteuid()}"
    except OSError:
        return "unknown"


def age(pod: dict[str, Any]) -> float:
    """Seconds since a pod was made."""
    return max(0.0, time.time() - float(pod["created"]))
