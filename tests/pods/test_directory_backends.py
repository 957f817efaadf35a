"""A pod without namespaces does all a pod does; under Landlock nothing outside it is in reach; nothing outlives it.

Each truth is checked on `landlock` (with a user per pod when run by root), on `landlock` where pods share their maker's
user, and on `subprocess`, as far as it claims it. Attacks run only where something is there to hold them, and only on
what the test itself made.
"""

import asyncio
import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from etude.pods import agent, fence, landlock
from etude.pods.backends import directory
from etude.pods.backends.backend import PodSpec
from etude.pods.backends.directory import DirectoryBackend, DirectoryPod, LandlockBackend, SubprocessBackend
from etude.pods.pod import Egress, Limits, PodError, PodFileError, PodGone, Unsupported
from etude.pods.records import SYSTEM_BINDS, Image, Layer
from etude.pods.store import Store
from etude.pods.warding import landlock_available

needs_landlock = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock ABI 6 (Linux 6.12)")
HOST = Image("host", "host", (), binds=SYSTEM_BINDS)
PYTHON = "/usr/bin/python3"
needs_python = pytest.mark.skipif(not Path(PYTHON).exists(), reason="attacks are written in the system's Python")
KINDS = [pytest.param("landlock", marks=needs_landlock), pytest.param("shared", marks=needs_landlock), "subprocess"]
CONFINED = KINDS[:2]


@contextlib.asynccontextmanager
async def opened(state: Path, kind: str) -> AsyncIterator[DirectoryBackend]:
    """A backend of a state directory; at the end everything is shut and nothing may be left."""
    (state / "pods").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "shared":
            patch.setattr(directory, "own_users", lambda: None)
        store = Store(state / "store")
        backend = SubprocessBackend(state, store) if kind == "subprocess" else LandlockBackend(state, store)
        try:
            yield backend
        finally:
            await backend.shut()
    assert not list((state / "pods").iterdir())
    assert not backend.outside.exists()
    assert not any(base.exists() for base in backend.layout.bases), "a control group is left"


async def start(backend: DirectoryBackend, id: str = "one", **options: object) -> DirectoryPod:
    spec = {"image": HOST, "limits": Limits(), "created": time.time()} | options
    return await backend.start(PodSpec(id, **spec))  # type: ignore[arg-type]


def with_pod(
    state: Path, kind: str, check: Callable[[DirectoryPod, DirectoryBackend], Awaitable[None]], **options: object
) -> None:
    """Run `check` on a new pod, end the pod, and see that none of its processes is left."""

    async def main() -> None:
        async with opened(state, kind) as backend:
            pod = await start(backend, **options)
            keeper = await family(pod)
            await check(pod, backend)
            seen = keeper | set(agent.descendants(max(keeper)))
            await pod.end()
            await pod.end()
            assert not pod.fs.exists()
            assert not [pid for pid in seen - keeper if alive(pid)]
        assert await gone(keeper)

    asyncio.run(main())


async def family(pod: DirectoryPod) -> set[int]:
    """A pod's agent, the worker that made it, and the guard above."""
    agent_pid = int((await pod.exec("echo $PPID")).stdout)
    worker = parent(agent_pid)
    return {agent_pid, worker, parent(worker)}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    return not agent.is_zombie(pid)


async def gone(pids: set[int], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return not [pid for pid in pids if alive(pid)]


async def attack(pod: DirectoryPod, code: str, *arguments: object) -> str:
    """What a Python program in the pod prints; an attempt in it prints its error's name."""
    tools = """
        import ctypes, errno, os, signal, socket, sys
        def attempt(call, *arguments):
            try:
                call(*arguments)
            except OSError as error:
                return errno.errorcode[error.errno]
            return "done"
    """
    program = textwrap.dedent(tools) + textwrap.dedent(code)
    result = await pod.exec([PYTHON, "-c", program, *map(str, arguments)], timeout=30)
    assert result.exit_code == 0, result.stderr
    return result.stdout.strip()


# ------------------------------------------------------------------------------------------- what a pod does


@pytest.mark.parametrize("kind", KINDS)
def test_commands_have_a_directory_variables_input_output_and_an_end(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        result = await pod.exec("echo out; echo err >&2; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "err\n")
        assert (await pod.exec("pwd")).stdout == f"{pod.workdir}\n"
        assert (await pod.exec("pwd", cwd="../home")).stdout == f"{pod.fs}/home\n"
        assert (
            await pod.exec('echo $HOME $TMPDIR "$X"', env={"X": "y z"})
        ).stdout == f"{pod.fs}/home {pod.fs}/tmp y z\n"
        assert (await pod.exec(["cat"], stdin=b"typed")).stdout == "typed"
        big = os.urandom(600_000)
        assert (await pod.exec(["cat"], stdin=big)).stdout_bytes == big
        late = await pod.exec("echo early; sleep 60", timeout=0.3)
        assert (late.timed_out, late.exit_code, late.stdout) == (True, 137, "early\n")
        cut = await pod.exec("head -c 100000 /dev/zero", max_output=10)
        assert (cut.truncated, len(cut.stdout_bytes)) == (True, 10)
        assert (await pod.exec(["no-such-program"])).exit_code == 127
        with pytest.raises(Unsupported, match="another user"):
            await pod.exec("id", user="root")

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_stream_take_signals_and_terminals(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        job = await pod.spawn(["cat"])
        await job.write(b"hello")
        await job.close_stdin()
        assert [piece async for piece in job.output()] == [("stdout", b"hello")]
        assert (await job.wait()).ok
        sleeper = await pod.spawn("trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done")
        async for _, data in sleeper.output():
            if b"ready" in data:
                break
        await sleeper.signal(signal.SIGTERM)
        assert (await sleeper.wait(10)).exit_code == 7
        typed = await pod.pty(["sh", "-c", "stty size; test -t 0 && echo a terminal; echo x > /dev/tty"], rows=30)
        shown = b"".join([data async for _, data in typed.output()])
        assert shown.split() == [b"30", b"80", b"a", b"terminal", b"x"]

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shell_remembers(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        shell = await pod.shell()
        await shell.run("cd ../tmp; X=1")
        assert (await shell.run("echo $X; pwd")).stdout == f"1\n{pod.fs}/tmp\n"
        await shell.close()

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_files_go_in_and_out(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        await pod.write("a/b/text", "content", mode=0o600)
        await pod.write("a/b/text", " and more", append=True)
        assert await pod.read("a/b/text") == b"content and more"
        assert await pod.read("a/b/text", offset=8, length=3) == b"and"
        assert [entry.name for entry in await pod.list("a")] == ["b"]
        assert (await pod.stat("a/b/text")).mode == 0o600
        await pod.make_directory("c/d")
        await pod.remove("a")
        with pytest.raises(PodFileError):
            await pod.stat("a")
        source = tmp_path / "source"
        (source / "sub").mkdir(parents=True)
        (source / "sub" / "file").write_bytes(os.urandom(300_000))
        (source / "link").symlink_to("sub/file")
        await pod.upload(source, "uploaded")
        await pod.download("uploaded", tmp_path / "back")
        assert (tmp_path / "back/link").read_bytes() == (source / "sub/file").read_bytes()

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_can_be_paused_and_counted(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        if not backend.capabilities.pause:
            with pytest.raises(Unsupported):
                await pod.pause()
            return
        job = await pod.spawn("while :; do date +%N; sleep 0.01; done")
        await pod.pause()
        await asyncio.sleep(0.1)
        assert "paused" in [event.kind for event in pod.events()]
        await pod.resume()
        assert await pod.processes() >= 1
        await job.signal(signal.SIGKILL)
        assert set(await pod.stats()) >= backend.capabilities.limits & {"memory", "pids"}

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_done_is_refused(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            other = Image("x", "debian", (Layer("base"),))
            refused = [
                {"limits": Limits(disk=1 << 20)},
                {"image": other},
                {"egress": Egress.to("example.org", transparent=True)},
            ]
            if kind == "subprocess":
                refused.append({"egress": Egress.to("example.org")})
                assert backend.capabilities.isolation == "none"
                assert any("network is open" in note for note in backend.capabilities.notes)
            for options in refused:
                with pytest.raises(Unsupported):
                    await start(backend, **options)
            assert not list((tmp_path / "pods").iterdir())

    asyncio.run(main())


# ------------------------------------------------------------------------------------------- snapshots


@pytest.mark.parametrize("kind", KINDS)
def test_a_snapshot_starts_a_pod_with_the_same_files(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            first = await start(backend)
            await first.exec(
                "echo 1 > file; ln -s file link; mkdir -m 700 sub; echo x > sub/x; chmod 4755 file; rmdir ../tmp"
            )
            layers, how = await first.seal(None)
            assert how == "fs"
            await first.restart(layers)
            await first.exec("echo 2 > file")
            second = await start(backend, "two", image=HOST.with_(layers=layers))
            shown = await second.exec(
                "cat file link sub/x; echo new > sub/x; cat sub/x; ls -d ../tmp; test -O file && echo own"
            )
            assert shown.stdout == "1\n1\nx\nnew\n../tmp\nown\n", shown.stderr
            assert (await first.exec("cat file sub/x")).stdout == "2\nx\n"
            grandchild = await start(backend, "three", image=HOST.with_(layers=(await second.seal("fs"))[0]))
            assert await grandchild.read("sub/x") == b"new\n"
            for pod in (first, second, grandchild):
                await pod.end()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_fs_ends_the_programs_and_fs_live_does_not(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            pod = await start(backend)
            await pod.exec("setsid sleep 1000 >/dev/null 2>&1 & echo kept > file")
            assert await pod.processes() == 1
            if "fs-live" in backend.capabilities.snapshots:
                layers, how = await pod.seal(None)
                assert (how, await pod.processes()) == ("fs-live", 1)
                twin = await start(backend, "twin", image=HOST.with_(layers=layers))
                assert await twin.read("file") == b"kept\n"
                await twin.end()
            else:
                with pytest.raises(Unsupported, match="fs-live"):
                    await pod.seal(None)
            await pod.seal("fs")
            assert await pod.processes() == 0
            assert (await pod.exec("cat file")).stdout == "kept\n"
            await pod.end()

    asyncio.run(main())


# ------------------------------------------------------------------------------------------- nothing is left

LEAVE = "(setsid sh -c 'sleep 1000 & (sleep 1000 &) ; wait' >/dev/null 2>&1 &) ; (sleep 1000 >/dev/null 2>&1 &)"
SERVICE = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {path!r}
from tests.pods.test_directory_backends import LEAVE, opened, start
async def main():
    async with opened(Path({state!r}), {kind!r}) as backend:
        pods = [await start(backend, "attached"), await start(backend, "detached", attached=False)]
        for pod in pods:
            await pod.exec(LEAVE)
            print((await pod.exec("echo $PPID")).stdout.strip(), flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


def sleepers(root: int) -> set[int]:
    """What LEAVE leaves below an agent, once all of it is there."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found = set(agent.descendants(root))
        with contextlib.suppress(OSError):
            found = {pid for pid in found if Path(f"/proc/{pid}/comm").read_text() == "sleep\n"}
            if len(found) == 3:
                return found
    raise AssertionError(f"not all of {LEAVE!r} is running")


@pytest.mark.parametrize("kind", KINDS)
def test_killing_the_service_ends_its_pods_and_leaves_the_detached_ones(tmp_path: Path, kind: str) -> None:
    program = SERVICE.format(path=[path for path in sys.path if path], state=str(tmp_path), kind=kind)
    service = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=Path.cwd())
    assert service.stdout is not None
    agents = [int(service.stdout.readline()) for _ in range(2)]
    below = [sleepers(pid) for pid in agents]
    service.kill()
    service.wait()
    service.stdout.close()

    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            assert await gone({agents[0], *below[0]})
            assert all(alive(pid) for pid in (agents[1], *below[1]))
            assert await backend.adopt(PodSpec("attached", HOST, Limits())) is None
            pod = await backend.adopt(PodSpec("detached", HOST, Limits(), attached=False))
            assert pod is not None
            assert await pod.processes() >= 3
            assert await backend.reap(["detached"]) == ["attached"]
            await pod.end()
            assert not [pid for pid in (agents[1], *below[1]) if alive(pid)]

    asyncio.run(main())


@pytest.mark.parametrize("victims", [["agent"], ["worker"], ["guard"], ["worker", "guard"]], ids="+".join)
@pytest.mark.parametrize("kind", KINDS)
def test_no_process_outlives_its_pod_whoever_is_killed(tmp_path: Path, kind: str, victims: list[str]) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            pod = await start(backend)
            await pod.exec(LEAVE)
            agent_pid = int((await pod.exec("echo $PPID")).stdout)
            worker = parent(agent_pid)
            named = {"agent": agent_pid, "worker": worker, "guard": parent(worker)}
            below = sleepers(agent_pid)
            for name in victims:  # stopped first: neither shall see the other go
                os.kill(named[name], signal.SIGSTOP)
            for name in victims:
                os.kill(named[name], signal.SIGKILL)
            if len(victims) == 1:
                assert await gone({agent_pid, *below})
            while pod.line.gone is None:
                await asyncio.sleep(0.01)
            with pytest.raises(PodGone):
                await pod.exec("true")
            assert await backend.reap([]) == ["one"]
            assert await gone({agent_pid, *below})
            await pod.end()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_ends_when_its_time_is_over(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        with contextlib.suppress(PodGone):  # half a second may be over already
            await pod.exec(LEAVE)
        while pod.line.gone is None:
            await asyncio.sleep(0.02)

    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            pod = await start(backend, ttl=0.5)
            await asyncio.wait_for(check(pod, backend), 10)
            await pod.end()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_that_could_not_be_made_leaves_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            monkeypatch.setattr(DirectoryPod, "_plan", lambda *_: [])
            with pytest.raises(PodError):
                await start(backend)
            assert not list((tmp_path / "pods").iterdir())

    asyncio.run(main())


def test_many_pods_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "landlock" if landlock.abi() >= 6 else "subprocess") as backend:
            pods = await asyncio.gather(*(start(backend, f"pod{n}") for n in range(16)))
            ids = await asyncio.gather(*(pod.exec("id -u") for pod in pods))
            if backend.users:
                assert len({result.stdout for result in ids}) == 16
            await asyncio.gather(*(pod.end() for pod in pods))

    asyncio.run(main())


# ------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("kind", KINDS)
@needs_python
def test_a_memory_hog_is_killed_and_the_pod_goes_on(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        result = await pod.exec([PYTHON, "-c", "x = bytearray(400 << 20); x[::4096] = b'x' * len(x[::4096])"])
        assert (result.exit_code, result.out_of_memory) == (137, True)
        assert (await pod.exec("echo on")).stdout == "on\n"

    skip_without(tmp_path, kind, "memory")
    with_pod(tmp_path, kind, check, limits=Limits(memory=128 << 20))


@pytest.mark.parametrize("kind", CONFINED)
@needs_python
def test_a_fork_bomb_stays_inside(tmp_path: Path, kind: str) -> None:
    bomb = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass"

    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        job = await pod.spawn([PYTHON, "-c", bomb])
        await asyncio.sleep(0.3)
        assert (await pod.stats())["pids"] <= 40
        await job.signal(signal.SIGKILL)

    skip_without(tmp_path, kind, "pids")
    with_pod(tmp_path, kind, check, limits=Limits(pids=40, cpu=0.5) if os.geteuid() == 0 else Limits(pids=40))


def skip_without(state: Path, kind: str, limit: str) -> None:
    (state / "asked").mkdir()

    async def ask() -> bool:
        async with opened(state / "asked", kind) as backend:
            return limit in backend.capabilities.limits

    if not asyncio.run(ask()):
        pytest.skip(f"no control group for {limit} can be made here")


# ------------------------------------------------------------------------------------------- attacks on Landlock


@pytest.fixture
def secret() -> Iterator[Path]:
    """A file outside every pod that anybody may read, were it not for Landlock."""
    open_directory = Path("/var/tmp") / f"etude-test-{os.urandom(6).hex()}"
    open_directory.mkdir(mode=0o755)
    file = open_directory / "secret"
    file.write_text("hidden")
    file.chmod(0o666)
    open_directory.chmod(0o777)
    yield file
    file.unlink(missing_ok=True)
    for left in open_directory.iterdir():
        left.unlink()
    open_directory.rmdir()


@pytest.mark.parametrize("kind", CONFINED)
def test_programs_cannot_read_or_write_outside(tmp_path: Path, kind: str, secret: Path) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        place = secret.parent
        for command in (
            f"cat {secret}",
            f"ls {place}",
            f"echo x >> {secret}",
            f"echo x > {place}/new",
            f"truncate -s 0 {secret}",
            f"rm {secret}",
            f"mv {secret} {place}/moved",
            f"ln {secret} stolen && cat stolen",
            f"ln -s {secret} link && cat link",
            f"cp /bin/true {place}/program",
            f"cat {pod.directory}/agent.sock; ls {backend.state} {backend.state}/pods",
            "cat /etc/shadow",
            "ls /root",
            "ls /home",
            "ls /tmp",
            "cat /proc/1/cmdline",
            "cat /proc/1/environ",
            "cat /proc/self/environ",
            "echo x > /dev/shm/etude-test",
            "ls /dev/pts" if kind == "shared" or os.geteuid() else "false",
        ):
            result = await pod.exec(command)
            assert result.exit_code, command
            assert "hidden" not in result.stdout, command
        assert (secret.read_text(), [entry.name for entry in place.iterdir()]) == ("hidden", ["secret"])

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", CONFINED)
def test_file_calls_cannot_leave_the_pod(tmp_path: Path, kind: str, secret: Path) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        await pod.exec(f"ln -s {secret} link; ln -s {secret.parent} place; mkdir mine; echo x > mine/x")
        up = os.path.relpath(secret, pod.workdir)
        for path in (str(secret), up, "link", "place/secret", f"/proc/self/root{secret}", f"/proc/self/cwd/{up}"):
            for call in (pod.read(path), pod.write(path, "x"), pod.write(path, "x", append=True)):
                with pytest.raises(PodError):
                    await call
        for path in (str(secret), up, "place/secret"):
            with pytest.raises(PodError):
                await pod.remove(path)
        for path in (str(secret.parent), "place", os.path.dirname(up)):
            with pytest.raises(PodError):
                await pod.list(path)
            with pytest.raises(PodError):
                await pod.make_directory(f"{path}/new")
            with pytest.raises(PodError):
                await pod.upload(tmp_path / "given", f"{path}/given")
        for number, path in enumerate((str(secret), str(secret.parent), up, "place/secret", "link", "place")):
            copy = tmp_path / f"copy-{number}"
            with contextlib.suppress(PodError):  # a link is copied as one
                await pod.download(path, copy)
            assert copy.is_symlink() or not copy.is_file() or copy.read_bytes() == b""
        assert (secret.read_text(), [entry.name for entry in secret.parent.iterdir()]) == ("hidden", ["secret"])

    (tmp_path / "given").write_text("given")
    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", CONFINED)
@needs_python
def test_another_pod_is_out_of_reach(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            victim, attacker = await start(backend, "victim"), await start(backend, "attacker")
            await victim.write("secret", "hidden", mode=0o666)
            await victim.exec("chmod -R a+rwx ..")
            sleeper = await victim.spawn(["sleep", "1000"])
            pid = await sleeper.started  # type: ignore[attr-defined]
            for path in (f"{victim.workdir}/secret", "../../../victim/fs/work/secret"):
                with pytest.raises(PodError):
                    await attacker.read(path)
            code = """
                fs, directory, pid = sys.argv[1:]
                print(attempt(open, fs + "/work/secret"), attempt(open, fs + "/work/new", "w"), attempt(os.listdir, fs))
                print(attempt(os.kill, int(pid), 9), attempt(open, f"/proc/{pid}/mem", "rb"))
                libc = ctypes.CDLL(None, use_errno=True)
                print(libc.ptrace(16, int(pid), 0, 0), errno.errorcode[ctypes.get_errno()])
                def knock():
                    with socket.socket(socket.AF_UNIX) as sock:
                        sock.connect(directory + "/agent.sock")
                print(attempt(knock))
            """
            shown = (await attack(attacker, code, victim.fs, victim.directory, pid)).split()
            assert set(shown) <= {"EACCES", "EPERM", "-1"}, shown
            assert alive(pid)
            for pod in (victim, attacker):
                await pod.end()

    asyncio.run(main())


@pytest.mark.parametrize("kind", CONFINED)
@needs_python
def test_host_processes_and_the_agent_can_be_neither_signalled_nor_traced(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        host = subprocess.Popen(["sleep", "1000"])
        try:
            code = """
                agent, host = os.getppid(), int(sys.argv[1])
                libc = ctypes.CDLL(None, use_errno=True)
                for pid in (host, agent):
                    print(libc.ptrace(16, pid, 0, 0), attempt(open, f"/proc/{pid}/mem", "rb"))
                    print(attempt(open, f"/proc/{pid}/environ"), attempt(os.listdir, f"/proc/{pid}/fd"))
                print(attempt(os.kill, host, 9), attempt(os.kill, host, 0), attempt(os.kill, os.getppid(), 0))
            """
            *traces, signals = (await attack(pod, code, host.pid)).splitlines()
            assert set(" ".join(traces).split()) <= {"-1", "EACCES", "EPERM"}
            assert signals == "EPERM EPERM done"
            assert host.poll() is None
        finally:
            host.kill()
            host.wait()

    with_pod(tmp_path, kind, check)


@contextlib.contextmanager
def serving(family: int, address: object) -> Iterator[socket.socket]:
    """A server of the machine's that greets whoever connects."""
    with socket.socket(family) as server:
        server.bind(address)  # type: ignore[arg-type]
        if isinstance(address, str) and not address.startswith("\0"):
            os.chmod(address, 0o777 if address.endswith("public") else 0o700)
        server.listen()
        yield server


@pytest.mark.parametrize("kind", CONFINED)
@needs_python
def test_sockets_of_the_machine_are_out_of_reach(tmp_path: Path, kind: str, secret: Path) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        path, name = str(secret.parent / "private"), f"\0etude-test-{os.urandom(6).hex()}"
        public = str(secret.parent / "public")
        with (
            serving(socket.AF_INET, ("127.0.0.1", 0)) as inet,
            serving(socket.AF_UNIX, path),
            serving(socket.AF_UNIX, public),
            serving(socket.AF_UNIX, name),
        ):
            code = """
                port, path, public, name = int(sys.argv[1]), *sys.argv[2:4], "\\0" + sys.argv[4]
                def knock(family, kind, address):
                    with socket.socket(family, kind) as sock:
                        sock.connect(address)
                print(attempt(knock, socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", port)))
                print(attempt(knock, socket.AF_INET6, socket.SOCK_STREAM, ("::1", port)))
                print(attempt(knock, socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 53)))
                print(attempt(knock, socket.AF_UNIX, socket.SOCK_STREAM, name))
                def datagram():
                    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                    near.sendto(b"x", path)
                print(attempt(datagram))
                print(attempt(knock, socket.AF_UNIX, socket.SOCK_STREAM, path))
                print(attempt(knock, socket.AF_UNIX, socket.SOCK_STREAM, public))
                a, b = socket.socketpair()
                a.send(b"x"); print(b.recv(1).decode())
                libc = ctypes.CDLL(None, use_errno=True)
                print(libc.shmget(0, 4096, 0o1600), libc.semget(0, 1, 0o1600), libc.msgget(0, 0o1600))
            """
            shown = (await attack(pod, code, inet.getsockname()[1], path, public, name[1:])).splitlines()
            assert set(shown[:6]) <= {"EACCES", "EPERM"}, shown
            # The limit of what is stopped, where a pod has a user of its own: what every user may connect to by a path.
            assert shown[6] == ("done" if backend.users and landlock.abi() < 9 else "EACCES")
            assert shown[7:] == ["x", "-1 -1 -1"]

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", CONFINED)
@needs_python
def test_more_than_the_pods_own_user_cannot_be_had(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        code = """
            print(attempt(os.setuid, 1 if os.getuid() != 1 else 2), attempt(os.chroot, "."), attempt(os.mkfifo, "fifo"))
            print(attempt(os.mknod, "device", 0o20600, os.makedev(1, 1)))
            libc = ctypes.CDLL(None, use_errno=True)
            print(libc.unshare(0x10000000), libc.mount(b"x", b".", b"tmpfs", 0, None))
            print(attempt(os.chown, ".", 1, 1), open("/proc/sys/kernel/ostype").read().strip())
        """
        shown = (await attack(pod, code)).split()
        assert shown[:3] == ["EPERM", "EPERM", "done"]
        assert shown[3] in ("EPERM", "EACCES")
        assert shown[4:] == ["-1", "-1", "EPERM", "Linux"]
        if backend.users:
            # with a user of its own not even the modes of the machine's files can be changed
            assert (await pod.exec(f"chmod 777 {backend.outside} {pod.fs.parent}")).exit_code

    with_pod(tmp_path, kind, check)


# ------------------------------------------------------------------------------------------- egress


class Hello(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"hello from outside")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def web() -> Iterator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("kind", CONFINED)
@needs_python
def test_only_allowed_destinations_are_reached_whatever_address_is_named(tmp_path: Path, kind: str) -> None:
    with web() as allowed, web() as other:

        async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
            fetch = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=9).read().decode())"
            good = await pod.exec([PYTHON, "-c", fetch, f"http://127.0.0.1:{allowed}/"])
            assert good.stdout == "hello from outside\n", good.stderr
            bad = await pod.exec([PYTHON, "-c", fetch, f"http://127.0.0.1:{other}/"])
            assert "403" in bad.stderr
            code = """
                def direct(sock, address):
                    sock.settimeout(5)
                    sock.connect(address)
                    sock.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
                    return sock.recv(100).split()[1].decode()
                for port in map(int, sys.argv[1:]):
                    print(direct(socket.socket(), ("127.0.0.1", port)), direct(socket.socket(), ("192.0.2.1", port)))
                print(attempt(socket.socket, socket.AF_INET, socket.SOCK_DGRAM), attempt(socket.socket, socket.AF_UNIX))
                print(attempt(socket.socket().listen), attempt(socket.socket().bind, ("127.0.0.1", 0)))
                print(attempt(lambda: socket.socket(fileno=os.dup(0)).connect(("127.0.0.1", 1))))
                slow = socket.socket(); slow.setblocking(False); slow.connect(("192.0.2.1", 1))
                try: slow.recv(1)
                except BlockingIOError: print("still not blocking")
                raw = ctypes.CDLL(None, use_errno=True)
                print(raw.connect(0, b"\\2\\0" + bytes(14), 16), errno.errorcode[ctypes.get_errno()])
            """
            shown = (await attack(pod, code, allowed, other)).splitlines()
            assert shown[:2] == ["400 400", "400 400"]  # the gate answered, and nobody else
            assert shown[2:4] == ["EACCES EACCES", "EACCES EACCES"]
            assert shown[5:] == ["still not blocking", "-1 ENOTSOCK"]
            decisions = [event.facts for event in pod.events() if event.kind == "egress"]
            assert {(fact["port"], fact["allowed"]) for fact in decisions} >= {(allowed, True), (other, False)}

        with_pod(tmp_path, kind, check, egress=Egress.to(f"127.0.0.1:{allowed}"))


# ------------------------------------------------------------------------------------------- asking beforehand


@needs_landlock
def test_the_probe_tries_the_real_thing(tmp_path: Path) -> None:
    works, words = landlock_available(tmp_path)
    assert works, words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("abi", "users", "words"), [(0, False, "has none"), (2, True, "ABI 3"), (5, False, "signal")])
def test_an_old_kernel_is_told_from_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abi: int, users: bool, words: str
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: abi)
    monkeypatch.setattr(directory, "own_users", lambda: range(50_000, 60_000) if users else None)
    with pytest.raises(Unsupported, match=words):
        LandlockBackend(tmp_path, Store(tmp_path / "store"))


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_fence_is_small_and_ends_in_a_verdict(machine: str) -> None:
    for unix in (True, False):
        for carry in (True, False):
            program = fence.build(unix, carry, machine)
            assert len(program) % 8 == 0
            assert len(program) < 50 * 8
            assert program[-8:-6] == b"\x06\x00"
