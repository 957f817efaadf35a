"""Brings images and snapshots to the hosts that need them, layer by layer, from this machine's store or other hosts.

Nothing is sent to a host that has it. A layer on its way to a host is sent once, however many pods wait for it; what is
sent from one host to another passes through this process in parts, and is not stored here.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from etude.errors import EtudeError, InputError
from etude.pods.host_client import HostClient, HostGone
from etude.pods.images.records import Image, SnapshotRecord
from etude.pods.images.store import Store
from etude.pods.images.transfer import LayerPeer, SourceFailed, StorePeer, new_sender, send_layer
from etude.pods.pod import PodError
from etude.system.run_limited import run_limited

AT_ONCE = 4  # layers sent to a host at the same time, for one image
SOURCE_WAIT_S = 15.0  # for the only host with a layer, if it does not answer: it may be restarting
RETRY_S = 0.5


class LayerLost(PodError):
    """No store that can be reached has a layer: what consists of it must be made again."""


class Distribution:
    """Images, layers and snapshots on a set of hosts, which may grow and shrink, and in the store of this machine."""

    def __init__(self, here: Store, clients: Mapping[str, HostClient], answers: Callable[[HostClient], bool]) -> None:
        self.here = StorePeer(here)
        self.clients = clients  # by address
        self.answers = answers  # whether a host answered when it was asked last
        self.sender = new_sender()
        self.sent: Counter[HostClient] = Counter()  # bytes of layers
        self.known: defaultdict[HostClient, dict[str, bool]] = defaultdict(dict)  # whether a host has a layer
        self.transfers: dict[tuple[LayerPeer, str], asyncio.Task[int]] = {}

    async def close(self) -> None:
        """End the transfers that are under way; they can be continued by another process."""
        for task in self.transfers.values():
            task.cancel()
        await asyncio.gather(*self.transfers.values(), return_exceptions=True)
        await asyncio.to_thread(self.here.store.remove_packed)

    # ------------------------------------------------------------------------------------------- images

    async def holders(self, image: Image) -> frozenset[str]:
        """Return the names of the hosts that have all layers of an image, of those that answer."""
        ids = [layer.id for layer in image.layers]

        async def ask(client: HostClient) -> None:
            if not set(ids) <= self.known[client].keys():
                missing = set(await client.layers.missing(ids))
                self.known[client].update({id: id not in missing for id in ids})

        clients = list(filter(self.answers, self.clients.values()))
        await asyncio.gather(*map(ask, clients), return_exceptions=True)  # one that does not answer now has none
        return frozenset(client.name for client in clients if all(self.known[client].get(id) for id in ids))

    async def exists(self, image: Image) -> bool:
        """Return whether a host that answers has an image, or this machine."""
        ids = [layer.id for layer in image.layers]
        return bool(await self.holders(image)) or not await self.here.missing(ids)

    async def bring_image(self, image: Image, target: HostClient) -> None:
        """Bring the layers of an image to a host."""
        ids = [layer.id for layer in image.layers]
        if not all(self.known[target].get(id) for id in ids):
            try:
                sent = await self._bring(ids, target.layers)
            except (HostGone, LayerLost):
                raise
            except (InputError, PodError) as error:  # such as a full disk
                raise HostGone(f"host {target.url} cannot receive an image: {error}") from error
            self.sent[target] += sent
            self.note(image, target)

    def note(self, image: Image, client: HostClient) -> None:
        """Record that a host has an image."""
        self.known[client].update({layer.id: True for layer in image.layers})

    def forget(self, client: HostClient) -> None:
        """Forget what a host has: it has answered that it lacks something."""
        self.known.pop(client, None)

    async def fetch_image(self, image: Image) -> None:
        """Bring the layers of an image to the store of this machine."""
        await self._bring([layer.id for layer in image.layers], self.here)

    async def find_image(self, name: str) -> Image:
        """Return the image that has a name here or on hosts; InputError if there are several different ones."""
        found: dict[str, list[str]] = defaultdict(list)  # where, by digest
        images: dict[str, Image] = {}

        def add(image: Image, where: str) -> None:
            found[image.id].append(where)
            images[image.id] = image.named(name)

        async def ask(client: HostClient) -> Image | None:
            try:
                return await client.image(name)
            except InputError:
                return None  # it has none of this name

        clients = list(self.clients.values())
        results = await asyncio.gather(*map(ask, clients), return_exceptions=True)
        for client, result in zip(clients, results, strict=True):
            if isinstance(result, Image):
                add(result, client.url)
        try:
            local = await asyncio.to_thread(self.here.store.image, name)
            layers = [await asyncio.to_thread(self.here.store.portable, layer) for layer in local.layers]
            add(local.with_(layers=tuple(layers)), "this machine")
        except InputError:
            pass
        if len(images) == 1:
            return next(iter(images.values()))
        if images:
            where = "; ".join(f"{id[:16]} on {', '.join(places)}" for id, places in found.items())
            raise InputError(f"the image {name!r} is not the same everywhere: {where}; give it by its digest")
        if failed := [str(error) for error in results if error is not None]:
            raise PodError(f"no reachable host has the image {name!r}: {failed[0]}")
        raise InputError(f"there is no image {name!r} on this machine or on the pod hosts")

    # ------------------------------------------------------------------------------------------- snapshots

    async def find_snapshot(self, id: str, likely: Sequence[str] = ()) -> tuple[SnapshotRecord, HostClient]:
        """Return the record of a snapshot and a host that has it, asking the hosts at `likely` addresses first."""
        deadline = time.monotonic() + SOURCE_WAIT_S
        while True:
            silent: list[str] = []  # hosts that may have it, and be restarting
            for url in dict.fromkeys((*likely, *self.clients)):
                client = self.clients.get(url)
                try:
                    if client is not None:
                        return await client.portable_snapshot(id), client
                except HostGone as error:
                    silent += [str(error)] if url in likely else []
                except InputError:
                    continue
            if not silent or time.monotonic() > deadline:
                raise PodError("; ".join([f"no reachable host has snapshot {id}", *silent]))
            await asyncio.sleep(RETRY_S)

    async def bring_snapshot(self, id: str, target: HostClient, likely: Sequence[str] = ()) -> None:
        """Bring a snapshot to a host."""
        record, source = await self.find_snapshot(id, likely)
        if source is not target:
            self.note(record.image, source)
            await self.bring_image(record.image, target)
            await target.add_snapshot(record)

    async def fetch_snapshot(self, id: str) -> Image:
        """Bring the layers of a snapshot to the store of this machine; return an image of them."""
        record, source = await self.find_snapshot(id)
        self.note(record.image, source)
        await self.fetch_image(record.image)
        return replace(record.image, id="", name="").with_()

    # ------------------------------------------------------------------------------------------- layers

    async def _bring(self, layers: Sequence[str], target: LayerPeer) -> int:
        """Bring layers to a store; return the bytes that were sent for it."""
        lacking = await target.missing(layers)
        return sum(await run_limited((self._once(layer, target) for layer in lacking), AT_ONCE))

    async def _once(self, layer: str, target: LayerPeer) -> int:
        """Send a layer, or wait for the transfer of it that is under way; that one counts its bytes."""
        key = (target, layer)
        if key in self.transfers:
            await asyncio.shield(self.transfers[key])
            return 0
        task = self.transfers[key] = asyncio.create_task(self._send(layer, target))
        task.add_done_callback(lambda done: self._transferred(key, done))
        return await asyncio.shield(task)

    def _had(self, client: HostClient, layer: str) -> bool:
        return self.known[client].get(layer, False)

    def _transferred(self, key: tuple[LayerPeer, str], task: "asyncio.Task[int]") -> None:
        self.transfers.pop(key, None)
        if not task.cancelled():
            task.exception()  # those who waited have it

    async def _send(self, layer: str, target: LayerPeer) -> int:
        """Send a layer from the first store that has it; wait a while for a host that had it and does not answer."""
        deadline = time.monotonic() + SOURCE_WAIT_S
        while True:
            failures: list[str] = []
            sources = [(self.here, True), *((each.layers, self._had(each, layer)) for each in self.clients.values())]
            for source, had in sources:
                try:
                    if source is target or await source.missing([layer]):
                        continue
                except EtudeError as error:
                    failures += [str(error)] if had else []
                    continue
                try:
                    return await send_layer(source, target, layer, self.sender)
                except SourceFailed as error:
                    failures.append(str(error))
            if not failures or time.monotonic() > deadline:
                raise LayerLost("; ".join([f"no reachable host has layer {layer}", *failures]))
            await asyncio.sleep(RETRY_S)
