"""Runs the checks of a task with the two halves of its verifier apart.

Submitted code is observed in the pod, which gets the inputs of the checks and nothing that it must not know. What it
answers is data, which is judged in this process. So the reward does not depend on the users that the pod has: with root
and without, an answer is worth as much as it agrees with expected results that never entered the pod.
"""

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.pods.payload import START
from etude.pods.workspace import FileChange, full_path, read_files, remove_if_exists, stat_if_exists
from etude.tasks.checks import observer_program, python_command
from etude.tasks.checks.inside import judges
from etude.tasks.checks.inside.file_judges import FILE_KINDS
from etude.tasks.checks.inside.program import FORMAT
from etude.tasks.checks.inside.swe_log import NoResult
from etude.tasks.environment import TaskEnvironment, copy_files
from etude.tasks.harbor import files_to_upload
from etude.tasks.image import FileToCopy
from etude.tasks.reward_file import REWARD_JSON, REWARD_TXT, Rewards
from etude.tasks.schema import resolve_env
from etude.tasks.task import Task, TaskPhase, TaskStep
from etude.tasks.verifier_result import VerifierFailed

MAX_OBSERVATIONS = 32 << 20  # bytes read of them
MAX_LOG = 16 << 10  # bytes kept of the observers' output for people
MAX_CHANGED = 4 << 20  # bytes of changed files that are parsed in this process
OWN_FILES = ("/tests/verifier/", "/tests/checks.json", "/tests/expected.json", "/tests/test.sh")


@dataclass(frozen=True)
class TaskChecks:
    """The checks of a task or step, their expected results, and the other files of its tests/."""

    workspace: str
    checks: list[dict[str, Any]]
    expected: list[dict[str, Any]]
    files: list[FileToCopy]

    def suite_file(self, path: str) -> bytes | None:
        """Return a file of the suite; None if it has none of that name."""
        found = next((file for file in self.files if file.target == f"/tests/suite/{path}"), None)
        return None if found is None else _read(found.source)


def has_checks(task: Task, step: TaskStep | None) -> bool:
    """Return whether the verifier of a task, or of a step with its own test.sh, is ours."""
    return _read_spec(_tests_of(task, step)) is not None


def _tests_of(task: Task, step: TaskStep | None) -> Path:
    own = task.directory / f"steps/{step.name}/tests" if step is not None else None
    return own if own is not None and (own / "test.sh").is_file() else task.directory / "tests"


def _read_spec(top: Path) -> dict[str, Any] | None:
    if not (top / "checks.json").is_file() or not (top / "expected.json").is_file():
        return None
    spec = _load(top / "checks.json")
    return spec if isinstance(spec, dict) and "format" in spec else None  # another program's


def read_checks(task: Task, step: TaskStep | None) -> TaskChecks | None:
    """Return the checks of a task, or of a step with its own test.sh; None if that is not our verifier."""
    top = _tests_of(task, step)
    if (spec := _read_spec(top)) is None:
        return None
    expected = _load(top / "expected.json")
    if spec["format"] != FORMAT:
        raise InputError(f"{top}/checks.json: format is {spec['format']!r}; expected {FORMAT}: generate the task again")
    kinds = {*FILE_KINDS, *judges.EXECUTED_KINDS}
    if unknown := [check["kind"] for check in spec["checks"] if check["kind"] not in kinds]:
        raise InputError(f"{top}/checks.json: {unknown[0]} is not a kind of check; expected one of {sorted(kinds)}")
    if len(expected) != len(spec["checks"]):
        raise InputError(f"{top}/expected.json: has {len(expected)} results for {len(spec['checks'])} checks")
    directories = ["tests"] if step is None else ["tests", f"steps/{step.name}/tests"]
    files = {file.target: file for each in directories for file in files_to_upload(task, each, "/tests")}
    others = [file for target, file in files.items() if not target.startswith(OWN_FILES)]
    return TaskChecks(spec["workspace"], spec["checks"], expected, others)


def _load(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{file}: not JSON ({error})") from None


class CheckRun:
    """One run of the checks of a task: call `observe` with a pod for each of the `pending` passes.

    Submitted tests are run on each version of the code in a pass of its own, so that a clean pod can be given to each:
    nothing that they leave behind tells them which version comes next. After the last pass the observations are judged;
    tests that passed are then run a second time.
    """

    def __init__(self, task: Task, checks: TaskChecks) -> None:
        self.task, self.checks = task, checks
        self.files: dict[str, bytes] | None = None
        self.judgement: judges.Judgement | None = None
        self.forged = False  # submitted code wrote a reward file
        self.log = ""
        self._begin(checks.checks, checks.expected)

    def _begin(self, checks: list[dict[str, Any]], expected: list[dict[str, Any]], again: bool = False) -> None:
        self.current = (checks, expected)
        executed, self.secrets = judges.prepare(checks, expected, self.checks.suite_file, again=again)
        self.observed: list[dict[str, Any]] = [{} for _ in executed]
        together = [(number, check) for number, check in enumerate(executed) if "versions" not in check]
        self.pending: list[list[tuple[int, dict[str, Any]]]] = [together] if together else []
        for number, check in enumerate(executed):
            self.pending += [[(number, {**check, "versions": [version]})] for version in check.get("versions", ())]
        self.pending = self.pending or [[]]

    async def observe(self, environment: TaskEnvironment, changes: Sequence[FileChange], phase: TaskPhase) -> None:
        """Do the next pass in a pod to which the changes were applied."""
        if self.files is None:
            kinds = {check["kind"] for check in self.checks.checks}
            reads_files = not kinds.isdisjoint({*FILE_KINDS, "wheel"})
            if reads_files and sum(len(change.text("after")) for change in changes) > MAX_CHANGED:
                problem = f"the changed files have over {MAX_CHANGED:,} bytes"
                self.judgement, self.pending = judges.Judgement({"reward": 0.0}, [problem], ""), []
                return
            self.files = await _submitted_files(environment, changes) if reads_files else {}
        part = self.pending.pop(0)
        with self._no_result():
            if part:
                for (number, _), found in zip(part, await self._execute(environment, part, phase), strict=True):
                    runs = [*self.observed[number].get("runs", ()), *found.get("runs", ())]
                    self.observed[number] = {**found, "runs": runs}
            if not self.pending:
                await self._judge(self.files)

    async def _judge(self, files: dict[str, bytes]) -> None:
        found = await asyncio.to_thread(judges.judge, *self.current, self.observed, self.secrets, files)
        if self.judgement is not None:
            self.judgement = judges.compare_runs(self.judgement, found)
            return
        self.judgement = found
        if again := judges.checks_to_repeat(*self.current, found):
            self._begin(*again, again=True)

    def result(self) -> tuple[Rewards, str, bool, str]:
        """Return the rewards, the log, whether submitted code wrote a reward file, and how it attacks its tests, or "".
        Call it when no pass is pending."""
        assert self.judgement is not None, "a pass is pending"
        report = [*filter(None, [self.log]), *self.judgement.report]
        return self.judgement.rewards, "\n".join(report), self.forged, self.judgement.hack

    async def _execute(
        self, environment: TaskEnvironment, part: Sequence[tuple[int, dict[str, Any]]], phase: TaskPhase
    ) -> list[dict[str, Any]]:
        """Run the observer in a pod and return what it printed. Our program writes no reward file there."""
        pod, task, executed = environment.pod, self.task, [check for _, check in part]
        await pod.make_directory("/tests", 0o755 if phase.user else 0o700)
        await copy_files(pod, self.checks.files, "/tests")
        for path in (REWARD_TXT, REWARD_JSON):
            await remove_if_exists(pod, path)
        env = resolve_env(phase.env, environment.host_settings.variables, f"{task.directory}/task.toml: verifier")
        spec = {"workspace": self.checks.workspace, "checks": executed}
        done = await pod.exec(
            f"{python_command(executed)} -c '{START}' /tests/verifier observe",
            cwd=environment.workspace,
            env=env,
            stdin=observer_program(executed) + json.dumps(spec).encode(),
            timeout=phase.timeout_s,
            max_output=MAX_OBSERVATIONS,
            user=phase.user,
        )
        self.log = f"{self.log}\n{done.stderr.strip()}".strip()[-MAX_LOG:]
        if done.timed_out:
            message = f"{task.name}: submitted code was observed for {phase.timeout_s:g} s without an end"
            raise VerifierFailed("verifier-timeout", f"{message}\n{self.log[-1000:]}")
        for path in (REWARD_TXT, REWARD_JSON):
            self.forged = self.forged or await stat_if_exists(pod, path) is not None
        if done.exit_code != 0:
            raise NoResult(f"the observer ended with exit code {done.exit_code}")
        return judges.parse_observations(done.stdout_bytes, len(executed))

    @contextmanager
    def _no_result(self) -> Iterator[None]:
        try:
            yield
        except NoResult as error:
            raise VerifierFailed("no-reward", f"{self.task.name}: no reward: {error}\n{self.log[-1000:]}") from None


async def _submitted_files(environment: TaskEnvironment, changes: Sequence[FileChange]) -> dict[str, bytes]:
    """Return the files of the workspace and carried files with the changes. No submitted code has run yet."""
    changed = {change.path: change.text("after") for change in changes if change.after is not None}
    others = {path: file for path, file in environment.baseline.items() if path not in {each.path for each in changes}}
    found = {path: _read(file.source) for path, file in others.items() if file is not None}
    pod, root, limit = environment.pod, environment.workspace, judges.MAX_FILE_BYTES
    infos = {path: await stat_if_exists(pod, full_path(root, path)) for path, file in others.items() if file is None}
    states, _ = await read_files(pod, root, infos, limit, 16 * limit)  # of the image
    of_image = {path: FileChange(path, None, state).text("after") for path, state in states.items() if state}
    return {**found, **of_image, **changed}


def _read(source: Path) -> bytes:
    return b"" if source.is_symlink() else source.read_bytes()
