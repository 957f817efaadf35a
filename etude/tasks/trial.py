"""One attempt at a task: somebody acts on its ground, then it is graded. With steps, both for each step.

An actor is an async function of the ground and the step. `nothing` and `solution` are the two that prove a task;
`commands` runs a script; a session of the harness is one too.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from etude.errors import InputError
from etude.pods.fleet import Fleet
from etude.tasks.base_images import Provision
from etude.tasks.environment import Ground, Origin, fill, open_ground
from etude.tasks.harbor import uploads
from etude.tasks.image import Put
from etude.tasks.schema import resolve_env
from etude.tasks.task import Task, TaskStep
from etude.tasks.verifier import (
    combine_steps,
    failures,
    falls_short,
    grade_changes,
    grade_ground,
    grade_in_place,
    graded_in_place,
)
from etude.tasks.verifier_result import Grade

Actor = Callable[[Ground, TaskStep | None], Awaitable[None]]
SOLUTION_S = 3600.0  # for a solution where the task gives its agent no limit


async def nothing(ground: Ground, step: TaskStep | None) -> None:
    """Leave everything as it is."""


async def solution(ground: Ground, step: TaskStep | None) -> None:
    """Run the task's own solution, as the agent."""
    task = ground.task
    place = "solution" if step is None else f"steps/{step.name}/solution"
    if not has_solution(task, step):
        raise InputError(f"{task.directory}: there is no {place}/solve.sh")
    puts = [Put(path, f"/solution/{name}", _mode(path, name)) for name, path in uploads(task, place).items()]
    await fill(ground.pod, puts, "/solution")
    phase = task.agent if step is None else step.agent
    env = resolve_env(task.solution.env, ground.provision.variables, f"{task.directory}/task.toml: solution")
    done = await ground.pod.exec(
        ["/solution/solve.sh"],
        cwd=ground.workspace,
        env=env,
        user=phase.user or task.agent.user,
        timeout=phase.timeout_s or task.agent.timeout_s or SOLUTION_S,
    )
    if not done.ok:
        why = "ran out of time" if done.timed_out else f"ended with exit code {done.exit_code}"
        raise SolutionFailed(f"{task.name}: {place}/solve.sh {why}:\n{(done.stdout + done.stderr)[-2000:]}")
    await ground.pod.remove("/solution")


class SolutionFailed(InputError):
    """solve.sh itself failed."""


def has_solution(task: Task, step: TaskStep | None = None) -> bool:
    place = "solution" if step is None else f"steps/{step.name}/solution"
    return (task.directory / place / "solve.sh").is_file()


def _mode(path: Path, name: str) -> int:
    mode = path.lstat().st_mode & 0o7777
    return mode | 0o111 if name == "solve.sh" else mode


def commands(*lines: str) -> Actor:
    """Run shell commands one after the other; that one fails is the task's business."""

    async def act(ground: Ground, step: TaskStep | None) -> None:
        for line in lines:
            await ground.pod.exec(["bash", "-c", line], cwd=ground.workspace, timeout=SOLUTION_S)

    return act


async def attempt(
    fleet: Fleet,
    task: Task,
    actor: Actor,
    *,
    provision: Provision | None = None,
    in_place: bool = False,
    artifacts: Path | None = None,
    origin: Origin | None = None,
) -> Grade:
    """Let somebody act on a task, and grade what came of it. GradingFailed when there is no grade.

    With an `origin` the ground is as it was left there; tasks with steps cannot be taken up in the middle.
    """
    if task.steps:
        if origin is not None:
            raise InputError(f"{task.name} has steps; a session in one of them cannot be taken up again")
        with failures(task):
            return await _attempt_steps(fleet, task, actor, provision, in_place, artifacts)
    with failures(task):
        async with open_ground(fleet, task, provision=provision, origin=origin) as ground:
            await actor(ground, None)
            if in_place or graded_in_place(task):
                return await grade_in_place(ground, artifacts=artifacts)
            changes = await ground.changes()
        # Its pod is closed by now: many who hold one and wait for a second could wait for each other.
        return await grade_changes(ground, changes, artifacts=artifacts)


async def _attempt_steps(
    fleet: Fleet, task: Task, actor: Actor, provision: Provision | None, in_place: bool, artifacts: Path | None
) -> Grade:
    grades: list[Grade] = []
    short = ""
    async with open_ground(fleet, task, provision=provision) as ground:
        for step in task.steps:
            place = artifacts / step.name if artifacts else None
            await ground.begin_step(step)
            await actor(ground, step)
            judge = grade_in_place if in_place else grade_ground
            grades.append(await judge(ground, step=step, artifacts=place))
            if short := falls_short(step, grades[-1].rewards):
                break
    whole = combine_steps(task, grades)
    return replace(whole, facts={**whole.facts, "stopped": short}) if short else whole
