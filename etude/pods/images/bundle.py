"""Export an image or a snapshot as one file and import it: an OCI image layout in a tar, readable by other tools.

The store's own record is an annotation of the manifest. Imported files are untrusted: blobs are verified by digest,
layers are unpacked like any untrusted archive and get content-derived ids, a name in use stays with its image, and
host paths are bound only if they are system directories or the caller allows them.
"""

import hashlib
import io
import json
import os
import secrets
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import zstandard

from etude.errors import InputError
from etude.pods.images import oci
from etude.pods.images.archive import UnpackLimits, pack, unpack
from etude.pods.images.records import (
    SYSTEM_BINDS,
    Image,
    Layer,
    SnapshotRecord,
    check_id,
    image_from_json,
    image_to_json,
    snapshot_from_json,
)
from etude.pods.images.trees import digest

if TYPE_CHECKING:
    from etude.pods.images.store import Store

RECORD = "org.etude.record"
_NOT_AN_EXPORT = "the file is not an export of a store, or damaged"


class _HashingWriter(io.RawIOBase):
    """Writes to another stream, computing the digest and size of what was written."""

    def __init__(self, target: Any) -> None:
        self._target, self._hash, self.size = target, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._hash.update(data)
        self.size += len(data)
        self._target.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


# -- export


def export(store: "Store", id: str, file: Path, include_base: bool = True) -> None:
    """Write the image or snapshot `id` to `file`, atomically."""
    if file.exists() and not file.is_file():
        raise InputError(f"{file}: exists and is not a regular file; name another")
    record, image = _find(store, id)
    omitted = set() if include_base else _base_layers(store, record, id)
    with store.staging() as staging:
        blobs: dict[str, Path] = {}
        included = [layer for layer in image.layers if layer.id not in omitted]
        described = [_write_layer(store, layer, staging, blobs) for layer in included]
        annotation = {
            "image": image_to_json(image),
            "snapshot": asdict(record.snapshot) if record else None,
            "diff_ids": [[layer, diff_id] for layer, _, diff_id in described],
        }
        config = _write_blob(oci.CONFIG, _config(image, [diff_id for *_, diff_id in described]), staging, blobs)
        manifest = {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST,
            "config": config,
            "layers": [descriptor for _, descriptor, _ in described],
            "annotations": {RECORD: json.dumps(annotation, sort_keys=True)},
        }
        entry = _write_blob(oci.MANIFEST, manifest, staging, blobs)
        entry["annotations"] = {oci.REF: image.name or id}
        index = {"schemaVersion": 2, "mediaType": oci.INDEX, "manifests": [entry]}
        _write_tar(file, index, blobs)


def _find(store: "Store", id: str) -> tuple[SnapshotRecord | None, Image]:
    try:
        record = store.snapshot(id)
    except InputError:
        try:
            return None, store.image(id)
        except InputError:
            raise InputError(f"there is no image and no snapshot {id!r} in {store.root}") from None
    return record, record.image


def _base_layers(store: "Store", record: SnapshotRecord | None, id: str) -> set[str]:
    """Return the ids of the layers that a snapshot shares with the image it is based on."""
    if record is None:
        raise InputError(f"{id} is an image and has no base to leave out; export it whole")
    base = store.image(record.snapshot.image)
    shared = set()
    for mine, theirs in zip(record.image.layers, base.layers, strict=False):
        if mine != theirs:
            break
        shared.add(mine.id)
    if not shared:
        raise InputError(f"snapshot {id}: image {base.name or base.id} has changed since; export the snapshot whole")
    return shared


def _write_layer(
    store: "Store", layer: Layer, staging: Path, blobs: dict[str, Path]
) -> tuple[str, dict[str, Any], str]:
    """Write a layer as a compressed tar. Return its id, the blob's descriptor and the digest of the plain tar."""
    path = staging / f"{len(blobs)}.blob"
    with open(path, "xb") as file:
        packed = _HashingWriter(file)
        with zstandard.ZstdCompressor(level=3, threads=-1).stream_writer(
            cast(IO[bytes], packed), closefd=False
        ) as compressor:
            plain = _HashingWriter(compressor)
            pack(store.layer_path(layer), cast(IO[bytes], plain), layer.shift)
    blobs[packed.digest] = path
    return layer.id, {"mediaType": oci.LAYER, "digest": packed.digest, "size": packed.size}, plain.digest


def _config(image: Image, diff_ids: Sequence[str]) -> dict[str, Any]:
    return {
        "architecture": oci.architecture(),
        "os": "linux",
        "config": {
            "Env": [f"{key}={value}" for key, value in image.env.items()],
            "WorkingDir": image.workdir,
            "User": image.user,
            "Entrypoint": list(image.entrypoint),
            "Cmd": list(image.command),
            "Labels": dict(image.labels),
        },
        "rootfs": {"type": "layers", "diff_ids": list(diff_ids)},
    }


def _write_blob(media: str, value: Any, staging: Path, blobs: dict[str, Path]) -> dict[str, Any]:
    data = json.dumps(value, sort_keys=True).encode()
    name = f"sha256:{hashlib.sha256(data).hexdigest()}"
    blobs[name] = staging / f"{len(blobs)}.blob"
    blobs[name].write_bytes(data)
    return {"mediaType": media, "digest": name, "size": len(data)}


def _write_tar(file: Path, index: Mapping[str, Any], blobs: Mapping[str, Path]) -> None:
    part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb") as out:
            with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
                _add(tar, "oci-layout", json.dumps({"imageLayoutVersion": "1.0.0"}).encode())
                _add(tar, "index.json", json.dumps(index, sort_keys=True).encode())
                for name, path in blobs.items():
                    with open(path, "rb") as blob:
                        _add(tar, f"blobs/{name.replace(':', '/')}", blob)
            out.flush()
            os.fsync(out.fileno())
        os.rename(part, file)
    except OSError as error:
        raise InputError(f"export to {file}: {error.strerror}; name a file that can be written") from None
    finally:
        part.unlink(missing_ok=True)


def _add(tar: tarfile.TarFile, name: str, source: bytes | IO[bytes]) -> None:
    member = tarfile.TarInfo(name)
    member.mode = 0o644
    if isinstance(source, bytes):
        member.size = len(source)
        source = io.BytesIO(source)
    else:
        member.size = os.fstat(source.fileno()).st_size
    tar.addfile(member, source)


# -- import


def import_(store: "Store", file: Path, binds: Sequence[str] = ()) -> str:
    """Import a file that `export` wrote; return the id of the image or snapshot."""
    with store.staging() as staging, store.pin() as pin:
        layout = open_layout(file, staging)
        manifest = layout.manifest()
        record, image, blobs = _read_record(layout, manifest, file)
        refused = sorted(set(image.binds) - {*SYSTEM_BINDS, *binds})
        if refused:
            raise InputError(f"{file}: binds the host paths {', '.join(refused)}; allow these to import it")
        kept = []
        for at, layer in enumerate(image.layers):
            if layer.id in blobs:
                kept.append(_import_layer(store, layout, *blobs[layer.id], file, lowest=at == 0))
            elif not layer.memory and store.layer_path(layer).is_dir():
                kept.append(layer)
            else:
                base = f" {record.snapshot.image}" if record else ""
                raise InputError(
                    f"{file} leaves out layer {layer.id} of its image{base}, which is not in this store; "
                    "import or build that image first, or export the snapshot whole"
                )
            pin(kept)
        return _add_to_store(store, record, image.with_(layers=tuple(kept)))


def open_layout(file: Path, staging: Path) -> oci.OciLayout:
    """Open a layout in a directory, or in a tar, which is unpacked into `staging`."""
    if file.is_dir():
        return oci.OciLayout(file, str(file))
    directory = staging / "layout"
    directory.mkdir()
    try:
        with open(file, "rb") as source:
            unpack(source, directory, str(file), lowest=True)
    except FileNotFoundError:
        raise InputError(f"{file}: there is no such file") from None
    return oci.OciLayout(directory, str(file))


def _read_record(
    layout: oci.OciLayout, manifest: Mapping[str, Any], file: Path
) -> tuple[SnapshotRecord | None, Image, dict[str, tuple[Any, str]]]:
    """Return the record, and for each included layer its blob's descriptor and the digest of its tar."""
    try:
        annotation = json.loads(manifest["annotations"][RECORD])
        image = image_from_json(annotation["image"])
        record = None
        if annotation["snapshot"] is not None:
            record = snapshot_from_json({"snapshot": annotation["snapshot"], "image": annotation["image"]})
            check_id(record.snapshot.id)
        layout.json(manifest["config"])  # only other tools use it; verify its digest
        pairs = zip(annotation["diff_ids"], manifest["layers"], strict=True)
        blobs = {str(id): (dict(descriptor), str(diff_id)) for (id, diff_id), descriptor in pairs}
        return record, image, blobs
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: {_NOT_AN_EXPORT} ({error!r})") from None


def _import_layer(
    store: "Store",
    layout: oci.OciLayout,
    descriptor: Mapping[str, Any],
    diff_id: str,
    file: Path,
    lowest: bool,
) -> Layer:
    def fill(target: Path) -> None:
        oci.unpack_blob(layout, descriptor, diff_id, target, str(file), UnpackLimits(), lowest)

    return store.add_layer(fill, key=digest("import", diff_id, str(lowest)))


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
