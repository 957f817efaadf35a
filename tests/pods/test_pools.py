"""Warm pools: a request claims a pod of exactly its kind that was started and prepared in advance."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.pods.fleet import Fleet, open_fleet
from etude.pods.host import Host
from etude.pods.pod import Limits, Pod, PodError
from tests.pods.serving import need_namespaces


async def start_server(pod: Pod) -> str:
    """Stand for a tool server: it leaves a process and a file in the pod."""
    await pod.exec("echo started >> log; sleep 600 &")
    return f"server of {pod.id}"


def on_fleet(state: Path, act: Callable[[Fleet, Host], Awaitable[None]]) -> None:
    need_namespaces()

    async def main() -> None:
        async with asyncio.timeout(60), open_fleet("namespace", state=state) as fleet:
            assert fleet.local is not None
            await act(fleet, fleet.local)
        await fleet.local.backend.shutdown()

    asyncio.run(main())


async def filled(host: Host, ready: int) -> list[str]:
    """Wait until the pools of a host have this many pods; return their ids."""
    while sum(len(pool.ready) for pool in host.pools.values()) != ready:
        await asyncio.sleep(0.01)
    return [pod.id for pool in host.pools.values() for pod in pool.ready]


def test_a_claimed_pod_was_prepared_once_in_advance(state: Path) -> None:
    async def act(fleet: Fleet, host: Host) -> None:
        await fleet.pool("host", 2, prepare=start_server)
        warm = await filled(host, 2)
        plain = await fleet.create("host")
        assert (plain.id in warm, plain.prepared) == (False, None), "it was not asked to be prepared"
        pod = await fleet.create("host", prepare=start_server, ttl=300)
        assert pod.id == warm[0]
        assert pod.prepared == f"server of {pod.id}"
        assert await pod.read("log") == b"started\n"
        assert (await filled(host, 2))[0] == warm[1]
        await fleet.pool("host", 0, prepare=start_server)
        cold = await fleet.create("host", prepare=start_server)
        assert (cold.prepared, await cold.read("log")) == (f"server of {cold.id}", b"started\n")

    on_fleet(state, act)


def test_pools_of_one_image_are_told_apart_by_their_limits(state: Path) -> None:
    async def act(fleet: Fleet, host: Host) -> None:
        small, large = Limits(pids=100), Limits(pids=200)
        await fleet.pool("host", 1, limits=small)
        await fleet.pool("host", 2, limits=large)
        warm = await filled(host, 3)
        assert host.report().warm["host"] == 3
        pod = await fleet.create("host", limits=large)
        assert pod.id in warm
        assert pod.limits.pids == large.pids

    on_fleet(state, act)


def test_the_refill_starts_after_the_claim(state: Path) -> None:
    async def act(fleet: Fleet, host: Host) -> None:
        await fleet.pool("host", 1)
        (warm,) = await filled(host, 1)
        pod = await fleet.create("host")
        assert [path.name for path in (state / "pods").iterdir()] == [pod.id] == [warm]
        await filled(host, 1)

    on_fleet(state, act)


def test_a_pod_that_cannot_be_prepared_is_closed_and_the_next_claim_tries_again(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(fleet: Fleet, host: Host) -> None:
        broken = True

        async def prepare(pod: Pod) -> str:
            if broken:
                raise PodError("no server in this image")
            return "well"

        await fleet.pool("host", 1, prepare=prepare)
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert "0 of 1 pods until its next claim: no server in this image" in caplog.text
        with pytest.raises(PodError, match="no server in this image"):
            await fleet.create("host", prepare=prepare)
        broken = False
        assert (await fleet.create("host", prepare=prepare)).prepared == "well"
        await filled(host, 1)
        while len(host.pods) > 2:
            await asyncio.sleep(0.01)

    on_fleet(state, act)


def test_a_ready_pod_that_died_is_not_handed_out(state: Path) -> None:
    async def act(fleet: Fleet, host: Host) -> None:
        await fleet.pool("host", 1)
        (warm,) = await filled(host, 1)
        await host.pods[warm].exec("kill -9 -1", timeout=5)
        await host.close_pod(host.pods[warm])
        assert host.report().warm["host"] == 0
        assert (await (await fleet.create("host")).exec("echo well")).stdout == "well\n"

    on_fleet(state, act)
