"""Ways to run a pod on this machine.

A `Backend` creates pods from a `PodSpec`, adopts running ones and cleans up: `namespaces` (the default) and
`directories` (confined by Landlock, or not). Pods are forked from a zygote (`native`). `probe` tests which backend
works here. The exported names are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.runtime.backend import Backend as Backend
    from etude.pods.runtime.backend import LocalPod as LocalPod
    from etude.pods.runtime.backend import PodSpec as PodSpec
    from etude.pods.runtime.backend import Storage as Storage
    from etude.pods.runtime.probe import ProbeResult as ProbeResult
    from etude.pods.runtime.probe import choose_backend as choose_backend
    from etude.pods.runtime.probe import make_backend as make_backend
    from etude.pods.runtime.unisolated import open_unisolated as open_unisolated

__getattr__ = lazy_exports(__name__)
