"""One writer at a time: a lock file whose text says who holds it. It goes with the process, however that ends."""

import fcntl
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from etude.errors import BusyError


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


def holder(file: Path) -> str:
    """Who holds `file`, without disturbing them; "" when nobody does. What a killed process wrote there stays."""
    said = file.read_text(errors="replace").strip() if file.exists() else ""
    words = said.split()  # pid N on HOST since WHEN
    if len(words) != 6 or not words[1].isdigit():
        return ""
    return said if words[3] != socket.gethostname() or _lives(int(words[1])) else ""


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True
