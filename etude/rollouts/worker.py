"""A worker of a run: claims slots, runs their sessions in pods, grades, scores, keeps the traces and reports.

    python -m etude.rollouts.worker RUN --name worker-0

One process, one event loop, many rollouts at once; measurements come before training. It talks to the table of slots
and to the samplers, and to nobody else. Kill it at any time: what it held is queued again, and goes on from the last
checkpoint of each rollout, in this worker's next life or in another worker on the same machine. Asked to end (SIGTERM),
it gives its slots back, closes its pods and is gone. Every second a status file says what it waits for.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError, InputError
from etude.harness.search.searcher import open_searcher
from etude.harness.trace_store import SUFFIX, save_trace
from etude.inference.policy import Policy
from etude.model.config import ModelConfig
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError
from etude.recipe.sections import RlStage
from etude.rewards.live_weights import LiveWeights
from etude.rl.settings import budget_of, effort_of, environment_of, evaluation_plan, plan_of, summaries_of
from etude.rollouts.queue import Plan, Slot, Slots, SlotState, StaleClaim
from etude.rollouts.rollout import (
    Checkpoint,
    Doing,
    Rollout,
    RolloutFailed,
    Settings,
    Voice,
    forget_snapshot,
    load_checkpoint,
    rollout_seed,
    run_rollout,
    save_checkpoint,
)
from etude.rollouts.sampler_pool import SamplersLost, open_samplers
from etude.runs.layout import Place, die_with_parent, parent_process, place_and_section, read_tasks, write_status
from etude.tasks.environment import open_ground
from etude.tasks.harbor import read_task
from etude.tasks.task import Task

T = TypeVar("T")
TableName = Literal["training", "evaluation"]
TABLES: tuple[TableName, ...] = ("evaluation", "training")  # in the order they are served

IDLE_S = 0.05  # between looks at a table with nothing to do
REPORT_S = 1.0
BEATS = 4  # in a lease, at least ...
BEAT_S = 2.0  # ... and as often as this, so that the table knows what is going on
SWEEP_S = 60.0  # between looks for snapshots that nobody needs
CLOSE_S = 8.0  # to end in, when asked to; the orchestrator kills after ten
MOST_WHY = 1000  # characters of a reason that the table keeps

log = logging.getLogger("etude.rollouts.worker")


@dataclass(frozen=True)
class Orders:
    """What a worker needs to know of its run."""

    place: Place
    plans: Mapping[TableName, Plan]
    tasks: Mapping[TableName, Mapping[str, Path]]  # directories by name
    settings: Mapping[TableName, Settings]
    rewards: Mapping[str, float]
    seed: int
    most: int  # rollouts at once


@dataclass
class Held:
    """A slot of ours."""

    table: TableName
    slot: Slot
    since: float
    doing: Doing = "ground"
    work: "asyncio.Task[None] | None" = None
    snapshot: str = ""  # of its last checkpoint
    partial: str = ""
    kept: bool = False  # there is a checkpoint of this very attempt
    reported: bool = False  # what came of it

    @property
    def state(self) -> SlotState:
        return "starting" if self.doing == "ground" else "grading" if self.doing == "grading" else "running"


class Tables:
    """The tables in a thread of their own: a lock that somebody else holds must not stop the sessions."""

    def __init__(self, worker: str, place: Place, plans: Mapping[TableName, Plan]) -> None:
        self.worker, self.plans = worker, plans
        self.paths = {"training": place.slots, "evaluation": place.evaluations}
        self._thread = ThreadPoolExecutor(1, "slots")
        self._all: dict[TableName, Slots] = {}

    async def claim(self, room: int) -> list[tuple[TableName, Slot]]:
        """At most `room` slots, now ours."""

        def work() -> list[tuple[TableName, Slot]]:
            found: list[tuple[TableName, Slot]] = []
            for name, table in self._all.items():
                while len(found) < room and (slot := table.claim(self.worker, time.time())) is not None:
                    found.append((name, slot))
            return found

        return await self._do(work)

    async def beat(self, mine: Sequence[Held]) -> list[Held]:
        """A sign of life for all of them; those that are not ours any more."""
        states = [(held, held.state) for held in mine]

        def work() -> list[Held]:
            lost: list[Held] = []
            for name, table in self._all.items():
                here = {held.slot.id: (held, state) for held, state in states if held.table == name}
                gone = table.beat_all([(held.slot, state) for held, state in here.values()], time.time())
                lost += [here[slot.id][0] for slot in gone]
            return lost

        return await self._do(work)

    async def release(self) -> None:
        """Give back all that is ours."""
        await self._do(lambda: [table.release(self.worker) for table in self._all.values()])

    async def snapshots(self) -> set[str]:
        """Those that a slot may be taken up from."""
        return await self._do(
            lambda: {str(resume.get("snapshot")) for table in self._all.values() for resume in table.resumes()}
        )

    async def report(self, held: Held, word: Callable[[Slots, Slot], None]) -> None:
        """Say something of a slot; StaleClaim when it is not ours any more."""
        await self._do(lambda: word(self._all[held.table], held.slot))

    async def close(self) -> None:
        def work() -> None:
            for table in self._all.values():
                table.close()

        await self._do(work)
        self._thread.shutdown()

    async def _do(self, work: Callable[[], T]) -> T:
        def run() -> T:
            if not self._all:  # a connection belongs to the thread that opened it
                self._all = {name: Slots(self.paths[name], self.plans[name]) for name in TABLES if name in self.plans}
            return work()

        return await asyncio.get_running_loop().run_in_executor(self._thread, run)


# ------------------------------------------------------------------------------------------- the worker


class Worker:
    """Use `run`; `stop` ends it."""

    def __init__(self, name: str, orders: Orders, fleet: Fleet, voice: Voice) -> None:
        self.name, self.orders, self.fleet, self.voice = name, orders, fleet, voice
        self.place = orders.place
        self.tables = Tables(name, orders.place, orders.plans)
        self.weights = LiveWeights(orders.place.run, orders.rewards)
        self.held: dict[tuple[TableName, int], Held] = {}
        self.counts: Counter[str] = Counter()
        self.waiting = "the samplers"  # before anything can be done
        self.last_failure = ""
        self._tasks: dict[Path, Task] = {}
        self._change = asyncio.Event()  # a slot was given back
        self._stop = asyncio.Event()
        self._broken: BaseException | None = None  # what a rollout could not even report
        self._unneeded: set[str] = set()

    def stop(self) -> None:
        self._stop.set()

    async def run(self) -> None:
        """Until it is stopped. What breaks here ends the process, for somebody to start another."""
        await self.tables.release()  # what an earlier life of this name held
        always = [self._claim_always(), self._beat_always(), self._report_always(), self._sweep_always()]
        keeping = [asyncio.create_task(work) for work in (*always, self._stop.wait())]
        breaking = asyncio.create_task(self._break_ground())
        try:
            done, _ = await asyncio.wait(keeping, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            if self._broken is not None:
                raise self._broken
        finally:
            for task in (*keeping, breaking):
                task.cancel()
            await asyncio.gather(*keeping, breaking, return_exceptions=True)
            await self._give_back()

    async def _break_ground(self) -> None:
        """Make the ground of one task while the samplers load: what is built for it is there for its likes."""
        name = next(iter(self.orders.tasks["training"]), None)
        with contextlib.suppress(EtudeError, OSError):  # the first rollout will say so
            if name is not None:
                provision = self.orders.settings["training"].provision
                async with open_ground(self.fleet, self._task("training", name), provision=provision):
                    pass

    async def _give_back(self) -> None:
        """End every rollout, and let others have the slots: nobody's failure."""
        works = [held.work for held in self.held.values() if held.work is not None]
        for work in works:
            work.cancel()
        kept = [held.snapshot for held in self.held.values() if held.snapshot]
        if works:
            await asyncio.wait(works, timeout=CLOSE_S / 2)
        await self._persist(kept)
        await self.tables.release()
        await self.tables.close()
        self._report()

    async def _persist(self, snapshots: Sequence[str]) -> None:
        """Have snapshots outlive the memory of the pods' keeper; what takes too long does not."""
        host = self.fleet.local
        with contextlib.suppress(TimeoutError, PodError, InputError):
            async with asyncio.timeout(CLOSE_S / 4):
                for snapshot in snapshots if host is not None else ():
                    assert host is not None
                    await host.persist(snapshot)

    # -- slots

    async def _claim_always(self) -> None:
        await self._hear_samplers()
        while True:
            self._change.clear()
            room = self.orders.most - len(self.held)
            slots = await self.tables.claim(room) if room else []
            for table, slot in slots:
                held = Held(table, slot, time.monotonic())
                self.held[table, slot.id] = held
                held.work = asyncio.create_task(self._fill(held))
                held.work.add_done_callback(self._see_end)
            if not slots:
                with contextlib.suppress(TimeoutError):
                    # not wait_for, which before Python 3.12 loses a cancellation that comes with what it waits for
                    async with asyncio.timeout(IDLE_S if room else REPORT_S):
                        await self._change.wait()
            if self.waiting:
                await self._hear_samplers()

    async def _hear_samplers(self) -> None:
        """Wait until somebody can answer: a session that cannot be had is not begun."""
        while True:
            try:
                await self.voice.policy.version()
            except EtudeError as error:
                self.waiting = f"the samplers: {error}"
                await asyncio.sleep(REPORT_S / 4)
            else:
                self.waiting = ""
                return

    async def _beat_always(self) -> None:
        lease = min(plan.lease_s for plan in self.orders.plans.values())
        while True:
            await asyncio.sleep(min(BEAT_S, lease / BEATS))
            for held in await self.tables.beat(list(self.held.values())):
                if not held.reported and held.work is not None:
                    log.warning("slot %d of %s is not ours any more", held.slot.id, held.slot.task)
                    self.counts["lost"] += 1
                    held.work.cancel()

    # -- one slot

    def _see_end(self, work: "asyncio.Task[None]") -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._broken = error
            self._stop.set()

    async def _fill(self, held: Held) -> None:
        slot = held.slot
        try:
            try:
                rollout = await self._roll(held)
                await self._finish(held, rollout)
            except RolloutFailed as error:
                await self._fail(held, error)
            except StaleClaim:
                self.counts["lost"] += 1
            except Exception as error:  # a bug of ours; the others go on
                log.exception("slot %d of %s", slot.id, slot.task)
                await self._fail(held, RolloutFailed(f"bug: {type(error).__name__}: {error}"))
        except StaleClaim:
            self.counts["lost"] += 1
        finally:
            del self.held[held.table, slot.id]
            self._change.set()

    async def _roll(self, held: Held) -> Rollout:
        table, slot, orders = held.table, held.slot, self.orders
        task = self._task(table, slot.task)
        resume = await self._resumed(held)

        def do(doing: Doing) -> None:
            held.doing = doing

        async def keep(checkpoint: Checkpoint) -> None:
            await self._checkpoint(held, checkpoint)

        rollout = await run_rollout(
            self.fleet,
            task,
            self.voice,
            orders.settings[table],
            seed=rollout_seed(orders.seed, TABLES.index(table), slot.group, slot.number, slot.attempt),
            id=f"{self.place.run.name}/{table}/{slot.group:06d}/{slot.number:02d}-{slot.attempt}",
            facts={"run": self.place.run.name, "set": table, "group": slot.group, "number": slot.number},
            weights=self.weights.at,
            resume=resume,
            on_checkpoint=keep,
            on_doing=do,
        )
        if rollout.note:
            await self.tables.report(held, lambda slots, slot: slots.remark(slot, rollout.note[:MOST_WHY]))
        return rollout

    async def _finish(self, held: Held, rollout: Rollout) -> None:
        slot, task = held.slot, self._task(held.table, held.slot.task)
        directory = self.place.traces if held.table == "training" else self.place.evaluation_traces
        path = directory / f"{slot.group:06d}" / f"{slot.number:02d}-{slot.attempt}{SUFFIX}"
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(save_trace, rollout.trace, path)
        name = path.relative_to(self.place.root).as_posix()
        record, versions = rollout.record(task), rollout.trace.versions()
        held.reported = True
        try:
            await self.tables.report(held, lambda slots, slot: slots.finish(slot, record, name, versions))
        except StaleClaim:
            path.unlink(missing_ok=True)  # another's counts
            raise
        self.counts["finished"] += 1
        await self._forget(held)

    async def _fail(self, held: Held, error: RolloutFailed) -> None:
        """Have the slot tried again: from its checkpoint, unless that is what it was tried from just now."""
        why = str(error)[:MOST_WHY]
        log.warning("slot %d of %s, attempt %d: %s", held.slot.id, held.slot.task, held.slot.attempt, why)
        self.counts["failed"] += 1
        self.last_failure = why
        if isinstance(error.__cause__, SamplersLost):
            self.waiting = "the samplers"
        keep, held.reported = held.kept, True
        await self.tables.report(held, lambda slots, slot: slots.fail(slot, why, keep_resume=keep))
        if not keep:
            await self._forget(held)

    def _task(self, table: TableName, name: str) -> Task:
        """A task by its name in the table; those of measurements have the step before it."""
        plain = name if table == "training" else name.partition("/")[2]
        directory = self.orders.tasks[table].get(plain)
        if directory is None:
            raise RolloutFailed(f"there is no task {plain} in {self.place.tasks}")
        if directory not in self._tasks:
            try:
                self._tasks[directory] = read_task(directory)
            except InputError as error:
                raise RolloutFailed(str(error)) from error
        return self._tasks[directory]

    # -- checkpoints

    async def _resumed(self, held: Held) -> Checkpoint | None:
        """Where an earlier attempt was; None where there was none, or nothing is left of it."""
        resume = held.slot.resume
        if resume is None:
            return None
        held.snapshot, held.partial = str(resume.get("snapshot", "")), str(resume.get("trace", ""))
        try:
            return await asyncio.to_thread(load_checkpoint, self.place.root / held.partial)
        except InputError as error:
            note = f"begun anew: {error}"[:MOST_WHY]
            await self.tables.report(held, lambda slots, slot: slots.remark(slot, note))
            return None

    async def _checkpoint(self, held: Held, checkpoint: Checkpoint) -> None:
        """Write a rollout down; the one before is not needed when the table knows of it."""
        slot, before = held.slot, replace(held)
        turns = checkpoint.trace.cost.turns
        path = self.place.partial / f"{held.table}-{slot.id:06d}-{slot.attempt}-{turns}{SUFFIX}"
        name, snapshot = path.relative_to(self.place.root).as_posix(), checkpoint.origin.snapshot.id
        await asyncio.to_thread(save_checkpoint, checkpoint, path)
        resume = {"trace": name, "snapshot": snapshot, "turns": turns, "over": checkpoint.over}
        await self.tables.report(held, lambda slots, slot: slots.checkpoint(slot, resume, time.time()))
        held.snapshot, held.partial, held.kept = snapshot, name, True
        self.counts["checkpoints"] += 1
        await self._forget(before, but=name)

    async def _forget(self, held: Held, but: str = "") -> None:
        """Remove what a checkpoint took."""
        if held.snapshot:
            await forget_snapshot(self.fleet, held.snapshot)
        if held.partial and held.partial != but:
            (self.place.root / held.partial).unlink(missing_ok=True)

    async def _sweep_always(self) -> None:
        """Remove snapshots that no slot speaks of, now as a while ago: those of rollouts that are over, or were killed
        before the table knew."""
        local = self.fleet.local
        while local is not None:
            needed = await self.tables.snapshots()
            there = {saved.snapshot.id for saved in await asyncio.to_thread(local.store.snapshots)}
            for id in (there - needed) & self._unneeded:
                await forget_snapshot(self.fleet, id)
            self._unneeded = there - needed
            await asyncio.sleep(SWEEP_S)
        await asyncio.Event().wait()

    # -- how it is

    async def _report_always(self) -> None:
        while True:
            self._report()
            await asyncio.sleep(REPORT_S)

    def _report(self) -> None:
        now = time.monotonic()
        held = sorted(self.held.values(), key=lambda each: each.since)
        waiting = self.waiting
        if held and not waiting:
            first = held[0]
            waiting = f"{first.doing} of {first.slot.task} (slot {first.slot.id}), {now - first.since:.0f} s"
        elif not waiting:
            waiting = "slots to claim"
        write_status(
            self.place,
            self.name,
            state="working" if held else "waiting",
            waiting_for=waiting,
            held=[{"table": h.table, "slot": h.slot.id, "doing": h.doing, "seconds": now - h.since} for h in held],
            doing=dict(Counter(each.doing for each in held)),
            counts=dict(self.counts),
            last_failure=self.last_failure,
            cpu_s=time.process_time(),
            weights_problem=self.weights.problem,
        )


# ------------------------------------------------------------------------------------------- the process


def orders_of(place: Place, section: RlStage, seed: int) -> Orders:
    """What the recipe says, in a worker's terms."""
    settings = Settings(
        environment=environment_of(section),
        budget=budget_of(section),
        summaries=summaries_of(section),
        temperature=section.temperature,
        effort=effort_of(section),
        checkpoint_s=section.checkpoint_rollouts_s,
    )
    if "codebase_search" in settings.environment.tools:
        settings = replace(settings, searcher=open_searcher())
    found = read_tasks(place)
    plans: dict[TableName, Plan] = {"training": plan_of(section)}
    all_settings: dict[TableName, Settings] = {"training": settings}
    if section.evaluation is not None:
        plans["evaluation"] = evaluation_plan(section)
        all_settings["evaluation"] = replace(settings, temperature=section.evaluation.temperature)
    return Orders(
        place=place,
        plans=plans,
        tasks={"training": found["train"], "evaluation": found.get("held_out", {})},
        settings=all_settings,
        rewards=section.rewards,
        seed=seed,
        most=max(1, -(-section.in_flight // section.workers)),
    )


def voice_of(place: Place, section: RlStage, policy: Policy) -> Voice:
    """The model of a run, as sessions speak with it."""
    dialect = dialect_for(Tokenizer.load(place.model), None if section.dialect == "auto" else section.dialect)
    window = section.window or ModelConfig.load(place.model).max_length
    return Voice(policy, dialect, window, place.run.name)


async def work(name: str, orders: Orders, section: RlStage) -> None:
    """One worker, until it is asked to end."""
    place = orders.place
    # one directory for all workers of a machine: whoever takes a slot up finds the snapshot of its pod
    async with open_fleet(state=place.root / "pods") as fleet, open_samplers(place) as policy:
        worker = Worker(name, orders, fleet, voice_of(place, section, policy))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        await worker.run()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m etude.rollouts.worker", description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--name", required=True, help="of this worker, such as worker-0")
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    try:
        die_with_parent(parent_process())
        place, section, recipe = place_and_section(given.run)
        write_status(place, given.name, state="starting")
        asyncio.run(work(given.name, orders_of(place, section, recipe.seed), section))
    except EtudeError as error:
        print(f"{given.name}: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
