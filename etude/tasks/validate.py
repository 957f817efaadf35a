"""Proof before use: a task is admitted only if doing nothing fails, its solution passes, reruns agree, and the answer
cannot be found from inside. What is not admitted carries reason codes and evidence.

Results are kept by the task's digest, so a run that was stopped goes on where it was, and a task that did not change is
not tried again.
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.system.cores import usable_cores
from etude.tasks.base_images import Provision
from etude.tasks.environment import open_ground
from etude.tasks.harbor import read_task, task_digest
from etude.tasks.leak_check import find_answer
from etude.tasks.task import Task
from etude.tasks.trial import Actor, SolutionFailed, attempt, has_solution, nothing, solution
from etude.tasks.verifier import failures, grade, graded_in_place
from etude.tasks.verifier_result import FileChange, Grade, GradingFailed

RERUNS = 3
CHANCES = 2  # for a machine that fails under a task
FORMAT = 2  # of what is kept; another number makes earlier results forgotten

# Why a task is not admitted, and what that means.
REASONS: Mapping[str, str] = {
    "invalid": "the directory is not a task",
    "build-failed": "its environment cannot be made",
    "verifier-broken": "the verifier gives no reward",
    "noop-passes": "doing nothing passes",
    "no-solution": "there is no solution to prove it with",
    "solution-broken": "solve.sh itself fails",
    "solution-fails": "the solution does not pass",
    "outside-workspace": "the solution passes only with what it changed outside the workspace",
    "flaky": "reruns do not agree",
    "answer-in-history": "git has the answer",
    "answer-in-bytecode": "compiled files have the answer",
    "answer-installed": "an installed copy has the answer",
    "answer-in-cache": "a package cache has the answer",
    "answer-in-build": "build leftovers have the answer",
    "answer-in-archive": "a package's archive has the answer",
    "answer-in-workspace": "another file of the workspace has the answer",
    "answer-in-image": "tests or solution are in the image",
    "git-unreadable": "its repository cannot be searched",
    "network": "the agent has a network to find the answer on",
    "not-searched": "the answer could not be looked for",
    "sandbox": "the machine failed, not the task: try again",
}


@dataclass(frozen=True)
class Reason:
    """One reason not to admit a task."""

    code: str
    evidence: str = ""


@dataclass(frozen=True)
class Report:
    """What validation found of a task."""

    task: str
    directory: str
    digest: str
    reasons: tuple[Reason, ...] = ()
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)  # noop, solution
    changed: tuple[str, ...] = ()  # files that the solution changes
    seconds: float = 0.0
    setting: str = ""  # what it was given: images, network, number of reruns
    cached: bool = False

    @property
    def admitted(self) -> bool:
        return not self.reasons


class _Rejected(Exception):
    def __init__(self, code: str, evidence: str = "") -> None:
        super().__init__(evidence)
        self.reason = Reason(code, evidence.strip()[-2000:])


async def validate(
    fleet: Fleet, directory: Path, *, provision: Provision | None = None, reruns: int = RERUNS, search: bool = True
) -> Report:
    """Try a task in pods."""
    started = time.monotonic()
    digest = task_digest(directory)
    scores: dict[str, list[float]] = {"noop": [], "solution": []}
    report = Report(directory.name, str(directory), digest, setting=setting_of(provision, reruns))
    try:
        task = _read(directory)
        report = replace(report, task=task.name)
        changes = await _try(fleet, task, provision or Provision(), max(1, reruns), scores)
        report = replace(report, changed=tuple(sorted({change.path for change in changes})))
        if search:
            found = await find_answer(fleet, task, changes, provision)
            report = replace(report, reasons=tuple(Reason(each.code, each.evidence) for each in found))
    except _Rejected as rejected:
        report = replace(report, reasons=(rejected.reason,))
    return replace(report, scores=scores, seconds=round(time.monotonic() - started, 3))


def _read(directory: Path) -> Task:
    try:
        task = read_task(directory)
    except InputError as error:
        raise _Rejected("invalid", str(error)) from None
    if not all(has_solution(task, step) for step in task.steps or (None,)):
        raise _Rejected("no-solution", f"{directory}: there is no solve.sh")
    return task


async def _try(
    fleet: Fleet, task: Task, provision: Provision, reruns: int, scores: dict[str, list[float]]
) -> tuple[FileChange, ...]:
    """Nothing and the solution, as often as asked; the solution's changes."""
    passing = task.passing
    clean = not task.steps and not graded_in_place(task)

    async def rerun(name: str, actor: Actor) -> Once:
        """Once, and again; of a task graded in a clean copy only the grading, for that is what could differ."""
        first = await _once(fleet, task, actor, provision, clean, None)
        scores[name].append(first.grade.score)
        for _ in range(reruns - 1):
            more = await _once(fleet, task, actor, provision, clean, first.changes)
            scores[name].append(more.grade.score)
        if len(set(scores[name])) > 1:
            raise _Rejected("flaky", f"{name}: rewards {', '.join(f'{score:g}' for score in scores[name])}")
        return first

    idle = await rerun("noop", nothing)
    if idle.grade.score >= passing:
        raise _Rejected("noop-passes", f"reward {idle.grade.score:g} for doing nothing; {idle.grade.log[-500:]}")
    solved = await rerun("solution", solution)
    if solved.grade.score < passing:
        await _explain(fleet, task, provision, passing, solved.grade, clean)
    return solved.changes


@dataclass(frozen=True)
class Once:
    """One try: its grade, and everything that was changed for it."""

    grade: Grade
    changes: tuple[FileChange, ...]


async def _once(
    fleet: Fleet, task: Task, actor: Actor, provision: Provision, clean: bool, changes: tuple[FileChange, ...] | None
) -> Once:
    """Act and grade, or grade `changes` again. A machine that failed is given another chance."""
    for chance in range(CHANCES):
        try:
            if not clean:
                made = await attempt(fleet, task, actor, provision=provision)
                return Once(made, made.changes)
            if changes is None:
                with failures(task):
                    async with open_ground(fleet, task, provision=provision) as ground:
                        await actor(ground, None)
                        changes = await ground.changes()
            return Once(await grade(fleet, task, changes, provision=provision), changes)
        except SolutionFailed as error:
            raise _Rejected("solution-broken", str(error)) from None
        except GradingFailed as error:
            if error.cause == "sandbox" and chance + 1 < CHANCES:
                continue
            code = {"build": "build-failed", "sandbox": "sandbox"}.get(error.cause, "verifier-broken")
            raise _Rejected(code, str(error)) from None
        except InputError as error:
            raise _Rejected("build-failed", str(error)) from None
    raise AssertionError("a last chance ends in a result")


async def _explain(fleet: Fleet, task: Task, provision: Provision, passing: float, solved: Grade, clean: bool) -> None:
    """A solution that fails may have done its work where the clean copy does not see it."""
    if clean:
        try:
            there = await attempt(fleet, task, solution, provision=provision, in_place=True)
        except GradingFailed as error:
            there = Grade({"reward": 0.0}, log=str(error))
        if there.score >= passing:
            message = 'name the paths in metadata.carry, or set metadata.grading = "in-place"'
            raise _Rejected("outside-workspace", message)
    raise _Rejected("solution-fails", f"reward {solved.score:g} for the solution; {solved.log[-1500:]}")


# ------------------------------------------------------------------------------------------------- many


@dataclass(frozen=True)
class Shelf:
    """Results that were found before, one file for each task's digest."""

    directory: Path

    def recall(self, digest: str, setting: str | None = None) -> Report | None:
        """What was found of a task; with `setting`, only if it was found under the same."""
        try:
            found = json.loads((self.directory / f"{digest}.json").read_text())
            if found.pop("format") != FORMAT or setting not in (None, found["setting"]):
                return None
            reasons = tuple(Reason(**each) for each in found.pop("reasons"))
            return Report(**{**found, "reasons": reasons, "changed": tuple(found["changed"]), "cached": True})
        except (OSError, ValueError, KeyError, TypeError):
            return None  # none, or of another time: it is found anew

    def keep(self, report: Report) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / f"{report.digest}.json"
        staging = file.with_suffix(f".{os.getpid()}")
        staging.write_text(json.dumps({"format": FORMAT, **asdict(report)}))
        staging.replace(file)


def setting_of(provision: Provision | None, reruns: int) -> str:
    """What may make a difference to a result, besides the task."""
    given = provision or Provision()
    return json.dumps([dict(given.images), given.build.allow, given.egress.allow, sorted(given.variables), reruns])


def default_shelf() -> Path:
    """Where results are kept: the cache directory of the desktop's convention."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "etude" / "validated"


async def validate_all(
    fleet: Fleet,
    directories: Sequence[Path],
    *,
    provision: Provision | None = None,
    reruns: int = RERUNS,
    at_once: int | None = None,
    shelf: Shelf | None = None,
    on_report: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Validate tasks in parallel, in their order; those whose result is known are not tried again."""
    gate = asyncio.Semaphore(at_once or max(2, usable_cores()))

    async def one(directory: Path) -> Report:
        async with gate:
            known = shelf.recall(task_digest(directory), setting_of(provision, reruns)) if shelf else None
            report = known or await validate(fleet, directory, provision=provision, reruns=reruns)
            report = replace(report, directory=str(directory))
            if shelf and known is None and not any(reason.code == "sandbox" for reason in report.reasons):
                shelf.keep(report)
            on_report(report)
            return report

    tasks = [asyncio.create_task(one(directory)) for directory in directories]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
