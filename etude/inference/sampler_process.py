"""A sampler of a run: an engine behind our HTTP server that follows the chain of weights by itself.

    python -m etude.inference.sampler_process RUN --name sampler-0

Weights come from the store, requests over HTTP; a request goes on across a swap, and its tokens say of which version
they are. Every second a status file tells how it is. It may be killed at any time: a request is token ids, and whoever
asked asks again (`samplers.py`). A broken or stuck engine ends the process with 1, for somebody to start another.
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

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import EtudeError, InputError
from etude.inference import server
from etude.inference.engine import Engine, EngineOptions
from etude.inference.service import EngineBroken, EngineService
from etude.inference.weight_update import check_finite
from etude.kernels import usable_device
from etude.model.checkpoint import load
from etude.recipe.sections import RlStage
from etude.rollouts.sampler_pool import KIND, token_of
from etude.runs.layout import Place, die_with_parent, parent_process, place_and_section, write_status
from etude.weights.bucket import Bucket
from etude.weights.delta import DeltaError
from etude.weights.versions import BrokenChain, State, Version, follow, latest, read_version

REPORT_S = 1.0
LOAD_S = 120.0  # for the engine to take new weights between two steps
REST = 4.0  # after a failed look at the store, times what it took: broken chains of large models are costly to read
LINGER_S = 5.0  # for connections to close at the end
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Settings:
    """What a sampler needs to know."""

    model: Path
    store: str
    engine: EngineOptions
    device: str = "auto"
    dtype: str = "float32"
    threads: int = 0
    host: str = "127.0.0.1"
    poll_s: float = 0.2
    first_version_s: float = 600.0  # to wait for the trainer, which loads the model too and uploads all of it
    stuck_s: float = 300.0  # without a step while there is work; a first step may compile kernels


def settings_of(place: Place, section: RlStage) -> Settings:
    table = section.sampler
    options = EngineOptions(
        tokens=table.tokens, max_streams=table.max_streams, budget=table.budget, on_swap=table.on_swap
    )
    return Settings(
        model=place.model,
        store=place.store,
        engine=options,
        device=table.device,
        dtype=section.precision,
        threads=table.threads,
        poll_s=section.weights.poll_s,
        first_version_s=section.stall_s,
    )


# ------------------------------------------------------------------------------------------- the chain of weights


class MeteredBucket(Bucket):
    """A bucket that counts what reading took."""

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
    """A version as it came from the store."""

    version: Version
    state: State
    fetch_s: float
    apply_s: float
    bytes: int


class Chain:
    """Where we are in the chain, and what is wrong with what comes next."""

    def __init__(self, bucket: MeteredBucket) -> None:
        self.bucket = bucket
        self.problem = ""  # why the newest version is not the one in use
        self._have: tuple[Version, State] | None = None  # what deltas apply to, usable or not
        self._refused = ""
        self._rests_until = 0.0

    def look(self) -> Fetched | None:
        """A version newer than the last one given, if the store has one that can be rebuilt."""
        started = time.monotonic()
        if started < self._rests_until:
            return None
        seconds, size = self.bucket.seconds, self.bucket.size
        try:
            newest = latest(self.bucket)
            if newest is None or (self._have is not None and newest == self._have[0].number):
                self.problem = self._refused
                return None
            version, state = self._read(newest)
        except Exception as error:  # of whatever store: it may work again
            self._rest(started, str(error) if isinstance(error, EtudeError) else f"{type(error).__name__}: {error}")
            return None
        if self._have is not None and version.number <= self._have[0].number:
            return None
        self._have, self._refused = (version, state), ""
        took, fetch_s = time.monotonic() - started, self.bucket.seconds - seconds
        return Fetched(version, state, fetch_s, max(0.0, took - fetch_s), self.bucket.size - size)

    def refuse(self, problem: str) -> None:
        """The version given last cannot be used; the next may be."""
        self.problem = self._refused = problem

    def _read(self, newest: int) -> tuple[Version, State]:
        """The newest version, or the newest that can be rebuilt, and then `problem` says why."""
        started, problem = time.monotonic(), ""
        try:
            found = read_version(self.bucket, newest, self._have)
        except (BrokenChain, DeltaError) as error:
            found, problem = follow(self.bucket, self._have), str(error)
        if found[0].number < newest:
            self._rest(started, problem)
        else:
            self.problem = ""
        return found

    def _rest(self, started: float, problem: str) -> None:
        self.problem = problem
        now = time.monotonic()
        self._rests_until = now + REST * (now - started)


# ------------------------------------------------------------------------------------------- the process


class Sampler:
    """One engine, who asks it, what it follows, and what it says of itself."""

    def __init__(self, place: Place, name: str, settings: Settings) -> None:
        self.place, self.name, self.settings = place, name, settings
        self.chain = Chain(MeteredBucket(settings.store))
        self.service: EngineService | None = None
        self._state, self._waiting_for, self._url = "starting", "", ""
        self._loaded: dict[str, Any] = {"version": None, "checksum": ""}
        self._parent = parent_process()
        self._reports = threading.Event()  # set: at once
        self._made = (time.monotonic(), 0)  # tokens at the last report
        self._moved = (time.monotonic(), -1)  # when the engine's steps last grew

    def run(self) -> None:
        """Serve until SIGTERM, which ends it at once; EngineBroken when the engine is."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        threading.Thread(target=self._report, name="report", daemon=True).start()
        try:
            with server.bind(self.settings.host, 0) as listener:
                engine = open_engine(self.settings)
                self._begin(engine)
                asyncio.run(self._serve(engine, listener))
        except Stopped:
            pass
        except Exception as error:
            self.chain.problem = str(error)
            raise
        finally:
            self._state, self._waiting_for, self._url = "ended", "", ""
            self.write()

    def _begin(self, engine: Engine) -> None:
        """Wait for a first version that can be used, and get ready meanwhile."""
        warming = engine.warm()
        deadline = time.monotonic() + self.settings.first_version_s
        while (fetched := self.chain.look()) is None or not self._usable(fetched):
            store = self.settings.store
            self._tell("waiting", f"a first version in {store}")
            if time.monotonic() > deadline:
                waited = f"after {self.settings.first_version_s:g} s there is no usable version in {store}"
                why = self.chain.problem or "the trainer publishes one when it starts"
                raise EtudeError(f"{waited}: {why}")
            if not next(warming, False):
                time.sleep(self.settings.poll_s)
        self._tell("starting", "the engine")
        started = time.perf_counter()
        engine.load(fetched.state, fetched.version.number)
        self._note(fetched, time.perf_counter() - started)

    def _usable(self, fetched: Fetched) -> bool:
        try:
            check_finite(fetched.state, fetched.version.number)
        except InputError as error:
            self.chain.refuse(str(error))
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
                self._tell("ready", "")

            token = token_of(self.place)
            await server.run(service, listener, name=self.name, token=token, grace=0.0, ready=ready)
            if service.failure is not None:
                raise service.failure

    def _follow(self, service: EngineService, loop: asyncio.AbstractEventLoop) -> None:
        """Bring every new version between two steps of the engine, for as long as that takes any."""
        while service.state not in ("broken", "closed"):
            time.sleep(self.settings.poll_s)
            known, fetched = self.chain.problem, self.chain.look()
            if self.chain.problem != known:
                self._reports.set()
            if fetched is None:
                continue
            number = fetched.version.number
            try:
                loading = asyncio.run_coroutine_threadsafe(service.load(fetched.state, number), loop)
                self._note(fetched, loading.result(LOAD_S).seconds)
            except TimeoutError:
                self.chain.refuse(f"the engine did not take version {number} in {LOAD_S:g} s")
            except EngineBroken:
                return
            except EtudeError as error:
                self.chain.refuse(str(error))
            except (CancelledError, RuntimeError):  # the loop has ended, and the process is about to
                return

    def _note(self, fetched: Fetched, swap_s: float) -> None:
        self._loaded = {
            "version": fetched.version.number,
            "checksum": fetched.version.checksum,
            "loaded_at": time.time(),
            "fetch_s": round(fetched.fetch_s, 4),
            "apply_s": round(fetched.apply_s, 4),
            "swap_s": round(swap_s, 4),
            "fetched_bytes": fetched.bytes,
        }
        self._reports.set()

    # ------------------------------------------------------------------------------------------- what it says

    def _tell(self, state: str, waiting_for: str) -> None:
        if (state, waiting_for) != (self._state, self._waiting_for):
            self._state, self._waiting_for = state, waiting_for
            self._reports.set()

    def _report(self) -> None:
        """Every second: say how it is, and look whether anybody still wants it."""
        while True:
            self._reports.clear()
            self.write()
            if os.getppid() != self._parent:
                self._end("the process that started this one has ended", 1)
            self._end_if_stuck()
            self._reports.wait(REPORT_S)

    def write(self) -> None:
        """The status file, as of now."""
        facts = {"kind": KIND, "state": self._state, "waiting_for": self._waiting_for, "url": self._url}
        facts |= {"model": str(self.settings.model), "problem": self.chain.problem, **self._loaded, **self._figures()}
        try:
            write_status(self.place, self.name, **facts)
        except OSError as error:
            print(f"{self.name}: the status file cannot be written: {error}", file=sys.stderr, flush=True)

    def _figures(self) -> dict[str, Any]:
        if self.service is None:
            return {}
        stats, (then, before), now = self.service.stats(), self._made, time.monotonic()
        self._made = now, stats.made_tokens
        return {
            "version": stats.version,
            "engine": stats.state,
            "running": stats.running,
            "waiting": stats.waiting,
            "swaps": stats.swaps,
            "made_tokens": stats.made_tokens,
            "read_tokens": stats.read_tokens,
            "cached_tokens": stats.cached_tokens,
            "preemptions": stats.preemptions,
            "busy_s": round(stats.busy_s, 3),
            "tokens_s": round((stats.made_tokens - before) / max(now - then, 1e-3), 1),
        }

    def _end_if_stuck(self) -> None:
        """A step that never ends must not look like work; nor may an end that never comes."""
        service, now = self.service, time.monotonic()
        if service is None:
            return
        ending = service.state in ("broken", "closed")
        if (service.engine.steps != self._moved[1] or service.state == "paused" or not service.held) and not ending:
            self._moved = now, service.engine.steps
        limit = LINGER_S if ending else self.settings.stuck_s
        if now - self._moved[0] > limit:
            why = "it does not end" if ending else f"the engine made no step in {limit:g} s with {service.held} samples"
            self._end(why, 0 if service.state == "closed" else 1)

    def _end(self, why: str, code: int) -> NoReturn:
        """Without waiting for anybody."""
        print(f"{self.name}: {why}", file=sys.stderr, flush=True)
        self._state, self._waiting_for, self._url, self.chain.problem = "ended", "", "", why
        self.write()
        os._exit(code)


def open_engine(settings: Settings) -> Engine:
    """The engine around the model the run began with."""
    if settings.threads:
        torch.set_num_threads(settings.threads)
    tokenizer = Tokenizer.load(settings.model)
    model = load(settings.model, dtype=TYPES[settings.dtype], device=usable_device(settings.device))
    check_vocabulary(tokenizer, model.config.vocab_size, str(settings.model))
    return Engine(model, settings.engine, tokenizer=tokenizer)


class Stopped(BaseException):
    """Somebody asked the process to end."""


def _stop(number: int, frame: object) -> NoReturn:
    raise Stopped


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m etude.inference.sampler_process", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--name", required=True, help="of this sampler, such as sampler-0")
    given = parser.parse_args(arguments)
    try:
        die_with_parent(parent_process())
        place, section, _ = place_and_section(given.run)
        Sampler(place, given.name, settings_of(place, section)).run()
    except EtudeError as error:
        print(f"{given.name}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # what follows the chain may be inside torch, whose threads do not bear the interpreter's end
