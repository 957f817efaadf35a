"""Warm pools: pods started in advance, by the attributes a request must match. The host fills them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from etude.pods.pod import Egress, Limits
from etude.pods.runtime.backend import LocalPod, PodSpec, Storage


@dataclass(frozen=True)
class WarmPoolKey:
    """The attributes in which a warm pod must equal a request."""

    image: str
    limits: Limits
    egress: Egress
    storage: Storage


@dataclass
class WarmPool:
    """Pods of one kind, started in advance."""

    size: int
    spec: Callable[[], PodSpec]
    ready: list[LocalPod]
    refill_task: asyncio.Task[None] | None = None


def warm_pool_key(spec: PodSpec) -> WarmPoolKey:
    """Return the key of the warm pool that serves `spec`."""
    return WarmPoolKey(spec.image.id, spec.limits, spec.egress, spec.storage)
