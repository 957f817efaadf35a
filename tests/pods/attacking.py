"""Shared by the attack tests: a pod, a second pod that must stay usable, and no leftovers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from etude.pods.fleet import open_host
from etude.pods.pod import Limits, Pod
from etude.pods.scheduling.admission import Thresholds
from tests.pods import inventory

Act = Callable[[Pod], Awaitable[None]]


async def well(pod: Pod) -> str:
    return (await pod.exec("echo well", timeout=10)).stdout.strip()


def run_in_pod(state: Path, act: Act, limits: Limits | None = None) -> None:
    """Run an attack in a pod; check that another pod still works and that closing both leaves nothing behind.

    Limits that this user cannot set are left out: an attack that is about one of them calls `need` first.
    """

    async def main() -> None:
        calm = Thresholds(
            memory_some=101, memory_full=101, io_full=101
        )  # attacks cause pressure; do not wait for it to pass
        host = await open_host("namespace", state, calm)
        try:
            can = host.backend.capabilities.limits
            possible = Limits(
                **{name: value for name, value in (limits or Limits()).specified().items() if name in can}
            )
            before = await inventory.baseline(host)
            pod, other = await host.create(limits=possible), await host.create()
            await act(pod)
            assert await well(other) == "well"
            await pod.close()
            await other.close()
            now = await asyncio.to_thread(inventory.settled, host, before)
            assert not now.difference(before), f"left behind: {now.difference(before)}"
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(main())
