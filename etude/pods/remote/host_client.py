"""The pods that a command line acts on: those of a state directory on this machine, or of a host over HTTP."""

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

TOKEN_VARIABLE = "ETUDE_PODS_TOKEN"


class PodService(ABC):
    """Pods, snapshots and images of one host, local or remote."""

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
        """Create a pod, which ends with this process unless it is detached."""

    @abstractmethod
    async def find(self, id: str) -> Pod:
        """Return a running pod by its id or a prefix of it."""

    @abstractmethod
    async def pods(self) -> list[dict[str, Any]]:
        """Return every pod as JSON, with its resource usage and state."""

    @abstractmethod
    async def events(self, id: str) -> Sequence[Event]: ...

    @abstractmethod
    async def snapshots(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    async def images(self) -> list[dict[str, Any]]: ...

    @abstractmethod
    async def persist(self, snapshot: str) -> None:
        """Write a snapshot that is held in memory to disk."""

    @abstractmethod
    async def export(self, id: str, file: Path) -> None: ...

    @abstractmethod
    async def import_(self, file: Path) -> str: ...

    @abstractmethod
    async def remove_snapshot(self, snapshot: str) -> None: ...

    @abstractmethod
    def default_command(self, pod: Pod) -> list[str]:
        """Return the default command of the pod's image."""

    async def fork(self, pod: Pod, n: int, kind: SnapshotKind | None, ttl: float) -> Sequence[Pod]:
        """Create `n` detached pods from a snapshot of this one: all of them, or none on an error."""
        snapshot = await pod.snapshot(kind)
        options: dict[str, Any] = {"limits": pod.limits, "egress": pod.egress, "ttl": ttl, "detach": True}
        try:
            tasks = [asyncio.create_task(self.create(snapshot, **options)) for _ in range(n)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            await self.remove_snapshot(snapshot.id)
        if failed := [each for each in results if isinstance(each, BaseException)]:
            await asyncio.gather(*(each.close() for each in results if isinstance(each, Pod)))
            raise failed[0]
        return [each for each in results if isinstance(each, Pod)]


class LocalPodService(PodService):
    """The pods of a state directory on this machine."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def create(self, image: str | Snapshot, **options: Any) -> Pod:
        detach, egress = options.pop("detach", False), options.get("egress")
        if detach and egress and egress.allow:
            raise InputError(
                "a pod's connections are forwarded by the process that created it, and this one is about to exit; "
                "start `etude pods serve` and create the pod there with --host"
            )
        return await self.host.create(image, attached=not detach, **options)

    async def find(self, id: str) -> Pod:
        return await self.host.find(id)

    async def pods(self) -> list[dict[str, Any]]:
        found = await asyncio.gather(*map(self._describe, self.host.registry.records()))
        return sorted(found, key=lambda pod: float(pod["created"]))

    async def _describe(self, spec: PodSpec) -> dict[str, Any]:
        described = {**messages.spec_to_json(spec), "owner": spec.owner, "state": "running", "stats": {}}
        try:
            pod = await self.host.adopt(spec)
            described["stats"] = dict(await pod.stats())
        except (PodError, OSError):
            described["state"] = "does not answer"
        return described

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

    async def remove_snapshot(self, snapshot: str) -> None:
        await self.host.remove_snapshot(snapshot)

    def default_command(self, pod: Pod) -> list[str]:
        assert isinstance(pod, LocalPod)
        return [*pod.spec.image.entrypoint, *pod.spec.image.command]


class RemotePodService(PodService):
    """The pods of a host over HTTP."""

    def __init__(self, client: "RemoteHostClient") -> None:
        self.client = client

    async def create(self, image: str | Snapshot, **options: Any) -> Pod:
        if not options.pop("detach", False):
            return await self.client.create(image, **options)
        pod = await self.client.create(image, lease=0.0, **options)
        self.client.pods.pop(pod.id)  # closing the client must not close it
        return pod

    async def find(self, id: str) -> Pod:
        return await self._attach(id)

    async def _attach(self, id: str) -> "RemotePod":
        try:
            return await self.client.attach(id)
        except PodGone as error:
            raise InputError(str(error)) from None

    async def pods(self) -> list[dict[str, Any]]:
        return [{**pod, "state": "running"} for pod in await self.client.list_pods()]

    async def events(self, id: str) -> Sequence[Event]:
        pod = await self._attach(id)
        await pod.refresh()
        return pod.events()

    async def snapshots(self) -> list[dict[str, Any]]:
        return [asdict(snapshot) for snapshot in await self.client.snapshots()]

    async def images(self) -> list[dict[str, Any]]:
        return await self.client.images()

    async def persist(self, snapshot: str) -> None:
        await self.client.persist(snapshot)

    async def export(self, id: str, file: Path) -> None:
        await self.client.export(id, file)

    async def import_(self, file: Path) -> str:
        return await self.client.import_(file)

    async def remove_snapshot(self, snapshot: str) -> None:
        await self.client.remove_snapshot(snapshot)

    def default_command(self, pod: Pod) -> list[str]:
        return list(pod.description["command"])  # type: ignore[attr-defined]


@asynccontextmanager
async def open_pod_service(state: Path | None, url: str | None, backend: str = "auto") -> AsyncIterator[PodService]:
    """Open the pods of a host URL or of a state directory. Leaving closes the pods created here and not detached."""
    if url is not None:
        from etude.pods.remote.client import RemoteHostClient

        if state is not None:
            raise InputError("--host and --state: a remote host has its own state directory; give one of them")
        client = await RemoteHostClient.open(url, os.environ.get(TOKEN_VARIABLE, ""))
        try:
            yield RemotePodService(client)
        finally:
            await client.close()
        return
    directory = state or default_state()
    host = await open_host(cached_backend(directory) if backend == "auto" else backend, directory)
    with contextlib.suppress(OSError):  # only a cache
        (host.state / "backend").write_text(f"{host.backend.name} {boot_id()}")
    try:
        yield LocalPodService(host)
    finally:
        await host.close()


def cached_backend(state: Path) -> str:
    """Return the backend last used in a state directory since this boot, or "auto": probing all costs a second."""
    try:
        name, boot = (state / "backend").read_text().split()
    except (OSError, ValueError):
        return "auto"
    return name if boot == boot_id() else "auto"


def boot_id() -> str:
    """Return an id of this boot and user, for which a backend's capabilities practically do not change."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.geteuid()}"
    except OSError:
        return "unknown"


def age(pod: dict[str, Any]) -> float:
    """Return the seconds since a pod was created."""
    return max(0.0, time.time() - float(pod["created"]))
