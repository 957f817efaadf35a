"""Ways to run a pod on this machine.

A `Backend` creates pods from a `PodSpec`, adopts running ones and cleans up: `namespaces` (the default) and
`landlock`. Pods are forked from a zygote, in Python or compiled (`native`). `probe` tests which backend works here.
The exported names are imported when first used, because the zygote imports this package and must stay small.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.runtime.backend import Backend, LocalPod, PodSpec, Storage
    from etude.pods.runtime.probe import ProbeResult, choose_backend, make_backend
    from etude.pods.runtime.unisolated import open_unisolated

_MODULES = {
    "Backend": "etude.pods.runtime.backend",
    "LocalPod": "etude.pods.runtime.backend",
    "PodSpec": "etude.pods.runtime.backend",
    "ProbeResult": "etude.pods.runtime.probe",
    "Storage": "etude.pods.runtime.backend",
    "choose_backend": "etude.pods.runtime.probe",
    "make_backend": "etude.pods.runtime.probe",
    "open_unisolated": "etude.pods.runtime.unisolated",
}
__all__ = [
    "Backend",
    "LocalPod",
    "PodSpec",
    "ProbeResult",
    "Storage",
    "choose_backend",
    "make_backend",
    "open_unisolated",
]
__getattr__ = lazy_exports(__name__, _MODULES)
