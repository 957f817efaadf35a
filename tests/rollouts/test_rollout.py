"""Rollouts in real pods: graded or failed, never both; and after a death, on from where they were, token by token."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_lines import LINES, OFTEN, SETTINGS, TASK, TEST, Actor, voice, writes
from session_helpers import call, says

from etude.errors import EtudeError
from etude.harness.budget import Budget
from etude.harness.trace import Trace
from etude.inference.clients.transport import ServerUnreachable
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.rollouts.rollout import (
    Rollout,
    RolloutCheckpoint,
    RolloutFailed,
    RolloutPhase,
    load_checkpoint,
    remove_snapshot,
    rollout_seed,
    run_rollout,
    save_checkpoint,
)
from etude.tasks.harbor import write_task
from etude.tasks.task import Task


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return write_task(tmp_path / "task", TASK)


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pods")


def inside(state: Path, check: Callable[[Fleet], Awaitable[None]]) -> None:
    """Run a check with a fleet, and see that it leaves no pod."""

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


def test_a_rollout_is_a_session_with_its_grade_and_reward(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        heard: list[RolloutPhase] = []
        weights: list[int] = []

        def weigh(version: int) -> dict[str, float]:
            weights.append(version)
            return {"correctness": 2.0, "effort_spent": 0.1}

        rollout = await run_rollout(
            fleet, task, voice(Actor(version=7)), SETTINGS, seed=3, weights=weigh, on_doing=heard.append
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
        assert list(dict.fromkeys(heard)) == ["ground", "tools", "answer", "grading"]

    inside(state, check)


def test_a_session_that_does_wrong_is_paid_nothing_and_is_no_failure(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        rollout = await run_rollout(fleet, task, voice(Actor([writes("four"), says("Done.")])), SETTINGS)
        assert rollout.reward.total == 0.0

    inside(state, check)


def test_luck_depends_on_the_seed_and_the_turn(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        asked = []
        for seed in (5, 5, 6):
            actor = Actor()
            await run_rollout(fleet, task, voice(actor), SETTINGS, seed=seed)
            asked.append(actor.asked)
        assert asked[0] == asked[1] != asked[2]
        assert len({seed for turns in asked[1:] for _, seed in turns}) == 2 * len(LINES)

    inside(state, check)


def test_turns_may_use_what_was_read_with_the_weights_the_session_began_with(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        async def changes(turn: int) -> None:
            actor.at += 1

        actor = Actor(hook=changes, version=7)
        await run_rollout(fleet, task, voice(actor), SETTINGS)
        assert actor.since == [None] + [8] * (len(LINES) - 1)

    inside(state, check)


@given(st.sets(st.tuples(*[st.integers(0, 5000)] * 3), min_size=2, max_size=50), st.integers(0, 2**62))
def test_no_two_slots_have_the_same_luck(places: set[tuple[int, int, int]], seed: int) -> None:
    assert len({rollout_seed(seed, *place) for place in places}) == len(places)


# ------------------------------------------------------------------------------------------- what is no reward


def test_what_the_infrastructure_does_wrong_is_a_failure_and_no_reward(state: Path, tmp_path: Path, task: Task) -> None:
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

        assert "no-reward" in await fails(run_rollout(fleet, silent, voice(Actor()), SETTINGS))
        assert "bad-reward" in await fails(run_rollout(fleet, odd, voice(Actor()), SETTINGS))
        assert "ServerUnreachable" in await fails(run_rollout(fleet, task, voice(Actor(hook=gone)), SETTINGS))
        assert "sandbox" in await fails(run_rollout(fleet, task, voice(Actor(hook=kill)), SETTINGS))
        small = replace(voice(Actor()), window=100)
        assert "tokens" in await fails(run_rollout(fleet, task, small, SETTINGS))

    inside(state, check)


def test_a_session_whose_time_ran_out_while_nobody_answered_is_no_reward(state: Path, task: Task) -> None:
    async def slow(turn: int) -> None:
        await asyncio.sleep(30 if turn == 2 else 0)

    async def check(fleet: Fleet) -> None:
        hurried = replace(SETTINGS, budget=Budget(turns=12, max_turn_tokens=500, seconds=1.0))
        why = await fails(run_rollout(fleet, task, voice(Actor(hook=slow)), hurried))
        assert "no answer for" in why
        busy = [says("", call("run_terminal_cmd", command="sleep 30")), says("Done.")]
        rollout = await run_rollout(fleet, task, voice(Actor(busy)), hurried)  # that is the agent's own doing
        assert (rollout.trace.ending, rollout.reward.total) == ("time", 0.0)

    inside(state, check)


def test_cancelling_a_rollout_closes_its_pod(state: Path, task: Task) -> None:
    async def check(fleet: Fleet) -> None:
        reached = asyncio.Event()

        async def hang(turn: int) -> None:
            reached.set()
            await asyncio.sleep(60)

        work = asyncio.create_task(run_rollout(fleet, task, voice(Actor(hook=hang)), SETTINGS))
        await reached.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    inside(state, check)


# ------------------------------------------------------------------------------------------- checkpoints


@asynccontextmanager
async def interrupted(fleet: Fleet, task: Task, at: int, path: Path, **more: Any) -> AsyncIterator[list[RolloutCheckpoint]]:
    """A rollout that dies when it is to give an answer; the checkpoints up to then, the last of them a file too."""
    kept: list[RolloutCheckpoint] = []

    async def keep(checkpoint: RolloutCheckpoint) -> None:
        save_checkpoint(checkpoint, path)
        for before in kept:
            await remove_snapshot(fleet, before.origin.snapshot.id)
        kept.append(checkpoint)

    async def die(turn: int) -> None:
        if turn == at:
            raise EtudeError("died")

    why = await fails(run_rollout(fleet, task, voice(Actor(hook=die)), OFTEN, seed=9, on_checkpoint=keep, **more))
    assert "died" in why
    try:
        yield kept
    finally:
        for left in kept[-1:]:
            await remove_snapshot(fleet, left.origin.snapshot.id)


@pytest.mark.parametrize("at", range(1, len(LINES)))
def test_a_rollout_goes_on_where_it_was_to_the_same_tokens(state: Path, task: Task, tmp_path: Path, at: int) -> None:
    async def check(fleet: Fleet) -> None:
        whole = await run_rollout(fleet, task, voice(Actor()), SETTINGS, seed=9)
        path = tmp_path / "partial.trace"
        async with interrupted(fleet, task, at, path):
            actor = Actor()
            rollout = await run_rollout(fleet, task, voice(actor), SETTINGS, seed=10, resume=load_checkpoint(path))
        assert tokens_of(rollout.trace) == tokens_of(whole.trace)
        assert [turn for turn, _ in actor.asked] == list(range(at, len(LINES)))
        assert rollout.reward.total == 1.0  # no command before was run again
        assert rollout.trace.facts["seed"] == 9
        assert rollout.trace.cost.turns == whole.trace.cost.turns
        assert not rollout.note

    inside(state, check)


def test_a_session_that_was_over_is_graded_from_its_checkpoint(state: Path, task: Task, tmp_path: Path) -> None:
    path = tmp_path / "partial.trace"

    async def check(fleet: Fleet) -> None:
        (task.directory / "tests/test.sh").write_text("#!/bin/sh\nexit 1\n")
        kept: list[RolloutCheckpoint] = []

        async def keep(checkpoint: RolloutCheckpoint) -> None:
            save_checkpoint(checkpoint, path)
            for before in kept:
                await remove_snapshot(fleet, before.origin.snapshot.id)
            kept.append(checkpoint)

        assert "no-reward" in await fails(run_rollout(fleet, task, voice(Actor()), OFTEN, on_checkpoint=keep))
        (task.directory / "tests/test.sh").write_text(TEST)
        checkpoint = load_checkpoint(path)
        assert checkpoint.over
        actor = Actor()
        rollout = await run_rollout(fleet, task, voice(actor), OFTEN, resume=checkpoint, on_checkpoint=keep)
        assert not actor.asked
        assert rollout.reward.total == 1.0
        await remove_snapshot(fleet, checkpoint.origin.snapshot.id)

    inside(state, check)


def test_without_its_snapshot_a_rollout_begins_anew_and_says_so(state: Path, task: Task, tmp_path: Path) -> None:
    async def check(fleet: Fleet) -> None:
        async with interrupted(fleet, task, 2, tmp_path / "partial.trace") as kept:
            pass
        actor = Actor()
        rollout = await run_rollout(fleet, task, voice(actor), SETTINGS, seed=4, resume=kept[-1])
        assert [turn for turn, _ in actor.asked] == list(range(len(LINES)))
        assert rollout.reward.total == 1.0
        assert "begun anew" in rollout.note
        assert rollout.trace.facts["seed"] == 4

    inside(state, check)


def test_a_session_with_a_command_in_the_background_is_not_written_down(state: Path, task: Task) -> None:
    starts = says("", call("run_terminal_cmd", command="sleep 50", is_background=True))

    async def check(fleet: Fleet) -> None:
        kept: list[RolloutCheckpoint] = []

        async def keep(checkpoint: RolloutCheckpoint) -> None:
            kept.append(checkpoint)

        await run_rollout(fleet, task, voice(Actor([starts, *LINES])), OFTEN, on_checkpoint=keep)
        assert [(checkpoint.trace.cost.turns, checkpoint.over) for checkpoint in kept] == [(6, True)]
        for checkpoint in kept:
            await remove_snapshot(fleet, checkpoint.origin.snapshot.id)

    inside(state, check)
