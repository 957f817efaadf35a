"""System calls that Python does not wrap, by ctypes: namespaces, the new mount API, openat2, prctl.

Each function makes one system call and raises OSError that names the operation. Imported inside pods: standard
library only, nothing imported later.
"""

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

# The numbers of clone and pivot_root differ by machine; calls added since 5.1 have one number everywhere.
_NUMBERS = {"x86_64": (56, 155), "aarch64": (220, 41)}
SUPPORTED = platform.system() == "Linux" and platform.machine() in _NUMBERS
_CLONE, _PIVOT_ROOT = _NUMBERS.get(platform.machine(), (-1, -1))
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_CLONE3, _CLOSE_RANGE, _OPENAT2, _MOUNT_SETATTR = 435, 436, 437, 442
_CLONE_INTO_CGROUP = 1 << 33

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x20000,
    0x2000000,
    0x4000000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_PRIVATE, MS_SLAVE = 2, 4, 8, 0x4000, 1 << 18, 1 << 19
MNT_DETACH = 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE = -100, 0x1000, 0x8000
OPEN_TREE_CLONE = 1
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_SYMLINKS = 4, 0x10
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CMD_CREATE = 0, 1, 6
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC = 1, 2, 4, 8
MOUNT_ATTR_IDMAP = 0x100000
RESOLVE_NO_MAGICLINKS = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _syscall(number: int, what: str, *arguments: int | bytes | None) -> int:
    ready = (ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments)
    return _check(_libc.syscall(ctypes.c_long(number), *ready), what)


def clone(flags: int) -> int:
    """Fork into new namespaces; return 0 in the child. Only for a single-threaded process that never execs there."""
    return _syscall(_CLONE, "clone into new namespaces", flags | 17, 0, 0, 0, 0)  # 17: SIGCHLD


def clone_into(flags: int, group: str) -> int:
    """`clone` directly into a v2 control group: moving a running process costs an RCU grace period."""
    directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        arguments = struct.pack("11Q", flags | _CLONE_INTO_CGROUP, 0, 0, 0, 17, 0, 0, 0, 0, 0, directory)
        return _syscall(_CLONE3, "clone into a control group", arguments, len(arguments))
    finally:
        os.close(directory)


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    """Call mount(2), the classic API."""
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode() or None)
    _check(_libc.mount(*arguments), f"mount {kind or 'propagation'} on {target}")


def umount(target: str) -> None:
    """Detach a mount lazily: it disappears with its last user."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and move the old root to `old`."""
    _syscall(_PIVOT_ROOT, "pivot_root", new.encode(), old.encode())


def new_mount(kind: str, options: list[tuple[str, str | None]], attributes: int = 0) -> int:
    """Return the descriptor of a new detached mount; an option without a value is a flag."""
    context = _syscall(_FSOPEN, f"open file system {kind}", kind.encode(), 1)
    try:
        for name, value in options:
            if value is None:
                _syscall(_FSCONFIG, f"{kind}: {name}", context, _FSCONFIG_SET_FLAG, name.encode(), None, 0)
            else:
                what = f"{kind}: {name}={value}"
                _syscall(_FSCONFIG, what, context, _FSCONFIG_SET_STRING, name.encode(), value.encode(), 0)
        _syscall(_FSCONFIG, f"create {kind}", context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _syscall(_FSMOUNT, f"mount {kind}", context, 1, attributes)
    finally:
        os.close(context)


def attach(tree: int, target: str) -> None:
    """Attach a detached mount at `target`."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | (_MOVE_MOUNT_T_SYMLINKS if target.startswith("/proc/self/fd/") else 0)
    _syscall(_MOVE_MOUNT, f"attach a mount at {target}", tree, b"", AT_FDCWD, target.encode(), flags)


def clone_tree(path: str | int, recursive: bool = False) -> int:
    """Return the descriptor of a detached copy of the mount at `path`, or of an open directory."""
    flags = OPEN_TREE_CLONE | os.O_CLOEXEC | (AT_RECURSIVE if recursive else 0)
    if isinstance(path, int):
        return _syscall(_OPEN_TREE, "clone a mount", path, b"", flags | AT_EMPTY_PATH)
    return _syscall(_OPEN_TREE, f"clone the mount of {path}", AT_FDCWD, path.encode(), flags)


def set_attributes(tree: int, attributes: int, recursive: bool = False, user_namespace: int = 0) -> None:
    """Set attributes of a detached mount, such as read-only or id-mapped."""
    packed = struct.pack("QQQQ", attributes, 0, 0, user_namespace)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _syscall(_MOUNT_SETATTR, "set the attributes of a mount", tree, b"", flags, packed, len(packed))


def prctl(option: int, value: int) -> None:
    """Call prctl(2) with one argument."""
    zero = ctypes.c_ulong(0)
    _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), zero, zero, zero), f"prctl {option}")


def close_range(first: int, last: int = 0xFFFFFFFF) -> None:
    """Close every descriptor from `first` to `last`."""
    _syscall(_CLOSE_RANGE, "close descriptors", first, last, 0)


def open_plain(path: str, flags: int, mode: int = 0) -> int:
    """Open without following procfs magic links, which lead to files outside the path's own tree."""
    allowed = mode if flags & os.O_CREAT else 0
    how = struct.pack("QQQ", flags | os.O_CLOEXEC | os.O_NOCTTY, allowed, RESOLVE_NO_MAGICLINKS)
    result = _libc.syscall(
        ctypes.c_long(_OPENAT2),
        ctypes.c_long(AT_FDCWD),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.c_char_p(how),
        ctypes.c_long(len(how)),
    )
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return int(result)
