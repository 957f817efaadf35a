"""The contract of a cluster: where the services of a run are started, and what is known of each afterwards.

`ServiceSupervisor` decides when a service is started, restarted and ended; a `Cluster` does it. `LocalCluster` starts
processes of this machine, `RayCluster` processes on the nodes of a Ray cluster.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

# here: on the machine of the process that holds the run. run: on a machine that sees the run directory, this one if it
# has the resources.
Where = Literal["here", "run", "anywhere"]


@dataclass(frozen=True)
class Resources:
    """What one process needs of its machine, as far as the cluster counts it."""

    cpus: float = 1.0
    gpus: int = 0
    memory: int = 0  # bytes; 0: not counted
    having: str = ""  # a further resource that its machine must have, by the name that the cluster knows

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU{'s' if self.cpus != 1 else ''}"] if self.cpus else []
        parts += [f"{self.gpus} GPU{'s' if self.gpus != 1 else ''}"] if self.gpus else []
        parts += [f"{self.memory / 2**30:g} GiB"] if self.memory else []
        parts += [f"the resource {self.having}"] if self.having else []
        return ", ".join(parts) or "no resources"


@dataclass(frozen=True)
class ServiceSpec:
    """One service: the program `python -m MODULE ARGUMENTS`, what it needs, and where it may run.

    With several `ranks` it is as many processes of one torch.distributed job, placed together and ended together.
    """

    name: str
    module: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # beside that of the machine
    finishes: bool = False  # exit code 0 means that its work is done; other services run until they are stopped
    where: Where = "here"
    node: str = ""  # id of the only node it may run on; without that node it is not started again
    resources: Resources = field(default_factory=Resources)  # of each rank
    ranks: int = 1

    def rank_name(self, rank: int) -> str:
        """Return the name of a rank in logs and errors: that of the service for the first."""
        return f"{self.name}-rank-{rank}" if rank else self.name


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    reason: str  # completes the sentence that begins with its name
    code: int | None = None  # None: no exit code of its own, such as with a signal or a lost node
    node_lost: bool = False  # it ended with its node, through no fault of its own


def exit_of(code: int) -> Exit:
    """Return how a child process ended, from its return code."""
    if code < 0:
        return Exit(f"ended with signal {-code}")
    return Exit(f"ended with exit code {code}", code)


@dataclass(frozen=True)
class Node:
    """A machine of the cluster."""

    id: str
    name: str  # for people: its address or host name


@dataclass(frozen=True)
class ClusterSize:
    """A cluster as a plan sees it."""

    name: str
    nodes: int = 1
    cpus: float = 0.0
    gpus: int = 0

    def __str__(self) -> str:
        gpus = f", {self.gpus} GPU{'s' if self.gpus != 1 else ''}" if self.gpus else ""
        return f"{self.name} ({self.nodes} node{'s' if self.nodes != 1 else ''}, {self.cpus:g} CPUs{gpus})"


class ServiceProcess(ABC):
    """One process of a service. Its output is appended to the log that it was started with."""

    node: str = ""  # name of its node; "" while it waits for one

    @abstractmethod
    def poll(self) -> Exit | None:
        """Return how the process ended; None while it runs or waits for resources."""

    @abstractmethod
    def terminate(self) -> None:
        """Ask the process to end (SIGTERM); return at once."""

    @abstractmethod
    def kill(self) -> None:
        """End the process and release its resources; return at once."""


class Cluster(ABC):
    """Machines to start services on. A context manager: leaving it ends what still runs."""

    name: str  # for people: which cluster this is
    address: str  # of this machine, as the processes of all nodes reach it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    @abstractmethod
    def assigns_gpus(self) -> bool:
        """Return whether there are GPUs of which a process sees only those that it was given."""

    @abstractmethod
    def start(
        self, spec: ServiceSpec, environments: Sequence[Mapping[str, str]], logs: Sequence[Path]
    ) -> Sequence[ServiceProcess]:
        """Start the ranks of a service, each with its own further environment and log file; return at once.

        InputError if no node can ever run it.
        """

    @abstractmethod
    def nodes(self, resources: Resources) -> Sequence[Node]:
        """Return the nodes that have these resources, free or not."""

    @abstractmethod
    def update(self) -> None:
        """Learn what happened on other machines; called once before processes are polled."""

    @abstractmethod
    def close(self) -> None:
        """Leave the cluster. Processes that a supervisor has not ended end with this one at the latest."""
