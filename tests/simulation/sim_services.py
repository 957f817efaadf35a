"""The services of a simulated run: the real parts, and stand-ins for what they compute with.

A policy step notes which rollouts it was given, the weights are the list of the steps that made them, and a session
waits for a sampler a few times.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sim_checks import apply_update, updates_of, weights_of
from sim_network import Server
from sim_time import SimLoop, SimProcess, SimulationFailed, run_async

from etude.harness.trace import Segment, Trace
from etude.harness.trace_store import unpack_trace
from etude.inference.sampler_process import Fetched, Sampler
from etude.inference.service import WeightSwap
from etude.rl.learner import Learner, StepOrder, StepOutcome
from etude.rl.loop import finish_publishing, learn
from etude.rl.trainer_process import (
    commit_checkpoint,
    intact_checkpoints,
    new_draft,
    reporting_status,
    resumed_loop,
    seal_draft,
    take_over,
)
from etude.rollouts.live_settings import LiveSettings
from etude.rollouts.rollout import RolloutFailed, RolloutOptions
from etude.rollouts.run_queues import open_queues
from etude.rollouts.run_service import RunService
from etude.rollouts.sampler_pool import SamplersUnavailable
from etude.rollouts.settings import RolloutSettings
from etude.rollouts.worker import ClaimedSlot, Worker, WorkerConfig
from etude.runs.address import run_token
from etude.runs.member import RunMember
from etude.runs.service_status import StatusReader
from etude.train.trainer import StepResult
from etude.weights.object_store import ROLLOUTS, WEIGHTS
from etude.weights.publisher import Publisher

if TYPE_CHECKING:
    from sim_run import SimulatedRun

SHARD_BYTES = 64


# ------------------------------------------------------------------------------------------ the trainer


class SimLearner(Learner):
    """A learner whose step only notes what it was given."""

    def begin(self, run: SimulatedRun, process: SimProcess, updates: tuple[int, ...], session: int) -> None:
        self.run, self.process, self.updates, self.session = run, process, updates, session
        self.weights = weights_of(updates, run.plan.steps)

    def step(self, order: StepOrder) -> StepOutcome:
        run, started = self.run, self.process.clock.monotonic()
        names = tuple(name for name, _ in order.rollouts or ())
        traces = {name: self.load_trace(name) for name in names}
        self.process.clock.sleep(run.rng.uniform(0.2, 1.0))
        update = run.history.add_update(traces, self.updates)
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
            self.run.history.add_version(number, self.updates)
            self.run.say(self.process, f"publishes version {number} (updates {list(self.updates)})")
            self.run.tempt(self.process)
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
        """Load a version while others sample."""
        number = fetched.version.number
        self.process.clock.sleep(self.run.rng.uniform(0.0, 0.3))
        self.weights = {name: tensor.clone() for name, tensor in fetched.state.items()}
        self.version, self.swaps = number, self.swaps + 1
        self.run.say(self.process, f"loads version {number} (updates {list(updates_of(self.weights))})")
        self.check()
        return WeightSwap(number, "keep", 0, 0.0)  # type: ignore[arg-type]

    def check(self) -> None:
        self.run.history.check_weights(self.process.name, self.version, self.weights)

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
                sampler.check()
                return [first, sampler.version]
        raise SamplersUnavailable("all samplers died")

    async def _finish(self, claim: ClaimedSlot, rollout: Any) -> None:
        await super()._finish(claim, rollout)
        run, slot = self.simulated, claim.slot
        run.history.reported.append((slot.id, slot.attempt))
        run.say(self.process, f"finished slot {slot.id}, attempt {slot.attempt}")
        run.tempt(self.process)


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
            keeping = asyncio.create_task(service.keep_house())
            while not keeping.done():
                await asyncio.sleep(1.0)
                run.history.check_in_flight(queues["training"].in_flight())
            keeping.result()

        run_async(clock, main())
