"""Parsing of JSON tool calls. Every error message is a sentence from which the model can correct its call."""

import json
import math
import re
from typing import Any, NoReturn

from etude.chat.messages import CallStatus

CONTEXT = 24  # characters shown on either side of an error
NAMED = re.compile(r'\s*\{\s*"name"\s*:\s*"([\w.-]+)"')  # the tool name in a call whose remainder is not valid
MAX_PROBLEM = 600  # characters of an error message, including quoted text
MAX_DEPTH = 64  # nested lists and objects; a trace cannot store deeper values


class MalformedCall(Exception):
    """A call that cannot run: its status, and an error message for the model."""

    def __init__(self, status: CallStatus, problem: str, name: str = "") -> None:
        super().__init__(problem)
        self.status: CallStatus = status
        self.problem = problem if len(problem) <= MAX_PROBLEM else f"{problem[:MAX_PROBLEM]}..."
        self.name = name  # of the tool, if it could be parsed


def read_json(text: str, what: str, name: str = "") -> Any:
    """Parse `text` as JSON; raise MalformedCall that says what is wrong and where."""
    text = text.strip(" \t\r\n")  # line numbers in errors count from the first brace
    if not text:
        raise MalformedCall("bad_json", f"{what} is empty; expected a JSON object", name)
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        json.dumps(value, ensure_ascii=False).encode()
        if _nested_deeper(value, MAX_DEPTH):
            raise RecursionError
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        near = text[max(error.pos - CONTEXT, 0) : error.pos + CONTEXT]
        raise MalformedCall(
            "bad_json", f"{what} is not valid JSON: {error.msg} at {place}, near {near!r}", name
        ) from None
    except UnicodeEncodeError:
        problem = f"{what} is not valid JSON: a \\u escape writes one half of a surrogate pair"
        raise MalformedCall("bad_json", problem, name) from None
    except RecursionError:
        raise MalformedCall("bad_json", f"{what} is not valid JSON: nested too deeply", name) from None
    except ValueError as error:  # a number of thousands of digits, or NaN or infinity
        raise MalformedCall("bad_json", f"{what} is not valid JSON: {error}", name) from None
    return value


def read_arguments(text: str, name: str) -> dict[str, Any]:
    """Parse the arguments of a call, which must be a JSON object."""
    return check_arguments(read_json(text, "the text of the arguments", name), name)


def check_arguments(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedCall("bad_structure", f"the arguments must be a JSON object, not {_kind(value)}", name)
    return value


def read_named_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse a Hermes-style call: an object with a name and arguments."""
    named = NAMED.match(text)
    value = read_json(text, "the text of the call", named[1] if named else "")
    if not isinstance(value, dict):
        raise MalformedCall(
            "bad_structure", f"a call must be a JSON object with name and arguments, not {_kind(value)}"
        )
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise MalformedCall(
            "missing_name", 'the call has no tool\'s name: expected {"name": "...", "arguments": {...}}'
        )
    if "arguments" not in value:
        problem = (
            'the call has no arguments: expected {"name": "...", "arguments": {...}}, if need be with an empty object'
        )
        raise MalformedCall("bad_structure", problem, name)
    return name, check_arguments(value["arguments"], name)


def write_json(value: Any) -> str:
    """Serialize a value as chat templates do."""
    return json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", str: "text", list: "an array", dict: "an object", type(None): "null"}
    return kinds.get(type(value), "a number")


def _nested_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `depth`."""
    layer = [value]
    for _ in range(depth + 1):
        layer = [each for each in layer if isinstance(each, dict | list)]
        layer = [item for each in layer for item in (each.values() if isinstance(each, dict) else each)]
    return bool(layer)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return value
