"""The compiled keeper and agent answer as the Python ones do: the same requests to both, and the answers compared."""

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

from etude.pods import capabilities, linux, plan, seccomp, wire
from etude.pods.client import connect_unix
from etude.pods.keeping import KeeperLine
from etude.pods.native import build
from etude.pods.pod import PodError

FIRST_ID = 2_000_000_000
UNSTEADY = {wire.TIME, wire.UTIME, wire.STIME, wire.MAXRSS, wire.MTIME, wire.PID}  # differ from run to run
ENDS = (wire.OK, wire.FAIL, wire.EXITED, -1)
PATH = (wire.ENV, b"PATH=/usr/bin:/bin")
HOST = "namespace pods cannot be made here: "

Frame = tuple[int, dict[int, list[bytes]]]
Given = tuple[int, wire.Value]


class Talk:
    """A connection to an agent, spoken synchronously."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.splitter, self.calls = sock, wire.Splitter(), 0
        self.frames: list[tuple[int, int, wire.Fields]] = []
        self.held: list[tuple[int, int, wire.Fields]] = []  # frames of other calls than the one asked for
        sock.settimeout(20)

    def receive(self) -> tuple[int, int, wire.Fields]:
        """The next frame; op -1 at the end."""
        while not self.frames:
            try:
                data = self.sock.recv(1 << 18)
            except ConnectionError:
                data = b""
            if not data:
                return -1, 0, {}
            self.frames += self.splitter.feed(data)
        return self.frames.pop(0)

    def send(self, op: int, *fields: Given) -> int:
        self.calls += 1
        self.sock.sendall(wire.frame(op, self.calls, *fields))
        return self.calls

    def answer(self, call: int) -> list[Frame]:
        """All frames of an answer, without what differs from run to run; output of one stream as one frame."""
        found: list[Frame] = []
        self.frames, self.held = [*self.held, *self.frames], []
        while not found or found[-1][0] not in ENDS:
            op, number, fields = self.receive()
            if number not in (call, 0):
                self.held.append((op, number, fields))
                continue
            steady = {key: value for key, value in fields.items() if key not in UNSTEADY}
            before = next((kept for kind, kept in found if kind == op), None) if op in (wire.OUT, wire.ERR) else None
            if before is not None:
                before[wire.DATA] = [before[wire.DATA][0] + steady[wire.DATA][0]]
            else:
                found.append((op, steady))
        return sorted(found, key=lambda frame: frame[0])

    def ask(self, op: int, *fields: Given) -> list[Frame]:
        return self.answer(self.send(op, *fields))

    def run(self, *argv: str, given: tuple[Given, ...] = (), env: Given = PATH) -> list[Frame]:
        return self.ask(wire.SPAWN, *((wire.ARG, word.encode()) for word in argv), env, *given)

    def sh(self, script: str, *given: Given) -> bytes:
        """The standard output of a script."""
        return b"".join(f[wire.DATA][0] for op, f in self.run("/bin/sh", "-c", script, given=given) if op == wire.OUT)

    def close(self) -> None:
        self.sock.close()


class World:
    """A keeper of one kind, and pods made by hand."""

    def __init__(self, helper: Path | None) -> None:
        self.state = Path(tempfile.mkdtemp(prefix="etude-native-"))
        self.root = os.geteuid() == 0
        self.loop = asyncio.new_event_loop()
        self.line = KeeperLine(self.state, helper)
        self.count = 0
        self.talks: list[Talk] = []
        make_skeleton(self.state / "skeleton")
        if self.root:
            self.keep(plan.MAP, (plan.LAYER, b"skeleton"), (plan.PATH, b"skeleton"), *self.maps())

    def keep(self, op: int, *fields: Given, descriptors: tuple[int, ...] = ()) -> tuple[wire.Fields, list[int]]:
        return self.loop.run_until_complete(self.line.ask(op, *fields, descriptors=descriptors))

    def maps(self) -> list[Given]:
        text = f"0 {FIRST_ID} 65536\n" if self.root else "0 0 1\n"
        return [(plan.UIDMAP, text.encode()), (plan.GIDMAP, text.encode())]

    def create(self, *more: Given, lower: bytes | None = None) -> tuple[str, int]:
        """A new pod: its name, and the pid of its first process."""
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
            (plan.ID, name.encode()),
            (plan.LOWER, lower or (b"mapped/skeleton" if self.root else b"skeleton")),
            (plan.SIZE, 64 << 20),
            *self.maps(),
            (plan.OWNER, FIRST_ID if self.root else 0),
            (plan.HOSTNAME, b"pod"),
            (plan.WORKDIR, b"/work"),
            (plan.CAPS, capabilities.mask()),
            (plan.FILTER, seccomp.build_filter("own")),
            (plan.BIND, b"/usr\0/usr"),
            *more,
        ]
        reply, _ = self.keep(plan.CREATE, *fields, descriptors=(listener.fileno(),))
        listener.close()
        return name, wire.number(reply, plan.PID)

    def connect(self, name: str) -> Talk:
        self.talks.append(Talk(connect_unix(str(self.state / name), "agent.sock")))
        return self.talks[-1]

    def pod(self, *more: Given) -> Talk:
        talk = self.connect(self.create(*more)[0])
        assert talk.receive()[0] == wire.HELLO
        return talk

    def clear(self) -> None:
        """End every pod and conversation, as after a test."""
        while self.talks:
            self.talks.pop().close()
        for name in self.keep(plan.STATUS)[0].get(plan.ID, []):
            self.keep(plan.KILL, (plan.ID, name))

    def end(self) -> None:
        while self.talks:
            self.talks.pop().close()
        if self.line.sock is not None:
            with contextlib.suppress(PodError):  # it was killed
                self.keep(plan.STOP)

        async def close() -> None:
            self.line.close()

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
    found, why = build.find_helper(tmp_path_factory.mktemp("cache"))
    if found is None:
        pytest.skip(f"no compiled keeper: {why}")
    return found


@pytest.fixture(scope="module")
def two_worlds(helper: Path) -> Iterator[tuple[World, World]]:
    """Python's, then C's."""
    if not linux.SUPPORTED:
        pytest.skip(HOST + "not Linux, or another processor")
    pair: list[World] = []
    try:
        for kind in (None, helper):
            world = World(kind)
            pair.append(world)
            op, _, fields = world.connect(world.create()[0]).receive()
            if op != wire.HELLO:
                pytest.skip(HOST + wire.data(fields, wire.DATA).decode("utf-8", "replace"))
        yield pair[0], pair[1]
    finally:
        for world in pair:
            world.end()


@pytest.fixture
def worlds(two_worlds: tuple[World, World]) -> Iterator[tuple[World, World]]:
    yield two_worlds
    for world in two_worlds:
        world.clear()


@pytest.fixture
def compiled(worlds: tuple[World, World]) -> World:
    return worlds[1]


# ------------------------------------------------------------------------------------------------- both alike


def words(*argv: str) -> tuple[Given, ...]:
    return tuple((wire.ARG, word.encode()) for word in argv)


def commands(talk: Talk) -> list[Any]:
    loop = "import os,sys; os.write(1, b'x' * 300000); os.write(2, b'y' * 10)"
    return [
        talk.run("/bin/sh", "-c", "echo out; echo err >&2; exit 3"),
        talk.run("true"),
        talk.run("true", env=(wire.ENV, b"A=b")),  # no PATH: where programs usually are
        talk.run("true", env=(wire.ENV, b"PATH=/nowhere:/etc/passwd")),
        talk.run("true", given=((wire.ENV, b"PATH=/nowhere"),)),  # the last of a name counts
        talk.run("sh", "-c", "env | sort", given=((wire.ENV, b"B=1"), (wire.ENV, b"novalue"), (wire.ENV, b"C=x=y"))),
        talk.run("/no/such"),
        talk.run("/etc/passwd"),
        talk.run("/work"),
        talk.run(""),
        talk.run("a\0b")[-1][1][wire.NUMBER],
        talk.run()[-1][1][wire.NUMBER],
        talk.run("pwd"),
        talk.run("pwd", given=((wire.CWD, b"../tmp"),)),
        talk.run("pwd", given=((wire.CWD, b"/no/where"),)),
        talk.run("pwd", given=((wire.CWD, b"/etc/passwd"),)),
        talk.run("sh", "-c", "kill -9 $$"),
        talk.run("sh", "-c", "umask; ls /proc/self/fd; ps -o sid= -p $$ | grep -q $$ && echo leader"),
        talk.run("grep", "-E", "^(Sig(Blk|Ign|Cgt)|Cap|NoNew|Seccomp:|Groups|Uid)", "/proc/self/status"),
        talk.run("sh", "-c", "cat; echo done", given=((wire.DATA, b"some input"),)),
        talk.run("cat"),
        talk.run("head", "-c", "100000", "/dev/zero", given=((wire.LIMIT, 1000),)),
        talk.run("python3", "-c", loop, given=((wire.LIMIT, 200_000),)),
        talk.run("head", "-c", "1000", "/dev/zero", given=((wire.LIMIT, 1000),)),
        talk.run("sh", "-c", "echo before; sleep 20", given=((wire.TIME, 150),)),
        talk.run("sh", "-c", "echo now; sleep 20 &"),  # a survivor holds the pipe: nobody waits for it
        talk.ask(wire.PROCESSES),
        talk.ask(wire.KILLALL),
        talk.ask(wire.PROCESSES),
        talk.ask(99),
        talk.ask(wire.PING),
    ]


def users(talk: Talk) -> list[Any]:
    if os.geteuid():
        return []
    asked = ("ann", "1000", "ann:mail", "0:50", "7:9", "nobody-here", "ann:no-group", "root", "odd")
    rows = [talk.run("sh", "-c", "id -u; id -g; id -G", given=((wire.USER, name.encode()),)) for name in asked]
    rows[-1] = [(op, {key: fields[key] for key in fields if key != wire.DATA}) for op, fields in rows[-1]][:0]
    return [*rows, talk.run("id", "-u", given=((wire.USER, b""),))]


def streams(talk: Talk) -> list[Any]:
    job = (wire.JOB, talk.send(wire.SPAWN, *words("cat"), PATH, (wire.FLAGS, wire.KEEP_STDIN)))
    rows = [talk.ask(wire.INPUT, job, (wire.DATA, b"one ")), talk.ask(wire.INPUT, job, (wire.DATA, b"two"))]
    rows += [talk.ask(wire.RESIZE, job, (wire.ROWS, 5), (wire.COLS, 9)), talk.ask(wire.SIGNAL, job, (wire.NUMBER, 99))]
    rows += [talk.ask(wire.INPUT, job, (wire.FLAGS, wire.END)), talk.answer(job[1])]
    rows += [talk.ask(wire.INPUT, job, (wire.DATA, b"late")), talk.ask(wire.SIGNAL, job, (wire.NUMBER, 9))]
    job = (wire.JOB, talk.send(wire.SPAWN, *words("sleep", "60"), PATH, (wire.FLAGS, wire.KEEP_STDIN)))
    rows += [talk.ask(wire.SIGNAL, job, (wire.NUMBER, signal.SIGTERM)), talk.answer(job[1])]
    script = "exec <&-; echo closed; sleep 60"
    job = (wire.JOB, talk.send(wire.SPAWN, *words("sh", "-c", script), PATH, (wire.FLAGS, wire.KEEP_STDIN)))
    while talk.receive()[0] != wire.OUT:
        pass
    time.sleep(0.1)
    rows += [talk.ask(wire.INPUT, job, (wire.DATA, b"into nothing"))]
    return rows


def terminals(talk: Talk) -> list[Any]:
    size = ((wire.ROWS, 30), (wire.COLS, 100))
    script = "stty size; tty; test -t 0 -a -t 1 -a -t 2 && echo all; echo hello >/dev/tty; read line; echo got $line"
    job = (wire.JOB, talk.send(wire.SPAWN, *words("sh", "-c", script), PATH, *size))
    rows = [talk.ask(wire.INPUT, job, (wire.DATA, b"typed\n")), talk.answer(job[1])]
    script = "read line; stty size; read line; echo end; sleep 0.2"
    job = (wire.JOB, talk.send(wire.SPAWN, *words("sh", "-c", script), PATH, *size))
    rows += [talk.ask(wire.RESIZE, job, (wire.ROWS, 7), (wire.COLS, 8)), talk.ask(wire.INPUT, job, (wire.DATA, b"\n"))]
    time.sleep(0.2)
    rows += [talk.ask(wire.INPUT, job, (wire.FLAGS, wire.END)), talk.answer(job[1])]
    return [[(op, fields) for op, fields in row if op != wire.OUT] + [echoed(row)] for row in rows]


def echoed(row: list[Frame]) -> Any:
    """The lines of a terminal; what was typed may be echoed before or between them."""
    return sorted(b"".join(fields[wire.DATA][0] for op, fields in row if op == wire.OUT).split())


def files(talk: Talk) -> list[Any]:
    def path(text: str) -> Given:
        return (wire.PATH, text.encode())

    def write(name: str, data: bytes, *more: Given) -> list[Frame]:
        return talk.ask(wire.WRITE, path(name), (wire.DATA, data), *more)

    talk.sh("mkfifo fifo; ln -s /etc loop; ln -s self self")
    talk.sh("mkdir -p d/e; touch d/z d/e/y; chmod 600 d/z; ln -s fifo d/l")
    truncate, append = (wire.FLAGS, wire.TRUNCATE), (wire.FLAGS, wire.APPEND)
    changes = [
        write("new/deep/file", b"hello", truncate, (wire.MODE, 0o4751)),
        write("new/deep/file", b"XY", (wire.OFFSET, 3)),
        write("new/deep/file", b"!", append),
        write("new/deep/file/below", b""),
        write("fifo", b"x"),
        write("/proc/sys/kernel/hostname", b"x"),
        write("/dev/null", b"x"),
        write("/work", b"x"),
        write("self", b"x"),
        write("new/at", b"x", (wire.OFFSET, -1)),
        write("a" * 300, b"x"),
        write("/" + "b/" * 2100, b"x")[-1][1][wire.NUMBER],
        write("", b"x"),
        write("a\0b", b"x"),
        talk.ask(wire.MKDIR, path("made/of/many"), (wire.MODE, 0o1700)),
        talk.ask(wire.MKDIR, path("made/of/many")),
        talk.ask(wire.MKDIR, path("d/z")),
        talk.ask(wire.MKDIR, path("d/z/below")),
        talk.ask(wire.SYMLINK, path("links/one"), (wire.DATA, b"../d/z")),
        talk.ask(wire.SYMLINK, path("links/one"), (wire.DATA, b"../d/z"))[-1][1][wire.NUMBER],
    ]
    reads = [
        *(talk.ask(wire.READ, path(name)) for name in ("new/deep/file", "links/one", "d", "fifo", "missing", "self")),
        *(talk.ask(wire.READ, path(f"/proc/{name}")) for name in ("self/mem", "1/environ", "self/exe", "version")),
        *(talk.ask(wire.READ, path(name)) for name in ("/dev/zero", "/proc/thread-self/status", "/proc/self/root/etc")),
        talk.ask(wire.READ, path("new/deep/file"), (wire.OFFSET, 2), (wire.LIMIT, 2)),
        talk.ask(wire.READ, path("new/deep/file"), (wire.OFFSET, 200)),
        talk.ask(wire.READ, path("new/deep/file"), (wire.OFFSET, -5)),
        talk.ask(wire.READ, path("new/deep/file"), (wire.LIMIT, -5)),
        *(talk.ask(wire.STAT, path(name)) for name in ("d/z", "d/", "/", "loop", "missing", "d/z/x", "fifo")),
        talk.ask(wire.STAT, path("new/deep/file")),
        *(talk.ask(wire.LIST, path(name)) for name in ("d", "loop", ".", "missing", "d/z")),
    ]
    talk.sh("mkdir -p t/u/v/w; touch t/1 t/u/2 t/u/v/3; ln -s /etc t/out; chmod 0 t/u/v t/u")
    talk.run("python3", "-c", "import os\nfor _ in range(1500): os.mkdir('deeper'); os.chdir('deeper')")
    names = ("d/z", "d/l", "t", "missing", "loop", "/etc/passwd/x", "deeper/", "made/of/many/")
    removes: list[Any] = [talk.ask(wire.REMOVE, path(name)) for name in names]
    removes.append(talk.ask(wire.REMOVE, path("/dev"))[-1][1][wire.NUMBER])  # which device it stops at is chance
    return [*changes, *reads, *removes, talk.ask(wire.LIST, path("/etc")), talk.ask(wire.LIST, path("."))]


@pytest.mark.parametrize("scenario", [commands, users, streams, terminals, files], ids=lambda one: one.__name__)
def test_both_agents_answer_alike(worlds: tuple[World, World], scenario: Callable[[Talk], list[Any]]) -> None:
    said, answered = (scenario(world.pod()) for world in worlds)
    for number, (expected, found) in enumerate(zip(said, answered, strict=True)):
        assert found == expected, f"answer {number} of {scenario.__name__}"


@pytest.mark.parametrize(
    "bad",
    [
        struct.pack("<IB", 1, 1),  # too short
        struct.pack("<I", wire.MAX_FRAME + 1),
        struct.pack("<IBIBI", 10, wire.PING, 1, wire.DATA, 6),  # a field longer than its frame
        struct.pack("<IBIB", 6, wire.PING, 1, wire.DATA),  # a field cut off
        wire.frame(wire.SPAWN, 1, (wire.ARG, b"true"), (wire.FLAGS, b"x")),  # not a number
        wire.frame(wire.OWN, 1, (wire.TIME, b"")),
    ],
)
def test_who_does_not_speak_the_protocol_is_cut_off_and_nobody_else(worlds: tuple[World, World], bad: bytes) -> None:
    for world in worlds:
        name, _ = world.create()
        good, evil = world.connect(name), world.connect(name)
        assert (good.receive()[0], evil.receive()[0]) == (wire.HELLO, wire.HELLO)
        evil.sock.sendall(wire.frame(wire.PING, 5) + bad)
        assert [evil.receive()[0], evil.receive()[0]] == [wire.OK, -1]
        assert good.ask(wire.PING)[-1][0] == wire.OK


def test_a_slow_reader_stops_its_own_job_and_loses_nothing(worlds: tuple[World, World]) -> None:
    size = 32 << 20
    for world in worlds:
        name, pid = world.create()
        slow, other = world.connect(name), world.connect(name)
        slow.receive(), other.receive()
        slow.send(wire.SPAWN, *words("head", "-c", str(size), "/dev/zero"), PATH)
        time.sleep(0.5)
        assert other.ask(wire.PROCESSES)[-1][1][wire.SIZE] == [struct.pack("<q", 1)], "it stands, and waits for us"
        status = Path(f"/proc/{pid}/status").read_text()
        resident = int(status.split("VmRSS:")[1].split()[0]) << 10
        assert resident < 32 << 20
        got = 0
        while (frame := slow.receive())[0] != wire.EXITED:
            got += len(wire.data(frame[2], wire.DATA))
        assert got == size


def test_a_program_that_does_not_read_gets_all_of_a_large_input_in_the_end(worlds: tuple[World, World]) -> None:
    for world in worlds:
        talk = world.pod()
        script = "sleep 0.5; wc -c"
        call = talk.send(wire.SPAWN, *words("sh", "-c", script), PATH, (wire.FLAGS, wire.KEEP_STDIN))
        for _ in range(40):
            talk.sock.sendall(wire.frame(wire.INPUT, 500, (wire.JOB, call), (wire.DATA, bytes(wire.CHUNK))))
        talk.sock.sendall(wire.frame(wire.INPUT, 501, (wire.JOB, call), (wire.FLAGS, wire.END)))
        assert [f[wire.DATA] for op, f in talk.answer(call) if op == wire.OUT] == [[b"%d\n" % (40 * wire.CHUNK)]]


def gone(talk: Talk, seconds: float = 5) -> bool:
    talk.sock.settimeout(seconds)
    return talk.receive()[0] == -1


def test_a_pod_ends_with_its_owner_or_its_time_and_a_job_with_its_connection(worlds: tuple[World, World]) -> None:
    for world in worlds:
        name, _ = world.create()
        owner, guest = world.connect(name), world.connect(name)
        owner.receive(), guest.receive()
        guest.send(wire.SPAWN, *words("sleep", "50"), PATH)
        guest.receive()
        guest.close()
        deadline = time.monotonic() + 5
        while owner.ask(wire.PROCESSES)[-1][1][wire.SIZE] != [bytes(8)]:
            assert time.monotonic() < deadline, "the job of a closed connection goes on"
        assert owner.ask(wire.OWN, (wire.FLAGS, wire.ATTACHED))[-1][0] == wire.OK
        watcher = world.connect(name)
        watcher.receive()
        owner.close()
        assert gone(watcher)
        brief = world.pod()
        brief.ask(wire.OWN, (wire.TIME, 100))
        assert gone(brief)


def test_a_program_that_leaves_its_terminal_is_not_hung_up_on(compiled: World) -> None:
    talk = compiled.pod()
    script = "exec <&- >&- 2>&-; sleep 0.1; echo back >/dev/tty; exit 5"
    call = talk.send(wire.SPAWN, *words("sh", "-c", script), PATH, (wire.ROWS, 3), (wire.COLS, 80))
    *_, output, ended = talk.answer(call)
    assert output == (wire.OUT, {wire.DATA: [b"back\r\n"]})
    assert ended[1][wire.CODE] == [struct.pack("<q", 5)]


def test_orphans_are_reaped(worlds: tuple[World, World]) -> None:
    for world in worlds:
        talk = world.pod()
        talk.sh("for i in 1 2 3 4 5; do (sleep 0.05 &) ; done")
        deadline = time.monotonic() + 5
        while (left := talk.sh("ls -d /proc/[0-9]* | wc -l")) != b"4\n":  # the agent, sh, ls and wc
            assert time.monotonic() < deadline, f"{left!r} processes are left"


# ------------------------------------------------------------------------------------------------- the keeper


def test_what_a_pod_wrote_can_be_sealed_fetched_and_stacked(worlds: tuple[World, World]) -> None:
    for world in worlds:
        name, _ = world.create()
        talk = world.connect(name)
        talk.receive()
        talk.ask(wire.WRITE, (wire.PATH, b"kept"), (wire.DATA, b"words"))
        _, (directory,) = world.keep(plan.FETCH, (plan.ID, name.encode()))
        assert os.listdir(f"/proc/self/fd/{directory}") == ["work"]
        os.close(directory)
        world.keep(plan.SEAL, (plan.ID, name.encode()), (plan.LAYER, b"sealed"))
        assert gone(talk)
        reply, _ = world.keep(plan.STATUS)
        assert name.encode() not in reply.get(plan.ID, [])
        assert reply[plan.LAYER] == [b"sealed"]
        base = b"mapped/skeleton" if world.root else b"skeleton"
        child = world.connect(world.create((plan.LOWER, base), lower=b"memory/sealed/u")[0])
        assert child.receive()[0] == wire.HELLO
        assert child.sh("cat kept") == b"words"
        child.close()
        _, (directory,) = world.keep(plan.FETCH, (plan.LAYER, b"sealed"))
        os.close(directory)
        world.keep(plan.KILL, (plan.ID, f"p{world.count}".encode()))
        world.keep(plan.DROP, (plan.LAYER, b"sealed"))
        with pytest.raises(PodError, match="no layer sealed"):
            world.keep(plan.FETCH, (plan.LAYER, b"sealed"))
        with pytest.raises(PodError, match="writes nothing"):
            world.keep(plan.SEAL, (plan.ID, b"nobody"), (plan.LAYER, b"x"))
        assert not list((world.state / plan.MEMORY).iterdir())


def test_a_pod_that_cannot_be_made_says_why_to_who_connects(worlds: tuple[World, World]) -> None:
    for world in worlds:
        for more, what in (((plan.BIND, b"/no/such/place\0/usr"), "No such file"), ((plan.ADDRESS, b"300.1"), "")):
            talk = world.connect(world.create(more)[0])
            op, call, fields = talk.receive()
            assert call == 0
            if what:
                assert op == wire.FAIL
                assert wire.number(fields, wire.NUMBER) == errno.ENOENT
                assert what in wire.data(fields, wire.DATA).decode()
        with pytest.raises(PodError, match="exists already"):
            world.keep(plan.CREATE, (plan.ID, b"p1"))
        world.keep(plan.KILL, (plan.ID, b"never-was"))


def test_descriptors_for_egress_come_with_the_greeting(worlds: tuple[World, World]) -> None:
    for world in worlds:
        listens: list[Given] = [(plan.LISTEN, b"tcp 198.18.0.1 443"), (plan.LISTEN, b"udp 127.0.0.1 53")]
        name, _ = world.create((plan.ADDRESS, b"198.18.0.1"), *listens)
        for _ in range(2):
            talk = world.connect(name)
            _, fds, _, _ = socket.recv_fds(talk.sock, 1 << 16, 16)
            found = [socket.socket(fileno=fd) for fd in fds]
            assert [(one.type, one.getsockname()) for one in found] == [
                (socket.SOCK_STREAM, ("198.18.0.1", 443)),
                (socket.SOCK_DGRAM, ("127.0.0.1", 53)),
            ]
            for one in found:
                one.close()


def test_nothing_of_the_host_is_seen_through_the_first_process(compiled: World) -> None:
    talk = compiled.pod()
    assert b"/" not in talk.sh("cat /proc/1/cmdline /proc/1/comm")
    assert talk.sh("ls /proc/1/fd; cat /proc/1/environ /proc/1/maps; readlink /proc/1/exe /proc/1/cwd") == b""
    assert talk.sh("kill -9 1; kill -9 -1; echo fine") in (b"fine\n", b"")
    assert talk.ask(wire.PING)[-1][0] == wire.OK


def test_programs_are_marked_for_the_kernel_to_kill_first(compiled: World) -> None:
    talk = compiled.pod((plan.FLAGS, plan.MARK_CHILDREN))
    marked = "for i in 1 2 3 4 5 6 7 8 9; do grep -q 1000 /proc/$$/oom_score_adj && break; sleep 0.2; done"
    assert talk.sh(f"{marked}; cat /proc/self/oom_score_adj") == b"1000\n"  # soon after its start
    assert talk.sh("cat /proc/1/oom_score_adj") != b"1000\n"


def test_every_pod_dies_with_its_keeper(helper: Path, worlds: tuple[World, World]) -> None:
    world = World(helper)
    try:
        talk = world.pod()
        first = world.create()[1]
        keeper = int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(keeper, signal.SIGKILL)
        assert gone(talk)
    finally:
        world.end()


def test_hostile_files_do_not_stop_the_agent(compiled: World) -> None:
    talk = compiled.pod()
    talk.sh("rm /etc/passwd /etc/group; mkfifo /etc/passwd /etc/group; rm /dev/ptmx; mkfifo /dev/ptmx")
    assert talk.run("true", given=((wire.USER, b"ann"),))[-1][0] == wire.FAIL
    assert talk.run("true", given=((wire.ROWS, 3), (wire.COLS, 3)))[-1][0] == wire.FAIL
    assert talk.run("true", given=((wire.USER, b"99999999999"),))[-1][0] == wire.FAIL
    assert talk.ask(wire.OWN, (wire.TIME, 1 << 62))[-1][0] == wire.OK
    assert talk.ask(wire.PING)[-1][0] == wire.OK


def test_random_frames_never_end_the_agent(compiled: World) -> None:
    seed = int(os.environ.get("ETUDE_TEST_SEED", "1"))
    chance = random.Random(seed)
    name, _ = compiled.create()
    deadline = time.monotonic() + float(os.environ.get("ETUDE_TEST_FUZZ_S", "1"))
    while time.monotonic() < deadline:
        talk = compiled.connect(name)
        talk.sock.settimeout(10)
        with contextlib.suppress(ConnectionError):
            for _ in range(chance.randrange(1, 30)):
                talk.sock.sendall(random_frame(chance))
                while select.select([talk.sock], [], [], 0)[0] and talk.sock.recv(1 << 18):
                    pass
        talk.close()
    survivor = compiled.connect(name)
    assert survivor.receive()[0] == wire.HELLO, f"seed {seed}"
    assert survivor.ask(wire.PING)[-1][0] == wire.OK, f"seed {seed}"


def random_frame(chance: random.Random) -> bytes:
    """Mostly well-formed frames with odd fields, some of them damaged. OWN is left out: it may end the pod rightly."""
    op = chance.choice([n for n in range(1, 17) if n != wire.OWN] + [255, 0])
    fields: list[Given] = []
    for _ in range(chance.randrange(8)):
        key = chance.choice([*range(1, 26), 128, 255])
        long = b"/tmp/" + b"y" * 5000
        text = chance.choice([b"", b"/bin/true", b"/proc/self/mem", b"/work/x", b"a=b", b"1:2", b"\0", long])
        value: wire.Value = chance.choice([-1, 0, 1, 3, 1 << 20, 1 << 40, -(1 << 63)]) if key in range(6, 17) else text
        fields.append((key, chance.randbytes(chance.randrange(12)) if chance.random() < 0.1 else value))
    data = bytearray(wire.frame(op, chance.randrange(4), *fields))
    if chance.random() < 0.1:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        data[4] = 0 if data[4] == wire.OWN else data[4]
    return bytes(data) if chance.random() < 0.95 else chance.randbytes(chance.randrange(60))


# ------------------------------------------------------------------------------------------------- building


def test_a_second_process_finds_what_the_first_built(helper: Path) -> None:
    assert build.find_helper(helper.parent) == (helper, "")
    assert [path.name for path in helper.parent.iterdir()] == [helper.name]


def test_without_a_compiler_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(build.SWITCH, "off")
    assert build.find_helper(tmp_path) == (None, "ETUDE_PODS_HELPER=off")
    monkeypatch.delenv(build.SWITCH)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.find_helper(tmp_path) == (None, "no C compiler (musl-gcc, cc, gcc, clang)")
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'wire.h:1: error: out of ink' >&2\nexit 1\n")
    broken.chmod(0o755)
    assert build.find_helper(tmp_path / "cache") == (None, "cc: wire.h:1: error: out of ink")
    broken.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho nonsense >"$2"\n')
    found, why = build.find_helper(tmp_path / "cache")
    assert found is None
    assert why.startswith("cc: ")
    assert not list((tmp_path / "cache").iterdir())
