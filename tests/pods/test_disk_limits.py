"""Limits on files on disk: disk images as root, which leave nothing behind; measured directories otherwise."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.errors import InputError
from etude.pods.fleet import open_host
from etude.pods.host import Host
from etude.pods.pod import Limits, PodGone
from etude.pods.runtime import disk_images
from tests.pods import inventory
from tests.pods.test_leaks import ROOT, with_host

MIB = 1 << 20
LIMITS = Limits(disk=16 * MIB)

images_only = pytest.mark.skipif(bool(disk_images.why_not()), reason=disk_images.why_not() or "works")


@images_only
@pytest.mark.parametrize("disk", [MIB, 40 * MIB, 3 << 30])
def test_a_disk_image_has_the_size_of_the_limit_and_takes_little_space(disk: int, state: Path) -> None:
    async def act(host: Host) -> None:
        async with await host.create(storage="disk", limits=Limits(disk=disk, memory=64 * MIB)) as pod:
            free = int((await pod.exec("stat -f -c '%a * %S' / | xargs expr")).stdout)
            assert 0.97 * disk <= free + 64 * 1024 <= disk + 64 * 1024, (free, disk)
        template = next((host.state / "disk-templates").glob(f"{disk}-*"))
        assert template.stat().st_blocks * 512 < 2 * MIB

    with_host(state, act)


@images_only
def test_pods_on_disk_images_leave_nothing_behind(state: Path) -> None:
    async def act(host: Host) -> None:
        for _ in range(4):
            pod = await host.create(storage="disk", limits=LIMITS)
            await pod.exec("dd if=/dev/urandom of=big bs=1M count=8")
            children = await pod.fork(2)
            assert [(await child.stat("big")).size for child in children] == [8 * MIB] * 2
            live, sealed = await pod.snapshot("fs-live"), await pod.snapshot("fs")
            await asyncio.gather(*(child.close() for child in children), pod.close())
            for snapshot in (live, sealed):
                await host.remove_snapshot(snapshot.id)
        async with asyncio.timeout(10):
            while await host.backend.memory_layers():
                await asyncio.sleep(0.05)

    with_host(state, act)


CHILD = """
import asyncio, sys
from etude.pods.fleet import open_host
from etude.pods.pod import Limits

async def main():
    host = await open_host("namespace", sys.argv[1])
    pods = [await host.create(storage="disk", limits=Limits(disk=16 << 20)) for _ in range(3)]
    await asyncio.gather(*(pod.exec("dd if=/dev/zero of=big bs=1M count=8") for pod in pods))
    await pods[0].snapshot("fs")
    print("ready", flush=True)
    while True:
        for child in await pods[1].fork(1):
            await child.close()

asyncio.run(main())
"""


@images_only
@pytest.mark.parametrize("zygote_too", [False, True])
def test_loop_devices_do_not_outlive_killed_processes(zygote_too: bool, state: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(state)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert child.stdout
    with child.stdout as said:
        assert said.readline() == "ready\n"
    assert list(inventory.loop_devices(state))
    child.send_signal(signal.SIGKILL)
    child.wait()
    if zygote_too:
        os.kill(inventory.zygote_of(state), signal.SIGKILL)

    async def main() -> None:
        host = await open_host("namespace", state)
        try:
            for saved in host.store.snapshots():
                await host.remove_snapshot(saved.snapshot.id)
            async with asyncio.timeout(30):
                while list(inventory.loop_devices(state)) or any((state / "pods").iterdir()):
                    await host.reap()
                    await asyncio.sleep(0.05)
        finally:
            await host.close()
            await host.backend.shutdown()

    asyncio.run(main())


@pytest.mark.skipif(os.geteuid() != 0, reason="as an ordinary user every pod on disk is like this")
def test_without_mkfs_a_pod_over_its_limit_is_ended(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_images, "SEARCH", "")

    async def act(host: Host) -> None:
        assert host.backend.capabilities.disk_limits == "soft"
        assert any("mkfs.ext4 is not installed" in note for note in host.backend.capabilities.notes)
        pod = await host.create(storage="disk", limits=LIMITS)
        with pytest.raises(PodGone, match="its limits are 16777216"):
            await pod.exec("dd if=/dev/zero of=big bs=1M count=48; sleep 600")
        async with asyncio.timeout(10):
            while pod.id in host.pods:
                await asyncio.sleep(0.02)

    with_host(state, act)


def test_a_soft_limit_holds_after_the_service_was_killed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote watches the pods, not the service."""
    monkeypatch.setattr(disk_images, "SEARCH", "")

    async def main() -> None:
        host = await open_host("namespace", state)
        try:
            pod = await host.create(storage="disk", limits=LIMITS, attached=False)
            await pod.spawn("sleep 1; dd if=/dev/zero of=big bs=1M count=48; sleep 600")
        finally:
            await host.close()
        async with asyncio.timeout(30):
            while not pod.over_limit():
                await asyncio.sleep(0.02)
        again = await open_host("namespace", state)
        try:
            with pytest.raises(InputError, match="there are no pods"):
                await again.find(pod.id)
        finally:
            await again.close()
            await again.backend.shutdown()

    asyncio.run(main())


def test_a_limit_on_files_alone_is_refused_on_disk(state: Path) -> None:
    async def act(host: Host) -> None:
        with pytest.raises(InputError, match="inodes without disk"):
            await host.create(storage="disk", limits=Limits(inodes=100))

    with_host(state, act)
