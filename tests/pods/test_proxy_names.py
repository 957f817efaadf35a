"""Names in the egress proxy: what they resolve to, and the addresses that stand for hosts."""

import asyncio
import socket
import struct

import pytest

from etude.errors import InputError
from etude.pods.network import policy as egress
from etude.pods.network.policy import EgressPolicy, ListenSpec
from etude.pods.network.proxy import EgressLimits, EgressProxy
from tests.pods.egress_proxy import (
    ESTABLISHED,
    OK,
    client_hello,
    connect,
    dns_query,
    echo,
    exchange,
    http_server,
    on_loop,
    running_proxy,
    running_server,
)

# -- resolving


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::ffff:127.0.0.1", "fd00::1"])
@on_loop
async def test_a_name_that_resolves_to_an_internal_address_is_refused(address: str) -> None:
    async def resolver(host: str, port: int) -> list[str]:
        return [address]

    async with running_server(echo) as server, running_proxy([f"*.example.org:{server}"], resolver=resolver) as running:
        answer = await exchange(running.ports[0], connect(f"rebind.example.org:{server}"))
        assert answer.startswith(b"HTTP/1.1 403 ")
        record = (await running.wait_for_records())[0]
        assert not record["allowed"]
        assert address in record["reason"]


@on_loop
async def test_a_name_is_resolved_once_and_the_checked_address_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "forbidden_address", lambda *_: "")  # the servers of this test are on this machine
    asked: list[str] = []

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.77", "127.0.0.1"]  # no server listens on the first

    async with running_server(echo) as server:
        authority = f"example.org:{server}"
        async with running_proxy([authority], resolver=resolver) as running:
            assert await exchange(running.ports[0], connect(authority) + b"\0", end=True) == ESTABLISHED + b"\0"
        assert asked == ["example.org"]
        async with running_proxy(
            [f"127.0.0.1:{server}"], resolver=resolver
        ) as running:  # the rule is the address itself
            request = connect(f"127.0.0.1:{server}") + b"\0"
            assert await exchange(running.ports[0], request, end=True) == ESTABLISHED + b"\0"
        assert asked == ["example.org"]


@on_loop
async def test_an_unreachable_host_is_502_and_a_timeout_504(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "forbidden_address", lambda *_: "")

    async def resolver(host: str, port: int) -> list[str]:
        if host == "slow.example.org":
            await asyncio.sleep(30)
        if host == "none.example.org":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ["127.0.0.1"]

    options = {"resolver": resolver, "limits": EgressLimits(connect_s=0.1)}
    async with running_proxy(["*.example.org:1"], **options) as running:
        for host, status, text in [("slow", 504, "did not"), ("none", 502, "not known"), ("shut", 502, "refused")]:
            answer = (await exchange(running.ports[0], connect(f"{host}.example.org:1"))).decode()
            assert answer.startswith(f"HTTP/1.1 {status} ")
            assert text in answer


@on_loop
async def test_a_machine_behind_a_proxy_connects_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
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

    async with running_server(proxy) as port, running_server(echo) as near:
        for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("https_proxy", f"http://me:a%20b@127.0.0.1:{port}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        rules = ["example.org:9", "inside.example.org:9", f"127.0.0.1:{near}"]
        async with running_proxy(rules, resolver=resolver, upstream_proxy="environment") as running:
            request = connect("example.org:9") + b"\0hello"
            assert await exchange(running.ports[0], request, end=True) == ESTABLISHED + b"\0hello"
            request = connect(f"127.0.0.1:{near}") + b"\0"
            assert await exchange(running.ports[0], request, end=True) == ESTABLISHED + b"\0"
            assert b" 403 " in await exchange(running.ports[0], connect("inside.example.org:9"))
        assert len(asked) == 1
        async with running_proxy(rules, resolver=resolver, upstream_proxy=f"127.0.0.1:{port}") as running:
            assert b"answered 407" in await exchange(running.ports[0], connect("example.org:9"))
    with pytest.raises(InputError, match="http://host:port"):
        EgressProxy(EgressPolicy(), print, upstream_proxy="socks5://127.0.0.1:1")


# -- transparent


@on_loop
async def test_an_address_that_stands_for_a_host_accepts_only_that_host() -> None:
    tls = ListenSpec("tcp", "198.18.1.1", 443, "carry", "example.org")
    web = ListenSpec("tcp", "198.18.1.1", 8080, "carry", "example.org")
    rules = ["example.org", "example.org:8080", "other.example:8080"]
    good, bad, bare = client_hello("example.org"), client_hello("other.example"), client_hello(None)
    async with running_server(echo) as server, running_proxy(rules, (tls, web), server) as running:
        for port in running.ports:
            assert await exchange(port, good, end=True) == good
            assert await exchange(port, bad, end=True) == b""
        assert await exchange(running.ports[0], bare, end=True) == b""
        assert await exchange(running.ports[1], bare, end=True) == bare
        assert await exchange(running.ports[0], b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n") == b""
        assert await exchange(running.ports[1], b"\0binary", end=True) == b"\0binary"
        assert {record["way"] for record in await running.wait_for_records(8)} == {"carry"}
        assert sum(record["allowed"] for record in running.records) == 4


@on_loop
async def test_every_http_request_must_be_for_the_host_of_its_address() -> None:
    seen: list[bytes] = []
    exact = ListenSpec("tcp", "198.18.1.1", 80, "carry", "example.org")
    wildcard = ListenSpec("tcp", "198.18.0.1", 80, "carry")
    mine = b"GET /?q HTTP/1.1\r\nHost: example.org\r\nCookie: s\r\n\r\n"
    theirs = b"GET /?q HTTP/1.1\r\nHost: a.example.org\r\n\r\n"
    rules = ["example.org:80", "*.example.org:80"]
    async with (
        running_server(http_server(OK, seen)) as server,
        running_proxy(rules, (exact, wildcard), server) as running,
    ):
        answer = await exchange(running.ports[0], mine + mine + theirs)
        assert answer.count(b"200 OK") == 2
        assert b"403" not in answer
        assert await exchange(running.ports[0], theirs) == b""
        assert (await exchange(running.ports[1], theirs, end=True)).endswith(b"ok")
        assert await exchange(running.ports[1], theirs.replace(b"example", b"evil")) == b""
        assert await exchange(running.ports[1], b"GET / HTTP/1.0\r\n\r\n") == b""
        records = await running.wait_for_records(6)
    assert all(b"Cookie" not in head for head in seen)
    assert [record["allowed"] for record in records] == [True, True, False, False, True, False, False]


@on_loop
async def test_the_wildcard_address_takes_the_host_from_the_client_hello() -> None:
    wildcard = ListenSpec("tcp", "198.18.0.1", 443, "carry")
    good = client_hello("a.example.org")
    async with running_server(echo) as server, running_proxy(["*.example.org"], (wildcard,), server) as running:
        assert await exchange(running.ports[0], good[:50], good[50:], end=True) == good
        for first in (client_hello("example.org"), client_hello(None), b"SSH-2.0-x\r\n", b"", good[:80]):
            assert await exchange(running.ports[0], first, end=True) == b""
        assert running.connected == [("a.example.org", 443)]
        assert [record["allowed"] for record in await running.wait_for_records(6)] == [True] + [False] * 5


@on_loop
async def test_dns_is_answered_over_udp_and_tcp() -> None:
    listen_specs = (ListenSpec("udp", "127.0.0.1", 53, "dns"), ListenSpec("tcp", "127.0.0.1", 53, "dns"))
    async with running_proxy(["example.org", "*.example.org"], listen_specs, 1) as running:
        loop = asyncio.get_running_loop()
        sock = socket.socket(type=socket.SOCK_DGRAM)
        sock.setblocking(False)
        sock.connect(("127.0.0.1", running.ports[0]))

        async def ask(packet: bytes) -> bytes:
            await loop.sock_sendall(sock, packet)
            async with asyncio.timeout(5):
                udp = await loop.sock_recv(sock, 512)
            framed = struct.pack(">H", len(packet)) + packet
            tcp = await exchange(running.ports[1], framed[:1], framed[1:] + framed, end=True)
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
        (record,) = running.records
        assert (record["way"], record["host"], record["allowed"]) == ("dns", "evil.example", False)
