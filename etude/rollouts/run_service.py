"""The run service: the one process that opens a run's rollout queues, and what all its other processes know it by.

    python -m etude.rollouts.run_service RUN

It runs beside the run directory and answers over HTTP: the queues, the statuses that services report, where samplers
are, and for processes on other machines the recipe, tasks, model and object stores. It may be killed at any time: what
it has acknowledged is in the queues' files, its address stays, and its clients send their requests again.
"""

import argparse
import asyncio
import errno
import inspect
import json
import logging
import resource
import sqlite3
import ssl
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, get_type_hints

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from etude.errors import EtudeError, InputError
from etude.harness.trace_store import from_json
from etude.inference.latency import Histogram
from etude.rollouts.leased_evaluations import LeasedEvaluations
from etude.rollouts.live_settings import LiveSettings
from etude.rollouts.queue import RolloutQueue, StaleClaim, SupersededWorker
from etude.rollouts.queue_records import HeldSlot, Slot
from etude.rollouts.run_files import RunFiles
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import QUEUES, QueueName, RolloutSettings, load_sessions
from etude.rollouts.status_board import Bell, StatusBoard
from etude.runs.address import choose_address, read_address, run_token, service_settings
from etude.runs.client import DISK_FULL, LONG_POLL_S, PROTOCOL, PROTOCOL_HEADER, RUN_HEADER, status_facts
from etude.runs.layout import RL_ROOT, RunLayout
from etude.runs.service_status import DRAINED, ORCHESTRATOR, RUN_SERVICE, WORKER, write_copy
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.system.http import RequestGuard, bind, cancel_on_disconnect, serving
from etude.system.processes import die_with_parent, parent_process
from etude.system.prometheus import PrometheusText
from etude.system.terminal import say

BIND_S = 20.0  # for the port to become free: another program may hold it for a moment
MAX_WAIT_S = 60.0  # for which a request is held back
HEARTBEAT_S = 2.0  # between two heartbeats of a worker, so that the queue shows the current state ...
HEARTBEATS_PER_S = 200.0  # ... but of all workers together no more than this
HEARTBEATS_PER_LEASE = 4  # ... and of each at least this
COPY_S, STATUSES_PER_S = 2.0, 500.0  # between two copies of the statuses, longer if there are many
RECONCILE_S = 1.0  # leases are long
LOOKUP_S = 1.0  # for which figures over the statuses of all workers are kept
ABSENT_S = 60.0  # without a heartbeat, after which a worker started by hand gets no share of the rollouts
NEWS_S = 0.2  # between two times that all workers are told of samplers, which often change together
NO_STEP = -1  # of the trainer, for evaluations: below every step, so that no rollout is too stale
IDLE_S = 600  # seconds for which an idle connection is kept
FILES = 65536  # open connections, where the system allows it
LATENCY_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
FULL = (errno.ENOSPC, errno.EDQUOT)

# What the trainer, the orchestrator and other processes beside the run directory call (`QueueClient`).
QUEUE_METHODS = frozenset(
    {
        *("add", "set_served_step", "groups_to_start", "release", "discard", "changed_groups", "trained_rewards"),
        *(
            "offer",
            "awaited_tasks",
            "judge",
            "trainer_session",
            "begin_session",
            "mark_trained",
            "record_version",
            "newest_version",
            "rewind",
            "requeue_lost",
            "step_of",
        ),
        *("state", "alike_groups", "group", "groups", "progress", "numbers", "incidents"),
        *("lease", "set_lease", "versions_of"),
    }
)

log = logging.getLogger("etude.rollouts.run_service")


class RunService:
    """The endpoints of a run service, one method each."""

    def __init__(
        self,
        layout: RunLayout,
        queues: Mapping[QueueName, RolloutQueue],
        workers: int = 1,
        live: LiveSettings[RolloutSettings] | None = None,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        self.layout, self.queues, self.workers, self.live, self.clock = layout, queues, workers, live, clock
        self.in_flight = max((queue.settings.in_flight for queue in queues.values()), default=1)  # by the recipe
        self.draining: dict[str, str] = {}  # sessions of workers that shall end, by name
        self.files = RunFiles(layout)
        self.board = StatusBoard.restored(layout)
        self.leased = LeasedEvaluations(queues, self.board)
        self.work = Bell()  # rings when slots can be claimed
        self.sampler_news = Bell()  # rings when samplers have changed, a moment later if they did just before
        self._prepared = (float("-inf"), frozenset[str]())  # when it was looked up; snapshots that workers keep ready
        self._by_hand = (float("-inf"), 1)  # when it was counted, and the workers that the run has not started
        self._told = (self.board.sampler_changes, float("-inf"))  # changes when it rang last, and the time
        self.requests: Counter[str] = Counter()
        self.latency = Histogram(LATENCY_S)
        self.leased.read(self.clock.time())

    # ------------------------------------------------------------------------------------------ workers

    async def enlist(self, request: Request) -> Any:
        """Begin a session of a worker, which ends that of an earlier process of its name."""
        name, wanted = request.path_params["name"], await read_json(request)
        if self.draining.get(name) != wanted["session"]:
            self.draining.pop(name, None)
        return sum(queue.enlist(name, wanted["session"]) for queue in self.queues.values())

    async def drain(self, request: Request) -> Any:
        """Have a worker claim no more slots, finish its rollouts and end; return whether there is such a worker.

        Its next process is not concerned.
        """
        name = request.path_params["name"]
        status = self.board.statuses.get(name, {})
        if status.get("kind") != WORKER:
            return False
        self.draining[name] = status["session"]
        self.work.ring()
        return True

    async def claim(self, request: Request) -> Any:
        """Claim slots, evaluations first; if there are none, wait for some."""
        name, wanted = request.path_params["name"], await read_json(request)
        if found := self._claim(name, wanted):
            return found
        deadline = self.clock.monotonic() + min(float(wanted["wait_s"]), MAX_WAIT_S)

        async def wait() -> list[tuple[QueueName, Slot]]:
            while (left := deadline - self.clock.monotonic()) > 0:
                await self.work.wait(left)
                if (found := self._claim(name, wanted)) or self.draining.get(name) == wanted["session"]:
                    return found
            return []

        return await cancel_on_disconnect(request, wait())

    def _claim(self, name: str, wanted: Mapping[str, Any]) -> list[tuple[QueueName, Slot]]:
        found: list[tuple[QueueName, Slot]] = []
        if self.draining.get(name) == wanted["session"]:
            return found
        now, session = self.clock.time(), {"session": wanted["session"], "request": wanted["request"]}
        for queue in (queue for queue in QUEUES if queue in self.queues):
            left, prefix = int(wanted["count"]) - len(found), ""
            if self.leased.includes(queue):
                left, prefix = min(left, self.leased.room()), self.leased.prefix()
            slots = self.queues[queue].claim_many(name, left, now, prefix=prefix, **session)
            found += [(queue, slot) for slot in slots]
        return found

    async def heartbeat(self, request: Request) -> Any:
        """Renew the leases of what a worker holds, record its status, and tell it what has changed."""
        name, wanted = request.path_params["name"], await read_json(request)
        status = {**wanted["status"], "kind": WORKER, "session": wanted["session"]}
        self.board.report(name, status, self.clock.time())
        lost: dict[str, list[tuple[int, int]]] = {}
        for queue_name, queue in self.queues.items():
            held = [HeldSlot(*each) for each in wanted["held"].get(queue_name, ())]
            session = {"session": wanted["session"], "answered": wanted["answered"]}
            gone = queue.renew(name, held, self.clock.time(), **session)
            lost[queue_name] = [(each.id, each.attempt) for each in gone]
        lease = min(queue.settings.lease_s for queue in self.queues.values())
        interval = max(HEARTBEAT_S, len(self.board.statuses) / HEARTBEATS_PER_S)
        return {
            "lost": lost,
            "next_s": min(interval, lease / HEARTBEATS_PER_LEASE),
            "max_rollouts": self.share(),
            "drain": self.draining.get(name) == wanted["session"],
            "changes": self.live.changes if self.live else {},
            "problem": self.live.problem if self.live else "",
        }

    def share(self) -> int:
        """Return how many of the rollouts in flight one worker may run."""
        started = self.board.statuses.get(ORCHESTRATOR, {}).get("workers", self.workers)  # by the run
        return -(-self.apply_changes() // int(started or self.workers_by_hand()))

    def workers_by_hand(self) -> int:
        """Return how many workers have reported lately, at least 1: a run may start none itself."""
        now = self.clock.time()
        if now - self._by_hand[0] > LOOKUP_S:
            reported = (facts["time"] for facts in self.board.statuses.values() if facts.get("kind") == WORKER)
            self._by_hand = now, max(1, sum(now - then < ABSENT_S for then in reported))
        return self._by_hand[1]

    def apply_changes(self) -> int:
        """Apply changes of the run's settings to the queues; return how many rollouts may be in flight."""
        if self.live is None:
            return self.in_flight
        settings = self.live.current()
        in_flight = settings.in_flight if "in_flight" in self.live.changes else self.in_flight
        for queue in self.queues.values():
            if queue.settings.in_flight != in_flight:
                queue.settings = queue.settings.model_copy(update={"in_flight": in_flight})
        return in_flight

    async def leave(self, request: Request) -> Any:
        """End a session of a worker and requeue its slots."""
        name, wanted = request.path_params["name"], await read_json(request)
        return sum(queue.dismiss(name, wanted["session"]) for queue in self.queues.values())

    async def report(self, request: Request) -> Any:
        """Apply a report on a claimed slot: note, checkpoint, finish, fail or release."""
        wanted, queue = await read_json(request), self._queue(request)
        slot = Slot(wanted["slot"], 0, wanted["task"], 0, wanted["attempt"], "")
        kind, facts = request.path_params["kind"], wanted["facts"]
        if kind == "note":
            queue.add_note(slot, facts["note"])
        elif kind == "checkpoint":
            queue.checkpoint(slot, facts["resume"], self.clock.time())
        elif kind == "finish":
            versions = int(facts["versions"][0]), int(facts["versions"][1])
            if self.leased.includes(request.path_params["queue"]) and not self.leased.counts(slot.task, versions):
                why = f"weight versions {versions[0]} to {versions[1]} are not all of the evaluated step"
                queue.release_slot(slot, why, keep_resume=False)
            else:
                queue.finish(slot, facts["reward"], facts["trace"], versions)
        elif kind == "fail":
            queue.fail(slot, facts["why"], keep_resume=facts["keep_resume"])
        elif kind == "release":
            queue.release_slot(slot, facts["why"])
        else:
            raise InputError(f"{kind} is not a report on a slot")

    async def snapshots(self, request: Request) -> Any:
        """Return those of a worker's snapshots from which a rollout may be resumed, or that a worker keeps ready."""
        given, now = {str(snapshot) for snapshot in (await read_json(request))["snapshots"]}, self.clock.monotonic()
        if now - self._prepared[0] > LOOKUP_S:
            reported = (facts.get("prepared", ()) for facts in self.board.statuses.values())
            self._prepared = now, frozenset(str(id) for ids in reported for id in ids)
        resumed = (queue.needed_snapshots(given) for queue in self.queues.values())
        return sorted((self._prepared[1] & given).union(*resumed))

    # ------------------------------------------------------------------------------------------ queues

    def _queue(self, request: Request) -> RolloutQueue:
        name = request.path_params["queue"]
        if name not in self.queues:
            raise InputError(f"this run has no queue {name!r}")
        return self.queues[name]

    async def call(self, request: Request) -> Any:
        """Call a method of a queue with the arguments in the body; the time is that of this machine."""
        name, queue = request.path_params["method"], self._queue(request)
        if name not in QUEUE_METHODS:
            raise InputError(f"{name!r} is not a method of rollout queues")
        hints, method = _hints(name), getattr(queue, name)
        given = await read_json(request)
        sender = given.pop("trainer", None)
        if unknown := given.keys() - hints.keys():
            raise InputError(f"{name} has no argument {sorted(unknown)[0]}")
        arguments = {key: from_json(hints[key], value, f"{name}.{key}") for key, value in given.items()}
        arguments |= {"now": self.clock.time()} if "now" in hints else {}
        if sender is None:
            found = method(**arguments)
        else:
            found = queue.apply_once(int(sender[0]), int(sender[1]), partial(method, **arguments))
        if name == "set_lease":
            self.leased.read(self.clock.time())
        return found

    # ------------------------------------------------------------------------------------------ statuses

    async def run(self, request: Request) -> Any:
        return self.files.info()

    async def statuses(self, request: Request) -> Any:
        return self.board.ages(self.clock.time()) | {RUN_SERVICE: self.own_status() | {"age_s": 0.0}}

    async def report_status(self, request: Request) -> Any:
        """Record a status; return the lease of a sampler that has one."""
        name, now = request.path_params["name"], self.clock.time()
        self.board.report(name, await read_json(request), now)
        return self.board.instructions(name, now)

    async def forget_status(self, request: Request) -> Any:
        self.board.forget(request.path_params["name"])

    async def samplers(self, request: Request) -> Any:
        """Return what is known of the samplers, once it differs from what the client has seen, or after a while."""
        seen, deadline = int(request.query_params["seen"]), self.clock.monotonic() + LONG_POLL_S

        async def wait() -> None:
            while self.board.sampler_changes == seen and (left := deadline - self.clock.monotonic()) > 0:
                await self.sampler_news.wait(left)

        if self.board.sampler_changes == seen:
            await cancel_on_disconnect(request, wait())
        return {"seen": self.board.sampler_changes, "samplers": self.board.shown()}

    def own_status(self) -> dict[str, Any]:
        return status_facts(state="ready", requests=self.requests.total(), workers_waiting=len(self.work))

    async def health(self, request: Request) -> Any:
        return {"state": "ready"}

    async def metrics(self, request: Request) -> Any:
        text = PrometheusText("etude_run")
        for name, queue in self.queues.items():
            text.labelled(f"{name}_slots", "gauge", "Slots of the queue by state.", "state", queue.counts())
        states = Counter(str(facts.get("state")) for facts in self.board.statuses.values())
        text.labelled("services", "gauge", "Services by the state that they reported last.", "state", states)
        text.family("workers_waiting", "gauge", "Workers that wait for a slot.", ("", len(self.work)))
        text.labelled("requests_total", "counter", "Requests by endpoint.", "endpoint", self.requests)
        text.family("request_seconds", "histogram", "Time to a response, waiting excluded.", *self.latency.lines())
        service_metrics(text, self.board.ages(self.clock.time()) | {RUN_SERVICE: self.own_status() | {"age_s": 0.0}})
        return PlainTextResponse(str(text))

    # ------------------------------------------------------------------------------------------ the application

    def endpoint(self, name: str, work: Callable[[Request], Awaitable[Any]], waits: bool) -> Callable[..., Any]:
        """Return the endpoint of a method: its result as JSON, its errors as status and code."""

        async def answer(request: Request) -> Response:
            started = time.perf_counter()
            try:
                found = await work(request)
            except ClientDisconnect:
                return Response(status_code=499)
            except Exception as error:
                return error_response(error)
            finally:
                self.requests[name] += 1
                if not waits:
                    self.latency.add(time.perf_counter() - started)
                self.ring()
            return found if isinstance(found, Response) else Response(to_text(found), media_type="application/json")

        return answer

    def application(self, token: str) -> Starlette:
        """Return the service as an ASGI application."""
        table: list[tuple[str, str, Callable[[Request], Awaitable[Any]]]] = [
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/run", self.run),
            ("GET", "/status", self.statuses),
            ("POST", "/status/{name}", self.report_status),
            ("DELETE", "/status/{name}", self.forget_status),
            ("GET", "/samplers", self.samplers),
            ("POST", "/snapshots", self.snapshots),
            ("POST", "/workers/{name}/enlist", self.enlist),
            ("POST", "/workers/{name}/claim", self.claim),
            ("POST", "/workers/{name}/heartbeat", self.heartbeat),
            ("POST", "/workers/{name}/leave", self.leave),
            ("POST", "/workers/{name}/drain", self.drain),
            ("POST", "/queues/{queue}/report/{kind}", self.report),
            ("POST", "/queues/{queue}/{method}", self.call),
            *self.files.endpoints(),
        ]
        waiting = (self.claim, self.samplers)
        routes = [
            Route(path, self.endpoint(work.__name__, work, work in waiting), methods=[method])
            for method, path, work in table
        ]
        guard = Middleware(RequestGuard, refuse=refuse, token=token, needs_token=lambda method, path: path != "/health")
        return Starlette(routes=routes, middleware=[guard, Middleware(HandshakeGuard, run=self.layout.run_id())])

    async def keep_house(self) -> None:
        """Requeue what was lost, show samplers that are silent, and write the statuses to disk now and then."""
        for queue in self.queues.values():
            queue.extend_leases(self.clock.time())
        copy_at = 0.0
        while True:
            now = self.clock.time()
            with suppress(sqlite3.OperationalError, OSError):  # a full disk: the next time may succeed
                for name, queue in self.queues.items():
                    queue.reconcile(now, queue.last_step() if name == "training" else NO_STEP)
                self.leased.read(now)  # the lease may have expired
                self.apply_changes()
                self.board.expire(now)
                if now >= copy_at:
                    copy_at = now + max(COPY_S, len(self.board.statuses) / STATUSES_PER_S)
                    write_copy(self.layout, self.board.statuses | {RUN_SERVICE: self.own_status() | {"time": now}})
            self.ring()
            await asyncio.sleep(RECONCILE_S)

    def ring(self) -> None:
        """Wake as many waiting workers as there are slots to claim, and all if samplers have changed."""
        if len(self.work):
            self.work.ring(sum(map(self.leased.claimable, self.queues)))
        changes, now = self.board.sampler_changes, self.clock.monotonic()
        if changes != self._told[0] and now - self._told[1] >= NEWS_S:
            self._told = changes, now
            self.sampler_news.ring()

    def end(self) -> None:
        """Mark all services as ended: the run service ends last."""
        self.board.end()
        with suppress(OSError):
            ended = {"state": "ended", "time": self.clock.time()}
            write_copy(self.layout, self.board.statuses | {RUN_SERVICE: self.own_status() | ended})


# Figures of statuses that are metrics, by service: kind and meaning.
SERVICE_METRICS = {
    "age_s": ("gauge", "Seconds since the last status."),
    "cpu_s": ("counter", "CPU time of the process."),
    "version": ("gauge", "Weight version that the service has."),
    "step": ("gauge", "Policy steps taken."),
    "rollouts": ("gauge", "Rollouts that a worker runs."),
    "max_rollouts": ("gauge", "Rollouts that a worker may run at once."),
    "running": ("gauge", "Sequences that a sampler decodes."),
    "waiting": ("gauge", "Sequences that wait for a sampler."),
    "tokens_s": ("gauge", "Tokens that a sampler produces in a second."),
}


def service_metrics(text: PrometheusText, statuses: Mapping[str, Mapping[str, Any]]) -> None:
    """Add what every service has reported: only this process has an address that is known from outside."""
    labels = {name: f'service="{name}",host="{facts.get("host", "")}"' for name, facts in statuses.items()}
    up = {name: facts.get("state") not in ("ended", "failed", DRAINED) for name, facts in statuses.items()}
    text.family(
        "service_up",
        "gauge",
        "1 for a service whose last status was not its end, with its state.",
        *((f'{{{labels[name]},state="{statuses[name].get("state")}"}}', float(value)) for name, value in up.items()),
    )
    for key, (kind, meaning) in SERVICE_METRICS.items():
        found = {name: facts[key] for name, facts in statuses.items() if isinstance(facts.get(key), int | float)}
        if found:
            name = {"age_s": "status_age_seconds", "cpu_s": "cpu_seconds_total"}.get(key, key)
            rows = ((f"{{{labels[service]}}}", float(value)) for service, value in found.items())
            text.family(f"service_{name}", kind, meaning, *rows)


class HandshakeGuard:
    """Middleware that refuses clients of another protocol, or of another run."""

    def __init__(self, app: Any, run: str) -> None:
        self.app, self.run = app, run

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in ("/health", "/metrics"):
            headers = dict(scope["headers"])
            protocol = headers.get(PROTOCOL_HEADER.encode(), b"").decode(errors="replace")
            run = headers.get(RUN_HEADER.encode(), b"").decode(errors="replace")
            if protocol != str(PROTOCOL):
                other = f"protocol {protocol}" if protocol else "no protocol"
                message = f"the run service speaks protocol {PROTOCOL}, this client {other}: both need the same Etude"
                await error_body(426, "protocol", message)(scope, receive, send)
                return
            if run and run != self.run:
                message = f"this is the service of another run ({self.run[:8]}, not {run[:8]}): its own has ended"
                await error_body(409, "run", message)(scope, receive, send)
                return
        await self.app(scope, receive, send)


# ------------------------------------------------------------------------------------------- requests and responses


async def read_json(request: Request) -> dict[str, Any]:
    """Return the JSON object in a request."""
    try:
        found = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise InputError(f"{request.url.path}: the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise InputError(f"{request.url.path}: expected a JSON object")
    return found


def to_text(value: Any) -> bytes:
    return b"" if value is None else json.dumps(value, default=vars, separators=(",", ":")).encode()


def error_body(status: int, code: str, message: str) -> JSONResponse:
    return JSONResponse({"error": {"code": code, "message": message}}, status)


def refuse(status: int, message: str) -> Response:
    return error_body(status, "refused", message)


def error_response(error: Exception) -> Response:
    """Return the status and code that a client turns back into an error."""
    full = isinstance(error, OSError) and error.errno in FULL
    if full or (isinstance(error, sqlite3.Error) and "full" in str(error)):
        return error_body(DISK_FULL, "disk_full", f"the disk of the run directory is full ({error}); free some space")
    if isinstance(error, sqlite3.OperationalError):  # locked, or not readable for a moment
        return error_body(503, "busy", f"the rollout queue: {error}")
    for kind, status, code in (
        (StaleClaim, 410, "stale"),
        (SupersededWorker, 409, "superseded"),
        (InputError, 400, "input"),
        (EtudeError, 500, "failed"),
    ):
        if isinstance(error, kind):
            return error_body(status, code, str(error))
    if isinstance(error, KeyError | TypeError | ValueError | IndexError):
        return error_body(400, "input", f"the request is not understood: {type(error).__name__}: {error}")
    log.exception("a request failed", exc_info=error)
    return error_body(500, "bug", f"{type(error).__name__}: {error}")


@cache
def _hints(name: str) -> dict[str, Any]:
    """Return the types of a queue method's arguments."""
    method = getattr(RolloutQueue, name)
    hints = get_type_hints(method)
    return {key: hints[key] for key in inspect.signature(method).parameters if key != "self"}


# ------------------------------------------------------------------------------------------- the process


async def serve(layout: RunLayout, service: RunService) -> None:
    """Serve on the recorded address until SIGTERM."""
    address, settings = read_address(layout) or choose_address(layout), service_settings(layout)
    deadline = time.monotonic() + BIND_S
    while True:
        try:
            listener = bind(address.host, address.port)
            break
        except InputError as error:
            if time.monotonic() > deadline:
                raise EtudeError(
                    f"{error}; remove {layout.service_address} to let the run choose another port"
                ) from None
            await asyncio.sleep(0.2)
    options: dict[str, Any] = {"timeout_keep_alive": IDLE_S, "backlog": 2048}
    if settings.certificate and settings.key:
        check_certificate(settings.certificate, settings.key)
        options |= {"ssl_certfile": str(settings.certificate), "ssl_keyfile": str(settings.key)}
    with listener:
        async with serving(service.application(run_token(layout)), listener, **options) as stopped:
            keeping = asyncio.create_task(service.keep_house())
            ended = asyncio.create_task(stopped.wait())
            await asyncio.wait((keeping, ended), return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
            keeping.cancel()
            ended.cancel()


def check_certificate(certificate: Path, key: Path) -> None:
    """Raise InputError unless the files are a certificate and its key."""
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    except OSError as error:  # ssl.SSLError is one
        raise InputError(f"[service] certificate {certificate} and key {key}: {error}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m etude.rollouts.run_service", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", default=RL_ROOT, help="directory of the run that its processes share")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    layout: RunLayout | None = None
    try:
        die_with_parent(parent_process())
        layout = RunLayout.of_run(given.run, given.root)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (FILES if hard == resource.RLIM_INFINITY else min(FILES, hard), hard)
        )
        sessions, live = load_sessions(layout), None
        if isinstance(sessions, RolloutSettings) and layout.service_root == RL_ROOT:
            live = LiveSettings(layout, RolloutSettings)
        with open_queues(layout) as queues:
            service = RunService(layout, queues, sessions.workers, live)
            asyncio.run(serve(layout, service))
            service.end()
    except (EtudeError, OSError) as error:
        say(f"{RUN_SERVICE}: {error}", file=sys.stderr)
        if layout is not None:
            with suppress(OSError):
                write_copy(layout, {RUN_SERVICE: status_facts(state="failed", problem=str(error), time=time.time())})
        return error.exit_code if isinstance(error, EtudeError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
