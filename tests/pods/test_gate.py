"""Truths about the gate of a pod, on real sockets of this machine; nothing here needs a network."""

import asyncio
import contextlib
import functools
import random
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from etude.errors import InputError
from etude.pods import egress
from etude.pods.egress import Listen, Policy
from etude.pods.gate import Gate, GateLimits
from etude.pods.pod import Egress

PROXY = Listen("tcp", "127.0.0.1", 3128, "proxy")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that is a coroutine, run to its end on a loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **keywords: Any) -> None:
        asyncio.run(test(*args, **keywords))  # type: ignore[arg-type]

    return run


@dataclass
class Open:
    """A gate that serves, the ports it listens on, and what it told."""

    gate: Gate
    ports: list[int]
    records: list[dict[str, Any]] = field(default_factory=list)
    dialled: list[tuple[str, int]] = field(default_factory=list)

    async def settled(self, n: int = 1) -> list[dict[str, Any]]:
        for _ in range(400):
            if len(self.records) >= n:
                break
            await asyncio.sleep(0.005)
        return self.records


@contextlib.asynccontextmanager
async def opened(
    rules: list[str], listens: tuple[Listen, ...] = (PROXY,), server: int | None = None, **options: Any
) -> AsyncIterator[Open]:
    """A gate whose every dial ends at the local port `server`, or which dials as in life when there is none."""
    policy = Policy.from_egress(Egress.to(*rules))
    sockets = [socket.socket(type=socket.SOCK_STREAM if at.kind == "tcp" else socket.SOCK_DGRAM) for at in listens]
    for sock, listen in zip(sockets, listens, strict=True):
        sock.bind(("127.0.0.1", 0))
        if listen.kind == "tcp":
            sock.listen(256)
    world = Open(None, [sock.getsockname()[1] for sock in sockets])  # type: ignore[arg-type]

    async def dial(host: str, port: int, rule: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        world.dialled.append((host, port))
        return await asyncio.open_connection("127.0.0.1", server)

    options.setdefault("upstream_proxy", "")
    record = options.pop("record", world.records.append)
    world.gate = Gate(policy, record, None if server is None else dial, **options)  # type: ignore[arg-type]
    await world.gate.start(list(zip(listens, sockets, strict=True)))
    try:
        yield world
    finally:
        started = time.monotonic()
        await world.gate.close()
        assert time.monotonic() - started < 1
        assert all(sock.fileno() == -1 for sock in sockets)
        left = [task for task in asyncio.all_tasks() if "etude/pods/gate.py" in repr(task)]
        assert not left, left


@contextlib.asynccontextmanager
async def serving(serve: Serve) -> AsyncIterator[int]:
    async def kept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(kept, "127.0.0.1", 0, backlog=256)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()


async def talk(port: int, *pieces: bytes, end: bool = False) -> bytes:
    """Send, and return all that comes back until the end, or until a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = bytearray()

    async def listen() -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                got.extend(data)

    async with asyncio.timeout(5):
        listening = asyncio.create_task(listen())
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01 if len(pieces) > 1 else 0)
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


def connect(place: str) -> bytes:
    return f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode()


def get(url: str, *headers: str) -> bytes:
    host = url.split("/")[2]
    return "\r\n".join([f"GET {url} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


# -- CONNECT


@on_loop
async def test_connect_carries_tls_to_the_host_it_names() -> None:
    hello = client_hello("example.org")
    async with serving(echo) as server, opened(["example.org"], server=server) as world:
        for pieces in ([connect("Example.org:443"), hello], [connect("example.org:443") + hello[:9], hello[9:]]):
            assert await talk(world.ports[0], *pieces, end=True) == ESTABLISHED + hello
        facts = (await world.settled(2))[0]
        assert world.dialled == [("example.org", 443)] * 2
        assert facts.pop("seconds") < 5
        size = len(hello)
        assert facts == {
            "kind": "egress", "way": "connect", "host": "example.org", "port": 443, "allowed": True,
            "rule": "example.org:443", "up": size, "down": size,
        }  # fmt: skip


@pytest.mark.parametrize("place", ["evil.example:443", "example.org:80", "[2001:db8::1]:443", "169.254.169.254:80"])
@on_loop
async def test_a_refusal_names_the_rule_to_add(place: str) -> None:
    async with opened(["example.org"], server=1) as world:
        answer = await talk(world.ports[0], connect(place))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert f"add the rule {place!r}".encode() in answer
        assert world.dialled == []
        (facts,) = await world.settled()
        assert (facts["allowed"], facts["rule"], facts["reason"][:7]) == (False, None, "no rule")


@pytest.mark.parametrize(
    ("place", "first", "reason"),
    [
        ("example.org:443", client_hello("evil.example"), "evil.example"),
        ("example.org:443", client_hello(None), "no server name"),
        ("example.org:443", b"SSH-2.0-x\r\n", "not the first bytes of TLS"),
        ("example.org:443", b"", "before its ClientHello"),
        ("example.org:443", client_hello("example.org")[:-1], "before its ClientHello"),
        ("example.org:8443", client_hello("evil.example"), "evil.example"),
        ("example.org:8443", b"\x16\x03\x01\x40\x01rubbish", "impossible length"),
    ],
)
@on_loop
async def test_a_tunnel_for_one_host_is_not_for_another(place: str, first: bytes, reason: str) -> None:
    async with serving(echo) as server, opened(["example.org", "example.org:8443"], server=server) as world:
        assert await talk(world.ports[0], connect(place) + first, end=True) in (ESTABLISHED, b"")
        (facts,) = await world.settled()
        assert not facts["allowed"]
        assert reason in facts["reason"]
        assert facts["up"] == 0


@on_loop
async def test_tls_without_a_name_is_carried_to_other_ports_and_noted() -> None:
    hello = client_hello(None)
    async with serving(echo) as server, opened(["example.org:8443", "192.0.2.7:443"], server=server) as world:
        for place in ("example.org:8443", "192.0.2.7:443"):
            assert await talk(world.ports[0], connect(place) + hello, end=True) == ESTABLISHED + hello
        assert [facts["note"] for facts in await world.settled(2)] == ["TLS without a server name"] * 2


@on_loop
async def test_a_server_may_speak_first() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.write(b"you said " + await reader.readline())
        await writer.drain()

    carry = Listen("tcp", "198.18.1.1", 22, "carry", "example.org")
    async with serving(greet) as server, opened(["example.org:22"], (PROXY, carry), server) as world:
        for port, start in ((world.ports[0], ESTABLISHED), (world.ports[1], b"")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if start:
                writer.write(connect("example.org:22"))
            assert await reader.readexactly(len(start) + 11) == start + b"220 hello\r\n"
            writer.write(b"EHLO\r\n")
            assert await reader.read() == b"you said EHLO\r\n"
            writer.close()


@on_loop
async def test_each_direction_ends_alone() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # to the client's end
        writer.write(b"%d" % len(data))
        await writer.drain()

    async def end_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        heard.append(await reader.read())

    heard: list[bytes] = []
    async with serving(count) as server, opened(["example.org:9"], server=server) as world:
        request = connect("example.org:9") + b"\0" * 100_000
        assert await talk(world.ports[0], request, end=True) == ESTABLISHED + b"100000"
    async with serving(end_first) as server, opened(["example.org:9"], server=server) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.ports[0])
        writer.write(connect("example.org:9"))
        assert await reader.read() == ESTABLISHED
        writer.write(b"\0still here")
        writer.write_eof()
        assert (await world.settled())[0]["up"] == 11
        writer.close()
    assert heard == [b"\0still here"]


# -- plain HTTP


@on_loop
async def test_each_request_of_a_connection_is_decided_and_cleaned() -> None:
    seen: list[bytes] = []
    secret = ("Authorization: Bearer s", "Cookie: s", "X-Api-Key: s", "Proxy-Authorization: s")
    hops = ("Connection: keep-alive, X-Hop", "X-Hop: 1", "TE: trailers", "Upgrade: websocket", "Accept: */*")
    one = get("http://example.org/a?token=s", *secret, *hops)
    async with serving(http_server(OK, seen)) as server, opened(["example.org:80"], server=server) as world:
        answer = await talk(world.ports[0], one + get("http://example.org/b") + get("http://evil.example/c?s"))
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.count(b"Connection: keep-alive") == 2
        assert b"HTTP/1.1 403 " in answer
        records = await world.settled(3)
    first = b"GET /a?token=s HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    assert seen == [first, b"GET /b HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n"]
    assert [facts["allowed"] for facts in records] == [True, True, False]
    assert "token" not in repr(records)
    assert "?s" not in repr(records)


@pytest.mark.parametrize(
    "request_bytes",
    [
        get("http://example.org/", "Content-Length: 3", "Transfer-Encoding: chunked"),
        get("http://example.org/", "X: 1", " folded"),
        get("http://example.org/", "X: \x01"),
        get("http://example.org/", "Host: example.org"),
        get("http://example.org/").replace(b"Host: example.org", b"Host: evil.example"),
        get("http://example.org/").replace(b"http://", b"http://me:secret@"),
        get("http://example.org/").replace(b"http://example.org", b""),
        get("http://example.org/").replace(b"GET", b"TRACE"),
        get("http://example.org/", "X: " + "a" * (64 << 10)),
        b"CONNECT example.org HTTP/1.1\r\n\r\n",
        connect("example.org:80").replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\nhello"),
        b"\x16\x03\x01\x00\x05hello\r\n\r\n",
        b"rubbish\r\n\r\n",
    ],
)
@on_loop
async def test_a_doubtful_request_is_never_passed_on(request_bytes: bytes) -> None:
    async with opened(["example.org:80", "example.org"], server=1) as world:
        assert (await talk(world.ports[0], request_bytes)).startswith(b"HTTP/1.1 400 ")
        assert world.dialled == []
        (facts,) = await world.settled()
        assert not facts["allowed"]
        assert "secret" not in repr(facts)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: 1\r\n\r\n",
            b"3\r\nabc\r\n0\r\n\r\n",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"\r\n\r\nok"),
        (b"HTTP/1.0 200\r\n\r\nuntil the end", b"Connection: close\r\n\r\nuntil the end"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"keep-alive\r\n\r\n"),
    ],
)
@on_loop
async def test_answers_of_every_framing_come_through(answer: bytes, expected: bytes) -> None:
    seen: list[bytes] = []
    async with serving(http_server(answer, seen)) as server, opened(["example.org:80"], server=server) as world:
        got = await talk(world.ports[0], get("http://example.org/"), end=True)
        assert got.startswith(b"HTTP/1.1 20")
        assert got.endswith(expected)
        assert (await world.settled())[0]["allowed"]


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
    ],
)
@on_loop
async def test_an_answer_that_is_no_answer_becomes_502(answer: bytes) -> None:
    async with serving(http_server(answer, [])) as server, opened(["example.org:80"], server=server) as world:
        assert (await talk(world.ports[0], get("http://example.org/"))).startswith(b"HTTP/1.1 502 ")
        facts = (await world.settled())[0]
        assert facts["allowed"]
        assert facts["error"]


@on_loop
async def test_a_cut_off_answer_does_not_look_complete() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await writer.drain()
        await asyncio.sleep(0.05)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with serving(reset) as server, opened(["example.org:80"], server=server) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.ports[0])
        writer.write(get("http://example.org/"))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert "broke" in (await world.settled())[0]["error"]


@on_loop
async def test_bodies_go_up_chunked_and_whole_and_an_early_answer_is_heard() -> None:
    async def post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if b"/early" in head:
            writer.write(b"HTTP/1.1 413 Too Big\r\nContent-Length: 0\r\n\r\n")
            await reader.read()
        elif b"chunked" in head:
            body = await reader.readuntil(b"0\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        else:
            body = await reader.readexactly(5)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n" + body)
        await writer.drain()

    def head(path: str, *headers: str) -> bytes:
        return get(f"http://example.org{path}", *headers).replace(b"GET", b"POST")

    async with serving(post) as server, opened(["example.org:80"], server=server) as world:
        port = world.ports[0]
        chunked = head("/", "Transfer-Encoding: chunked") + b"5;ext\r\nhello\r\n0\r\nTrailer: x\r\n\r\n"
        whole = head("/", "Content-Length: 5", "Expect: 100-continue") + b"world"
        answer = await talk(port, chunked + whole, end=True)
        assert b"5\r\nhello\r\n0\r\n\r\nHTTP/1.1 100 Continue" in answer
        assert answer.endswith(b"world")
        early = head("/early", "Content-Length: 900000000") + b"x" * 500_000
        assert b" 413 " in await talk(port, early)
        bad = head("/", "Transfer-Encoding: chunked") + b"5\r\nhelloXX"
        assert b" 400 " in await talk(port, bad)
        records = await world.settled(4)
        assert [facts.get("error", "")[:3] for facts in records] == ["", "", "", "bad"]


# -- where a name leads


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::ffff:127.0.0.1", "fd00::1"])
@on_loop
async def test_a_name_that_leads_inside_is_refused(address: str) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return [address]

    async with serving(echo) as server, opened([f"*.example.org:{server}"], resolver=resolver) as world:
        answer = await talk(world.ports[0], connect(f"rebind.example.org:{server}"))
        assert answer.startswith(b"HTTP/1.1 403 ")
        facts = (await world.settled())[0]
        assert not facts["allowed"]
        assert address in facts["reason"]


@on_loop
async def test_a_name_is_resolved_once_and_the_checked_address_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "forbidden_address", lambda *_: "")  # the servers of this test are on this machine
    asked: list[str] = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.77", "127.0.0.1"]  # nobody is at the first

    async with serving(echo) as server:
        place = f"example.org:{server}"
        async with opened([place], resolver=resolver) as world:
            assert await talk(world.ports[0], connect(place) + b"\0", end=True) == ESTABLISHED + b"\0"
        assert asked == ["example.org"]
        async with opened([f"127.0.0.1:{server}"], resolver=resolver) as world:  # the rule is the address itself
            request = connect(f"127.0.0.1:{server}") + b"\0"
            assert await talk(world.ports[0], request, end=True) == ESTABLISHED + b"\0"
        assert asked == ["example.org"]


@on_loop
async def test_who_cannot_be_reached_is_502_and_who_does_not_answer_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "forbidden_address", lambda *_: "")

    async def resolver(host: str, port: int) -> list[str]:
        if host == "slow.example.org":
            await asyncio.sleep(30)
        if host == "none.example.org":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    options = {"resolver": resolver, "limits": GateLimits(connect_s=0.1)}
    async with opened(["*.example.org:1"], **options) as world:
        for host, status, text in [("slow", 504, "did not"), ("none", 502, "not known"), ("shut", 502, "refused")]:
            answer = (await talk(world.ports[0], connect(f"{host}.example.org:1"))).decode()
            assert answer.startswith(f"HTTP/1.1 {status} ")
            assert text in answer


@on_loop
async def test_a_machine_behind_a_proxy_dials_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        asked.append(head)
        known = b"Basic bWU6YSBi" in head  # me:a b
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" if known else b"HTTP/1.1 407 Who\r\n\r\n")
        await (echo(reader, writer) if known else writer.drain())

    async def resolver(host: str, port: int) -> list[str]:
        if host == "inside.example.org":
            return ["127.0.0.1"]
        raise socket.gaierror(socket.EAI_NONAME, "no names here")

    async with serving(proxy) as port, serving(echo) as near:
        for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("https_proxy", f"http://me:a%20b@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        rules = ["example.org:9", "inside.example.org:9", f"127.0.0.1:{near}"]
        async with opened(rules, resolver=resolver, upstream_proxy="environment") as world:
            request = connect("example.org:9") + b"\0hello"
            assert await talk(world.ports[0], request, end=True) == ESTABLISHED + b"\0hello"
            request = connect(f"127.0.0.1:{near}") + b"\0"
            assert await talk(world.ports[0], request, end=True) == ESTABLISHED + b"\0"
            assert b" 403 " in await talk(world.ports[0], connect("inside.example.org:9"))
        assert len(asked) == 1
        async with opened(rules, resolver=resolver, upstream_proxy=f"127.0.0.1:{port}") as world:
            assert b"answered 407" in await talk(world.ports[0], connect("example.org:9"))
    with pytest.raises(InputError, match="http://host:port"):
        Gate(Policy(), print, upstream_proxy="socks5://127.0.0.1:1")


# -- transparent


@on_loop
async def test_an_address_that_stands_for_a_host_is_for_that_host_alone() -> None:
    tls = Listen("tcp", "198.18.1.1", 443, "carry", "example.org")
    web = Listen("tcp", "198.18.1.1", 8080, "carry", "example.org")
    rules = ["example.org", "example.org:8080", "other.example:8080"]
    good, bad, bare = client_hello("example.org"), client_hello("other.example"), client_hello(None)
    async with serving(echo) as server, opened(rules, (tls, web), server) as world:
        for port in world.ports:
            assert await talk(port, good, end=True) == good
            assert await talk(port, bad, end=True) == b""
        assert await talk(world.ports[0], bare, end=True) == b""
        assert await talk(world.ports[1], bare, end=True) == bare
        assert await talk(world.ports[0], b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n") == b""
        assert await talk(world.ports[1], b"\0binary", end=True) == b"\0binary"
        assert {facts["way"] for facts in await world.settled(8)} == {"carry"}
        assert sum(facts["allowed"] for facts in world.records) == 4


@on_loop
async def test_carried_http_must_be_for_the_host_in_every_request() -> None:
    seen: list[bytes] = []
    exact = Listen("tcp", "198.18.1.1", 80, "carry", "example.org")
    wild = Listen("tcp", "198.18.0.1", 80, "carry")
    mine = b"GET /?q HTTP/1.1\r\nHost: example.org\r\nCookie: s\r\n\r\n"
    theirs = b"GET /?q HTTP/1.1\r\nHost: a.example.org\r\n\r\n"
    rules = ["example.org:80", "*.example.org:80"]
    async with serving(http_server(OK, seen)) as server, opened(rules, (exact, wild), server) as world:
        answer = await talk(world.ports[0], mine + mine + theirs)
        assert answer.count(b"200 OK") == 2
        assert b"403" not in answer
        assert await talk(world.ports[0], theirs) == b""
        assert (await talk(world.ports[1], theirs, end=True)).endswith(b"ok")
        assert await talk(world.ports[1], theirs.replace(b"example", b"evil")) == b""
        assert await talk(world.ports[1], b"GET / HTTP/1.0\r\n\r\n") == b""
        records = await world.settled(6)
    assert all(b"Cookie" not in head for head in seen)
    assert [facts["allowed"] for facts in records] == [True, True, False, False, True, False, False]


@on_loop
async def test_the_wildcard_address_takes_the_host_from_the_client() -> None:
    wild = Listen("tcp", "198.18.0.1", 443, "carry")
    good = client_hello("a.example.org")
    async with serving(echo) as server, opened(["*.example.org"], (wild,), server) as world:
        assert await talk(world.ports[0], good[:50], good[50:], end=True) == good
        for first in (client_hello("example.org"), client_hello(None), b"SSH-2.0-x\r\n", b"", good[:80]):
            assert await talk(world.ports[0], first, end=True) == b""
        assert world.dialled == [("a.example.org", 443)]
        assert [facts["allowed"] for facts in await world.settled(6)] == [True] + [False] * 5


def dns_query(name: str, kind: int = egress.A) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


@on_loop
async def test_names_are_answered_over_udp_and_tcp() -> None:
    listens = (Listen("udp", "127.0.0.1", 53, "dns"), Listen("tcp", "127.0.0.1", 53, "dns"))
    async with opened(["example.org", "*.example.org"], listens, 1) as world:
        loop = asyncio.get_running_loop()
        sock = socket.socket(type=socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.connect(("127.0.0.1", world.ports[0]))

        async def ask(packet: bytes) -> bytes:
            await loop.sock_sendall(sock, packet)
            async with asyncio.timeout(5):
                udp = await loop.sock_recv(sock, 512)
            framed = struct.pack(">H", len(packet)) + packet
            tcp = await talk(world.ports[1], framed[:1], framed[1:] + framed, end=True)
            assert tcp == (struct.pack(">H", len(udp)) + udp) * 2
            return udp

        assert (await ask(dns_query("EXAMPLE.org")))[-4:] == bytes([198, 18, 1, 1])
        assert (await ask(dns_query("a.example.org")))[-4:] == bytes([198, 18, 0, 1])
        empty = await ask(dns_query("example.org", egress.AAAA))
        assert (empty[3] & 15, empty[7]) == (egress.NOERROR, 0)
        assert (await ask(dns_query("evil.example")))[3] & 15 == egress.NXDOMAIN
        assert (await ask(dns_query("evil.example", egress.AAAA)))[3] & 15 == egress.NXDOMAIN
        assert (await ask(dns_query("a")[:12]))[3] & 15 == egress.FORMERR
        sock.close()
        (facts,) = world.records
        assert (facts["way"], facts["host"], facts["allowed"]) == ("dns", "evil.example", False)


# -- what cannot hurt


@on_loop
async def test_two_hundred_connections_at_once_all_come_through() -> None:
    async with serving(echo) as server, opened(["example.org:9"], server=server) as world:
        request, body = connect("example.org:9"), b"\0" * 20_000
        answers = await asyncio.gather(*(talk(world.ports[0], request + body, end=True) for _ in range(200)))
        assert set(answers) == {ESTABLISHED + body}
        assert len(await world.settled(200)) == 200


@on_loop
async def test_more_connections_than_allowed_wait_for_their_turn() -> None:
    limits = GateLimits(connections=2)
    async with serving(echo) as server, opened(["example.org:9"], server=server, limits=limits) as world:
        held = [await asyncio.open_connection("127.0.0.1", world.ports[0]) for _ in range(2)]
        for _, writer in held:
            writer.write(connect("example.org:9"))
        waiting = asyncio.create_task(talk(world.ports[0], connect("example.org:9") + b"\0", end=True))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert len(world.dialled) == 2
        held[0][1].transport.abort()
        assert await waiting == ESTABLISHED + b"\0"
        held[1][1].transport.abort()


@on_loop
async def test_who_is_slow_with_a_head_or_silent_for_long_is_let_go() -> None:
    limits = GateLimits(header_s=0.2, idle_s=0.3)
    rules = ["example.org:9", "example.org"]
    async with serving(echo) as server, opened(rules, server=server, limits=limits) as world:
        drip = [bytes([byte]) for byte in get("http://example.org/", "X: " + "a" * 60)]
        started = time.monotonic()
        assert (await talk(world.ports[0], *drip)).startswith(b"HTTP/1.1 408 ")
        assert await talk(world.ports[0]) == b""
        assert await talk(world.ports[0], connect("example.org:443") + b"\x16\x03") == ESTABLISHED
        assert await talk(world.ports[0], connect("example.org:9") + b"\0") == ESTABLISHED + b"\0"
        assert time.monotonic() - started < 3
        reasons = [facts.get("reason") or facts["error"] for facts in await world.settled(3)]
        assert reasons == ["nothing came for too long", "no ClientHello in 0.2 s", "nothing came for too long"]


@on_loop
async def test_a_reader_that_does_not_read_stops_the_writer() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(bytes(1 << 18))
            await writer.drain()
            sent += 1 << 18

    async with serving(flood) as server, opened(["example.org:9"], server=server) as world:
        _, writer = await asyncio.open_connection("127.0.0.1", world.ports[0], limit=1 << 12)
        writer.write(connect("example.org:9"))
        before = -1
        while sent != before:  # until the kernel's buffers are full
            before = sent
            await asyncio.sleep(0.2)
        assert 0 < sent < 64 << 20
        writer.transport.abort()
        await world.settled()


@on_loop
async def test_the_byte_limit_of_a_pod_holds_over_all_its_connections() -> None:
    limits = GateLimits(total_bytes=50_000)
    async with serving(echo) as server, opened(["example.org:9"], server=server, limits=limits) as world:
        request = connect("example.org:9") + b"\0" * 20_000
        assert len(await talk(world.ports[0], request, end=True)) == len(ESTABLISHED) + 20_000
        await talk(world.ports[0], request, end=True)
        assert b" 403 " in await talk(world.ports[0], request, end=True)
        assert "50000 bytes" in (await world.settled(3))[1]["error"]


@on_loop
async def test_closing_ends_what_is_under_way_at_once_and_tells_it() -> None:
    async with serving(echo) as server, opened(["example.org:9"], server=server) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.ports[0])
        writer.write(connect("example.org:9") + b"\0hello")
        assert await reader.readexactly(len(ESTABLISHED) + 6) == ESTABLISHED + b"\0hello"
        idle = await asyncio.open_connection("127.0.0.1", world.ports[0])
        await asyncio.sleep(0.02)
        await world.gate.close()
        for stream in (reader, idle[0]):
            with contextlib.suppress(ConnectionError):
                assert await stream.read() == b""
        writer.close(), idle[1].close()
        (facts,) = world.records
        assert (facts["up"], facts["down"], facts["error"]) == (6, 6, "the gate was closed")


@on_loop
async def test_no_connection_and_no_record_can_kill_the_gate(caplog: pytest.LogCaptureFixture) -> None:
    seed = 20261115
    rng = random.Random(seed)
    wild = Listen("tcp", "198.18.0.1", 8080, "carry")
    names = Listen("tcp", "127.0.0.1", 53, "dns")
    rules = ["example.org:9", "*.example.org:8080"]
    seeds = [
        connect("example.org:9"),
        get("http://example.org:9/"),
        client_hello("a.example.org"),
        dns_query("a.b"),
    ]
    async with serving(echo) as server, opened(rules, (PROXY, wild, names), server) as world:
        for _ in range(150):
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randrange(5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            await talk(rng.choice(world.ports), bytes(data), end=True)
        assert (await talk(world.ports[0], seeds[0] + b"\0", end=True)).endswith(b"\0"), seed
        assert caplog.records == [], seed

    async with serving(echo) as server, opened(rules, server=server, record=lambda facts: 1 / 0) as world:
        for _ in range(2):
            assert (await talk(world.ports[0], seeds[0] + b"\0", end=True)).endswith(b"\0")
    assert "was not taken" in caplog.text


@on_loop
async def test_a_socket_of_the_wrong_kind_is_named() -> None:
    sock = socket.socket(type=socket.SOCK_DGRAM)
    with pytest.raises(InputError, match="another type"):
        await Gate(Policy(), print, upstream_proxy="").start([(PROXY, sock)])
    assert sock.fileno() == -1
