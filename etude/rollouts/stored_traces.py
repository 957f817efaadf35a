"""The traces of a run: in its directory, or in the object store that its recipe names (`rl.traces`).

Names are those in the rollout queue: traces/GROUP/NUMBER-ATTEMPT.trace and evaluation-traces/... An attempt has one
trace, which is never changed.
"""

from dataclasses import dataclass
from pathlib import PurePosixPath

from etude.errors import InputError
from etude.harness.trace import Trace
from etude.harness.trace_store import SUFFIX, unpack_trace
from etude.rollouts.settings import QueueName, rollout_store
from etude.runs.layout import RunLayout
from etude.weights.object_store import ObjectStore

DIRECTORIES: dict[QueueName, str] = {"training": "traces", "evaluation": "evaluation-traces"}


def trace_name(queue: QueueName, group: int, number: int, attempt: int) -> str:
    """Return the name of the trace of an attempt."""
    return f"{DIRECTORIES[queue]}/{group:06d}/{number:02d}-{attempt}{SUFFIX}"


@dataclass(frozen=True)
class StoredTrace:
    """A trace that exists; `changed` differs if its file was replaced."""

    url: str
    name: str
    changed: int = 0


class StoredTraces:
    """Reads the traces of one run."""

    def __init__(self, layout: RunLayout) -> None:
        self.store = ObjectStore(rollout_store(layout))

    def find(self, name: str) -> StoredTrace | None:
        """Return the trace of this name; None if there is none, or it leads out of the run."""
        directory = self.store.directory
        if directory is None:
            folder, _, file = name.rpartition("/")
            return StoredTrace(self.url(name), name) if file in self.store.names(folder) else None
        path = directory / name
        if not path.is_file() or not path.resolve().is_relative_to(directory.resolve()):
            return None
        return StoredTrace(self.url(name), name, path.stat().st_mtime_ns)

    def load(self, name: str) -> Trace:
        """Return a trace; InputError if it is missing or damaged, or the store cannot be read."""
        try:
            data = self.store.get(name)
        except OSError as error:
            raise InputError(f"{self.url(name)}: cannot be read: {error.strerror or error}") from None
        if data is None:
            raise InputError(f"{self.url(name)}: cannot be read: there is no such trace")
        return unpack_trace(data, self.url(name))

    def groups(self, queue: QueueName) -> list[int]:
        """Return the groups that have traces."""
        return [int(name) for name in self.store.names(DIRECTORIES[queue]) if name.isdigit()]

    def of_group(self, queue: QueueName, group: int) -> list[str]:
        """Return the names of the traces of a group."""
        folder = f"{DIRECTORIES[queue]}/{group:06d}"
        return [f"{folder}/{name}" for name in self.store.names(folder) if name.endswith(SUFFIX)]

    def url(self, name: str) -> str:
        return f"{self.store.url}/{name}"


def attempt_of(name: str) -> tuple[int, int]:
    """Return the number of the slot and the attempt that a trace is of."""
    number, _, attempt = PurePosixPath(name).name.removesuffix(SUFFIX).partition("-")
    return int(number), int(attempt)
