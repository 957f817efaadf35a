"""Number of usable cores: CPU affinity, limited by the CPU quotas of the enclosing control groups."""

import os
from collections.abc import Iterable, Iterator


def usable_cores() -> int:
    """Return the number of whole usable cores, at least one: a container often sees more cores than its quota."""
    return max(1, round(core_limit(own_cgroups())))


def core_limit(cgroups: Iterable[str]) -> float:
    """Return the usable cores under the quotas of these control groups; may be fractional."""
    cores = float(len(os.sched_getaffinity(0)))
    for directory in cgroups:
        quota, period = "", ""
        if text := read_kernel_file(f"{directory}/cpu.max"):
            quota, period = text.split()[:2]
        elif text := read_kernel_file(f"{directory}/cpu.cfs_quota_us"):
            quota, period = text.strip(), (read_kernel_file(f"{directory}/cpu.cfs_period_us") or "").strip()
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # "max" and -1 mean no limit
            cores = min(cores, int(quota) / int(period))
    return cores


def own_cgroups(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> Iterator[str]:
    """Yield the directories of this process's control groups that can limit memory or cores, innermost first.

    A container sees its own group either under the full path or, in a cgroup namespace, as the root of the mount:
    walking up to that root finds it in both cases. Readers skip directories that do not exist.
    """
    for line in (read_kernel_file(f"{proc}/self/cgroup") or "").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            tops = [cgroup]
        else:
            tops = [f"{cgroup}/{name}" for name in controllers.split(",") if name in ("memory", "cpu")]
        for top in tops:
            parts = [part for part in path.split("/") if part and part != ".."]
            for depth in range(len(parts), -1, -1):
                yield "/".join([top, *parts[:depth]])


def read_kernel_file(path: str) -> str | None:
    """Return the text of a kernel file, or None if it is missing or unreadable (reading fails when PSI is disabled)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, 1 << 16).decode("ascii", "replace")
    except OSError:
        return None
    finally:
        os.close(descriptor)
