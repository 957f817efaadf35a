"""The filter agrees with its table for any call and argument, and the kernel enforces it."""

import ctypes
import errno
import mmap
import multiprocessing
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.pods.runtime import seccomp
from tests.pods.children import Killed, in_child, libc, outcome, syscall
from tests.pods.confining import install

NETWORKS = ("own", "none", "tcp-only")
ARCHS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HERE = os.uname().machine
linux = pytest.mark.skipif(sys.platform != "linux" or HERE not in ARCHS, reason="needs Linux on x86_64 or aarch64")


# -- the program against the table


def interpret(program: bytes, data: bytes) -> tuple[int, int]:
    """Interpret a filter as the kernel would; return its action and the number of instructions executed."""
    lines = list(struct.iter_unpack("=HBBI", program))
    accumulator, at, steps = 0, 0, 0
    while True:
        code, yes, no, k = lines[at]
        at, steps = at + 1, steps + 1
        if code == 0x06:
            return k, steps
        elif code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif code == 0x54:
            accumulator &= k
        else:
            test = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[code]
            at += yes if test else no


def seccomp_data(arch: int, number: int, arguments: tuple[int, ...] = ()) -> bytes:
    return struct.pack("=IIQ6Q", number, arch, 0x7FFF1234, *arguments, *[0] * (6 - len(arguments)))


def verdict(network: str, machine: str, arch: int, number: int, arguments: tuple[int, ...]) -> str:
    """Return the expected action of the filter, from an independent implementation."""
    if arch != ARCHS[machine]:
        return "kill"
    if number > 469:
        return "ENOSYS"
    rule = seccomp.calls(network, machine).get(number, "allow")  # type: ignore[arg-type]
    a, b, c, d = (argument & 0xFFFFFFFF for argument in arguments[:4])
    match rule:
        case "clone":
            flags = (1 << 17, 1 << 25, 1 << 26, 1 << 27, 1 << 28, 1 << 29, 1 << 30)
            return "EPERM" if any(a & flag for flag in flags) else "allow"
        case "ioctl":
            return "EPERM" if b in (0x5412, 0x541C) else "allow"
        case "personality":
            return "allow" if a in (0, 8, 0x20000, 0x20008, 0x40000, 0xFFFFFFFF) else "EPERM"
        case "socket" | "socketpair":
            return socket_verdict(network, a, b, c)
        case "sendto" | "sendmmsg":
            return "EOPNOTSUPP" if d & 0x20000000 else "allow"
        case "sendmsg":
            return "EOPNOTSUPP" if c & 0x20000000 else "allow"
        case _:
            return rule


def socket_verdict(network: str, family: int, kind: int, protocol: int) -> str:
    if family == socket.AF_UNIX:
        return "allow"
    if family == 16:
        return "allow" if protocol == 0 else "EPROTONOSUPPORT"
    if family not in (2, 10):
        return "EAFNOSUPPORT"
    if network == "own":
        return "allow"
    if network == "none" or kind & ~0o2000000 & ~0o4000 != 1:
        return "EACCES"
    return "allow" if protocol in (0, 6) else "EPROTONOSUPPORT"


def action(name: str) -> int:
    return {"allow": 0x7FFF0000, "kill": 0x80000000}.get(name) or 0x50000 | getattr(errno, name)


PROGRAMS = {(n, m): seccomp.build_filter(n, m) for n in NETWORKS for m in ARCHS}  # type: ignore[arg-type]
CONSTRAINED = sorted({number for n, m in PROGRAMS for number in seccomp.calls(n, m)})  # type: ignore[arg-type]
TELLING = (
    0,
    1,
    2,
    3,
    6,
    8,
    10,
    16,
    40,
    262,
    0x5412,
    0x541C,
    0x80801,
    0x20000,
    0x40000,
    0x10000000,
    0x20000000,
    2**32 - 1,
)

numbers = st.sampled_from(CONSTRAINED) | st.integers(0, 520) | st.integers(0, 2**32 - 1)
words = st.sampled_from(TELLING) | st.integers(0, 2**32 - 1)
# The upper half of a register may hold anything; the kernel ignores it, and so must the filter.
arguments = st.tuples(*[st.builds(lambda low, high: low | high << 32, words, st.sampled_from([0, 1, 2**32 - 1]))] * 6)


@settings(max_examples=2000, deadline=None, print_blob=True)
@given(st.sampled_from(sorted(PROGRAMS)), st.sampled_from([*ARCHS.values(), 0x40000003]), numbers, arguments)
def test_the_filter_agrees_with_the_table(
    which: tuple[str, str], arch: int, number: int, arguments: tuple[int, ...]
) -> None:
    said, _ = interpret(PROGRAMS[which], seccomp_data(arch, number, arguments))
    assert said == action(verdict(*which, arch, number, arguments))


@pytest.mark.parametrize(("network", "machine"), sorted(PROGRAMS))
def test_every_call_is_decided_in_a_dozen_instructions_and_by_number_if_possible(network: str, machine: str) -> None:
    program, checked = PROGRAMS[network, machine], seccomp.calls(network, machine)  # type: ignore[arg-type]
    for number in range(520):
        said, steps = interpret(program, seccomp_data(ARCHS[machine], number))
        if checked.get(number, "allow") == "allow":
            assert said == action("allow" if number <= seccomp.NEWEST else "ENOSYS")
            assert steps <= 12
        assert steps <= 20


HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", r"#define __NR_(\w+)\s+(\d+)"),
    "aarch64": ("/usr/include/asm-generic/unistd.h", r"#define __NR(?:3264)?_(\w+)\s+(\d+)"),
}


@pytest.mark.parametrize("machine", ARCHS)
def test_the_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    path, pattern = HEADERS[machine]
    if not Path(path).exists():
        pytest.skip(f"{path} is not installed")
    known = {name: int(number) for name, number in re.findall(pattern, Path(path).read_text())}
    column = list(ARCHS).index(machine) + 1
    groups = [*(group for _, group in seccomp.DENIED), seccomp.CHECKED, seccomp.CHECKED_TCP_ONLY]
    entries = [entry.split(":") for group in groups for entry in group.split()]
    assert len({entry[0] for entry in entries}) == len(entries)
    wrong = {e[0]: e[column] for e in entries if e[0] in known and str(known[e[0]]) != e[column]}
    assert not wrong
    assert sum(entry[0] in known for entry in entries if entry[column]) > 50


def test_invalid_filter_arguments_are_refused_with_a_reason() -> None:
    with pytest.raises(ValueError, match="expected one of own, none, tcp-only"):
        seccomp.build_filter("all")  # type: ignore[arg-type]
    with pytest.raises(OSError, match="no system-call table for riscv64; there is one for x86_64, aarch64"):
        seccomp.build_filter(machine="riscv64")


# -- the kernel with the program


def filtered(action: Callable[[], Any], network: Any = "own") -> Any:
    """Return the result of `action` in a child under the filter."""

    def child() -> Any:
        os.setsid()  # so that vhangup would hang up nothing if it got through
        install(program)
        return action()

    program = seccomp.build_filter(network)
    return in_child(child)


def number_of(name: str) -> int:
    groups = [*(group for _, group in seccomp.DENIED), seccomp.CHECKED]
    entry = next(e.split(":") for group in groups for e in group.split() if e.startswith(f"{name}:"))
    return int(entry[list(ARCHS).index(HERE) + 1])


@linux
def test_every_denied_call_is_denied() -> None:
    denied = {number: rule for number, rule in seccomp.calls().items() if rule.isupper()}
    assert len(denied) > 40
    assert filtered(lambda: {number: syscall(number) for number in denied}) == denied


@linux
def test_newer_calls_and_the_x32_abi_return_enosys() -> None:
    newer = (seccomp.NEWEST + 1, 512, 1000, 0x40000000, 0x40000000 + 39, 2**31 - 1)
    assert filtered(lambda: {syscall(number) for number in newer}) == {"ENOSYS"}


@linux
def test_no_process_is_started_in_a_new_namespace() -> None:
    flags = [1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)]
    assert filtered(lambda: [syscall(number_of("clone"), flag | signal.SIGCHLD) for flag in flags]) == ["EPERM"] * 7


@linux
def test_terminal_input_cannot_be_injected() -> None:
    def child() -> list[str]:
        master, slave = os.openpty()
        letter = ctypes.create_string_buffer(b"x")
        # The kernel takes the request as 32 bits: the upper bits must make no difference.
        requests = (0x5412, 0x541C, 0x5412 | 1 << 40)
        refused = [syscall(number_of("ioctl"), slave, request, ctypes.addressof(letter)) for request in requests]
        return [*refused, outcome(os.get_terminal_size, master), outcome(os.ttyname, slave)]

    assert filtered(child) == ["EPERM"] * 3 + ["ok"] * 2


@linux
def test_address_randomisation_can_be_disabled_but_no_protection() -> None:
    def child() -> list[str]:
        read_implies_exec, mmap_page_zero = 0x0400000, 0x0100000
        return [
            syscall(number_of("personality"), p) for p in (0xFFFFFFFF, 0x40000, 0, read_implies_exec, mmap_page_zero)
        ]

    assert filtered(child) == ["ok", "ok", "ok", "EPERM", "EPERM"]


FAMILIES = {
    "unix": (1, 1, 0),
    "tcp": (2, 1 | 0x80800, 6),
    "tcp6": (10, 1, 0),
    "udp": (2, 2, 0),
    "mptcp": (2, 1, 262),
    "route": (16, 3, 0),
    "audit": (16, 3, 9),
    "alg": (38, 5, 0),
    "vsock": (40, 1, 0),
    "packet": (17, 3, 0),
}


@linux
@pytest.mark.parametrize(
    ("network", "expected"),
    [
        ("own", {"tcp": "ok", "tcp6": "ok", "udp": "ok"}),
        ("none", {"tcp": "EACCES", "tcp6": "EACCES", "udp": "EACCES", "mptcp": "EACCES"}),
        ("tcp-only", {"tcp": "ok", "tcp6": "ok", "udp": "EACCES", "mptcp": "EPROTONOSUPPORT"}),
    ],
)
def test_sockets_are_of_the_allowed_families_only(network: str, expected: dict[str, str]) -> None:
    call = number_of("socket")
    found = filtered(lambda: {name: syscall(call, *triple) for name, triple in FAMILIES.items()}, network)
    expected |= {"unix": "ok", "route": "ok", "audit": "EPROTONOSUPPORT"}
    expected |= dict.fromkeys(("alg", "vsock", "packet"), "EAFNOSUPPORT")
    if socket.has_ipv6 is False or found["tcp6"] == "EAFNOSUPPORT":
        expected["tcp6"] = "EAFNOSUPPORT"  # a kernel without it
    assert {name: found[name] for name in expected} == expected


@linux
def test_under_tcp_only_no_connection_is_made_by_sending() -> None:
    def child() -> list[str]:
        with socket.socket() as server, socket.socket() as one, socket.socket() as two, socket.socket() as three:
            server.bind(("127.0.0.1", 0))
            server.listen()
            address, fast_open = server.getsockname(), 0x20000000
            three.connect(address)
            refused = [
                outcome(one.sendto, b"x", fast_open, address),
                outcome(two.sendmsg, [b"x"], [], fast_open, address),
            ]
            return [*refused, outcome(three.sendall, b"x"), outcome(three.sendmsg, [b"x"])]

    assert filtered(child, "tcp-only") == ["ENOTSUP", "ENOTSUP", "ok", "ok"]  # the same number as EOPNOTSUPP


@linux
def test_threads_programs_and_processes_work() -> None:
    def child() -> tuple[list[int], str, int]:
        seen: list[int] = []
        threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        output = subprocess.run(["sh", "-c", "echo one | cat; (echo two)"], capture_output=True, text=True, check=True)
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=lambda: queue.put(42))
        process.start()
        answer = queue.get()
        process.join()
        return sorted(seen), output.stdout, answer

    assert filtered(child) == ([0, 1, 2, 3], "one\ntwo\n", 42)


@linux
def test_servers_clients_and_names_work() -> None:
    def echo(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(connection.recv(10).upper())

    def child() -> tuple[bytes, bytes, bool]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=echo, args=(server,))
            thread.start()
            with socket.create_connection(server.getsockname()) as client:
                client.sendall(b"tcp")
                answer = client.recv(10)
            thread.join()
        left, right = socket.socketpair()
        left.sendall(b"unix")
        return answer, right.recv(10), bool(socket.getaddrinfo("localhost", 80))

    assert filtered(child) == (b"TCP", b"unix", True)


@linux
def test_a_debugger_can_trace() -> None:
    trace_me, cont = 0, 7

    def child() -> tuple[bool, int]:
        traced = os.fork()
        if not traced:
            libc.ptrace(trace_me, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(7)
        _, status = os.waitpid(traced, 0)
        stopped = os.WIFSTOPPED(status)
        libc.ptrace(cont, traced, None, None)
        return stopped, os.waitstatus_to_exitcode(os.waitpid(traced, 0)[1])

    assert filtered(child) == (True, 7)


@linux
def test_the_filter_survives_exec_and_others_can_be_stacked_on_it() -> None:
    def child() -> list[bool]:
        install(seccomp.build_filter("none"))
        run = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True)
        return ["Seccomp:\t2" in run.stdout, "NoNewPrivs:\t1" in run.stdout, outcome(socket.socket) == "EACCES"]

    assert filtered(child) == [True, True, True]


@linux
@pytest.mark.skipif(HERE != "x86_64", reason="int 0x80 is of x86")
def test_a_32_bit_system_call_kills_the_process() -> None:
    def getpid_as_i386() -> int:
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")  # mov eax, 20; int 0x80; ret
        return ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()

    try:
        assert in_child(getpid_as_i386) > 0
    except Killed:
        pytest.skip("this kernel has no 32-bit calls")
    with pytest.raises(Killed, match="SIGSYS"):
        filtered(getpid_as_i386)
