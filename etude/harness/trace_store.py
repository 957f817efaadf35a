"""Lossless storage of traces, one compressed file each.

    magic, version | size of the header | header (JSON: everything but the arrays) | the arrays, one after another

The whole is one zstd frame with a checksum, so damage is always detected. The header gives offset, type and shape of
each array. Files are validated against the types of `trace.py` on loading, whatever wrote them.
"""

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
import zstandard

from etude.config import Settings, make_settings
from etude.errors import EtudeError, InputError
from etude.files import write_atomically
from etude.harness.trace import Segment, SegmentKind, Trace

MAGIC = b"ETUDETRACE"
VERSION = b"\x01\n"
SUFFIX = ".trace"
MAX_BYTES = 4 << 30  # of an uncompressed trace; a damaged file must not exhaust memory
ARRAYS = {"tokens": "uint32", "sampled": "bool", "logprobs": "float32", "raw_logprobs": "float32", "versions": "int32"}
# Attribute of a segment -> its key in the file.
KEYS = {name: "made" if name == "sampled" else name for name in (*ARRAYS, "routing")}
NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "an integer",
    int | float: "a number",
    list: "a list",
    dict: "an object",
}
# Exceptions that libraries raise on invalid input.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error, zstandard.ZstdError)

Array: TypeAlias = np.ndarray[Any, Any]


def save_trace(trace: Trace, path: Path | str) -> None:
    """Write a trace atomically."""
    data = pack_trace(trace)
    try:
        write_atomically(Path(path), data, durable=True)
    except OSError as error:
        raise EtudeError(f"{path}: cannot be written: {error.strerror}") from error


def load_trace(path: Path | str) -> Trace:
    """Load a trace; raise InputError if the file is not a trace or is damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return unpack_trace(data, str(path))


def pack_trace(trace: Trace) -> bytes:
    """Return the content of a trace file."""
    arrays: list[bytes] = []
    offset = 0

    def put(array: Array) -> dict[str, Any]:
        nonlocal offset
        arrays.append(array.tobytes())
        offset += len(arrays[-1])
        return {"type": array.dtype.str, "shape": list(array.shape), "at": offset - len(arrays[-1])}

    name = f"trace {trace.id}"
    segments = [write_segment(segment, put, f"{name}: segments[{i}]") for i, segment in enumerate(trace.segments)]
    try:
        header = to_json(replace(trace, segments=()), name) | {"segments": segments}
        # Not as \u escapes: two separate halves of a surrogate pair would be read back as one character.
        text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or deep nesting
        raise InputError(f"{name}: cannot be stored: {error}") from error
    whole = b"".join((MAGIC, VERSION, struct.pack("<Q", len(text)), text, *arrays))
    if len(whole) > MAX_BYTES:
        raise InputError(f"{name}: cannot be stored: it has {len(whole)} bytes; expected at most {MAX_BYTES}")
    return deflate(whole)


def unpack_trace(data: bytes, name: str = "trace") -> Trace:
    """Return the trace from the output of `pack_trace`; raise InputError, starting with `name`, if it is damaged."""
    try:
        whole = inflate(data)
        start = len(MAGIC) + len(VERSION)
        if not whole.startswith(MAGIC):
            raise ValueError("it does not begin with the magic of a trace")
        if whole[len(MAGIC) : start] != VERSION:
            raise InputError(f"{name}: a trace of version {whole[len(MAGIC)]}; this program reads {VERSION[0]}")
        (size,) = struct.unpack_from("<Q", whole, start)
        start += 8
        header = json.loads(whole[start : start + size].decode("utf-8", "surrogatepass"))
        body = memoryview(whole)[start + size :]

        def take(where: Mapping[str, Any]) -> Array:
            shape = from_json(tuple[int, ...], where["shape"], f"{name}: shape")
            if min(shape, default=0) < 0:
                raise ValueError(f"an array of shape {shape}")
            return np.frombuffer(body, where["type"], math.prod(shape), where["at"]).reshape(shape)

        written = header.pop("segments")
        segments = tuple(read_segment(form, take, f"{name}: segments[{i}]") for i, form in enumerate(written))
    except DAMAGE as error:
        raise InputError(f"{name}: not a trace, or damaged: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise InputError(f"{name}: too large or nested too deeply to be read") from error
    trace: Trace = from_json(Trace, header | {"segments": []}, f"{name}: trace")
    return replace(trace, segments=segments)


# ------------------------------------------------------------------------------------------- compression


def deflate(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=6, write_checksum=True).compress(data)


def inflate(data: bytes) -> bytes:
    """Undo `deflate`; raise ValueError or ZstdError for anything else."""
    claimed = zstandard.get_frame_parameters(data).content_size  # allocated in full before a byte is checked
    if claimed > MAX_BYTES:
        raise ValueError(f"it claims to hold {claimed} bytes; expected at most {MAX_BYTES}")
    return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


# ------------------------------------------------------------------------------------------- segments


def write_segment(segment: Segment, put: Callable[[Array], dict[str, Any]], where: str) -> dict[str, Any]:
    """Return the JSON form of a segment; `put` stores a little-endian array and returns a reference to it."""
    _check(segment, where)
    form: dict[str, Any] = {"kind": segment.kind}
    for name, key in KEYS.items():
        if (array := getattr(segment, name)) is not None:
            form[key] = put(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
    return form


def read_segment(form: Any, take: Callable[[Mapping[str, Any]], Array], where: str) -> Segment:
    """Return a segment from its JSON form; `take` returns the array of a reference."""
    required = [KEYS[name] for name in ARRAYS]
    if not isinstance(form, dict) or not form.keys() >= {"kind", *required} or form.keys() - {"kind", *KEYS.values()}:
        raise InputError(f"{where}: expected an object with kind, {', '.join(required)} and at most routing")
    arrays = {}
    for name, key in ((name, key) for name, key in KEYS.items() if key in form):
        try:
            array = take(form[key])
        except DAMAGE as error:
            raise InputError(f"{where}.{key}: damaged: {error}") from error
        arrays[name] = array.astype(array.dtype.newbyteorder("="))  # a copy, in native byte order
    segment = Segment(kind=from_json(SegmentKind, form["kind"], f"{where}.kind"), **arrays)
    _check(segment, where)
    return segment


def _check(segment: Segment, where: str) -> None:
    for name, kind in ARRAYS.items():
        array = getattr(segment, name)
        if array.dtype != np.dtype(kind) or array.shape != (len(segment),):
            raise InputError(
                f"{where}.{KEYS[name]}: {array.dtype} {list(array.shape)}; expected {kind} [{len(segment)}]"
            )
    routing = segment.routing
    if routing is not None and (routing.dtype.kind not in "ui" or routing.ndim != 3 or len(routing) > len(segment)):
        expected = f"integers [at most {len(segment)}, layers, experts]"
        raise InputError(f"{where}.routing: {routing.dtype} {list(routing.shape)}; expected {expected}")


# ------------------------------------------------------------------------------------------- JSON forms


def to_json(value: Any, where: str) -> Any:
    """Return the JSON form of dataclasses, settings, mappings and sequences; InputError names a value that has none."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Settings):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name), f"{where}.{field.name}") for field in fields(value)}
    if isinstance(value, list | tuple):
        return [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    kind = "a mapping whose keys are not all text" if isinstance(value, Mapping) else type(value).__name__
    raise InputError(f"{where}: {kind} cannot be stored in a trace; expected JSON values")


def from_json(kind: Any, value: Any, where: str) -> Any:
    """Return a value of type `kind` from its JSON form; InputError names the place where it does not match."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and NoneType in parts):
        return value
    if origin in (Union, UnionType):
        options = [part for part in parts if part is not NoneType]
        matching = (part for part in options if isinstance(value, _json_type(part)))
        return from_json(next(matching, options[0]), value, where)
    form = _json_type(kind)
    if not isinstance(value, form) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{where}: {_shown(value)} where {NAMES[form]} was expected")
    if origin is Literal and value not in parts:
        raise InputError(f"{where}: {_shown(value)} is none of {', '.join(parts)}")
    if _is_settings(kind):
        return make_settings(kind, where, **{kind.renamed_keys.get(key, key): item for key, item in value.items()})
    if is_dataclass(kind):
        return _read_object(kind, value, where)
    if form is list:
        if origin is not tuple and {parts[0]}.issuperset(map(type, value)):  # fast path for long lists of numbers
            return tuple(value)
        kinds = parts if origin is tuple and parts[-1] is not ... else parts[:1] * len(value)
        if len(kinds) != len(value):
            raise InputError(f"{where}: {len(value)} values where {len(kinds)} were expected")
        return tuple(
            from_json(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(zip(kinds, value, strict=True))
        )
    return Path(value) if kind is Path else value


_hints = functools.cache(get_type_hints)  # a trace has thousands of objects of a dozen types


def _read_object(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        name = _shown(min(unknown, key=str))
        raise InputError(f"{where}: unknown key {name}; expected {', '.join(hints)}")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where}: {field.name} is missing")
    return kind(**{name: from_json(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _json_type(kind: Any) -> Any:
    """Return the Python type of the JSON form of `kind`."""
    if kind in (str, bool, int):
        return kind
    if kind is float:
        return int | float
    if get_origin(kind) is Literal or kind is Path:
        return str
    return dict if _is_settings(kind) or is_dataclass(kind) or issubclass(get_origin(kind), Mapping) else list


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return NAMES[type(value)]
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
