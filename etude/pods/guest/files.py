"""The guest init's file requests. Paths are the pod's; nothing blocks, and no path exposes the guest init itself.

Imported inside pods: standard library only.
"""

import contextlib
import errno
import os
import stat
from typing import Any

from etude.pods.guest import protocol
from etude.pods.runtime import linux

OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileHandlers:
    """Handlers of the file requests; a base class of GuestInit."""

    workdir: str
    proc_device: int  # of procfs
    self_prefix: str  # of this process in it

    def send(self, peer: Any, op: int, call: int, *fields: tuple[int, protocol.Value]) -> None:
        raise NotImplementedError

    def ok(self, peer: Any, call: int, *fields: tuple[int, protocol.Value]) -> None:
        raise NotImplementedError

    def request_path(self, fields: protocol.Fields) -> str:
        path = os.fsdecode(protocol.data(fields, protocol.PATH))
        if not path or "\0" in path:
            raise OSError(errno.ENOENT, "an empty path")
        return os.path.join(self.workdir, path)

    def open_regular(self, path: str, flags: int, mode: int = 0) -> int:
        """Open a regular file; refuse procfs files that expose this process."""
        fd = linux.open_plain(path, flags | os.O_NONBLOCK, mode)  # do not block on the other end of a fifo
        try:
            info = os.fstat(fd)
            if stat.S_ISDIR(info.st_mode):
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if not stat.S_ISREG(info.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", path)
            if info.st_dev == self.proc_device:
                real = os.readlink(f"/proc/self/fd/{fd}")
                if flags & (os.O_WRONLY | os.O_RDWR) or real.startswith(self.self_prefix):
                    raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        except OSError:
            os.close(fd)
            raise
        return fd

    def read(self, peer: Any, call: int, fields: protocol.Fields) -> None:
        path = self.request_path(fields)
        left = min(protocol.number(fields, protocol.LIMIT, protocol.CHUNK), 4 * protocol.CHUNK)
        at = protocol.number(fields, protocol.OFFSET)
        fd = self.open_regular(path, os.O_RDONLY)
        try:
            while left > 0 and (received := os.pread(fd, min(left, protocol.CHUNK), at)):
                self.send(peer, protocol.OUT, call, (protocol.DATA, received))
                at, left = at + len(received), left - len(received)
            self.ok(peer, call, (protocol.SIZE, os.fstat(fd).st_size))
        finally:
            os.close(fd)

    def write(self, peer: Any, call: int, fields: protocol.Fields) -> None:
        path, how = self.request_path(fields), protocol.number(fields, protocol.FLAGS)
        mode = protocol.number(fields, protocol.MODE, -1)
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if how & protocol.APPEND else 0)
        try:
            fd = self.open_regular(path, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = self.open_regular(path, flags, 0o644)
        try:
            if how & protocol.TRUNCATE:
                os.ftruncate(fd, 0)
            left, at = memoryview(protocol.data(fields, protocol.DATA)), protocol.number(fields, protocol.OFFSET)
            while left:
                size = os.write(fd, left) if how & protocol.APPEND else os.pwrite(fd, left, at)
                left, at = left[size:], at + size
            if mode >= 0:
                os.fchmod(fd, mode & 0o7777)
        finally:
            os.close(fd)
        self.ok(peer, call)

    def list_directory(self, peer: Any, call: int, fields: protocol.Fields) -> None:
        path = self.request_path(fields)
        for name in sorted(os.listdir(path)):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                self.describe(peer, call, os.path.join(path, name), name)
        self.ok(peer, call)

    def stat_path(self, peer: Any, call: int, fields: protocol.Fields) -> None:
        path = self.request_path(fields)
        self.describe(peer, call, path, os.path.basename(path.rstrip("/")) or "/")
        self.ok(peer, call)

    def describe(self, peer: Any, call: int, path: str, name: str) -> None:
        info = os.lstat(path)
        kinds = {stat.S_IFREG: b"f", stat.S_IFDIR: b"d", stat.S_IFLNK: b"l"}
        kind = kinds.get(stat.S_IFMT(info.st_mode), b"o")
        self.send(
            peer,
            protocol.ENTRY,
            call,
            (protocol.PATH, os.fsencode(name)),
            (protocol.KIND, kind),
            (protocol.SIZE, info.st_size),
            (protocol.MODE, stat.S_IMODE(info.st_mode)),
            (protocol.MTIME, info.st_mtime_ns),
            (protocol.TARGET, os.fsencode(os.readlink(path)) if kind == b"l" else b""),
        )

    def remove(self, peer: Any, call: int, fields: protocol.Fields) -> None:
        remove_tree(self.request_path(fields))
        self.ok(peer, call)

    def make_directory(self, peer: Any, call: int, fields: protocol.Fields) -> None:
        path, mode = self.request_path(fields), protocol.number(fields, protocol.MODE, -1)
        os.makedirs(path, exist_ok=True)
        if mode >= 0:
            os.chmod(path, mode & 0o7777)
        self.ok(peer, call)

    def make_link(self, peer: Any, call: int, fields: protocol.Fields) -> None:
        path = self.request_path(fields)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(protocol.data(fields, protocol.DATA), os.fsencode(path))
        self.ok(peer, call)


def remove_tree(path: str) -> None:
    """Remove a path recursively: at any depth, following no link, and ending even if programs create more files."""
    path = path.rstrip("/") or "/"
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    here = open_for_removal(path, None)
    above: list[tuple[int, int, str, list[str]]] = []  # parents: device, inode, the name entered, names still to remove
    try:
        names = unlink_files(here)
        while names or above:
            if names:
                name = names.pop()
                below = open_for_removal(name, here)
                above.append((*identity(here), name, names))
                here, names = move_to(below, here), unlink_files(below)
                continue
            device, file, name, names = above.pop()
            here = move_to(os.open("..", OPEN_DIRECTORY, dir_fd=here), here)
            if identity(here) != (device, file):
                raise OSError(errno.EBUSY, "it is being moved", path)
            os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    os.rmdir(path)


def move_to(to: int, here: int) -> int:
    os.close(here)
    return to


def identity(fd: int) -> tuple[int, int]:
    info = os.fstat(fd)
    return info.st_dev, info.st_ino


def unlink_files(directory: int) -> list[str]:
    """Unlink the files of a directory and return the names of its subdirectories."""
    found = []
    for name in os.listdir(directory):
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM):
                raise
            if not stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
                raise
            found.append(name)
    return found


def open_for_removal(name: str, at: int | None) -> int:
    """Open a directory with the rights to remove its entries, whatever its mode."""
    try:
        fd = os.open(name, OPEN_DIRECTORY, dir_fd=at)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=at)  # a link put here meanwhile can only lead into the pod
        return os.open(name, OPEN_DIRECTORY, dir_fd=at)
    with contextlib.suppress(PermissionError):
        os.fchmod(fd, 0o700)
    return fd
