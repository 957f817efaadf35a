"""Decide when and where pods start.

`admission` admits pods on one host by live `pressure` and queues them fairly between tenants; `pools` holds pods
started in advance; `router` chooses a host of a fleet. The names below are imported when first used, because the
router loads numpy.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.scheduling.admission import (
        Admission,
        FairQueue,
        NeverFits,
        Reservation,
        ResourceRequest,
        Thresholds,
        WaitedTooLong,
    )
    from etude.pods.scheduling.pressure import Pressure, read_pressure
    from etude.pods.scheduling.router import HostReport, NoHost, Placement, PlacementPolicy, PlacementRequest, PodRouter

_MODULES = {
    "Admission": "etude.pods.scheduling.admission",
    "FairQueue": "etude.pods.scheduling.admission",
    "HostReport": "etude.pods.scheduling.router",
    "NeverFits": "etude.pods.scheduling.admission",
    "NoHost": "etude.pods.scheduling.router",
    "Placement": "etude.pods.scheduling.router",
    "PlacementPolicy": "etude.pods.scheduling.router",
    "PlacementRequest": "etude.pods.scheduling.router",
    "PodRouter": "etude.pods.scheduling.router",
    "Pressure": "etude.pods.scheduling.pressure",
    "Reservation": "etude.pods.scheduling.admission",
    "ResourceRequest": "etude.pods.scheduling.admission",
    "Thresholds": "etude.pods.scheduling.admission",
    "WaitedTooLong": "etude.pods.scheduling.admission",
    "read_pressure": "etude.pods.scheduling.pressure",
}
__all__ = [
    "Admission",
    "FairQueue",
    "HostReport",
    "NeverFits",
    "NoHost",
    "Placement",
    "PlacementPolicy",
    "PlacementRequest",
    "PodRouter",
    "Pressure",
    "Reservation",
    "ResourceRequest",
    "Thresholds",
    "WaitedTooLong",
    "read_pressure",
]
__getattr__ = lazy_exports(__name__, _MODULES)
