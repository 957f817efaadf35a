"""The fleet: creates pods on this machine or on remote hosts that serve HTTP.

With one local host there is nothing to route. With several hosts, each reports its contents and pressure, the router
places pods, images and snapshots travel to where they are needed, and when a host fails the pod is created on another.
Forks stay on their parent's host unless it is over its pressure ceilings.
"""

import asyncio
import hashlib
import logging
import math
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar, Unpack
from urllib.parse import urlsplit

from etude.errors import InputError
from etude.pods.distribution import Distribution
from etude.pods.host import Host, PodOptions, all_or_none
from etude.pods.host_client import HostClient, HostGone, LocalHostClient
from etude.pods.host_system import HostSystem, host_system
from etude.pods.host_watch import ISOLATION_OPTION, HostWatch, strong_isolation
from etude.pods.images.builder import LayerBuilder
from etude.pods.images.records import SYSTEM_LABEL, Image, Layer
from etude.pods.images.store import Store
from etude.pods.images.transfer import LayersMissing
from etude.pods.pod import Capabilities, Egress, Limits, Pod, PodError, Snapshot, SnapshotKind, Unsupported
from etude.pods.runtime.probe import choose_backend, make_backend
from etude.pods.scheduling.admission import NeverFits, Thresholds, WaitedTooLong
from etude.pods.scheduling.pools import PodKind, Prepare, WarmPool
from etude.pods.scheduling.router import NoHost, Placement, PlacementRequest, PodRouter, system_label
from etude.pods.settings import PodSettings

T = TypeVar("T")
HOST_WAIT_S = 3.0  # for admission on one host, before others are tried
RETRY_S = 0.25  # between attempts when no host can take a pod
EXPECTED_MEMORY = 256 << 20  # bytes a new pod is placed for; its host has an estimate for the image
PATIENCE_S = 60.0  # in which a host may be restarted, before a request fails because none answers
RESOLVED_S = 10.0  # for which the image of a name is not asked for again

log = logging.getLogger("etude.pods")


class Fleet:
    """Creates and forks pods on one or more hosts. Made by `open_fleet`.

    `store` has the images of this machine. `owner` is the run that remote snapshots are taken for.
    """

    def __init__(self, clients: Sequence[HostClient], store: Store, local: Host | None = None, owner: str = "") -> None:
        if not clients:
            raise InputError("a fleet needs at least one host")
        self.clients = {client.url: client for client in clients}
        self.store, self.local, self.owner = store, local, owner
        self.router = PodRouter()
        self.watch = HostWatch(self.clients, self.router)
        self.distribution = Distribution(store, self.clients, self.watch.answers)
        self.pools: dict[PodKind, WarmPool[Pod]] = {}  # of remote pods
        self.snapshot_hosts: dict[str, str] = {}  # address of the host where this process took a snapshot
        self.named: dict[str, Image] = {}  # by `name_image`
        self.resolved: dict[str, tuple[float, Image]] = {}
        self.closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Get the first report of every remote host, and poll them from then on."""
        if self.local is None:
            await self.watch.start()

    async def close(self) -> None:
        await self.watch.close()
        await asyncio.gather(*(pool.close() for pool in self.pools.values()))
        if self.closing:
            await asyncio.wait(self.closing)
        if self.local is None:
            await self.distribution.close()
        for client in self.clients.values():
            await client.close()

    # ------------------------------------------------------------------------------------------- pods

    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        prepare: Prepare | None = None,
        **options: Unpack[PodOptions],
    ) -> Pod:
        """Create a pod from an image ("host" is its machine's own toolchain) or a snapshot.

        Waits for admission, at most `timeout` seconds. The pod ends after `ttl` seconds. `await prepare(pod)` runs
        before the pod is returned, or has run already in a warm pool; `pod.prepared` is its result.
        """
        if self.local is not None:
            return await self.local.create(image, ttl=ttl, timeout=timeout, prepare=prepare, **options)
        if isinstance(image, str) and image != "host" and not image.startswith("snap-"):
            image = await self.resolve(image)
        pool = self.pools.get(_kind(image, prepare, options)) if ttl is None else None
        if pool is not None and (pod := self._take(pool)) is not None:
            return pod
        return await self._create_prepared(image, ttl, timeout, prepare, **options)

    async def _create_prepared(
        self,
        image: str | Image | Snapshot,
        ttl: float | None,
        timeout: float | None,
        prepare: Prepare | None,
        **options: Unpack[PodOptions],
    ) -> Pod:
        pod = await self._place(image, ttl, timeout, None, **options)
        if prepare is not None:
            try:
                pod.prepared = await prepare(pod)
            except BaseException:
                await pod.close()
                raise
        return pod

    async def _place(
        self,
        image: str | Image | Snapshot,
        ttl: float | None,
        timeout: float | None,
        parent_host: str | None,
        **options: Unpack[PodOptions],
    ) -> Pod:
        """Try hosts, best first, until one has created the pod."""
        request = await self._placement_request(image, parent_host, **options)
        deadline = None if timeout is None else time.monotonic() + timeout
        patience = time.monotonic() + min(PATIENCE_S, math.inf if timeout is None else timeout)
        tried: set[str] = set()
        lacked: set[str] = set()  # hosts that turned out to lack layers of the image
        while True:
            try:
                placement = self.router.place(request, exclude=tried)
            except NoHost as error:
                if not error.retryable or (deadline is not None and time.monotonic() > deadline):
                    raise
                tried.clear()
                await asyncio.sleep(RETRY_S)
                continue
            try:
                return await self._create_on(placement, image, ttl, deadline, **options)
            except WaitedTooLong:  # the report was too old to show that the host is full
                self.router.release(placement)
                if deadline is not None and time.monotonic() > deadline:
                    raise
                tried.add(placement.host)
            except LayersMissing:
                self.router.release(placement)
                self.distribution.forget(self._client(placement.host))
                if placement.host in lacked:
                    raise
                lacked.add(placement.host)
            except (HostGone, OSError, NeverFits) as error:
                self.router.release(placement)
                never_fits = isinstance(error, NeverFits)
                if not never_fits:
                    self.router.mark_failed(placement.host)
                tried.add(placement.host)
                if len(tried) >= len(self.clients) and (never_fits or time.monotonic() > patience):
                    raise
            except BaseException:
                self.router.release(placement)
                raise

    async def _create_on(
        self,
        placement: Placement,
        image: str | Image | Snapshot,
        ttl: float | None,
        deadline: float | None,
        **options: Unpack[PodOptions],
    ) -> Pod:
        """Create a pod on the host of a placement, after what it starts from."""
        client = self._client(placement.host)
        if isinstance(image, Image):
            await self.distribution.bring_image(image, client)
        elif isinstance(image, Snapshot) and placement.transfer:
            await self.distribution.bring_snapshot(image.id, client, self._likely(image.id))
        left = math.inf if deadline is None else max(0.1, deadline - time.monotonic())
        wait = min(left, HOST_WAIT_S) if len(self.clients) > 1 else left
        return await client.create(image, ttl=ttl, timeout=None if wait == math.inf else wait, **options)

    def _client(self, name: str) -> HostClient:
        """Return the client of a host by its name in the router."""
        for client in self.clients.values():
            if client.name == name:
                return client
        raise HostGone(f"host {name} was restarted")

    async def _placement_request(
        self, image: str | Image | Snapshot, parent_host: str | None, **options: Unpack[PodOptions]
    ) -> PlacementRequest:
        limits, egress = options.get("limits") or Limits(), options.get("egress")
        requires = {f"limit:{name}" for name in limits.specified()}
        if egress and egress.allow:
            requires.add("egress:transparent" if egress.transparent else "egress:proxy")
        memory = min(EXPECTED_MEMORY, limits.memory or EXPECTED_MEMORY)
        if isinstance(image, str):
            return PlacementRequest(image, memory, None, parent_host, frozenset(requires))
        if isinstance(image, Image):
            if image.binds and SYSTEM_LABEL in image.labels:
                requires.add(f"system:{image.labels[SYSTEM_LABEL]}")
            holders = await self.distribution.holders(image)
            return PlacementRequest(image.id, memory, None, parent_host, frozenset(requires), holders)
        for url in self._likely(image.id):
            if (report := self.watch.reports.get(url)) is not None:
                parent_host = parent_host or self.clients[url].name  # reports may be too old to show the snapshot
                requires.add(system_label(report.system))  # it may be of an image that binds the host's programs
                break
        return PlacementRequest(image.image, memory, image.id, parent_host, frozenset(requires))

    def _likely(self, snapshot: str) -> list[str]:
        """Return the addresses of the hosts that have a snapshot, as far as is known."""
        reported = [url for url, report in self.watch.reports.items() if snapshot in report.snapshots]
        known = self.snapshot_hosts.get(snapshot)
        return [*([known] if known else []), *reported]

    async def fork(self, pod: Pod, host: str, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        """Fork a remote pod on its own host, given by address, or on others when that is over its ceilings."""
        snapshot = await pod.snapshot(kind)
        options: PodOptions = {"limits": pod.limits, "egress": pod.egress}
        parent = self.clients[host].name
        try:
            return await all_or_none(self._place(snapshot, None, None, parent, **options) for _ in range(n))
        finally:
            await self.remove_snapshot(snapshot.id)

    # ------------------------------------------------------------------------------------------- warm pools

    async def pool(
        self,
        image: str | Image | Snapshot,
        size: int,
        *,
        prepare: Prepare | None = None,
        **options: Unpack[PodOptions],
    ) -> None:
        """Keep pods of this kind started in advance (see `Host.pool`); on remote hosts where the router places them."""
        if self.local is not None:
            await self.local.pool(image, size, prepare=prepare, **options)
            return

        def start() -> Awaitable[Pod]:
            return self._create_prepared(image, None, None, prepare, **options)

        kind = _kind(image, prepare, options)
        pool = self.pools.setdefault(kind, WarmPool(start))
        if size == 0:
            del self.pools[kind]
        await pool.resize(size)

    def _take(self, pool: WarmPool[Pod]) -> Pod | None:
        """Return a ready pod of a pool; those whose hosts have died meanwhile are closed."""
        asyncio.get_running_loop().call_soon(pool.refill)  # once the caller has its pod
        while (pod := pool.take()) is not None:
            if pod.connected:
                return pod
            task = asyncio.create_task(pod.close())
            self.closing.add(task)
            task.add_done_callback(self._closed)
        return None

    def _closed(self, task: "asyncio.Task[None]") -> None:
        self.closing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("a pod of a warm pool was lost: %s", error)

    # ------------------------------------------------------------------------------------------- snapshots

    async def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot from every host that has it and can be reached."""
        self.snapshot_hosts.pop(id, None)
        removing = (client.remove_snapshot(id) for client in self.clients.values())
        for error in await asyncio.gather(*removing, return_exceptions=True):
            if error is not None and not isinstance(error, InputError | PodError):  # unknown there, or unreachable
                raise error

    async def snapshots(self) -> set[str]:
        """Return the snapshots of this fleet's owner on hosts that can be reached; on this machine, all."""
        if self.local is None and not self.owner:
            return set()
        listing = (client.snapshots(self.owner if self.local is None else "") for client in self.clients.values())
        found = await asyncio.gather(*listing, return_exceptions=True)
        if unexpected := [each for each in found if isinstance(each, BaseException) and not isinstance(each, PodError)]:
            raise unexpected[0]
        return {snapshot.id for each in found if isinstance(each, list) for snapshot in each}

    async def persist(self, id: str) -> None:
        """Write a snapshot to the disk of its host."""
        for url in dict.fromkeys((*self._likely(id), *self.clients)):
            try:
                await self.clients[url].persist(id)
            except InputError:  # it has no such snapshot
                continue
            return
        raise InputError(f"there is no snapshot {id}")

    async def fetch_snapshot(self, id: str, above: Sequence[Layer]) -> tuple[Layer, ...]:
        """Return the layers of a snapshot in the store of this machine; those not among `above` are portable."""
        if self.local is None:
            return (await self.distribution.fetch_snapshot(id)).layers
        layers = self.store.snapshot(id).image.layers
        return tuple([each if each in above else await asyncio.to_thread(self.store.portable, each) for each in layers])

    # ------------------------------------------------------------------------------------------- images

    async def resolve(self, name: str) -> Image:
        """Return the image of a name: on this machine, or the one that it and the hosts have."""
        if self.local is not None:
            return self.local.resolve(name)
        if name in self.named:
            return self.named[name]
        until, image = self.resolved.get(name, (0.0, None))
        if image is None or time.monotonic() > until or not await self.distribution.exists(image):
            image = await (_patiently(self._host_image) if name == "host" else self.distribution.find_image(name))
            self.resolved[name] = (time.monotonic() + RESOLVED_S, image)
        return image

    async def _host_image(self) -> Image:
        """Return the image of the system that most hosts have, as the first of them has it."""
        failures = []
        system = self.system
        for client in self.watch.usable():
            try:
                if self.watch.reports[client.url].system == system:
                    return await client.image("host")
            except HostGone as error:
                failures.append(str(error))
        raise HostGone("; ".join(["no pod host can be reached", *failures]))

    async def known_image(self, name: str) -> Image | None:
        """Return the image that `name_image` made known, if its layers still exist somewhere."""
        if self.local is not None:
            try:
                return self.store.image(name)
            except InputError:
                return None
        image = self.named.get(name)
        return image if image is not None and await self.distribution.exists(image) else None

    def name_image(self, image: Image) -> None:
        """Let `resolve` know an image by its name: in the store of this machine, or in this fleet."""
        if self.local is not None:
            self.store.add_image(image)
        else:
            self.named[image.name] = image

    async def keep_image(self, image: Image) -> Image:
        """Add an image to the store of this machine, with all its layers."""
        await self.fetch_image(image)
        return await asyncio.to_thread(self.store.add_image, image)

    async def fetch_image(self, image: Image) -> None:
        """Bring the layers of an image to the store of this machine."""
        if self.local is None:
            await self.distribution.fetch_image(image)

    async def build(self, key: str, work: Callable[[LayerBuilder], Awaitable[T]]) -> T:
        """Call `work` with a builder: equal keys with that of the same host, so that equal builds run once."""
        if self.local is not None:
            return await work(self.local.builder)
        return await _patiently(lambda: self._build_on_host(key, work))

    async def _build_on_host(self, key: str, work: Callable[[LayerBuilder], Awaitable[T]]) -> T:
        system, failures = self.system, list[str]()

        def rank(client: HostClient) -> tuple[bool, bytes]:
            other_system = self.watch.reports[client.url].system != system
            return other_system, hashlib.sha256(f"{key} {client.url}".encode()).digest()

        for client in sorted(self.watch.usable(), key=rank):
            try:
                return await work(client.builder(self.distribution, self.watch.reports[client.url].system))
            except HostGone as error:
                self.router.mark_failed(client.name)
                failures.append(str(error))
        raise HostGone("; ".join(["no pod host can build an image", *failures]))

    @property
    def system(self) -> HostSystem:
        """The system of this machine, or the one that most of the hosts have."""
        return host_system() if self.local is not None else self.watch.system()

    def own_address(self) -> str:
        """Return the address of this machine at which the hosts of pods reach it."""
        if self.local is not None:
            return "127.0.0.1"
        parts = urlsplit(next(iter(self.watch.usable() or self.clients.values())).url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probing:  # nothing is sent
            try:
                probing.connect((parts.hostname, parts.port or 443))
            except OSError as error:
                raise InputError(f"host {parts.geturl()} has no IPv4 address that can be reached: {error}") from None
            return str(probing.getsockname()[0])

    def possible_limits(self) -> frozenset[str]:
        """Return the limits that a pod can have on some host."""
        if self.local is not None:
            return self.local.backend.capabilities.limits
        labels = Counter(label for report in self.watch.reports.values() for label in report.capabilities)
        return frozenset(label.removeprefix("limit:") for label in labels if label.startswith("limit:"))


async def _patiently(work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` returns; while no host answers, call it again for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return await work()
        except HostGone:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(RETRY_S)


def _kind(image: str | Image | Snapshot, prepare: Prepare | None, options: PodOptions) -> PodKind:
    """Return the kind of pods that a request for a remote pod can claim."""
    name = image if isinstance(image, str) else image.id
    env = "".join(f" {key}={value}" for key, value in sorted((options.get("env") or {}).items()))
    limits, egress = options.get("limits") or Limits(), options.get("egress") or Egress()
    return PodKind(name + env, limits, egress, options.get("storage", "memory"), prepare)


def default_state() -> Path:
    """Return this user's state directory: $ETUDE_PODS, or etude/pods in $XDG_STATE_HOME."""
    if given := os.environ.get("ETUDE_PODS"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "etude" / "pods"


def check_isolation(backend: str, capabilities: Capabilities) -> None:
    """Raise Unsupported if the option of this environment refuses what a backend isolates less than the strongest."""
    if strong_isolation() and (weak := capabilities.lacks(isolation=True)):
        raise Unsupported(
            f"{ISOLATION_OPTION}=strong refuses the {backend} backend here, without {'; '.join(weak)}: "
            "`etude pods doctor` says why; run the service as root, or unset the option"
        )


async def open_host(
    backend: str = "auto", state: Path | str | None = None, thresholds: Thresholds | None = None
) -> Host:
    """Open the host of a state directory on this machine."""
    state = Path(state or default_state()).absolute()
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{state}: cannot be created: {error.strerror}; name another directory with --state") from None
    name = await choose_backend(backend)
    store = Store(state / "store")
    made = await asyncio.to_thread(make_backend, name, state, store)
    check_isolation(name, made.capabilities)
    host = Host(state, store, made, thresholds)
    await host.open()
    return host


@asynccontextmanager
async def open_fleet(
    backend: str = "auto",
    *,
    state: Path | str | None = None,
    pods: PodSettings | None = None,
    owner: str = "",
    thresholds: Thresholds | None = None,
) -> AsyncIterator[Fleet]:
    """Open a fleet on this machine, or on the hosts that `pods` names; close it and its pods on exit.

    With hosts, the store in `state` has the images of this machine. `owner` names the run whose processes take
    snapshots there: `Fleet.snapshots` has those of all of them.
    """
    if pods is not None and pods.hosts:
        fleet = _remote_fleet(pods, Path(state or default_state()).absolute(), owner)
    else:
        local = await open_host(backend, state, thresholds)
        fleet = Fleet([LocalHostClient(local)], local.store, local)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


def _remote_fleet(pods: PodSettings, state: Path, owner: str) -> Fleet:
    from etude.pods.remote.client import RemoteHostClient

    token, tls = pods.token(), pods.tls()
    clients = [RemoteHostClient(url, token, pods.lease_s, tls) for url in pods.hosts]
    fleet = Fleet(clients, Store(state / "store"), owner=owner)
    for client in clients:
        client.fleet = fleet  # so that pods there can fork to the other hosts
    return fleet
