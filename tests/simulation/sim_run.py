"""A simulated run: the real services of RL on simulated hosts, with faults.

Real are the rollout queue and the run service with its endpoints, the client that sends requests again, the worker's
claims, heartbeats and reports, the publisher, the follower of a sampler and its updates, the trainer's loop with its
checkpoints, the orchestrator's tick and the supervisor. `sim_services` has the stand-ins for what they compute with.
The cluster, its hosts, the network between them, the object store and all clocks are simulated. `sim_checks` says what
must be true.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tomli_w
from sim_checks import History, check
from sim_cluster import SimCluster, SimNode, SimServiceProcess
from sim_faults import MAX_KILLS, Chaos
from sim_network import Bucket, Network, SimStore, connect_from
from sim_plan import Plan
from sim_services import SimSampler, sample, serve, train, work
from sim_time import Host, SimProcess, Simulation, SimulationFailed

from etude.cluster.cluster import ServiceSpec
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceSupervisor
from etude.errors import EtudeError
from etude.files import take_lock, write_atomically
from etude.inference import sampler_process
from etude.rl import loop, orchestrator, trainer_process
from etude.rl.orchestrator import Orchestrator, RlTaskSets, check_queues, orchestrate
from etude.rl.services import add_rl_services
from etude.rl.settings import RlSettings
from etude.rollouts import run_service
from etude.rollouts.queue_client import QueueClient
from etude.rollouts.settings import load_queues
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.runs.member import RunMember
from etude.runs.run import Run, RunSettings
from etude.runs.service_status import StatusReader
from etude.weights.object_store import ROLLOUTS, WEIGHTS, ObjectStore
from etude.weights.owner import claimed

PORT = 29110
PROMPTS = 120
TIMEOUT_S = 8.0  # of a request
PROGRESS_S = 2000.0  # within which the run must reach its steps once faults have stopped


class SimulatedRun:
    """One run, from its seed."""

    def __init__(self, seed: int, directory: Path, faults: bool | None = None) -> None:
        self.plan = plan = Plan.of_seed(seed, faults)
        self.simulation = Simulation(seed)
        self.rng = self.simulation.rng
        self.network = Network(self.simulation)
        self.layout = RunLayout(directory)
        self.layout.make()
        recipe = {"name": "simulated", "seed": seed, "stages": ["rl"], "service": {"port": PORT}, "rl": plan.settings()}
        write_atomically(self.layout.recipe, tomli_w.dumps(recipe))
        self.layout.id.write_text("simulated")
        self.settings = RlSettings.model_validate(plan.settings())
        self.buckets = {WEIGHTS: Bucket(self.network), ROLLOUTS: Bucket(self.network)}
        drift = 0.02 if "clocks" in plan.faults else 0.0
        self.rng.random()
        self.home = Host("home", self.rng.uniform(-5, 5), self.rng.uniform(-drift, drift))
        self.nodes = [SimNode("home", self.home, True)]
        self.joined = 0
        for number in range(plan.nodes):
            self.join(sees_run=number == 0)
        self.samplers: list[SimSampler] = []  # that have been ready
        self.started: list[SimServiceProcess] = []  # every process that was started
        self.head: SimProcess | None = None
        self.heads = 0
        self.supervisor: ServiceSupervisor | None = None
        self.finished = False
        self.process_numbers: Counter[str] = Counter()
        self.history = History(plan)
        self.killed: Counter[str] = Counter()  # by service

    # -------------------------------------------------------------------------------------- helpers

    def say(self, process: SimProcess, what: str) -> None:
        self.simulation.say(process.name, what)

    def faulty(self, kind: str, probability: float) -> bool:
        return kind in self.plan.faults and self.simulation.now < self.plan.until and self.rng.random() < probability

    def join(self, sees_run: bool = False) -> SimNode:
        self.joined += 1
        drift = 0.02 if "clocks" in self.plan.faults else 0.0
        host = Host(f"node-{self.joined}", self.rng.uniform(-5, 5), self.rng.uniform(-drift, drift))
        node = SimNode(host.name, host, sees_run)
        self.nodes.append(node)
        return node

    def store(self, process: SimProcess, name: str) -> ObjectStore:
        return SimStore(self.buckets[name], process, f"sim://{name}")

    def client_factory(self, process: SimProcess) -> Callable[..., RunClient]:
        options = {"clock": process.clock, "connect": connect_from(self.network, process), "timeout_s": TIMEOUT_S}
        return lambda layout, **more: RunClient.beside(layout, **{**options, **more})

    def member(self, process: SimProcess, name: str) -> RunMember:
        client = self.client_factory(process)(self.layout)
        return RunMember(name, client, client.connect(), self.layout, True, True)

    def reward(self, group: int, number: int, attempt: int) -> dict[str, Any]:
        """Return the record of a rollout."""
        draw = random.Random(f"{self.plan.seed}/{group}")
        total = (
            0.5
            if draw.random() < self.plan.alike
            else random.Random(f"{self.plan.seed}/{group}/{number}/{attempt}").random()
        )
        return {
            "total": total,
            "parts": {"correctness": total},
            "hack": "",
            "score": total,
            "solved": total > 0.5,
            "cost": {"turns": 2},
        }

    def tempt(self, process: SimProcess) -> None:
        """Kill a process perhaps, just after it has done something."""
        service = process.name.partition(".")[0]
        if self.faulty("moments", 0.08) and self.killed[service] < MAX_KILLS:
            self.killed[service] += 1
            delay = self.rng.choice([0.0, 0.001, 0.02, 0.5]) * self.rng.random()
            self.say(process, f"is killed in {delay:.4f} s")
            if delay:
                self.simulation.later(delay, process.kill)
            else:
                process.kill()
                self.simulation.check()

    # -------------------------------------------------------------------------------------- processes

    def process(self, name: str, host: Host) -> SimProcess:
        self.process_numbers[name] += 1
        return SimProcess(self.simulation, f"{name}.{self.process_numbers[name]}@{host.name}", host)

    def start_service(self, node: SimNode, spec: ServiceSpec) -> SimProcess:
        process = self.process(spec.name, node.host)
        mains: dict[str, Callable[[], None]] = {
            "etude.rollouts.run_service": partial(serve, self, process),
            "etude.rl.trainer_process": partial(train, self, process),
            "etude.inference.sampler_process": partial(sample, self, process, spec.name),
            "etude.rollouts.worker": partial(work, self, process, spec.name),
        }
        self.say(process, "starts")
        process.on_end.append(lambda: self.say(process, f"ends: {process.code}"))
        process.start(partial(self.main_of, process, mains[spec.module]))
        return process

    def main_of(self, process: SimProcess, main: Callable[[], None]) -> int:
        """Run the main function of a process; return its exit code."""
        try:
            main()
        except (EtudeError, OSError) as error:
            self.say(process, f"{type(error).__name__}: {error}")
            return error.exit_code if isinstance(error, EtudeError) else 1
        return 0

    def hold(self, process: SimProcess) -> None:
        """The process that holds the run, as `run_rl`."""
        clock, layout, settings = process.clock, self.layout, self.settings
        open_client = self.client_factory(process)
        tasks: Any = {f"task-{number:03}": SimpleNamespace(metadata={}) for number in range(PROMPTS)}
        recipe = RunSettings(name="simulated", stages=("rl",))
        with Run(layout.run, recipe, take_lock(layout.lock, "run")) as run:
            check_queues(layout, settings)
            while True:
                try:
                    stack = ExitStack()
                    stack.enter_context(claimed(self.store(process, WEIGHTS), layout.run_id(), inside=True))
                    break
                except OSError:
                    clock.sleep(1.0)
            with (
                stack,
                SimCluster(self, process) as cluster,
                closing(StatusReader(layout, open_client, clock)) as statuses,
                ServiceSupervisor(cluster, layout.logs, statuses, clock=clock) as services,
                orchestrator.run_service(services, layout, open_client) as client,
            ):
                queues = {name: QueueClient(client, name, found) for name, found in load_queues(layout).items()}
                holder = Orchestrator(
                    run,
                    settings,
                    layout,
                    queues["training"],
                    queues["evaluation"],
                    statuses,
                    RlTaskSets(tasks, {}),
                    self.plan.seed,
                    lambda *_: None,
                    clock=clock,
                )
                services.on_death = holder.on_process_death
                add_rl_services(services, layout, holder.live.settings, ClusterSettings(), client.url)
                self.supervisor = services
                orchestrate(holder, services)
                self.finished = True
                self.say(process, "the run has finished")

    def main(self) -> None:
        """Hold the run until it has finished; start again if that process is killed."""
        simulation = self.simulation
        while not self.finished:
            self.head = process = self.process("head", self.home)
            self.heads += 1
            self.say(process, "starts")
            process.start(partial(self.main_of, process, partial(self.hold, process)))
            while process.alive:
                simulation.wait(0.5)
                if simulation.now > self.plan.until + PROGRESS_S:
                    raise SimulationFailed(f"no progress {PROGRESS_S:.0f} s after the last fault")
            if process.code:
                raise SimulationFailed(f"the run has ended with exit code {process.code}: {self.simulation.log[-1]}")
            if not self.finished:
                simulation.wait(self.rng.uniform(1, 10))

    def run(self) -> SimulatedRun:
        """Run it, and check it."""
        state = random.getstate()
        random.seed(self.plan.seed)
        outside = SimProcess(self.simulation, "outside", Host("outside"))
        chaos = Chaos(self)
        try:

            def main() -> None:
                self.simulation.spawn(SimProcess(self.simulation, "chaos", Host("chaos")), chaos.run, "faults")
                self.main()

            self.simulation.run(outside, main)
        finally:
            random.setstate(state)
        check(self)
        return self


def quick(replace: Callable[[Any, str, Any], None]) -> None:
    """Have the parts look less often than in a real run: most looks see nothing new."""
    for module, name, seconds in (
        (loop, "POLL_S", 0.5),
        (orchestrator, "TICK_S", 1.0),
        (trainer_process, "STATUS_S", 2.0),
        (sampler_process, "REPORT_S", 2.0),
        (run_service, "HEARTBEAT_S", 3.0),
    ):
        replace(module, name, seconds)
    replace(sampler_process, "say", lambda *text, **options: None)


if __name__ == "__main__":
    import sys
    import tempfile

    quick(setattr)
    for seed in range(int(sys.argv[1]), int(sys.argv[-1]) + 1):
        with tempfile.TemporaryDirectory() as found:
            simulated = SimulatedRun(seed, Path(found))
            try:
                simulated.run()
            finally:
                print("\n".join([str(simulated.plan), *simulated.simulation.log]))
