"""Diagnose a machine's support for pods by trying its backends, with advice that a user can act on."""

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.pods.fleet import default_state
from etude.pods.host import DEFAULT_LIMITS
from etude.pods.runtime.cgroups import CONTROLLERS, CgroupLayout, find_layout
from etude.pods.runtime.native.build import find_helper
from etude.pods.runtime.probe import BACKENDS, ProbeResult, probe
from etude.pods.scheduling.pressure import read_pressure


async def diagnose(state: Path | None, backend: str = "all") -> dict[str, Any]:
    """Return the whole diagnosis as JSON."""
    known = tuple(BACKENDS)
    if backend not in ("all", *known):
        raise InputError(f"--backend {backend}: expected one of all, {', '.join(known)}")
    directory = (state or default_state()).absolute()
    names = known if backend == "all" else (backend,)
    nearest = next(each for each in (directory, *directory.parents) if each.is_dir())
    return {
        "kernel": " ".join((os.uname().sysname, os.uname().release, os.uname().machine)),
        "user": os.geteuid(),
        "backends": [describe(await probe(name, disk_limits=True)) for name in names],
        "cgroups": control_groups(),
        "helper": await asyncio.to_thread(compiled_helper, directory),
        "default_limits": DEFAULT_LIMITS.specified(),
        "pressure": asdict(read_pressure(nearest)),
        "state": {
            "path": str(directory),
            "exists": directory.is_dir(),
            **await asyncio.to_thread(state_usage, directory),
        },
    }


def describe(result: ProbeResult) -> dict[str, Any]:
    """Return the result of probing a backend as JSON."""
    described: dict[str, Any] = {"backend": result.backend, "works": result.works, "reason": result.reason}
    if (capabilities := result.capabilities) is not None:
        plain = {name: getattr(capabilities, name) for name in type(capabilities).__dataclass_fields__}
        described["lacks"] = capabilities.lacks()
        described["capabilities"] = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in plain.items()}
        described["refused_if_strong"] = capabilities.lacks(isolation=True)
    return described


def control_groups() -> dict[str, Any]:
    """Find which limits can be set, by creating a control group and removing it."""
    layout = find_layout(f"etude-doctor-{os.getpid()}")
    for base in layout.bases:
        base.rmdir()
    return {
        "v2": str(layout.unified.parent) if layout.unified else None,
        "controllers": {name: "v1" if name in layout.legacy else "v2" for name in sorted(layout.controllers)},
        "missing": [name for name in CONTROLLERS if name not in layout.controllers],
        "freeze": layout.unified is not None,
        "reason": layout.reason,
        "advice": _advice(layout),
    }


def _advice(layout: CgroupLayout) -> str:
    """Return advice on missing limits, or on making pods start faster; empty if there is none."""
    if os.geteuid() and set(CONTROLLERS) - layout.controllers:
        return (
            "limits need root or a control group (v2) that is delegated to you; with systemd: "
            "`systemd-run --user --scope -p Delegate=yes COMMAND`"
        )
    if not layout.legacy or layout.unified is None or "favordynmods" in Path("/proc/mounts").read_text():
        return ""
    mount = layout.unified.parent
    return (
        f"limits are cgroup v1: a pod may wait up to 20 ms for its control groups; "
        f"`mount -o remount,favordynmods {mount}` removes the wait"
    )


def compiled_helper(state: Path) -> dict[str, Any]:
    """Return the path of the helper, or the reason why there is none, with advice."""
    path, reason = find_helper(state)
    return {"path": str(path) if path else None, "reason": reason}


def state_usage(state: Path) -> dict[str, int]:
    """Return the number of pods and layers of a state directory, and its disk usage."""
    size, seen = 0, set()
    for directory, _, files in os.walk(state):
        for name in files:
            try:
                info = os.lstat(os.path.join(directory, name))
            except OSError:  # removed meanwhile, or not readable
                continue
            if info.st_ino not in seen:
                seen.add(info.st_ino)
                size += info.st_blocks * 512
    count = {name: len(list((state / path).glob("*"))) for name, path in (("pods", "pods"), ("layers", "store/layers"))}
    return {**count, "disk_bytes": size}
