"""The store's record types: layers, images, snapshots. pydantic reads and writes their JSON form."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from etude.errors import InputError
from etude.pods.images.trees import DIGEST_LENGTH, digest
from etude.pods.pod import Snapshot

# directories of programs: an imported image may bind these host paths
SYSTEM_BINDS = ("/usr", "/opt", "/nix", "/gnu", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_LABEL = "org.etude.system"  # of an image that binds them: whose they are


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
    owner: str = ""  # the run that a remote client took it for
    lease: float = 0.0  # seconds without a use after which its host removes it; 0: never


IMAGE = TypeAdapter(Image)
IMAGE_NAME = TypeAdapter(ImageName)
SNAPSHOT = TypeAdapter(SnapshotRecord)


def is_id(name: str) -> bool:
    """Return whether a name can be an id: up to 128 letters, digits, `-`, `_` and `.`, not starting with a dot."""
    return re.fullmatch(r"(?!\.)[A-Za-z0-9._-]{1,128}", name) is not None


def is_content_id(name: str) -> bool:
    """Return whether the id of a layer is the digest of its content: such a layer is the same in every store."""
    return re.fullmatch(rf"[0-9a-f]{{{DIGEST_LENGTH}}}", name) is not None


def check_id(name: str) -> str:
    """Return an id; raise ValueError if it is none."""
    if not is_id(name):
        raise ValueError(f"{name!r} is not an id")
    return name


def check_binds(image: Image, what: str) -> None:
    """Raise InputError for an image from outside that binds anything but system directories."""
    if refused := sorted(set(image.binds) - set(SYSTEM_BINDS)):
        raise InputError(f"{what}: binds the host paths {', '.join(refused)}; only system directories can be bound")


def check_travelled(image: Image, what: str) -> Image:
    """Return an image that another machine sent; raise InputError if it is not one that stores exchange."""
    check_binds(image, what)
    if any(layer.shift or layer.memory or not is_content_id(layer.id) for layer in image.layers) or not image.layers:
        raise InputError(f"{what}: its layers are not those of a portable image")
    return image


def reason(error: ValueError) -> str:
    """Return why a record cannot be read, in one line."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}".lstrip(": ")
