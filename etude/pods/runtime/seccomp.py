"""The system-call filters of a pod: they refuse the calls that developer tools never make or must not be allowed.

`build_filter` builds a classic BPF program as bytes (an array of `struct sock_filter`) from the tables below, which the
zygote installs in a pod's first process. It is a deny list: compilers, interpreters, debuggers and servers run
unchanged. Two rules close its gaps. A call newer than the tables fails with ENOSYS, as on an older kernel, until it has
been reviewed. And another ABI of the same kernel (32-bit, x32) cannot bypass the filter: its calls have other numbers
and are all refused.

The filter decides by number first and checks arguments only for the few calls that need it: Linux 5.11 and later then
determine at installation which calls always pass, and skip the filter for those.
"""

import errno
import os
import struct
from typing import Literal, NamedTuple, get_args

Network = Literal["own", "none", "tcp-only"]

NEWEST = 469  # file_setattr, Linux 6.17; from 424 on all machines number alike

# Each group: the error returned, and `name:x86_64:aarch64` (empty: that machine has no such call).
DENIED = (
    # Mounts change what paths mean, and in a user namespace they reach file-system code meant for root only.
    (
        errno.EPERM,
        "mount:165:40 umount2:166:39 pivot_root:155:41 open_tree:428:428 move_mount:429:429 fsopen:430:430 "
        "fsconfig:431:431 fsmount:432:432 fspick:433:433 mount_setattr:442:442 open_tree_attr:467:467",
    ),
    # A new namespace gives its creator every capability in it, which most past local kernel exploits needed.
    (errno.EPERM, "unshare:272:97 setns:308:268"),
    # Its flags are in memory, which a filter cannot read. On ENOSYS libc falls back to clone.
    (errno.ENOSYS, "clone3:435:435"),
    # BPF programs and performance counters: a large attack surface, with a view beyond the pod.
    (errno.EPERM, "bpf:321:280 perf_event_open:298:241"),
    # Makes system calls that no filter sees; libuv and others fall back when it is refused.
    (errno.EPERM, "io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427"),
    # Stops the kernel in the middle of a copy for any length of time, which turns a small race into an exploit.
    (errno.EPERM, "userfaultfd:323:282"),
    # Keyrings belong to a user id of the machine, not to a pod.
    (errno.EPERM, "keyctl:250:219 add_key:248:217 request_key:249:218"),
    # Memory that the kernel itself cannot read, so neither debuggers nor snapshots could.
    (errno.EPERM, "memfd_secret:447:447"),
    # Opens a file by its inode, bypassing the permissions of the directories above it.
    (errno.EPERM, "open_by_handle_at:304:265"),
    # Administration of the machine: kernel, power, swap, accounting, quotas, log and consoles.
    (
        errno.EPERM,
        "kexec_load:246:104 kexec_file_load:320:294 init_module:175:105 finit_module:313:273 delete_module:176:106 "
        "reboot:169:142 swapon:167:224 swapoff:168:225 acct:163:89 quotactl:179:60 quotactl_fd:443:443 "
        "syslog:103:116 vhangup:153:58",
    ),
    # All pods share the machine's clock.
    (errno.EPERM, "settimeofday:164:170 clock_settime:227:112 adjtimex:159:171 clock_adjtime:305:266"),
    # Direct access to hardware ports.
    (errno.EPERM, "iopl:172: ioperm:173:"),
    # Obsolete calls; where an old kernel still has them they are only attack surface.
    (
        errno.EPERM,
        "nfsservctl:180:42 lookup_dcookie:212:18 uselib:134: sysfs:139: _sysctl:156: create_module:174: "
        "get_kernel_syms:177: query_module:178:",
    ),
)

# Calls decided by their arguments; `_check_arguments` has the code for each.
CHECKED = "clone:56:220 ioctl:16:29 personality:135:92 socket:41:198 socketpair:53:199"
CHECKED_TCP_ONLY = "sendto:44:206 sendmsg:46:211 sendmmsg:307:269"

# Calls of the second filter. IPC objects outlive their creator and belong to a user id, not to a pod.
# Those that exist are named by small numbers, so using one needs no `get` call.
IPC = (
    "shmget:29:194 shmat:30:196 shmctl:31:195 semget:64:190 semop:65:193 semctl:66:191 semtimedop:220:192 "
    "msgget:68:186 msgsnd:69:189 msgrcv:70:188 msgctl:71:187 mq_open:240:180 mq_unlink:241:181"
)
# Calls on another process of the same user, by the index of the argument that is 0 for the caller itself.
OTHER_PROCESSES = {
    0: "prlimit64:302:261 sched_setparam:142:118 sched_setscheduler:144:119 sched_setaffinity:203:122 "
    "sched_setattr:314:274",
    1: "setpriority:141:140 ioprio_set:251:30",
}
SOCKETS = "socket:41:198 socketpair:53:199 connect:42:203 listen:50:201"

# NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET. NEWTIME is not a flag of clone.
CLONE_NEW = 0x7E020000
# Injecting input into another process's terminal or into a console: both can run commands outside the pod.
TERMINAL_INJECTION = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX
# Linux, 32-bit uname, 2.6 uname, both, no address randomisation (debuggers), query. The others disable protections.
PERSONALITIES = (0, 0x8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF)
# Families outside these are rarely used, often broken (AF_VSOCK, AF_PACKET, AF_ALG, AF_RDS, ...), or reach the host.
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
# getaddrinfo queries netlink for addresses. Other protocols fail as on a kernel without them: su and useradd accept
# that there is no audit, but stop on EPERM.
NETLINK_ROUTE = 0
SOCK_STREAM, SOCK_SEQPACKET, SOCK_FLAGS = 1, 5, 0x80800  # SOCK_CLOEXEC | SOCK_NONBLOCK share an argument with the type
IPPROTO_TCP = 6
# Sending with this flag connects, which Landlock's port rules do not check: landlock-lsm/linux#41.
MSG_FASTOPEN = 0x20000000

_ALLOW, _ERRNO, _KILL_PROCESS, _NOTIFY = 0x7FFF0000, 0x00050000, 0x80000000, 0x7FC00000
_ACTIONS = {"allow": _ALLOW, "kill": _KILL_PROCESS, "notify": _NOTIFY}
_LOAD, _JEQ, _JGE, _JSET, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data


class _Machine(NamedTuple):
    arch: int  # AUDIT_ARCH_*
    column: int  # in the tables above


_MACHINES = {"x86_64": _Machine(0xC000003E, 1), "aarch64": _Machine(0xC00000B7, 2)}


def build_filter(network: Network = "own", machine: str | None = None) -> bytes:
    """Return the filter as an array of `struct sock_filter`.

    `network` names the pod's network isolation: `own`, a network namespace, so that internet sockets are harmless;
    `none`, so that no internet sockets are allowed; `tcp-only`, Landlock's port rules, so that only what these can
    check is allowed. `machine` is as in uname, by default this one.
    """
    target = calls(network, machine)
    program = _Program()
    program.load(_ARCH)
    program.jump(_JEQ, _machine(machine).arch, no="kill")
    program.load(_NUMBER)
    _search(program, _ranges(target))
    _check_arguments(program, network)
    return program.assemble()


def build_shared_filter(unix: bool, egress: bool, own_user: bool, machine: str | None = None) -> bytes:
    """Return the second filter of a pod that shares the machine's network, user or IPC objects.

    Without namespaces gaps remain that Landlock does not cover either: System V IPC objects and POSIX queues; limits,
    priorities and processors of other processes of the same user; sockets named by a path (before ABI 9), and TCP to
    any address, because Landlock's rules name a port and no address. `unix`: UNIX sockets are allowed; `egress`: every
    connect goes to the pod's broker; `own_user`: no other process has the pod's user.
    """
    column = _machine(machine).column
    program = _Program()
    program.load(_ARCH)
    program.jump(_JEQ, _machine(machine).arch, no="allow")  # the first filter kills it
    program.load(_NUMBER)
    targets = dict.fromkeys(_numbers(IPC, column).values(), "EPERM")
    for argument, group in {} if own_user else OTHER_PROCESSES.items():
        targets |= dict.fromkeys(_numbers(group, column).values(), f"caller in {argument}")
    sockets = {} if unix else {"socket": "socket", "socketpair": "socketpair"}
    # listen() without bind() takes a port of the machine without a Landlock check.
    sockets |= {"connect": "notify", "listen": "EACCES"} if egress else {}
    targets |= {_numbers(SOCKETS, column)[name]: target for name, target in sockets.items()}
    for number, target in targets.items():
        program.jump(_JEQ, number, yes=target)
    program.jump(_JGE, 0, yes="allow")
    # A CPU limit of 0 kills like a signal. A process may change its own limits, as pid 0.
    for argument in OTHER_PROCESSES:
        program.label(f"caller in {argument}")
        program.load_argument(argument)
        program.jump(_JEQ, 0, yes="allow", no="EPERM")
    program.label("socket")
    program.load_argument(0)
    program.jump(_JEQ, AF_UNIX, yes="EACCES", no="allow")
    # A socket pair stays connected, except for datagrams, which can be sent to any path.
    program.label("socketpair")
    program.load_argument(1)
    program.keep_bits(~SOCK_FLAGS & 0xFFFFFFFF)
    program.jump(_JEQ, SOCK_STREAM, yes="allow")
    program.jump(_JEQ, SOCK_SEQPACKET, yes="allow", no="EACCES")
    return program.assemble()


def calls(network: Network = "own", machine: str | None = None) -> dict[int, str]:
    """Map each call that is not always allowed: its number -> an error, or its name if its arguments decide."""
    if network not in get_args(Network):
        raise ValueError(f"seccomp: network is {network!r}; expected one of {', '.join(get_args(Network))}")
    column = _machine(machine).column
    target = {number: errno.errorcode[e] for e, group in DENIED for number in _numbers(group, column).values()}
    checked = CHECKED + " " + (CHECKED_TCP_ONLY if network == "tcp-only" else "")
    return target | {number: name for name, number in _numbers(checked, column).items()}


def _machine(name: str | None = None) -> _Machine:
    name = name or os.uname().machine
    if name not in _MACHINES:
        raise OSError(
            errno.ENOTSUP, f"seccomp: no system-call table for {name}; there is one for {', '.join(_MACHINES)}"
        )
    return _MACHINES[name]


def _numbers(group: str, column: int) -> dict[str, int]:
    rows = (entry.split(":") for entry in group.split())
    return {row[0]: int(row[column]) for row in rows if row[column]}


class _Program:
    """An assembler for the needed part of classic BPF: jumps go forward to labels, "" is the next instruction."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, int, str, str]] = []
        self._labels: dict[str, int] = {}

    def label(self, name: str) -> None:
        self._labels[name] = len(self._lines)

    def load(self, offset: int) -> None:
        self._lines.append((_LOAD, offset, "", ""))

    def load_argument(self, index: int) -> None:
        # The low word (both machines are little-endian): every argument we check is 32 bits wide in the kernel.
        self.load(_ARGUMENTS + 8 * index)

    def keep_bits(self, bits: int) -> None:
        self._lines.append((_AND, bits, "", ""))

    def jump(self, test: int, value: int, yes: str = "", no: str = "") -> None:
        self._lines.append((test, value, yes, no))

    def assemble(self) -> bytes:
        """Return the bytes; an undefined label is an action: `allow`, `kill`, `notify` or the name of an error."""
        actions = {label for line in self._lines for label in line[2:] if label} - self._labels.keys()
        for name in sorted(actions):
            value = {"allow": _ALLOW, "kill": _KILL_PROCESS, "notify": _NOTIFY}.get(name) or _ERRNO | getattr(
                errno, name
            )
            self.label(name)
            self._lines.append((_RETURN, value, "", ""))
        lines = enumerate(self._lines, 1)
        return b"".join(
            struct.pack("=HBBI", c, self._skip(yes, at), self._skip(no, at), k) for at, (c, k, yes, no) in lines
        )

    def _skip(self, label: str, at: int) -> int:
        skip = self._labels[label] - at if label else 0
        assert 0 <= skip <= 255, f"the jump to {label} is {skip} instructions long; one byte is all there is"
        return skip


def _ranges(target: dict[int, str]) -> list[tuple[int, str]]:
    """Return all call numbers in order, as (first of a range, label); neighbours with one label are one range."""
    ranges: list[tuple[int, str]] = []
    for number in range(NEWEST + 1):
        where = target.get(number, "allow")
        if not ranges or ranges[-1][1] != where:
            ranges.append((number, where))
    return [*ranges, (NEWEST + 1, "ENOSYS")]  # all above, with the x32 calls, which have bit 30 set


def _search(program: _Program, ranges: list[tuple[int, str]]) -> None:
    """Emit a binary search for the number in the accumulator: about seven comparisons for any call."""

    def name(part: list[tuple[int, str]]) -> str:
        return part[0][1] if len(part) == 1 else f"from {part[0][0]} to {part[-1][0]}"

    low, high = ranges[: len(ranges) // 2], ranges[len(ranges) // 2 :]
    program.label(name(ranges))
    program.jump(_JGE, high[0][0], yes=name(high), no=name(low))
    for part in (low, high):
        if len(part) > 1:
            _search(program, part)


def _check_arguments(program: _Program, network: Network) -> None:
    program.label("clone")
    program.load_argument(0)
    program.jump(_JSET, CLONE_NEW, yes="EPERM", no="allow")

    program.label("ioctl")
    program.load_argument(1)
    for request in TERMINAL_INJECTION[:-1]:
        program.jump(_JEQ, request, yes="EPERM")
    program.jump(_JEQ, TERMINAL_INJECTION[-1], yes="EPERM", no="allow")

    program.label("personality")
    program.load_argument(0)
    for value in PERSONALITIES[:-1]:
        program.jump(_JEQ, value, yes="allow")
    program.jump(_JEQ, PERSONALITIES[-1], yes="allow", no="EPERM")

    internet = {"own": "allow", "none": "EACCES", "tcp-only": "internet"}[network]
    program.label("socket")
    program.label("socketpair")
    program.load_argument(0)
    program.jump(_JEQ, AF_UNIX, yes="allow")
    program.jump(_JEQ, AF_INET, yes=internet)
    program.jump(_JEQ, AF_INET6, yes=internet)
    program.jump(_JEQ, AF_NETLINK, no="EAFNOSUPPORT")
    program.load_argument(2)
    program.jump(_JEQ, NETLINK_ROUTE, yes="allow", no="EPROTONOSUPPORT")
    if network == "tcp-only":
        _check_tcp(program)


def _check_tcp(program: _Program) -> None:
    program.label("internet")
    program.load_argument(1)
    program.keep_bits(~SOCK_FLAGS & 0xFFFFFFFF)
    program.jump(_JEQ, SOCK_STREAM, no="EACCES")
    # MPTCP, SCTP and SMC are streams too, and Landlock's port rules do not cover them.
    program.load_argument(2)
    program.jump(_JEQ, 0, yes="allow")
    program.jump(_JEQ, IPPROTO_TCP, yes="allow", no="EPROTONOSUPPORT")

    program.label("sendto")
    program.label("sendmmsg")
    program.load_argument(3)
    program.jump(_JSET, MSG_FASTOPEN, yes="EOPNOTSUPP", no="allow")
    program.label("sendmsg")
    program.load_argument(2)
    program.jump(_JSET, MSG_FASTOPEN, yes="EOPNOTSUPP", no="allow")
