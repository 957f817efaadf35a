"""Messages between a host and its clients over HTTP: requests, and errors that arrive as the class they were raised as.

A message is JSON: `to_json` writes any dataclass, `parse` checks and reads it. An unknown field is an error.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import to_jsonable_python

from etude.errors import BusyError, EtudeError, InputError
from etude.pods.host_client import HostGone
from etude.pods.images.builder import CopyStep
from etude.pods.images.records import Image, Layer
from etude.pods.images.transfer import LayersMissing, PackedLayer
from etude.pods.pod import (
    DiffTooLarge,
    Egress,
    Event,
    FileInfo,
    Limits,
    PodError,
    PodFileError,
    PodGone,
    SnapshotKind,
    Unsupported,
)
from etude.pods.runtime.backend import Storage
from etude.pods.scheduling.admission import NeverFits, WaitedTooLong
from etude.pods.scheduling.router import NoHost

LEASE_S = 60.0  # a pod whose client died ends after this; a server restart must take less
MAX_LEASE_S = 24 * 3600.0
SNAPSHOT_LEASE_S = 24 * 3600.0  # of the snapshots of a fleet, from their last use on
MAX_SNAPSHOT_LEASE_S = 30 * 24 * 3600.0
TUNNEL_ENDED = 4410  # close code of a tunnel: the guest init closed it, because the pod ended or was restarted

T = TypeVar("T")
to_json = to_jsonable_python


class CreateRequest(BaseModel):
    """A client's request for a pod. `timeout` bounds the wait for admission, `lease` the time without a renewal."""

    model_config = ConfigDict(extra="forbid")
    image: str | Image = "host"  # an image, whose layers the host has; the name of one, or the id of a snapshot
    limits: Limits | None = None
    egress: Egress | None = None
    storage: Storage = "memory"
    env: dict[str, str] | None = None
    ttl: float | None = None
    lease: Annotated[float, Field(ge=0, le=MAX_LEASE_S)] = LEASE_S
    timeout: float | None = None

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if not self.lease and self.ttl is None:
            raise ValueError("a pod without a lease needs a ttl, or it would never end")
        return self


class SnapshotRequest(BaseModel):
    """A request to take a snapshot of a pod, or to fork it `n` times."""

    model_config = ConfigDict(extra="forbid")
    n: int = 1
    kind: SnapshotKind | None = None
    owner: str = ""  # the run that the snapshot is taken for
    lease: Annotated[float, Field(ge=0, le=MAX_SNAPSHOT_LEASE_S)] = 0.0  # removed so long after its last use; 0: never


class LayerRequest(BaseModel):
    """A request to send a packed layer to a host."""

    model_config = ConfigDict(extra="forbid")
    packed: PackedLayer
    sender: str


class CopyRequest(BaseModel):
    """A request to make the layer of a COPY. `sources` has the name of each, and whether ADD unpacks it."""

    model_config = ConfigDict(extra="forbid")
    step: CopyStep
    layer: Layer | None = None
    sources: list[tuple[str, bool]] = []


class LocateRequest(BaseModel):
    """A request to follow the links of a path in an image."""

    model_config = ConfigDict(extra="forbid")
    image: Image
    path: str


class Events(BaseModel):
    """Events of a pod. `next` and `of` are the `after` and `of` of the request for those that follow."""

    events: list[Event]
    next: int
    of: str  # the host's name: one that restarted has a new list


_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def parse(kind: type[T], body: bytes, what: str) -> T:
    """Return a message of this kind; InputError, which names the first wrong field, if `body` is not one."""
    try:
        message: T = _adapter(kind).validate_json(body or b"{}", strict=True)
        return message
    except ValidationError as error:
        first = error.errors()[0]
        field, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            raise InputError(f"{what}: {field} is not a field") from None
        where = f"{field} is {str(first['input'])[:100]!r}; " if field else ""
        raise InputError(f"{what}: {where}{reason}") from None


def changes_to_json(changes: Mapping[str, FileInfo | None]) -> str:
    """Return a diff as JSON text; ASCII, because a name that is not UTF-8 contains lone surrogates."""
    return json.dumps({path: asdict(info) if info else None for path, info in changes.items()})


def changes_from_json(text: bytes) -> dict[str, FileInfo | None]:
    return {path: FileInfo(**info) if info else None for path, info in json.loads(text).items()}


class ErrorBody(BaseModel):
    """The body of a response that is an error."""

    error: str
    kind: str = "PodError"
    errno: int = 0


_STATUS: Mapping[type[EtudeError], int] = {
    InputError: 400,
    PodGone: 410,
    BusyError: 409,
    PodFileError: 422,
    Unsupported: 501,
    DiffTooLarge: 501,
    WaitedTooLong: 503,
    HostGone: 503,
    LayersMissing: 404,
    NoHost: 503,
    NeverFits: 507,
    PodError: 500,
    EtudeError: 500,
}
_KINDS = {kind.__name__: kind for kind in _STATUS}


def error_to_json(error: EtudeError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body that represent an error."""
    kind = next(each for each in type(error).__mro__ if each in _STATUS)
    errno = error.errno if isinstance(error, PodFileError) else 0
    return _STATUS[kind], ErrorBody(error=str(error), kind=kind.__name__, errno=errno).model_dump()


def error_from_json(status: int, body: bytes, url: str) -> EtudeError:
    """Return the error that a response represents; `url` names the server if the body is not one of our errors."""
    try:
        found = ErrorBody.model_validate_json(body)
    except ValidationError:
        return HostGone(f"{url} answered {status} without a pod host's error body; check the address")
    kind = _KINDS.get(found.kind, PodError)
    if kind is PodFileError:
        return PodFileError(found.errno, found.error)
    return NoHost(found.error, {}, True) if kind is NoHost else kind(found.error)
