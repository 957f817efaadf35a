"""Apply changes to the user's directory, each file atomically, and never over edits made meanwhile.

Changes come from a pod and are untrusted. Directories are opened from the root by descriptor and no link is followed,
so nothing outside is written; .git is never touched; a symlink that points outside is not created. A file whose
contents differ from the upload is left alone and reported as refused.
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

from etude.agent.diff import FileDiff
from etude.agent.manifest import ManifestEntry, is_workspace_path
from etude.errors import EtudeError

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NOT_A_FILE = ManifestEntry("file", "neither a file nor a link")  # a directory or a device; equals no other entry


class ChangeRefused(EtudeError):
    """A change was not applied; the message says why."""


@dataclass(frozen=True)
class ApplyResult:
    """Changes that were applied, and those that were not with the reason."""

    applied: tuple[FileDiff, ...]
    refused: tuple[tuple[FileDiff, str], ...]


def apply_changes(root: Path, changes: Sequence[FileDiff]) -> ApplyResult:
    """Apply every change that can be applied. Deletions come first, so that a file can replace a directory."""
    applied, refused = [], []
    order = sorted(changes, key=lambda change: (change.after is not None, change.path))
    with contextlib.closing(_RootDirectory(root)) as top:
        for change in order:
            try:
                _apply(top, change)
                applied.append(change)
            except ChangeRefused as error:
                refused.append((change, str(error)))
            except OSError as error:
                refused.append((change, f"{error.strerror}".lower()))
    return ApplyResult(tuple(applied), tuple(refused))


class _RootDirectory:
    """The directory that is written to, held by descriptor."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, OPEN_DIRECTORY)

    def close(self) -> None:
        os.close(self.fd)

    @contextlib.contextmanager
    def parent(self, path: str, make: bool) -> Iterator[tuple[int, str]]:
        """Open the parent directory of a path, creating it if `make`; yield its descriptor and the last name."""
        *above, name = path.split("/")
        here = os.dup(self.fd)
        try:
            for part in above:
                try:
                    below = os.open(part, OPEN_DIRECTORY, dir_fd=here)
                except FileNotFoundError:
                    if not make:
                        raise
                    os.mkdir(part, dir_fd=here)
                    below = os.open(part, OPEN_DIRECTORY, dir_fd=here)
                except OSError as error:
                    if error.errno in (errno.ELOOP, errno.ENOTDIR):
                        raise ChangeRefused(f"{part} in its path is not a directory") from None
                    raise
                os.close(here)
                here = below
            yield here, name
        finally:
            os.close(here)


def _apply(root: _RootDirectory, change: FileDiff) -> None:
    if not is_workspace_path(change.path):
        raise ChangeRefused("the path is outside the directory or in .git")
    after = change.after
    if after is not None and after.kind == "link" and link_escapes(change.path, after.digest):
        raise ChangeRefused(f"the link points outside the directory, to {after.digest}")
    try:
        with root.parent(change.path, make=after is not None) as (here, name):
            now = read_entry(here, name)
            if now == after:
                return  # the same change was already made on disk
            if now != change.before:
                raise ChangeRefused(_conflict_reason(change, now))
            if after is None:
                os.unlink(name, dir_fd=here)
            else:
                _write_replacement(here, name, change, after)
    except FileNotFoundError:
        if after is not None:
            raise
    if after is None:
        _remove_empty_parents(root, change.path)


def _write_replacement(here: int, name: str, change: FileDiff, after: ManifestEntry) -> None:
    """Write the new file next to the old one, then rename it over the old one."""
    part = f".etude-{secrets.token_hex(8)}"
    try:
        if after.kind == "link":
            os.symlink(after.digest, part, dir_fd=here)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o777 if after.executable else 0o666, dir_fd=here), "wb") as file:
                file.write(change.data)
                file.flush()
                if (mode := _preserved_mode(here, name, after)) is not None:
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        if read_entry(here, name) != change.before:  # checked again: it may have changed during the write
            raise ChangeRefused(_conflict_reason(change, read_entry(here, name)))
        os.replace(part, name, src_dir_fd=here, dst_dir_fd=here)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=here)
        raise


def _preserved_mode(here: int, name: str, after: ManifestEntry) -> int | None:
    """Return the permissions of the replaced file with the new file's executable bit; None for a new file."""
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    mode = stat.S_IMODE(info.st_mode) & 0o777
    readers = (mode & 0o444) >> 2  # users that may read it may execute it
    return mode | readers if after.executable else mode & ~0o111


def read_entry(here: int, name: str) -> ManifestEntry | None:
    """Return the manifest entry of a file on disk, or None if it does not exist."""
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(info.st_mode):
        return ManifestEntry("link", os.readlink(name, dir_fd=here))
    if not stat.S_ISREG(info.st_mode):
        return NOT_A_FILE
    digest = hashlib.sha256()
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, dir_fd=here), "rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return ManifestEntry("file", digest.hexdigest(), info.st_size, bool(info.st_mode & 0o100))


def link_escapes(path: str, target: str) -> bool:
    """Return whether a symlink may point outside the directory. ".." is allowed only at the front of the target: after
    a name, which may itself be a link, its meaning is unknown."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return target.startswith("/") or not target or ".." in parts[up:] or up > path.count("/")


def _remove_empty_parents(root: _RootDirectory, path: str) -> None:
    """Remove directories that a deletion left empty."""
    parts = path.split("/")[:-1]
    while parts:
        with contextlib.suppress(OSError, ChangeRefused), root.parent("/".join(parts), make=False) as (here, name):
            os.rmdir(name, dir_fd=here)
        parts.pop()


def _conflict_reason(change: FileDiff, now: ManifestEntry | None) -> str:
    if now is None:
        return "it was deleted on disk meanwhile"
    if now is NOT_A_FILE:
        return "something that is not a file has that name"
    return "a file of that name appeared on disk meanwhile" if change.before is None else "it changed on disk meanwhile"
