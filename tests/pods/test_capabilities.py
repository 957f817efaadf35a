"""The programs of a pod have exactly the kept capabilities: what needs another is refused, and kept ones work."""

import re
from pathlib import Path

import pytest

from etude.pods.pod import Pod
from etude.pods.runtime import capabilities
from tests.pods.attacking import run_in_pod

HEADER = Path("/usr/include/linux/capability.h")
ATTEMPTS = """
import ctypes, errno, fcntl, os, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
def outcome(call, *arguments):
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), "")
def set_loopback_down():
    fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack("16sH14x", b"lo", 0))
def listen_on_port_80():
    socket.socket().bind(("127.0.0.1", 80))
open("file", "w").close()
os.chmod("file", 0)
print(
    outcome(lambda: checked(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None))),
    outcome(set_loopback_down),
    outcome(lambda: checked(libc.sethostname(b"x", 1))),
    outcome(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
    outcome(os.mknod, "null", 0o020666, os.makedev(1, 3)),
)
print(
    outcome(os.chown, "file", 0, 0),
    outcome(lambda: open("file").read()),
    outcome(listen_on_port_80),
    outcome(os.setresuid, 0, 0, 0),
    outcome(os.chroot, "."),
)
"""


def test_the_mask_has_the_bits_of_the_names() -> None:
    assert capabilities.mask(()) == 0
    assert capabilities.mask({"chown"}) == 1
    assert capabilities.mask(["checkpoint_restore", "kill"]) == 1 << 40 | 1 << 5
    # chown, dac_override, fowner, fsetid, kill, setgid, setuid, net_bind_service, sys_chroot, setfcap
    assert capabilities.mask() == sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 10, 18, 31))


def test_an_unknown_capability_is_named_in_the_error() -> None:
    with pytest.raises(ValueError, match="sys_admn not known"):
        capabilities.mask({"sys_admn", "chown"})
    with pytest.raises(ValueError, match="expected a collection of names"):
        capabilities.mask("chown")


@pytest.mark.skipif(not HEADER.exists(), reason="the kernel's headers are not installed")
def test_the_numbers_are_those_of_the_kernel_headers() -> None:
    known = re.findall(r"^#define CAP_([A-Z_]+)\s+(\d+)$", HEADER.read_text(), re.MULTILINE)
    assert {name.lower(): int(number) for name, number in known} == {n: i for i, n in enumerate(capabilities.NAMES)}


def test_a_program_has_exactly_what_is_kept(state: Path) -> None:
    async def act(pod: Pod) -> None:
        status = (await pod.exec("cat /proc/self/status")).stdout
        found = {name: int(value, 16) for name, value in re.findall(r"^(Cap\w+):\t(\w+)$", status, re.MULTILINE)}
        kept = capabilities.mask()
        assert found == {"CapBnd": kept, "CapPrm": kept, "CapEff": kept, "CapInh": 0, "CapAmb": 0}
        assert "NoNewPrivs:\t1" in status

    run_in_pod(state, act)


def test_what_is_dropped_is_refused_and_what_is_kept_works(state: Path) -> None:
    async def act(pod: Pod) -> None:
        refused, kept = (await pod.exec(["python3", "-c", ATTEMPTS])).stdout.splitlines()
        assert refused.split() == ["EPERM"] * 5
        assert kept.split() == ["ok"] * 5

    run_in_pod(state, act)
