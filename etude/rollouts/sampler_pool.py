"""A policy over all samplers of a run, which may die, hang and be restarted elsewhere while requests are in flight.

The run service says where the samplers are, and which are leased to an evaluation: those serve its sessions only. A
session stays with one sampler, which has its prefix cached; new sessions go to the sampler with the fewest requests. A
request is only token ids, so a lost one is sent again, to the same or another sampler, until a deadline: then
SamplersUnavailable says what was waited for.
"""

import asyncio
import contextlib
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from etude.errors import EtudeError, InputError
from etude.harness.trace_store import from_json
from etude.inference.clients.http import HttpPolicy
from etude.inference.clients.transport import RetryPolicy, ServerError, ServerUnreachable, Transport
from etude.inference.known_routing import RoutingCache
from etude.inference.policy import PolicyBase, Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.inference.settings import EVALUATION
from etude.rollouts.leases import EvaluationLease
from etude.runs.client import LONG_POLL_S, RunClient
from etude.runs.member import RunMember

DEADLINE_S = 120.0  # a sampler starts in seconds; loading a large model and its weights takes a minute or two
MAX_LOSSES = (
    5  # per request, after processing started: a request that crashes every engine must not be retried for ever
)
PROCESSING_S = 1.0  # a request that failed sooner is not counted as a loss
REFRESH_S = 0.2  # seconds between two looks at what is known of the samplers, while none is usable
ASK_AGAIN_S = 1.0  # before the run service is asked again after an error
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.25, 10.0  # after a failure of a sampler; doubled for each further one
QUEUE_FULL_S = 1.0  # seconds before a request that found a full queue is sent again
HEALTH_S, HEALTH_TIMEOUT_S, HEALTH_FAILURES = (
    2.0,
    5.0,
    3,
)  # after that many failed health checks a sampler counts as hung
MAX_SESSIONS = 1 << 16  # number of sessions whose sampler is remembered

WRONG_SERVER = (401, 403, 404)  # another program has the port now; the request itself is fine


class SamplersUnavailable(EtudeError):
    """No sampler completed a request before the deadline. The request itself is valid."""


@dataclass(eq=False)
class SamplerEndpoint:
    """One sampler process and its address."""

    name: str
    url: str
    pid: int
    host: str
    http: HttpPolicy
    ready: bool = True
    status: dict[str, Any] = field(default_factory=dict)
    requests: set["asyncio.Task[list[Completion]]"] = field(default_factory=set)  # in flight
    last_assigned: float = 0.0  # when a session was last sent here
    failures: int = 0  # in a row
    retry_at: float = 0.0
    problem: str = ""
    missed_checks: int = 0  # in a row
    abandoned: bool = False  # it hangs, or another process has its name

    @property
    def load(self) -> tuple[int, float]:
        return len(self.requests), self.last_assigned

    def usable(self, now: float) -> bool:
        return self.ready and not self.abandoned and self.retry_at <= now

    def serves(self, step: int | None) -> bool:
        """Return whether it serves the evaluation of this step; None: training."""
        found = self.status.get("lease")
        lease = None if found is None else from_json(EvaluationLease, found, "lease")
        if step is not None:
            return lease is not None and lease.step == step and lease.is_served_with(self.status["version"])
        free = lease is None or lease.shared
        return free and self.status.get("purpose") != EVALUATION and self.status.get("leased") is None

    def on_success(self) -> None:
        self.failures = 0
        self.problem = ""

    def on_failure(self, problem: str) -> None:
        """Send nothing for a while, longer after each failure."""
        backoff = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2**self.failures)
        self.failures, self.problem = self.failures + 1, problem
        self.retry_at = time.monotonic() + backoff

    def abandon(self, problem: str) -> None:
        """Cancel all requests in flight, so that they are sent to another sampler."""
        self.abandoned, self.problem = True, problem
        for task in self.requests:
            task.cancel()


class SamplerDirectory:
    """What the run service knows of the samplers, kept up to date by a thread that waits there for changes."""

    def __init__(self, client: RunClient) -> None:
        self._client = client.twin(problem="", on_problem=lambda problem: None)
        self._samplers: dict[str, dict[str, Any]] = {}
        self._problem = "the run service has not answered yet"
        self._thread = threading.Thread(target=self._follow, name="samplers", daemon=True)
        self._closed = threading.Event()
        self._thread.start()

    def current(self) -> dict[str, dict[str, Any]]:
        """Return what each sampler has reported: url, pid, state, version and what it waits for."""
        return self._samplers

    @property
    def problem(self) -> str:
        """Why nothing is known of the samplers."""
        return self._client.problem or self._problem

    def close(self) -> None:
        self._closed.set()
        self._client.close()

    def _follow(self) -> None:
        seen = 0
        while not self._closed.is_set():
            try:
                found = self._client.call("GET", "/samplers", wait_s=LONG_POLL_S, query={"seen": str(seen)})
                seen, self._samplers, self._problem = found["seen"], found["samplers"], ""
            except EtudeError as error:
                self._problem = str(error)
                self._closed.wait(ASK_AGAIN_S)


def open_sampler_pool(member: RunMember, *, deadline_s: float = DEADLINE_S, routing: bool = True) -> "SamplerPool":
    """Return the policy of a run. Use it in one event loop, as a context manager or with `close`."""
    directory = SamplerDirectory(member.client)
    return SamplerPool(directory, member.info.sampler_token, deadline_s=deadline_s, routing=routing)


class SamplerPool(PolicyBase):
    """All samplers of a run as one policy. With `routing`, completions of MoE models include the routed experts."""

    def __init__(
        self, directory: SamplerDirectory, token: str, *, deadline_s: float = DEADLINE_S, routing: bool = True
    ) -> None:
        self.directory, self.deadline_s, self.routing = directory, deadline_s, routing
        self._token = token
        self._endpoints: dict[str, SamplerEndpoint] = {}  # the newest of each name
        self._replaced: list[SamplerEndpoint] = []  # to be closed when their requests have ended
        self._session_samplers: OrderedDict[str, str] = OrderedDict()
        self._known: object = None  # what the directory said at the last refresh
        self._routing = RoutingCache()  # of sessions, which may move from one sampler to another
        self._health_transport = Transport(self._token, RetryPolicy(timeout=HEALTH_TIMEOUT_S, attempts=1))
        self._health_task: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; requests in flight raise SamplersUnavailable."""
        self._closed = True
        self.directory.close()
        if self._health_task is not None:
            self._health_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._health_task
        for endpoint in (*self._endpoints.values(), *self._replaced):
            endpoint.abandon("closed")
            await endpoint.http.close()
        await self._health_transport.close()

    # ------------------------------------------------------------------------------------------- requests

    def for_evaluation(self, step: int) -> "LeasedSamplers":
        """Return the samplers that are leased to the evaluation of a step as one policy."""
        return LeasedSamplers(self, step)

    async def complete_many(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", step: int | None = None
    ) -> list[Completion]:
        """Return completions of one prompt, for training or for the evaluation of a `step`."""
        if self._health_task is None:
            self._health_task = asyncio.create_task(self._health_loop())
        losses, deadline = 0, time.monotonic() + self.deadline_s
        while True:
            endpoint = await self._choose_endpoint(session, step, deadline)
            started = time.monotonic()
            try:
                found = await self._send(endpoint, tokens, sampling, session)
                endpoint.on_success()
                return found
            except ServerError as error:
                if error.status == 429:
                    if time.monotonic() >= deadline:
                        raise SamplersUnavailable(f"queues were full for {self.deadline_s:g} s: {error}") from None
                    await asyncio.sleep(QUEUE_FULL_S * random.uniform(0.5, 1.0))  # it still has the session's cache
                    continue
                if error.status < 500 and error.status not in WRONG_SERVER:
                    raise InputError(str(error)) from error
                problem, processed = str(error), True
            except EtudeError as error:
                problem, processed = str(error), time.monotonic() - started > PROCESSING_S
            endpoint.on_failure(problem)
            if processed:
                losses, deadline = losses + 1, time.monotonic() + self.deadline_s
                if losses >= MAX_LOSSES:
                    raise SamplersUnavailable(
                        f"samplers failed {losses} times while processing a request; last: {problem}"
                    )

    async def _send(
        self, endpoint: SamplerEndpoint, tokens: Sequence[int], sampling: Sampling, session: str
    ) -> list[Completion]:
        """Return the completions of one sampler; ServerUnreachable if it is abandoned meanwhile."""
        task = asyncio.create_task(endpoint.http.complete_many(tokens, sampling, session=session))
        endpoint.requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if endpoint.abandoned and current is not None and not current.cancelling():
                raise ServerUnreachable(f"{endpoint.name} at {endpoint.url}: {endpoint.problem}") from None
            raise
        finally:
            endpoint.requests.discard(task)

    async def _choose_endpoint(self, session: str, step: int | None, deadline: float) -> SamplerEndpoint:
        """Return the session's sampler, or the least loaded one; wait until one is usable."""
        usable = await self._usable_endpoints(deadline, lambda endpoint: endpoint.serves(step))
        previous = self._session_samplers.get(session) if session else None
        if previous in usable:
            return self._assign(session, usable[previous])
        return self._assign(session, min(usable.values(), key=lambda endpoint: endpoint.load))

    async def _usable_endpoints(
        self, deadline: float, serves: Callable[[SamplerEndpoint], bool] = lambda endpoint: True
    ) -> dict[str, SamplerEndpoint]:
        """Return the usable samplers by name, of those that serve a request; wait until there is at least one."""
        while not self._closed:
            self._refresh()
            now = time.monotonic()
            usable = {name: each for name, each in self._endpoints.items() if each.usable(now) and serves(each)}
            if usable:
                return usable
            if now >= deadline:
                raise SamplersUnavailable(f"no sampler was available for {self.deadline_s:g} s: {self._problems()}")
            await asyncio.sleep(min(REFRESH_S, deadline - now))
        raise SamplersUnavailable("the sampler pool was closed before the request was completed")

    def _assign(self, session: str, endpoint: SamplerEndpoint) -> SamplerEndpoint:
        endpoint.last_assigned = time.monotonic()
        if session:
            self._session_samplers[session] = endpoint.name
            self._session_samplers.move_to_end(session)
            if len(self._session_samplers) > MAX_SESSIONS:
                self._session_samplers.popitem(last=False)
        return endpoint

    async def load(self, weights: Weights, version: int) -> None:
        raise InputError(f"samplers load weights only from the run's store; publish version {version} there")

    async def version(self) -> int:
        """Return the weight version that samples new tokens: the oldest of all usable samplers.

        What is known of it may be half a minute old: a new version is not told to every worker at once.
        """
        usable = await self._usable_endpoints(time.monotonic() + self.deadline_s)
        return min(int(endpoint.status["version"]) for endpoint in usable.values())

    # ------------------------------------------------------------------------------------------- discovery and health

    def _refresh(self) -> None:
        """Take note of what has changed at the samplers."""
        found = self.directory.current()
        if found is self._known:
            return
        self._known = found
        for name, status in found.items():
            ready = status["state"] == "ready"
            if ready:
                self._add_endpoint(name, status)
            known = self._endpoints.get(name)
            if known is not None and _process(status) == (known.url, known.pid, known.host):
                known.ready, known.status = ready, status
            elif known is not None:  # a new process that is not ready yet
                self._replace(known)
        for name in self._endpoints.keys() - found.keys():
            self._endpoints[name].ready = False

    def _add_endpoint(self, name: str, status: dict[str, Any]) -> None:
        known = self._endpoints.get(name)
        if known is not None:
            if _process(status) == (known.url, known.pid, known.host):
                return
            self._replace(known)
        retry = RetryPolicy(attempts=1)
        http = HttpPolicy(status["url"], self._token, routing=self.routing, retry=retry, known=self._routing)
        self._endpoints[name] = SamplerEndpoint(name, *_process(status), http)

    def _replace(self, endpoint: SamplerEndpoint) -> None:
        del self._endpoints[endpoint.name]
        endpoint.abandon("it was replaced by another process")
        self._replaced.append(endpoint)

    async def _health_loop(self) -> None:
        """Find samplers that hang: a request alone cannot distinguish them from busy ones."""
        while True:
            await asyncio.sleep(HEALTH_S)
            self._refresh()
            checked = [each for each in self._endpoints.values() if each.requests or each.abandoned]
            await asyncio.gather(*(self._check_health(endpoint) for endpoint in checked))
            replaced, self._replaced = self._replaced, []
            for endpoint in replaced:
                if endpoint.requests:
                    self._replaced.append(endpoint)
                else:
                    await endpoint.http.close()

    async def _check_health(self, endpoint: SamplerEndpoint) -> None:
        try:
            await self._health_transport.call("GET", "/health", lambda: endpoint.url)
        except ServerError:  # draining or broken: it responds, and refuses every request
            endpoint.missed_checks, endpoint.abandoned = 0, False
        except EtudeError as error:
            endpoint.missed_checks += 1
            if endpoint.missed_checks >= HEALTH_FAILURES and not endpoint.abandoned:
                endpoint.abandon(f"{endpoint.missed_checks} health checks failed: {error}")
        else:
            endpoint.missed_checks, endpoint.abandoned = 0, False

    def _problems(self) -> str:
        """Describe why each sampler is not usable."""
        found = []
        for name, status in self.directory.current().items():
            known = self._endpoints.get(name)
            if status["state"] == "ready":
                problem = known.problem if known is not None else ""
                if not problem and (lease := status.get("lease")) is not None:
                    problem = f"it serves the evaluation of step {lease['step']}"
            else:
                reason = status["waiting_for"] or status["problem"]
                problem = f"{status['state']}: {reason}" if reason else status["state"]
            found.append(f"{name}: {problem}")
        return "; ".join(found) or f"there is none: {self.directory.problem or 'no sampler has reported'}"


class LeasedSamplers(PolicyBase):
    """The samplers of a pool that are leased to the evaluation of a policy step."""

    def __init__(self, pool: SamplerPool, step: int) -> None:
        self.pool, self.step = pool, step

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        return await self.pool.complete_many(tokens, sampling, session=session, step=self.step)

    async def load(self, weights: Weights, version: int) -> None:
        await self.pool.load(weights, version)

    async def version(self) -> int:
        return await self.pool.version()

    async def close(self) -> None:
        """Do nothing: the pool is closed by its owner."""


def _process(status: dict[str, Any]) -> tuple[str, int, str]:
    """Return what distinguishes one process of a sampler from another."""
    return status["url"], status["pid"], status["host"]
