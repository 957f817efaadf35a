"""Print the diagnosis of a machine's support for pods."""

from collections.abc import Sequence
from typing import Any

from rich.markup import escape

from etude.pods.cli.units import show_size
from etude.pods.host_watch import ISOLATION_OPTION
from etude.pods.scheduling.router import HostReport
from etude.system.terminal import Console


def print_host(url: str, found: dict[str, Any], report: HostReport) -> None:
    """Print what a host says of itself: what it runs now, and its diagnosis."""
    console = Console(highlight=False, soft_wrap=True)
    state = "draining: takes no new pods" if report.draining else "takes pods"
    console.print(f"[bold]{escape(url)}[/] {state}, {report.pods} of at most {report.max_pods}")
    console.print(
        f"[bold]{'system':<12}[/]{escape(str(report.system))}; {show_size(report.memory_free)} of memory for new pods, "
        f"{len(report.images)} names and digests of images, {len(report.snapshots)} snapshots"
    )
    print_diagnosis(found)


def print_diagnosis(found: dict[str, Any]) -> None:
    """Print the diagnosis as text."""
    console = Console(highlight=False, soft_wrap=True)

    def line(name: str, text: str) -> None:
        console.print(f"[bold]{name:<12}[/]{escape(text)}")

    line("kernel", f"{found['kernel']}, user {found['user']}")
    for each in found["backends"]:
        console.print(
            f"[bold]{each['backend']:<12}[/]{'[green]works[/]' if each['works'] else '[red]does not work[/]'}: "
            + escape(each["reason"])
        )
        for text in capability_lines(each.get("capabilities"), each.get("lacks", ())):
            console.print(" " * 12 + escape(text))
        if weak := each.get("refused_if_strong"):
            line("", f"refused with {ISOLATION_OPTION}=strong, because it is without {'; '.join(weak)}")
    groups = found["cgroups"]
    limits = ", ".join(f"{name} ({version})" for name, version in groups["controllers"].items()) or "none"
    line("cgroups", f"{limits}; {'can freeze' if groups['freeze'] else 'cannot freeze'}")
    for note in filter(None, (groups["reason"], groups["advice"])):
        line("", note)
    helper = found["helper"]
    line("helper", helper["path"] or helper["reason"])
    defaults = {**found["default_limits"]}
    sizes = [f"{name} {show_size(defaults.pop(name))}" for name in ("memory", "disk")]
    line(
        "limits",
        ", ".join([*sizes, *(f"{name} {count:,}" for name, count in defaults.items())]) + " by default, of those above",
    )
    now = found["pressure"]
    stalls = [f"{name} {now[key]:g} %" for name, key in STALLS if now[key] is not None]
    free = f"{show_size(now['memory_available'])} of {show_size(now['memory_total'])} memory free"
    line(
        "pressure", f"{free}; load {now['load']:g} on {now['cores']:g} cores; stalls: {', '.join(stalls) or 'unknown'}"
    )
    state = found["state"]
    used = f"{state['pods']} pods, {state['layers']} layers, {show_size(state['disk_bytes'])}"
    line("state", f"{state['path']}: {used if state['exists'] else 'does not exist yet'}")


STALLS = (("cpu", "cpu_some"), ("memory", "memory_some"), ("disk", "io_full"))


def capability_lines(capabilities: dict[str, Any] | None, lacks: Sequence[str]) -> list[str]:
    """Format a backend's capabilities, and what is missing of the strongest ones, as lines of text."""
    if capabilities is None:
        return []
    limits, egress, snapshots = (", ".join(capabilities[key]) or "none" for key in ("limits", "egress", "snapshots"))
    others = [name for name in ("images", "users") if capabilities[name]]
    on_disk = {"hard": "hard (a disk image for each pod)", "soft": "soft (a pod over its limit is ended)"}
    return [
        f"isolation {capabilities['isolation']}; limits: {limits}",
        f"limits of files on disk: {on_disk[capabilities['disk_limits']]}",
        f"egress: {egress}; snapshots: {snapshots}; also: {', '.join(others) or 'nothing'}",
        *([f"weaker here: pods without {'; '.join(lacks)}"] if lacks else []),
        *(f"note: {note}" for note in capabilities["notes"]),
    ]
