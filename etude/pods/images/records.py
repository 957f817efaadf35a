"""The store's record types: layers, images, snapshots. pydantic reads and writes their JSON form."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from etude.pods.images.trees import digest
from etude.pods.pod import Snapshot

# directories of programs: an imported image may bind these host paths
SYSTEM_BINDS = ("/usr", "/opt", "/nix", "/gnu", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


@dataclass(frozen=True, slots=True)
class Layer:
    """One read-only directory tree in overlayfs form. On disk its uids and gids are shifted by `shift`."""

    id: str
    shift: int = 0
    memory: bool = False  # in a tmpfs of the zygote, not in the store's directory

    def __post_init__(self) -> None:
        check_id(self.id)


@dataclass(frozen=True, slots=True)
class Image:
    """A pod's root file system: layers, lowest first, and the configuration of its processes."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
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
    format: Literal[1] = 1

    @classmethod
    def of(cls, layers: tuple[Layer, ...], name: str = "", **config: Any) -> "Image":
        """Return an image with a content-derived id: the same layers and configuration have the same id."""
        return cls("", name, layers).with_(**config)

    def with_(self, **changes: Any) -> "Image":
        """Return an image with other layers or configuration, and the matching id."""
        made = replace(self, **changes)
        return replace(made, id=digest(IMAGE.dump_json(replace(made, id="", name="")).decode()))

    def named(self, name: str) -> "Image":
        """Return the same image under another name."""
        return replace(self, name=name)


@dataclass(frozen=True, slots=True)
class ImageName:
    """A name of an image."""

    name: str
    image: str


@dataclass(frozen=True, slots=True)
class SnapshotRecord:
    """A snapshot in the store: a pod created from `image` starts in the snapshot's state."""

    snapshot: Snapshot
    image: Image


IMAGE = TypeAdapter(Image)
IMAGE_NAME = TypeAdapter(ImageName)
SNAPSHOT = TypeAdapter(SnapshotRecord)


def is_id(name: str) -> bool:
    """Return whether a name can be an id: up to 128 letters, digits, `-`, `_` and `.`, not starting with a dot."""
    return re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,128}", name) is not None


def check_id(name: str) -> str:
    """Return an id; raise ValueError if it is none."""
    if not is_id(name):
        raise ValueError(f"{name!r} is not an id")
    return name


def reason(error: ValueError) -> str:
    """Return why a record cannot be read, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
