"""Start and watch the service processes of a run on this machine.

A service that dies is started again, with a growing pause. A service that reports no status for too long is killed. One
that rejects its input or gives up would do so again, so the run ends with its error. A service that dies too
often ends the run too. All services end with the process that started them, however that ends.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

from etude.errors import EtudeError, InputError
from etude.runs.layout import RunLayout
from etude.runs.service_status import read_status
from etude.system.processes import PARENT_VARIABLE

SILENCE_S = 120.0  # a process without a status for so long is killed; loading torch alone may take 30 s
DEATH_WINDOW_S = 300.0  # seconds after which a death no longer counts
MAX_DEATHS = 8  # within the window
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 20.0  # seconds before a restart; doubled with every death
STOP_S = 10.0  # seconds that a process has to end after SIGTERM
LOG_TAIL = 2000  # characters of a log shown in an error


class ServiceGaveUp(EtudeError):
    """A service cannot continue, and would fail the same way after a restart."""

    exit_code: ClassVar[int] = 4


class ServiceFailed(EtudeError):
    """A service failed for good: a final exit code, or too many deaths."""


FINAL_EXIT_CODES = (InputError.exit_code, ServiceGaveUp.exit_code)


@dataclass
class Service:
    """One service, across all its processes."""

    name: str
    command: Sequence[str]
    finishes: bool = False  # exit code 0 means that its work is done; other services run until they are stopped
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    deaths: list[float] = field(default_factory=list)
    starts: int = 0
    finished: bool = False


class LocalServices:
    """The services of a run as local processes. A context manager: leaving it stops them all."""

    def __init__(self, layout: RunLayout, on_death: Callable[[str, str], None] = lambda name, reason: None) -> None:
        self.layout, self.on_death = layout, on_death
        self.services: dict[str, Service] = {}

    def __enter__(self) -> "LocalServices":
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(*self.services)

    def add(self, name: str, module: str, *arguments: str, finishes: bool = False) -> None:
        """Add a service `python -m MODULE RUN --root ROOT ARGUMENTS`; the next `tick` starts it."""
        root = ("--root", self.layout.service_root)
        command = [sys.executable, "-m", module, str(self.layout.run), *root, *arguments]
        self.services[name] = Service(name, command, finishes)

    def tick(self) -> None:
        """Start services that should run and do not, and kill those that hang."""
        now = time.monotonic()
        for service in self.services.values():
            if service.finished:
                continue
            if service.process is None:
                if now >= service.restart_at:
                    self._start(service)
                continue
            code = service.process.poll()
            if code is None and self._is_silent(service):
                service.process.kill()
                code = service.process.wait()
                self._on_process_death(service, f"reported nothing for {SILENCE_S:.0f} s and was killed")
            elif code == 0 and service.finishes:
                service.finished, service.process = True, None
            elif code is not None:
                reason = f"ended with signal {-code}" if code < 0 else f"ended with exit code {code}"
                self._on_process_death(service, reason, code)

    def stop(self, *names: str) -> None:
        """Stop services: SIGTERM first, then SIGKILL."""
        running = [service for name in names if (service := self.services[name]).process is not None]
        for service in running:
            assert service.process is not None
            service.process.terminate()
        deadline = time.monotonic() + STOP_S
        for service in running:
            assert service.process is not None
            try:
                service.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                service.process.kill()
                service.process.wait()
            service.process, service.finished = None, True

    def restarts(self) -> dict[str, int]:
        """Return how often each service was restarted, those that never were left out."""
        return {name: service.starts - 1 for name, service in self.services.items() if service.starts > 1}

    def _start(self, service: Service) -> None:
        (self.layout.services / f"{service.name}.json").unlink(missing_ok=True)  # status of the previous process
        log = self._log(service.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        out: IO[bytes]
        with open(log, "ab") as out:
            service.process = subprocess.Popen(
                service.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )
        service.started_at, service.starts = time.time(), service.starts + 1

    def _is_silent(self, service: Service) -> bool:
        status = read_status(self.layout, service.name) or {}
        return time.time() - max(service.started_at, float(status.get("time", 0.0))) > SILENCE_S

    def _on_process_death(self, service: Service, reason: str, code: int = 1) -> None:
        now = time.monotonic()
        service.process = None
        service.deaths = [when for when in service.deaths if now - when < DEATH_WINDOW_S] + [now]
        self.on_death(service.name, reason)
        status = read_status(self.layout, service.name) or {}
        if code == InputError.exit_code and status.get("state") == "failed":
            raise InputError(status["problem"])  # in its own words: they name what to change
        final = code in FINAL_EXIT_CODES
        if final or len(service.deaths) >= MAX_DEATHS:
            count = f" for the {len(service.deaths)}th time in {DEATH_WINDOW_S / 60:.0f} minutes"
            raise ServiceFailed(
                f"{service.name} {reason}{'' if final else count}; its log ends:\n{self._log_tail(service.name)}"
            )
        service.restart_at = now + min(MAX_PAUSE_S, MIN_PAUSE_S * 2 ** (len(service.deaths) - 1))

    def _log(self, name: str) -> Path:
        return self.layout.logs / f"{name}.log"

    def _log_tail(self, name: str) -> str:
        text = self._log(name).read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
        return "\n".join(f"  {line}" for line in text.strip().splitlines()[-15:])
