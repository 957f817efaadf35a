"""What this machine can do for pods, found by trying; in words a person can act on."""

import asyncio
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from etude.errors import InputError
from etude.pods.cli.units import show_size
from etude.pods.fleet import default_state
from etude.pods.host import DEFAULTS
from etude.pods.runtime.cgroups import CONTROLLERS, Layout, find_layout
from etude.pods.runtime.native.build import find_helper
from etude.pods.runtime.probe import ORDER, Verdict, cache_directory, probe
from etude.pods.scheduling.pressure import read_pressure


async def examine(state: Path | None, backend: str = "all") -> dict[str, Any]:
    """Everything, as plain JSON."""
    known = (*ORDER, "subprocess")
    if backend not in ("all", *known):
        raise InputError(f"--backend {backend}: there are: all, {', '.join(known)}")
    place = (state or default_state()).absolute()
    names = known if backend == "all" else (backend,)
    nearest = next(each for each in (place, *place.parents) if each.is_dir())
    return {
        "kernel": " ".join((os.uname().sysname, os.uname().release, os.uname().machine)),
        "user": os.geteuid(),
        "backends": [describe(await probe(name)) for name in names],
        "cgroups": control_groups(),
        "helper": await asyncio.to_thread(compiled_helper, place),
        "default_limits": DEFAULTS.asked(),
        "pressure": asdict(read_pressure(nearest)),
        "state": {"path": str(place), "exists": place.is_dir(), **await asyncio.to_thread(contents, place)},
    }


def describe(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON."""
    told: dict[str, Any] = {"backend": verdict.backend, "works": verdict.works, "reason": verdict.reason}
    if (can := verdict.capabilities) is not None:
        plain = {name: getattr(can, name) for name in type(can).__dataclass_fields__}
        told["capabilities"] = {k: sorted(v) if isinstance(v, frozenset) else v for k, v in plain.items()}
    return told


def control_groups() -> dict[str, Any]:
    """Which limits can be set, by making a group and removing it."""
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


def _advice(layout: Layout) -> str:
    """What would make pods start faster here."""
    if not layout.legacy or layout.unified is None or "favordynmods" in Path("/proc/mounts").read_text():
        return ""
    mount = layout.unified.parent
    return f"limits are v1: until `mount -o remount,favordynmods {mount}` a pod may wait up to 20 ms for its groups"


def compiled_helper(state: Path) -> dict[str, Any]:
    """Whether pods start from the compiled keeper, or why from Python's."""
    path, reason = find_helper(cache_directory(state))
    return {"path": str(path) if path else None, "reason": reason}


def contents(state: Path) -> dict[str, int]:
    """How many pods and layers a state directory has, and the disk they take."""
    size, seen = 0, set()
    for directory, _, files in os.walk(state):
        for name in files:
            try:
                info = os.lstat(os.path.join(directory, name))
            except OSError:  # removed since, or a pod's own
                continue
            if info.st_ino not in seen:
                seen.add(info.st_ino)
                size += info.st_blocks * 512
    count = {name: len(list((state / path).glob("*"))) for name, path in (("pods", "pods"), ("layers", "store/layers"))}
    return {**count, "disk_bytes": size}


def print_findings(found: dict[str, Any]) -> None:
    """The same, for people."""
    console = Console(highlight=False, soft_wrap=True)

    def line(name: str, text: str) -> None:
        console.print(f"[bold]{name:<12}[/]{escape(text)}")

    line("kernel", f"{found['kernel']}, user {found['user']}")
    for each in found["backends"]:
        console.print(
            f"[bold]{each['backend']:<12}[/]{'[green]works[/]' if each['works'] else '[red]does not work[/]'}: "
            + escape(each["reason"])
        )
        for text in capability_lines(each.get("capabilities")):
            console.print(" " * 12 + escape(text))
    groups = found["cgroups"]
    limits = ", ".join(f"{name} ({version})" for name, version in groups["controllers"].items()) or "none"
    line("cgroups", f"{limits}; {'can freeze' if groups['freeze'] else 'cannot freeze'}")
    for note in filter(None, (groups["reason"], groups["advice"])):
        line("", note)
    helper = found["helper"]
    line("helper", f"compiled, {helper['path']}" if helper["path"] else f"Python's instead: {helper['reason']}")
    defaults = {**found["default_limits"]}
    sizes = [f"{name} {show_size(defaults.pop(name))}" for name in ("memory", "disk")]
    line("limits", ", ".join([*sizes, *(f"{name} {count:,}" for name, count in defaults.items())]) + " unless told")
    now = found["pressure"]
    stalls = [f"{name} {now[key]:g} %" for name, key in STALLS if now[key] is not None]
    free = f"{show_size(now['memory_available'])} of {show_size(now['memory_total'])} memory free"
    line(
        "pressure", f"{free}; load {now['load']:g} on {now['cores']:g} cores; stalls: {', '.join(stalls) or 'unknown'}"
    )
    state = found["state"]
    used = f"{state['pods']} pods, {state['layers']} layers, {show_size(state['disk_bytes'])}"
    line("state", f"{state['path']}: {used if state['exists'] else 'not there yet'}")


STALLS = (("cpu", "cpu_some"), ("memory", "memory_some"), ("disk", "io_full"))


def capability_lines(can: dict[str, Any] | None) -> list[str]:
    """What a backend can do, line by line."""
    if can is None:
        return []
    verbs = [name for name in ("images", "pause", "users") if can[name]]
    return [
        f"isolation {can['isolation']}; limits: {', '.join(can['limits']) or 'none'}",
        f"egress: {', '.join(can['egress']) or 'none'}; snapshots: {', '.join(can['snapshots']) or 'none'}; "
        f"also: {', '.join(verbs) or 'nothing'}",
        *(f"note: {note}" for note in can["notes"]),
    ]
