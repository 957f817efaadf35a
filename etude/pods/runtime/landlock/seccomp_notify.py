"""A second system-call filter, for pods that share the machine's network, user or IPC objects with other processes.

`seccomp.py` is written for pods with their own namespaces. Without these, gaps remain that Landlock does not cover
either: System V IPC objects and POSIX queues, limits and priorities of other processes of the same user, sockets named
by a path (before ABI 9), and TCP to any address, because Landlock's rules name a port and no address. `build_filter`
closes all but the last. For that one, with egress allowed, every `connect` is stopped (seccomp user notification) and
handed to a broker process outside the pod, which replaces the socket by a connection to the pod's egress proxy. The pod
itself can neither connect nor listen; the address a program names is never used or even read, so it cannot be swapped
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
_AT_NUMBER = 1  # flag of _ADD: replace the descriptor with the given number

_libc = ctypes.CDLL(None, use_errno=True)
Instruction = tuple[int, int, int, int]


def build_filter(unix: bool, egress: bool, own_user: bool, machine: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    `unix`: UNIX sockets are allowed; `egress`: every connect goes to the broker; `own_user`: no other process has the
    pod's user.
    """
    arch, column = _ARCHES[machine or platform.machine()]
    refuse = _ERRNO | errno.EACCES
    program: list[Instruction] = [(_LOAD, 0, 0, _ARCH), (_JEQ, 1, 0, arch), _return(_ALLOW), (_LOAD, 0, 0, _NUMBER)]
    for numbers in IPC.values():
        # They outlive their creator and belong to a user id, not to a pod, so they could not be cleaned up.
        program += _if_call(numbers[column], [_return(_ERRNO | errno.EPERM)])
    if not own_user:
        # A CPU limit of 0 kills like a signal. A process may change its own limits, as pid 0.
        program += _if_call(_PRLIMIT[column], _refuse_unless(0, 0))
        for numbers in (_SETPRIORITY, _IOPRIO_SET):
            program += _if_call(numbers[column], _refuse_unless(1, 0))
    if not unix:
        argument: Instruction = (_LOAD, 0, 0, _ARGUMENTS)
        check = [argument, (_JEQ, 0, 1, _AF_UNIX), _return(refuse), _return(_ALLOW)]
        program += _if_call(_SOCKET[column], check)
        # A socket pair stays connected, except for datagrams, which can be sent to any path.
        kinds: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENTS + 8), (_AND, 0, 0, _KIND)]
        kinds += [(_JEQ, 2, 0, _STREAM), (_JEQ, 1, 0, _SEQPACKET), _return(refuse), _return(_ALLOW)]
        program += _if_call(_SOCKETPAIR[column], kinds)
    if egress:
        program += _if_call(_CONNECT[column], [_return(_NOTIFY)])
        # listen() without bind() takes a port of the machine without a Landlock check.
        program += _if_call(_LISTEN[column], [_return(refuse)])
    program.append(_return(_ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in program)


def _if_call(number: int, then: list[Instruction]) -> list[Instruction]:
    """Run `then`, which must end by returning, when the call in the accumulator is `number`."""
    return [(_JEQ, 0, len(then), number), *then]


def _refuse_unless(argument: int, value: int) -> list[Instruction]:
    """Refuse the call unless an argument has this value."""
    load: Instruction = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)
    return [load, (_JEQ, 1, 0, value), _return(_ERRNO | errno.EPERM), _return(_ALLOW)]


def _return(value: int) -> Instruction:
    return (_RETURN, 0, 0, value)


def install(program: bytes, egress: bool) -> int:
    """Apply the filter to this single-threaded process; with `egress` return the notification descriptor, else -1."""
    code = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code))
    no_new_privileges()
    number = _SECCOMP[_ARCHES[platform.machine()][1]]
    words = (number, _SET_MODE_FILTER, _NEW_LISTENER if egress else 0)
    result = _libc.syscall(*map(ctypes.c_long, words), ctypes.c_char_p(description))
    if result < 0:
        failed = ctypes.get_errno()
        hint = "; this process already has a filter with a listener" if failed == errno.EBUSY else ""
        raise OSError(failed, f"seccomp: the kernel rejected the filter: {os.strerror(failed)}{hint}")
    return int(result) if egress else -1


# ------------------------------------------------------------------------------------------------- connect broker


def serve_connects(channel: socket.socket, port: int) -> None:
    """Serve the connect calls of one pod until its last process ends. Runs outside the pod, as the pod's user.

    As that user, because the kernel shows a process's descriptors only to the same user; outside, so that the pod's
    programs can neither signal it (Landlock's scope, or another user) nor trace it.
    """
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    _, (listener,), _, _ = socket.recv_fds(channel, 1, 1)
    channel.close()
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        for _, event in poll.poll():
            if not event & select.POLLIN:
                return  # no process of the pod is left
            # The caller may be killed at any point, which voids its request: go on with the next one.
            with contextlib.suppress(FileNotFoundError, InterruptedError):
                _serve(listener, port)


def _serve(listener: int, port: int) -> None:
    notification = bytearray(80)
    fcntl.ioctl(listener, _RECEIVE, notification)
    call, pid = struct.unpack_from("=QI", notification)
    (number,) = struct.unpack_from("=i", notification, 32)  # first argument, the socket: an int, ignore the upper half
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
    """Return whether the caller's socket is blocking; raise if it is no socket, because it will be replaced."""
    try:
        kind = os.readlink(f"/proc/{pid}/fd/{number}")
        with open(f"/proc/{pid}/fdinfo/{number}") as file:
            flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    except (FileNotFoundError, StopIteration):
        raise OSError(errno.EBADF, "no such descriptor") from None
    fcntl.ioctl(listener, _VALID, struct.pack("=Q", call))  # else the pid may have been reused
    if not kind.startswith("socket:"):
        raise OSError(errno.ENOTSOCK, "not a socket")
    return not flags & os.O_NONBLOCK


def run_broker(channel: socket.socket, port: int, user: int, parent: int) -> None:
    """Run the connect broker after its fork; never returns."""
    try:
        os.setsid()
        if user >= 0:
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
        linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            serve_connects(channel, port)
    finally:
        os._exit(0)
