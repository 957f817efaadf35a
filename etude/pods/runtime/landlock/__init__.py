"""Pods without namespaces: a process and a directory, confined by Landlock and seccomp or not at all.

`backend` has the two backends, `zygote` the process that pods are forked from and `client` its client; `ruleset`
applies Landlock and `seccomp_notify` the filter that sends connects to a broker. Names are imported when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.pods.runtime.landlock.backend import LandlockBackend, SubprocessBackend
    from etude.pods.runtime.landlock.client import landlock_available

_HOMES = {
    "LandlockBackend": "etude.pods.runtime.landlock.backend",
    "SubprocessBackend": "etude.pods.runtime.landlock.backend",
    "landlock_available": "etude.pods.runtime.landlock.client",
}
__all__ = ["LandlockBackend", "SubprocessBackend", "landlock_available"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'etude.pods.runtime.landlock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
