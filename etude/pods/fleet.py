"""The fleet: creates pods on this machine or on remote hosts that serve HTTP.

With one local host there is nothing to route. With several hosts, each reports its contents and pressure, the router
places pods, and when a host fails the pod is created on another. Forks stay on their parent's host unless it is over
its pressure ceilings; then the snapshot is transferred.
"""

import asyncio
import contextlib
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Unpack

from etude.errors import InputError
from etude.pods.host import Host, PodOptions, all_or_none
from etude.pods.host_client import HostClient, HostGone, LocalHostClient
from etude.pods.images.records import Image
from etude.pods.images.store import Store
from etude.pods.pod import Capabilities, Limits, Pod, PodError, Snapshot, SnapshotKind, Unsupported
from etude.pods.runtime.probe import choose_backend, make_backend
from etude.pods.scheduling.admission import NeverFits, Thresholds, WaitedTooLong
from etude.pods.scheduling.pools import Prepare
from etude.pods.scheduling.router import NoHost, PlacementRequest, PodRouter

ISOLATION_OPTION = "ETUDE_POD_ISOLATION"  # "strong": no pods where they are isolated less than as root
REPORT_INTERVAL_S = 1.0
REPORT_TIMEOUT_S = 5.0
HOST_WAIT_S = 3.0  # for admission on one host, before others are tried
RETRY_S = 0.25  # between attempts when no host can take a pod
EXPECTED_MEMORY = 256 << 20  # bytes a new pod is placed for; its host has an estimate for the image


class Fleet:
    """Creates and forks pods on one or more hosts. Made by `open_fleet`."""

    def __init__(self, clients: Sequence[HostClient], local: Host | None = None) -> None:
        if not clients:
            raise InputError("a fleet needs at least one host")
        self.clients = {client.name: client for client in clients}  # by host name
        self.local = local
        self.router = PodRouter()
        self.pod_hosts: dict[str, str] = {}  # pod id -> host name
        self.transfers: dict[tuple[str, str], asyncio.Task[None]] = {}  # by (snapshot, host)
        self.report_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Get the first report of every remote host, and poll them from then on."""
        if self.local is None:
            await self._poll_hosts()
            self.report_task = asyncio.create_task(self._poll_loop())

    async def close(self) -> None:
        if self.report_task is not None:
            self.report_task.cancel()
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
        """Create a pod from an image ("host" is this machine's own toolchain) or a snapshot.

        Waits for admission, at most `timeout` seconds. The pod ends after `ttl` seconds. `await prepare(pod)` runs
        before the pod is returned, or has run already in a warm pool; `pod.prepared` is its result.
        """
        if self.local is not None:
            return await self.local.create(image, ttl=ttl, timeout=timeout, prepare=prepare, **options)
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
        request = self._placement_request(image, parent_host, **options)
        deadline = None if timeout is None else time.monotonic() + timeout
        tried: set[str] = set()
        while True:
            try:
                placement = self.router.place(request, exclude=tried)
            except NoHost as error:
                if not error.retryable or (deadline is not None and time.monotonic() > deadline):
                    raise
                tried.clear()
                await asyncio.sleep(RETRY_S)
                continue
            client = self.clients[placement.host]
            try:
                if placement.transfer and isinstance(image, Snapshot):
                    await self._ensure_snapshot(image.id, client)
                left = math.inf if deadline is None else max(0.1, deadline - time.monotonic())
                wait = min(left, HOST_WAIT_S) if len(self.clients) > 1 else left
                pod = await client.create(image, ttl=ttl, timeout=None if wait == math.inf else wait, **options)
            except WaitedTooLong:  # the report was too old to show that the host is full
                self.router.release(placement)
                if deadline is not None and time.monotonic() > deadline:
                    raise
                tried.add(placement.host)
                continue
            except (HostGone, OSError, NeverFits) as error:
                self.router.release(placement)
                if not isinstance(error, NeverFits):
                    self.router.mark_failed(placement.host)
                tried.add(placement.host)
                if len(tried) == len(self.clients):
                    raise
                continue
            except BaseException:
                self.router.release(placement)
                raise
            self.pod_hosts[pod.id] = placement.host
            return pod

    def _placement_request(
        self, image: str | Image | Snapshot, parent_host: str | None, **options: Unpack[PodOptions]
    ) -> PlacementRequest:
        limits, egress = options.get("limits") or Limits(), options.get("egress")
        requires = {f"limit:{name}" for name in limits.specified()}
        if egress and egress.allow:
            requires.add("egress:transparent" if egress.transparent else "egress:proxy")
        memory = min(EXPECTED_MEMORY, limits.memory or EXPECTED_MEMORY)
        snapshot = image.id if isinstance(image, Snapshot) else None
        name = image if isinstance(image, str) else image.id if isinstance(image, Image) else image.image
        return PlacementRequest(name, memory, snapshot, parent_host, requires=frozenset(requires))

    async def fork(self, pod: Pod, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        """Fork a pod on its own host, or on others when that one is over its pressure ceilings."""
        host = self.pod_hosts.get(pod.id)
        if host is None or len(self.clients) == 1:
            return await pod.fork(n, kind)
        snapshot = await pod.snapshot(kind)
        options: PodOptions = {"limits": pod.limits, "egress": pod.egress}
        try:
            return await all_or_none(self._place(snapshot, None, None, host, **options) for _ in range(n))
        finally:
            await self.remove_snapshot(snapshot.id)

    async def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot from every host that has it and can be reached."""
        removing = (client.remove_snapshot(id) for client in self.clients.values())
        for error in await asyncio.gather(*removing, return_exceptions=True):
            if error is not None and not isinstance(error, InputError | PodError):  # unknown there, or unreachable
                raise error

    async def _ensure_snapshot(self, snapshot: str, target: HostClient) -> None:
        """Transfer a snapshot to `target` once, however many children wait for it there."""
        key = (snapshot, target.name)
        if key not in self.transfers:
            task = self.transfers[key] = asyncio.create_task(self._transfer(snapshot, target))
            task.add_done_callback(lambda _: self.transfers.pop(key, None))
        await asyncio.shield(self.transfers[key])

    async def _transfer(self, snapshot: str, target: HostClient) -> None:
        """Copy a snapshot from a host that has it to `target`."""
        sources = [report.host for report in self.router.hosts() if snapshot in report.snapshots]
        # Reports are up to a second old: try the hosts that reported the snapshot first, then all others.
        for name in dict.fromkeys((*sources, *self.clients)):
            if name == target.name or name not in self.clients:
                continue
            with tempfile.TemporaryDirectory(prefix="etude-snapshot-") as directory:
                file = Path(directory) / "snapshot.tar"
                try:
                    await self.clients[name].export(snapshot, file)
                except (HostGone, InputError):
                    continue
                await target.import_(file)
                return
        raise PodError(f"no reachable host has snapshot {snapshot}")

    async def pool(
        self,
        image: str | Image | Snapshot,
        size: int,
        *,
        prepare: Prepare | None = None,
        **options: Unpack[PodOptions],
    ) -> None:
        """Keep pods of this kind started in advance on this machine (see `Host.pool`)."""
        if self.local is None:
            raise InputError("remote hosts keep their own warm pools: start `etude pods serve` there with --warm")
        await self.local.pool(image, size, prepare=prepare, **options)

    # ------------------------------------------------------------------------------------------- hosts

    async def _poll_loop(self) -> None:
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            await self._poll_hosts()

    async def _poll_hosts(self) -> None:
        async def poll(client: HostClient) -> None:
            with contextlib.suppress(PodError, OSError, TimeoutError):  # the router excludes a host without reports
                report = await asyncio.wait_for(client.report(), REPORT_TIMEOUT_S)
                if report.host != client.name:  # the host was restarted at the same address
                    self.clients[report.host] = self.clients.pop(client.name)
                    renamed = {id: report.host for id, host in self.pod_hosts.items() if host == client.name}
                    self.pod_hosts.update(renamed)
                    self.router.forget(client.name)
                    client.name = report.host
                self.router.report(report)

        await asyncio.gather(*(poll(client) for client in list(self.clients.values())))


def default_state() -> Path:
    """Return this user's state directory: $ETUDE_PODS, or etude/pods in $XDG_STATE_HOME."""
    if given := os.environ.get("ETUDE_PODS"):
        return Path(given).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "etude" / "pods"


def check_isolation(backend: str, capabilities: Capabilities) -> None:
    """Raise Unsupported if the option of this environment refuses what a backend isolates less than the strongest."""
    wanted = os.environ.get(ISOLATION_OPTION, "any")
    if wanted not in ("any", "strong"):
        raise InputError(f"{ISOLATION_OPTION}={wanted}: expected any or strong")
    if wanted == "strong" and (weak := capabilities.lacks(isolation=True)):
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
    hosts: Sequence[str] | None = None,
    token: str = "",
    thresholds: Thresholds | None = None,
) -> AsyncIterator[Fleet]:
    """Open a fleet on this machine or on `hosts` (URLs of `etude pods serve`); close it and its pods on exit."""
    if isinstance(hosts, str) or (hosts is not None and not hosts):
        raise InputError(f"hosts is {hosts!r}; expected a list of URLs, or None for pods on this machine")
    if hosts:
        from etude.pods.remote.client import RemoteHostClient

        clients = [await RemoteHostClient.open(url, token, required=False) for url in hosts]
        fleet = Fleet(clients)
        for client in clients:
            client.fleet = fleet  # so that pods there can fork to the other hosts
    else:
        local = await open_host(backend, state, thresholds)
        fleet = Fleet([LocalHostClient(local)], local)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()
