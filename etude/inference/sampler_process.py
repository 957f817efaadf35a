"""The sampler process of a run: an HTTP server that samples and loads every new weight version by itself.

    ETUDE_RUN_TOKEN=... python -m etude.inference.sampler_process --service URL --name sampler-0

The run service says what to run and where the weights are, so the process may be on any machine. Requests come over
HTTP. What samples is an engine in this process or a server of vLLM or SGLang behind it (`rl.sampler.backend`). A
request continues across a weight update, and each token records the version that sampled it. The process reports its
status every second and may be killed at any time: a request is token ids, so the client sends it again. A broken or
stuck engine ends the process with exit code 1.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from etude.config import load_table
from etude.errors import EtudeError, InputError
from etude.inference import server
from etude.inference.backends.backend import SamplerBackend, SamplerService
from etude.inference.backends.engine_backend import EngineBackend
from etude.inference.service import EngineBroken, WeightSwap
from etude.inference.settings import EVALUATION, TRAINING, SamplerPurpose, SamplerRunSettings, SamplerSettings
from etude.inference.weight_update import check_finite
from etude.runs.address import TOKEN_VARIABLE
from etude.runs.member import RunMember, open_member
from etude.runs.service_status import SAMPLER
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.system.http import bind
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.weights.delta import DeltaError
from etude.weights.object_store import WEIGHTS, ObjectStore, open_store
from etude.weights.versions import BrokenChain, Version, WeightState, follow, latest, read_version

REPORT_S = 1.0
STATUS_TIMEOUT_S = 5.0  # for the run service to take a status; the next one comes soon
BACKOFF = 4.0  # after a failed read of the store, times its duration: broken chains of large models are slow to read
STUCK_S = 300.0  # without a step while there are requests; a first step may compile kernels


# ------------------------------------------------------------------------------------------ weight versions


class MeteredObjectStore(ObjectStore):
    """Another object store, of which the time and bytes of reads are counted."""

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self.url, self.directory, self._store, self._clock = store.url, store.directory, store, clock
        self.seconds, self.size = 0.0, 0

    def get(self, name: str) -> bytes | None:
        started = self._clock.monotonic()
        data = self._store.get(name)
        self.seconds += self._clock.monotonic() - started
        self.size += len(data or b"")
        return data

    def names(self, prefix: str) -> list[str]:
        return self._store.names(prefix)


@dataclass(frozen=True)
class Fetched:
    """A weight version read from the store, and the cost of reading it."""

    version: Version
    state: WeightState
    fetch_s: float
    apply_s: float
    bytes: int


class VersionFollower:
    """Reads new weight versions from the store, and records why the newest cannot be used."""

    def __init__(self, store: ObjectStore, clock: Clock = MACHINE_CLOCK) -> None:
        self.bucket, self.clock = MeteredObjectStore(store, clock), clock
        self.problem = ""  # why the newest version is not in use
        self._current: tuple[Version, WeightState] | None = None  # base of the next delta, usable or not
        self._newest: int | None = None  # in the store, or wanted, at the last look
        self._rejected = ""
        self._retry_at = 0.0

    @property
    def is_current(self) -> bool:
        """Whether the last version returned was the newest in the store at the last look."""
        return self._current is not None and self._newest == self._current[0].number

    def poll(self, wanted: int | None = None) -> Fetched | None:
        """Return a version newer than the last one returned, if the store has one that can be rebuilt.

        A `wanted` version is the only one to return, newer or older than the last.
        """
        started = self.clock.monotonic()
        if started < self._retry_at:
            return None
        seconds, size = self.bucket.seconds, self.bucket.size
        try:
            self._newest = latest(self.bucket) if wanted is None else wanted
            if self._newest is None or self.is_current:
                self.problem = self._rejected
                return None
            version, state = self._read(self._newest) if wanted is None else self._read_exactly(wanted)
        except Exception as error:  # from any kind of store; the next poll may succeed
            self._back_off(started, str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}")
            return None
        if wanted is None and self._current is not None and version.number <= self._current[0].number:
            return None
        self._current, self._rejected = (version, state), ""
        took, fetch_s = self.clock.monotonic() - started, self.bucket.seconds - seconds
        return Fetched(version, state, fetch_s, max(0.0, took - fetch_s), self.bucket.size - size)

    def reject(self, problem: str) -> None:
        """Record that the last returned version cannot be used; the next one may be."""
        self.problem = self._rejected = problem

    def _read(self, newest: int) -> tuple[Version, WeightState]:
        """Return the newest version, or the newest that can be rebuilt; `problem` then says why."""
        started, problem = self.clock.monotonic(), ""
        try:
            found = read_version(self.bucket, newest, self._current)
        except (BrokenChain, DeltaError) as error:
            found, problem = follow(self.bucket, self._current), str(error)
        if found[0].number < newest:
            self._back_off(started, problem)
        else:
            self.problem = ""
        return found

    def _read_exactly(self, wanted: int) -> tuple[Version, WeightState]:
        found = read_version(self.bucket, wanted, self._current)
        self.problem = ""
        return found

    def _back_off(self, started: float, problem: str) -> None:
        self.problem = problem
        now = self.clock.monotonic()
        self._retry_at = now + BACKOFF * (now - started)


# ------------------------------------------------------------------------------------------ the process


@dataclass(frozen=True)
class Pin:
    """The weight version that a lease to an evaluation keeps the sampler at, until it ends."""

    version: int
    shared: bool  # the sampler takes training requests too
    until: float


class Sampler:
    """What samples, with its HTTP server, its weight updates and its status reports."""

    def __init__(
        self,
        member: RunMember,
        settings: SamplerRunSettings,
        backend: SamplerBackend,
        store: ObjectStore,
        clock: Clock = MACHINE_CLOCK,
        purpose: SamplerPurpose = TRAINING,
    ) -> None:
        self.member, self.name, self.settings, self.backend = member, member.name, settings, backend
        self.purpose = purpose
        self.store, self.clock = store.url, clock
        self.follower = VersionFollower(store, clock)
        self.service: SamplerService | None = None
        self._state, self._waiting_for, self._url = "starting", "", ""
        self._loaded: dict[str, Any] = {"version": None, "checksum": ""}
        self._parent = parent_process()
        self._report_now = clock.event()
        self._reporting = member.client.twin(patience_s=0, timeout_s=STATUS_TIMEOUT_S)
        self._sampled = (clock.monotonic(), 0)  # time and tokens at the last report
        self._progress = (clock.monotonic(), -1)  # time and number of the last step
        self._pin: Pin | None = None  # of the lease that the run service told last
        self._leased: int | None = None  # version of a lease under which training is not served, or not yet again

    def run(self) -> None:
        """Serve until SIGTERM; raise EngineBroken if what samples breaks."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        self.clock.start_thread(self._report, "report")
        try:
            with bind(self.member.client.own_address(), 0) as listener:
                self.backend.start()
                asyncio.run(self._serve(self._first_version(), listener))
        except Stopped:
            pass
        except Exception as error:
            self.follower.problem = str(error)
            raise
        finally:
            self.backend.close()
            self._state, self._waiting_for, self._url = "ended", "", ""
            self.write()

    def _first_version(self) -> Fetched:
        """Wait for a first usable version, and warm up the backend meanwhile."""
        warming = self.backend.warm_up()
        deadline = self.clock.monotonic() + self.settings.stall_s
        while (fetched := self.follower.poll()) is None or not self._usable(fetched):
            store = self.store
            self._set_state("waiting", f"a first version in {store}")
            if self.clock.monotonic() > deadline:
                waited = f"after {self.settings.stall_s:g} s there is no usable version in {store}"
                why = self.follower.problem or "the trainer publishes one when it starts"
                raise EtudeError(f"{waited}: {why}")
            if not next(warming, False):
                self.clock.sleep(self.settings.weights.poll_s)
        return fetched

    def _usable(self, fetched: Fetched) -> bool:
        try:
            check_finite(fetched.state, fetched.version.number)
        except InputError as error:
            self.follower.reject(str(error))
            return False
        return True

    async def _serve(self, first: Fetched, listener: socket.socket) -> None:
        self._set_state("starting", self.backend.waits_for)
        host, port = listener.getsockname()[:2]
        started = time.perf_counter()
        async with self.backend.service(first.version, first.state) as service:
            self._record_loaded(first, time.perf_counter() - started)
            self.service = service
            loop = asyncio.get_running_loop()

            def load(fetched: Fetched) -> WeightSwap:
                loading = asyncio.run_coroutine_threadsafe(service.load(fetched.state, fetched.version.number), loop)
                return loading.result(self.backend.load_s)

            self.clock.start_thread(partial(self._follow, service, load), "follow")

            def ready() -> None:
                self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                self._set_state("ready", "")

            access = server.Access(self.member.info.sampler_token)
            application = self.backend.application(service, self.name, access)
            await server.serve(application, service, listener, grace=0.0, ready=ready)
            if service.failure is not None:
                raise service.failure

    def _follow(self, service: SamplerService, load: Callable[[Fetched], WeightSwap]) -> None:
        """Load every new version between two engine steps, or the one of a lease, until the service ends."""
        while service.state not in ("broken", "closed"):
            self.clock.sleep(self.settings.weights.poll_s)
            known, pin = self.follower.problem, self._current_pin()
            fetched = self._poll(service, pin)
            if self.follower.problem != known:
                self._report_now.set()
            if fetched is None:
                self._end_lease(pin)
                continue
            try:
                self._record_loaded(fetched, load(fetched).seconds)
            except TimeoutError:
                waited = f"in {self.backend.load_s:g} s"
                self.follower.reject(f"{self.backend.waits_for} did not take version {fetched.version.number} {waited}")
            except EngineBroken:
                return
            except EtudeError as error:
                self.follower.reject(str(error))
            except (CancelledError, RuntimeError):  # the event loop has ended, and the process is about to
                return
            self._end_lease(pin)

    def _current_pin(self) -> Pin | None:
        """Return the pin of the sampler's lease; None if it has none, or it has expired."""
        pin = self._pin
        return pin if pin is not None and self.clock.monotonic() < pin.until else None

    def _poll(self, service: SamplerService, pin: Pin | None) -> Fetched | None:
        """Return the version to load now, if it is another than the sampler has."""
        if pin is None:
            return None if self.purpose == EVALUATION else self.follower.poll()
        version = service.stats().version
        if pin.version < version and service.stats().running + service.stats().waiting:
            return None  # requests of training end on weights that do not go back
        return self.follower.poll(pin.version)

    def _end_lease(self, pin: Pin | None) -> None:
        """After a lease, serve training again as soon as the newest weights are in use."""
        if pin is None and self._leased is not None and self.follower.is_current:
            self._leased = None
            self._report_now.set()

    def _take_instructions(self, lease: Mapping[str, Any] | None) -> None:
        """Take note of the lease that the run service tells of; one that it does not renew expires."""
        if lease is None:
            self._pin = None
            return
        until = self.clock.monotonic() + lease["seconds"]
        self._pin = Pin(lease["version"], lease["shared"], until)
        if not lease["shared"] and self._leased != lease["version"]:
            self._leased = lease["version"]
            self._report_now.set()

    def _record_loaded(self, fetched: Fetched, swap_s: float) -> None:
        self._loaded = {
            "version": fetched.version.number,
            "checksum": fetched.version.checksum,
            "loaded_at": self.clock.time(),
            "fetch_s": round(fetched.fetch_s, 4),
            "apply_s": round(fetched.apply_s, 4),
            "swap_s": round(swap_s, 4),
            "fetched_bytes": fetched.bytes,
        }
        self._report_now.set()

    # ------------------------------------------------------------------------------------------ status

    def _set_state(self, state: str, waiting_for: str) -> None:
        if (state, waiting_for) != (self._state, self._waiting_for):
            self._state, self._waiting_for = state, waiting_for
            self._report_now.set()

    def _report(self) -> None:
        """Every second: report the status, and end if the parent process has ended or the engine is stuck."""
        while True:
            self._report_now.clear()
            self.write()
            if os.getppid() != self._parent:
                self._end("the process that started this one has ended", 1)
            self._end_if_stuck()
            self._report_now.wait(REPORT_S)

    def write(self) -> None:
        """Report the status."""
        facts: dict[str, Any] = {
            "kind": SAMPLER,
            "state": self._state,
            "waiting_for": self._waiting_for,
            "url": self._url,
            "model": str(self.backend.model),
            "backend": self.settings.sampler.backend,
            "problem": self.follower.problem,
            "purpose": self.purpose,
            "leased": self._leased,
            **self._loaded,
            **self._metrics(),
        }
        try:
            self._take_instructions(self._reporting.report_status(self.name, **facts))
        except EtudeError as error:
            say(f"{self.name}: the status cannot be reported: {error}", file=sys.stderr)

    def _metrics(self) -> dict[str, Any]:
        if self.service is None:
            return {}
        stats, (then, before), now = self.service.stats(), self._sampled, self.clock.monotonic()
        self._sampled = now, stats.output_tokens
        return {
            "version": stats.version,
            "engine": stats.state,
            "running": stats.running,
            "waiting": stats.waiting,
            "swaps": stats.swaps,
            "made_tokens": stats.output_tokens,
            "read_tokens": stats.prefill_tokens,
            "cached_tokens": stats.cached_tokens,
            "preemptions": stats.preemptions,
            "busy_s": round(stats.busy_s, 3),
            "tokens_s": round((stats.output_tokens - before) / max(now - then, 1e-3), 1),
        }

    def _end_if_stuck(self) -> None:
        """End the process if an engine step, or the shutdown itself, does not finish."""
        service, now = self.service, self.clock.monotonic()
        if service is None:
            return
        ending = service.state in ("broken", "closed")
        if (
            service.steps != self._progress[1] or service.state == "paused" or not service.open_sequences
        ) and not ending:
            self._progress = now, service.steps
        limit = self.backend.close_s if ending else STUCK_S
        if now - self._progress[0] > limit:
            failure = f" after its failure: {service.failure}" if service.failure is not None else ""
            why = (
                f"the shutdown does not finish{failure}"
                if ending
                else f"{self.backend.waits_for} made no step in {limit:g} s with {service.open_sequences} sequences"
            )
            self._end(why, 0 if service.state == "closed" else 1)

    def _end(self, why: str, code: int) -> NoReturn:
        """Exit at once, without closing connections or joining threads."""
        say(f"{self.name}: {why}", file=sys.stderr)
        self.backend.close()
        self._state, self._waiting_for, self._url, self.follower.problem = "ended", "", "", why
        self.write()
        os._exit(code)


class Stopped(BaseException):
    """The process was asked to end."""


def _stop(number: int, frame: object) -> NoReturn:
    raise Stopped


def open_backend(model: Path, settings: SamplerRunSettings, gpu: int, url: str, routing: bool) -> SamplerBackend:
    """Return the backend that the recipe names; nothing of it is started yet."""
    if settings.sampler.backend == "etude":
        return EngineBackend(model, settings, gpu)
    from etude.inference.backends.server_backend import ServerBackend

    return ServerBackend(model, settings, gpu, url, routing)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m etude.inference.sampler_process", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--service", required=True, metavar="URL", help=f"run service; its token is in ${TOKEN_VARIABLE}"
    )
    parser.add_argument("--name", required=True, help="name of this sampler, such as sampler-0")
    parser.add_argument("--gpu", type=int, default=0, help="its (first) GPU, counted round, if the recipe names none")
    parser.add_argument("--url", default="", help="the server of its backend, which runs already")
    parser.add_argument(
        "--evaluation", action="store_true", help="serve evaluations only, with the settings [evaluation.sampler]"
    )
    parser.add_argument("--routing", action="store_true", help="experts of MoE models are needed, of a server too")
    given = parser.parse_args(arguments)
    try:
        die_with_parent(parent_process())
        member = open_member(given.service, given.name)
        recipe, purpose = member.layout.recipe, EVALUATION if given.evaluation else TRAINING
        settings = load_table(recipe, member.layout.sessions_table(), SamplerRunSettings)
        if given.evaluation:
            own = load_table(recipe, "evaluation.sampler", SamplerSettings)
            settings = settings.model_copy(update={"sampler": own})
        backend = open_backend(member.model(weights=True), settings, given.gpu, given.url, given.routing)
        Sampler(member, settings, backend, open_store(member, WEIGHTS), purpose=purpose).run()
    except EtudeError as error:
        say(f"{given.name}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a weight update may be inside torch, whose threads crash when the interpreter shuts down
