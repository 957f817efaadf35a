"""Stages 1 and 2: sessions of a model explore a repository and set it up.

Stage 1 proposes ten commands and what success looks like; they are run and recorded. Three of them are the target of
stage 2, in which a session writes a set-up script; it is replayed in a fresh pod and the targets are run there without
a network. What went wrong is told to the next attempt, of which there are five at most. Sessions see no secrets.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.harness.prompt import SessionRequest
from etude.harness.session import SessionSpec
from etude.harness.session_factory import open_session
from etude.pods.images.records import Image
from etude.pods.pod import Pod, PodFileError
from etude.system.progress import ProgressCallback
from etude.tasks.installation.result import WORKSPACE, InstallationFailed
from etude.tasks.installation.script import DIRECTORY, MOCKS
from etude.tasks.installation.setup_pod import InstallContext
from etude.tasks.installation.targets import PROPOSALS, TARGETS, TargetCommand, choose_targets, read_targets
from etude.tasks.installation.test_run import ENVIRONMENT, TestCommand, run_tests
from etude.tasks.installation.verification import (
    Replay,
    Verification,
    check_run,
    replay_script,
    summarize,
    verify_tests,
    why_unacceptable,
)
from etude.tasks.session_agent import OpenModel

ATTEMPTS = 5
COMMAND_TIMEOUT_S = 300.0
MAX_FILE = 256 << 10  # bytes of a script or a list of commands
COMMANDS_FILE, SCRIPT_FILE = f"{DIRECTORY}/commands.json", f"{DIRECTORY}/setup.sh"

EXPLORE = f"""\
This workspace is a fresh checkout of a repository; nothing is installed. Find out how the project is set up, tested \
and used: read its documentation, build files and CI, and try commands. Only package registries can be reached.

Then write {COMMANDS_FILE}: a JSON list of exactly {PROPOSALS} commands that work once the project is installed, each \
an object with
- "command": one line of shell, run in {WORKSPACE}
- "kind": test, run, import, build, lint or setup
- "description": what a successful output looks like
- "pattern": a regular expression that the output matches only if it worked
- "framework": for a test command the runner: pytest, unittest, node, tap, jest, mocha, go or cargo

At least one command must run the project's whole test suite. Commands that work without any installation do not \
count."""

SET_UP = f"""\
This workspace is a fresh checkout of a repository; nothing is installed. Set it up so that these commands work:

{{targets}}

Write the set-up as a bash script, {SCRIPT_FILE}. It will be run once in a fresh copy of this machine, where \
{WORKSPACE} has the repository's files, and the commands are run afterwards without a network. Only package \
registries can be reached during the set-up.

- Do not change files of the repository, above all not its tests. Do not add files to it.
- Missing services, files and credentials may be replaced by mocks. All mocks are below {MOCKS}; the workspace may \
have links to them.
- The script must stop at the first error. Do not hide failures (`|| true`, `set +e`).
- Run the commands yourself before you finish.{{feedback}}"""


@dataclass
class AgentStages:
    """What the sessions did, for the result: proposals, targets and the failures of attempts."""

    proposals: list[dict[str, object]] = field(default_factory=list)
    targets: list[TargetCommand] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    sampled_tokens: int = 0


@dataclass(frozen=True)
class AgentSetup:
    """The set-up of the attempt that worked."""

    script: str
    command: TestCommand
    replay: Replay
    verification: Verification
    attempt: int


async def install_by_sessions(
    context: InstallContext, open_model: OpenModel, stages: AgentStages, progress: ProgressCallback
) -> AgentSetup:
    """Run stages 1 and 2; raise InstallationFailed with the reason after the last attempt."""
    progress(0, ATTEMPTS + 1, "exploring")
    stages.targets = await propose_targets(context, open_model, stages)
    for attempt in range(1, ATTEMPTS + 1):
        progress(attempt, ATTEMPTS + 1, f"setting up, attempt {attempt}")
        context.log.note(f"== stage 2, attempt {attempt}")
        try:
            return await _attempt(context, open_model, stages, attempt)
        except InstallationFailed as error:
            context.log.note(f"failed: {error}")
            stages.failures.append(str(error))
            if time.monotonic() > context.deadline:
                break
    last = stages.failures[-1] if stages.failures else "no attempt"
    raise context.failed("attempts", f"discarded after {len(stages.failures)} attempts; the last: {last}")


# ------------------------------------------------------------------------------------------------- stage 1


async def propose_targets(context: InstallContext, open_model: OpenModel, stages: AgentStages) -> list[TargetCommand]:
    """Run stage 1: return the three targets, after all proposals were run and recorded."""
    context.log.note("== stage 1")
    pod = await _open_pod(context)
    try:
        final = await _session(context, open_model, pod, EXPLORE, "explore", stages)
        targets, dropped = read_targets(await _read(pod, COMMANDS_FILE) or final)
        for each in dropped:
            context.log.note(f"proposal left out: {each}")
        explored = {target.command: await _try_target(context, pod, target) for target in targets}
    finally:
        context.log.count(pod)
        await pod.close()
    works_already: dict[str, bool] = {}
    for target in targets:
        async with await context.fleet.create(context.start) as untouched:
            works_already[target.command] = not await _try_target(context, untouched, target)
    for target in targets:
        works = works_already[target.command]
        record = {**target.to_json(), "after exploring": explored[target.command] or "works", "works untouched": works}
        stages.proposals.append(record)
        context.log.note(f"proposal: {record}")
    chosen = choose_targets(targets, works_already)
    if len(chosen) < TARGETS:
        usable = sum(not works for works in works_already.values())
        raise context.failed(
            "no-proposals",
            f"of the proposed commands {usable} can be targets; expected {TARGETS}, a test command among them",
        )
    return chosen


async def _try_target(context: InstallContext, pod: Pod, target: TargetCommand) -> str:
    """Return why a target command does not work in a pod; empty if it does."""
    if target.kind == "test":
        command = TestCommand(target.command, target.framework, WORKSPACE)
        run = await run_tests(pod, command, timeout=context.options.test_timeout_s)
        context.log.note(f"$ {target.command}\n{run.output[-2000:]}\n[{summarize(run.statuses)}]")
        reason = why_unacceptable(run, context.options.min_passing)
        return reason[1] if reason else ""
    done = await pod.exec(["bash", "-c", target.command], cwd=WORKSPACE, env=ENVIRONMENT, timeout=COMMAND_TIMEOUT_S)
    context.log.command(target.command, done)
    return wrong_output(target, done.exit_code, done.stdout + done.stderr)


# ------------------------------------------------------------------------------------------------- stage 2


async def _attempt(context: InstallContext, open_model: OpenModel, stages: AgentStages, attempt: int) -> AgentSetup:
    """Let one session set the repository up, and check its script in fresh pods."""
    pod = await _open_pod(context)
    try:
        await _session(context, open_model, pod, set_up_prompt(stages), f"set-up-{attempt}", stages)
        script = await _read(pod, SCRIPT_FILE)
    finally:
        context.log.count(pod)
        await pod.close()
    context.log.note(f"script:\n{script}")
    if not script.strip():
        raise context.failed("script-fails", f"the session wrote no {SCRIPT_FILE}")
    script = f"#!/usr/bin/env bash\nset -euo pipefail\nmkdir -p {DIRECTORY} {MOCKS}\n{script}"
    replay = await replay_script(context, script, strict=True)
    await _check_targets(context, replay.image, stages.targets)
    test = stages.targets[0]
    command = TestCommand(test.command, test.framework, WORKSPACE)
    verification = await verify_tests(context, replay.image, command)
    return AgentSetup(script, command, replay, verification, attempt)


def set_up_prompt(stages: AgentStages) -> str:
    """Return the request of stage 2, with the failure of the last attempt."""
    lines = [f"{number}. `{each.command}`\n   {each.description}" for number, each in enumerate(stages.targets, 1)]
    feedback = ""
    if stages.failures:
        feedback = f"\n\nAn earlier attempt started from here and failed:\n{stages.failures[-1]}"
    return SET_UP.format(targets="\n".join(lines), feedback=feedback)


async def _check_targets(context: InstallContext, image: Image, targets: Sequence[TargetCommand]) -> None:
    """Run every target in a fresh pod without network; raise InstallationFailed if one does not do what it should."""
    for target in targets:
        async with await context.fleet.create(image) as pod:
            if target.kind == "test":
                command = TestCommand(target.command, target.framework, WORKSPACE)
                check_run(context, await run_tests(pod, command, timeout=context.options.test_timeout_s))
            elif why := await _try_target(context, pod, target):
                raise context.failed("wrong-output", f"`{target.command}`: {why}; expected: {target.description}")


def wrong_output(target: TargetCommand, exit_code: int, output: str) -> str:
    """Return why the result of a target is not as described; empty if it is."""

    shown = " ".join(output.split())[-300:]
    if exit_code != 0:
        return f"exit code {exit_code}: {shown}"
    if target.pattern and not re.search(target.pattern, output, re.M):
        return f"the output does not match {target.pattern!r}: {shown}"
    return ""


# ------------------------------------------------------------------------------------------------- sessions


async def _open_pod(context: InstallContext) -> Pod:
    """Return a pod for a session: the base image with the repository, and the network of a set-up, without secrets."""
    env = context.index.environment(context.view)
    return await context.fleet.create(context.start, egress=context.egress, storage="disk", env=env)


async def _session(
    context: InstallContext, open_model: OpenModel, pod: Pod, text: str, name: str, stages: AgentStages
) -> str:
    """Run a session in a pod; return its final message."""
    await pod.make_directory(DIRECTORY)
    await pod.make_directory(MOCKS)
    session_id = f"install-{context.snapshot.name}-{name}"
    async with open_model(session_id) as model:
        spec = SessionSpec.of(model.profile)
        tool_set = spec.tool_set.model_copy(update={"root": WORKSPACE})
        spec = SessionSpec.of(model.profile.model_copy(update={"tool_set": tool_set}))
        async with open_session(SessionRequest(text, id=session_id), model.client, pod, spec) as (session, _):
            trace = await session.run()
    stages.sampled_tokens += trace.cost.sampled
    context.log.note(f"session {name}: {trace.cost.turns} turns, ended with {trace.ending}\n{trace.final[-2000:]}")
    return trace.final


async def _read(pod: Pod, path: str) -> str:
    try:
        return (await pod.read(path, length=MAX_FILE)).decode("utf-8", "replace")
    except PodFileError:
        return ""
