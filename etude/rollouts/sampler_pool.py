"""A policy over all samplers of a run, which may die, hang and come back elsewhere while it is asked.

Who there is stands in the status files. A session stays with one sampler, where its prefix is cached; new ones go where
the fewest requests are. A request is token ids and nothing else, so one that was lost on the way is sent again, to
another or to the same when it is back: until a deadline, after which `SamplersLost` says what was waited for.
"""

import asyncio
import contextlib
import os
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from etude.errors import EtudeError, InputError
from etude.inference.clients.http import Http
from etude.inference.clients.transport import Patience, ServerError, Transport, Unreachable
from etude.inference.policy import OneSample, Weights
from etude.inference.request import Sample
from etude.inference.sampling import Sampling
from etude.runs.layout import Place, statuses

KIND = "sampler"  # what a sampler's status file says it is
DEADLINE_S = 120.0  # a sampler's start takes seconds; loading a large model and its weights a minute or two
LOSSES = 5  # of one request that was being worked on: one that breaks every engine must not go round for ever
AT_WORK_S = 1.0  # a request that failed sooner was hardly begun
FRESH_S = 10.0  # a status file is written every second, by a busy machine later
LOOK_S = 0.2  # between two readings of the status files
FIRST_REST_S, LONGEST_REST_S = 0.25, 10.0  # that a sampler is left alone after a failure; doubled for each further
BUSY_S = 1.0  # before one whose queue is full is asked again
HEALTH_S, HEALTH_TIMEOUT_S, HEALTH_FAILURES = 2.0, 5.0, 3  # without an answer to as many checks it hangs
SESSIONS = 1 << 16  # whose sampler is remembered

NOT_OURS = (401, 403, 404)  # the port has gone to somebody else: nothing that the request could be blamed for


class SamplersLost(EtudeError):
    """No sampler finished a request in time; nothing is wrong with the request."""


@dataclass(eq=False)
class Endpoint:
    """A sampler as it is now: a process at a place."""

    name: str
    url: str
    pid: int
    http: Http
    ready: bool = True
    status: dict[str, Any] = field(default_factory=dict)
    asked: set["asyncio.Task[list[Sample]]"] = field(default_factory=set)  # requests in flight
    chosen: float = 0.0  # when a session was last sent here
    failures: int = 0  # in a row
    rests_until: float = 0.0
    problem: str = ""
    missed: int = 0  # checks in a row without an answer
    gone: bool = False  # it hangs, or another process has its name

    @property
    def load(self) -> tuple[int, float]:
        return len(self.asked), self.chosen

    def usable(self, now: float) -> bool:
        return self.ready and not self.gone and self.rests_until <= now

    def served(self) -> None:
        self.failures = 0
        self.problem = ""

    def failed(self, problem: str) -> None:
        """Leave it alone for a while, longer each time."""
        rest = min(LONGEST_REST_S, FIRST_REST_S * 2**self.failures)
        self.failures, self.problem = self.failures + 1, problem
        self.rests_until = time.monotonic() + rest

    def give_up(self, problem: str) -> None:
        """Nothing more will come from it: whoever waits asks another."""
        self.gone, self.problem = True, problem
        for task in self.asked:
            task.cancel()


def open_samplers(place: Place, *, deadline_s: float = DEADLINE_S, routing: bool = True) -> "Samplers":
    """The policy of a run. Use it in one event loop, as a context or with `close`."""
    return Samplers(place, deadline_s=deadline_s, routing=routing)


class Samplers(OneSample):
    """All samplers of a run as one policy. With `routing`, the experts of MoE models come along."""

    def __init__(self, place: Place, *, deadline_s: float = DEADLINE_S, routing: bool = True) -> None:
        self.place, self.deadline_s, self.routing = place, deadline_s, routing
        self._token = token_of(place)
        self._endpoints: dict[str, Endpoint] = {}  # the newest of each name
        self._leaving: list[Endpoint] = []  # replaced, with requests in flight maybe
        self._signs: dict[str, tuple[float, float]] = {}  # what time a status last said, and when that changed here
        self._homes: OrderedDict[str, str] = OrderedDict()  # the sampler of each session
        self._looked = -LOOK_S
        self._checks = Transport(self._token, Patience(timeout=HEALTH_TIMEOUT_S, attempts=1))
        self._watcher: asyncio.Task[None] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of all connections; whoever still waits is told so."""
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        for endpoint in (*self._endpoints.values(), *self._leaving):
            endpoint.give_up("closed")
            await endpoint.http.close()
        await self._checks.close()

    # ------------------------------------------------------------------------------------------- asking

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        losses, deadline = 0, time.monotonic() + self.deadline_s
        while True:
            endpoint = await self._sampler_for(session, deadline)
            started = time.monotonic()
            try:
                found = await self._ask(endpoint, tokens, sampling)
                endpoint.served()
                return found
            except ServerError as error:
                if error.status == 429:
                    if time.monotonic() >= deadline:
                        raise SamplersLost(f"no place in a queue for {self.deadline_s:g} s: {error}") from None
                    await asyncio.sleep(BUSY_S * random.uniform(0.5, 1.0))  # it still has the session's cache
                    continue
                if error.status < 500 and error.status not in NOT_OURS:
                    raise InputError(str(error)) from error
                problem, begun = str(error), True
            except EtudeError as error:
                problem, begun = str(error), time.monotonic() - started > AT_WORK_S
            endpoint.failed(problem)
            if begun:
                losses, deadline = losses + 1, time.monotonic() + self.deadline_s
                if losses >= LOSSES:
                    raise SamplersLost(f"a request was lost {losses} times by samplers at work on it; last: {problem}")

    async def _ask(self, endpoint: Endpoint, tokens: Sequence[int], sampling: Sampling) -> list[Sample]:
        """The samples of one sampler; Unreachable when it was given up meanwhile."""
        task = asyncio.create_task(endpoint.http.samples(tokens, sampling))
        endpoint.asked.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if endpoint.gone and me is not None and not me.cancelling():
                raise Unreachable(f"{endpoint.name} at {endpoint.url}: {endpoint.problem}") from None
            raise
        finally:
            endpoint.asked.discard(task)

    async def _sampler_for(self, session: str, deadline: float) -> Endpoint:
        """The sampler to ask, as soon as there is one."""
        usable = await self._usable(deadline)
        home = self._homes.get(session) if session else None
        found = usable[home] if home in usable else min(usable.values(), key=lambda endpoint: endpoint.load)
        return self._settle(session, found)

    async def _usable(self, deadline: float) -> dict[str, Endpoint]:
        """Who can be asked, as soon as there is anybody."""
        while not self._closed:
            self._look()
            now = time.monotonic()
            usable = {name: endpoint for name, endpoint in self._endpoints.items() if endpoint.usable(now)}
            if usable:
                return usable
            if now >= deadline:
                raise SamplersLost(f"no sampler served for {self.deadline_s:g} s: {self._excuses()}")
            await asyncio.sleep(min(LOOK_S, deadline - now))
        raise SamplersLost("the client of the samplers was closed; this was not finished")

    def _settle(self, session: str, endpoint: Endpoint) -> Endpoint:
        endpoint.chosen = time.monotonic()
        if session:
            self._homes[session] = endpoint.name
            self._homes.move_to_end(session)
            if len(self._homes) > SESSIONS:
                self._homes.popitem(last=False)
        return endpoint

    async def load(self, weights: Weights, version: int) -> None:
        raise InputError(f"samplers load no weights but those of {self.place.store}; publish version {version} there")

    async def version(self) -> int:
        """Of the weights that make new tokens; of several samplers, the oldest."""
        usable = await self._usable(time.monotonic() + self.deadline_s)
        return min(int(each.status["version"]) for each in usable.values())

    # ------------------------------------------------------------------------------------------- looking

    def _look(self) -> None:
        """Read who there is, unless that was just done."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        found = {name: status for name, status in statuses(self.place).items() if status.get("kind") == KIND}
        for name, status in found.items():
            ready = status["state"] == "ready" and self._is_fresh(name, status, now)
            if ready:
                self._meet(name, status)
            known = self._endpoints.get(name)
            if known is not None and (known.url, known.pid) == (status.get("url"), status.get("pid")):
                known.ready, known.status = ready, status
            elif known is not None:  # its successor is not ready yet
                self._replace(known)
        for name in self._endpoints.keys() - found.keys():
            self._endpoints[name].ready = False

    def _is_fresh(self, name: str, status: dict[str, Any], now: float) -> bool:
        """Whether a status was written lately; where clocks differ, whether it changes."""
        said = float(status["time"])
        last = self._signs.get(name)
        if last is None:
            self._signs[name] = said, now - abs(time.time() - said)
        elif last[0] != said:
            self._signs[name] = said, now
        return now - self._signs[name][1] <= FRESH_S

    def _meet(self, name: str, status: dict[str, Any]) -> None:
        known = self._endpoints.get(name)
        if known is not None:
            if (known.url, known.pid) == (status.get("url"), status.get("pid")):
                return
            self._replace(known)
        http = Http(status["url"], self._token, routing=self.routing, patience=Patience(attempts=1))
        self._endpoints[name] = Endpoint(name, status["url"], status["pid"], http)

    def _replace(self, endpoint: Endpoint) -> None:
        del self._endpoints[endpoint.name]
        endpoint.give_up("another process has taken its place")
        self._leaving.append(endpoint)

    async def _watch(self) -> None:
        """Find out about samplers that hang: a request alone cannot tell them from ones with much to do."""
        while True:
            await asyncio.sleep(HEALTH_S)
            with contextlib.suppress(EtudeError, OSError):  # a status that cannot be read: requests are told
                self._look()
            await asyncio.gather(*(self._check(each) for each in self._endpoints.values() if each.asked or each.gone))
            left, self._leaving = self._leaving, []
            for endpoint in left:
                if endpoint.asked:
                    self._leaving.append(endpoint)
                else:
                    await endpoint.http.close()

    async def _check(self, endpoint: Endpoint) -> None:
        try:
            await self._checks.call("GET", "/health", lambda: endpoint.url)
        except ServerError:  # draining or broken: it answers, and says so to every request
            endpoint.missed, endpoint.gone = 0, False
        except EtudeError as error:
            endpoint.missed += 1
            if endpoint.missed >= HEALTH_FAILURES and not endpoint.gone:
                endpoint.give_up(f"no answer to {endpoint.missed} checks: {error}")
        else:
            endpoint.missed, endpoint.gone = 0, False

    def _excuses(self) -> str:
        """What keeps every sampler from serving."""
        found = []
        for name, status in statuses(self.place).items():
            if status.get("kind") != KIND:
                continue
            known, age = self._endpoints.get(name), time.time() - float(status["time"])
            if status["state"] != "ready":
                reason = status["waiting_for"] or status.get("problem")
                why = f"{status['state']}: {reason}" if reason else status["state"]
            elif known is not None and known.problem:
                why = known.problem
            else:
                why = f"no sign of life for {age:.0f} s"
            found.append(f"{name}: {why}")
        return "; ".join(found) or f"there is none: {self.place.services} has no status of one"


def token_of(place: Place) -> str:
    """What the samplers of a run ask for; made by whoever needs it first."""
    path = place.root / "sampler.token"
    with contextlib.suppress(FileNotFoundError):
        return path.read_text(encoding="ascii")
    place.root.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    part.touch(0o600)
    try:
        part.write_text(secrets.token_hex(24), encoding="ascii")
        with contextlib.suppress(FileExistsError):
            os.link(part, path)  # appears whole, and only once
    finally:
        part.unlink(missing_ok=True)
    return path.read_text(encoding="ascii")
