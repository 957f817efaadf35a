"""What every backend must do, in one suite: run here by pytest, or by any interpreter that can import etude.

    python tests/pods/conformance.py namespace STATE [--compiled] [CHECK ...]

A check is an async function of a `Home`; its name states a truth. Every check prints one JSON object (name, outcome,
seconds, text), so that a run as another user, on another machine or through another keeper reads the same. A check
that this backend declares it cannot pass must say so: then `Unsupported` has to be raised, and that is the check.
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
from etude.pods.runtime.native.build import find_helper
from etude.pods.runtime.probe import cache_directory, probe

DEADLINE_S = 60.0  # of one check; none takes more than a few seconds

Check = Callable[["Home"], Awaitable[None]]
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
class Home:
    """Where checks get their pods, and a directory of the host's that is theirs."""

    host: Host
    scratch: Path

    @property
    def can(self) -> Capabilities:
        return self.host.backend.capabilities

    @contextlib.asynccontextmanager
    async def pod(self, *arguments: Any, **options: Any) -> AsyncIterator[Pod]:
        """A pod for one check."""
        pod = await self.host.create(*arguments, **options)
        try:
            yield pod
        finally:
            await pod.close()

    @property
    def own_root(self) -> bool:
        """Whether a pod has a root file system of its own, and processes nobody else sees."""
        return self.can.isolation not in ("none", "lsm")

    def place(self) -> Path:
        """A new empty directory of the host's."""
        return Path(tempfile.mkdtemp(dir=self.scratch))


@contextlib.contextmanager
def raises(*kinds: type[BaseException]) -> Iterator[dict[str, BaseException]]:
    """That the block ends with one of these errors; it is `caught["error"]` afterwards."""
    caught: dict[str, BaseException] = {}
    try:
        yield caught
    except kinds as error:
        caught["error"] = error
    else:
        raise AssertionError(f"nothing was raised; expected {' or '.join(kind.__name__ for kind in kinds)}")


async def eventually(condition: Callable[[], Awaitable[Any]], seconds: float = 10.0) -> Any:
    """What `condition` gives as soon as it is true; an error when it does not become so in time."""
    deadline = time.monotonic() + seconds
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        await asyncio.sleep(0.01)
    return found


async def run_one(home: Home, name: str) -> dict[str, Any]:
    """One check as a row of the table."""
    started = time.perf_counter()
    outcome, text = "passed", ""
    try:
        await asyncio.wait_for(CHECKS[name](home), DEADLINE_S)
    except Skip as reason:
        outcome, text = "skipped", str(reason)
    except Exception:
        outcome, text = "failed", traceback.format_exc()
    return {"name": name, "outcome": outcome, "seconds": round(time.perf_counter() - started, 3), "text": text}


async def run(backend: str, state: Path, compiled: bool, names: list[str]) -> None:
    """Every check, one after the other, on one host; one JSON object per line."""
    if (reason := await missing(backend, state, compiled)) is not None:
        print(json.dumps({"name": UNAVAILABLE, "outcome": "skipped", "seconds": 0.0, "text": reason}), flush=True)
        return
    host = await open_host(backend, state, compiled=compiled)
    with tempfile.TemporaryDirectory(dir=state.parent) as scratch:
        home = Home(host, Path(scratch))
        try:
            for name in names or CHECKS:
                print(json.dumps(await run_one(home, name)), flush=True)
        finally:
            await host.close()
            await host.backend.shutdown()
    left = [path for path in (state / "pods").iterdir() if path.name != "probe"]
    row = {"name": NOTHING_LEFT, "outcome": "failed" if left else "passed", "seconds": 0.0, "text": str(left or "")}
    print(json.dumps(row), flush=True)


async def missing(backend: str, state: Path, compiled: bool) -> str | None:
    """Why this backend cannot be checked here, in words; None when it can."""
    if compiled:
        helper, reason = find_helper(cache_directory(state))
        if helper is None:
            return f"there is no compiled keeper: {reason}"
    verdict = await probe(backend, compiled)
    return None if verdict.works else f"{backend} does not work here: {verdict.reason}"


UNAVAILABLE = "unavailable"
NOTHING_LEFT = "no_pod_directory_is_left_when_all_is_closed"


def load() -> None:
    """Import every theme of the suite."""
    import tests.pods.conformance_commands
    import tests.pods.conformance_files
    import tests.pods.conformance_jobs
    import tests.pods.conformance_life
    import tests.pods.conformance_snapshots  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("state", type=Path)
    parser.add_argument("checks", nargs="*")
    parser.add_argument("--compiled", action="store_true")
    given = parser.parse_args()
    os.umask(0o022)
    os.environ["ETUDE_CONFORMANCE_SECRET"] = "of the service"
    load()
    asyncio.run(run(given.backend, given.state, given.compiled, given.checks))


if __name__ == "__main__":
    # As a script this file would be a second module beside `tests.pods.conformance`, with a table of its own.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from tests.pods.conformance import main as run_main

    run_main()
