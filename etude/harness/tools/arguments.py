"""Validates the arguments of a call against a tool's schema, strictly or with unambiguous conversions.

Supports the part of JSON schema that the tools use: types, required, enum, bounds, items. One error names all problems.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Any

from etude.harness.tools.tool import ToolError

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (dict, Mapping),
}


def check_arguments(
    name: str, schema: Mapping[str, Any], given: Mapping[str, Any], strict: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the validated arguments and the ignored names; raise ToolError that lists all problems."""
    problems: list[str] = []
    known = schema["properties"]
    unknown = [key for key in given if key not in known]
    if strict:
        problems += [_unknown(key, known, given) for key in unknown]
    checked: dict[str, Any] = {}
    for key, value in given.items():
        if key not in known or (value is None and not strict and key not in schema["required"]):
            continue
        checked[key] = _validate(key, known[key], value, strict, problems)
    problems += [_missing(key, unknown) for key in schema["required"] if key not in checked]
    if problems:
        raise ToolError("bad_arguments", f"{name}: {'; '.join(problems)}")
    return checked, unknown


def _unknown(key: str, known: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    close = difflib.get_close_matches(key, [other for other in known if other not in given], 1)
    meant = f"; did you mean {close[0]}?" if close else f"; it takes {', '.join(known)}"
    return f"there is no argument {key[:100]!r}{meant}"


def _missing(key: str, unknown: list[str]) -> str:
    close = difflib.get_close_matches(key, unknown, 1)
    return f"the argument {key} is missing" + (f" (there is {close[0]!r}, which is not known)" if close else "")


def _validate(where: str, schema: Mapping[str, Any], value: Any, strict: bool, problems: list[str]) -> Any:
    kind = schema["type"]
    if not strict:
        value = _convert(kind, schema, value)
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        problems.append(f"{where} must be {_article(kind)}, not {_format_value(value)}")
        return value
    if isinstance(value, str) and (wrong := _invalid_text(value)):
        problems.append(f"{where} {wrong}")
    if "enum" in schema and value not in schema["enum"]:
        problems.append(f"{where} must be one of {', '.join(schema['enum'])}, not {_format_value(value)}")
    for key, word, outside in (("minimum", "least", int.__lt__), ("maximum", "most", int.__gt__)):
        if key in schema and outside(int(value), schema[key]):
            problems.append(f"{where} must be at {word} {schema[key]}, not {value}")
    if kind == "array":
        items = schema["items"]
        return [_validate(f"{where}[{at}]", items, item, strict, problems) for at, item in enumerate(value)]
    if kind == "object":
        return _validate_object(where, schema, value, strict, problems)
    return value


def _validate_object(
    where: str, schema: Mapping[str, Any], value: Mapping[str, Any], strict: bool, problems: list[str]
) -> dict[str, Any]:
    known = schema["properties"]
    if strict:
        problems += [f"{where}: {_unknown(key, known, value)}" for key in value if key not in known]
    problems += [f"{where}.{key} is missing" for key in schema["required"] if key not in value]
    return {
        key: _validate(f"{where}.{key}", known[key], item, strict, problems)
        for key, item in value.items()
        if key in known and (item is not None or strict)
    }


def _convert(kind: str, schema: Mapping[str, Any], value: Any) -> Any:
    """Convert a value of another type if the conversion is unambiguous."""
    if isinstance(value, str) and kind != "string":
        if kind == "array" and not value.lstrip().startswith("[") and schema["items"]["type"] == "string":
            return [value]
        try:
            found = json.loads(value.strip().lower() if kind == "boolean" else value)
        except (ValueError, RecursionError):
            return value
        return _convert(kind, schema, found) if not isinstance(found, str) else value
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind == "string" and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return value


def _invalid_text(text: str) -> str:
    """Return why a text cannot be stored in a file or command, empty if it can."""
    if "\0" in text:
        return "contains a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"contains half a character (\\u{ord(text[error.start]):04x}) at position {error.start}"
    return ""


def _article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aio" else f"a {kind}"


def _format_value(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
