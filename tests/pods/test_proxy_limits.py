"""Truths about what cannot hurt the gate of a pod: crowds, silence, floods, rubbish, and its own end."""

import asyncio
import contextlib
import random
import socket
import time

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
    get,
    on_loop,
    opened,
    serving,
    talk,
)


@on_loop
async def test_two_hundred_connections_at_once_all_come_through() -> None:
    async with serving(echo) as server, opened(["example.org:9"], server=server) as world:
        request, body = connect("example.org:9"), b"\0" * 20_000
        answers = await asyncio.gather(*(talk(world.ports[0], request + body, end=True) for _ in range(200)))
        assert set(answers) == {ESTABLISHED + body}
        assert len(await world.settled(200)) == 200


@on_loop
async def test_more_connections_than_allowed_wait_for_their_turn() -> None:
    limits = EgressLimits(connections=2)
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
    limits = EgressLimits(header_s=0.2, idle_s=0.3)
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
    limits = EgressLimits(total_bytes=50_000)
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
    wild = ListenSpec("tcp", "198.18.0.1", 8080, "carry")
    names = ListenSpec("tcp", "127.0.0.1", 53, "dns")
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
        await EgressProxy(EgressPolicy(), print, upstream_proxy="").start([(PROXY, sock)])
    assert sock.fileno() == -1
