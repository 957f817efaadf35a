"""Pods on another machine: the client of `etude pods serve`.

Lifecycle requests go over HTTP; commands and files over a WebSocket that carries the guest protocol, so remote and
local pods share the same code. A pod has a lease that its client renews: whichever of the two machines dies, nothing
runs on for long. A broken connection is re-established; only the commands that ran on it fail.
"""

import asyncio
import contextlib
import json
import math
import os
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack
from urllib.parse import quote

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from etude.errors import EtudeError, InputError
from etude.pods.distribution import Distribution
from etude.pods.fleet import Fleet
from etude.pods.guest import protocol
from etude.pods.guest.client import GuestClient, Link
from etude.pods.guest.guest_pod import GuestPod
from etude.pods.host import PodOptions, all_or_none
from etude.pods.host_client import HostClient, HostGone, HostRefused, ImageDescription, PodDescription
from etude.pods.host_system import HostSystem
from etude.pods.images.builder import LayerBuilder
from etude.pods.images.records import Image, SnapshotRecord
from etude.pods.pod import Event, ExecResult, FileInfo, Job, Pod, PodError, PodGone, Snapshot, SnapshotKind
from etude.pods.remote import messages
from etude.pods.remote.images import LONG_S, RemoteBuilder, RemoteLayers
from etude.pods.remote.messages import parse
from etude.pods.remote.websocket import WebSocketLink
from etude.pods.scheduling.router import REPORT_VERSION, HostReport
from etude.pods.settings import CERTIFICATE_VARIABLE, TOKEN_VARIABLE, PodSettings, check_address

CONNECT_S = 10.0
RESPONSE_S = 60.0
RETRIES = (0.1, 0.4)  # seconds between attempts of idempotent requests
RECONNECT_S = 30.0  # at least, before reconnecting to a pod is given up
# A creation may wait for admission without a byte: the kernel finds out within 50 s whether the host is still there.
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)


class RemoteHostClient(HostClient):
    """A remote host, as the fleet sees it. Created by `open`; closing it closes the pods it created."""

    def __init__(
        self, url: str, token: str, lease: float = messages.LEASE_S, tls: ssl.SSLContext | None = None
    ) -> None:
        try:
            self.url = self.name = check_address(url)
        except ValueError as error:
            raise InputError(f"host {error}") from None
        self.lease = lease
        self.headers = {"authorization": f"Bearer {token}"} if token else {}
        self.tls = (tls or ssl.create_default_context()) if self.url.startswith("https:") else None
        # Ignore the environment's proxies: hosts are on our own network, and the token must not reach a third party.
        self.http = httpx.AsyncClient(
            base_url=f"{self.url}/v1",
            headers=self.headers,
            timeout=httpx.Timeout(RESPONSE_S, connect=CONNECT_S),
            transport=httpx.AsyncHTTPTransport(
                verify=self.tls or False,
                trust_env=False,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
                socket_options=KEEPALIVE,
            ),
            trust_env=False,
        )
        self.layers = RemoteLayers(self)
        self.created: dict[str, RemotePod] = {}  # by id; closed by `close`
        self.fleet: Fleet | None = None

    @classmethod
    async def open(cls, url: str, settings: PodSettings | None = None) -> "RemoteHostClient":
        """Connect to a host; raise the error that says why it cannot be used."""
        settings = settings or PodSettings()
        client = cls(url, settings.token(), settings.lease_s, settings.tls())
        try:
            client.name = (await client.report()).host
        except BaseException:
            await client.http.aclose()
            raise
        return client

    async def close(self) -> None:
        await asyncio.gather(*(pod.close() for pod in list(self.created.values())), return_exceptions=True)
        await self.http.aclose()

    async def request(
        self, method: str, path: str, *, retry: bool = True, wait: float | None = RESPONSE_S, **options: Any
    ) -> bytes:
        """Send a request and return its response; `retry` if idempotent. HostGone if there is none within `wait`."""
        options["timeout"] = httpx.Timeout(wait, connect=CONNECT_S)
        for pause in (*(RETRIES if retry else ()), None):
            try:
                response = await self.http.request(method, path, **options)
                break
            except (httpx.HTTPError, OSError) as error:
                if pause is None:
                    raise self._unreachable(error) from error
                await asyncio.sleep(pause)
        if response.is_error:
            raise self._refusal(response.status_code, response.content)
        return response.content

    def _refusal(self, status: int, body: bytes) -> EtudeError:
        if status == 401:
            return HostRefused(
                f"host {self.url} refuses our token: give its own in ${TOKEN_VARIABLE}, or in a file (`token_file`)"
            )
        return messages.error_from_json(status, body, self.url)

    def _unreachable(self, error: Exception) -> HostGone:
        """Return the error of a request without a response."""
        text = str(error)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            reason = text.rpartition("certificate verify failed: ")[2].partition(" (_ssl")[0]
            return HostRefused(
                f"host {self.url}: its certificate is not trusted ({reason}); name the PEM file of its authority in "
                f"${CERTIFICATE_VARIABLE}, or with the key `certificate`"
            )
        if "WRONG_VERSION_NUMBER" in text:
            return HostRefused(f"host {self.url} serves without TLS; its address begins with http://")
        return HostGone(f"host {self.url} does not answer: {text or type(error).__name__}")

    # ------------------------------------------------------------------------------------------- pods

    async def report(self) -> HostReport:
        body = await self.request("GET", "/report", retry=False)
        try:
            version = json.loads(body)["version"]
        except (ValueError, KeyError, TypeError):
            version = "none"
        if version != REPORT_VERSION:
            raise HostRefused(
                f"host {self.url} runs another release of Etude (protocol {version}, ours is {REPORT_VERSION}); "
                "install the same one there"
            )
        return parse(HostReport, body, f"report of {self.url}")

    async def create(
        self,
        image: str | Image | Snapshot = "host",
        *,
        ttl: float | None = None,
        timeout: float | None = None,
        detached: bool = False,
        **options: Unpack[PodOptions],
    ) -> "RemotePod":
        """Create a pod on the host. If the response is lost, the pod ends with its first lease."""
        given = image.id if isinstance(image, Snapshot) else image
        lease = 0.0 if detached else self.lease
        request = messages.to_json({"image": given, "ttl": ttl, "timeout": timeout, "lease": lease, **options})
        wait = None if timeout is None else timeout + RESPONSE_S
        body = await self.request("POST", "/pods", retry=False, wait=wait, json=request)
        return await self._connect_pod(parse(PodDescription, body, self.url), renews=not detached)

    async def _connect_pod(self, description: PodDescription, renews: bool) -> "RemotePod":
        pod = RemotePod(self, description, renews)
        if renews:
            self.created[pod.id] = pod
        try:
            await pod.connect()
        except BaseException:
            await pod.close()
            raise
        return pod

    async def find(self, id: str) -> "RemotePod":
        """Return a running pod of the host by its id or a prefix of it, without renewing its lease."""
        try:
            body = await self.request("GET", f"/pods/{quote(id, safe='')}")
        except PodGone as error:
            raise InputError(str(error)) from None
        pod = RemotePod(self, parse(PodDescription, body, self.url), renews=False)
        await pod.connect()
        return pod

    async def pods(self) -> list[PodDescription]:
        return parse(list[PodDescription], await self.request("GET", "/pods"), self.url)

    async def events(self, id: str) -> Sequence[Event]:
        pod = await self.find(id)
        await pod.refresh()
        return pod.events()

    async def adopt_children(self, found: Sequence[PodDescription], renews: bool) -> "list[RemotePod]":
        """Connect to pods that were just forked; on an error all of them are closed."""
        return await all_or_none(self._connect_pod(each, renews) for each in found)

    async def open_link(self, id: str) -> WebSocketLink:
        """Open a new connection to a pod's guest init."""
        address = f"ws{self.url.removeprefix('http')}/v1/pods/{id}/agent"
        try:
            socket = await connect(
                address,
                additional_headers=self.headers,
                ssl=self.tls,
                proxy=None,
                compression=None,
                max_size=2 * protocol.MAX_FRAME,
                ping_timeout=60,
                open_timeout=CONNECT_S,
                close_timeout=1,
            )
        except InvalidStatus as refused:
            body = bytes(refused.response.body or b"")
            raise self._refusal(refused.response.status_code, body) from None
        except (OSError, TimeoutError, WebSocketException) as error:
            raise self._unreachable(error) from error
        return WebSocketLink(socket, self.url)

    # ------------------------------------------------------------------------------------------- files

    async def snapshots(self, owner: str = "") -> list[Snapshot]:
        return parse(list[Snapshot], await self.request("GET", "/snapshots", params={"owner": owner}), self.url)

    async def image(self, name: str) -> Image:
        return parse(Image, await self.request("GET", f"/images/{quote(name)}", wait=LONG_S), self.url)

    def builder(self, distribution: Distribution, system: HostSystem) -> LayerBuilder:
        return RemoteBuilder(self, distribution, system)

    async def portable_snapshot(self, id: str) -> SnapshotRecord:
        body = await self.request("GET", f"/snapshots/{quote(id, safe='')}/record", wait=LONG_S)
        return parse(SnapshotRecord, body, self.url)

    async def add_snapshot(self, record: SnapshotRecord) -> None:
        path = f"/snapshots/{quote(record.snapshot.id, safe='')}/record"
        await self.request("PUT", path, json=messages.to_json(record))

    async def drain(self, draining: bool) -> None:
        """Let the host take no new pods, or take them again."""
        await self.request("PUT", "/drain", json=draining)

    async def doctor(self) -> dict[str, Any]:
        """Return the host's diagnosis of itself."""
        return parse(dict[str, Any], await self.request("GET", "/doctor", retry=False, wait=LONG_S), self.url)

    async def images(self) -> list[ImageDescription]:
        return parse(list[ImageDescription], await self.request("GET", "/images"), self.url)

    async def export(self, id: str, file: Path) -> None:
        part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
        timeout = httpx.Timeout(LONG_S, connect=CONNECT_S)
        try:
            async with self.http.stream("GET", f"/snapshots/{quote(id)}", timeout=timeout) as response:
                if response.is_error:
                    raise self._refusal(response.status_code, await response.aread())
                with open(part, "xb") as out:
                    async for chunk in response.aiter_bytes(1 << 20):
                        await asyncio.to_thread(out.write, chunk)
            os.rename(part, file)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        finally:
            part.unlink(missing_ok=True)

    async def import_(self, file: Path) -> str:
        if not file.is_file():
            raise InputError(f"{file}: there is no such file")
        headers = {"content-length": str(file.stat().st_size), "content-type": "application/octet-stream"}
        content = _read_chunks(file)
        body = await self.request("PUT", "/images", retry=False, wait=LONG_S, content=content, headers=headers)
        return parse(dict[str, str], body, self.url)["id"]

    async def persist(self, id: str) -> Snapshot:
        body = await self.request("POST", f"/snapshots/{quote(id, safe='')}/persist", wait=LONG_S)
        return parse(Snapshot, body, self.url)

    async def remove_snapshot(self, id: str) -> None:
        await self.request("DELETE", f"/snapshots/{quote(id)}")


async def _read_chunks(file: Path) -> AsyncIterator[bytes]:
    with open(file, "rb") as source:
        while chunk := await asyncio.to_thread(source.read, 1 << 20):
            yield chunk


class RemoteJob(Job):
    """A job whose result the host completes: only the host sees that the kernel killed a process for memory."""

    def __init__(self, job: Job, complete_result: Callable[[ExecResult], Awaitable[ExecResult]]) -> None:
        self.job, self.complete_result = job, complete_result
        self.result: asyncio.Task[ExecResult] | None = None

    def output(self) -> AsyncIterator[tuple[Literal["stdout", "stderr"], bytes]]:
        return self.job.output()

    async def write(self, data: bytes) -> None:
        await self.job.write(data)

    async def close_stdin(self) -> None:
        await self.job.close_stdin()

    async def signal(self, number: int) -> None:
        await self.job.signal(number)

    async def resize(self, rows: int, columns: int) -> None:
        await self.job.resize(rows, columns)

    async def wait(self, timeout: float | None = None) -> ExecResult:
        async def end() -> ExecResult:
            return await self.complete_result(await self.job.wait())

        if self.result is None:
            self.result = asyncio.create_task(end())
        return await asyncio.wait_for(asyncio.shield(self.result), timeout)


class RemotePod(GuestPod):
    """A pod on another machine. With `renews` this client renews its lease, and the pod ends when the client does."""

    def __init__(self, client: RemoteHostClient, found: PodDescription, renews: bool) -> None:
        super().__init__(found.id, found.environment, found.workdir, found.user)
        self.client, self.renews, self.lease = client, renews, found.lease
        self.image, self.limits, self.egress = found.image, found.limits, found.egress
        self.default_command = found.command
        left = found.remaining
        self.deadline = math.inf if left is None else time.monotonic() + left  # on the local monotonic clock
        self.host_events: list[Event] = []
        self.event_cursor: dict[str, str] = {}  # how far the host's events have been read
        self.end_error: PodError | None = None
        self.reconnecting: asyncio.Task[None] | None = None
        self.renewing: asyncio.Task[None] | None = None

    # ------------------------------------------------------------------------------------------- connection

    @property
    def connected(self) -> bool:
        """Whether the pod can be reached, as far as is known."""
        return self.end_error is None and self.connection is not None and self.connection.closed_error is None

    async def open_link(self) -> Link:
        return await self.client.open_link(self.id)

    async def connect(self) -> None:
        """Connect for the first time, and with `renews` start renewing the lease."""
        await self._connect()
        if self.renews and self.lease:
            self.renewing = asyncio.create_task(self._renew_forever())

    async def _connect(self) -> None:
        guest = GuestClient(await self.open_link(), self.id)
        await guest.wait_until_ready(CONNECT_S)
        if self.end_error is not None:
            guest.close()
            raise self.end_error
        guest.on_disconnect = self._disconnected
        self.connection = guest
        self._renew()

    def _disconnected(self) -> None:
        if self.end_error is None and self.renews:  # at once, not at the next call: the lease is running out
            self._start_reconnect()

    def _start_reconnect(self) -> "asyncio.Task[None]":
        if self.reconnecting is None or self.reconnecting.done():
            self.reconnecting = asyncio.create_task(self._reconnect())
            # Retrieve the exception, which `ready` raises, so that asyncio does not log it.
            self.reconnecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self.reconnecting

    async def ready(self) -> GuestClient:
        """Return the guest client, once connected; PodGone if the pod has ended, HostGone if its host is silent."""
        if self.end_error is not None:
            raise self.end_error
        if self.connection is None or self.connection.closed_error is not None:
            await asyncio.shield(self._start_reconnect())
        return self.guest

    async def _reconnect(self) -> None:
        deadline, pause = time.monotonic() + max(self.lease, RECONNECT_S), 0.02
        while True:
            try:
                return await self._connect()
            except PodGone as error:
                # A pod that a snapshot restarts also ends a connection that came too early: ask its host.
                is_restarted = self.end_error is None and time.monotonic() < deadline and await self._exists()
                if not is_restarted:
                    if self.end_error is None:
                        self._end(error)
                        self.record("gone", {"reason": str(error)})
                    raise
            except PodError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(1.0, pause * 1.5)

    async def _exists(self) -> bool:
        """Return whether the host has the pod, as far as it answers."""
        with contextlib.suppress(PodError):
            try:
                await self.client.request("GET", f"/pods/{self.id}")
            except PodGone:
                return False
        return True

    def _end(self, error: PodError) -> None:
        self.end_error = self.end_error or error
        self.client.created.pop(self.id, None)
        for task in (self.renewing, self.reconnecting):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        if self.connection is not None:
            guest, self.connection = self.connection, None
            guest.close()

    def _renew(self) -> None:
        """Send a lease renewal to the guest init, without waiting for the answer: a frozen one gives none."""
        if not self.renews or not self.lease or self.connection is None or self.connection.closed_error is not None:
            return
        granted = max(0.001, min(self.lease, self.deadline - time.monotonic()))
        self.connection.next_call += 1
        fields = ((protocol.TIME, math.ceil(granted * 1000)), (protocol.FLAGS, 0))
        self.connection.link.send(protocol.frame(protocol.OWN, self.connection.next_call, *fields))

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(self.lease / 3)
            self._renew()
            with contextlib.suppress(EtudeError):
                await self.refresh()

    # ------------------------------------------------------------------------------------------- commands

    async def exec(self, *command: Any, **options: Any) -> ExecResult:
        return await self._check_out_of_memory(await super().exec(*command, **options))

    async def spawn(self, *command: Any, **options: Any) -> Job:
        return RemoteJob(await super().spawn(*command, **options), self._check_out_of_memory)

    async def _check_out_of_memory(self, result: ExecResult) -> ExecResult:
        """Ask the host whether memory ran out, if a command failed in a pod with a memory limit."""
        if result.exit_code == 0 or result.out_of_memory or self.limits.memory is None:
            return result
        with contextlib.suppress(EtudeError):  # the command's result matters more
            if parse(dict[str, bool], await self._request("POST", "memory"), self.client.url)["ran_out"]:
                self.record("out-of-memory", {"exit_code": result.exit_code})
                return replace(result, out_of_memory=True)
        return result

    # ------------------------------------------------------------------------------------------- lifecycle

    async def _request(self, method: str, verb: str, **options: Any) -> bytes:
        if self.end_error is not None:
            raise self.end_error
        return await self.client.request(method, f"/pods/{self.id}/{verb}".rstrip("/"), **options)

    async def diff(self, paths: Sequence[str] = ("/",)) -> Mapping[str, FileInfo | None]:
        return messages.changes_from_json(await self._request("GET", "diff", wait=LONG_S, params={"path": list(paths)}))

    async def snapshot(self, kind: SnapshotKind | None = None) -> Snapshot:
        fleet = self.client.fleet
        lent = {"owner": fleet.owner, "lease": messages.SNAPSHOT_LEASE_S} if fleet is not None else {}
        body = await self._request("POST", "snapshot", retry=False, wait=LONG_S, json={"kind": kind, **lent})
        await self._resync()
        taken = parse(Snapshot, body, self.client.url)
        if fleet is not None:
            fleet.snapshot_hosts[taken.id] = self.client.url
        return taken

    async def fork(self, n: int = 1, kind: SnapshotKind | None = None) -> Sequence[Pod]:
        fleet = self.client.fleet
        if fleet is not None and len(fleet.clients) > 1:
            return await fleet.fork(self, self.client.url, n, kind)
        body = await self._request("POST", "fork", retry=False, wait=LONG_S, json={"n": n, "kind": kind})
        found = parse(list[PodDescription], body, self.client.url)
        children, _ = await asyncio.gather(self.client.adopt_children(found, self.renews), self._resync())
        return children

    async def _resync(self) -> None:
        """Reconnect and fetch events, after an operation that may have restarted the pod."""
        with contextlib.suppress(PodError):
            await self.guest.request(protocol.PING)
        await self.ready()
        with contextlib.suppress(EtudeError):
            await self.refresh()

    async def close(self) -> None:
        if self.end_error is not None:
            return
        self._end(PodGone(f"pod {self.id} is closed"))
        try:
            self._add_events(await self.client.request("DELETE", f"/pods/{self.id}", params=self.event_cursor))
        except HostGone:
            if not self.lease:
                raise
            self.record("unreachable", {"ends_within_s": self.lease})  # its lease is no longer renewed

    async def stats(self) -> Mapping[str, float]:
        return parse(PodDescription, await self._request("GET", ""), self.client.url).stats

    # ------------------------------------------------------------------------------------------- events

    async def refresh(self) -> None:
        """Fetch the events that the host has recorded since the last call."""
        self._add_events(await self._request("GET", "events", params=self.event_cursor))

    def _add_events(self, body: bytes) -> None:
        found = parse(messages.Events, body, self.client.url)
        self.host_events += found.events
        self.event_cursor = {"after": str(found.next), "of": found.of}

    def events(self) -> Sequence[Event]:
        """Return this client's events and the host's, which are fetched at every renewal, snapshot and the end."""
        return tuple(sorted((*self.history, *self.host_events), key=lambda event: event.time))
