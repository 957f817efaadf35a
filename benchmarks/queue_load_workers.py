"""Simulated workers of `queue_load.py`: the real `WorkerClient`, with its requests sent by one event loop a process.

A worker enlists, claims slots, sends heartbeats when it is told to, checkpoints and finishes its rollouts, sweeps
snapshots, and follows the samplers: what `rollouts/worker.py` asks of the run service, without pods and samplers. A
rollout is a pause. A worker has two connections for that, as in the real client, and one on which it waits for
changes of the samplers.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, cast
from urllib.parse import quote, urlencode, urlsplit

from etude.rollouts.queue_client import ERRORS
from etude.rollouts.queue_records import HeldSlot, Slot
from etude.rollouts.settings import QueueName
from etude.rollouts.worker_client import THREADS, WorkerClient
from etude.runs.client import PROTOCOL, PROTOCOL_HEADER, RUN_HEADER, status_facts
from etude.runs.member import RunMember

RAMP_S = 10.0  # over which the workers of a process start
SWEEP_S = 60.0  # between two sweeps for snapshots, as in the worker
CHECKPOINT_S = 60.0  # the default of checkpoint_rollouts_s
EVALUATIONS: tuple[QueueName, ...] = ("evaluation", "training")
REWARD = {
    "parts": {"correctness": 1.0},
    "hack": False,
    "score": 1.0,
    **dict.fromkeys(("category", "family", "difficulty"), "repair"),
    "ending": "final",
    "cost": {"turns": 31, "calls": 44, "thinking": 9120, "sampled": 15200, "prompt": 310400, "pod_s": 81.5, "edits": 5},
    "errors": {"bad_arguments": 1, "command_failed": 4},
    "segments": 2,
    "tokens": 48211,
    "made": 15200,
    "pod_s": 81.5,
    "seconds": {"environment": 1.2, "session": 96.0, "verifier": 7.5},
    "habits": {f"habit_{number}": 0.125 * number for number in range(24)},
}


def reward_record(solved: bool) -> dict[str, Any]:
    """Return a record of a rollout as large as those of real ones."""
    evidence = {"correctness": {"value": float(solved), "passed": 12, "failed": 0}}
    evidence |= {f"term_{number}": {"value": 0.5, "weight": 0.0} for number in range(3)}
    return {"total": float(solved), "solved": solved, **REWARD, "evidence": evidence}


@dataclass(frozen=True)
class Load:
    """What the workers of one process do."""

    url: str
    token: str
    run: str
    names: tuple[str, ...]
    rollouts: int  # that a worker runs at once
    seed: int


@dataclass(frozen=True)
class Request:
    """A request that the real client would send now."""

    method: str
    path: str
    body: bytes | None
    endpoint: str


class RequestMaker:
    """Takes the place of a `RunClient`: returns the request instead of sending it."""

    def __init__(self, connection: HttpConnection) -> None:
        self.connection = connection

    def twin(self, **options: Any) -> RequestMaker:
        return RequestMaker(self.connection.twin())

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        content = None if body is None else json.dumps(body, default=vars, separators=(",", ":")).encode()
        parts = path.split("/")
        endpoint = "report " + parts[-1] if parts[-2] == "report" else parts[-1]
        return self.connection, Request(method, path, content, endpoint)

    def close(self) -> None:
        pass


class HttpConnection:
    """One connection that is kept open, with one request at a time; records how long each response took."""

    def __init__(self, load: Load, record: Callable[[str, float], None]) -> None:
        self.load, self.record = load, record
        parts = urlsplit(load.url)
        self.host, self.port = str(parts.hostname), int(parts.port or 80)
        headers = {"host": f"{self.host}:{self.port}", "authorization": f"Bearer {load.token}"}
        headers |= {PROTOCOL_HEADER: str(PROTOCOL), RUN_HEADER: load.run, "accept-encoding": "identity"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()

    def twin(self) -> HttpConnection:
        return HttpConnection(self.load, self.record)

    async def exchange(self, request: Request, query: Mapping[str, str] | None = None) -> Any:
        started = time.perf_counter()
        async with self._lock:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self.host, self.port)
            reader, writer = self._streams
            target = quote(request.path) + (f"?{urlencode(query)}" if query else "")
            head = f"{request.method} {target} HTTP/1.1\r\n{self._headers}"
            if request.body is not None:
                head += f"content-type: application/json\r\ncontent-length: {len(request.body)}\r\n"
            writer.write(f"{head}\r\n".encode() + (request.body or b""))
            lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
            data = await reader.readexactly(int(fields["content-length"]))
        self.record(request.endpoint, time.perf_counter() - started)
        if (status := int(lines[0].split(" ")[1])) >= 400:
            error = json.loads(data)["error"]
            raise ERRORS.get(error["code"], RuntimeError)(f"{status}: {error['message']}")
        return json.loads(data) if data else None

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


class SimulatedClient(WorkerClient):
    """The worker's client: its methods make the requests, an event loop sends them in place of its threads."""

    def __init__(self, name: str, connection: HttpConnection) -> None:
        maker: Any = RequestMaker(connection)
        super().__init__(
            RunMember(name, maker, info=cast(Any, None), layout=cast(Any, None), sees_run=True, same_machine=True)
        )
        self._threads.shutdown()
        self._limit = asyncio.Semaphore(THREADS)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        async with self._limit:
            connection, request = work()
            return await connection.exchange(request)


class SimulatedWorker:
    """One worker. `phase.value` is 0 while rollouts take their time, 1 when they take none, 2 at the end."""

    def __init__(self, name: str, load: Load, shared: Shared, record: Callable[[str, float], None]) -> None:
        self.load, self.shared, self.rng = load, shared, random.Random(f"{load.seed}/{name}")
        connection = HttpConnection(load, record)
        self.client, self.samplers = SimulatedClient(name, connection), connection.twin()
        self.held: dict[tuple[QueueName, int, int], HeldSlot] = {}
        self.counts: Counter[str] = Counter()
        self._freed = asyncio.Event()
        self._rollouts: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, RAMP_S))
        await self.client.enlist()
        loops = (self._claim_loop(), self._heartbeat_loop(), self._sweep_loop(), self._sampler_loop())
        async with asyncio.TaskGroup() as group:
            for loop in loops:
                group.create_task(loop)

    async def _claim_loop(self) -> None:
        while True:
            self._freed.clear()
            if free := self.load.rollouts - len(self.held):
                for queue, slot in await self.client.claim(free):
                    self.held[queue, slot.id, slot.attempt] = HeldSlot(slot.id, slot.attempt, "running")
                    task = asyncio.create_task(self._rollout(queue, slot))
                    self._rollouts.add(task)
                    task.add_done_callback(self._done)
            else:
                await self._freed.wait()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._rollouts.discard(task)
        self._freed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.counts["errors"] += 1
            print(f"{self.client.name}: {error}")

    async def _rollout(self, queue: QueueName, slot: Slot) -> None:
        claimed_at, version = time.monotonic(), self.shared.version.value
        seconds = self.rng.uniform(0.5, 1.5) * self.shared.rollout_s.value
        trace = f"traces/{queue}/{slot.group:06d}/{slot.number:02d}-{slot.attempt}.trace"
        try:
            while (left := claimed_at + seconds - time.monotonic()) > 0 and self.shared.rollout_s.value:
                await asyncio.sleep(min(left, CHECKPOINT_S, 5.0 if seconds > 5.0 else left))
                if self.rng.random() < min(5.0, left) / CHECKPOINT_S:
                    resume = {"trace": f"{trace}.partial", "snapshot": f"{slot.id:032x}", "turns": 9, "over": False}
                    await self.client.report(queue, slot, "checkpoint", resume=resume)
            solved = self.rng.random() < 0.5
            reward, versions = reward_record(solved), (version, self.shared.version.value)
            await self.client.report(queue, slot, "finish", reward=reward, trace=trace, versions=versions)
            self.counts["finished"] += 1
        except tuple(ERRORS.values()):
            self.counts["lost"] += 1
        finally:
            del self.held[queue, slot.id, slot.attempt]

    async def _heartbeat_loop(self) -> None:
        while True:
            held: dict[QueueName, list[HeldSlot]] = {name: [] for name in EVALUATIONS}
            for (queue, _, _), slot in self.held.items():
                held[queue].append(slot)
            reply = await self.client.heartbeat(held, self._status())
            await asyncio.sleep(reply.next_s)

    async def _sweep_loop(self) -> None:
        await asyncio.sleep(self.rng.uniform(0, SWEEP_S))
        while True:
            await self.client.needed_snapshots([f"{slot:032x}" for _, slot, _ in self.held] * 2)
            await asyncio.sleep(SWEEP_S)

    async def _sampler_loop(self) -> None:
        seen = 0
        while True:
            request = Request("GET", "/samplers", None, "samplers")
            seen = (await self.samplers.exchange(request, {"seen": str(seen)}))["seen"]

    def _status(self) -> dict[str, Any]:
        rows = [{"table": q, "slot": id, "doing": "session", "seconds": 7.5} for q, id, _ in self.held]
        return status_facts(
            state="working" if rows else "waiting",
            waiting_for=f"session of task (slot {rows[0]['slot']}), 8 s" if rows else "slots to claim",
            held=rows,
            doing={"session": len(rows)},
            counts=dict(self.counts),
            last_failure="",
            prepared=[f"{self.rng.randrange(1 << 64):032x}"] * 2,
            cpu_s=time.process_time(),
        )


@dataclass(frozen=True)
class Shared:
    """What the main process tells the workers."""

    phase: Any  # number of the phase whose latencies are recorded
    version: Any  # newest weight version
    rollout_s: Any  # mean duration of a rollout; 0: none


def run_workers(load: Load, shared: Shared, results: Connection) -> None:
    """Run the workers of one process until the phase is negative, then send what was measured."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    results.send(asyncio.run(run(load, shared)))


async def run(load: Load, shared: Shared) -> tuple[dict[int, dict[str, list[float]]], Counter[str], float]:
    found: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def record(endpoint: str, seconds: float) -> None:
        found[shared.phase.value][endpoint].append(seconds)

    workers = [SimulatedWorker(name, load, shared, record) for name in load.names]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    while shared.phase.value >= 0:
        await asyncio.sleep(0.1)
        for task in tasks:
            if task.done():
                task.result()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    counts = sum((worker.counts for worker in workers), Counter[str]())
    return {phase: dict(by_endpoint) for phase, by_endpoint in found.items()}, counts, time.process_time()
