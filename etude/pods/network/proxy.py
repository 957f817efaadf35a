"""The gate of one pod: accepts on the sockets the pod opened, and carries what its policy allows.

    proxy   CONNECT and plain HTTP              carry   a socket that stands for a host, or for all of a wildcard
    dns     answers names with fake addresses; no question ever leaves this process

The gate dials by name, once resolved and checked, so what a client claims about addresses does not matter. TLS is not
opened: its ClientHello must name the host that was asked for, but what is said inside is between the two ends.
One connection cannot hurt another: each is a task with deadlines and bounded buffers. Whatever happened is told to
`record`, once per decision when it is over: host, port, way, rule or reason, bytes, seconds; never a path or header.
"""

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from etude.errors import InputError
from etude.pods.network import policy as egress
from etude.pods.network.connect import (
    CHUNK,
    FROM_ENVIRONMENT,
    MAX_HEAD,
    Connect,
    Connector,
    EgressRefused,
    Resolver,
    UpstreamUnreachable,
)
from etude.pods.network.policy import (
    CHUNKED,
    SENSITIVE,
    UNTIL_CLOSE,
    ClientHelloReader,
    EgressPolicy,
    EgressRule,
    HttpHead,
    ListenSpec,
    ProtocolError,
)
from etude.pods.network.stream import LINGER_S, BufferedStream, UpstreamClosed, relay_body

Record = Callable[[Mapping[str, Any]], None]

REFUSED_NAMES = 1000  # names of which a refused lookup is recorded; a pod can ask for any number of them

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EgressLimits:
    """What one pod's connections may take."""

    connections: int = 128  # at once; more wait in the pod until one ends
    header_s: float = 10.0  # for a whole request head or ClientHello
    connect_s: float = 15.0  # to resolve and reach the other side
    idle_s: float = 300.0  # without a byte in either direction
    total_bytes: int | None = None  # both directions, all connections


class EgressConnection:
    """One decision, from the first byte to its record."""

    def __init__(self, way: str, host: str = "", port: int = 0) -> None:
        self.way, self.host, self.port = way, host, port
        self.rule: EgressRule | None = None  # set when allowed
        self.reason = ""  # why refused
        self.error = ""  # how an allowed one failed
        self.note = ""
        self.up = self.down = 0
        self.started = self.touched = time.monotonic()
        self.answered = False  # the client has seen the beginning of an answer
        self.keep = False  # the client's connection can take another request
        self.silent = False  # nothing was decided here

    @property
    def place(self) -> str:
        return egress.authority(self.host, self.port)

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kind": "egress", "way": self.way, "host": self.host, "port": self.port}
        facts["allowed"] = self.rule is not None and not self.reason
        facts["rule"] = str(self.rule) if facts["allowed"] else None
        facts |= {name: text for name in ("reason", "error", "note") if (text := getattr(self, name))}
        return facts | {"up": self.up, "down": self.down, "seconds": round(time.monotonic() - self.started, 3)}


# -- messages


def _head_bytes(first: str, headers: list[tuple[str, str]]) -> bytes:
    return "\r\n".join([first, *(f"{name}: {value}" for name, value in headers), "", ""]).encode("latin-1")


def _request_bytes(head: HttpHead, passage: EgressConnection, path: str, length: int) -> bytes:
    """The request as the server gets it: one per connection, so nothing after it can be taken for another."""
    host = egress.authority(passage.host, passage.port).removesuffix(":80")
    framing = [("Transfer-Encoding", "chunked")] if length == CHUNKED else []
    headers = [("Host", host), *head.kept(SENSITIVE | {"host"}), *framing, ("Connection", "close")]
    return _head_bytes(f"{head.start[0]} {path} {head.start[2]}", headers)


def _refusal(status: int, text: str) -> bytes:
    phrases = {400: "Bad Request", 403: "Forbidden by the egress rules of this pod", 408: "Request Timeout"}
    body = (text + "\n").encode("utf-8", "replace")
    headers = [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))]
    first = f"HTTP/1.1 {status} {phrases.get(status, 'Bad Gateway' if status == 502 else 'Gateway Timeout')}"
    return _head_bytes(first, [*headers, ("Connection", "close")]) + body


class _Names(asyncio.DatagramProtocol):
    def __init__(self, answer: Callable[[bytes], bytes]) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if (reply := self._answer(data)) and self._transport.get_write_buffer_size() < CHUNK:
            self._transport.sendto(reply, addr)


class EgressProxy:
    """Carries the connections of one pod. `start` takes the sockets over; `close` ends everything and closes them."""

    def __init__(
        self,
        policy: EgressPolicy,
        record: Record,
        upstream: Connect | None = None,
        *,
        resolver: Resolver | None = None,
        upstream_proxy: str = FROM_ENVIRONMENT,  # http://host:port, or "" for none
        limits: EgressLimits | None = None,
    ) -> None:
        self.policy, self.limits, self._record = policy, limits or EgressLimits(), record
        self._dialer: Connect = upstream or Connector(policy.private_ok, resolver, upstream_proxy)
        self._slots = asyncio.Semaphore(self.limits.connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sockets: list[socket.socket] = []
        self._names: list[asyncio.DatagramTransport] = []
        self._refused_names: set[str] = set()
        self._bytes = 0

    async def start(self, sockets: list[tuple[ListenSpec, socket.socket]]) -> None:
        """Serve these from now on. They belong to the gate, even if this fails."""
        self._sockets += [sock for _, sock in sockets]
        try:
            for listen, sock in sockets:
                wanted = socket.SOCK_STREAM if listen.kind == "tcp" else socket.SOCK_DGRAM
                if sock.type != wanted:
                    raise InputError(f"egress: the socket for {listen} is of another type ({sock.type!r})")
                sock.setblocking(False)
                if listen.kind == "udp":
                    loop = asyncio.get_running_loop()
                    transport, _ = await loop.create_datagram_endpoint(lambda: _Names(self.answer_name), sock=sock)
                    self._names.append(transport)
                else:
                    self._spawn(self._accept(listen, sock))
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Cut off every connection, record it, and close the sockets. Closing twice is fine."""
        while self._tasks:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for transport in self._names:
            transport.abort()
        await asyncio.sleep(0)  # transports let go of their sockets in the next round of the loop
        for sock in self._sockets:
            sock.close()
        self._sockets, self._names = [], []

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection of a pod ended in an error of ours", exc_info=error)

    async def _accept(self, listen: ListenSpec, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(sock)
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP):
                    raise
                await asyncio.sleep(0.2)  # out of descriptors, or a client that left at once: others may still come
                continue
            try:
                await self._slots.acquire()
            except BaseException:
                connection.close()
                raise
            self._spawn(self._serve(listen, connection)).add_done_callback(lambda _: self._slots.release())

    async def _serve(self, listen: ListenSpec, connection: socket.socket) -> None:
        serve = {"proxy": self._serve_proxy, "dns": self._serve_names, "carry": self._serve_carry}[listen.role]
        try:
            client = BufferedStream(*await asyncio.open_connection(sock=connection, limit=CHUNK))
        except BaseException:
            connection.close()
            raise
        async with client:
            with suppress(OSError, TimeoutError):  # before anything was decided
                await serve(client, listen)

    # -- deciding and telling

    def _tell(self, passage: EgressConnection) -> None:
        if not passage.silent:
            try:
                self._record(passage.facts())
            except Exception:
                logger.exception("the record of an egress decision was not taken")

    def _decide(self, passage: EgressConnection) -> EgressRule:
        decision = self.policy.decide(passage.host, passage.port)
        if decision.rule is None:
            raise EgressRefused(decision.reason)
        if self.limits.total_bytes is not None and self._bytes >= self.limits.total_bytes:
            raise EgressRefused(f"the pod has used its {self.limits.total_bytes} bytes of network")
        passage.rule = decision.rule
        return decision.rule

    async def _dial(self, passage: EgressConnection) -> BufferedStream:
        assert passage.rule is not None
        try:
            async with asyncio.timeout(self.limits.connect_s):
                return BufferedStream(*await self._dialer(passage.host, passage.port, passage.rule))
        except TimeoutError:
            raise UpstreamUnreachable(504, f"{passage.place} did not answer in {self.limits.connect_s:g} s") from None
        except OSError as error:
            known = isinstance(error.errno, int) and error.errno > 0  # a resolver's codes are negative
            why = os.strerror(error.errno or 0) if known else error.strerror or type(error).__name__
            raise UpstreamUnreachable(502, f"{passage.place} could not be reached: {why}") from None

    @asynccontextmanager
    async def _passing(self, client: BufferedStream, passage: EgressConnection, answer: bool) -> AsyncIterator[None]:
        """Whatever goes wrong inside becomes the passage's record and, for a client that speaks HTTP, an answer."""
        status, text = 0, ""
        try:
            try:
                yield
            except EgressRefused as error:
                passage.reason, status = str(error), 403
                text = f"egress to {passage.place} is refused: {error}"
                if passage.rule is None:
                    text += f"; add the rule {passage.place!r} to allow it"
            except ProtocolError as error:
                status, text = 400, f"bad request: {error}"
            except UpstreamUnreachable as error:
                status, text = error.status, str(error)
            except TimeoutError:
                status, text = 408, "nothing came for too long"
            except OSError as error:
                status, text = 502, f"the connection broke: {type(error).__name__}"
            except asyncio.CancelledError:
                passage.error = "the gate was closed"
                raise
            if status and not passage.reason:  # refused by us unless a rule had allowed it
                passage.error, passage.reason = (text, "") if passage.rule else ("", text)
        finally:
            self._tell(passage)
        if status and answer and not passage.answered:
            await self._answer(client, _refusal(status, text))
        elif status:
            client.abort()

    async def _answer(self, client: BufferedStream, message: bytes) -> None:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER_S):
                await client.write(message)
                client.end()
                client.ahead.clear()
                while await client.reader.read(CHUNK):  # closing on unread bytes would reset, and lose our answer
                    pass

    # -- moving bytes

    async def _move(self, passage: EgressConnection, sink: BufferedStream, data: bytes, count: int, up: bool) -> None:
        passage.touched = time.monotonic()
        passage.up, passage.down = passage.up + count * up, passage.down + count * (not up)
        self._bytes += count
        if self.limits.total_bytes is not None and self._bytes > self.limits.total_bytes:
            raise UpstreamUnreachable(502, f"the pod has used its {self.limits.total_bytes} bytes of network")
        await sink.write(data)
        passage.touched = time.monotonic()

    async def _pump(self, passage: EgressConnection, source: BufferedStream, sink: BufferedStream, up: bool) -> bool:
        while data := await source.read():
            await self._move(passage, sink, data, len(data), up)
        sink.end()  # the other direction may have more to say
        return True

    async def _tunnel(self, passage: EgressConnection, client: BufferedStream, server: BufferedStream) -> None:
        up, down = self._pump(passage, client, server, True), self._pump(passage, server, client, False)
        await self._together(passage, up, down, both=True)

    async def _together(
        self, passage: EgressConnection, up: Coroutine[Any, Any, bool], down: Coroutine[Any, Any, bool], both: bool
    ) -> bool:
        """Run both directions until `down` (or `both`) ended, one failed, or nothing moved; True when `up` is whole."""
        passage.touched = time.monotonic()
        tasks = asyncio.create_task(up), asyncio.create_task(down)
        try:
            while not tasks[1].done() or (both and not tasks[0].done()):
                quiet = self.limits.idle_s - (time.monotonic() - passage.touched)
                if quiet <= 0:
                    raise TimeoutError
                running = [task for task in tasks if not task.done()]
                done, _ = await asyncio.wait(running, timeout=quiet, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return tasks[0].done() and tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- TLS: the name in the ClientHello

    async def _hello(self, client: BufferedStream) -> str:
        reader, fed = ClientHelloReader(), 0
        try:
            async with asyncio.timeout(self.limits.header_s):
                while (hello := reader.feed(bytes(client.ahead[fed:]))) is None:
                    fed = len(client.ahead)
                    if not await client.fill():
                        raise EgressRefused("the connection ended before its ClientHello did")
        except ProtocolError as error:
            raise EgressRefused(str(error)) from None
        except TimeoutError:
            raise EgressRefused(f"no ClientHello in {self.limits.header_s:g} s") from None
        return hello.sni

    async def _check_hello(self, client: BufferedStream, passage: EgressConnection) -> None:
        name = await self._hello(client)
        if not name and (passage.port != 443 or egress.is_address(passage.host)):
            passage.note = "TLS without a server name"
        elif name != passage.host:
            raise EgressRefused(f"TLS asks for {name or 'no server name'}, the connection for {passage.host}")

    async def _first_word(self, client: BufferedStream, server: BufferedStream) -> Literal["tls", "http", "other"]:
        """What the client begins with; "other" too when the server speaks first, as in SSH and mail."""
        said, spoke = asyncio.create_task(client.sniff()), asyncio.create_task(server.fill())
        try:
            await asyncio.wait((said, spoke), timeout=self.limits.idle_s, return_when=asyncio.FIRST_COMPLETED)
            if not said.done() and not spoke.done():
                raise TimeoutError
            return said.result() if said.done() else "other"
        finally:
            said.cancel(), spoke.cancel()
            await asyncio.gather(said, spoke, return_exceptions=True)

    # -- the proxy

    async def _serve_proxy(self, client: BufferedStream, listen: ListenSpec) -> None:
        await self._serve_requests(client, None)

    async def _serve_requests(
        self, client: BufferedStream, listen: ListenSpec | None, spare: BufferedStream | None = None
    ) -> None:
        """Each request is decided anew. `spare` is a connection to the server that is open already."""
        patience = self.limits.header_s
        while True:
            async with asyncio.timeout(patience):
                if not client.ahead and not await client.fill():
                    return
            if not await self._request(client, listen, spare):
                return
            patience, spare = self.limits.idle_s, None

    async def _request(self, client: BufferedStream, listen: ListenSpec | None, spare: BufferedStream | None) -> bool:
        passage = EgressConnection("carry", listen.host, listen.port) if listen else EgressConnection("http")
        async with self._passing(client, passage, answer=listen is None):
            async with asyncio.timeout(self.limits.header_s):
                head = egress.parse_head(await client.until(b"\r\n\r\n", MAX_HEAD))
            length = egress.request_length(head)
            if head.start[0] == "CONNECT" and listen is None and length == 0:
                passage.way = "connect"
                await self._connect(client, head, passage)
            elif head.start[0] in ("CONNECT", "TRACE"):
                raise ProtocolError(f"{head.start[0]} is not possible here")
            else:
                passage.host, passage.port, path = egress.split_target(head, listen.port if listen else None)
                if listen and listen.host and passage.host != listen.host:
                    raise EgressRefused(f"this connection is for {listen.host}")
                self._decide(passage)
                async with spare or await self._dial(passage) as server:
                    passage.keep = await self._exchange(client, server, head, path, length, passage)
        return passage.keep

    async def _connect(self, client: BufferedStream, head: HttpHead, passage: EgressConnection) -> None:
        try:
            passage.host, passage.port = egress.split_authority(head.start[1], None)
        except InputError:
            raise ProtocolError("expected CONNECT host:port") from None
        self._decide(passage)
        async with await self._dial(passage) as server:
            await client.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            passage.answered = True
            if passage.port == 443 or await self._first_word(client, server) == "tls":
                await self._check_hello(client, passage)
            await self._tunnel(passage, client, server)

    async def _exchange(
        self,
        client: BufferedStream,
        server: BufferedStream,
        head: HttpHead,
        path: str,
        length: int,
        passage: EgressConnection,
    ) -> bool:
        """One request and its answer; True when the client's connection can take another."""
        if head.values("expect") and head.start[2] == "HTTP/1.1":  # asked of us, the next hop
            await client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request = _request_bytes(head, passage, path, length)
        await self._move(passage, server, request, len(request), up=True)
        upload, answer = self._upload(client, server, length, passage), self._download(client, server, head, passage)
        return await self._together(passage, upload, answer, both=False) and passage.keep

    async def _upload(
        self, client: BufferedStream, server: BufferedStream, length: int, passage: EgressConnection
    ) -> bool:
        async def send(data: bytes) -> None:
            framed = b"%x\r\n%b\r\n" % (len(data), data) if length == CHUNKED else data
            try:
                await self._move(passage, server, framed, len(data), up=True)
            except OSError:
                raise UpstreamClosed from None

        try:
            await relay_body(client, length, send)
            if length == CHUNKED:
                await server.write(b"0\r\n\r\n")
        except UpstreamClosed:
            return False
        return True

    async def _download(
        self, client: BufferedStream, server: BufferedStream, head: HttpHead, passage: EgressConnection
    ) -> bool:
        method, _, version = head.start
        try:
            answer = egress.parse_head(await server.until(b"\r\n\r\n", MAX_HEAD))
            while answer.start[1].startswith("1"):  # "go on": we have said so ourselves
                egress.response_length(answer, method)
                answer = egress.parse_head(await server.until(b"\r\n\r\n", MAX_HEAD))
            length = egress.response_length(answer, method)
        except ProtocolError as error:
            raise UpstreamUnreachable(502, f"the answer of {passage.place}: {error}") from None
        if length == CHUNKED and version == "HTTP/1.0":
            raise UpstreamUnreachable(502, f"the answer of {passage.place} is chunked, which HTTP/1.0 does not know")
        closing = "close" in head.tokens("connection") | head.tokens("proxy-connection")
        keep = version == "HTTP/1.1" and length != UNTIL_CLOSE and not closing
        headers = answer.kept(()) + ([("Transfer-Encoding", "chunked")] if length == CHUNKED else [])
        first = f"HTTP/1.1 {answer.start[1]} {answer.start[2]}"
        message = _head_bytes(first, [*headers, ("Connection", "keep-alive" if keep else "close")])

        async def send(data: bytes) -> None:
            framed = b"%x\r\n%b\r\n" % (len(data), data) if length == CHUNKED else data
            await self._move(passage, client, framed, len(data), up=False)

        passage.answered = True
        await self._move(passage, client, message, len(message), up=False)
        await relay_body(server, length, send)
        if length == CHUNKED:
            await client.write(b"0\r\n\r\n")
        passage.keep = keep
        return True

    # -- transparent: sockets that stand for hosts

    async def _serve_carry(self, client: BufferedStream, listen: ListenSpec) -> None:
        passage = EgressConnection("carry", listen.host, listen.port)
        server: BufferedStream | None = None
        try:
            async with self._passing(client, passage, answer=False):
                if listen.host and listen.port != 443:  # the host is known, and its server may speak first
                    self._decide(passage)
                    server = await self._dial(passage)
                    kind = await self._first_word(client, server)
                else:
                    async with asyncio.timeout(self.limits.header_s):
                        kind = await client.sniff()
                if kind == "http" and listen.port != 443:
                    passage.silent = True  # each of its requests is a decision of its own
                else:
                    await self._carry(client, server, kind, passage)
            if passage.silent:
                await self._serve_requests(client, listen, server)
        finally:
            if server is not None:
                server.abort()

    async def _carry(
        self, client: BufferedStream, server: BufferedStream | None, kind: str, passage: EgressConnection
    ) -> None:
        if server is None:  # nobody is dialled before the client has said for whom this is
            if kind != "tls":
                raise EgressRefused("neither TLS nor HTTP, so nothing says which host it is for")
            passage.host = passage.host or await self._hello(client)
            if not passage.host:
                raise EgressRefused("TLS without a server name")
            self._decide(passage)
        if kind == "tls":
            await self._check_hello(client, passage)
        async with server or await self._dial(passage) as server:
            await self._tunnel(passage, client, server)

    # -- names

    async def _serve_names(self, client: BufferedStream, listen: ListenSpec) -> None:
        while True:
            async with asyncio.timeout(self.limits.header_s):
                while len(client.ahead) < 2 or len(client.ahead) < 2 + int.from_bytes(client.ahead[:2], "big"):
                    if not await client.fill():
                        return
                length = int.from_bytes(await client.read(2), "big")
                reply = self.answer_name(await client.read(length))
                await client.write(len(reply).to_bytes(2, "big") + reply)

    def answer_name(self, packet: bytes) -> bytes:
        """The reply to one DNS packet; empty when none is due."""
        try:
            question = egress.parse_dns_question(packet)
        except ProtocolError:
            other = len(packet) > 2 and packet[2] & 0x78
            return egress.dns_answer(packet, None, egress.NOTIMP if other else egress.FORMERR)
        if not question.internet:
            return egress.dns_answer(packet, question, egress.REFUSED)
        address = self.policy.lookup(question.name)
        if address is None:
            self._refuse_name(question.name)
            return egress.dns_answer(packet, question, egress.NXDOMAIN)
        return egress.dns_answer(packet, question, egress.NOERROR, address if question.kind == egress.A else None)

    def _refuse_name(self, name: str) -> None:
        if name in self._refused_names or len(self._refused_names) > REFUSED_NAMES:
            return  # programs ask again and again, and for A and AAAA: one record per name is enough
        self._refused_names.add(name)
        passage = EgressConnection("dns", name)
        passage.reason = "no rule names it"
        if len(self._refused_names) > REFUSED_NAMES:
            passage.note = "refused names are not recorded from here on: there are too many"
        self._tell(passage)
