"""A host behind HTTP: its pods, snapshots and images for whoever holds the token, and a tunnel to every pod's agent.

Pods made here are detached: they outlive this process, and the next one on the same state directory takes them up
with their egress and their idempotency keys, so a restart loses nothing. Who keeps a pod alive is its client, by
renewing a lease through the tunnel; what ended is reaped here. Nothing that comes in is believed or unbounded.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from etude.errors import EtudeError, InputError
from etude.pods.fleet import HostGone
from etude.pods.guest.client import Link
from etude.pods.host import Host
from etude.pods.pod import PodError, PodGone, SnapshotKind
from etude.pods.remote import messages
from etude.pods.remote.host_client import TOKEN
from etude.pods.runtime.backend import LocalPod, PodSpec

MAX_JSON = 1 << 20
MAX_UPLOAD = 64 << 30  # bytes of a snapshot or an image; the disk's own limits come first
REAP_S = 10.0
TUNNEL_ROOM = 1 << 20  # bytes on their way to a client that is slow, before its pod's agent is left waiting
RESTART_S = 10.0  # that a pod may be without an agent, while it is snapshot
SEEN = 1000  # pods whose events can be asked for after they ended
KINDS = ("fs", "fs-live", "full")

logger = logging.getLogger(__name__)


class TokenAuth:
    """Lets in whoever has the token, and nobody else."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self.token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and self.token:
            scheme, _, given = HTTPConnection(scope).headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token):
                error = "the token is missing or wrong; clients send that of the host as `Authorization: Bearer`"
                await JSONResponse({"error": error, "kind": "InputError"}, 401)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class Tunnel:
    """Bytes between a client and a pod's agent; each side waits when the other is slow."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.waiting: list[bytes] = []
        self.size = 0
        self.held = self.ended = False
        self.news = asyncio.Event()
        link.start(self)

    def received(self, data: bytes) -> None:
        # What came with the greeting carries a pod's egress: that is the host's affair.
        descriptors, self.link.descriptors = self.link.descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)
        self.waiting.append(data)
        self.size += len(data)
        if self.size > TUNNEL_ROOM and not self.held:
            self.held = True
            self.link.hold(True)
        self.news.set()

    def lost(self) -> None:
        self.ended = True
        self.news.set()

    async def to_client(self, websocket: WebSocket) -> None:
        """Until the agent hangs up."""
        while True:
            if self.waiting:
                data, self.waiting, self.size = b"".join(self.waiting), [], 0
                if self.held:
                    self.held = False
                    self.link.hold(False)
                await websocket.send_bytes(data)
            elif self.ended:
                return
            else:
                self.news.clear()
                await self.news.wait()

    async def to_agent(self, websocket: WebSocket) -> None:
        """Until the client hangs up."""
        while True:
            message = await websocket.receive()
            if message["type"] != "websocket.receive" or message.get("bytes") is None:
                return
            self.link.send(message["bytes"])
            await self.link.drain()


class HostService:
    """The answers. One method per endpoint."""

    def __init__(self, host: Host, max_upload: int) -> None:
        self.host, self.max_upload = host, max_upload
        self.seen: dict[str, LocalPod] = {}

    # ------------------------------------------------------------------------------------------- pods

    async def report(self, request: Request) -> Response:
        return JSONResponse(self.host.report(str(request.base_url)).to_wire())

    async def create(self, request: Request) -> Response:
        ask = messages.CreateAsk.from_json(await read_json(request))
        if self.host.draining:
            raise HostGone(f"host {self.host.name} is draining and takes no new pods")
        making = self.host.create(
            ask.image,
            limits=ask.limits,
            egress=ask.egress,
            storage=ask.storage,
            ttl=ask.ttl,
            key=ask.key,
            tenant=ask.tenant,
            attached=False,
            lease=ask.lease,
            timeout=ask.timeout,
        )
        try:
            # With a key the making goes on when we stop waiting, and the same key asks for it again.
            pod = await (asyncio.wait_for(making, messages.WAIT_S) if ask.key else making)
        except TimeoutError:
            return JSONResponse({"waiting": ask.key}, 202)
        self._see(pod)
        return JSONResponse(messages.pod_to_json(pod), 201)

    async def forget(self, request: Request) -> Response:
        """Whoever asked with this key has gone: what was made for it goes too."""
        work = self.host.keys.get(request.query_params.get("key", ""))
        if work is not None:
            work.cancel()
            (pod,) = await asyncio.gather(work, return_exceptions=True)
            if isinstance(pod, LocalPod):
                await pod.close()
        return JSONResponse({})

    async def pods(self, _: Request) -> Response:
        spare = {pod.id for pool in self.host.pools.values() for pod in pool.ready}
        return JSONResponse([await describe(pod) for pod in list(self.host.pods.values()) if pod.id not in spare])

    async def pod(self, request: Request) -> Response:
        return JSONResponse(await describe(await self._find(request)))

    async def events(self, request: Request) -> Response:
        pod = self.seen.get(request.path_params["id"]) or await self._find(request)
        return JSONResponse(self._events_of(pod, request))

    def _events_of(self, pod: LocalPod, request: Request) -> dict[str, Any]:
        after = request.query_params.get("after", "0")
        if not after.isdigit():
            raise InputError(f"events: after is {after!r}; expected the number that came with the last ones")
        # A pod that was taken up after a restart has a new list, which is read from its beginning.
        start = int(after) if request.query_params.get("of", self.host.name) == self.host.name else 0
        found = pod.history[start:]
        return {"events": [*map(messages.event_to_json, found)], "next": start + len(found), "of": self.host.name}

    async def close(self, request: Request) -> Response:
        id = request.path_params["id"]
        pod = self.host.pods.get(id)
        if pod is None:
            try:
                pod = await self._find(request)
            except PodGone:
                pod = self.seen.get(id)
        if pod is None:
            return JSONResponse({"events": [], "next": 0, "of": self.host.name})
        await pod.close()
        return JSONResponse(self._events_of(pod, request))

    async def pause(self, request: Request) -> Response:
        await (await self._find(request)).pause()
        return JSONResponse({})

    async def resume(self, request: Request) -> Response:
        await (await self._find(request)).resume()
        return JSONResponse({})

    async def memory(self, request: Request) -> Response:
        """Whether the kernel killed something for memory since this was last asked."""
        return JSONResponse({"ran_out": (await self._find(request)).memory_ran_out()})

    async def snapshot(self, request: Request) -> Response:
        given = messages.take(await read_json(request), "snapshot", kind=(str, type(None)))
        snapshot = await (await self._find(request)).snapshot(kind_of(given))
        return JSONResponse(asdict(snapshot), 201)

    async def fork(self, request: Request) -> Response:
        given = messages.take(await read_json(request), "fork", n=int, kind=(str, type(None)))
        pod, kind = await self._find(request), kind_of(given)
        if self.host.draining:
            raise HostGone(f"host {self.host.name} is draining and takes no new pods")
        children = await self.host.fork_pod(pod, given.get("n", 1), kind)
        for child in children:
            self._see(child)
        return JSONResponse([messages.pod_to_json(child) for child in children], 201)

    async def tunnel(self, websocket: WebSocket) -> None:
        try:
            link = await self._link(await self._find(websocket))
        except EtudeError as error:
            status, body = messages.error_to_json(error)
            await websocket.send_denial_response(JSONResponse(body, status))
            return
        tunnel = Tunnel(link)
        try:
            await websocket.accept()
            ways = {asyncio.create_task(tunnel.to_client(websocket)), asyncio.create_task(tunnel.to_agent(websocket))}
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        finally:
            link.close()
        if tunnel.ended:
            with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client hung up in the same moment
                await websocket.close(messages.TUNNEL_ENDED, "the agent hung up")

    async def _link(self, pod: LocalPod) -> Link:
        deadline = asyncio.get_running_loop().time() + RESTART_S
        while True:
            try:
                return await pod.open_link()
            except OSError as error:  # between the two lives of a pod that is being snapshot, or at its end
                if pod.id not in self.host.pods:
                    raise PodGone(f"pod {pod.id} is gone") from None
                if asyncio.get_running_loop().time() > deadline:
                    raise PodError(f"pod {pod.id} does not answer: {error.strerror}") from None
            await asyncio.sleep(0.02)

    async def _find(self, request: HTTPConnection) -> LocalPod:
        """The pod that a path names, by its id or the beginning of it."""
        id = request.path_params["id"]
        if id in self.host.pods:
            return self.host.pods[id]
        matches = [spec for spec in self.host.registry.records() if spec.id.startswith(id)]
        if not matches or (len(matches) > 1 and id in self.seen):
            raise PodGone(f"there is no pod {id} on this host any more: closed, past its time, or never made")
        if len(matches) > 1:
            raise InputError(f"there are {len(matches)} pods whose id begins with {id!r}; `etude pods ps` lists them")
        try:
            pod = await self.host.adopt(matches[0])
        except PodError as error:
            raise PodGone(str(error)) from None
        self._see(pod)
        return pod

    def _see(self, pod: LocalPod) -> None:
        self.seen[pod.id] = pod
        for id in list(self.seen)[: max(0, len(self.seen) - SEEN)]:
            if id not in self.host.pods:
                del self.seen[id]

    # ------------------------------------------------------------------------------------------- files

    async def snapshots(self, _: Request) -> Response:
        return JSONResponse([asdict(saved.snapshot) for saved in self.host.store.snapshots()])

    async def images(self, _: Request) -> Response:
        return JSONResponse([messages.image_to_json(image) for image in self.host.store.images()])

    async def export(self, request: Request) -> Response:
        id, store = request.path_params["id"], self.host.store
        with contextlib.suppress(InputError):  # an image is on disk already
            await self.host.persist(id)
        with ExitStack() as stack:
            file = stack.enter_context(store.staging()) / "export.tar"
            await asyncio.to_thread(store.export, id, file)
            headers = {"content-length": str(file.stat().st_size)}
            return StreamingResponse(pour(file, stack.pop_all()), headers=headers, media_type="application/x-tar")

    async def take_in(self, request: Request) -> Response:
        """A file that `export` wrote, whether it holds an image or a snapshot."""
        with self.host.store.staging() as staging:
            file = staging / "import.tar"
            await receive_file(request, file, self.max_upload)
            try:
                id = await asyncio.to_thread(self.host.store.import_, file)
            except InputError as error:  # the name of our temporary file means nothing to the client
                raise InputError(str(error).replace(str(file), "the file")) from None
        wanted = request.path_params.get("id", id)
        if id != wanted:
            raise InputError(f"the file holds {id}, not {wanted}; it was taken in under its own name")
        return JSONResponse({"id": id}, 201)

    async def persist(self, request: Request) -> Response:
        return JSONResponse(asdict(await self.host.persist(request.path_params["id"])))

    async def remove_snapshot(self, request: Request) -> Response:
        with contextlib.suppress(InputError):  # one that is not there is fine
            await self.host.remove_snapshot(request.path_params["id"])
        return JSONResponse({})


def kind_of(given: dict[str, Any]) -> SnapshotKind | None:
    """The kind of snapshot that a request names."""
    kind = given.get("kind")
    if kind is not None and kind not in KINDS:
        raise InputError(f"kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return cast(SnapshotKind | None, kind)


async def describe(pod: LocalPod) -> dict[str, Any]:
    """A pod with what it uses now."""
    stats: dict[str, float] = {}
    with contextlib.suppress(PodError, OSError):  # it ends in this moment
        stats = dict(await pod.stats())
    return {**messages.pod_to_json(pod), "stats": stats}


async def read_json(request: Request) -> Any:
    """The body of a request, at most MAX_JSON bytes of it."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_JSON:
            raise InputError(f"the body is over {MAX_JSON:,} bytes")
    try:
        return json.loads(data or b"{}")
    except ValueError as error:
        raise InputError(f"the body is not JSON: {error}") from None


async def receive_file(request: Request, file: Path, limit: int) -> None:
    """Write a request's body to a file as it comes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise InputError(f"the file has {int(declared):,} bytes; this host takes {limit:,}")
    size = 0
    with open(file, "xb") as out:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise InputError(f"the file has over {limit:,} bytes, which is what this host takes")
            await asyncio.to_thread(out.write, chunk)


async def pour(file: Path, stack: ExitStack) -> AsyncIterator[bytes]:
    """A file in pieces; what `stack` holds goes with the last."""
    with stack, open(file, "rb") as source:
        while chunk := await asyncio.to_thread(source.read, 1 << 20):
            yield chunk


async def adopt_detached(host: Host) -> list[str]:
    """Take up the pods that an earlier server left running: their connections, egress and keys. Their ids."""

    async def finished(pod: LocalPod) -> LocalPod:
        return pod

    async def take_up(spec: PodSpec) -> str | None:
        try:
            pod = await host.adopt(spec)
        except PodError:  # it ended while nobody looked: the next reaping removes what is left
            return None
        if spec.key:
            host.keys[spec.key] = asyncio.create_task(finished(pod))
        return pod.id

    found = [spec for spec in host.registry.records() if not spec.attached]
    return [id for id in await asyncio.gather(*map(take_up, found)) if id is not None]


async def reap_for_ever(host: Host) -> None:
    """Remove what is left of pods that ended without our noticing, such as those of killed processes."""
    while True:
        await asyncio.sleep(REAP_S)
        try:
            await host.reap()
        except (PodError, OSError) as error:
            logger.warning("reaping failed, will be tried again: %s", error)


async def show_error(_: Request, error: Exception) -> Response:
    """Any error as JSON, so that the client can raise the same class."""
    if isinstance(error, HTTPException):
        return JSONResponse({"error": f"{error.detail}", "kind": "InputError"}, error.status_code)
    known = error if isinstance(error, EtudeError) else PodError(f"{type(error).__name__}: {error}")
    status, body = messages.error_to_json(known)
    return JSONResponse(body, status)


def app(host: Host, token: str, *, max_upload: int = MAX_UPLOAD) -> Starlette:
    """The application that serves an open host; without a token, to everybody who can connect."""
    service = HostService(host, max_upload)

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        await adopt_detached(host)
        reaping = asyncio.create_task(reap_for_ever(host))
        try:
            yield
        finally:
            reaping.cancel()

    def route(method: str, path: str, answer: Callable[[Request], Awaitable[Response]]) -> Route:
        return Route(f"/v1{path}", answer, methods=[method])

    return Starlette(
        routes=[
            route("GET", "/report", service.report),
            route("POST", "/pods", service.create),
            route("DELETE", "/pods", service.forget),
            route("GET", "/pods", service.pods),
            route("GET", "/pods/{id}", service.pod),
            route("GET", "/pods/{id}/events", service.events),
            route("DELETE", "/pods/{id}", service.close),
            route("POST", "/pods/{id}/pause", service.pause),
            route("POST", "/pods/{id}/resume", service.resume),
            route("POST", "/pods/{id}/memory", service.memory),
            route("POST", "/pods/{id}/snapshot", service.snapshot),
            route("POST", "/pods/{id}/fork", service.fork),
            WebSocketRoute("/v1/pods/{id}/agent", service.tunnel),
            route("GET", "/snapshots", service.snapshots),
            route("GET", "/snapshots/{id:path}", service.export),
            route("PUT", "/snapshots/{id:path}", service.take_in),
            route("DELETE", "/snapshots/{id:path}", service.remove_snapshot),
            route("POST", "/snapshots/{id}/persist", service.persist),
            route("GET", "/images", service.images),
            route("PUT", "/images", service.take_in),
            route("GET", "/images/{id:path}", service.export),
        ],
        middleware=[Middleware(TokenAuth, token=token)],
        exception_handlers=dict.fromkeys((HTTPException, EtudeError, OSError, Exception), show_error),
        lifespan=life,
    )


class UvicornServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again before the host is closed."""
        yield


def is_loopback(address: str) -> bool:
    """Whether `HOST:PORT` can be reached from this machine only."""
    name = address.rpartition(":")[0].strip("[]")
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def read_token(listen: str, file: Path | None, none: bool) -> str:
    """The token of a file or of the environment; empty only for who asks for that on this machine alone."""
    try:
        token = (file.read_text() if file else os.environ.get(TOKEN, "")).strip()
    except (OSError, UnicodeError) as error:
        raise InputError(f"--token-file {file}: {error}") from None
    if none:
        if token:
            raise InputError(f"--no-token, but there is one in {file or f'${TOKEN}'}; leave out one of them")
        if not is_loopback(listen):
            raise InputError(f"--no-token: {listen} can be reached from outside; that needs a token")
        return ""
    if len(token) < 16 or not token.isascii():
        found = "is too short" if token else "is missing"
        raise InputError(
            f"the token {found}: give at least 16 characters in ${TOKEN} or --token-file (`openssl rand -hex 24` "
            "makes some), or on this machine alone --no-token"
        )
    return token


def parse_warm(text: str) -> tuple[str, int]:
    """The image and the number of `IMAGE=N`."""
    image, _, count = text.rpartition("=")
    if not image or not count.isdigit():
        raise InputError(f"--warm {text}: expected IMAGE=N, such as host=8")
    return image, int(count)


def bind(address: str) -> socket.socket:
    """A socket that listens on `HOST:PORT`; port 0 takes any that is free."""
    name, _, port = address.rpartition(":")
    if not name or not port.isdigit() or int(port) > 65535:
        raise InputError(f"--listen {address}: expected HOST:PORT, such as 127.0.0.1:7741")
    name = name.strip("[]")
    try:
        family = socket.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((name, int(port)), family=family, backlog=1024)
    except OSError as error:
        raise InputError(f"--listen {address}: {error.strerror or error}; name another address or port") from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it a small answer takes 40 ms
    return listener


async def run(
    host: Host,
    token: str,
    listener: socket.socket,
    *,
    certificate: Path | None = None,
    key: Path | None = None,
    close: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve an open host until SIGTERM or SIGINT: then no new pods, connections end, and the pods run on.

    With `close` they do not: every pod that is ours ends. `ready` is called when requests are answered.
    """
    config = uvicorn.Config(
        app(host, token),
        log_level="warning",
        access_log=False,
        lifespan="on",
        ssl_certfile=certificate,
        ssl_keyfile=key,
        ws_max_size=4 << 20,  # frames are at most half of that
        ws_per_message_deflate=False,  # costs more than it saves between machines of one network
        ws_ping_timeout=60.0,  # a client may compute for a while
        timeout_graceful_shutdown=5,
    )
    server = UvicornServer(config)

    def stop() -> None:
        host.draining = server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        ready()
    await serving
    if close:
        own = [pod for pod in host.pods.values() if pod.id not in host.guests]
        await asyncio.gather(*(pod.close() for pod in own), return_exceptions=True)
