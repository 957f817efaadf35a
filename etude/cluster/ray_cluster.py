"""Services on the nodes of a Ray cluster.

Each process of a service is the child of an actor that holds its resources (`ray_actor.ServiceHost`). Actors are not
detached: they end with this process, and their children with them. A service beside the run directory has a placement
group, which keeps the resources for it while it is restarted.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude import __version__
from etude.cluster.cluster import Cluster, ClusterSize, Exit, Node, Resources, ServiceProcess, ServiceSpec, exit_of
from etude.cluster.local import LocalCluster
from etude.cluster.settings import RAY, ClusterSettings
from etude.errors import EtudeError, InputError
from etude.system.processes import NODE_VARIABLE
from etude.system.terminal import say

try:
    import ray
    from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
    from ray.util.placement_group import placement_group, placement_group_table
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    from etude.cluster.ray_actor import News, NodeFacts, Probe, ServiceHost, describe_node
except ModuleNotFoundError as error:
    raise InputError(f"a Ray cluster needs the Python module {error.name}: pip install 'etude[ray]'") from error

NODES_S = 2.0  # between two looks at the nodes
CONNECT_S = 10.0
DESCRIBE_S = 120.0  # for all nodes to answer at the start: Ray starts a Python process on each
NODE_ID = "ray.io/node-id"  # label that Ray gives every node
ANY_SHARE = 0.001  # of a resource that a node only has to have


@dataclass
class RayNode:
    """A node, as Ray and the node itself describe it."""

    node: Node
    resources: Mapping[str, float]
    answer: Any = None  # reference to its facts, until they have been read
    facts: NodeFacts | None = None

    def room(self, resources: Resources) -> int:
        """Return how many processes with these resources fit on the node when it is free."""
        demands = demands_of(resources).items()
        return min((int(self.resources.get(name, 0.0) // amount) for name, amount in demands), default=1 << 30)


class RayCluster(Cluster):
    """The Ray cluster that this process is connected to. This machine may be a node of it."""

    def __init__(self, settings: ClusterSettings, probe: Path) -> None:
        self.settings = settings
        self.probe = Probe(str(probe), secrets.token_hex(16))
        self._local = LocalCluster()
        self._processes: list[RayProcess] = []
        self._groups: dict[str, Any] = {}  # placement groups by service
        self._nodes: dict[str, RayNode] = {}  # those that live, by id
        self._looked_at = 0.0
        self._output = ExitStack()
        self._output.enter_context(redirect_stdout(sys.stderr))  # Ray prints there what happens to nodes
        self._host, self._describe = ray.remote(ServiceHost), ray.remote(describe_node)
        try:
            connect(settings.address)
            if target_of(settings.address).startswith("ray://"):  # this machine is none of its nodes
                self.own_node, self.name = "", f"the Ray cluster at {target_of(settings.address)}"
            else:
                context = ray.get_runtime_context()
                self.own_node, self.name = context.get_node_id(), f"the Ray cluster at {context.gcs_address}"
            probe.write_text(self.probe.contents, encoding="ascii")
            self._look_at_nodes()
            self._check_nodes()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:  # type: ignore[override]
        if self.own_node:
            return str(ray.util.get_node_ip_address())
        return address_towards(target_of(self.settings.address))

    @property
    def assigns_gpus(self) -> bool:
        return any(each.resources.get("GPU") for each in self._nodes.values())

    # ------------------------------------------------------------------------------------------ nodes

    def nodes(self, resources: Resources) -> list[Node]:
        return [each.node for each in self._nodes.values() if each.facts is not None and each.room(resources)]

    def is_lost(self, node: str) -> bool:
        """Return whether Ray knows that a node has ended."""
        self._look_at_nodes()
        return bool(node) and node not in self._nodes

    def name_of(self, node: str) -> str:
        return self._nodes[node].node.name if node in self._nodes else node[:6]

    def _look_at_nodes(self) -> None:
        """Learn which nodes live, and ask new ones to describe themselves."""
        self._looked_at = time.monotonic()
        found = {each["NodeID"]: each for each in ray.nodes() if each["Alive"]}
        addresses = Counter(each["NodeManagerAddress"] for each in found.values())
        for id in self._nodes.keys() - found.keys():
            del self._nodes[id]
        for id in found.keys() - self._nodes.keys():
            address = found[id]["NodeManagerAddress"]
            name = address if addresses[address] == 1 else f"{address}/{id[:6]}"
            there = NodeAffinitySchedulingStrategy(id, soft=False)
            answer = self._describe.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(self.probe)
            self._nodes[id] = RayNode(Node(id, name), found[id]["Resources"], answer)

    def _read_descriptions(self, wait_s: float = 0.0) -> dict[str, str]:
        """Read the answers of nodes, waiting for all of them; return why some cannot be used, by name."""
        waiting = {each.answer: each for each in self._nodes.values() if each.answer is not None}
        ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=wait_s) if waiting else ([], [])
        problems = {waiting[answer].node.name: "it does not answer" for answer in late if wait_s}
        for answer in ready:
            each = waiting[answer]
            each.answer = None
            try:
                facts: NodeFacts = ray.get(answer)
            except RayTaskError as error:  # of an import, most likely
                problems[each.node.name] = f"it cannot run etude {__version__}: {last_line(error)}"
                continue
            except RayError:  # the node has just ended, or is asked again
                del self._nodes[each.node.id]
                continue
            if facts.version != __version__:
                problems[each.node.name] = f"it has etude {facts.version}, not {__version__}"
            else:
                each.facts = facts
        return problems

    def _check_nodes(self) -> None:
        if problems := self._read_descriptions(DESCRIBE_S):
            listed = "; ".join(f"{name}: {problem}" for name, problem in sorted(problems.items()))
            raise InputError(f"{self.name} has nodes that cannot be used: {listed}; install etude on every node")

    # ------------------------------------------------------------------------------------------ services

    def start(
        self, spec: ServiceSpec, environments: Sequence[Mapping[str, str]], logs: Sequence[Path]
    ) -> Sequence[ServiceProcess]:
        # A machine outside of the cluster sees the run directory, but has no node that counts its resources.
        outside = not self.own_node and spec.ranks == 1 and not spec.resources.gpus
        if spec.where == "here" or (spec.where == "run" and outside):
            return self._local.start(spec, environments, logs)
        group = self._group(spec) if spec.where == "run" else None
        ranks = enumerate(zip(environments, logs, strict=True))
        found = [RayProcess(self, spec, rank, environment, log, group) for rank, (environment, log) in ranks]
        self._processes += found
        return found

    def update(self) -> None:
        try:
            self._update()
        except (RayError, ConnectionError) as error:
            raise EtudeError(f"{self.name} does not answer any more: {last_line(error)}") from error

    def _update(self) -> None:
        if time.monotonic() - self._looked_at > NODES_S:
            self._look_at_nodes()
        for name, problem in self._read_descriptions().items():
            say(f"etude: the node {name} has joined, but is not used: {problem}")
        self._processes = [process for process in self._processes if process.waits_for is not None]
        references = {process.waits_for for process in self._processes}
        if references:
            ready = set(ray.wait(list(references), num_returns=len(references), timeout=0)[0])
            for process in self._processes:
                if process.waits_for in ready:
                    process.advance()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        with suppress(OSError):
            os.unlink(self.probe.path)
        ray.shutdown()
        self._output.close()

    def environment_of(self, spec: ServiceSpec) -> dict[str, str]:
        """Return the variables of a service elsewhere, beside those of its node."""
        patterns = ("OMP_WAIT_POLICY", *self.settings.environment)
        passed = {name: value for name, value in os.environ.items() if any(fnmatch.fnmatch(name, p) for p in patterns)}
        return {**passed, **spec.environment}

    def new_host(self, spec: ServiceSpec, group: Any, bundle: int) -> Any:
        """Return a new actor with the resources of one rank; Ray starts it when it has them."""
        if group is not None:
            place: Any = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        else:
            place = NodeAffinitySchedulingStrategy(spec.node, soft=False) if spec.node else "SPREAD"
        needs = demands_of(spec.resources)
        options = {
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            "memory": needs.pop("memory", None),
            "resources": needs,
        }
        return self._host.options(max_restarts=0, scheduling_strategy=place, **options).remote()

    def bundle_of(self, group: Any, rank: int) -> int:
        """Return the bundle of a rank in a placed group: this machine has the first ones, neighbours share a node."""
        nodes = placement_group_table(group)["bundles_to_node_id"]
        return sorted(map(int, nodes), key=lambda bundle: (nodes[bundle] != self.own_node, nodes[bundle], bundle))[rank]

    def _group(self, spec: ServiceSpec) -> Any:
        """Return the placement group of a service beside the run directory. Ray moves what it loses with a node."""
        if spec.name not in self._groups:
            nodes = self._nodes_beside_run(spec)
            selector = {NODE_ID: f"in({','.join(nodes)})"} if nodes else {}
            bundle = demands_of(spec.resources) or {"CPU": ANY_SHARE}
            self._groups[spec.name] = placement_group(
                [bundle] * spec.ranks, strategy="PACK", bundle_label_selector=[selector] * spec.ranks
            )
        return self._groups[spec.name]

    def _nodes_beside_run(self, spec: ServiceSpec) -> list[str]:
        """Return the nodes that may run a service beside the run directory: this one if it suffices; []: all."""
        seeing = {id: each for id, each in self._nodes.items() if each.facts is not None and each.facts.sees_run}
        if self.own_node in seeing and seeing[self.own_node].room(spec.resources) >= spec.ranks:
            return [self.own_node]
        if sum(each.room(spec.resources) for each in seeing.values()) < spec.ranks:
            needed = f"{spec.ranks} x ({spec.resources})" if spec.ranks > 1 else str(spec.resources)
            names = ", ".join(sorted(each.node.name for each in seeing.values())) or "none"
            raise InputError(
                f"{spec.name} needs {needed} on nodes that see {Path(self.probe.path).parent}, which are: {names}; put "
                "the run directory on storage that more nodes share, or start the run on a node with these resources"
            )
        return [] if len(seeing) == len(self._nodes) else sorted(seeing)


class RayProcess(ServiceProcess):
    """One process of a service, through its actor: placed, described, started, watched."""

    def __init__(
        self, cluster: RayCluster, spec: ServiceSpec, rank: int, environment: Mapping[str, str], log: Path, group: Any
    ) -> None:
        self.cluster, self.spec, self.rank, self.log, self.group = cluster, spec, rank, log, group
        self._environment = {**cluster.environment_of(spec), **environment}
        self._actor: Any = None
        self._exit: Exit | None = None
        self._node = spec.node  # id
        self.waits_for: Any = None  # reference to the answer that `advance` reads
        self._then: Callable[[Any], None]
        if group is None:
            self._place(0)
        else:
            self._ask(group.ready(), lambda _: self._place(cluster.bundle_of(group, rank)))

    def poll(self) -> Exit | None:
        return self._exit

    def terminate(self) -> None:
        if self.node and self._exit is None:
            self._actor.terminate.remote()
        else:
            self.kill()

    def kill(self) -> None:
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = self.waits_for = None
        self._exit = self._exit or Exit("was killed")

    def advance(self) -> None:
        """Read the answer that has come, and ask for the next."""
        try:
            self._then(ray.get(self.waits_for))
        except RayError as error:
            if isinstance(error, ActorUnavailableError) and self._then == self._read:
                self._watch()  # the connection broke; Ray will know whether the actor, or its node, has ended
                return
            self._exit = self._exit_of_actor(error)
            self.kill()

    def _exit_of_actor(self, error: RayError) -> Exit:
        if self.cluster.is_lost(self._node):
            return Exit(f"was lost with its node {self.node}", node_lost=True)
        if not self.node and isinstance(error, RayActorError) and not error.actor_init_failed:
            return Exit("was not started, as Ray lost the node for it", node_lost=True)
        return Exit(f"was lost with its Ray actor: {last_line(error)}")

    def _ask(self, reference: Any, then: Callable[[Any], None]) -> None:
        self.waits_for, self._then = reference, then

    def _place(self, bundle: int) -> None:
        self._actor = self.cluster.new_host(self.spec, self.group, bundle)
        self._ask(self._actor.describe.remote(self.cluster.probe), self._start)

    def _start(self, facts: NodeFacts) -> None:
        self._node, self.node = facts.id, self.cluster.name_of(facts.id)
        if self.spec.where == "run" and not facts.sees_run:
            directory = Path(self.cluster.probe.path).parent
            raise InputError(
                f"{self.spec.name} cannot run on {self.node}, which does not see {directory}: put it on shared storage"
            )
        self.log.touch()
        # Ray shows the process no other GPUs than its own.
        environment = {**self._environment, NODE_VARIABLE: self.node, "LOCAL_RANK": "0"}
        started = self._actor.start.remote(self.spec.module, tuple(self.spec.arguments), environment)
        self._ask(started, lambda _: self._watch())

    def _watch(self) -> None:
        self._ask(self._actor.watch.remote(), self._read)

    def _read(self, news: News) -> None:
        if news.log:
            with open(self.log, "ab") as log:
                log.write(news.log)
        if news.code is None:
            self._watch()
        else:
            self._exit = exit_of(news.code)
            self.kill()


def connect(address: str) -> None:
    """Connect this process to a Ray cluster; InputError if there is none."""
    target = target_of(address)
    try:
        if target != "auto":  # Ray itself tries for minutes
            socket.create_connection(host_and_port(target), timeout=CONNECT_S).close()
        ray.init(target, log_to_driver=False, logging_level=logging.CRITICAL)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or last_line(error).rstrip(".")
        raise InputError(
            f"cluster.address is {address}, but no Ray cluster can be joined there: {reason}; "
            "`ray start --head` starts one on this machine, and RAY_ADDRESS names another one"
        ) from error


def survey(settings: ClusterSettings) -> ClusterSize:
    """Return what a cluster has; InputError if it cannot be joined."""
    with redirect_stdout(sys.stderr):
        connect(settings.address)
        try:
            nodes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
        finally:
            ray.shutdown()
    cpus, gpus = (sum(resources.get(name, 0) for resources in nodes) for name in ("CPU", "GPU"))
    return ClusterSize(f"the Ray cluster at {settings.address}", len(nodes), cpus, int(gpus))


def target_of(address: str) -> str:
    """Return the address that Ray is told; "auto": it looks for a cluster of this machine."""
    return os.environ.get("RAY_ADDRESS", "auto") if address == RAY else address


def demands_of(resources: Resources) -> dict[str, float]:
    """Return resources as Ray counts them."""
    demands = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": resources.memory}
    demands |= {resources.having: ANY_SHARE} if resources.having else {}
    return {name: amount for name, amount in demands.items() if amount}


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    return host, int(port)


def address_towards(address: str) -> str:
    """Return the address of this machine from which it reaches another."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(host_and_port(address))  # sends nothing
        return str(probe.getsockname()[0])


def last_line(error: BaseException) -> str:
    """Return the last line of an error, which names the cause where Ray adds a remote traceback."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1].strip()
