"""What crosses HTTP between a host and its clients: requests, descriptions of pods and errors, as plain JSON.

Both sides use these functions, so that a client meets the same classes as a caller in the host's own process. What
comes in is checked field by field: an unknown field is refused by name, never skipped.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from etude.errors import BusyError, EtudeError, InputError
from etude.pods.fleet import HostGone
from etude.pods.images.records import Image
from etude.pods.pod import Egress, Event, Limits, PodError, PodFileError, PodGone, Snapshot, Unsupported
from etude.pods.runtime.backend import LocalPod, PodSpec, Storage
from etude.pods.scheduling.admission import NeverFits, WaitedTooLong
from etude.pods.scheduling.router import NoHost

LEASE_S = 60.0  # a pod whose client died ends after this, so a server may be away for less
MOST_LEASE_S = 24 * 3600.0
TUNNEL_ENDED = 4410  # close code of a tunnel: the agent hung up, because the pod ended or was started anew
WAIT_S = 20.0  # a request to create is answered after this, made or not: proxies cut longer silences

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
    """The HTTP status and the body that stand for an error."""
    kind = next(each for each in type(error).__mro__ if each in _STATUS)
    body: dict[str, Any] = {"error": str(error), "kind": kind.__name__}
    if isinstance(error, PodFileError):
        body["errno"] = error.errno
    return _STATUS[kind], body


def error_from_json(status: int, body: Any, where: str) -> EtudeError:
    """The error that an answer stands for; `where` says whose answer it is, when that is no error of ours."""
    if not isinstance(body, dict) or not isinstance(body.get("error"), str):
        return HostGone(f"{where} answered {status}, not as a host of pods does; is the address right?")
    kind, text = _KINDS.get(str(body.get("kind")), PodError), body["error"]
    if kind is PodFileError:
        return PodFileError(int(body.get("errno", 0)), text)
    if kind is NoHost:
        return NoHost(text, {}, True)
    return kind(text)


def take(plain: Any, what: str, **types: type | tuple[type, ...]) -> dict[str, Any]:
    """The fields of a JSON object, each of its type; what is unknown or of another type is refused by name."""
    if not isinstance(plain, dict):
        raise InputError(f"{what}: expected a JSON object")
    for name, value in plain.items():
        if name not in types:
            raise InputError(f"{what}: {name!r} is not a field; there are: {', '.join(types)}")
        wanted = types[name]
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
            names = " or ".join("null" if each is type(None) else each.__name__ for each in wanted)
            raise InputError(f"{what}: {name} is {value!r}; expected {names}")
    return plain


@dataclass(frozen=True, slots=True)
class CreateAsk:
    """A pod that a client asks for. `timeout` bounds the wait for a turn, `lease` the silence of the client."""

    image: str = "host"  # the name or id of an image, or the id of a snapshot
    limits: Limits | None = None
    egress: Egress | None = None
    storage: Storage = "memory"
    ttl: float | None = None
    key: str = ""
    tenant: str = ""
    lease: float = LEASE_S
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.storage not in ("memory", "disk"):
            raise InputError(f"create: storage is {self.storage!r}; expected memory or disk")
        if not 0 <= self.lease <= MOST_LEASE_S:
            raise InputError(f"create: lease is {self.lease:g}; expected up to {MOST_LEASE_S:g} seconds, or 0 for none")
        if not self.lease and self.ttl is None:
            raise InputError("create: a pod without a lease needs a ttl, or nobody would ever end it")

    def to_json(self) -> dict[str, Any]:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        plain["limits"] = self.limits.asked() if self.limits else None
        plain["egress"] = asdict(self.egress) if self.egress else None
        return plain

    @classmethod
    def from_json(cls, body: Any) -> "CreateAsk":
        number, nothing = (int, float), type(None)
        plain = take(
            body,
            "create",
            image=str,
            limits=(dict, nothing),
            egress=(dict, nothing),
            storage=str,
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
    """Limits, as `Limits.asked` gives them."""
    types = {field.name: (int, float) if field.name == "cpu" else int for field in fields(Limits)}
    return Limits(**take(plain, "limits", **types))


def egress_from_json(plain: Any) -> Egress:
    """A policy of egress."""
    given = take(plain, "egress", allow=list, transparent=bool, private=bool)
    rules = given.get("allow", [])
    if not all(isinstance(rule, str) for rule in rules):
        raise InputError("egress: rules are text, such as example.org:443")
    return Egress(**{**given, "allow": tuple(rules)})


def pod_to_json(pod: LocalPod) -> dict[str, Any]:
    """What a client needs to know of a pod to drive it."""
    return {
        **spec_to_json(pod.spec),
        "workdir": pod.workdir,
        "environment": dict(pod.environment),
        "user": pod.user,
        "command": [*pod.spec.image.entrypoint, *pod.spec.image.command],
    }


def spec_to_json(spec: PodSpec) -> dict[str, Any]:
    """What everybody may know of a pod."""
    left = spec.remaining()
    return {
        "id": spec.id,
        "image": spec.image.name or spec.image.id,
        "limits": spec.limits.asked(),
        "egress": asdict(spec.egress),
        "storage": spec.storage,
        "ttl": spec.ttl,
        "remaining": left,
        "lease": spec.lease,
        "tenant": spec.tenant,
        "attached": spec.attached,
        "created": spec.created,
    }


def image_to_json(image: Image) -> dict[str, Any]:
    """What a list of images shows."""
    return {"id": image.id, "name": image.name, "layers": len(image.layers), "workdir": image.workdir}


def event_to_json(event: Event) -> dict[str, Any]:
    return {"time": event.time, "kind": event.kind, "facts": dict(event.facts)}


def event_from_json(plain: Mapping[str, Any]) -> Event:
    return Event(plain["time"], plain["kind"], plain["facts"])


def snapshot_from_json(plain: Mapping[str, Any]) -> Snapshot:
    return Snapshot(**plain)
