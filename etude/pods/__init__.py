"""Pods: isolated sandboxes for agent sessions, with limits, snapshots, forks and no network unless allowed.

    async with etude.pods.open_fleet() as fleet:
        pod = await fleet.create("host")
        result = await pod.exec(["python3", "-c", "print(1)"], timeout=10)
        children = await pod.fork(4)

The names below are imported when first used: a pod's first process imports this package too and must stay small.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.pods.fleet import Fleet, open_fleet
    from etude.pods.pod import (
        Capabilities,
        Egress,
        Event,
        ExecResult,
        FileInfo,
        Job,
        Limits,
        Pod,
        PodError,
        PodFileError,
        PodGone,
        Shell,
        Snapshot,
        Unsupported,
    )

__all__ = [
    "Capabilities",
    "Egress",
    "Event",
    "ExecResult",
    "FileInfo",
    "Fleet",
    "Job",
    "Limits",
    "Pod",
    "PodError",
    "PodFileError",
    "PodGone",
    "Shell",
    "Snapshot",
    "Unsupported",
    "open_fleet",
]


_HOMES = dict.fromkeys(__all__, "etude.pods.pod") | dict.fromkeys(("Fleet", "open_fleet"), "etude.pods.fleet")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.pods' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
