"""The orchestrator of the `rl` stage: keeps the service processes alive and the rollout queue filled until the trainer
has taken its steps.

    ten times a second: restart dead processes, requeue lost rollouts, start groups, start an evaluation that is due,
                        copy step facts and evaluation results into the run's metrics

It holds the run's lock and computes nothing itself. If it is killed, the other processes end with it; the same command
with `--resume` continues from the queue, the trainer's newest checkpoint and the checkpoints of rollouts.
"""

import json
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.cluster.local import LocalServices
from etude.errors import EtudeError, InputError
from etude.evaluation import held_out, statistics
from etude.evaluation.scorings import record_scoring
from etude.files import write_atomically
from etude.rl import best_checkpoint, metrics
from etude.rl.curriculum import Curriculum, kind_of
from etude.rl.imitation import check_demonstrations
from etude.rl.settings import RlSettings
from etude.rl.sibling_process import read_siblings
from etude.rl.trainer_process import checkpoints, intact_checkpoints
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import EvaluationSettings, evaluation_queue
from etude.runs.copy_stages import link_or_copy
from etude.runs.layout import RunLayout
from etude.runs.run import Artefact, Parent, Run
from etude.runs.service_status import read_statuses, write_status
from etude.system.progress import ProgressCallback
from etude.tasks.harbor import find_tasks, read_task
from etude.tasks.task import Task
from etude.train.stages import initial_weights
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed

TICK_S = 0.1
RECONCILE_S = 1.0  # leases are long
Facts = dict[str, Any]


def run_rl(
    run: Run, settings: RlSettings, evaluation: EvaluationSettings | None, seed: int, report: ProgressCallback
) -> Facts:
    """Run asynchronous reinforcement learning to its end; return the facts of the stage's summary."""
    layout = RunLayout(run.path, settings.weights.store)
    tasks = prepare(run, settings, evaluation, layout)
    with open_queues(layout, settings, evaluation) as (queue, evaluations):
        intact_checkpoints(layout)  # here too, so that the user reads of a damaged one
        if settings.control != "imitation":
            check_queue_matches_checkpoint(layout, queue)
        queue.release()
        evaluations.release()
        orchestrator = Orchestrator(run, settings, layout, queue, evaluations, tasks, seed, report, evaluation)
        store = claimed(ObjectStore(layout.store), layout.run_id(), inside=not settings.weights.store)
        with store, mark_services_ended(layout), LocalServices(layout, orchestrator.on_process_death) as services:
            services.add("trainer", "etude.rl.trainer_process", finishes=True)
            for number in range(settings.sampler.count):
                name = f"sampler-{number}"
                services.add(name, "etude.inference.sampler_process", "--name", name)
            for number in range(settings.workers):
                name = f"worker-{number}"
                services.add(name, "etude.rollouts.worker", "--name", name)
            if settings.curriculum.siblings:
                services.add("siblings", "etude.rl.sibling_process")
            while not orchestrator.is_finished(services):
                services.tick()
                orchestrator.tick(services)
                time.sleep(TICK_S)
        return orchestrator.finish()


@contextmanager
def open_queues(
    layout: RunLayout, settings: RlSettings, evaluation: EvaluationSettings | None
) -> Iterator[tuple[RolloutQueue, RolloutQueue]]:
    """Open the rollout queues of training and of evaluation."""
    samples = evaluation.validation_samples if evaluation else 1
    try:
        queue = RolloutQueue(layout.slots, settings)
        evaluations = RolloutQueue(layout.evaluations, evaluation_queue(settings, samples))
    except sqlite3.DatabaseError as error:
        files = f"{layout.slots.name} and {layout.evaluations.name}"
        raise InputError(f"{layout.root}: {files}: {error}; restore them, or start another run") from error
    with closing(queue), closing(evaluations):
        yield queue, evaluations


@contextmanager
def mark_services_ended(layout: RunLayout) -> Iterator[None]:
    """When the stage ends, however that happens, mark the status of every service as ended."""
    try:
        yield
    finally:
        for name, status in read_statuses(layout).items():
            write_status(layout, name, **{**status, "state": "ended", "waiting_for": ""})


# ------------------------------------------------------------------------------------------ preparing


@dataclass(frozen=True)
class RlTaskSets:
    """The tasks of a run by name: those to train on, and those of the validation set."""

    train: dict[str, Task]
    held_out: dict[str, Task]


def prepare(run: Run, settings: RlSettings, evaluation: EvaluationSettings | None, layout: RunLayout) -> RlTaskSets:
    """Copy the model that RL starts from into the run, and write the task lists for the workers."""
    copy_model(run, settings.model or initial_weights(run, "rl"), layout)
    train = named_tasks(task_directory(run, settings.tasks, "rl.tasks"))
    needed = settings.steps * settings.groups_per_step
    if settings.control == "imitation":
        check_demonstrations(layout)
    elif len(train) * settings.curriculum.reuse < needed:
        times = "once" if settings.curriculum.reuse == 1 else f"at most {settings.curriculum.reuse} times"
        raise InputError(
            f"rl.tasks has {len(train)} prompts, but {settings.steps} steps of {settings.groups_per_step} groups need "
            f"{needed}, and a prompt is trained on {times}: give more tasks or fewer steps"
        )
    validation: dict[str, Task] = {}
    if evaluation:
        validation = evaluated_tasks(run, evaluation.validation, evaluation.max_tasks)
    sets = RlTaskSets(train | new_siblings(layout, train), validation)
    write_task_lists(layout, sets.train, sets.held_out)
    return sets


def new_siblings(layout: RunLayout, tasks: Collection[str]) -> dict[str, Task]:
    """Return the harder siblings that were made and are not among the tasks yet."""
    found = {each.name: each.directory for each in read_siblings(layout).values() if each.name}
    return {name: read_task(Path(directory)) for name, directory in found.items() if name not in tasks}


def copy_model(run: Run, origin: Artefact | Path, layout: RunLayout) -> None:
    """Make the directory that a set of processes shares, with a copy of the model it starts from."""
    layout.make()
    if not layout.id.exists():
        write_atomically(layout.id, uuid.uuid4().hex, durable=True)
    if not layout.model.is_dir():
        source = origin if isinstance(origin, Path) else origin.path
        write_atomically(layout.origin, json.dumps(asdict(run.parent(origin))))
        draft = layout.root / ".model.making"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(source, draft, copy_function=link_or_copy, ignore=shutil.ignore_patterns("optimizer.*"))
        draft.rename(layout.model)


def write_task_lists(layout: RunLayout, train: Mapping[str, Task], evaluated: Mapping[str, Task]) -> None:
    """Write the tasks by name, for the workers."""
    sets = {"train": train, "held_out": evaluated}
    lists = {split: {name: str(task.directory) for name, task in tasks.items()} for split, tasks in sets.items()}
    write_atomically(layout.tasks, json.dumps(lists))


def evaluated_tasks(run: Run, name: str, max_tasks: int | None) -> dict[str, Task]:
    """Return the tasks of a set that are scored, as SET/TASK: the same ones in the same order for every model."""
    tasks = named_tasks(task_directory(run, name, "evaluation"))
    return {f"{Path(name).name}/{task}": tasks[task] for task in held_out.choose_tasks(tasks, max_tasks)}


def check_queue_matches_checkpoint(layout: RunLayout, queue: RolloutQueue) -> None:
    """Refuse a queue that is older than the trainer's checkpoint: prompts would be trained on again."""
    step = max((step for step, _ in checkpoints(layout)), default=0)
    if queue.last_step() < step:
        raise InputError(
            f"{layout.slots} records {queue.last_step()} steps, but the trainer's checkpoint is of step {step}: which "
            "prompts were used is lost; restore the file, or start another run from that checkpoint"
        )


def task_directory(run: Run, name: str, key: str) -> Path:
    """Return the directory of a task set: one of this run by name, or any directory by absolute path."""
    if os.path.isabs(name):
        return Path(name)
    sets = {artefact.name.removeprefix("tasks-"): artefact.path for artefact in run.artefacts("tasks")}
    if name not in sets:
        raise InputError(f"{key}: this run has no tasks {name!r}; build them in [[tasks.build]] or give a path")
    return sets[name]


def named_tasks(directory: Path) -> dict[str, Task]:
    """Return the tasks below a directory, by their relative path."""
    tasks = {path.relative_to(directory).as_posix(): read_task(path) for path in find_tasks(directory)}
    if not tasks:
        raise InputError(f"{directory}: there are no tasks; expected directories with a task.toml")
    return tasks


# ------------------------------------------------------------------------------------------ orchestrating


def step_identity(facts: Facts) -> tuple[Any, ...]:
    """Return an identity that differs between a step and its repetition after going back to a checkpoint."""
    return facts.get("version"), facts.get("wall_s")


@dataclass
class Orchestrator:
    """The work of every tick, and the state kept between ticks."""

    run: Run
    settings: RlSettings
    layout: RunLayout
    queue: RolloutQueue
    evaluations: RolloutQueue
    tasks: RlTaskSets
    seed: int
    report: ProgressCallback
    evaluation: EvaluationSettings | None = None  # RL looks at its validation set only
    logged_steps: int = field(init=False)  # steps whose facts are in the metrics
    logged_evaluations: set[int] = field(init=False)  # steps whose evaluation is in the metrics
    process_deaths: list[str] = field(init=False, default_factory=list)
    logged_deaths: int = field(init=False, default=0)
    last_step_line: str = field(init=False, default="")  # of the progress line
    served_step: int | None = field(init=False, default=None)  # the step whose weights all samplers have
    judged: object = field(init=False, default=None)  # the evaluations that were judged last

    def __post_init__(self) -> None:
        kinds = {name: kind_of(task) for name, task in self.tasks.train.items()}
        self.curriculum = Curriculum(kinds, self.seed, self.settings.curriculum)
        records = self.run.metrics("rl")
        self.logged_evaluations = {record["step"] for record in records if record.get("evaluation")}
        self.step_records = {record["step"]: record for record in records if not record.get("evaluation")}
        self.step_identities = {step: step_identity(record) for step, record in self.step_records.items()}
        self.logged_steps = max(self.step_records, default=0)
        self._lineage = -1  # of the evaluations that were checked last
        self._reconciled_at = 0.0

    @property
    def step(self) -> int:
        """Policy steps the trainer has taken."""
        return max((int(path.stem) for path in self.layout.steps.glob("[0-9]*.json")), default=0)

    def tick(self, services: LocalServices) -> None:
        step = self.step
        if time.monotonic() - self._reconciled_at > RECONCILE_S:
            self.queue.reconcile(time.time(), step)
            held_out.reconcile(self.evaluations, time.time())
            self._reconciled_at = time.monotonic()
        if "began" not in self.run.facts("rl") and self.samplers_have(0):
            self.run.save_facts("rl", began=time.time())  # the time before was spent loading models
        self.start_due_evaluation(step)
        self.update_served_step()
        self.add_siblings()
        self.start_groups(step)
        self.log_steps(step)
        self.log_evaluations()
        self.judge_validation()
        self.report_status(step, services)

    def update_served_step(self) -> None:
        """Record in the queue the oldest policy step whose weights a sampler still serves."""
        steps = [self.queue.step_of(version) for version in self.sampler_versions() if version is not None]
        if len(steps) == self.settings.sampler.count and min(steps) != self.served_step:
            self.served_step = min(steps)
            self.queue.set_served_step(self.served_step)

    def add_siblings(self) -> None:
        """Add siblings that were admitted since the last tick to the tasks, the workers' list and the curriculum."""
        if not self.settings.curriculum.siblings or not (new := new_siblings(self.layout, self.tasks.train)):
            return
        self.tasks.train.update(new)
        write_task_lists(self.layout, self.tasks.train, self.tasks.held_out)  # before a worker can claim one
        kinds = {name: kind_of(task) for name, task in self.tasks.train.items()}
        self.curriculum = Curriculum(kinds, self.seed, self.settings.curriculum)
        self.layout.exhausted.unlink(missing_ok=True)

    def start_groups(self, step: int) -> None:
        """Start as many groups as may be outstanding.

        With max_staleness = 0 none starts before the samplers have the weights of the last step: this is how the
        asynchronous loop becomes synchronous.
        """
        if self.settings.control == "imitation":
            return
        trained = self.queue.last_step()  # briefly larger than `step`, until the step's facts are written
        fresh = trained == step and self.samplers_have(step)
        wanted = self.queue.groups_to_start(fresh=fresh, steps_left=self.settings.steps - max(step, trained))
        if not wanted:
            return
        draw = self.curriculum.next(self.queue, wanted, step / self.settings.steps)
        self.queue.add(draw.prompts, max_uses=self.settings.curriculum.reuse)
        if draw.missing and not draw.waiting:
            reason = self.curriculum.exhausted(self.queue) or "no prompt is left"
            write_atomically(self.layout.exhausted, reason)

    def start_due_evaluation(self, step: int) -> None:
        """Start the evaluation before the first step, or a periodic one. `is_finished` starts the last one."""
        evaluation = self.evaluation
        if evaluation is None:
            return
        due = step - step % evaluation.every if evaluation.every else 0
        if due >= self.settings.steps or due in held_out.started(self.evaluations):
            return
        if due == 0 or self.samplers_have(due):
            self.start_evaluation(due)
            if due and not self.layout.step_file(due).exists():  # the trainer went back to a checkpoint meanwhile
                held_out.discard_later(self.evaluations, due - 1)

    def start_evaluation(self, step: int) -> None:
        """Start a validation, and record that the set is scored."""
        assert self.evaluation is not None
        key = f"rl/{self.evaluations.lineage()}/{step}"
        record_scoring(self.run, Path(self.evaluation.validation).name, f"rl step {step}", key)
        held_out.start(self.evaluations, step, sorted(self.tasks.held_out))

    def log_steps(self, step: int) -> None:
        if (valid := self.last_valid_step(step)) < self.logged_steps:  # the trainer went back to a checkpoint
            self.run.rewind("rl", valid)
            self.logged_steps = valid
            self.logged_evaluations = {logged for logged in self.logged_evaluations if logged <= valid}
        while self.logged_steps < step:
            number = self.logged_steps + 1
            facts = json.loads(self.layout.step_file(number).read_text(encoding="utf-8"))
            groups = self.queue.groups(facts["groups"])
            previous = self.step_records.get(self.logged_steps)
            values = metrics.step_metrics(groups, number, facts, read_statuses(self.layout), self.queue, previous)
            values |= self.curriculum.facts(self.queue)
            values["infrastructure/deaths"] = len(self.process_deaths) - self.logged_deaths
            self.logged_deaths = len(self.process_deaths)
            self.step_records = {number: values}
            self.step_identities[number] = step_identity(facts)
            self.run.log("rl", number, **values)
            self.last_step_line = metrics.progress_line(values)
            self.logged_steps = number

    def last_valid_step(self, step: int) -> int:
        """Return the last logged step that is the one the trainer took.

        After going back to a checkpoint the trainer may already have taken a step of the same number again.
        """
        last = min(step, self.logged_steps)
        while last and self.step_identities.get(last) != self._recorded_identity(last):
            last -= 1
        return last

    def _recorded_identity(self, step: int) -> tuple[Any, ...] | None:
        try:
            return step_identity(json.loads(self.layout.step_file(step).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def unlog_lost_evaluations(self) -> None:
        """Remove the records of evaluations of weights that were lost when the trainer went back to a checkpoint."""
        if self._lineage == (lineage := self.evaluations.lineage()):
            return
        lost = {step for step in self.logged_evaluations if not held_out.is_finished(self.evaluations, step)}
        if lost:
            self.run.remove_metrics("rl", lambda record: bool(record.get("evaluation")) and record["step"] in lost)
        self.logged_evaluations -= lost
        self._lineage = lineage

    def log_evaluations(self) -> None:
        self.unlog_lost_evaluations()
        for step in held_out.started(self.evaluations):
            if step in self.logged_evaluations or step > self.logged_steps:
                continue
            if held_out.is_finished(self.evaluations, step):
                results = held_out.results(self.evaluations, step)
                self.run.log("rl", step, evaluation=True, **statistics.summarise(results))
                self.logged_evaluations.add(step)

    def judge_validation(self) -> None:
        """Tell the trainer the scores of evaluated steps, and record that the run ends here if it has collapsed."""
        if self.judged == (logged := (self._lineage, frozenset(self.logged_evaluations))):
            return
        self.judged, scores = logged, self.scores()
        best_checkpoint.write_scores(self.layout, scores)
        if reason := best_checkpoint.collapse(self.evaluations, scores, self.settings):
            write_atomically(self.layout.collapsed, reason, durable=True)

    def scores(self) -> dict[int, float]:
        return best_checkpoint.validation_scores(self.run.metrics("rl"))

    def report_status(self, step: int, services: LocalServices) -> None:
        """Update the progress line and the orchestrator's own status."""
        counts = self.queue.counts()
        in_flight = sum(counts.get(state, 0) for state in ("starting", "running", "grading"))
        note = f"{in_flight} in flight, {counts.get('ready', 0)} ready"
        note += f"  {self.last_step_line}" if self.last_step_line else ""
        if "began" not in self.run.facts("rl"):
            note = "trainer and samplers are starting"
        elif evaluating := self.evaluation_progress():
            note = f"{evaluating}  {note}"
        self.report(step, self.settings.steps, note)
        write_status(self.layout, "orchestrator", step=step, counts=counts, deaths=services.restarts())

    def evaluation_progress(self) -> str:
        """Describe the progress of a running evaluation; "" if there is none."""
        evaluation = self.evaluation
        steps = [step for step in held_out.started(self.evaluations) if step not in self.logged_evaluations]
        if evaluation is None or not steps:
            return ""
        counts = self.evaluations.counts()
        left = sum(count for state, count in counts.items() if state not in ("ready", "trained", "dropped"))
        total = len(steps) * len(self.tasks.held_out) * evaluation.validation_samples
        return f"evaluated {max(0, total - left)} of {total}"

    def on_process_death(self, name: str, reason: str) -> None:
        """Record the death, and requeue a worker's slots at once."""
        self.process_deaths.append(f"{name} {reason}")
        with open(self.layout.logs / "deaths.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps({"time": time.time(), "name": name, "why": reason}) + "\n")
        if name.startswith("worker"):
            self.queue.release(name)
            self.evaluations.release(name)

    # -------------------------------------------------------------------------------------- finishing

    def is_finished(self, services: LocalServices) -> bool:
        """Return whether the trainer has finished and its last weights are evaluated, or the run has collapsed."""
        if self.layout.collapsed.exists():
            return True
        trainer = services.services.get("trainer")
        if trainer is None or not trainer.finished:
            return False
        step = self.step
        if self.logged_steps < step:
            return False
        if self.evaluation is None:
            return True
        if step not in held_out.started(self.evaluations) and self.samplers_have(step):
            self.start_evaluation(step)
        return step in self.logged_evaluations

    def result(self, saved: dict[int, Path]) -> tuple[int, Path]:
        """Return the step and the directory of the stage's model: the best on validation, or the last."""
        last = max(saved)
        if self.settings.keep_best or self.layout.collapsed.exists():
            choices = {0: self.layout.model, **saved}
            scores = {step: score for step, score in self.scores().items() if step in choices}
            best = best_checkpoint.best_step(scores)
            return (last, saved[last]) if best is None else (best, choices[best])
        return last, saved[last]

    def samplers_have(self, step: int) -> bool:
        """Return whether every sampler has the weights of this step: the last evaluation is of exactly those."""
        try:
            version = json.loads(self.layout.step_file(step).read_text())["version"] if step else 0
        except FileNotFoundError:  # the trainer went back to a checkpoint
            return False
        return all(loaded is not None and loaded >= version for loaded in self.sampler_versions())

    def sampler_versions(self) -> list[int | None]:
        """Return the weight version of each sampler; None for one that has none yet."""
        statuses = read_statuses(self.layout)
        names = (f"sampler-{number}" for number in range(self.settings.sampler.count))
        return [statuses.get(name, {}).get("version") for name in names]

    def finish(self) -> Facts:
        """Save the resulting weights as a checkpoint of the run, and return the facts of the stage's summary."""
        found = checkpoints(self.layout)
        note = self.layout.exhausted
        ended_early = note.read_text(encoding="utf-8") if note.exists() else ""
        if not found:
            reason = ended_early or "the trainer ended before its first step"
            raise EtudeError(f"{self.layout.trainer}: no checkpoint: {reason}")
        step, source = self.result(dict(found))
        if not any(artefact.name == f"rl-{step}" for artefact in self.run.artefacts("checkpoint")):
            origin = Parent(**json.loads(self.layout.origin.read_text(encoding="utf-8")))
            with self.run.checkpoint("rl", step, parents=[origin]) as directory:
                ignored = shutil.ignore_patterns("optimizer.*", "training.json")
                shutil.copytree(source, directory, dirs_exist_ok=True, ignore=ignored, copy_function=link_or_copy)
        facts = metrics.stage_facts(self.run.metrics("rl"), self.queue, self.process_deaths, step)
        facts |= {"result_step": step, "control": self.settings.control}
        if self.layout.collapsed.exists():
            facts["collapsed"] = self.layout.collapsed.read_text(encoding="utf-8")
            self.report(self.step, self.step, "collapsed")
        elif ended_early and found[-1][0] < self.settings.steps:
            facts["ended_early"] = ended_early
            self.report(step, step, "ended early")
        if {0, step} <= self.logged_evaluations and step:
            before, after = (held_out.results(self.evaluations, each) for each in (0, step))
            facts["rise"] = statistics.compare(before, after)
        return facts
