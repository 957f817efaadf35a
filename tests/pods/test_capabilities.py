"""Dropped capabilities are gone, for this process and every program it runs; kept ones work."""

import ctypes
import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.pods.runtime import capabilities
from tests.pods.children import in_child, libc, outcome

NEWNS, NEWUTS, NEWUSER, NEWNET = 0x00020000, 0x04000000, 0x10000000, 0x40000000
HEADER = Path("/usr/include/linux/capability.h")


def as_root_of_a_namespace(action: Callable[[], Any]) -> Any:
    """Return the result of `action` in a child that is root in its own user namespace, as in a pod."""

    def child() -> Any:
        user, group = os.getuid(), os.getgid()
        if libc.unshare(NEWUSER | NEWNS | NEWNET | NEWUTS):
            return None
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        return action()

    result = in_child(child)
    if result is None:
        pytest.skip("this machine does not let this user make namespaces")
    return result


def status_of_a_program() -> dict[str, int]:
    text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    return {name: int(value, 16) for name, value in re.findall(r"^(Cap\w+):\t(\w+)$", text, re.MULTILINE)}


def mount_tmpfs(on: Path) -> None:
    if libc.mount(b"none", bytes(on), b"tmpfs", 0, None):
        raise OSError(ctypes.get_errno(), "mount")


def set_loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, up and running


def listen_on_port_80() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 80))


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


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities are Linux's")
class TestDrop:
    def test_a_program_run_afterwards_has_exactly_what_was_kept(self) -> None:
        def child() -> tuple[dict[str, int], int, int]:
            capabilities.drop()
            return status_of_a_program(), capabilities.permitted(), capabilities.bounding()

        status, held, bounding = as_root_of_a_namespace(child)
        kept = capabilities.mask()
        assert status == {"CapBnd": kept, "CapPrm": kept, "CapEff": kept, "CapInh": 0, "CapAmb": 0}
        assert (held, bounding) == (kept, kept)

    def test_mounts_devices_interfaces_and_host_names_are_out_of_reach(self, tmp_path: Path) -> None:
        (directory := tmp_path / "mount").mkdir()

        def attempts() -> list[str]:
            host_name = (os.uname().nodename.encode(), len(os.uname().nodename))
            return [
                outcome(mount_tmpfs, directory),
                outcome(set_loopback_up),
                "EPERM" if libc.sethostname(*host_name) else "ok",
                outcome(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1),
                outcome(os.setpriority, os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0)),
            ]

        def child() -> tuple[list[str], list[str], str]:
            before = attempts()
            capabilities.drop()
            return before, attempts(), outcome(os.mknod, tmp_path / "null", 0o020666, os.makedev(1, 3))

        before, after, device = as_root_of_a_namespace(child)
        assert before == ["ok"] * 5
        assert after == ["EPERM"] * 4 + ["ok"]
        assert device == "EPERM"

    def test_what_is_kept_works(self, tmp_path: Path) -> None:
        def child() -> list[str]:
            set_loopback_up()
            capabilities.drop()
            (tmp_path / "file").write_text("")
            (tmp_path / "file").chmod(0)
            return [
                outcome(os.chown, tmp_path / "file", 0, 0),
                outcome((tmp_path / "file").read_text),
                outcome(listen_on_port_80),
                outcome(os.setresuid, 0, 0, 0),
                outcome(os.chroot, tmp_path),
            ]

        assert as_root_of_a_namespace(child) == ["ok"] * 5

    def test_nothing_kept_leaves_nothing(self) -> None:
        def child() -> tuple[dict[str, int], list[str]]:
            set_loopback_up()
            capabilities.drop(())
            return status_of_a_program(), [outcome(listen_on_port_80), outcome(os.chroot, "/")]

        status, found = as_root_of_a_namespace(child)
        assert set(status.values()) == {0}
        assert found == ["EACCES", "EPERM"]

    def test_dropping_again_can_only_take_more(self) -> None:
        def child() -> tuple[int, str]:
            capabilities.drop({"chown", "kill", "setpcap"})
            capabilities.drop({"chown", "net_admin", "setpcap"})
            return capabilities.permitted(), outcome(set_loopback_up)

        assert as_root_of_a_namespace(child) == (capabilities.mask({"chown", "setpcap"}), "EPERM")

    def test_who_may_not_cut_the_bounding_set_is_told_and_can_still_drop_the_rest(self) -> None:
        def child() -> tuple[str, int]:
            capabilities.drop((), bounding=False)  # without setpcap from here on
            try:
                capabilities.drop(())
            except PermissionError as error:
                return str(error), capabilities.permitted()
            return "", 0

        message, held = in_child(child)
        assert "only with setpcap" in message
        assert held == 0

    def test_no_new_privileges_stays_set_over_exec(self) -> None:
        def child() -> str:
            capabilities.no_new_privileges()
            return subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout

        assert "NoNewPrivs:\t1" in in_child(child)
