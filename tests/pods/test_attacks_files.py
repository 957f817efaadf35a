"""Attacks through files: paths that lead outside, trees that harm their reader, files with false sizes."""

import asyncio
import contextlib
import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.pods.fleet import open_host
from etude.pods.pod import Limits, Pod, PodError
from etude.pods.runtime.probe import probe
from tests.pods.attacking import run_in_pod, well

SECRET = "a secret of the host"
WINDOWS = (  # procfs links that lead outside
    *("/proc/self/root{}", "/proc/1/root{}", "/proc/1/cwd{}", "/proc/self/cwd{}", "/proc/1/task/1/root{}"),
    *("/proc/thread-self/root{}", "/../../../../../../..{}", "a/../../../../../..{}", "link{}", "//{}"),
)


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A new directory of the host that pods see, with a socket and a FIFO that every user may use, and a file."""
    for parent in (Path("/opt"), Path("/usr/local")):
        if os.access(parent, os.W_OK):
            break
    else:
        pytest.skip("this user cannot write to a directory that pods see")
    directory = Path(tempfile.mkdtemp(prefix="etude-test-", dir=parent))
    directory.chmod(0o755)
    (directory / "file").write_text("words")
    os.mkfifo(directory / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / "socket"))
        server.listen()
        for name, mode in (("file", 0o644), ("fifo", 0o666), ("socket", 0o777)):
            (directory / name).chmod(mode)
        yield directory
    shutil.rmtree(directory)


def test_sockets_and_fifos_of_shared_directories_lead_nowhere(state: Path, shared_directory: Path) -> None:
    reach = """if True:
        import os, socket, sys
        os.chdir(sys.argv[1])
        print(open("file").read(), end=" ")
        try:
            socket.socket(socket.AF_UNIX).connect("socket")
        except OSError as error:
            print(type(error).__name__, end=" ")
        try:
            os.write(os.open("fifo", os.O_WRONLY | os.O_NONBLOCK), b"stolen")
        except OSError as error:
            print(error.errno)
    """

    async def act(pod: Pod) -> None:
        reader = os.open(shared_directory / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        try:
            result = await pod.exec(["python3", "-c", reach, str(shared_directory)], timeout=10)
            assert result.stdout.split()[:2] == ["words", "ConnectionRefusedError"], result
            assert os.read(reader, 10) == b""
        finally:
            os.close(reader)

    run_in_pod(state, act)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems on the host")
def test_a_shared_directory_that_cannot_be_a_layer_is_mounted_as_it_is(state: Path, shared_directory: Path) -> None:
    """An overlay over an overlay is as deep as the kernel stacks them. The probe says what is weaker."""
    lowest, inner, outer = (shared_directory / name for name in ("lowest", "inner", "outer"))
    first, second = (shared_directory / name for name in ("first", "second"))  # without an upper, two layers are needed
    for directory in (lowest, inner, outer, first, second):
        directory.mkdir()
    (lowest / "file").write_text("words")
    mounted: list[Path] = []
    try:
        for lower, empty, target in ((lowest, first, inner), (inner, second, outer)):
            options = f"lowerdir={lower}:{empty}"
            subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(target)], check=True)
            mounted.append(target)

        async def act(pod: Pod) -> None:
            result = await pod.exec(f"cat {outer}/file && touch {outer}/new", timeout=10)
            assert result.stdout == "words", result
            assert "Read-only file system" in result.stderr, result

        run_in_pod(state, act)
        result = asyncio.run(probe("namespace"))
        assert result.capabilities is not None, result
        assert any(str(outer) in note and "sockets" in note for note in result.capabilities.notes), result
    finally:
        for target in reversed(mounted):
            subprocess.run(["umount", str(target)], check=True)


def test_a_pod_does_not_see_what_others_do_in_shared_directories(state: Path, shared_directory: Path) -> None:
    watch = """if True:
        import ctypes, os, sys
        libc = ctypes.CDLL(None)
        queue = libc.inotify_init1(os.O_NONBLOCK)
        assert libc.inotify_add_watch(queue, sys.argv[1].encode(), 0xFFF) > 0
        def seen():
            try:
                return len(os.read(queue, 65536))
            except BlockingIOError:
                return 0
        print("watching", flush=True)
        sys.stdin.readline()
        others = seen()
        open(sys.argv[1] + "/file").close()
        print(others, seen() > 0, flush=True)
    """

    async def main() -> None:
        host = await open_host("namespace", state)
        try:
            watcher, other = await host.create(), await host.create()
            job = await watcher.spawn(["python3", "-c", watch, str(shared_directory)])
            output = job.output()
            assert (await anext(output))[1] == b"watching\n"
            (shared_directory / "file").read_text()
            assert (await other.exec(f"cat {shared_directory}/file")).stdout == "words"
            await job.write(b"\n")
            assert (await anext(output))[1] == b"0 True\n"
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(main())


@pytest.mark.parametrize("window", WINDOWS)
def test_no_file_request_reaches_a_file_of_the_host(window: str, state: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.write_text(SECRET)

    async def act(pod: Pod) -> None:
        await pod.exec("mkdir a; ln -s / link")
        path = window.format(hidden)
        calls = (pod.read(path), pod.stat(path), pod.list(os.path.dirname(path)), pod.download(path, tmp_path / "out"))
        for call in calls:
            with pytest.raises(PodError):
                await call
        with contextlib.suppress(PodError):
            await pod.write(path, "changed")  # may create such a file inside
        with contextlib.suppress(PodError):
            await pod.make_directory(os.path.dirname(path) + "/made")
        with contextlib.suppress(PodError):
            await pod.upload(hidden, path + ".up")
        with contextlib.suppress(PodError):
            await pod.remove(os.path.dirname(path))
        assert hidden.read_text() == SECRET
        assert os.listdir(tmp_path) == ["hidden"]
        assert await well(pod) == "well"

    run_in_pod(state, act)


def test_the_guest_inits_memory_and_descriptors_cannot_be_read(state: Path, tmp_path: Path) -> None:
    async def act(pod: Pod) -> None:
        await pod.exec("ln -s /proc/self/mem m; ln -s /proc/self/environ e; ln -s /proc/self/fd f; ln -s /proc/1 one")
        names = ["mem", "environ", "maps", "pagemap", "fd/0", "fd/1", "fd/2", "fd/3", "fd/4", "fdinfo/3", "cwd", "exe"]
        paths = [f"/proc/{who}/{name}" for who in ("self", "1", "thread-self") for name in names]
        for path in [*paths, "m", "e", "f/0", "f/2", "f/3", "one/mem", "one/environ", "one/fd/2"]:
            for call in (pod.read(path), pod.write(path, "x"), pod.write(path, "x", append=True)):
                with pytest.raises(PodError):
                    await asyncio.wait_for(call, 60)
        for path in ("/proc/self/oom_score_adj", "/proc/1/comm", "/proc/self/attr/current", "/proc/sys/kernel/tainted"):
            with pytest.raises(PodError):
                await pod.write(path, "0")
        for path in ("/proc", "/proc/self", "/dev/null", "/usr/bin"):
            with pytest.raises(PodError):
                await pod.remove(path)
        assert await well(pod) == "well"

    run_in_pod(state, act)


def test_proc_1_contains_no_path_of_the_host(state: Path) -> None:
    async def act(pod: Pod) -> None:
        for directory in ("/proc/self/fd", "/proc/1/fd", "/proc/self"):
            with contextlib.suppress(PodError):
                for info in await pod.list(directory):
                    assert str(state) not in info.target, info

    run_in_pod(state, act)


HOSTILE = r"""
import os, socket, sys
os.makedirs("tree/sub"); os.chdir("tree")
for name in (b"new\nline", b"\xff\xfe", b"-rf", b"...", b"a\\b", b"\x1b[2J", b" ", b"x" * 255, "\u202egpj".encode()):
    open(name, "wb").write(b"content")
os.symlink("/etc/passwd", "passwd"); os.symlink("../../../../../../../../etc", "up"); os.symlink("/", "root")
os.symlink("loop", "loop"); os.symlink("x" * 4000, "long")
os.mkfifo("fifo"); s = socket.socket(socket.AF_UNIX); s.bind("socket")
open("suid", "w").close(); os.chmod("suid", 0o6777); os.mkdir("closed", 0o000)
open("sub/file", "w").write("fine")
"""


def test_a_hostile_tree_is_downloaded_without_harm(state: Path, tmp_path: Path) -> None:
    async def act(pod: Pod) -> None:
        assert (await pod.exec(["python3", "-c", HOSTILE])).ok
        target = tmp_path / "out"
        await pod.download("tree", target)
        found = {os.path.relpath(os.path.join(d, n), target) for d, ds, fs in os.walk(target) for n in (*ds, *fs)}
        assert {"passwd", "up", "root", "loop", "sub/file", "suid", "closed"} <= found
        assert not {"fifo", "socket"} & found
        for name in found:
            info = os.lstat(target / name)
            assert stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode) or stat.S_ISLNK(info.st_mode)
            assert stat.S_ISLNK(info.st_mode) or not info.st_mode & 0o7000
        assert os.readlink(target / "passwd") == "/etc/passwd"  # a link is copied as a link
        assert os.listdir(tmp_path) == ["out"]

    run_in_pod(state, act)


def test_a_tree_that_changes_during_the_copy_writes_nothing_outside(state: Path, tmp_path: Path) -> None:
    race = (
        "import os\nos.makedirs('t/d', exist_ok=True)\nopen('t/d/f', 'w').write('x')\n"
        "open('ready', 'w').close()\n"
        "def attempt(act, *paths):\n    try: act(*paths)\n    except OSError: pass\n"
        "while True:\n    attempt(os.rename, 't/d', 't/e'); attempt(os.symlink, '/etc', 't/d')\n"
        "    attempt(os.unlink, 't/d'); attempt(os.rename, 't/e', 't/d')\n"
    )

    async def act(pod: Pod) -> None:
        job = await pod.spawn(["python3", "-c", race])
        while not (await pod.exec("test -e ready")).ok:
            await asyncio.sleep(0.01)
        outcomes = set()
        for n in range(40):
            try:
                await pod.download("t", tmp_path / f"out-{n}")
                outcomes.add("copied")
            except PodError:
                outcomes.add("refused")
            with contextlib.suppress(PodError):
                await pod.remove("t/d/f")
            with contextlib.suppress(PodError):
                await pod.write("t/d/f", "x")
        assert outcomes <= {"copied", "refused"}
        await job.signal(9)
        for directory, names, files in os.walk(tmp_path):
            for name in (*names, *files):
                assert os.path.realpath(directory).startswith(str(tmp_path)), name
        assert await pod.read("/etc/hosts")  # the guest init removed nothing else

    run_in_pod(state, act)


def test_reading_a_growing_file_ends(state: Path, tmp_path: Path) -> None:
    async def act(pod: Pod) -> None:
        job = await pod.spawn("while :; do head -c 100000 /dev/zero >> grow; done")
        while not (await pod.exec("test -s grow")).ok:
            await asyncio.sleep(0.01)
        with contextlib.suppress(PodError):
            await asyncio.wait_for(pod.download("grow", tmp_path / "grow"), 60)
        with contextlib.suppress(PodError):
            await asyncio.wait_for(pod.read("grow"), 60)
        await job.signal(9)
        assert await well(pod) == "well"

    run_in_pod(state, act, Limits(memory=256 << 20, disk=64 << 20))


def test_ten_thousand_nested_directories_are_handled(state: Path, tmp_path: Path) -> None:
    deep = "import os\nfor _ in range(10000):\n    os.mkdir('d'); os.chdir('d')\nopen('end', 'w').close()"

    async def act(pod: Pod) -> None:
        assert (await pod.exec(["python3", "-c", deep], timeout=60)).ok
        with pytest.raises(PodError):
            await pod.download("d", tmp_path / "d")
        assert not (tmp_path / "d").exists()  # the partial copy was removed
        if "fs-live" in pod.backend.capabilities.snapshots:  # type: ignore[attr-defined]
            with contextlib.suppress(PodError):
                await pod.host.remove_snapshot((await pod.snapshot("fs-live")).id)  # type: ignore[attr-defined]
        await pod.remove("d")
        assert await pod.list(".") == []

    run_in_pod(state, act)


def test_a_directory_with_very_many_entries_is_refused_and_can_be_removed(state: Path) -> None:
    many = "import os\nos.mkdir('many')\nfor n in range(30000): os.close(os.open(f'many/{n}', os.O_CREAT))"

    async def act(pod: Pod) -> None:
        assert (await pod.exec(["python3", "-c", many], timeout=60)).ok
        with pytest.raises(PodError, match="limit of a listing"):
            await pod.list("many")
        await pod.remove("many")
        assert await pod.list() == []

    run_in_pod(state, act)


def test_a_pod_with_deep_and_unreadable_trees_is_removed_completely(state: Path) -> None:
    mess = (
        "import os\nfor _ in range(300):\n    os.mkdir('d'); os.chdir('d')\n"
        "os.chdir('/work')\nfor n in range(50): os.makedirs(f'c{n}/x/y'); os.chmod(f'c{n}/x', 0)"
    )

    async def act(pod: Pod) -> None:
        assert (await pod.exec(["python3", "-c", mess])).ok
        (child,) = await pod.fork()
        disk = await pod.host.create(storage="disk")  # type: ignore[attr-defined]
        assert (await disk.exec(["python3", "-c", mess])).ok
        await disk.close()
        await child.close()

    run_in_pod(state, act)
