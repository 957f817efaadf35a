"""The egress proxy under many connections, idle and slow clients, floods, random bytes, and closing."""

import asyncio
import contextlib
import random
import socket

import pytest

from etude.errors import InputError
from etude.pods.network.policy import EgressPolicy, ListenSpec
from etude.pods.network.proxy import EgressLimits, EgressProxy
from tests.pods.egress_proxy import (
    ESTABLISHED,
    PROXY,
    client_hello,
    connect,
    dns_query,
    echo,
    exchange,
    get,
    on_loop,
    running_proxy,
    running_server,
)


@on_loop
async def test_two_hundred_concurrent_connections_are_forwarded() -> None:
    async with running_server(echo) as server, running_proxy(["example.org:9"], server=server) as running:
        request, body = connect("example.org:9"), b"\0" * 20_000
        answers = await asyncio.gather(*(exchange(running.ports[0], request + body, end=True) for _ in range(200)))
        assert set(answers) == {ESTABLISHED + body}
        assert len(await running.wait_for_records(200)) == 200


@on_loop
async def test_connections_over_the_limit_wait() -> None:
    limits = EgressLimits(connections=2)
    async with (
        running_server(echo) as server,
        running_proxy(["example.org:9"], server=server, limits=limits) as running,
    ):
        held = [await asyncio.open_connection("127.0.0.1", running.ports[0]) for _ in range(2)]
        for _, writer in held:
            writer.write(connect("example.org:9"))
        waiting = asyncio.create_task(exchange(running.ports[0], connect("example.org:9") + b"\0", end=True))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        assert len(running.connected) == 2
        held[0][1].transport.abort()
        assert await waiting == ESTABLISHED + b"\0"
        held[1][1].transport.abort()


@on_loop
async def test_a_slow_head_or_an_idle_connection_times_out() -> None:
    limits = EgressLimits(header_s=0.2, idle_s=0.3)
    rules = ["example.org:9", "example.org"]
    async with running_server(echo) as server, running_proxy(rules, server=server, limits=limits) as running:
        drip = [bytes([byte]) for byte in get("http://example.org/", "X: " + "a" * 60)]
        assert (await exchange(running.ports[0], *drip)).startswith(b"HTTP/1.1 408 ")
        assert await exchange(running.ports[0]) == b""
        assert await exchange(running.ports[0], connect("example.org:443") + b"\x16\x03") == ESTABLISHED
        assert await exchange(running.ports[0], connect("example.org:9") + b"\0") == ESTABLISHED + b"\0"
        reasons = [record.get("reason") or record["error"] for record in await running.wait_for_records(3)]
        assert reasons == ["nothing came for too long", "no ClientHello in 0.2 s", "nothing came for too long"]


@on_loop
async def test_a_client_that_does_not_read_stops_the_server() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        while True:
            writer.write(bytes(1 << 18))
            await writer.drain()
            sent += 1 << 18

    async with running_server(flood) as server, running_proxy(["example.org:9"], server=server) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.ports[0], limit=1 << 12)
        writer.write(connect("example.org:9"))
        before = -1
        while sent != before:  # until the kernel's buffers are full
            before = sent
            await asyncio.sleep(0.2)
        assert 0 < sent < 64 << 20
        writer.transport.abort()
        await running.wait_for_records()


@on_loop
async def test_closing_aborts_open_connections_and_records_them() -> None:
    async with running_server(echo) as server, running_proxy(["example.org:9"], server=server) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.ports[0])
        writer.write(connect("example.org:9") + b"\0hello")
        assert await reader.readexactly(len(ESTABLISHED) + 6) == ESTABLISHED + b"\0hello"
        idle = await asyncio.open_connection("127.0.0.1", running.ports[0])
        await asyncio.sleep(0.02)
        await running.proxy.close()
        for stream in (reader, idle[0]):
            with contextlib.suppress(ConnectionError):
                assert await stream.read() == b""
        writer.close(), idle[1].close()
        (record,) = running.records
        assert (record["up"], record["down"], record["error"]) == (6, 6, "the egress proxy was closed")


@on_loop
async def test_random_bytes_and_a_failing_record_do_not_stop_the_proxy(caplog: pytest.LogCaptureFixture) -> None:
    seed = 20261115
    rng = random.Random(seed)
    wildcard = ListenSpec("tcp", "198.18.0.1", 8080, "carry")
    names = ListenSpec("tcp", "127.0.0.1", 53, "dns")
    rules = ["example.org:9", "*.example.org:8080"]
    seeds = [
        connect("example.org:9"),
        get("http://example.org:9/"),
        client_hello("a.example.org"),
        dns_query("a.b"),
    ]
    async with running_server(echo) as server, running_proxy(rules, (PROXY, wildcard, names), server) as running:
        for _ in range(150):
            data = bytearray(rng.choice(seeds))
            for _ in range(rng.randrange(5)):
                data[rng.randrange(len(data))] = rng.randrange(256)
            await exchange(rng.choice(running.ports), bytes(data), end=True)
        assert (await exchange(running.ports[0], seeds[0] + b"\0", end=True)).endswith(b"\0"), seed
        assert caplog.records == [], seed

    async with running_server(echo) as server, running_proxy(rules, server=server, record=lambda _: 1 / 0) as running:
        for _ in range(2):
            assert (await exchange(running.ports[0], seeds[0] + b"\0", end=True)).endswith(b"\0")
    assert "could not be recorded" in caplog.text


@on_loop
async def test_a_socket_of_the_wrong_type_is_an_input_error() -> None:
    sock = socket.socket(type=socket.SOCK_DGRAM)
    with pytest.raises(InputError, match="another type"):
        await EgressProxy(EgressPolicy(), print, upstream_proxy="").start([(PROXY, sock)])
    assert sock.fileno() == -1
