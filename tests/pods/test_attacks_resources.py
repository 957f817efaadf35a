"""Attacks on shared resources: processes, memory, disk space, CPU. The host and its other pods are not affected."""

import asyncio
import contextlib
import resource
import time
from pathlib import Path

import pytest

from etude.pods.pod import Limits, Pod, PodError
from etude.pods.runtime.backend import LocalPod
from tests.pods.attacking import run_in_pod, well
from tests.pods.needs import need

MIB = 1 << 20
SMALL = Limits(memory=128 * MIB, pids=64, disk=64 * MIB)


async def clear(pod: Pod) -> None:
    """Kill the pod's programs until it can run a command again."""
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(PodError):
            await pod.exec(["python3", "-c", "import os; os.kill(-1, 9)"], timeout=5)
            if await well(pod) == "well":
                return
        assert time.monotonic() < deadline, "the pod did not come back"
        await asyncio.sleep(0.05)


def test_a_pod_sees_neither_its_control_groups_nor_its_id(state: Path) -> None:
    async def act(pod: Pod) -> None:
        groups = (await pod.exec("cat /proc/self/cgroup")).stdout.splitlines()
        assert groups
        assert isinstance(pod, LocalPod)
        assert not [line for line in groups if "etude" in line or pod.id in line], groups
        limited = [line.split(":", 2)[2] for line in groups if line.split(":")[1] in ("", "memory", "pids")]
        assert set(limited) == {"/"}, groups

    run_in_pod(state, act, SMALL)


def test_a_fork_bomb_is_contained(state: Path) -> None:
    async def act(pod: Pod) -> None:
        result = await pod.exec(["bash", "-c", "bomb() { bomb | bomb & }; bomb; sleep 0.5"], timeout=3)
        assert (await pod.stats())["pids"] <= 64
        assert not result.ok or result.stderr is not None
        await clear(pod)

    run_in_pod(state, act, SMALL)


def test_many_zombies_are_reaped(state: Path) -> None:
    async def act(pod: Pod) -> None:
        orphans = (
            "import os\nfor _ in range(1500):\n"
            "    if os.fork() == 0:\n        if os.fork() == 0: os._exit(0)\n        os._exit(0)\n    os.wait()"
        )
        assert (await pod.exec(["python3", "-c", orphans], timeout=30)).ok
        assert await well(pod) == "well"
        assert (await pod.stats())["pids"] < 10

    run_in_pod(state, act, SMALL)


def test_out_of_memory_ends_programs_and_not_the_pod(state: Path) -> None:
    need(limit="memory")

    async def act(pod: Pod) -> None:
        hog = "x = []\nwhile True: x.append(bytearray(b'z' * (4 << 20)))"
        for _ in range(3):
            result = await pod.exec(["python3", "-c", hog], timeout=30)
            assert result.exit_code == 137
            assert result.out_of_memory
        many = "for i in $(seq 40); do python3 -c \"x = b'z' * (20 << 20); import time; time.sleep(5)\" & done; wait"
        await pod.exec(many, timeout=1)
        await clear(pod)

    run_in_pod(state, act, SMALL)


@pytest.mark.parametrize("place", ["/work/fill", "/dev/shm/fill", "/tmp/fill", "/dev/fill", "/run/fill"])
def test_a_full_disk_affects_only_the_pod(place: str, state: Path) -> None:
    async def act(pod: Pod) -> None:
        full = await pod.exec(f"dd if=/dev/zero of={place} bs=1M count=500; stat -c %s {place}", timeout=30)
        assert "No space left" in full.stderr, full
        assert int(full.stdout) <= 64 * MIB
        assert await well(pod) == "well"
        with contextlib.suppress(PodError):
            await pod.write("more", b"x" * MIB)
        await pod.exec(["rm", "-f", place])
        assert await well(pod) == "well"

    run_in_pod(state, act, SMALL)


def test_filling_all_file_systems_leaves_the_guest_init_alive(state: Path) -> None:
    async def act(pod: Pod) -> None:
        fill = "; ".join(f"dd if=/dev/zero of={place} bs=64k 2>&-" for place in ("/work/f", "/dev/shm/f", "/dev/f"))
        await pod.exec(f"{fill}; true", timeout=30)
        assert await well(pod) == "well"

    run_in_pod(state, act, SMALL)


def test_exhausted_inodes_affect_only_the_pod(state: Path) -> None:
    async def act(pod: Pod) -> None:
        many = (
            "import os\nn = 0\ntry:\n    while True:\n        os.close(os.open(str(n), os.O_CREAT)); n += 1\n"
            "except OSError as e: print(n, e)"
        )
        result = await pod.exec(["python3", "-c", many], timeout=60)
        count = int(result.stdout.split()[0]) if result.stdout else 0
        assert count <= 200_000
        assert await well(pod) == "well", result

    run_in_pod(state, act, Limits(memory=64 * MIB, pids=64, disk=32 * MIB))


def test_a_flood_of_output_is_truncated_and_uses_no_memory(state: Path) -> None:
    async def act(pod: Pod) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results = await asyncio.gather(*(pod.exec("cat /dev/zero", timeout=1.0) for _ in range(4)))
        assert all(result.timed_out and result.truncated for result in results)
        job = await pod.spawn("cat /dev/zero", timeout=1.0)  # its output is not read
        assert (await job.wait(10)).timed_out
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000
        assert await well(pod) == "well"

    run_in_pod(state, act, SMALL)


def test_a_million_tiny_writes_arrive_or_are_truncated(state: Path) -> None:
    async def act(pod: Pod) -> None:
        drip = "import os\nfor _ in range(300000): os.write(1, b'x')"
        result = await pod.exec(["python3", "-c", drip], timeout=60)
        assert (result.exit_code, len(result.stdout_bytes)) == (0, 300_000)
        job = await pod.spawn(["python3", "-c", drip.replace("300000", "100000")], timeout=60)
        assert sum([len(data) async for _, data in job.output()]) == 100_000

    run_in_pod(state, act, SMALL)


def test_closing_a_busy_pod_leaves_nothing_behind(state: Path) -> None:
    async def act(pod: Pod) -> None:
        tasks = [asyncio.create_task(pod.exec("cat /dev/zero")) for _ in range(5)]
        tasks += [asyncio.create_task(pod.exec("setsid sleep 600 & sleep 600")) for _ in range(5)]
        jobs = [await pod.spawn("cat /dev/zero") for _ in range(3)]
        tty = await pod.spawn(["sh"], terminal=(24, 80))
        await asyncio.sleep(0.2)
        await pod.close()
        waits = (job.wait() for job in (*jobs, tty))
        for ended in await asyncio.gather(*tasks, *waits, return_exceptions=True):
            assert isinstance(ended, PodError), ended

    run_in_pod(state, act, SMALL)


def test_an_enormous_command_is_refused_and_the_pod_survives(state: Path) -> None:
    async def act(pod: Pod) -> None:
        for command, env in ((["echo", *["x" * 1000] * 900], {}), (["env"], {f"V{n}": "y" * 1000 for n in range(900)})):
            assert (await pod.exec(command, env=env)).exit_code in (0, 126)
        with pytest.raises(PodError):
            await pod.exec(["echo", "x" * (3 * MIB)])
        with pytest.raises(PodError):
            await pod.exec("true", env={"V": "x" * (3 * MIB)})
        with contextlib.suppress(PodError):
            await pod.exec(["x"] * 100_000)
        assert await well(pod) == "well"

    run_in_pod(state, act, SMALL)


def test_many_concurrent_jobs_run_or_fail_with_a_reason(state: Path) -> None:
    async def act(pod: Pod) -> None:
        made = await asyncio.gather(*(pod.spawn("sleep 2") for _ in range(200)), return_exceptions=True)
        refused = [job for job in made if isinstance(job, BaseException)]
        assert all(isinstance(error, PodError) for error in refused), refused
        assert len(refused) >= 130  # 64 processes are allowed
        await clear(pod)

    run_in_pod(state, act, SMALL)
