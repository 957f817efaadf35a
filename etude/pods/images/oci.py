"""OCI image layouts: read those of other tools; export an image or a snapshot as one file, and import it again.

A layout is a directory with index.json and blobs named by their digest. An export is one in a tar, with the store's own
record as an annotation of the manifest. Every layout is untrusted: blobs are verified by digest, layers both compressed
and uncompressed, no string is used as a path before it is checked to be a digest, layers are unpacked like any
untrusted archive, a name in use stays with its image, and only system directories of the host are bound.
"""

import hashlib
import io
import os
import platform
import re
import secrets
import stat
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel, to_pascal

from etude.errors import InputError
from etude.pods.images.archive import HashingReader, decompress, pack_compressed, unpack
from etude.pods.images.layers import LayerStack
from etude.pods.images.records import (
    IMAGE,
    SNAPSHOT,
    Image,
    Layer,
    SnapshotRecord,
    check_binds,
    check_id,
    reason,
)
from etude.pods.images.trees import copy_metadata, digest, is_opaque

if TYPE_CHECKING:
    from etude.pods.images.store import Store

INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
REF = "org.opencontainers.image.ref.name"
IMAGE_RECORD, SNAPSHOT_RECORD = "org.etude.image", "org.etude.snapshot"

_INDEXES = (INDEX, "application/vnd.docker.distribution.manifest.list.v2+json")
_DIGEST = re.compile(r"sha(256:[0-9a-f]{64}|512:[0-9a-f]{128})")
_MAX_JSON = 8 << 20
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386", "ppc64le": "ppc64le"}
_M = TypeVar("_M", bound=BaseModel)


def architecture() -> str:
    """Return this machine's architecture by its OCI name."""
    machine = platform.machine()
    return _MACHINES.get(machine, machine)


# -- documents of a layout


def _check_digest(value: str) -> str:
    if not _DIGEST.fullmatch(value):
        raise ValueError(f"{value!r} is not a digest")
    return value


Digest = Annotated[str, AfterValidator(_check_digest)]


class _Document(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class Descriptor(_Document):
    """A reference to a blob."""

    digest: Digest
    media_type: str = ""
    size: int | None = None
    annotations: dict[str, str] | None = None
    platform: dict[str, Any] | None = None

    @property
    def ref(self) -> str:
        return (self.annotations or {}).get(REF, "")

    @property
    def fits(self) -> bool:
        """Whether an image is for this machine's platform."""
        here = {"os": "linux", "architecture": architecture()}
        return {**here, **(self.platform or {})}.items() >= here.items()


class Index(_Document):
    """The images of a layout, or those of one name for several platforms."""

    manifests: list[Descriptor]
    schema_version: int = 2
    media_type: str = INDEX


class Manifest(_Document):
    """One image: its configuration and layers."""

    config: Descriptor
    layers: list[Descriptor]
    schema_version: int = 2
    media_type: str = MANIFEST
    annotations: dict[str, str] | None = None


class ProcessConfig(BaseModel):
    """The process settings of an image."""

    model_config = ConfigDict(alias_generator=to_pascal, populate_by_name=True)

    env: list[str] | None = None
    working_dir: str | None = None
    user: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    labels: dict[str, str] | None = None

    def to_image_fields(self) -> dict[str, Any]:
        """Return the settings as fields of `Image`."""
        return {
            "env": {name: value for name, _, value in (entry.partition("=") for entry in self.env or ())},
            "workdir": self.working_dir or "/",
            "user": self.user or "",
            "entrypoint": tuple(self.entrypoint or ()),
            "command": tuple(self.cmd or ()),
            "labels": self.labels or {},
        }


class RootFs(BaseModel):
    """The digests of the uncompressed layers."""

    type: str = "layers"
    diff_ids: list[Digest] = []


class ImageConfig(BaseModel):
    """The configuration of an image."""

    config: ProcessConfig | None = None
    rootfs: RootFs = RootFs()
    architecture: str = ""
    os: str = "linux"


# -- reading


class OciLayout:
    """An untrusted OCI image layout in a directory; `label` names it in errors."""

    def __init__(self, directory: Path, label: str) -> None:
        self._directory, self._label = directory, label
        if not (directory / "index.json").is_file():
            raise InputError(f"{label}: no index.json, so this is not an OCI image layout")
        with self._open("index.json") as file:
            self._index = self._parse(Index, file.read(_MAX_JSON), "index.json")

    def manifest(self, ref: str | None = None) -> Manifest:
        """Return the manifest for this machine's platform: the one named `ref`, or the only one."""
        named = [entry for entry in self._index.manifests if ref is None or entry.ref == ref]
        matching = list(self._matching(named, 0))
        if len(matching) == 1:
            return self.read(Manifest, matching[0])
        refs = sorted({entry.ref or "(no name)" for entry in self._index.manifests})
        found = f"{len(matching)} images" if matching else "no image"
        raise InputError(
            f"{self._label}: {found} {f'called {ref} ' if ref else ''}for linux/{architecture()}; "
            f"name one of: {', '.join(refs)}"
        )

    def _matching(self, entries: Sequence[Descriptor], depth: int) -> Iterator[Descriptor]:
        """Yield the manifests in `entries`, and in nested indexes, that match this machine's platform."""
        for entry in entries:
            if entry.media_type in _INDEXES and depth < 5:
                yield from self._matching(self.read(Index, entry).manifests, depth + 1)
            elif entry.fits:
                yield entry

    def read(self, kind: type[_M], descriptor: Descriptor) -> _M:
        """Return the document in a blob."""
        with self.blob(descriptor) as reader:
            data = reader.read(_MAX_JSON + 1)
            if len(data) > _MAX_JSON:
                raise InputError(f"{self._label}: blob {descriptor.digest} is larger than {_MAX_JSON} bytes")
        return self._parse(kind, data, descriptor.digest)

    @contextmanager
    def blob(self, descriptor: Descriptor) -> Iterator[HashingReader]:
        """Yield a reader of a blob; at the end of the block, read the rest and verify the digest."""
        kind, _, wanted = descriptor.digest.partition(":")
        with self._open(f"blobs/{kind}/{wanted}") as file:
            reader = HashingReader(file, kind=kind)
            yield reader
            if reader.drain() != wanted or descriptor.size not in (None, reader.size):
                raise InputError(
                    f"{self._label}: blob {descriptor.digest} is damaged (its content has another digest); get it again"
                )

    def _open(self, name: str) -> io.BufferedReader:
        try:
            file = open(os.open(self._directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
        except OSError as error:
            raise InputError(f"{self._label}: cannot read {name} ({error.strerror})") from None
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise InputError(f"{self._label}: {name} is not a file")
        return file

    def _parse(self, kind: type[_M], data: bytes, name: str) -> _M:
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise InputError(
                f"{self._label}: {name} is not {kind.__name__} of an OCI layout ({reason(error)})"
            ) from None

    def import_image(self, store: "Store", manifest: Manifest) -> Image:
        """Return the image of a manifest, without a name; its layers are in the store then."""
        config = self.read(ImageConfig, manifest.config)
        diff_ids = config.rootfs.diff_ids
        if len(manifest.layers) != len(diff_ids):
            raise InputError(
                f"{self._label}: {len(manifest.layers)} layers in the manifest, {len(diff_ids)} in the configuration"
            )
        taken: list[Layer] = []
        chain = ""
        for descriptor, diff_id in zip(manifest.layers, diff_ids, strict=True):
            # a directory that a layer does not describe takes its metadata from below: layers depend on lower ones
            chain = digest("oci", chain, diff_id)
            below = LayerStack.of(store.layer_dirs(taken))
            layer = store.add_layer(partial(self._unpack, descriptor, diff_id, below), key=chain)
            if is_opaque(str(store.layer_path(layer))):
                taken.clear()  # it hides everything below; overlayfs ignores the marker on the root itself
            taken.append(layer)
        return Image.of(tuple(taken), **(config.config or ProcessConfig()).to_image_fields())

    def _unpack(self, descriptor: Descriptor, diff_id: str, below: LayerStack, target: Path) -> None:
        kind, _, wanted = diff_id.partition(":")
        with self.blob(descriptor) as raw:
            plain = HashingReader(decompress(cast(IO[bytes], raw)), kind=kind)
            implied = unpack(cast(IO[bytes], plain), target, self._label, lowest=not below.layers)
            if plain.drain() != wanted:
                raise InputError(
                    f"{self._label}: layer {diff_id} is damaged (its content has another digest); get it again"
                )
        for path in implied:  # directories that no member describes: as in the layers below
            resolved, found = below.locate(path, follow=False)
            if found.is_directory and found.info is not None and resolved.strip("/") == path:
                copy_metadata(found.dirs[0].path, str(target / path), found.info, found.dirs[0].shift)


def open_layout(file: Path, staging: Path) -> OciLayout:
    """Open a layout in a directory, or in a tar, which is unpacked into `staging`."""
    if file.is_dir():
        return OciLayout(file, str(file))
    directory = staging / "layout"
    directory.mkdir()
    try:
        with open(file, "rb") as source:
            unpack(source, directory, str(file), lowest=True)
    except FileNotFoundError:
        raise InputError(f"{file}: there is no such file or directory") from None
    return OciLayout(directory, str(file))


# -- export


class _LayoutWriter:
    """Writes a layout into an empty directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "blobs/sha256").mkdir(parents=True)
        (directory / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')

    def add(self, document: BaseModel, media_type: str) -> Descriptor:
        data = document.model_dump_json(by_alias=True, exclude_none=True).encode()
        name = hashlib.sha256(data).hexdigest()
        (self.directory / "blobs/sha256" / name).write_bytes(data)
        return Descriptor(digest=f"sha256:{name}", media_type=media_type, size=len(data))

    def add_layer(self, layer: Path, shift: int) -> tuple[Descriptor, str]:
        """Add a layer as a compressed tar; return its blob, and the digest of the plain tar."""
        part = self.directory / "blobs/part"
        packed, plain = pack_compressed(layer, part, shift)
        name = packed.hexdigest()
        part.rename(self.directory / "blobs/sha256" / name)
        blob = Descriptor(digest=f"sha256:{name}", media_type=LAYER, size=packed.size)
        return blob, f"sha256:{plain.hexdigest()}"

    def write_tar(self, file: IO[bytes]) -> None:
        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            return member

        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(path for path in self.directory.rglob("*") if path.is_file()):
                tar.add(path, path.relative_to(self.directory), filter=plain)


def export(store: "Store", id: str, file: Path) -> None:
    """Write the image or snapshot `id` to `file`, atomically."""
    if file.exists() and not file.is_file():
        raise InputError(f"{file}: exists and is not a regular file; name another")
    record, image = _find(store, id)
    with store.staging() as staging:
        layout = _LayoutWriter(staging / "layout")
        added = [layout.add_layer(store.layer_path(layer), layer.shift) for layer in image.layers]
        process = ProcessConfig(
            env=[f"{key}={value}" for key, value in image.env.items()],
            working_dir=image.workdir,
            user=image.user,
            entrypoint=list(image.entrypoint),
            cmd=list(image.command),
            labels=dict(image.labels),
        )
        rootfs = RootFs(diff_ids=[diff_id for _, diff_id in added])
        config = layout.add(ImageConfig(config=process, rootfs=rootfs, architecture=architecture()), CONFIG)
        own = (SNAPSHOT_RECORD, SNAPSHOT.dump_json(record)) if record else (IMAGE_RECORD, IMAGE.dump_json(image))
        manifest = Manifest(config=config, layers=[blob for blob, _ in added], annotations={own[0]: own[1].decode()})
        entry = layout.add(manifest, MANIFEST).model_copy(update={"annotations": {REF: image.name or id}})
        index = Index(manifests=[entry]).model_dump_json(by_alias=True, exclude_none=True)
        (layout.directory / "index.json").write_text(index)
        part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
        try:
            with open(part, "xb") as out:
                layout.write_tar(out)
                out.flush()
                os.fsync(out.fileno())
            os.rename(part, file)
        except OSError as error:
            raise InputError(f"export to {file}: {error.strerror}; name a file that can be written") from None
        finally:
            part.unlink(missing_ok=True)


def _find(store: "Store", id: str) -> tuple[SnapshotRecord | None, Image]:
    try:
        record = store.snapshot(id)
        return record, record.image
    except InputError:
        try:
            return None, store.image(id)
        except InputError:
            raise InputError(f"there is no image and no snapshot {id!r} in {store.root}") from None


# -- import


def import_(store: "Store", file: Path) -> str:
    """Import a file that `export` wrote; return the id of the image or snapshot."""
    with store.staging() as staging, store.pin() as pin:
        layout = open_layout(file, staging)
        manifest = layout.manifest()
        own = manifest.annotations or {}
        try:
            record = SNAPSHOT.validate_json(own[SNAPSHOT_RECORD]) if SNAPSHOT_RECORD in own else None
            image = record.image if record else IMAGE.validate_json(own[IMAGE_RECORD])
            check_id(record.snapshot.id if record else image.id)
        except (KeyError, ValueError) as error:
            raise InputError(f"{file}: the file is not an export of a store, or damaged ({error!r})") from None
        check_binds(image, str(file))
        layers = layout.import_image(store, manifest).layers
        pin(layers)
        return _add_to_store(store, record, image.with_(layers=layers))


def _add_to_store(store: "Store", record: SnapshotRecord | None, image: Image) -> str:
    if record is None:
        taken = {other.name: other.id for other in store.images()}
        free = taken.get(image.name, image.id) == image.id
        return store.add_image(image if free else image.named("")).id
    snapshot = record.snapshot
    for other in store.snapshots():
        if other.snapshot.id == snapshot.id:
            if other.image == replace(image, id=snapshot.id, name=""):
                return snapshot.id
            snapshot = replace(snapshot, id=secrets.token_hex(16))
    store.save_snapshot(replace(snapshot, durable=True), image)
    return snapshot.id
