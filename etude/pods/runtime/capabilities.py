"""Linux capabilities: the set that a pod's root keeps, and dropping all others permanently.

`mask` returns the kept set as a number, from which the compiled zygote does the same as `drop`. Dropping also cuts the
bounding set, so that no program run later, set-user-ID or with file capabilities, regains a dropped capability.
This file is imported inside pods: standard library only, and no call opens or imports anything.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Collection

NAMES = (  # by number, as in linux/capability.h
    *("chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner"),
    *("sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice"),
    *("sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap"),
    *("mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf"),
    "checkpoint_restore",
)

# The capabilities that package managers, build tools and tests need when run as the pod's root: Docker's set without
#   mknod        devices are created with the pod; a user namespace refuses them anyway
#   net_raw      a raw socket can forge packets on the link to the egress proxy; ping works on a datagram socket
#   setpcap      changes capability sets, which must not change
#   audit_write  the log is the host's; the system-call filter reports "no audit", which su and useradd accept
# Unpacking an archive as root needs dac_override, fowner, chown and fsetid; setuid, setgid and kill let root become
# and stop the pod's other users; packages such as ping set file capabilities on installation, which needs setfcap.
KEEP = frozenset(
    {
        *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid"),
        *("net_bind_service", "sys_chroot", "setfcap"),
    }
)

_PR_CAPBSET_READ, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 23, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_VERSION_3 = 0x20080522  # of capget and capset: two 32-bit words for each set
_HIGHEST = 63  # of a set; the kernel's own highest is lower

_libc = ctypes.CDLL(None, use_errno=True)


def mask(keep: Collection[str] = KEEP) -> int:
    """Return these capabilities as a number, bit n for capability n, as in /proc/self/status."""
    if isinstance(keep, str):
        raise ValueError(f"capabilities: expected a collection of names, not the string {keep!r}")
    if unknown := set(keep) - set(NAMES):
        raise ValueError(f"capabilities: {', '.join(sorted(unknown))} not known; names look like {NAMES[0]!r}")
    return sum(1 << NAMES.index(name) for name in set(keep))


def drop(keep: Collection[str] = KEEP, *, bounding: bool = True) -> None:
    """Drop every capability not in `keep`, for this thread and its future children.

    Cutting the bounding set needs setpcap. A user without it must pass `bounding=False` and rely on no-new-privileges,
    with which no program gains a capability either.
    """
    drop_to(mask(keep), bounding=bounding)


def drop_to(bits: int, *, bounding: bool = True) -> None:
    """Like `drop`, with the capabilities to keep as a number."""
    if bounding:
        _drop_bounding(bits)
    if _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL):
        raise _failure("clear the ambient capabilities")
    # Inheritable stays empty: with bits in it, a program that carries inheritable file capabilities would hand them to
    # an ordinary user of the pod (CVE-2022-24769 in Docker). The pod's root gets its set from the bounding set at exec.
    _set(permitted() & bits)


def permitted() -> int:
    """Return the permitted capabilities of this thread as a number."""
    words = ctypes.create_string_buffer(24)
    if _libc.capget(_header(), words):
        raise _failure("read the capabilities")
    low, high = struct.unpack("=4xI8xI4x", words.raw)
    return int(low | high << 32)


def bounding() -> int:
    """Return the bounding set of this thread as a number."""
    return sum(1 << number for number in range(_HIGHEST + 1) if _prctl(_PR_CAPBSET_READ, number) == 1)


def no_new_privileges() -> None:
    """Set no-new-privileges: no exec gains a privilege. Seccomp filters and Landlock rulesets require it."""
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1):
        raise _failure("set no-new-privileges")


def _drop_bounding(bits: int) -> None:
    surplus = bounding() & ~bits
    for number in range(_HIGHEST + 1):
        if surplus >> number & 1 and _prctl(_PR_CAPBSET_DROP, number):
            if ctypes.get_errno() == errno.EPERM:
                why = "capabilities: the bounding set can be cut only with setpcap, which this process does not have"
                raise PermissionError(errno.EPERM, why)
            raise _failure(f"drop capability {number}")


def _set(bits: int) -> None:
    low, high = bits & 0xFFFFFFFF, bits >> 32
    # effective, permitted, inheritable: low words, then high words
    if _libc.capset(_header(), struct.pack("=6I", low, low, 0, high, high, 0)):
        raise _failure("set the capabilities")


def _header() -> bytes:
    return struct.pack("=Ii", _VERSION_3, 0)  # 0: the calling thread


def _prctl(option: int, argument: int) -> int:
    return int(_libc.prctl(option, *map(ctypes.c_ulong, (argument, 0, 0, 0))))


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"capabilities: cannot {what}: {os.strerror(number)}")
