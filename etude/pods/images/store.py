"""The store: immutable layers, and image and snapshot records that refer to them, shared by any number of processes.

    layers/<id>/fs        a tree in overlayfs form; built in staging/, committed by one rename, never changed again
    layers/<id>/*.zst     the same packed, to be sent to another store; incoming/ has what arrives from others
    images/<id>.json      names/<digest of a name>.json    snapshots/<id>.json
    keys/<digest>.json    build cache: the image that a key produced; dropped when its layers are gone
    pins/<id>.json        layers that a live process needs before a record refers to them
    staging/  trash/      work in progress; `collect_garbage` removes what killed processes left there

References are found by reading the records, so no crash can leave a wrong count. Records refer to existing layers
only; `lock` (shared to add, exclusive to collect) ensures that. Killing a process at any time is safe; images are
synced against power loss, snapshots (taken in milliseconds) are not.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar, cast

from pydantic import TypeAdapter

from etude.errors import InputError
from etude.files import take_lock, write_atomically
from etude.pods.images import layers, oci
from etude.pods.images.archive import HashingReader, tree_digest, unpack
from etude.pods.images.records import (
    IMAGE,
    IMAGE_NAME,
    SNAPSHOT,
    Image,
    ImageName,
    Layer,
    SnapshotRecord,
    check_id,
    is_content_id,
    is_id,
    reason,
)
from etude.pods.images.trees import can_chown, digest, remove_tree
from etude.pods.pod import PodError, Snapshot

__all__ = ["Image", "Layer", "SnapshotRecord", "Store"]

GRACE_S = 3600.0  # minimum age of unreferenced layers to collect: their creator may be about to write a record
_LOCK_GRACE_S = 60.0  # minimum age of unlocked directories to collect: their creator may be about to lock them
_REMEDIES = {
    "images": "delete the file and build the image again",
    "names": "delete the file and build the image again",
    "snapshots": "delete the file; the snapshot cannot be restored",
}
_DIRECTORIES = ("layers", "images", "names", "snapshots", "keys", "pins", "staging", "incoming", "trash")
T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


class Store:
    """Layers, images and snapshots in one directory, which should be on a local file system and private to its user."""

    def __init__(self, root: Path, memory: Path | None = None) -> None:
        self.root = Path(os.path.abspath(root))
        self.memory = memory  # directory of the in-memory layers, if this process can access them
        try:
            for name in _DIRECTORIES:
                (self.root / name).mkdir(parents=True, exist_ok=True)
            os.chmod(self.root, 0o700)  # layers contain untrusted set-uid programs: no access for other users
        except OSError as error:
            raise InputError(f"store {self.root}: {error.strerror}; name a directory that can be written") from None

    # -- layers

    def layer_path(self, layer: Layer) -> Path:
        """Return the directory of a layer. Its existence is checked where records are read."""
        if not layer.memory:
            return self.root / "layers" / layer.id / "fs"
        if self.memory is None:
            raise PodError(f"layer {layer.id} is in the zygote's memory; persist it to disk to use it here")
        return self.memory / layer.id / "fs"

    def layer_dirs(self, stack: Iterable[Layer]) -> list[layers.LayerDir]:
        """Return layers in the form that `layers.merge` and `layers.LayerStack` take."""
        return [layers.LayerDir(str(self.layer_path(layer)), layer.shift) for layer in stack]

    def add_layer(self, fill: Callable[[Path], None], key: str | None = None, id: str = "") -> Layer:
        """Add the layer that `fill` writes into an empty directory, with a content-derived id.

        With a `key` (anything that determines the content), `fill` is not called if the key's layer is in the store.
        With an `id`, derived from what determines the content, the content itself is not read.
        """
        if id:
            with self._shared():
                if self._present(Layer(id)):
                    return Layer(id)
            return self._build_layer(fill, lambda made: Layer(id))
        if key is not None and (cached := self.cached_image(key)) is not None:
            return cached.layers[0]
        layer = self._build_layer(fill, lambda made: Layer(tree_digest(made)))
        if key is not None:
            self.cache_image(key, Image.of((layer,)))
        return layer

    def adopt_layer(self, directory: Path, shift: int = 0) -> Layer:
        """Commit a pod's upper directory by one rename, whatever its size. Nothing may write to it any more."""
        layer = Layer(f"up-{secrets.token_hex(16)}", shift)
        self._commit_layer(directory, layer)
        return layer

    def copy_layer(self, directory: Path, shift: int = 0) -> Layer:
        """Copy an upper directory or an in-memory layer into the store."""
        layer = Layer(f"up-{secrets.token_hex(16)}", shift if can_chown() else 0)
        return self._build_layer(lambda made: layers.copy(directory, made, shift, keep_shift=True), lambda made: layer)

    def portable(self, layer: Layer, copy: Layer | None = None) -> Layer:
        """Return a layer as other stores can have it: with the digest of its content as id, and without a shift.

        A layer that a pod wrote is copied, once; it stays as it is. Of one in memory, `copy` is a copy on disk.
        """
        if is_content_id(layer.id):
            return layer
        source = copy or layer
        path = self._require(source)
        return self.add_layer(lambda made: layers.copy(path, made, source.shift), key=_portable_key(layer))

    def known_portable(self, layer: Layer) -> Layer | None:
        """Return what `portable` returned for a layer, if it is still there."""
        if is_content_id(layer.id):
            return layer
        found = self.cached_image(_portable_key(layer))
        return None if found is None else found.layers[0]

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Return the layers that are not in the store, and restart the grace period of the others."""
        with self._shared():
            return [id for id in ids if not self._present(Layer(id))]

    def receive_layer(self, id: str, packed: Path, digest: str) -> bool:
        """Add a layer that arrived as a packed file, verifying both digests; False if the file is damaged.

        An ordinary user cannot give files to others: then the file is kept too, to be sent on as it is.
        """
        damaged, exact = False, True

        def fill(made: Path) -> None:
            nonlocal damaged
            with open(packed, "rb") as file:
                reader = HashingReader(file)
                try:
                    unpack(cast(IO[bytes], reader), made, f"layer {id}")
                finally:
                    damaged = reader.drain() != digest

        def describe(made: Path) -> Layer:
            nonlocal exact
            exact = tree_digest(made) == id
            if damaged or (not exact and can_chown()):
                raise InputError(f"layer {id} arrived with another content than the digest in its name")
            return Layer(id)

        try:
            self._build_layer(fill, describe)
        except InputError:
            if damaged:
                return False
            raise
        if not exact:
            os.rename(packed, self.root / "layers" / id / f"kept-{digest}.zst")
        return True

    def discard_layers(self, found: Iterable[Layer]) -> None:
        """Remove layers that only the caller knows, at once; those that a record refers to stay."""
        with self._locked(fcntl.LOCK_EX):
            needed = self.references()
            for id in {layer.id for layer in found} - needed:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(self.root / "layers" / id, self.root / "trash" / f"{id}-{secrets.token_hex(4)}")
        for left in (self.root / "trash").iterdir():
            remove_tree(left)

    def flatten(self, stack: Sequence[Layer], below: Sequence[Layer]) -> Layer:
        """Merge `stack` into one layer that looks the same on top of `below`; both are lowest first.

        Files are hard-linked to the merged layers if these have the same shift and file system: no data is copied.
        """
        if not stack:
            raise InputError("flatten: no layers to merge")
        shifts = {layer.shift for layer in stack}
        link = len(shifts) == 1 and not any(layer.memory for layer in stack)
        identity = [f"{layer.id} {layer.shift}" for layer in (*stack, *below)]
        layer = Layer("flat-" + digest(str(len(stack)), *identity)[:36], shifts.pop() if link else 0)
        with self._shared():
            if self._present(layer):
                return layer
        sources, lower = self.layer_dirs(stack), self.layer_dirs(below)
        return self._build_layer(lambda made: layers.merge(sources, lower, made, link=link), lambda made: layer)

    def _build_layer(self, fill: Callable[[Path], None], name: Callable[[Path], Layer]) -> Layer:
        """Commit the layer that `fill` writes into an empty directory and `name` then describes."""
        with self.staging() as staging:
            made = staging / "fs"
            made.mkdir()
            os.chmod(made, 0o755)
            fill(made)
            layer = name(made)
            self._commit_layer(made, layer)
        return layer

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """Yield a directory to build in, removed afterwards; no other process removes it while this one lives."""
        path = self.root / "staging" / f"{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        lock = take_lock(path / "lock", f"staging {path}")
        try:
            yield path
        finally:
            remove_tree(path)
            os.close(lock)

    def _commit_layer(self, directory: Path, layer: Layer) -> None:
        """Move a finished tree to its place. A layer that exists already stays, with a new grace period."""
        place = self.root / "layers" / layer.id
        with self._shared():
            if self._present(layer):
                return
            place.mkdir(mode=0o755, exist_ok=True)
            mode = os.lstat(directory).st_mode & 0o7777
            try:
                if os.geteuid() and mode & 0o200 == 0:  # moving a directory writes its `..`
                    os.chmod(directory, mode | 0o200)
                os.rename(directory, place / "fs")
                os.chmod(place / "fs", mode)
            except OSError as error:
                if error.errno == errno.EXDEV:
                    raise PodError(
                        f"{directory} is on another file system than the store {self.root}, so it cannot be committed "
                        "by a rename; copy it, or put both on one"
                    ) from None
                # another process committed the same layer first
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._present(layer):
                    raise

    def _present(self, layer: Layer) -> bool:
        """Return whether a layer exists, and restart its grace period. Call under the shared lock."""
        place = self.root / "layers" / layer.id
        if not (place / "fs").is_dir():
            return False
        os.utime(place)
        return True

    def _require(self, layer: Layer, user: str = "") -> Path:
        path = self.layer_path(layer)
        if not path.is_dir():
            raise PodError(
                f"{user + ': ' if user else ''}layer {path} is missing; "
                "remove what was built from it and build it again, or import it"
            )
        return path

    # -- build cache: the images that keys produced, while their layers exist

    def cache_image(self, key: str, image: Image) -> None:
        """Record that `key` produced `image`. The cache entry alone keeps no layer alive."""
        write_atomically(self._key_file(key), IMAGE.dump_json(image))

    def cached_image(self, key: str) -> Image | None:
        """Return the image that `key` produced if all its layers exist, and restart their grace period."""
        with self._shared():
            try:
                image = IMAGE.validate_json(self._key_file(key).read_bytes())
            except (FileNotFoundError, ValueError):
                return None  # a lost cache entry only means that the image is built again
            present = [self._present(layer) for layer in image.layers]  # a list: restarts the grace period of all
        return image if all(present) else None

    def _key_file(self, key: str) -> Path:
        return self.root / "keys" / f"{digest('owners' if can_chown() else 'mine', key)}.json"

    # -- images

    def add_image(self, image: Image) -> Image:
        """Add an image, under its name if it has one; a name in use moves to this image."""
        self._sync()
        what = f"image {image.name or image.id}"
        self._write_record("images", image.id, IMAGE.dump_json(image.named("")), image, what, durable=True)
        if image.name:
            data = IMAGE_NAME.dump_json(ImageName(image.name, image.id))
            write_atomically(self._name_file(image.name), data, durable=True)
        return image

    def image(self, name: str) -> Image:
        """Return an image by its name or id."""
        found = self._find_image(name)
        if found is None:
            known = ", ".join(sorted(image.name or image.id for image in self.images())) or "none"
            raise InputError(f"there is no image {name!r} in {self.root}; there are: {known}")
        for layer in found.layers:
            self._require(layer, f"image {name}")
        return found

    def _find_image(self, name: str) -> Image | None:
        named = self._read(IMAGE_NAME, self._name_file(name))
        if named is None:
            return self._read(IMAGE, self.root / "images" / f"{name}.json") if is_id(name) else None
        found = self._read(IMAGE, self.root / "images" / f"{named.image}.json") if is_id(named.image) else None
        if found is None:
            raise _damaged(self._name_file(name), "its image is missing")
        return found.named(name)

    def images(self) -> list[Image]:
        """Return every image, once for each of its names."""
        names: dict[str, list[str]] = {}
        for named in self._read_all(IMAGE_NAME, "names"):
            names.setdefault(named.image, []).append(named.name)
        images = self._read_all(IMAGE, "images")
        return [image.named(name) for image in images for name in names.get(image.id, [""])]

    def remove_image(self, name: str) -> None:
        """Remove a name, and the image with its last name; by id, remove the image and all its names."""
        image = self._find_image(name)
        if image is None:
            raise InputError(f"there is no image {name!r} in {self.root}")
        names = [other.name for other in self.images() if other.id == image.id and other.name]
        if not image.name or names == [name]:
            (self.root / "images" / f"{image.id}.json").unlink(missing_ok=True)
        for each in [name] if image.name else names:
            self._name_file(each).unlink(missing_ok=True)

    def _name_file(self, name: str) -> Path:
        return self.root / "names" / f"{digest(name)}.json"

    # -- snapshots

    def save_snapshot(self, snapshot: Snapshot, image: Image, *, owner: str = "", lease: float = 0.0) -> SnapshotRecord:
        """Add a snapshot; `image` has all layers and the configuration of a pod that starts from it.

        A snapshot with in-memory layers may be saved too (`snapshot.durable` false); its record outlives the layers.
        With a `lease`, `expired_snapshots` has it that many seconds after its last `renew_snapshot`.
        """
        record = SnapshotRecord(snapshot, replace(image, id=check_id(snapshot.id), name=""), owner, lease)
        self._write_record(
            "snapshots", snapshot.id, SNAPSHOT.dump_json(record), record.image, f"snapshot {snapshot.id}"
        )
        return record

    def snapshot(self, id: str) -> SnapshotRecord:
        """Return a snapshot by its id."""
        record = self._read(SNAPSHOT, self._snapshot_file(id)) if is_id(id) else None
        if record is None:
            raise InputError(f"there is no snapshot {id!r} in {self.root}")
        for layer in record.image.layers:
            if not layer.memory:
                self._require(layer, f"snapshot {id}")
        return record

    def snapshots(self) -> list[SnapshotRecord]:
        """Return every snapshot."""
        return self._read_all(SNAPSHOT, "snapshots")

    def renew_snapshot(self, id: str) -> None:
        """Start the lease of a snapshot again, if there is one of this id."""
        if not is_id(id):
            return
        with contextlib.suppress(FileNotFoundError):
            os.utime(self._snapshot_file(id))

    def expired_snapshots(self) -> list[str]:
        """Return the snapshots whose lease has ended."""
        found = []
        for record in self.snapshots():
            with contextlib.suppress(FileNotFoundError):
                age = time.time() - self._snapshot_file(record.snapshot.id).stat().st_mtime
                if record.lease and age > record.lease:
                    found.append(record.snapshot.id)
        return found

    def remove_snapshot(self, id: str) -> None:
        """Remove a snapshot, if it exists; the next garbage collection removes its layers."""
        if is_id(id):
            self._snapshot_file(id).unlink(missing_ok=True)

    def _snapshot_file(self, id: str) -> Path:
        return self.root / "snapshots" / f"{id}.json"

    # -- garbage collection

    @contextlib.contextmanager
    def pin(self) -> Iterator[Callable[[Iterable[Layer]], None]]:
        """Yield a function that protects the layers given to it from garbage collection, for this block."""
        file = self.root / "pins" / f"{os.getpid()}-{secrets.token_hex(8)}.json"
        pinned: set[str] = set()
        lock = take_lock(file.with_suffix(".lock"), f"pin {file}")

        def add(stack: Iterable[Layer]) -> None:
            pinned.update(layer.id for layer in stack)
            write_atomically(file, json.dumps(sorted(pinned)))

        try:
            yield add
        finally:
            file.unlink(missing_ok=True)
            file.with_suffix(".lock").unlink(missing_ok=True)
            os.close(lock)

    def references(self, in_use: Iterable[Layer] = ()) -> set[str]:
        """Return the ids of the layers that records, live pins and `in_use` refer to."""
        stacks = [in_use, *(image.layers for image in self._read_all(IMAGE, "images"))]
        stacks += [record.image.layers for record in self.snapshots()]
        needed = {layer.id for stack in stacks for layer in stack}
        for file in (self.root / "pins").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                if not _abandoned(file.with_suffix(".lock")):
                    needed.update(json.loads(file.read_bytes()))
        return needed

    def collect_garbage(self, in_use: Iterable[Layer] = (), grace: float = GRACE_S) -> list[str]:
        """Remove unreferenced layers and what killed processes left. Return the removed layers' ids.

        A layer younger than `grace` seconds stays: its creator has yet to write the record. A damaged record raises,
        because the layers it refers to are unknown.
        """
        removed = []
        with self._locked(fcntl.LOCK_EX):
            needed = self.references(in_use)
            for directory in (self.root / "layers").iterdir():
                if directory.name not in needed and time.time() - directory.stat().st_mtime >= grace:
                    os.rename(directory, self.root / "trash" / f"{directory.name}-{secrets.token_hex(4)}")
                    removed.append(directory.name)
        for staging in (self.root / "staging").iterdir():
            if _abandoned(staging / "lock", min(grace, _LOCK_GRACE_S)):
                remove_tree(staging)
        for lock in (self.root / "pins").glob("*.lock"):
            if _abandoned(lock, min(grace, _LOCK_GRACE_S)):
                lock.with_suffix(".json").unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        for entry in (self.root / "keys").glob("*.json"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                if {layer.id for layer in IMAGE.validate_json(entry.read_bytes()).layers}.isdisjoint(removed):
                    continue
            entry.unlink(missing_ok=True)
        for left in (self.root / "trash").iterdir():
            remove_tree(left)
        self._remove_temporaries()
        self.remove_packed(grace)
        return sorted(removed)

    def remove_packed(self, grace: float = GRACE_S) -> None:
        """Remove packed layers and unfinished arrivals that nothing has used for `grace` seconds."""
        for file in (*(self.root / "layers").glob("*/packed-*"), *(self.root / "incoming").iterdir()):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime >= grace:
                    file.unlink()

    def _remove_temporaries(self) -> None:
        for name in ("images", "names", "snapshots", "keys", "pins"):
            for file in (self.root / name).glob(".*.part"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - file.stat().st_mtime > 60:  # writing a record takes less
                        file.unlink()

    # -- export and import

    def export(self, id: str, file: Path) -> None:
        """Write an image or a snapshot as one file, an OCI image layout in a tar."""
        oci.export(self, id, file)

    def import_(self, file: Path) -> str:
        """Import a file that `export` wrote, verifying every digest. Return the id of the image or snapshot."""
        return oci.import_(self, file)

    # -- records

    def _read(self, adapter: TypeAdapter[T], file: Path) -> T | None:
        """Return a record; None if there is no such file."""
        try:
            return adapter.validate_json(file.read_bytes(), strict=True)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise _damaged(file, reason(error)) from None

    def _read_all(self, adapter: TypeAdapter[T], kind: str) -> list[T]:
        found = [self._read(adapter, file) for file in sorted((self.root / kind).glob("*.json"))]
        return [record for record in found if record is not None]

    def _write_record(self, kind: str, id: str, data: bytes, image: Image, what: str, durable: bool = False) -> None:
        """Write a record after checking that its layers exist."""
        check_id(id)
        with self._shared():
            for layer in image.layers:
                if not layer.memory:
                    self._require(layer, what)
            write_atomically(self.root / kind / f"{id}.json", data, durable=durable)

    def arrivals_locked(self) -> contextlib.AbstractContextManager[None]:
        """Keep all other processes from changing which layers arrive."""
        return self._locked(fcntl.LOCK_EX, "arrivals.lock")

    def _shared(self) -> contextlib.AbstractContextManager[None]:
        return self._locked(fcntl.LOCK_SH)

    @contextlib.contextmanager
    def _locked(self, mode: int, name: str = "lock") -> Iterator[None]:
        lock = os.open(self.root / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, mode)
            yield
        finally:
            os.close(lock)

    def _sync(self) -> None:
        """Sync the file system: layer data must be on disk before a record refers to it."""
        directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if _libc.syncfs(directory) != 0:
                raise PodError(f"store {self.root}: {os.strerror(ctypes.get_errno())} while writing it to disk")
        finally:
            os.close(directory)


def _portable_key(layer: Layer) -> str:
    return f"portable {layer.id} {layer.shift}"


def _damaged(file: Path, why: str) -> PodError:
    return PodError(f"record {file} is damaged ({why}); {_REMEDIES[file.parent.name]}")


def _abandoned(lock: Path, after: float = 0.0) -> bool:
    """Return whether no process holds a lock file. One younger than `after` may be about to be locked."""
    try:
        held = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        with contextlib.suppress(FileNotFoundError):
            return time.time() - lock.parent.stat().st_mtime >= after
        return True
    try:
        if time.time() - os.fstat(held).st_mtime < after:
            return False
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(held)
    return True
