"""The last status of every service of a run, as the run service has it; when none answers, its last copy on disk.

Services report to the run service (`RunClient.report_status`), which writes all statuses to `rl/statuses.json` now and
then, and when it ends.
"""

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from etude.errors import EtudeError
from etude.files import write_atomically
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.system.clock import MACHINE_CLOCK, Clock

SAMPLER, WORKER = "sampler", "worker"  # the `kind` in the status of a sampler, and of a worker
RUN_SERVICE, ORCHESTRATOR = "run-service", "orchestrator"  # names among the services
DRAINED = "drained"  # last state of a worker that was asked to end
SILENT_S = 10.0  # services report every second or two; a busy machine is late
LOADS = {  # further figures, as they are shown
    "step": "step {}",
    "running": "{} sequences",
    "waiting": "{} waiting",
    "tokens_s": "{:,.0f} tokens/s",
    "requests": "{:,} requests",
    "siblings": "{} siblings",
    "leased": "leased to an evaluation of version {}",
}
FRESH_S = 0.5  # a status read so recently is not read again
ANSWER_S = 2.0  # for the run service to answer a reader


@dataclass(frozen=True)
class ServiceStatus:
    """The last status of a service, and its age: how long ago the run service received it."""

    facts: dict[str, Any]
    age_s: float

    @property
    def state(self) -> str:
        return str(self.facts.get("state", ""))


@dataclass(frozen=True)
class ServiceView:
    """What people see of a service, in the terminal and in the viewer."""

    name: str
    host: str
    version: str  # of Etude, and of the weights that it has
    state: str  # as it reported, or silent
    load: str
    waiting_for: str  # or its problem
    age_s: float  # of its last status

    @classmethod
    def of(cls, name: str, status: ServiceStatus) -> "ServiceView":
        """Return what a status says."""
        facts = status.facts
        silent = status.age_s > SILENT_S and status.state not in ("ended", DRAINED)
        version = [str(facts[key]) for key in ("etude",) if facts.get(key)]
        version += [f"weights {facts['version']}"] if isinstance(facts.get("version"), int) else []
        waiting = str(facts.get("waiting_for") or facts.get("problem") or "")
        host, state = str(facts.get("host", "")), "silent" if silent else status.state
        load = "" if status.state in ("ended", DRAINED) else _load(facts)
        return cls(name, host, ", ".join(version), state, load, waiting, status.age_s)


def _load(facts: Mapping[str, Any]) -> str:
    """Return the figures of a service that say how busy it is."""
    found = [f"{facts['cpus']:.2f} CPUs"] if "cpus" in facts else []
    if "max_rollouts" in facts:
        found.append(f"{facts['rollouts']} of {facts['max_rollouts']} rollouts")
    for key, text in LOADS.items():
        if isinstance(facts.get(key), int | float):
            found.append(text.format(facts[key]))
    found += [str(facts["evaluates"])] if facts.get("evaluates") else []  # of the orchestrator
    return ", ".join(found)


class StatusReader:
    """Reads the statuses of a run. While the run service does not answer, no status but its own grows older."""

    def __init__(
        self,
        layout: RunLayout,
        open_client: Callable[..., RunClient] = RunClient.beside,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        self.layout, self.clock, self._open_client = layout, clock, open_client
        self._client: RunClient | None = None
        self._found: dict[str, ServiceStatus] = {}
        self._read_at, self._answered_at = float("-inf"), clock.monotonic()

    def all(self, *, fresh: bool = False) -> dict[str, ServiceStatus]:
        """Return the statuses by name, at most half a second old unless they must be `fresh`."""
        now = self.clock.monotonic()
        if fresh or now - self._read_at > FRESH_S:
            self._read_at = now
            self._read(now)
        return self._found

    def get(self, name: str, *, fresh: bool = False) -> ServiceStatus | None:
        """Return the status of a service; None if it has not reported any."""
        return self.all(fresh=fresh).get(name)

    def report(self, name: str, **facts: Any) -> None:
        """Report a status, if the run service answers."""
        with contextlib.suppress(EtudeError):
            self._open().report_status(name, **facts)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def forget(self, name: str) -> None:
        """Remove the status of a process that has ended, before another of its name starts."""
        self._found.pop(name, None)
        with contextlib.suppress(EtudeError):
            self._open().call("DELETE", f"/status/{name}")

    def _open(self) -> RunClient:
        if self._client is None:
            client = self._open_client(self.layout, patience_s=0, timeout_s=ANSWER_S)
            try:
                client.check_beside(self.layout)
            except EtudeError:
                client.close()
                raise
            self._client = client
        return self._client

    def _read(self, now: float) -> None:
        try:
            statuses = self._open().statuses()
        except EtudeError:  # it is starting, restarting, or the run is not active
            self.close()
            copy = read_copy(self.layout)
            self._found = {name: each for name, each in copy.items() if name not in self._found} | self._found
            if RUN_SERVICE in copy:
                own = copy[RUN_SERVICE]
                self._found[RUN_SERVICE] = replace(own, age_s=max(own.age_s, now - self._answered_at))
            return
        self._answered_at = now
        self._found = {name: ServiceStatus(facts, float(facts.pop("age_s"))) for name, facts in statuses.items()}


def read_statuses(layout: RunLayout) -> dict[str, ServiceStatus]:
    """Return the last status of every service of a run, whether it is active or not."""
    with contextlib.suppress(EtudeError):
        client = RunClient.beside(layout, patience_s=0, timeout_s=ANSWER_S)
        with contextlib.closing(client):
            client.check_beside(layout)
            return {name: ServiceStatus(facts, float(facts.pop("age_s"))) for name, facts in client.statuses().items()}
    return read_copy(layout)


# ------------------------------------------------------------------------------------------- the copy on disk


def write_copy(layout: RunLayout, statuses: dict[str, dict[str, Any]]) -> None:
    """Write the statuses, each with the `time` at which it arrived."""
    write_atomically(layout.statuses, json.dumps(statuses))


def read_copy(layout: RunLayout) -> dict[str, ServiceStatus]:
    """Return the statuses that the run service wrote last."""
    try:
        found = json.loads(layout.statuses.read_text(encoding="utf-8"))
        now = time.time()
        return {name: ServiceStatus(dict(facts), now - float(facts["time"])) for name, facts in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EtudeError(f"{layout.statuses}: damaged: {error}") from error
