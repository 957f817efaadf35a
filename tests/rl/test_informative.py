"""Policy steps of informative groups: which groups a step consumes, how far it moves, and what survives a kill."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rl_runs import make_recipe, open_loop, random_segment, random_trace
from run_services import threaded_service
from test_loop import prepare_run

from etude.harness.trace_store import save_trace
from etude.rl.loop import learn
from etude.rl.settings import open_rl_run
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import QueueSettings, load_queues
from etude.runs.layout import RunLayout


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_recipe(tmp_path_factory.mktemp("recipe"), tasks=8, groups_per_step=2, warmup=0)


def fill(layout: RunLayout, rewards: Sequence[tuple[float, float]], version: int = 0) -> RolloutQueue:
    """Add a finished group of two rollouts for each pair of rewards."""
    queue = RolloutQueue(layout.slots, open_rl_run(layout.run)[1])
    started = len(queue.tasks())
    queue.add((f"task-{started + number}", 0.0) for number in range(len(rewards)))
    rng = np.random.default_rng(started)
    while (slot := queue.claim("worker", 0.0)) is not None:
        name = f"traces/{slot.id}.trace"
        save_trace(random_trace(rng, random_segment(rng, version=version)), layout.root / name)
        total = rewards[int(slot.task.removeprefix("task-")) - started][slot.number]
        queue.finish(slot, {"total": total, "solved": total > 0.5}, name, (version, version))
    return queue


SPLIT, ALIKE, SOLVED = (1.0, 0.0), (0.0, 0.0), (1.0, 1.0)


def facts_of(layout: RunLayout, step: int) -> dict[str, object]:
    found: dict[str, object] = json.loads(layout.step_file(step).read_text())
    return found


def test_a_step_has_informative_groups_and_consumes_those_that_are_alike(recipe: Path, tmp_path: Path) -> None:
    layout = prepare_run(recipe, tmp_path / "run", "rl.steps=2")
    queue = fill(layout, [ALIKE, SPLIT, SOLVED, ALIKE, SPLIT, SPLIT, ALIKE, SPLIT])
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        learn(loop)
    assert facts_of(layout, 1)["groups"] == [2, 5, 1, 3, 4, 7]  # the limit of a step is 8 groups
    assert facts_of(layout, 2)["groups"] == [6, 8]
    assert [facts_of(layout, step)["step_scale"] for step in (1, 2)] == [1.0, 1.0]
    assert sorted(step for _, step in queue.trained()) == [1] * 6 + [2] * 2
    assert queue.outstanding() == 0
    assert queue.informative_share() == pytest.approx((4 + 2) / (8 + 2))


def changed(recipe: Path, run: Path, rewards: Sequence[tuple[float, float]], *overrides: str) -> torch.Tensor:
    """Take one step on these groups; return the change of all weights."""
    layout = prepare_run(recipe, run, "rl.steps=1", "rl.weights.dtype=float32", *overrides)
    fill(layout, rewards)
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        before = torch.cat([p.detach().flatten().clone() for p in loop.learner.trainer.model.parameters()])
        learn(loop)
        return torch.cat([p.detach().flatten() for p in loop.learner.trainer.model.parameters()]) - before


def test_a_step_with_half_of_its_informative_groups_moves_half_as_far(recipe: Path, tmp_path: Path) -> None:
    """Adam's first step moves every weight by the learning rate, whatever the size of its gradient."""
    limit = "rl.max_groups_per_step=3"
    half = changed(recipe, tmp_path / "half", [SPLIT, ALIKE, SOLVED], limit)
    plain = changed(recipe, tmp_path / "plain", [SPLIT, ALIKE, SOLVED], "rl.informative_groups=false")
    assert plain.norm() > 0
    torch.testing.assert_close(2 * half, plain, rtol=1e-3, atol=1e-7)
    none = changed(recipe, tmp_path / "none", [ALIKE, ALIKE, SOLVED], limit)
    assert not none.any()
    assert facts_of(RunLayout(tmp_path / "none"), 1)["step_scale"] == 0.0


def test_groups_that_were_consumed_stay_consumed_after_a_kill(recipe: Path, tmp_path: Path) -> None:
    """Kill the trainer when it has judged groups and waits for more, and when it has taken a step."""
    layout = prepare_run(recipe, tmp_path / "run", "rl.steps=3", "rl.checkpoint_every=3")
    queue = fill(layout, [ALIKE, SPLIT, SOLVED])
    kill_when(layout, lambda: queue.outstanding() == 1)
    fill(layout, [ALIKE, SPLIT])
    kill_when(layout, lambda: layout.step_file(1).exists())
    assert facts_of(layout, 1)["groups"] == [2, 5, 1, 3, 4]
    queue.rewind(0)  # as the restarted trainer does: its step is lost
    assert queue.outstanding() == 2
    fill(layout, [SPLIT, SPLIT, ALIKE, SPLIT, SPLIT])
    with open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        learn(loop)
    assert [facts_of(layout, step)["groups"] for step in (1, 2, 3)] == [[2, 5, 1, 3, 4, 8], [6, 7], [9, 10]]
    assert not queue.incidents()


def kill_when(layout: RunLayout, done: object) -> None:
    environment = {**os.environ, "ETUDE_PARENT": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    with threaded_service(layout, load_queues(layout)):
        trainer = subprocess.Popen([sys.executable, "-m", "etude.rl.trainer_process", str(layout.run)], env=environment)
        try:
            deadline = time.monotonic() + 120
            while not done():  # type: ignore[operator]
                assert trainer.poll() is None, "the trainer ended"
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait()


# ------------------------------------------------------------------------------------------- groups in flight


def judge(queue: RolloutQueue, informative: int, alike: int) -> None:
    """Start, finish and judge groups; the informative ones stay ready."""
    known = len(queue.tasks())
    queue.add((f"{known + number}", 0.0) for number in range(informative + alike))
    while (slot := queue.claim("w", 0.0)) is not None:
        queue.finish(slot, {"total": float(slot.number * (slot.group <= known + informative))}, "t", (0, 0))
    queue.take(0, lambda group: len({slot.record["total"] for slot in group.slots}) > 1)


def test_the_groups_in_flight_follow_the_informative_share() -> None:
    settings = QueueSettings(group_size=2, groups_per_step=10, max_staleness=4, prefetch_steps=1, in_flight=1000)
    queue = RolloutQueue(":memory:", settings.model_copy(update={"max_groups_per_step": 400}))
    assert queue.groups_to_start() == 20  # two steps; nothing is known yet
    judge(queue, informative=5, alike=35)
    assert queue.informative_share() == (5 + 10) / (40 + 10)
    assert queue.outstanding() == 5
    assert queue.groups_to_start() == 45  # 15 are missing and 50 would give them; but at most five steps in all
    assert queue.groups_to_start(fresh=False) == 5 + 17 - 5  # 10 - 5 informative ones at 30 %
    assert queue.groups_to_start(steps_left=1) == 17
    assert queue.groups_to_start(steps_left=0) == 0
    judge(queue, informative=75, alike=0)
    assert queue.informative_share() == pytest.approx((45 + 35 + 10) / (80 + 10), abs=0.5)
    assert queue.groups_to_start() == 0


def test_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_groups_per_step = 4 is less than groups_per_step = 8"):
        QueueSettings(max_groups_per_step=4)
    with pytest.raises(ValidationError, match="would not be used: informative_groups is off"):
        QueueSettings(max_groups_per_step=40, informative_groups=False)
