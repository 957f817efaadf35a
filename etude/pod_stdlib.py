"""JSON and `suppress` for programs that run in pods, without what `json` and `contextlib` import.

`json` imports `re`, for its error messages and for Pythons without the C functions; `contextlib` imports `collections`
and `functools`. Each takes about as long as the start of the interpreter. No syntax newer than Python 3.8.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    HAS_FUNCTIONS = True
except ImportError:  # another implementation of Python
    HAS_FUNCTIONS = False


class suppress:  # noqa: N801
    """Do what `contextlib.suppress` does."""

    def __init__(self, *errors: type[BaseException]) -> None:
        self.errors = errors

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return kind is not None and issubclass(kind, self.errors)


class _ScannerOptions:
    """The attributes of `json.JSONDecoder` that the scanner reads."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float


_OPTIONS: Any = _ScannerOptions()


def loads(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError or RecursionError as `json.loads` does."""
    if not HAS_FUNCTIONS:
        import json

        return json.loads(text)
    text = text.decode("utf-8", "surrogatepass") if isinstance(text, bytes) else text
    try:
        value, end = make_scanner(_OPTIONS)(text, len(text) - len(text.lstrip(" \t\n\r")))
    except StopIteration as error:
        raise ValueError(f"no JSON value at character {error.value}") from None
    if text[end:].strip(" \t\n\r"):
        raise ValueError(f"more than one JSON value at character {end}")
    return value


def dumps(value: Any) -> str:
    """Return a value of built-in types as JSON; raise as `json.dumps` does."""
    if not HAS_FUNCTIONS:
        import json

        return json.dumps(value)
    return "".join(make_encoder({}, _refuse, encode_basestring_ascii, None, ": ", ", ", False, False, True)(value, 0))


def _refuse(value: Any) -> Any:
    raise TypeError(f"a value of {type(value).__name__} is not JSON")
