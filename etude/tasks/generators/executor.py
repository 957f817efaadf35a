"""Execute a repository's tests in pods; each starts from a snapshot of the prepared repository and is then discarded.

    async with open_executor(fleet, source, wheels) as executor:
        result = await executor.run_tests({"src/x.py": b"..."}, ["tests/test_x.py::test_y"])

Tests run with the verifier's user, environment and options, so results here predict the verifier's.
"""

import json
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from etude.errors import EtudeError
from etude.pods.fleet import Fleet
from etude.pods.host_system import host_system
from etude.pods.payload import START, pack
from etude.pods.pod import ExecResult, Pod, Snapshot
from etude.pods.workspace import remove_if_exists
from etude.tasks.base_images import HostSettings
from etude.tasks.environment import copy_files
from etude.tasks.generators.packages import pytest_plugin_names
from etude.tasks.generators.source import RepositorySource
from etude.tasks.image import FileToCopy, plan_image
from etude.tasks.task import MachineSpec

PROGRAM_DIR = "/trial"
WORKSPACE = "/work"
RUN_TIMEOUT_S = 180.0
# hypothesis derandomizes its examples when it detects CI
TEST_ENV = {"CI": "true"}
# what the programs in inside/ consist of
POD_MODULES = (
    "etude.tasks.generators.inside",
    "etude.tasks.checks.inside",
    "etude.globs",
    "etude.pod_stdlib",
    "etude.syntax",
)
Changes = Mapping[str, bytes | None]  # path -> new contents; None: removed


class ExecutionFailed(EtudeError):
    """Tests could not be executed; their status is unknown."""


@dataclass(frozen=True)
class TestOutcome:
    """The status of one test; for a failure also its message, its text and its frames (file, line, function)."""

    status: str
    seconds: float = 0.0
    message: str = ""
    text: str = ""
    frames: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class ExecutionResult:
    """The result of tests or a command in a changed workspace. Tests of files that were not collected are missing."""

    tests: Mapping[str, TestOutcome]
    output: str
    seconds: float
    complete: bool = True
    # file -> line -> the tests that execute it, or their number if very many
    coverage: Mapping[str, Mapping[int, tuple[str, ...] | int]] = field(default_factory=dict)
    import_time_lines: Mapping[str, frozenset[int]] = field(default_factory=dict)  # executed before the first test
    exit_code: int = 0

    def status(self, id: str) -> str:
        return self.tests[id].status if id in self.tests else "missing"


def dockerfile(source: RepositorySource, wheels: Mapping[str, bytes]) -> str:
    """Return the Dockerfile of all tasks of a repository: Python, the wheels, and the workspace directory."""
    install = (
        "COPY packages/ /packages/\n"
        "RUN python3 -m pip install --quiet --no-index --no-deps --no-compile --root-user-action=ignore /packages/*.whl"
        " && rm -rf /packages\n"
    )
    roots = ":".join(WORKSPACE if root == "." else f"{WORKSPACE}/{root}" for root in source.roots)
    version = host_system().python or "3"
    return (
        f"FROM python:{version}\n"
        + (install if wheels else "")
        + f"ENV PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={roots} CI=true\n"
        + (f"ENV SETUPTOOLS_SCM_PRETEND_VERSION={source.version}\n" if "vcs" in " ".join(source.backend) else "")
        + f"WORKDIR {WORKSPACE}\n"
    )


def run_spec(source: RepositorySource, plugins: Sequence[str], tests: Sequence[str], timeout: float) -> dict[str, Any]:
    """Return how to run tests of a repository, in the form of the verifier's run.json."""
    return {
        "workspace": WORKSPACE,
        "run": list(tests),
        "paths": list(source.roots),
        "ini": dict(source.ini),
        "plugins": list(plugins),
        "arguments": list(source.arguments),
        "env": TEST_ENV,
        "timeout": timeout,
    }


class RepositoryExecutor:
    """Runs tests and commands on changed copies of a prepared repository. Created by `open_executor`."""

    def __init__(self, fleet: Fleet, source: RepositorySource, plugins: tuple[str, ...], snapshot: Snapshot) -> None:
        self.fleet, self.source, self.plugins, self.snapshot = fleet, source, plugins, snapshot

    @asynccontextmanager
    async def open_workspace(self, changes: Changes) -> AsyncIterator[Pod]:
        """Open a pod that contains the repository with the changes applied."""
        pod = await self.fleet.create(self.snapshot)
        try:
            for path, data in changes.items():
                if data is None:
                    await remove_if_exists(pod, f"{WORKSPACE}/{path}")
                else:
                    await pod.write(f"{WORKSPACE}/{path}", data, mode=0o644)
            yield pod
        finally:
            await pod.close()

    async def run_tests(
        self,
        changes: Changes,
        tests: Sequence[str],
        *,
        timeout: float = RUN_TIMEOUT_S,
        measure: bool = False,
        options: Sequence[str] = (),
    ) -> ExecutionResult:
        """Run tests (ids or files) in a changed workspace; `measure` records which test executes which line, `options`
        are further ones of pytest."""
        async with self.open_workspace(changes) as pod:
            spec = run_spec(self.source, self.plugins, tests, timeout)
            spec["arguments"] += options
            if measure:
                spec["arguments"].append("--continue-on-collection-errors")
                spec["measure"] = [f"{WORKSPACE}/{root}" for root in self.source.roots]
            await pod.write(f"{PROGRAM_DIR}/spec.json", json.dumps(spec))
            return await self._run(pod, timeout)

    async def _run(self, pod: Pod, timeout: float) -> ExecutionResult:
        started = time.monotonic()
        command = program_command(
            "run_tests", f"{PROGRAM_DIR}/spec.json {PROGRAM_DIR}/report.json", "HOME=/root PYTHONHASHSEED=0"
        )
        completed = await pod.exec(command, timeout=timeout + 30)
        if not completed.ok:
            raise ExecutionFailed(f"{self.source.label}: tests could not be executed: {_failure_text(completed)}")
        report = json.loads(await pod.read(f"{PROGRAM_DIR}/report.json"))
        return _parse_report(report, time.monotonic() - started)

    async def run_command(self, changes: Changes, command: str, timeout: float = RUN_TIMEOUT_S) -> ExecutionResult:
        """Run a shell command in a changed workspace, as an agent would."""
        started = time.monotonic()
        async with self.open_workspace(changes) as pod:
            completed = await pod.exec(command, cwd=WORKSPACE, timeout=timeout)
        output = completed.stdout + completed.stderr
        return ExecutionResult(
            {}, output, time.monotonic() - started, not completed.timed_out, exit_code=completed.exit_code
        )


def _failure_text(completed: ExecResult) -> str:
    return "timed out" if completed.timed_out else (completed.stdout + completed.stderr).strip()[-1000:]


def _parse_report(report: Mapping[str, Any], seconds: float) -> ExecutionResult:
    tests = {
        id: TestOutcome(
            status=each["status"],
            seconds=each.get("seconds", 0.0),
            message=each.get("message", ""),
            text=each.get("text", ""),
            frames=tuple((file, line, name) for file, line, name in each.get("frames", ())),
        )
        for id, each in report["tests"].items()
    }
    prefix = f"{WORKSPACE}/"
    order = report["order"]
    coverage = {
        file.removeprefix(prefix): {
            int(line): found if isinstance(found, int) else tuple(order[number] for number in found)
            for line, found in by_line.items()
        }
        for file, by_line in report["lines"].items()
    }
    import_time_lines = {file.removeprefix(prefix): frozenset(found) for file, found in report["early"].items()}
    complete = bool(report["seen"]) and not report["timed_out"]
    return ExecutionResult(tests, report["output"], seconds, complete, coverage, import_time_lines)


@asynccontextmanager
async def open_executor(
    fleet: Fleet, source: RepositorySource, wheels: Mapping[str, bytes], host_settings: HostSettings | None = None
) -> AsyncIterator[RepositoryExecutor]:
    """Build the environment of a repository and snapshot it as the state that every execution starts from."""
    with tempfile.TemporaryDirectory(prefix="etude-executor-") as directory:
        context = Path(directory)
        (context / "packages").mkdir()
        (context / "Dockerfile").write_text(dockerfile(source, wheels))
        for name, data in wheels.items():
            (context / "packages" / name).write_bytes(data)
        plan = await plan_image(fleet, context, MachineSpec(), host_settings or HostSettings())
        copies = [
            _stage_file(context / "repo", f"{WORKSPACE}/{path}", path, data) for path, data in source.files.items()
        ]
        copies += [
            _stage_file(context / "trial", f"{PROGRAM_DIR}/{path}", path, data) for path, data in pod_programs().items()
        ]
        pod = await fleet.create(plan.image)
        try:
            await copy_files(pod, copies, WORKSPACE)
            snapshot = await pod.snapshot()
        finally:
            await pod.close()
    yield RepositoryExecutor(fleet, source, pytest_plugin_names(wheels), snapshot)


def _stage_file(top: Path, target: str, path: str, data: bytes) -> FileToCopy:
    staged = top / path
    staged.parent.mkdir(parents=True, exist_ok=True)
    staged.write_bytes(data)
    return FileToCopy(staged, target, 0o755 if path.endswith(".sh") else 0o644)


def program_command(name: str, arguments: str, env: str = "") -> str:
    """Return the shell command that runs one of our programs in PROGRAM_DIR, without the image's variables."""
    python = f'env -i PATH="$PATH" LANG=C.UTF-8 {env} python3 -B -s -S'
    return f"{python} -c '{START}' {PROGRAM_DIR}/{name} {arguments} < {PROGRAM_DIR}/{name}"


def pod_programs() -> dict[str, bytes]:
    """Return the files of PROGRAM_DIR in a pod: our programs, and the coverage package installed on this host."""
    programs = ("run_tests", "build")
    files = {name: pack(f"{POD_MODULES[0]}.{name}:main", *POD_MODULES) for name in programs}
    coverage = metadata.distribution("coverage")
    top = Path(str(coverage.locate_file(""))).resolve()
    for file in coverage.files or ():
        path = Path(str(coverage.locate_file(file))).resolve()
        if path.is_relative_to(top / "coverage") and path.suffix in (".py", ".so"):
            files[f"packages/{path.relative_to(top).as_posix()}"] = path.read_bytes()
    return files
