"""Run a task's verifier with Harbor's semantics, in a clean copy of the environment.

A new pod is made from the task, the agent's changes are applied to it (except those to protected files), then tests/ is
uploaded and test.sh runs. Reward files, edited tests, replaced programs and processes of the agent's pod do not exist
there. Where tests/ has checks (`etude.tasks.checks`), the pod only observes submitted code, and this process judges.
`metadata.grading = "in-place"` verifies in the agent's own pod instead, as Harbor does.

The exit code of test.sh is ignored; reward.json takes precedence over reward.txt. A missing or unreadable reward, a
timeout or a pod failure raises VerifierFailed: there is no result. If it happens after the submission was in the pod,
it is VerifierStopped, and `run_trial` decides by a control run whether the submission is at fault (`control.py`).
"""

import json
import math
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.globs import Globs
from etude.pods.fleet import Fleet
from etude.pods.pod import Pod, PodError
from etude.pods.workspace import FileChange, apply_to_pod, parents, remove_if_exists
from etude.tasks.artifacts import collect_artifacts
from etude.tasks.base_images import HostSettings
from etude.tasks.checks.in_pods import CheckRun, read_checks
from etude.tasks.environment import (
    EnvironmentUnavailable,
    PreparedEnvironments,
    TaskEnvironment,
    copy_files,
    is_tracked,
    open_environment,
)
from etude.tasks.harbor import files_to_upload
from etude.tasks.image import BuildFailed, ImagePlan
from etude.tasks.reward_file import REWARD_JSON, REWARD_TXT, Rewards, read_if_exists, read_rewards
from etude.tasks.schema import DEFAULT_VERIFIER_TIMEOUT_S, resolve_env
from etude.tasks.task import MachineSpec, Task, TaskPhase, TaskStep
from etude.tasks.verifier_result import VerifierFailed, VerifierResult, VerifierStopped

STDOUT = "/logs/verifier/test-stdout.txt"
ATTACK_FACTS = ("forged", "hack", "protected", "verifier_failed", "control")  # kept of every step
MAX_LOG = 16 << 10  # bytes of the verifier's output kept in the result


@dataclass(frozen=True)
class VerifierOutput:
    """Rewards and log of one verifier run. `forged`: submitted code wrote a reward file that only a verifier writes."""

    rewards: Rewards
    log: str
    forged: bool = False
    hack: str = ""  # how the submission attacks its tests

    def result(self, changes: Sequence[FileChange], started: float, facts: Mapping[str, Any]) -> VerifierResult:
        """Return the result with the changes inside the workspace; forged rewards become 0."""
        rewards = dict.fromkeys(self.rewards, 0.0) if self.forged else self.rewards
        facts = {**facts, **({"forged": True} if self.forged else {}), **({"hack": self.hack} if self.hack else {})}
        return VerifierResult(rewards, in_workspace(changes), time.monotonic() - started, self.log[-MAX_LOG:], facts)


def in_workspace(changes: Sequence[FileChange]) -> tuple[FileChange, ...]:
    return tuple(change for change in changes if not change.path.startswith("/"))


@dataclass
class PhaseTimes:
    """Wall-clock seconds per phase of a verification."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


# ------------------------------------------------------------------------------------------------- verification


async def verify(
    fleet: Fleet,
    task: Task,
    changes: Sequence[FileChange],
    *,
    step: TaskStep | None = None,
    host_settings: HostSettings | None = None,
    artifacts: Path | None = None,
    plan: ImagePlan | None = None,
    prepared: PreparedEnvironments | None = None,
    replaced_tests: Mapping[str, bytes] | None = None,
) -> VerifierResult:
    """Verify an agent's changes in a clean copy of the environment; for a multi-step task, one step.

    `artifacts` is a directory, created here, for collected artifacts. `plan` and `prepared` reuse what was made for the
    agent's environment. `replaced_tests` are files for /tests in place of the task's own.
    """
    if task.steps and step is None:
        raise InputError(f"{task.name} has steps; verify each of them, then call combine_step_results")
    settings, times, started = host_settings or HostSettings(), PhaseTimes(), time.monotonic()
    phase = _verifier_phase(task, step)
    options: dict[str, Any] = {"host_settings": settings, "plan": plan, "prepared": prepared}
    run, output = _check_run(task, step), None
    with infrastructure_failures(task):
        while output is None:
            async with open_environment(fleet, task, phase=phase, **options) as environment:
                for name, seconds in environment.seconds.items():
                    times.seconds[name] = times.seconds.get(name, 0.0) + seconds
                for earlier in steps_through(task, step):
                    await environment.begin_step(earlier)
                with submission_failures(task, changes, started):
                    with times.measure("apply"):
                        protected = protected_changes(changes, environment)
                        allowed = [
                            each for each in changes if each.path not in protected and can_apply(each, environment)
                        ]
                        await apply_to_pod(environment.pod, environment.workspace, allowed)
                    replaced = replaced_tests or {}
                    output = await _verify(environment, allowed, run, step, settings, times, artifacts, replaced)
    facts = {"seconds": times.seconds, **({"protected": protected} if protected else {})}
    return output.result(changes, started, facts)


def protected_changes(changes: Sequence[FileChange], environment: TaskEnvironment) -> list[str]:
    """Return the paths of changes to protected files, or to a parent directory of one."""
    protected = Globs(environment.task.protected)
    kept = {parent for path in environment.baseline if protected.matches(path) for parent in parents(path)}
    return sorted(
        change.path
        for change in changes
        if protected.matches(change.path) or (change.path in kept and change.after is not None)
    )


def can_apply(change: FileChange, environment: TaskEnvironment) -> bool:
    """Return whether a change may be applied: it stays where changes are reported."""
    return ".." not in change.path.split("/") and is_tracked(change.path, environment.carry)


async def verify_in_place(
    environment: TaskEnvironment, *, step: TaskStep | None = None, artifacts: Path | None = None
) -> VerifierResult:
    """Verify in the agent's own pod: Harbor's shared mode, for tasks whose result is more than files."""
    times, started = PhaseTimes(), time.monotonic()
    changes = await environment.changes()
    run, output = _check_run(environment.task, step), None
    with submission_failures(environment.task, changes, started):
        while output is None:
            output = await _verify(environment, changes, run, step, environment.host_settings, times, artifacts, {})
    protected = protected_changes(changes, environment)  # not refused here, but a gate of the rewards reads them
    facts = {"seconds": times.seconds, "in_place": True, **({"protected": protected} if protected else {})}
    return output.result(changes, started, facts)


async def verify_environment(
    environment: TaskEnvironment, *, step: TaskStep | None = None, artifacts: Path | None = None
) -> VerifierResult:
    """Verify the current state of an environment in the mode its task sets."""
    if verified_in_place(environment.task):
        return await verify_in_place(environment, step=step, artifacts=artifacts)
    return await verify_changes(environment, await environment.changes(), step=step, artifacts=artifacts)


async def verify_changes(
    environment: TaskEnvironment,
    changes: Sequence[FileChange],
    *,
    step: TaskStep | None = None,
    artifacts: Path | None = None,
    replaced_tests: Mapping[str, bytes] | None = None,
) -> VerifierResult:
    """Verify changes that were taken from an environment whose pod may be closed by now."""
    result = await verify(
        environment.fleet,
        environment.task,
        changes,
        step=step,
        host_settings=environment.host_settings,
        artifacts=artifacts,
        plan=environment.plan,
        prepared=environment.prepared,
        replaced_tests=replaced_tests,
    )
    if not environment.left_out:
        return result
    return replace(result, facts={**result.facts, "left_out": list(environment.left_out[:100])})


def verified_in_place(task: Task) -> bool:
    mode = task.metadata.get("grading", "clean")
    if mode not in ("clean", "in-place"):
        raise InputError(f'{task.directory}/task.toml: metadata.grading is {mode!r}; expected "clean" or "in-place"')
    return bool(mode == "in-place")


@contextmanager
def infrastructure_failures(task: Task) -> Iterator[None]:
    """Turn build, pod and I/O errors into VerifierFailed with a cause."""
    try:
        yield
    except BuildFailed as error:
        raise VerifierFailed("build", f"{task.name}: {error}") from error
    except (PodError, OSError) as error:
        raise VerifierFailed("sandbox", f"{task.name}: {error}") from error


@contextmanager
def submission_failures(task: Task, changes: Sequence[FileChange], started: float) -> Iterator[None]:
    """Turn failures with the submission in the pod into VerifierStopped; not those to build or create a further pod."""
    try:
        with infrastructure_failures(task):
            yield
    except VerifierFailed as error:
        if isinstance(error.__cause__, BuildFailed | EnvironmentUnavailable):
            raise
        raise VerifierStopped(error.cause, str(error), in_workspace(changes), time.monotonic() - started) from error


# ------------------------------------------------------------------------------------------------- running test.sh


def _verifier_phase(task: Task, step: TaskStep | None) -> TaskPhase:
    """Return the verifier's settings; a step's override the task's."""
    own, general = (step.verifier if step else task.verifier), task.verifier
    return TaskPhase(
        timeout_s=own.timeout_s or general.timeout_s or DEFAULT_VERIFIER_TIMEOUT_S,
        user=own.user or general.user,
        env={**general.env, **own.env},
        network=own.network or general.network,
    )


def steps_through(task: Task, step: TaskStep | None) -> tuple[TaskStep, ...]:
    """Return the steps up to and including this one."""
    return () if step is None else task.steps[: task.steps.index(step) + 1]


def _check_run(task: Task, step: TaskStep | None) -> CheckRun | None:
    """Return a run of the task's checks; None if the task has another verifier, or one in a separate environment."""
    checks = read_checks(task, step) if (step or task).verifier_machine is None else None
    return None if checks is None else CheckRun(task, checks)


async def _verify(
    environment: TaskEnvironment,
    changes: Sequence[FileChange],
    run: CheckRun | None,
    step: TaskStep | None,
    host_settings: HostSettings,
    times: PhaseTimes,
    artifacts: Path | None,
    replaced_tests: Mapping[str, bytes],
) -> VerifierOutput | None:
    """Run the verifier in the environment, or in a separate one with the collected artifacts. Return None if a run of
    checks has further passes, each of which is better done in a new pod."""
    task, phase = environment.task, _verifier_phase(environment.task, step)
    own = (step or task).verifier_machine
    if own is None:
        try:
            if run is not None:
                with times.measure("run"):
                    await run.observe(environment, changes, phase)
                return None if run.pending else VerifierOutput(*run.result())
            await upload_tests(environment.pod, task, step, times)
            for path, data in replaced_tests.items():
                await environment.pod.write(path, data, mode=(await environment.pod.stat(path)).mode & 0o777)
            return await _run(environment.pod, environment.workspace, phase, task, host_settings, times)
        finally:
            if artifacts is not None and not artifacts.exists():
                await collect_artifacts(environment, step, artifacts)
    with tempfile.TemporaryDirectory(prefix="etude-artifacts-") as directory:
        collected = artifacts or Path(directory) / "artifacts"
        with times.measure("artifacts"):
            await collect_artifacts(environment, step, collected)
        return await _run_separate(environment, own, step, collected, phase, host_settings, times)


async def _run_separate(
    environment: TaskEnvironment,
    own: MachineSpec,
    step: TaskStep | None,
    collected: Path,
    phase: TaskPhase,
    host_settings: HostSettings,
    times: PhaseTimes,
) -> VerifierOutput:
    """Run a separate verifier: its image is built from tests/, and it sees only the collected artifacts."""
    task = environment.task
    context = task.directory / "tests"
    if step is not None and (task.directory / "steps" / step.name / "tests/Dockerfile").exists():
        context = task.directory / "steps" / step.name / "tests"
    if not own.image and not (context / "Dockerfile").exists():
        raise InputError(
            f"{context}: a separate verifier needs a Dockerfile there or verifier.environment.docker_image"
        )
    options: dict[str, Any] = {"host_settings": host_settings, "phase": phase, "machine": own, "context": context}
    async with open_environment(environment.fleet, task, **options) as separate:
        times.seconds["pod"] = times.seconds.get("pod", 0.0) + separate.seconds["pod"]
        with times.measure("artifacts"):
            for entry in json.loads((collected / "manifest.json").read_text()):
                await separate.pod.upload(collected / entry["destination"], entry["source"])
        return await _run(separate.pod, separate.workspace, phase, task, host_settings, times)


async def upload_tests(pod: Pod, task: Task, step: TaskStep | None, times: PhaseTimes) -> None:
    """Upload tests/, a step's over the task's."""
    with times.measure("upload"):
        directories = ["tests"] if step is None else ["tests", f"steps/{step.name}/tests"]
        files = {file.target: file for each in directories for file in files_to_upload(task, each, "/tests", "test.sh")}
        await pod.make_directory("/tests", 0o755)
        await copy_files(pod, list(files.values()), "/tests")


async def _run(
    pod: Pod, workspace: str, phase: TaskPhase, task: Task, host_settings: HostSettings, times: PhaseTimes
) -> VerifierOutput:
    """Run test.sh as the format specifies and read its rewards and log."""
    with times.measure("run"):
        for path in (REWARD_TXT, REWARD_JSON):
            await remove_if_exists(pod, path)
        env = resolve_env(phase.env, host_settings.variables, f"{task.directory}/task.toml: verifier")
        command = f"/tests/test.sh > {shlex.quote(STDOUT)} 2>&1"
        done = await pod.exec(command, cwd=workspace, env=env, timeout=phase.timeout_s, user=phase.user)
    with times.measure("read"):
        log = (await read_if_exists(pod, STDOUT, MAX_LOG) or b"").decode("utf-8", "replace")
        if done.timed_out:
            message = f"{task.name}: test.sh timed out after {phase.timeout_s:g} s\n{log[-1000:]}"
            raise VerifierFailed("verifier-timeout", message)
        rewards = await read_rewards(pod, task.name, log)
    return VerifierOutput(rewards, log)


# ------------------------------------------------------------------------------------------------- steps


def below_min_reward(step: TaskStep, rewards: Rewards) -> str:
    """Return why no further step runs, or "" if min_reward is met. A missing reward is below every minimum."""
    for key, minimum in step.min_rewards.items():
        if (found := rewards.get(key, -math.inf)) < minimum:
            return f"step {step.name}: {key} is {found:g}, below {minimum:g}"
    return ""


def combine_step_results(task: Task, results: Sequence[VerifierResult]) -> VerifierResult:
    """Combine the results of the steps that ran: for each key the mean, or the last step's value."""
    if not results:
        raise InputError(f"{task.name}: no step was verified")
    last = results[-1]
    names = {name for each in results for name in each.rewards}
    mean = {name: sum(each.rewards.get(name, 0.0) for each in results) / len(results) for name in sorted(names)}
    found = {key: value for each in results for key, value in each.facts.items() if key in ATTACK_FACTS}
    steps = {step.name: dict(each.rewards) for step, each in zip(task.steps, results, strict=False)}
    return VerifierResult(
        rewards=last.rewards if task.step_reward_strategy == "final" else mean,
        changes=last.changes,
        seconds=sum(each.seconds for each in results),
        log=last.log,
        facts={"steps": steps, **found},
    )
