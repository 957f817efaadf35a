"""Turn candidates into validated tasks, with one generator run per repository and generator, all concurrent.

    candidate -> states executed in pods -> draft -> task directory -> validate -> accepted, or rejected with a reason

Each run handles its candidates in order and records them in a journal, from which a stopped run resumes. The same seed
gives the same tasks for any number of jobs.
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
from etude.system.progress import time_left
from etude.tasks.base_images import HostSettings
from etude.tasks.generators.candidate import CandidateRejected, Generator, TaskCandidate
from etude.tasks.generators.executor import ExecutionFailed, ExecutionResult, RepositoryExecutor, open_executor
from etude.tasks.generators.image import prepare_base_image
from etude.tasks.generators.journal import GeneratorYield, Journal, JournalEntry, summarize_journals
from etude.tasks.generators.registry import GENERATORS
from etude.tasks.generators.repository import Repository, default_cache, prepare
from etude.tasks.generators.source import read_source
from etude.tasks.generators.task_writer import TaskFiles, task_files
from etude.tasks.harbor import write_task
from etude.tasks.validate import validate

WORK_DIR = ".generate"  # in the output directory: journals, wheels, and tasks under validation
CANDIDATES_PER_TASK = 8  # a generator run gives up after this many candidates per requested task
RERUNS = 3
SHOWN_REASONS = 3  # in the progress line
ProgressCallback = Callable[[int, int, str], None]


@dataclass(frozen=True)
class GenerationOptions:
    """How many tasks to generate, where, and how."""

    out: Path
    count: int
    seed: int = 0
    jobs: int = 2
    only: tuple[str, ...] = ()  # names of generators; empty: all
    reruns: int = RERUNS
    cache: Path | None = None  # of repository surveys; default: default_cache()


@dataclass
class GeneratorRun:
    """The state of one generator on one repository."""

    repository: Repository
    generator: Generator
    executor: RepositoryExecutor
    journal: Journal
    candidates: Iterator[TaskCandidate]
    target_count: int = 0
    tried: int = 0
    made: int = 0
    fresh: int = 0  # of those made, not in the journal of an earlier run
    exhausted: bool = False
    families: Counter[str] = field(default_factory=Counter)
    sites: set[str] = field(default_factory=set)
    reasons: Counter[str] = field(default_factory=Counter)  # of rejected candidates

    @property
    def name(self) -> str:
        return f"{self.repository.label}-{self.generator.name}"

    def next_candidate(self) -> TaskCandidate | None:
        """Return the next candidate with an unused site and a family below its limit, or None when exhausted."""
        family_limit = max(1, ceil(self.generator.max_family_share * max(self.target_count, 3)))
        for candidate in self.candidates:
            if candidate.site in self.sites or self.families[candidate.family] >= family_limit:
                continue
            self.sites.add(candidate.site)
            return candidate
        return None


async def generate(
    fleet: Fleet,
    sources: Sequence[Path],
    options: GenerationOptions,
    *,
    extra: Sequence[str] = (),
    wheels: Path | None = None,
    progress: ProgressCallback = lambda done, total, text: None,
) -> list[GeneratorYield]:
    """Generate tasks from repositories; return the yield of each generator."""
    generators = _select_generators(options.only)
    work_dir = options.out / WORK_DIR
    work_dir.mkdir(parents=True, exist_ok=True)
    host_settings = await prepare_base_image(fleet)
    pod_slots = asyncio.Semaphore(options.jobs)
    runs: list[GeneratorRun] = []
    async with AsyncExitStack() as stack:
        for path in sources:
            progress(0, options.count, f"surveying {Path(path).name}")
            source = await asyncio.to_thread(read_source, path)
            cache = options.cache or default_cache()
            repository = await prepare(fleet, source, cache, extra=extra, wheels=wheels, host_settings=host_settings)
            executor = await stack.enter_async_context(open_executor(fleet, source, repository.wheels, host_settings))
            runs += [_open_run(repository, each, executor, work_dir, options.seed) for each in generators]
        await _generate_all(fleet, runs, options, host_settings, pod_slots, progress)
    return summarize_journals([run.journal for run in runs])


def _select_generators(only: Sequence[str]) -> list[Generator]:
    unknown = [name for name in only if name not in GENERATORS]
    if unknown:
        raise InputError(f"{unknown[0]!r} is not a generator; expected one of {', '.join(sorted(GENERATORS))}")
    return [GENERATORS[name] for name in (only or sorted(GENERATORS))]


def _open_run(
    repository: Repository, generator: Generator, executor: RepositoryExecutor, work_dir: Path, seed: int
) -> GeneratorRun:
    rng = random.Random(f"{seed}/{repository.source.digest}/{generator.name}")
    journal = Journal.open(work_dir / "journals" / f"{repository.label}-{generator.name}-{seed}.jsonl", generator.name)
    return GeneratorRun(repository, generator, executor, journal, generator.generate(repository, rng))


async def _generate_all(
    fleet: Fleet,
    runs: list[GeneratorRun],
    options: GenerationOptions,
    host_settings: HostSettings,
    pod_slots: asyncio.Semaphore,
    progress: ProgressCallback,
) -> None:
    """Give every run its share of the tasks; redistribute the rest of exhausted runs to the others."""
    missing, started = options.count, time.monotonic()
    while missing > 0:
        active = [run for run in runs if not run.exhausted]
        if not active:
            return
        for run, share in zip(active, split_by_weight(missing, [run.generator.weight for run in active]), strict=True):
            run.target_count += share

        def report_progress() -> None:
            made, fresh = sum(run.made for run in runs), sum(run.fresh for run in runs)
            left = time_left(fresh, options.count - made, time.monotonic() - started)
            progress(made, options.count, ", ".join(filter(None, [left, progress_note(runs)])))

        async with asyncio.TaskGroup() as group:
            for run in active:
                group.create_task(_run_generator(fleet, run, options, host_settings, pod_slots, report_progress))
        missing = options.count - sum(run.made for run in runs)


def progress_note(runs: Sequence[GeneratorRun]) -> str:
    """Return how many candidates were tried, and the most frequent reasons why they were rejected."""
    reasons = Counter[str]()
    for run in runs:
        reasons += run.reasons
    words = [f"{sum(run.tried for run in runs)} tried"]
    words += [f"{reason} {count}" for reason, count in reasons.most_common(SHOWN_REASONS)]
    if len(done := [run for run in runs if run.exhausted]) > 0:
        words.append(f"{len(done)} of {len(runs)} generators have no more candidates")
    return ", ".join(words)


def split_by_weight(count: int, weights: Sequence[float]) -> list[int]:
    """Split `count` into integers proportional to the weights, each at least 1 if `count` allows it."""
    minimum = 1 if count >= len(weights) else 0
    exact = [max(0.0, count * weight / sum(weights) - minimum) for weight in weights]
    rest = count - minimum * len(weights)
    scale = rest / sum(exact) if sum(exact) else 0.0
    extra = [each * scale for each in exact]
    counts = [minimum + int(part) for part in extra]
    by_remainder = sorted(range(len(extra)), key=lambda number: (int(extra[number]) - extra[number], number))
    for number in by_remainder[: count - sum(counts)]:
        counts[number] += 1
    return counts


async def _run_generator(
    fleet: Fleet,
    run: GeneratorRun,
    options: GenerationOptions,
    host_settings: HostSettings,
    pod_slots: asyncio.Semaphore,
    report_progress: Callable[[], None],
) -> None:
    """Evaluate candidates until the run has made `target_count` tasks or is exhausted."""
    while run.made < run.target_count:
        if run.tried >= CANDIDATES_PER_TASK * (run.target_count + 2):
            run.exhausted = True
            return
        async with pod_slots:
            candidate = await asyncio.to_thread(run.next_candidate)
            if candidate is None:
                run.exhausted = True
                return
            entry = run.journal.get(candidate.site)
            if entry is None or (entry.task and not (options.out / entry.task).is_dir()):
                entry = await _evaluate_candidate(fleet, run, candidate, options, host_settings)
                run.journal.add(entry)
                run.fresh += bool(entry.task)
        run.tried += 1
        if entry.task:
            run.made += 1
            run.families[candidate.family] += 1
        else:
            run.reasons[entry.reason] += 1
        report_progress()


async def _evaluate_candidate(
    fleet: Fleet, run: GeneratorRun, candidate: TaskCandidate, options: GenerationOptions, host_settings: HostSettings
) -> JournalEntry:
    """Execute, write and validate one candidate; return its journal entry."""
    started = time.monotonic()
    name = f"{run.name}-{run.made + 1:03d}"
    task, reason, detail, validation_s = "", "", "", 0.0
    results: dict[str, ExecutionResult] = {}
    try:
        await _execute_states(run, candidate, results)
        files = await asyncio.to_thread(_build_files, run, candidate, results, name, options.seed)
        reason, detail, validation_s = await _write_and_validate(fleet, files, options, name, host_settings)
        task = "" if reason else name
    except CandidateRejected as rejection:
        reason, detail = rejection.reason, rejection.detail
    except (ExecutionFailed, PodError) as error:
        reason, detail = "trial-failed", str(error)
    return JournalEntry(
        site=candidate.site,
        family=candidate.family,
        task=task,
        reason=reason,
        detail=detail[-1000:],
        seconds=round(time.monotonic() - started, 3),
        pod_seconds=round(sum(result.seconds for result in results.values()) + validation_s, 3),
    )


async def _execute_states(run: GeneratorRun, candidate: TaskCandidate, results: dict[str, ExecutionResult]) -> None:
    """Execute the states of a candidate in order; raise CandidateRejected at the first change that no test notices."""
    for name, state in candidate.states.items():
        if state.command:
            results[name] = await run.executor.run_command(state.changes, state.command)
        else:
            limit = 20.0 + 10 * run.repository.total_duration(state.tests)  # a mutation can cause an endless loop
            results[name] = await run.executor.run_tests(state.changes, state.tests, timeout=limit)
        if state.survived(results[name]):
            raise CandidateRejected("survives", "no test fails")


def _build_files(
    run: GeneratorRun, candidate: TaskCandidate, results: dict[str, ExecutionResult], name: str, seed: int
) -> TaskFiles:
    return task_files(run.repository, candidate.finish(results), name, run.generator.name, seed)


async def _write_and_validate(
    fleet: Fleet, files: TaskFiles, options: GenerationOptions, name: str, host_settings: HostSettings
) -> tuple[str, str, float]:
    """Write and validate a task, and keep it if it is admitted; return (reason code, detail, seconds)."""
    draft_dir = options.out / WORK_DIR / "trying" / name
    try:
        await asyncio.to_thread(write_task, draft_dir, files)
        await asyncio.to_thread(_hard_link_wheels, draft_dir, options.out / WORK_DIR / "wheels")
        report = await validate(fleet, draft_dir, host_settings=host_settings, reruns=options.reruns)
        if not report.admitted:
            first = report.reasons[0]
            return first.code, first.evidence, report.seconds
        target = options.out / name
        if target.exists():
            shutil.rmtree(target)
        draft_dir.rename(target)
        return "", "", report.seconds
    finally:
        shutil.rmtree(draft_dir, ignore_errors=True)


def _hard_link_wheels(task: Path, wheel_store: Path) -> None:
    """Replace wheels that are identical across tasks by hard links to one file."""
    wheel_store.mkdir(exist_ok=True)
    for wheel in (task / "environment/packages").glob("*.whl"):
        stored = wheel_store / wheel.name
        if not stored.exists():
            shutil.copyfile(wheel, stored)
        if stored.read_bytes() == wheel.read_bytes():
            wheel.unlink()
            try:
                os.link(stored, wheel)
            except OSError as error:
                raise EtudeError(
                    f"{wheel} cannot be a hard link: {error.strerror}; choose an output directory that supports them"
                ) from None
