"""How many cores there are for us: those we may run on, and what the control groups we live in leave of them."""

import os
from collections.abc import Iterable, Iterator


def usable_cores() -> int:
    """Whole cores, at least one: a container often sees all of a large machine and has a share of it."""
    return max(1, round(core_limit(own_cgroups())))


def core_limit(groups: Iterable[str]) -> float:
    """Cores we may use, as far as these groups bind: 0.5 is half of one."""
    cores = float(len(os.sched_getaffinity(0)))
    for directory in groups:
        quota, period = "", ""
        if text := read_kernel_file(f"{directory}/cpu.max"):
            quota, period = text.split()[:2]
        elif text := read_kernel_file(f"{directory}/cpu.cfs_quota_us"):
            quota, period = text.strip(), (read_kernel_file(f"{directory}/cpu.cfs_period_us") or "").strip()
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):  # "max" and -1 do not bind
            cores = min(cores, int(quota) / int(period))
    return cores


def own_cgroups(proc: str = "/proc", cgroup: str = "/sys/fs/cgroup") -> Iterator[str]:
    """The directories of every control group above us that can bind memory or cores, innermost first.

    A container sees its own group either under the full path or, with a view of its own, as the root of the mount:
    walking up to that root meets it in both cases. What is not visible is skipped.
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
    """A kernel file's text; None where it is not there or not measured (PSI that is switched off fails on read)."""
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
