"""Run tests in a pod of an installed repository and read what its runner reports.

async with await fleet.create(installation.image) as pod:                  # no network
    run = await run_tests(pod, TestCommand.of(installation), ["tests/test_x.py::test_y"])
    run.statuses, run.exit_code, run.output
"""

import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from etude.globs import GitGlobs
from etude.pods.pod import Pod, PodFileError
from etude.pods.workspace import full_path, remove_if_exists
from etude.tasks.installation.reports import read_statuses, report_lines
from etude.tasks.installation.result import Installation

TRIAL = "/trial"  # our files in the pod, outside the workspace
PLUGIN = "etude_pytest_report"
MAX_OUTPUT = 16 << 20
MAX_REPORT = 64 << 20
TIMEOUT_S = 600.0
ENDED = (0, 1, 2, 5)  # exit codes of a session of pytest that did not break off by an error of its own
VALUE_OPTIONS = ("-k", "-m", "-W", "-p", "-o", "-c", "-n", "--ignore", "--import-mode")
FILE_ARGUMENTS = ("node", "tap", "jest", "mocha")  # runners of JavaScript: a file is an argument of the command
TEST_NAME = re.compile(r"(^|[/._-])(test|spec)\.[cm]?[jt]sx?$|(^|/)__tests__/[^/]+$|(^|/)test-[^/]+\.[cm]?[jt]sx?$")
# hypothesis derandomizes its examples when it detects CI
ENVIRONMENT = {"CI": "true", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
_PROBE = """import unittest


class Probe{name}(unittest.TestCase):
    def test_{passing}(self):
        self.assertEqual(1 + 1, 2)

    def test_{failing}(self):
        self.assertEqual(1 + 1, 3)
"""


@dataclass(frozen=True)
class TestCommand:
    """A command that runs tests, and how its report is read."""

    __test__ = False  # no test class

    command: str
    framework: str
    directory: str
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, installation: Installation) -> "TestCommand":
        return cls(installation.test_command, installation.framework, installation.directory, installation.env)

    def line(self, tests: Sequence[str] = ()) -> str:
        """Return the command line for some tests or test files, or for all of them."""
        if not tests:
            return self.command
        words = shlex.split(self.command)
        if self.framework == "pytest" and "pytest" in words:
            kept = _without_paths(words[words.index("pytest") + 1 :])
            return shlex.join([*words[: words.index("pytest") + 1], *kept, *tests])
        if self.framework == "unittest" and "unittest" in words:  # test_x (module.Class.test_x)
            names = [re.sub(r"^\w+ \((.*)\)$", r"\1", test) for test in tests]
            return shlex.join([*words[: words.index("unittest") + 1], "-v", *names])
        return " ".join([*(word for word in self.command.split() if "*" not in word), *map(shlex.quote, tests)])

    def own_files(self, paths: Sequence[str]) -> list[str]:
        """Return those of these test files that the command runs and takes as arguments; none of some runners."""
        if self.framework not in FILE_ARGUMENTS:
            return []
        patterns = [word.strip("\"'").removeprefix("./") for word in self.command.split() if "*" in word]
        if not patterns:
            return [path for path in paths if TEST_NAME.search(path)]
        globs = GitGlobs([f"/{pattern}" for pattern in patterns])
        return [path for path in paths if globs.match(path)]


def _without_paths(words: Sequence[str]) -> list[str]:
    """Return the options of a pytest command with their values, without the paths."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in VALUE_OPTIONS:
            kept += [word, next(rest, "")]
        elif word.startswith("-"):
            kept.append(word)
    return kept


@dataclass(frozen=True)
class TestRun:
    """The result of running tests."""

    __test__ = False

    statuses: Mapping[str, str]  # test id -> passed, failed, error, skipped, xfailed, xpassed
    exit_code: int
    output: str  # of the runner
    seconds: float
    complete: bool  # False: it was killed, or its session broke off
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)  # failure texts by test id
    durations: Mapping[str, float] = field(default_factory=dict, repr=False)
    collection_errors: tuple[str, ...] = ()  # ids of files that could not be collected
    timed_out: bool = False
    probes: Mapping[str, str] = field(default_factory=dict)  # "passing" and "failing" -> status, in a run with probes

    @property
    def passed(self) -> list[str]:
        return [test for test, status in self.statuses.items() if status == "passed"]


async def run_tests(
    pod: Pod, command: TestCommand, tests: Sequence[str] = (), *, timeout: float = TIMEOUT_S, probes: str | None = None
) -> TestRun:
    """Run tests (ids or files; none: all) in a pod and return their statuses.

    With `probes`, a directory of tests, two tests with random names run in it: one that must pass, one that must fail.
    """
    token = secrets.token_hex(8)
    report = f"{TRIAL}/report-{token}.jsonl"
    env = {**ENVIRONMENT, **command.env}
    names = {"passing": f"a{secrets.token_hex(6)}", "failing": f"b{secrets.token_hex(6)}"}
    if command.framework == "pytest":
        await pod.write(f"{TRIAL}/{PLUGIN}.py", (Path(__file__).parent / "inside" / f"{PLUGIN}.py").read_bytes())
        old = env.get("PYTHONPATH", "")
        env |= {"PYTEST_PLUGINS": PLUGIN, "PYTHONPATH": f"{TRIAL}:{old}" if old else TRIAL, "ETUDE_REPORT": report}
        env["PYTEST_ADDOPTS"] = f"--rootdir={command.directory}"
        if probes is not None:
            env["ETUDE_PROBES"] = f"{full_path(command.directory, probes)}/test_{token}.py"
            await pod.write(env["ETUDE_PROBES"], _PROBE.format(name=token, **names))
    done = await pod.exec(command.line(tests), cwd=command.directory, env=env, timeout=timeout, max_output=MAX_OUTPUT)
    if probe := env.get("ETUDE_PROBES"):
        await remove_if_exists(pod, probe)
    output = done.stdout + done.stderr
    text = ""
    if command.framework == "pytest":
        try:
            text = (await pod.read(report, length=MAX_REPORT)).decode("utf-8", "replace")
        except PodFileError:
            text = ""
    lines = report_lines(text)
    statuses = read_statuses(command.framework, output, text)
    ended = any(line.get("end") in ENDED for line in lines) if command.framework == "pytest" else bool(statuses)
    found = {key: _probe_status(statuses, f"test_{name}") for key, name in names.items()}
    return TestRun(
        {id: status for id, status in statuses.items() if token not in id},
        done.exit_code,
        output,
        done.usage.wall_s,
        ended and not done.timed_out,
        {str(line["id"]): str(line["text"]) for line in lines if line.get("id") and line.get("text")},
        {str(line["id"]): float(str(line["seconds"])) for line in lines if line.get("id") and "seconds" in line},
        tuple(str(line["id"]) for line in lines if line.get("collection")),
        done.timed_out,
        found,
    )


def _probe_status(statuses: Mapping[str, str], name: str) -> str:
    return next((status for id, status in statuses.items() if id.endswith(name)), "missing")
