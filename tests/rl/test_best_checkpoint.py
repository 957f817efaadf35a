"""A run that collapses stops itself, and a stage ends with its best checkpoint: real trainer, orchestrator, kills."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rl_runs import finish_slots, make_recipe
from run_services import FakeStatuses, threaded_service
from test_lineage import evaluate, is_published, publish_start, tick, train_until, validation_tasks, version_of
from test_loop import prepare_run

from etude.cluster.cluster import ServiceSpec
from etude.cluster.local import LocalCluster
from etude.cluster.supervisor import ServiceSupervisor
from etude.model import load
from etude.model.checkpoint import checkpoint_views
from etude.recipe.recipe import load_recipe
from etude.rl.best_checkpoint import best_step, kept_steps, read_scores
from etude.rl.orchestrator import Orchestrator, RlTaskSets, named_tasks
from etude.rl.settings import RlSettings, open_rl_run
from etude.rl.trainer_process import checkpoints
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import load_evaluation, load_queues
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.runs.service_status import StatusReader

SETTINGS = RlSettings(tasks="./t", steps=100, keep=2)


@given(st.lists(st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=12), st.integers(0, 3))
def test_the_best_checkpoint_always_exists_whenever_its_evaluation_ends(scores: list[float], delay: int) -> None:
    """Train, with each evaluation ending `delay` steps after its start; compare with keeping every checkpoint."""
    saved: set[int] = set()
    known = {0: scores[0]}
    for step in range(1, 4 * len(scores)):
        if step % 4 == delay and step > delay:
            known[step - delay] = scores[(step - delay) // 4]
        if step % 4 == 0 or step % 3 == 0:
            saved.add(step)
            saved &= kept_steps(saved, SETTINGS, known, 4)
            assert best_step(known) in saved | {0}
            assert len(saved) <= SETTINGS.keep + 2
    assert kept_steps({3, 6, 9, 12}, SETTINGS.model_copy(update={"keep_best": False}), {0: 0.5, 3: 0.9}, 4) == {9, 12}


# ------------------------------------------------------------------------------------------- a real run


def start_run(directory: Path) -> Run:
    evaluation = {"validation_samples": 2, "every": 2}
    recipe = make_recipe(directory, tasks=24, held_out=4, evaluation=evaluation, steps=8, checkpoint_every=100, keep=1)
    layout = prepare_run(recipe, directory / "run")
    layout.origin.write_text(json.dumps({"path": "model", "digest": ""}))
    return Run.create_or_resume(layout.run, load_recipe(recipe), resume=True)


@pytest.fixture
def orchestrator(tmp_path: Path) -> Iterator[Orchestrator]:
    with opened(start_run(tmp_path), tmp_path) as found:
        yield found


@contextmanager
def opened(run: Run, directory: Path) -> Iterator[Orchestrator]:
    """Open an orchestrator of the run, as after a restart."""
    layout, settings = open_rl_run(run.path)
    tasks = RlTaskSets(named_tasks(directory / "tasks"), validation_tasks(directory))
    evaluation = load_evaluation(layout)
    with threaded_service(layout, load_queues(layout)), open_queues(layout) as queues:
        statuses, both = FakeStatuses(), (queues["training"], queues["evaluation"])
        yield Orchestrator(run, settings, layout, *both, statuses, tasks, 0, lambda *_: None, evaluation)


def advance(orchestrator: Orchestrator, step: int, score: float | None) -> None:
    """Let the trainer take its steps up to `step`, and evaluate the policy there."""
    layout, queue = orchestrator.layout, orchestrator.queue
    if step:
        known = len(queue.tasks())
        queue.add((f"task-{known + number}", 1.0) for number in range(4))
        finish_slots(layout, queue, np.random.default_rng(step), version=queue.newest_version())
        train_until(layout, lambda: (layout.trainer / f"{step:06d}").exists() and is_published(layout, step))
    else:
        publish_start(orchestrator)
    version = version_of(layout, step) or 0
    tick(orchestrator, version)
    if score is not None:
        evaluate(orchestrator.evaluations, version, score)
        tick(orchestrator, version)


def supervisor_of(layout: RunLayout) -> ServiceSupervisor:
    return ServiceSupervisor(LocalCluster(), layout.logs, StatusReader(layout))


def test_a_run_whose_validation_falls_stops_and_ends_with_its_best_checkpoint(
    orchestrator: Orchestrator, tmp_path: Path
) -> None:
    layout = orchestrator.layout
    with supervisor_of(layout) as services:
        for step, score in ((0, 0.0), (2, 1.0), (4, 1.0), (6, 0.0)):
            assert not orchestrator.is_finished(services)
            advance(orchestrator, step, score)
        assert orchestrator.is_finished(services)
    assert read_scores(layout) == {0: 0.0, 2: 1.0, 4: 1.0, 6: 0.0}
    assert {4, 6} <= {step for step, _ in checkpoints(layout)}
    best = {name: tensor.clone() for name, tensor in checkpoint_views(load(dict(checkpoints(layout))[4])).items()}
    # The orchestrator is killed here: another one starts no process and ends the stage.
    with opened(orchestrator.run, tmp_path) as again:
        with supervisor_of(layout) as services:
            services.add(ServiceSpec("trainer", "etude.rl.trainer_process", (str(layout.run),), finishes=True))
            assert again.is_finished(services)
            assert not services.services["trainer"].processes
        facts = again.finish(again.queue, again.evaluations)
        assert again.finish(again.queue, again.evaluations) == facts  # killed after the checkpoint was written
    assert facts["result_step"] == 4
    assert facts["collapsed"].startswith("validation fell from 100.0% at step 4 to 0.0% at step 6 (95 % interval")
    assert facts["rise"]["solved"] == 1.0
    assert facts["after"]["step"] == 4
    made = checkpoint_views(load(layout.run / "checkpoints" / "rl-4"))
    assert all(torch.equal(tensor, best[name]) for name, tensor in made.items())
    assert not (layout.run / "checkpoints" / "rl-6").exists()


def test_a_fall_that_chance_explains_does_not_stop_a_run(orchestrator: Orchestrator) -> None:
    """One of four tasks is lost: 25 points, but the interval of the difference reaches 0."""
    advance(orchestrator, 0, 1.0)
    advance(orchestrator, 2, None)
    version = version_of(orchestrator.layout, 2)
    assert version is not None
    queue = orchestrator.evaluations
    record = {"total": 1.0, "score": 1.0, "category": "", "ending": "final", "made": 1, "seconds": {}}
    lost = ""
    while (slot := queue.claim("worker", time.time())) is not None:
        lost = lost or slot.task
        queue.finish(slot, {**record, "cost": {"turns": 1}, "solved": slot.task != lost}, "t", (version, version))
    tick(orchestrator, version)
    assert read_scores(orchestrator.layout) == {0: 1.0, 2: 0.75}
    assert not orchestrator.layout.collapsed.exists()
    step, directory = orchestrator.result(dict(checkpoints(orchestrator.layout)))
    assert (step, directory) == (0, orchestrator.layout.model)  # RL made nothing better than its start


BASE = Path(__file__).parents[2] / "base" / "nano"


@pytest.mark.slow
def test_an_absurd_learning_rate_collapses_and_the_run_ends_with_the_start(tmp_path: Path) -> None:
    """The real thing: a base model that solves tasks, a learning rate that destroys it, and kill -9 at the rollback."""
    evaluation = {"validation_samples": 2, "every": 2}
    recipe = make_recipe(
        tmp_path,
        tasks=80,
        held_out=16,
        evaluation=evaluation,
        steps=12,
        group_size=4,
        learning_rate=0.02,
        warmup=0,
        budget={"turns": 8, "max_turn_tokens": 200},
        window=2048,
        rewards={"correctness": 1.0},
        max_groups_per_step=4,
    )
    text = recipe.read_text().replace('model = "model"', f'model = "{BASE}"')
    recipe.write_text(text)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(run), "--json", "--resume"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 900
    while not (run / "rl" / "collapsed").exists():
        assert process.poll() is None, "the run ended without a collapse"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)["stages"]["rl"]
    scores = read_scores(open_rl_run(run)[0])
    print(scores, facts["collapsed"])
    assert facts["result_step"] == best_step(scores) < max(scores)
    assert scores[max(scores)] < max(scores.values()) - 0.1
    (made,) = Run.read(run).artefacts("checkpoint")
    assert made.path.name == f"rl-{facts['result_step']}"
