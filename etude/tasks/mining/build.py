"""Build a benchmark from the history of a repository: changes newest first, each a validated task or a reason.

The journal has one line per change; a stopped build resumes from it. Nothing of the repository runs outside pods.
"""

import asyncio
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.errors import EtudeError, InputError
from etude.pods.fleet import Fleet
from etude.pods.pod import PodError
from etude.tasks.base_images import HostSettings
from etude.tasks.generators.candidate import CandidateRejected
from etude.tasks.generators.executor import ExecutionFailed, ExecutionResult
from etude.tasks.generators.journal import Journal, JournalEntry
from etude.tasks.harbor import write_task
from etude.tasks.installation.result import InstallationFailed
from etude.tasks.mining.classify import DROP_REASONS, category_of
from etude.tasks.mining.environments import ARCHIVE, CommitEnvironment, EnvironmentPool, Installer
from etude.tasks.mining.evidence import RUNS, TestEvidence, compare_runs, graded_files, kept_tests
from etude.tasks.mining.history import History, HistoryCommit
from etude.tasks.mining.interface import HiddenName, InterfaceNotes, find_interface, new_definitions
from etude.tasks.mining.mess import PastedLog, make_log
from etude.tasks.mining.mined_task import MinedTask, mined_task_files
from etude.tasks.mining.mutations import mutations_of
from etude.tasks.mining.options import MiningOptions, check_same_options
from etude.tasks.mining.requests import behaviours_of, clean_subject, full_request
from etude.tasks.mining.screening import ScreenedChange, Screening, selected_commits
from etude.tasks.mining.suites import CommandSuite, PytestSuite, UnsupportedSuite, open_suite
from etude.tasks.mining.time_split import task_metadata
from etude.tasks.validate import validate

SUITE_TIMEOUT_S = 300.0
MUTATION_TIMEOUT_S = 60.0
MIN_MUTATIONS, MUTATIONS_S = 4, 60.0  # of slow tests fewer mutations are tried
STATIC_REASONS = frozenset({*DROP_REASONS, "duplicate"})  # found without a pod
ProgressCallback = Callable[[int, int, str], None]


@dataclass(frozen=True)
class MinedChange:
    """A change that became a task."""

    task: str
    change: ScreenedChange
    fully_noticed: bool = True  # a test fails for every mutation of its reference


def select_tasks(found: Sequence[MinedChange], count: int, min_share: float) -> list[MinedChange]:
    """Return the tasks of the shortest beginning of `found` that has `count`, or of all if it has too few.

    Tasks in which a mutation goes unnoticed are taken as long as the others are a share of at least `min_share`.
    """
    chosen: list[MinedChange] = []
    for end in range(1, len(found) + 1):
        full = [each for each in found[:end] if each.fully_noticed][:count]
        allowed = end if min_share <= 0 else int(len(full) * (1 - min_share) / min_share + 1e-9)
        partly = [each for each in found[:end] if not each.fully_noticed][: min(allowed, count - len(full))]
        chosen = [each for each in found[:end] if each in full or each in partly]
        if len(chosen) == count:
            break
    return chosen


@dataclass
class MiningState:
    """What a build knows while it runs."""

    fleet: Fleet
    history: History
    options: MiningOptions
    pool: EnvironmentPool
    host_settings: HostSettings
    journal: Journal
    made: dict[int, MinedChange] = field(default_factory=dict)  # by its place in the order of trying

    def record(self, commit: HistoryCommit, task: str, reason: str, detail: str, seconds: float) -> None:
        """Write the fate of a change into the journal, unless it is there."""
        if (known := self.journal.get(commit.id)) is None or (known.task, known.reason) != (task, reason):
            entry = JournalEntry(
                commit.id, commit.date, task, reason, detail[-1000:], round(seconds, 3), round(seconds, 3)
            )
            self.journal.add(entry)


@dataclass(frozen=True)
class MinedSet:
    """The tasks of a build in the order in which they were tried, and the journal of all changes looked at.

    `spare` are tasks that are left out, because a mutation goes unnoticed in them as in enough others.
    """

    changes: tuple[MinedChange, ...]
    spare: tuple[str, ...]
    journal: Journal
    looked_at: frozenset[str]  # commits


async def mine(
    fleet: Fleet,
    history: History,
    options: MiningOptions,
    install: Installer,
    host_settings: HostSettings,
    progress: ProgressCallback = lambda done, total, text: None,
) -> MinedSet:
    """Make tasks of changes, newest first, until there are `count`; the same for any number of jobs."""
    commits = await asyncio.to_thread(selected_commits, history, options)
    check_same_options(options)
    pool = EnvironmentPool(fleet, history.root, options.work_dir / "environments", install, host_settings)
    journal = Journal.open(options.work_dir / "journal.jsonl", "history")
    state = MiningState(fleet, history, options, pool, host_settings, journal)

    def on_drop(commit: HistoryCommit, reason: str, detail: str, seconds: float) -> None:
        state.record(commit, "", reason, detail, seconds)

    screening = Screening(history, commits, options, on_drop)
    numbers, lock = itertools.count(), asyncio.Lock()

    def selected() -> list[MinedChange]:
        found = [state.made[number] for number in sorted(state.made)]
        return select_tasks(found, options.count, options.min_fully_noticed)

    def report(text: str = "") -> None:
        done = len(selected())
        tried = sum(bool(each.reason) and each.reason not in STATIC_REASONS for each in journal.entries.values())
        progress(done, options.count, f"{screening.looked_at} of {len(commits)} changes, {tried} failed in pods {text}")

    async def worker() -> None:
        while len(selected()) < options.count:
            async with lock:  # the order of changes decides which become tasks, not the speed of workers
                change, number = await asyncio.to_thread(screening.next_change), next(numbers)
            if change is None:
                return
            report(change.commit.id[:8])
            if task := await _evaluate(state, change):
                state.made[number] = MinedChange(task, change, _fully_noticed(options.work_dir / "tasks" / task))

    async with asyncio.TaskGroup() as group:
        for _ in range(options.jobs):
            group.create_task(worker())
    report()
    chosen = selected()
    names = {each.task for each in chosen}
    spare = [each.task for each in state.made.values() if not each.fully_noticed and each.task not in names]
    return MinedSet(tuple(chosen), tuple(spare), journal, frozenset(each.id for each in commits[: screening.looked_at]))


def _fully_noticed(task: Path) -> bool:
    metadata = task_metadata(task)
    return bool(metadata["mutations_noticed"] == metadata["mutations_tried"])


async def _evaluate(state: MiningState, change: ScreenedChange) -> str:
    """Try a change in pods and record its fate; return the name of its task, or "". A known fate is not tried again."""
    name, started = f"{state.history.name}-{change.commit.id[:10]}", time.monotonic()
    known = state.journal.get(change.commit.id)
    if known is not None and known.task and (state.options.work_dir / "tasks" / known.task).is_dir():
        return known.task
    if known is not None and known.reason and known.reason not in STATIC_REASONS:
        return ""
    task, reason, detail = "", "", ""
    try:
        await _make_task(state, change, name)
        task = name
    except CandidateRejected as rejected:
        reason, detail = rejected.reason, rejected.detail
    except InstallationFailed as failed:
        reason, detail = f"install-{failed.reason}", str(failed)
    except UnsupportedSuite as error:
        reason, detail = "unsupported-tests", str(error)
    except (ExecutionFailed, PodError, InputError) as error:
        reason, detail = "trial-failed", str(error)
    state.record(change.commit, task, reason, detail, time.monotonic() - started)
    return task


async def _make_task(state: MiningState, change: ScreenedChange, name: str) -> None:
    """Write and validate the task of a change; raise CandidateRejected with a reason."""
    commit, parts = change.commit, change.parts
    environment = await state.pool.of_commit(commit.parents[0])
    notes = _interface(change, environment)
    after = {**environment.files, **_present(parts.solution), **_present(parts.test_changes)}
    for path in (path for path, data in {**parts.solution, **parts.test_changes}.items() if data is None):
        after.pop(path, None)
    async with open_suite(state.fleet, environment, after, [file.path for file in parts.tests]) as suite:
        evidence, failing = await _run_tests(suite, change)
        tried, ignored = await _try_mutations(suite, change, evidence)
        _check_mutations(tried, ignored, state.options.min_noticed)
        log = make_log(evidence, failing, commit.id, environment.files) if state.options.logs else None
        task = MinedTask(
            name=name,
            commit=commit,
            category=category_of(clean_subject(commit.message[0]) or commit.subject, parts),
            parts=parts,
            environment=environment,
            evidence=evidence,
            instruction=_instruction(state.options, change, notes, evidence, log),
            request_source="full" if state.options.prompts == "full" else change.request.source,
            tried_mutations=tried,
            unnoticed_mutations=tuple(ignored),
            extra_files=log.files if log else {},
            log=log.kind if log else "",
        )
        files = await asyncio.to_thread(mined_task_files, task, suite)
    await _write_and_validate(state, name, files, environment)


def _present(changes: Mapping[str, bytes | None]) -> dict[str, bytes]:
    return {path: data for path, data in changes.items() if data is not None}


def _interface(change: ScreenedChange, environment: CommitEnvironment) -> InterfaceNotes:
    try:
        return find_interface(change.parts, environment.files, change.request.text)
    except HiddenName as error:
        raise CandidateRejected("hidden-name", str(error)) from None


def _instruction(
    options: MiningOptions,
    change: ScreenedChange,
    notes: InterfaceNotes,
    evidence: TestEvidence,
    log: PastedLog | None,
) -> str:
    text = change.request.text
    if options.prompts == "full":
        source = change.parts.source
        new = dict.fromkeys(each.line for file in source for each in new_definitions(file) if each.kind == "definition")
        files = [file.path for file in source]
        text = full_request(change.commit, files, list(new)[:20], behaviours_of(evidence.fail_to_pass), text)
    return "\n\n".join(part for part in (text, log.note if log else "", notes.section) if part)


# ------------------------------------------------------------------------------------------------- pods


async def _run_tests(suite: PytestSuite | CommandSuite, change: ScreenedChange) -> tuple[TestEvidence, ExecutionResult]:
    """Run the tests three times before and after a change; return what they say, and a run before it."""
    parts, rng = change.parts, random.Random(change.commit.id)
    solved = {**parts.solution, **parts.test_changes}
    changed = [file.path for file in parts.tests if file.path in suite.files]
    if not changed:
        raise CandidateRejected("no-tests", "the changed tests are no files that the test runner collects")
    files = graded_files(suite.files, changed, suite.sizes, rng)
    after = [await suite.run(solved, files, timeout=SUITE_TIMEOUT_S)]
    if not after[0].complete or not after[0].tests:
        raise CandidateRejected("suite-fails", after[0].output[-800:] or "the tests did not finish")
    limit = 60.0 + 4 * after[0].seconds
    before = [await suite.run(parts.test_changes, files, timeout=limit)]
    first = compare_runs(before, after)
    if not first.fail_to_pass:
        failed = [test for test, outcome in after[0].tests.items() if outcome.status not in ("passed", "skipped")]
        raise CandidateRejected("no-fail-to-pass", f"failing after the change: {len(failed)}, {failed[:3]}")
    chosen = [*first.fail_to_pass, *kept_tests(first, changed, rng)]
    collected = [test for test in chosen if test in before[0].tests] or files
    for _ in range(RUNS - 1):
        after.append(await suite.run(solved, chosen, timeout=limit))
        before.append(await suite.run(parts.test_changes, collected, timeout=limit))
    evidence = compare_runs(before, after, chosen)
    if not evidence.fail_to_pass:
        raise CandidateRejected("flaky", f"{len(evidence.flaky)} tests: {evidence.flaky[:3]}")
    if not evidence.pass_to_pass and not evidence.import_only:
        raise CandidateRejected("no-pass-to-pass", "no test passes before and after")
    return evidence, before[0]


async def _try_mutations(
    suite: PytestSuite | CommandSuite, change: ScreenedChange, evidence: TestEvidence
) -> tuple[int, list[str]]:
    """Return how many mutations of the reference were tried, and the names of those that no test noticed."""
    solved = {**change.parts.solution, **change.parts.test_changes}
    tests = [*evidence.fail_to_pass, *evidence.pass_to_pass]
    limit = MUTATION_TIMEOUT_S + 4 * evidence.seconds(tests)
    tried, ignored = 0, []
    affordable = max(MIN_MUTATIONS, int(MUTATIONS_S / (1 + evidence.seconds(tests))))
    for mutation in mutations_of(change.parts, affordable):
        tried += 1
        if mutation.sure:
            continue
        run = await suite.run({**solved, mutation.path: mutation.data}, tests, timeout=limit, until_failure=True)
        if run.complete and all(run.status(test) == "passed" for test in tests):
            ignored.append(mutation.name)
    return tried, ignored


def _check_mutations(tried: int, ignored: list[str], min_noticed: float) -> None:
    """Raise CandidateRejected if the tests notice too few mutations to mean something."""
    if len(ignored) == tried:
        raise CandidateRejected("unnoticed", f"none of {tried} mutations of the reference fails a test: {ignored[:3]}")
    if tried - len(ignored) < min_noticed * tried:
        raise CandidateRejected("weak-tests", f"{len(ignored)} of {tried} mutations fail no test: {ignored[:5]}")


async def _write_and_validate(
    state: MiningState, name: str, files: Mapping[str, str | bytes], environment: CommitEnvironment
) -> None:
    """Write a task, validate it, and keep it if it is admitted."""
    work = state.options.work_dir
    draft, target = work / "trying" / name, work / "tasks" / name
    try:
        await asyncio.to_thread(write_task, draft, files)
        if environment.archive is not None:
            _link(environment.archive, draft / "environment" / ARCHIVE)
        report = await validate(state.fleet, draft, host_settings=state.host_settings, reruns=state.options.reruns)
        if not report.admitted:
            raise CandidateRejected(report.reasons[0].code, report.reasons[0].evidence)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """Hard-link the archive of an environment: tasks of the same environment share it on disk."""
    try:
        os.link(source, target)
    except OSError as error:
        raise EtudeError(
            f"{target} cannot be a hard link: {error.strerror}; choose an output directory that supports them"
        ) from None
