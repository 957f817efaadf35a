"""Network egress of pods: allowed destinations (`EgressPolicy`) and the proxy that enforces them (`EgressProxy`).

A pod has no route to the outside. It opens listening sockets in its own network namespace and hands them to the host
process, where an `EgressProxy` accepts on them, decides by the policy, connects by name and records every decision.
"""
