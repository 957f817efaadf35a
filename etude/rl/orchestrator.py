"""The stage `rl`: keep the processes alive and the table full until the trainer has taken its steps.

    every tenth of a second: start what died, queue what was lost, begin groups, begin a measurement that is due,
                             write into the run's metrics what the others left

It holds the run's lock and computes nothing itself. Kill it, and the others end with it; the same command with
`--resume` goes on from the table, the trainer's newest checkpoint and the rollouts' own.
"""

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from etude.cluster.local import Services
from etude.errors import EtudeError, InputError
from etude.evaluation import held_out as evaluate
from etude.recipe.recipe import Recipe
from etude.recipe.sections import RlStage
from etude.rl import metrics as observe
from etude.rl.curriculum import Curriculum, kind_of
from etude.rl.settings import evaluation_plan, plan_of
from etude.rl.trainer_process import checkpoints
from etude.rollouts.queue import Slots
from etude.runs.layout import Place, statuses, write_status, write_whole
from etude.runs.run import Parent, Run
from etude.system.progress import Report
from etude.tasks.harbor import find_tasks, read_task
from etude.tasks.task import Task
from etude.train.stages import origin_of

POLL_S = 0.1
Facts = dict[str, Any]


def rl(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Asynchronous reinforcement learning."""
    section = recipe.rl
    assert section is not None  # the recipe checks that every stage it names has its section
    place = Place(run.path, section.weights.store)
    tasks = prepare(run, section, place)
    with tables(place, section) as (slots, evaluations):
        check_ledger(place, slots)
        slots.release()
        evaluations.release()
        care = Care(run, section, place, slots, evaluations, tasks, recipe.seed, report)
        with all_ended(place), Services(place, care.mourn) as services:
            services.add("trainer", "etude.rl.trainer_process", ends=True)
            for number in range(section.sampler.count):
                services.add(f"sampler-{number}", "etude.inference.sampler_process", "--name", f"sampler-{number}")
            for number in range(section.workers):
                services.add(f"worker-{number}", "etude.rollouts.worker", "--name", f"worker-{number}")
            while not care.over(services):
                services.tend()
                care.look_after(services)
                time.sleep(POLL_S)
        return care.finish()


@contextmanager
def tables(place: Place, section: RlStage) -> Iterator[tuple[Slots, Slots]]:
    """Those of rollouts to train on and to measure with."""
    try:
        slots, evaluations = Slots(place.slots, plan_of(section)), Slots(place.evaluations, evaluation_plan(section))
    except sqlite3.DatabaseError as error:
        what = f"{place.slots.name} and {place.evaluations.name}"
        raise InputError(f"{place.root}: {what}: {error}; put them back as they were, or begin another run") from error
    with closing(slots), closing(evaluations):
        yield slots, evaluations


@contextmanager
def all_ended(place: Place) -> Iterator[None]:
    """However the stage ends, its processes end with it, and their status says so."""
    try:
        yield
    finally:
        for name, told in statuses(place).items():
            write_status(place, name, **{**told, "state": "ended", "waiting_for": ""})


# ------------------------------------------------------------------------------------------- beginning


@dataclass(frozen=True)
class TaskSets:
    """What is learned from, and what is measured with, by name."""

    train: dict[str, Task]
    held_out: dict[str, Task]


def prepare(run: Run, section: RlStage, place: Place) -> TaskSets:
    """The run's own copy of the model it begins with, and the list of its tasks."""
    place.make()
    if not place.model.is_dir():
        origin = section.model or origin_of(run, "rl")
        source = origin if isinstance(origin, Path) else origin.path
        write_whole(place.origin, json.dumps(asdict(run.parent(origin))))
        making = place.root / ".model.making"
        shutil.rmtree(making, ignore_errors=True)
        shutil.copytree(source, making, copy_function=_link_or_copy, ignore=shutil.ignore_patterns("optimizer.*"))
        making.rename(place.model)
    train = named_tasks(task_directory(run, section.tasks, "rl.tasks"))
    needed = section.steps * section.groups_per_step
    if len(train) < needed:
        raise InputError(
            f"rl.tasks has {len(train)} prompts, but {section.steps} steps of {section.groups_per_step} groups take "
            f"{needed}, and a prompt is trained on once: give more tasks or fewer steps"
        )
    held_out: dict[str, Task] = {}
    if section.evaluation:
        for name in section.evaluation.tasks:
            tasks = named_tasks(task_directory(run, name, "rl.evaluation.tasks"))
            chosen = evaluate.choose_tasks(tasks, section.evaluation.most)
            label = f"{Path(name).name}/" if len(section.evaluation.tasks) > 1 else ""
            held_out |= {f"{label}{task}": tasks[task] for task in chosen}
    found = {"train": train, "held_out": held_out}
    lists = {split: {name: str(task.directory) for name, task in tasks.items()} for split, tasks in found.items()}
    write_whole(place.tasks, json.dumps(lists))
    return TaskSets(train, held_out)


def check_ledger(place: Place, slots: Slots) -> None:
    """What a checkpoint has learned from stands in the table before it: without that, prompts would be used again."""
    step = max((step for step, _ in checkpoints(place)), default=0)
    if slots.last_step() < step:
        raise InputError(
            f"{place.slots} knows of {slots.last_step()} steps, but the trainer's checkpoint is of step {step}: which "
            "prompts were used is lost; put the table back, or begin another run from that checkpoint"
        )


def task_directory(run: Run, name: str, key: str) -> Path:
    """A set of tasks of this run by its name, or a directory of them."""
    if os.path.isabs(name):
        return Path(name)
    sets = {artefact.name.removeprefix("tasks-"): artefact.path for artefact in run.artefacts("tasks")}
    if name not in sets:
        raise InputError(f"{key}: this run has no tasks {name!r}; build them in [[tasks.build]] or give a path")
    return sets[name]


def named_tasks(directory: Path) -> dict[str, Task]:
    """The tasks below a directory, by their place in it."""
    tasks = {path.relative_to(directory).as_posix(): read_task(path) for path in find_tasks(directory)}
    if not tasks:
        raise InputError(f"{directory}: there are no tasks; expected directories with a task.toml")
    return tasks


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


# ------------------------------------------------------------------------------------------- going on


def mark(facts: Facts) -> tuple[Any, ...]:
    """By what a step is told from another of the same number, in the trainer's own words and in the metrics."""
    return facts.get("version"), facts.get("wall_s")


@dataclass
class Care:
    """What the orchestrator does again and again, and what it knows from one time to the next."""

    run: Run
    section: RlStage
    place: Place
    slots: Slots
    evaluations: Slots
    tasks: TaskSets
    seed: int
    report: Report
    logged: int = field(init=False)  # steps whose facts are in the metrics
    measured: set[int] = field(init=False)  # measurements whose results are
    problems: list[str] = field(init=False, default_factory=list)  # deaths of processes
    told: int = field(init=False, default=0)  # of those, how many are in the metrics
    lately: str = field(init=False, default="")  # how the last step went
    served: int | None = field(init=False, default=None)  # the step whose weights all samplers have

    def __post_init__(self) -> None:
        table = self.section.curriculum
        kinds = {name: kind_of(task) for name, task in self.tasks.train.items()}
        self.curriculum = Curriculum(kinds, self.seed, table.hard_after, table.hard_weight)
        records = self.run.metrics("rl")
        self.measured = {record["step"] for record in records if record.get("evaluation")}
        self.logged = max((record["step"] for record in records if not record.get("evaluation")), default=0)
        self.lines = {record["step"]: record for record in records if not record.get("evaluation")}
        self.marks = {step: mark(record) for step, record in self.lines.items()}
        self._reconciled = 0.0

    @property
    def step(self) -> int:
        """Steps the trainer has taken."""
        return max((int(path.stem) for path in self.place.steps.glob("[0-9]*.json")), default=0)

    def look_after(self, services: Services) -> None:
        step = self.step
        if time.monotonic() - self._reconciled > 1.0:  # leases are long
            self.slots.reconcile(time.time(), step)
            evaluate.upkeep(self.evaluations, time.time())
            self._reconciled = time.monotonic()
        if "began" not in self.run.facts("rl") and self.caught_up(0):
            self.run.keep("rl", began=time.time())  # what came before is loading models
        self.begin_measurement(step)
        self.see_samplers()
        self.fill(step)
        self.log_steps(step)
        self.log_measurements()
        self.say(step, services)

    def see_samplers(self) -> None:
        """Have the table know how old at most is what begins now."""
        have = [self.slots.step_of(version) for version in self.sampled() if version is not None]
        if len(have) == self.section.sampler.count and min(have) != self.served:
            self.served = min(have)
            self.slots.serve(self.served)

    def fill(self, step: int) -> None:
        """Begin as many groups as may be under way. Where no token may be older than the trainer, none may before the
        samplers have the weights of the last step: this is how asynchronous becomes synchronous."""
        marked = self.slots.last_step()  # a moment before its facts are written
        left = (self.section.steps - max(step, marked)) * self.section.groups_per_step - self.slots.outstanding()
        fresh = marked == step and self.caught_up(step)
        wanted = min(self.slots.wanted(fresh=fresh), left)
        if wanted <= 0:
            return
        draw = self.curriculum.next(self.slots, wanted, step / self.section.steps)
        self.slots.add(draw.prompts)
        if draw.missing:
            write_whole(self.place.root / "exhausted", self.curriculum.over(self.slots) or "no prompt is left")

    def begin_measurement(self, step: int) -> None:
        """Before the first step and every so many; the last one is begun when the trainer has ended."""
        table = self.section.evaluation
        if table is None:
            return
        due = step - step % table.every if table.every else 0
        if due < self.section.steps and due not in evaluate.begun(self.evaluations):
            evaluate.begin(self.evaluations, due, sorted(self.tasks.held_out))

    def log_steps(self, step: int) -> None:
        if (kept := self.still_taken(step)) < self.logged:  # the trainer went back to a checkpoint
            self.run.rewind("rl", kept)
            self.logged = kept
            self.measured = {measured for measured in self.measured if measured <= kept}
        while self.logged < step:
            path = self.place.steps / f"{self.logged + 1:06d}.json"
            facts = json.loads(path.read_text(encoding="utf-8"))
            groups = self.slots.groups(facts["groups"])
            before = self.lines.get(self.logged)
            values = observe.step_facts(groups, self.logged + 1, facts, statuses(self.place), self.slots, before)
            values["infrastructure/deaths"], self.told = len(self.problems) - self.told, len(self.problems)
            self.lines = {self.logged + 1: values}
            self.marks[self.logged + 1] = mark(facts)
            self.run.log("rl", self.logged + 1, **values)
            self.lately = observe.line(values)
            self.logged += 1

    def still_taken(self, step: int) -> int:
        """The last step in the metrics that is the one the trainer took: back at a checkpoint it may have taken a step
        of the same number again before anybody looked."""
        last = min(step, self.logged)
        while last and self.marks.get(last) != self.mark_of(last):
            last -= 1
        return last

    def mark_of(self, step: int) -> tuple[Any, ...] | None:
        try:
            return mark(json.loads((self.place.steps / f"{step:06d}.json").read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None

    def log_measurements(self) -> None:
        for step in evaluate.begun(self.evaluations):
            if step not in self.measured and step <= self.logged and evaluate.finished(self.evaluations, step):
                found = evaluate.results(self.evaluations, step)
                self.run.log("rl", step, evaluation=True, **evaluate.summarise(found), **self.by_set(found))
                self.measured.add(step)

    def by_set(self, found: evaluate.Evaluation) -> Facts:
        """Where several sets are measured with, each by itself."""
        table = self.section.evaluation
        sets = [Path(name).name for name in table.tasks] if table and len(table.tasks) > 1 else []
        parts = {name: evaluate.summarise(evaluate.part(found, f"{name}/")) for name in sets}
        kept = ("tasks", "solved", "solved_low", "solved_high", f"best/{table.samples if table else 1}")
        return {f"set/{name}/{key}": part[key] for name, part in parts.items() for key in kept if key in part}

    def say(self, step: int, services: Services) -> None:
        """One line for whoever watches, and one for the status."""
        counts = self.slots.counts()
        flying = sum(counts.get(state, 0) for state in ("starting", "running", "grading"))
        note = f"{flying} in flight, {counts.get('ready', 0)} ready"
        note += f"  {self.lately}" if self.lately else ""
        if "began" not in self.run.facts("rl"):
            note = "trainer and samplers are starting"
        elif measuring := self.measuring():
            note = f"{measuring}  {note}"
        self.report(step, self.section.steps, note)
        write_status(self.place, "orchestrator", step=step, counts=counts, deaths=services.deaths())

    def measuring(self) -> str:
        """How far a measurement is that goes on."""
        table = self.section.evaluation
        begun = [step for step in evaluate.begun(self.evaluations) if step not in self.measured]
        if table is None or not begun:
            return ""
        counts = self.evaluations.counts()
        left = sum(count for state, count in counts.items() if state not in ("ready", "trained"))
        total = len(begun) * len(self.tasks.held_out) * table.samples
        return f"measured {max(0, total - left)} of {total}"

    def mourn(self, name: str, why: str) -> None:
        """A process died: what it held is queued at once."""
        self.problems.append(f"{name} {why}")
        with open(self.place.logs / "deaths.jsonl", "a", encoding="utf-8") as log:
            log.write(json.dumps({"time": time.time(), "name": name, "why": why}) + "\n")
        if name.startswith("worker"):
            self.slots.release(name)
            self.evaluations.release(name)

    # --------------------------------------------------------------------------------------- ending

    def over(self, services: Services) -> bool:
        """Whether the trainer has ended and everything it should be measured by is."""
        trainer = services.all.get("trainer")
        if trainer is None or not trainer.ended:
            return False
        step = self.step
        if self.logged < step:
            return False
        if self.section.evaluation is None:
            return True
        if step not in evaluate.begun(self.evaluations) and self.caught_up(step):
            evaluate.begin(self.evaluations, step, sorted(self.tasks.held_out))
        return step in self.measured

    def caught_up(self, step: int) -> bool:
        """Whether every sampler has the weights of this step: the last measurement is of those and no others."""
        version = json.loads((self.place.steps / f"{step:06d}.json").read_text())["version"] if step else 0
        return all(each is not None and each >= version for each in self.sampled())

    def sampled(self) -> list[int | None]:
        """The version that each sampler has; None for one that has none yet."""
        told = statuses(self.place)
        return [told.get(f"sampler-{number}", {}).get("version") for number in range(self.section.sampler.count)]

    def finish(self) -> Facts:
        """The last weights as a checkpoint of the run, and the facts worth telling."""
        found = checkpoints(self.place)
        note = self.place.root / "exhausted"
        early = note.read_text(encoding="utf-8") if note.exists() else ""
        if not found:
            raise EtudeError(
                f"{self.place.trainer}: no checkpoint: {early or 'the trainer ended before its first step'}"
            )
        step, last = found[-1]
        existing = [artefact for artefact in self.run.artefacts("checkpoint") if artefact.name == f"rl-{step}"]
        if not existing:
            origin = Parent(**json.loads(self.place.origin.read_text(encoding="utf-8")))
            with self.run.checkpoint("rl", step, parents=[origin]) as directory:
                ignored = shutil.ignore_patterns("optimizer.*", "training.json")
                shutil.copytree(last, directory, dirs_exist_ok=True, ignore=ignored, copy_function=_link_or_copy)
        facts = observe.stage_facts(self.run.metrics("rl"), self.slots, self.problems)
        if early and step < self.section.steps:
            facts["ended_early"] = early
            self.report(step, step, "ended early")
        if {0, step} <= self.measured and step:
            before, after = (evaluate.results(self.evaluations, measured) for measured in (0, step))
            facts["rise"] = evaluate.compare(before, after)
            for name in dict.fromkeys(key.split("/")[1] for key in self.by_set(after)):
                parts = (evaluate.part(found, f"{name}/") for found in (before, after))
                facts[f"rise_{name}"] = evaluate.compare(*parts)
        return facts
