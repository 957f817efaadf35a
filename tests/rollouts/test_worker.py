"""Workers with real pods and real queues: whichever process dies, each slot is finished once, with the right reward."""

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
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from run_services import ServiceProcess, environment_of, facts_of, member_of, service_url, threaded_service
from scripted_lines import CHECKPOINTING, LINES, OPTIONS, TASK, TEST, LinesPolicy, bind, lines_sampler
from session_helpers import chatml

from etude.errors import InputError
from etude.files import write_atomically
from etude.harness.trace_store import load_trace
from etude.inference.clients.transport import ServerUnreachable
from etude.inference.policy import PolicyBase
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.rl.settings import open_rl_run
from etude.rollouts.leases import EvaluationLease
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_records import Slot
from etude.rollouts.rollout import RolloutOptions, rollout_seed, run_rollout
from etude.rollouts.settings import QUEUES, QueueName, QueueSettings, load_queues
from etude.rollouts.worker import Worker, WorkerConfig, main
from etude.rollouts.worker_client import drain_worker
from etude.runs.address import TOKEN_VARIABLE, choose_address, run_token
from etude.runs.layout import RunLayout
from etude.tasks.harbor import read_task, write_task
from etude.weights.object_store import ROLLOUTS, open_store

TIMEOUT_S = 60.0
QUEUE = QueueSettings(group_size=2, groups_per_step=1, max_staleness=5, in_flight=8, lease_s=4.0, max_attempts=3)
SINGLE = QUEUE.model_copy(update={"group_size": 1})


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


class PreparedRun:
    """A run directory with its queues, as the orchestrator creates it. The queues are those of the run service."""

    def __init__(self, path: Path, settings: QueueSettings, options: RolloutOptions = OPTIONS) -> None:
        self.layout, self.settings = RunLayout(path), settings
        self.layout.make()
        self.queue = RolloutQueue(self.layout.slots, settings)
        self.evaluations = RolloutQueue(self.layout.evaluations, settings)
        self.task = write_task(path / "tasks/lines", TASK)
        lines = {"lines": str(self.task.directory)}
        self.layout.tasks.write_text(json.dumps({"train": lines, "held_out": lines}))
        self.config = WorkerConfig(
            run="run",
            options={"training": options, "evaluation": replace(options, temperature=0.5)},
            rewards={"correctness": 1.0},
            seed=1,
        )

    def one(self) -> Slot:
        return self.queue.slot(1)

    def failures(self) -> int:
        return self.queue.progress()[0].failures


@contextlib.asynccontextmanager
async def working(run: PreparedRun, state: Path, policy: PolicyBase) -> Any:
    """Run a worker in this process; it must leave no pod."""
    queues: dict[QueueName, QueueSettings] = {"training": run.settings, "evaluation": run.settings}
    async with AsyncExitStack() as stack:
        stack.enter_context(threaded_service(run.layout, queues))
        member = stack.enter_context(member_of(run.layout))
        if (lease := run.evaluations.lease()) is not None:  # its sampler is there before a worker asks for slots
            sampler = {"kind": "sampler", "state": "ready", "url": "http://x", "version": lease.version}
            member.client.report_status(lease.samplers[0], **sampler)
        await stack.enter_async_context(asyncio.timeout(TIMEOUT_S))
        fleet = await stack.enter_async_context(open_fleet(state=state))
        worker = Worker(member, run.config, fleet, bind(policy), open_store(member, ROLLOUTS))
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


def test_evaluation_slots_come_before_training_slots(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, QUEUE.model_copy(update={"in_flight": 1}))
    run.queue.add([("lines", 0)])
    run.evaluations.add([("000007/lines", 0)])
    run.evaluations.record_version(7, 7)
    run.evaluations.set_lease(EvaluationLease(7, 7, ("sampler-0",), shared=False, sessions=2))
    sampled: list[tuple[str, float]] = []

    class RecordingPolicy(LinesPolicy):
        async def complete_many(self, tokens: Any, sampling: Any, *, session: str = "") -> Any:
            sampled.append((session, sampling.temperature))
            return await super().complete_many(tokens, sampling, session=session)

    async def work() -> None:
        async with working(run, state, RecordingPolicy(version=7)) as _:
            await until(lambda: run.queue.counts() == run.evaluations.counts() == {"ready": 2})
            await until(lambda: (facts_of(run.layout, "worker-0") or {})["counts"] == {"finished": 4})
            assert (facts_of(run.layout, "worker-0") or {})["held"] == []

    inside(work())
    sessions = list(dict.fromkeys(sampled))
    assert ["/evaluation/" in session for session, _ in sessions] == [True, True, False, False]
    assert [temperature for _, temperature in sessions] == [0.5, 0.5, 1.0, 1.0]
    for queue, directory in ((run.queue, "traces"), (run.evaluations, "evaluation-traces")):
        group = queue.group(1)
        for slot in group.slots:
            assert slot.trace == f"{directory}/000001/{slot.number:02d}-1.trace"
            assert slot.reward is not None
            assert slot.reward["total"] == slot.reward["score"] == 1.0
            assert slot.newest_step == 7
            trace = load_trace(run.layout.root / slot.trace)
            assert trace.facts["reward"]["total"] == 1.0
            assert trace.facts["set"] == ("training" if directory == "traces" else "evaluation")
        assert len({load_trace(run.layout.root / slot.trace).facts["seed"] for slot in group.slots}) == 2
    status = facts_of(run.layout, "worker-0")
    assert status is not None
    assert status["state"] == "ended"


def test_reward_weights_can_change_during_a_run(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, SINGLE)
    run.queue.add([("lines", 0)])
    (tmp_path / "live.toml").write_text("[rl.rewards]\ncorrectness = 3.0\n")

    async def work() -> None:
        async with working(run, state, LinesPolicy()):
            await until(lambda: run.queue.counts() == {"ready": 1})

    inside(work())
    assert (run.one().reward or {})["total"] == 3.0


def test_a_drained_worker_finishes_its_rollouts_and_claims_no_more(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, QUEUE.model_copy(update={"in_flight": 2}))
    run.queue.add([("lines", 0)])
    go_on = asyncio.Event()

    class SlowPolicy(LinesPolicy):
        async def complete_many(self, tokens: Any, sampling: Any, *, session: str = "") -> Any:
            await go_on.wait()
            return await super().complete_many(tokens, sampling, session=session)

    async def work() -> None:
        async with working(run, state, SlowPolicy()) as (worker, _):
            await until(lambda: run.queue.counts() == {"running": 2})
            run.queue.add([("lines", 0)], max_uses=2)
            client = worker.member.client
            assert await asyncio.to_thread(drain_worker, client, "worker-0")
            await until(lambda: worker.draining)
            go_on.set()
            await until(lambda: worker.drained)
            assert not await asyncio.to_thread(drain_worker, client, "worker-7")

    inside(work())
    assert run.queue.counts() == {"ready": 2, "queued": 2}
    assert [slot.attempt for slot in run.queue.group(1).slots] == [1, 1]
    assert not run.queue.incidents()


def test_a_crashed_verifier_is_retried_and_never_a_zero(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, SINGLE, CHECKPOINTING)
    run.queue.add([("lines", 0)])
    test = run.task.directory / "tests/test.sh"
    test.write_text("#!/bin/sh\nexit 1\n")
    policy = LinesPolicy()

    async def work() -> None:
        async with working(run, state, policy):
            await until(run.failures)
            assert run.one().reward is None
            test.write_text(TEST)
            await until(lambda: run.queue.counts() == {"ready": 1})

    inside(work())
    assert (run.one().reward or {})["total"] == 1.0
    if run.failures() == 1:  # otherwise the worker verified twice before the fix, and restarted the session
        assert [turn for turn, _ in policy.requests] == list(range(len(LINES)))  # the session itself was not run again
    assert [incident.kind for incident in run.queue.incidents()] == ["failed"] * run.failures()
    assert "no-reward" in run.queue.incidents()[0].why
    assert not list(run.layout.partial.iterdir())


def test_a_worker_that_is_stopped_after_a_rollout_removes_its_checkpoint(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, SINGLE, CHECKPOINTING)
    run.queue.add([("lines", 0)])
    remove_snapshot = Fleet.remove_snapshot

    async def remove_slowly(fleet: Fleet, id: str) -> None:
        await asyncio.sleep(0.5)
        await remove_snapshot(fleet, id)

    async def work() -> None:
        async with working(run, state, LinesPolicy()):
            await until(lambda: run.queue.counts() == {"ready": 1})

    with patch.object(Fleet, "remove_snapshot", remove_slowly):
        inside(work())
    assert not list(run.layout.partial.iterdir())


def test_a_verifier_that_always_crashes_drops_the_prompt(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, SINGLE)
    run.queue.add([("lines", 0)])
    (run.task.directory / "tests/test.sh").write_text("#!/bin/sh\nexit 1\n")

    async def work() -> None:
        async with working(run, state, LinesPolicy()):
            await until(lambda: run.queue.counts() == {"dropped": 1})

    inside(work())
    assert run.one().reward is None
    assert run.failures() == SINGLE.max_attempts


@pytest.mark.parametrize("options", [OPTIONS, CHECKPOINTING])
def test_a_rollout_is_retried_after_a_lost_sampler(state: Path, tmp_path: Path, options: RolloutOptions) -> None:
    run = PreparedRun(tmp_path, SINGLE, options)
    run.queue.add([("lines", 0)])
    lost = 0

    async def once(turn: int) -> None:
        nonlocal lost
        if turn == 2 and not lost:
            lost += 1
            raise ServerUnreachable("POST http://127.0.0.1:1/generate: connection refused")

    policy = LinesPolicy(hook=once)

    async def work() -> None:
        async with working(run, state, policy):
            await until(lambda: run.queue.counts() == {"ready": 1})

    inside(work())
    assert (run.one().reward or {})["total"] == 1.0
    assert run.failures() == 1
    again = [2, 3, 4] if options is CHECKPOINTING else [0, 1, 2, 3, 4]
    assert [turn for turn, _ in policy.requests] == [0, 1, 2, *again]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_on_a_full_disk_of_its_machine_a_worker_claims_nothing_and_no_slot_fails(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PreparedRun(tmp_path, SINGLE)
    run.queue.add([("lines", 0)])
    disk, filler, filled = tmp_path / "disk", tmp_path / "disk/filler", list[int]()
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=72m", "none", disk], check=False).returncode:
        pytest.skip("mounting is not permitted")
    monkeypatch.setattr("etude.rollouts.worker.FULL_DISK_S", 0.02)

    async def fill_and_fail(turn: int) -> None:
        if turn == 2 and not filled:
            filled.append(turn)
            filler.write_bytes(bytes(70 << 20))
            raise ServerUnreachable("POST http://127.0.0.1:1/generate: connection refused")

    async def work() -> None:
        async with working(run, state, LinesPolicy(hook=fill_and_fail)) as (worker, _):
            worker.disks = (disk / "not/there/yet",)
            await until(lambda: worker.waiting_for == f"space on the disk of this machine: {disk} has 2 MiB left")
            assert (run.queue.counts(), run.failures()) == ({"queued": 1}, 0)
            assert worker.waiting_for in run.one().note
            attempts = run.one().attempt  # a claim may have been on its way
            await asyncio.sleep(0.2)
            assert run.one().attempt == attempts <= 2
            filler.unlink()
            await until(lambda: run.queue.counts() == {"ready": 1})

    try:
        inside(work())
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert (run.failures(), run.queue.incidents(), (run.one().reward or {})["total"]) == (0, [], 1.0)


def test_a_worker_abandons_a_slot_claimed_by_another(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, SINGLE.model_copy(update={"lease_s": 0.8}))
    run.queue.add([("lines", 0)])

    async def hang(turn: int) -> None:
        await asyncio.sleep(TIMEOUT_S)

    async def work() -> None:
        async with working(run, state, LinesPolicy(hook=hang)) as (worker, fleet):
            await until(lambda: fleet.local.pods and run.one().state == "running")
            assert run.queue.reconcile(time.time() + 100, 0)["lost"] == 1
            other = run.queue.claim("other", time.time() + 1000)
            assert other is not None
            await until(lambda: not worker.claims)
            run.queue.finish(other, {"total": 0.5}, "x", (0, 0))
            assert worker.counts["lost"] == 1

    inside(work())
    assert (run.one().reward or {})["total"] == 0.5


def test_an_input_error_ends_the_worker_and_is_no_failure_of_the_slot(state: Path, tmp_path: Path) -> None:
    run = PreparedRun(tmp_path, SINGLE)
    run.queue.add([("unknown", 0)])

    async def work() -> None:
        async with working(run, state, LinesPolicy()) as (worker, _):
            await until(lambda: worker._stop.is_set())

    with pytest.raises(InputError, match="there is no task unknown in the training set"):
        inside(work())
    assert (run.one().state, run.failures()) == ("queued", 0)


def test_unneeded_snapshots_are_removed(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.rollouts.worker.SWEEP_S", 0.05)
    run = PreparedRun(tmp_path, SINGLE)

    async def work() -> None:
        async with open_fleet(state=state) as fleet, await fleet.create("host") as pod:
            snapshots = [await pod.snapshot(), await pod.snapshot()]
        run.queue.add([("lines", 0)])
        slot = run.queue.claim("other", time.time())
        assert slot is not None
        run.queue.checkpoint(slot, {"snapshot": snapshots[0].id}, time.time())
        async with working(run, state, LinesPolicy()) as (_, fleet):
            assert fleet.local is not None
            await until(lambda: [one.snapshot for one in fleet.local.store.snapshots()] == [snapshots[0]])
            await asyncio.sleep(0.3)
            assert [one.snapshot.id for one in fleet.local.store.snapshots()] == [snapshots[0].id]
            await fleet.local.remove_snapshot(snapshots[0].id)
            run.queue.fail(slot, "over", keep_resume=False)
            await until(lambda: run.queue.counts() == {"ready": 1})

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
[rl.tool_set]
tools = ["read_file", "run_terminal_cmd"]
short_system_prompt = true
[rl.budget]
turns = 12
max_turn_tokens = 500
[rl.summaries]
mode = "off"
"""


def make_run(path: Path) -> tuple[RunLayout, RolloutQueue]:
    """Create a run as the orchestrator prepares it for workers, with one prompt."""
    path.mkdir()
    (path / "recipe.toml").write_text(RECIPE)
    layout, settings = open_rl_run(path)
    layout.make()
    layout.model.mkdir()
    chatml().tokenizer.save(layout.model)
    task = write_task(path / "tasks/lines", TASK)
    write_atomically(layout.tasks, json.dumps({"train": {"lines": str(task.directory)}, "held_out": {}}))
    queue = RolloutQueue(layout.slots, settings)
    queue.add([("lines", 0)])
    return layout, queue


class ForkedWorker:
    """A worker process, forked before there are threads and with all modules loaded; it starts with `begin`."""

    def __init__(self, layout: RunLayout) -> None:
        choose_address(layout)
        reader, self.writer = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                os.close(self.writer)
                if os.read(reader, 1):
                    os.environ["ETUDE_PARENT"] = str(parent)
                    log = os.open(layout.logs / "worker.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                    os.dup2(log, 1)
                    os.dup2(log, 2)
                    os.environ[TOKEN_VARIABLE] = run_token(layout)
                    status = main(["--service", service_url(layout), "--name", "worker-0"])
            finally:
                os._exit(status)
        os.close(reader)

    def begin(self) -> None:
        os.write(self.writer, b"1")

    def end(self, number: int) -> int:
        """Send a signal and return the exit code."""
        os.close(self.writer)
        os.kill(self.pid, number)
        deadline = time.monotonic() + TIMEOUT_S
        while not (found := os.waitpid(self.pid, os.WNOHANG))[0]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return os.waitstatus_to_exitcode(found[1])


def wait(layout: RunLayout, true: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline, worker_log(layout)
        time.sleep(0.02)


def worker_log(layout: RunLayout) -> str:
    log = layout.logs / "worker.log"
    return log.read_text()[-3000:] if log.exists() else "the log is empty"


async def pods_left(layout: RunLayout) -> tuple[list[str], list[str]]:
    """Return the pods and snapshots left in the run's fleet; stop its zygote."""
    async with open_fleet(state=layout.root / "pods") as fleet:
        local = fleet.local
        assert local is not None
        found = [spec.id for spec in local.registry.records()], [one.snapshot.id for one in local.store.snapshots()]
        await local.backend.shutdown()
        return found


def shut(layout: RunLayout) -> tuple[list[str], list[str]]:
    return asyncio.run(pods_left(layout))


def test_a_killed_worker_continues_after_its_restart_to_the_same_tokens(state: Path, tmp_path: Path) -> None:
    layout, queue = make_run(tmp_path / "run")
    let_go = threading.Event()

    def hang(turn: int) -> None:
        if turn == 3:
            let_go.wait(TIMEOUT_S)

    first, second = ForkedWorker(layout), ForkedWorker(layout)
    with threaded_service(layout, load_queues(layout)), lines_sampler(layout, hang) as requests:
        first.begin()
        wait(layout, lambda: requests.count(3) == 2)
        assert first.end(signal.SIGKILL) == -signal.SIGKILL
        assert {(queue.slot(id).resume or {})["turns"] for id in (1, 2)} <= {2, 3}
        let_go.set()
        before = len(requests)
        second.begin()
        wait(layout, lambda: queue.counts() == {"ready": 2})
        assert second.end(signal.SIGTERM) == 0
    assert set(requests[before:]) <= {2, 3, 4}  # turns before the checkpoints were not sampled again
    for slot in queue.group(1).slots:
        trace = load_trace(layout.root / slot.trace)
        assert trace.segments[0].tokens.tolist() == uninterrupted(state, layout)
        assert trace.facts["seed"] == rollout_seed(5, QUEUES.index("training"), 1, slot.number, 1)
        assert slot.reward is not None
        assert slot.reward["total"] == 1.0  # nor executed again: the verifier rewards exactly three lines
        assert slot.attempt == 2
    assert queue.progress()[0].failures == 0
    assert not list(layout.partial.iterdir())
    assert shut(layout) == ([], [])


def uninterrupted(state: Path, layout: RunLayout) -> list[int]:
    """Return the tokens of the same rollout without interruption."""

    async def run() -> list[int]:
        async with open_fleet(state=state) as fleet:
            task = read_task(layout.run / "tasks/lines")
            rollout = await run_rollout(fleet, task, bind(LinesPolicy()), OPTIONS)
            return [int(token) for token in rollout.trace.segments[0].tokens]

    return asyncio.run(run())


def test_on_sigterm_a_worker_releases_its_slots_and_leaves_no_pod(tmp_path: Path) -> None:
    layout, queue = make_run(tmp_path / "run")
    ended = threading.Event()

    def hang(turn: int) -> None:
        if turn == 2:
            ended.wait(TIMEOUT_S)

    first, second = ForkedWorker(layout), ForkedWorker(layout)
    with threaded_service(layout, load_queues(layout)), lines_sampler(layout, hang) as requests:
        first.begin()
        wait(layout, lambda: requests.count(2) == 2)
        assert first.end(signal.SIGTERM) == 0
        ended.set()
        assert queue.counts() == {"queued": 2}
        assert queue.progress()[0].failures == 0
        asyncio.run(stop_zygote(layout))  # snapshots in its memory are lost
        before = len(requests)
        second.begin()
        wait(layout, lambda: queue.counts() == {"ready": 2})
        assert second.end(signal.SIGTERM) == 0
    assert set(requests[before:]) == {2, 3, 4}  # the checkpoints were on disk by then
    assert shut(layout) == ([], [])


async def stop_zygote(layout: RunLayout) -> None:
    async with open_fleet(state=layout.root / "pods") as fleet:
        assert isinstance(fleet, Fleet)
        assert fleet.local is not None
        assert not fleet.local.registry.records()
        await fleet.local.backend.shutdown()


@pytest.mark.slow
def test_a_worker_starts_from_its_command_line(tmp_path: Path) -> None:
    layout, queue = make_run(tmp_path / "run")
    with ServiceProcess(layout) as service:
        service.client(patience_s=60).close()
        command = [
            sys.executable,
            "-m",
            "etude.rollouts.worker",
            "--service",
            service_url(layout),
            "--name",
            "worker-0",
        ]
        with lines_sampler(layout), subprocess.Popen(command, env=environment_of(layout)) as process:
            wait(layout, lambda: queue.counts() == {"ready": 2})
            wait(layout, lambda: (facts_of(layout, "worker-0") or {})["pid"] == process.pid)
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
        assert shut(layout) == ([], [])
        wrong = subprocess.run(
            command, env={**os.environ, TOKEN_VARIABLE: "x" * 20}, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
        assert "the token is wrong" in wrong.stderr
