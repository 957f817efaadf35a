"""The orchestrator of the `rl` stage: keeps the service processes alive and the rollout queue filled until the trainer
has taken its steps.

    ten times a second: restart dead processes, requeue lost rollouts, start groups, start an evaluation that is due,
                        copy step facts and evaluation results into the run's metrics

It holds the run's lock and computes nothing itself. If it is killed, the other processes end with it; the same command
with `--resume` continues from the queue, the trainer's newest checkpoint and the checkpoints of rollouts.
"""

import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.cluster.cluster import ServiceSpec
from etude.cluster.launch import open_cluster
from etude.cluster.settings import ClusterSettings
from etude.cluster.supervisor import ServiceSupervisor
from etude.errors import EtudeError, InputError
from etude.evaluation import held_out, statistics
from etude.files import write_atomically
from etude.rl import best_checkpoint, metrics
from etude.rl.curriculum import Curriculum, kind_of
from etude.rl.imitation import check_demonstrations
from etude.rl.run_evaluations import RunEvaluations
from etude.rl.services import SAMPLER, TRAINER, WORKER, add_rl_services
from etude.rl.settings import RlSettings
from etude.rl.sibling_process import read_siblings
from etude.rl.starting_model import copy_checkpoint, make_starting_model
from etude.rl.trainer_process import checkpoints, intact_checkpoints
from etude.rollouts.live_settings import LiveSettings, differing, record_changes
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.queue_client import AnyQueue, QueueClient
from etude.rollouts.queue_reader import IN_FLIGHT_STATES
from etude.rollouts.queue_records import QueueState
from etude.rollouts.run_queues import open_queues
from etude.rollouts.settings import EvaluationSettings, load_queues
from etude.rollouts.worker_client import drain_worker
from etude.runs.address import choose_address
from etude.runs.client import RunClient, RunServiceUnavailable
from etude.runs.layout import RunLayout
from etude.runs.run import Parent, Run
from etude.runs.service_status import ORCHESTRATOR, RUN_SERVICE, StatusReader
from etude.system.clock import MACHINE_CLOCK, Clock
from etude.system.progress import ProgressCallback
from etude.system.terminal import say
from etude.tasks.harbor import find_tasks, read_task
from etude.tasks.task import Task
from etude.train.stages import initial_weights
from etude.weights.object_store import ObjectStore
from etude.weights.owner import claimed

TICK_S = 0.1
STATUS_S = 1.0
SERVED_S = 10.0  # after which the queue is told again what the samplers have
Facts = dict[str, Any]


def run_rl(
    run: Run,
    settings: RlSettings,
    evaluation: EvaluationSettings | None,
    seed: int,
    report: ProgressCallback,
    cluster: ClusterSettings,
) -> Facts:
    """Run asynchronous reinforcement learning to its end; return the facts of the stage's summary."""
    layout = RunLayout(run.path, settings.weights.store)
    tasks = prepare(run, settings, evaluation, layout, seed)
    intact_checkpoints(layout)  # here too, so that the user reads of a damaged one
    check_queues(layout, settings)
    store = claimed(ObjectStore(layout.store), layout.run_id(), inside=not settings.weights.store)
    with (
        store,
        open_cluster(cluster, layout) as machines,
        closing(StatusReader(layout)) as statuses,
        ServiceSupervisor(machines, layout.logs, statuses) as services,
        run_service(services, layout) as client,
    ):
        queues = (QueueClient(client, name, found) for name, found in sorted(load_queues(layout).items()))
        evaluations, queue = queues
        orchestrator = Orchestrator(
            run, settings, layout, queue, evaluations, statuses, tasks, seed, report, evaluation
        )
        services.on_death = orchestrator.on_process_death
        add_rl_services(services, layout, orchestrator.live.settings, cluster, client.url, evaluation)
        orchestrate(orchestrator, services)
    with (
        closing(RolloutQueue.open_read_only(layout.slots)) as ended,
        closing(RolloutQueue.open_read_only(layout.evaluations)) as ended_evaluations,
    ):
        return orchestrator.finish(ended, ended_evaluations)


def orchestrate(orchestrator: "Orchestrator", services: ServiceSupervisor) -> None:
    """Keep the services alive and the queue filled until the run has finished."""
    finished = orchestrator.is_finished(services)
    while not finished:
        services.tick()
        with suppress(RunServiceUnavailable):  # it is starting
            orchestrator.tick(services)
            finished = orchestrator.is_finished(services)
        orchestrator.clock.sleep(TICK_S)


@contextmanager
def run_service(
    services: ServiceSupervisor, layout: RunLayout, open_client: Callable[..., RunClient] = RunClient.beside
) -> Iterator[RunClient]:
    """Have the run service started first and stopped last; give a client that does not wait for it.

    What the orchestrator does not get done in one tick it does in the next.
    """
    layout.statuses.unlink(missing_ok=True)  # of processes that have ended
    address = choose_address(layout, services.cluster.address)
    if not address.is_local and address.url.startswith("http:"):
        say("etude: warning: the run service has no TLS: its token can be read on the network", file=sys.stderr)
    arguments = (str(layout.run), "--root", layout.service_root)
    services.add(ServiceSpec(RUN_SERVICE, "etude.rollouts.run_service", arguments))
    with closing(open_client(layout, patience_s=0)) as client:
        try:
            yield client
        finally:
            services.stop(*(name for name in services.services if name != RUN_SERVICE))


# ------------------------------------------------------------------------------------------ preparing


@dataclass(frozen=True)
class RlTaskSets:
    """The tasks of a run by name: those to train on, and as SET/TASK those that are scored while it runs."""

    train: dict[str, Task]
    held_out: dict[str, Task]


def prepare(
    run: Run, settings: RlSettings, evaluation: EvaluationSettings | None, layout: RunLayout, seed: int
) -> RlTaskSets:
    """Make the model that RL starts from, and write the task lists for the workers."""
    make_starting_model(run, settings.model or initial_weights(run, "rl"), layout, settings.lora, seed)
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
    scored: dict[str, Task] = {}
    for each in evaluation.sets_during_rl().values() if evaluation else ():
        scored |= evaluated_tasks(run, each.tasks, each.max_tasks)
    sets = RlTaskSets(train | new_siblings(layout, train), scored)
    write_task_lists(layout, sets.train, sets.held_out)
    return sets


def new_siblings(layout: RunLayout, tasks: Collection[str]) -> dict[str, Task]:
    """Return the harder siblings that were made and are not among the tasks yet."""
    found = {each.name: each.directory for each in read_siblings(layout).values() if each.name}
    return {name: read_task(Path(directory)) for name, directory in found.items() if name not in tasks}


def write_task_lists(layout: RunLayout, train: Mapping[str, Task], evaluated: Mapping[str, Task]) -> None:
    """Write the tasks by name, for the workers."""
    sets = {"train": train, "held_out": evaluated}
    lists = {split: {name: str(task.directory) for name, task in tasks.items()} for split, tasks in sets.items()}
    write_atomically(layout.tasks, json.dumps(lists))


def evaluated_tasks(run: Run, name: str, max_tasks: int | None) -> dict[str, Task]:
    """Return the tasks of a set that are scored, as SET/TASK: the same ones in the same order for every model."""
    tasks = named_tasks(task_directory(run, name, "evaluation"))
    return {f"{Path(name).name}/{task}": tasks[task] for task in held_out.choose_tasks(tasks, max_tasks)}


def check_queues(layout: RunLayout, settings: RlSettings) -> None:
    """Open the queues before the run service does: requeue what was in flight, refuse one that is not the run's.

    A queue older than the trainer's checkpoint would have prompts trained on again.
    """
    step = max((step for step, _ in checkpoints(layout)), default=0)
    with open_queues(layout) as queues:
        for queue in queues.values():
            queue.release()
        queues["evaluation"].set_lease(None)
        if settings.control != "imitation" and (last := queues["training"].last_step()) < step:
            raise InputError(
                f"{layout.slots} records {last} steps, but the trainer's checkpoint is of step {step}: which "
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


def is_over(services: ServiceSupervisor) -> bool:
    """Return whether the trainer has taken its last step."""
    trainer = services.services.get(TRAINER)
    return trainer is not None and trainer.finished


def sets_of(tasks: Collection[str]) -> dict[str, list[str]]:
    """Return tasks named SET/TASK by their set."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        found.setdefault(task.partition("/")[0], []).append(task)
    return found


def step_identity(facts: Facts) -> tuple[Any, ...]:
    """Return an identity that differs between a step and its repetition after going back to a checkpoint."""
    return facts.get("version"), facts.get("wall_s")


@dataclass
class Orchestrator:
    """The work of every tick, and the state kept between ticks."""

    run: Run
    settings: RlSettings  # of the recipe
    layout: RunLayout
    queue: AnyQueue
    evaluations: AnyQueue
    statuses: StatusReader
    tasks: RlTaskSets
    seed: int
    report: ProgressCallback
    evaluation: EvaluationSettings | None = None  # RL never looks at its test sets
    clock: Clock = MACHINE_CLOCK
    live: LiveSettings[RlSettings] = field(init=False)  # the settings in force
    logged_steps: int = field(init=False)  # steps whose facts are in the metrics
    scoring: RunEvaluations | None = field(init=False, default=None)
    process_deaths: list[str] = field(init=False, default_factory=list)
    dead_workers: list[str] = field(init=False, default_factory=list)  # whose slots are not requeued yet
    logged_deaths: int = field(init=False, default=0)
    last_step_line: str = field(init=False, default="")  # of the progress line
    served: tuple[int | None, int | None] = field(init=False, default=(None, None))  # oldest, newest step of samplers
    served_at: float = field(init=False, default=0.0)
    unplaced: set[str] = field(init=False, default_factory=set)  # services that wait for resources
    evaluating: str = field(init=False, default="")  # which evaluation runs, and how far it is
    judged: object = field(init=False, default=None)  # the evaluations that were judged last
    seen: object = field(init=False, default=None)  # what the last complete tick has seen
    reported_at: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.live = LiveSettings(self.layout, RlSettings)
        kinds = {name: kind_of(task) for name, task in self.tasks.train.items()}
        self.curriculum = Curriculum(kinds, self.seed, self.live.settings.curriculum)
        records = self.run.metrics("rl")
        self.step_records = {record["step"]: record for record in records if not record.get("evaluation")}
        self.step_identities = {step: step_identity(record) for step, record in self.step_records.items()}
        self.logged_steps = max(self.step_records, default=0)
        self._step = 0
        if self.evaluation is not None:
            self.scoring = RunEvaluations(
                self.run,
                self.layout,
                self.settings,
                self.evaluation,
                self.evaluations,
                sets_of(self.tasks.held_out),
                self.statuses.get,
                ObjectStore(self.layout.store),
                lambda: self.live.settings.in_flight,
                self.clock,
            )

    @property
    def step(self) -> int:
        """Policy steps the trainer has taken."""
        if self._step and not self.layout.step_file(self._step).exists():  # the trainer went back to a checkpoint
            self._step = max((int(path.stem) for path in self.layout.steps.glob("[0-9]*.json")), default=0)
        while self.layout.step_file(self._step + 1).exists():
            self._step += 1
        return self._step

    def tick(self, services: ServiceSupervisor) -> None:
        """Do what is to be done; nothing, beside reporting, if nothing has changed since the last tick."""
        step, self.unplaced = self.step, services.unplaced()
        self.release_slots()
        self.apply_changes(services, step)
        state, evaluated = self.queue.state(), self.evaluations.state()
        if self.clock.monotonic() - self.served_at > SERVED_S:
            self.update_served_step()
        seen = (step, state.changes, evaluated.changes, self.sampler_versions())
        if seen != self.seen:
            if "began" not in self.run.facts("rl") and self.samplers_have(0):
                self.run.save_facts("rl", began=self.clock.time())  # the time before was spent loading models
            self.update_served_step()
            self.start_groups(step)
            self.log_steps(step)
            self.seen = seen
        self.evaluate(step, is_over(services), evaluated)
        self.add_siblings()
        self.report_status(step, services, state)

    def evaluate(self, step: int, over: bool, evaluated: QueueState) -> None:
        """Do what the evaluations beside training need; `over` is whether training has ended."""
        if self.scoring is not None:
            self.scoring.tick(step, over, self.logged_steps, evaluated)
            self.judge_validation()

    def apply_changes(self, services: ServiceSupervisor, step: int) -> None:
        """Apply what was changed in the settings since the last tick, and record it with the next policy step.

        The trainer records reward weights, with the step whose groups it scores with them.
        """
        before, now = self.live.settings, self.live.current()
        changed = {key: each for key, each in differing(before, now).items() if key != "rewards"}
        if "curriculum" in changed:
            self.curriculum.change(now.curriculum)
            self.layout.exhausted.unlink(missing_ok=True)
        if "workers" in changed:
            services.set_per_node(WORKER, now.workers)
        if changed:
            record_changes(self.layout, step + 1, changed)
            self.seen = None
        for name in services.retiring():
            if self.statuses.get(name) is not None and isinstance(self.queue, QueueClient):
                drain_worker(self.queue.client, name)

    def update_served_step(self) -> None:
        """Record in the queue the oldest and the newest policy step whose weights a sampler serves.

        Now and then also if they are the same: the trainer may have gone back, or an earlier request arrived last.
        """
        versions = self.sampler_versions()
        steps = [self.queue.step_of(version) for version in versions if version is not None]
        oldest = min(steps, default=None) if len(steps) == len(versions) else self.served[0]
        served, now = (oldest, max(steps, default=None)), self.clock.monotonic()
        if oldest is not None and (served != self.served or now - self.served_at > SERVED_S):
            self.queue.set_served_step(oldest, served[1])
            self.served, self.served_at = served, now

    def add_siblings(self) -> None:
        """Add siblings that were admitted since the last tick to the tasks, the workers' list and the curriculum."""
        if not self.settings.curriculum.siblings or not (new := new_siblings(self.layout, self.tasks.train)):
            return
        self.tasks.train.update(new)
        write_task_lists(self.layout, self.tasks.train, self.tasks.held_out)  # before a worker can claim one
        self.curriculum.set_tasks({name: kind_of(task) for name, task in self.tasks.train.items()})
        self.layout.exhausted.unlink(missing_ok=True)
        self.seen = None

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

    def log_steps(self, step: int) -> None:
        if (valid := self.last_valid_step(step)) < self.logged_steps:  # the trainer went back to a checkpoint
            self.run.rewind("rl", valid)
            self.logged_steps = valid
            if self.scoring is not None:
                self.scoring.forget_after(valid)
        while self.logged_steps < step and (facts := self._step_facts(self.logged_steps + 1)) is not None:
            number = self.logged_steps + 1
            groups = self.queue.groups(facts["groups"])
            previous = self.step_records.get(self.logged_steps)
            services = {name: status.facts for name, status in self.statuses.all().items()}
            values = metrics.step_metrics(groups, number, facts, services, self.queue, previous)
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
        facts = self._step_facts(step)
        return None if facts is None else step_identity(facts)

    def _step_facts(self, step: int) -> Facts | None:
        """Return the facts of a step; None if the trainer went back to a checkpoint meanwhile."""
        try:
            facts: Facts = json.loads(self.layout.step_file(step).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return facts

    def judge_validation(self) -> None:
        """Tell the trainer the scores of evaluated steps, and record that the run ends here if it has collapsed."""
        assert self.scoring is not None
        if self.judged == (logged := (self.scoring.lineage, frozenset(self.scoring.validated()))):
            return
        scores = self.scores()
        best_checkpoint.write_scores(self.layout, scores)
        if reason := best_checkpoint.collapse(self.evaluations, scores, self.settings, self.scoring.validation):
            write_atomically(self.layout.collapsed, reason, durable=True)
        self.judged = logged

    def scores(self) -> dict[int, float]:
        return best_checkpoint.validation_scores(self.run.metrics("rl"))

    def report_status(self, step: int, services: ServiceSupervisor, state: QueueState) -> None:
        """Update the progress line and, every second, the orchestrator's own status."""
        counts = state.counts
        in_flight = sum(counts.get(name, 0) for name in IN_FLIGHT_STATES)
        note = f"{in_flight} in flight, {counts.get('ready', 0)} ready"
        note += f"  {self.last_step_line}" if self.last_step_line else ""
        if "began" not in self.run.facts("rl"):
            note = "trainer and samplers are starting"
        elif self.evaluating:
            note = f"{self.evaluating}  {note}"
        self.report(step, self.settings.steps, note)
        if self.clock.monotonic() - self.reported_at > STATUS_S:
            self.reported_at = self.clock.monotonic()
            scoring = self.scoring.facts() if self.scoring is not None else {}
            self.evaluating = str(scoring.get("evaluates", ""))
            waiting = f"resources: {lacking}" if (lacking := services.waiting_for()) else ""
            facts: Facts = {"counts": counts, "deaths": services.restarts(), "cluster": services.cluster.name}
            facts |= {"workers": services.count(WORKER), "problem": self.live.problem, **scoring}
            self.statuses.report(ORCHESTRATOR, step=step, waiting_for=waiting, **facts)

    def on_process_death(self, name: str, reason: str) -> None:
        """Record the death."""
        self.process_deaths.append(f"{name} {reason}")
        with open(self.layout.logs / "deaths.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps({"time": self.clock.time(), "name": name, "why": reason}) + "\n")
        if name.startswith(WORKER):
            self.dead_workers.append(name)

    def release_slots(self) -> None:
        """Requeue the slots of workers that died, without waiting for their leases to expire."""
        for name in list(self.dead_workers):
            self.queue.release(name)
            self.evaluations.release(name)
            self.dead_workers.remove(name)

    # -------------------------------------------------------------------------------------- finishing

    def is_finished(self, services: ServiceSupervisor) -> bool:
        """Return whether the trainer has finished and its last weights are evaluated, or the run has collapsed."""
        if self.layout.collapsed.exists():
            return True
        if not is_over(services) or self.logged_steps < (step := self.step):
            return False
        return self.scoring is None or not self.scoring.pending(step, over=True)

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
        """Return whether every sampler that serves training has the weights of this step."""
        if (facts := self._step_facts(step) if step else {"version": 0}) is None:
            return False
        return all(loaded is not None and loaded >= facts["version"] for loaded in self.sampler_versions())

    def sampler_versions(self) -> list[int | None]:
        """Return the weight version of each sampler that serves training; None for one that has none yet.

        One that waits for resources does not count, because it will start with the newest version; nor does one that
        is leased to an evaluation, or has been and does not have the newest version again.
        """
        names = [f"{SAMPLER}-{number}" for number in range(self.settings.sampler.count)]
        placed = [name for name in names if name not in self.unplaced]
        lease = self.scoring.lease if self.scoring is not None else None
        leased = lease.samplers if lease is not None and not lease.shared else ()
        found = {name: self.statuses.get(name) for name in placed or names if name not in leased}
        facts = [status.facts if status is not None else {} for status in found.values()]
        return [each.get("version") for each in facts if each.get("leased") is None]

    def finish(self, queue: RolloutQueue, evaluations: RolloutQueue) -> Facts:
        """Save the resulting weights as a checkpoint of the run, and return the facts of the stage's summary.

        The run service has ended: the queues are read from their files.
        """
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
                copy_checkpoint(source, directory, self.run.path)
        facts = metrics.stage_facts(self.run.metrics("rl"), queue, self.process_deaths, step)
        facts |= {"result_step": step, "control": self.settings.control}
        if self.layout.collapsed.exists():
            facts["collapsed"] = self.layout.collapsed.read_text(encoding="utf-8")
            self.report(self.step, self.step, "collapsed")
        elif ended_early and found[-1][0] < self.settings.steps:
            facts["ended_early"] = ended_early
            self.report(step, step, "ended early")
        if self.scoring is not None and {0, step} <= self.scoring.validated() and step:
            name = self.scoring.validation
            before, after = (held_out.results(evaluations, each, name) for each in (0, step))
            facts["rise"] = statistics.compare(before, after)
        return facts
