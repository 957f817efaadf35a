"""A second system-call filter, for pods that share the machine's network, user or IPC objects with everybody else.

`seccomp.py` is written for pods with namespaces of their own. Without them doors stay open that Landlock does not know
either: objects of System V IPC and POSIX queues, limits and priorities of other processes of the same user, sockets
named by a path (before ABI 9), and TCP to any address, because Landlock's rules name a port and no address. `build`
closes all but the last. That one is turned around: with egress allowed, every `connect` is stopped and handed to a
carrier process outside the pod, which puts a connection to the pod's gate in its place. The pod itself can connect to
nothing and listen on nothing; no address that a program names is ever used or even read, so there is nothing to swap
after a check. Imported inside pods: standard library only.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import signal
import socket
import struct

from etude.pods.runtime import linux
from etude.pods.runtime.capabilities import no_new_privileges

# name -> number on x86_64 and aarch64
IPC = {"shmget": (29, 194), "shmat": (30, 196), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180)}
_PRLIMIT, _SETPRIORITY, _IOPRIO_SET = (302, 261), (141, 140), (251, 30)
_SOCKET, _SOCKETPAIR, _CONNECT, _LISTEN = (41, 198), (53, 199), (42, 203), (50, 201)
_SECCOMP = (317, 277)
_ARCHES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_AF_UNIX, _STREAM, _SEQPACKET, _KIND = 1, 1, 5, 0xF  # the kind of a socket is in the low four bits of its type

_ALLOW, _ERRNO, _NOTIFY = 0x7FFF0000, 0x00050000, 0x7FC00000
_LOAD, _JEQ, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_RECEIVE, _ANSWER, _VALID, _ADD = 0xC0502100, 0xC0182101, 0x40082102, 0x40182103  # ioctls of a listener
_AT_NUMBER = 1  # flag of _ADD: at the number we say, in place of what is there

_libc = ctypes.CDLL(None, use_errno=True)
Line = tuple[int, int, int, int]


def build(unix: bool, carry: bool, alone: bool, machine: str | None = None) -> bytes:
    """The filter.

    `unix`: sockets of the UNIX family may be opened; `carry`: every connect goes to the carrier; `alone`: nobody else
    has the pod's user.
    """
    arch, column = _ARCHES[machine or platform.machine()]
    refuse = _ERRNO | errno.EACCES
    program: list[Line] = [(_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, arch), _return(_ALLOW), (_LOAD, 0, 0, _NUMBER)]
    for numbers in IPC.values():
        # They outlive their makers and belong to a user id, not to a pod: nobody could clean up after it.
        program += _on(numbers[column], [_return(_ERRNO | errno.EPERM)])
    if not alone:
        # A limit of no time is a signal by another name. Its own a process may change, named as 0.
        program += _on(_PRLIMIT[column], _unless(0, 0))
        for numbers in (_SETPRIORITY, _IOPRIO_SET):
            program += _on(numbers[column], _unless(1, 0))
    if not unix:
        argument: Line = (_LOAD, 0, 0, _ARGUMENTS)
        check = [argument, (_JEQ, 0, 1, _AF_UNIX), _return(refuse), _return(_ALLOW)]
        program += _on(_SOCKET[column], check)
        # A pair is connected and stays so, but for datagrams: those can be sent to any path.
        kinds: list[Line] = [(_LOAD, 0, 0, _ARGUMENTS + 8), (_AND, 0, 0, _KIND)]
        kinds += [(_JEQ, 2, 0, _STREAM), (_JEQ, 1, 0, _SEQPACKET), _return(refuse), _return(_ALLOW)]
        program += _on(_SOCKETPAIR[column], kinds)
    if carry:
        program += _on(_CONNECT[column], [_return(_NOTIFY)])
        # listen() without bind() takes a port of the machine's by itself, and Landlock is not asked.
        program += _on(_LISTEN[column], [_return(refuse)])
    program.append(_return(_ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def _on(number: int, then: list[Line]) -> list[Line]:
    """Do `then`, which must end by returning, when the call in the accumulator is `number`."""
    return [(_JEQ, 0, len(then), number), *then]


def _unless(argument: int, value: int) -> list[Line]:
    """Refuse, unless an argument has this value."""
    load: Line = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    return [load, (_JEQ, 1, 0, value), _return(_ERRNO | errno.EPERM), _return(_ALLOW)]


def _return(value: int) -> Line:
    return (_RETURN, 0, 0, value)


def install(program: bytes, carry: bool) -> int:
    """Put the filter on this process, which has one thread. With `carry`, the descriptor where connects arrive."""
    code = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    no_new_privileges()
    number = _SECCOMP[_ARCHES[platform.machine()][1]]
    words = (number, _SET_MODE_FILTER, _NEW_LISTENER if carry else 0)
    result = _libc.syscall(*map(ctypes.c_long, words), ctypes.c_char_p(description))
    if result < 0:
        failed = ctypes.get_errno()
        hint = "; a filter with a listener is on this process already" if failed == errno.EBUSY else ""
        raise OSError(failed, f"seccomp: the kernel did not take the filter: {os.strerror(failed)}{hint}")
    return int(result) if carry else -1


# ------------------------------------------------------------------------------------------------- the carrier


def carry(line: socket.socket, port: int) -> None:
    """Serve the connects of one pod until its last process is gone. Runs outside the pod, as the pod's own user.

    That user because the kernel shows a process's descriptors only to its like; outside so that the pod's programs
    can neither signal it (Landlock's scope, or another user) nor trace it.
    """
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    _, (listener,), _, _ = socket.recv_fds(line, 1, 1)
    line.close()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for _, event in poll.poll():
            if not event & select.POLLIN:
                return  # nobody is left who could ask
            # The caller may be killed at any point: its request is void then, and the next one counts.
            with contextlib.suppress(FileNotFoundError, InterruptedError):
                _serve(listener, port)


def _serve(listener: int, port: int) -> None:
    asked = bytearray(80)
    fcntl.ioctl(listener, _RECEIVE, asked)
    call, pid = struct.unpack_from("=QI", asked)
    (number,) = struct.unpack_from("=i", asked, 32)  # the first argument: its socket; an int, whatever the upper half
    failed = 0
    try:
        blocking = _blocking(listener, call, pid, number)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as fresh:
            fresh.settimeout(5)
            fresh.connect(("127.0.0.1", port))
            fresh.setblocking(blocking)
            wanted = struct.pack("=QIIII", call, _AT_NUMBER, fresh.fileno(), number, os.O_CLOEXEC)
            fcntl.ioctl(listener, _ADD, wanted)
    except TimeoutError:
        failed = errno.ETIMEDOUT
    except FileNotFoundError:
        raise
    except OSError as error:
        failed = error.errno or errno.ECONNREFUSED
    fcntl.ioctl(listener, _ANSWER, struct.pack("=QqiI", call, 0, -failed, 0))


def _blocking(listener: int, call: int, pid: int, number: int) -> bool:
    """Whether the caller's socket waits; it must be a socket, for it is going to be replaced."""
    try:
        kind = os.readlink(f"/proc/{pid}/fd/{number}")
        with open(f"/proc/{pid}/fdinfo/{number}") as file:
            flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    except (FileNotFoundError, StopIteration):
        raise OSError(errno.EBADF, "no such descriptor") from None
    fcntl.ioctl(listener, _VALID, struct.pack("=Q", call))  # else the number may be somebody else's by now
    if not kind.startswith("socket:"):
        raise OSError(errno.ENOTSOCK, "not a socket")
    return not flags & os.O_NONBLOCK


def be_carrier(line: socket.socket, port: int, user: int, parent: int) -> None:
    """The life of a carrier, from its fork on; never returns."""
    try:
        os.setsid()
        if user >= 0:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            carry(line, port)
    finally:
        os._exit(0)
