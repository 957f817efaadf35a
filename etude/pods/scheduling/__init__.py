"""Decide when and where pods start.

`admission` admits pods on one host by live `pressure` and queues them fairly between tenants; `pools` holds pods
started in advance; `router` chooses a host of a fleet. The names below are imported when first used, because the
router loads numpy.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.scheduling.admission import Admission as Admission
    from etude.pods.scheduling.admission import FairQueue as FairQueue
    from etude.pods.scheduling.admission import NeverFits as NeverFits
    from etude.pods.scheduling.admission import Reservation as Reservation
    from etude.pods.scheduling.admission import ResourceRequest as ResourceRequest
    from etude.pods.scheduling.admission import Thresholds as Thresholds
    from etude.pods.scheduling.admission import WaitedTooLong as WaitedTooLong
    from etude.pods.scheduling.pressure import Pressure as Pressure
    from etude.pods.scheduling.pressure import read_pressure as read_pressure
    from etude.pods.scheduling.router import HostReport as HostReport
    from etude.pods.scheduling.router import NoHost as NoHost
    from etude.pods.scheduling.router import Placement as Placement
    from etude.pods.scheduling.router import PlacementPolicy as PlacementPolicy
    from etude.pods.scheduling.router import PlacementRequest as PlacementRequest
    from etude.pods.scheduling.router import PodRouter as PodRouter

__getattr__ = lazy_exports(__name__)
