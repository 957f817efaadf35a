"""Landlock: limits the accessible files, TCP ports and processes, where no namespace can hide the others.

`restrict` builds a ruleset for the newest ABI that both this file and the kernel support, and applies it irreversibly
to the calling thread and its children. It raises if it cannot enforce a requested restriction. `gaps` lists accesses
that this kernel's Landlock cannot restrict at all.

Processes restricted by two calls cannot signal or trace each other: restrict once, in the parent of those that belong
together. This file is imported inside pods: standard library only, and a call opens nothing but the paths it is given.
"""

import ctypes
import errno
import os
import stat
import struct
import sys
from collections.abc import Sequence

from etude.pods.runtime.capabilities import no_new_privileges

Path = str | os.PathLike[str]

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

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every machine
_VERSION = 1  # flag of _CREATE_RULESET: only return the ABI
_PATH_BENEATH, _NET_PORT = 1, 2  # kinds of rule
_LINUX = {1: "5.13", 3: "6.2", 4: "6.7", 6: "6.12"}  # the kernel version that introduced an ABI

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """Return the Landlock ABI available to this process; 0 when there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, _syscall(_CREATE_RULESET, None, 0, _VERSION))


def gaps(version: int | None = None) -> tuple[str, ...]:
    """Return descriptions of what `restrict` cannot prevent on this kernel, or on one with the given ABI."""
    version = abi() if version is None else version
    if not version:
        return ("there is no Landlock",)
    since = {
        3: "any file can be truncated",
        4: "TCP ports cannot be restricted",
        5: "a device that may be opened takes any ioctl",
        6: "processes and abstract sockets outside can be reached",
        9: "sockets named by a path can be connected to wherever file permissions let the user",
    }
    always = (
        "the mode, owner, times and attributes of files outside can be read, and changed where the user may",
        "UDP, MPTCP and TCP Fast Open pass by the port rules; the system-call filter has to refuse them",
    )
    return (*(text for needed, text in since.items() if version < needed), *always)


def restrict(
    read: Sequence[Path] = (),
    write: Sequence[Path] = (),
    execute: Sequence[Path] = (),
    connect_ports: Sequence[int] | None = None,
    scope: bool = True,
    *,
    bind_ports: Sequence[int] = (),
) -> None:
    """Confine the calling thread to these paths (recursively) and TCP ports, and its signals to its own domain.

    `write` and `execute` include reading; a path in both may be written and run. With `connect_ports` TCP connects to
    these ports only and listens on `bind_ports` only; None does not restrict TCP. `scope` denies access to processes
    and abstract UNIX sockets outside. Sets no-new-privileges. Root has to drop its capabilities as well: with perfmon
    the kernel lets it read the memory of other processes without consulting Landlock.
    """
    version = abi()
    _require(version, 1, "confining files")
    # Before ABI 3 any file of the user could be truncated, even one not given for writing.
    _require(version, 3, "keeping other files from being truncated")
    if connect_ports is not None:
        _require(version, 4, "restricting TCP ports")
    elif bind_ports:
        raise ValueError("landlock: bind_ports needs connect_ports")
    if scope:
        _require(version, 6, "keeping signals and abstract sockets inside")
    handled = file_rights(version)
    net = 0 if connect_ports is None else BIND_TCP | CONNECT_TCP
    ruleset = _create(handled, net, SCOPE_ABSTRACT_SOCKET | SCOPE_SIGNAL if scope else 0)
    try:
        for paths, rights in ((read, READ), (write, WRITE), (execute, READ | EXECUTE)):
            if isinstance(paths, str):
                raise ValueError(f"landlock: expected a sequence of paths, not the string {paths!r}")
            for path in paths:
                _allow_path(ruleset, path, rights & handled)
        for ports, rights in ((connect_ports or (), CONNECT_TCP), (bind_ports, BIND_TCP)):
            for port in ports:
                _allow_port(ruleset, port, rights)
        no_new_privileges()
        if _syscall(_RESTRICT_SELF, ruleset, 0):
            raise _failure("apply the ruleset")
    finally:
        os.close(ruleset)


def file_rights(version: int) -> int:
    """Return all file rights known here that an ABI can restrict."""
    return sum(rights for since, rights in _FILE_RIGHTS_SINCE.items() if since <= version)


def _require(version: int, needed: int, what: str) -> None:
    if version < needed:
        have = f"this kernel has {version}" if version else "this kernel has no Landlock, or does not let us use it"
        why = f"landlock: {what} needs ABI {needed} (Linux {_LINUX[needed]}); {have}"
        raise OSError(errno.EOPNOTSUPP, why)


def _create(files: int, net: int, scoped: int) -> int:
    # Older kernels accept the longer structure as long as the fields unknown to them are zero.
    attributes = struct.pack("=QQQ", files, net, scoped)
    ruleset = _syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        raise _failure("create a ruleset")
    return ruleset


def _allow_path(ruleset: int, path: Path, rights: int) -> None:
    try:
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        raise OSError(error.errno, f"landlock: cannot open {os.fspath(path)}: {error.strerror}") from None
    try:
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _OF_A_FILE
        if _syscall(_ADD_RULE, ruleset, _PATH_BENEATH, struct.pack("=Qi", rights, parent), 0):
            raise _failure(f"add a rule for {os.fspath(path)}")
    finally:
        os.close(parent)


def _allow_port(ruleset: int, port: int, rights: int) -> None:
    if not 0 <= port <= 65535:
        raise ValueError(f"landlock: {port} is not a TCP port")
    if _syscall(_ADD_RULE, ruleset, _NET_PORT, struct.pack("=QQ", rights, port), 0):
        raise _failure(f"add a rule for TCP port {port}")


def _syscall(number: int, *arguments: int | bytes | None) -> int:
    words = (ctypes.c_long(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments)
    return int(_libc.syscall(ctypes.c_long(number), *words))


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    hint = "; this process already has too many rulesets" if number == errno.E2BIG else ""
    return OSError(number, f"landlock: cannot {what}: {os.strerror(number)}{hint}")
