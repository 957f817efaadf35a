"""CONNECT and plain HTTP through the egress proxy, on real local sockets; no test needs a network."""

import asyncio
import socket
import struct

import pytest

from etude.pods.network.policy import ListenSpec
from tests.pods.egress_proxy import (
    ESTABLISHED,
    OK,
    PROXY,
    client_hello,
    connect,
    echo,
    exchange,
    get,
    http_server,
    on_loop,
    running_proxy,
    running_server,
)

# -- CONNECT


@on_loop
async def test_connect_forwards_tls_to_the_named_host() -> None:
    hello = client_hello("example.org")
    async with running_server(echo) as server, running_proxy(["example.org"], server=server) as running:
        for pieces in ([connect("Example.org:443"), hello], [connect("example.org:443") + hello[:9], hello[9:]]):
            assert await exchange(running.ports[0], *pieces, end=True) == ESTABLISHED + hello
        record = (await running.wait_for_records(2))[0]
        assert running.connected == [("example.org", 443)] * 2
        assert record.pop("seconds") >= 0
        size = len(hello)
        assert record == {
            "kind": "egress", "way": "connect", "host": "example.org", "port": 443, "allowed": True,
            "rule": "example.org:443", "up": size, "down": size,
        }  # fmt: skip


@pytest.mark.parametrize("authority", ["evil.example:443", "example.org:80", "[2001:db8::1]:443", "169.254.169.254:80"])
@on_loop
async def test_a_refusal_names_the_rule_to_add(authority: str) -> None:
    async with running_proxy(["example.org"], server=1) as running:
        answer = await exchange(running.ports[0], connect(authority))
        assert answer.startswith(b"HTTP/1.1 403 ")
        assert f"add the rule {authority!r}".encode() in answer
        assert running.connected == []
        (record,) = await running.wait_for_records()
        assert (record["allowed"], record["rule"], record["reason"][:7]) == (False, None, "no rule")


@pytest.mark.parametrize(
    ("authority", "first", "reason"),
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
async def test_a_tunnel_is_refused_if_the_client_hello_does_not_match_its_host(
    authority: str, first: bytes, reason: str
) -> None:
    async with (
        running_server(echo) as server,
        running_proxy(["example.org", "example.org:8443"], server=server) as running,
    ):
        assert await exchange(running.ports[0], connect(authority) + first, end=True) in (ESTABLISHED, b"")
        (record,) = await running.wait_for_records()
        assert not record["allowed"]
        assert reason in record["reason"]
        assert record["up"] == 0


@on_loop
async def test_tls_without_a_server_name_is_forwarded_to_other_ports_and_noted() -> None:
    hello = client_hello(None)
    async with (
        running_server(echo) as server,
        running_proxy(["example.org:8443", "192.0.2.7:443"], server=server) as running,
    ):
        for authority in ("example.org:8443", "192.0.2.7:443"):
            assert await exchange(running.ports[0], connect(authority) + hello, end=True) == ESTABLISHED + hello
        assert [record["note"] for record in await running.wait_for_records(2)] == ["TLS without a server name"] * 2


@on_loop
async def test_a_server_may_send_first() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 hello\r\n")
        writer.write(b"you said " + await reader.readline())
        await writer.drain()

    carry = ListenSpec("tcp", "198.18.1.1", 22, "carry", "example.org")
    async with running_server(greet) as server, running_proxy(["example.org:22"], (PROXY, carry), server) as running:
        for port, start in ((running.ports[0], ESTABLISHED), (running.ports[1], b"")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if start:
                writer.write(connect("example.org:22"))
            assert await reader.readexactly(len(start) + 11) == start + b"220 hello\r\n"
            writer.write(b"EHLO\r\n")
            assert await reader.read() == b"you said EHLO\r\n"
            writer.close()


@on_loop
async def test_each_direction_can_end_before_the_other() -> None:
    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.read()  # to the client's end
        writer.write(b"%d" % len(data))
        await writer.drain()

    async def end_first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write_eof()
        heard.append(await reader.read())

    heard: list[bytes] = []
    async with running_server(count) as server, running_proxy(["example.org:9"], server=server) as running:
        request = connect("example.org:9") + b"\0" * 100_000
        assert await exchange(running.ports[0], request, end=True) == ESTABLISHED + b"100000"
    async with running_server(end_first) as server, running_proxy(["example.org:9"], server=server) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.ports[0])
        writer.write(connect("example.org:9"))
        assert await reader.read() == ESTABLISHED
        writer.write(b"\0still here")
        writer.write_eof()
        assert (await running.wait_for_records())[0]["up"] == 11
        writer.close()
    assert heard == [b"\0still here"]


# -- plain HTTP


@on_loop
async def test_each_request_of_a_connection_is_decided_and_stripped_of_sensitive_headers() -> None:
    seen: list[bytes] = []
    secret = ("Authorization: Bearer s", "Cookie: s", "X-Api-Key: s", "Proxy-Authorization: s")
    hops = ("Connection: keep-alive, X-Hop", "X-Hop: 1", "TE: trailers", "Upgrade: websocket", "Accept: */*")
    one = get("http://example.org/a?token=s", *secret, *hops)
    async with (
        running_server(http_server(OK, seen)) as server,
        running_proxy(["example.org:80"], server=server) as running,
    ):
        answer = await exchange(running.ports[0], one + get("http://example.org/b") + get("http://evil.example/c?s"))
        assert answer.count(b"HTTP/1.1 200 OK") == 2
        assert answer.count(b"Connection: keep-alive") == 2
        assert b"HTTP/1.1 403 " in answer
        records = await running.wait_for_records(3)
    first = b"GET /a?token=s HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    assert seen == [first, b"GET /b HTTP/1.1\r\nHost: example.org\r\nConnection: close\r\n\r\n"]
    assert [record["allowed"] for record in records] == [True, True, False]
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
async def test_an_ambiguous_request_is_never_forwarded(request_bytes: bytes) -> None:
    async with running_proxy(["example.org:80", "example.org"], server=1) as running:
        assert (await exchange(running.ports[0], request_bytes)).startswith(b"HTTP/1.1 400 ")
        assert running.connected == []
        (record,) = await running.wait_for_records()
        assert not record["allowed"]
        assert "secret" not in repr(record)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: 1\r\n\r\n",
            b"3\r\nabc\r\n0\r\n\r\n",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"\r\n\r\nok"),
        (b"HTTP/1.0 200\r\n\r\nuntil the end", b"\r\nd\r\nuntil the end\r\n0\r\n\r\n"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"keep-alive\r\n\r\n"),
    ],
)
@on_loop
async def test_responses_of_every_framing_are_forwarded(answer: bytes, expected: bytes) -> None:
    seen: list[bytes] = []
    async with (
        running_server(http_server(answer, seen)) as server,
        running_proxy(["example.org:80"], server=server) as running,
    ):
        got = await exchange(running.ports[0], get("http://example.org/"), end=True)
        assert got.startswith(b"HTTP/1.1 20")
        assert got.endswith(expected)
        assert (await running.wait_for_records())[0]["allowed"]


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
async def test_an_invalid_response_becomes_502(answer: bytes) -> None:
    async with (
        running_server(http_server(answer, [])) as server,
        running_proxy(["example.org:80"], server=server) as running,
    ):
        assert (await exchange(running.ports[0], get("http://example.org/"))).startswith(b"HTTP/1.1 502 ")
        record = (await running.wait_for_records())[0]
        assert record["allowed"]
        assert record["error"]


@on_loop
async def test_a_truncated_response_does_not_look_complete() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await writer.drain()
        await asyncio.sleep(0.05)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with running_server(reset) as server, running_proxy(["example.org:80"], server=server) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.ports[0])
        writer.write(get("http://example.org/"))
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert "broke" in (await running.wait_for_records())[0]["error"]


@on_loop
async def test_bodies_are_uploaded_chunked_and_whole_and_an_early_response_is_forwarded() -> None:
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

    async with running_server(post) as server, running_proxy(["example.org:80"], server=server) as running:
        port = running.ports[0]
        chunked = head("/", "Transfer-Encoding: chunked") + b"5;ext\r\nhello\r\n0\r\nTrailer: x\r\n\r\n"
        whole = head("/", "Content-Length: 5", "Expect: 100-continue") + b"world"
        answer = await exchange(port, chunked + whole, end=True)
        assert b"5\r\nhello\r\n0\r\n\r\nHTTP/1.1 100 Continue" in answer
        assert answer.endswith(b"world")
        early = head("/early", "Content-Length: 900000000") + b"x" * 500_000
        assert b" 413 " in await exchange(port, early)
        bodies = [b"5\r\nhelloXX", b"\r\n", b"-1\r\n", b"0x1\r\n", b"1 2\r\n", b"1" * 21 + b"\r\n", b"1\n\r\n"]
        for body in bodies:
            assert b" 400 " in await exchange(port, head("/", "Transfer-Encoding: chunked") + body)
        records = await running.wait_for_records(3 + len(bodies))
        assert [record.get("error", "")[:3] for record in records] == ["", "", ""] + ["bad"] * len(bodies)
