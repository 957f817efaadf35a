"""Evaluations after the trainer went back to a checkpoint: a real queue, orchestrator and killed trainer."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from rl_runs import finish_slots, make_recipe
from run_services import FakeStatuses, threaded_service
from test_loop import prepare_run

from etude.evaluation import held_out
from etude.recipe.recipe import load_recipe
from etude.rl.orchestrator import Orchestrator, RlTaskSets, named_tasks
from etude.rl.settings import open_rl_run
from etude.rollouts.queue import RolloutQueue, StaleClaim
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import QueueSettings, evaluation_queue, load_evaluation, load_queues
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.tasks.task import Task
from etude.weights.object_store import ObjectStore
from etude.weights.versions import has_version, write_version


def validation_tasks(directory: Path) -> dict[str, Task]:
    """Return the tasks of the validation set of `make_recipe`, as they are named in a run."""
    return {f"held-out/{name}": task for name, task in named_tasks(directory / "held-out").items()}


def evaluate(queue: RolloutQueue, version: int, score: float) -> None:
    """Finish all queued samples, as a worker does whose sampler has this version."""
    record = {"total": score, "score": score, "solved": score > 0.5, "category": "", "ending": "final", "made": 1}
    while (slot := queue.claim("worker", time.time())) is not None:
        queue.finish(slot, {**record, "cost": {"turns": 1}, "seconds": {}}, "t", (version, version))


def publish_start(orchestrator: Orchestrator) -> None:
    """Publish version 0, which is of step 0, as a trainer does that is killed before its first step."""
    write_version(ObjectStore(orchestrator.layout.store), 0, {"a": torch.zeros(2)}, None)
    for queue in (orchestrator.queue, orchestrator.evaluations):
        queue.record_version(0, 0)


def is_published(layout: RunLayout, step: int) -> bool:
    version = version_of(layout, step)
    return version is not None and has_version(ObjectStore(layout.store), version)


def version_of(layout: RunLayout, step: int) -> int | None:
    try:
        return int(json.loads(layout.step_file(step).read_text())["version"])
    except FileNotFoundError:
        return None


def train_until(layout: RunLayout, done: Callable[[], bool]) -> None:
    """Run a trainer until something is done, then kill it."""
    environment = {**os.environ, "ETUDE_PARENT": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    trainer = subprocess.Popen([sys.executable, "-m", "etude.rl.trainer_process", str(layout.run)], env=environment)
    try:
        deadline = time.monotonic() + 120
        while not done():
            assert trainer.poll() is None, "the trainer ended"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()


@pytest.fixture
def orchestrator(tmp_path: Path) -> Iterator[Orchestrator]:
    table = {"validation_samples": 2, "every": 3}
    # keep_best would also save evaluated steps, so that what is lost would depend on when the trainer is killed.
    options = {"steps": 8, "checkpoint_every": 2, "keep_best": False}
    recipe = make_recipe(tmp_path, tasks=24, held_out=2, evaluation=table, **options)
    layout = prepare_run(recipe, tmp_path / "run")
    settings = open_rl_run(layout.run)[1]
    run = Run.create_or_resume(layout.run, load_recipe(recipe), resume=True)
    tasks = RlTaskSets(named_tasks(tmp_path / "tasks"), validation_tasks(tmp_path))
    evaluation = load_evaluation(layout)
    with threaded_service(layout, load_queues(layout)), open_queues(layout) as queues:
        statuses, both = FakeStatuses(), (queues["training"], queues["evaluation"])
        yield Orchestrator(run, settings, layout, *both, statuses, tasks, 0, lambda *_: None, evaluation)


def tick(orchestrator: Orchestrator, version: int) -> None:
    """Do the part of a tick that needs no services; the sampler has this version."""
    orchestrator.statuses.report("sampler-0", state="ready", version=version)
    step = orchestrator.step
    orchestrator.log_steps(step)
    for _ in range(2):  # what has finished gives way to the next
        orchestrator.evaluate(step, False, orchestrator.evaluations.state())


def evaluations(orchestrator: Orchestrator) -> dict[int, float]:
    records = orchestrator.run.metrics("rl")
    return {record["step"]: record["solved"] for record in records if record.get("evaluation")}


def test_an_evaluation_of_lost_weights_is_not_reported_and_is_made_again(orchestrator: Orchestrator) -> None:
    layout, queue, samples = orchestrator.layout, orchestrator.queue, orchestrator.evaluations
    publish_start(orchestrator)
    tick(orchestrator, version=0)
    evaluate(samples, 0, score=0.0)
    queue.add((f"task-{number}", 1.0) for number in range(6))
    finish_slots(layout, queue, np.random.default_rng(0))
    train_until(layout, lambda: is_published(layout, 3))
    lost = version_of(layout, 3)
    assert lost is not None
    tick(orchestrator, version=lost)
    evaluate(samples, lost, score=1.0)
    tick(orchestrator, version=lost)
    assert evaluations(orchestrator) == {0: 0.0, 3: 1.0}
    # The trainer goes back to its checkpoint after step 2 and takes step 3 again.
    train_until(layout, lambda: (version_of(layout, 3) or 0) > lost and is_published(layout, 3))
    assert samples.step_of(lost) == queue.step_of(lost) == 1  # the lost update counts as staleness
    new = version_of(layout, 3)
    assert new is not None
    for _ in range(2):
        tick(orchestrator, version=lost)
        assert evaluations(orchestrator) == {0: 0.0}, "the evaluation of lost weights is reported"
        assert held_out.started(samples) == [0, 3]
        assert (lease := samples.lease()) is not None
        assert (lease.step, lease.version) == (3, new)
        assert not lease.is_served_with(lost)  # the sampler has lost weights still
    evaluate(samples, new, score=0.0)
    tick(orchestrator, version=new)
    assert evaluations(orchestrator) == {0: 0.0, 3: 0.0}
    (record,) = (each for each in orchestrator.run.metrics("rl") if each.get("evaluation") and each["step"] == 3)
    assert (record["versions/oldest"], record["versions/newest"]) == (3, 3)


def test_samples_of_lost_weights_in_an_earlier_evaluation_are_repeated() -> None:
    """An evaluation runs while training continues: its step can survive although some of its samples do not."""
    queue = RolloutQueue(":memory:", evaluation_queue(QueueSettings(), 1))
    for version in range(6):
        queue.record_version(version, version)
    held_out.start(queue, 3, ["a", "b", "c", "d"])
    held_out.start(queue, 5, ["a"])
    slots = {slot.task: slot for _ in range(5) if (slot := queue.claim("worker", 0.0)) is not None}
    record = {"total": 1.0}
    queue.finish(slots["000003/a"], record, "t", (3, 4))
    queue.finish(slots["000003/b"], record, "t", (3, 5))
    held_out.rewind(queue, 4)
    assert held_out.started(queue) == [3]
    with pytest.raises(StaleClaim):
        queue.finish(slots["000005/a"], record, "t", (5, 5))
    queue.record_version(6, 4)
    queue.finish(slots["000003/c"], record, "t", (4, 6))  # the sampler had version 5 for a while
    queue.finish(slots["000003/d"], record, "t", (6, 6))
    assert not held_out.is_finished(queue, 3)
    assert {group.task: group.ready for group in queue.progress("000003/")} == {
        "000003/a": 1,
        "000003/b": 0,
        "000003/c": 0,
        "000003/d": 1,
    }
    evaluate(queue, 6, score=1.0)
    assert held_out.is_finished(queue, 3)
    steps = [
        (slot.oldest_step, slot.newest_step) for group in held_out.results(queue, 3).groups for slot in group.slots
    ]
    assert steps == [(3, 4), (4, 4), (4, 4), (4, 4)]
