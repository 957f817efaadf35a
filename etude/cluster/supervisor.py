"""Keeps the services of a run alive, on whatever cluster they are.

A service that dies is started again, with a growing pause. A service that reports no status for too long is killed. One
that rejects its input or gives up would do so again, so the run ends with its error. A service that dies too often ends
the run too. Processes that are lost with their node are no fault of their service: it is started elsewhere at once, or,
if it belongs to that node, not again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from etude.cluster.cluster import Cluster, Exit, Node, Resources, ServiceProcess, ServiceSpec
from etude.errors import EtudeError, InputError
from etude.runs.service_status import DRAINED, ServiceStatus
from etude.system.clock import MACHINE_CLOCK, Clock

SILENCE_S = 120.0  # a process without a status for so long is killed; loading torch alone may take 30 s
DEATH_WINDOW_S = 300.0  # seconds after which a death no longer counts
MAX_DEATHS = 8  # within the window
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 20.0  # seconds before a restart; doubled with every death
RANKS_S = 5.0  # after a rank has died, for the others to end by themselves: one of them may know why
STOP_S = 10.0  # seconds that a process has to end after SIGTERM
POLL_S = 0.05  # while processes are stopped
LOG_TAIL = 2000  # characters of a log shown in an error


class ServiceGaveUp(EtudeError):
    """A service cannot continue, and would fail the same way after a restart."""

    exit_code: ClassVar[int] = 4


class ServiceFailed(EtudeError):
    """A service failed for good: a final exit code, or too many deaths."""


FINAL_EXIT_CODES = (InputError.exit_code, ServiceGaveUp.exit_code)


class Statuses(Protocol):
    """The last status of every service of a run."""

    def get(self, name: str, *, fresh: bool = False) -> ServiceStatus | None:
        """Return the status of a service, read just now if it must be `fresh`; None if it has not reported any."""

    def forget(self, name: str) -> None:
        """Remove the status of a service, which its next process replaces."""


@dataclass
class Service:
    """One service, across all its processes."""

    spec: ServiceSpec
    processes: Sequence[ServiceProcess] = ()  # of all ranks; empty while none runs
    started_at: float | None = None  # when its processes had their resources
    restart_at: float = 0.0
    kill_at: float | None = None  # for the ranks that go on when one has died
    deaths: list[float] = field(default_factory=list)
    starts: int = 0
    finished: bool = False
    retiring: bool = False  # it is not started again
    rendezvous: ExitStack = field(default_factory=ExitStack)  # the store by which its ranks find each other

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def nodes(self) -> list[str]:
        """Return the names of its nodes, one for each rank; empty while a rank waits for resources."""
        names = [process.node for process in self.processes]
        return names if all(names) else []


@dataclass
class NodeServices:
    """Services that every node with the resources gets, such as workers."""

    kind: str
    per_node: int
    resources: Resources
    spec_of: Callable[[str, Node], ServiceSpec]
    started: int = 0  # names are not used twice: a node that seemed lost may still run the old process
    nodes: dict[str, list[str]] = field(default_factory=dict)  # names of each node's, by its id


class ServiceSupervisor:
    """The services of a run. A context manager: leaving it stops them all."""

    def __init__(
        self,
        cluster: Cluster,
        logs: Path,
        statuses: Statuses,
        on_death: Callable[[str, str], None] = lambda name, reason: None,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        self.cluster, self.logs, self.statuses, self.on_death, self.clock = cluster, logs, statuses, on_death, clock
        self.services: dict[str, Service] = {}
        self._on_nodes: dict[str, NodeServices] = {}

    def __enter__(self) -> ServiceSupervisor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(*self.services)

    def add(self, spec: ServiceSpec) -> None:
        """Add a service; the next `tick` starts it."""
        self.services[spec.name] = Service(spec)

    def add_on_nodes(
        self, kind: str, per_node: int, resources: Resources, spec_of: Callable[[str, Node], ServiceSpec]
    ) -> None:
        """Add services `KIND-NUMBER` on every node, those that join later included."""
        self._on_nodes[kind] = NodeServices(kind, per_node, resources, spec_of)
        self._follow_nodes()

    def set_per_node(self, kind: str, per_node: int) -> None:
        """Have another number of services of a kind on every node. Those too many, the newest, are `retiring`."""
        self._on_nodes[kind].per_node = per_node
        self._follow_nodes()

    def tick(self) -> None:
        """Start services that should run and do not, and kill those that hang."""
        self.cluster.update()
        self._follow_nodes()
        for service in list(self.services.values()):
            if service.finished:
                continue
            if service.processes:
                self._watch(service)
            elif service.retiring:
                self.statuses.forget(service.name)
                del self.services[service.name]
            elif self.clock.monotonic() >= service.restart_at:
                self._start(service)

    def stop(self, *names: str) -> None:
        """Stop services: SIGTERM first, then SIGKILL."""
        stopped = [self.services[name] for name in names]
        processes = [process for service in stopped for process in service.processes]
        for process in processes:
            process.terminate()
        deadline = self.clock.monotonic() + STOP_S
        while any(process.poll() is None for process in processes) and self.clock.monotonic() < deadline:
            self.clock.sleep(POLL_S)
            self.cluster.update()
        for service in stopped:
            self._end_processes(service)
            service.finished = True

    # ------------------------------------------------------------------------------------------ what is known

    def restarts(self) -> dict[str, int]:
        """Return how often each service was restarted, those that never were left out."""
        return {name: service.starts - 1 for name, service in self.services.items() if service.starts > 1}

    def count(self, kind: str) -> int:
        """Return the number of services of a kind that are on nodes and not retiring."""
        return sum(map(len, self._on_nodes[kind].nodes.values()))

    def retiring(self) -> list[str]:
        """Return the services that are to end and have not yet."""
        return [name for name, service in self.services.items() if service.retiring]

    def unplaced(self) -> set[str]:
        """Return the services that wait for resources."""
        return {name for name, each in self.services.items() if each.processes and not each.nodes}

    def waiting_for(self) -> str:
        """Return which services wait for resources, and for which; "" if none does."""
        waiting = (self.services[name].spec for name in sorted(self.unplaced()))
        return "; ".join(f"{_needs(spec)} for {spec.name}" for spec in waiting)

    # ------------------------------------------------------------------------------------------ one service

    def _start(self, service: Service) -> None:
        spec = service.spec
        self.statuses.forget(spec.name)  # that of the previous process
        self.logs.mkdir(parents=True, exist_ok=True)
        environments: Sequence[Mapping[str, str]] = [{}]
        if spec.ranks > 1:
            from etude.parallel.launch import rendezvous  # which loads torch

            environments = service.rendezvous.enter_context(rendezvous(spec.ranks, self.cluster.address))
        logs = [self._log(spec, rank) for rank in range(spec.ranks)]
        service.processes = self.cluster.start(spec, environments, logs)
        service.started_at, service.kill_at, service.starts = None, None, service.starts + 1

    def _watch(self, service: Service) -> None:
        """Look at the processes of a service: finished, dead or silent."""
        spec, now = service.spec, self.clock.monotonic()
        exits = {rank: ended for rank, process in enumerate(service.processes) if (ended := process.poll())}
        failed = {rank: ended for rank, ended in exits.items() if not (ended.code == 0 and spec.finishes)}
        if failed:
            if service.kill_at is None:
                service.kill_at = now + RANKS_S
            if len(exits) == spec.ranks or now >= service.kill_at:
                rank = min(failed, key=lambda rank: _precedence(failed[rank]))
                self._on_process_death(service, rank, failed[rank])
        elif len(exits) == spec.ranks:
            self._end_processes(service)
            service.finished = True
        elif service.nodes and self._is_silent(service, now):
            self._on_process_death(service, 0, Exit(f"reported nothing for {SILENCE_S:.0f} s and was killed"))

    def _is_silent(self, service: Service, now: float) -> bool:
        if service.started_at is None:
            service.started_at = now
        status, since = self.statuses.get(service.name), now - service.started_at
        return since > SILENCE_S and (status is None or status.age_s > SILENCE_S)

    def _on_process_death(self, service: Service, rank: int, ended: Exit) -> None:
        """End what is left of a service, and say when it is started again; ServiceFailed if that would not help."""
        spec, now = service.spec, self.clock.monotonic()
        self._end_processes(service)
        if ended.code == 0 and self._was_drained(service):
            service.restart_at = now
            return
        service.deaths = [when for when in service.deaths if now - when < DEATH_WINDOW_S]
        service.deaths += [] if ended.node_lost else [now]
        reason = f"rank {rank} of {spec.ranks} {ended.reason}" if spec.ranks > 1 else ended.reason
        self.on_death(spec.name, reason)
        status = self.statuses.get(spec.name, fresh=True) if ended.code == InputError.exit_code else None
        if status is not None and status.state == "failed":
            raise InputError(status.facts["problem"])  # in its own words: they name what to change
        final = ended.code in FINAL_EXIT_CODES
        if final or len(service.deaths) >= MAX_DEATHS:
            count = f" for the {len(service.deaths)}th time in {DEATH_WINDOW_S / 60:.0f} minutes"
            tail = log_tail(self._log(spec, rank))
            raise ServiceFailed(f"{spec.name} {reason}{'' if final else count}; its log ends:\n{tail}")
        if ended.node_lost and spec.node:
            self.statuses.forget(spec.name)
            del self.services[spec.name]
        service.restart_at = now + min(MAX_PAUSE_S, MIN_PAUSE_S * 2.0 ** max(0, len(service.deaths) - 1))

    def _was_drained(self, service: Service) -> bool:
        """Return whether a service ended because it was asked to: it is replaced at once, unless it retires."""
        status = self.statuses.get(service.name, fresh=True)
        return status is not None and status.state == DRAINED

    def _end_processes(self, service: Service) -> None:
        for process in service.processes:
            process.kill()
        service.processes = ()
        service.rendezvous.close()

    def _log(self, spec: ServiceSpec, rank: int) -> Path:
        return self.logs / f"{spec.rank_name(rank)}.log"

    # ------------------------------------------------------------------------------------------ nodes

    def _follow_nodes(self) -> None:
        """Give nodes that have joined their services. Those of nodes that are gone end when their processes do."""
        for each in self._on_nodes.values():
            nodes = {node.id: node for node in self.cluster.nodes(each.resources)}
            each.nodes = {id: each.nodes.get(id, []) for id in nodes}
            for id, names in each.nodes.items():
                for name in names[each.per_node :]:
                    names.remove(name)
                    if name in self.services:
                        self.services[name].retiring = True
                while len(names) < each.per_node:
                    names.append(f"{each.kind}-{each.started}")
                    self.add(each.spec_of(names[-1], nodes[id]))
                    each.started += 1


def _precedence(ended: Exit) -> int:
    """Return the order in which the exits of ranks explain a death: a rank that is left alone fails in a collective."""
    if ended.node_lost or ended.code in FINAL_EXIT_CODES:
        return 0
    return 1 if ended.code is None else 2


def _needs(spec: ServiceSpec) -> str:
    return f"{spec.ranks} x ({spec.resources})" if spec.ranks > 1 else str(spec.resources)


def log_tail(path: Path) -> str:
    """Return the last lines of a log, indented."""
    text = path.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:] if path.exists() else ""
    return "\n".join(f"  {line}" for line in text.strip().splitlines()[-15:])
