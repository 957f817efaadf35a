"""Egress proxy of one pod: accepts on the sockets that the pod opened and forwards what its policy allows.

    proxy   CONNECT and plain HTTP              carry   a socket that stands for a host, or for all of a wildcard
    dns     answers names with fake addresses; no question ever leaves this process

The proxy connects by name, resolved once and checked, so a client's claims about addresses do not matter. TLS is not
decrypted: the ClientHello must name the requested host. Each connection is a task with deadlines and bounded buffers,
so it cannot affect another. `record` is called once per decision, when it is over: host, port, way, rule or reason,
bytes, seconds; never a path or header.
"""

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import h11

from etude.errors import InputError
from etude.pods.network import http
from etude.pods.network import policy as egress
from etude.pods.network.connect import (
    CHUNK,
    FROM_ENVIRONMENT,
    Connect,
    Connector,
    EgressRefused,
    Resolver,
    UpstreamUnreachable,
)
from etude.pods.network.http import MAX_HEAD, SENSITIVE, HttpPeer
from etude.pods.network.policy import ClientHelloReader, EgressPolicy, EgressRule, ListenSpec, ProtocolError
from etude.pods.network.stream import LINGER_S, BufferedStream

Record = Callable[[Mapping[str, Any]], None]

MAX_REFUSED_NAMES = 1000  # refused lookups are recorded for this many names; a pod can ask for any number of them

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EgressLimits:
    """Limits on the egress connections of one pod."""

    connections: int = 128  # at once; further ones wait in the pod until one ends
    header_s: float = 10.0  # for a whole request head or ClientHello
    connect_s: float = 15.0  # to resolve and connect
    idle_s: float = 300.0  # without a byte in either direction


@dataclass(slots=True)
class EgressConnection:
    """One egress decision and its transfer, from the first byte to its record."""

    way: str
    host: str = ""
    port: int = 0
    rule: EgressRule | None = None  # set when allowed
    reason: str = ""  # why it was refused
    error: str = ""  # how an allowed connection failed
    note: str = ""
    up: int = 0
    down: int = 0
    started: float = field(default_factory=time.monotonic)
    last_activity: float = field(default_factory=time.monotonic)
    answered: bool = False  # the beginning of an answer was sent to the client
    keep_alive: bool = False  # the client's connection can carry another request
    unrecorded: bool = False  # nothing was decided here

    @property
    def authority(self) -> str:
        return egress.authority(self.host, self.port)

    def to_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"kind": "egress", "way": self.way, "host": self.host, "port": self.port}
        record["allowed"] = self.rule is not None and not self.reason
        record["rule"] = str(self.rule) if record["allowed"] else None
        record |= {name: text for name in ("reason", "error", "note") if (text := getattr(self, name))}
        return record | {"up": self.up, "down": self.down, "seconds": round(time.monotonic() - self.started, 3)}


class _DnsProtocol(asyncio.DatagramProtocol):
    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if (reply := self._answer(data)) and self._transport.get_write_buffer_size() < CHUNK:
            self._transport.sendto(reply, addr)


class EgressProxy:
    """Forwards the connections of one pod. `start` takes ownership of the sockets; `close` ends everything."""

    def __init__(
        self,
        policy: EgressPolicy,
        record: Record,
        connect: Connect | None = None,
        *,
        resolver: Resolver | None = None,
        upstream_proxy: str = FROM_ENVIRONMENT,  # http://host:port, or "" for none
        limits: EgressLimits | None = None,
    ) -> None:
        self.policy, self.limits, self._record = policy, limits or EgressLimits(), record
        self._connector: Connect = connect or Connector(policy.private_ok, resolver, upstream_proxy)
        self._slots = asyncio.Semaphore(self.limits.connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []
        self._dns_transports: list[asyncio.DatagramTransport] = []
        self._refused_names: set[str] = set()

    async def start(self, sockets: list[tuple[ListenSpec, socket.socket]]) -> None:
        """Start serving these sockets. The proxy owns them, even if this fails."""
        self._sockets += [sock for _, sock in sockets]
        try:
            for listen, sock in sockets:
                wanted = socket.SOCK_STREAM if listen.kind == "tcp" else socket.SOCK_DGRAM
                if sock.type != wanted:
                    raise InputError(f"egress: the socket for {listen} is of another type ({sock.type!r})")
                sock.setblocking(False)
                if listen.kind == "udp":
                    loop = asyncio.get_running_loop()
                    transport, _ = await loop.create_datagram_endpoint(lambda: _DnsProtocol(self.answer_dns), sock=sock)
                    self._dns_transports.append(transport)
                else:
                    self._spawn(self._accept(listen, sock))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Abort and record every connection, then close the sockets. Closing twice is allowed."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for transport in self._dns_transports:
            transport.abort()
        await asyncio.sleep(0)  # transports release their sockets in the next iteration of the loop
        for sock in self._sockets:
            sock.close()
        self._sockets, self._dns_transports = [], []

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("internal error while forwarding a pod's connection", exc_info=error)

    async def _accept(self, listen: ListenSpec, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP):
                    raise
                await asyncio.sleep(0.2)  # out of descriptors, or the client left at once: keep accepting
                continue
            try:
                await self._slots.acquire()
            except BaseException:
                accepted.close()
                raise
            self._spawn(self._serve(listen, accepted)).add_done_callback(lambda _: self._slots.release())

    async def _serve(self, listen: ListenSpec, accepted: socket.socket) -> None:
        try:
            client = BufferedStream(*await asyncio.open_connection(sock=accepted, limit=CHUNK))
        except BaseException:
            accepted.close()
            raise
        async with client:
            with suppress(OSError, TimeoutError):  # before anything was decided
                if listen.role == "proxy":
                    await self._serve_requests(client, None)
                elif listen.role == "dns":
                    await self._serve_dns(client)
                else:
                    await self._serve_carry(client, listen)

    # -- decisions and records

    def _report(self, connection: EgressConnection) -> None:
        if not connection.unrecorded:
            try:
                self._record(connection.to_record())
            except Exception:
                logger.exception("an egress decision could not be recorded")

    def _decide(self, connection: EgressConnection) -> EgressRule:
        decision = self.policy.decide(connection.host, connection.port)
        if decision.rule is None:
            raise EgressRefused(decision.reason)
        connection.rule = decision.rule
        return decision.rule

    async def _open_upstream(self, connection: EgressConnection) -> BufferedStream:
        assert connection.rule is not None
        try:
            async with asyncio.timeout(self.limits.connect_s):
                return BufferedStream(*await self._connector(connection.host, connection.port, connection.rule))
        except TimeoutError:
            raise UpstreamUnreachable(
                504, f"{connection.authority} did not answer in {self.limits.connect_s:g} s"
            ) from None
        except OSError as error:
            has_errno = isinstance(error.errno, int) and error.errno > 0  # a resolver's codes are negative
            reason = os.strerror(error.errno or 0) if has_errno else error.strerror or type(error).__name__
            raise UpstreamUnreachable(502, f"{connection.authority} could not be reached: {reason}") from None

    @asynccontextmanager
    async def _handle_errors(
        self, client: BufferedStream, connection: EgressConnection, answer: bool
    ) -> AsyncIterator[None]:
        """Turn an error inside into the connection's record and, if `answer`, into an HTTP response to the client."""
        status, text = 0, ""
        try:
            try:
                yield
            except EgressRefused as error:
                connection.reason, status = str(error), 403
                text = f"egress to {connection.authority} is refused: {error}"
                if connection.rule is None:
                    text += f"; add the rule {connection.authority!r} to allow it"
            except ProtocolError as error:
                status, text = 400, f"bad request: {error}"
            except UpstreamUnreachable as error:
                status, text = error.status, str(error)
            except TimeoutError:
                status, text = 408, "nothing came for too long"
            except OSError as error:
                status, text = 502, f"the connection broke: {type(error).__name__}"
            except asyncio.CancelledError:
                connection.error = "the egress proxy was closed"
                raise
            if status and not connection.reason:  # a refusal, unless a rule had allowed the connection
                connection.error, connection.reason = (text, "") if connection.rule else ("", text)
        finally:
            self._report(connection)
        if status and answer and not connection.answered:
            await self._respond(client, http.error_response(status, text))
        elif status:
            client.abort()

    async def _respond(self, client: BufferedStream, message: bytes) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await client.write(message)
                client.write_eof()
                client.buffer.clear()
                while await client.reader.read(CHUNK):  # closing with unread bytes would reset and lose the response
                    pass

    # -- transfer

    async def _transfer(
        self, connection: EgressConnection, sink: BufferedStream, data: bytes, count: int, up: bool
    ) -> None:
        connection.last_activity = time.monotonic()
        connection.up, connection.down = connection.up + count * up, connection.down + count * (not up)
        await sink.write(data)
        connection.last_activity = time.monotonic()

    async def _pump(self, connection: EgressConnection, source: BufferedStream, sink: BufferedStream, up: bool) -> bool:
        while data := await source.read():
            await self._transfer(connection, sink, data, len(data), up)
        sink.write_eof()  # the other direction may still have data
        return True

    async def _tunnel(self, connection: EgressConnection, client: BufferedStream, server: BufferedStream) -> None:
        up, down = self._pump(connection, client, server, True), self._pump(connection, server, client, False)
        await self._run_both(connection, up, down, both=True)

    async def _run_both(
        self, connection: EgressConnection, up: Coroutine[Any, Any, bool], down: Coroutine[Any, Any, bool], both: bool
    ) -> bool:
        """Run both directions until `down` (or `both`) ended, one failed or went idle; True if `up` is complete."""
        connection.last_activity = time.monotonic()
        tasks = asyncio.create_task(up), asyncio.create_task(down)
        try:
            while not tasks[1].done() or (both and not tasks[0].done()):
                left = self.limits.idle_s - (time.monotonic() - connection.last_activity)
                if left <= 0:
                    raise TimeoutError
                running = [task for task in tasks if not task.done()]
                done, _ = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return tasks[0].done() and tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- TLS: the server name in the ClientHello

    async def _read_server_name(self, client: BufferedStream) -> str:
        reader, fed = ClientHelloReader(), 0
        try:
            async with asyncio.timeout(self.limits.header_s):
                while (name := reader.feed(bytes(client.buffer[fed:]))) is None:
                    fed = len(client.buffer)
                    if not await client.fill():
                        raise EgressRefused("the connection ended before its ClientHello did")
        except ProtocolError as error:
            raise EgressRefused(str(error)) from None
        except TimeoutError:
            raise EgressRefused(f"no ClientHello in {self.limits.header_s:g} s") from None
        return name

    async def _check_server_name(self, client: BufferedStream, connection: EgressConnection) -> None:
        name = await self._read_server_name(client)
        if not name and (connection.port != 443 or egress.is_address(connection.host)):
            connection.note = "TLS without a server name"
        elif name != connection.host:
            raise EgressRefused(f"TLS asks for {name or 'no server name'}, the connection for {connection.host}")

    async def _detect_protocol(self, client: BufferedStream, server: BufferedStream) -> Literal["tls", "http", "other"]:
        """Return the client's protocol; "other" also if the server sends first, as in SSH and mail."""
        sent, received = asyncio.create_task(client.detect_protocol()), asyncio.create_task(server.fill())
        try:
            await asyncio.wait((sent, received), timeout=self.limits.idle_s, return_when=asyncio.FIRST_COMPLETED)
            if not sent.done() and not received.done():
                raise TimeoutError
            return sent.result() if sent.done() else "other"
        finally:
            sent.cancel(), received.cancel()
            await asyncio.gather(sent, received, return_exceptions=True)

    # -- CONNECT and plain HTTP

    async def _serve_requests(
        self, client: BufferedStream, listen: ListenSpec | None, upstream: BufferedStream | None = None
    ) -> None:
        """Serve requests and decide each separately. `upstream` is an open connection to the server, for the first."""
        timeout = self.limits.header_s
        while True:
            async with asyncio.timeout(timeout):
                if not client.buffer and not await client.fill():
                    return
            if not await self._serve_request(client, listen, upstream):
                return
            timeout, upstream = self.limits.idle_s, None

    async def _serve_request(
        self, client: BufferedStream, listen: ListenSpec | None, upstream: BufferedStream | None
    ) -> bool:
        connection = EgressConnection("carry", listen.host, listen.port) if listen else EgressConnection("http")
        async with self._handle_errors(client, connection, answer=listen is None):
            async with asyncio.timeout(self.limits.header_s):
                state, request = http.parse_request(await client.read_until(b"\r\n\r\n", MAX_HEAD))
            method, has_body = (
                request.method,
                bool({b"content-length", b"transfer-encoding"} & dict(request.headers).keys()),
            )
            if method == b"CONNECT" and listen is None and not has_body:
                connection.way = "connect"
                await self._serve_connect(client, request, connection)
            elif method in (b"CONNECT", b"TRACE"):
                raise ProtocolError(f"{method.decode()} is not possible here")
            else:
                connection.host, connection.port, path = http.split_target(request, listen.port if listen else None)
                if listen and listen.host and connection.host != listen.host:
                    raise EgressRefused(f"this connection is for {listen.host}")
                self._decide(connection)
                async with upstream or await self._open_upstream(connection) as server:
                    await self._exchange(HttpPeer(client, state), server, request, path, connection)
        return connection.keep_alive

    async def _serve_connect(self, client: BufferedStream, request: h11.Request, connection: EgressConnection) -> None:
        try:
            connection.host, connection.port = egress.split_authority(request.target.decode("ascii"), None)
        except InputError:
            raise ProtocolError("expected CONNECT host:port") from None
        self._decide(connection)
        async with await self._open_upstream(connection) as server:
            await client.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            connection.answered = True
            if connection.port == 443 or await self._detect_protocol(client, server) == "tls":
                await self._check_server_name(client, connection)
            await self._tunnel(connection, client, server)

    async def _exchange(
        self, client: HttpPeer, stream: BufferedStream, request: h11.Request, path: str, connection: EgressConnection
    ) -> None:
        """Forward one request and its response; note if the client's connection can carry another."""
        server = HttpPeer(stream, h11.Connection(h11.CLIENT, MAX_HEAD))
        if client.state.they_are_waiting_for_100_continue:  # Expect is answered by the next hop
            await client.stream.write(
                client.encode(h11.InformationalResponse(status_code=100, reason="Continue", headers=[]))
            )
        # One request per connection, so that nothing after it can pass for another.
        headers = [(b"Host", connection.authority.removesuffix(":80").encode())]
        headers += http.forwarded(request, SENSITIVE | {b"host"})
        if http.values(request, b"transfer-encoding"):
            headers.append((b"Transfer-Encoding", b"chunked"))
        headers.append((b"Connection", b"close"))
        head = server.encode(h11.Request(method=request.method, target=path, headers=headers))
        await self._transfer(connection, stream, head, len(head), up=True)
        upload = self._upload(client, server, connection)
        complete = await self._run_both(
            connection, upload, self._download(client, server, request, connection), both=False
        )
        connection.keep_alive = complete and client.state.our_state is h11.DONE

    async def _upload(self, client: HttpPeer, server: HttpPeer, connection: EgressConnection) -> bool:
        async for data in client.body():
            try:
                await self._transfer(connection, server.stream, server.encode(h11.Data(data)), len(data), up=True)
            except OSError:  # the server accepts no more of the request; it may have answered already
                return False
        await server.stream.write(server.encode(h11.EndOfMessage()))
        return True

    async def _download(
        self, client: HttpPeer, server: HttpPeer, request: h11.Request, connection: EgressConnection
    ) -> bool:
        try:
            answer = await server.read_response()
        except ProtocolError as error:
            raise UpstreamUnreachable(502, f"the answer of {connection.authority}: {error}") from None
        closing = b"close" in http.tokens(request, b"proxy-connection")  # h11 heeds Connection itself
        headers = [*http.forwarded(answer), (b"Connection", b"close" if closing else b"keep-alive")]
        head = client.encode(h11.Response(status_code=answer.status_code, reason=answer.reason, headers=headers))
        connection.answered = True
        await self._transfer(connection, client.stream, head, len(head), up=False)
        async for data in server.body():
            await self._transfer(connection, client.stream, client.encode(h11.Data(data)), len(data), up=False)
        await client.stream.write(client.encode(h11.EndOfMessage()))
        return True

    # -- sockets that stand for hosts (transparent)

    async def _serve_carry(self, client: BufferedStream, listen: ListenSpec) -> None:
        connection = EgressConnection("carry", listen.host, listen.port)
        server: BufferedStream | None = None
        try:
            async with self._handle_errors(client, connection, answer=False):
                if listen.host and listen.port != 443:  # the host is known, and its server may send first
                    self._decide(connection)
                    server = await self._open_upstream(connection)
                    kind = await self._detect_protocol(client, server)
                else:
                    async with asyncio.timeout(self.limits.header_s):
                        kind = await client.detect_protocol()
                if kind == "http" and listen.port != 443:
                    connection.unrecorded = True  # each of its requests is decided and recorded separately
                else:
                    await self._carry(client, server, kind, connection)
            if connection.unrecorded:
                await self._serve_requests(client, listen, server)
        finally:
            if server is not None:
                server.abort()

    async def _carry(
        self, client: BufferedStream, server: BufferedStream | None, kind: str, connection: EgressConnection
    ) -> None:
        if server is None:  # no connection is opened before the client has named the host
            if kind != "tls":
                raise EgressRefused("neither TLS nor HTTP, so nothing says which host it is for")
            connection.host = connection.host or await self._read_server_name(client)
            if not connection.host:
                raise EgressRefused("TLS without a server name")
            self._decide(connection)
        if kind == "tls":
            await self._check_server_name(client, connection)
        async with server or await self._open_upstream(connection) as server:
            await self._tunnel(connection, client, server)

    # -- DNS

    async def _serve_dns(self, client: BufferedStream) -> None:
        while True:
            async with asyncio.timeout(self.limits.header_s):
                while len(client.buffer) < 2 or len(client.buffer) < 2 + int.from_bytes(client.buffer[:2], "big"):
                    if not await client.fill():
                        return
                length = int.from_bytes(await client.read(2), "big")
                reply = self.answer_dns(await client.read(length))
                await client.write(len(reply).to_bytes(2, "big") + reply)

    def answer_dns(self, packet: bytes) -> bytes:
        """Return the reply to one DNS packet; empty when none is due."""
        try:
            question = egress.parse_dns_question(packet)
        except ProtocolError:
            other = len(packet) > 2 and packet[2] & 0x78
            return egress.dns_answer(packet, None, egress.NOTIMP if other else egress.FORMERR)
        if not question.internet:
            return egress.dns_answer(packet, question, egress.REFUSED)
        address = self.policy.lookup(question.name)
        if address is None:
            self._record_refused_name(question.name)
            return egress.dns_answer(packet, question, egress.NXDOMAIN)
        return egress.dns_answer(packet, question, egress.NOERROR, address if question.kind == egress.A else None)

    def _record_refused_name(self, name: str) -> None:
        if name in self._refused_names or len(self._refused_names) > MAX_REFUSED_NAMES:
            return  # programs repeat queries, for A and AAAA: one record per name is enough
        self._refused_names.add(name)
        connection = EgressConnection("dns", name)
        connection.reason = "no rule names it"
        if len(self._refused_names) > MAX_REFUSED_NAMES:
            connection.note = "refused names are not recorded from here on: there are too many"
        self._report(connection)
