"""Tool executors on real pods for tests: one fleet per module, a new pod for every check.

@pytest.fixture(scope="module")
def pods():
    with open_pod_fixture() as pods:
        yield pods

def test_something(pods):
    async def check(tools: PodTools) -> None:
        assert "1|a" in await tools.text("read_file", target_file="a.txt")
    pods.run(check, files={"a.txt": "a"})
"""

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from etude.chat.messages import ToolCall
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import ToolExecutor, open_tool_executor
from etude.harness.tools.tool import ToolOutcome
from etude.pods import open_fleet
from etude.pods.fleet import Fleet
from etude.pods.pod import Pod, Unsupported

CHECK_S = 180.0  # of one check; none takes more than a few seconds on an idle machine


class PodTools:
    """A tool executor with its pod, and shortcuts for calls."""

    def __init__(self, pod: Pod, executor: ToolExecutor, fleet: Fleet) -> None:
        self.pod, self.executor, self.fleet = pod, executor, fleet
        self.numbers = itertools.count(1)

    @property
    def root(self) -> str:
        return self.executor.root

    def make_call(self, name: str, /, **arguments: Any) -> ToolCall:
        """Return a parsed call; the keyword `_A` stands for the argument `-A`."""
        renamed = {f"-{key[1:]}" if key.startswith("_") else key: value for key, value in arguments.items()}
        return ToolCall(name, renamed, f"call-{next(self.numbers)}")

    async def call(self, name: str, /, **arguments: Any) -> ToolOutcome:
        (outcome,) = await self.executor.run([self.make_call(name, **arguments)])
        return outcome

    async def text(self, name: str, /, **arguments: Any) -> str:
        """Return the text of a call that must succeed."""
        outcome = await self.call(name, **arguments)
        assert outcome.error is None, f"{name}: {outcome.error}: {outcome.text}"
        return outcome.text

    async def error(self, kind: str, name: str, /, **arguments: Any) -> str:
        """Return the text of a call that must fail."""
        outcome = await self.call(name, **arguments)
        assert outcome.error == kind, f"{name}: {outcome.error}, not {kind}: {outcome.text}"
        return outcome.text

    async def sh(self, command: str, **options: Any) -> str:
        """Return the output of a command run outside the tools."""
        result = await self.pod.exec(command, **options)
        assert result.ok, result.stderr
        return result.stdout

    async def read(self, path: str) -> bytes:
        return await self.pod.read(f"{self.root}/{path}")


class PodFixture:
    """Runs checks on new pods of one fleet."""

    def __init__(self, runner: asyncio.Runner, fleet: Fleet) -> None:
        self.runner, self.fleet = runner, fleet
        assert fleet.local is not None
        self.backend = fleet.local.backend.name

    def run(
        self,
        check: Callable[[PodTools], Awaitable[None]],
        *,
        tool_set: ToolSet | None = None,
        files: Mapping[str, str | bytes] | None = None,
        **options: Any,
    ) -> None:
        """Run a check on a new pod that has these files."""

        async def main() -> None:
            pod = await self.fleet.create("host")
            try:
                for path, content in (files or {}).items():
                    await pod.write(path, content)
                async with open_tool_executor(pod, tool_set or ToolSet(), **options) as executor:
                    await check(PodTools(pod, executor, self.fleet))
                    assert executor.bugs == 0
            finally:
                await pod.close()

        self.runner.run(asyncio.wait_for(main(), CHECK_S))


@contextlib.contextmanager
def open_pod_fixture(backend: str = "auto") -> Iterator[PodFixture]:
    """Open a fleet on the strongest available backend or the named one; skip the test if there is none."""
    with tempfile.TemporaryDirectory(prefix="etude-tools-") as directory, asyncio.Runner() as runner:
        context = open_fleet(backend, state=Path(directory) / "state")
        try:
            fleet = runner.run(context.__aenter__())
        except Unsupported as reason:
            pytest.skip(str(reason))
        try:
            yield PodFixture(runner, fleet)
        finally:
            runner.run(context.__aexit__(None, None, None))
            runner.run(fleet.local.backend.shutdown())  # type: ignore[union-attr]


_shared: list[PodFixture] = []


def shared_pod_fixture(config: pytest.Config) -> PodFixture:
    """Return the fixture shared by all tests of this run: opening one takes longer than most checks."""
    if not _shared:
        stack = contextlib.ExitStack()
        _shared.append(stack.enter_context(open_pod_fixture()))
        config.add_cleanup(stack.close)
    return _shared[0]
