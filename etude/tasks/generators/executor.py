"""Pods in which a repository's tests are tried: each starts where the prepared repository is, and is thrown away after.

    bench = await open_workbench(fleet, source, wheels, ...)
    trial = await bench.try_tests({"src/x.py": b"..."}, ["tests/test_x.py::test_y"])

Tests run under the verifier's own rules (its user, environment and options), so that what is seen here is what grading
will see.
"""

import json
import re
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
from etude.pods.pod import ExecResult, Limits, Pod, Snapshot
from etude.tasks.base_images import Provision, host_python
from etude.tasks.environment import fill
from etude.tasks.generators.packages import plugins_among
from etude.tasks.generators.source import Source
from etude.tasks.image import Put, plan_environment
from etude.tasks.task import Machine
from etude.tasks.workspace import remove_if_there

INSIDE = Path(__file__).parent / "inside"
RUNNER = Path(__file__).parent.parent / "runner"
PLACE = "/trial"
WORKSPACE = "/work"
TRIAL_S = 180.0
# hypothesis draws the same examples again where it believes to be in CI
ENV = {"CI": "true"}
Changes = Mapping[str, bytes | None]  # over the repository's files; None: not there


class TrialFailed(EtudeError):
    """Tests could not be tried; it says nothing about them."""


@dataclass(frozen=True)
class Outcome:
    """What one test came to; of one that failed also what it said, and the frames (file, line, function) on the way."""

    status: str
    seconds: float = 0.0
    message: str = ""
    text: str = ""
    frames: tuple[tuple[str, int, str], ...] = ()


@dataclass(frozen=True)
class Trial:
    """What tests came to in a changed workspace. A test that is not there did not run: its file was not collected."""

    tests: Mapping[str, Outcome]
    output: str
    seconds: float
    complete: bool = True
    lines: Mapping[str, Mapping[int, tuple[str, ...] | int]] = field(default_factory=dict)  # or how many, if very many
    early: Mapping[str, frozenset[int]] = field(default_factory=dict)  # lines that run before any test does
    exit_code: int = 0

    def status(self, id: str) -> str:
        return self.tests[id].status if id in self.tests else "missing"


def dockerfile(source: Source, wheels: Mapping[str, bytes]) -> str:
    """The environment of every task of a repository: Python, its packages, and the workspace over them."""
    install = (
        "COPY packages/ /packages/\n"
        "RUN python3 -m pip install --quiet --no-index --no-deps --no-compile --root-user-action=ignore /packages/*.whl"
        " && rm -rf /packages\n"
    )
    roots = ":".join(WORKSPACE if root == "." else f"{WORKSPACE}/{root}" for root in source.roots)
    version = host_python() or "3"
    return (
        f"FROM python:{version}\n"
        + (install if wheels else "")
        + f"ENV PYTHONDONTWRITEBYTECODE=1 PYTHONPATH={roots} CI=true\n"
        + (f"ENV SETUPTOOLS_SCM_PRETEND_VERSION={source.version}\n" if "vcs" in " ".join(source.backend) else "")
        + f"WORKDIR {WORKSPACE}\n"
    )


def run_spec(source: Source, plugins: Sequence[str], tests: Sequence[str], seconds: float) -> dict[str, Any]:
    """How tests of a repository are run, in the form of the verifier's run.json."""
    return {
        "workspace": WORKSPACE,
        "run": list(tests),
        "paths": list(source.roots),
        "ini": dict(source.ini),
        "plugins": list(plugins),
        "arguments": list(source.arguments),
        "env": ENV,
        "timeout": seconds,
    }


class Workbench:
    """A prepared repository, ready to be tried out. Made by `open_workbench`."""

    def __init__(self, fleet: Fleet, source: Source, plugins: tuple[str, ...], start: Snapshot) -> None:
        self.fleet, self.source, self.plugins, self.start = fleet, source, plugins, start

    @asynccontextmanager
    async def workspace(self, changes: Changes) -> AsyncIterator[Pod]:
        """A pod with the repository in it, changed."""
        pod = await self.fleet.create(self.start, limits=Limits(memory=2 << 30))
        try:
            for path, data in changes.items():
                if data is None:
                    await remove_if_there(pod, f"{WORKSPACE}/{path}")
                else:
                    await pod.write(f"{WORKSPACE}/{path}", data, mode=0o644)
            yield pod
        finally:
            await pod.close()

    async def try_tests(
        self, changes: Changes, tests: Sequence[str], *, seconds: float = TRIAL_S, measure: bool = False
    ) -> Trial:
        """Run tests (ids or files) in a changed workspace."""
        async with self.workspace(changes) as pod:
            spec = run_spec(self.source, self.plugins, tests, seconds)
            if measure:
                spec["arguments"].append("--continue-on-collection-errors")
                spec["measure"] = [f"{WORKSPACE}/{root}" for root in self.source.roots]
            await pod.write(f"{PLACE}/spec.json", json.dumps(spec))
            return await self._run(pod, seconds)

    async def _run(self, pod: Pod, seconds: float) -> Trial:
        started = time.monotonic()
        command = f'env -i PATH="$PATH" HOME=/root LANG=C.UTF-8 PYTHONHASHSEED=0 python3 -B -s -S {PLACE}/trial.py'
        done = await pod.exec(f"{command} {PLACE}/spec.json {PLACE}/report.json", timeout=seconds + 30)
        if not done.ok:
            raise TrialFailed(f"{self.source.label}: tests could not be tried: {_last(done)}")
        report = json.loads(await pod.read(f"{PLACE}/report.json"))
        return _trial(report, time.monotonic() - started)

    async def try_command(self, changes: Changes, command: str, seconds: float = TRIAL_S) -> Trial:
        """Run a command in a changed workspace, as an agent would."""
        started = time.monotonic()
        async with self.workspace(changes) as pod:
            done = await pod.exec(command, cwd=WORKSPACE, timeout=seconds)
        output = done.stdout + done.stderr
        return Trial({}, output, time.monotonic() - started, not done.timed_out, exit_code=done.exit_code)


def _last(done: ExecResult) -> str:
    return "the time was over" if done.timed_out else (done.stdout + done.stderr).strip()[-1000:]


def _trial(report: Mapping[str, Any], seconds: float) -> Trial:
    tests = {
        id: Outcome(
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
    lines = {
        file.removeprefix(prefix): {
            int(line): found if isinstance(found, int) else tuple(order[number] for number in found)
            for line, found in by_line.items()
        }
        for file, by_line in report["lines"].items()
    }
    early = {file.removeprefix(prefix): frozenset(found) for file, found in report["early"].items()}
    complete = bool(report["seen"]) and not report["timed_out"]
    return Trial(tests, report["output"], seconds, complete, lines, early)


@asynccontextmanager
async def open_workbench(
    fleet: Fleet, source: Source, wheels: Mapping[str, bytes], provision: Provision | None = None
) -> AsyncIterator[Workbench]:
    """Make the environment of a repository and keep it as the state that every trial starts from."""
    with tempfile.TemporaryDirectory(prefix="etude-workbench-") as directory:
        context = Path(directory)
        (context / "packages").mkdir()
        (context / "Dockerfile").write_text(dockerfile(source, wheels))
        for name, data in wheels.items():
            (context / "packages" / name).write_bytes(data)
        plan = await plan_environment(fleet, context, Machine(), provision or Provision())
        puts = [_put(context / "repo", f"{WORKSPACE}/{path}", path, data) for path, data in source.files.items()]
        puts += [_put(context / "trial", f"{PLACE}/{path}", path, data) for path, data in _programs().items()]
        pod = await fleet.create(plan.image)
        try:
            await fill(pod, puts, WORKSPACE)
            start = await pod.snapshot()
        finally:
            await pod.close()
    yield Workbench(fleet, source, plugins_among(wheels), start)


def _put(top: Path, target: str, path: str, data: bytes) -> Put:
    place = top / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(data)
    return Put(place, target, 0o755 if path.endswith(".sh") else 0o644)


def placed(program: Path) -> bytes:
    """A program of ours as it stands in a pod, beside those it imports; by names that no workspace has."""
    text = program.read_text()
    text = text.replace("from etude.tasks.runner.inside import", "from etude_runner import")
    text = text.replace("from etude.tasks.runner.guard import", "from guard import")
    text = re.sub(r"from etude\.tasks\.generate\.inside\.(\w+) import", r"from etude_\1 import", text)
    found = re.search(r"^from etude\.tasks\.generate\.inside import (.+)$", text, re.MULTILINE)
    if found is not None:
        text = text.replace(found[0], "\n".join(f"import etude_{name} as {name}" for name in found[1].split(", ")))
    return text.encode()


def _programs() -> dict[str, bytes]:
    """What a trial needs in the pod: our programs, and coverage as it is installed here."""
    programs = {"guard.py": RUNNER / "guard.py", "etude_runner.py": RUNNER / "inside.py"}
    programs |= {"trial.py": INSIDE / "trial.py", "build.py": INSIDE / "build.py"}
    programs["etude_running.py"] = INSIDE / "running.py"
    found = {name: placed(path) for name, path in programs.items()}
    coverage = metadata.distribution("coverage")
    top = Path(str(coverage.locate_file(""))).resolve()
    for file in coverage.files or ():
        path = Path(str(coverage.locate_file(file))).resolve()
        if path.is_relative_to(top / "coverage") and path.suffix in (".py", ".so"):
            found[f"packages/{path.relative_to(top).as_posix()}"] = path.read_bytes()
    return found
