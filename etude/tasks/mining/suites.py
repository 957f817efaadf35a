"""Run the tests of a commit in pods without a network: as the verifier will, or with the repository's own command.

async with open_suite(fleet, environment, files_after) as suite:
    result = await suite.run(changes, suite.files)
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from etude.errors import EtudeError, InputError
from etude.pods.fleet import Fleet
from etude.pods.workspace import remove_if_exists
from etude.tasks.generators.executor import (
    PROGRAM_DIR,
    WORKSPACE,
    Changes,
    ExecutionResult,
    RepositoryExecutor,
    TestOutcome,
    pod_programs,
)
from etude.tasks.generators.packages import IGNORED_PACKAGES
from etude.tasks.generators.source import make_source, requirement_name
from etude.tasks.installation.test_run import TestCommand, run_tests
from etude.tasks.mining.classify import SOURCE_SUFFIXES, is_test_path
from etude.tasks.mining.environments import CommitEnvironment

PYTEST_FRAMEWORKS = ("pytest", "unittest")  # pytest runs the tests of unittest, too
KEEP_GOING = "--continue-on-collection-errors"
# dist name and entry point names of the pytest plugins in the image, if pytest can be imported there
_LIST_PLUGINS = """
import importlib.metadata as m, json, pytest
found = [[d.metadata["Name"] or "", e.name] for d in m.distributions() for e in d.entry_points if e.group == "pytest11"]
print(json.dumps(found))
"""


class UnsupportedSuite(EtudeError):
    """The tests of a commit cannot be run test by test."""


class PytestSuite:
    """Tests that run as the pytest check of our verifier runs them."""

    def __init__(self, executor: RepositoryExecutor) -> None:
        self.executor, self.source, self.plugins = executor, executor.source, executor.plugins
        self.files = self.source.tests
        self.sizes = {path: len(self.source.files[path]) for path in self.files}

    async def run(
        self, changes: Changes, tests: Sequence[str], *, timeout: float, until_failure: bool = False
    ) -> ExecutionResult:
        options = ["-x"] if until_failure else [KEEP_GOING]
        return await self.executor.run_tests(changes, tests, timeout=timeout, options=options)


class CommandSuite:
    """Tests that run with the repository's own command, and whose report names them: those of the changed files where
    the command takes files as arguments, otherwise all."""

    def __init__(
        self, fleet: Fleet, environment: CommitEnvironment, files: tuple[str, ...], changed: Sequence[str]
    ) -> None:
        self.fleet, self.environment, self.files = fleet, environment, files
        self.command = TestCommand.of(environment.installation)
        self.arguments = self.command.own_files([path for path in changed if path in files])
        self.line = self.command.line(self.arguments)
        self.sizes: Mapping[str, int] = {}

    async def run(
        self, changes: Changes, tests: Sequence[str], *, timeout: float, until_failure: bool = False
    ) -> ExecutionResult:
        pod = await self.fleet.create(self.environment.image)
        try:
            for path, data in changes.items():
                if data is None:
                    await remove_if_exists(pod, f"{WORKSPACE}/{path}")
                else:
                    await pod.write(f"{WORKSPACE}/{path}", data, mode=0o644)
            found = await run_tests(pod, self.command, self.arguments, timeout=timeout)
        finally:
            await pod.close()
        outcomes = {
            id: TestOutcome(status, found.durations.get(id, 0.0), text=found.texts.get(id, ""))
            for id, status in found.statuses.items()
        }
        return ExecutionResult(outcomes, found.output, found.seconds, found.complete, exit_code=found.exit_code)


@asynccontextmanager
async def open_suite(
    fleet: Fleet, environment: CommitEnvironment, files_after: dict[str, bytes], changed: Sequence[str] = ()
) -> AsyncIterator[PytestSuite | CommandSuite]:
    """Yield the suite of a commit in the environment of its parent; `files_after` are the files of the commit,
    `changed` its changed test files."""
    installation = environment.installation
    if installation.project:
        raise UnsupportedSuite(f"the project is in {installation.project}; only one at the top is supported")
    if installation.framework not in PYTEST_FRAMEWORKS:
        yield _command_suite(fleet, environment, files_after, changed)
        return
    try:
        source = make_source(files_after, installation.repository)
    except InputError as error:
        raise UnsupportedSuite(str(error)) from None
    pod = await fleet.create(environment.image)
    try:
        listed = await pod.exec(["python3", "-c", _LIST_PLUGINS], timeout=60)
        if not listed.ok and installation.framework == "pytest":
            raise UnsupportedSuite(f"the image has no working pytest: {listed.stderr[-300:]}")
        if not listed.ok:  # tests of unittest, and a pytest of that time that does not start with this Python
            yield _command_suite(fleet, environment, files_after, changed)
            return
        for path, data in pod_programs().items():
            await pod.write(f"{PROGRAM_DIR}/{path}", data)
        snapshot = await pod.snapshot()
    finally:
        await pod.close()
    try:
        executor = RepositoryExecutor(fleet, source, _plugins(listed.stdout), snapshot)
        yield PytestSuite(executor)
    finally:
        await fleet.remove_snapshot(snapshot.id)


def _command_suite(
    fleet: Fleet, environment: CommitEnvironment, files_after: Mapping[str, bytes], changed: Sequence[str]
) -> CommandSuite:
    tests = tuple(path for path in files_after if is_test_path(path) and path.endswith(SOURCE_SUFFIXES))
    return CommandSuite(fleet, environment, tests, changed)


def _plugins(listed: str) -> tuple[str, ...]:
    ignored = {*IGNORED_PACKAGES, "pytest", "hypothesis"}
    return tuple(sorted(name for package, name in json.loads(listed) if requirement_name(package) not in ignored))
