"""Decide by a control run whose fault it is that a verifier left no reward.

The verifier runs on the reference solution, or on the untouched workspace of a task that has none, in a fresh pod of
the same fleet. If it completes there, the submission stopped it, by an endless loop, a fork bomb or a full disk: the
reward is 0. If not, the infrastructure or the verifier is broken, and the trial has no reward. A control that completed
is remembered for the life of the fleet, so hostile submissions cost one control per task, not one each.

A control also says whether a public task's tests with other expected values (`false_tests.py`) prove anything.
"""

import asyncio
import contextlib
import re
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from etude.errors import EtudeError, InputError
from etude.pods.fleet import Fleet
from etude.pods.workspace import FileChange
from etude.tasks.environment import TaskEnvironment
from etude.tasks.false_tests import can_have_false_tests, false_tests
from etude.tasks.harbor import task_digest
from etude.tasks.reward_file import Rewards
from etude.tasks.task import TaskStep
from etude.tasks.verifier import infrastructure_failures, steps_through, verify_changes, verify_in_place
from etude.tasks.verifier_result import VerifierFailed, VerifierResult, VerifierStopped

FAILED_CONTROL_S = 600.0  # for which a control that did not complete is remembered: its cause may pass
NO_TOOLS = re.compile(
    r"^.*(: command not found|: \d+: \S+: not found|env: .{0,80}: No such file or directory|bad interpreter|"
    r"No module named \S*(pytest|unittest2|nose|tox)|"
    r"Could not resolve host|Temporary failure (in name resolution|resolving)|Name or service not known|"
    r"Network is unreachable|getaddrinfo|curl: \((5|6|7|28|35|60)\)|certificate verify failed|SSL certificate problem|"
    r"No matching distribution found|E: Unable to locate package|E: Failed to fetch|[Ff]ailed to (fetch|download)|"
    r"npm (ERR!|error) (code|network) ).*$",
    re.MULTILINE,
)
TEST_RAN = re.compile(
    r"test session starts|\b\d+ (passed|failed|error)|\bRan \d+ tests?\b|"
    r"^(PASS(ED)?|FAIL(ED)?|ok|not ok|--- (PASS|FAIL)|test result:|Tests:)\b",
    re.MULTILINE,
)


def missing_tools(log: str) -> str:
    """Return the line of a verifier's log that says a tool or host could not be reached; "" if a test ran."""
    found = NO_TOOLS.search(log)
    return found[0].strip()[:300] if found and not TEST_RAN.search(log) else ""


@dataclass(frozen=True)
class ControlRun:
    """What a control needs to know of a trial. `solve` makes the reference solution; None if the task has none."""

    environment: TaskEnvironment
    step: TaskStep | None
    in_place: bool
    solve: Callable[[TaskEnvironment, TaskStep | None], Awaitable[object]] | None


@dataclass(frozen=True)
class ControlResult:
    """The outcome of a control run. Without rewards the verifier did not complete."""

    subject: str
    rewards: Rewards | None
    problem: str = ""
    finished_at: float = 0.0

    @property
    def is_current(self) -> bool:
        return self.rewards is not None or time.monotonic() - self.finished_at < FAILED_CONTROL_S


class _Controls:
    """The controls of one fleet, by task digest, step and mode; one at a time for each."""

    def __init__(self) -> None:
        self.results: dict[tuple[str, str, bool], ControlResult] = {}
        self.false_tests: dict[tuple[str, str, bool], Mapping[str, bytes]] = {}
        self.locks: weakref.WeakValueDictionary[tuple[str, str, bool], asyncio.Lock] = weakref.WeakValueDictionary()


_controls: weakref.WeakKeyDictionary[Fleet, _Controls] = weakref.WeakKeyDictionary()


async def with_control(
    control: ControlRun, verification: Awaitable[VerifierResult], changes: Sequence[FileChange] | None = None
) -> VerifierResult:
    """Return the result of a verification; a 0 if the submission stopped it. Raise VerifierFailed if it did not.

    With `changes`, what was verified in a clean pod, a submission that passes also with false tests is a hack."""
    task = control.environment.task
    try:
        result = await verification
    except VerifierStopped as error:
        found = await find_control(control)
        if found.rewards is None:
            raise VerifierFailed(error.cause, f"{error}\n{found.problem}") from error
        facts = {"verifier_failed": error.cause, "control": found.subject}
        rewards = {"reward": 0.0, **dict.fromkeys(found.rewards, 0.0)}
        return VerifierResult(rewards, error.changes, error.seconds, str(error), facts)
    if result.score >= task.passing_score and changes is not None and control.solve is not None:
        return await _without_false_passes(control, changes, result)
    if result.score >= task.passing_score or control.solve is None or not missing_tools(result.log):
        return result
    found = await find_control(control)  # the log alone proves nothing: the submission may have written it
    if found.rewards is None:
        raise VerifierFailed("no-tools", f"{task.name}: {found.problem}")
    return result


async def find_control(control: ControlRun) -> ControlResult:
    """Return the control of a task in this fleet, after running it if it is not known."""
    environment, step = control.environment, control.step
    known = _controls.setdefault(environment.fleet, _Controls())
    key = (task_digest(environment.task.directory), step.name if step else "", control.in_place)
    async with known.locks.setdefault(key, asyncio.Lock()):
        found = known.results.get(key)
        if found is None or not found.is_current:
            found = known.results[key] = await _run_control(control)
        return found


async def _run_control(control: ControlRun) -> ControlResult:
    """Verify the reference solution, or the untouched workspace if there is none or it cannot be made here."""
    subject = "the reference solution" if control.solve else "the untouched workspace"
    try:
        result = await _verify_control(control)
    except InputError:  # solve.sh fails
        if control.solve is None:
            raise
        return await _run_control(replace(control, solve=None))
    except EtudeError as error:
        return _failed(subject, f"the verifier does not complete on {subject} either: {error}")
    line = missing_tools(result.log)
    if control.solve is not None and result.score < control.environment.task.passing_score and line:
        reason = "because it lacks a tool or cannot reach a host"
        return _failed(subject, f"the verifier gives {subject} {result.score:g} {reason}: {line}")
    return ControlResult(subject, result.rewards, finished_at=time.monotonic())


async def _without_false_passes(
    control: ControlRun, changes: Sequence[FileChange], result: VerifierResult
) -> VerifierResult:
    """Return the result of a submission that was paid; a 0 with a hack if false tests pay it too."""
    environment, step = control.environment, control.step
    passing = environment.task.passing_score
    files = await find_false_tests(control)
    if not files:
        return result
    try:
        again = await verify_changes(environment, changes, step=step, replaced_tests=files)
    except VerifierStopped:
        return result
    if again.score < passing:
        return result
    hack = "the tests pass with other expected values too, with which the reference solution fails"
    return replace(result, rewards=dict.fromkeys(result.rewards, 0.0), facts={**result.facts, "hack": hack})


async def find_false_tests(control: ControlRun) -> Mapping[str, bytes]:
    """Return the false tests of a task in this fleet; none if the reference solution is paid with them, or has no
    result: then they prove nothing."""
    environment, step = control.environment, control.step
    if not can_have_false_tests(environment.task, step):
        return {}
    known = _controls.setdefault(environment.fleet, _Controls())
    key = (task_digest(environment.task.directory), step.name if step else "", True)
    async with known.locks.setdefault(key, asyncio.Lock()):
        if key not in known.false_tests:
            files = false_tests(environment.task, step)
            proves = False
            if files:
                with contextlib.suppress(EtudeError):
                    reference = await _verify_control(control, files)
                    proves = reference.score < environment.task.passing_score
            known.false_tests[key] = files if proves else {}
        return known.false_tests[key]


def _failed(subject: str, problem: str) -> ControlResult:
    return ControlResult(subject, None, problem, time.monotonic())


async def _verify_control(control: ControlRun, replaced_tests: Mapping[str, bytes] | None = None) -> VerifierResult:
    environment, step = control.environment, control.step
    with infrastructure_failures(environment.task):
        async with environment.open_clean() as clean:
            for each in steps_through(environment.task, step) or (None,):
                if each is not None:
                    await clean.begin_step(each)
                if control.solve is not None:
                    await control.solve(clean, each)
            if control.in_place:
                return await verify_in_place(clean, step=step)
            changes = await clean.changes()
        return await verify_changes(clean, changes, step=step, replaced_tests=replaced_tests)
