"""Our token-exact protocol in front of another project's server, and its weight updates.

Requests pass through; new ones wait while weights are replaced, so their tokens are never labelled too new. Anything
that leaves the server in doubt (a failed update, an end, a hang, nonsense) breaks the relay, which ends the sampler
process: the pool sends the requests to another sampler, and a new process starts over.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from etude.errors import EtudeError, InputError
from etude.inference import server
from etude.inference.api_schema import GenerateRequest, parse_request
from etude.inference.backends.client import ServerClient, WeightsInUse
from etude.inference.backends.weight_files import WeightFiles
from etude.inference.clients.transport import ServerError
from etude.inference.generate_protocol import InvalidResponse, completion_to_json
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.inference.service import ContextLengthExceeded, EngineBroken, QueueFull, ServiceState, WeightSwap
from etude.inference.settings import CachePolicy
from etude.inference.weight_update import check_finite
from etude.system.http import cancel_on_disconnect
from etude.weights.versions import WeightState

WATCH_S = 2.0  # between two looks at the server
MAX_MISSED = 6  # failed looks in a row
MAX_NONSENSE = 5  # invalid responses in a row
REFUSED = (400, 404, 413, 422)  # statuses of a request that is wrong itself


@dataclass(frozen=True)
class RelayStats:
    """Counters and present state; the numbers of an engine that a relay cannot know are 0."""

    state: ServiceState
    version: int
    running: int
    waiting: int
    swaps: int
    output_tokens: int
    prefill_tokens: int
    cached_tokens: int
    preemptions: int
    busy_s: float


class Relay:
    """Requests to a server, and the weights that it has. Use it in one event loop, as a context manager."""

    def __init__(
        self,
        client: ServerClient,
        files: WeightFiles,
        on_swap: CachePolicy,
        routing: bool = False,  # the server returns the experts of MoE models
        problem: Callable[[], str] = lambda: "",
    ) -> None:
        self.client, self.files, self.on_swap, self.routing = client, files, on_swap, routing
        self.problem = problem  # why the server's process cannot answer, if it has ended
        self.version = -1
        self.steps = 0  # grows while the server samples
        self.failure: EngineBroken | None = None
        self._closing = self._draining = False
        self._updating = asyncio.Lock()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open: Counter[int] = Counter()  # sequences by the version that they began with
        self._swaps = self._output_tokens = self._prefill_tokens = self._cached_tokens = self._nonsense = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------------------------------- requests

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, routing: bool = True) -> list[Completion]:
        """Return the completions of a prompt, or raise why there are none."""
        if len(tokens) + sampling.max_tokens > (limit := self.client.max_length):
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens, but the prompt has {len(tokens)} and "
                f"max_tokens is {sampling.max_tokens}; shorten the prompt or lower max_tokens"
            )
        async with self._updating:  # new requests wait for new weights
            self._check_open()
            weights, cache_key = WeightsInUse(self.version, self.adapter), self._cache_key(sampling.since)
        sending = asyncio.ensure_future(
            self.client.complete(tokens, sampling, weights, cache_key, routing and self.routing)
        )
        with self._counted(weights.version, sampling.samples):
            try:
                waiting: set[asyncio.Future[Any]] = {sending, self._failed}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if not sending.done():
                    self._check_open()
                found = await sending
                self._check_versions(found)
            except ServerError as error:
                raise _own_error(error) from None
            except InvalidResponse as error:
                self._on_nonsense(error)
                raise
            finally:
                sending.cancel()
        self._nonsense = 0
        self._output_tokens += sum(len(each.tokens) for each in found)
        self._cached_tokens += found[0].cached
        self._prefill_tokens += len(tokens) - found[0].cached
        return found

    @property
    def adapter(self) -> str:
        """Return the adapter that new requests use; "" if weights are replaced as a whole."""
        return adapter_name(self.version) if self.files.adapters else ""

    def _cache_key(self, since: int | None) -> str:
        """Return the key under which a request shares cached keys and values: with those of the same weights and, where
        these caches are kept, of the session's first weights."""
        kept = self.on_swap == "keep" and since is not None
        return f"weights-{min(since, self.version) if kept and since is not None else self.version}"

    @contextlib.contextmanager
    def _counted(self, version: int, samples: int) -> Iterator[None]:
        if not self.open_sequences:
            self._busy_since = time.perf_counter()
        self._open[version] += samples
        try:
            yield
        finally:
            self._open[version] -= samples
            if not self.open_sequences:
                self._busy_s += time.perf_counter() - self._busy_since

    def _check_open(self) -> None:
        if self.failure is not None:
            raise self.failure
        if self._closing or self._draining:
            raise EngineBroken("the sampler is about to end")

    def _check_versions(self, found: Sequence[Completion]) -> None:
        if newer := [version for each in found for version in each.versions if version > self.version]:
            raise InvalidResponse(f"{self.client.url}: tokens of version {newer[0]}, which was not loaded")

    def _on_nonsense(self, error: InvalidResponse) -> None:
        self._nonsense += 1
        if self._nonsense >= MAX_NONSENSE:
            self.fail(f"{self._nonsense} invalid responses in a row; the last: {error}")

    # ------------------------------------------------------------------------------------------- weights

    async def load(self, weights: WeightState, version: int) -> WeightSwap:
        """Write weights to files, while requests run, and have the server take them between two steps."""
        await asyncio.to_thread(check_finite, weights, version)
        directory = await asyncio.to_thread(self.files.write, version_name(version), weights)
        started = time.perf_counter()
        async with self._updating:
            self._check_open()
            in_flight = self.open_sequences
            await self.take(directory, version)
            self.version, self._swaps = version, self._swaps + 1
        seconds = time.perf_counter() - started
        await self._forget_old_weights()
        return WeightSwap(version, self.on_swap, in_flight, seconds)

    async def take(self, directory: Path, version: int) -> None:
        """Have the server load a directory; if that fails, its weights are unknown and the relay is broken."""
        try:
            if self.files.adapters:
                await self.client.load_adapter(directory, adapter_name(version))
            else:
                # Nothing is known of the caches that a server has at first. Those of a version that it had before may
                # hold what later weights have added.
                recompute = self.on_swap == "recompute" or self.version < 0 or version < self.version
                await self.client.load(directory, version, recompute)
        except EtudeError as error:
            self.fail(f"the server did not take version {version}: {error}")
            self._check_open()

    async def _forget_old_weights(self) -> None:
        """Remove files, and the adapters that no request uses any more."""
        if not self.files.adapters:
            await asyncio.to_thread(self.files.keep_only, version_name(self.version))
            return
        used = {self.version, *(version for version, count in self._open.items() if count)}
        for version in self._open.keys() - used:
            with contextlib.suppress(EtudeError):  # the server drops the oldest by itself
                await self.client.unload_adapter(adapter_name(version))
        self._open = Counter({version: self._open[version] for version in used})
        await asyncio.to_thread(self.files.keep_only, *map(version_name, used))

    # ------------------------------------------------------------------------------------------- state

    @property
    def state(self) -> ServiceState:
        if self.failure is not None:
            return "broken"
        if self._closing:
            return "closed"
        return "draining" if self._draining else "paused" if self._updating.locked() else "running"

    @property
    def open_sequences(self) -> int:
        return sum(self._open.values())

    def stats(self) -> RelayStats:
        running = self.open_sequences
        busy = self._busy_s + (time.perf_counter() - self._busy_since if running else 0.0)
        counts = self._swaps, self._output_tokens, self._prefill_tokens, self._cached_tokens
        return RelayStats(self.state, self.version, running, 0, *counts, preemptions=0, busy_s=busy)

    def fail(self, reason: str) -> None:
        """Break the relay: all requests fail, and the process ends."""
        if self.failure is None:
            self.failure = EngineBroken(f"{self.client.program} at {self.client.url}: {reason}")
            if not self._failed.done():
                self._failed.set_result(None)

    async def drain(self) -> None:
        """Refuse new requests and wait until all others have ended."""
        self._draining = True
        while self.open_sequences and self.failure is None:
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """End what runs; requests that have not ended fail with an error that says so."""
        self._closing = True
        if not self._failed.done():
            self._failed.set_result(None)
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)

    async def _watch(self) -> None:
        """Count steps of the server, and find out that it has ended or does not respond."""
        seen: tuple[float, ...] = ()
        missed = 0
        while self.failure is None:
            await asyncio.sleep(WATCH_S)
            if ended := self.problem():
                self.fail(ended)
                return
            try:
                counters = await self.client.progress()
            except (EtudeError, ValueError) as error:
                missed += 1
                if missed >= MAX_MISSED:
                    self.fail(f"{missed} health checks failed: {error}")
            else:
                self.steps += counters != seen
                seen, missed = counters, 0

    # ------------------------------------------------------------------------------------------- HTTP

    def application(self, access: server.Access) -> Starlette:
        """Return the endpoints that the sampler pool uses."""
        routes = [
            Route("/generate", self._generate, methods=["POST"]),
            Route("/weights", self._weights, methods=["GET"]),
            Route("/health", self._health, methods=["GET"]),
        ]
        return server.guarded_app(routes, access)

    async def _generate(self, request: Request) -> Response:
        body = parse_request(GenerateRequest, await server.read_json(request, server.MAX_BODY))
        if body.stream:
            raise InputError("stream: a sampler in front of another server returns whole completions only")
        work = self.complete_many(body.tokens, body.sampling, body.routing)
        found = await cancel_on_disconnect(request, work)
        return JSONResponse({"samples": [completion_to_json(each, body.routing, body.known_routing) for each in found]})

    async def _weights(self, _: Request) -> Response:
        return JSONResponse({"version": self.version, "on_swap": self.on_swap})

    async def _health(self, _: Request) -> Response:
        found: dict[str, Any] = {"status": self.state, "version": self.version, "open": self.open_sequences}
        if self.failure is not None:
            found["error"] = str(self.failure)
        return JSONResponse(found, 503 if self.state in ("draining", "broken", "closed") else 200)


def version_name(version: int) -> str:
    return f"version-{version}"


def adapter_name(version: int) -> str:
    return f"policy-{version}"


def _own_error(error: ServerError) -> EtudeError:
    """Return a server's error as ours: a request that is wrong itself must not be sent again."""
    if error.status in REFUSED:
        return InputError(str(error))
    if error.status in (429, 503):
        return QueueFull(str(error))
    return EtudeError(str(error))
