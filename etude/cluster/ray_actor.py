"""What runs on the nodes of a Ray cluster: an actor that holds one process of a service, and a description of its node.

The process is a child of the actor, in a session of its own: a crash of it never takes a worker of Ray along, and it
ends with the actor, which ends with the process that holds the run.
"""

import asyncio
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray

from etude import __version__
from etude.cluster.local import start_child

WATCH_S = 1.0  # a call that watches a process returns after so long without news
POLL_S = 0.1
LOG_BYTES = 1 << 18  # of one answer


@dataclass(frozen=True)
class Probe:
    """A file of the run directory and its contents: a node that reads the same sees the directory."""

    path: str
    contents: str

    def is_seen(self) -> bool:
        try:
            with open(self.path, encoding="ascii") as file:
                return file.read() == self.contents
        except OSError:
            return False


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself."""

    id: str
    version: str  # of etude
    sees_run: bool  # the run directory


@dataclass(frozen=True)
class News:
    """What a process has written since the last answer, and its return code once it has ended and all is read."""

    log: bytes
    code: int | None


def describe_node(probe: Probe) -> NodeFacts:
    """Return the facts of the node that this runs on."""
    return NodeFacts(ray.get_runtime_context().get_node_id(), __version__, probe.is_seen())


class ServiceHost:
    """The actor. Its methods are called one after another by the process that holds the run."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (it disappears with this process, however that ends)
        self._read = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None

    async def describe(self, probe: Probe) -> NodeFacts:
        return describe_node(probe)

    async def start(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the process `python -m MODULE ARGUMENTS`."""
        started = threading.Event()

        def run() -> None:
            # The kernel ends the child when the thread that started it ends: this one stays until the child has ended.
            try:
                self._process = start_child(
                    [sys.executable, "-m", module, *arguments], environment, self._log, own_session=True
                )
            except OSError as error:
                self._failure = error
            started.set()
            if self._process is not None:
                self._process.wait()

        threading.Thread(target=run, name="service", daemon=True).start()
        started.wait()
        if self._failure is not None:
            raise self._failure

    async def watch(self) -> News:
        """Return news of the process; after a second without any, what is known."""
        assert self._process is not None
        for _ in range(round(WATCH_S / POLL_S)):
            code = self._process.returncode  # before the log is read: nothing is written after it
            log = os.pread(self._log.fileno(), LOG_BYTES, self._read)
            self._read += len(log)
            if log or code is not None:
                return News(log, code if len(log) < LOG_BYTES else None)
            await asyncio.sleep(POLL_S)
        return News(b"", None)

    async def terminate(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()
