"""Layers on their way between stores: packed once, sent in parts, resumed after an interruption, verified on arrival.

A layer travels under the digest of its content (`Store.portable`). The source packs it to a file, the target collects
the parts of that file in `incoming/`. At a target one sender at a time has the lease of a layer and the others wait, so
that a layer is sent once however many requests need it; a sender that is silent loses the lease to the next, which
continues where it stopped.
"""

import asyncio
import contextlib
import os
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from etude.errors import EtudeError
from etude.pods.images.archive import pack_compressed
from etude.pods.images.records import Layer, check_id, is_content_id
from etude.pods.images.store import Store
from etude.pods.pod import PodError

PART = 8 << 20  # bytes of a file sent at once
LEASE_S = 15.0  # a sender that has sent nothing for this long has died
BUSY_S = 0.2  # between questions whether another sender has finished
MAX_DAMAGED = 2  # arrivals with a wrong digest before a transfer fails


class SourceFailed(PodError):
    """A layer could not be read from its source; another one may have it."""


class LayersMissing(PodError):
    """A host lacks layers that it had, or was said to have; they can be sent again."""


@dataclass(frozen=True)
class PackedLayer:
    """A layer packed to a file."""

    layer: str
    digest: str  # SHA-256 of the file, in hex
    size: int

    def __post_init__(self) -> None:
        if not is_content_id(self.layer) or not re.fullmatch("[0-9a-f]{64}", self.digest) or self.size < 1:
            raise ValueError(f"{self!r} is no packed layer")


@dataclass(frozen=True)
class Arrival:
    """How much of a packed layer has arrived. `busy`: another sender has the lease."""

    state: Literal["present", "busy", "expected"]
    received: int = 0


class LayerPeer(ABC):
    """A store that layers are read from and sent to: of this process, or of a host."""

    @abstractmethod
    async def missing(self, layers: Sequence[str]) -> list[str]:
        """Return those of the layers that are not there."""

    @abstractmethod
    async def pack(self, layer: str) -> PackedLayer:
        """Pack a layer, if it is not packed yet."""

    @abstractmethod
    async def read(self, packed: PackedLayer, offset: int) -> bytes:
        """Return the part of a packed layer that begins at `offset`: at most PART bytes, none at the end."""

    @abstractmethod
    async def begin(self, packed: PackedLayer, sender: str) -> Arrival:
        """Take the lease of a layer that shall be sent, unless it is there or another sender has the lease."""

    @abstractmethod
    async def write(self, packed: PackedLayer, sender: str, offset: int, data: bytes) -> Arrival:
        """Append a part. One that does not begin where the last one ended is ignored. The last part ends the layer."""


async def send_layer(source: LayerPeer, target: LayerPeer, layer: str, sender: str) -> int:
    """Send a layer that the target lacks, or wait until another sender has; return the bytes sent."""
    sent = damaged = 0
    try:
        packed = await source.pack(layer)
    except EtudeError as error:
        raise SourceFailed(str(error)) from error
    while True:
        arrival = await target.begin(packed, sender)
        if arrival.state == "present":
            return sent
        if arrival.state == "busy":
            await asyncio.sleep(BUSY_S)
            continue
        reading = asyncio.create_task(_read(source, packed, arrival.received))
        try:
            while arrival.state == "expected":
                offset, data = arrival.received, await reading
                reading = asyncio.create_task(_read(source, packed, offset + len(data)))  # while this part is sent
                arrival = await target.write(packed, sender, offset, data)
                sent += len(data)
                if arrival.state == "expected" and arrival.received != offset + len(data):
                    damaged += arrival.received == 0
                    break  # another sender has continued, or the file was damaged
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        if damaged > MAX_DAMAGED:
            raise PodError(f"layer {layer} arrived damaged {damaged} times")


async def _read(source: LayerPeer, packed: PackedLayer, offset: int) -> bytes:
    if offset >= packed.size:
        return b""
    try:
        return await source.read(packed, offset)
    except EtudeError as error:
        raise SourceFailed(str(error)) from error


class StorePeer(LayerPeer):
    """The layers of a store on this machine, which several processes may share."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.packing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)  # by layer
        self.arriving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.unpacking: dict[str, asyncio.Task[bool]] = {}

    async def missing(self, layers: Sequence[str]) -> list[str]:
        return await asyncio.to_thread(self.store.missing, map(check_id, layers))

    # -- source

    async def pack(self, layer: str) -> PackedLayer:
        async with self.packing[layer]:
            return await asyncio.to_thread(self._pack, check_id(layer))

    def _pack(self, layer: str) -> PackedLayer:
        directory = self.store.root / "layers" / layer
        if self.store.missing([layer]):
            raise PodError(f"layer {layer} is not in {self.store.root}")
        for file in (*directory.glob("kept-*.zst"), *directory.glob("packed-*.zst")):
            os.utime(file)
            return PackedLayer(layer, file.stem.partition("-")[2], file.stat().st_size)
        with self.store.staging() as staging:
            packed, _ = pack_compressed(self.store.layer_path(Layer(layer)), staging / "packed")
            os.rename(staging / "packed", directory / f"packed-{packed.hexdigest()}.zst")
        return PackedLayer(layer, packed.hexdigest(), packed.size)

    async def read(self, packed: PackedLayer, offset: int) -> bytes:
        return await asyncio.to_thread(self._read, packed, offset)

    def _read(self, packed: PackedLayer, offset: int) -> bytes:
        directory = self.store.root / "layers" / packed.layer
        for file in (directory / f"packed-{packed.digest}.zst", directory / f"kept-{packed.digest}.zst"):
            with contextlib.suppress(FileNotFoundError), open(file, "rb") as opened:
                opened.seek(offset)
                return opened.read(PART)
        raise PodError(f"layer {packed.layer} is not packed any more")

    # -- target

    async def begin(self, packed: PackedLayer, sender: str) -> Arrival:
        if packed.layer in self.unpacking:
            return Arrival("busy", packed.size)
        return await asyncio.to_thread(self._begin, packed, sender)

    def _begin(self, packed: PackedLayer, sender: str) -> Arrival:
        lease = self._lease(packed)
        if not self.store.missing([packed.layer]):
            return Arrival("present", packed.size)
        with self.store.arrivals_locked():
            with contextlib.suppress(FileNotFoundError):
                age = time.time() - lease.stat().st_mtime
                if lease.read_text() != sender and age < LEASE_S:
                    return Arrival("busy", self._received(packed))
            lease.write_text(sender)
        return Arrival("expected", self._received(packed))

    async def write(self, packed: PackedLayer, sender: str, offset: int, data: bytes) -> Arrival:
        async with self.arriving[packed.layer]:
            arrival = await asyncio.to_thread(self._append, packed, sender, offset, data)
        if arrival.state != "expected" or arrival.received < packed.size:
            return arrival
        if packed.layer not in self.unpacking:
            task = self.unpacking[packed.layer] = asyncio.create_task(asyncio.to_thread(self._finish, packed))
            task.add_done_callback(lambda _: self.unpacking.pop(packed.layer, None))
        whole = await asyncio.shield(self.unpacking[packed.layer])  # a sender that disconnects does not end it
        return Arrival("present", packed.size) if whole else Arrival("expected", 0)

    def _append(self, packed: PackedLayer, sender: str, offset: int, data: bytes) -> Arrival:
        lease = self._lease(packed)
        with contextlib.suppress(FileNotFoundError):
            if lease.read_text() == sender:
                os.utime(lease)
                received = self._received(packed)
                if received == offset and offset + len(data) <= packed.size:
                    with open(self._part(packed), "ab") as file:
                        file.write(data)
                    received += len(data)
                return Arrival("expected", received)
        state: Literal["present", "busy"] = "busy" if self.store.missing([packed.layer]) else "present"
        return Arrival(state, self._received(packed))

    def _finish(self, packed: PackedLayer) -> bool:
        """Unpack a layer that has arrived as a whole; return whether it is the one that was sent."""
        part = self._part(packed)
        try:
            return self.store.receive_layer(packed.layer, part, packed.digest)
        except FileNotFoundError:  # another process that shares the store was faster
            if self.store.missing([packed.layer]):
                raise
            return True
        finally:
            part.unlink(missing_ok=True)
            self._lease(packed).unlink(missing_ok=True)

    def _received(self, packed: PackedLayer) -> int:
        try:
            return self._part(packed).stat().st_size
        except FileNotFoundError:
            return 0

    def _part(self, packed: PackedLayer) -> Path:
        return self.store.root / "incoming" / f"{packed.layer}-{packed.digest[:16]}.part"

    def _lease(self, packed: PackedLayer) -> Path:
        return self.store.root / "incoming" / f"{packed.layer}.lease"


def new_sender() -> str:
    """Return a name for a sender of layers that no other has."""
    return secrets.token_hex(8)
