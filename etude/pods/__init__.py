"""Pods: isolated sandboxes for agent sessions, with limits, snapshots, forks and no network unless allowed.

    async with etude.pods.open_fleet() as fleet:
        pod = await fleet.create("host")
        result = await pod.exec(["python3", "-c", "print(1)"], timeout=10)
        children = await pod.fork(4)

The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.fleet import Fleet as Fleet
    from etude.pods.fleet import open_fleet as open_fleet
    from etude.pods.pod import Capabilities as Capabilities
    from etude.pods.pod import Egress as Egress
    from etude.pods.pod import Event as Event
    from etude.pods.pod import ExecResult as ExecResult
    from etude.pods.pod import FileInfo as FileInfo
    from etude.pods.pod import Job as Job
    from etude.pods.pod import Limits as Limits
    from etude.pods.pod import Pod as Pod
    from etude.pods.pod import PodError as PodError
    from etude.pods.pod import PodFileError as PodFileError
    from etude.pods.pod import PodGone as PodGone
    from etude.pods.pod import Snapshot as Snapshot
    from etude.pods.pod import Unsupported as Unsupported

__getattr__ = lazy_exports(__name__)
