"""A host in its own process, for tests that kill it: creates pods, prints their ids, then runs until it is killed.

    python -m tests.pods.service_child STATE ATTACHED DETACHED

Prints one JSON object (ids of the attached and of the detached pods) and then takes snapshots and forks in a loop.
"""

import asyncio
import contextlib
import json
import sys
from pathlib import Path

from etude.pods.fleet import open_host
from etude.pods.pod import PodError


async def main(state: Path, attached: int, detached: int) -> None:
    host = await open_host("namespace", state)
    mine = [await host.create() for _ in range(attached)]
    others = [await host.create(attached=False) for _ in range(detached)]
    for pod in (*mine, *others):
        await pod.write("name", pod.id)
        await pod.exec("sleep 600 &")
    print(json.dumps({"attached": [p.id for p in mine], "detached": [p.id for p in others]}), flush=True)

    async def keep_busy(pod: object) -> None:
        while True:
            with contextlib.suppress(PodError):
                await pod.write("more", "x" * 10_000)  # type: ignore[attr-defined]
                await pod.snapshot("fs")  # type: ignore[attr-defined]
                for child in await pod.fork(2):  # type: ignore[attr-defined]
                    await child.close()

    await asyncio.gather(*(keep_busy(pod) for pod in mine[:3]))
    await asyncio.sleep(600)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
