"""The conformance suite of all backends: run by pytest, or by any interpreter that can import etude.

    python tests/pods/conformance.py namespace STATE [CHECK ...]

A check is an async function of a `CheckContext`; its name states what it verifies. Every check prints one JSON object
(name, outcome, seconds, text), so that a run as another user or on another machine has the same output. Where the
backend declares that it lacks a capability, the check verifies that `Unsupported` is raised.
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.pods.fleet import open_host
from etude.pods.host import Host
from etude.pods.pod import Capabilities, Pod
from etude.pods.runtime.probe import probe

DEADLINE_S = 180.0  # for one check; none takes more than a few seconds

Check = Callable[["CheckContext"], Awaitable[None]]
CHECKS: dict[str, Check] = {}


class Skip(Exception):
    """The check does not apply here; the message says why."""


def check(function: Check) -> Check:
    """Add a check to the suite, under its name."""
    name = function.__name__  # type: ignore[attr-defined]
    assert name not in CHECKS, name
    CHECKS[name] = function
    return function


@dataclass
class CheckContext:
    """The host on which checks create their pods, and a scratch directory."""

    host: Host
    scratch: Path

    @property
    def can(self) -> Capabilities:
        return self.host.backend.capabilities

    @contextlib.asynccontextmanager
    async def pod(self, *arguments: Any, **options: Any) -> AsyncIterator[Pod]:
        """Create a pod for one check."""
        pod = await self.host.create(*arguments, **options)
        try:
            yield pod
        finally:
            await pod.close()

    @property
    def own_root(self) -> bool:
        """Whether a pod has its own root file system and PID namespace."""
        return self.can.isolation not in ("none", "lsm")

    def new_directory(self) -> Path:
        """Create an empty directory on the host."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


@contextlib.contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[dict[str, BaseException]]:
    """Check that the block raises one of these errors; it is `caught["error"]` afterwards."""
    caught: dict[str, BaseException] = {}
    try:
        yield caught
    except kinds as error:
        caught["error"] = error
    else:
        raise AssertionError(f"nothing was raised; expected {' or '.join(kind.__name__ for kind in kinds)}")


async def eventually(condition: Callable[[], Awaitable[Any]], seconds: float = 60.0) -> Any:
    """Wait until `condition` returns a true value and return it; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        await asyncio.sleep(0.01)
    return found


async def run_one(context: CheckContext, name: str) -> dict[str, Any]:
    """Run one check and return its row of the table."""
    started = time.perf_counter()
    outcome, text = "passed", ""
    try:
        await asyncio.wait_for(CHECKS[name](context), DEADLINE_S)
    except Skip as reason:
        outcome, text = "skipped", str(reason)
    except Exception:
        outcome, text = "failed", traceback.format_exc()
    return {"name": name, "outcome": outcome, "seconds": round(time.perf_counter() - started, 3), "text": text}


async def run(backend: str, state: Path, names: list[str]) -> None:
    """Run the checks one after the other on one host; print one JSON object per line."""
    result = await probe(backend)
    if not result.works:
        reason = f"{backend} does not work here: {result.reason}"
        print(json.dumps({"name": UNAVAILABLE, "outcome": "skipped", "seconds": 0.0, "text": reason}), flush=True)
        return
    host = await open_host(backend, state)
    with tempfile.TemporaryDirectory(dir=state.parent) as scratch:
        context = CheckContext(host, Path(scratch))
        try:
            for name in names or CHECKS:
                print(json.dumps(await run_one(context, name)), flush=True)
        finally:
            await host.close()
            await host.backend.shutdown()
    left = [path for path in (state / "pods").iterdir() if path.name != "probe"]
    row = {"name": NOTHING_LEFT, "outcome": "failed" if left else "passed", "seconds": 0.0, "text": str(left or "")}
    print(json.dumps(row), flush=True)


UNAVAILABLE = "unavailable"
NOTHING_LEFT = "no_pod_directory_is_left_after_closing"


def load() -> None:
    """Import every module of the suite."""
    import tests.pods.conformance_commands
    import tests.pods.conformance_diff
    import tests.pods.conformance_files
    import tests.pods.conformance_jobs
    import tests.pods.conformance_life
    import tests.pods.conformance_snapshots  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("state", type=Path)
    parser.add_argument("checks", nargs="*")
    given = parser.parse_args()
    os.umask(0o022)
    os.environ["ETUDE_CONFORMANCE_SECRET"] = "of the service"
    load()
    asyncio.run(run(given.backend, given.state, given.checks))


if __name__ == "__main__":
    # As a script this file would be a second module beside `tests.pods.conformance`, with a table of its own.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tests.pods.conformance import main as run_main

    run_main()
