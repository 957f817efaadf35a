"""Stage 0: try a proposal in a pod with network to registries, and compose the script that replays what worked."""

import re
import shlex
import time
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from etude.system.progress import ProgressCallback
from etude.tasks.installation.detect_other import required_programs
from etude.tasks.installation.proposal import Proposal, SetupStep
from etude.tasks.installation.repairs import missing_header, missing_packages
from etude.tasks.installation.result import WORKSPACE
from etude.tasks.installation.script import PIP, compose_script
from etude.tasks.installation.setup_pod import InstallContext, SetupPod, open_setup_pod
from etude.tasks.installation.snapshot import RepositorySnapshot
from etude.tasks.installation.test_run import TestCommand, TestRun, run_tests
from etude.tasks.installation.verification import summarize, why_unacceptable

MAX_REPAIRS = 4
_PIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+$")
# The first is the oldest that starts with Python 3.10. The command has not the form to which scripts add their pins: a
# newer pytest may be one that the project excludes.
_PYTESTS = ("pytest<7", "pytest<8", "pytest<9", "pytest")
_UPGRADE = "python -m pip --no-input install --upgrade"
_PYTEST_STARTS = """d=$(mktemp -d) && cd "$d" && printf 'def test_it():\n    assert 1 + 1 == 2\n' > test_it.py
python -m pytest -q -p no:cacheprovider test_it.py"""
_APT = "apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends"


@dataclass(frozen=True)
class ExploredSetup:
    """What worked in the exploration: the script and the test command."""

    script: str
    command: TestCommand


@dataclass
class _Exploration:
    """The state of one exploration."""

    context: InstallContext
    proposal: Proposal
    setup: SetupPod
    commands: list[str]
    versions: dict[str, str] = field(default_factory=dict)  # of packages, after the last step
    unpinned: set[str] = field(default_factory=set)  # packages of which the steps install several versions


async def explore(context: InstallContext, proposal: Proposal, progress: ProgressCallback) -> ExploredSetup:
    """Run the steps and test commands of a proposal; raise InstallationFailed with the reason of the best attempt."""
    project, index, total = proposal.project, context.index, len(proposal.steps) + 3
    directory = f"{WORKSPACE}/{project}" if project else WORKSPACE
    async with open_setup_pod(context, directory, proposal.env) as setup:
        state = _Exploration(context, proposal, setup, [])
        await _check_programs(state)
        if proposal.apt:
            await _install_system_packages(state)
        for number, step in enumerate(proposal.steps):
            progress(number, total, step.name)
            await _run_step(state, step)
        progress(len(proposal.steps), total, "tests")
        command = await _find_test_command(state)
        pins = await _pins(state) if proposal.ecosystem == "python" else []
        pins = [pin for pin in pins if pin.partition("==")[0] not in state.unpinned]
    title = f"Installs {context.label} in the image {proposal.base}, which has its files in {WORKSPACE}."
    if context.view != "all" and index.as_of is not None:
        newer = ", build tools and test runners those of the installation" if context.view == "tools" else ""
        title += f"\nPackages are those of {index.as_of.isoformat()}{newer}."
    return ExploredSetup(compose_script(title, project, proposal.env, state.commands, pins), command)


async def _check_programs(state: _Exploration) -> None:
    programs = required_programs(state.proposal)
    missing = [each for each in programs if not (await state.setup.pod.exec(["sh", "-c", f"command -v {each}"])).ok]
    if missing:
        raise state.context.failed(
            "no-toolchain",
            f"{' and '.join(missing)} is not in the image {state.proposal.base}; "
            f"install it on this host or pass --map {state.proposal.base}=IMAGE",
        )


async def _install_system_packages(state: _Exploration) -> None:
    """Install the Debian packages that CI installs; without a writable system this is left out."""
    command = f"{_APT} {shlex.join(state.proposal.apt)}"
    if not (await state.setup.run("test -w /var/lib/dpkg/status")).ok:
        state.context.log.note(f"left out, because Debian packages cannot be installed in this image: {command}")
        return
    if (await state.setup.run(command)).ok:
        state.commands.append(command)


async def _run_step(state: _Exploration, step: SetupStep) -> None:
    output = ""
    for alternative in step.alternatives:
        done = await state.setup.run(alternative)
        if done.ok:
            state.commands.append(alternative)
            await _note_versions(state)
            return
        output = output or done.stdout + done.stderr  # of the best alternative
        if time.monotonic() > state.setup.deadline:
            raise state.context.failed("timeout", f"the time limit ended in {step.name}")
    if not step.required:
        state.context.log.note(f"left out: {step.name}")
        return
    reason = step.reason
    missing = missing_header(output)
    if missing:
        reason = "system-package"
    elif re.search(r"No matching distribution found|Could not find a version", output):
        reason = "dependency"
    elif re.search(r"requires a different Python|requires Python", output):
        reason = "python-version"
    why = missing or _last_error(output)
    raise state.context.failed(reason, f"{step.name} cannot be installed: {why}")


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if re.search(r"error|Error|ERR!", line)]
    kept = [line for line in lines if not re.match(r"(note|hint|ERROR: Failed to build|╰─>|error: subprocess)", line)]
    return (kept or lines or ["no message"])[-1][:300]


async def _find_test_command(state: _Exploration) -> TestCommand:
    """Return the first test command whose run shows that the repository is installed, after repairs."""
    failures: list[tuple[int, tuple[str, str]]] = []
    for candidate in state.proposal.tests:
        command = TestCommand(candidate.command, candidate.framework, state.setup.directory)
        run = await _repaired_run(state, command)
        why = why_unacceptable(run, state.context.options.min_passing)
        if why is None:
            return command
        broke_off = candidate.framework == "pytest" and not run.complete and not run.timed_out
        if broke_off and await _works_with_other_pytest(state, command):
            return command
        failures.append((len(run.passed), why))
        if run.statuses and run.collection_errors and candidate.framework == "pytest":
            more = replace(command, command=f"{command.command} --continue-on-collection-errors")
            run = await _test(state, more)
            if why_unacceptable(run, state.context.options.min_passing) is None:
                return more
        if time.monotonic() > state.setup.deadline:
            break
    reason, text = max(failures, key=lambda each: each[0])[1]
    raise state.context.failed(reason, f"{text}")


async def _repaired_run(state: _Exploration, command: TestCommand) -> TestRun:
    """Run the tests; install what they are missing and run them again, a few times."""
    run = await _test(state, command)
    tried: set[str] = set()
    for _ in range(MAX_REPAIRS if state.proposal.ecosystem == "python" else 0):
        text = run.output + "\n".join(run.texts.values())
        found = [each for each in missing_packages(text, _own_modules(state.context.snapshot)) if each not in tried]
        if not found:
            break
        tried.update(found)
        worked = [each for each in found if await _install_package(state, each)]
        if not worked:
            break
        run = await _test(state, command)
    return run


async def _works_with_other_pytest(state: _Exploration, command: TestCommand) -> bool:
    """Install the oldest major version of pytest that starts and runs the tests; return whether there is one.

    pytest of an old commit does not start with a newer Python, and conftest.py files of that time do not work with the
    newest. Among packages of a date nothing is tried: the next view has newer ones.
    """
    if state.context.view == "dated":
        if (await state.setup.run(_PYTEST_STARTS)).ok:
            return False
        raise state.context.failed("no-report", "pytest of that time does not start with this Python")
    before = await _pins(state)
    for requirement in _PYTESTS:
        if not (await state.setup.run(f"{_UPGRADE} {shlex.quote(requirement)}")).ok:
            continue
        if not (await state.setup.run(_PYTEST_STARTS)).ok:
            continue
        run = await _repaired_run(state, command)
        if why_unacceptable(run, state.context.options.min_passing) is None:
            other = [pin for pin in await _pins(state) if pin not in before]
            state.unpinned.update(pin.partition("==")[0] for pin in other)
            state.commands.append(f"{_UPGRADE} {shlex.join(other)}")
            return True
    return False


async def _install_package(state: _Exploration, requirement: str) -> bool:
    command = f"{PIP} {shlex.quote(requirement)}"
    if not (await state.setup.run(command)).ok:
        return False
    state.commands.append(command)
    return True


async def _test(state: _Exploration, command: TestCommand) -> TestRun:
    left = max(1.0, min(state.context.options.test_timeout_s, state.setup.deadline - time.monotonic()))
    # Without the network variables, so that tests behave as they do later.
    run = await run_tests(state.setup.pod, replace(command, env={"NO_PROXY": "*", "no_proxy": "*"}), timeout=left)
    state.context.log.note(
        f"$ {command.command}\n{run.output[-3000:]}\n[{summarize(run.statuses)}, exit code {run.exit_code}]"
    )
    return run


def _own_modules(snapshot: RepositorySnapshot) -> Collection[str]:
    """Return the names that may be modules of the repository itself."""
    found = set[str]()
    for path in snapshot.files:
        parts = path.split("/")
        if path.endswith((".py", ".pyx", ".pyi")):
            found.update(parts[:-1])
            found.add(parts[-1].rpartition(".")[0])
    return found


async def _note_versions(state: _Exploration) -> None:
    """Record the versions after a step; what another step replaced cannot be pinned to one of them."""
    if state.proposal.ecosystem == "python":
        found = dict(pin.split("==", 1) for pin in await _pins(state))
        state.unpinned |= {name for name, version in state.versions.items() if found.get(name, version) != version}
        state.versions = found


async def _pins(state: _Exploration) -> list[str]:
    done = await state.setup.run("python -m pip freeze --exclude-editable")
    return [line for line in done.stdout.splitlines() if _PIN.match(line)] if done.ok else []
