"""A real `etude pods serve` process, and a check that it leaves nothing behind: for tests of hosts and the CLI."""

import asyncio
import contextlib
import functools
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from etude.errors import BusyError
from etude.files import take_lock
from etude.pods.fleet import open_host
from etude.pods.remote.client import RemoteHostClient
from etude.pods.runtime.namespaces import ZYGOTE
from etude.pods.runtime.probe import probe
from etude.pods.settings import PodSettings

ROOT = Path(__file__).parent.parent.parent
TOKEN = "a-token-for-tests-0123456789"
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # an ordinary user's tests have our packages there
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(PATHS),
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "ETUDE_PODS_TOKEN": TOKEN,
}
T = TypeVar("T")


@functools.cache
def why_not() -> str:
    """Return why the namespace backend does not work here; empty if it works."""
    verdict = asyncio.run(probe("namespace"))
    return "" if verdict.works else verdict.reason


def need_namespaces() -> None:
    """Skip the test where the namespace backend does not work."""
    if reason := why_not():
        pytest.skip(f"the namespace backend does not work here: {reason}")


@contextlib.contextmanager
def state_directory() -> Iterator[Path]:
    """Yield a state directory; afterwards stop its zygote and check that nothing is left."""
    state = Path(tempfile.mkdtemp(prefix="etude-test-"))
    try:
        yield state
        asyncio.run(shut(state))
        deadline = time.monotonic() + 60  # a zygote that was told to stop needs a moment
        while (left := left_behind(state)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, left
    finally:
        shutil.rmtree(state, ignore_errors=True)


async def shut(state: Path) -> None:
    host = await open_host("namespace", state)
    await host.backend.shutdown()
    await host.close()


def left_behind(state: Path) -> list[str]:
    """Return what is left of a state directory's pods: a zygote, control groups, mounts, pod directories."""
    found = []
    try:
        os.close(take_lock(state / f"{ZYGOTE}.lock", "the zygote"))
    except BusyError as error:
        found.append(str(error))
    name = f"etude-{hashlib.sha256(os.fsencode(state)).hexdigest()[:12]}"
    groups = os.walk("/sys/fs/cgroup")  # unlike a glob it ignores groups that disappear meanwhile
    found += [
        os.path.join(parent, group) for parent, children, _ in groups for group in children if group.startswith(name)
    ]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line]
    return found + [str(path) for path in (state / "pods").iterdir()]


class Server:
    """A running `etude pods serve` on its own port."""

    def __init__(self, state: Path, *options: str, address: str = "127.0.0.1", prefix: Sequence[str] = ()) -> None:
        self.state, self.options, self.url, self.prefix = state, options, f"http://{address}:0", prefix
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        """Start the server; a restart uses the same address."""
        listen = self.url.partition("://")[2]
        command = [sys.executable, "-m", "etude.cli", "pods", "serve", "--backend", "namespace", "--listen", listen]
        self.process = subprocess.Popen(
            [*self.prefix, *command, "--state", str(self.state), *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=ENVIRONMENT,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while "warning: no TLS" in line:
            line = self.process.stdout.readline()
        assert line.startswith(("http://", "https://")), line + self.process.stdout.read()
        self.url = line.split()[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.contextmanager
def server(*options: str, **place: Any) -> Iterator[Server]:
    """Run a server with its own state directory; check afterwards that nothing is left of either."""
    need_namespaces()
    with state_directory() as state:
        running = Server(state, *options, **place)
        try:
            yield running
        finally:
            if running.process is not None and running.process.poll() is None:
                running.end()


@functools.cache
def token_file(token: str) -> Path:
    """Return a file with a token."""
    path = Path(tempfile.mkdtemp(prefix="etude-token-")) / "token"
    path.write_text(f"{token}\n")
    return path


def settings_of(*urls: str, token: str = TOKEN, **values: Any) -> PodSettings:
    """Return the settings with which a fleet uses hosts."""
    return PodSettings(hosts=urls, token_file=token_file(token), **values)


async def open_client(url: str, **values: Any) -> RemoteHostClient:
    return await RemoteHostClient.open(url, settings_of(url, **values))


async def wait_until_empty(running: Server, seconds: float = 120.0) -> None:
    """Wait until a server has no pods; those of dead clients end with their lease."""
    client, deadline = await open_client(running.url), time.monotonic() + seconds
    try:
        while pods := await client.pods():
            assert time.monotonic() < deadline, pods
            await asyncio.sleep(0.1)
    finally:
        await client.close()


def with_client(running: Server, work: Callable[[RemoteHostClient], Awaitable[T]], **options: Any) -> T:
    """Run `work` with a client of a server; close every pod it created."""

    async def inside() -> T:
        client = await open_client(running.url, **options)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(inside())
