"""An egress proxy on real local sockets, with clients and servers to test it."""

import asyncio
import contextlib
import functools
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from etude.pods.network import policy as egress
from etude.pods.network.policy import EgressPolicy, ListenSpec
from etude.pods.network.proxy import EgressProxy
from etude.pods.pod import Egress

PROXY = ListenSpec("tcp", "127.0.0.1", 3128, "proxy")
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a coroutine test on an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **keywords: Any) -> None:
        asyncio.run(test(*args, **keywords))  # type: ignore[arg-type]

    return run


@dataclass
class ProxyFixture:
    """A running egress proxy, its ports, its records, and the destinations it connected to."""

    proxy: EgressProxy
    ports: list[int]
    records: list[dict[str, Any]] = field(default_factory=list)
    connected: list[tuple[str, int]] = field(default_factory=list)

    async def wait_for_records(self, n: int = 1) -> list[dict[str, Any]]:
        for _ in range(400):
            if len(self.records) >= n:
                break
            await asyncio.sleep(0.005)
        return self.records


@contextlib.asynccontextmanager
async def running_proxy(
    rules: list[str], listen_specs: tuple[ListenSpec, ...] = (PROXY,), server: int | None = None, **options: Any
) -> AsyncIterator[ProxyFixture]:
    """Run a proxy that connects every destination to the local port `server`; if None, it connects normally."""
    policy = EgressPolicy.from_egress(Egress.to(*rules))
    sockets = [
        socket.socket(type=socket.SOCK_STREAM if spec.kind == "tcp" else socket.SOCK_DGRAM) for spec in listen_specs
    ]
    for sock, listen in zip(sockets, listen_specs, strict=True):
        sock.bind(("127.0.0.1", 0))
        if listen.kind == "tcp":
            sock.listen(256)
    running = ProxyFixture(None, [sock.getsockname()[1] for sock in sockets])  # type: ignore[arg-type]

    async def connect(host: str, port: int, rule: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        running.connected.append((host, port))
        return await asyncio.open_connection("127.0.0.1", server)

    options.setdefault("upstream_proxy", "")
    record = options.pop("record", running.records.append)
    running.proxy = EgressProxy(policy, record, None if server is None else connect, **options)  # type: ignore[arg-type]
    await running.proxy.start(list(zip(listen_specs, sockets, strict=True)))
    try:
        yield running
    finally:
        await asyncio.wait_for(running.proxy.close(), 60)
        assert all(sock.fileno() == -1 for sock in sockets)
        left = [task for task in asyncio.all_tasks() if "etude/pods/network/proxy.py" in repr(task)]
        assert not left, left


@contextlib.asynccontextmanager
async def running_server(serve: Serve) -> AsyncIterator[int]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=256)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def exchange(port: int, *chunks: bytes, end: bool = False) -> bytes:
    """Send chunks, and return everything received until the end of the stream or a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = bytearray()

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                got.extend(data)

    async with asyncio.timeout(5):
        listening = asyncio.create_task(listen())
        with contextlib.suppress(ConnectionError):
            for chunk in chunks:
                writer.write(chunk)
                await writer.drain()
                await asyncio.sleep(0.01 if len(chunks) > 1 else 0)
            if end and not writer.is_closing():
                writer.write_eof()
        await listening
    writer.transport.abort()
    return bytes(got)


def http_server(answer: bytes, seen: list[bytes]) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()

    return serve


def client_hello(name: str | None) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def connect(authority: str) -> bytes:
    return f"CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n\r\n".encode()


def get(url: str, *headers: str) -> bytes:
    host = url.split("/")[2]
    return "\r\n".join([f"GET {url} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


def dns_query(name: str, kind: int = egress.A) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)
