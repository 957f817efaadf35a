"""Rollouts on several pod hosts: checkpoints are resumed on another host, and a dead host costs rollouts no reward."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from rl_runs import make_recipe
from scripted_lines import CHECKPOINTING, LINES, OPTIONS, TASK, LinesPolicy, bind

from etude.harness.toolserver.client import launch_tool_server
from etude.pods.fleet import Fleet, open_fleet
from etude.pods.host_client import HostGone
from etude.pods.remote.client import RemoteHostClient
from etude.rollouts.rollout import RolloutCheckpoint, RolloutFailed, run_rollout
from etude.rollouts.settings import WorkerSettings
from etude.tasks.environment import PreparedEnvironments
from etude.tasks.harbor import write_task
from etude.tasks.task import Task
from tests.pods.serving import TOKEN, Server, open_client, server, settings_of, token_file, wait_until_empty

LEASE_S = 3.0
LIMIT_S = 900


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "tasks/lines", TASK)


@contextlib.asynccontextmanager
async def fleet_of(*hosts: Server, state: Path) -> AsyncIterator[Fleet]:
    settings = settings_of(*(host.url for host in hosts), lease_s=LEASE_S)
    async with asyncio.timeout(300), open_fleet(pods=settings, state=state, owner="a run") as fleet:
        yield fleet


async def drain(fleet: Fleet, host: Server) -> None:
    client = fleet.clients[host.url]
    assert isinstance(client, RemoteHostClient)
    await client.drain(True)
    while fleet.watch.states[host.url][0] != "draining":
        await asyncio.sleep(0.05)


async def snapshots_of(host: Server) -> list[str]:
    client = await open_client(host.url)
    try:
        return [snapshot.id for snapshot in await client.snapshots()]
    finally:
        await client.close()


async def interrupted(fleet: Fleet, task: Task) -> RolloutCheckpoint:
    """Run a rollout until its third turn; return its checkpoint."""
    kept: list[RolloutCheckpoint] = []

    async def keep(checkpoint: RolloutCheckpoint) -> None:
        kept.append(checkpoint)

    async def fail(turn: int) -> None:
        if turn == 3:
            raise RolloutFailed("the end of this worker")

    with pytest.raises(RolloutFailed):
        await run_rollout(fleet, task, bind(LinesPolicy(hook=fail)), CHECKPOINTING, on_checkpoint=keep)
    for checkpoint in kept[:-1]:
        await fleet.remove_snapshot(checkpoint.environment.snapshot.id)
    return kept[-1]


@pytest.mark.slow
def test_a_checkpoint_is_resumed_on_another_host_and_lost_with_its_own(task: Task, tmp_path: Path) -> None:
    async def work(first: Server, second: Server) -> None:
        async with fleet_of(first, state=tmp_path / "a") as fleet:
            moved, lost = await interrupted(fleet, task), await interrupted(fleet, task)
            await fleet.persist(moved.environment.snapshot.id)
        async with fleet_of(first, second, state=tmp_path / "b") as fleet:
            await drain(fleet, first)
            policy = LinesPolicy()
            done = await run_rollout(fleet, task, bind(policy), OPTIONS, resume=moved)
            assert (done.reward.total, done.note) == (1.0, "")
            assert {turn for turn, _ in policy.requests} <= {2, 3, 4}, "it went on from its checkpoint"
            assert moved.environment.snapshot.id in await snapshots_of(second)
            await asyncio.to_thread(first.end, 9)
            policy = LinesPolicy()
            done = await run_rollout(fleet, task, bind(policy), OPTIONS, resume=lost)
            assert done.reward.total == 1.0
            assert done.note.startswith("restarted from the beginning: snapshot")
            assert [turn for turn, _ in policy.requests] == list(range(len(LINES)))
            await asyncio.to_thread(first.start)
            while fleet.watch.states[first.url][0]:
                await asyncio.sleep(0.05)
            for checkpoint in (moved, lost):
                await fleet.remove_snapshot(checkpoint.environment.snapshot.id)
            assert await fleet.snapshots() == set()

    with server() as first, server() as second:
        asyncio.run(work(first, second))


@pytest.mark.slow
def test_when_a_host_is_killed_its_rollouts_fail_without_a_reward_and_can_be_run_again(
    task: Task, tmp_path: Path
) -> None:
    async def work(first: Server, second: Server) -> None:
        at_third_turn, killed = asyncio.Semaphore(0), asyncio.Event()

        async def pause(turn: int) -> None:
            if turn == 2:
                at_third_turn.release()
                await killed.wait()

        async with fleet_of(first, second, state=tmp_path) as fleet:
            prepared = PreparedEnvironments(fleet, min_files=1000, prepare_pod=launch_tool_server)
            options = replace(CHECKPOINTING, prepared=prepared)

            async def one() -> int:
                """Run a rollout as often as a queue would; return the number of failures."""
                for failures in range(4):
                    try:
                        rollout = await run_rollout(fleet, task, bind(LinesPolicy(hook=pause)), options)
                    except RolloutFailed:
                        continue
                    assert rollout.reward.total == 1.0
                    return failures
                raise AssertionError("failed four times")

            async with prepared:
                await prepared.keep_warm(task, 2)
                running = [asyncio.create_task(one()) for _ in range(6)]
                for _ in running:
                    await at_third_turn.acquire()
                used = [client for client in fleet.clients.values() if client.created]  # type: ignore[attr-defined]
                assert len(used) == 2, "rollouts run on both hosts"
                await asyncio.to_thread(first.end, 9)
                killed.set()
                failures = await asyncio.gather(*running)
            assert 0 < sum(map(bool, failures)) < len(running), failures
            await asyncio.to_thread(first.start)
            await wait_until_empty(first)

    with server("--max-pods", "4") as first, server("--max-pods", "6") as second:
        asyncio.run(work(first, second))


@pytest.mark.slow
def test_a_run_goes_on_when_a_host_is_killed(tmp_path: Path) -> None:
    with server() as first, server() as second:
        pods = {"hosts": [first.url, second.url, "http://127.0.0.1:9"], "token_file": str(token_file(TOKEN))}
        recipe = make_recipe(tmp_path, tasks=40, pods={**pods, "lease_s": LEASE_S}, lease_s=20.0)
        command = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(tmp_path / "run"), "--json"]
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        traces = tmp_path / "run/rl/traces"
        deadline = time.monotonic() + LIMIT_S
        while not list(traces.rglob("*.trace")):
            assert running.poll() is None, running.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        first.end(9)
        out, errors = running.communicate(timeout=LIMIT_S)
        assert running.returncode == 0, errors
        assert "host http://127.0.0.1:9 does not answer" in errors
        facts = json.loads(out)["stages"]["rl"]
        assert facts["steps"] == 3
        assert not (tmp_path / "run/rl/pods/pods").exists(), "no pod ran on this machine"
        first.start()
        asyncio.run(wait_until_empty(first))


def test_a_recipe_with_a_wrong_host_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is not the address of"):
        WorkerSettings.model_validate({"pods": {"hosts": ["host-a:7741"]}})
    settings = WorkerSettings.model_validate({"pods": {"hosts": ["http://127.0.0.1:9"], "lease_s": 10}})

    async def work() -> None:
        async with open_fleet(pods=settings.pods, state=tmp_path):
            pass

    with pytest.raises(HostGone, match="no pod host can be used"):
        asyncio.run(work())
