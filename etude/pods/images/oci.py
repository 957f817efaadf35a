"""OCI image layouts: a directory with index.json and blobs named by their digest, in and out.

Everything read is checked against the digest that named it, layers both as stored and unpacked. What a layout says is
never used as a path before it was checked to be a digest.
"""

import io
import json
import os
import platform
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from etude.errors import InputError
from etude.pods.images.archive import HashingReader, UnpackLimits, decompressed, unpack
from etude.pods.images.layers import LayerStack
from etude.pods.images.records import Layer
from etude.pods.images.trees import copy_metadata, digest, is_opaque

if TYPE_CHECKING:
    from etude.pods.images.store import Store

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
REF = "org.opencontainers.image.ref.name"

_INDEXES = (INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
_DIGEST = re.compile(r"sha(256:[0-9a-f]{64}|512:[0-9a-f]{128})")
_MAX_JSON = 8 << 20
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386", "ppc64le": "ppc64le"}


def architecture() -> str:
    """This machine's architecture, in the words of OCI."""
    machine = platform.machine()
    return _MACHINES.get(machine, machine)


class OciLayout:
    """A layout in a directory that may have been written by anybody."""

    def __init__(self, directory: Path, what: str) -> None:
        self._directory, self._what = directory, what
        if not (directory / "index.json").is_file():
            raise InputError(f"{what}: no index.json, so this is not an OCI image layout")
        with self._open("index.json") as file:
            self._index = self._parse(file.read(_MAX_JSON), "index.json")

    def manifest(self, ref: str | None = None) -> dict[str, Any]:
        """The manifest for this machine: the one called `ref`, or the only one."""
        entries = self._entries(self._index)
        if ref is not None:
            entries = [entry for entry in entries if self._ref(entry) == ref]
        fitting = list(self._fitting(entries, 0))
        if len(fitting) == 1:
            return self.json(fitting[0])
        refs = sorted({self._ref(entry) or "(no name)" for entry in self._entries(self._index)})
        found = f"{len(fitting)} images" if fitting else "no image"
        raise InputError(
            f"{self._what}: {found} {f'called {ref} ' if ref else ''}for linux/{architecture()}; "
            f"name one of: {', '.join(refs)}"
        )

    def _fitting(self, entries: Sequence[Mapping[str, Any]], depth: int) -> Iterator[Mapping[str, Any]]:
        """The manifests among `entries`, and in the indexes among them, that run here."""
        for entry in entries:
            if entry.get("mediaType") in _INDEXES and depth < 5:
                yield from self._fitting(self._entries(self.json(entry)), depth + 1)
                continue
            wanted = entry.get("platform") or {}
            if wanted.get("os", "linux") == "linux" and wanted.get("architecture", architecture()) == architecture():
                yield entry

    def _entries(self, index: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        entries = index.get("manifests")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"{self._what}: an index without a list of manifests")
        return entries

    @staticmethod
    def _ref(entry: Mapping[str, Any]) -> str:
        return str((entry.get("annotations") or {}).get(REF, ""))

    def json(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """A blob that is a JSON object."""
        name = self.name(descriptor)
        with self.blob(descriptor) as reader:
            data = reader.read(_MAX_JSON + 1)
            if len(data) > _MAX_JSON:
                raise InputError(f"{self._what}: blob {name} is larger than {_MAX_JSON} bytes")
        return self._parse(data, name)

    @contextmanager
    def blob(self, descriptor: Mapping[str, Any]) -> Iterator[HashingReader]:
        """A blob's bytes; at the end of the block it has been read whole, and is what its digest says."""
        name = self.name(descriptor)
        kind, _, wanted = name.partition(":")
        with self._open(f"blobs/{kind}/{wanted}") as file:
            reader = HashingReader(file, kind=kind)
            yield reader
            if reader.drain() != wanted or descriptor.get("size", reader.size) != reader.size:
                raise InputError(f"{self._what}: blob {name} is damaged (its content has another digest); get it again")

    def name(self, descriptor: Mapping[str, Any]) -> str:
        """The digest of what a descriptor stands for, which is safe to use as a path."""
        name = descriptor.get("digest")
        if not isinstance(name, str) or not _DIGEST.fullmatch(name):
            raise InputError(f"{self._what}: {name!r} is not a digest")
        return name

    def _open(self, name: str) -> io.BufferedReader:
        try:
            file = open(os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{self._what}: cannot read {name} ({error.strerror})") from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise InputError(f"{self._what}: {name} is not a file")
        return file

    def _parse(self, data: bytes, name: str) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self._what}: {name} is not JSON ({error})") from None
        if not isinstance(value, dict):
            raise InputError(f"{self._what}: {name} is not a JSON object")
        return value


def take_layers(
    store: "Store",
    layout: OciLayout,
    descriptors: Sequence[Any],
    diff_ids: Sequence[Any],
    what: str,
    allow: UnpackLimits,
) -> tuple[Layer, ...]:
    """The layers of a manifest, lowest first, unpacked into the store unless they are there."""
    if len(descriptors) != len(diff_ids) or not all(isinstance(entry, dict) for entry in descriptors):
        raise InputError(f"{what}: {len(descriptors)} layers in the manifest, {len(diff_ids)} in the configuration")
    taken: list[Layer] = []
    chain = ""
    for descriptor, diff_id in zip(descriptors, diff_ids, strict=True):
        # a directory that a layer does not describe looks as below: what a layer is depends on those under it
        chain = digest("oci", chain, str(diff_id))
        fill = partial(_fill, store, layout, descriptor, str(diff_id), tuple(taken), what, allow)
        layer = store.add_layer(fill, key=chain)
        if is_opaque(str(store.layer_path(layer))):
            taken.clear()  # it hides everything below, which overlay does not do for the root itself
        taken.append(layer)
    return tuple(taken)


def _fill(
    store: "Store",
    layout: OciLayout,
    descriptor: Mapping[str, Any],
    diff_id: str,
    below: tuple[Layer, ...],
    what: str,
    allow: UnpackLimits,
    target: Path,
) -> None:
    implied = unpack_blob(layout, descriptor, diff_id, target, what, allow, lowest=not below)
    describe(target, LayerStack.of(store.parts(below)), implied)


def unpack_blob(
    layout: OciLayout,
    descriptor: Mapping[str, Any],
    diff_id: str,
    target: Path,
    what: str,
    allow: UnpackLimits,
    lowest: bool,
) -> list[str]:
    """Unpack one layer, checking its digests; returns what `unpack` does."""
    kind, _, wanted = layout.name({"digest": diff_id}).partition(":")
    with layout.blob(descriptor) as raw:
        plain = HashingReader(decompressed(cast(IO[bytes], raw)), kind=kind)
        implied = unpack(cast(IO[bytes], plain), target, what, allow, lowest)
        if plain.drain() != wanted:
            raise InputError(f"{what}: layer {diff_id} is damaged (its content has another digest); get it again")
    return implied


def describe(layer: Path, below: LayerStack, implied: Sequence[str]) -> None:
    """Directories that are in a layer only for what is in them keep the owner and mode they have below."""
    for path in implied:
        where, found = below.locate(path, follow=False)
        if found.directory and found.info is not None and where.strip("/") == path:
            copy_metadata(found.parts[0].path, str(layer / path), found.info, found.parts[0].shift)


def configuration(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """What an image's configuration says about starting programs, as fields of `Image`."""
    given = config.get("config") or {}
    try:
        env = dict(str(entry).split("=", 1) for entry in given.get("Env") or ())
        return {
            "env": env,
            "workdir": str(given.get("WorkingDir") or "/"),
            "user": str(given.get("User") or ""),
            "entrypoint": tuple(map(str, given.get("Entrypoint") or ())),
            "command": tuple(map(str, given.get("Cmd") or ())),
            "labels": {str(key): str(value) for key, value in (given.get("Labels") or {}).items()},
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{what}: the image's configuration cannot be read ({error})") from None
