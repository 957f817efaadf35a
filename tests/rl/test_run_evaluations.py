"""Evaluations beside training: the real trainer, queue, run service and store; samplers and workers are the test's."""

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rl_runs import finish_slots, make_recipe
from run_services import FakeStatuses, threaded_service
from test_lineage import evaluate, evaluations, publish_start, validation_tasks, version_of
from test_loop import prepare_run

from etude.model import load
from etude.model.adapters import published_views
from etude.recipe.recipe import load_recipe
from etude.rl import trainer_process
from etude.rl.best_checkpoint import finished_steps
from etude.rl.loop import finish_publishing, learn
from etude.rl.orchestrator import Orchestrator, RlTaskSets, named_tasks
from etude.rl.run_evaluations import RunEvaluations
from etude.rl.settings import open_rl_run
from etude.rl.trainer_process import checkpoints
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import load_evaluation, load_queues
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.weights.object_store import ObjectStore
from etude.weights.versions import read_version, version_numbers


@contextmanager
def opened(directory: Path, evaluation: dict[str, Any], **options: Any) -> Iterator[Orchestrator]:
    """Give the orchestrator of a new run, with its run service."""
    recipe = make_recipe(directory, tasks=24, held_out=2, evaluation=evaluation, **options)
    layout = prepare_run(recipe, directory / "run")
    settings = open_rl_run(layout.run)[1]
    run = Run.create_or_resume(layout.run, load_recipe(recipe), resume=True)
    scored = validation_tasks(directory)
    if evaluation.get("benchmarks"):
        scored |= {name.replace("held-out/", "more/", 1): task for name, task in scored.items()}
    tasks = RlTaskSets(named_tasks(directory / "tasks"), scored)
    with threaded_service(layout, load_queues(layout)), open_queues(layout) as queues:
        statuses, both = FakeStatuses(), (queues["training"], queues["evaluation"])
        found = load_evaluation(layout)
        yield Orchestrator(run, settings, layout, *both, statuses, tasks, 0, lambda *_: None, found)


def scoring_of(orchestrator: Orchestrator) -> RunEvaluations:
    assert orchestrator.scoring is not None
    return orchestrator.scoring


def tick(orchestrator: Orchestrator, over: bool = False, **versions: int) -> None:
    """Do the part of a tick that needs no services; the samplers have these versions."""
    for name, version in versions.items():
        orchestrator.statuses.report(name.replace("_", "-"), state="ready", version=version)
    step = orchestrator.step
    orchestrator.log_steps(step)
    for _ in range(2):  # what has finished gives way to the next
        orchestrator.evaluate(step, over, orchestrator.evaluations.state())


def train(layout: RunLayout) -> None:
    """Run the learning loop to its end in this process, from the newest checkpoint."""
    with trainer_process.open_loop(layout, open_rl_run(layout.run)[1]) as loop:
        learn(loop)
        finish_publishing(loop)


def fill(queue: RolloutQueue, layout: RunLayout, groups: int) -> None:
    known = len(queue.tasks())
    queue.add((f"task-{known + number}", 1.0) for number in range(groups))
    finish_slots(layout, queue, np.random.default_rng(known), version=max(0, queue.newest_version()))


def assert_weights_of(layout: RunLayout, version: int, step: int) -> None:
    """Check that a version in the store has, bit for bit, the weights of the trainer's checkpoint of a step."""
    _, stored = read_version(ObjectStore(layout.store), version)
    with torch.no_grad():
        wanted = dict(published_views(load(dict(checkpoints(layout))[step]), torch.bfloat16))
    assert wanted.keys() == set(stored)
    assert all(torch.equal(stored[name], tensor) for name, tensor in wanted.items())


def test_steps_go_on_while_an_evaluation_is_stuck_and_its_result_counts_for_its_step(tmp_path: Path) -> None:
    """The store prunes every other version, training goes to its end, and then back: four evaluations come late."""
    options: dict[str, Any] = {"steps": 6, "checkpoint_every": 100, "keep": 1, "max_staleness": 8}
    options |= {"sampler": {"count": 2, "device": "cpu"}, "weights": {"full_every": 2, "keep": 1}}
    with opened(tmp_path, {"validation_samples": 1, "every": 2}, **options) as orchestrator:
        layout, samples = orchestrator.layout, orchestrator.evaluations
        scoring, store = scoring_of(orchestrator), ObjectStore(layout.store)
        publish_start(orchestrator)
        tick(orchestrator, sampler_0=0, sampler_1=0)
        assert (lease := samples.lease()) is not None
        assert (lease.step, lease.version, lease.samplers, lease.shared) == (0, 0, ("sampler-1",), False)
        assert orchestrator.sampler_versions() == [0], "the borrowed sampler serves no training"
        stuck = samples.claim("stuck", time.time())
        assert stuck is not None
        fill(orchestrator.queue, layout, 12)
        train(layout)  # all steps, in this thread: nothing here moves the evaluation
        versions = {step: version_of(layout, step) for step in range(1, 7)}
        assert None not in versions.values()
        tick(orchestrator, sampler_0=versions[6])
        assert evaluations(orchestrator) == {}
        assert scoring.describe() == "held-out of step 0 runs, 0 of 2, 3 more due"
        assert samples.lease() == lease or lease.is_same(samples.lease())
        # Of the pinned versions nothing is missing, of the others only the newest are left.
        kept = set(version_numbers(store))
        assert {0, versions[2], versions[4], versions[6]} <= kept
        assert not {versions[1], versions[3]} <= kept
        for step in (2, 4, 6):
            version = versions[step]
            assert version is not None
            assert_weights_of(layout, version, step)
        # The trainer is back at step 4, and takes steps 5 and 6 again.
        shutil.rmtree(layout.trainer / "000006")
        samples.release("stuck")
        evaluate(samples, 0, score=0.0)
        tick(orchestrator)
        assert evaluations(orchestrator) == {0: 0.0}
        for step in (2, 4):
            version = versions[step]
            assert version is not None
            assert (lease := samples.lease()) is not None
            assert (lease.step, lease.version) == (step, version)
            if step == 4:
                train(layout)
            evaluate(samples, version, score=step / 8)
            tick(orchestrator)
        again = version_of(layout, 6)
        assert again is not None
        assert again > (versions[6] or 0)
        assert evaluations(orchestrator) == {0: 0.0, 2: 0.0, 4: 0.0}
        assert (lease := samples.lease()) is not None
        assert (lease.step, lease.version) == (6, again)
        assert finished_steps(layout, samples.lineage()) == {0, 2, 4}
        assert_weights_of(layout, again, 6)
        evaluate(samples, again, score=1.0)
        tick(orchestrator, over=True)
        assert evaluations(orchestrator) == {0: 0.0, 2: 0.0, 4: 0.0, 6: 1.0}
        assert samples.lease() is None
        records = [record for record in orchestrator.run.metrics("rl") if record.get("evaluation")]
        assert all(each["versions/oldest"] == each["versions/newest"] == each["step"] for each in records)
