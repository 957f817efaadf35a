"""Workers on real pods and real tables: whatever dies, slots are filled once, with rewards that somebody earned."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_lines import LINES, OFTEN, SETTINGS, TASK, TEST, Actor, stage, voice
from session_helpers import chatml

from etude.files import write_atomically
from etude.harness.trace_store import load_trace
from etude.inference.clients.transport import ServerUnreachable
from etude.inference.policy import PolicyBase
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.rl.settings import open_rl_run
from etude.rollouts.queue import RolloutQueue, Slot
from etude.rollouts.rollout import RolloutOptions, rollout_seed, run_rollout
from etude.rollouts.settings import QueueSettings
from etude.rollouts.worker import QUEUES, Worker, WorkerConfig, main
from etude.runs.layout import RunLayout
from etude.runs.service_status import read_status
from etude.tasks.harbor import read_task, write_task

PATIENCE_S = 60.0
PLAN = QueueSettings(group_size=2, groups_per_step=1, max_staleness=5, in_flight=8, lease_s=4.0, max_attempts=3)
ONE = PLAN.model_copy(update=dict(group_size=1))


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


class Desk:
    """A run directory and its table, as the orchestrator sees them."""

    def __init__(self, path: Path, plan: QueueSettings, settings: RolloutOptions = SETTINGS) -> None:
        self.place = RunLayout(path)
        self.place.make()
        self.slots = RolloutQueue(self.place.slots, plan)
        self.evaluations = RolloutQueue(self.place.evaluations, plan)
        self.task = write_task(path / "tasks/lines", TASK)
        self.orders = WorkerConfig(
            place=self.place,
            plans={"training": plan, "evaluation": plan},
            tasks={"training": {"lines": self.task.directory}, "evaluation": {"lines": self.task.directory}},
            settings={"training": settings, "evaluation": replace(settings, temperature=0.5)},
            rewards={"correctness": 1.0},
            seed=1,
            most=4,
        )

    def one(self) -> Slot:
        return self.slots.slot(1)

    def failures(self) -> int:
        return self.slots.progress()[0].failures


@contextlib.asynccontextmanager
async def working(desk: Desk, state: Path, policy: PolicyBase) -> Any:
    """A worker in this process, from its start until it is stopped; it leaves no pod."""
    async with asyncio.timeout(PATIENCE_S), open_fleet(state=state) as fleet:
        worker = Worker("worker-0", desk.orders, fleet, voice(policy))
        running = asyncio.create_task(worker.run())
        try:
            yield worker, fleet
        finally:
            worker.stop()
            await running
        assert fleet.local is not None
        assert not fleet.local.pods


async def until(true: Callable[[], object]) -> None:
    while not true():
        await asyncio.sleep(0.02)


def inside(work: Awaitable[None]) -> None:
    async def main() -> None:
        await work

    asyncio.run(main())


# ------------------------------------------------------------------------------------------- in this process


def test_slots_are_filled_measurements_first(state: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path, PLAN)
    desk.slots.add([("lines", 0)])
    desk.evaluations.add([("000007/lines", 0)])
    seen: list[tuple[str, float]] = []

    class Witness(Actor):
        async def complete_many(self, tokens: Any, sampling: Any, *, session: str = "") -> Any:
            seen.append((session, sampling.temperature))
            return await super().complete_many(tokens, sampling, session=session)

    async def work() -> None:
        orders = replace(desk.orders, most=2)
        desk.orders = orders
        async with working(desk, state, Witness(version=7)):
            await until(lambda: desk.slots.counts() == desk.evaluations.counts() == {"ready": 2})

    inside(work())
    sessions = list(dict.fromkeys(seen))
    assert ["evaluation" in session for session, _ in sessions] == [True, True, False, False]
    assert [temperature for _, temperature in sessions] == [0.5, 0.5, 1.0, 1.0]
    for table, place in ((desk.slots, "traces"), (desk.evaluations, "evaluation-traces")):
        (group,) = [table.group(1)]
        for slot in group.slots:
            assert slot.trace == f"{place}/000001/{slot.number:02d}-1.trace"
            assert slot.reward is not None
            assert slot.reward["total"] == slot.reward["score"] == 1.0
            assert slot.newest_step == 7
            trace = load_trace(desk.place.root / slot.trace)
            assert trace.facts["reward"]["total"] == 1.0
            assert trace.facts["set"] == ("training" if place == "traces" else "evaluation")
        assert len({load_trace(desk.place.root / slot.trace).facts["seed"] for slot in group.slots}) == 2
    status = read_status(desk.place, "worker-0")
    assert status is not None
    assert status["counts"] == {"finished": 4}
    assert status["held"] == []


def test_weights_of_rewards_may_change_while_a_run_goes_on(state: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path, ONE)
    desk.slots.add([("lines", 0)])
    (tmp_path / "rewards.toml").write_text("correctness = 3.0\n")

    async def work() -> None:
        async with working(desk, state, Actor()):
            await until(lambda: desk.slots.counts() == {"ready": 1})

    inside(work())
    assert (desk.one().reward or {})["total"] == 3.0


def test_a_verifier_that_crashes_is_tried_again_and_is_never_a_zero(state: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path, ONE, OFTEN)
    desk.slots.add([("lines", 0)])
    test = desk.task.directory / "tests/test.sh"
    test.write_text("#!/bin/sh\nexit 1\n")
    actor = Actor()

    async def work() -> None:
        async with working(desk, state, actor):
            await until(desk.failures)
            assert desk.one().reward is None
            test.write_text(TEST)
            await until(lambda: desk.slots.counts() == {"ready": 1})

    inside(work())
    assert (desk.one().reward or {})["total"] == 1.0
    if desk.failures() == 1:  # a worker that was faster than this test has graded in vain twice, and begins anew
        assert [turn for turn, _ in actor.asked] == list(range(len(LINES)))  # the session itself was not run again
    assert [trouble.kind for trouble in desk.slots.incidents()] == ["failed"] * desk.failures()
    assert "no-reward" in desk.slots.incidents()[0].why
    assert not list(desk.place.partial.iterdir())


def test_a_verifier_that_always_crashes_drops_the_prompt(state: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path, ONE)
    desk.slots.add([("lines", 0)])
    (desk.task.directory / "tests/test.sh").write_text("#!/bin/sh\nexit 1\n")

    async def work() -> None:
        async with working(desk, state, Actor()):
            await until(lambda: desk.slots.counts() == {"dropped": 1})

    inside(work())
    assert desk.one().reward is None
    assert desk.failures() == ONE.attempts


@pytest.mark.parametrize("settings", [SETTINGS, OFTEN])
def test_a_lost_sampler_is_asked_again(state: Path, tmp_path: Path, settings: RolloutOptions) -> None:
    desk = Desk(tmp_path, ONE, settings)
    desk.slots.add([("lines", 0)])
    lost = 0

    async def once(turn: int) -> None:
        nonlocal lost
        if turn == 2 and not lost:
            lost += 1
            raise ServerUnreachable("POST http://127.0.0.1:1/generate: connection refused")

    actor = Actor(hook=once)

    async def work() -> None:
        async with working(desk, state, actor):
            await until(lambda: desk.slots.counts() == {"ready": 1})

    inside(work())
    assert (desk.one().reward or {})["total"] == 1.0
    assert desk.failures() == 1
    again = [2, 3, 4] if settings is OFTEN else [0, 1, 2, 3, 4]  # with a checkpoint nothing was lost with it
    assert [turn for turn, _ in actor.asked] == [0, 1, 2, *again]


def test_a_slot_that_was_given_to_somebody_else_is_let_go(state: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path, replace(ONE, lease_s=0.8))
    desk.slots.add([("lines", 0)])

    async def hang(turn: int) -> None:
        await asyncio.sleep(PATIENCE_S)

    async def work() -> None:
        async with working(desk, state, Actor(hook=hang)) as (worker, fleet):
            await until(lambda: fleet.local.pods and desk.one().state == "running")
            assert desk.slots.reconcile(time.time() + 100, 0)["lost"] == 1
            other = desk.slots.claim("other", time.time())
            assert other is not None
            await until(lambda: not worker.held)
            desk.slots.finish(other, {"total": 0.5}, "x", (0, 0))
            assert worker.counts["lost"] == 1

    inside(work())
    assert desk.one().reward == {"total": 0.5}


def test_a_task_that_cannot_be_read_is_a_failure_of_its_slot_alone(state: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path, replace(ONE, attempts=1))
    desk.slots.add([("unknown", 0), ("lines", 0)])

    async def work() -> None:
        async with working(desk, state, Actor()):
            await until(lambda: desk.slots.counts() == {"dropped": 1, "ready": 1})

    inside(work())
    assert "there is no task unknown" in desk.slots.incidents()[0].why


def test_snapshots_that_nobody_needs_are_swept(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.rollouts.worker.SWEEP_S", 0.05)
    desk = Desk(tmp_path, ONE)

    async def work() -> None:
        async with working(desk, state, Actor()) as (_, fleet):
            async with await fleet.create("host") as pod:
                snapshots = [await pod.snapshot(), await pod.snapshot()]
            desk.slots.add([("lines", 0)])
            slot = desk.slots.claim("other", time.time())
            assert slot is not None
            desk.slots.checkpoint(slot, {"snapshot": snapshots[0].id}, time.time())
            await until(lambda: [one.snapshot for one in fleet.local.store.snapshots()] == [snapshots[0]])
            await asyncio.sleep(0.3)
            assert [one.snapshot.id for one in fleet.local.store.snapshots()] == [snapshots[0].id]
            await fleet.local.remove_snapshot(snapshots[0].id)
            desk.slots.fail(slot, "over", keep_resume=False)
            await until(lambda: desk.slots.counts() == {"ready": 1})

    inside(work())


# ------------------------------------------------------------------------------------------- as a process

RECIPE = """
name = "test"
stages = ["rl"]
seed = 5
[rl]
model = "start"
tasks = "./tasks"
steps = 1
group_size = 2
in_flight = 2
window = 20000
lease_s = 20.0
checkpoint_rollouts_s = 0.01
[rl.environment]
tools = ["read_file", "run_terminal_cmd"]
brief = true
[rl.budget]
turns = 12
answer = 500
[rl.summaries]
mode = "off"
"""


def make_run(path: Path) -> tuple[RunLayout, RolloutQueue]:
    """A run as its orchestrator leaves it to a worker, with one prompt to sample."""
    path.mkdir()
    (path / "recipe.toml").write_text(RECIPE)
    place, section = open_rl_run(path)
    place.make()
    place.model.mkdir()
    chatml().tokenizer.save(place.model)
    task = write_task(path / "tasks/lines", TASK)
    write_atomically(place.tasks, json.dumps({"train": {"lines": str(task.directory)}, "held_out": {}}))
    slots = RolloutQueue(place.slots, section)
    slots.add([("lines", 0)])
    return place, slots


class Life:
    """A worker process to be: forked before there are threads, it waits to be told to begin. What Python loads for
    seconds is loaded already."""

    def __init__(self, place: RunLayout) -> None:
        told, self.teller = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                os.close(self.teller)
                if os.read(told, 1):
                    os.environ["ETUDE_PARENT"] = str(parent)
                    log = os.open(place.logs / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    status = main([str(place.run), "--name", "worker-0"])
            finally:
                os._exit(status)
        os.close(told)

    def begin(self) -> None:
        os.write(self.teller, b"1")

    def end(self, number: int) -> int:
        """End it by a signal; its exit code."""
        os.close(self.teller)
        os.kill(self.pid, number)
        deadline = time.monotonic() + PATIENCE_S
        while not (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(found[1])


def wait(place: RunLayout, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, said_by(place)
        time.sleep(0.02)


def said_by(place: RunLayout) -> str:
    log = place.logs / "worker.log"
    return log.read_text()[-3000:] if log.exists() else "it said nothing"


async def pods_left(place: RunLayout) -> tuple[list[str], list[str]]:
    """Pods and snapshots that are there when another opens the same place; ends the keeper."""
    async with open_fleet(state=place.root / "pods") as fleet:
        local = fleet.local
        assert local is not None
        found = [spec.id for spec in local.registry.records()], [one.snapshot.id for one in local.store.snapshots()]
        await local.backend.shutdown()
        return found


def shut(place: RunLayout) -> tuple[list[str], list[str]]:
    return asyncio.run(pods_left(place))


def test_a_worker_that_is_killed_goes_on_in_its_next_life_to_the_same_tokens(state: Path, tmp_path: Path) -> None:
    place, slots = make_run(tmp_path / "run")
    let_go = threading.Event()

    def hang(turn: int) -> None:
        if turn == 3:
            let_go.wait(PATIENCE_S)

    first, second = Life(place), Life(place)
    with stage(place, hang) as asked:
        first.begin()
        wait(place, lambda: asked.count(3) == 2)
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        assert {(slots.slot(id).resume or {})["turns"] for id in (1, 2)} <= {2, 3}
        let_go.set()
        before = len(asked)
        second.begin()
        wait(place, lambda: slots.counts() == {"ready": 2})
        assert second.end(signal.SIGTERM) == 0
    assert set(asked[before:]) <= {2, 3, 4}  # what was before the checkpoints was not said again
    for slot in slots.group(1).slots:
        trace = load_trace(place.root / slot.trace)
        assert trace.segments[0].tokens.tolist() == uninterrupted(state, place)
        assert trace.facts["seed"] == rollout_seed(5, QUEUES.index("training"), 1, slot.number, 1)
        assert slot.reward is not None
        assert slot.reward["total"] == 1.0  # nor done again: the verifier pays for three lines only
        assert slot.attempt == 2
    assert slots.progress()[0].failures == 0
    assert not list(place.partial.iterdir())
    assert shut(place) == ([], [])


def uninterrupted(state: Path, place: RunLayout) -> list[int]:
    """The tokens of the same rollout when nobody is killed."""

    async def run() -> list[int]:
        async with open_fleet(state=state) as fleet:
            task = read_task(place.run / "tasks/lines")
            rollout = await run_rollout(fleet, task, voice(Actor()), SETTINGS)
            return [int(token) for token in rollout.trace.segments[0].tokens]

    return asyncio.run(run())


def test_asked_to_end_a_worker_gives_its_slots_back_and_leaves_no_pod(tmp_path: Path) -> None:
    place, slots = make_run(tmp_path / "run")
    ended = threading.Event()

    def hang(turn: int) -> None:
        if turn == 2:
            ended.wait(PATIENCE_S)

    first, second = Life(place), Life(place)
    with stage(place, hang) as asked:
        first.begin()
        wait(place, lambda: asked.count(2) == 2)
        assert first.end(signal.SIGTERM) == 0
        ended.set()
        assert slots.counts() == {"queued": 2}
        assert slots.progress()[0].failures == 0
        asyncio.run(stop_keeper(place))  # what was in its memory goes
        before = len(asked)
        second.begin()
        wait(place, lambda: slots.counts() == {"ready": 2})
        assert second.end(signal.SIGTERM) == 0
    assert set(asked[before:]) == {2, 3, 4}  # the checkpoints were on disk by then
    assert shut(place) == ([], [])


async def stop_keeper(place: RunLayout) -> None:
    async with open_fleet(state=place.root / "pods") as fleet:
        assert isinstance(fleet, Fleet)
        assert fleet.local is not None
        assert not fleet.local.registry.records()
        await fleet.local.backend.shutdown()


@pytest.mark.slow
def test_a_worker_by_its_command_line(tmp_path: Path) -> None:
    place, slots = make_run(tmp_path / "run")
    command = [sys.executable, "-m", "etude.rollouts.worker", str(place.run), "--name", "worker-0"]
    with stage(place), subprocess.Popen(command) as process:
        wait(place, lambda: slots.counts() == {"ready": 2})
        status = read_status(place, "worker-0")
        assert status is not None
        assert status["pid"] == process.pid
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert shut(place) == ([], [])
    refused = subprocess.run([*command[:3], str(tmp_path), *command[4:]], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "is not a run" in refused.stderr
