"""Landlock: rules that limit the accessible files, TCP and processes, where no namespace can hide the others.

`build_ruleset` builds a ruleset for the newest ABI that both this file and the kernel support; the zygote applies it to
a pod's first process. It raises if it cannot enforce a requested restriction. The mode, owner, times and attributes of
files outside can still be read, and changed where the user may; UDP, MPTCP and TCP Fast Open pass by the rules for
TCP, so the system-call filter refuses them.
"""

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Iterable
from typing import NamedTuple

# Rights over files, one bit each; those of the first ABI, then the later ones with the ABI that introduced them.
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, REMOVE_DIR, REMOVE_FILE = (1 << bit for bit in range(6))
MAKE_CHAR, MAKE_DIR, MAKE_REG, MAKE_SOCK, MAKE_FIFO, MAKE_BLOCK, MAKE_SYM = (1 << bit for bit in range(6, 13))
REFER = 1 << 13  # 2: link and rename between directories, always refused before
TRUNCATE = 1 << 14  # 3
IOCTL_DEV = 1 << 15  # 5
RESOLVE_UNIX = 1 << 16  # 9: connect to a socket by its path
_FILE_RIGHTS_SINCE = {1: (1 << 13) - 1, 2: REFER, 3: TRUNCATE, 5: IOCTL_DEV, 9: RESOLVE_UNIX}
BIND_TCP, CONNECT_TCP = 1, 2  # 4
SCOPE_ABSTRACT_SOCKET, SCOPE_SIGNAL = 1, 2  # 6

READ = READ_FILE | READ_DIR
# Without MAKE_CHAR and MAKE_BLOCK: a pod creates no devices, not even 0:0, which is a whiteout to overlayfs.
WRITE = READ | WRITE_FILE | TRUNCATE | REFER | IOCTL_DEV | RESOLVE_UNIX | REMOVE_DIR | REMOVE_FILE
WRITE |= MAKE_DIR | MAKE_REG | MAKE_SOCK | MAKE_FIFO | MAKE_SYM
# The kernel refuses a rule that gives a plain file rights only a directory can have.
_OF_A_FILE = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV | RESOLVE_UNIX

_CREATE_RULESET = 444  # the number of the call, the same on every machine
_VERSION = 1  # its flag: only return the ABI
_LINUX = {1: "5.13", 3: "6.2", 4: "6.7", 6: "6.12"}  # the kernel version that introduced an ABI

_libc = ctypes.CDLL(None, use_errno=True)


class Ruleset(NamedTuple):
    """A ruleset as the kernel's structures: its attributes, and for each rule the rights and the path."""

    attributes: bytes
    rules: list[bytes]


def abi() -> int:
    """Return the Landlock ABI available to this process; 0 when there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc.syscall(*map(ctypes.c_long, (_CREATE_RULESET, 0, 0, _VERSION)))))


def build_ruleset(
    read: Iterable[str] = (),
    write: Iterable[str] = (),
    execute: Iterable[str] = (),
    *,
    tcp: bool = True,
    scope: bool = True,
) -> Ruleset:
    """Return a ruleset that confines a process to these paths (recursively); those that do not exist are left out.

    `write` and `execute` include reading; a path in both may be written and run. Unless `tcp`, it neither connects nor
    listens by TCP. `scope` denies access to processes and abstract UNIX sockets outside. Root has to drop its
    capabilities as well: with perfmon the kernel lets it read the memory of other processes without asking Landlock.
    """
    version = abi()
    _require(version, 1, "confining files")
    # Before ABI 3 any file of the user could be truncated, even one not given for writing.
    _require(version, 3, "keeping other files from being truncated")
    if not tcp:
        _require(version, 4, "restricting TCP ports")
    if scope:
        _require(version, 6, "keeping signals and abstract sockets inside")
    handled = file_rights(version)
    # Older kernels accept the longer structure as long as the fields unknown to them are zero.
    attributes = struct.pack(
        "=QQQ", handled, 0 if tcp else BIND_TCP | CONNECT_TCP, SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL if scope else 0
    )
    rules = [
        struct.pack("=Q", rights & handled & (-1 if os.path.isdir(path) else _OF_A_FILE)) + os.fsencode(path)
        for paths, rights in ((read, READ), (write, WRITE), (execute, READ | EXECUTE))
        for path in paths
        if os.path.exists(path)
    ]
    return Ruleset(attributes, rules)


def file_rights(version: int) -> int:
    """Return all file rights known here that an ABI can restrict."""
    return sum(rights for since, rights in _FILE_RIGHTS_SINCE.items() if since <= version)


def _require(version: int, needed: int, what: str) -> None:
    if version < needed:
        have = f"this kernel has {version}" if version else "this kernel has no Landlock, or does not let us use it"
        why = f"landlock: {what} needs ABI {needed} (Linux {_LINUX[needed]}); {have}"
        raise OSError(errno.EOPNOTSUPP, why)
