"""Records of the pods of a state directory, and of the processes that own them.

A pod's record is written before the pod is created. Every owner process holds a lock file while it lives, so that other
processes can tell which owners are dead.
"""

import contextlib
import os
import secrets
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from etude.errors import BusyError, InputError
from etude.files import take_lock, write_atomically
from etude.pods.runtime.backend import PodSpec

_RECORD = TypeAdapter(PodSpec)


class PodRegistry:
    """The records of a state directory, and this process's owner lock in it."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        self.lock = -1

    def open(self) -> None:
        """Create the directories and take this process's owner lock."""
        for name in ("pods", "owners", "trash"):
            (self.state / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.lock = take_lock(self.owner_file(self.owner), f"owner {self.owner}")

    def close(self) -> None:
        """Release the owner lock."""
        if self.lock >= 0:
            self.owner_file(self.owner).unlink(missing_ok=True)
            os.close(self.lock)
            self.lock = -1

    def write(self, spec: PodSpec) -> None:
        """Write a pod's record, atomically."""
        directory = self.state / "pods" / spec.id
        directory.mkdir(mode=0o700, exist_ok=True)
        write_atomically(directory / "pod.json", _RECORD.dump_json(spec))

    def remove(self, id: str) -> None:
        """Remove a pod's record, and its directory if that is empty then."""
        directory = self.state / "pods" / id
        with contextlib.suppress(OSError):  # the backend has removed it already
            (directory / "pod.json").unlink()
            directory.rmdir()

    def records(self) -> list[PodSpec]:
        """Return the spec of every pod in the state directory; a record that cannot be read is skipped."""
        found = []
        for directory in (self.state / "pods").iterdir():
            with contextlib.suppress(OSError, ValidationError, InputError):
                found.append(_RECORD.validate_json((directory / "pod.json").read_bytes()))
        return found

    def owner_file(self, owner: str) -> Path:
        return self.state / "owners" / f"{owner}.lock"

    def alive(self, owner: str) -> bool:
        """Return whether an owner process still runs, by its lock; remove the lock file of a dead one."""
        file = self.owner_file(owner)
        if not file.exists():
            return False
        try:
            os.close(take_lock(file, owner))
        except BusyError:
            return True
        file.unlink(missing_ok=True)
        return False

    def other_owners(self) -> list[str]:
        """Return the other live processes that have this state directory open."""
        owners = (file.stem for file in (self.state / "owners").glob("*.lock"))
        return [owner for owner in owners if owner != self.owner and self.alive(owner)]
