"""Completions as JSON: the format in which `/generate` sends them and the HTTP client reads them back, bit for bit."""

import base64
import math
from dataclasses import asdict
from typing import Any

import numpy as np

from etude.errors import EtudeError
from etude.inference.known_routing import KnownRouting, Routing
from etude.inference.request import Completion
from etude.inference.sampling import Sampling

ENDINGS = ("stop", "length", "cancelled")
ROUTING_TYPES = ("uint8", "uint16")


class InvalidResponse(EtudeError):
    """A server's response does not follow its interface."""


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    return {**asdict(sampling), "stop": sorted(sampling.stop), "stop_text": list(sampling.stop_text)}


def completion_to_json(completion: Completion, routing: bool, known: KnownRouting | None = None) -> dict[str, Any]:
    """Return a completion as JSON; with `routing`, including the experts that the client does not know, if any."""
    check_logprobs_finite(completion.logprobs, completion.raw_logprobs or [])
    return {
        "tokens": completion.tokens,
        "logprobs": completion.logprobs,
        "raw_logprobs": completion.raw_logprobs,
        "versions": completion.versions,
        "ending": completion.ending,
        "cached": completion.cached,
        "preempted": completion.preempted,
        "routing": routing_to_json(completion.routing, known) if routing else None,
    }


def check_logprobs_finite(*lists: list[float]) -> None:
    """Raise EtudeError for NaN or infinity: JSON has neither, and a model that gives them is broken."""
    if not all(map(math.isfinite, (number for numbers in lists for number in numbers))):
        raise EtudeError("the model's log-probabilities are not finite; its weights are broken")


def completion_from_json(given: Any, where: str, known: Routing | None = None) -> Completion:
    """Return the completion that our server sent; InvalidResponse names what is missing or wrong.

    `known` is the routing that the request named.
    """
    tokens = numbers(given, "tokens", int, where)
    size = len(tokens)
    ending = member(given, "ending", str, where)
    if ending not in ENDINGS:
        raise InvalidResponse(f"{where}: ending is {ending!r}; expected one of {', '.join(ENDINGS)}")
    routing = given.get("routing")
    return Completion(
        tokens,
        numbers(given, "logprobs", float, where, size),
        None if given.get("raw_logprobs") is None else numbers(given, "raw_logprobs", float, where, size),
        numbers(given, "versions", int, where, size),
        ending,
        None if routing is None else routing_from_json(routing, where, known),
        member(given, "cached", int, where),
        member(given, "preempted", int, where),
    )


def routing_to_json(routing: Routing | None, known: KnownRouting | None) -> dict[str, Any] | None:
    """Return routing as JSON, without the leading tokens that the client knows (`known` of them)."""
    if routing is None:
        return None
    skipped = known.count(routing) if known else 0
    rest = routing[skipped:]
    data = base64.b64encode(np.ascontiguousarray(rest).tobytes()).decode()
    return {"dtype": str(rest.dtype), "shape": list(rest.shape), "data": data, "known": skipped}


def routing_from_json(given: Any, where: str, known: Routing | None) -> Routing:
    """Return whole routing, of which the server has left out what the client knows."""
    dtype, shape = member(given, "dtype", str, where), numbers(given, "shape", int, where)
    skipped = member(given, "known", int, where) if "known" in given else 0
    if skipped not in (0, 0 if known is None else len(known)):
        raise InvalidResponse(f"{where}: routing leaves out {skipped} tokens, which the request did not name")
    if dtype not in ROUTING_TYPES:
        raise InvalidResponse(f"{where}: routing has dtype {dtype!r}; expected one of {', '.join(ROUTING_TYPES)}")
    try:
        data = base64.b64decode(member(given, "data", str, where), validate=True)
        rest = np.frombuffer(data, dtype).reshape(shape)
        return rest if known is None or not skipped else np.concatenate((known, rest))
    except ValueError as error:
        raise InvalidResponse(f"{where}: routing cannot be read: {error}") from None


def member(given: Any, name: str, kind: type, where: str) -> Any:
    """Return a member of a JSON object, checked to be of type `kind`; a whole number is also a float."""
    if not isinstance(given, dict) or name not in given:
        raise InvalidResponse(f"{where}: {name} is missing in the response")
    value = given[name]
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise InvalidResponse(f"{where}: {name} is {value!r:.60}; expected {kind.__name__}")
    return value


def numbers(given: Any, name: str, kind: type, where: str, size: int | None = None) -> list[Any]:
    """Return a member that is a list of numbers, checked to have `size` entries."""
    found = member(given, name, list, where)
    expected = (int, float) if kind is float else kind
    if bad := [item for item in found if isinstance(item, bool) or not isinstance(item, expected)]:
        raise InvalidResponse(f"{where}: {name} contains {bad[0]!r:.60}; expected {kind.__name__}s")
    if size is not None and len(found) != size:
        raise InvalidResponse(f"{where}: {name} has {len(found)} entries for {size} tokens")
    return [float(item) for item in found] if kind is float else found
