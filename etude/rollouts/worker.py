"""A worker process: claims slots, runs their rollouts in pods, stores traces and reports rewards to the queue.

    ETUDE_RUN_TOKEN=... python -m etude.rollouts.worker --service URL --name worker-0

One process with one event loop runs many rollouts concurrently; evaluation slots come before training slots. It needs
only the run service, the samplers and the object store of traces, so it may run on any machine. It may be killed at any
time: its slots are requeued and continue from the last checkpoint of each rollout, in the restarted worker or in
another one on the same machine. On SIGTERM it releases its slots, closes its pods and exits. Its heartbeats carry its
status.
"""

import argparse
import asyncio
import contextlib
import logging
import shutil
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.config import read_toml
from etude.errors import EtudeError, InputError
from etude.files import user_cache
from etude.harness.search.searcher import open_searcher
from etude.harness.session import SessionSpec
from etude.harness.toolserver.client import launch_tool_server
from etude.harness.trace_store import SUFFIX, pack_trace
from etude.inference.policy import Policy
from etude.model.config import ModelConfig
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError
from etude.rewards.effort import EffortSettings
from etude.rollouts.leases import evaluated_step
from etude.rollouts.live_settings import changed_settings
from etude.rollouts.queue import SlotState, StaleClaim
from etude.rollouts.queue_records import HeldSlot, Slot
from etude.rollouts.rollout import (
    PolicyBinding,
    Rollout,
    RolloutCheckpoint,
    RolloutFailed,
    RolloutOptions,
    RolloutPhase,
    pack_checkpoint,
    rollout_seed,
    run_rollout,
    unpack_checkpoint,
)
from etude.rollouts.sampler_pool import SamplersUnavailable, open_sampler_pool
from etude.rollouts.settings import QUEUES, QueueName, RolloutSettings, WorkerSettings, load_evaluation, load_sessions
from etude.rollouts.stored_traces import trace_name
from etude.rollouts.worker_client import WorkerClient
from etude.runs.address import TOKEN_VARIABLE
from etude.runs.client import PATIENCE_S, status_facts
from etude.runs.layout import RL_ROOT, RunLayout
from etude.runs.member import RunMember, open_member
from etude.runs.service_status import DRAINED
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.system.cores import usable_cores
from etude.system.processes import die_with_parent, parent_process
from etude.system.terminal import say
from etude.tasks.environment import PreparedEnvironments, environment_kind
from etude.tasks.harbor import read_task
from etude.tasks.task import Task
from etude.weights.object_store import ROLLOUTS, ObjectStore, open_store

STATUS_S = 1.0  # seconds between two looks for a sampler, times four
FULL_DISK_S = 5.0  # seconds between two looks whether a full disk has space again
MIN_FREE = 64 << 20  # bytes on the disks of this machine: with less, nothing is claimed, and no failure counts
SWEEP_S = 60.0  # seconds between searches for unneeded snapshots
STOP_S = 8.0  # seconds to stop after SIGTERM; the orchestrator sends SIGKILL after ten
KIND_SAMPLE = 32  # tasks whose environments are compared to find the kind to keep warm
MIN_SNAPSHOT_FILES = 500  # of a task: fewer are copied into a warm pod before a new pod's tool server has started
MAX_REASON = 1000  # characters of a failure reason stored in the queue

log = logging.getLogger("etude.rollouts.worker")


@dataclass(frozen=True)
class WorkerConfig:
    """The part of a run's configuration that a worker needs."""

    run: str  # its name
    options: Mapping[QueueName, RolloutOptions]
    rewards: Mapping[str, float]  # weights of the recipe
    seed: int
    changes: Mapping[str, Any] = field(default_factory=dict)  # of the settings during the run


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


# ------------------------------------------------------------------------------------------- the worker


class Worker:
    """Runs rollouts until `stop` is called. Use `run`."""

    def __init__(
        self,
        member: RunMember,
        config: WorkerConfig,
        fleet: Fleet,
        binding: PolicyBinding,
        store: ObjectStore,
        clock: Clock = MACHINE_CLOCK,
        evaluation_binding: Callable[[int], PolicyBinding] | None = None,
    ) -> None:
        self.config, self.fleet, self.binding = config, fleet, binding
        # Beside training, an evaluation of a step has samplers of its own.
        self.evaluation_binding = evaluation_binding or (lambda step: binding)
        self.prepared = PreparedEnvironments(fleet, min_files=MIN_SNAPSHOT_FILES, prepare_pod=launch_tool_server)
        self.service, self.member = WorkerClient(member), member
        self.store, self.clock = store, clock
        self.max_rollouts, self.draining, self.settings_problem = 1, False, ""  # by the last heartbeat
        self.claims: dict[tuple[QueueName, int, int], ClaimedSlot] = {}  # by slot and attempt
        self.counts: Counter[str] = Counter()
        self.waiting_for = "the samplers"
        self.last_failure = ""
        self.storage_problem = ""  # why a trace could not be stored yet
        self.disks = (member.layout.pods, user_cache(""))  # of this machine, on which rollouts need space
        self._tasks: dict[tuple[QueueName, str], Task] = {}
        self._slot_freed = asyncio.Event()
        self._stop = asyncio.Event()
        self.drained = False  # it ended because it was asked to, with nothing left to do
        self._fatal: BaseException | None = None  # an error that a rollout could not report to the queue
        self._unneeded: set[str] = set()  # snapshots that the last sweep found unneeded

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Claim and run slots until stopped.

        An InputError of a rollout ends the worker and the run. So does any other error that cannot be reported to the
        queue, but then the orchestrator restarts the worker.
        """
        await self.service.enlist()
        pause_s = await self._heartbeat()
        loops = [self._claim_loop(), self._heartbeat_loop(pause_s), self._sweep_loop()]
        running = [asyncio.create_task(work) for work in (*loops, self._stop.wait())]
        prewarming = asyncio.create_task(self._prewarm())
        try:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._fatal is not None:
                raise self._fatal
            self.drained = self.draining and not self.claims
        finally:
            for task in (*running, prewarming):
                task.cancel()
            await asyncio.gather(*running, prewarming, return_exceptions=True)
            async with self.prepared:
                await self._shut_down()

    async def _prewarm(self) -> None:
        """Build the image that most tasks have, and keep pods of it ready, each with its tool server."""
        queue: QueueName = "training" if "training" in self.config.options else "evaluation"
        with contextlib.suppress(EtudeError, OSError):  # the first rollout will report the error
            names = await asyncio.to_thread(self.member.task_names, queue, KIND_SAMPLE)
            found = [await self._read_task(queue, name) for name in names]
            tasks = {environment_kind(task): task for task in found}
            for kind, count in Counter(map(environment_kind, found)).most_common(1):
                size = min(self.max_rollouts, usable_cores()) if count > 1 else 0
                await self.prepared.keep_warm(tasks[kind], size, self.config.options[queue].host_settings)

    async def _shut_down(self) -> None:
        """Cancel all rollouts and release their slots, without counting failures."""
        works = [claim.work for claim in self.claims.values() if claim.work is not None]
        for claim in self.claims.values():
            if claim.work is not None and not claim.reported:  # after the report only its checkpoint is left to remove
                claim.work.cancel()
        snapshots = [claim.snapshot for claim in self.claims.values() if claim.snapshot]
        if works:
            await asyncio.wait(works, timeout=STOP_S / 2)
        await self._persist(snapshots)
        await self.service.leave()

    async def _persist(self, snapshots: Sequence[str]) -> None:
        """Write snapshots to disk, so that they outlive the zygote's memory; those that take too long are lost."""
        with contextlib.suppress(TimeoutError, PodError, InputError):
            async with asyncio.timeout(STOP_S / 4):
                for snapshot in snapshots:
                    await self.fleet.persist(snapshot)

    # -- claims

    async def _claim_loop(self) -> None:
        await self._wait_for_samplers()
        while True:
            self._slot_freed.clear()
            await self._wait_for_space()
            if self.draining and not self.claims:
                self._stop.set()
            free = 0 if self.draining else max(0, self.max_rollouts - len(self.claims))
            slots = await self.service.claim(free) if free else []
            for queue, slot in slots:
                claim = ClaimedSlot(queue, slot, self.clock.monotonic())
                self.claims[queue, slot.id, slot.attempt] = claim
                claim.work = asyncio.create_task(self._run_slot(claim))
                claim.work.add_done_callback(self._on_slot_done)
            if not free:
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

    async def _wait_for_space(self) -> None:
        """Wait until there is space on the disks of this machine: rollouts of other machines go on."""
        while full := self.full_disk():
            self.waiting_for = full
            await asyncio.sleep(FULL_DISK_S)
            self.waiting_for = ""

    def full_disk(self) -> str:
        """Return that a disk of this machine is full; "" if none is."""
        for path in self.disks:
            there = next((each for each in (path, *path.parents) if each.exists()), path)
            with contextlib.suppress(OSError):
                if (free := shutil.disk_usage(there).free) < MIN_FREE:
                    return f"space on the disk of this machine: {there} has {free >> 20} MiB left"
        return ""

    async def _heartbeat_loop(self, pause_s: float) -> None:
        while True:
            await asyncio.sleep(pause_s)
            pause_s = await self._heartbeat()

    async def _heartbeat(self) -> float:
        """Renew all leases, report the status and take note of what has changed; return the seconds to the next one."""
        held: dict[QueueName, list[HeldSlot]] = {queue: [] for queue in self.config.options}
        for claim in self.claims.values():
            held[claim.queue].append(HeldSlot(claim.slot.id, claim.slot.attempt, claim.state))
        reply = await self.service.heartbeat(held, self._status())
        if reply.changes != self.config.changes:
            self.config = changed_config(self.member.layout, self.config, reply.changes)
        self.settings_problem = reply.problem
        if (self.max_rollouts, self.draining) != (reply.max_rollouts, self.draining or reply.drain):
            self.max_rollouts, self.draining = reply.max_rollouts, self.draining or reply.drain
            self._slot_freed.set()
        for queue in held:
            for found in (self.claims.get((queue, *each)) for each in reply.lost.get(queue, ())):
                if found is not None and not found.reported and found.work is not None:
                    log.warning("slot %d of %s: the claim was lost", found.slot.id, found.slot.task)
                    self.counts["lost"] += 1
                    found.work.cancel()
        return reply.next_s

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
            del self.claims[claim.queue, slot.id, slot.attempt]
            self._slot_freed.set()

    async def _run_rollout(self, claim: ClaimedSlot) -> Rollout:
        queue, slot, config = claim.queue, claim.slot, self.config
        if full := self.full_disk():  # since the claim was asked for
            raise RolloutFailed(full)
        task = await self._task(queue, slot.task)
        resume = await self._load_checkpoint(claim)

        def set_phase(phase: RolloutPhase) -> None:
            claim.phase = phase

        async def save(checkpoint: RolloutCheckpoint) -> None:
            await self._save_checkpoint(claim, checkpoint)

        beside_training = queue == "evaluation" and "training" in config.options
        rollout = await run_rollout(
            self.fleet,
            task,
            self.evaluation_binding(evaluated_step(slot.task)) if beside_training else self.binding,
            replace(config.options[queue], prepared=self.prepared),
            seed=slot_seed(config.seed, queue, slot),
            id=f"{config.run}/{queue}/{slot.group:06d}/{slot.number:02d}-{slot.attempt}",
            facts={"run": config.run, "set": queue, "group": slot.group, "number": slot.number},
            weights=lambda version: self.config.rewards,  # the trainer scores the group again, with one set
            resume=resume,
            on_checkpoint=save,
            on_phase=set_phase,
        )
        if rollout.note:
            await self.service.report(queue, slot, "note", note=rollout.note[:MAX_REASON])
        return rollout

    async def _finish(self, claim: ClaimedSlot, rollout: Rollout) -> None:
        """Store the trace and report the reward."""
        slot, task = claim.slot, await self._task(claim.queue, claim.slot.task)
        name = trace_name(claim.queue, slot.group, slot.number, slot.attempt)
        await self._put(name, await asyncio.to_thread(pack_trace, rollout.trace))
        record, versions = rollout.record(task), rollout.trace.versions()
        claim.reported = True
        try:
            await self.service.report(claim.queue, slot, "finish", reward=record, trace=name, versions=versions)
        except StaleClaim:
            await asyncio.to_thread(self.store.remove, name)  # the rollout of another worker counts
            raise
        self.counts["finished"] += 1
        await self._remove_checkpoint(claim)

    async def _put(self, name: str, data: bytes) -> None:
        """Write an object; while that fails, on a full disk say, the finished rollout is kept here and tried again."""
        deadline = self.clock.monotonic() + PATIENCE_S
        while True:
            try:
                await asyncio.to_thread(self.store.put, name, data)
            except OSError as error:
                if self.clock.monotonic() > deadline:
                    raise RolloutFailed(f"{self.store.url}/{name} cannot be written: {error}") from error
                self.storage_problem = f"{self.store.url}: {error.strerror or error}"
                await asyncio.sleep(FULL_DISK_S)
            else:
                self.storage_problem = ""
                return

    async def _fail(self, claim: ClaimedSlot, error: RolloutFailed) -> None:
        """Requeue the slot. Its checkpoint is kept only if this attempt wrote it, so that none fails repeatedly.

        A full disk of this machine is no failure of the slot: another machine may finish it.
        """
        reason = str(error)[:MAX_REASON]
        log.warning("slot %d of %s, attempt %d: %s", claim.slot.id, claim.slot.task, claim.slot.attempt, reason)
        self.counts["failed"] += 1
        self.last_failure = reason
        if isinstance(error.__cause__, SamplersUnavailable):
            self.waiting_for = "the samplers"
        keep, claim.reported = claim.has_checkpoint, True
        if full := self.full_disk():
            await self.service.report(claim.queue, claim.slot, "release", why=f"{full}: {reason}"[:MAX_REASON])
            return
        await self.service.report(claim.queue, claim.slot, "fail", why=reason, keep_resume=keep)
        if not keep:
            await self._remove_checkpoint(claim)

    async def _task(self, queue: QueueName, name: str) -> Task:
        """Return a task by its name in the queue; in the evaluation queue names are STEP/TASK."""
        return await self._read_task(queue, name if queue == "training" else name.partition("/")[2])

    async def _read_task(self, queue: QueueName, name: str) -> Task:
        known = self._tasks.get((queue, name))
        if known is None:
            directory = await self.service.task_directory(queue, name)
            if directory is None:
                raise InputError(f"there is no task {name} in the {queue} set of this run")
            known = self._tasks[queue, name] = await asyncio.to_thread(read_task, directory)
        return known

    # -- checkpoints

    async def _load_checkpoint(self, claim: ClaimedSlot) -> RolloutCheckpoint | None:
        """Return the checkpoint of an earlier attempt; None if there is none, or it cannot be read."""
        resume = claim.slot.resume
        if resume is None:
            return None
        claim.snapshot, claim.checkpoint_file = str(resume.get("snapshot", "")), str(resume.get("trace", ""))
        try:
            data = await asyncio.to_thread(self.store.get, claim.checkpoint_file)
            if data is None:
                raise InputError(f"{claim.checkpoint_file} does not exist")
            return unpack_checkpoint(data, claim.checkpoint_file)
        except (InputError, OSError) as error:
            note = f"restarted from the beginning: {error}"[:MAX_REASON]
            await self.service.report(claim.queue, claim.slot, "note", note=note)
            return None

    async def _save_checkpoint(self, claim: ClaimedSlot, checkpoint: RolloutCheckpoint) -> None:
        """Save a checkpoint, record it in the queue, and then remove the previous one."""
        slot, previous = claim.slot, replace(claim)
        turns = checkpoint.trace.cost.turns
        name = f"partial/{claim.queue}-{slot.id:06d}-{slot.attempt}-{turns}{SUFFIX}"
        snapshot = checkpoint.environment.snapshot
        await self._put(name, await asyncio.to_thread(pack_checkpoint, checkpoint))
        resume = {"trace": name, "snapshot": snapshot.id, "turns": turns, "over": checkpoint.finished}
        await self.service.report(claim.queue, slot, "checkpoint", resume=resume)
        claim.snapshot, claim.checkpoint_file, claim.has_checkpoint = snapshot.id, name, True
        self.counts["checkpoints"] += 1
        await self._remove_checkpoint(previous, keep_file=name)

    async def _remove_checkpoint(self, claim: ClaimedSlot, keep_file: str = "") -> None:
        """Remove the snapshot and file of a claim's checkpoint."""
        if claim.snapshot:
            await self.fleet.remove_snapshot(claim.snapshot)
        if claim.checkpoint_file and claim.checkpoint_file != keep_file:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self.store.remove, claim.checkpoint_file)

    async def _sweep_loop(self) -> None:
        """Remove snapshots that no slot and no worker refers to in two consecutive sweeps.

        They belong to finished rollouts, or to workers killed before they recorded the checkpoint.
        """
        while True:
            existing = await self.fleet.snapshots()
            needed = await self.service.needed_snapshots(existing)
            for id in (existing - needed) & self._unneeded:
                await self.fleet.remove_snapshot(id)
            self._unneeded = existing - needed
            await asyncio.sleep(SWEEP_S)

    # -- status

    def _status(self) -> dict[str, Any]:
        now = self.clock.monotonic()
        claims = sorted(self.claims.values(), key=lambda claim: claim.since)
        waiting_for = self.waiting_for
        if claims and not waiting_for:
            oldest = claims[0]
            waiting_for = f"{oldest.phase} of {oldest.slot.task} (slot {oldest.slot.id}), {now - oldest.since:.0f} s"
        elif not waiting_for:
            waiting_for = "slots to claim"
        return status_facts(
            state="draining" if self.draining else "working" if claims else "waiting",
            rollouts=len(claims),
            max_rollouts=self.max_rollouts,
            waiting_for=waiting_for,
            held=[{"table": c.queue, "slot": c.slot.id, "doing": c.phase, "seconds": now - c.since} for c in claims],
            doing=dict(Counter(claim.phase for claim in claims)),
            counts=dict(self.counts),
            last_failure=self.last_failure,
            prepared=sorted(self.prepared.snapshots),  # other workers' sweeps spare them
            problem=self.storage_problem or self.settings_problem or self.member.client.problem,
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


def rollout_options(settings: WorkerSettings) -> RolloutOptions:
    """Return the options of a run's training rollouts."""
    searcher = open_searcher() if "codebase_search" in settings.tool_set.tools else None
    return RolloutOptions(
        SessionSpec.of(settings, searcher=searcher),
        temperature=settings.temperature,
        effort=settings.effort if isinstance(settings, RolloutSettings) else EffortSettings(),
        checkpoint_s=settings.checkpoint_rollouts_s,
    )


def worker_config(layout: RunLayout) -> WorkerConfig:
    """Return the configuration of a run's workers; those of the stage `evaluation` have no training queue."""
    settings, evaluation = load_sessions(layout), load_evaluation(layout)
    training = rollout_options(settings)
    options: dict[QueueName, RolloutOptions] = {"evaluation": training}
    if isinstance(settings, RolloutSettings) and layout.service_root == RL_ROOT:
        options["training"] = training
    if evaluation is not None:
        options["evaluation"] = replace(training, temperature=evaluation.temperature)
    return WorkerConfig(
        run=layout.run.name,
        options=options,
        rewards=settings.rewards if isinstance(settings, RolloutSettings) else {"correctness": 1.0},
        seed=int(read_toml(layout.recipe).get("seed", 0)),
    )


def changed_config(layout: RunLayout, config: WorkerConfig, changes: Mapping[str, Any]) -> WorkerConfig:
    """Return a configuration with changes of the settings. Evaluations keep theirs: they are compared with others."""
    settings = changed_settings(layout, RolloutSettings, changes)
    options = config.options["training"]
    session = replace(options.session, budget=settings.budget)
    training = replace(options, session=session, temperature=settings.temperature, effort=settings.effort)
    return replace(config, options={**config.options, "training": training}, rewards=settings.rewards, changes=changes)


def bind_policy(member: RunMember, settings: WorkerSettings, policy: Policy) -> PolicyBinding:
    """Bind the policy of a run to its dialect and window."""
    model = member.model(weights=False)
    dialect = dialect_for(Tokenizer.load(model), settings.dialect)
    window = settings.window or ModelConfig.load(model).max_length
    return PolicyBinding(policy, dialect, window, member.layout.run.name)


async def run_worker(member: RunMember) -> bool:
    """Run a worker until SIGTERM or SIGINT, or until it is drained; return whether it was."""
    config, settings = worker_config(member.layout), load_sessions(member.layout)
    # All workers of a machine share one directory: each finds the pod snapshots of the others' checkpoints.
    fleet_of_run = open_fleet(pods=settings.pods, state=member.layout.pods, owner=member.pods_owner)
    async with fleet_of_run as fleet, open_sampler_pool(member) as policy:
        binding, store = bind_policy(member, settings, policy), open_store(member, ROLLOUTS)

        def evaluation_binding(step: int) -> PolicyBinding:
            return replace(binding, policy=policy.for_evaluation(step))

        worker = Worker(member, config, fleet, binding, store, evaluation_binding=evaluation_binding)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        await worker.run()
        return worker.drained


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m etude.rollouts.worker", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--service", required=True, metavar="URL", help=f"run service; its token is in ${TOKEN_VARIABLE}"
    )
    parser.add_argument("--name", required=True, help="name of this worker, such as worker-0")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    member: RunMember | None = None
    try:
        die_with_parent(parent_process())
        member = open_member(given.service, given.name)
        member.client.report_status(given.name, state="starting")
        if asyncio.run(run_worker(member)):
            member.client.report_status(given.name, state=DRAINED)
    except EtudeError as error:
        say(f"{given.name}: {error}", file=sys.stderr)
        if member is not None:
            member.report_failure(str(error))
        return error.exit_code
    finally:
        if member is not None:
            member.client.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
