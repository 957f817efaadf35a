"""How many cores there are for us."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Those we may use: a container often sees all of a large machine and has a share of it."""
    seen = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
    except (OSError, ValueError):  # no container, or an older kind that says nothing here
        return seen
    return seen if quota == "max" else max(1, min(seen, round(int(quota) / int(period))))
