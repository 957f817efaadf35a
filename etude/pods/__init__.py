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
    from etude.pods.pod import Egress as Egress
    from etude.pods.pod import Limits as Limits

__getattr__ = lazy_exports(__name__)
