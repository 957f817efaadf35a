"""Samples as JSON, token for token: what `/generate` answers and the HTTP client reads back, bit for bit."""

import base64
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.errors import EtudeError
from etude.inference.request import Sample
from etude.inference.sampling import Sampling

ENDINGS = ("stop", "length", "cancelled")
ROUTING_TYPES = ("uint8", "uint16")


class BadAnswer(EtudeError):
    """A server answered something that is not what its interface promises."""


def sampling_to_json(sampling: Sampling) -> dict[str, Any]:
    return {**asdict(sampling), "stop": sorted(sampling.stop), "stop_text": list(sampling.stop_text)}


def sample_to_json(sample: Sample, routing: bool) -> dict[str, Any]:
    """A sample without its routing, or with it if asked for and the model has any."""
    check_numbers(sample.logprobs, sample.raw_logprobs)
    return {
        "tokens": sample.tokens,
        "logprobs": sample.logprobs,
        "raw_logprobs": sample.raw_logprobs,
        "versions": sample.versions,
        "ending": sample.ending,
        "cached": sample.cached,
        "preempted": sample.preempted,
        "routing": array_to_json(sample.routing) if routing and sample.routing is not None else None,
    }


def check_numbers(*lists: list[float]) -> None:
    """JSON has no NaN; a model that makes some is broken, and its samples are worth nothing."""
    if not all(map(math.isfinite, (number for numbers in lists for number in numbers))):
        raise EtudeError("the model's log-probabilities are not finite; its weights are broken")


def sample_from_json(given: Any, where: str) -> Sample:
    """A sample as our server sends it; BadAnswer names what is missing or wrong."""
    tokens = numbers(given, "tokens", int, where)
    size = len(tokens)
    ending = member(given, "ending", str, where)
    if ending not in ENDINGS:
        raise BadAnswer(f"{where}: ending is {ending!r}; expected one of {', '.join(ENDINGS)}")
    routing = given.get("routing")
    return Sample(
        tokens,
        numbers(given, "logprobs", float, where, size),
        numbers(given, "raw_logprobs", float, where, size),
        numbers(given, "versions", int, where, size),
        ending,
        None if routing is None else array_from_json(routing, where),
        member(given, "cached", int, where),
        member(given, "preempted", int, where),
    )


def array_to_json(array: npt.NDArray[np.unsignedinteger[Any]]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def array_from_json(given: Any, where: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    kind, shape = member(given, "dtype", str, where), numbers(given, "shape", int, where)
    if kind not in ROUTING_TYPES:
        raise BadAnswer(f"{where}: routing is of {kind!r}; expected one of {', '.join(ROUTING_TYPES)}")
    try:
        data = base64.b64decode(member(given, "data", str, where), validate=True)
        return np.frombuffer(data, kind).reshape(shape)
    except ValueError as error:
        raise BadAnswer(f"{where}: routing cannot be read: {error}") from None


def member(given: Any, name: str, kind: type, where: str) -> Any:
    """A member of a JSON object, of the type it must have; a whole number is also a float."""
    if not isinstance(given, dict) or name not in given:
        raise BadAnswer(f"{where}: {name} is missing in the answer")
    value = given[name]
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise BadAnswer(f"{where}: {name} is {value!r:.60}; expected {kind.__name__}")
    return value


def numbers(given: Any, name: str, kind: type, where: str, size: int | None = None) -> list[Any]:
    """A list of numbers, as long as it must be."""
    found = member(given, name, list, where)
    wanted = (int, float) if kind is float else kind
    if bad := [item for item in found if isinstance(item, bool) or not isinstance(item, wanted)]:
        raise BadAnswer(f"{where}: {name} holds {bad[0]!r:.60}; expected {kind.__name__}s")
    if size is not None and len(found) != size:
        raise BadAnswer(f"{where}: {name} has {len(found)} entries for {size} tokens")
    return [float(item) for item in found] if kind is float else found
