"""Runs inside a pod: takes all it can of what the kernel counts by user, prints how much, and holds it until killed.

`take` is also used outside: it returns how many of a resource this process could get, at most `most`.
"""

import ctypes
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
HELD: list[object] = []


def watch_files() -> None:
    if libc.inotify_init() < 0:
        raise OSError(ctypes.get_errno(), "inotify_init")


def send_descriptors() -> None:
    """Put 200 descriptors in flight: sent, and never received."""
    HELD.append(pair := socket.socketpair())
    socket.send_fds(pair[0], [b"x"], [0] * 200)


def queue_signal() -> None:
    if libc.sigqueue(os.getpid(), signal.SIGRTMIN, 0):
        raise OSError(ctypes.get_errno(), "sigqueue")


def open_terminal() -> None:
    HELD.append(os.openpty())


KINDS: dict[str, Callable[[], None]] = {
    "inotify": watch_files,
    "descriptors": send_descriptors,
    "signals": queue_signal,
    "terminals": open_terminal,
}


def take(kind: str, most: int) -> int:
    """Take a resource `most` times or until it is refused; return how often."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    for count in range(most):
        try:
            KINDS[kind]()
        except OSError:
            return count
    return most


def main() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print(take(sys.argv[1], int(sys.argv[2])), flush=True)
    if sys.argv[3:] == ["hold"]:
        time.sleep(600)


if __name__ == "__main__":
    main()
