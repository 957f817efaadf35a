"""Run irreversible actions in a forked child and return their result, for tests of confinement."""

import ctypes
import errno
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
libc = ctypes.CDLL(None, use_errno=True)


class Killed(Exception):
    """The child was killed by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = number


def in_child(action: Callable[[], T], seconds: int = 30) -> T:
    """Return the result of `action` in a forked child; its exception becomes a failure here, its signal `Killed`."""
    receive, send = os.pipe()
    child = os.fork()
    if not child:
        os.close(receive)
        signal.alarm(seconds)
        try:
            report = (True, action())
        except BaseException:
            report = (False, traceback.format_exc())
        os.write(send, pickle.dumps(report))  # well below a pipe's capacity
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        raise Killed(os.WTERMSIG(status))
    fine, result = pickle.loads(data)
    assert fine, f"in the child:\n{result}"
    return result


def outcome(action: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Return `ok`, or the name of the error that a call raises."""
    try:
        action(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "ok"


def syscall(number: int, *arguments: int) -> str:
    """Make a system call; return `ok` or the name of its error."""
    words = [ctypes.c_long(word) for word in (number, *arguments, *[0] * (6 - len(arguments)))]
    libc.syscall.restype = ctypes.c_long
    return "ok" if libc.syscall(*words) >= 0 else errno.errorcode[ctypes.get_errno()]
