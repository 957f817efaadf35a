"""Operations on untrusted file trees: delete them, copy single files, compute digests.

Deletion walks by directory descriptors and never follows a link, so a tree that changes meanwhile cannot lead it
outside; it handles directories of mode 000 and any depth. A tree may be in overlayfs form: a whiteout is a character
device 0:0, an opaque directory has the attribute `user.overlay.opaque`.
"""

import ctypes
import errno
import functools
import hashlib
import itertools
import os
import stat
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from etude.pods.pod import PodError

T = TypeVar("T")

OPAQUE = "user.overlay.opaque"
MAX_ID = 65535  # largest uid or gid in a pod; any other is shown as OVERFLOW_ID
OVERFLOW_ID = 65534
DIGEST_LENGTH = 40  # hex digits of an id: short enough for the 255 bytes of a mount option
MAX_DEPTH = 200  # nested directories; real trees stay under 100, and every level takes a stack frame

_OPENAT2, _RESOLVE_NO_XDEV = 437, 1
_libc = ctypes.CDLL(None, use_errno=True)
_CAPABILITY = "security.capability"
_BLOCK = 1 << 20


@functools.cache
def can_chown() -> bool:
    """Return whether this process may chown files to every id of a pod: root, with 65536 ids and CAP_CHOWN."""
    if os.geteuid() != 0:
        return False
    ids = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return ids > MAX_ID and int(status["CapEff"], 16) & 1 == 1


# -- overlayfs whiteouts and opaque directories


def is_whiteout(info: os.stat_result) -> bool:
    """Return whether this is an overlayfs whiteout, which marks a deleted name."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def is_opaque(directory: str) -> bool:
    """Return whether a directory hides those of the same name in lower layers."""
    try:
        return with_read_access(directory, lambda: os.getxattr(directory, OPAQUE, follow_symlinks=False)) == b"y"
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return False
        raise


def make_whiteout(path: str) -> None:
    """Create a whiteout; allowed to every user, unlike other devices."""
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(0, 0))


def make_opaque(directory: str) -> None:
    """Mark a directory opaque."""
    try:
        os.setxattr(directory, OPAQUE, b"y")
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            raise PodError(
                f"{directory}: the file system has no user.* extended attributes, which layers need; "
                "put the store on ext4, xfs, btrfs, or tmpfs of Linux 6.6 or later"
            ) from None
        raise


# -- deletion


def remove_tree(path: Path) -> None:
    """Remove a file or a tree. It may be missing, or be removed by another process meanwhile.

    Directories below it are moved up into it before they are emptied, so depth costs neither frames nor descriptors.
    """
    with suppress(FileNotFoundError), _opened(path.parent, os.O_PATH | os.O_DIRECTORY) as parent:
        if _unlinked(parent, path.name):
            return
        top = _open_to_empty(parent, path.name)
        try:
            while names := os.listdir(top):
                for child in names:
                    # if it changes meanwhile, the loop around this one tries again
                    with suppress(FileNotFoundError, NotADirectoryError):
                        _empty_directory(top, child)
        finally:
            os.close(top)
        os.rmdir(path.name, dir_fd=parent)


@contextmanager
def _opened(path: str | Path, flags: int, mode: int = 0o600) -> Iterator[int]:
    """Yield a descriptor, closed at the end of the block."""
    handle = os.open(path, flags | os.O_CLOEXEC, mode)
    try:
        yield handle
    finally:
        os.close(handle)


def _empty_directory(top: int, name: str) -> None:
    """Remove `name`; if it is a directory, first move the directories in it up into `top`."""
    if _unlinked(top, name):
        return
    directory = _open_to_empty(top, name)
    try:
        for child in os.listdir(directory):
            if not _unlinked(directory, child):
                os.close(_open_to_empty(directory, child))  # to move a directory is to write to it
                new_name = f".moved-{next(_moved)}-{os.getpid()}"
                os.rename(child, new_name, src_dir_fd=directory, dst_dir_fd=top)
    finally:
        os.close(directory)
    try:
        os.rmdir(name, dir_fd=top)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


_moved = itertools.count()  # shared by all deletions of this process, which may be of the same tree


def _unlinked(parent: int, name: str) -> bool:
    """Unlink `name` and return whether it is gone now; False for a directory."""
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        # for a directory Linux returns EISDIR, POSIX specifies EPERM
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        return False
    return True


def _open_to_empty(parent: int, name: str) -> int:
    """Open a directory so that its entries can be removed, whatever its mode."""
    handle = _open_inside(parent, name)
    try:
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            with suppress(PermissionError):  # another user's: the open below fails, unless this is root
                os.chmod(f"/proc/self/fd/{handle}", 0o700)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)


def _open_inside(parent: int, name: str) -> int:
    """Open a directory with O_PATH, not following links; fail if something is mounted there.

    A leftover mount in a tree, such as the machine's own /usr, must not be emptied with it. Only openat2 detects a bind
    mount of the same file system.
    """
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    how = struct.pack("<3Q", flags, 0, _RESOLVE_NO_XDEV)
    handle = int(_libc.syscall(_OPENAT2, parent, os.fsencode(name), how, len(how)))
    if handle >= 0:
        return handle
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EPERM):  # before Linux 5.6, or denied by a seccomp filter
        return os.open(name, flags, dir_fd=parent)
    if number == errno.EXDEV:
        raise PodError(f"{name}: something is mounted there, so it is not deleted; unmount it and try again")
    raise OSError(number, os.strerror(number), name)


# -- reading files whose mode forbids it


@contextmanager
def readable_directory(directory: str, limit: int | None = None) -> Iterator[list[str]]:
    """Yield the names in a directory, the first `limit`, sorted; inside the block its entries are accessible.

    Layers of an unprivileged user contain files and directories whose mode forbids reading (root's, in the image). The
    user owns them, so the mode is widened while needed. Root does not need this.
    """
    info = os.stat(directory)  # not lstat: the path may be that of a descriptor, in /proc
    mode = stat.S_IMODE(info.st_mode)
    widen = os.geteuid() != 0 and mode & 0o700 != 0o700 and info.st_uid == os.geteuid()
    if widen:
        os.chmod(directory, mode | 0o700)
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in itertools.islice(entries, limit)]
        yield sorted(names, key=os.fsencode)
    finally:
        if widen:
            os.chmod(directory, mode)


def with_read_access(path: str, read: Callable[[], T]) -> T:
    """Call `read` on a file or directory; if its mode forbids that and this user owns it, widen the mode meanwhile."""
    try:
        return read()
    except PermissionError:
        info = os.lstat(path)
        if info.st_uid != os.geteuid() or stat.S_ISLNK(info.st_mode):
            raise
        os.chmod(path, stat.S_IMODE(info.st_mode) | 0o400)
        try:
            return read()
        finally:
            os.chmod(path, stat.S_IMODE(info.st_mode))


def open_to_read(path: str) -> int:
    """Open a file for reading; a link is refused, a pipe does not block."""
    return with_read_access(path, lambda: os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK))


# -- extended attributes


def portable_xattrs(path: str, plain: bool = True) -> dict[str, bytes]:
    """Return the attributes copied with a file: user.* and capabilities; `plain` converts those to version 2."""
    kept: dict[str, bytes] = {}
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return kept
        raise
    for name in filter(is_portable_xattr, names):
        kept[name] = with_read_access(path, partial(os.getxattr, path, name, follow_symlinks=False))
    if plain and _CAPABILITY in kept:
        kept[_CAPABILITY] = _plain_capability(kept[_CAPABILITY])
    return kept


def is_portable_xattr(name: str) -> bool:
    """Return whether an attribute belongs to the file, not to overlayfs or to this machine."""
    if name.startswith("user.overlay."):
        return name.startswith("user.overlay.overlay.")  # overlayfs's escape of one set inside a pod
    return name.startswith("user.") or (name == _CAPABILITY and can_chown())


def _plain_capability(value: bytes) -> bytes:
    """Convert a capability set inside a user namespace (version 3, with the namespace's root uid) to version 2."""
    if len(value) != 24:
        return value
    magic, *rest = struct.unpack("<6I", value)
    return struct.pack("<5I", (magic & 0x00FFFFFF) | 0x02000000, *rest[:4])


def unshift_id(owner: int, shift: int) -> int:
    """Return the uid or gid a pod sees for one on disk in a layer whose ids start at `shift`."""
    return owner - shift if 0 <= owner - shift <= MAX_ID else OVERFLOW_ID


# -- copying one file


def copy_leaf(source: str, target: str, info: os.stat_result, shift: int | None = 0) -> bool:
    """Copy anything but a directory. Return False for a device or a socket, which layers do not contain."""
    if stat.S_ISREG(info.st_mode):
        _copy_contents(source, target)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(source), target)
    elif stat.S_ISFIFO(info.st_mode):
        os.mkfifo(target)
    else:
        return False
    copy_metadata(source, target, info, shift)
    return True


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a file in a layer."""

    mode: int | None  # None for a symbolic link, which has none and no attributes
    owner: tuple[int, int]
    times: tuple[int, int]  # nanoseconds: of access, of modification
    xattrs: Mapping[str, bytes]


def set_metadata(path: str, metadata: Metadata) -> None:
    """Set owner, mode, attributes and times; no link is followed."""
    if can_chown():
        os.lchown(path, *metadata.owner)
    if metadata.mode is not None:
        for name, value in metadata.xattrs.items():
            os.setxattr(path, name, value)
        os.chmod(path, metadata.mode)  # after chown, which clears the set-id bits
    os.utime(path, ns=metadata.times, follow_symlinks=False)


def copy_metadata(source: str, target: str, info: os.stat_result, shift: int | None = 0) -> None:
    """Copy owner, mode, attributes and times. `shift` is subtracted from ids; None keeps them as they are on disk."""
    owner = (info.st_uid, info.st_gid)
    if shift is not None:
        owner = (unshift_id(info.st_uid, shift), unshift_id(info.st_gid, shift))
    link = stat.S_ISLNK(info.st_mode)
    xattrs = {} if link else portable_xattrs(source, plain=shift is not None)
    mode = None if link else stat.S_IMODE(info.st_mode)
    set_metadata(target, Metadata(mode, owner, (info.st_atime_ns, info.st_mtime_ns), xattrs))


def _copy_contents(source: str, target: str) -> None:
    with os.fdopen(open_to_read(source), "rb") as file, _opened(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as writer:
        reader = file.fileno()
        size = os.fstat(reader).st_size
        os.ftruncate(writer, size)
        for start, end in _extents(reader, size):
            _copy_range(reader, writer, start, end)


def _extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a file that contain data: holes are skipped, so a sparse terabyte is copied at once."""
    at = 0
    while at < size:
        try:
            start = os.lseek(file, at, os.SEEK_DATA)
            at = os.lseek(file, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            start, at = at, size  # the file system does not support it
        yield start, at


def _copy_range(reader: int, writer: int, start: int, end: int) -> None:
    while start < end:
        try:
            moved = os.copy_file_range(reader, writer, end - start, start, start)
        except OSError:
            moved = os.pwrite(writer, os.pread(reader, min(_BLOCK, end - start), start), start)
        if moved == 0:
            return  # the file shrank meanwhile
        start += moved


# -- digests


def digest(*parts: str) -> str:
    """Return a digest of the parts, in hex."""
    running = hashlib.sha256()
    for part in parts:
        data = os.fsencode(part)
        running.update(len(data).to_bytes(8, "little") + data)
    return running.hexdigest()[:DIGEST_LENGTH]


def file_digest(path: str) -> bytes:
    """Return the SHA-256 of a file's contents."""
    with os.fdopen(open_to_read(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def check_depth(path: str, depth: int) -> None:
    """Raise PodError for a directory nested too deep to walk."""
    if depth > MAX_DEPTH:
        raise PodError(f"{path[:200]}...: directories are nested deeper than {MAX_DEPTH}; remove them and try again")


# -- paths


def components(path: str) -> Sequence[str]:
    """Return the names in a path, without empty ones and dots."""
    return [part for part in path.split("/") if part not in ("", ".")]
