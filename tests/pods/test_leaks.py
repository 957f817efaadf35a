"""No process, mount, group, file or descriptor is left, whichever process is killed and however many pods were made."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pods.fleet import open_host
from etude.pods.host import Host
from etude.pods.pod import Limits, PodError, PodGone
from etude.pods.runtime.backend import LocalPod
from etude.pods.scheduling.admission import Thresholds
from tests.pods import inventory
from tests.pods.needs import need

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def with_host(state: Path, act: Callable[[Host], Awaitable[None]], most: int = 1000) -> None:
    """Run `act` on a host and check that the inventory afterwards is that before its first pod."""

    async def main() -> None:
        thresholds = Thresholds(max_pods=most, unseen_image_fraction=0.05)
        host = await open_host("namespace", state, thresholds)
        try:
            before = await inventory.baseline(host)
            await act(host)
            now = await asyncio.to_thread(inventory.settled, host, before)
            assert now.difference(before) == {}
            assert now.zygote_memory - before.zygote_memory < 2 * MIB
            assert not host.layers.refs
        finally:
            await host.close()
            await host.backend.shutdown()
        async with asyncio.timeout(10):
            while inventory.zygote_of(state):
                await asyncio.sleep(0.01)

    asyncio.run(main())


async def cycles(host: Host, count: int, workers: int = 4) -> None:
    left = iter(range(count))

    async def work() -> None:
        for n in left:
            pod = await host.create()
            assert (await pod.exec(["echo", str(n)])).stdout == f"{n}\n"
            await pod.close()

    await asyncio.gather(*(work() for _ in range(workers)))


def test_a_hundred_and_fifty_pods_leave_nothing_behind(state: Path) -> None:
    with_host(state, lambda host: cycles(host, 150))


def test_removed_snapshots_and_forks_leave_nothing_behind(state: Path) -> None:
    async def act(host: Host) -> None:
        pod = await host.create()
        job = await pod.spawn("sleep 600")
        for n in range(6) if "fs-live" in host.backend.capabilities.snapshots else ():
            await pod.write("file", str(n))
            live = await pod.snapshot("fs-live")
            children = await pod.fork(2, "fs-live")
            await asyncio.gather(*(child.close() for child in children))
            await host.remove_snapshot(live.id)
        await job.signal(9)
        await job.wait(10)
        for n in range(6):
            await pod.write("file", str(n))
            sealed = await pod.snapshot("fs")
            if n % 2:
                await host.persist(sealed.id)
            children = await pod.fork(2)
            await asyncio.gather(*(child.close() for child in children))
            await host.remove_snapshot(sealed.id)
        await pod.close()
        async with asyncio.timeout(10):
            while await host.backend.memory_layers():
                await asyncio.sleep(0.05)

    with_host(state, act)


def test_thousands_of_concurrent_requests_do_not_deadlock_service_and_zygote(state: Path) -> None:
    """Both send blocking: without a limit, each could wait for the other to read."""

    async def act(host: Host) -> None:
        async with asyncio.timeout(60):
            await asyncio.gather(*(host.backend.memory_layers() for _ in range(3000)))

    with_host(state, act)


def test_cancelled_creations_leave_nothing_behind(state: Path) -> None:
    async def act(host: Host) -> None:
        for n in range(40):
            task = asyncio.create_task(host.create())
            await asyncio.sleep(n / 4000)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()

    with_host(state, act)


def test_cancelled_commands_and_jobs_leave_nothing_behind(state: Path) -> None:
    async def act(host: Host) -> None:
        pod = await host.create()
        before = len(os.listdir("/proc/self/fd"))
        for n in range(30):
            for call in (pod.exec("sleep 600"), pod.spawn("sleep 600"), pod.read("/etc/hosts")):
                task = asyncio.create_task(call)
                await asyncio.sleep(n / 10_000)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    made = await task
                    if hasattr(made, "signal"):
                        await made.signal(9)
                        await made.wait(10)
        async with asyncio.timeout(10):
            while len(os.listdir("/proc/self/fd")) > before or await pod.processes():  # type: ignore[attr-defined]
                await asyncio.sleep(0.02)
        await pod.close()

    with_host(state, act)


# -- killed processes


def start_service(state: Path, attached: int, detached: int) -> tuple["subprocess.Popen[str]", dict[str, list[str]]]:
    command = [sys.executable, "-m", "tests.pods.service_child", str(state), str(attached), str(detached)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    with child.stdout as said:
        return child, json.loads(said.readline())


def test_a_killed_service_ends_its_attached_pods_only(state: Path) -> None:
    child, ids = start_service(state, attached=10, detached=3)
    time.sleep(0.3)  # in the middle of snapshots and forks
    child.send_signal(signal.SIGKILL)
    child.wait()

    async def main() -> None:
        host = await open_host("namespace", state)
        try:
            deadline = time.monotonic() + 60  # the dead service's last request may still be on its way to the zygote
            while time.monotonic() < deadline:
                left = [{path.name for path in (state / "pods").iterdir()}]
                if host.backend.layout.bases:
                    left.append({Path(group).name for group in inventory.take(host).groups})
                if all(names == set(ids["detached"]) for names in left):
                    break
                await host.reap()
            assert left == [set(ids["detached"])] * len(left)
            for id in ids["detached"]:
                pod = await host.find(id)
                assert await pod.read("name") == id.encode()
                assert await pod.processes() == 1  # type: ignore[attr-defined]  # its sleep
            for id in ids["attached"]:
                with pytest.raises(InputError):
                    await host.find(id)
            for saved in host.store.snapshots():
                await host.remove_snapshot(saved.snapshot.id)
            for pod in list(host.pods.values()):
                await pod.close()
            await host.collect_garbage(grace=0)
            async with asyncio.timeout(10):
                while any((state / "trash").iterdir()) or await host.backend.memory_layers():
                    await asyncio.sleep(0.05)
            now = inventory.take(host)
            assert (now.processes, now.groups) == (frozenset(), frozenset())
            assert not list((state / "pods").iterdir())
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(main())


def test_a_pod_that_its_service_left_frozen_is_thawed_when_adopted(state: Path) -> None:
    need(snapshot="fs-live")

    async def main() -> None:
        host = await open_host("namespace", state)
        pod = await host.create(attached=False)
        await pod.write("kept", "x")
        await asyncio.to_thread(pod.group.freeze, True)
        await host.close()
        again = await open_host("namespace", state)
        try:
            found = await again.find(pod.id)
            assert await found.read("kept") == b"x"
            await found.close()
        finally:
            await again.close()
            await again.backend.shutdown()

    asyncio.run(main())


def test_a_killed_zygote_ends_every_pod_and_is_replaced(state: Path) -> None:
    async def main() -> None:
        host = await open_host("namespace", state)
        try:
            await inventory.baseline(host)
            pods = [await host.create() for _ in range(5)]
            job = await pods[0].spawn("sleep 600")
            snapshot = await pods[1].snapshot()
            victims = list(inventory.descendants(inventory.zygote_of(state)))
            assert len(victims) >= 6
            os.kill(inventory.zygote_of(state), signal.SIGKILL)
            with pytest.raises(PodGone):
                await job.wait(10)
            async with asyncio.timeout(10):
                while host.pods or any(map(alive, victims)):
                    await asyncio.sleep(0.02)
            for pod in pods:
                with pytest.raises(PodGone):
                    await pod.exec("true")
                assert "died" in [event.kind for event in pod.events()]
            with pytest.raises(PodError):  # it was in the memory of the killed zygote
                await host.create(snapshot)
            fresh = await host.create()
            assert (await fresh.exec("ls /usr/bin/env")).ok
            await fresh.close()
            async with asyncio.timeout(10):
                while inventory.take(host).groups or any((state / "pods").iterdir()):
                    await asyncio.sleep(0.05)
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(main())


def alive(pid: int) -> bool:
    return inventory.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def test_a_killed_guest_init_ends_only_its_pod(state: Path) -> None:
    async def act(host: Host) -> None:
        pod, other = await host.create(), await host.create()
        await pod.spawn(["sleep", "600"])
        zygote = inventory.zygote_of(state)
        (program,) = [pid for pid in inventory.descendants(zygote) if inventory.read(f"/proc/{pid}/comm") == "sleep\n"]
        (agent,) = [pid for pid in inventory.descendants(zygote) if program in inventory.descendants(pid)]
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(PodGone):
            await pod.exec("sleep 600")
        async with asyncio.timeout(10):
            while pod.id in host.pods:
                await asyncio.sleep(0.02)
        assert (await other.exec("echo well")).stdout == "well\n"
        await other.close()

    with_host(state, act)


def test_a_second_service_does_not_affect_the_pods_of_the_first(state: Path) -> None:
    """A pod created while the second service looks for leftovers is not removed."""

    async def main() -> None:
        host = await open_host("namespace", state)
        stop = asyncio.Event()

        async def come_and_go() -> int:
            made = 0
            while not stop.is_set():
                pod: LocalPod = await host.create()
                assert (await pod.exec(["echo", "x"])).stdout == "x\n"
                children = await pod.fork(1)
                assert (await children[0].exec(["echo", "y"])).stdout == "y\n"
                await asyncio.gather(pod.close(), *(child.close() for child in children))
                made += 2
            return made

        async def newcomers() -> None:
            for _ in range(25):
                other = await open_host("namespace", state)
                await other.collect_garbage()
                await other.close()
            stop.set()

        try:
            counts = await asyncio.gather(come_and_go(), come_and_go(), newcomers())
            assert min(counts[:2]) > 0
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(main())


# -- many pods


@pytest.mark.slow
def test_a_thousand_pods_run_at_once(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(host: Host) -> None:
        free, started = available(), time.perf_counter()
        pods: list[LocalPod] = []
        gate = asyncio.Semaphore(8)

        async def make() -> None:
            async with gate:
                pods.append(await host.create(limits=Limits(memory=64 * MIB, pids=16)))

        await asyncio.gather(*(make() for _ in range(1000)))
        made, taken = time.perf_counter() - started, free - available()
        started = time.perf_counter()
        results = await asyncio.gather(*(pod.exec(["echo", pod.id]) for pod in pods))
        assert [result.stdout.strip() for result in results] == [pod.id for pod in pods]
        ran, started = time.perf_counter() - started, time.perf_counter()
        await asyncio.gather(*(pod.close() for pod in pods))
        closed = time.perf_counter() - started
        with capsys.disabled():
            print(
                f"\n1,000 pods: made in {made:.1f} s, {taken / 1000 / MIB:.2f} MiB each, "
                f"a command in each in {ran:.1f} s, closed in {closed:.1f} s"
            )

    with_host(state, act, most=2000)


@pytest.mark.slow
def test_ten_thousand_pods_leave_nothing_behind(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(host: Host) -> None:
        started = time.perf_counter()
        await cycles(host, 10_000)
        took = time.perf_counter() - started
        with capsys.disabled():
            print(f"\n10,000 pods: {took:.0f} s, {10_000 / took:.0f} a second, nothing left")

    with_host(state, act)


def available() -> int:
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(rows["MemAvailable"].split()[0]) << 10
