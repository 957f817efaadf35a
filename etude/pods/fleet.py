"""The fleet: pods wherever there is room for them, on this machine or on hosts that joined by HTTP.

With one host there is nothing to route. With several, hosts report what they have and how they feel, the router
places, and a host that dies in the middle is left out and the pod made elsewhere. Forks stay where their parent is
unless that host is over its ceiling; then the snapshot travels.
"""

import asyncio
import contextlib
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from etude.errors import InputError
from etude.pods.host import Host
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.pod import Egress, Limits, Pod, PodError, Snapshot, SnapshotKind
from etude.pods.runtime.backend import Storage
from etude.pods.runtime.probe import choose, make_backend
from etude.pods.scheduling.admission import NeverFits, Thresholds, WaitedTooLong
from etude.pods.scheduling.router import HostReport, NoHost, PlacementRequest, PodRouter

REPORT_S = 1.0  # between reports of one host
REPORT_TIMEOUT_S = 5.0
PATIENCE_S = 3.0  # for a turn on one host, before others are asked
RETRY_S = 0.25  # between attempts when no host has room
EXPECTED = 256 << 20  # bytes of memory a new pod is placed for; its host knows better what its image takes


class HostGone(PodError):
    """A host does not answer; its pods are lost to us, and new ones are made elsewhere."""


class HostClient(Protocol):
    """A host as the fleet sees it, in this process or behind HTTP."""

    name: str

    async def report(self) -> HostReport: ...
    async def create(self, image: str | Image | Snapshot, **options: Any) -> Pod: ...
    async def export(self, snapshot: str, file: Path) -> None: ...
    async def import_(self, file: Path) -> str: ...
    async def remove_snapshot(self, id: str) -> None: ...
    async def close(self) -> None: ...


class LocalHostClient:
    """The host in this process."""

    def __init__(self, host: Host) -> None:
        self.host, self.name = host, host.name

    async def report(self) -> HostReport:
        return self.host.report()

    async def create(self, image: str | Image | Snapshot, **options: Any) -> Pod:
        return await self.host.create(image, **options)

    async def export(self, snapshot: str, file: Path) -> None:
        await self.host.persist(snapshot)
        await asyncio.to_thread(self.host.store.export, snapshot, file)

    async def import_(self, file: Path) -> str:
        return await asyncio.to_thread(self.host.store.import_, file)

    async def remove_snapshot(self, id: str) -> None:
        await self.host.remove_snapshot(id)

    async def close(self) -> None:
        await self.host.close()


class Fleet:
    """Hosts, and pods on them. Made by `open_fleet`."""

    def __init__(self, doors: Sequence[HostClient], local: Host | None = None) -> None:
        if not doors:
            raise InputError("a fleet needs at least one host")
        self.doors = {door.name: door for door in doors}
        self.local = local
        self.router = PodRouter()
        self.homes: dict[str, str] = {}  # pod -> host
        self.bringing: dict[tuple[str, str], asyncio.Task[None]] = {}  # (snapshot, host) -> its transfer
        self.copies: dict[str, set[str]] = {}  # snapshot -> hosts we brought it to
        self.reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask every host for its first report; from then on they are asked all the time."""
        if len(self.doors) > 1 or self.local is None:
            await self._ask_all()
            self.reporting = asyncio.create_task(self._keep_asking())

    async def close(self) -> None:
        if self.reporting is not None:
            self.reporting.cancel()
        for door in self.doors.values():
            await door.close()

    # ------------------------------------------------------------------------------------------- pods

    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        limits: Limits | None = None,
        egress: Egress | None = None,
        storage: Storage = "memory",
        ttl: float | None = None,
        key: str = "",
        tenant: str = "",
        timeout: float | None = None,
    ) -> Pod:
        """A new pod from an image ("host" is this machine's own toolchain) or a snapshot.

        Waits for its turn, at most `timeout` seconds. With an idempotency `key`, asking twice gives the same pod.
        After `ttl` seconds the pod ends. `storage="disk"` is for pods that write more than fits in memory.
        """
        options = {
            "limits": limits,
            "egress": egress,
            "storage": storage,
            "ttl": ttl,
            "key": key,
            "tenant": tenant,
        }
        if self.reporting is None:
            assert self.local is not None
            return await self.local.create(image, timeout=timeout, **options)  # type: ignore[arg-type]
        return await self._place(image, options, timeout, origin=None)

    async def _place(
        self, image: str | Image | Snapshot, options: Mapping[str, Any], timeout: float | None, origin: str | None
    ) -> Pod:
        """Try hosts, best first, until one has made the pod."""
        deadline = None if timeout is None else time.monotonic() + timeout
        tried: set[str] = set()
        while True:
            try:
                place = self.router.place(self._request(image, options, origin), exclude=tried)
            except NoHost as error:
                if not error.ever or (deadline is not None and time.monotonic() > deadline):
                    raise
                tried.clear()
                await asyncio.sleep(RETRY_S)
                continue
            door = self.doors[place.host]
            try:
                if place.transfer and isinstance(image, Snapshot):
                    await self._bring(image.id, door)
                left = math.inf if deadline is None else max(0.1, deadline - time.monotonic())
                wait = min(left, PATIENCE_S) if len(self.doors) > 1 else left
                pod = await door.create(image, timeout=None if wait == math.inf else wait, **options)
            except WaitedTooLong:  # its report was too old to show that it is full
                self.router.returned(place)
                if deadline is not None and time.monotonic() > deadline:
                    raise
                tried.add(place.host)
                continue
            except (HostGone, OSError, NeverFits) as error:
                self.router.returned(place)
                if not isinstance(error, NeverFits):
                    self.router.failed(place.host)
                tried.add(place.host)
                if len(tried) == len(self.doors):
                    raise
                continue
            except BaseException:
                self.router.returned(place)
                raise
            self.homes[pod.id] = place.host
            return pod

    def _request(
        self, image: str | Image | Snapshot, options: Mapping[str, Any], origin: str | None
    ) -> PlacementRequest:
        limits, egress = options["limits"] or Limits(), options["egress"]
        needs = {f"limit:{name}" for name in limits.asked()}
        if egress and egress.allow:
            needs.add("egress:transparent" if egress.transparent else "egress:proxy")
        memory = min(EXPECTED, limits.memory or EXPECTED)
        snapshot = image.id if isinstance(image, Snapshot) else None
        name = image if isinstance(image, str) else image.id if isinstance(image, Image) else image.image
        return PlacementRequest(name, memory, options["tenant"], snapshot, origin, needs=frozenset(needs))

    async def fork(self, pod: Pod, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        """Children of a pod, on its own host first, elsewhere when that one is over its ceiling."""
        home = self.homes.get(pod.id)
        if self.reporting is None or home is None or len(self.doors) == 1:
            return await pod.fork(n, kind)
        snapshot = await pod.snapshot(kind)
        options = {"limits": pod.limits, "egress": pod.egress}
        options |= {"storage": "memory", "ttl": None, "key": "", "tenant": ""}
        made = [asyncio.create_task(self._place(snapshot, options, None, origin=home)) for _ in range(n)]
        try:
            return await asyncio.gather(*made)
        except BaseException:
            for task in made:
                task.cancel()
            for done in await asyncio.gather(*made, return_exceptions=True):
                if isinstance(done, Pod):
                    await done.close()
            raise
        finally:
            for name in {self.homes.get(pod.id, home), *self.copies.pop(snapshot.id, ())} & set(self.doors):
                with contextlib.suppress(HostGone):
                    await self.doors[name].remove_snapshot(snapshot.id)

    async def _bring(self, snapshot: str, target: HostClient) -> None:
        """Transfer a snapshot once, however many children wait for it there."""
        key = (snapshot, target.name)
        if key not in self.bringing:
            task = self.bringing[key] = asyncio.create_task(self._transfer(snapshot, target))
            task.add_done_callback(lambda _: self.bringing.pop(key, None))
        await asyncio.shield(self.bringing[key])
        self.copies.setdefault(snapshot, set()).add(target.name)

    async def _transfer(self, snapshot: str, target: HostClient) -> None:
        """Bring a snapshot from a host that has it to `target`."""
        sources = [report.host for report in self.router.hosts() if snapshot in report.snapshots]
        # Reports are a second old: those that said they have it first, then whoever may have it by now.
        for name in dict.fromkeys((*sources, *self.doors)):
            if name == target.name or name not in self.doors:
                continue
            with tempfile.TemporaryDirectory(prefix="etude-snapshot-") as directory:
                file = Path(directory) / "snapshot.tar"
                try:
                    await self.doors[name].export(snapshot, file)
                except (HostGone, InputError):
                    continue
                await target.import_(file)
                return
        raise PodError(f"no host that answers has snapshot {snapshot}")

    async def pool(self, image: str | Image | Snapshot, size: int, **options: Any) -> None:
        """Keep pods of this kind started in advance on this machine."""
        if self.local is None:
            raise InputError("warm pools are kept by hosts: start `etude pods serve` with --warm there")
        await self.local.pool(image, size, **options)

    # ------------------------------------------------------------------------------------------- hosts

    async def _keep_asking(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            await self._ask_all()

    async def _ask_all(self) -> None:
        async def ask(door: HostClient) -> None:
            with contextlib.suppress(PodError, OSError, TimeoutError):  # silence makes a host stale, then left out
                report = await asyncio.wait_for(door.report(), REPORT_TIMEOUT_S)
                if report.host != door.name:  # the host was started anew under the same address
                    self.doors[report.host] = self.doors.pop(door.name)
                    self.homes.update({id: report.host for id, home in self.homes.items() if home == door.name})
                    self.router.forget(door.name)
                    door.name = report.host
                self.router.report(report)

        await asyncio.gather(*(ask(door) for door in list(self.doors.values())))


def default_state() -> Path:
    """Where this user's pods live: $ETUDE_PODS, or the state directory of the desktop's convention."""
    if given := os.environ.get("ETUDE_PODS"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "etude" / "pods"


async def open_host(
    backend: str = "auto", state: Path | str | None = None, thresholds: Thresholds | None = None, compiled: bool = True
) -> Host:
    """The host of a state directory on this machine, open."""
    state = Path(state or default_state()).absolute()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{state}: cannot keep pods there: {error.strerror}; name a directory with --state") from None
    name = await choose(backend)
    store = Store(state / "store")
    host = Host(state, store, make_backend(name, state, store, compiled), thresholds)
    await host.open()
    return host


@asynccontextmanager
async def open_fleet(
    backend: str = "auto",
    *,
    state: Path | str | None = None,
    hosts: Sequence[str] | None = None,
    token: str = "",
    thresholds: Thresholds | None = None,
    compiled: bool = True,
) -> AsyncIterator[Fleet]:
    """Pods on this machine or, with `hosts` (URLs of `etude pods serve`), on those; closed with everything it made."""
    if isinstance(hosts, str) or (hosts is not None and not hosts):
        raise InputError(f"hosts is {hosts!r}; expected a list of URLs, or None for pods on this machine")
    if hosts:
        from etude.pods.remote.client import RemoteHostClient

        doors = [await RemoteHostClient.open(url, token, required=False) for url in hosts]
        fleet = Fleet(doors)
        for door in doors:
            door.fleet = fleet  # so that pods there can fork to the others
    else:
        local = await open_host(backend, state, thresholds, compiled)
        fleet = Fleet([LocalHostClient(local)], local)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()
