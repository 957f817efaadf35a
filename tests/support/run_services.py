"""Run services for tests: in a thread of this process, or as the process that a run starts."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from etude.files import write_atomically
from etude.rollouts.live_settings import LiveSettings
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.run_service import RunService
from etude.rollouts.settings import QueueName, QueueSettings, RolloutSettings
from etude.runs.address import TOKEN_VARIABLE, choose_address, read_address, run_token
from etude.runs.client import RunClient
from etude.runs.layout import RunLayout
from etude.runs.member import RunMember, open_member
from etude.runs.service_status import ServiceStatus, read_copy, read_statuses, write_copy
from etude.system.http import UvicornServer, bind

RECIPE = 'name = "test"\nstages = ["rl"]\n[rl]\n'


class FakeStatuses:
    """The statuses that a test says there are, in place of a `StatusReader`."""

    def __init__(self) -> None:
        self.found: dict[str, ServiceStatus] = {}

    def set(self, name: str, **facts: Any) -> None:
        self.found[name] = ServiceStatus(facts, 0.0)

    def all(self, *, fresh: bool = False) -> dict[str, ServiceStatus]:
        return self.found

    def get(self, name: str, *, fresh: bool = False) -> ServiceStatus | None:
        return self.found.get(name)

    def report(self, name: str, **facts: Any) -> None:
        self.set(name, **facts)


@contextlib.contextmanager
def threaded_service(layout: RunLayout, queues: Mapping[QueueName, QueueSettings]) -> Iterator[RunService]:
    """Run the run service of a run in a thread."""
    if not layout.recipe.exists():
        write_atomically(layout.recipe, RECIPE)
    address, started = choose_address(layout), threading.Event()
    found: list[RunService] = []
    paths: dict[QueueName, Any] = {"training": layout.slots, "evaluation": layout.evaluations}

    async def serve() -> None:
        opened = {name: RolloutQueue(paths[name], settings) for name, settings in queues.items()}
        service = RunService(layout, opened, live=LiveSettings(layout, RolloutSettings))
        options: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "timeout_graceful_shutdown": 1}
        with bind(address.host, address.port) as listener:
            server = UvicornServer(uvicorn.Config(service.application(run_token(layout)), **options))
            service.server = server  # type: ignore[attr-defined]
            keeping = asyncio.create_task(service.keep_house())
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            while not server.started:
                await asyncio.sleep(0.01)
            found.append(service)
            started.set()
            await serving
            keeping.cancel()
        service.end()
        for queue in opened.values():
            queue.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        yield found[0]
    finally:
        if found:
            found[0].server.should_exit = True  # type: ignore[attr-defined]
        thread.join(60)


def environment_of(layout: RunLayout) -> dict[str, str]:
    """Return the environment of processes that the service of this run admits."""
    return {**os.environ, TOKEN_VARIABLE: run_token(layout)}


@contextlib.contextmanager
def member_of(layout: RunLayout, name: str = "worker-0") -> Iterator[RunMember]:
    """Give this process as a member of a run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TOKEN_VARIABLE, run_token(layout))
        member = open_member(service_url(layout), name)
    with contextlib.closing(member.client):
        yield member


def service_url(layout: RunLayout) -> str:
    address = read_address(layout)
    assert address is not None
    return address.url


def elsewhere(hidden: Path, command: Sequence[str]) -> list[str]:
    """Return a command that runs where a directory cannot be seen, as on another machine; skip if not permitted."""
    script = f'mount -t tmpfs none "{hidden}" && exec "$@"'
    prefix = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode:
        pytest.skip("private mounts are not permitted here")
    return [*prefix, *command]


class ServiceProcess:
    """The run service as a process, which can be killed and started again."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        if not layout.recipe.exists():
            write_atomically(layout.recipe, RECIPE)
        choose_address(layout)
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "ServiceProcess":
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end(signal.SIGTERM)

    def start(self) -> None:
        command = [sys.executable, "-m", "etude.rollouts.run_service", str(self.layout.run)]
        self.process = subprocess.Popen([*command, "--root", self.layout.service_root])

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)

    def client(self, **options: Any) -> RunClient:
        found = RunClient.beside(self.layout, **options)
        found.connect()
        return found


def set_status(layout: RunLayout, name: str, *, time: float, **facts: Any) -> None:
    """Write the status of a service as the run service of an ended run has left it."""
    found = {key: each.facts for key, each in read_copy(layout).items()}
    write_copy(layout, found | {name: {**facts, "time": time}})


def facts_of(layout: RunLayout, name: str) -> dict[str, Any] | None:
    """Return the last status of a service; None if there is none."""
    status = read_statuses(layout).get(name)
    return None if status is None else status.facts
