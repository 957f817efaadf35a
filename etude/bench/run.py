"""Running a comparison: every policy on every task, so many times, a few trials at once.

Each trial is a slot of its policy's table. What breaks underneath is tried again and counted beside; a task that broke
too often is given up for that policy, never scored zero. Checkpoints take turns in the memory, endpoints are asked
beside them. Kill this at any time: what is graded is kept, and the rest begins anew.
"""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.bench.candidates import Candidate, Player, Price, open_player
from etude.bench.directory import Place, Question, all_results
from etude.bench.report import page
from etude.bench.results import last_chances, plain_name, summary, trial_rows
from etude.errors import EtudeError
from etude.evaluation.held_out import begin, evaluation_plan
from etude.harness.trace_store import save_trace
from etude.pods.fleet import Fleet
from etude.rollouts.queue import Plan, Slot, Slots
from etude.rollouts.rollout import Rollout, RolloutFailed, rollout_seed
from etude.runs.layout import write_whole
from etude.system.progress import progress_bars
from etude.tasks.task import Task

WORKER = "bench"  # there is one
MOST_WHY = 1000  # characters of a reason that the table keeps
ABOUT = ("kind", "where", "model", "window", "dialect")  # of a policy, for the results
HOPELESS = 3  # tasks given up by a policy with no graded trial: then it is not the tasks

log = logging.getLogger("etude.bench")


@dataclass(frozen=True)
class Progress:
    """How far a policy is, in trials."""

    graded: int = 0
    wanted: int = 0
    solved: int = 0
    failures: int = 0  # of the infrastructure

    @property
    def note(self) -> str:
        words = [f"{self.solved / self.graded:.0%} solved"] if self.graded else []
        return ", ".join([*words, f"{self.failures} failures"] if self.failures else words)


Report = Callable[[str, Progress], None]


async def run_trials(
    place: Place,
    question: Question,
    fleet: Fleet,
    *,
    at_once: int,
    device: str = "auto",
    report: Report = lambda name, progress: None,
) -> dict[str, EtudeError]:
    """All trials that are missing. A policy that broke stops alone; why, by its name."""
    bench = _Bench(place, question, fleet, at_once, device, report)
    checkpoints = [number for number, each in enumerate(question.candidates) if each.kind == "checkpoint"]
    endpoints = [number for number, each in enumerate(question.candidates) if each.kind == "endpoint"]
    async with asyncio.TaskGroup() as group:
        group.create_task(bench.in_turn(checkpoints))
        for number in endpoints:
            group.create_task(bench.in_turn([number]))
    return bench.broken


class _Bench:
    """A comparison while it runs."""

    def __init__(
        self, place: Place, question: Question, fleet: Fleet, at_once: int, device: str, report: Report
    ) -> None:
        self.place, self.question, self.fleet, self.at_once = place, question, fleet, at_once
        self.device, self.report = device, report
        self.gate = asyncio.Semaphore(at_once)  # over all policies: pods share the machine
        self.numbers = {name: number for number, name in enumerate(question.tasks)}
        self.progress: dict[str, Progress] = {}
        self.broken: dict[str, EtudeError] = {}

    async def in_turn(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            candidate = self.question.candidates[number]
            try:
                await self.play_all(number, candidate)
            except* EtudeError as group:
                self.broken[candidate.name] = _first(group)

    async def play_all(self, number: int, candidate: Candidate) -> None:
        """All trials of one policy."""
        question = self.question
        plan = evaluation_plan(Plan(in_flight=self.at_once), question.samples)
        with closing(open_slots(self.place.slots(candidate.name), plan)) as slots:
            slots.release()  # what an earlier life of this comparison held
            queue(slots, question.tasks)
            self.count(candidate, slots)
            if all(standing.over for standing in last_chances(slots).values()):
                return
            known = question.known[candidate.name]
            opened = open_player(candidate, known, at_once=self.at_once, device=self.device)
            try:
                async with opened as player, asyncio.TaskGroup() as group:
                    for _ in range(self.at_once):
                        group.create_task(self.keep_playing(number, candidate, player, slots))
            finally:
                slots.release()

    async def keep_playing(self, number: int, candidate: Candidate, player: Player, slots: Slots) -> None:
        """Trial after trial, until none is queued. One that fails is queued by whoever ran it, who will look again."""
        while True:
            async with self.gate:
                slot = slots.claim(WORKER, time.time())
                if slot is None:
                    return
                try:
                    rollout = await self.play(number, candidate, player, slot)
                except RolloutFailed as error:
                    slots.fail(slot, str(error)[:MOST_WHY])
                    self.count(candidate, slots)
                    await player.check(error)
                    check_hope(slots, error)
                else:
                    await self.keep(candidate, slots, slot, rollout)

    async def play(self, number: int, candidate: Candidate, player: Player, slot: Slot) -> Rollout:
        name, task = self.place.root.name, plain_name(slot.task)
        # not by the attempt: a trial that was cut short is the same trial when it is run again
        seed = rollout_seed(self.question.seed, number, self.numbers[task], slot.number)
        facts = {"bench": name, "policy": candidate.name, "sample": slot.number}
        id = f"{name}/{candidate.name}/{task}/{slot.number:02d}"
        given, settings = self.question.tasks[task], self.question.settings
        try:
            return await player.play(self.fleet, given, settings, seed=seed, id=id, facts=facts)
        except EtudeError:
            raise
        except Exception as error:  # a bug of ours; the other trials go on
            log.exception("%s on %s, sample %d", candidate.name, task, slot.number)
            raise RolloutFailed(f"bug: {type(error).__name__}: {error}") from error

    async def keep(self, candidate: Candidate, slots: Slots, slot: Slot, rollout: Rollout) -> None:
        """The trace first: what the table says is there has to be there."""
        task = plain_name(slot.task)
        path = self.place.trace(candidate.name, task, slot.number)
        path.parent.mkdir(parents=True, exist_ok=True)
        await asyncio.to_thread(save_trace, rollout.trace, path)
        record = trial_record(rollout, self.question.tasks[task])
        slots.finish(slot, record, path.relative_to(self.place.root).as_posix(), rollout.trace.versions())
        before = self.progress[candidate.name]
        self.tell(candidate, replace(before, graded=before.graded + 1, solved=before.solved + record["solved"]))

    def count(self, candidate: Candidate, slots: Slots) -> None:
        """Look how far a policy is. Not after every trial: there may be many thousands."""
        standings = last_chances(slots).values()
        current = {standing.task for standing in standings}
        efforts = [effort for effort in slots.efforts() if effort.task in current]
        found = Progress(
            graded=sum(standing.ready for standing in standings),
            wanted=sum(standing.ready if standing.dropped else standing.size for standing in standings),
            solved=round(sum((effort.solved or 0) * effort.rollouts for effort in efforts)),
            failures=sum(standing.failures for standing in slots.standings()),
        )
        self.tell(candidate, found)

    def tell(self, candidate: Candidate, progress: Progress) -> None:
        self.progress[candidate.name] = progress
        self.report(candidate.name, progress)


def open_slots(path: Path, plan: Plan) -> Slots:
    """A policy's table. One that has its name is whole: others look at it, and a kill may come at any time."""
    if not path.exists():
        part = path.with_suffix(".part")
        for left in path.parent.glob(f"{part.name}*"):
            left.unlink()
        Slots(part, plan).close()
        part.rename(path)
    return Slots(path, plan)


def queue(slots: Slots, tasks: Iterable[str]) -> None:
    """Have every task tried that was not; those that an earlier life gave up get another chance."""
    known = last_chances(slots)
    for task in tasks:
        before = known.get(task)
        if before is None or before.dropped:
            begin(slots, 0 if before is None else int(before.task.partition("/")[0]) + 1, [task])


def check_hope(slots: Slots, error: RolloutFailed) -> None:
    """Stop a policy that fails at everything: what is wrong is not in the tasks."""
    standings = last_chances(slots).values()
    given_up = sum(bool(standing.dropped) for standing in standings)
    if given_up >= min(HOPELESS, len(standings)) and not any(standing.ready for standing in standings):
        raise EtudeError(f"none of its trials could be graded, and {given_up} tasks were given up; the last: {error}")


def trial_record(rollout: Rollout, task: Task) -> dict[str, Any]:
    """What a trial came to. What cheated has solved nothing, whatever the verifier says, and that is said beside."""
    record = rollout.record(task)
    if record["hack"]:
        return {**record, "verifier_score": record["score"], "score": 0.0}
    return record


def _first(group: BaseExceptionGroup[EtudeError]) -> EtudeError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, EtudeError)
    return error


# ------------------------------------------------------------------------------------------- what is left of it


def describe(place: Place, prices: Mapping[str, Price] | None = None) -> dict[str, Any]:
    """What the trials say up to now, as JSON; prices count before those of the question."""
    form, found = all_results(place)
    asked = {name: Price(**price) for name, price in form["prices"].items()}
    said = summary(found, {**asked, **(prices or {})})
    about = [{key: each[key] for key in ABOUT} for each in form["policies"]]
    said["policies"] = [{**facts, **results} for facts, results in zip(about, said["policies"], strict=True)]
    kept = {key: value for key, value in form.items() if key not in ("format", "policies", "prices", "tasks")}
    return {**said, "settings": {**kept, "tasks": len(form["tasks"])}}


def write_outputs(place: Place) -> dict[str, Any]:
    """Every trial, the summary and the page; each replaced whole."""
    form, found = all_results(place)
    prices = {name: Price(**price) for name, price in form["prices"].items()}
    lines = [json.dumps(row) for results in found for row in trial_rows(results, prices.get(results.name))]
    said = describe(place)
    write_whole(place.trials, "".join(f"{line}\n" for line in lines))
    write_whole(place.summary, json.dumps(said, indent=1) + "\n")
    write_whole(place.report, page(said, place.root.name))
    return said


@contextmanager
def shown_progress(names: Sequence[str]) -> Iterator[Report]:
    """One line for every policy on standard error."""
    with progress_bars() as bars:
        lines = {name: bars.add_task(name, total=None, note="") for name in names}

        def report(name: str, progress: Progress) -> None:
            bars.update(lines[name], completed=progress.graded, total=progress.wanted, note=progress.note)

        yield report
