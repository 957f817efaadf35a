"""One writer at a time: a lock file whose text says who holds it. It goes with the process, however that ends."""

import fcntl
import os
import re
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from etude.errors import BusyError

_HELD = re.compile(r"pid (\d+) on (\S+) since (\S+)")  # as `take_lock` writes it


def take_lock(file: Path, what: str) -> int:
    """Hold `file` until the descriptor is closed; BusyError, naming the holder, if somebody else does."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 1000, 0).decode(errors="replace").strip() or "another process"
        os.close(lock)
        raise BusyError(f"{what} is in use by {holder}; wait for it or name another directory") from None
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)
    return lock


@dataclass(frozen=True)
class Holder:
    """Who has a lock."""

    pid: int
    host: str
    since: str  # ISO 8601

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"


def holder(file: Path) -> Holder | None:
    """Who holds `file`. Its text is read, never the lock tried: for that moment nobody else could have it. What a
    killed process wrote there stays, so on this machine the process must live."""
    try:
        said = _HELD.match(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if said is None:
        return None
    found = Holder(int(said[1]), said[2], said[3])
    return found if not found.here or _lives(found.pid) else None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # somebody else's, or no number of ours
        return True
    return True
