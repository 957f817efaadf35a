"""A host in its own process that executes commands, one JSON object per line, until it is killed.

    python -m tests.pods.fleet_child STATE

The command is [verb, arguments...]; the answer is {"ok": value} or {"error": type, "text": message}.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from etude.errors import EtudeError
from etude.pods.fleet import open_host
from etude.pods.host import Host
from etude.pods.pod import Snapshot


async def act(host: Host, verb: str, *given: Any) -> Any:
    """Carry out one command."""
    if verb == "create":
        source, attached = given
        return (await host.create(source, attached=attached)).id
    if verb == "gc":
        return await host.collect_garbage(grace=0.0)
    if verb == "remove-snapshot":
        return await host.remove_snapshot(given[0])
    if verb == "persist":
        return (await host.persist(given[0])).id
    pod = await host.find(given[0])
    if verb == "exec":
        return (await pod.exec(given[1], timeout=20)).stdout
    if verb == "read":
        return (await pod.read(given[1])).decode()
    if verb == "list":
        return [info.name for info in await pod.list("/work")]
    if verb == "snapshot":
        snapshot: Snapshot = await pod.snapshot(given[1])
        return snapshot.id, snapshot.durable
    if verb == "fork":
        return [child.id for child in await pod.fork(given[1])]
    if verb == "call":
        return await getattr(pod, given[1])(*given[2:])
    raise ValueError(verb)


async def main(state: Path) -> None:
    host = await open_host("namespace", state)
    print(json.dumps({"ok": "ready"}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            answer = {"ok": await asyncio.wait_for(act(host, *json.loads(line)), 60)}
        except (EtudeError, TimeoutError) as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        print(json.dumps(answer), flush=True)
    await host.close()
    await host.backend.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
