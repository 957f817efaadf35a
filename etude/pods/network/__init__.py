"""Network egress of pods: allowed destinations (`EgressPolicy`) and the proxy that enforces them (`EgressProxy`).

A pod has no route to the outside. It opens listening sockets in its own network namespace and hands them to the host
process, where an `EgressProxy` accepts on them, decides by the policy, connects by name and records every decision.
The names below are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.network.policy import EgressPolicy, EgressRule, parse_rule
    from etude.pods.network.proxy import EgressLimits, EgressProxy

_MODULES = {
    "EgressLimits": "etude.pods.network.proxy",
    "EgressPolicy": "etude.pods.network.policy",
    "EgressProxy": "etude.pods.network.proxy",
    "EgressRule": "etude.pods.network.policy",
    "parse_rule": "etude.pods.network.policy",
}
__all__ = ["EgressLimits", "EgressPolicy", "EgressProxy", "EgressRule", "parse_rule"]
__getattr__ = lazy_exports(__name__, _MODULES)
