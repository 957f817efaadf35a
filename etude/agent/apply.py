"""Bringing changes to the real directory: file by file, each whole or not at all, and never over somebody's work.

What comes out of a pod is a stranger's. Directories are walked from the root by descriptor and no link is followed, so
nothing is written outside; git's own directory is never touched; a link that leads out is not made. A file that is not
as it was when the session saw it stays as it is.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.agent.diff import Change
from etude.agent.manifest import Entry, is_ours
from etude.errors import EtudeError

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OTHER = Entry("file", "neither a file nor a link")  # a directory or a device; equal to nothing that changes


class Refused(EtudeError):
    """A change was not applied, and why."""


@dataclass(frozen=True)
class Applied:
    """What became of changes."""

    done: tuple[Change, ...]
    refused: tuple[tuple[Change, str], ...]


def apply_changes(root: Path, changes: Sequence[Change]) -> Applied:
    """Apply what can be; deletions first, so that a file can take a directory's place."""
    done, refused = [], []
    order = sorted(changes, key=lambda change: (change.after is not None, change.path))
    with contextlib.closing(_Root(root)) as top:
        for change in order:
            try:
                _apply(top, change)
                done.append(change)
            except Refused as error:
                refused.append((change, str(error)))
            except OSError as error:
                refused.append((change, f"{error.strerror}".lower()))
    return Applied(tuple(done), tuple(refused))


class _Root:
    """The directory that is written to, by descriptor."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, DIRECTORY)

    def close(self) -> None:
        os.close(self.fd)

    @contextlib.contextmanager
    def parent(self, path: str, make: bool) -> Iterator[tuple[int, str]]:
        """The directory of a path, made if need be, and its last name."""
        *above, name = path.split("/")
        here = os.dup(self.fd)
        try:
            for part in above:
                try:
                    below = os.open(part, DIRECTORY, dir_fd=here)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, dir_fd=here)
                    below = os.open(part, DIRECTORY, dir_fd=here)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        raise Refused(f"{part} on its way is not a directory") from None
                    raise
                os.close(here)
                here = below
            yield here, name
        finally:
            os.close(here)


def _apply(root: _Root, change: Change) -> None:
    if not is_ours(change.path):
        raise Refused("it is not a path in the directory that may be written")
    after = change.after
    if after is not None and after.kind == "link" and leads_out(change.path, after.digest):
        raise Refused(f"the link leads out of the directory, to {after.digest}")
    try:
        with root.parent(change.path, make=after is not None) as (here, name):
            now = current(here, name)
            if now == after:
                return  # somebody did the same
            if now != change.before:
                raise Refused(_what_happened(change, now))
            if after is None:
                os.unlink(name, dir_fd=here)
            else:
                _put(here, name, change, after)
    except FileNotFoundError:
        if after is not None:
            raise
    if after is None:
        _prune(root, change.path)


def _put(here: int, name: str, change: Change, after: Entry) -> None:
    """Make the new file beside the old, then take its place."""
    part = f".etude-{secrets.token_hex(8)}"
    try:
        if after.kind == "link":
            os.symlink(after.digest, part, dir_fd=here)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o777 if after.executable else 0o666, dir_fd=here), "wb") as file:
                file.write(change.data)
                file.flush()
                if (mode := _kept_mode(here, name, after)) is not None:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        if current(here, name) != change.before:  # once more: writing took its time
            raise Refused(_what_happened(change, current(here, name)))
        os.replace(part, name, src_dir_fd=here, dst_dir_fd=here)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=here)
        raise


def _kept_mode(here: int, name: str, after: Entry) -> int | None:
    """The permissions of the file that is replaced, executable or not as the new one; None for a new file."""
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    mode = stat.S_IMODE(info.st_mode) & 0o777
    readers = (mode & 0o444) >> 2  # who may read it may run it
    return mode | readers if after.executable else mode & ~0o111


def current(here: int, name: str) -> Entry | None:
    """What is there now."""
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(info.st_mode):
        return Entry("link", os.readlink(name, dir_fd=here))
    if not stat.S_ISREG(info.st_mode):
        return OTHER
    digest = hashlib.sha256()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=here), "rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return Entry("file", digest.hexdigest(), info.st_size, bool(info.st_mode & 0o100))


def leads_out(path: str, target: str) -> bool:
    """Whether a link may lead out of the directory. Steps up stand at the front: after a name, which may be a link
    itself, nobody can tell where a step up leads."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return target.startswith("/") or not target or ".." in parts[up:] or up > path.count("/")


def _prune(root: _Root, path: str) -> None:
    """Remove the directories that a deletion left empty."""
    parts = path.split("/")[:-1]
    while parts:
        with contextlib.suppress(OSError, Refused), root.parent("/".join(parts), make=False) as (here, name):
            os.rmdir(name, dir_fd=here)
        parts.pop()


def _what_happened(change: Change, now: Entry | None) -> str:
    if now is None:
        return "it was deleted on disk meanwhile"
    if now is OTHER:
        return "something that is not a file is there"
    return "a file of that name appeared on disk meanwhile" if change.before is None else "it changed on disk meanwhile"
