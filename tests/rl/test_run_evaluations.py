"""Evaluations beside training: the real trainer, queue, run service and store; samplers and workers are the test's."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from rl_runs import finish_slots, make_recipe
from run_services import FakeStatuses, threaded_service
from test_lineage import evaluate, evaluations, publish_start, validation_tasks, version_of
from test_loop import plain_loop, prepare_run

from etude.cluster.local import LocalCluster
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceSupervisor
from etude.errors import EtudeError, InputError
from etude.model import load
from etude.model.adapters import published_views
from etude.recipe.recipe import load_recipe
from etude.rl import run_evaluations, trainer_process
from etude.rl.best_checkpoint import finished_steps
from etude.rl.loop import finish_publishing, learn
from etude.rl.orchestrator import Orchestrator, RlTaskSets, named_tasks
from etude.rl.run_evaluations import RunEvaluations
from etude.rl.services import add_rl_services
from etude.rl.settings import open_rl_run
from etude.rl.trainer_process import checkpoints
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import EvaluationSettings, load_evaluation, load_queues
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.runs.service_status import StatusReader, read_statuses
from etude.weights.object_store import ObjectStore
from etude.weights.versions import read_version, version_numbers, write_version
from etude_nano.source import generate_nano


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


def test_pinned_versions_of_several_ranks_are_published_although_newer_ones_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a rank is busy, copies of pinned weights are kept: the trainer changes its own in the next step."""
    layout = prepare_run(make_recipe(tmp_path, tasks=4), tmp_path / "run")
    learner = plain_loop(layout, store=f"memory://{tmp_path.name}").learner
    publisher, value = learner.publisher, torch.zeros(3)
    mesh: Any = SimpleNamespace(exchange=lambda busy: [busy], announce=lambda order: None)
    monkeypatch.setattr(learner.trainer, "mesh", mesh)
    monkeypatch.setattr(learner, "_published", lambda: {"a": value})
    put, go_on = publisher.store.put, threading.Event()
    monkeypatch.setattr(publisher.store, "put", lambda name, data: go_on.wait(60) and put(name, data))
    for number in range(6):
        value.fill_(number)
        learner.publish(number, pinned=number in (1, 3))
    go_on.set()
    deadline = time.monotonic() + 60
    while learner.waits:
        learner.publish_pending()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    publisher.flush(60)
    assert [each.version.number for each in publisher.history] == [0, 1, 3, 5]
    for number in (0, 1, 3, 5):
        assert read_version(publisher.store, number)[1]["a"].tolist() == [number] * 3
    publisher.close()


def take_step(orchestrator: Orchestrator, version: int, step: int) -> None:
    """Leave behind what a trainer does that has taken a step and published its weights."""
    layout = orchestrator.layout
    write_version(ObjectStore(layout.store), version, {"a": torch.full((2,), float(version))}, None)
    for queue in (orchestrator.queue, orchestrator.evaluations):
        queue.record_version(version, step)
    layout.step_file(step).write_text(json.dumps({"version": version, "groups": [], "wall_s": 1.0, "values": {}}))


def lease_of(orchestrator: Orchestrator) -> tuple[int, int | None, tuple[str, ...], bool, int] | None:
    lease = orchestrator.evaluations.lease()
    return None if lease is None else (lease.step, lease.version, lease.samplers, lease.shared, lease.sessions)


def test_the_only_sampler_is_shared_and_follows_training_again_before_that_must_wait(tmp_path: Path) -> None:
    with opened(tmp_path, {"every": 2}, steps=9, max_staleness=4) as orchestrator:
        publish_start(orchestrator)
        scoring, only = scoring_of(orchestrator), ("sampler-0",)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(orchestrator, "log_steps", lambda step: None)
            orchestrator.logged_steps = 9
            tick(orchestrator, sampler_0=0)
            assert lease_of(orchestrator) == (0, 0, only, True, 4)  # half of in_flight, and it stays at version 0
            assert orchestrator.sampler_versions() == [0]
            for step in (1, 2):
                take_step(orchestrator, step, step)
                tick(orchestrator)
                assert lease_of(orchestrator) == (0, 0, only, True, 4)
            take_step(orchestrator, 3, 3)  # more than half of max_staleness behind
            tick(orchestrator)
            assert lease_of(orchestrator) == (0, None, only, True, 4)
            assert scoring.describe().endswith("of step 0 runs, 0 of 8 (shared sampler), 1 more due")
            evaluate(orchestrator.evaluations, 0, score=0.0)
            # The next one is due since step 2; its sampler does not go back to older weights than it has.
            tick(orchestrator, sampler_0=3)
            assert lease_of(orchestrator) == (2, 3, only, True, 4)
            # When training is over, the rest of it is of exactly its weights, and takes all sessions.
            tick(orchestrator, over=True)
            assert lease_of(orchestrator) == (2, 2, only, False, 8)
            evaluate(orchestrator.evaluations, 2, score=0.0)
            tick(orchestrator, over=True)
            assert lease_of(orchestrator) == (3, 3, only, False, 8)
            assert evaluations(orchestrator) == {0: 0.0, 2: 0.0}


def test_imitation_leases_all_samplers_and_samplers_of_their_own_are_leased_alone(tmp_path: Path) -> None:
    for name, options in {"imitation": {"control": "imitation"}, "own": {}}.items():
        (tmp_path / name).mkdir()
        table: dict[str, Any] = {"sampler": {"count": 2, "device": "cpu"}} if name == "own" else {}
        with opened(tmp_path / name, table, **options) as orchestrator:
            publish_start(orchestrator)
            tick(orchestrator, sampler_0=0)
            own = ("evaluation-sampler-0", "evaluation-sampler-1")
            wanted = (0, 0, own, False, 4) if name == "own" else (0, 0, ("sampler-0",), False, 8)
            assert lease_of(orchestrator) == wanted
            assert orchestrator.sampler_versions() == ([0] if name == "own" else [])


def test_a_borrowed_sampler_that_does_not_come_back_is_replaced_and_training_keeps_one(tmp_path: Path) -> None:
    with opened(tmp_path, {}, sampler={"count": 3, "device": "cpu"}) as orchestrator:
        publish_start(orchestrator)
        scoring = scoring_of(orchestrator)
        tick(orchestrator, sampler_0=0)
        assert lease_of(orchestrator) is None
        assert scoring.describe() == "evaluation of step 0 waits for a second sampler that is ready: 1 of 3 are"
        tick(orchestrator, sampler_2=0)
        assert lease_of(orchestrator) == (0, 0, ("sampler-2",), False, 4)
        orchestrator.statuses.report("sampler-2", state="ended", version=0)
        tick(orchestrator, sampler_1=0)
        assert lease_of(orchestrator) == (0, 0, ("sampler-2",), False, 4)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_evaluations, "ABSENT_S", 0.0)
            tick(orchestrator)
        assert lease_of(orchestrator) == (0, 0, ("sampler-1",), False, 4)


def test_an_evaluation_without_progress_gives_its_sampler_back_and_ends_a_run_that_waits_for_it(
    tmp_path: Path,
) -> None:
    with opened(tmp_path, {}, stall_s=0.1, steps=1, sampler={"count": 2, "device": "cpu"}) as orchestrator:
        publish_start(orchestrator)
        tick(orchestrator, sampler_0=0, sampler_1=0)
        assert orchestrator.evaluations.claim("w", time.time()) is not None
        tick(orchestrator)
        time.sleep(0.2)
        tick(orchestrator)
        assert lease_of(orchestrator) is None
        assert orchestrator.sampler_versions() == [0, 0]
        assert orchestrator.evaluations.counts() == {"queued": 8}, "the session in progress is requeued"
        waits = "waits for another try: it made no progress for 0.1 s (7 queued, 1 starting;"
        assert waits in scoring_of(orchestrator).describe()
        tick(orchestrator)
        assert lease_of(orchestrator) is None, "it is tried again at once"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_evaluations, "LOOK_S", 0.0)
            scoring_of(orchestrator)._retry.clear()  # a minute later
            tick(orchestrator, over=True)
            assert lease_of(orchestrator) == (0, 0, ("sampler-0", "sampler-1"), False, 8)
            time.sleep(0.2)
            with pytest.raises(EtudeError, match=r"evaluation of step 0 made no progress .* --resume continues"):
                tick(orchestrator, over=True)


def test_an_evaluation_whose_weights_are_not_in_the_store_is_reported_as_impossible(tmp_path: Path) -> None:
    with opened(tmp_path, {"every": 1}, sampler={"count": 2, "device": "cpu"}) as orchestrator:
        publish_start(orchestrator)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(orchestrator, "log_steps", lambda step: None)
            for step in (1, 2):
                take_step(orchestrator, step, step)
            ObjectStore(orchestrator.layout.store).remove("versions/00000001")
            orchestrator.logged_steps = 2
            tick(orchestrator, sampler_0=2, sampler_1=2)
            evaluate(orchestrator.evaluations, 0, score=0.0)
            tick(orchestrator)
            assert lease_of(orchestrator) == (2, 2, ("sampler-1",), False, 4)
            facts = scoring_of(orchestrator).facts()
            assert facts["not_evaluated"] == {"1": "its weights (version 1) are not in the store"}
            assert finished_steps(orchestrator.layout, 0) == {0, 1}


def test_benchmarks_have_their_own_intervals_and_names_and_decide_nothing(tmp_path: Path) -> None:
    table = {"every": 2, "validation_samples": 1, "benchmarks": [{"tasks": "./more", "every": 3, "samples": 2}]}
    with opened(tmp_path, table, steps=7, max_validation_fall=0.1) as orchestrator:
        publish_start(orchestrator)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(orchestrator, "log_steps", lambda step: None)
            orchestrator.logged_steps = 7
            tick(orchestrator, sampler_0=0)
            for step in range(1, 8):
                evaluate(orchestrator.evaluations, step - 1, score=1.0 / step)
                tick(orchestrator)
                take_step(orchestrator, step, step)
                tick(orchestrator, sampler_0=step)
            evaluate(orchestrator.evaluations, 7, score=1.0)
            tick(orchestrator, over=True)
            evaluate(orchestrator.evaluations, 7, score=0.0)
            tick(orchestrator, over=True)
        found = [(each["step"], each.get("benchmark")) for each in orchestrator.run.metrics("rl")]
        assert sorted(step for step, name in found if name is None) == [0, 2, 4, 6, 7]
        assert sorted(step for step, name in found if name == "more") == [0, 3, 6, 7]
        samples = {each.get("benchmark"): each["samples"] for each in orchestrator.run.metrics("rl")}
        assert samples == {None: 2, "more": 4}
        assert orchestrator.scores().keys() == {0, 2, 4, 6, 7}
        lines = orchestrator.layout.scorings.read_text().splitlines()
        assert len(lines) == len(found)


def test_test_sets_are_refused_as_benchmarks_and_keys_without_rl_too(tmp_path: Path) -> None:
    for name in ("new", "unseen", "./elsewhere/new"):
        with pytest.raises(ValidationError, match="is a test set"):
            EvaluationSettings.model_validate({"benchmarks": [{"tasks": name}]}, context={"base": tmp_path})
    (tmp_path / "new").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "new")
    with pytest.raises(ValidationError, match="is a test set"):
        EvaluationSettings(test=str(tmp_path / "new"), benchmarks=[{"tasks": str(tmp_path / "alias")}])  # type: ignore[arg-type, list-item]
    with pytest.raises(ValidationError, match='"validation" is given twice'):
        EvaluationSettings(benchmarks=[{"tasks": "validation"}])  # type: ignore[list-item]
    path, sets = tmp_path / "recipe.toml", 'validation = "./v"\ntest = []'
    for table, key in (
        ('benchmarks = [{ tasks = "./t" }]', "benchmarks"),
        ("[evaluation.sampler]\ncount = 2", "sampler"),
    ):
        path.write_text(f'name = "x"\nstages = ["evaluation"]\n[evaluation]\nmodel = "m"\n{sets}\n{table}\n')
        with pytest.raises(InputError, match=f"evaluation.{key} would not be used: it needs the stage"):
            load_recipe(path)


def test_samplers_of_evaluations_are_services_like_the_others(tmp_path: Path) -> None:
    """They may run anywhere, with resources of their own; on one machine their GPUs come after those of training."""
    table = {"sampler": {"count": 2, "device": "cuda"}}
    options = {"device": "cuda", "sampler": {"count": 3, "device": "cuda"}}
    layout = prepare_run(make_recipe(tmp_path, tasks=4, evaluation=table, **options), tmp_path / "run")
    supervisor = ServiceSupervisor(LocalCluster(), layout.logs, StatusReader(layout))
    settings = open_rl_run(layout.run)[1]
    add_rl_services(supervisor, layout, settings, ClusterSettings(), "http://x", load_evaluation(layout))
    specs = {name: each.spec for name, each in supervisor.services.items() if "sampler" in name}
    assert list(specs) == [f"sampler-{n}" for n in range(3)] + [f"evaluation-sampler-{n}" for n in range(2)]
    assert {(spec.module, spec.where, spec.resources.gpus) for spec in specs.values()} == {
        ("etude.inference.sampler_process", "anywhere", 1)
    }
    known = ("--service", "http://x", "--name", "evaluation-sampler-1")
    assert specs["evaluation-sampler-1"].arguments == (*known, "--gpu", "5", "--evaluation")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["borrowed", "own"])
def test_evaluations_of_a_real_run_are_exact_although_their_sampler_and_the_run_are_killed(
    kind: str, tmp_path: Path
) -> None:
    """Real processes: the leased sampler is killed twice, the orchestrator once; results are of exactly their step."""
    samplers = {"device": "cpu", "kv_cache_tokens": 16384, "max_sequences": 8, "threads": 1}
    table: dict[str, Any] = {"every": 2, "validation_samples": 2}
    table["benchmarks"] = [{"tasks": "./more", "every": 3, "max_tasks": 1}]
    table |= {"sampler": samplers} if kind == "own" else {}
    count = 1 if kind == "own" else 2
    options: dict[str, Any] = {"steps": 8, "checkpoint_every": 3, "weights": {"full_every": 2, "keep": 1}}
    recipe = make_recipe(tmp_path, tasks=80, evaluation=table, sampler={**samplers, "count": count}, **options)
    generate_nano(tmp_path / "more", 2, "validation", 2, (1,))
    layout, kills = RunLayout(tmp_path / "run"), ["sampler", "orchestrator", "sampler"]
    line = [sys.executable, "-m", "etude.cli", "rl", str(recipe), "--out", str(layout.run), "--json", "--resume"]
    deadline, leased = time.monotonic() + 600, set[str]()
    while True:
        with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "a") as err:
            process = subprocess.Popen(line, stdout=out, stderr=err, start_new_session=True)
            while process.poll() is None:
                assert time.monotonic() < deadline, (tmp_path / "err").read_text()[-2000:]
                time.sleep(0.1)
                found = {name: each.facts for name, each in read_statuses(layout).items()}
                lease = found.get("orchestrator", {}).get("lease")
                if not lease or lease["step"] < 2:
                    continue
                leased |= set(lease["samplers"])
                victim = found.get(lease["samplers"][0], {})
                if kills and victim.get("leased") == lease["version"]:
                    with suppress(ProcessLookupError):
                        os.kill(process.pid if kills.pop(0) == "orchestrator" else victim["pid"], signal.SIGKILL)
                    time.sleep(2.0)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, (tmp_path / "err").read_text()[-3000:]
    assert kills == []
    assert leased >= ({"evaluation-sampler-0"} if kind == "own" else {"sampler-1"})
    records = Run.read(layout.run).metrics("rl")
    steps = [record["step"] for record in records if not record.get("evaluation")]
    assert steps == list(range(1, 9))
    scored = {(each["step"], each.get("benchmark")): each for each in records if each.get("evaluation")}
    assert scored.keys() == {(step, None) for step in (0, 2, 4, 6, 8)} | {(step, "more") for step in (0, 3, 6, 8)}
    for (step, name), record in scored.items():
        assert record["versions/oldest"] == record["versions/newest"] == step, (step, name)
        assert record["samples"] == (1 if name else 6)
