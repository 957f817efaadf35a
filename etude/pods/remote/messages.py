"""JSON messages between a host and its clients over HTTP: requests, descriptions of pods, and errors.

Both sides use these functions, so a client gets the same classes as a caller in the host's own process. Input is
checked field by field: an unknown field is an error that names it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from etude.errors import BusyError, EtudeError, InputError
from etude.pods.fleet import HostGone
from etude.pods.images.records import Image
from etude.pods.pod import Egress, Event, FileInfo, Limits, PodError, PodFileError, PodGone, Snapshot, Unsupported
from etude.pods.runtime.backend import LocalPod, PodSpec, Storage
from etude.pods.scheduling.admission import NeverFits, WaitedTooLong
from etude.pods.scheduling.router import NoHost

LEASE_S = 60.0  # a pod whose client died ends after this; a server restart must take less
MAX_LEASE_S = 24 * 3600.0
TUNNEL_ENDED = 4410  # close code of a tunnel: the guest init closed it, because the pod ended or was restarted
WAIT_S = 20.0  # a create request is answered after this even if still waiting: HTTP proxies cut longer silences

_STATUS: Mapping[type[EtudeError], int] = {
    InputError: 400,
    PodGone: 410,
    BusyError: 409,
    PodFileError: 422,
    Unsupported: 501,
    WaitedTooLong: 503,
    HostGone: 503,
    NoHost: 503,
    NeverFits: 507,
    PodError: 500,
    EtudeError: 500,
}
_KINDS = {kind.__name__: kind for kind in _STATUS}


def error_to_json(error: EtudeError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body that represent an error."""
    kind = next(each for each in type(error).__mro__ if each in _STATUS)
    body: dict[str, Any] = {"error": str(error), "kind": kind.__name__}
    if isinstance(error, PodFileError):
        body["errno"] = error.errno
    return _STATUS[kind], body


def error_from_json(status: int, body: Any, url: str) -> EtudeError:
    """Return the error that a response represents; `url` names the server if the body is not one of our errors."""
    if not isinstance(body, dict) or not isinstance(body.get("error"), str):
        return HostGone(f"{url} answered {status} without a pod host's error body; check the address")
    kind, text = _KINDS.get(str(body.get("kind")), PodError), body["error"]
    if kind is PodFileError:
        return PodFileError(int(body.get("errno", 0)), text)
    if kind is NoHost:
        return NoHost(text, {}, True)
    return kind(text)


def check_fields(plain: Any, message: str, **types: type | tuple[type, ...]) -> dict[str, Any]:
    """Return a JSON object after checking its fields; an unknown field or a wrong type is an error that names it."""
    if not isinstance(plain, dict):
        raise InputError(f"{message}: expected a JSON object")
    for name, value in plain.items():
        if name not in types:
            raise InputError(f"{message}: {name!r} is not a field; the fields are: {', '.join(types)}")
        wanted = types[name]
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join("null" if each is type(None) else each.__name__ for each in wanted)
            raise InputError(f"{message}: {name} is {value!r}; expected {names}")
    return plain


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A client's request for a pod. `timeout` bounds the wait for admission, `lease` the time without a renewal."""

    image: str = "host"  # the name or id of an image, or the id of a snapshot
    limits: Limits | None = None
    egress: Egress | None = None
    storage: Storage = "memory"
    env: Mapping[str, str] | None = None
    ttl: float | None = None
    key: str = ""
    tenant: str = ""
    lease: float = LEASE_S
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.storage not in ("memory", "disk"):
            raise InputError(f"create: storage is {self.storage!r}; expected memory or disk")
        if not 0 <= self.lease <= MAX_LEASE_S:
            raise InputError(f"create: lease is {self.lease:g}; expected up to {MAX_LEASE_S:g} seconds, or 0 for none")
        if not self.lease and self.ttl is None:
            raise InputError("create: a pod without a lease needs a ttl, or it would never end")
        if not all(isinstance(text, str) for item in (self.env or {}).items() for text in item):
            raise InputError(f"create: env is {self.env!r}; expected names and values as text")

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["limits"] = self.limits.specified() if self.limits else None
        plain["egress"] = asdict(self.egress) if self.egress else None
        plain["env"] = dict(self.env) if self.env else None
        return plain

    @classmethod
    def from_json(cls, body: Any) -> "CreateRequest":
        number, nothing = (int, float), type(None)
        plain = check_fields(
            body,
            "create",
            image=str,
            limits=(dict, nothing),
            egress=(dict, nothing),
            storage=str,
            env=(dict, nothing),
            ttl=(*number, nothing),
            key=str,
            tenant=str,
            lease=number,
            timeout=(*number, nothing),
        )
        given = {key: value for key, value in plain.items() if value is not None}
        if "limits" in given:
            given["limits"] = limits_from_json(given["limits"])
        if "egress" in given:
            given["egress"] = egress_from_json(given["egress"])
        return cls(**given)


def limits_from_json(plain: Any) -> Limits:
    """Parse limits; the inverse of `Limits.specified`."""
    types = {field.name: (int, float) if field.name == "cpu" else int for field in fields(Limits)}
    return Limits(**check_fields(plain, "limits", **types))


def egress_from_json(plain: Any) -> Egress:
    """Parse an egress setting."""
    given = check_fields(plain, "egress", allow=list, transparent=bool, private=bool)
    rules = given.get("allow", [])
    if not all(isinstance(rule, str) for rule in rules):
        raise InputError("egress: allow must be a list of strings such as example.org:443")
    return Egress(**{**given, "allow": tuple(rules)})


def pod_to_json(pod: LocalPod) -> dict[str, Any]:
    """Return the description of a pod that a client needs to use it."""
    return {
        **spec_to_json(pod.spec),
        "workdir": pod.workdir,
        "environment": dict(pod.environment),
        "user": pod.user,
        "command": [*pod.spec.image.entrypoint, *pod.spec.image.command],
    }


def spec_to_json(spec: PodSpec) -> dict[str, Any]:
    """Return the public description of a pod."""
    return {
        "id": spec.id,
        "image": spec.image.name or spec.image.id,
        "limits": spec.limits.specified(),
        "egress": asdict(spec.egress),
        "storage": spec.storage,
        "ttl": spec.ttl,
        "remaining": spec.remaining(),
        "lease": spec.lease,
        "tenant": spec.tenant,
        "attached": spec.attached,
        "created": spec.created,
    }


def image_to_json(image: Image) -> dict[str, Any]:
    """Return the description of an image for a list."""
    return {"id": image.id, "name": image.name, "layers": len(image.layers), "workdir": image.workdir}


def changes_to_json(changes: Mapping[str, FileInfo | None]) -> str:
    """Return a diff as JSON text; ASCII, because a name that is not UTF-8 contains lone surrogates."""
    return json.dumps({path: asdict(info) if info else None for path, info in changes.items()})


def changes_from_json(plain: Mapping[str, Any]) -> dict[str, FileInfo | None]:
    return {path: FileInfo(**info) if info else None for path, info in plain.items()}


def event_to_json(event: Event) -> dict[str, Any]:
    return {"time": event.time, "kind": event.kind, "facts": dict(event.facts)}


def event_from_json(plain: Mapping[str, Any]) -> Event:
    return Event(plain["time"], plain["kind"], plain["facts"])


def snapshot_from_json(plain: Mapping[str, Any]) -> Snapshot:
    return Snapshot(**plain)
