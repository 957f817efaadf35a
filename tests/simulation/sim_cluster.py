"""A simulated cluster: nodes that die, are lost and join, and the processes on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sim_time import Host, SimProcess

from etude.cluster.cluster import Cluster, Exit, Node, Resources, ServiceProcess, ServiceSpec

if TYPE_CHECKING:
    from sim_run import SimulatedRun


@dataclass
class SimNode:
    """A machine of the cluster."""

    id: str
    host: Host
    sees_run: bool
    gone_at: float | None = None  # when the cluster notices that it has left


class SimServiceProcess(ServiceProcess):
    """A process of a service, or one that waits for a node."""

    def __init__(self, cluster: SimCluster, spec: ServiceSpec) -> None:
        self.cluster, self.spec = cluster, spec
        self.process: SimProcess | None = None
        self.place: SimNode | None = None
        self.stopped = False

    @property
    def node(self) -> str:  # type: ignore[override]
        return self.place.host.name if self.place else ""

    def poll(self) -> Exit | None:
        if self.place is not None and self.place.gone_at is not None:
            seen = self.cluster.run.simulation.now >= self.place.gone_at
            return Exit("was lost with its node", node_lost=True) if seen else None
        if self.process is None or self.process.alive:
            return None
        code = self.process.code
        return Exit("ended with signal 9") if code is None else Exit(f"ended with exit code {code}", code)

    def terminate(self) -> None:
        if self.process is not None and self.process.alive:
            getattr(self.process, "terminate", self.process.kill)()

    def kill(self) -> None:
        self.stopped = True
        # A node that the cluster has lost runs on what it has, until it notices.
        if self.process is not None and (self.place is None or self.place.gone_at is None):
            self.process.kill()


class SimCluster(Cluster):
    """Simulated nodes. They end what they run when the process that holds the run has ended."""

    name, address, assigns_gpus = "simulated hosts", "127.0.0.1", False

    def __init__(self, run: SimulatedRun, head: SimProcess) -> None:
        self.run, self.head = run, head
        self.waiting: list[SimServiceProcess] = []
        head.on_end.append(self.close)

    def start(
        self, spec: ServiceSpec, environments: Sequence[Mapping[str, str]], logs: Sequence[Path]
    ) -> list[SimServiceProcess]:
        found = SimServiceProcess(self, spec)
        self.waiting.append(found)
        self.run.started.append(found)
        self._place(found)
        return [found]

    def _place(self, process: SimServiceProcess) -> None:
        spec, nodes = process.spec, [node for node in self.run.nodes if node.gone_at is None]
        if spec.where == "here":
            nodes = nodes[:1]
        elif spec.where == "run":
            nodes = [node for node in nodes if node.sees_run]
        if spec.node:
            nodes = [node for node in nodes if node.id == spec.node]
        if nodes:
            self.waiting.remove(process)
            process.place = self.run.rng.choice(nodes)
            process.process = self.run.start_service(process.place, spec)

    def nodes(self, resources: Resources) -> list[Node]:
        now = self.run.simulation.now
        return [Node(each.id, each.host.name) for each in self.run.nodes if each.gone_at is None or each.gone_at > now]

    def update(self) -> None:
        for process in list(self.waiting):
            if process.stopped:
                self.waiting.remove(process)
            else:
                self._place(process)

    def close(self) -> None:
        for each in self.run.started:
            if each.cluster is self and each.process is not None:
                each.process.kill()
