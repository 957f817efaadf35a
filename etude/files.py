"""Files that survive a kill: locks that name their holder, atomic replacement, content digests."""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from etude.errors import BusyError, EtudeError, InputError

_LOCK_TEXT = re.compile(r"pid (\d+) on (\S+) since (\S+)")  # as `take_lock` writes it


# ------------------------------------------------------------------------------------------ locks


def take_lock(file: Path, what: str) -> int:
    """Lock `file` until the returned descriptor is closed; BusyError, naming the holder, if it is taken.

    The kernel releases the lock when the process ends, however that happens.
    """
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
class LockHolder:
    """The process that holds a lock."""

    pid: int
    host: str
    since: str  # ISO 8601

    @property
    def is_local(self) -> bool:
        return self.host == socket.gethostname()

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host} since {self.since}"


def lock_holder(file: Path) -> LockHolder | None:
    """Return the holder that the lock file names, without trying the lock, which would make it busy for a moment.

    A killed process leaves its text behind, so a holder on this machine must still be alive to count.
    """
    try:
        match = _LOCK_TEXT.match(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    if match is None:
        return None
    holder = LockHolder(int(match[1]), match[2], match[3])
    return holder if not holder.is_local or _is_alive(holder.pid) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process, or not a valid pid here
        return True
    return True


# ------------------------------------------------------------------------------------------ atomic writes


def write_atomically(path: Path, data: bytes | str, *, durable: bool = False) -> None:
    """Replace a file: a reader, or a kill at any moment, sees the old content or the new, never a part.

    With `durable` the content is on disk when this returns, and survives a power cut.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
        if durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: str | Path) -> None:
    """Flush a file or directory to disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def sync_tree(root: Path) -> None:
    """Flush everything below `root` to disk.

    In parallel: calls that wait together share one commit of the file system's journal. For a task set of 13,500
    small files that is 2 s instead of 57 on a busy disk.
    """
    paths = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in (*names, "")]
    with ThreadPoolExecutor(16) as pool:
        for _ in pool.map(sync, paths):
            pass


def commit_directory(draft: Path, final: Path) -> None:
    """Give a complete directory its name, replacing what has it: after a kill or a power cut it is there whole or not.

    The old one is moved aside, not deleted in place: a kill must not leave half of it under its name.
    """
    sync_tree(draft)
    old = draft.with_name(f"{draft.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    draft.rename(final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into an EtudeError of one line that names the file."""
    try:
        yield
    except OSError as error:
        advice = "; free some space, then continue with --resume" if error.errno == errno.ENOSPC else ""
        raise EtudeError(f"{error.filename or path}: {error.strerror or error}{advice}") from error


def user_cache(name: str) -> Path:
    """Return a directory for files that can be made again, below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "etude" / name


# ------------------------------------------------------------------------------------------ digests


def content_digest(path: Path) -> str:
    """Return the sha256 of a file; of a directory, the sha256 of what `sha256sum` prints for its files in order."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    if not path.is_dir():
        raise InputError(f"{path} does not exist, so it cannot be recorded as a parent")
    files = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    return files_digest(sorted(files.items()))


def files_digest(files: Iterable[tuple[str, Path]]) -> str:
    """Return one digest for files and the names given with them."""
    manifest = "".join(f"{content_digest(path)}  {name}\n" for name, path in files)
    return hashlib.sha256(manifest.encode(errors="surrogateescape")).hexdigest()
