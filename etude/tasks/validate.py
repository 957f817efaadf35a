"""Validate tasks before use. A task is admitted only if doing nothing fails, its solution passes, reruns agree, and the
leak check finds nothing; otherwise its report has reason codes and evidence.

Reports are cached by task digest, so an interrupted validation resumes and unchanged tasks are not validated again.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from etude.errors import InputError
from etude.files import user_cache
from etude.pods.fleet import Fleet
from etude.pods.workspace import FileChange
from etude.system.cores import usable_cores
from etude.system.run_limited import run_limited
from etude.tasks.base_images import HostSettings
from etude.tasks.control import missing_tools
from etude.tasks.environment import open_environment
from etude.tasks.harbor import read_task, task_digest
from etude.tasks.leak_check import find_leaks
from etude.tasks.task import Task
from etude.tasks.trial import SolutionFailed, TrialAgent, has_solution, nop_agent, oracle_agent, run_trial
from etude.tasks.verifier import infrastructure_failures, verified_in_place, verify
from etude.tasks.verifier_result import VerifierFailed, VerifierResult

RERUNS = 3
MAX_TRIES = 2  # for sandbox failures
CACHE_FORMAT = 2  # a new number invalidates cached reports

# Reason codes for not admitting a task, with explanations.
REASONS: Mapping[str, str] = {
    "invalid": "the directory is not a task",
    "build-failed": "its environment cannot be built",
    "verifier-broken": "the verifier writes no valid reward",
    "noop-passes": "doing nothing passes",
    "no-solution": "there is no solution to validate it with",
    "solution-broken": "solve.sh itself fails",
    "solution-fails": "the solution does not pass",
    "outside-workspace": "the solution passes only with its changes outside the workspace",
    "flaky": "reruns do not agree",
    "answer-in-history": "a git object contains the solution",
    "answer-in-bytecode": "bytecode contains the solution",
    "answer-installed": "an installed copy contains the solution",
    "answer-in-cache": "a package cache contains the solution",
    "answer-in-build": "build leftovers contain the solution",
    "answer-in-archive": "a package archive contains the solution",
    "answer-in-workspace": "another file of the workspace contains the solution",
    "answer-in-image": "tests or solution are in the image",
    "git-unreadable": "its repository cannot be searched",
    "network": "the agent has network access and could find the solution there",
    "not-searched": "the leak check could not run",
    "sandbox": "the sandbox failed, not the task; validate it again",
}


@dataclass(frozen=True)
class Reason:
    """One reason not to admit a task."""

    code: str
    evidence: str = ""


@dataclass(frozen=True)
class ValidationReport:
    """The result of validating a task."""

    task: str
    directory: str
    digest: str
    reasons: tuple[Reason, ...] = ()
    scores: Mapping[str, Sequence[float]] = field(default_factory=dict)  # noop, solution
    changed: tuple[str, ...] = ()  # files that the solution changes
    seconds: float = 0.0
    setting: str = ""  # host settings and number of reruns; see settings_key
    cached: bool = False

    @property
    def admitted(self) -> bool:
        return not self.reasons


class _Rejected(Exception):
    def __init__(self, code: str, evidence: str = "") -> None:
        super().__init__(evidence)
        self.reason = Reason(code, evidence.strip()[-2000:])


async def validate(
    fleet: Fleet,
    directory: Path,
    *,
    host_settings: HostSettings | None = None,
    reruns: int = RERUNS,
    search: bool = True,
) -> ValidationReport:
    """Validate one task in pods."""
    started = time.monotonic()
    digest = task_digest(directory)
    scores: dict[str, list[float]] = {"noop": [], "solution": []}
    report = ValidationReport(directory.name, str(directory), digest, setting=settings_key(host_settings, reruns))
    try:
        task = _read(directory)
        report = replace(report, task=task.name)
        changes = await _check_agents(fleet, task, host_settings or HostSettings(), max(1, reruns), scores)
        report = replace(report, changed=tuple(sorted({change.path for change in changes})))
        if search:
            found = await find_leaks(fleet, task, changes, host_settings)
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
        raise _Rejected("no-solution", f"{directory}: has no solve.sh")
    return task


async def _check_agents(
    fleet: Fleet, task: Task, host_settings: HostSettings, reruns: int, scores: dict[str, list[float]]
) -> tuple[FileChange, ...]:
    """Run the nop and the oracle agent, each verified `reruns` times; return the solution's changes."""
    passing = task.passing_score
    clean = not task.steps and not verified_in_place(task)

    async def rerun(name: str, agent: TrialAgent) -> VerifiedChanges:
        """Run the agent and verify it `reruns` times. In clean mode the agent runs once: only verifying may vary."""
        first = await _run_and_verify(fleet, task, agent, host_settings, clean, None)
        scores[name].append(first.result.score)
        for _ in range(reruns - 1):
            more = await _run_and_verify(fleet, task, agent, host_settings, clean, first.changes)
            scores[name].append(more.result.score)
        if len(set(scores[name])) > 1:
            raise _Rejected("flaky", f"{name}: rewards {', '.join(f'{score:g}' for score in scores[name])}")
        return first

    nop = (await rerun("noop", nop_agent)).result
    if nop.score >= passing:
        raise _Rejected("noop-passes", f"reward {nop.score:g} for doing nothing; {nop.log[-500:]}")
    oracle = await rerun("solution", oracle_agent)
    if oracle.result.score < passing:
        await _reject_failed_solution(fleet, task, host_settings, passing, oracle.result, clean)
    return oracle.changes


@dataclass(frozen=True)
class VerifiedChanges:
    """One verified trial: its result and all changes, including those outside the workspace."""

    result: VerifierResult
    changes: tuple[FileChange, ...]


async def _run_and_verify(
    fleet: Fleet,
    task: Task,
    agent: TrialAgent,
    host_settings: HostSettings,
    clean: bool,
    changes: tuple[FileChange, ...] | None,
) -> VerifiedChanges:
    """Run a trial and verify it, or verify `changes` again. Sandbox failures are retried."""
    for number in range(MAX_TRIES):
        try:
            if not clean:
                result = (await run_trial(fleet, task, agent, host_settings=host_settings)).result
                return VerifiedChanges(result, result.changes)
            if changes is None:
                with infrastructure_failures(task):
                    async with open_environment(fleet, task, host_settings=host_settings) as environment:
                        await agent(environment, None)
                        changes = await environment.changes()
            return VerifiedChanges(await verify(fleet, task, changes, host_settings=host_settings), changes)
        except SolutionFailed as error:
            raise _Rejected("solution-broken", str(error)) from None
        except VerifierFailed as error:
            if error.cause == "sandbox" and number + 1 < MAX_TRIES:
                continue
            code = {"build": "build-failed", "sandbox": "sandbox"}.get(error.cause, "verifier-broken")
            raise _Rejected(code, str(error)) from None
        except InputError as error:
            raise _Rejected("build-failed", str(error)) from None
    raise AssertionError("unreachable: the last try returns or raises")


async def _reject_failed_solution(
    fleet: Fleet, task: Task, host_settings: HostSettings, passing: float, failed: VerifierResult, clean: bool
) -> None:
    """Reject a failing solution; verify it in place to find out whether it changed files outside the workspace."""
    if line := missing_tools(failed.log):
        raise _Rejected("verifier-broken", f"reward {failed.score:g} for the solution before any test ran: {line}")
    if clean:
        try:
            trial = await run_trial(fleet, task, oracle_agent, host_settings=host_settings, in_place=True)
            in_place = trial.result
        except VerifierFailed as error:
            in_place = VerifierResult({"reward": 0.0}, log=str(error))
        if in_place.score >= passing:
            message = 'name the paths in metadata.carry, or set metadata.grading = "in-place"'
            raise _Rejected("outside-workspace", message)
    raise _Rejected("solution-fails", f"reward {failed.score:g} for the solution; {failed.log[-1500:]}")


# ------------------------------------------------------------------------------------------------- many tasks


@dataclass(frozen=True)
class ValidationCache:
    """Validation reports on disk, one file per task digest."""

    directory: Path

    def load(self, digest: str, setting: str | None = None) -> ValidationReport | None:
        """Return the report of a task, or None; with `setting`, only a report made under the same settings."""
        try:
            found = json.loads((self.directory / f"{digest}.json").read_text())
            if found.pop("format") != CACHE_FORMAT or setting not in (None, found["setting"]):
                return None
            reasons = tuple(Reason(**each) for each in found.pop("reasons"))
            return ValidationReport(**{**found, "reasons": reasons, "changed": tuple(found["changed"]), "cached": True})
        except (OSError, ValueError, KeyError, TypeError):
            return None  # missing, or of an older format

    def save(self, report: ValidationReport) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        file = self.directory / f"{report.digest}.json"
        staging = file.with_suffix(f".{os.getpid()}")
        staging.write_text(json.dumps({"format": CACHE_FORMAT, **asdict(report)}))
        staging.replace(file)


def settings_key(host_settings: HostSettings | None, reruns: int) -> str:
    """Return everything besides the task that may affect its report, as JSON."""
    given = host_settings or HostSettings()
    allowed = given.build_egress.allow, given.egress.allow
    return json.dumps([dict(given.images), *allowed, sorted(given.variables), reruns])


def default_validation_cache() -> Path:
    """Return the directory of cached reports."""
    return user_cache("validated")


async def validate_all(
    fleet: Fleet,
    directories: Sequence[Path],
    *,
    host_settings: HostSettings | None = None,
    reruns: int = RERUNS,
    at_once: int | None = None,
    cache: ValidationCache | None = None,
    on_report: Callable[[ValidationReport], None] = lambda report: None,
) -> list[ValidationReport]:
    """Validate tasks concurrently, skipping those with a cached report; return reports in the given order."""

    async def one(directory: Path) -> ValidationReport:
        cached = cache.load(task_digest(directory), settings_key(host_settings, reruns)) if cache else None
        report = cached or await validate(fleet, directory, host_settings=host_settings, reruns=reruns)
        report = replace(report, directory=str(directory))
        if cache and cached is None and not any(reason.code == "sandbox" for reason in report.reasons):
            cache.save(report)
        on_report(report)
        return report

    return await run_limited(map(one, directories), at_once or max(2, usable_cores()))
