"""Toolboxes on real pods for tests: one fleet for a module, a pod of its own for every check.

@pytest.fixture(scope="module")
def yard():
    with open_yard() as yard:
        yield yard

def test_something(yard):
    async def check(box: Box) -> None:
        assert "1|a" in await box.text("read_file", target_file="a.txt")
    yard.run(check, files={"a.txt": "a"})
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

CHECK_S = 60.0  # of one check; none takes more than a few seconds on an idle machine


class Box:
    """A toolbox with its pod, and short ways to use them."""

    def __init__(self, pod: Pod, toolbox: ToolExecutor, fleet: Fleet) -> None:
        self.pod, self.toolbox, self.fleet = pod, toolbox, fleet
        self.numbers = itertools.count(1)

    @property
    def root(self) -> str:
        return self.toolbox.root

    def made(self, name: str, /, **arguments: Any) -> ToolCall:
        """A call as a dialect would have read it; `_A` stands for `-A`."""
        given = {f"-{key[1:]}" if key.startswith("_") else key: value for key, value in arguments.items()}
        return ToolCall(name, given, f"call-{next(self.numbers)}")

    async def call(self, name: str, /, **arguments: Any) -> ToolOutcome:
        (outcome,) = await self.toolbox.run([self.made(name, **arguments)])
        return outcome

    async def text(self, name: str, /, **arguments: Any) -> str:
        """What a call that must succeed gives."""
        outcome = await self.call(name, **arguments)
        assert outcome.error is None, f"{name}: {outcome.error}: {outcome.text}"
        return outcome.text

    async def error(self, kind: str, name: str, /, **arguments: Any) -> str:
        """What a call that must fail says."""
        outcome = await self.call(name, **arguments)
        assert outcome.error == kind, f"{name}: {outcome.error}, not {kind}: {outcome.text}"
        return outcome.text

    async def sh(self, command: str, **options: Any) -> str:
        """What a command run beside the tools prints."""
        result = await self.pod.exec(command, **options)
        assert result.ok, result.stderr
        return result.stdout

    async def read(self, path: str) -> bytes:
        return await self.pod.read(f"{self.root}/{path}")


class Yard:
    """Where checks get their pods."""

    def __init__(self, runner: asyncio.Runner, fleet: Fleet) -> None:
        self.runner, self.fleet = runner, fleet
        assert fleet.local is not None
        self.backend = fleet.local.backend.name

    def run(
        self,
        check: Callable[[Box], Awaitable[None]],
        *,
        environment: ToolSet | None = None,
        files: Mapping[str, str | bytes] | None = None,
        **options: Any,
    ) -> None:
        """Run a check on a new pod that has these files."""

        async def main() -> None:
            pod = await self.fleet.create("host")
            try:
                for path, content in (files or {}).items():
                    await pod.write(path, content)
                async with open_tool_executor(pod, environment or ToolSet(), **options) as toolbox:
                    await check(Box(pod, toolbox, self.fleet))
                    assert toolbox.bugs == 0
            finally:
                await pod.close()

        self.runner.run(asyncio.wait_for(main(), CHECK_S))


@contextlib.contextmanager
def open_yard(backend: str = "auto") -> Iterator[Yard]:
    """A fleet on the strongest backend that works here, or the one named; skips where there is none."""
    with tempfile.TemporaryDirectory(prefix="etude-tools-") as directory, asyncio.Runner() as runner:
        context = open_fleet(backend, state=Path(directory) / "state")
        try:
            fleet = runner.run(context.__aenter__())
        except Unsupported as reason:
            pytest.skip(str(reason))
        try:
            yield Yard(runner, fleet)
        finally:
            runner.run(context.__aexit__(None, None, None))
            runner.run(fleet.local.backend.shutdown())  # type: ignore[union-attr]


_shared: list[Yard] = []


def shared_yard(config: pytest.Config) -> Yard:
    """The yard of this run of tests: opening one takes longer than most checks."""
    if not _shared:
        stack = contextlib.ExitStack()
        _shared.append(stack.enter_context(open_yard()))
        config.add_cleanup(stack.close)
    return _shared[0]
