"""Read OCI image layouts: a directory with index.json and blobs named by their digest.

Every blob is verified against its digest, layers both compressed and uncompressed. No string of a layout is used as a
path before it is checked to be a digest.
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
from etude.pods.images.archive import HashingReader, UnpackLimits, decompress, unpack
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
    """Return this machine's architecture by its OCI name."""
    machine = platform.machine()
    return _MACHINES.get(machine, machine)


class OciLayout:
    """An untrusted OCI image layout in a directory; `label` names it in errors."""

    def __init__(self, directory: Path, label: str) -> None:
        self._directory, self._label = directory, label
        if not (directory / "index.json").is_file():
            raise InputError(f"{label}: no index.json, so this is not an OCI image layout")
        with self._open("index.json") as file:
            self._index = self._parse(file.read(_MAX_JSON), "index.json")

    def manifest(self, ref: str | None = None) -> dict[str, Any]:
        """Return the manifest for this machine's platform: the one named `ref`, or the only one."""
        entries = self._entries(self._index)
        if ref is not None:
            entries = [entry for entry in entries if self._ref(entry) == ref]
        matching = list(self._matching(entries, 0))
        if len(matching) == 1:
            return self.json(matching[0])
        refs = sorted({self._ref(entry) or "(no name)" for entry in self._entries(self._index)})
        found = f"{len(matching)} images" if matching else "no image"
        raise InputError(
            f"{self._label}: {found} {f'called {ref} ' if ref else ''}for linux/{architecture()}; "
            f"name one of: {', '.join(refs)}"
        )

    def _matching(self, entries: Sequence[Mapping[str, Any]], depth: int) -> Iterator[Mapping[str, Any]]:
        """Yield the manifests in `entries`, and in nested indexes, that match this machine's platform."""
        for entry in entries:
            if entry.get("mediaType") in _INDEXES and depth < 5:
                yield from self._matching(self._entries(self.json(entry)), depth + 1)
                continue
            wanted = entry.get("platform") or {}
            if wanted.get("os", "linux") == "linux" and wanted.get("architecture", architecture()) == architecture():
                yield entry

    def _entries(self, index: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        entries = index.get("manifests")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError(f"{self._label}: an index without a list of manifests")
        return entries

    @staticmethod
    def _ref(entry: Mapping[str, Any]) -> str:
        return str((entry.get("annotations") or {}).get(REF, ""))

    def json(self, descriptor: Mapping[str, Any]) -> dict[str, Any]:
        """Return a blob that is a JSON object."""
        name = self.name(descriptor)
        with self.blob(descriptor) as reader:
            data = reader.read(_MAX_JSON + 1)
            if len(data) > _MAX_JSON:
                raise InputError(f"{self._label}: blob {name} is larger than {_MAX_JSON} bytes")
        return self._parse(data, name)

    @contextmanager
    def blob(self, descriptor: Mapping[str, Any]) -> Iterator[HashingReader]:
        """Yield a reader of a blob; at the end of the block, read the rest and verify the digest."""
        name = self.name(descriptor)
        kind, _, wanted = name.partition(":")
        with self._open(f"blobs/{kind}/{wanted}") as file:
            reader = HashingReader(file, kind=kind)
            yield reader
            if reader.drain() != wanted or descriptor.get("size", reader.size) != reader.size:
                raise InputError(
                    f"{self._label}: blob {name} is damaged (its content has another digest); get it again"
                )

    def name(self, descriptor: Mapping[str, Any]) -> str:
        """Return a descriptor's digest, which is then safe to use in a path."""
        name = descriptor.get("digest")
        if not isinstance(name, str) or not _DIGEST.fullmatch(name):
            raise InputError(f"{self._label}: {name!r} is not a digest")
        return name

    def _open(self, name: str) -> io.BufferedReader:
        try:
            file = open(os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{self._label}: cannot read {name} ({error.strerror})") from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise InputError(f"{self._label}: {name} is not a file")
        return file

    def _parse(self, data: bytes, name: str) -> dict[str, Any]:
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{self._label}: {name} is not JSON ({error})") from None
        if not isinstance(value, dict):
            raise InputError(f"{self._label}: {name} is not a JSON object")
        return value


def import_layers(
    store: "Store",
    layout: OciLayout,
    descriptors: Sequence[Any],
    diff_ids: Sequence[Any],
    label: str,
    limits: UnpackLimits,
) -> tuple[Layer, ...]:
    """Return the layers of a manifest, lowest first, unpacking those that are not in the store."""
    if len(descriptors) != len(diff_ids) or not all(isinstance(entry, dict) for entry in descriptors):
        raise InputError(f"{label}: {len(descriptors)} layers in the manifest, {len(diff_ids)} in the configuration")
    taken: list[Layer] = []
    chain = ""
    for descriptor, diff_id in zip(descriptors, diff_ids, strict=True):
        # a directory that a layer does not describe takes its metadata from below: a layer depends on those under it
        chain = digest("oci", chain, str(diff_id))
        fill = partial(_fill, store, layout, descriptor, str(diff_id), tuple(taken), label, limits)
        layer = store.add_layer(fill, key=chain)
        if is_opaque(str(store.layer_path(layer))):
            taken.clear()  # it hides everything below; overlayfs ignores the marker on the root itself
        taken.append(layer)
    return tuple(taken)


def _fill(
    store: "Store",
    layout: OciLayout,
    descriptor: Mapping[str, Any],
    diff_id: str,
    below: tuple[Layer, ...],
    label: str,
    limits: UnpackLimits,
    target: Path,
) -> None:
    implied = unpack_blob(layout, descriptor, diff_id, target, label, limits, lowest=not below)
    inherit_metadata(target, LayerStack.of(store.layer_dirs(below)), implied)


def unpack_blob(
    layout: OciLayout,
    descriptor: Mapping[str, Any],
    diff_id: str,
    target: Path,
    label: str,
    limits: UnpackLimits,
    lowest: bool,
) -> list[str]:
    """Unpack one layer and verify its digests; return the directories that `unpack` returns."""
    kind, _, wanted = layout.name({"digest": diff_id}).partition(":")
    with layout.blob(descriptor) as raw:
        plain = HashingReader(decompress(cast(IO[bytes], raw)), kind=kind)
        implied = unpack(cast(IO[bytes], plain), target, label, limits, lowest)
        if plain.drain() != wanted:
            raise InputError(f"{label}: layer {diff_id} is damaged (its content has another digest); get it again")
    return implied


def inherit_metadata(layer: Path, below: LayerStack, implied: Sequence[str]) -> None:
    """Give directories that no member describes the owner and mode they have in the layers below."""
    for path in implied:
        resolved, found = below.locate(path, follow=False)
        if found.is_directory and found.info is not None and resolved.strip("/") == path:
            copy_metadata(found.dirs[0].path, str(layer / path), found.info, found.dirs[0].shift)


def parse_config(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """Return an image configuration's process settings as fields of `Image`."""
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
        raise InputError(f"{label}: the image's configuration cannot be read ({error})") from None
