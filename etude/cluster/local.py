"""The processes of a run on this machine: started, watched, started again when they die.

They end with whoever started them, however that ends. A process that says nothing for too long is as good as dead and
is killed; one that refuses its input or gives up would do so again, and that ends the run with its own words. So does
one that dies again and again: how often, and the end of its log, are in the message.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from etude.errors import EtudeError, InputError
from etude.runs.layout import GivenUp, Place, read_status

SILENT_S = 120.0  # without a word after which a process is killed; torch alone may take half a minute to load
FORGIVEN_S = 300.0  # after which a death no longer counts
MOST_DEATHS = 8
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 20.0
END_S = 10.0  # that a process has to end when it is asked to
TAIL = 2000  # characters of a log that are shown
FINAL = (InputError.exit_code, GivenUp.exit_code)


class ServiceFailed(EtudeError):
    """A process that cannot be kept alive."""


@dataclass
class Service:
    """One process, through all its lives."""

    name: str
    command: Sequence[str]
    ends: bool = False  # it has an end to come to; the others run until they are stopped
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    next_start: float = 0.0
    deaths: list[float] = field(default_factory=list)
    lives: int = 0
    ended: bool = False  # it has done its work


class Services:
    """Use as a context: leaving ends them all."""

    def __init__(self, place: Place, on_death: Callable[[str, str], None] = lambda name, why: None) -> None:
        self.place, self.on_death = place, on_death
        self.all: dict[str, Service] = {}

    def __enter__(self) -> "Services":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(*self.all)

    def add(self, name: str, module: str, *arguments: str, ends: bool = False) -> None:
        """A process that shall run from now on."""
        self.all[name] = Service(name, [sys.executable, "-m", module, str(self.place.run), *arguments], ends)

    def tend(self) -> None:
        """Start what should run and does not; once in a while."""
        now = time.monotonic()
        for service in self.all.values():
            if service.ended:
                continue
            if service.process is None:
                if now >= service.next_start:
                    self._start(service)
                continue
            code = service.process.poll()
            if code is None and self._silent(service):
                service.process.kill()
                code = service.process.wait()
                self._mourn(service, f"said nothing for {SILENT_S:.0f} s and was killed")
            elif code == 0 and service.ends:
                service.ended, service.process = True, None
            elif code is not None:
                self._mourn(service, f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}", code)

    def stop(self, *names: str) -> None:
        """End processes: asked first, then killed."""
        there = [service for name in names if (service := self.all[name]).process is not None]
        for service in there:
            assert service.process is not None
            service.process.terminate()
        deadline = time.monotonic() + END_S
        for service in there:
            assert service.process is not None
            try:
                service.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
            service.process, service.ended = None, True

    def deaths(self) -> dict[str, int]:
        """How often each has died in this process's time, those who never did left out."""
        return {name: service.lives - 1 for name, service in self.all.items() if service.lives > 1}

    def _start(self, service: Service) -> None:
        (self.place.services / f"{service.name}.json").unlink(missing_ok=True)  # what its last life said
        log = self._log(service.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        out: IO[bytes]
        with open(log, "ab") as out:
            service.process = subprocess.Popen(
                service.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "ETUDE_PARENT": str(os.getpid())},
            )
        service.started, service.lives = time.time(), service.lives + 1

    def _silent(self, service: Service) -> bool:
        status = read_status(self.place, service.name) or {}
        return time.time() - max(service.started, float(status.get("time", 0.0))) > SILENT_S

    def _mourn(self, service: Service, why: str, code: int = 1) -> None:
        now = time.monotonic()
        service.process = None
        service.deaths = [when for when in service.deaths if now - when < FORGIVEN_S] + [now]
        self.on_death(service.name, why)
        if code in FINAL or len(service.deaths) >= MOST_DEATHS:
            often = "" if code in FINAL else f" for the {len(service.deaths)}th time in {FORGIVEN_S / 60:.0f} minutes"
            raise ServiceFailed(f"{service.name} {why}{often}; its log ends:\n{self._tail(service.name)}")
        service.next_start = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (len(service.deaths) - 1))

    def _log(self, name: str) -> Path:
        return self.place.logs / f"{name}.log"

    def _tail(self, name: str) -> str:
        text = self._log(name).read_text(encoding="utf-8", errors="replace")[-TAIL:]
        return "\n".join(f"  {line}" for line in text.strip().splitlines()[-15:])
