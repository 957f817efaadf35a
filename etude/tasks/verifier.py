"""Grading with Harbor's semantics, in a clean copy of the environment: what the agent left behind is not there.

A new pod is made from the task, the session's changes are applied to it (not those to protected files), then tests/ is
brought and test.sh run. Result files, edited tests, replaced programs and processes of the agent's pod do not exist in
it. A task may say otherwise: `metadata.grading = "in-place"` grades in the agent's own pod, as Harbor does it.

The exit code of test.sh means nothing. reward.json counts before reward.txt. No reward, one that cannot be read, a time
that is over or a machine that broke raise GradingFailed: there is no grade, and the agent is not to blame.
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
from etude.pods.fleet import Fleet
from etude.pods.pod import Pod, PodError
from etude.tasks.artifacts import collect
from etude.tasks.base_images import Provision
from etude.tasks.environment import Ground, fill, open_ground
from etude.tasks.harbor import separate_machine, uploads
from etude.tasks.image import BuildFailed, Plan, Put
from etude.tasks.reward_file import REWARD_JSON, REWARD_TXT, Rewards, read_if_there, read_rewards
from etude.tasks.schema import VERIFIER_S, resolve_env
from etude.tasks.task import Machine, Phase, Task, TaskStep
from etude.tasks.verifier_result import FileChange, Grade, GradingFailed
from etude.tasks.workspace import Globs, applicable, apply_changes, remove_if_there

STDOUT = "/logs/verifier/test-stdout.txt"
SEAL = "/logs/verifier/seal"
MAX_LOG = 16 << 10  # bytes of the verifier's output that a grade keeps


@dataclass(frozen=True)
class Verdict:
    """What a verifier came to. `forged`: there is a reward, but our verifier did not write it."""

    rewards: Rewards
    log: str
    forged: bool = False

    def grade(self, changes: Sequence[FileChange], started: float, facts: Mapping[str, Any]) -> Grade:
        """As a grade: a forged reward is worth nothing, whatever it says. Its changes are those of the workspace."""
        rewards = dict.fromkeys(self.rewards, 0.0) if self.forged else self.rewards
        facts = {**facts, "forged": True} if self.forged else facts
        mine = tuple(change for change in changes if not change.path.startswith("/"))
        return Grade(rewards, mine, time.monotonic() - started, self.log, facts)


@dataclass
class Clock:
    """Seconds by what they were spent on."""

    spent: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.monotonic() - started


# ------------------------------------------------------------------------------------------------- grading


async def grade(
    fleet: Fleet,
    task: Task,
    changes: Sequence[FileChange],
    *,
    step: TaskStep | None = None,
    provision: Provision | None = None,
    artifacts: Path | None = None,
    plan: Plan | None = None,
) -> Grade:
    """Grade a session's changes in a clean copy; of a task with steps, one step.

    `artifacts` is a directory, made here, for what the task says to collect; `plan` is how its ground was made.
    """
    if task.steps and step is None:
        raise InputError(f"{task.name} has steps; grade each of them, then combine_steps")
    given, clock, started = provision or Provision(), Clock(), time.monotonic()
    with failures(task):
        async with open_ground(fleet, task, provision=given, phase=_phase(task, step), plan=plan) as ground:
            clock.spent.update(ground.seconds)
            with clock.on("apply"):
                for earlier in _until(task, step):
                    await ground.begin_step(earlier)
                mine, refused = applicable(changes, ground.before, Globs(task.protected), ground.carry)
                await apply_changes(ground.pod, ground.workspace, ground.before, mine)
            verdict = await _verify(ground, step, given, clock, artifacts)
    facts: dict[str, Any] = {"seconds": clock.spent}
    if refused:
        facts["protected"] = sorted({change.path for change in refused})
    return verdict.grade(changes, started, facts)


async def grade_in_place(ground: Ground, *, step: TaskStep | None = None, artifacts: Path | None = None) -> Grade:
    """Grade in the agent's own pod: Harbor's shared mode, for tasks whose result is more than files."""
    clock, started = Clock(), time.monotonic()
    changes = await ground.changes()
    with failures(ground.task):
        verdict = await _verify(ground, step, ground.provision, clock, artifacts)
    return verdict.grade(changes, started, {"seconds": clock.spent, "in_place": True})


async def grade_ground(ground: Ground, *, step: TaskStep | None = None, artifacts: Path | None = None) -> Grade:
    """Grade what is in a ground now, the way its task says."""
    if graded_in_place(ground.task):
        return await grade_in_place(ground, step=step, artifacts=artifacts)
    return await grade_changes(ground, await ground.changes(), step=step, artifacts=artifacts)


async def grade_changes(
    ground: Ground, changes: Sequence[FileChange], *, step: TaskStep | None = None, artifacts: Path | None = None
) -> Grade:
    """Grade what was found on a ground, whose pod may be closed by now."""
    options: dict[str, Any] = {"step": step, "provision": ground.provision, "artifacts": artifacts, "plan": ground.plan}
    made = await grade(ground.fleet, ground.task, changes, **options)
    if not ground.left_out:
        return made
    return replace(made, facts={**made.facts, "left_out": list(ground.left_out[:100])})


def graded_in_place(task: Task) -> bool:
    how = task.metadata.get("grading", "clean")
    if how not in ("clean", "in-place"):
        raise InputError(f'{task.directory}/task.toml: metadata.grading is {how!r}; expected "clean" or "in-place"')
    return bool(how == "in-place")


@contextmanager
def failures(task: Task) -> Iterator[None]:
    """What breaks underneath becomes a GradingFailed with its cause."""
    try:
        yield
    except BuildFailed as error:
        raise GradingFailed("build", f"{task.name}: {error}") from error
    except (PodError, OSError) as error:
        raise GradingFailed("sandbox", f"{task.name}: {error}") from error


# ------------------------------------------------------------------------------------------------- the verifier


def _phase(task: Task, step: TaskStep | None) -> Phase:
    """How the verifier runs: a step's word first, then the task's."""
    own, general = (step.verifier if step else task.verifier), task.verifier
    return Phase(
        timeout_s=own.timeout_s or general.timeout_s or VERIFIER_S,
        user=own.user or general.user,
        env={**general.env, **own.env},
        network=own.network or general.network,
    )


def _until(task: Task, step: TaskStep | None) -> tuple[TaskStep, ...]:
    """The steps up to and with this one."""
    return () if step is None else task.steps[: task.steps.index(step) + 1]


async def _verify(
    ground: Ground, step: TaskStep | None, provision: Provision, clock: Clock, artifacts: Path | None
) -> Verdict:
    """Run the verifier on a ground, or on a machine of its own with what the task says to bring there."""
    task, phase = ground.task, _phase(ground.task, step)
    own = separate_machine(task, step)
    if own is None:
        seal = await bring_tests(ground.pod, task, step, clock)
        seal = seal if phase.user in (None, "root", "0") else ""  # a user's verifier shares it with what it tests
        try:
            return await _run(ground.pod, ground.workspace, phase, task, provision, clock, seal)
        finally:
            if artifacts is not None:
                await collect(ground, step, artifacts)
    with tempfile.TemporaryDirectory(prefix="etude-artifacts-") as directory:
        place = artifacts or Path(directory) / "artifacts"
        with clock.on("artifacts"):
            await collect(ground, step, place)
        return await _run_apart(ground, own, step, place, phase, provision, clock)


async def _run_apart(
    ground: Ground, own: Machine, step: TaskStep | None, place: Path, phase: Phase, provision: Provision, clock: Clock
) -> Verdict:
    """A separate verifier: its image is built from tests/, and it sees the collected artifacts and nothing else."""
    task = ground.task
    context = task.directory / "tests"
    if step is not None and (task.directory / "steps" / step.name / "tests/Dockerfile").exists():
        context = task.directory / "steps" / step.name / "tests"
    if not own.image and not (context / "Dockerfile").exists():
        raise InputError(
            f"{context}: a separate verifier needs a Dockerfile there, or verifier.environment.docker_image"
        )
    options: dict[str, Any] = {"provision": provision, "phase": phase, "machine": own, "context": context}
    async with open_ground(ground.fleet, task, **options) as apart:
        clock.spent["pod"] = clock.spent.get("pod", 0.0) + apart.seconds["pod"]
        with clock.on("artifacts"):
            for entry in json.loads((place / "manifest.json").read_text()):
                await apart.pod.upload(place / entry["destination"], entry["source"])
        return await _run(apart.pod, apart.workspace, phase, task, provision, clock, "")


async def bring_tests(pod: Pod, task: Task, step: TaskStep | None, clock: Clock) -> str:
    """Upload tests/, the step's own over the task's; the seal that a verifier of ours must give back, if it is one."""
    with clock.on("upload"):
        files = uploads(task, "tests")
        if step is not None:
            files |= uploads(task, f"steps/{step.name}/tests")
        seal = secrets.token_hex(16) if ".seal" in files else ""
        puts = [Put(path, f"/tests/{name}", _mode(path, name)) for name, path in files.items() if name != ".seal"]
        await pod.make_directory("/tests", 0o755)
        await fill(pod, puts, "/tests")
        if seal:
            await pod.write("/tests/.seal", seal, mode=0o600)
    return seal


def _mode(path: Path, name: str) -> int:
    mode = path.lstat().st_mode & 0o7777
    return mode | 0o111 if name == "test.sh" else mode


async def _run(
    pod: Pod, workspace: str, phase: Phase, task: Task, provision: Provision, clock: Clock, seal: str
) -> Verdict:
    """Run test.sh exactly as the format says, and read what it left."""
    with clock.on("run"):
        for path in (REWARD_TXT, REWARD_JSON, SEAL):
            await remove_if_there(pod, path)
        env = resolve_env(phase.env, provision.variables, f"{task.directory}/task.toml: verifier")
        command = f"/tests/test.sh > {shlex.quote(STDOUT)} 2>&1"
        done = await pod.exec(command, cwd=workspace, env=env, timeout=phase.timeout_s, user=phase.user)
    with clock.on("read"):
        log = (await read_if_there(pod, STDOUT, MAX_LOG) or b"").decode("utf-8", "replace")
        if done.timed_out:
            message = f"{task.name}: test.sh ran over {phase.timeout_s:g} s\n{log[-1000:]}"
            raise GradingFailed("verifier-timeout", message)
        rewards = await read_rewards(pod, task.name, log)
        forged = bool(seal) and await read_if_there(pod, SEAL) != seal.encode()
    return Verdict(rewards, log, forged)


# ------------------------------------------------------------------------------------------------- steps


def falls_short(step: TaskStep, rewards: Rewards) -> str:
    """Why the steps after this one are not tried; "" if they are. A reward that is missing is below everything."""
    for key, least in step.least.items():
        if (found := rewards.get(key, -math.inf)) < least:
            return f"step {step.name}: {key} is {found:g}, below {least:g}"
    return ""


def combine_steps(task: Task, grades: Sequence[Grade]) -> Grade:
    """The grade of a task from those of the steps that were tried: key by key the mean, or the last one's."""
    if not grades:
        raise InputError(f"{task.name}: no step was graded")
    last = grades[-1]
    names = {name for each in grades for name in each.rewards}
    mean = {name: sum(each.rewards.get(name, 0.0) for each in grades) / len(grades) for name in sorted(names)}
    return Grade(
        rewards=last.rewards if task.step_rewards == "final" else mean,
        changes=last.changes,
        seconds=sum(each.seconds for each in grades),
        log=last.log,
        facts={"steps": {step.name: dict(each.rewards) for step, each in zip(task.steps, grades, strict=False)}},
    )
