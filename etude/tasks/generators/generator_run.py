"""Candidates into proven tasks: every repository and generator is a lane, lanes go on side by side, each in its order.

    candidate -> its states tried in pods -> draft -> task directory -> validated -> kept, or a reason why not

What a lane has tried stands in its journal. A run that was stopped reads the journals and goes on; the same seed gives
the same tasks, however many jobs there are.
"""

import asyncio
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

from etude.errors import EtudeError, InputError
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError
from etude.tasks.base_images import Provision
from etude.tasks.generators.candidate import Candidate, Generator, Unfit
from etude.tasks.generators.executor import Trial, TrialFailed, Workbench, open_workbench
from etude.tasks.generators.image import sealed_base
from etude.tasks.generators.journal import Entry, Journal, Yield, yields
from etude.tasks.generators.registry import GENERATORS
from etude.tasks.generators.repository import Repository, default_cache, prepare
from etude.tasks.generators.source import read_source
from etude.tasks.generators.task_writer import Files, task_files
from etude.tasks.harbor import write_task
from etude.tasks.validate import validate

DESK = ".generate"  # in the output directory: journals, and what is being tried
PATIENCE = 8  # candidates for each task that is wanted, before a lane gives up
RERUNS = 3
Note = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Order:
    """What is wanted."""

    out: Path
    count: int
    seed: int = 0
    jobs: int = 2
    only: tuple[str, ...] = ()  # generators; all if none is named
    reruns: int = RERUNS
    cache: Path | None = None  # of surveys; the user's own if not given


@dataclass
class Lane:
    """One generator over one repository: its candidates in order, and what has come of them."""

    repository: Repository
    generator: Generator
    bench: Workbench
    journal: Journal
    candidates: Iterator[Candidate]
    wanted: int = 0
    tried: int = 0
    made: int = 0
    exhausted: bool = False
    families: Counter[str] = field(default_factory=Counter)
    sites: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"{self.repository.label}-{self.generator.name}"

    def next_candidate(self) -> Candidate | None:
        """The next candidate that is not like one before; None when there is no more."""
        most = max(1, ceil(self.generator.most * max(self.wanted, 3)))
        for candidate in self.candidates:
            if candidate.site in self.sites or self.families[candidate.family] >= most:
                continue
            self.sites.add(candidate.site)
            return candidate
        return None


async def generate(
    fleet: Fleet,
    sources: Sequence[Path],
    order: Order,
    *,
    extra: Sequence[str] = (),
    wheels: Path | None = None,
    note: Note = lambda done, total, text: None,
) -> list[Yield]:
    """Make tasks out of repositories; what every generator gave."""
    chosen = _chosen(order.only)
    desk = order.out / DESK
    desk.mkdir(parents=True, exist_ok=True)
    provision = await sealed_base(fleet)
    gate = asyncio.Semaphore(order.jobs)
    lanes: list[Lane] = []
    async with AsyncExitStack() as stack:
        for path in sources:
            note(0, order.count, f"surveying {Path(path).name}")
            source = await asyncio.to_thread(read_source, path)
            cache = order.cache or default_cache()
            repository = await prepare(fleet, source, cache, extra=extra, wheels=wheels, provision=provision)
            bench = await stack.enter_async_context(open_workbench(fleet, source, repository.wheels, provision))
            lanes += [_open_lane(repository, each, bench, desk, order.seed) for each in chosen]
        await _fill(fleet, lanes, order, provision, gate, note)
    return yields([lane.journal for lane in lanes])


def _chosen(only: Sequence[str]) -> list[Generator]:
    unknown = [name for name in only if name not in GENERATORS]
    if unknown:
        raise InputError(f"{unknown[0]!r} is not a generator; there are {', '.join(sorted(GENERATORS))}")
    return [GENERATORS[name] for name in (only or sorted(GENERATORS))]


def _open_lane(repository: Repository, generator: Generator, bench: Workbench, desk: Path, seed: int) -> Lane:
    rng = random.Random(f"{seed}/{repository.source.digest}/{generator.name}")
    journal = Journal.open(desk / "journals" / f"{repository.label}-{generator.name}-{seed}.jsonl", generator.name)
    return Lane(repository, generator, bench, journal, generator.generate(repository, rng))


async def _fill(
    fleet: Fleet, lanes: list[Lane], order: Order, provision: Provision, gate: asyncio.Semaphore, note: Note
) -> None:
    """Give every lane its share; what some cannot make is asked of the others."""
    missing = order.count
    while missing > 0:
        open_lanes = [lane for lane in lanes if not lane.exhausted]
        if not open_lanes:
            return
        for lane, share in zip(
            open_lanes, shares(missing, [lane.generator.weight for lane in open_lanes]), strict=True
        ):
            lane.wanted += share

        def progress() -> None:
            note(sum(lane.made for lane in lanes), order.count, "")

        async with asyncio.TaskGroup() as group:
            for lane in open_lanes:
                group.create_task(_work(fleet, lane, order, provision, gate, progress))
        missing = order.count - sum(lane.made for lane in lanes)


def shares(count: int, weights: Sequence[float]) -> list[int]:
    """A number in whole parts by weight, none of them empty if there is enough for all."""
    least = 1 if count >= len(weights) else 0
    exact = [max(0.0, count * weight / sum(weights) - least) for weight in weights]
    rest = count - least * len(weights)
    scale = rest / sum(exact) if sum(exact) else 0.0
    parts = [each * scale for each in exact]
    found = [least + int(part) for part in parts]
    order = sorted(range(len(parts)), key=lambda number: (int(parts[number]) - parts[number], number))
    for number in order[: count - sum(found)]:
        found[number] += 1
    return found


async def _work(
    fleet: Fleet,
    lane: Lane,
    order: Order,
    provision: Provision,
    gate: asyncio.Semaphore,
    progress: Callable[[], None],
) -> None:
    """Try candidates of a lane until it has made what is wanted of it."""
    while lane.made < lane.wanted:
        if lane.tried >= PATIENCE * (lane.wanted + 2):
            lane.exhausted = True
            return
        async with gate:
            candidate = await asyncio.to_thread(lane.next_candidate)
            if candidate is None:
                lane.exhausted = True
                return
            entry = lane.journal.recall(candidate.site)
            if entry is None or (entry.task and not (order.out / entry.task).is_dir()):
                entry = await _judge(fleet, lane, candidate, order, provision)
                lane.journal.add(entry)
        lane.tried += 1
        if entry.task:
            lane.made += 1
            lane.families[candidate.family] += 1
        progress()


async def _judge(fleet: Fleet, lane: Lane, candidate: Candidate, order: Order, provision: Provision) -> Entry:
    """One candidate from its trials to its proof."""
    started = time.monotonic()
    name = f"{lane.name}-{lane.made + 1:03d}"
    task, reason, detail, proof = "", "", "", 0.0
    trials: dict[str, Trial] = {}
    try:
        await _try_states(lane, candidate, trials)
        files = await asyncio.to_thread(_finish, lane, candidate, trials, name, order.seed)
        reason, detail, proof = await _prove(fleet, files, order, name, provision)
        task = "" if reason else name
    except Unfit as unfit:
        reason, detail = unfit.reason, unfit.detail
    except (TrialFailed, PodError) as error:
        reason, detail = "trial-failed", str(error)
    return Entry(
        site=candidate.site,
        family=candidate.family,
        task=task,
        reason=reason,
        detail=detail[-1000:],
        seconds=round(time.monotonic() - started, 3),
        pod_seconds=round(sum(trial.seconds for trial in trials.values()) + proof, 3),
    )


async def _try_states(lane: Lane, candidate: Candidate, trials: dict[str, Trial]) -> None:
    """Try what a candidate asks for, one after the other; Unfit as soon as a change breaks nothing."""
    for name, state in candidate.states.items():
        if state.command:
            trials[name] = await lane.bench.try_command(state.changes, state.command)
        else:
            limit = 20.0 + 10 * lane.repository.time_of(state.tests)  # a wrong change may make a loop endless
            trials[name] = await lane.bench.try_tests(state.changes, state.tests, seconds=limit)
        if state.survived(trials[name]):
            raise Unfit("survives", "no test fails")


def _finish(lane: Lane, candidate: Candidate, trials: dict[str, Trial], name: str, seed: int) -> Files:
    return task_files(lane.repository, candidate.finish(trials), name, lane.generator.name, seed)


async def _prove(fleet: Fleet, files: Files, order: Order, name: str, provision: Provision) -> tuple[str, str, float]:
    """Write a task, validate it, and keep it if it is admitted: why not, in a code and words, and the time it took."""
    place = order.out / DESK / "trying" / name
    try:
        await asyncio.to_thread(write_task, place, files)
        await asyncio.to_thread(_share_wheels, place, order.out / DESK / "wheels")
        report = await validate(fleet, place, provision=provision, reruns=order.reruns)
        if not report.admitted:
            first = report.reasons[0]
            return first.code, first.evidence, report.seconds
        target = order.out / name
        if target.exists():
            shutil.rmtree(target)
        place.rename(target)
        return "", "", report.seconds
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _share_wheels(task: Path, shelf: Path) -> None:
    """The same wheels in every task of a repository are one file on disk."""
    shelf.mkdir(exist_ok=True)
    for wheel in (task / "environment/packages").glob("*.whl"):
        kept = shelf / wheel.name
        if not kept.exists():
            shutil.copyfile(wheel, kept)
        if kept.read_bytes() == wheel.read_bytes():
            wheel.unlink()
            try:
                os.link(kept, wheel)
            except OSError as error:
                raise EtudeError(f"{kept} cannot be linked to {wheel}: {error.strerror}") from None
