"""Pods without namespaces, on `landlock` and on `subprocess`: all operations work, and no process outlives its pod."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.pods.images.records import Image, Layer
from etude.pods.images.store import Store
from etude.pods.pod import Egress, Limits, PodError, PodFileError, PodGone, Unsupported
from etude.pods.runtime import directories as directory
from etude.pods.runtime import landlock, seccomp, zygote_protocol
from etude.pods.runtime.backend import PodSpec
from etude.pods.runtime.directories import DirectoryBackend, DirectoryPod, LandlockBackend
from tests.pods import inventory
from tests.pods.directories import (
    CONFINED,
    HOST,
    KINDS,
    PYTHON,
    alive,
    attack,
    family,
    gone,
    needs_python,
    opened,
    start,
    with_pod,
)

# ------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("kind", KINDS)
def test_commands_have_cwd_variables_input_output_and_timeout(tmp_path: Path, kind: str) -> None:
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
def test_jobs_stream_and_take_signals_and_terminals(tmp_path: Path, kind: str) -> None:
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
        typed = await pod.spawn(
            ["sh", "-c", "stty size; test -t 0 && echo a terminal; echo x > /dev/tty"], terminal=(30, 80)
        )
        shown = b"".join([data async for _, data in typed.output()])
        assert shown.split() == [b"30", b"80", b"a", b"terminal", b"x"]

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_copied_in_and_out(tmp_path: Path, kind: str) -> None:
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
def test_a_running_pod_can_be_snapshotted_and_measured(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        if "fs-live" not in backend.capabilities.snapshots:
            with pytest.raises(Unsupported):
                await pod.seal("fs-live")
            return
        job = await pod.spawn("while :; do date +%N; sleep 0.01; done")
        assert (await pod.seal(None))[1] == "fs-live"
        assert await pod.processes() >= 1
        await job.signal(signal.SIGKILL)
        assert set(await pod.stats()) >= backend.capabilities.limits & {"memory", "pids"}

    with_pod(tmp_path, kind, check)


@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_operations_are_refused(tmp_path: Path, kind: str) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            other = Image("x", "debian", (Layer("base"),))
            refused = [
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


@pytest.mark.parametrize("kind", KINDS)
@needs_python
def test_programs_inherit_nothing_of_the_service(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        code = """
            opened = [fd for fd in range(1000) if attempt(os.fstat, fd) == "done"]
            print(opened, [name for name in os.environ if "KEY" in name], os.getsid(0) == os.getpid())
        """
        assert await attack(pod, code) == "[0, 1, 2] [] True"

    monkeypatch.setenv("SERVICE_KEY", "hidden")
    with_pod(tmp_path, kind, check)


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
            await first.restart()
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


# ------------------------------------------------------------------------------------------- cleanup

LEAVE = "(setsid sh -c 'sleep 1000 & (sleep 1000 &) ; wait' >/dev/null 2>&1 &) ; (sleep 1000 >/dev/null 2>&1 &)"
SERVICE = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = {path!r}
from tests.pods.directories import opened, start
from tests.pods.test_directory_backends import LEAVE
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
    """Wait for all processes that LEAVE starts below a guest init, and return them."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = set(inventory.descendants(root))
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
def test_no_process_outlives_its_pod_when_a_process_is_killed(tmp_path: Path, kind: str, victims: list[str]) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            pod = await start(backend)
            await pod.exec(LEAVE)
            named = dict(zip(("agent", "worker", "guard"), await family(pod), strict=True))
            init_pid = named["agent"]
            below = sleepers(init_pid)
            for name in victims:  # stop them first, so that neither sees the other die
                os.kill(named[name], signal.SIGSTOP)
            for name in victims:
                os.kill(named[name], signal.SIGKILL)
            if len(victims) == 1:
                assert await gone({init_pid, *below})
            while pod.guest.closed_error is None:
                await asyncio.sleep(0.01)
            with pytest.raises(PodGone):
                await pod.exec("true")
            assert await backend.reap([]) == ["one"]
            assert await gone({init_pid, *below})
            await pod.end()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_ends_when_its_ttl_expires(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        with contextlib.suppress(PodGone):  # half a second may have passed already
            await pod.exec(LEAVE)
        while pod.guest.closed_error is None:
            await asyncio.sleep(0.02)

    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            pod = await start(backend, ttl=0.5)
            await asyncio.wait_for(check(pod, backend), 60)
            await pod.end()

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_creation_leaves_nothing_behind(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with opened(tmp_path, kind) as backend:
            monkeypatch.setattr(type(backend), "confinement", lambda *_: [(zygote_protocol.RULESET, b"none")])
            with pytest.raises(PodError):
                await start(backend)
            assert not list((tmp_path / "pods").iterdir())

    asyncio.run(main())


def test_many_pods_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "landlock" if landlock.abi() >= 6 else "subprocess") as backend:
            pods = await asyncio.gather(*(start(backend, f"pod{n}") for n in range(16)))
            ids = await asyncio.gather(*(pod.exec("id -u") for pod in pods))
            if backend.user_ids:
                assert len({result.stdout for result in ids}) == 16
            await asyncio.gather(*(pod.end() for pod in pods))

    asyncio.run(main())


# ------------------------------------------------------------------------------------------- limits


@pytest.mark.parametrize("kind", KINDS)
@needs_python
def test_a_memory_hog_is_killed_and_the_pod_survives(tmp_path: Path, kind: str) -> None:
    async def check(pod: DirectoryPod, backend: DirectoryBackend) -> None:
        result = await pod.exec([PYTHON, "-c", "x = bytearray(400 << 20); x[::4096] = b'x' * len(x[::4096])"])
        assert (result.exit_code, result.out_of_memory) == (137, True)
        assert (await pod.exec("echo on")).stdout == "on\n"

    skip_without(tmp_path, kind, "memory")
    with_pod(tmp_path, kind, check, limits=Limits(memory=128 << 20))


@pytest.mark.parametrize("kind", CONFINED)
@needs_python
def test_a_fork_bomb_is_contained(tmp_path: Path, kind: str) -> None:
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


# ------------------------------------------------------------------------------------------- probing


@pytest.mark.parametrize(("abi", "users", "words"), [(0, False, "has none"), (2, True, "ABI 3"), (5, False, "signal")])
def test_an_old_kernel_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abi: int, users: bool, words: str
) -> None:
    monkeypatch.setattr(landlock, "abi", lambda: abi)
    monkeypatch.setattr(directory, "pod_user_ids", lambda: range(50_000, 60_000) if users else None)
    with pytest.raises(Unsupported, match=words):
        LandlockBackend(tmp_path, Store(tmp_path / "store"), tmp_path)


def test_closing_a_backend_leaves_no_directory_beside_its_state(tmp_path: Path) -> None:
    async def main() -> None:
        async with opened(tmp_path, "landlock") as backend:
            await (await start(backend)).end()
            await backend.close()
            assert not backend.user_pods.exists()

    asyncio.run(main())


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_notify_filter_is_small_and_ends_in_a_return(machine: str) -> None:
    for unix in (True, False):
        for egress in (True, False):
            program = seccomp.build_shared_filter(unix, egress, False, machine)
            assert len(program) % 8 == 0
            assert len(program) < 60 * 8
            assert program[-8:-6] == b"\x06\x00"
