"""Pods without namespaces for tests: a backend that must leave nothing behind, pods on it, and attacks from inside.

`shared` is `landlock` where pods have their creator's user, the only mode for an ordinary user; for root it is forced
by patching `pod_user_ids`.
"""

import asyncio
import contextlib
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from etude.pods.images.records import SYSTEM_BINDS, Image
from etude.pods.images.store import Store
from etude.pods.pod import Limits
from etude.pods.runtime import directories as directory
from etude.pods.runtime import landlock
from etude.pods.runtime.backend import PodSpec
from etude.pods.runtime.directories import DirectoryBackend, DirectoryPod
from etude.pods.runtime.probe import make_backend
from tests.pods import inventory

needs_landlock = pytest.mark.skipif(landlock.abi() < 6, reason="needs Landlock ABI 6 (Linux 6.12)")
HOST = Image("host", "host", (), binds=SYSTEM_BINDS)
PYTHON = "/usr/bin/python3"
needs_python = pytest.mark.skipif(not Path(PYTHON).exists(), reason="attacks are written in the system's Python")
KINDS = [pytest.param("landlock", marks=needs_landlock), pytest.param("shared", marks=needs_landlock), "subprocess"]
CONFINED = KINDS[:2]


@contextlib.asynccontextmanager
async def opened(state: Path, kind: str) -> AsyncIterator[DirectoryBackend]:
    """Open a backend on a state directory; at the end shut it down and check that nothing is left."""
    (state / "pods").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "shared":
            patch.setattr(directory, "pod_user_ids", lambda: None)
        store = Store(state / "store")
        backend = make_backend("landlock" if kind == "shared" else kind, state, store)
        assert isinstance(backend, DirectoryBackend)
        try:
            yield backend
        finally:
            await backend.shutdown()
    assert not list((state / "pods").iterdir())
    assert not backend.user_pods.exists()
    assert not any(base.exists() for base in backend.layout.bases), "a control group is left"


async def start(backend: DirectoryBackend, id: str = "one", **options: object) -> DirectoryPod:
    spec = {"image": HOST, "limits": Limits(), "created": time.time()} | options
    pod = await backend.start(PodSpec(id, **spec))  # type: ignore[arg-type]
    assert isinstance(pod, DirectoryPod)
    return pod


def with_pod(
    state: Path, kind: str, check: Callable[[DirectoryPod, DirectoryBackend], Awaitable[None]], **options: object
) -> None:
    """Run `check` on a new pod, end the pod, and check that none of its processes is left."""

    async def main() -> None:
        async with opened(state, kind) as backend:
            pod = await start(backend, **options)
            init_pid, worker, guard = await family(pod)
            await check(pod, backend)
            seen = {init_pid, *inventory.descendants(init_pid)}
            await pod.end()
            await pod.end()
            assert not pod.fs.exists()
            assert not [pid for pid in seen if alive(pid)]
        assert await gone({worker, guard})

    asyncio.run(main())


async def family(pod: DirectoryPod) -> tuple[int, int, int]:
    """Return the pids of a pod's guest init, the zygote's worker and its guard."""
    init_pid = int((await pod.exec("echo $PPID")).stdout)
    worker = parent(init_pid)
    return init_pid, worker, parent(worker)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


async def gone(pids: set[int], seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return not [pid for pid in pids if alive(pid)]


async def attack(pod: DirectoryPod, code: str, *arguments: object) -> str:
    """Return the output of a Python program in the pod; `attempt` in it returns "done" or an error's name."""
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
