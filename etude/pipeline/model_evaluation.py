"""Score one model after another on the task sets of `[evaluation]`, with the workers, samplers and queue of RL.

Every model gets the same tasks in the same order with the same seeds, so comparisons are paired. The directory
`evaluation/MODEL` of the run holds its queue, traces and logs. The evaluation can be killed at any time: scored
sessions are kept, and the others are sampled again with their seeds.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from etude.cluster.launch import open_cluster
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceSupervisor
from etude.errors import EtudeError, InputError
from etude.evaluation import held_out
from etude.evaluation.scorings import record_scoring
from etude.model.adapters import published_views
from etude.model.checkpoint import load
from etude.model.config import ModelConfig
from etude.pipeline.render import duration
from etude.recipe.recipe import Recipe
from etude.rl.orchestrator import evaluated_tasks, run_service, write_task_lists
from etude.rl.services import WORKER, add_session_services
from etude.rl.settings import RlSettings
from etude.rl.starting_model import copy_model
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_client import QueueClient
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import MODEL_STAGES, EvaluationSessions, EvaluationSettings, load_queues
from etude.runs.client import RunServiceUnavailable
from etude.runs.layout import RunLayout
from etude.runs.run import Artefact, Run
from etude.runs.service_status import ORCHESTRATOR, StatusReader
from etude.system.progress import ProgressCallback
from etude.tasks.task import Task
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed
from etude.weights.publisher import Publisher
from etude.weights.versions import latest

STEP = 0  # of the evaluation in the queue of its model, and of the weights it samples from
TICK_S = 0.1
START = "start"  # name of a model that no stage of the recipe has made


@dataclass(frozen=True)
class MeasuredModel:
    """A model to score: the last checkpoint of a stage, or a directory that the recipe names."""

    name: str
    origin: Artefact | Path

    @property
    def directory(self) -> Path:
        return self.origin.path if isinstance(self.origin, Artefact) else self.origin


def model_names(recipe: Recipe) -> list[str]:
    """Return the names of the models to score, in pipeline order."""
    assert recipe.evaluation is not None
    given = [START] if _given_model(recipe) is not None and recipe.evaluation.models is None else []
    wanted = recipe.evaluation.models or MODEL_STAGES
    return given + [name for name in MODEL_STAGES if name in recipe.stages and name in wanted]


def measured_models(run: Run, recipe: Recipe) -> list[MeasuredModel]:
    """Return the models to score; InputError if a stage has left none, or one does not fit the window of the others."""
    checkpoints = {artefact.stage: artefact for artefact in run.artefacts("checkpoint")}
    found = []
    for name in model_names(recipe):
        origin = _given_model(recipe) if name == START else checkpoints.get(name)
        if origin is None:
            raise InputError(f"evaluation: the stage {name} has left no model in {run.path}; run that stage first")
        found.append(MeasuredModel(name, origin))
    check_windows({model.name: ModelConfig.load(model.directory) for model in found}, sessions_of(recipe).window)
    return found


def _given_model(recipe: Recipe) -> Path | None:
    """Return the directory of the model that the first stage starts from, if the recipe names one."""
    tables = (getattr(recipe, stage) for stage in recipe.stages)
    return next((model for table in tables if (model := getattr(table, "model", None)) is not None), None)


def check_windows(configs: Mapping[str, ModelConfig], window: int | None) -> None:
    """Check that all models can be scored in the same window."""
    lengths = {name: config.max_length for name, config in configs.items()}
    if window is None and len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise InputError(f"evaluation: the models have contexts of different lengths ({listed}): set the window")
    for name, length in lengths.items():
        if window is not None and window > length:
            raise InputError(
                f"evaluation: the window of {window:,} tokens exceeds the context of the model {name}, {length:,}: "
                "give a smaller window, or leave this model out of evaluation.models"
            )


def sessions_of(recipe: Recipe) -> RlSettings | EvaluationSessions:
    """Return the settings of sessions, workers and samplers; the recipe checks that they are given once."""
    found = recipe.rl or (recipe.evaluation.sessions if recipe.evaluation else None)
    assert found is not None
    return found


def chosen_tasks(run: Run, evaluation: EvaluationSettings) -> dict[str, dict[str, Task]]:
    """Return the tasks to score by set, each as SET/TASK."""
    return {key: evaluated_tasks(run, name, evaluation.max_tasks) for key, name in evaluation.task_sets().items()}


# ------------------------------------------------------------------------------------------- scoring


@dataclass
class EvaluationProgressLine:
    """The progress of all models together: sessions done, and the time left at the rate since the stage (re)started."""

    report: ProgressCallback
    total: int
    done: int = 0  # sessions of models that are finished
    started: float = field(default_factory=time.monotonic)
    at_start: int | None = None  # sessions that were done before

    def update(self, ready: int, model: str) -> None:
        """Report that `ready` sessions of this model are scored."""
        done = self.done + ready
        if self.at_start is None:
            self.at_start = done
        note, fresh = f"{model}: {ready:,} sessions", done - self.at_start
        if fresh:
            left = (self.total - done) * (time.monotonic() - self.started) / fresh
            note += f", {duration(left)} left"
        self.report(done, self.total, note)


@dataclass
class ModelScoring:
    """The evaluation of one model: its files, its tasks and its settings."""

    run: Run
    recipe: Recipe
    model: MeasuredModel
    tasks: Mapping[str, Mapping[str, Task]]  # by set
    line: EvaluationProgressLine
    layout: RunLayout = field(init=False)

    def __post_init__(self) -> None:
        self.layout = self.run.layout.evaluation_of(self.model.name)
        self.sessions = sessions_of(self.recipe)
        assert self.recipe.evaluation is not None
        self.evaluation = self.recipe.evaluation

    def score(self) -> dict[str, held_out.Evaluation]:
        """Score what is left to score; return the results by set."""
        self.prepare()
        with open_queues(self.layout) as queues:
            queue = queues["evaluation"]
            for name, tasks in self.tasks.items():
                record_scoring(self.run, name, self.model.name, f"{self.model.name}/{self.layout.run_id()}")
                held_out.start(queue, STEP, tasks, samples=self.evaluation.samples_of(name))
            queue.release()
            queue.record_version(STEP, STEP)
            finished = held_out.is_finished(queue, STEP)
        if not finished:
            self.run_services()
        with closing(RolloutQueue.open_read_only(self.layout.evaluations)) as ended:
            self.line.done += held_out.progress(ended, STEP).ready
            results = held_out.results(ended, STEP)
        shutil.rmtree(self.layout.store, ignore_errors=True)  # a copy of the checkpoint
        found = {name: held_out.subset(results, f"{name}/") for name in self.tasks}
        for name, each in found.items():
            if not each.groups:
                task, reason = next(iter(each.dropped.items()))
                raise EtudeError(
                    f"evaluation of {self.model.name}: no task of {name} could be scored; {task}: {reason}"
                )
        return found

    def prepare(self) -> None:
        """Write the files that the processes read: a copy of the model, and the tasks by name."""
        copy_model(self.run, self.model.origin, self.layout)
        copied = json.loads(self.layout.origin.read_text(encoding="utf-8"))["digest"]
        if copied != self.run.parent(self.model.origin).digest:
            raise InputError(
                f"{self.layout.root} holds the evaluation of other weights than {self.model.directory} has now; "
                "remove that directory to score these (the scoring counts as another)"
            )
        write_task_lists(self.layout, {}, {name: task for tasks in self.tasks.values() for name, task in tasks.items()})

    def publish(self) -> None:
        """Publish the weights for the samplers as RL publishes its own, rounded in the same way."""
        store = ObjectStore(self.layout.store)
        if latest(store) is not None:
            return
        weights = self.sessions.weights
        model = load(self.layout.model, dtype=getattr(torch, self.sessions.precision), device="cpu")
        with torch.no_grad(), Publisher(store, run=self.layout.run_id()) as publisher:
            publisher.publish_soon(STEP, published_views(model, getattr(torch, weights.dtype)))
            publisher.flush(self.sessions.stall_s)

    def run_services(self) -> None:
        """Run samplers and workers until every session is scored."""
        dead: list[str] = []  # workers whose slots are not requeued yet

        def on_process_death(name: str, reason: str) -> None:
            with open(self.layout.logs / "deaths.jsonl", "a", encoding="utf-8") as log:
                log.write(json.dumps({"time": time.time(), "name": name, "why": reason}) + "\n")
            if name.startswith(WORKER):
                dead.append(name)

        store = claimed(ObjectStore(self.layout.store), self.layout.run_id(), inside=True)
        layout, cluster = self.layout, self.recipe.cluster or ClusterSettings()
        with (
            store,
            open_cluster(cluster, layout) as machines,
            closing(StatusReader(layout)) as statuses,
            ServiceSupervisor(machines, layout.logs, statuses, on_process_death) as services,
            run_service(services, layout) as client,
        ):
            add_session_services(services, layout, self.sessions, cluster, client.url)
            services.tick()  # they load their libraries while the weights are published
            self.publish()
            self.wait(QueueClient(client, "evaluation", load_queues(layout)["evaluation"]), services, dead)

    def wait(self, queue: QueueClient, services: ServiceSupervisor, dead: list[str]) -> None:
        """Keep the services alive until the evaluation is finished; EtudeError if it makes no progress."""
        watch, changes, finished, waiting_for = held_out.StallWatch(self.sessions.stall_s), -1, False, "the run service"
        watch.restart(time.monotonic())
        state: object = None
        workers = 0  # that the run service knows of: each gets its share of the sessions
        while not finished:
            services.tick()
            with suppress(RunServiceUnavailable):  # it is starting
                while dead:
                    queue.release(dead[-1])
                    dead.pop()
                if workers != (count := services.count(WORKER)):
                    queue.client.report_status(ORCHESTRATOR, workers=count)
                    workers = count
                if (figures := queue.state()).changes != changes:
                    ready, waiting_for = held_out.progress(queue, STEP).ready, figures.waiting_for
                    self.line.update(ready, self.model.name)
                    state = (ready, figures.last_heartbeat)
                    finished, changes = held_out.is_finished(queue, STEP), figures.changes
            if watch.has_stalled(state, time.monotonic()):
                stalled = f"evaluation of {self.model.name}: no progress for {self.sessions.stall_s:g} s"
                raise EtudeError(f"{stalled} ({waiting_for}); its logs are in {self.layout.logs}")
            time.sleep(TICK_S)
