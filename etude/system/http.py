"""Shared parts of our HTTP servers: which requests are answered, tokens, listening, and serving until a signal.

A server on a loopback address is reachable by every program on the machine, and through a browser by every web page:
pages of other origins can send it requests, and read its answers after they have pointed their own name at 127.0.0.1.
`RequestGuard` refuses both.
"""

import asyncio
import contextlib
import hmac
import ipaddress
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import uvicorn
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from etude.errors import EtudeError, InputError

LOCAL_NAMES = ("localhost", socket.gethostname().lower())
# A web page can send any other content type to another origin without asking the server first.
CONTENT_TYPES = ("application/json", "application/octet-stream")
MIN_TOKEN = 16  # characters

T = TypeVar("T")


def always(_method: str, _path: str) -> bool:
    return True


class RequestGuard:
    """Middleware that refuses requests of foreign origins, for foreign names, of other content types, or without token.

    `needs_token` says which (method, path) need the token; an empty token is no token. `refuse` makes the response
    from a status and a message. A request with the token may name any host: a web page does not know it.
    """

    def __init__(
        self,
        app: ASGIApp,
        refuse: Callable[[int, str], Response],
        *,
        token: str = "",
        needs_token: Callable[[str, str], bool] = always,
        hosts: Iterable[str] = (),
    ) -> None:
        self.app, self.refuse, self.token, self.needs_token = app, refuse, token.encode(), needs_token
        self.hosts = {*LOCAL_NAMES, *(name.lower() for name in hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (refused := self.check(scope)):
            await self.refuse(*refused)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def check(self, scope: Scope) -> tuple[int, str] | None:
        """Return the status and message with which a request is refused, or None."""
        headers, method = Headers(scope=scope), scope.get("method", "GET")
        scheme, _, given = headers.get("authorization", "").partition(" ")
        known = scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), self.token)
        if is_foreign(headers, method):
            return 403, "requests of web pages of another origin are refused"
        if self.token and not known and self.needs_token(method, scope["path"]):
            return 401, "the token is missing or wrong; send the server's token as `Authorization: Bearer TOKEN`"
        name = host_name(headers.get("host", ""))
        if not (self.token and known) and name not in self.hosts and not is_address(name):
            return 421, f"the host {name!r:.80} is not a name of this server; if it is, allow it with --allow-host"
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and headers.get("content-type", "").partition(";")[0].strip().lower() not in CONTENT_TYPES:
            return 415, f"send the body as `content-type: {CONTENT_TYPES[0]}`, or {CONTENT_TYPES[1]} for a file"
        return None


def is_foreign(headers: Headers, method: str) -> bool:
    """Return whether a web page of another origin sent a request; following a link to a page here is allowed."""
    if "origin" in headers and headers["origin"].partition("://")[2].lower() != headers.get("host", "").lower():
        return True
    is_link = (
        method == "GET" and headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    )
    return headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not is_link


def host_name(host: str) -> str:
    """Return the name or address in `NAME`, `NAME:PORT` or `[ADDRESS]:PORT`."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).strip("[]").rstrip(".").lower()


def is_address(name: str) -> bool:
    """Return whether a name is an IP address; a page can rebind names, not addresses."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    name = host.strip("[]")
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)


# ------------------------------------------------------------------------------------------------- tokens


def read_token(host: str, file: Path | None, no_token: bool, variable: str = "") -> str | None:
    """Return the token in a file or variable, "" if there shall be none, and None if none is given."""
    source = f"--token-file {file}" if file else f"${variable}"
    try:
        token = file.read_text().strip() if file else os.environ.get(variable, "").strip()
    except (OSError, UnicodeError) as error:
        raise InputError(f"{source}: {error}") from None
    if no_token and not is_loopback(host):
        raise InputError(f"--no-token: {host} can be reached from outside, which needs a token")
    if no_token and (file or token):
        raise InputError(f"--no-token, but there is one in {source}; leave out one of them")
    if (file or token) and (len(token) < MIN_TOKEN or not token.isascii()):
        raise InputError(f"{source}: expected at least {MIN_TOKEN} ASCII characters (`openssl rand -hex 24`)")
    return "" if no_token else token or None


def new_token() -> str:
    return secrets.token_hex(24)


def stored_token(file: Path) -> str:
    """Return the token in a file that only its owner can read; the first process that asks makes it."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="ascii")
    part = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    part.touch(0o600)
    try:
        part.write_text(new_token(), encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(part, file)  # appears complete, and only once
    finally:
        part.unlink(missing_ok=True)
    return file.read_text(encoding="ascii")


# ------------------------------------------------------------------------------------------------- serving


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes any free one."""
    name = host.strip("[]")
    try:
        family = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((name, port), family=family, backlog=2048)
    except OSError as error:
        raise InputError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address or port"
        ) from None
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # inherited; without it a small response takes 40 ms
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """Return the URL of a listening socket."""
    address, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{address}]' if ':' in address else address}:{port}"


class UvicornServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would raise the signals again before running requests finish."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def serving(app: ASGIApp, listener: socket.socket, **options: Any) -> AsyncIterator[asyncio.Event]:
    """Serve an application while the block runs; the event is set by SIGTERM, SIGINT, or when the server has ended."""
    config = {"log_level": "warning", "access_log": False, "lifespan": "off", "timeout_graceful_shutdown": 1, **options}
    server, stopped = UvicornServer(uvicorn.Config(app, **config)), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    task.add_done_callback(lambda _: stopped.set())
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if not server.started:
            await task
            raise EtudeError(f"the server on {url_of(listener)} did not start")
        yield stopped
    finally:
        server.should_exit = True
        await task


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client disconnects."""
    task = asyncio.create_task(work)

    async def wait_for_disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    disconnected = asyncio.create_task(wait_for_disconnect())
    try:
        await asyncio.wait({task, disconnected}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        disconnected.cancel()
        task.cancel()
        await asyncio.gather(task, disconnected, return_exceptions=True)
