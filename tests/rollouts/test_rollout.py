"""Rollouts in real pods: scored or failed, never both; after a crash they continue to the same tokens."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_lines import CHECKPOINTING, LINES, OPTIONS, TASK, TEST, LinesPolicy, bind, writes
from session_helpers import call, says

from etude.errors import EtudeError, InputError
from etude.harness.budget import Budget
from etude.harness.toolserver.client import LaunchedToolServer, launch_tool_server
from etude.harness.trace import Trace
from etude.inference.clients.transport import ServerUnreachable
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.pods.pod import Pod
from etude.rollouts.rollout import (
    Rollout,
    RolloutCheckpoint,
    RolloutFailed,
    RolloutPhase,
    pack_checkpoint,
    rollout_seed,
    run_rollout,
    unpack_checkpoint,
)
from etude.tasks.environment import PreparedEnvironments
from etude.tasks.harbor import write_task
from etude.tasks.task import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "task", TASK)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


def inside(state: Path, check: Callable[[Fleet], Awaitable[None]]) -> None:
    """Run a check with a fleet; it must leave no pod."""

    async def main() -> None:
        async with asyncio.timeout(60), open_fleet(state=state) as fleet:
            await check(fleet)
            assert fleet.local is not None
            assert not fleet.local.pods

    asyncio.run(main())


def tokens_of(trace: Trace) -> list[list[int]]:
    return [segment.tokens.tolist() for segment in trace.segments]


async def fails(work: Awaitable[Rollout]) -> str:
    with pytest.raises(RolloutFailed) as failure:
        await work
    return str(failure.value)


# ------------------------------------------------------------------------------------------- one rollout


def test_a_rollout_has_trace_verifier_result_and_reward(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        phases: list[RolloutPhase] = []
        weights: list[int] = []

        def weigh(version: int) -> dict[str, float]:
            weights.append(version)
            return {"correctness": 2.0, "effort_spent": 0.1}

        rollout = await run_rollout(
            fleet, task, bind(LinesPolicy(version=7)), OPTIONS, seed=3, weights=weigh, on_phase=phases.append
        )
        record = json.loads(json.dumps(rollout.record(task)))
        assert record["score"] == 1.0
        assert record["solved"] is True
        assert record["parts"]["correctness"] == 2.0
        assert record["total"] == pytest.approx(sum(record["parts"].values()))
        assert record["category"] == "feature"
        assert record["ending"] == "final"
        assert record["made"] == rollout.trace.segments[0].sampled.sum() < record["tokens"]
        assert {*record["seconds"]} == {"ground", "session", "grading"}
        assert rollout.trace.facts["seed"] == 3
        assert rollout.trace.facts["versions"] == [7, 7]
        assert rollout.trace.facts["effort"]["turn"] == 0.2
        assert weights == [7]
        assert list(dict.fromkeys(phases)) == ["environment", "session", "grading"]

    inside(state, check)


def test_a_wrong_solution_has_reward_zero_and_is_not_a_failure(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        rollout = await run_rollout(fleet, task, bind(LinesPolicy([writes("four"), says("Done.")])), OPTIONS)
        assert rollout.reward.total == 0.0

    inside(state, check)


def test_sampling_depends_on_the_seed_and_the_turn(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        requests = []
        for seed in (5, 5, 6):
            policy = LinesPolicy()
            await run_rollout(fleet, task, bind(policy), OPTIONS, seed=seed)
            requests.append(policy.requests)
        assert requests[0] == requests[1] != requests[2]
        assert len({seed for turns in requests[1:] for _, seed in turns}) == 2 * len(LINES)

    inside(state, check)


def test_turns_may_use_the_cache_of_the_weights_the_session_started_with(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        async def changes(turn: int) -> None:
            policy.weight_version += 1

        policy = LinesPolicy(hook=changes, version=7)
        await run_rollout(fleet, task, bind(policy), OPTIONS)
        assert policy.since == [None] + [8] * (len(LINES) - 1)

    inside(state, check)


@given(st.sets(st.tuples(*[st.integers(0, 5000)] * 3), min_size=2, max_size=50), st.integers(0, 2**62))
def test_no_two_rollouts_have_the_same_seed(paths: set[tuple[int, int, int]], seed: int) -> None:
    assert len({rollout_seed(seed, *path) for path in paths}) == len(paths)


@pytest.mark.parametrize("files", [0, 1])
def test_a_warm_or_prepared_pod_gives_the_same_rollout(state: Path, task: Task, files: int) -> None:
    async def check(fleet: Fleet) -> None:
        assert fleet.local is not None
        whole = await run_rollout(fleet, task, bind(LinesPolicy()), OPTIONS, seed=9)
        launched: list[str] = []

        async def launch(pod: Pod) -> LaunchedToolServer:
            launched.append(pod.id)
            return await launch_tool_server(pod)

        async with PreparedEnvironments(fleet, min_files=100 * files, prepare_pod=launch) as prepared:
            await prepared.keep_warm(task, files)
            while len(launched) < files:
                await asyncio.sleep(0.01)
            rollout = await run_rollout(fleet, task, bind(LinesPolicy()), replace(OPTIONS, prepared=prepared), seed=9)
            assert len(prepared.snapshots) == 1 - files, "few files are copied into a warm pod, many are in a snapshot"
        assert launched
        assert tokens_of(rollout.trace) == tokens_of(whole.trace)
        assert rollout.reward.total == 1.0

    inside(state, check)


# ------------------------------------------------------------------------------------------- failures


def test_infrastructure_failures_have_no_reward(state: Path, tmp_path: Path, task: Task) -> None:
    silent = write_task(tmp_path / "silent", {**TASK, "tests/test.sh": "#!/bin/sh\nexit 3\n"})
    odd = write_task(tmp_path / "odd", {**TASK, "tests/test.sh": "#!/bin/sh\necho nan > /logs/verifier/reward.txt\n"})

    async def gone(turn: int) -> None:
        raise ServerUnreachable("POST http://127.0.0.1:1/generate: no answer")

    async def check(fleet: Fleet) -> None:
        assert fleet.local is not None

        async def kill(turn: int) -> None:
            if turn == 1:
                (pod,) = fleet.local.pods.values()  # type: ignore[union-attr]
                await pod.close()

        assert "no-reward" in await fails(run_rollout(fleet, silent, bind(LinesPolicy()), OPTIONS))
        assert "bad-reward" in await fails(run_rollout(fleet, odd, bind(LinesPolicy()), OPTIONS))
        assert "ServerUnreachable" in await fails(run_rollout(fleet, task, bind(LinesPolicy(hook=gone)), OPTIONS))
        assert "sandbox" in await fails(run_rollout(fleet, task, bind(LinesPolicy(hook=kill)), OPTIONS))

    inside(state, check)


def test_a_submission_that_stops_its_verifier_is_a_rollout_with_reward_0(state: Path, tmp_path: Path) -> None:
    test = "#!/bin/sh\n[ -s log.txt ] && kill -9 $$\necho 0 > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path / "stopped", {**TASK, "tests/test.sh": test})

    async def check(fleet: Fleet) -> None:
        rollout = await run_rollout(fleet, task, bind(LinesPolicy()), OPTIONS)
        assert rollout.reward.total == 0.0
        assert rollout.verifier_result.facts["verifier_failed"] == "no-reward"

    inside(state, check)


def test_a_prompt_that_does_not_fit_is_an_input_error_and_not_retried(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        small = replace(bind(LinesPolicy()), window=100)
        with pytest.raises(InputError, match=r"etude/lines: the prompt has \d+ tokens"):
            await run_rollout(fleet, task, small, OPTIONS)

    inside(state, check)


def test_a_session_that_timed_out_waiting_for_a_completion_has_no_reward(state: Path, task: Task) -> None:
    async def slow(turn: int) -> None:
        await asyncio.sleep(30 if turn == 2 else 0)

    async def check(fleet: Fleet) -> None:
        budget = Budget(turns=12, max_turn_tokens=500, seconds=1.0)
        limited = replace(OPTIONS, session=replace(OPTIONS.session, budget=budget))
        why = await fails(run_rollout(fleet, task, bind(LinesPolicy(hook=slow)), limited))
        assert "no completion for" in why
        busy = [says("", call("run_terminal_cmd", command="sleep 30")), says("Done.")]
        rollout = await run_rollout(fleet, task, bind(LinesPolicy(busy)), limited)  # the agent itself took the time
        assert (rollout.trace.ending, rollout.reward.total) == ("time", 0.0)

    inside(state, check)


def test_cancelling_a_rollout_closes_its_pod(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        reached = asyncio.Event()

        async def hang(turn: int) -> None:
            reached.set()
            await asyncio.sleep(60)

        work = asyncio.create_task(run_rollout(fleet, task, bind(LinesPolicy(hook=hang)), OPTIONS))
        await reached.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    inside(state, check)


# ------------------------------------------------------------------------------------------- checkpoints


@asynccontextmanager
async def interrupted(fleet: Fleet, task: Task, at: int, path: Path) -> AsyncIterator[list[RolloutCheckpoint]]:
    """Run a rollout that fails at a turn; give its checkpoints, the last of which is also a file."""
    kept: list[RolloutCheckpoint] = []

    async def keep(checkpoint: RolloutCheckpoint) -> None:
        path.write_bytes(pack_checkpoint(checkpoint))
        for before in kept:
            await fleet.remove_snapshot(before.environment.snapshot.id)
        kept.append(checkpoint)

    async def die(turn: int) -> None:
        if turn == at:
            raise EtudeError("died")

    why = await fails(run_rollout(fleet, task, bind(LinesPolicy(hook=die)), CHECKPOINTING, seed=9, on_checkpoint=keep))
    assert "died" in why
    try:
        yield kept
    finally:
        for left in kept[-1:]:
            await fleet.remove_snapshot(left.environment.snapshot.id)


@pytest.mark.parametrize("at", range(1, len(LINES)))
def test_a_resumed_rollout_continues_to_the_same_tokens(state: Path, task: Task, tmp_path: Path, at: int) -> None:
    async def check(fleet: Fleet) -> None:
        whole = await run_rollout(fleet, task, bind(LinesPolicy()), OPTIONS, seed=9)
        path = tmp_path / "partial.trace"
        async with interrupted(fleet, task, at, path):
            policy = LinesPolicy()
            resume = unpack_checkpoint(path.read_bytes(), "checkpoint")
            rollout = await run_rollout(fleet, task, bind(policy), OPTIONS, seed=10, resume=resume)
        assert tokens_of(rollout.trace) == tokens_of(whole.trace)
        assert [turn for turn, _ in policy.requests] == list(range(at, len(LINES)))
        assert rollout.reward.total == 1.0  # no earlier command was run again
        assert rollout.trace.facts["seed"] == 9
        assert rollout.trace.cost.turns == whole.trace.cost.turns
        assert not rollout.note

    inside(state, check)


def test_a_finished_session_is_verified_from_its_checkpoint(state: Path, task: Task, tmp_path: Path) -> None:
    path = tmp_path / "partial.trace"

    async def check(fleet: Fleet) -> None:
        (task.directory / "tests/test.sh").write_text("#!/bin/sh\nexit 1\n")
        kept: list[RolloutCheckpoint] = []

        async def keep(checkpoint: RolloutCheckpoint) -> None:
            path.write_bytes(pack_checkpoint(checkpoint))
            for before in kept:
                await fleet.remove_snapshot(before.environment.snapshot.id)
            kept.append(checkpoint)

        assert "no-reward" in await fails(
            run_rollout(fleet, task, bind(LinesPolicy()), CHECKPOINTING, on_checkpoint=keep)
        )
        (task.directory / "tests/test.sh").write_text(TEST)
        checkpoint = unpack_checkpoint(path.read_bytes(), "checkpoint")
        assert checkpoint.finished
        policy = LinesPolicy()
        rollout = await run_rollout(fleet, task, bind(policy), CHECKPOINTING, resume=checkpoint, on_checkpoint=keep)
        assert not policy.requests
        assert rollout.reward.total == 1.0
        await fleet.remove_snapshot(checkpoint.environment.snapshot.id)

    inside(state, check)


def test_without_its_snapshot_a_rollout_restarts_and_notes_it(state: Path, task: Task, tmp_path: Path) -> None:
    async def check(fleet: Fleet) -> None:
        async with interrupted(fleet, task, 2, tmp_path / "partial.trace") as kept:
            pass
        policy = LinesPolicy()
        rollout = await run_rollout(fleet, task, bind(policy), OPTIONS, seed=4, resume=kept[-1])
        assert [turn for turn, _ in policy.requests] == list(range(len(LINES)))
        assert rollout.reward.total == 1.0
        assert "restarted from the beginning" in rollout.note
        assert rollout.trace.facts["seed"] == 4

    inside(state, check)


def test_a_session_with_a_running_background_command_is_not_checkpointed(state: Path, task: Task) -> None:
    starts = says("", call("run_terminal_cmd", command="sleep 50", is_background=True))

    async def check(fleet: Fleet) -> None:
        kept: list[RolloutCheckpoint] = []

        async def keep(checkpoint: RolloutCheckpoint) -> None:
            kept.append(checkpoint)

        await run_rollout(fleet, task, bind(LinesPolicy([starts, *LINES])), CHECKPOINTING, on_checkpoint=keep)
        assert fleet.local is not None
        live = "fs-live" in fleet.local.backend.capabilities.snapshots  # of a pod whose command still runs at the end
        expected = [(6, True)] if live else []
        assert [(checkpoint.trace.cost.turns, checkpoint.finished) for checkpoint in kept] == expected
        for checkpoint in kept:
            await fleet.remove_snapshot(checkpoint.environment.snapshot.id)

    inside(state, check)
