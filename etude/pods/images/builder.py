"""The layers of a build: what RUN, COPY and WORKDIR of a Dockerfile make on one host, each cached by its key.

`dockerfile.py` interprets; a `LayerBuilder` has the layers. Layers that RUN writes get the digest of their content as
id, so that equal steps with equal results are the same image on every host. Equal steps that are asked for at the same
time run once.
"""

import asyncio
import os
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from etude.errors import InputError
from etude.pods.images.context import (
    CopyLayerWriter,
    CopySource,
    DirectoryToMake,
    FileToCopy,
    archive_source,
    copies,
    from_stack,
    owner_of,
    source_digest,
)
from etude.pods.images.layers import LayerStack
from etude.pods.images.records import Image, Layer, is_content_id
from etude.pods.images.store import Store
from etude.pods.images.trees import can_chown, copy_leaf, copy_metadata, digest
from etude.pods.pod import Egress, Pod, PodError


class PodFactory(Protocol):
    """The part of a host that a build uses."""

    async def create(self, image: Image, *, storage: Any, egress: Egress) -> Pod: ...


@dataclass(frozen=True)
class RunStep:
    """A RUN: its command runs in a pod of the image."""

    image: Image
    key: str
    command: tuple[str, ...]
    variables: Mapping[str, str]
    egress: Egress
    where: str  # in the Dockerfile, for errors


@dataclass(frozen=True)
class CopyStep:
    """A COPY or ADD: of sources that the builder is given, and of `names` in another stage."""

    image: Image
    key: str
    target: str
    into: bool  # the target was written as a directory
    owner: str = ""  # user:group
    mode: int | None = None
    origin: Image | None = None
    names: tuple[str, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class DirectoryStep:
    """A WORKDIR that the image may lack."""

    image: Image
    key: str
    path: str
    where: str


@dataclass(frozen=True)
class Location:
    """Where a path of an image leads when its links are followed."""

    path: str
    is_directory: bool


class LayerBuilder(ABC):
    """Makes the layers of builds on one host."""

    @abstractmethod
    async def scratch(self) -> Image:
        """Return an image without files."""

    @abstractmethod
    async def locate(self, image: Image, path: str) -> Location:
        """Follow the links of a path in an image."""

    @abstractmethod
    async def run(self, step: RunStep) -> Image: ...

    @abstractmethod
    async def copy(self, step: CopyStep, sources: Sequence[CopySource]) -> Image: ...

    @abstractmethod
    async def make_directory(self, step: DirectoryStep) -> Image: ...

    @abstractmethod
    async def keep(self, image: Image) -> Image:
        """Keep the layers of an image that was built, where this machine has them."""


class StoreBuilder(LayerBuilder):
    """Builds on this machine: layers in its store, RUN in its pods."""

    def __init__(self, store: Store, pods: PodFactory) -> None:
        self.store, self.pods = store, pods
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()  # by key

    async def scratch(self) -> Image:
        return empty_image(self.store)

    async def locate(self, image: Image, path: str) -> Location:
        resolved, found = await asyncio.to_thread(self._stack(image).locate, path)
        return Location(resolved, found.is_directory)

    async def keep(self, image: Image) -> Image:
        return self.store.add_image(image)

    # -- RUN

    async def run(self, step: RunStep) -> Image:
        async with self._locks.setdefault(step.key, asyncio.Lock()):
            cached = self.store.cached_image(step.key)
            if cached is not None and _portable(cached.layers, step.image.layers):
                return step.image.with_(layers=cached.layers)
            pod = await self.pods.create(step.image, storage="disk", egress=step.egress)
            try:
                directory, user = step.image.workdir, step.image.user or None
                done = await pod.exec(list(step.command), cwd=directory, env=step.variables, user=user)
                if not done.ok:
                    last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-20:])
                    raise PodError(f"{step.where}: RUN failed with exit code {done.exit_code}:\n{last}")
                snapshot = await pod.snapshot("fs")
            finally:
                await pod.close()
            made = step.image.with_(layers=await asyncio.to_thread(self._take, snapshot.id, step.image.layers))
            self.store.cache_image(step.key, made)
            return made

    def _take(self, snapshot: str, below: Sequence[Layer]) -> tuple[Layer, ...]:
        """Return the layers of a snapshot as other hosts can have them, and remove the snapshot."""
        written = self.store.snapshot(snapshot).image.layers
        try:
            return tuple(layer if layer in below else self.store.portable(layer) for layer in written)
        finally:
            self.store.remove_snapshot(snapshot)
            self.store.discard_layers(layer for layer in written if layer.id.startswith("up-") and layer not in below)

    # -- COPY, ADD and WORKDIR

    async def copy(self, step: CopyStep, sources: Sequence[CopySource]) -> Image:
        async with self._locks.setdefault(step.key, asyncio.Lock()):
            return await asyncio.to_thread(self._copy, step, sources)

    def _copy(self, step: CopyStep, sources: Sequence[CopySource]) -> Image:
        below, key = self._stack(step.image), step.key
        target, found = below.locate(step.target)  # a link as target is followed, as in a pod
        into = step.into or found.is_directory
        with self.store.staging() as staging:
            sources = list(sources)
            if step.origin is not None:
                stage = self._stack(step.origin)
                for name in step.names:
                    sources += from_stack(stage, name, staging, step.where, step.origin.binds)
                key = digest(key, source_digest(sources))
            owner = owner_of(step.owner, below, step.where)
            check_count(len(sources), into, step.target, step.where)
            unpacked = (archive_source(each, staging) if each.unpack else each for each in sources)
            return self._write_layer(step.image, key, copies(unpacked, target, into, step.mode), step.where, owner)

    async def make_directory(self, step: DirectoryStep) -> Image:
        async with self._locks.setdefault(step.key, asyncio.Lock()):
            return await asyncio.to_thread(self._make_directory, step)

    def _make_directory(self, step: DirectoryStep) -> Image:
        is_bound = any(step.path.startswith(bind) for bind in step.image.binds)
        if is_bound or self._stack(step.image).locate(step.path)[1].is_directory:
            return step.image
        return self._write_layer(step.image, step.key, [DirectoryToMake(step.path)], step.where)

    def _write_layer(
        self,
        image: Image,
        key: str,
        files: Iterable[FileToCopy | DirectoryToMake],
        where: str,
        owner: tuple[int, int] = (0, 0),
    ) -> Image:
        """Add a layer with these files to the image, or the cached one, for which none of them is made."""
        below = self._stack(image)

        def fill(target: Path) -> None:
            _, root = below.locate("/")
            if root.info is not None:
                copy_metadata(root.dirs[0].path, str(target), root.info, root.dirs[0].shift)
            CopyLayerWriter(target, below, where, owner, image.binds).write(files)

        return image.with_(layers=(*image.layers, self.store.add_layer(fill, key=key)))

    def _stack(self, image: Image) -> LayerStack:
        return LayerStack.of(self.store.layer_dirs(image.layers))


def empty_image(store: Store) -> Image:
    """Return an image without files; its layer is the same in every store."""
    return Image.of((store.add_layer(lambda target: None, key="empty"),), workdir="/")


def _portable(layers: Sequence[Layer], below: Sequence[Layer]) -> bool:
    """Return whether other hosts can have the layers above `below`; those of stores of earlier versions they cannot."""
    return all(layer in below or is_content_id(layer.id) for layer in layers)


def check_count(sources: int, into: bool, target: str, where: str) -> None:
    """Raise InputError for several sources whose target is no directory."""
    if sources > 1 and not into:
        raise InputError(f"{where}: {sources} sources need a directory as target; end {target!r} with a slash")


# -- the sources of COPY as a layer, in which they travel to another host


def pack_sources(store: Store, sources: Sequence[CopySource]) -> Layer:
    """Return a layer with the sources, by number: equal sources make equal layers."""

    def fill(target: Path) -> None:
        for number, source in enumerate(sources):
            entries = list(source.walk())
            for inside, path, info in entries:
                place = os.path.normpath(target / str(number) / inside)
                if stat.S_ISDIR(info.st_mode):
                    os.mkdir(place)
                else:
                    copy_leaf(str(path), place, info)
            for inside, path, info in reversed(entries):  # a directory's mode may forbid to write into it
                place = os.path.normpath(target / str(number) / inside)
                if stat.S_ISDIR(info.st_mode):
                    copy_metadata(str(path), place, info)
                if can_chown() and os.path.lexists(place):
                    os.lchown(place, 0, 0)
                    if not stat.S_ISLNK(info.st_mode):
                        os.chmod(place, stat.S_IMODE(info.st_mode))

    return store.add_layer(fill)


def unpack_sources(store: Store, layer: Layer, names: Sequence[tuple[str, bool]]) -> list[CopySource]:
    """Return the sources of a layer of `pack_sources`, given the name of each and whether ADD unpacks it."""
    top = store.layer_path(layer)
    return [CopySource(top / str(number), name, unpack=unpack) for number, (name, unpack) in enumerate(names)]
