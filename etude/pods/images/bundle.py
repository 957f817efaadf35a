"""One file for an image or a snapshot: an OCI image layout in a tar, so that other tools can read it too.

Our own record travels as an annotation of the manifest. On the way in nothing of it is believed: blobs are checked by
digest, layers are unpacked like any stranger's archive and get ids of their own, a taken name stays with its owner,
and paths of this machine are shown only if they are the system's own or the caller allows them.
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
_OURS = "the file is not an export of a store, or damaged"


class _HashingWriter(io.RawIOBase):
    """Writes through to another stream, and knows the digest and size of what passed."""

    def __init__(self, target: Any) -> None:
        self._target, self._running, self.size = target, hashlib.sha256(), 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._running.update(data)
        self.size += len(data)
        self._target.write(data)
        return len(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._running.hexdigest()}"


# -- out


def export(store: "Store", id: str, file: Path, whole: bool = True) -> None:
    """Write the image or snapshot `id` to `file`, which appears when it is complete."""
    if file.exists() and not file.is_file():
        raise InputError(f"{file}: is there and is no ordinary file; name another")
    saved, image = _find(store, id)
    left_out = set() if whole else _base(store, saved, id)
    with store.staging() as staging:
        blobs: dict[str, Path] = {}
        along = [layer for layer in image.layers if layer.id not in left_out]
        described = [_write_layer(store, layer, staging, blobs) for layer in along]
        record = {
            "image": image_to_json(image),
            "snapshot": asdict(saved.snapshot) if saved else None,
            "diff_ids": [[layer, diff_id] for layer, _, diff_id in described],
        }
        config = _write_blob(oci.CONFIG, _config(image, [diff_id for *_, diff_id in described]), staging, blobs)
        manifest = {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST,
            "config": config,
            "layers": [descriptor for _, descriptor, _ in described],
            "annotations": {RECORD: json.dumps(record, sort_keys=True)},
        }
        entry = _write_blob(oci.MANIFEST, manifest, staging, blobs)
        entry["annotations"] = {oci.REF: image.name or id}
        index = {"schemaVersion": 2, "mediaType": oci.INDEX, "manifests": [entry]}
        _write_tar(file, index, blobs)


def _find(store: "Store", id: str) -> tuple[SnapshotRecord | None, Image]:
    try:
        saved = store.snapshot(id)
    except InputError:
        try:
            return None, store.image(id)
        except InputError:
            raise InputError(f"there is no image and no snapshot {id!r} in {store.root}") from None
    return saved, saved.image


def _base(store: "Store", saved: SnapshotRecord | None, id: str) -> set[str]:
    """The layers that a snapshot shares with the image it grew from."""
    if saved is None:
        raise InputError(f"{id} is an image: it has no base to leave out; export it whole")
    base = store.image(saved.snapshot.image)
    shared = set()
    for mine, theirs in zip(saved.image.layers, base.layers, strict=False):
        if mine != theirs:
            break
        shared.add(mine.id)
    if not shared:
        raise InputError(f"snapshot {id}: image {base.name or base.id} has changed since; export the snapshot whole")
    return shared


def _write_layer(
    store: "Store", layer: Layer, staging: Path, blobs: dict[str, Path]
) -> tuple[str, dict[str, Any], str]:
    """A layer as a compressed tar: its id, the descriptor of that, and the digest of the tar itself."""
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


# -- in


def import_(store: "Store", file: Path, binds: Sequence[str] = ()) -> str:
    """Take in what `export` wrote; the id of the image or snapshot."""
    with store.staging() as staging, store.pin() as pin:
        layout = open_layout(file, staging)
        manifest = layout.manifest()
        saved, image, blobs = _read_record(layout, manifest, file)
        refused = sorted(set(image.binds) - {*SYSTEM_BINDS, *binds})
        if refused:
            raise InputError(f"{file}: it wants to show {', '.join(refused)} of this machine; allow that to import it")
        kept = []
        for at, layer in enumerate(image.layers):
            if layer.id in blobs:
                kept.append(_take(store, layout, *blobs[layer.id], file, lowest=at == 0))
            elif not layer.memory and store.layer_path(layer).is_dir():
                kept.append(layer)
            else:
                grew = f" {saved.snapshot.image}" if saved else ""
                raise InputError(
                    f"{file} leaves out layer {layer.id} of its image{grew}, which is not here; "
                    "import or make that image first, or export the snapshot whole"
                )
            pin(kept)
        return _keep(store, saved, image.with_(layers=tuple(kept)))


def open_layout(file: Path, staging: Path) -> oci.OciLayout:
    """A layout in a directory, or in a tar, which is unpacked into `staging`."""
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
    """The record, and for each layer that came along its blob's descriptor and the digest of its tar."""
    try:
        record = json.loads(manifest["annotations"][RECORD])
        image = image_from_json(record["image"])
        saved = None
        if record["snapshot"] is not None:
            saved = snapshot_from_json({"snapshot": record["snapshot"], "image": record["image"]})
            check_id(saved.snapshot.id)
        layout.json(manifest["config"])  # for other tools; damaged, it says that the file is
        pairs = zip(record["diff_ids"], manifest["layers"], strict=True)
        blobs = {str(id): (dict(descriptor), str(diff_id)) for (id, diff_id), descriptor in pairs}
        return saved, image, blobs
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{file}: {_OURS} ({error!r})") from None


def _take(
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


def _keep(store: "Store", saved: SnapshotRecord | None, image: Image) -> str:
    if saved is None:
        taken = {other.name: other.id for other in store.images()}
        free = taken.get(image.name, image.id) == image.id
        return store.add_image(image if free else image.named("")).id
    snapshot = saved.snapshot
    for other in store.snapshots():
        if other.snapshot.id == snapshot.id:
            if other.image == replace(image, id=snapshot.id, name=""):
                return snapshot.id
            snapshot = replace(snapshot, id=secrets.token_hex(16))
    store.save_snapshot(replace(snapshot, durable=True), image)
    return snapshot.id
