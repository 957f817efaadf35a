"""The unisolated pod: commands, files and jobs work as in every pod; everything else raises Unsupported."""

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import InputError
from etude.pods.pod import Capabilities, Pod, PodGone, Unsupported
from etude.pods.runtime.unisolated import open_unisolated
from tests.pods import conformance, conformance_commands, conformance_files, conformance_jobs
from tests.pods.test_conformance import LENGTHY

THEMES = (conformance_commands, conformance_files, conformance_jobs)
# An unisolated command has our environment except the hidden variables: see below.
EXCLUDED = {
    "a_command_inherits_no_variable_of_the_service",
    "variables_given_at_creation_are_those_of_every_command_and_of_forks",
}
CHECKS = {
    name: check
    for name, check in conformance.CHECKS.items()
    if check.__module__ in {theme.__name__ for theme in THEMES} and name not in EXCLUDED
}


class UnisolatedContext:
    """The context of the conformance checks: creates unisolated pods."""

    can = Capabilities(isolation="none")
    own_root = False

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch

    def new_directory(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.scratch))

    @contextlib.asynccontextmanager
    async def pod(self, *_: Any, **__: Any) -> AsyncIterator[Pod]:
        async with open_unisolated(self.new_directory()) as pod:
            yield pod


@pytest.mark.parametrize(
    "check",
    [pytest.param(check, id=name, marks=[pytest.mark.slow] * (name in LENGTHY)) for name, check in CHECKS.items()],
)
def test_an_unisolated_pod_passes_the_conformance_checks(
    check: Callable[[Any], Awaitable[None]], tmp_path: Path
) -> None:
    try:
        asyncio.run(asyncio.wait_for(check(UnisolatedContext(tmp_path)), conformance.DEADLINE_S))  # type: ignore[arg-type]
    except conformance.Skip as reason:
        pytest.skip(str(reason))


def test_commands_have_our_environment_except_hidden_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN", "yes")
    monkeypatch.setenv("HIDDEN_FROM_IT", "no")

    async def work() -> str:
        async with open_unisolated(tmp_path, hidden=["HIDDEN_FROM_IT"]) as pod:
            return (await pod.exec("env; cat /proc/$PPID/environ | tr '\\0' '\\n'")).stdout

    output = asyncio.run(work())
    assert "SEEN=yes" in output
    assert "HIDDEN_FROM_IT" not in output


def test_operations_that_need_isolation_are_unsupported(tmp_path: Path) -> None:
    async def work() -> None:
        async with open_unisolated(tmp_path) as pod:
            for asked in (pod.snapshot, pod.fork, pod.diff):
                with pytest.raises(Unsupported, match="in an unisolated pod"):
                    await asked()
            with pytest.raises(Unsupported, match="another user"):
                await pod.exec("true", user="nobody")
            assert (await pod.stats())["pids"] == 0
        with pytest.raises(PodGone):
            await pod.exec("true")

    asyncio.run(work())
    with pytest.raises(InputError, match="not a directory"):
        asyncio.run(open_unisolated(tmp_path / "nowhere").__aenter__())


def test_processes_end_with_the_pod_and_files_stay(tmp_path: Path) -> None:
    async def work() -> tuple[int, str]:
        async with open_unisolated(tmp_path) as pod:
            left = "setsid sh -c 'echo $$ > pid; exec sleep 1000' >/dev/null 2>&1 & while [ ! -s pid ]; do :; done"
            await pod.exec(left, timeout=20)
            return int(await pod.read("pid")), (await pod.exec("echo $TMPDIR")).stdout.strip()

    pid, scratch = asyncio.run(work())
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)  # killed, and not yet waited for
    assert not os.path.exists(f"/proc/{pid}")
    assert not os.path.exists(scratch)
    assert (tmp_path / "pid").exists()
