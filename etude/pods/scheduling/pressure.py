"""Read the current pressure on this machine from the kernel: stalls, memory, disk, load.

A reading gives the resources available to a pod: the minimum of the machine's numbers and the limits of this process's
cgroups (version 1 and 2), because MemAvailable ignores cgroup limits. Stalls are the kernel's PSI, averaged over ten
seconds, in per cent of the time; None where the kernel does not measure them. A reading costs well under a millisecond
and is cached for a tenth of a second, so that a burst of calls costs one.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from etude.pods.pod import PodError
from etude.system.cores import core_limit, own_cgroups, read_kernel_file

MAX_AGE = 0.1  # seconds; PSI averages over ten, and memory changes by what one creation can touch in this time
UNLIMITED = 1 << 60  # cgroup v1 writes "no limit" as the largest page-aligned number


@dataclass(frozen=True, slots=True)
class Pressure:
    """One reading. Stalls are PSI avg10 (0 to 100, None where not measured); sizes are bytes."""

    cpu_some: float | None  # time in which some process waited for a core
    memory_some: float | None  # time in which some process waited for memory
    memory_full: float | None  # time in which all processes waited for memory
    io_full: float | None
    memory_available: int
    memory_total: int
    disk_free: int  # of the state directory's file system, for an unprivileged user
    disk_total: int
    inodes_free: int | None  # None: the file system allocates them dynamically
    load: float  # processes running or waiting, averaged over a minute
    cores: float  # usable by this process: 0.5 is half of one


_readings: dict[tuple[str, str], tuple[float, Pressure]] = {}


def read_pressure(
    state_dir: str | Path,
    *,
    root: str | Path = "/",
    max_age: float = MAX_AGE,
    clock: Callable[[], float] = time.monotonic,
) -> Pressure:
    """Return the pressure on this machine and on the disk that holds `state_dir`, at most `max_age` seconds old.

    `root` is the directory that contains `proc` and `sys`.
    """
    key, now = (os.fspath(state_dir), os.fspath(root)), clock()
    cached = _readings.get(key)
    if cached is not None and 0 <= now - cached[0] < max_age:
        return cached[1]
    reading = _read(Path(state_dir), os.path.join(root, "proc"), os.path.join(root, "sys/fs/cgroup"))
    _readings[key] = (now, reading)
    return reading


def _read(state_dir: Path, proc: str, cgroup: str) -> Pressure:
    groups = list(own_cgroups(proc, cgroup))
    total, available = _machine_memory(proc)
    for directory in groups:
        limit, free = _group_memory(directory)
        total, available = min(total, limit), min(available, free)
    disk = _disk(state_dir)
    return Pressure(
        cpu_some=_stall(proc, groups, "cpu", "some"),
        memory_some=_stall(proc, groups, "memory", "some"),
        memory_full=_stall(proc, groups, "memory", "full"),
        io_full=_stall(proc, groups, "io", "full"),
        memory_available=max(0, available),
        memory_total=total,
        disk_free=disk.f_bavail * disk.f_frsize,
        disk_total=disk.f_blocks * disk.f_frsize,
        inodes_free=disk.f_favail if disk.f_files else None,  # btrfs and others report 0 of 0
        load=float((read_kernel_file(f"{proc}/loadavg") or "0").split()[0]),
        cores=core_limit(groups),
    )


def _fields(text: str) -> dict[str, int]:
    """Parse lines of the form `name 123` or `name: 123 kB`."""
    pairs = (line.split() for line in text.splitlines())
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _machine_memory(proc: str) -> tuple[int, int]:
    memory = _fields(read_kernel_file(f"{proc}/meminfo") or "")
    if "MemTotal" not in memory or "MemAvailable" not in memory:
        raise PodError(
            f"pressure: {proc}/meminfo has no MemTotal and MemAvailable; admission by live pressure needs Linux"
        )
    return memory["MemTotal"] * 1024, memory["MemAvailable"] * 1024


def _group_memory(directory: str) -> tuple[int, int]:
    """Return (limit, free memory below it) of one cgroup; UNLIMITED twice when it sets no limit.

    Inactive file pages count as free, as in MemAvailable: they are reclaimed on demand. Files in tmpfs do not.
    """
    limits = [
        read_kernel_file(f"{directory}/{name}") for name in ("memory.max", "memory.high", "memory.limit_in_bytes")
    ]
    limit = min((int(text) for text in limits if text and text.strip().isdigit()), default=UNLIMITED)
    if limit >= UNLIMITED:
        return UNLIMITED, UNLIMITED
    used = read_kernel_file(f"{directory}/memory.current") or read_kernel_file(f"{directory}/memory.usage_in_bytes")
    if used is None:
        return UNLIMITED, UNLIMITED
    statistics = _fields(read_kernel_file(f"{directory}/memory.stat") or "")
    idle = statistics.get("total_inactive_file", statistics.get("inactive_file", 0))
    return limit, limit - max(0, int(used) - idle)


def _stall(proc: str, groups: list[str], resource: str, kind: str) -> float | None:
    """Return the worst avg10 of the machine and of this process's cgroups: a cgroup at its limit stalls alone."""
    files = [f"{proc}/pressure/{resource}", *(f"{directory}/{resource}.pressure" for directory in groups)]
    found = [value for path in files if (value := _avg10(read_kernel_file(path), kind)) is not None]
    return max(found, default=None)


def _avg10(text: str | None, kind: str) -> float | None:
    for line in (text or "").splitlines():
        if line.startswith(f"{kind} avg10="):
            return float(line.split()[1].partition("=")[2])
    return None


def _disk(directory: Path) -> os.statvfs_result:
    try:
        return os.statvfs(directory)
    except OSError as error:
        raise PodError(
            f"pressure: cannot measure the disk at {directory}: {error.strerror}; create the directory"
        ) from error
