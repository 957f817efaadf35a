"""Pods without namespaces: a process and a directory, confined by Landlock and seccomp or not at all.

`backend` has the two backends, `zygote` the process that pods are forked from and `client` its client; `ruleset`
applies Landlock and `seccomp_notify` the filter that sends connects to a broker. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from etude.lazy import lazy_exports

if TYPE_CHECKING:
    from etude.pods.runtime.landlock.backend import LandlockBackend as LandlockBackend
    from etude.pods.runtime.landlock.backend import SubprocessBackend as SubprocessBackend
    from etude.pods.runtime.landlock.client import landlock_available as landlock_available

__getattr__ = lazy_exports(__name__)
