"""What the store keeps records of: layers, images and snapshots, and their form as JSON.

A record is written once, whole, and never changed; one that cannot be read is an error that names the file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.pods.images.trees import digest
from etude.pods.pod import PodError, Snapshot

FORMAT = 1
# where a machine keeps its programs: what an image may show of it without being asked
SYSTEM_BINDS = ("/usr", "/opt", "/nix", "/gnu", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@dataclass(frozen=True, slots=True)
class Layer:
    """One read-only directory tree in overlay form. On disk its ids start at `shift`."""

    id: str
    shift: int = 0
    memory: bool = False  # in the keeper of the pods (a tmpfs there), not in the store's directory


@dataclass(frozen=True, slots=True)
class Image:
    """What a pod can be made from: layers, lowest first, and how programs are started in it."""

    id: str
    name: str
    layers: tuple[Layer, ...]
    binds: tuple[str, ...] = ()  # paths of this machine, shown read-only at the same path
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    workdir: str = "/root"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, layers: tuple[Layer, ...], name: str = "", **config: Any) -> "Image":
        """An image named by what it is: the same layers and configuration have the same id."""
        made = cls("", name, layers, **config)
        return replace(made, id=digest(json.dumps({**_image_json(made), "id": "", "name": ""}, sort_keys=True)))

    def named(self, name: str) -> "Image":
        """The same image under another name."""
        return replace(self, name=name)

    def with_(self, **changes: Any) -> "Image":
        """An image that differs in layers or configuration, with the id that goes with it."""
        config = {key: value for key, value in _fields(self).items() if key not in ("id", "name", "layers")}
        layers = changes.pop("layers", self.layers)
        return Image.of(layers, changes.pop("name", self.name), **{**config, **changes})


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot as the store keeps it: `image` is what a pod is made from to start where the snapshot was taken."""

    snapshot: Snapshot
    image: Image


def _fields(image: Image) -> dict[str, Any]:
    return {name: getattr(image, name) for name in Image.__dataclass_fields__}


def _image_json(image: Image) -> dict[str, Any]:
    # not asdict: it cannot copy every Mapping
    return {
        **_fields(image),
        "layers": [asdict(layer) for layer in image.layers],
        "binds": list(image.binds),
        "env": dict(image.env),
        "entrypoint": list(image.entrypoint),
        "command": list(image.command),
        "labels": dict(image.labels),
    }


def image_to_json(image: Image) -> dict[str, Any]:
    """An image as a JSON object."""
    return {"format": FORMAT, **_image_json(image)}


def snapshot_to_json(saved: SnapshotRecord) -> dict[str, Any]:
    """A snapshot's record as a JSON object."""
    return {"format": FORMAT, "snapshot": asdict(saved.snapshot), "image": image_to_json(saved.image)}


def image_from_json(value: Any) -> Image:
    """The image in a JSON object; ValueError says what is wrong with it."""
    given = dict(_object(value, "an image"))
    if given.pop("format", None) != FORMAT:
        raise ValueError(f"its format is not {FORMAT}")
    layers = tuple(_layer(layer) for layer in given.pop("layers", ()))
    unknown = set(given) - set(Image.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown keys {sorted(unknown)}")
    for key in ("binds", "entrypoint", "command"):
        given[key] = tuple(_strings(given.get(key, ()), key))
    for key in ("env", "labels"):
        given[key] = dict(_object(given.get(key, {}), key))
        _strings(given[key].values(), key)
    _strings([given.get(key, "") for key in ("id", "name", "workdir", "user")], "id, name, workdir or user")
    try:
        return Image(layers=layers, **given)
    except TypeError as error:
        raise ValueError(str(error)) from None


def snapshot_from_json(value: Any) -> SnapshotRecord:
    """The snapshot's record in a JSON object; ValueError says what is wrong with it."""
    given = _object(value, "a snapshot")
    try:
        snapshot = Snapshot(**_object(given.get("snapshot"), "snapshot"))
    except TypeError as error:
        raise ValueError(str(error)) from None
    return SnapshotRecord(snapshot, image_from_json(given.get("image")))


def _layer(value: Any) -> Layer:
    given = _object(value, "a layer")
    try:
        layer = Layer(**given)
    except TypeError as error:
        raise ValueError(str(error)) from None
    check_id(layer.id)
    if type(layer.shift) is not int or type(layer.memory) is not bool:
        raise ValueError(f"layer {layer.id}: shift or memory is of the wrong type")
    return layer


def check_id(name: str) -> str:
    """An id is one name of a file: letters, digits, `-`, `_` and `.`, not starting with a dot."""
    ok = isinstance(name, str) and 0 < len(name) <= 128 and name.isascii() and name[0] != "."
    if not ok or not all(c.isalnum() or c in "-_." for c in name):
        raise ValueError(f"{name!r} is not an id")
    return name


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"{what} is not an object")
    return value


def _strings(values: Any, what: str) -> list[str]:
    found = list(values)
    if not all(isinstance(value, str) for value in found):
        raise ValueError(f"{what}: expected text")
    return found


def read_json(file: Path, what: str, remedy: str) -> Any:
    """The JSON in a record's file; None if there is no such file."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise damaged(file, what, error, remedy) from None


def damaged(file: Path, what: str, why: object, remedy: str) -> PodError:
    """The error for a record that cannot be used."""
    return PodError(f"{what} {file} is damaged ({why}); {remedy}")
