"""Processes and users as the guest init sees them, from procfs and /etc; no name services. Standard library only."""

import contextlib
import errno
import os
import signal
import stat
from collections.abc import Iterator, Sequence

from etude.pods.runtime import linux

MAX_TABLE_SIZE = 1 << 22  # bytes read from /etc/passwd and /etc/group; programs of the pod may write them


def other_processes() -> Sequence[int]:
    """Return the other processes of the pod; without a PID namespace, the descendants of this one."""
    me = os.getpid()
    if me == 1:
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if pid != 1 and not is_zombie(pid)]
    return [pid for pid in descendants(me) if not is_zombie(pid)]


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"Z", b"X")
    except OSError:
        return True


def descendants(root: int) -> Iterator[int]:
    """Yield every descendant of `root`."""
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children", "rb") as file:
            for child in map(int, file.read().split()):
                yield child
                waiting.append(child)


def kill_everything() -> None:
    """Kill every process of the pod but this one."""
    if os.getpid() == 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        return
    for pid in list(descendants(os.getpid())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def find_user(text: str) -> tuple[int, int, list[int]]:
    """Return uid, gid and supplementary groups of `name`, `uid` or `uid:gid`, from the pod's own /etc."""
    name, _, group = text.partition(":")
    uid, gid = (int(name), int(name)) if name.isdigit() else (-1, -1)
    for row in read_table("/etc/passwd"):
        if len(row) >= 4 and (row[0] == name or row[2] == name):
            name, uid, gid = row[0], int(row[2]), int(row[3])
            break
    groups = [int(row[2]) for row in read_table("/etc/group") if len(row) >= 4 and name in row[3].split(",")]
    if group:
        found = [int(row[2]) for row in read_table("/etc/group") if len(row) >= 3 and group in (row[0], row[2])]
        gid = found[0] if found else int(group) if group.isdigit() else -1
    if uid < 0 or gid < 0:
        raise OSError(errno.EINVAL, f"no user {text!r} in the pod")
    return uid, gid, groups


def read_table(path: str) -> list[list[str]]:
    """Return the rows of a file that the pod may have replaced: do not block on it, do not read without end."""
    try:
        fd = linux.open_plain(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        text = os.pread(file.fileno(), MAX_TABLE_SIZE, 0).decode("utf-8", "replace")
    return [line.split(":") for line in text.splitlines()]
