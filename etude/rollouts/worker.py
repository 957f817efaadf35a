"""A worker process: claims slots, runs their rollouts in pods, stores traces and reports rewards to the queue.

    python -m etude.rollouts.worker RUN --name worker-0

One process with one event loop runs many rollouts concurrently; evaluation slots come before training slots. It talks
only to the rollout queues and the samplers. It may be killed at any time: its slots are requeued and continue from the
last checkpoint of each rollout, in the restarted worker or in another one on the same machine. On SIGTERM it releases
its slots, closes its pods and exits. It reports its status every second.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.config import load_table, read_toml
from etude.errors import EtudeError, InputError
from etude.harness.search.searcher import open_searcher
from etude.harness.session import SessionSpec
from etude.harness.toolserver.client import launch_tool_server
from etude.harness.trace_store import SUFFIX, save_trace
from etude.inference.policy import Policy
from etude.model.config import ModelConfig
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError
from etude.rewards.effort import EffortSettings
from etude.rewards.live_weights import LiveWeights
from etude.rollouts.queue import RolloutQueue, SlotState, StaleClaim
from etude.rollouts.queue_records import Slot
from etude.rollouts.rollout import (
    PolicyBinding,
    Rollout,
    RolloutCheckpoint,
    RolloutFailed,
    RolloutOptions,
    RolloutPhase,
    load_checkpoint,
    rollout_seed,
    run_rollout,
    save_checkpoint,
)
from etude.rollouts.sampler_pool import SamplersUnavailable, open_sampler_pool
from etude.rollouts.settings import (
    EvaluationSettings,
    QueueSettings,
    RolloutSettings,
    WorkerSettings,
    evaluation_queue,
    load_evaluation,
)
from etude.runs.layout import RL_ROOT, RunLayout
from etude.runs.service_status import read_statuses, write_status
from etude.system.cores import usable_cores
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.tasks.environment import PreparedEnvironments, environment_kind
from etude.tasks.harbor import read_task
from etude.tasks.task import Task

T = TypeVar("T")
QueueName = Literal["training", "evaluation"]
QUEUES: tuple[QueueName, ...] = ("evaluation", "training")  # in order of priority

IDLE_S = 0.05  # seconds between polls of a queue that has no slot to claim
STATUS_S = 1.0
HEARTBEATS_PER_LEASE = 4  # at least ...
HEARTBEAT_S = 2.0  # ... and at least this often, so that the queue shows the current state
SWEEP_S = 60.0  # seconds between searches for unneeded snapshots
STOP_S = 8.0  # seconds to stop after SIGTERM; the orchestrator sends SIGKILL after ten
KIND_SAMPLE = 32  # tasks whose environments are compared to find the kind to keep warm
MIN_SNAPSHOT_FILES = 500  # of a task: fewer are copied into a warm pod before a new pod's tool server has started
MAX_REASON = 1000  # characters of a failure reason stored in the queue

log = logging.getLogger("etude.rollouts.worker")


@dataclass(frozen=True)
class WorkerConfig:
    """The part of a run's configuration that a worker needs."""

    layout: RunLayout
    queues: Mapping[QueueName, QueueSettings]
    tasks: Mapping[QueueName, Mapping[str, Path]]  # task directories by name
    options: Mapping[QueueName, RolloutOptions]
    rewards: Mapping[str, float]  # weights of the recipe
    seed: int
    max_rollouts: int  # at once


@dataclass
class ClaimedSlot:
    """A slot that this worker has claimed, and the state of its rollout."""

    queue: QueueName
    slot: Slot
    since: float
    phase: RolloutPhase = "environment"
    work: "asyncio.Task[None] | None" = None
    snapshot: str = ""  # of its last checkpoint
    checkpoint_file: str = ""
    has_checkpoint: bool = False  # written by this attempt
    reported: bool = False  # its reward or failure is in the queue

    @property
    def state(self) -> SlotState:
        return "starting" if self.phase == "environment" else "grading" if self.phase == "grading" else "running"


class RolloutQueueClient:
    """The rollout queues, accessed in a thread of their own: a locked database must not block the sessions."""

    def __init__(self, worker: str, layout: RunLayout, settings: Mapping[QueueName, QueueSettings]) -> None:
        self.worker, self.settings = worker, settings
        self.paths = {"training": layout.slots, "evaluation": layout.evaluations}
        self._thread = ThreadPoolExecutor(1, "slots")
        self._queues: dict[QueueName, RolloutQueue] = {}

    async def claim(self, count: int) -> list[tuple[QueueName, Slot]]:
        """Claim at most `count` slots."""

        def work() -> list[tuple[QueueName, Slot]]:
            found: list[tuple[QueueName, Slot]] = []
            for name, queue in self._queues.items():
                while len(found) < count and (slot := queue.claim(self.worker, time.time())) is not None:
                    found.append((name, slot))
            return found

        return await self._call(work)

    async def heartbeat(self, claims: Sequence[ClaimedSlot]) -> list[ClaimedSlot]:
        """Renew the leases of all claims; return those that are no longer valid."""
        states = [(claim, claim.state) for claim in claims]

        def work() -> list[ClaimedSlot]:
            lost: list[ClaimedSlot] = []
            for name, queue in self._queues.items():
                own = {claim.slot.id: (claim, state) for claim, state in states if claim.queue == name}
                gone = queue.heartbeat_all([(claim.slot, state) for claim, state in own.values()], time.time())
                lost += [own[slot.id][0] for slot in gone]
            return lost

        return await self._call(work)

    async def release(self) -> None:
        """Requeue all slots of this worker."""
        await self._call(lambda: [queue.release(self.worker) for queue in self._queues.values()])

    async def snapshots(self) -> set[str]:
        """Return the snapshots from which a slot may be resumed."""
        return await self._call(
            lambda: {
                str(resume.get("snapshot")) for queue in self._queues.values() for resume in queue.rollout_checkpoints()
            }
        )

    async def report(self, claim: ClaimedSlot, change: Callable[[RolloutQueue, Slot], None]) -> None:
        """Apply a change to a claimed slot; StaleClaim if the claim is no longer valid."""
        await self._call(lambda: change(self._queues[claim.queue], claim.slot))

    async def close(self) -> None:
        def work() -> None:
            for queue in self._queues.values():
                queue.close()

        await self._call(work)
        self._thread.shutdown()

    async def _call(self, work: Callable[[], T]) -> T:
        def run() -> T:
            if not self._queues:  # a connection belongs to the thread that opened it
                self._queues = {
                    name: RolloutQueue(self.paths[name], self.settings[name])
                    for name in QUEUES
                    if name in self.settings
                }
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


# ------------------------------------------------------------------------------------------- the worker


class Worker:
    """Runs rollouts until `stop` is called. Use `run`."""

    def __init__(self, name: str, config: WorkerConfig, fleet: Fleet, binding: PolicyBinding) -> None:
        self.name, self.config, self.fleet, self.binding = name, config, fleet, binding
        self.layout = config.layout
        self.prepared = PreparedEnvironments(fleet, min_files=MIN_SNAPSHOT_FILES, prepare_pod=launch_tool_server)
        self.queues = RolloutQueueClient(name, config.layout, config.queues)
        self.weights = LiveWeights(config.layout.run, config.rewards)
        self.claims: dict[tuple[QueueName, int], ClaimedSlot] = {}
        self.counts: Counter[str] = Counter()
        self.waiting_for = "the samplers"
        self.last_failure = ""
        self._tasks: dict[Path, Task] = {}
        self._slot_freed = asyncio.Event()
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None  # an error that a rollout could not report to the queue
        self._unneeded: set[str] = set()  # snapshots that the last sweep found unneeded

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Claim and run slots until stopped.

        An InputError of a rollout ends the worker and the run. So does any other error that cannot be reported to the
        queue, but then the orchestrator restarts the worker.
        """
        await self.queues.release()  # slots of an earlier process of this name
        loops = [self._claim_loop(), self._heartbeat_loop(), self._status_loop(), self._sweep_loop()]
        running = [asyncio.create_task(work) for work in (*loops, self._stop.wait())]
        prewarming = asyncio.create_task(self._prewarm())
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._fatal is not None:
                raise self._fatal
        finally:
            for task in (*running, prewarming):
                task.cancel()
            await asyncio.gather(*running, prewarming, return_exceptions=True)
            async with self.prepared:
                await self._shut_down()

    async def _prewarm(self) -> None:
        """Build the image that most tasks have, and keep pods of it ready, each with its tool server."""
        queue: QueueName = "training" if "training" in self.config.queues else "evaluation"
        directories = list(self.config.tasks[queue].values())[:KIND_SAMPLE]
        with contextlib.suppress(EtudeError, OSError):  # the first rollout will report the error
            found = [self._read_task(directory) for directory in directories]
            tasks = {environment_kind(task): task for task in found}
            for kind, count in Counter(map(environment_kind, found)).most_common(1):
                size = min(self.config.max_rollouts, usable_cores()) if count > 1 else 0
                await self.prepared.keep_warm(tasks[kind], size, self.config.options[queue].host_settings)

    async def _shut_down(self) -> None:
        """Cancel all rollouts and release their slots, without counting failures."""
        works = [claim.work for claim in self.claims.values() if claim.work is not None]
        for work in works:
            work.cancel()
        snapshots = [claim.snapshot for claim in self.claims.values() if claim.snapshot]
        if works:
            await asyncio.wait(works, timeout=STOP_S / 2)
        await self._persist(snapshots)
        await self.queues.release()
        await self.queues.close()
        self._report_status()

    async def _persist(self, snapshots: Sequence[str]) -> None:
        """Write snapshots to disk, so that they outlive the zygote's memory; those that take too long are lost."""
        host = self.fleet.local
        with contextlib.suppress(TimeoutError, PodError, InputError):
            async with asyncio.timeout(STOP_S / 4):
                for snapshot in snapshots if host is not None else ():
                    assert host is not None
                    await host.persist(snapshot)

    # -- claims

    async def _claim_loop(self) -> None:
        await self._wait_for_samplers()
        while True:
            self._slot_freed.clear()
            free = self.config.max_rollouts - len(self.claims)
            slots = await self.queues.claim(free) if free else []
            for queue, slot in slots:
                claim = ClaimedSlot(queue, slot, time.monotonic())
                self.claims[queue, slot.id] = claim
                claim.work = asyncio.create_task(self._run_slot(claim))
                claim.work.add_done_callback(self._on_slot_done)
            if not slots:
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: before Python 3.12 it loses a cancellation that arrives with the event.
                    async with asyncio.timeout(IDLE_S if free else STATUS_S):
                        await self._slot_freed.wait()
            if self.waiting_for:
                await self._wait_for_samplers()

    async def _wait_for_samplers(self) -> None:
        """Wait until a sampler is available; no session is started before."""
        while True:
            try:
                await self.binding.policy.version()
            except EtudeError as error:
                self.waiting_for = f"the samplers: {error}"
                await asyncio.sleep(STATUS_S / 4)
            else:
                self.waiting_for = ""
                return

    async def _heartbeat_loop(self) -> None:
        lease = min(settings.lease_s for settings in self.config.queues.values())
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, lease / HEARTBEATS_PER_LEASE))
            for claim in await self.queues.heartbeat(list(self.claims.values())):
                if not claim.reported and claim.work is not None:
                    log.warning("slot %d of %s: the claim was lost", claim.slot.id, claim.slot.task)
                    self.counts["lost"] += 1
                    claim.work.cancel()

    # -- one slot

    def _on_slot_done(self, work: "asyncio.Task[None]") -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._fatal = error
            self._stop.set()

    async def _run_slot(self, claim: ClaimedSlot) -> None:
        slot = claim.slot
        try:
            try:
                rollout = await self._run_rollout(claim)
                await self._finish(claim, rollout)
            except RolloutFailed as error:
                await self._fail(claim, error)
            except (StaleClaim, InputError):
                raise
            except Exception as error:  # a bug of ours must not end the other rollouts
                log.exception("slot %d of %s", slot.id, slot.task)
                await self._fail(claim, RolloutFailed(f"bug: {type(error).__name__}: {error}"))
        except StaleClaim:
            self.counts["lost"] += 1
        finally:
            del self.claims[claim.queue, slot.id]
            self._slot_freed.set()

    async def _run_rollout(self, claim: ClaimedSlot) -> Rollout:
        queue, slot, config = claim.queue, claim.slot, self.config
        task = self._task(queue, slot.task)
        resume = await self._load_checkpoint(claim)

        def set_phase(phase: RolloutPhase) -> None:
            claim.phase = phase

        async def save(checkpoint: RolloutCheckpoint) -> None:
            await self._save_checkpoint(claim, checkpoint)

        rollout = await run_rollout(
            self.fleet,
            task,
            self.binding,
            replace(config.options[queue], prepared=self.prepared),
            seed=slot_seed(config.seed, queue, slot),
            id=f"{self.layout.run.name}/{queue}/{slot.group:06d}/{slot.number:02d}-{slot.attempt}",
            facts={"run": self.layout.run.name, "set": queue, "group": slot.group, "number": slot.number},
            weights=lambda version: self.weights.current(),  # the trainer scores the group again, with one set
            resume=resume,
            on_checkpoint=save,
            on_phase=set_phase,
        )
        if rollout.note:
            await self.queues.report(claim, lambda queue, slot: queue.add_note(slot, rollout.note[:MAX_REASON]))
        return rollout

    async def _finish(self, claim: ClaimedSlot, rollout: Rollout) -> None:
        """Store the trace and report the reward."""
        slot, task = claim.slot, self._task(claim.queue, claim.slot.task)
        directory = self.layout.traces if claim.queue == "training" else self.layout.evaluation_traces
        path = directory / f"{slot.group:06d}" / f"{slot.number:02d}-{slot.attempt}{SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(save_trace, rollout.trace, path)
        name = path.relative_to(self.layout.root).as_posix()
        record, versions = rollout.record(task), rollout.trace.versions()
        claim.reported = True
        try:
            await self.queues.report(claim, lambda queue, slot: queue.finish(slot, record, name, versions))
        except StaleClaim:
            path.unlink(missing_ok=True)  # the rollout of another worker counts
            raise
        self.counts["finished"] += 1
        await self._remove_checkpoint(claim)

    async def _fail(self, claim: ClaimedSlot, error: RolloutFailed) -> None:
        """Requeue the slot. Its checkpoint is kept only if this attempt wrote it, so that none fails repeatedly."""
        reason = str(error)[:MAX_REASON]
        log.warning("slot %d of %s, attempt %d: %s", claim.slot.id, claim.slot.task, claim.slot.attempt, reason)
        self.counts["failed"] += 1
        self.last_failure = reason
        if isinstance(error.__cause__, SamplersUnavailable):
            self.waiting_for = "the samplers"
        keep, claim.reported = claim.has_checkpoint, True
        await self.queues.report(claim, lambda queue, slot: queue.fail(slot, reason, keep_resume=keep))
        if not keep:
            await self._remove_checkpoint(claim)

    def _task(self, queue: QueueName, name: str) -> Task:
        """Return a task by its name in the queue; in the evaluation queue names are STEP/TASK."""
        plain = name if queue == "training" else name.partition("/")[2]
        directory = self.config.tasks[queue].get(plain)
        if directory is None and queue == "training":  # added since this worker was started
            directory = self.layout.task_lists()["train"].get(plain)
        if directory is None:
            raise InputError(f"there is no task {plain} in {self.layout.tasks}")
        return self._read_task(directory)

    def _read_task(self, directory: Path) -> Task:
        if directory not in self._tasks:
            self._tasks[directory] = read_task(directory)
        return self._tasks[directory]

    # -- checkpoints

    async def _load_checkpoint(self, claim: ClaimedSlot) -> RolloutCheckpoint | None:
        """Return the checkpoint of an earlier attempt; None if there is none, or it cannot be read."""
        resume = claim.slot.resume
        if resume is None:
            return None
        claim.snapshot, claim.checkpoint_file = str(resume.get("snapshot", "")), str(resume.get("trace", ""))
        try:
            return await asyncio.to_thread(load_checkpoint, self.layout.root / claim.checkpoint_file)
        except InputError as error:
            note = f"restarted from the beginning: {error}"[:MAX_REASON]
            await self.queues.report(claim, lambda queue, slot: queue.add_note(slot, note))
            return None

    async def _save_checkpoint(self, claim: ClaimedSlot, checkpoint: RolloutCheckpoint) -> None:
        """Save a checkpoint, record it in the queue, and then remove the previous one."""
        slot, previous = claim.slot, replace(claim)
        turns = checkpoint.trace.cost.turns
        path = self.layout.partial / f"{claim.queue}-{slot.id:06d}-{slot.attempt}-{turns}{SUFFIX}"
        name, snapshot = path.relative_to(self.layout.root).as_posix(), checkpoint.environment.snapshot.id
        await asyncio.to_thread(save_checkpoint, checkpoint, path)
        resume = {"trace": name, "snapshot": snapshot, "turns": turns, "over": checkpoint.finished}
        await self.queues.report(claim, lambda queue, slot: queue.checkpoint(slot, resume, time.time()))
        claim.snapshot, claim.checkpoint_file, claim.has_checkpoint = snapshot, name, True
        self.counts["checkpoints"] += 1
        await self._remove_checkpoint(previous, keep_file=name)

    async def _remove_checkpoint(self, claim: ClaimedSlot, keep_file: str = "") -> None:
        """Remove the snapshot and file of a claim's checkpoint."""
        if claim.snapshot:
            await self.fleet.remove_snapshot(claim.snapshot)
        if claim.checkpoint_file and claim.checkpoint_file != keep_file:
            (self.layout.root / claim.checkpoint_file).unlink(missing_ok=True)

    async def _sweep_loop(self) -> None:
        """Remove snapshots that no slot and no worker refers to in two consecutive sweeps.

        They belong to finished rollouts, or to workers killed before they recorded the checkpoint.
        """
        local = self.fleet.local
        while local is not None:
            needed = await self.queues.snapshots() | {
                id for status in read_statuses(self.layout).values() for id in status.get("prepared", ())
            }
            existing = {saved.snapshot.id for saved in await asyncio.to_thread(local.store.snapshots)}
            for id in (existing - needed) & self._unneeded:
                await self.fleet.remove_snapshot(id)
            self._unneeded = existing - needed
            await asyncio.sleep(SWEEP_S)
        await asyncio.Event().wait()

    # -- status

    async def _status_loop(self) -> None:
        while True:
            self._report_status()
            await asyncio.sleep(STATUS_S)

    def _report_status(self) -> None:
        now = time.monotonic()
        claims = sorted(self.claims.values(), key=lambda claim: claim.since)
        waiting_for = self.waiting_for
        if claims and not waiting_for:
            oldest = claims[0]
            waiting_for = f"{oldest.phase} of {oldest.slot.task} (slot {oldest.slot.id}), {now - oldest.since:.0f} s"
        elif not waiting_for:
            waiting_for = "slots to claim"
        write_status(
            self.layout,
            self.name,
            state="working" if claims else "waiting",
            waiting_for=waiting_for,
            held=[{"table": c.queue, "slot": c.slot.id, "doing": c.phase, "seconds": now - c.since} for c in claims],
            doing=dict(Counter(claim.phase for claim in claims)),
            counts=dict(self.counts),
            last_failure=self.last_failure,
            prepared=sorted(self.prepared.snapshots),  # other workers' sweeps spare them
            cpu_s=time.process_time(),
            weights_problem=self.weights.problem,
        )


def slot_seed(seed: int, queue: QueueName, slot: Slot) -> int:
    """Return the seed of a slot's rollout.

    In training no two attempts share one. In an evaluation it is a function of task and sample alone: every model is
    compared under the same seeds, and a sample that was interrupted ends as it would have.
    """
    if queue == "training":
        return rollout_seed(seed, QUEUES.index(queue), slot.group, slot.number, slot.attempt)
    return rollout_seed(seed, QUEUES.index(queue), zlib.crc32(slot.task.partition("/")[2].encode()), slot.number)


# ------------------------------------------------------------------------------------------- the process


def load_sessions(layout: RunLayout) -> WorkerSettings:
    """Return the settings of a run's sessions: those of `[rl]`, or of `[evaluation.sessions]`."""
    table = layout.sessions_table()
    return load_table(layout.recipe, table, RolloutSettings if table == "rl" else WorkerSettings)


def rollout_options(settings: WorkerSettings) -> RolloutOptions:
    """Return the options of a run's training rollouts."""
    searcher = open_searcher() if "codebase_search" in settings.tool_set.tools else None
    return RolloutOptions(
        SessionSpec.of(settings, searcher=searcher),
        temperature=settings.temperature,
        effort=settings.effort if isinstance(settings, RolloutSettings) else EffortSettings(),
        checkpoint_s=settings.checkpoint_rollouts_s,
    )


def worker_config(
    layout: RunLayout, settings: WorkerSettings, evaluation: EvaluationSettings | None, seed: int
) -> WorkerConfig:
    """Return the configuration of a run's workers; those of the stage `evaluation` have no training queue."""
    training = rollout_options(settings)
    tasks = layout.task_lists()
    queues: dict[QueueName, QueueSettings] = {}
    options: dict[QueueName, RolloutOptions] = {}
    if isinstance(settings, RolloutSettings) and layout.service_root == RL_ROOT:
        queues["training"], options["training"] = settings, training
    if evaluation is not None:
        queues["evaluation"] = evaluation_queue(settings, evaluation.validation_samples)
        options["evaluation"] = replace(training, temperature=evaluation.temperature)
    return WorkerConfig(
        layout=layout,
        queues=queues,
        tasks={"training": tasks.get("train", {}), "evaluation": tasks.get("held_out", {})},
        options=options,
        rewards=settings.rewards if isinstance(settings, RolloutSettings) else {"correctness": 1.0},
        seed=seed,
        max_rollouts=max(1, -(-settings.in_flight // settings.workers)),
    )


def bind_policy(layout: RunLayout, settings: WorkerSettings, policy: Policy) -> PolicyBinding:
    """Bind the policy of a run to its dialect and window."""
    dialect = dialect_for(Tokenizer.load(layout.model), settings.dialect)
    window = settings.window or ModelConfig.load(layout.model).max_length
    return PolicyBinding(policy, dialect, window, layout.run.name)


async def run_worker(name: str, config: WorkerConfig, settings: WorkerSettings) -> None:
    """Run a worker until SIGTERM or SIGINT."""
    layout = config.layout
    # All workers of a machine share one directory: each finds the pod snapshots of the others' checkpoints.
    async with open_fleet(state=layout.pods) as fleet, open_sampler_pool(layout) as policy:
        worker = Worker(name, config, fleet, bind_policy(layout, settings, policy))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        await worker.run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m etude.rollouts.worker", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--root", default=RL_ROOT, help="directory of the run that its processes share")
    parser.add_argument("--name", required=True, help="name of this worker, such as worker-0")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    layout: RunLayout | None = None
    try:
        die_with_parent(parent_process())
        layout = RunLayout.of_run(given.run, given.root)
        write_status(layout, given.name, state="starting")
        settings, seed = load_sessions(layout), int(read_toml(layout.recipe).get("seed", 0))
        config = worker_config(layout, settings, load_evaluation(layout), seed)
        asyncio.run(run_worker(given.name, config, settings))
    except EtudeError as error:
        say(f"{given.name}: {error}", file=sys.stderr)
        if layout is not None:
            write_status(layout, given.name, state="failed", problem=str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
