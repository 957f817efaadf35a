"""One trial of a task: an agent works in the environment, then the verifier runs; for multi-step tasks, once per step.

An agent is an async function of the environment and the step that returns the trace of its session, or None if it has
none. `nop_agent` and `oracle_agent` validate a task, `commands_agent` runs a script, `etude.tasks.session_agent` runs
a session of the harness.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from etude.errors import InputError
from etude.harness.trace import Trace
from etude.pods.fleet import Fleet
from etude.tasks.base_images import HostSettings
from etude.tasks.control import ControlRun, with_control
from etude.tasks.environment import (
    EnvironmentCheckpoint,
    PreparedEnvironments,
    TaskEnvironment,
    copy_files,
    open_environment,
)
from etude.tasks.harbor import files_to_upload
from etude.tasks.schema import resolve_env
from etude.tasks.task import Task, TaskStep
from etude.tasks.verifier import (
    below_min_reward,
    combine_step_results,
    infrastructure_failures,
    steps_through,
    verified_in_place,
    verify_changes,
    verify_in_place,
)
from etude.tasks.verifier_result import VerifierResult

DEFAULT_AGENT_TIMEOUT_S = 3600.0  # for scripts, if the task sets no agent timeout
TrialAgent = Callable[[TaskEnvironment, TaskStep | None], Awaitable[Trace | None]]


@dataclass(frozen=True)
class Trial:
    """The outcome of a trial. `traces` are those of its sessions, one per step; a script leaves none."""

    result: VerifierResult
    traces: tuple[Trace, ...] = ()


async def nop_agent(environment: TaskEnvironment, step: TaskStep | None) -> None:
    """Change nothing."""


async def oracle_agent(environment: TaskEnvironment, step: TaskStep | None) -> None:
    """Run the task's own solution with the agent's user and timeout."""
    task = environment.task
    directory = "solution" if step is None else f"steps/{step.name}/solution"
    if not has_solution(task, step):
        raise InputError(f"{task.directory}: has no {directory}/solve.sh")
    await copy_files(environment.pod, files_to_upload(task, directory, "/solution", "solve.sh"), "/solution")
    phase = task.agent if step is None else step.agent
    env = resolve_env(task.solution.env, environment.host_settings.variables, f"{task.directory}/task.toml: solution")
    done = await environment.pod.exec(
        ["/solution/solve.sh"],
        cwd=environment.workspace,
        env=env,
        user=phase.user or task.agent.user,
        timeout=phase.timeout_s or task.agent.timeout_s or DEFAULT_AGENT_TIMEOUT_S,
    )
    if not done.ok:
        why = "timed out" if done.timed_out else f"ended with exit code {done.exit_code}"
        raise SolutionFailed(f"{task.name}: {directory}/solve.sh {why}:\n{(done.stdout + done.stderr)[-2000:]}")
    await environment.pod.remove("/solution")


class SolutionFailed(InputError):
    """The task's solve.sh failed."""


def has_solution(task: Task, step: TaskStep | None = None) -> bool:
    directory = "solution" if step is None else f"steps/{step.name}/solution"
    return (task.directory / directory / "solve.sh").is_file()


def reference_agent(task: Task, step: TaskStep | None) -> TrialAgent | None:
    """Return the agent of the reference solution, if the task has one for every step up to this one."""
    return oracle_agent if all(has_solution(task, each) for each in steps_through(task, step) or (None,)) else None


def commands_agent(*lines: str) -> TrialAgent:
    """Return an agent that runs shell commands in order and ignores their exit codes."""

    async def run(environment: TaskEnvironment, step: TaskStep | None) -> None:
        for line in lines:
            await environment.pod.exec(["bash", "-c", line], cwd=environment.workspace, timeout=DEFAULT_AGENT_TIMEOUT_S)

    return run


async def run_trial(
    fleet: Fleet,
    task: Task,
    agent: TrialAgent,
    *,
    host_settings: HostSettings | None = None,
    in_place: bool = False,
    artifacts: Path | None = None,
    prepared: PreparedEnvironments | None = None,
    checkpoint: EnvironmentCheckpoint | None = None,
) -> Trial:
    """Run an agent on a task and verify the outcome. Raise VerifierFailed if there is no result.

    A submission that stops its verifier gets 0, if the verifier completes on the reference solution (`control.py`).
    With a `checkpoint` the trial continues in the restored environment; multi-step tasks cannot be resumed.
    """
    in_place = in_place or verified_in_place(task)
    if task.steps:
        if checkpoint is not None:
            raise InputError(f"{task.name} has steps; a trial of it cannot be resumed from a checkpoint")
        with infrastructure_failures(task):
            return await _run_steps(fleet, task, agent, host_settings, in_place, artifacts)
    with infrastructure_failures(task):
        async with open_environment(
            fleet, task, host_settings=host_settings, prepared=prepared, checkpoint=checkpoint
        ) as environment:
            trace = await agent(environment, None)
            traces = () if trace is None else (trace,)
            control = ControlRun(environment, None, in_place, reference_agent(task, None))
            if in_place:
                verification = verify_in_place(environment, artifacts=artifacts)
                return Trial(await with_control(control, verification), traces)
            changes = await environment.changes()
        # The agent's pod is closed first: trials that hold one pod while waiting for a second could deadlock.
        verification = verify_changes(environment, changes, artifacts=artifacts)
        return Trial(await with_control(control, verification, changes), traces)


async def _run_steps(
    fleet: Fleet,
    task: Task,
    agent: TrialAgent,
    host_settings: HostSettings | None,
    in_place: bool,
    artifacts: Path | None,
) -> Trial:
    results: list[VerifierResult] = []
    traces: list[Trace] = []
    stopped = ""
    async with open_environment(fleet, task, host_settings=host_settings) as environment:
        for step in task.steps:
            step_artifacts = artifacts / step.name if artifacts else None
            await environment.begin_step(step)
            if (trace := await agent(environment, step)) is not None:
                traces.append(trace)
            changes = None if in_place else await environment.changes()
            if changes is None:
                verification = verify_in_place(environment, step=step, artifacts=step_artifacts)
            else:
                verification = verify_changes(environment, changes, step=step, artifacts=step_artifacts)
            control = ControlRun(environment, step, in_place, reference_agent(task, step))
            results.append(await with_control(control, verification, changes))
            if stopped := below_min_reward(step, results[-1].rewards):
                break
    combined = combine_step_results(task, results)
    combined = replace(combined, facts={**combined.facts, "stopped": stopped}) if stopped else combined
    return Trial(combined, tuple(traces))
