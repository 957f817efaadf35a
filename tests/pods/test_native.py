"""The compiled zygote and guest init behave as the Python ones: send both the same requests and compare the replies."""

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
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.pods.guest import protocol
from etude.pods.guest.client import connect_unix
from etude.pods.pod import PodError
from etude.pods.runtime import capabilities, linux, seccomp, zygote_protocol
from etude.pods.runtime.native import build
from etude.pods.runtime.zygote_client import ZygoteClient

FIRST_ID = 2_000_000_000
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
    """A zygote of one implementation, and pods created by raw requests."""

    def __init__(self, helper: Path | None) -> None:
        self.state = Path(tempfile.mkdtemp(prefix="etude-native-"))
        self.root = os.geteuid() == 0
        self.loop = asyncio.new_event_loop()
        self.client = ZygoteClient(self.state, helper)
        self.count = 0
        self.guests: list[GuestConnection] = []
        make_skeleton(self.state / "skeleton")
        if self.root:
            self.request(
                zygote_protocol.MAP,
                (zygote_protocol.LAYER, b"skeleton"),
                (zygote_protocol.PATH, b"skeleton"),
                *self.maps(),
            )

    def request(self, op: int, *fields: Given, descriptors: tuple[int, ...] = ()) -> tuple[protocol.Fields, list[int]]:
        return self.loop.run_until_complete(self.client.request(op, *fields, descriptors=descriptors))

    def maps(self) -> list[Given]:
        text = f"0 {FIRST_ID} 65536\n" if self.root else "0 0 1\n"
        return [(zygote_protocol.UIDMAP, text.encode()), (zygote_protocol.GIDMAP, text.encode())]

    def create(self, *more: Given, lower: bytes | None = None) -> tuple[str, int]:
        """Create a pod; return its name and the pid of its first process."""
        self.count += 1
        name = f"p{self.count}"
        directory = self.state / name
        directory.mkdir()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        handle = os.open(directory, os.O_PATH)
        listener.bind(f"/proc/self/fd/{handle}/agent.sock")
        listener.listen(16)
        os.close(handle)
        fields: list[Given] = [
            (zygote_protocol.ID, name.encode()),
            (zygote_protocol.LOWER, lower or (b"mapped/skeleton" if self.root else b"skeleton")),
            (zygote_protocol.SIZE, 64 << 20),
            *self.maps(),
            (zygote_protocol.OWNER, FIRST_ID if self.root else 0),
            (zygote_protocol.HOSTNAME, b"pod"),
            (zygote_protocol.WORKDIR, b"/work"),
            (zygote_protocol.CAPS, capabilities.mask()),
            (zygote_protocol.FILTER, seccomp.build_filter("own")),
            (zygote_protocol.BIND, b"/usr\0/usr"),
            *more,
        ]
        reply, _ = self.request(zygote_protocol.CREATE, *fields, descriptors=(listener.fileno(),))
        listener.close()
        return name, protocol.number(reply, zygote_protocol.PID)

    def connect(self, name: str) -> GuestConnection:
        self.guests.append(GuestConnection(connect_unix(str(self.state / name), "agent.sock")))
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


Zygotes = tuple[ZygoteFixture, ZygoteFixture]  # in Python, compiled


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
    found, why = build.find_helper(tmp_path_factory.mktemp("cache"))
    if found is None:
        pytest.skip(f"no compiled zygote: {why}")
    return found


@pytest.fixture(scope="module")
def both_zygotes(helper: Path) -> Iterator[Zygotes]:
    """The zygote in Python and the compiled one."""
    if not linux.SUPPORTED:
        pytest.skip(HOST + "not Linux, or another processor")
    pair: list[ZygoteFixture] = []
    try:
        for kind in (None, helper):
            zygote = ZygoteFixture(kind)
            pair.append(zygote)
            op, _, fields = zygote.connect(zygote.create()[0]).receive()
            if op != protocol.HELLO:
                pytest.skip(HOST + protocol.data(fields, protocol.DATA).decode("utf-8", "replace"))
        yield pair[0], pair[1]
    finally:
        for zygote in pair:
            zygote.end()


@pytest.fixture
def zygotes(both_zygotes: Zygotes) -> Iterator[Zygotes]:
    yield both_zygotes
    for zygote in both_zygotes:
        zygote.clear()


@pytest.fixture
def compiled(zygotes: Zygotes) -> ZygoteFixture:
    return zygotes[1]


# ------------------------------------------------------------------------------------------------- guest init


def words(*argv: str) -> tuple[Given, ...]:
    return tuple((protocol.ARG, word.encode()) for word in argv)


def commands(guest: GuestConnection) -> list[Any]:
    loop = "import os,sys; os.write(1, b'x' * 300000); os.write(2, b'y' * 10)"
    return [
        guest.run("/bin/sh", "-c", "echo out; echo err >&2; exit 3"),
        guest.run("true"),
        guest.run("true", env=(protocol.ENV, b"A=b")),  # without PATH: the default search path
        guest.run("true", env=(protocol.ENV, b"PATH=/nowhere:/etc/passwd")),
        guest.run("true", given=((protocol.ENV, b"PATH=/nowhere"),)),  # the last variable of a name wins
        guest.run(
            "sh",
            "-c",
            "env | sort",
            given=((protocol.ENV, b"B=1"), (protocol.ENV, b"novalue"), (protocol.ENV, b"C=x=y")),
        ),
        guest.run("/no/such"),
        guest.run("/etc/passwd"),
        guest.run("/work"),
        guest.run(""),
        guest.run("a\0b")[-1][1][protocol.NUMBER],
        guest.run()[-1][1][protocol.NUMBER],
        guest.run("pwd"),
        guest.run("pwd", given=((protocol.CWD, b"../tmp"),)),
        guest.run("pwd", given=((protocol.CWD, b"/no/where"),)),
        guest.run("pwd", given=((protocol.CWD, b"/etc/passwd"),)),
        guest.run("sh", "-c", "kill -9 $$"),
        guest.run("sh", "-c", "umask; ls /proc/self/fd; ps -o sid= -p $$ | grep -q $$ && echo leader"),
        guest.run("grep", "-E", "^(Sig(Blk|Ign|Cgt)|Cap|NoNew|Seccomp:|Groups|Uid)", "/proc/self/status"),
        guest.run("sh", "-c", "cat; echo done", given=((protocol.DATA, b"some input"),)),
        guest.run("cat"),
        guest.run("head", "-c", "100000", "/dev/zero", given=((protocol.LIMIT, 1000),)),
        guest.run("python3", "-c", loop, given=((protocol.LIMIT, 200_000),)),
        guest.run("head", "-c", "1000", "/dev/zero", given=((protocol.LIMIT, 1000),)),
        guest.run("sh", "-c", "echo before; sleep 20", given=((protocol.TIME, 150),)),
        guest.run("sh", "-c", "echo now; sleep 20 &"),  # a background process that holds the pipe is not waited for
        guest.request(protocol.PROCESSES),
        guest.request(protocol.KILLALL),
        guest.request(protocol.PROCESSES),
        guest.request(99),
        guest.request(protocol.PING),
    ]


def users(guest: GuestConnection) -> list[Any]:
    if os.geteuid():
        return []
    asked = ("ann", "1000", "ann:mail", "0:50", "7:9", "nobody-here", "ann:no-group", "root", "odd")
    rows = [guest.run("sh", "-c", "id -u; id -g; id -G", given=((protocol.USER, name.encode()),)) for name in asked]
    rows[-1] = [(op, {key: fields[key] for key in fields if key != protocol.DATA}) for op, fields in rows[-1]][:0]
    return [*rows, guest.run("id", "-u", given=((protocol.USER, b""),))]


def streams(guest: GuestConnection) -> list[Any]:
    job = (protocol.JOB, guest.send(protocol.SPAWN, *words("cat"), PATH, (protocol.FLAGS, protocol.KEEP_STDIN)))
    rows = [
        guest.request(protocol.INPUT, job, (protocol.DATA, b"one ")),
        guest.request(protocol.INPUT, job, (protocol.DATA, b"two")),
    ]
    rows += [
        guest.request(protocol.RESIZE, job, (protocol.ROWS, 5), (protocol.COLS, 9)),
        guest.request(protocol.SIGNAL, job, (protocol.NUMBER, 99)),
    ]
    rows += [guest.request(protocol.INPUT, job, (protocol.FLAGS, protocol.END)), guest.answer(job[1])]
    rows += [
        guest.request(protocol.INPUT, job, (protocol.DATA, b"late")),
        guest.request(protocol.SIGNAL, job, (protocol.NUMBER, 9)),
    ]
    job = (protocol.JOB, guest.send(protocol.SPAWN, *words("sleep", "60"), PATH, (protocol.FLAGS, protocol.KEEP_STDIN)))
    rows += [guest.request(protocol.SIGNAL, job, (protocol.NUMBER, signal.SIGTERM)), guest.answer(job[1])]
    script = "exec <&-; echo closed; sleep 60"
    job = (
        protocol.JOB,
        guest.send(protocol.SPAWN, *words("sh", "-c", script), PATH, (protocol.FLAGS, protocol.KEEP_STDIN)),
    )
    while guest.receive()[0] != protocol.OUT:
        pass
    time.sleep(0.1)
    rows += [guest.request(protocol.INPUT, job, (protocol.DATA, b"into nothing"))]
    return rows


def terminals(guest: GuestConnection) -> list[Any]:
    size = ((protocol.ROWS, 30), (protocol.COLS, 100))
    script = "stty size; tty; test -t 0 -a -t 1 -a -t 2 && echo all; echo hello >/dev/tty; read line; echo got $line"
    job = (protocol.JOB, guest.send(protocol.SPAWN, *words("sh", "-c", script), PATH, *size))
    rows = [guest.request(protocol.INPUT, job, (protocol.DATA, b"typed\n")), guest.answer(job[1])]
    script = "read line; stty size; read line; echo end; sleep 0.2"
    job = (protocol.JOB, guest.send(protocol.SPAWN, *words("sh", "-c", script), PATH, *size))
    rows += [
        guest.request(protocol.RESIZE, job, (protocol.ROWS, 7), (protocol.COLS, 8)),
        guest.request(protocol.INPUT, job, (protocol.DATA, b"\n")),
    ]
    time.sleep(0.2)
    rows += [guest.request(protocol.INPUT, job, (protocol.FLAGS, protocol.END)), guest.answer(job[1])]
    return [[(op, fields) for op, fields in row if op != protocol.OUT] + [echoed(row)] for row in rows]


def echoed(row: list[Frame]) -> Any:
    """Return the words of a terminal's output, sorted, because input may be echoed before or between them."""
    return sorted(b"".join(fields[protocol.DATA][0] for op, fields in row if op == protocol.OUT).split())


def files(guest: GuestConnection) -> list[Any]:
    def path(text: str) -> Given:
        return (protocol.PATH, text.encode())

    def write(name: str, data: bytes, *more: Given) -> list[Frame]:
        return guest.request(protocol.WRITE, path(name), (protocol.DATA, data), *more)

    guest.sh("mkfifo fifo; ln -s /etc loop; ln -s self self")
    guest.sh("mkdir -p d/e; touch d/z d/e/y; chmod 600 d/z; ln -s fifo d/l")
    truncate, append = (protocol.FLAGS, protocol.TRUNCATE), (protocol.FLAGS, protocol.APPEND)
    changes = [
        write("new/deep/file", b"hello", truncate, (protocol.MODE, 0o4751)),
        write("new/deep/file", b"XY", (protocol.OFFSET, 3)),
        write("new/deep/file", b"!", append),
        write("new/deep/file/below", b""),
        write("fifo", b"x"),
        write("/proc/sys/kernel/hostname", b"x"),
        write("/dev/null", b"x"),
        write("/work", b"x"),
        write("self", b"x"),
        write("new/at", b"x", (protocol.OFFSET, -1)),
        write("a" * 300, b"x"),
        write("/" + "b/" * 2100, b"x")[-1][1][protocol.NUMBER],
        write("", b"x"),
        write("a\0b", b"x"),
        guest.request(protocol.MKDIR, path("made/of/many"), (protocol.MODE, 0o1700)),
        guest.request(protocol.MKDIR, path("made/of/many")),
        guest.request(protocol.MKDIR, path("d/z")),
        guest.request(protocol.MKDIR, path("d/z/below")),
        guest.request(protocol.SYMLINK, path("links/one"), (protocol.DATA, b"../d/z")),
        guest.request(protocol.SYMLINK, path("links/one"), (protocol.DATA, b"../d/z"))[-1][1][protocol.NUMBER],
    ]
    reads = [
        *(
            guest.request(protocol.READ, path(name))
            for name in ("new/deep/file", "links/one", "d", "fifo", "missing", "self")
        ),
        *(
            guest.request(protocol.READ, path(f"/proc/{name}"))
            for name in ("self/mem", "1/environ", "self/exe", "version")
        ),
        *(
            guest.request(protocol.READ, path(name))
            for name in ("/dev/zero", "/proc/thread-self/status", "/proc/self/root/etc")
        ),
        guest.request(protocol.READ, path("new/deep/file"), (protocol.OFFSET, 2), (protocol.LIMIT, 2)),
        guest.request(protocol.READ, path("new/deep/file"), (protocol.OFFSET, 200)),
        guest.request(protocol.READ, path("new/deep/file"), (protocol.OFFSET, -5)),
        guest.request(protocol.READ, path("new/deep/file"), (protocol.LIMIT, -5)),
        *(guest.request(protocol.STAT, path(name)) for name in ("d/z", "d/", "/", "loop", "missing", "d/z/x", "fifo")),
        guest.request(protocol.STAT, path("new/deep/file")),
        *(guest.request(protocol.LIST, path(name)) for name in ("d", "loop", ".", "missing", "d/z")),
    ]
    guest.sh("mkdir -p t/u/v/w; touch t/1 t/u/2 t/u/v/3; ln -s /etc t/out; chmod 0 t/u/v t/u")
    guest.run("python3", "-c", "import os\nfor _ in range(1500): os.mkdir('deeper'); os.chdir('deeper')")
    names = ("d/z", "d/l", "t", "missing", "loop", "/etc/passwd/x", "deeper/", "made/of/many/")
    removes: list[Any] = [guest.request(protocol.REMOVE, path(name)) for name in names]
    removes.append(
        guest.request(protocol.REMOVE, path("/dev"))[-1][1][protocol.NUMBER]
    )  # the device that it stops at varies
    return [
        *changes,
        *reads,
        *removes,
        guest.request(protocol.LIST, path("/etc")),
        guest.request(protocol.LIST, path(".")),
    ]


@pytest.mark.parametrize("scenario", [commands, users, streams, terminals, files], ids=lambda one: one.__name__)
def test_both_guest_inits_reply_alike(zygotes: Zygotes, scenario: Callable[[GuestConnection], list[Any]]) -> None:
    said, answered = (scenario(zygote.pod()) for zygote in zygotes)
    for number, (expected, found) in enumerate(zip(said, answered, strict=True)):
        assert found == expected, f"answer {number} of {scenario.__name__}"


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
def test_a_protocol_violation_closes_only_its_own_connection(zygotes: Zygotes, bad: bytes) -> None:
    for zygote in zygotes:
        name, _ = zygote.create()
        good, evil = zygote.connect(name), zygote.connect(name)
        assert (good.receive()[0], evil.receive()[0]) == (protocol.HELLO, protocol.HELLO)
        evil.sock.sendall(protocol.frame(protocol.PING, 5) + bad)
        assert [evil.receive()[0], evil.receive()[0]] == [protocol.OK, -1]
        assert good.request(protocol.PING)[-1][0] == protocol.OK


def test_a_slow_reader_stalls_only_its_own_job_and_loses_nothing(zygotes: Zygotes) -> None:
    size = 32 << 20
    for zygote in zygotes:
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


def test_a_program_that_reads_late_gets_all_of_a_large_input(zygotes: Zygotes) -> None:
    for zygote in zygotes:
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
    zygotes: Zygotes,
) -> None:
    for zygote in zygotes:
        name, _ = zygote.create()
        owner, guest = zygote.connect(name), zygote.connect(name)
        owner.receive(), guest.receive()
        guest.send(protocol.SPAWN, *words("sleep", "50"), PATH)
        guest.receive()
        guest.close()
        deadline = time.monotonic() + 5
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


def test_a_program_that_closes_its_terminal_gets_no_hangup(compiled: ZygoteFixture) -> None:
    guest = compiled.pod()
    script = "exec <&- >&- 2>&-; sleep 0.1; echo back >/dev/tty; exit 5"
    call = guest.send(protocol.SPAWN, *words("sh", "-c", script), PATH, (protocol.ROWS, 3), (protocol.COLS, 80))
    *_, output, ended = guest.answer(call)
    assert output == (protocol.OUT, {protocol.DATA: [b"back\r\n"]})
    assert ended[1][protocol.CODE] == [struct.pack("<q", 5)]


def test_orphans_are_reaped(zygotes: Zygotes) -> None:
    for zygote in zygotes:
        guest = zygote.pod()
        guest.sh("for i in 1 2 3 4 5; do (sleep 0.05 &) ; done")
        deadline = time.monotonic() + 5
        while (left := guest.sh("ls -d /proc/[0-9]* | wc -l")) != b"4\n":  # the guest init, sh, ls and wc
            assert time.monotonic() < deadline, f"{left!r} processes are left"


# ------------------------------------------------------------------------------------------------- zygote


def test_writes_of_a_pod_can_be_sealed_fetched_and_stacked(zygotes: Zygotes) -> None:
    for zygote in zygotes:
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
        base = b"mapped/skeleton" if zygote.root else b"skeleton"
        child = zygote.connect(zygote.create((zygote_protocol.LOWER, base), lower=b"memory/sealed/u")[0])
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


def test_a_failed_creation_is_reported_to_the_first_client(zygotes: Zygotes) -> None:
    for zygote in zygotes:
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


def test_egress_sockets_come_with_hello(zygotes: Zygotes) -> None:
    for zygote in zygotes:
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


def test_proc_1_shows_nothing_of_the_host(compiled: ZygoteFixture) -> None:
    guest = compiled.pod()
    assert b"/" not in guest.sh("cat /proc/1/cmdline /proc/1/comm")
    assert guest.sh("ls /proc/1/fd; cat /proc/1/environ /proc/1/maps; readlink /proc/1/exe /proc/1/cwd") == b""
    assert guest.sh("kill -9 1; kill -9 -1; echo fine") in (b"fine\n", b"")
    assert guest.request(protocol.PING)[-1][0] == protocol.OK


def test_programs_get_the_highest_oom_score(compiled: ZygoteFixture) -> None:
    guest = compiled.pod((zygote_protocol.FLAGS, zygote_protocol.ADJUST_OOM_SCORE))
    marked = "for i in 1 2 3 4 5 6 7 8 9; do grep -q 1000 /proc/$$/oom_score_adj && break; sleep 0.2; done"
    assert guest.sh(f"{marked}; cat /proc/self/oom_score_adj") == b"1000\n"  # soon after its start
    assert guest.sh("cat /proc/1/oom_score_adj") != b"1000\n"


def test_every_pod_dies_with_its_zygote(helper: Path, zygotes: Zygotes) -> None:
    zygote = ZygoteFixture(helper)
    try:
        guest = zygote.pod()
        first = zygote.create()[1]
        pid = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGKILL)
        assert gone(guest)
    finally:
        zygote.end()


def test_hostile_files_do_not_block_the_guest_init(compiled: ZygoteFixture) -> None:
    guest = compiled.pod()
    guest.sh("rm /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group; rm /dev/ptmx; mkfifo /dev/ptmx")
    assert guest.run("true", given=((protocol.USER, b"ann"),))[-1][0] == protocol.FAIL
    assert guest.run("true", given=((protocol.ROWS, 3), (protocol.COLS, 3)))[-1][0] == protocol.FAIL
    assert guest.run("true", given=((protocol.USER, b"99999999999"),))[-1][0] == protocol.FAIL
    assert guest.request(protocol.OWN, (protocol.TIME, 1 << 62))[-1][0] == protocol.OK
    assert guest.request(protocol.PING)[-1][0] == protocol.OK


def test_random_frames_never_end_the_guest_init(compiled: ZygoteFixture) -> None:
    seed = int(os.environ.get("ETUDE_TEST_SEED", "1"))
    chance = random.Random(seed)
    name, _ = compiled.create()
    deadline = time.monotonic() + float(os.environ.get("ETUDE_TEST_FUZZ_S", "1"))
    while time.monotonic() < deadline:
        guest = compiled.connect(name)
        guest.sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            for _ in range(chance.randrange(1, 30)):
                guest.sock.sendall(random_frame(chance))
                while select.select([guest.sock], [], [], 0)[0] and guest.sock.recv(1 << 18):
                    pass
        guest.close()
    survivor = compiled.connect(name)
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


def test_a_second_process_uses_the_cached_build(helper: Path) -> None:
    assert build.find_helper(helper.parent) == (helper, "")
    assert [path.name for path in helper.parent.iterdir()] == [helper.name]


def test_without_a_compiler_the_reason_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "off")
    assert build.find_helper(tmp_path) == (None, "ETUDE_PODS_HELPER=off")
    monkeypatch.delenv(build.SWITCH)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_helper(tmp_path) == (None, "no C compiler (musl-gcc, cc, gcc, clang)")
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'protocol.h:1: error: out of ink' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert build.find_helper(tmp_path / "cache") == (None, "cc: protocol.h:1: error: out of ink")
    broken.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nonsense >"$2"\n')
    found, why = build.find_helper(tmp_path / "cache")
    assert found is None
    assert why.startswith("cc: ")
    assert not list((tmp_path / "cache").iterdir())
