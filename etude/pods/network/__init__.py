"""Network egress of pods: allowed destinations (`EgressPolicy`) and the proxy that enforces them (`EgressProxy`).

A pod has no route to the outside. It opens listening sockets in its own network namespace and hands them to the host
process, where an `EgressProxy` accepts on them, decides by the policy, connects by name and records every decision.
The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.network.policy import EgressPolicy as EgressPolicy
    from etude.pods.network.policy import EgressRule as EgressRule
    from etude.pods.network.policy import parse_rule as parse_rule
    from etude.pods.network.proxy import EgressLimits as EgressLimits
    from etude.pods.network.proxy import EgressProxy as EgressProxy

__getattr__ = lazy_exports(__name__)
