"""Runs inside a pod, as its root, and tries to escape. Prints a JSON object: attack -> outcome.

The expected outcome is "refused" and an error's name; "ok" is an attack that succeeded. Every attack is harmless if it
succeeds: it opens, reads, or writes back what it read. Standard library only; the argument is JSON.
"""

import ctypes
import errno
import json
import os
import platform
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
libc.ptrace.restype = ctypes.c_long
FACTS: dict[str, Any] = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
ATTACKS: dict[str, Callable[[], object]] = {}
USUAL_SOCKETS = ("/run/docker.sock", "/var/run/docker.sock", "/run/dbus/system_bus_socket")
CALLS = {  # name: (number on x86_64, arguments)
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "io_uring_setup": (425, 1, 0),
    "userfaultfd": (323, 1),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, 0, 0, 0, 0, -3),
    "request_key": (249, 0, 0, 0, -3),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, -1, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "reboot (ctrl-alt-del off)": (169, 0xFEE1DEAD, 672274793, 0, 0),
    "swapon": (167, 0, 0),
    "settimeofday": (164, 0, 0),
    "open_by_handle_at": (304, -100, 0, 0),
    "syslog": (103, 3, 0, 0),
    "iopl": (172, 3),
    "unshare user": (272, 0x10000000),
    "unshare mount": (272, 0x20000),
    "unshare net": (272, 0x40000000),
    "unshare pid": (272, 0x20000000),
    "unshare cgroup": (272, 0x2000000),
    "clone user": (56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": (435, 0, 0),
    "setns": (308, 0, 0),
    "fsopen": (430, 0, 0),
    "open_tree": (428, -100, 0, 1),
    "move_mount": (429, -1, 0, -1, 0, 0),
    "mount_setattr": (442, -100, 0, 0, 0, 0),
    "quotactl": (179, 0x80000100, 0, 0, 0),
    "acct": (163, 0),
}


def attack(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    def add(function: Callable[[], object]) -> Callable[[], object]:
        ATTACKS[name] = function
        return function

    return add


def call(number: int, *arguments: int) -> int:
    words = [ctypes.c_long(word) for word in (number, *arguments)]
    result = libc.syscall(*words)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    if result == 0 and number == 56:
        os._exit(0)  # the child of a clone that should have been refused
    return result


def check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result


def mount(source: str, target: str, kind: str, flags: int = 0) -> None:
    arguments = (source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None)
    check(libc.mount(*arguments))


for name_, (number_, *arguments_) in CALLS.items():
    if platform.machine() == "x86_64":
        ATTACKS[f"system call {name_}"] = lambda number=number_, rest=tuple(arguments_): call(number, *rest)

for path_ in ("mem", "environ", "maps", "syscall", "stack", "auxv"):
    ATTACKS[f"read /proc/1/{path_}"] = lambda path=path_: os.read(os.open(f"/proc/1/{path}", os.O_RDONLY), 1)
for path_ in ("cwd", "root", "exe", "fd/0", "fd/2", "fd/3", "ns/mnt"):
    ATTACKS[f"follow /proc/1/{path_}"] = lambda path=path_: os.readlink(f"/proc/1/{path}")
ATTACKS["list /proc/1/fd"] = lambda: os.listdir("/proc/1/fd")
ATTACKS["list /proc/1/root"] = lambda: os.listdir("/proc/1/root/")
ATTACKS["list /proc/1/map_files"] = lambda: os.listdir("/proc/1/map_files")
ATTACKS["write /proc/1/oom_score_adj"] = lambda: os.write(os.open("/proc/1/oom_score_adj", os.O_WRONLY), b"0")
ATTACKS["trace the guest init"] = lambda: check(libc.ptrace(16, 1, 0, 0))
ATTACKS["seize the guest init"] = lambda: check(libc.ptrace(0x4206, 1, 0, 0))
ATTACKS["take a descriptor of the guest init"] = lambda: call(438, os.pidfd_open(1), 0, 0)

ATTACKS["mount tmpfs"] = lambda: mount("none", "/mnt", "tmpfs")
ATTACKS["mount proc"] = lambda: mount("proc", "/mnt", "proc")
ATTACKS["mount sysfs"] = lambda: mount("sysfs", "/mnt", "sysfs")
ATTACKS["mount cgroup"] = lambda: mount("none", "/mnt", "cgroup2")
ATTACKS["bind mount"] = lambda: mount("/", "/mnt", "", 4096)
ATTACKS["make /usr writable"] = lambda: mount("", "/usr", "", 32 | 4096)
ATTACKS["unmount /proc"] = lambda: check(libc.umount2(b"/proc", 2))
ATTACKS["unmount /usr"] = lambda: check(libc.umount2(b"/usr", 2))
ATTACKS["pivot_root"] = lambda: call(155, 0, 0) if platform.machine() == "x86_64" else (_ for _ in ()).throw(OSError(1))
ATTACKS["write to /usr"] = lambda: os.open("/usr/bin/etude-was-here", os.O_CREAT | os.O_WRONLY)
ATTACKS["change /usr"] = lambda: os.chmod("/usr/bin/env", 0o755)
ATTACKS["set the host's name"] = lambda: socket.sethostname("pwned")

for kind_, major_, minor_ in (("character", 1, 1), ("block", 8, 0), ("block", 254, 0)):
    mode_ = (stat.S_IFCHR if kind_ == "character" else stat.S_IFBLK) | 0o666
    number_ = os.makedev(major_, minor_)
    name_ = f"make a {kind_} device {major_}:{minor_}"
    ATTACKS[name_] = lambda mode=mode_, number=number_: os.mknod("device", mode, number)
for name_ in (
    *("mem", "kmem", "port", "kmsg", "sda", "vda", "vda1", "nvme0n1", "loop0", "loop-control", "fuse", "kvm"),
    "net/tun",
):
    ATTACKS[f"open /dev/{name_}"] = lambda name=name_: os.open(f"/dev/{name}", os.O_RDONLY)
for name_ in (
    *("sysrq-trigger", "sys/kernel/core_pattern", "sys/kernel/modprobe", "sys/kernel/panic", "sys/vm/drop_caches"),
    *("sys/kernel/dmesg_restrict", "sys/fs/binfmt_misc/register", "sys/vm/overcommit_memory"),
):
    ATTACKS[f"open /proc/{name_} to write"] = lambda name=name_: os.open(f"/proc/{name}", os.O_WRONLY)
for name_ in ("timer_list", "kcore"):
    ATTACKS[f"open /proc/{name_}"] = lambda name=name_: os.open(f"/proc/{name}", os.O_RDONLY)
ATTACKS["list /sys"] = lambda: os.listdir("/sys") or (_ for _ in ()).throw(FileNotFoundError(2, "empty"))
ATTACKS["list /sys/fs/cgroup"] = lambda: os.listdir("/sys/fs/cgroup")


@attack("read the guest init's memory")
def read_agent() -> object:
    buffer = ctypes.create_string_buffer(8)
    ours = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    theirs = (ctypes.c_void_p * 2)(0x400000, 8)
    return check(libc.process_vm_readv(1, ours, 1, theirs, 1, 0))


@attack("leave by chroot")
def leave_by_chroot() -> object:
    os.makedirs("jail", exist_ok=True)
    child = os.fork()
    if child == 0:
        os.chroot("jail")
        for _ in range(100):
            os.chdir("..")
        os.chroot(".")
        os._exit(7 if any(os.path.exists(path) for path in FACTS.get("hidden", [])) else 8)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 7:
        raise PermissionError(errno.EPERM, "")
    return "out"


# -- the network and sockets of the host


def connect(kind: int, address: Any, type_: int = socket.SOCK_STREAM) -> None:
    with socket.socket(kind, type_) as sock:
        sock.settimeout(2)
        sock.connect(address)
        if type_ == socket.SOCK_DGRAM:
            sock.send(b"x")


for name_, kind_, address_ in (
    ("the host's port", socket.AF_INET, ("127.0.0.1", FACTS.get("port", 1))),
    ("the host's port by IPv6", socket.AF_INET6, ("::1", FACTS.get("port", 1))),
    ("the internet", socket.AF_INET, ("1.1.1.1", 443)),
    ("the internet by IPv6", socket.AF_INET6, ("2606:4700:4700::1111", 443)),
    ("the cloud's metadata", socket.AF_INET, ("169.254.169.254", 80)),
    ("a private network", socket.AF_INET, ("10.0.0.1", 22)),
    ("an abstract socket of the host", socket.AF_UNIX, "\0" + FACTS.get("abstract", "none")),
    *((f"socket {path}", socket.AF_UNIX, path) for path in [*FACTS.get("sockets", []), *USUAL_SOCKETS]),
):
    ATTACKS[f"connect to {name_}"] = lambda kind=kind_, address=address_: connect(kind, address)
ATTACKS["send to a name server"] = lambda: connect(socket.AF_INET, ("8.8.8.8", 53), socket.SOCK_DGRAM)
for name_, family_, type_, protocol_ in (
    ("raw ICMP", socket.AF_INET, socket.SOCK_RAW, 1),
    ("raw IPv6", socket.AF_INET6, socket.SOCK_RAW, 58),
    ("packets", 17, socket.SOCK_RAW, 0x300),
    ("vsock", 40, socket.SOCK_STREAM, 0),
    ("crypto", 38, socket.SOCK_SEQPACKET, 0),
    ("audit", 16, socket.SOCK_RAW, 9),
    ("netfilter", 16, socket.SOCK_RAW, 12),
    ("kobject events", 16, socket.SOCK_RAW, 15),
    ("bluetooth", 31, socket.SOCK_RAW, 1),
):
    ATTACKS[f"socket for {name_}"] = lambda a=(family_, type_, protocol_): socket.socket(*a)


@attack("see other interfaces")
def see_other_interfaces() -> object:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    if not others:
        raise OSError(errno.ENODEV, "")
    return others


# -- files and secrets of the host

for path_ in FACTS.get("hidden", []):
    ATTACKS[f"see {path_}"] = lambda path=path_: os.lstat(path)
for path_ in ("etc/shadow", "etc/gshadow", "etc/sudoers", "etc/machine-id", "etc/ssh", "root/.ssh", "root/.bashrc"):
    ATTACKS[f"see /{path_}"] = lambda path=path_: os.lstat(f"/{path}")


@attack("find the secret in some process")
def find_secret() -> object:
    secret = FACTS.get("secret", "no secret").encode()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for name in ("environ", "cmdline"):
            try:
                with open(f"/proc/{pid}/{name}", "rb") as file:
                    if int(pid) != os.getpid() and secret in file.read():
                        return f"{pid}/{name}"
            except OSError:
                continue
    raise FileNotFoundError(errno.ENOENT, "")


@attack("read the host's directories in the mount table")
def read_mounts() -> object:
    with open("/proc/self/mountinfo") as file:
        text = file.read()
    found = [path for path in FACTS.get("private_names", []) if path in text]
    if not found:
        raise FileNotFoundError(errno.ENOENT, "")
    return found


# -- privileges


@attack("a set-user-ID program")
def set_user_id() -> object:
    return gains("u+s")


@attack("a file capability")
def file_capability() -> object:
    data = struct.pack("<5I", 0x02000001, 0xFFFFFFFF, 0, 0x1FF, 0)
    return gains("", data)


def gains(mode: str, capability: bytes = b"") -> object:
    """Return whether another user gets root's identity or a capability from a program that root prepared."""
    subprocess.run(["cp", "/usr/bin/cat", "/tmp/tool"], check=True)
    os.chmod("/tmp/tool", 0o4755 if mode else 0o755)
    if capability:
        os.setxattr("/tmp/tool", "security.capability", capability)
    try:
        status = as_other(["/tmp/tool", "/proc/self/status"])
    except OSError:
        raise PermissionError(errno.EPERM, "") from None
    finally:
        os.unlink("/tmp/tool")
    rows = dict(line.split(":", 1) for line in status.stdout.splitlines())
    if "Uid" in rows and (rows["Uid"].split()[1] == "0" or int(rows["CapEff"], 16)):
        return rows["Uid"], rows["CapEff"]
    raise PermissionError(errno.EPERM, "")


for name_ in ("sudo", "su", "pkexec", "mount"):
    ATTACKS[f"the host's {name_}"] = lambda name=name_: as_nobody(name)


def as_nobody(name: str) -> object:
    arguments = {"sudo": ["-n", "id"], "su": ["-c", "id"], "pkexec": ["id"], "mount": ["-t", "tmpfs", "x", "/mnt"]}
    try:
        done = as_other([name, *arguments[name]])
    except OSError:
        raise PermissionError(errno.EPERM, "") from None
    if done.returncode:
        raise PermissionError(errno.EPERM, "")
    return done.stdout


def as_other(command: list[str]) -> "subprocess.CompletedProcess[str]":
    nothing = subprocess.DEVNULL
    return subprocess.run(
        command, user=1234, group=1234, extra_groups=[], stdin=nothing, capture_output=True, text=True, timeout=10
    )


def main() -> None:
    found = {}
    for name, act in ATTACKS.items():
        try:
            found[name] = f"ok {act()!r}"[:200]
        except OSError as error:
            found[name] = "refused " + errno.errorcode.get(error.errno or 0, str(error))
        except Exception as error:
            found[name] = f"broken {type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main()
