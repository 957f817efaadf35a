"""Warm pods: what makes one as good as another, and how many are kept ready. The host fills them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from etude.pods.pod import Egress, Limits
from etude.pods.runtime.backend import LocalPod, PodSpec, Storage


@dataclass(frozen=True)
class WarmPoolKey:
    """What makes one warm pod as good as another."""

    image: str
    limits: Limits
    egress: Egress
    storage: Storage


@dataclass
class WarmPool:
    """Pods started in advance."""

    size: int
    spec: Callable[[], PodSpec]
    ready: list[LocalPod]
    filling: asyncio.Task[None] | None = None


def warm_pool_key(spec: PodSpec) -> WarmPoolKey:
    """The kind of warm pod that serves `spec`."""
    return WarmPoolKey(spec.image.id, spec.limits, spec.egress, spec.storage)
