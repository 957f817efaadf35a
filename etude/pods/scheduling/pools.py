"""Warm pools: pods started and prepared in advance. A request for a pod of exactly the same kind claims one."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from etude.pods.images.records import Image
from etude.pods.pod import Egress, Limits, Pod
from etude.pods.runtime.backend import PodSpec, Storage

PodT = TypeVar("PodT", bound=Pod)
Prepare = Callable[[Pod], Awaitable[Any]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PodKind:
    """The attributes in which a warm pod must equal a request: also the function that prepared it, compared by `==`."""

    image: str  # its id; of a remote pod, where the host resolves it, its name
    limits: Limits
    egress: Egress
    storage: Storage
    prepare: Prepare | None

    @classmethod
    def of(cls, spec: PodSpec, prepare: Prepare | None) -> "PodKind":
        return cls(spec.image.id, spec.limits, spec.egress, spec.storage, prepare)


class WarmPool(Generic[PodT]):
    """Pods of one kind. `start` creates a pod that is prepared and ready to be claimed."""

    def __init__(self, start: Callable[[], Awaitable[PodT]], image: Image | None = None) -> None:
        self.image, self.start, self.size = image, start, 0
        self.ready: list[PodT] = []
        self.filling: asyncio.Task[None] | None = None

    async def resize(self, size: int) -> None:
        """Keep `size` pods ready from now on; close those above."""
        self.size = size
        surplus, self.ready = self.ready[size:], self.ready[:size]
        await asyncio.gather(*(pod.close() for pod in surplus))
        self.refill()

    def take(self) -> PodT | None:
        """Return a ready pod, the oldest first; None if there is none."""
        return self.ready.pop(0) if self.ready else None

    def refill(self) -> None:
        """Start pods in the background, one after the other, until `size` are ready."""
        if self.filling is None or self.filling.done():
            self.filling = asyncio.create_task(self._fill())

    async def _fill(self) -> None:
        try:
            while len(self.ready) < self.size:
                pod = await self.start()
                if len(self.ready) < self.size:
                    self.ready.append(pod)
                else:  # the pool has shrunk meanwhile
                    await pod.close()
        except Exception as error:  # of any kind, because `prepare` is the caller's
            logger.warning("a warm pool has %d of %d pods until its next claim: %s", len(self.ready), self.size, error)

    async def close(self) -> None:
        """End the refilling. The ready pods are closed with their host."""
        self.size = 0
        if self.filling is not None:
            self.filling.cancel()
            await asyncio.gather(self.filling, return_exceptions=True)
