"""Serve a host over HTTP: its pods, snapshots and images for clients with the token, and a tunnel to each guest init.

Pods created here are detached: they outlive this process, and the next server on the same state directory adopts them
with their egress, so a restart loses nothing. A client keeps its pod alive by renewing a
lease through the tunnel; pods that ended are reaped here. All input is checked and bounded.
"""

import asyncio
import contextlib
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from etude.errors import EtudeError, InputError
from etude.pods.diagnosis import diagnose
from etude.pods.guest.client import SocketLink
from etude.pods.host import Host
from etude.pods.host_client import HostGone, LocalHostClient, describe
from etude.pods.images.records import Image
from etude.pods.pod import PodError, PodGone
from etude.pods.remote import messages
from etude.pods.remote.image_service import ImageService, read_body
from etude.pods.runtime.backend import LocalPod, PodSpec
from etude.pods.scheduling.router import HostReport
from etude.system.http import RequestGuard, cancel_on_disconnect, serving
from etude.system.prometheus import PrometheusText

MAX_UPLOAD = 64 << 30  # bytes of a snapshot or an image; the disk is usually full before
REAP_S = 10.0
REPORT_AGE_S = 0.5
TUNNEL_BUFFER = 1 << 20  # bytes buffered for a slow client before reading from the guest init pauses
RESTART_S = 10.0  # how long a pod may be without a guest init while a snapshot is taken

logger = logging.getLogger(__name__)


class HostService:
    """The endpoints of a host, one method each."""

    def __init__(self, host: Host, max_upload: int) -> None:
        self.host, self.client, self.max_upload = host, LocalHostClient(host), max_upload
        self.images = ImageService(host, self.client, max_upload)
        self.reported = (-math.inf, host.report())  # on the monotonic clock

    async def report(self, request: Request) -> Any:
        """Return the host's state; one answer serves the many clients that ask every second."""
        if time.monotonic() > self.reported[0] + REPORT_AGE_S:
            self.reported = (time.monotonic(), await self.client.report())
        return self.reported[1]

    async def metrics(self, request: Request) -> Any:
        """Return the host's state in Prometheus' text format."""
        report: HostReport = await self.report(request)
        now, text = report.pressure, PrometheusText("etude_pods")
        text.family("pods", "gauge", "Pods with a reservation, those being created included.", ("", report.pods))
        text.family("max_pods", "gauge", "Pods that the host admits.", ("", report.max_pods))
        text.family("starting", "gauge", "Pods that are being created.", ("", report.starting))
        text.family("draining", "gauge", "1 if the host takes no new pods.", ("", float(report.draining)))
        text.family("snapshots", "gauge", "Snapshots in the store.", ("", len(report.snapshots)))
        text.labelled("warm", "gauge", "Ready pods of warm pools.", "image", report.warm)
        text.family("memory_free_bytes", "gauge", "Memory for new pods.", ("", report.memory_free))
        text.family("disk_free_bytes", "gauge", "Disk for an unprivileged user.", ("", now.disk_free))
        text.family("load", "gauge", "Processes that run or wait, over a minute.", ("", now.load))
        text.family("cores", "gauge", "Cores that the host may use.", ("", now.cores))
        stalls = {"cpu": now.cpu_some, "memory": now.memory_some, "io": now.io_full}
        known = {name: value for name, value in stalls.items() if value is not None}
        text.labelled("stall_percent", "gauge", "Time in which processes waited for it, over 10 s.", "resource", known)
        return PlainTextResponse(str(text))

    # ------------------------------------------------------------------------------------------- pods

    async def create(self, request: Request) -> Any:
        wanted = messages.parse(messages.CreateRequest, await read_body(request), "create")
        self._require_open()
        if isinstance(wanted.image, Image):
            await self.images.check(wanted.image)
        else:
            self.host.store.renew_snapshot(wanted.image)
        options = {name: getattr(wanted, name) for name in type(wanted).model_fields if name != "image"}
        return describe(await cancel_on_disconnect(request, self.host.create(wanted.image, attached=False, **options)))

    def _require_open(self) -> None:
        if self.host.draining:
            raise HostGone(f"host {self.host.name} is draining and takes no new pods")

    async def pod(self, request: Request) -> Any:
        pod = await self._find(request)
        stats: dict[str, float] = {}
        with contextlib.suppress(PodError, OSError):  # the pod may be ending
            stats = dict(await pod.stats())
        return replace(describe(pod), stats=stats)

    async def events(self, request: Request) -> Any:
        return self._events_of(await self._find(request), request)

    def _events_of(self, pod: LocalPod, request: Request) -> messages.Events:
        after = request.query_params.get("after", "0")
        if not after.isdigit():
            raise InputError(f"events: after is {after!r}; expected the `next` number of the last response")
        # A pod that was adopted after a restart has a new list, which is read from its beginning.
        start = int(after) if request.query_params.get("of", self.host.name) == self.host.name else 0
        found = pod.history[start:]
        return messages.Events(events=found, next=start + len(found), of=self.host.name)

    async def close(self, request: Request) -> Any:
        try:
            pod = await self._find(request)
        except PodGone:  # closing a pod twice is allowed
            return messages.Events(events=[], next=0, of=self.host.name)
        await pod.close()
        return self._events_of(pod, request)

    async def memory(self, request: Request) -> Any:
        """Return whether the kernel killed a process for memory since the last request."""
        return {"ran_out": (await self._find(request)).memory_ran_out()}

    async def diff(self, request: Request) -> Any:
        changes = await (await self._find(request)).diff(request.query_params.getlist("path") or ["/"])
        return Response(messages.changes_to_json(changes), media_type="application/json")

    async def snapshot(self, request: Request) -> Any:
        wanted = messages.parse(messages.SnapshotRequest, await read_body(request), "snapshot")
        taken = await (await self._find(request)).snapshot(wanted.kind)
        if wanted.owner or wanted.lease:
            image = self.host.store.snapshot(taken.id).image
            self.host.store.save_snapshot(taken, image, owner=wanted.owner, lease=wanted.lease)
        return taken

    async def fork(self, request: Request) -> Any:
        wanted = messages.parse(messages.SnapshotRequest, await read_body(request), "fork")
        self._require_open()
        return [*map(describe, await self.host.fork_pod(await self._find(request), wanted.n, wanted.kind))]

    async def tunnel(self, websocket: WebSocket) -> None:
        """Forward bytes between a client and the guest init; each direction waits for its slower side."""
        try:
            reader, writer = await self._connect(await self._find(websocket))
        except EtudeError as error:
            status, body = messages.error_to_json(error)
            await websocket.send_denial_response(JSONResponse(body, status))
            return

        async def to_client() -> None:
            while data := await reader.read(TUNNEL_BUFFER):
                await websocket.send_bytes(data)

        async def to_guest() -> None:
            while (data := (await websocket.receive()).get("bytes")) is not None:
                writer.write(data)
                await writer.drain()

        await websocket.accept()
        sending, receiving = asyncio.create_task(to_client()), asyncio.create_task(to_guest())
        try:
            await asyncio.wait({sending, receiving}, return_when=asyncio.FIRST_COMPLETED)
            guest_ended = sending.done()
        finally:
            for task in (sending, receiving):
                task.cancel()
            await asyncio.gather(sending, receiving, return_exceptions=True)
            writer.close()
        if guest_ended:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client closed at the same moment
                await websocket.close(messages.TUNNEL_ENDED, "guest init closed the connection")

    async def _connect(self, pod: LocalPod) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to a pod's guest init. The egress sockets that come with its first message are for the host only."""
        deadline = asyncio.get_running_loop().time() + RESTART_S
        while True:
            try:
                link = await pod.open_link()
                assert isinstance(link, SocketLink)
                return await asyncio.open_connection(sock=link.sock, limit=TUNNEL_BUFFER)
            except OSError as error:  # the pod is being restarted by a snapshot, or has ended
                if pod.id not in self.host.pods:
                    raise PodGone(f"pod {pod.id} is gone") from None
                if asyncio.get_running_loop().time() > deadline:
                    raise PodError(f"pod {pod.id} does not answer: {error.strerror}") from None
            await asyncio.sleep(0.02)

    async def _find(self, request: HTTPConnection) -> LocalPod:
        """Return the pod that a path names by its id or a prefix of it."""
        id = request.path_params["id"]
        if id in self.host.pods:
            return self.host.pods[id]
        if not any(spec.id.startswith(id) for spec in self.host.registry.records()):
            raise PodGone(f"there is no pod {id} on this host: it was closed, its ttl passed, or it never existed")
        try:
            return await self.host.find(id)
        except PodError as error:
            raise PodGone(str(error)) from None

    # ------------------------------------------------------------------------------------------- files

    async def export(self, request: Request) -> Any:
        with ExitStack() as stack:
            file = stack.enter_context(self.host.store.staging()) / "export.tar"
            await self.client.export(request.path_params["id"], file)
            headers = {"content-length": str(file.stat().st_size)}
            content = stream_file(file, stack.pop_all())
            return StreamingResponse(content, headers=headers, media_type="application/x-tar")

    async def import_file(self, request: Request) -> Any:
        """Import a file written by `export`, whether it holds an image or a snapshot."""
        with self.host.store.staging() as staging:
            file = staging / "import.tar"
            await receive_file(request, file, self.max_upload)
            try:
                return {"id": await self.client.import_(file)}
            except InputError as error:  # do not show the server's temporary path to the client
                raise InputError(str(error).replace(str(file), "the file")) from None

    async def snapshots(self, request: Request) -> Any:
        return await self.client.snapshots(request.query_params.get("owner", ""))

    async def drain(self, request: Request) -> Any:
        self.host.draining = messages.parse(bool, await read_body(request), "drain")
        return {}

    async def doctor(self, request: Request) -> Any:
        return await diagnose(self.host.state, self.host.backend.name)

    async def remove_snapshot(self, request: Request) -> Any:
        with contextlib.suppress(InputError):  # removing a missing snapshot is allowed
            await self.client.remove_snapshot(request.path_params["id"])
        return {}


async def receive_file(request: Request, file: Path, limit: int) -> None:
    """Write a request's body to a file as it arrives."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise InputError(f"the file has {int(declared):,} bytes; this host accepts at most {limit:,}")
    size = 0
    with open(file, "xb") as out:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise InputError(f"the file is larger than {limit:,} bytes, the most that this host accepts")
            await asyncio.to_thread(out.write, chunk)


async def stream_file(file: Path, stack: ExitStack) -> AsyncIterator[bytes]:
    """Yield a file in chunks, then close `stack`."""
    with stack, open(file, "rb") as source:
        while chunk := await asyncio.to_thread(source.read, 1 << 20):
            yield chunk


async def adopt_detached(host: Host) -> None:
    """Adopt the pods that an earlier server left running, so that their egress goes on."""

    async def adopt(spec: PodSpec) -> None:
        with contextlib.suppress(PodError):  # it ended in the meantime: the next reaping removes its remains
            await host.adopt(spec)

    await asyncio.gather(*(adopt(spec) for spec in host.registry.records() if not spec.attached))


async def reap_forever(host: Host) -> None:
    """Periodically remove the remains of pods that ended unnoticed, such as those of killed processes."""
    while True:
        await asyncio.sleep(REAP_S)
        try:
            await host.reap()
            await host.remove_expired_snapshots()
            await asyncio.to_thread(host.store.remove_packed)
        except (PodError, OSError) as error:
            logger.warning("reaping failed and will be retried: %s", error)


async def error_response(_: Request, error: Exception) -> Response:
    """Return an error as JSON, so that the client can raise the same class."""
    if isinstance(error, HTTPException):
        return refuse(error.status_code, f"{error.detail}")
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)  # not sent: the client has gone
    known = error if isinstance(error, EtudeError) else PodError(f"{type(error).__name__}: {error}")
    status, body = messages.error_to_json(known)
    return JSONResponse(body, status)


def refuse(status: int, message: str) -> Response:
    return JSONResponse({"error": message, "kind": "InputError"}, status)


def app(host: Host, token: str, *, hosts: Sequence[str] = (), max_upload: int = MAX_UPLOAD) -> Starlette:
    """Return the application that serves an open host; an empty token disables authentication."""
    service = HostService(host, max_upload)
    client, images = service.client, service.images

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await adopt_detached(host)
        reaping = asyncio.create_task(reap_forever(host))
        try:
            yield
        finally:
            reaping.cancel()

    def route(path: str, /, **endpoints: Callable[[Request], Awaitable[Any]]) -> Route:
        async def respond(request: Request) -> Response:
            answer = await endpoints[request.method](request)
            return answer if isinstance(answer, Response) else JSONResponse(messages.to_json(answer))

        return Route(f"/v1{path}", respond, methods=[*endpoints])

    return Starlette(
        routes=[
            route("/report", GET=service.report),
            route("/metrics", GET=service.metrics),
            route("/pods", GET=lambda _: client.pods(), POST=service.create),
            route("/pods/{id}", GET=service.pod, DELETE=service.close),
            route("/pods/{id}/events", GET=service.events),
            route("/pods/{id}/memory", POST=service.memory),
            route("/pods/{id}/diff", GET=service.diff),
            route("/pods/{id}/snapshot", POST=service.snapshot),
            route("/pods/{id}/fork", POST=service.fork),
            WebSocketRoute("/v1/pods/{id}/agent", service.tunnel),
            route("/images", GET=lambda _: client.images(), PUT=service.import_file),
            route("/images/{name:path}", GET=images.image),
            route("/layers/missing", POST=images.missing),
            route("/layers/{id}/pack", POST=images.pack),
            route("/layers/{id}/begin", POST=images.begin),
            route("/layers/{id}/part", GET=images.read, PUT=images.write),
            route("/builds/run", POST=images.run),
            route("/builds/copy", POST=images.copy),
            route("/builds/directory", POST=images.make_directory),
            route("/builds/locate", POST=images.locate),
            route("/drain", PUT=service.drain),
            route("/doctor", GET=service.doctor),
            route("/snapshots", GET=service.snapshots),
            route("/snapshots/{id}/record", GET=images.get_snapshot, PUT=images.put_snapshot),
            route("/snapshots/{id}/persist", POST=lambda request: client.persist(request.path_params["id"])),
            route("/snapshots/{id:path}", GET=service.export, DELETE=service.remove_snapshot),
        ],
        middleware=[Middleware(RequestGuard, refuse=refuse, token=token, hosts=hosts)],
        exception_handlers=dict.fromkeys((HTTPException, EtudeError, ClientDisconnect, Exception), error_response),
        lifespan=lifespan,
    )


def parse_warm(text: str) -> tuple[str, int]:
    """Return the image and the number of `IMAGE=N`."""
    image, _, count = text.rpartition("=")
    if not image or not count.isdigit():
        raise InputError(f"--warm {text}: expected IMAGE=N, such as host=8")
    return image, int(count)


async def run(
    host: Host,
    token: str,
    listener: socket.socket,
    *,
    hosts: Sequence[str] = (),
    tls: tuple[Path, Path] | None = None,
    close: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve an open host until SIGTERM or SIGINT: then new pods are refused, connections end, and the pods run on.

    `tls` is a certificate and its key. With `close` every pod of this host is closed instead. `ready` is called when
    requests are being served.
    """
    options = {
        "lifespan": "on",
        **({"ssl_certfile": tls[0], "ssl_keyfile": tls[1]} if tls else {}),
        "ws_max_size": 4 << 20,  # frames are at most half of this
        "ws_per_message_deflate": False,  # costs more than it saves between machines of one network
        "ws_ping_timeout": 60.0,  # a client may be busy computing for a while
        "timeout_graceful_shutdown": 5,
    }
    async with serving(app(host, token, hosts=hosts), listener, **options) as stopped:
        ready()
        await stopped.wait()
        host.draining = True
    if close:
        own = [pod for pod in host.pods.values() if pod.id not in host.foreign_pods]
        await asyncio.gather(*(pod.close() for pod in own), return_exceptions=True)
