"""A pressure reading gives what a pod could really get, on a bare machine and under cgroups v1 and v2."""

from pathlib import Path

import pytest

from etude.pods.pod import PodError
from etude.pods.scheduling.pressure import read_pressure

GIB = 1 << 30
STALLS = "some avg10={some} avg60=0.00 avg300=0.00 total=1\nfull avg10={full} avg60=0.00 avg300=0.00 total=1\n"


class Kernel:
    """A directory with fake kernel files: MemTotal 64 GiB, 32 GiB available, no cgroup by default."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.put("proc/meminfo", f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\nHuge: 0\n")
        self.put("proc/loadavg", "1.50 1.00 0.50 2/300 4000\n")
        self.put("proc/self/cgroup", "0::/\n")

    def put(self, path: str, text: object) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(f"{text}")

    def read(self, max_age: float = 0.0):
        return read_pressure(self.root, root=self.root, max_age=max_age)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_a_machine_without_cgroups_or_psi(kernel: Kernel) -> None:
    reading = kernel.read()
    assert (reading.memory_total, reading.memory_available) == (64 * GIB, 32 * GIB)
    assert (reading.cpu_some, reading.memory_some, reading.memory_full, reading.io_full) == (None,) * 4
    assert reading.load == 1.5
    assert 0 < reading.disk_free <= reading.disk_total


def test_the_tightest_cgroup_v2_limit_applies(kernel: Kernel) -> None:
    kernel.put("proc/self/cgroup", "0::/pods.slice/service\n")
    kernel.put("sys/fs/cgroup/pods.slice/memory.max", 8 * GIB)
    kernel.put("sys/fs/cgroup/pods.slice/memory.current", 7 * GIB)
    kernel.put("sys/fs/cgroup/pods.slice/memory.stat", f"anon {4 * GIB}\ninactive_file {2 * GIB}\nshmem {GIB}\n")
    kernel.put("sys/fs/cgroup/pods.slice/service/memory.max", "max\n")
    kernel.put("sys/fs/cgroup/pods.slice/service/memory.current", GIB)
    kernel.put("sys/fs/cgroup/pods.slice/cpu.max", "50000 100000\n")
    reading = kernel.read()
    assert reading.memory_total == 8 * GIB
    assert reading.memory_available == 3 * GIB, "inactive file pages count as free"
    assert reading.cores == 0.5


def test_memory_high_counts_as_a_limit(kernel: Kernel) -> None:
    kernel.put("sys/fs/cgroup/memory.max", 8 * GIB)
    kernel.put("sys/fs/cgroup/memory.high", 6 * GIB)
    kernel.put("sys/fs/cgroup/memory.current", GIB)
    assert (kernel.read().memory_total, kernel.read().memory_available) == (6 * GIB, 5 * GIB)


def test_cgroup_v1_is_found_at_the_mount_root_when_its_path_is_not_visible(kernel: Kernel) -> None:
    kernel.put("proc/self/cgroup", "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n0::/\n")
    kernel.put("sys/fs/cgroup/memory/memory.limit_in_bytes", 4 * GIB)
    kernel.put("sys/fs/cgroup/memory/memory.usage_in_bytes", 3 * GIB)
    kernel.put("sys/fs/cgroup/memory/memory.stat", f"inactive_file 5\ntotal_inactive_file {GIB}\n")
    kernel.put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    kernel.put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    reading = kernel.read()
    assert (reading.memory_total, reading.memory_available) == (4 * GIB, 2 * GIB)
    assert reading.cores >= 1


def test_cgroup_v1_without_a_limit_is_ignored(kernel: Kernel) -> None:
    kernel.put("proc/self/cgroup", "4:memory:/\n")
    kernel.put("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)
    kernel.put("sys/fs/cgroup/memory/memory.usage_in_bytes", 3 * GIB)
    assert kernel.read().memory_available == 32 * GIB


def test_a_cgroup_over_its_limit_has_zero_memory_available(kernel: Kernel) -> None:
    kernel.put("sys/fs/cgroup/memory.max", GIB)
    kernel.put("sys/fs/cgroup/memory.current", 2 * GIB)
    assert kernel.read().memory_available == 0


def test_stalls_are_the_maximum_of_machine_and_cgroup(kernel: Kernel) -> None:
    kernel.put("proc/self/cgroup", "0::/service\n")
    kernel.put("proc/pressure/memory", STALLS.format(some=1.25, full=0.5))
    kernel.put("proc/pressure/io", STALLS.format(some=3, full=2))
    kernel.put("proc/pressure/cpu", STALLS.format(some=40, full=0))
    kernel.put("sys/fs/cgroup/service/memory.pressure", STALLS.format(some=30, full=12.5))
    reading = kernel.read()
    assert (reading.memory_some, reading.memory_full) == (30, 12.5)
    assert (reading.io_full, reading.cpu_some) == (2, 40)


def test_a_reading_is_cached_for_max_age(kernel: Kernel) -> None:
    now = [100.0]

    def read() -> float:
        return read_pressure(kernel.root, root=kernel.root, max_age=0.1, clock=lambda: now[0]).load

    assert read() == 1.5
    kernel.put("proc/loadavg", "9.00 1.00 0.50 2/300 4000\n")
    assert read() == 1.5
    now[0] += 0.11
    assert read() == 9


def test_a_machine_without_meminfo_says_what_is_missing(kernel: Kernel) -> None:
    (kernel.root / "proc/meminfo").unlink()
    with pytest.raises(PodError, match=r"meminfo has no MemTotal.*needs Linux"):
        kernel.read()


def test_a_missing_state_directory_is_named(kernel: Kernel) -> None:
    with pytest.raises(PodError, match=r"cannot measure the disk at .*nowhere"):
        read_pressure(kernel.root / "nowhere", root=kernel.root)


def test_a_real_reading_is_of_this_machine(tmp_path: Path) -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("needs Linux")
    reading = read_pressure(tmp_path, max_age=0)
    assert 0 < reading.memory_available <= reading.memory_total
