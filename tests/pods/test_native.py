"""The zygote and the guest init, by raw requests: what they answer, what ends with what, and what never ends them."""

import asyncio
import contextlib
import errno
import os
import random
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.pods.guest import protocol
from etude.pods.guest.client import connect_unix, listen_unix
from etude.pods.pod import PodError, Unsupported
from etude.pods.runtime import capabilities, probe, seccomp, zygote_protocol
from etude.pods.runtime.namespaces import FIRST_ID, IDS
from etude.pods.runtime.native import build
from etude.pods.runtime.zygote_client import ZygoteClient
from etude.system import compiler

UNSTEADY = {
    protocol.TIME,
    protocol.UTIME,
    protocol.STIME,
    protocol.MAXRSS,
    protocol.MTIME,
    protocol.PID,
}  # differ from run to run
ENDS = (protocol.OK, protocol.FAIL, protocol.EXITED, -1)
PATH = (protocol.ENV, b"PATH=/usr/bin:/bin")
HOST = "namespace pods cannot be made here: "

Frame = tuple[int, dict[int, list[bytes]]]
Given = tuple[int, protocol.Value]


class GuestConnection:
    """A synchronous connection to a guest init."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.decoder, self.calls = sock, protocol.FrameDecoder(), 0
        self.frames: list[tuple[int, int, protocol.Fields]] = []
        self.other_frames: list[tuple[int, int, protocol.Fields]] = []  # of other calls
        sock.settimeout(20)

    def receive(self) -> tuple[int, int, protocol.Fields]:
        """Return the next frame; op -1 at the end."""
        while not self.frames:
            try:
                data = self.sock.recv(1 << 18)
            except ConnectionError:
                data = b""
            if not data:
                return -1, 0, {}
            self.frames += self.decoder.feed(data)
        return self.frames.pop(0)

    def send(self, op: int, *fields: Given) -> int:
        self.calls += 1
        self.sock.sendall(protocol.frame(op, self.calls, *fields))
        return self.calls

    def answer(self, call: int) -> list[Frame]:
        """Return all frames of a reply, without fields that differ between runs; one frame per output stream."""
        found: list[Frame] = []
        self.frames, self.other_frames = [*self.other_frames, *self.frames], []
        while not found or found[-1][0] not in ENDS:
            op, number, fields = self.receive()
            if number not in (call, 0):
                self.other_frames.append((op, number, fields))
                continue
            steady = {key: value for key, value in fields.items() if key not in UNSTEADY}
            before = (
                next((kept for kind, kept in found if kind == op), None) if op in (protocol.OUT, protocol.ERR) else None
            )
            if before is not None:
                before[protocol.DATA] = [before[protocol.DATA][0] + steady[protocol.DATA][0]]
            else:
                found.append((op, steady))
        return sorted(found, key=lambda frame: frame[0])

    def request(self, op: int, *fields: Given) -> list[Frame]:
        return self.answer(self.send(op, *fields))

    def run(self, *argv: str, given: tuple[Given, ...] = (), env: Given = PATH) -> list[Frame]:
        return self.request(protocol.SPAWN, *((protocol.ARG, word.encode()) for word in argv), env, *given)

    def sh(self, script: str, *given: Given) -> bytes:
        """Return the standard output of a script."""
        return b"".join(
            f[protocol.DATA][0] for op, f in self.run("/bin/sh", "-c", script, given=given) if op == protocol.OUT
        )

    def close(self) -> None:
        self.sock.close()


class ZygoteFixture:
    """A zygote, and pods created by raw requests."""

    def __init__(self, helper: Path) -> None:
        self.state = Path(tempfile.mkdtemp(prefix="etude-native-"))
        self.root = os.geteuid() == 0
        self.loop = asyncio.new_event_loop()
        self.client = ZygoteClient(self.state, helper, "keeper", "namespaces")
        self.count = 0
        self.guests: list[GuestConnection] = []
        make_skeleton(self.state / "skeleton")

    def request(self, op: int, *fields: Given, descriptors: tuple[int, ...] = ()) -> tuple[protocol.Fields, list[int]]:
        return self.loop.run_until_complete(self.client.request(op, *fields, descriptors=descriptors))

    @property
    def flags(self) -> int:
        return zygote_protocol.OWN_IDS if self.root else 0

    def layer(self, path: str) -> Given:
        """Return the field of a layer."""
        return (zygote_protocol.MAPPED, f"0 {path}".encode()) if self.root else (zygote_protocol.LOWER, path.encode())

    def create(self, *more: Given, lower: str = "skeleton") -> tuple[str, int]:
        """Create a pod; return its name and the pid of its first process."""
        self.count += 1
        name = f"p{self.count}"
        directory = self.state / name
        directory.mkdir()
        listener = listen_unix(directory, "agent.sock")
        fields: list[Given] = [
            (zygote_protocol.ID, name.encode()),
            self.layer(lower),
            (zygote_protocol.SIZE, 64 << 20),
            (zygote_protocol.OWNER, FIRST_ID if self.root else 0),
            (zygote_protocol.IDS, IDS if self.root else 1),
            (zygote_protocol.HOSTNAME, b"pod"),
            (zygote_protocol.WORKDIR, b"/work"),
            (zygote_protocol.CAPS, capabilities.mask()),
            (zygote_protocol.FILTER, seccomp.build_filter("own")),
            (zygote_protocol.BIND, b"/usr\0/usr"),
            *more,
            (zygote_protocol.FLAGS, self.flags),
        ]
        reply, _ = self.request(zygote_protocol.CREATE, *fields, descriptors=(listener.fileno(),))
        listener.close()
        return name, protocol.number(reply, zygote_protocol.PID)

    def connect(self, name: str) -> GuestConnection:
        self.guests.append(GuestConnection(connect_unix(self.state / name, "agent.sock")))
        return self.guests[-1]

    def pod(self, *more: Given) -> GuestConnection:
        guest = self.connect(self.create(*more)[0])
        assert guest.receive()[0] == protocol.HELLO
        return guest

    def clear(self) -> None:
        """End every pod and connection, after a test."""
        while self.guests:
            self.guests.pop().close()
        for name in self.request(zygote_protocol.STATUS)[0].get(zygote_protocol.ID, []):
            self.request(zygote_protocol.KILL, (zygote_protocol.ID, name))

    def end(self) -> None:
        while self.guests:
            self.guests.pop().close()
        if self.client.sock is not None:
            with contextlib.suppress(PodError):  # it was killed
                self.request(zygote_protocol.STOP)

        async def close() -> None:
            self.client.close()

        self.loop.run_until_complete(close())
        self.loop.close()
        shutil.rmtree(self.state, ignore_errors=True)


def make_skeleton(root: Path) -> None:
    for name in ("proc", "dev", "tmp", "root", "usr", "etc", "work"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nann:x:1000:1001::/:/bin/sh\nodd:x:many:1::/:\n")
    (root / "etc/group").write_text("root:x:0:\nstaff:x:50:ann,bob\nmail:x:8:ann\n")
    (root / "etc/resolv.conf").touch()
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
    (root / "tmp").chmod(0o1777)


@pytest.fixture(scope="session")
def helper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found, why = build.find_helper(tmp_path_factory.mktemp("state"))
    if found is None:
        assert shutil.which("cc") is None, why
        pytest.skip(why)
    return found


@pytest.fixture(scope="module")
def shared_zygote(helper: Path) -> Iterator[ZygoteFixture]:
    zygote = ZygoteFixture(helper)
    try:
        op, _, fields = zygote.connect(zygote.create()[0]).receive()
        if op != protocol.HELLO:
            pytest.skip(HOST + protocol.data(fields, protocol.DATA).decode("utf-8", "replace"))
        yield zygote
    finally:
        zygote.end()


@pytest.fixture
def zygote(shared_zygote: ZygoteFixture) -> Iterator[ZygoteFixture]:
    yield shared_zygote
    shared_zygote.clear()


# ------------------------------------------------------------------------------------------------- guest init


def words(*argv: str) -> tuple[Given, ...]:
    return tuple((protocol.ARG, word.encode()) for word in argv)


def said(frames: list[Frame]) -> str:
    """Return a reply as text: an error and its message, an exit code with flags and output, or data and entries."""
    op, last = frames[-1]
    if op == protocol.FAIL:
        return f"{errno.errorcode[protocol.number(last, protocol.NUMBER)]} {last[protocol.DATA][0].decode()}"
    output = [fields[protocol.DATA][0] for kind, fields in frames if kind in (protocol.OUT, protocol.ERR)]
    shown = " ".join(text.decode() if len(text) < 60 else f"{len(text)} bytes" for text in output)
    names = " ".join(fields[protocol.PATH][0].decode() for kind, fields in frames if kind == protocol.ENTRY)
    if op == protocol.EXITED:
        flags = protocol.number(last, protocol.FLAGS)
        return f"exit {protocol.number(last, protocol.CODE)} {'!' * flags}{shown}".rstrip()
    return f"ok {shown}{names}".rstrip()


TIMED_OUT, TRUNCATED = "!", "!!"  # as `said` shows the flags


def test_commands(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    cases: list[tuple[tuple[str, ...], tuple[Given, ...], str]] = [
        (("/bin/sh", "-c", "echo out; echo err >&2; exit 3"), (), "exit 3 out\n err"),
        (("true",), (), "exit 0"),
        (("true",), ((protocol.ENV, b"PATH=/nowhere:/etc/passwd"),), "ENOTDIR 'true': Not a directory"),
        (("true",), ((protocol.ENV, b"PATH=/nowhere"),), "ENOENT 'true': No such file or directory"),
        (
            ("sh", "-c", "env | sort"),
            ((protocol.ENV, b"B=1"), (protocol.ENV, b"novalue"), (protocol.ENV, b"C=x=y")),
            "exit 0 B=1\nC=x=y\nPATH=/usr/bin:/bin\nPWD=/work",
        ),
        (("/no/such",), (), "ENOENT '/no/such': No such file or directory"),
        (("/etc/passwd",), (), "EACCES '/etc/passwd': Permission denied"),
        (("/work",), (), "EACCES '/work': Permission denied"),
        (("",), (), "EACCES Permission denied"),
        (("pwd",), (), "exit 0 /work"),
        (("pwd",), ((protocol.CWD, b"../tmp"),), "exit 0 /tmp"),
        (("pwd",), ((protocol.CWD, b"/no/where"),), "ENOTDIR the working directory /no/where is not there"),
        (("pwd",), ((protocol.CWD, b"/etc/passwd"),), "ENOTDIR the working directory /etc/passwd is not there"),
        (("sh", "-c", "kill -9 $$"), (), "exit 137"),
        (
            ("sh", "-c", "umask; ls /proc/self/fd; ps -o sid= -p $$ | grep -q $$ && echo leader"),
            (),
            "exit 0 0022\n0\n1\n2\n3\nleader",
        ),
        (("grep", "-cE", "^Sig(Blk|Ign):\t0+$", "/proc/self/status"), (), "exit 0 2"),
        (("sh", "-c", "cat; echo done"), ((protocol.DATA, b"some input"),), "exit 0 some inputdone"),
        (("cat",), (), "exit 0"),
        (("head", "-c", "100000", "/dev/zero"), ((protocol.LIMIT, 1000),), f"exit 0 {TRUNCATED}1000 bytes"),
        (("head", "-c", "1000", "/dev/zero"), ((protocol.LIMIT, 1000),), "exit 0 1000 bytes"),
        (("sh", "-c", "echo before; sleep 20"), ((protocol.TIME, 150),), f"exit 137 {TIMED_OUT}before"),
        (("sh", "-c", "echo now; sleep 20 &"), (), "exit 0 now"),  # nothing waits for a background process
    ]
    for argv, given, expected in cases:
        assert said(guest.run(*argv, given=given)) == expected.rstrip(), argv
    assert said(guest.run("true", env=(protocol.ENV, b"A=b"))) == "exit 0"  # the default search path
    for invalid in (guest.run("a\0b"), guest.run()):
        assert said(invalid).startswith("EINVAL")
    for expected_count in (1, 0):
        assert protocol.number(guest.request(protocol.PROCESSES)[-1][1], protocol.SIZE) == expected_count
        assert said(guest.request(protocol.KILLALL)) == "ok"
    assert said(guest.request(99)) == "ENOSYS unknown request 99"
    assert said(guest.request(protocol.PING)) == "ok"


@pytest.mark.skipif(os.geteuid() != 0, reason="a pod has other users only if its creator is root")
def test_users(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    for name, expected in {
        "ann": "exit 0 1000\n1001\n1001 8 50",
        "1000": "exit 0 1000\n1001\n1001 8 50",
        "ann:mail": "exit 0 1000\n8\n8 50",
        "0:50": "exit 0 0\n50\n50",
        "7:9": "exit 0 7\n9\n9",
        "root": "exit 0 0\n0\n0",
        "": "exit 0 0\n0\n0",
        "nobody-here": "EINVAL no user 'nobody-here' in the pod",
        "ann:no-group": "EINVAL no user 'ann:no-group' in the pod",
    }.items():
        assert said(guest.run("sh", "-c", "id -u; id -g; id -G", given=((protocol.USER, name.encode()),))) == expected


def test_streams(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()

    def start(*argv: str, given: tuple[Given, ...] = ((protocol.FLAGS, protocol.KEEP_STDIN),)) -> Given:
        return (protocol.JOB, guest.send(protocol.SPAWN, *words(*argv), PATH, *given))

    job = start("cat")
    assert said(guest.request(protocol.INPUT, job, (protocol.DATA, b"one "))) == "ok"
    assert said(guest.request(protocol.INPUT, job, (protocol.DATA, b"two"))) == "ok"
    assert said(guest.request(protocol.RESIZE, job, (protocol.ROWS, 5))) == "ENOTTY it has no terminal"
    assert said(guest.request(protocol.SIGNAL, job, (protocol.NUMBER, 99))) == "EINVAL Invalid argument"
    assert said(guest.request(protocol.INPUT, job, (protocol.FLAGS, protocol.END))) == "ok"
    assert said(guest.answer(int(job[1]))) == "exit 0 one two"
    for late in (protocol.INPUT, protocol.SIGNAL):
        assert said(guest.request(late, job, (protocol.NUMBER, 9))) == "ESRCH no such job, or it has ended"
    job = start("sleep", "60")
    assert said(guest.request(protocol.SIGNAL, job, (protocol.NUMBER, signal.SIGTERM))) == "ok"
    assert said(guest.answer(int(job[1]))) == "exit 143"
    job = start("sh", "-c", "exec <&-; echo closed; sleep 60")
    while guest.receive()[0] != protocol.OUT:
        pass
    while (reply := said(guest.request(protocol.INPUT, job, (protocol.DATA, b"into nothing")))) == "ok":
        time.sleep(0.02)
    assert reply == "EPIPE its standard input is closed"


def test_terminals(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    size = ((protocol.ROWS, 30), (protocol.COLS, 100))
    script = "stty size; tty; test -t 0 -a -t 1 -a -t 2 && echo all; echo hello >/dev/tty; read line; echo got $line"
    call = guest.send(protocol.SPAWN, *words("sh", "-c", script), PATH, *size)
    assert said(guest.request(protocol.INPUT, (protocol.JOB, call), (protocol.DATA, b"typed\n"))) == "ok"
    # Sorted, because input may be echoed before or between the words.
    assert sorted(output_words(guest, call)) == sorted(
        ["30", "100", "/dev/pts/0", "all", "hello", "typed", "got", "typed"]
    )
    call = guest.send(protocol.SPAWN, *words("sh", "-c", "read line; stty size; read line; echo end"), PATH, *size)
    resized = ((protocol.JOB, call), (protocol.ROWS, 7), (protocol.COLS, 8))
    assert said(guest.request(protocol.RESIZE, *resized)) == "ok"
    for given in ((protocol.DATA, b"\n"), (protocol.FLAGS, protocol.END)):
        assert said(guest.request(protocol.INPUT, (protocol.JOB, call), given)) == "ok"
        time.sleep(0.2)
    assert output_words(guest, call) == ["7", "8", "end"]


def output_words(guest: GuestConnection, call: int) -> list[str]:
    return " ".join(f[protocol.DATA][0].decode() for op, f in guest.answer(call) if op == protocol.OUT).split()


TRUNCATE, APPEND = (protocol.FLAGS, protocol.TRUNCATE), (protocol.FLAGS, protocol.APPEND)
FILE_REQUESTS: list[tuple[int, str, tuple[Given, ...], str]] = [
    (protocol.WRITE, "new/deep/file", ((protocol.DATA, b"hello"), TRUNCATE, (protocol.MODE, 0o4751)), "ok"),
    (protocol.WRITE, "new/deep/file", ((protocol.DATA, b"XY"), (protocol.OFFSET, 3)), "ok"),
    (protocol.WRITE, "new/deep/file", ((protocol.DATA, b"!"), APPEND), "ok"),
    (protocol.WRITE, "new/deep/file/below", (), "ENOTDIR '/work/new/deep/file/below': Not a directory"),
    (protocol.WRITE, "fifo", (), "ENXIO '/work/fifo': No such device or address"),
    (protocol.WRITE, "/proc/sys/kernel/hostname", (), "EACCES '/proc/sys/kernel/hostname': Permission denied"),
    (protocol.WRITE, "/dev/null", (), "EINVAL '/dev/null': not a regular file"),
    (protocol.WRITE, "/work", (), "EISDIR '/work': Is a directory"),
    (protocol.WRITE, "self", (), "ELOOP '/work/self': Too many levels of symbolic links"),
    (protocol.WRITE, "new/at", ((protocol.DATA, b"x"), (protocol.OFFSET, -1)), "EINVAL Invalid argument"),
    (protocol.WRITE, "a" * 300, (), f"ENAMETOOLONG '/work/{'a' * 300}': File name too long"),
    (protocol.WRITE, "/" + "b/" * 2100, (), "ENAMETOOLONG File name too long"),
    (protocol.WRITE, "", (), "ENOENT an empty path"),
    (protocol.WRITE, "a\0b", (), "ENOENT an empty path"),
    (protocol.MKDIR, "made/of/many", ((protocol.MODE, 0o1700),), "ok"),
    (protocol.MKDIR, "made/of/many", (), "ok"),
    (protocol.MKDIR, "d/z", (), "EEXIST '/work/d/z': File exists"),
    (protocol.MKDIR, "d/z/below", (), "ENOTDIR '/work/d/z/below': Not a directory"),
    (protocol.SYMLINK, "links/one", ((protocol.DATA, b"../d/z"),), "ok"),
    (protocol.SYMLINK, "links/one", ((protocol.DATA, b"../d/z"),), "EEXIST '/work/links/one': File exists"),
    (protocol.READ, "new/deep/file", (), "ok helXY!"),
    (protocol.READ, "links/one", (), "ok"),
    (protocol.READ, "d", (), "EISDIR '/work/d': Is a directory"),
    (protocol.READ, "fifo", (), "EINVAL '/work/fifo': not a regular file"),
    (protocol.READ, "missing", (), "ENOENT '/work/missing': No such file or directory"),
    (protocol.READ, "self", (), "ELOOP '/work/self': Too many levels of symbolic links"),
    (protocol.READ, "/proc/self/mem", (), "EACCES '/proc/self/mem': Permission denied"),
    (protocol.READ, "/proc/1/environ", (), "EACCES '/proc/1/environ': Permission denied"),
    (protocol.READ, "/proc/self/exe", (), "ELOOP '/proc/self/exe': Too many levels of symbolic links"),
    (protocol.READ, "/dev/zero", (), "EINVAL '/dev/zero': not a regular file"),
    (protocol.READ, "/proc/thread-self/status", (), "EACCES '/proc/thread-self/status': Permission denied"),
    (protocol.READ, "/proc/self/root/etc", (), "ELOOP '/proc/self/root/etc': Too many levels of symbolic links"),
    (protocol.READ, "new/deep/file", ((protocol.OFFSET, 2), (protocol.LIMIT, 2)), "ok lX"),
    (protocol.READ, "new/deep/file", ((protocol.OFFSET, 200),), "ok"),
    (protocol.READ, "new/deep/file", ((protocol.OFFSET, -5),), "EINVAL Invalid argument"),
    (protocol.READ, "new/deep/file", ((protocol.LIMIT, -5),), "ok"),
    (protocol.STAT, "d/z", (), "ok z"),
    (protocol.STAT, "d/", (), "ok d"),
    (protocol.STAT, "/", (), "ok /"),
    (protocol.STAT, "loop", (), "ok loop"),
    (protocol.STAT, "missing", (), "ENOENT '/work/missing': No such file or directory"),
    (protocol.STAT, "d/z/x", (), "ENOTDIR '/work/d/z/x': Not a directory"),
    (protocol.STAT, "fifo", (), "ok fifo"),
    (protocol.LIST, "d", (), "ok e l z"),
    (protocol.LIST, "loop", (), "ok group passwd resolv.conf"),
    (protocol.LIST, "missing", (), "ENOENT '/work/missing': No such file or directory"),
    (protocol.LIST, "d/z", (), "ENOTDIR '/work/d/z': Not a directory"),
    (protocol.REMOVE, "d/z", (), "ok"),
    (protocol.REMOVE, "d/l", (), "ok"),
    (protocol.REMOVE, "t", (), "ok"),
    (protocol.REMOVE, "missing", (), "ENOENT '/work/missing': No such file or directory"),
    (protocol.REMOVE, "loop", (), "ok"),
    (protocol.REMOVE, "/etc/passwd/x", (), "ENOTDIR '/etc/passwd/x': Not a directory"),
    (protocol.REMOVE, "deeper/", (), "ok"),
    (protocol.REMOVE, "made/of/many/", (), "ok"),
    (protocol.LIST, "/etc", (), "ok group passwd resolv.conf"),
    (protocol.LIST, ".", (), "ok d fifo links made new self"),
]


def test_files(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    guest.sh("mkfifo fifo; ln -s /etc loop; ln -s self self; mkdir -p d/e; touch d/z d/e/y; ln -s fifo d/l")
    guest.sh("mkdir -p t/u/v/w; touch t/1 t/u/2 t/u/v/3; ln -s /etc t/out; chmod 0 t/u/v t/u")
    guest.run("python3", "-c", "import os\nfor _ in range(1500): os.mkdir('deeper'); os.chdir('deeper')")
    for op, path, given, expected in FILE_REQUESTS:
        assert said(guest.request(op, (protocol.PATH, path.encode()), *given)) == expected, (op, path)
    _, entry = guest.request(protocol.STAT, (protocol.PATH, b"new/deep/file"))[-1]
    assert protocol.number(entry, protocol.MODE) == 0o751  # a later write removed the set-user-ID bit
    busy = guest.request(protocol.REMOVE, (protocol.PATH, b"/dev"))  # the device that it stops at varies
    assert said(busy).startswith("EBUSY")


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack("<IB", 1, 1),  # too short
        struct.pack("<I", protocol.MAX_FRAME + 1),
        struct.pack("<IBIBI", 10, protocol.PING, 1, protocol.DATA, 6),  # a field longer than its frame
        struct.pack("<IBIB", 6, protocol.PING, 1, protocol.DATA),  # a field cut off
        protocol.frame(protocol.SPAWN, 1, (protocol.ARG, b"true"), (protocol.FLAGS, b"x")),  # not a number
        protocol.frame(protocol.OWN, 1, (protocol.TIME, b"")),
    ],
)
def test_a_protocol_violation_closes_only_its_own_connection(zygote: ZygoteFixture, bad: bytes) -> None:
    name, _ = zygote.create()
    good, evil = zygote.connect(name), zygote.connect(name)
    assert (good.receive()[0], evil.receive()[0]) == (protocol.HELLO, protocol.HELLO)
    evil.sock.sendall(protocol.frame(protocol.PING, 5) + bad)
    assert [evil.receive()[0], evil.receive()[0]] == [protocol.OK, -1]
    assert good.request(protocol.PING)[-1][0] == protocol.OK


def test_a_slow_reader_stalls_only_its_own_job_and_loses_nothing(zygote: ZygoteFixture) -> None:
    size = 32 << 20
    name, pid = zygote.create()
    slow, other = zygote.connect(name), zygote.connect(name)
    slow.receive(), other.receive()
    slow.send(protocol.SPAWN, *words("head", "-c", str(size), "/dev/zero"), PATH)
    time.sleep(0.5)
    assert other.request(protocol.PROCESSES)[-1][1][protocol.SIZE] == [struct.pack("<q", 1)], (
        "the job waits for the reader"
    )
    status = Path(f"/proc/{pid}/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0]) << 10
    assert resident < 32 << 20
    got = 0
    while (frame := slow.receive())[0] != protocol.EXITED:
        got += len(protocol.data(frame[2], protocol.DATA))
    assert got == size


def test_a_program_that_reads_late_gets_all_of_a_large_input(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    script = "sleep 0.5; wc -c"
    call = guest.send(protocol.SPAWN, *words("sh", "-c", script), PATH, (protocol.FLAGS, protocol.KEEP_STDIN))
    for _ in range(40):
        guest.sock.sendall(
            protocol.frame(protocol.INPUT, 500, (protocol.JOB, call), (protocol.DATA, bytes(protocol.CHUNK)))
        )
    guest.sock.sendall(protocol.frame(protocol.INPUT, 501, (protocol.JOB, call), (protocol.FLAGS, protocol.END)))
    assert [f[protocol.DATA] for op, f in guest.answer(call) if op == protocol.OUT] == [
        [b"%d\n" % (40 * protocol.CHUNK)]
    ]


def gone(guest: GuestConnection, seconds: float = 5) -> bool:
    guest.sock.settimeout(seconds)
    return guest.receive()[0] == -1


def test_a_pod_ends_with_its_owner_or_ttl_and_a_job_with_its_connection(
    zygote: ZygoteFixture,
) -> None:
    name, _ = zygote.create()
    owner, guest = zygote.connect(name), zygote.connect(name)
    owner.receive(), guest.receive()
    guest.send(protocol.SPAWN, *words("sleep", "50"), PATH)
    guest.receive()
    guest.close()
    deadline = time.monotonic() + 60
    while owner.request(protocol.PROCESSES)[-1][1][protocol.SIZE] != [bytes(8)]:
        assert time.monotonic() < deadline, "the job of a closed connection goes on"
    assert owner.request(protocol.OWN, (protocol.FLAGS, protocol.ATTACHED))[-1][0] == protocol.OK
    watcher = zygote.connect(name)
    watcher.receive()
    owner.close()
    assert gone(watcher)
    brief = zygote.pod()
    brief.request(protocol.OWN, (protocol.TIME, 100))
    assert gone(brief)


def test_a_program_that_closes_its_terminal_gets_no_hangup(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    script = "exec <&- >&- 2>&-; sleep 0.1; echo back >/dev/tty; exit 5"
    call = guest.send(protocol.SPAWN, *words("sh", "-c", script), PATH, (protocol.ROWS, 3), (protocol.COLS, 80))
    *_, output, ended = guest.answer(call)
    assert output == (protocol.OUT, {protocol.DATA: [b"back\r\n"]})
    assert ended[1][protocol.CODE] == [struct.pack("<q", 5)]


def test_orphans_are_reaped(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    guest.sh("for i in 1 2 3 4 5; do (sleep 0.05 &) ; done")
    deadline = time.monotonic() + 60
    while (left := guest.sh("ls -d /proc/[0-9]* | wc -l")) != b"4\n":  # the guest init, sh, ls and wc
        assert time.monotonic() < deadline, f"{left!r} processes are left"


# ------------------------------------------------------------------------------------------------- zygote


def test_writes_of_a_pod_can_be_sealed_fetched_and_stacked(zygote: ZygoteFixture) -> None:
    name, _ = zygote.create()
    guest = zygote.connect(name)
    guest.receive()
    guest.request(protocol.WRITE, (protocol.PATH, b"kept"), (protocol.DATA, b"words"))
    _, (directory,) = zygote.request(zygote_protocol.FETCH, (zygote_protocol.ID, name.encode()))
    assert os.listdir(f"/proc/self/fd/{directory}") == ["work"]
    os.close(directory)
    zygote.request(zygote_protocol.SEAL, (zygote_protocol.ID, name.encode()), (zygote_protocol.LAYER, b"sealed"))
    assert gone(guest)
    reply, _ = zygote.request(zygote_protocol.STATUS)
    assert name.encode() not in reply.get(zygote_protocol.ID, [])
    assert reply[zygote_protocol.LAYER] == [b"sealed"]
    sealed = f"{zygote_protocol.MEMORY}/sealed/u"
    child = zygote.connect(zygote.create(zygote.layer("skeleton"), lower=sealed)[0])
    assert child.receive()[0] == protocol.HELLO
    assert child.sh("cat kept") == b"words"
    child.close()
    _, (directory,) = zygote.request(zygote_protocol.FETCH, (zygote_protocol.LAYER, b"sealed"))
    os.close(directory)
    zygote.request(zygote_protocol.KILL, (zygote_protocol.ID, f"p{zygote.count}".encode()))
    zygote.request(zygote_protocol.DROP, (zygote_protocol.LAYER, b"sealed"))
    with pytest.raises(PodError, match="no layer sealed"):
        zygote.request(zygote_protocol.FETCH, (zygote_protocol.LAYER, b"sealed"))
    with pytest.raises(PodError, match="writes nothing"):
        zygote.request(zygote_protocol.SEAL, (zygote_protocol.ID, b"nobody"), (zygote_protocol.LAYER, b"x"))
    assert not list((zygote.state / zygote_protocol.MEMORY).iterdir())


def test_a_failed_creation_is_reported_to_the_first_client(zygote: ZygoteFixture) -> None:
    for more, what in (
        ((zygote_protocol.BIND, b"/no/such/place\0/usr"), "No such file"),
        ((zygote_protocol.ADDRESS, b"300.1"), ""),
    ):
        guest = zygote.connect(zygote.create(more)[0])
        op, call, fields = guest.receive()
        assert call == 0
        if what:
            assert op == protocol.FAIL
            assert protocol.number(fields, protocol.NUMBER) == errno.ENOENT
            assert what in protocol.data(fields, protocol.DATA).decode()
    with pytest.raises(PodError, match="exists already"):
        zygote.request(zygote_protocol.CREATE, (zygote_protocol.ID, b"p1"))
    zygote.request(zygote_protocol.KILL, (zygote_protocol.ID, b"never-was"))


def test_egress_sockets_come_with_hello(zygote: ZygoteFixture) -> None:
    listens: list[Given] = [
        (zygote_protocol.LISTEN, b"tcp 198.18.0.1 443"),
        (zygote_protocol.LISTEN, b"udp 127.0.0.1 53"),
    ]
    name, _ = zygote.create((zygote_protocol.ADDRESS, b"198.18.0.1"), *listens)
    for _ in range(2):
        guest = zygote.connect(name)
        _, fds, _, _ = socket.recv_fds(guest.sock, 1 << 16, 16)
        found = [socket.socket(fileno=fd) for fd in fds]
        assert [(one.type, one.getsockname()) for one in found] == [
            (socket.SOCK_STREAM, ("198.18.0.1", 443)),
            (socket.SOCK_DGRAM, ("127.0.0.1", 53)),
        ]
        for one in found:
            one.close()


def test_proc_1_shows_nothing_of_the_host(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    assert b"/" not in guest.sh("cat /proc/1/cmdline /proc/1/comm")
    assert guest.sh("ls /proc/1/fd; cat /proc/1/environ /proc/1/maps; readlink /proc/1/exe /proc/1/cwd") == b""
    assert guest.sh("kill -9 1; kill -9 -1; echo fine") in (b"fine\n", b"")
    assert guest.request(protocol.PING)[-1][0] == protocol.OK


def test_programs_get_the_highest_oom_score(zygote: ZygoteFixture) -> None:
    guest = zygote.pod((zygote_protocol.FLAGS, zygote_protocol.ADJUST_OOM_SCORE | zygote.flags))
    marked = "for i in 1 2 3 4 5 6 7 8 9; do grep -q 1000 /proc/$$/oom_score_adj && break; sleep 0.2; done"
    assert guest.sh(f"{marked}; cat /proc/self/oom_score_adj") == b"1000\n"  # soon after its start
    assert guest.sh("cat /proc/1/oom_score_adj") != b"1000\n"


def test_every_pod_dies_with_its_zygote(helper: Path, shared_zygote: ZygoteFixture) -> None:
    zygote = ZygoteFixture(helper)
    try:
        guest = zygote.pod()
        first = zygote.create()[1]
        pid = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)
        assert gone(guest)
    finally:
        zygote.end()


def test_hostile_files_do_not_block_the_guest_init(zygote: ZygoteFixture) -> None:
    guest = zygote.pod()
    guest.sh("rm /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group; rm /dev/ptmx; mkfifo /dev/ptmx")
    assert guest.run("true", given=((protocol.USER, b"ann"),))[-1][0] == protocol.FAIL
    assert guest.run("true", given=((protocol.ROWS, 3), (protocol.COLS, 3)))[-1][0] == protocol.FAIL
    assert guest.run("true", given=((protocol.USER, b"99999999999"),))[-1][0] == protocol.FAIL
    assert guest.request(protocol.OWN, (protocol.TIME, 1 << 62))[-1][0] == protocol.OK
    assert guest.request(protocol.PING)[-1][0] == protocol.OK


def test_random_frames_never_end_the_guest_init(zygote: ZygoteFixture) -> None:
    seed = int(os.environ.get("ETUDE_TEST_SEED", "1"))
    chance = random.Random(seed)
    name, _ = zygote.create()
    deadline = time.monotonic() + float(os.environ.get("ETUDE_TEST_FUZZ_S", "1"))
    while time.monotonic() < deadline:
        guest = zygote.connect(name)
        guest.sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            for _ in range(chance.randrange(1, 30)):
                guest.sock.sendall(random_frame(chance))
                while select.select([guest.sock], [], [], 0)[0] and guest.sock.recv(1 << 18):
                    pass
        guest.close()
    survivor = zygote.connect(name)
    assert survivor.receive()[0] == protocol.HELLO, f"seed {seed}"
    assert survivor.request(protocol.PING)[-1][0] == protocol.OK, f"seed {seed}"


def random_frame(chance: random.Random) -> bytes:
    """Return a mostly well-formed frame with odd fields, sometimes damaged. OWN is excluded: it may end the pod."""
    op = chance.choice([n for n in range(1, 17) if n != protocol.OWN] + [255, 0])
    fields: list[Given] = []
    for _ in range(chance.randrange(8)):
        key = chance.choice([*range(1, 26), 128, 255])
        long = b"/tmp/" + b"y" * 5000
        text = chance.choice([b"", b"/bin/true", b"/proc/self/mem", b"/work/x", b"a=b", b"1:2", b"\0", long])
        value: protocol.Value = (
            chance.choice([-1, 0, 1, 3, 1 << 20, 1 << 40, -(1 << 63)]) if key in range(6, 17) else text
        )
        fields.append((key, chance.randbytes(chance.randrange(12)) if chance.random() < 0.1 else value))
    data = bytearray(protocol.frame(op, chance.randrange(4), *fields))
    if chance.random() < 0.1:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        data[4] = 0 if data[4] == protocol.OWN else data[4]
    return bytes(data) if chance.random() < 0.95 else chance.randbytes(chance.randrange(60))


# ------------------------------------------------------------------------------------------------- building

ADVICE = "install a C compiler (gcc or clang), or `pip install ziglang`"


def test_a_second_process_uses_the_cached_build(helper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, _ = build.find_helper(tmp_path)
    assert first is not None
    built = first.stat()
    assert build.find_helper(tmp_path) == (first, "")
    assert first.stat() == built


def test_without_a_compiler_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiler, "find_spec", lambda name: None)
    reason = f"pods need a small program that could not be compiled (no C compiler): {ADVICE}"
    assert build.find_helper(tmp_path) == (None, reason)
    monkeypatch.setattr(probe, "_strongest", [])
    with pytest.raises(Unsupported) as refused:
        asyncio.run(probe.choose_backend("auto"))
    assert str(refused.value) == reason
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'protocol.h:1: error: out of ink' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert build.find_helper(tmp_path)[1].startswith("pods need a small program that could not be compiled (cc: protoc")
    broken.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nonsense >"$2"\n')
    assert build.find_helper(tmp_path)[0] is None
    assert not list((tmp_path / "cache/etude").iterdir())


def test_zig_compiles_where_there_is_no_other_compiler(
    helper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package `ziglang` stands in for the real one: it runs cc, by its full path."""
    if (cc := shutil.which("cc")) is None:
        pytest.skip("the stand-in needs cc")
    package = tmp_path / "ziglang"
    package.mkdir()
    (package / "__init__.py").write_text("")
    run = f"assert sys.argv[1] == 'cc'; os.execve({cc!r}, ['cc', *sys.argv[2:]], {dict(os.environ)!r})"
    (package / "__main__.py").write_text(f"import os, sys\n{run}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    found, why = build.find_helper(tmp_path)
    assert (found is not None, why) == (True, "")


def test_a_prebuilt_helper_is_used_without_a_compiler(
    helper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PREBUILT", helper)
    monkeypatch.setenv("PATH", "/nowhere")
    assert build.find_helper(tmp_path) == (helper, "")


@pytest.mark.slow
def test_a_wheel_holds_the_helper_and_is_tagged_for_the_platform(tmp_path: Path) -> None:
    source = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), "."]
    copy = tmp_path / "source"
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "base", "*.egg-info", "build")
    shutil.copytree(source, copy, ignore=ignored, symlinks=True)
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    program = tmp_path / "unpacked/etude/pods/runtime/native/zygote"
    program.chmod(0o755)
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("etude zygote")
