"""Pods: isolated sandboxes for agent sessions, with limits, snapshots, forks and no network unless allowed.

    async with etude.pods.open_fleet() as fleet:
        pod = await fleet.create("host")
        result = await pod.exec(["python3", "-c", "print(1)"], timeout=10)
        children = await pod.fork(4)

The names below are imported when first used: a pod's first process imports this package too and must stay small.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

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
    "Snapshot",
    "Unsupported",
    "open_fleet",
]


_MODULES = dict.fromkeys(__all__, "etude.pods.pod") | dict.fromkeys(("Fleet", "open_fleet"), "etude.pods.fleet")
__getattr__ = lazy_exports(__name__, _MODULES)
