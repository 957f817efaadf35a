"""Run a task's verifier with Harbor's semantics, in a clean copy of the environment.

A new pod is made from the task, the agent's changes are applied to it (except those to protected files), then tests/ is
uploaded and test.sh runs. Reward files, edited tests, replaced programs and processes of the agent's pod do not exist
there. `metadata.grading = "in-place"` verifies in the agent's own pod instead, as Harbor does.

The exit code of test.sh is ignored; reward.json takes precedence over reward.txt. A missing or unreadable reward, a
timeout or a pod failure raises VerifierFailed: there is no result, and the agent is not at fault.
"""

import json
import math
import secrets
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
from etude.tasks.environment import PreparedEnvironments, TaskEnvironment, copy_files, is_tracked, open_environment
from etude.tasks.harbor import files_to_upload
from etude.tasks.image import BuildFailed, ImagePlan
from etude.tasks.reward_file import REWARD_JSON, REWARD_TXT, Rewards, read_if_exists, read_rewards
from etude.tasks.schema import DEFAULT_VERIFIER_TIMEOUT_S, resolve_env
from etude.tasks.task import MachineSpec, Task, TaskPhase, TaskStep
from etude.tasks.verifier_result import VerifierFailed, VerifierResult

STDOUT = "/logs/verifier/test-stdout.txt"
SEAL = "/logs/verifier/seal"
MAX_LOG = 16 << 10  # bytes of the verifier's output kept in the result


@dataclass(frozen=True)
class VerifierOutput:
    """Rewards and log of one verifier run. `forged`: our verifier did not write the reward file."""

    rewards: Rewards
    log: str
    forged: bool = False

    def result(self, changes: Sequence[FileChange], started: float, facts: Mapping[str, Any]) -> VerifierResult:
        """Return the result with the changes inside the workspace; forged rewards become 0."""
        rewards = dict.fromkeys(self.rewards, 0.0) if self.forged else self.rewards
        facts = {**facts, "forged": True} if self.forged else facts
        in_workspace = tuple(change for change in changes if not change.path.startswith("/"))
        return VerifierResult(rewards, in_workspace, time.monotonic() - started, self.log, facts)


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
) -> VerifierResult:
    """Verify an agent's changes in a clean copy of the environment; for a multi-step task, one step.

    `artifacts` is a directory, created here, for collected artifacts. `plan` and `prepared` reuse what was made for the
    agent's environment.
    """
    if task.steps and step is None:
        raise InputError(f"{task.name} has steps; verify each of them, then call combine_step_results")
    settings, times, started = host_settings or HostSettings(), PhaseTimes(), time.monotonic()
    phase = _verifier_phase(task, step)
    with infrastructure_failures(task):
        options: dict[str, Any] = {"host_settings": settings, "plan": plan, "prepared": prepared}
        async with open_environment(fleet, task, phase=phase, **options) as environment:
            times.seconds.update(environment.seconds)
            with times.measure("apply"):
                for earlier in _steps_through(task, step):
                    await environment.begin_step(earlier)
                refused = refused_paths(changes, Globs(task.protected), environment)
                allowed = [change for change in changes if change.path not in refused]
                await apply_to_pod(environment.pod, environment.workspace, allowed)
            output = await _verify(environment, step, settings, times, artifacts)
    facts: dict[str, Any] = {"seconds": times.seconds}
    if refused:
        facts["protected"] = sorted(refused)
    return output.result(changes, started, facts)


def refused_paths(changes: Sequence[FileChange], protected: Globs, environment: TaskEnvironment) -> set[str]:
    """Return the paths of changes that are not applied: to protected files, to a parent directory of one, and to files
    whose changes are not reported."""
    kept = {parent for path in environment.baseline if protected.matches(path) for parent in parents(path)}
    return {
        change.path
        for change in changes
        if protected.matches(change.path)
        or (change.path in kept and change.after is not None)
        or ".." in change.path.split("/")
        or not is_tracked(change.path, environment.carry)
    }


async def verify_in_place(
    environment: TaskEnvironment, *, step: TaskStep | None = None, artifacts: Path | None = None
) -> VerifierResult:
    """Verify in the agent's own pod: Harbor's shared mode, for tasks whose result is more than files."""
    times, started = PhaseTimes(), time.monotonic()
    changes = await environment.changes()
    with infrastructure_failures(environment.task):
        output = await _verify(environment, step, environment.host_settings, times, artifacts)
    return output.result(changes, started, {"seconds": times.seconds, "in_place": True})


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


def _steps_through(task: Task, step: TaskStep | None) -> tuple[TaskStep, ...]:
    """Return the steps up to and including this one."""
    return () if step is None else task.steps[: task.steps.index(step) + 1]


async def _verify(
    environment: TaskEnvironment,
    step: TaskStep | None,
    host_settings: HostSettings,
    times: PhaseTimes,
    artifacts: Path | None,
) -> VerifierOutput:
    """Run the verifier in the environment, or in a separate one with the collected artifacts."""
    task, phase = environment.task, _verifier_phase(environment.task, step)
    own = (step or task).verifier_machine
    if own is None:
        seal = await upload_tests(environment.pod, task, step, times)
        # a verifier without root runs as the same user as the tested code, which could read the seal
        seal = seal if phase.user in (None, "root", "0") else ""
        try:
            return await _run(environment.pod, environment.workspace, phase, task, host_settings, times, seal)
        finally:
            if artifacts is not None:
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
        return await _run(separate.pod, separate.workspace, phase, task, host_settings, times, "")


async def upload_tests(pod: Pod, task: Task, step: TaskStep | None, times: PhaseTimes) -> str:
    """Upload tests/, a step's over the task's. Return the seal, a random token that `tests/.seal` requests and that the
    verifier must write next to its reward; "" if the task does not use one."""
    with times.measure("upload"):
        directories = ["tests"] if step is None else ["tests", f"steps/{step.name}/tests"]
        files = {file.target: file for each in directories for file in files_to_upload(task, each, "/tests", "test.sh")}
        seal = secrets.token_hex(16) if files.pop("/tests/.seal", None) else ""
        await pod.make_directory("/tests", 0o755)
        await copy_files(pod, list(files.values()), "/tests")
        if seal:
            await pod.write("/tests/.seal", seal, mode=0o600)
    return seal


async def _run(
    pod: Pod, workspace: str, phase: TaskPhase, task: Task, host_settings: HostSettings, times: PhaseTimes, seal: str
) -> VerifierOutput:
    """Run test.sh as the format specifies and read its rewards and log."""
    with times.measure("run"):
        for path in (REWARD_TXT, REWARD_JSON, SEAL):
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
        forged = bool(seal) and await read_if_exists(pod, SEAL) != seal.encode()
    return VerifierOutput(rewards, log, forged)


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
    return VerifierResult(
        rewards=last.rewards if task.step_reward_strategy == "final" else mean,
        changes=last.changes,
        seconds=sum(each.seconds for each in results),
        log=last.log,
        facts={"steps": {step.name: dict(each.rewards) for step, each in zip(task.steps, results, strict=False)}},
    )
