"""The store: immutable layers, and the records of images and snapshots that refer to them. Any number of processes.

    layers/<id>/fs        a tree in overlay form; built in staging/, moved in by one rename, never changed again
    images/<id>.json      names/<digest of a name>.json    snapshots/<id>.json
    keys/<digest>.json    what a key made; forgotten when its layers are gone
    pins/<id>.json        layers that a living process needs though no record has them yet
    staging/  trash/      unfinished; what a killed process left there is removed by `collect`

The records are the only truth about what is needed: references are counted by reading them, so no crash can leave a
count wrong. A record refers to layers that exist; `lock` (shared to add, exclusive to collect) keeps it so. Killed
processes cost nothing; against power loss images are synced, snapshots (made in milliseconds) are not.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.files import take_lock
from etude.pods.images import bundle, layers
from etude.pods.images.records import (
    Image,
    Layer,
    SnapshotRecord,
    check_id,
    damaged,
    image_from_json,
    image_to_json,
    read_json,
    snapshot_from_json,
    snapshot_to_json,
)
from etude.pods.images.trees import can_chown, digest, remove_tree, tree_digest
from etude.pods.pod import PodError, Snapshot

__all__ = ["Image", "Layer", "SnapshotRecord", "Store"]

GRACE_S = 3600.0  # how long a layer lives that no record has yet: its maker is about to write one
_START_S = 60.0  # what is younger may be about to take its lock
_REMAKE = "delete the file and make the image again"
_PLACES = ("layers", "images", "names", "snapshots", "keys", "pins", "staging", "trash")
_libc = ctypes.CDLL(None, use_errno=True)


class Store:
    """Layers, images and snapshots in one directory, which should be on a local file system of its user's own."""

    def __init__(self, root: Path, memory: Path | None = None) -> None:
        self.root = Path(os.path.abspath(root))
        self.memory = memory  # where layers that live in memory can be seen by this process, if anywhere
        try:
            for place in _PLACES:
                (self.root / place).mkdir(parents=True, exist_ok=True)
            os.chmod(self.root, 0o700)  # layers hold set-id programs of unknown origin: no other user gets in
        except OSError as error:
            raise InputError(f"store {self.root}: {error.strerror}; name a directory that can be written") from None

    # -- layers

    def layer_path(self, layer: Layer) -> Path:
        """The directory of a layer; whether it is there is checked where records are read."""
        if not layer.memory:
            return self.root / "layers" / layer.id / "fs"
        if self.memory is None:
            raise PodError(f"layer {layer.id} is in the memory of the pods' keeper; copy it to disk to use it here")
        return self.memory / layer.id / "fs"

    def parts(self, stack: Iterable[Layer]) -> list[layers.LayerDir]:
        """Layers as `layers.merge` and `layers.LayerStack` take them."""
        return [layers.LayerDir(str(self.layer_path(layer)), layer.shift) for layer in stack]

    def add_layer(self, fill: Callable[[Path], None], key: str | None = None) -> Layer:
        """The layer that `fill` writes into an empty directory, named by its content.

        With a `key` (anything that decides the content), `fill` is not called when the key's layer is here already.
        """
        with self._shared():
            known = self._recall(key) if key is not None else None
        if known is not None:
            return known.layers[0]
        with self.staging() as staging:
            made = staging / "fs"
            made.mkdir(mode=0o755)
            os.chmod(made, 0o755)
            fill(made)
            layer = Layer(tree_digest(made))
            self._move_in(made, layer)
        if key is not None:
            self.remember(key, Image.of((layer,)))
        return layer

    def adopt_layer(self, directory: Path, shift: int = 0) -> Layer:
        """Take a pod's upper directory as it is: one rename, whatever its size. Nothing may write to it any more."""
        layer = Layer(f"up-{secrets.token_hex(16)}", shift)
        self._move_in(directory, layer)
        return layer

    def copy_layer(self, directory: Path, shift: int = 0) -> Layer:
        """Take a copy of an upper directory, or of a layer in memory; the original stays."""
        layer = Layer(f"up-{secrets.token_hex(16)}", shift if can_chown() else 0)
        with self.staging() as staging:
            made = staging / "fs"
            made.mkdir()
            layers.copy(directory, made, shift, keep_shift=True)
            self._move_in(made, layer)
        return layer

    def flatten(self, stack: Sequence[Layer], below: Sequence[Layer]) -> Layer:
        """One layer that over `below` shows what `stack` over `below` shows; both lowest first.

        Files are shared with the merged layers when these have one shift and one file system: no data is copied.
        """
        if not stack:
            raise InputError("flatten: no layers to merge")
        shifts = {layer.shift for layer in stack}
        link = len(shifts) == 1 and not any(layer.memory for layer in stack)
        marks = [f"{layer.id} {layer.shift}" for layer in (*stack, *below)]
        layer = Layer("flat-" + digest(str(len(stack)), *marks)[:36], shifts.pop() if link else 0)
        with self._shared():
            if self._present(layer):
                return layer
        with self.staging() as staging:
            made = staging / "fs"
            made.mkdir()
            layers.merge(self.parts(stack), self.parts(below), made, link=link)
            self._move_in(made, layer)
        return layer

    def verify(self, layer: Layer) -> None:
        """Raise unless a layer is whole: there, and what its name says if it is named by its content."""
        path = self._require(layer)
        if not layer.id.startswith(("up-", "flat-")) and tree_digest(path) != layer.id:
            raise PodError(f"layer {path} is damaged (its content has changed); remove what uses it and make it again")

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A directory to build in, gone afterwards; while its process lives nobody else removes it."""
        path = self.root / "staging" / f"{os.getpid()}-{secrets.token_hex(8)}"
        path.mkdir(mode=0o700)
        lock = take_lock(path / "lock", f"staging {path}")
        try:
            yield path
        finally:
            remove_tree(path)
            os.close(lock)

    def _move_in(self, directory: Path, layer: Layer) -> None:
        """Give a finished tree its place. A layer that is there already stays, and counts as new."""
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
                        f"{directory} is on another file system than the store {self.root}, so it cannot be sealed "
                        "by renaming; copy it, or put both on one"
                    ) from None
                # somebody else moved the same layer in first
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not self._present(layer):
                    raise

    def _present(self, layer: Layer) -> bool:
        """Whether a layer is here; if so its grace starts anew. Under the shared lock."""
        place = self.root / "layers" / layer.id
        if not (place / "fs").is_dir():
            return False
        os.utime(place)
        return True

    def _require(self, layer: Layer, whose: str = "") -> Path:
        path = self.layer_path(layer)
        if not path.is_dir():
            raise PodError(
                f"{whose + ': ' if whose else ''}layer {path} is missing; "
                "remove what was made from it and make it again, or import it"
            )
        return path

    # -- keys: what was made before, for as long as its layers are here

    def remember(self, key: str, image: Image) -> None:
        """Note that `key` made `image`. The note alone keeps no layer alive."""
        self._write(self._key_file(key), image_to_json(image))

    def write_note(self, file: Path, value: Any) -> None:
        """Replace a file of `keys` at once; losing it costs only time."""
        self._write(file, value)

    def recall(self, key: str) -> Image | None:
        """What `key` made, if all of it is still here; it then has the grace of something new."""
        with self._shared():
            return self._recall(key)

    def _recall(self, key: str) -> Image | None:
        try:
            image = image_from_json(json.loads(self._key_file(key).read_bytes()))
        except (FileNotFoundError, ValueError):
            return None  # a note is no record: without it the thing is made again
        here = [self._present(layer) for layer in image.layers]  # all of them: being asked for renews their grace
        return image if all(here) else None

    def _key_file(self, key: str) -> Path:
        return self.root / "keys" / f"{digest('owners' if can_chown() else 'mine', key)}.json"

    # -- images

    def add_image(self, image: Image) -> Image:
        """Keep an image, under its name if it has one; a name that was another image's moves to this one."""
        self._sync()
        what = f"image {image.name or image.id}"
        self._keep("images", image.id, image_to_json(image.named("")), image, what, durable=True)
        if image.name:
            self._write(self._name_file(image.name), {"name": image.name, "image": image.id}, durable=True)
        return image

    def image(self, name: str) -> Image:
        """An image by its name or id."""
        found = self._find_image(name)
        if found is None:
            known = ", ".join(sorted(image.name or image.id for image in self.images())) or "none"
            raise InputError(f"there is no image {name!r} in {self.root}; there are: {known}")
        for layer in found.layers:
            self._require(layer, f"image {name}")
        return found

    def _find_image(self, name: str) -> Image | None:
        link = self._name_file(name)
        given = read_json(link, "image name", _REMAKE)
        if given is None:
            return self._read_image(name, "") if _is_id(name) else None
        try:
            found = self._read_image(check_id(given["image"]), name)
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(link, "image name", error, _REMAKE) from None
        if found is None:
            raise damaged(link, "image name", "its image is gone", _REMAKE)
        return found

    def _read_image(self, id: str, name: str) -> Image | None:
        file = self.root / "images" / f"{id}.json"
        value = read_json(file, "image record", _REMAKE)
        try:
            return None if value is None else image_from_json(value).named(name)
        except ValueError as error:
            raise damaged(file, "image record", error, _REMAKE) from None

    def images(self) -> list[Image]:
        """Every image, once for each of its names."""
        names: dict[str, list[str]] = {}
        for file in sorted((self.root / "names").glob("*.json")):
            given = read_json(file, "image name", _REMAKE)
            try:
                if given is not None:
                    names.setdefault(check_id(given["image"]), []).append(given["name"])
            except (ValueError, KeyError, TypeError) as error:
                raise damaged(file, "image name", error, _REMAKE) from None
        found = []
        for file in sorted((self.root / "images").glob("*.json")):
            found += [self._read_image(file.stem, name) for name in names.get(file.stem, [""])]
        return [image for image in found if image is not None]

    def remove_image(self, name: str) -> None:
        """Forget an image: by a name, that name, and the image with its last one; by its id, all of it."""
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

    def save_snapshot(self, snapshot: Snapshot, image: Image) -> SnapshotRecord:
        """Keep a snapshot; `image` is what a pod that starts from it is made of, all layers and configuration.

        One with layers in memory may be kept too (`snapshot.durable` false): its record outlives what it stands for.
        """
        saved = SnapshotRecord(snapshot, replace(image, id=check_id(snapshot.id), name=""))
        self._keep("snapshots", snapshot.id, snapshot_to_json(saved), saved.image, f"snapshot {snapshot.id}")
        return saved

    def snapshot(self, id: str) -> SnapshotRecord:
        """A snapshot by its id."""
        saved = self._read_snapshot(id) if _is_id(id) else None
        if saved is None:
            raise InputError(f"there is no snapshot {id!r} in {self.root}")
        for layer in saved.image.layers:
            if not layer.memory:
                self._require(layer, f"snapshot {id}")
        return saved

    def _read_snapshot(self, id: str) -> SnapshotRecord | None:
        file = self.root / "snapshots" / f"{id}.json"
        remedy = "delete the file; what it stood for cannot be restored"
        value = read_json(file, "snapshot record", remedy)
        try:
            return None if value is None else snapshot_from_json(value)
        except ValueError as error:
            raise damaged(file, "snapshot record", error, remedy) from None

    def snapshots(self) -> list[SnapshotRecord]:
        """Every snapshot."""
        found = [self._read_snapshot(file.stem) for file in sorted((self.root / "snapshots").glob("*.json"))]
        return [saved for saved in found if saved is not None]

    def remove_snapshot(self, id: str) -> None:
        """Forget a snapshot; its layers go with the next collection. One that is not there is fine."""
        if _is_id(id):
            (self.root / "snapshots" / f"{id}.json").unlink(missing_ok=True)

    # -- what is needed, and what is not

    @contextlib.contextmanager
    def pin(self) -> Iterator[Callable[[Iterable[Layer]], None]]:
        """Inside the block, the layers given to the function are needed, record or not."""
        file = self.root / "pins" / f"{os.getpid()}-{secrets.token_hex(8)}.json"
        pinned: dict[str, Layer] = {}
        lock = take_lock(file.with_suffix(".lock"), f"pin {file}")

        def add(stack: Iterable[Layer]) -> None:
            pinned.update((layer.id, layer) for layer in stack)
            self._write(file, image_to_json(Image("pin", "", tuple(pinned.values()))))

        try:
            yield add
        finally:
            file.unlink(missing_ok=True)
            file.with_suffix(".lock").unlink(missing_ok=True)
            os.close(lock)

    def references(self, in_use: Iterable[Layer] = ()) -> Counter[str]:
        """How many records, pins and uses of `in_use` need each layer, by its id."""
        stacks = [image.layers for image in {image.id: image for image in self.images()}.values()]
        stacks += [saved.image.layers for saved in self.snapshots()]
        for file in (self.root / "pins").glob("*.json"):
            value = read_json(file, "pin", "delete the file")
            if value is not None and not _abandoned(file.with_suffix(".lock")):
                stacks.append(image_from_json(value).layers)
        needed = Counter(layer.id for layer in in_use)
        for stack in stacks:
            needed.update({layer.id for layer in stack})
        return needed

    def collect(self, in_use: Iterable[Layer] = (), grace: float = GRACE_S) -> list[str]:
        """Remove the layers that nobody needs, and what killed processes left. Returns the layers' ids.

        A layer younger than `grace` seconds stays: its maker has yet to write the record. Damaged records stop the
        collection, for what they need is not known.
        """
        gone = []
        with self._locked(fcntl.LOCK_EX):
            needed = self.references(in_use)
            for place in (self.root / "layers").iterdir():
                if place.name not in needed and time.time() - place.stat().st_mtime >= grace:
                    os.rename(place, self.root / "trash" / f"{place.name}-{secrets.token_hex(4)}")
                    gone.append(place.name)
        for staging in (self.root / "staging").iterdir():
            if _abandoned(staging / "lock", min(grace, _START_S)):
                remove_tree(staging)
        for lock in (self.root / "pins").glob("*.lock"):
            if _abandoned(lock, min(grace, _START_S)):
                lock.with_suffix(".json").unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
        for note in (self.root / "keys").glob("*.json"):
            with contextlib.suppress(ValueError, FileNotFoundError):
                if {layer.id for layer in image_from_json(json.loads(note.read_bytes())).layers}.isdisjoint(gone):
                    continue
            note.unlink(missing_ok=True)
        for left in (self.root / "trash").iterdir():
            remove_tree(left)
        self._remove_temporaries()
        return sorted(gone)

    def _remove_temporaries(self) -> None:
        for place in ("images", "names", "snapshots", "keys", "pins"):
            for file in (self.root / place).glob(".*.part"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - file.stat().st_mtime > 60:  # a record is written in less
                        file.unlink()

    # -- one file in, one file out

    def export(self, id: str, file: Path, whole: bool = True) -> None:
        """Write an image or a snapshot as one file, an OCI image layout in a tar.

        With `whole` false the layers of the image a snapshot grew from stay out; who imports it must have them.
        """
        bundle.export(self, id, file, whole)

    def import_(self, file: Path, binds: Sequence[str] = ()) -> str:
        """Take in what `export` wrote; every digest is checked. The id of the image or snapshot.

        `binds` are paths of this machine that it may show, beside the system's own such as /usr.
        """
        return bundle.import_(self, file, binds)

    # -- records

    def _keep(self, place: str, id: str, value: Any, image: Image, what: str, durable: bool = False) -> None:
        """Write a record whose layers are all here, and stay."""
        check_id(id)
        with self._shared():
            for layer in image.layers:
                if not layer.memory:
                    self._require(layer, what)
            self._write(self.root / place / f"{id}.json", value, durable)

    def _write(self, file: Path, value: Any, durable: bool = False) -> None:
        """Replace a file at once: a reader sees the old or the new, whole."""
        part = file.with_name(f".{file.name}.{secrets.token_hex(4)}.part")
        try:
            with open(part, "x", encoding="utf-8") as out:
                json.dump(value, out, sort_keys=True)
                out.flush()
                if durable:
                    os.fsync(out.fileno())
            os.rename(part, file)
        finally:
            part.unlink(missing_ok=True)
        if durable:
            directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _shared(self) -> contextlib.AbstractContextManager[None]:
        return self._locked(fcntl.LOCK_SH)

    @contextlib.contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how)
            yield
        finally:
            os.close(lock)

    def _sync(self) -> None:
        """The data of layers is on disk before a record says so."""
        directory = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if _libc.syncfs(directory) != 0:
                raise PodError(f"store {self.root}: {os.strerror(ctypes.get_errno())} while writing it to disk")
        finally:
            os.close(directory)


def _is_id(name: str) -> bool:
    try:
        check_id(name)
    except ValueError:
        return False
    return True


def _abandoned(lock: Path, after: float = 0.0) -> bool:
    """Whether nobody holds a lock any more. One younger than `after` may be on its way to being taken."""
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
