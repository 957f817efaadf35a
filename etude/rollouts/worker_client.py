"""What a worker asks of the run service, in threads: an unreachable service must not block the sessions."""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from etude.harness.trace_store import from_json
from etude.rollouts.queue_client import call
from etude.rollouts.queue_records import HeldSlot, Slot
from etude.rollouts.settings import QueueName
from etude.runs.client import RunClient, RunServiceUnavailable
from etude.runs.member import RunMember

T = TypeVar("T")
WAIT_S = 20.0  # for which the service holds a claim back while there is nothing to claim
LEAVE_S = 2.0  # for the run service to hear that a worker ends
THREADS = 4


@dataclass(frozen=True)
class HeartbeatReply:
    """What the run service tells a worker."""

    lost: Mapping[str, Sequence[tuple[int, int]]]  # by queue: slots, each with its attempt
    next_s: float  # until the next heartbeat
    max_rollouts: int  # at once
    drain: bool  # claim no more slots, and end when the last rollout is finished
    changes: Mapping[str, Any]  # of the settings (`live_settings`)
    problem: str  # with them


def drain_worker(client: RunClient, name: str) -> bool:
    """Have a worker claim no more slots, finish its rollouts and end; False if there is no such worker (any more)."""
    return bool(call(client, f"/workers/{name}/drain", {}, patience_s=0))


class WorkerClient:
    """One session of a worker with the run service."""

    def __init__(self, member: RunMember) -> None:
        self.member, self.name = member, member.name
        self.session = secrets.token_hex(8)
        self._client = member.client
        self._polling = member.client.twin(
            on_problem=lambda problem: None
        )  # closed at the end, while it may be waiting
        self._threads = ThreadPoolExecutor(THREADS, "run-service")
        self._request = self._answered = 0

    async def enlist(self) -> None:
        """Begin the session; slots of an earlier process of this name are requeued."""
        body = {"session": self.session}
        await self._in_thread(lambda: call(self._client, f"/workers/{self.name}/enlist", body))

    async def claim(self, count: int) -> list[tuple[QueueName, Slot]]:
        """Claim at most `count` slots; wait for a while if there are none."""
        self._request = number = self._request + 1
        body = {"session": self.session, "request": number, "count": count, "wait_s": WAIT_S}
        path = f"/workers/{self.name}/claim"
        found = await self._in_thread(lambda: call(self._polling, path, body, wait_s=WAIT_S))
        self._answered = number  # the caller records the slots before the next heartbeat is made
        return [(queue, from_json(Slot, slot, "claim")) for queue, slot in found]

    async def heartbeat(
        self, held: Mapping[QueueName, Sequence[HeldSlot]], status: Mapping[str, Any]
    ) -> HeartbeatReply:
        """Renew the leases of all claims, report the status, and return what has changed."""
        rows = {queue: [(each.id, each.attempt, each.state) for each in slots] for queue, slots in held.items()}
        body = {"session": self.session, "answered": self._answered, "held": rows, "status": status}
        path = f"/workers/{self.name}/heartbeat"
        return HeartbeatReply(**await self._in_thread(lambda: call(self._client, path, body)))

    async def report(self, queue: QueueName, slot: Slot, kind: str, **facts: Any) -> None:
        """Report note, checkpoint, finish, fail or release of a claimed slot; StaleClaim if it is no longer claimed."""
        body = {"slot": slot.id, "task": slot.task, "attempt": slot.attempt, "facts": facts}
        await self._in_thread(lambda: call(self._client, f"/queues/{queue}/report/{kind}", body))

    async def needed_snapshots(self, snapshots: Collection[str]) -> set[str]:
        """Return those of the snapshots from which a slot may be resumed, or that a worker keeps ready."""
        body = {"snapshots": sorted(snapshots)}
        return set(await self._in_thread(lambda: call(self._client, "/snapshots", body)))

    async def task_directory(self, queue: QueueName, task: str) -> Path | None:
        """Return the directory of a task, which may have to be fetched; None if the run has none of that name."""
        return await self._in_thread(lambda: self.member.task_directory(queue, task))

    async def leave(self) -> None:
        """End the session: requeue all slots, and close the connections."""
        self._polling.close()
        with contextlib.suppress(RunServiceUnavailable):  # the run service may have ended too
            path, body = f"/workers/{self.name}/leave", {"session": self.session}
            await self._in_thread(lambda: call(self._client, path, body, patience_s=LEAVE_S))
        self._threads.shutdown(wait=False)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
