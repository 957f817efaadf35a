"""The sampler process of a run: an engine behind the HTTP server that loads every new weight version by itself.

    python -m etude.inference.sampler_process RUN --name sampler-0

Weights come from the object store, requests over HTTP. A request continues across a weight update, and each token
records the version that sampled it. The process reports its status every second and may be killed at any time: a
request is token ids, so the client sends it again. A broken or stuck engine ends the process with exit code 1.
"""

import argparse
import asyncio
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from etude.config import load_table
from etude.errors import EtudeError, InputError
from etude.inference import server
from etude.inference.engine import Engine, open_engine
from etude.inference.service import EngineBroken, EngineService
from etude.inference.settings import SamplerRunSettings
from etude.inference.weight_update import check_finite
from etude.runs.layout import RL_ROOT, RunLayout
from etude.runs.service_status import SAMPLER, sampler_token, write_status
from etude.system.http import bind
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.weights.delta import DeltaError
from etude.weights.object_store import ObjectStore
from etude.weights.versions import BrokenChain, Version, WeightState, follow, latest, read_version

REPORT_S = 1.0
LOAD_S = 120.0  # for the engine to take new weights between two steps
BACKOFF = 4.0  # after a failed read of the store, times its duration: broken chains of large models are slow to read
CLOSE_S = 5.0  # for connections to close at the end
STUCK_S = 300.0  # without a step while there are requests; a first step may compile kernels
HOST = "127.0.0.1"


# ------------------------------------------------------------------------------------------ weight versions


class MeteredObjectStore(ObjectStore):
    """An object store that counts the time and bytes of reads."""

    seconds = 0.0
    size = 0

    def get(self, name: str) -> bytes | None:
        started = time.perf_counter()
        data = super().get(name)
        self.seconds += time.perf_counter() - started
        self.size += len(data or b"")
        return data


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

    def __init__(self, bucket: MeteredObjectStore) -> None:
        self.bucket = bucket
        self.problem = ""  # why the newest version is not in use
        self._current: tuple[Version, WeightState] | None = None  # base of the next delta, usable or not
        self._rejected = ""
        self._retry_at = 0.0

    def poll(self) -> Fetched | None:
        """Return a version newer than the last one returned, if the store has one that can be rebuilt."""
        started = time.monotonic()
        if started < self._retry_at:
            return None
        seconds, size = self.bucket.seconds, self.bucket.size
        try:
            newest = latest(self.bucket)
            if newest is None or (self._current is not None and newest == self._current[0].number):
                self.problem = self._rejected
                return None
            version, state = self._read(newest)
        except Exception as error:  # from any kind of store; the next poll may succeed
            self._back_off(started, str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}")
            return None
        if self._current is not None and version.number <= self._current[0].number:
            return None
        self._current, self._rejected = (version, state), ""
        took, fetch_s = time.monotonic() - started, self.bucket.seconds - seconds
        return Fetched(version, state, fetch_s, max(0.0, took - fetch_s), self.bucket.size - size)

    def reject(self, problem: str) -> None:
        """Record that the last returned version cannot be used; the next one may be."""
        self.problem = self._rejected = problem

    def _read(self, newest: int) -> tuple[Version, WeightState]:
        """Return the newest version, or the newest that can be rebuilt; `problem` then says why."""
        started, problem = time.monotonic(), ""
        try:
            found = read_version(self.bucket, newest, self._current)
        except (BrokenChain, DeltaError) as error:
            found, problem = follow(self.bucket, self._current), str(error)
        if found[0].number < newest:
            self._back_off(started, problem)
        else:
            self.problem = ""
        return found

    def _back_off(self, started: float, problem: str) -> None:
        self.problem = problem
        now = time.monotonic()
        self._retry_at = now + BACKOFF * (now - started)


# ------------------------------------------------------------------------------------------ the process


class Sampler:
    """One engine with its HTTP server, its weight updates and its status reports."""

    def __init__(self, layout: RunLayout, name: str, settings: SamplerRunSettings) -> None:
        self.layout, self.name, self.settings = layout, name, settings
        elsewhere = settings.weights.store if layout.service_root == RL_ROOT else ""  # of the weights that RL trains
        self.store = elsewhere or layout.store
        self.follower = VersionFollower(MeteredObjectStore(self.store))
        self.service: EngineService | None = None
        self._state, self._waiting_for, self._url = "starting", "", ""
        self._loaded: dict[str, Any] = {"version": None, "checksum": ""}
        self._parent = parent_process()
        self._report_now = threading.Event()
        self._sampled = (time.monotonic(), 0)  # time and tokens at the last report
        self._progress = (time.monotonic(), -1)  # time and number of the engine's last step

    def run(self) -> None:
        """Serve until SIGTERM; raise EngineBroken if the engine breaks."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        threading.Thread(target=self._report, name="report", daemon=True).start()
        try:
            with bind(HOST, 0) as listener:
                engine = self._open_engine()
                self._begin(engine)
                asyncio.run(self._serve(engine, listener))
        except Stopped:
            pass
        except Exception as error:
            self.follower.problem = str(error)
            raise
        finally:
            self._state, self._waiting_for, self._url = "ended", "", ""
            self.write()

    def _open_engine(self) -> Engine:
        """Return an engine with the model that the run started from; the first version replaces its weights."""
        sampler = self.settings.sampler
        if sampler.threads:
            torch.set_num_threads(sampler.threads)
        dtype = getattr(torch, self.settings.precision)
        return open_engine(self.layout.model, sampler, dtype=dtype, device=sampler.device)

    def _begin(self, engine: Engine) -> None:
        """Wait for a first usable version, and warm up the engine meanwhile."""
        warming = engine.warm_up()
        deadline = time.monotonic() + self.settings.stall_s
        while (fetched := self.follower.poll()) is None or not self._usable(fetched):
            store = self.store
            self._set_state("waiting", f"a first version in {store}")
            if time.monotonic() > deadline:
                waited = f"after {self.settings.stall_s:g} s there is no usable version in {store}"
                why = self.follower.problem or "the trainer publishes one when it starts"
                raise EtudeError(f"{waited}: {why}")
            if not next(warming, False):
                time.sleep(self.settings.weights.poll_s)
        self._set_state("starting", "the engine")
        started = time.perf_counter()
        engine.load(fetched.state, fetched.version.number)
        self._record_loaded(fetched, time.perf_counter() - started)

    def _usable(self, fetched: Fetched) -> bool:
        try:
            check_finite(fetched.state, fetched.version.number)
        except InputError as error:
            self.follower.reject(str(error))
            return False
        return True

    async def _serve(self, engine: Engine, listener: socket.socket) -> None:
        host, port = listener.getsockname()[:2]
        async with EngineService(engine) as service:
            self.service = service
            loop = asyncio.get_running_loop()
            threading.Thread(target=self._follow, args=(service, loop), name="follow", daemon=True).start()

            def ready() -> None:
                self._url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
                self._set_state("ready", "")

            access = server.Access(sampler_token(self.layout))
            model = server.ServedModel.of(self.name, engine.tokenizer)
            await server.run(service, listener, model, access, grace=0.0, ready=ready)
            if service.failure is not None:
                raise service.failure

    def _follow(self, service: EngineService, loop: asyncio.AbstractEventLoop) -> None:
        """Load every new version between two engine steps, until the service ends."""
        while service.state not in ("broken", "closed"):
            time.sleep(self.settings.weights.poll_s)
            known, fetched = self.follower.problem, self.follower.poll()
            if self.follower.problem != known:
                self._report_now.set()
            if fetched is None:
                continue
            number = fetched.version.number
            try:
                loading = asyncio.run_coroutine_threadsafe(service.load(fetched.state, number), loop)
                self._record_loaded(fetched, loading.result(LOAD_S).seconds)
            except TimeoutError:
                self.follower.reject(f"the engine did not take version {number} in {LOAD_S:g} s")
            except EngineBroken:
                return
            except EtudeError as error:
                self.follower.reject(str(error))
            except (CancelledError, RuntimeError):  # the event loop has ended, and the process is about to
                return

    def _record_loaded(self, fetched: Fetched, swap_s: float) -> None:
        self._loaded = {
            "version": fetched.version.number,
            "checksum": fetched.version.checksum,
            "loaded_at": time.time(),
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
        """Write the status file."""
        facts = {"kind": SAMPLER, "state": self._state, "waiting_for": self._waiting_for, "url": self._url}
        facts |= {
            "model": str(self.layout.model),
            "problem": self.follower.problem,
            **self._loaded,
            **self._metrics(),
        }
        try:
            write_status(self.layout, self.name, **facts)
        except OSError as error:
            print(f"{self.name}: the status file cannot be written: {error}", file=sys.stderr, flush=True)

    def _metrics(self) -> dict[str, Any]:
        if self.service is None:
            return {}
        stats, (then, before), now = self.service.stats(), self._sampled, time.monotonic()
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
        service, now = self.service, time.monotonic()
        if service is None:
            return
        ending = service.state in ("broken", "closed")
        if (
            service.engine.steps != self._progress[1] or service.state == "paused" or not service.open_sequences
        ) and not ending:
            self._progress = now, service.engine.steps
        limit = CLOSE_S if ending else STUCK_S
        if now - self._progress[0] > limit:
            why = (
                "the shutdown does not finish"
                if ending
                else f"the engine made no step in {limit:g} s with {service.open_sequences} sequences"
            )
            self._end(why, 0 if service.state == "closed" else 1)

    def _end(self, why: str, code: int) -> NoReturn:
        """Exit at once, without closing connections or joining threads."""
        say(f"{self.name}: {why}", file=sys.stderr)
        self._state, self._waiting_for, self._url, self.follower.problem = "ended", "", "", why
        self.write()
        os._exit(code)


class Stopped(BaseException):
    """The process was asked to end."""


def _stop(number: int, frame: object) -> NoReturn:
    raise Stopped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m etude.inference.sampler_process", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--root", default=RL_ROOT, help="directory of the run that its processes share")
    parser.add_argument("--name", required=True, help="name of this sampler, such as sampler-0")
    given = parser.parse_args(arguments)
    try:
        die_with_parent(parent_process())
        layout = RunLayout.of_run(given.run, given.root)
        settings = load_table(layout.recipe, layout.sessions_table(), SamplerRunSettings)
        Sampler(layout, given.name, settings).run()
    except EtudeError as error:
        say(f"{given.name}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # a weight update may be inside torch, whose threads crash when the interpreter shuts down
