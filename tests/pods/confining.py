"""Apply rulesets and filters to this process, as the zygote does to a pod's first one, to test them alone."""

import ctypes
import errno
import os
import struct
from typing import Any

from etude.pods.runtime import landlock
from tests.pods.children import libc

SECCOMP = {"x86_64": 317, "aarch64": 277}


def restrict(read: Any = (), write: Any = (), execute: Any = (), **options: bool) -> None:
    """Confine this process by Landlock to these paths."""
    ruleset = landlock.build_ruleset(*(list(map(str, paths)) for paths in (read, write, execute)), **options)
    descriptor = call(444, ruleset.attributes, len(ruleset.attributes), 0)
    for rule in ruleset.rules:
        parent = os.open(rule[8:], os.O_PATH)
        call(445, descriptor, 1, rule[:8] + struct.pack("=i", parent), 0)
        os.close(parent)
    no_new_privileges()
    call(446, descriptor, 0)
    os.close(descriptor)


def install(program: bytes) -> None:
    """Install a system-call filter."""
    code = ctypes.create_string_buffer(program, len(program))
    no_new_privileges()
    call(SECCOMP[os.uname().machine], 1, 0, struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(code)))


def drop_capabilities() -> None:
    """Drop all capabilities of this process."""
    assert libc.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24)) == 0, errno.errorcode[ctypes.get_errno()]


def no_new_privileges() -> None:
    assert libc.prctl(38, *map(ctypes.c_ulong, (1, 0, 0, 0))) == 0


def call(number: int, *arguments: int | bytes) -> int:
    words = (ctypes.c_long(word) if isinstance(word, int) else ctypes.c_char_p(word) for word in arguments)
    result = int(libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result
