"""The store's record types (layers, images, snapshots) and their JSON form.

A record is written once, atomically, and never changed; one that cannot be read is an error that names the file.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.pods.images.trees import digest
from etude.pods.pod import PodError, Snapshot

FORMAT = 1
# directories of programs: an imported image may bind these host paths without permission
SYSTEM_BINDS = ("/usr", "/opt", "/nix", "/gnu", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@dataclass(frozen=True, slots=True)
class Layer:
    """One read-only directory tree in overlayfs form. On disk its uids and gids are shifted by `shift`."""

    id: str
    shift: int = 0
    memory: bool = False  # in a tmpfs of the zygote, not in the store's directory


@dataclass(frozen=True, slots=True)
class Image:
    """A pod's root file system: layers, lowest first, and the configuration of its processes."""

    id: str
    name: str
    layers: tuple[Layer, ...]
    binds: tuple[str, ...] = ()  # host paths, mounted read-only at the same path
    env: Mapping[str, str] = field(default_factory=dict, hash=False)
    workdir: str = "/root"
    user: str = ""
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(cls, layers: tuple[Layer, ...], name: str = "", **config: Any) -> "Image":
        """Return an image with a content-derived id: the same layers and configuration have the same id."""
        made = cls("", name, layers, **config)
        return replace(made, id=digest(json.dumps({**_image_json(made), "id": "", "name": ""}, sort_keys=True)))

    def named(self, name: str) -> "Image":
        """Return the same image under another name."""
        return replace(self, name=name)

    def with_(self, **changes: Any) -> "Image":
        """Return an image with other layers or configuration, and the matching id."""
        config = {key: value for key, value in _fields(self).items() if key not in ("id", "name", "layers")}
        layers = changes.pop("layers", self.layers)
        return Image.of(layers, changes.pop("name", self.name), **{**config, **changes})


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot in the store: a pod created from `image` starts in the snapshot's state."""

    snapshot: Snapshot
    image: Image


def _fields(image: Image) -> dict[str, Any]:
    return {name: getattr(image, name) for name in Image.__dataclass_fields__}


def _image_json(image: Image) -> dict[str, Any]:
    # asdict cannot copy every Mapping
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
    """Return an image as a JSON object."""
    return {"format": FORMAT, **_image_json(image)}


def snapshot_to_json(record: SnapshotRecord) -> dict[str, Any]:
    """Return a snapshot record as a JSON object."""
    return {"format": FORMAT, "snapshot": asdict(record.snapshot), "image": image_to_json(record.image)}


def image_from_json(value: Any) -> Image:
    """Return the image in a JSON object; raise ValueError if it is invalid."""
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
    """Return the snapshot record in a JSON object; raise ValueError if it is invalid."""
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
    """Return an id if it is a valid file name of letters, digits, `-`, `_` and `.`, not starting with a dot."""
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
        raise ValueError(f"{what}: expected strings")
    return found


def read_json(file: Path, what: str, remedy: str) -> Any:
    """Return the JSON in a record's file; None if there is no such file."""
    try:
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise damaged_record(file, what, error, remedy) from None


def damaged_record(file: Path, what: str, why: object, remedy: str) -> PodError:
    """Return the error for a record that cannot be used."""
    return PodError(f"{what} {file} is damaged ({why}); {remedy}")
