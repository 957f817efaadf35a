"""A simulated run: the real services of RL on simulated hosts, with faults, and what must be true of it.

Real are the rollout queue and the run service with its endpoints, the client that sends requests again, the worker's
claims, heartbeats and reports, the publisher, the follower of a sampler and its updates, the trainer's loop with its
checkpoints, the orchestrator's tick and the supervisor. Stand-ins are what they compute with: a policy step notes which
rollouts it was given, the weights are the list of the steps that made them, and a session waits for a sampler a few
times. The cluster, its hosts, the network between them, the object store and all clocks are simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tomli_w
import torch
from sim_network import STORE, Bucket, Network, Server, SimStore, connect_from
from sim_time import Host, SimLoop, SimProcess, Simulation, SimulationFailed, run_async

from etude.cluster.cluster import Cluster, Exit, Node, Resources, ServiceProcess, ServiceSpec
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceSupervisor
from etude.errors import EtudeError
from etude.files import take_lock, write_atomically
from etude.harness.trace import Segment, Trace
from etude.harness.trace_store import unpack_trace
from etude.inference import sampler_process
from etude.inference.sampler_process import Fetched, Sampler
from etude.inference.service import WeightSwap
from etude.rl import loop, orchestrator, trainer_process
from etude.rl.learner import Learner, StepOrder, StepOutcome
from etude.rl.loop import finish_publishing, learn
from etude.rl.orchestrator import Orchestrator, RlTaskSets, check_queues, orchestrate
from etude.rl.services import SAMPLER, TRAINER, WORKER, add_rl_services
from etude.rl.settings import RlSettings
from etude.rl.trainer_process import (
    commit_checkpoint,
    intact_checkpoints,
    new_draft,
    reporting_status,
    resumed_loop,
    seal_draft,
    take_over,
)
from etude.rollouts import run_service
from etude.rollouts.live_settings import LiveSettings
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_client import QueueClient
from etude.rollouts.rollout import RolloutFailed, RolloutOptions
from etude.rollouts.run_queues import open_queues
from etude.rollouts.run_service import RunService
from etude.rollouts.sampler_pool import SamplersUnavailable
from etude.rollouts.settings import RolloutSettings, load_queues
from etude.rollouts.stored_traces import attempt_of
from etude.rollouts.worker import ClaimedSlot, Worker, WorkerConfig
from etude.runs.address import run_token
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.runs.member import RunMember
from etude.runs.run import Run, RunSettings
from etude.runs.service_status import RUN_SERVICE, StatusReader
from etude.train.trainer import StepResult
from etude.weights.object_store import ROLLOUTS, WEIGHTS, ObjectStore
from etude.weights.owner import claimed
from etude.weights.publisher import Publisher

PORT = 29110
PROMPTS = 120
TIMEOUT_S = 8.0  # of a request
SHARD_BYTES = 64
DETECTION_S = (1.0, 8.0)  # until the cluster knows that a node is gone
PROGRESS_S = 2000.0  # within which the run must reach its steps once faults have stopped
DOWN_S = 60.0  # for which a service that died may be missing


# ------------------------------------------------------------------------------------------ the plan of a run


@dataclass(frozen=True)
class Plan:
    """What is drawn from the seed."""

    seed: int
    steps: int
    group_size: int
    groups_per_step: int
    max_staleness: int
    in_flight: int
    lease_s: float
    full_every: int
    keep: int
    checkpoint_every: int
    samplers: int
    nodes: int  # beside that of the run
    workers_per_node: int
    alike: float  # share of groups whose rewards are alike
    faults: frozenset[str]  # kinds
    fault_s: float  # mean time between two
    until: float  # when faults stop

    @classmethod
    def of_seed(cls, seed: int, faults: bool | None = None) -> Plan:
        rng = random.Random(f"plan/{seed}")
        kinds = [kind for kind in FAULTS if rng.random() < 0.6] if rng.random() < 0.9 else []
        if faults is not None:
            kinds = list(FAULTS) if faults else []
        return cls(
            seed=seed,
            steps=rng.randint(2, 5),
            group_size=rng.randint(2, 3),
            groups_per_step=rng.randint(1, 2),
            max_staleness=rng.choice([0, 1, 1, 2, 3]),
            in_flight=rng.randint(2, 8),
            lease_s=rng.choice([6.0, 20.0]),
            full_every=rng.choice([1, 2, 3, 20]),
            keep=rng.randint(1, 2),
            checkpoint_every=rng.choice([1, 2, 3]),
            samplers=rng.randint(1, 2),
            nodes=rng.randint(1, 3),
            workers_per_node=rng.randint(1, 2),
            alike=rng.choice([0.0, 0.0, 0.3]),
            faults=frozenset(kinds),
            fault_s=rng.choice([4.0, 8.0, 15.0]),
            until=rng.choice([40.0, 80.0]) if kinds else 0.0,
        )

    def settings(self) -> dict[str, Any]:
        """Return the table [rl] of the recipe."""
        return {
            "tasks": "/tasks",
            "steps": self.steps,
            "group_size": self.group_size,
            "groups_per_step": self.groups_per_step,
            "max_staleness": self.max_staleness,
            "in_flight": self.in_flight,
            "lease_s": self.lease_s,
            "max_attempts": 1000,
            "checkpoint_every": self.checkpoint_every,
            "stall_s": 240.0,
            "workers": self.workers_per_node,
            "device": "cpu",
            "sampler": {"count": self.samplers, "device": "cpu"},
            "weights": {"full_every": self.full_every, "keep": self.keep, "poll_s": 0.5, "dtype": "float32"},
            "precision": "float32",
        }


# ------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class Update:
    """One gradient step that was taken somewhere: the traces that it learned from, and what was wrong with them."""

    traces: tuple[str, ...]
    stale: str = ""


def apply_update(weights: Mapping[str, torch.Tensor], step: int, update: int) -> None:
    """Change weights in place: `history` says which update was made by which step, the others change a little."""
    weights["history"][step] = update
    for name in ("a", "b", "c"):
        weights[name][(update * 7 + ord(name) + step) % 24] += update


def weights_of(updates: Sequence[int], steps: int) -> dict[str, torch.Tensor]:
    """Return the weights that these updates make."""
    found = {"history": torch.zeros(steps), **{name: torch.zeros(24) for name in ("a", "b", "c")}}
    for step, update in enumerate(updates):
        apply_update(found, step, update)
    return found


def updates_of(weights: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Return the updates that made these weights."""
    return tuple(int(value) for value in weights["history"].tolist() if value)


def same_weights(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one
    )


# ------------------------------------------------------------------------------------------ the trainer


class SimLearner(Learner):
    """A learner whose step only notes what it was given."""

    def begin(self, run: SimulatedRun, process: SimProcess, updates: tuple[int, ...], session: int) -> None:
        self.run, self.process, self.updates, self.session = run, process, updates, session
        self.weights = weights_of(updates, run.plan.steps)

    def step(self, order: StepOrder) -> StepOutcome:
        run, started = self.run, self.process.clock.monotonic()
        names = tuple(name for name, _ in order.rollouts or ())
        stale = [found for name in names if (found := run.staleness(name, self.load_trace(name), self.updates))]
        self.process.clock.sleep(run.rng.uniform(0.2, 1.0))
        update = len(run.updates) + 1
        run.updates[update] = Update(names, "; ".join(stale))
        apply_update(self.weights, len(self.updates), update)
        self.updates = (*self.updates, update)
        self.trainer.step_count += 1
        run.say(self.process, f"step {self.trainer.step_count} is update {update} of {', '.join(names)}")
        run.tempt(self.process)
        seconds = self.process.clock.monotonic() - started
        result = StepResult({"loss": 0.0}, {"model": 1.0}, False, len(names), len(names), seconds)
        return StepOutcome(result, 1.0, {}, len(names), 1.0)

    def publish(self, number: int, pinned: bool = False) -> None:
        if self.pending != number:
            self.run.note_publication(self.process, number, self.updates)
        super().publish(number, pinned)

    def _published(self) -> dict[str, torch.Tensor]:
        return self.weights  # which the next step changes in place

    def write(self) -> None:
        """Write a checkpoint."""
        run, step = self.run, self.trainer.step_count
        draft = run.layout.trainer / f".{step:06d}.making"
        new_draft(draft)
        (draft / "updates.json").write_text(json.dumps(self.updates))
        self.process.clock.sleep(run.rng.uniform(0.0, 0.5))
        seal_draft(draft, step)
        self.process.clock.sleep(run.rng.uniform(0.0, 0.1))
        commit_checkpoint(run.layout, draft, step, self.settings, None, self.session)
        run.say(self.process, f"checkpoint {step}")
        run.tempt(self.process)


def train(run: SimulatedRun, process: SimProcess) -> None:
    """The trainer process, as `trainer_process.lead`."""
    clock, layout, settings = process.clock, run.layout, run.settings
    open_client = run.client_factory(process)
    weights, traces = run.store(process, WEIGHTS), run.store(process, ROLLOUTS)

    def load_trace(name: str) -> Trace:
        while True:
            try:
                data = traces.get(name)
            except OSError:
                continue
            if data is None:
                raise SimulationFailed(f"the trace {name} of a finished rollout is lost")
            return unpack_trace(data, name)

    with (
        closing(StatusReader(layout, open_client, clock)) as statuses,
        reporting_status(statuses) as report,
        Publisher(
            weights,
            full_every=settings.weights.full_every,
            keep=settings.weights.keep,
            shard_bytes=SHARD_BYTES,
            run=layout.run_id(),
            clock=clock,
        ) as publisher,
        closing(open_client(layout)) as client,
    ):
        queues, session = take_over(layout, client)
        found = intact_checkpoints(layout)
        updates = tuple(json.loads((found[-1][1] / "updates.json").read_text())) if found else ()
        clock.sleep(run.rng.uniform(0.2, 2.0))  # loads the model
        trainer = SimpleNamespace(step_count=len(updates), mesh=None)
        learner = SimLearner(settings, trainer, None, publisher, None, 0, load_trace)  # type: ignore[arg-type]
        learner.begin(run, process, updates, session)
        learner.save = learner.write
        run.say(process, f"continues from step {len(updates)}")
        loop = resumed_loop(layout, settings, learner, queues, session)
        loop.report_status = report
        learn(loop)
        finish_publishing(loop)


# ------------------------------------------------------------------------------------------ samplers


class SimSampler:
    """What samples in a sampler process: it has the weights, and answers with their version."""

    model, load_s, close_s, waits_for = Path("/model"), 30.0, 30.0, "the engine"

    def __init__(self, run: SimulatedRun, process: SimProcess) -> None:
        self.run, self.process = run, process
        self.version, self.swaps = -1, 0
        self.weights: dict[str, torch.Tensor] = {}
        self.state, self.steps, self.open_sequences, self.failure = "running", 0, 0, None

    def warm_up(self) -> Iterator[bool]:
        return iter(())

    def close(self) -> None:
        pass

    def take(self, fetched: Fetched) -> WeightSwap:
        """Load a version, tensor by tensor, between two turns."""
        number = fetched.version.number
        self.process.clock.sleep(self.run.rng.uniform(0.0, 0.3))
        self.weights = {name: tensor.clone() for name, tensor in fetched.state.items()}
        self.version, self.swaps = number, self.swaps + 1
        self.run.say(self.process, f"loads version {number} (updates {list(updates_of(self.weights))})")
        self.run.check_weights(self)
        return WeightSwap(number, "keep", 0, 0.0)  # type: ignore[arg-type]

    def stats(self) -> Any:
        numbers = dict.fromkeys(("running", "waiting", "output_tokens", "prefill_tokens", "cached_tokens"), 0)
        return SimpleNamespace(
            state=self.state, version=self.version, swaps=self.swaps, preemptions=0, busy_s=0.0, **numbers
        )


def sample(run: SimulatedRun, process: SimProcess, name: str) -> None:
    """The sampler process, as `Sampler.run` without its HTTP server."""
    clock = process.clock
    clock.sleep(run.rng.uniform(0.2, 2.0))  # loads the model
    member = run.member(process, name)
    backend = SimSampler(run, process)
    sampler = Sampler(member, run.settings, backend, run.store(process, WEIGHTS), clock)  # type: ignore[arg-type]
    clock.start_thread(sampler._report, "report")
    first = sampler._first_version()
    sampler._record_loaded(first, backend.take(first).seconds)
    sampler.service = backend  # type: ignore[assignment]
    sampler._set_state("ready", "")
    run.samplers.append(backend)
    sampler._follow(backend, backend.take)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------ workers


class SimWorker(Worker):
    """A worker whose sessions wait for a sampler a few times."""

    def __init__(self, run: SimulatedRun, process: SimProcess, member: RunMember) -> None:
        fleet: Any = SimpleNamespace()
        binding: Any = SimpleNamespace(policy=self)
        options = {"training": RolloutOptions(), "evaluation": RolloutOptions()}
        config = WorkerConfig("simulated", options, {"correctness": 1.0}, run.plan.seed)  # type: ignore[arg-type]
        super().__init__(member, config, fleet, binding, run.store(process, ROLLOUTS), process.clock)
        self.simulated, self.process, self.rng = run, process, run.rng

    async def version(self) -> int:
        return self._sampler().version

    def _sampler(self) -> SimSampler:
        reach = self.simulated.network.reaches
        found = [
            each
            for each in self.simulated.samplers
            if each.process.alive and not each.process.paused_until > self.simulated.simulation.now
            if reach(self.process.host, each.process.host)
        ]
        if not found:
            raise SamplersUnavailable("no sampler answers")
        return self.rng.choice(found)

    async def _prewarm(self) -> None:
        pass

    async def _sweep_loop(self) -> None:
        await asyncio.Event().wait()

    async def _task(self, queue: Any, name: str) -> Any:
        return SimpleNamespace(name=name)

    async def _remove_checkpoint(self, claim: ClaimedSlot, keep_file: str = "") -> None:
        if claim.checkpoint_file and claim.checkpoint_file != keep_file:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.store.remove, claim.checkpoint_file)

    async def _run_rollout(self, claim: ClaimedSlot) -> Any:
        run, slot = self.simulated, claim.slot
        versions: list[int] = []
        if slot.resume is not None:
            claim.checkpoint_file = str(slot.resume["trace"])
            try:
                data = await asyncio.to_thread(self.store.get, claim.checkpoint_file)
            except OSError as error:
                raise RolloutFailed("the checkpoint cannot be read") from error
            versions = json.loads(data) if data is not None else []
        await asyncio.sleep(self.rng.uniform(0.05, 0.5))
        claim.phase = "session"
        for turn in range(len(versions) // 2, self.rng.randint(1, 4)):
            try:
                versions += await self._turn()
            except SamplersUnavailable as error:
                raise RolloutFailed(str(error)) from error
            if run.faulty("failures", 0.03):
                raise RolloutFailed("the pod died")
            if run.faulty("checkpoints", 0.3):
                name = f"partial/{slot.id}-{slot.attempt}-{turn}"
                await self._put(name, json.dumps(versions).encode())
                resume = {"trace": name, "snapshot": "", "turns": turn}
                await self.service.report(claim.queue, slot, "checkpoint", resume=resume)
                claim.checkpoint_file, claim.has_checkpoint = name, True
        claim.phase = "grading"
        await asyncio.sleep(self.rng.uniform(0.05, 0.3))
        versions = versions or [(await self._turn())[0]]
        reward = run.reward(slot.group, slot.number, slot.attempt)
        return SimpleNamespace(trace=trace_of(slot.task, versions), note="", record=lambda task: reward)

    async def _turn(self) -> list[int]:
        """Have one turn sampled; return the versions of its first and last token."""
        for _ in range(4):
            sampler = self._sampler()
            first = sampler.version
            await asyncio.sleep(self.rng.uniform(0.1, 0.8))
            if sampler.process.alive:
                self.simulated.check_weights(sampler)
                return [first, sampler.version]
        raise SamplersUnavailable("all samplers died")

    async def _finish(self, claim: ClaimedSlot, rollout: Any) -> None:
        await super()._finish(claim, rollout)
        self.simulated.note_finished(self.process, claim.slot)


def trace_of(task: str, versions: Sequence[int]) -> Trace:
    """Return a trace with one token for each of these versions."""
    size = len(versions)
    ones = np.zeros(size, np.float32)
    tokens = np.arange(size, dtype=np.uint32)
    segment = Segment("start", tokens, np.ones(size, bool), ones, ones, np.array(versions, np.int32))
    return Trace("id", task, "simulated", "policy", [], [segment], [], "final")


def work(run: SimulatedRun, process: SimProcess, name: str) -> None:
    """The worker process, as `run_worker`."""
    process.clock.sleep(run.rng.uniform(0.2, 1.0))
    member = run.member(process, name)

    async def main() -> None:
        worker = SimWorker(run, process, member)
        loop = asyncio.get_running_loop()
        process.terminate = lambda: loop.call_soon_threadsafe(worker.stop)  # type: ignore[attr-defined]
        await worker.run()

    run_async(process.clock, main())


# ------------------------------------------------------------------------------------------ the run service


def serve(run: SimulatedRun, process: SimProcess) -> None:
    """The run service, without its HTTP server."""
    clock, layout = process.clock, run.layout
    clock.sleep(run.rng.uniform(0.1, 0.5))
    with open_queues(layout) as queues:
        live = LiveSettings(layout, RolloutSettings)
        service = RunService(layout, queues, run.settings.workers, live, clock)

        async def main() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, SimLoop)
            Server(run.network, process, service.application(run_token(layout)), loop)
            await service.keep_house()

        run_async(clock, main())


# ------------------------------------------------------------------------------------------ the cluster


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


# ------------------------------------------------------------------------------------------ the run


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
        # What has happened, to be compared with what the run says.
        self.updates: dict[int, Update] = {}
        self.published: dict[int, tuple[int, ...]] = {}
        self.reported: list[tuple[int, int]] = []  # finished rollouts: slot and attempt
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

    # -------------------------------------------------------------------------------------- what happens

    def note_publication(self, process: SimProcess, number: int, updates: tuple[int, ...]) -> None:
        """Take note of a version; a trainer that was replaced may take a step, but publishes no weights."""
        for update in updates:
            if self.updates[update].stale:
                raise SimulationFailed(self.updates[update].stale)
        if self.published.setdefault(number, updates) != updates:
            raise SimulationFailed(f"version {number} is of updates {updates}, and of {self.published[number]}")
        self.say(process, f"publishes version {number} (updates {list(updates)})")
        self.tempt(process)

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

    def note_finished(self, process: SimProcess, slot: Any) -> None:
        self.say(process, f"finished slot {slot.id}, attempt {slot.attempt}")
        self.reported.append((slot.id, slot.attempt))
        self.tempt(process)

    # -------------------------------------------------------------------------------------- invariants at all times

    def check_weights(self, sampler: SimSampler) -> None:
        """A sampler has exactly the weights that were published as its version, all of them."""
        if sampler.version not in self.published:
            raise SimulationFailed(f"{sampler.process.name} has version {sampler.version}, which was not published")
        expected = weights_of(self.published[sampler.version], self.plan.steps)
        if not same_weights(sampler.weights, expected):
            raise SimulationFailed(f"{sampler.process.name}: its weights are not those of version {sampler.version}")

    def staleness(self, name: str, trace: Trace, updates: tuple[int, ...]) -> str:
        """No token is trained on more than max_staleness updates from the weights that sampled it: return which is."""
        for version in set(trace.segments[0].versions.tolist()):
            distance = len(set(self.published[version]) ^ set(updates))
            if distance > self.plan.max_staleness:
                return (
                    f"{name}: a token of version {version} (updates {self.published[version]}) is trained with the "
                    f"weights of {updates}: staleness {distance}, limit {self.plan.max_staleness}"
                )
        return ""


# ------------------------------------------------------------------------------------------ invariants at the end


def check(run: SimulatedRun) -> None:
    """Compare what the run says of itself with what has happened."""
    plan, layout = run.plan, run.layout
    (step, newest), *_ = reversed(intact_checkpoints(layout))
    updates = json.loads((newest / "updates.json").read_text())
    with closing(RolloutQueue.open_read_only(layout.slots)) as queue:
        groups = {each.id: each for each in queue.progress()}
        slots = {slot.id: slot for id in groups for slot in queue.group(id).slots}
        incidents, counts = queue.incidents(), queue.counts()
    # Progress: all steps are taken, and the last weights are the sum of exactly these.
    expect(step == plan.steps == len(updates), f"the run has {step} steps of {plan.steps}, by {len(updates)} updates")
    # Nothing is trained twice.
    trained = Counter(name for update in updates for name in run.updates[update].traces)
    twice = sorted(name for name, count in trained.items() if count > 1)
    expect(not twice, f"trained twice: {twice}")
    prompts = Counter(groups[id].task for id in {group_of(name) for name in trained})
    expect(all(count == 1 for count in prompts.values()), f"trained twice: {prompts.most_common(1)}")
    # The queue says of every group which update has trained it.
    for number, update in enumerate(updates, start=1):
        learned = {group_of(name) for name in run.updates[update].traces}
        marked = {id for id, each in groups.items() if each.step == number}
        expect(learned <= marked, f"step {number} has learned from {learned}, the queue says {marked}")
        for id in marked - learned:
            totals = {slot.record["total"] for slot in slots.values() if slot.group == id}
            expect(len(totals) == 1, f"group {id} was consumed by step {number}, which has not learned from it")
    expect(all(each.step is None or each.step <= plan.steps for each in groups.values()), "a step that was not taken")
    # Nothing finished is lost: it was trained on, is still there, or became too stale.
    stale = Counter((each.task, each.number) for each in incidents if each.kind == "stale")
    finished: defaultdict[int, set[int]] = defaultdict(set)
    for id, attempt in run.reported:
        finished[id].add(attempt)
    for id, attempts in finished.items():
        slot = slots[id]
        kept = slot.state == "ready" and slot.attempt in attempts and slot.trace in run.buckets[ROLLOUTS].objects
        lost = len(attempts) - kept - stale[slot.task, slot.number]
        expect(lost <= 0, f"of the finished attempts {attempts} of slot {id}, {lost} are lost: {slot}")
    for slot in slots.values():
        own = slot.state != "ready" or attempt_of(slot.trace) == (slot.number, slot.attempt)
        expect(own, f"slot {slot.id} has the trace of another attempt: {slot}")
    expect(len(slots) == len(groups) * plan.group_size == sum(counts.values()), "slots are missing")
    if not plan.faults:
        expect(not incidents, f"without faults: {incidents}")
        expect(all(slot.attempt <= 1 for slot in slots.values()), "without faults a rollout was repeated")
        expect(run.heads == 1 and len(run.started) == len({each.spec.name for each in run.started}), "restarts")


def expect(true: bool, problem: str) -> None:
    if not true:
        raise SimulationFailed(problem)


def group_of(trace: str) -> int:
    return int(trace.split("/")[1])


# ------------------------------------------------------------------------------------------ faults

FAULTS: tuple[str, ...] = (
    "kills",
    "moments",
    "nodes",
    "isolation",
    "freezes",
    "pauses",
    "head",
    "partitions",
    "slow",
    "losses",
    "repeats",
    "store",
    "clocks",
    "damage",
    "failures",
    "checkpoints",
)
MAX_KILLS = 5  # of a service: more in five minutes end a run, as they should


@dataclass
class Chaos:
    """What goes wrong."""

    world: SimulatedRun
    missing: dict[str, float] = field(default_factory=dict)  # services that are not running, and since when

    def run(self) -> None:
        world, simulation, rng = self.world, self.world.simulation, self.world.rng
        self.everywhere()
        acts = {name: getattr(self, name) for name in sorted(world.plan.faults) if hasattr(self, name)}
        while simulation.now < world.plan.until:
            simulation.wait(rng.expovariate(1 / world.plan.fault_s))
            if acts and simulation.now < world.plan.until:
                name = rng.choice(list(acts))
                acts[name]()
        self.stop()
        while True:
            simulation.wait(5.0)
            self.watch()

    def say(self, what: str) -> None:
        self.world.simulation.say("faults", what)

    def everywhere(self) -> None:
        """Faults that are there all the time."""
        world, kinds, rng = self.world, self.world.plan.faults, self.world.rng
        network = world.network
        network.loss = rng.choice([0.01, 0.05]) if "losses" in kinds else 0.0
        if "repeats" in kinds:
            network.repeats, network.late = rng.choice([0.02, 0.1]), rng.choice([0.0, 0.02])
        for bucket in world.buckets.values():
            if "store" in kinds:
                bucket.errors, bucket.late = rng.choice([0.01, 0.1]), 0.3
            if "slow" in kinds:
                bucket.rate = rng.choice([200.0, 1000.0, 1e5])

    def stop(self) -> None:
        world = self.world
        world.network.heal()
        for bucket in world.buckets.values():
            bucket.errors = bucket.late = 0.0
        self.say("no more faults")

    # -- one fault each

    def alive(self) -> list[SimServiceProcess]:
        return [each for each in self.world.started if each.process is not None and each.process.alive]

    def victims(self) -> list[SimServiceProcess]:
        return [each for each in self.alive() if self.world.killed[each.spec.name] < MAX_KILLS]

    def do_kill(self, each: SimServiceProcess) -> None:
        assert each.process is not None
        self.world.killed[each.spec.name] += 1
        self.say(f"kills {each.process.name}")
        each.process.kill()

    def kills(self) -> None:
        if found := self.victims():
            name = self.world.rng.choice(sorted({each.spec.name for each in found}))
            self.do_kill(next(each for each in reversed(found) if each.spec.name == name))

    def pauses(self) -> None:
        rng, found = self.world.rng, self.alive()
        if rng.random() < 0.5:
            found = [each for each in found if each.spec.name.startswith(WORKER)]
        if found:
            each, seconds = rng.choice(found), rng.uniform(1, 45)
            assert each.process is not None
            self.say(f"stops {each.process.name} for {seconds:.0f} s")
            each.process.paused_until = self.world.simulation.now + seconds

    def nodes(self) -> None:
        """A node dies; another joins later."""
        world = self.world
        found = [node for node in world.nodes[1:] if node.gone_at is None]
        if not found:
            return
        node = world.rng.choice(found)
        self.say(f"node {node.id} dies")
        node.host.up = False
        node.gone_at = world.simulation.now + world.rng.uniform(*DETECTION_S)
        for each in self.alive():
            if each.place is node and each.process is not None:
                each.process.kill()
        world.simulation.later(world.rng.uniform(2, 40), lambda: self.replace(node))

    def replace(self, node: SimNode) -> None:
        self.say(f"node {self.world.join(node.sees_run).id} joins")

    def isolation(self) -> None:
        """A node is cut off for so long that the cluster gives it up; it ends what it runs when it is back."""
        if (lost := self.lose("is cut off")) is not None:
            node, seconds = lost
            self.world.network.isolated(node.host, self.world.home, seconds)

    def freezes(self) -> None:
        """The same, by a node that stands still for a while."""
        if (lost := self.lose("stands still")) is not None:
            node, seconds = lost
            for each in self.alive():
                if each.place is node and each.process is not None:
                    each.process.paused_until = self.world.simulation.now + seconds

    def lose(self, how: str) -> tuple[SimNode, float] | None:
        """Have the cluster give up a node that is back later; return it, and for how many seconds it is away."""
        world, rng = self.world, self.world.rng
        found = [node for node in world.nodes[1:] if node.gone_at is None]
        if not found:
            return None
        node, seconds = rng.choice(found), rng.uniform(5, 40)
        self.say(f"node {node.id} {how} for {seconds:.0f} s")
        node.gone_at = world.simulation.now + rng.uniform(*DETECTION_S)

        def back() -> None:
            for each in world.started:
                if each.place is node and each.process is not None:
                    each.process.kill()
            self.replace(node)

        world.simulation.later(seconds + rng.uniform(0, 4), back)
        return node, seconds

    def head(self) -> None:
        """The process that holds the run is killed, and all services with it."""
        world = self.world
        if world.head is not None and world.head.alive and self.world.killed["head"] < 2:
            self.world.killed["head"] += 1
            self.say("kills the process that holds the run")
            world.head.kill()

    def partitions(self) -> None:
        world, rng = self.world, self.world.rng
        hosts = [node.host for node in world.nodes[1:] if node.host.up]
        if hosts:
            one, other, seconds = rng.choice([world.home, STORE]), rng.choice(hosts), rng.uniform(1, 40)
            self.say(f"{one.name} and {other.name} do not reach each other for {seconds:.0f} s")
            world.network.isolated(one, other, seconds)

    def slow(self) -> None:
        world, rng = self.world, self.world.rng
        host = rng.choice([node.host for node in world.nodes] + [STORE])
        factor = rng.choice([1.0, 30.0, 300.0])
        self.say(f"the link of {host.name} is {factor:.0f} times slower")
        world.network.slow[host.name] = factor

    def clocks(self) -> None:
        """The clock of a host is set."""
        host = self.world.rng.choice(self.world.nodes).host
        host.skew += self.world.rng.uniform(-15, 15)
        self.say(f"the clock of {host.name} is set to {host.skew:+.1f} s")

    def damage(self) -> None:
        """The trainer is killed, and its newest checkpoint damaged, as by a power cut."""
        trainers = [each for each in self.victims() if each.spec.name == TRAINER]
        found = sorted(self.world.layout.trainer.glob("[0-9]*"))
        if trainers and len(found) > 1:
            self.do_kill(trainers[-1])
            self.say(f"damages the checkpoint {found[-1].name}")
            file = found[-1] / "updates.json"
            file.write_bytes(file.read_bytes()[:-1])

    # -- what must be there

    def watch(self) -> None:
        """Services that have died run again; those of dead nodes elsewhere."""
        world, now = self.world, self.world.simulation.now
        if world.finished or world.head is None or not world.head.alive or world.supervisor is None:
            self.missing.clear()
            return
        services = world.supervisor.services
        running = Counter(each.spec.name for each in self.alive() if each.place and each.place.gone_at is None)
        expected = {RUN_SERVICE, TRAINER, *(f"{SAMPLER}-{number}" for number in range(world.plan.samplers))}
        if TRAINER in services and services[TRAINER].finished:
            expected.discard(TRAINER)
        lacking = {name for name in expected if not running[name]}
        for node in world.nodes:
            if node.gone_at is None:
                here = [e for e in self.alive() if e.place is node and e.spec.name.startswith(WORKER)]
                if len(here) < world.plan.workers_per_node:
                    lacking.add(f"a worker on {node.id}")
        self.missing = {name: self.missing.get(name, now) for name in lacking}
        for name, since in self.missing.items():
            if now - since > DOWN_S:
                world.simulation.fail(f"{name} has not run for {now - since:.0f} s")


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
