"""References to the layers that a zygote holds in memory: a layer without any is dropped after a moment."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence

from etude.pods.images.records import Layer
from etude.pods.images.store import Store
from etude.pods.pod import PodError
from etude.pods.registry import PodRegistry
from etude.pods.runtime.backend import Backend

DROP_DELAY_S = 0.5  # from the last release of a layer until it is dropped


class MemoryLayers:
    """Counts the references of this process's pods and snapshots; the records have those of the others."""

    def __init__(self, backend: Backend, store: Store, registry: PodRegistry) -> None:
        self.backend, self.store, self.registry = backend, store, registry
        self.refs: Counter[str] = Counter()
        self.unreferenced: set[str] = set()
        self.dropping: asyncio.Task[None] | None = None

    def ref(self, layers: Sequence[Layer], delta: int) -> None:
        """Change the reference counts of in-memory layers; schedule the drop of those that reach 0."""
        for layer in layers:
            if layer.memory:
                self.refs[layer.id] += delta
                if self.refs[layer.id] <= 0:
                    del self.refs[layer.id]
                    self.unreferenced.add(layer.id)
        if self.unreferenced and self.dropping is None:
            self.dropping = asyncio.create_task(self._drop_later())

    async def _drop_later(self) -> None:
        await asyncio.sleep(DROP_DELAY_S)
        self.dropping = None
        await self._drop_unreferenced()

    async def _drop_unreferenced(self) -> None:
        idle, self.unreferenced = self.unreferenced, set()
        for id in idle - set(self.refs) - await asyncio.to_thread(self._recorded):
            with contextlib.suppress(PodError):
                await self.backend.drop(Layer(id, memory=True))

    def _recorded(self) -> set[str]:
        stacks = [spec.image.layers for spec in self.registry.records()]
        stacks += [saved.image.layers for saved in self.store.snapshots()]
        return {layer.id for stack in stacks for layer in stack}

    async def drop_of_dead_owners(self) -> None:
        """Drop the layers that dead processes left."""
        unreferenced = await self.backend.memory_layers() - set(self.refs)
        for id in unreferenced - await asyncio.to_thread(self._recorded):
            if not self.registry.alive(id.partition(".")[0]):
                await self.backend.drop(Layer(id, memory=True))

    async def close(self) -> None:
        """Drop the unreferenced layers now."""
        if self.dropping is not None:
            self.dropping.cancel()
        if self.unreferenced:
            await self._drop_unreferenced()
