"""Traces as files: one each, compressed, complete. What is read is what was written, to the bit.

    magic, version | size of the header | header (JSON: everything but the arrays) | the arrays, one after another

all of it one zstd frame with a checksum, so that no damage goes unseen. The header says where each array lies, of
which type and shape. What is read is checked against the types of `trace.py`, whoever wrote it.
"""

import contextlib
import functools
import json
import math
import os
import struct
import uuid
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
import zstandard

from etude.errors import EtudeError, InputError
from etude.harness.trace import Segment, SegmentKind, Trace

MAGIC = b"ETUDETRACE"
VERSION = b"\x01\n"
SUFFIX = ".trace"
MOST = 4 << 30  # bytes a trace may have; a damaged file must not fill the memory
ARRAYS = {"tokens": "uint32", "made": "bool", "logprobs": "float32", "raw_logprobs": "float32", "versions": "int32"}
NAMES: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "an integer",
    int | float: "a number",
    list: "a list",
    dict: "an object",
}
# What libraries raise when they are given something else than they expect.
DAMAGE = (ValueError, LookupError, TypeError, AttributeError, OverflowError, struct.error, zstandard.ZstdError)

Array: TypeAlias = np.ndarray[Any, Any]


def save_trace(trace: Trace, path: Path | str) -> None:
    """Write a trace; whoever looks sees all of it or nothing."""
    path = Path(path)
    data = pack_trace(trace)
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        with part.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise EtudeError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            part.unlink()


def load_trace(path: Path | str) -> Trace:
    """Read a trace; InputError when the file is not one, or damaged."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return unpack_trace(data, str(path))


def pack_trace(trace: Trace) -> bytes:
    """The bytes of the file of a trace."""
    arrays: list[bytes] = []
    place = 0

    def put(array: Array) -> dict[str, Any]:
        nonlocal place
        arrays.append(array.tobytes())
        place += len(arrays[-1])
        return {"type": array.dtype.str, "shape": list(array.shape), "at": place - len(arrays[-1])}

    name = f"trace {trace.id}"
    segments = [write_segment(segment, put, f"{name}: segments[{i}]") for i, segment in enumerate(trace.segments)]
    try:
        header = plain(replace(trace, segments=()), name) | {"segments": segments}
        # Not as \u escapes: of two halves of a surrogate pair, which are two characters here, they would make one.
        text = json.dumps(header, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, a list in a list in a list...
        raise InputError(f"{name}: cannot be kept: {error}") from error
    whole = b"".join((MAGIC, VERSION, struct.pack("<Q", len(text)), text, *arrays))
    if len(whole) > MOST:
        raise InputError(f"{name}: cannot be kept: it has {len(whole)} bytes, and a trace may have {MOST}")
    return deflate(whole)


def unpack_trace(data: bytes, name: str = "trace") -> Trace:
    """The trace that `pack_trace` packed; InputError, beginning with `name`, when these are not its bytes."""
    try:
        whole = inflate(data)
        start = len(MAGIC) + len(VERSION)
        if not whole.startswith(MAGIC):
            raise ValueError("it does not begin as a trace does")
        if whole[len(MAGIC) : start] != VERSION:
            raise InputError(f"{name}: a trace of version {whole[len(MAGIC)]}; this program reads {VERSION[0]}")
        (size,) = struct.unpack_from("<Q", whole, start)
        start += 8
        header = json.loads(whole[start : start + size].decode("utf-8", "surrogatepass"))
        body = memoryview(whole)[start + size :]

        def take(where: Mapping[str, Any]) -> Array:
            shape = read(tuple[int, ...], where["shape"], f"{name}: shape")
            if min(shape, default=0) < 0:
                raise ValueError(f"an array of shape {shape}")
            return np.frombuffer(body, where["type"], math.prod(shape), where["at"]).reshape(shape)

        written = header.pop("segments")
        segments = tuple(read_segment(form, take, f"{name}: segments[{i}]") for i, form in enumerate(written))
    except DAMAGE as error:
        raise InputError(f"{name}: not a trace, or damaged: {error}") from error
    except (RecursionError, MemoryError) as error:
        raise InputError(f"{name}: too large or nested too deeply to be read") from error
    trace: Trace = read(Trace, header | {"segments": []}, f"{name}: trace")
    return replace(trace, segments=segments)


# ------------------------------------------------------------------------------------------- compressed bytes


def deflate(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=6, write_checksum=True).compress(data)


def inflate(data: bytes) -> bytes:
    """What `deflate` was given; ValueError or ZstdError for anything else."""
    claimed = zstandard.get_frame_parameters(data).content_size  # all of it is allocated before a byte is checked
    if claimed > MOST:
        raise ValueError(f"it claims to hold {claimed} bytes, and a trace may have {MOST}")
    return zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False)


# ------------------------------------------------------------------------------------------- segments


def write_segment(segment: Segment, put: Callable[[Array], dict[str, Any]], where: str) -> dict[str, Any]:
    """The JSON form of a segment; `put` keeps an array, little-endian, and gives what stands for it."""
    _check(segment, where)
    form: dict[str, Any] = {"kind": segment.kind}
    for name in (*ARRAYS, "routing"):
        if (array := getattr(segment, name)) is not None:
            form[name] = put(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
    return form


def read_segment(form: Any, take: Callable[[Mapping[str, Any]], Array], where: str) -> Segment:
    """A segment from its JSON form; `take` gives the array that something stands for."""
    if not isinstance(form, dict) or not form.keys() >= {"kind", *ARRAYS} or form.keys() - {*ARRAYS, "kind", "routing"}:
        raise InputError(f"{where}: expected an object with kind, {', '.join(ARRAYS)} and at most routing")
    arrays = {}
    for name in (name for name in form if name != "kind"):
        try:
            array = take(form[name])
        except DAMAGE as error:
            raise InputError(f"{where}.{name}: damaged: {error}") from error
        arrays[name] = array.astype(array.dtype.newbyteorder("="))  # a copy of its own, in the machine's byte order
    segment = Segment(kind=read(SegmentKind, form["kind"], f"{where}.kind"), **arrays)
    _check(segment, where)
    return segment


def _check(segment: Segment, where: str) -> None:
    for name, kind in ARRAYS.items():
        array = getattr(segment, name)
        if array.dtype != np.dtype(kind) or array.shape != (len(segment),):
            raise InputError(f"{where}.{name}: {array.dtype} {list(array.shape)}; expected {kind} [{len(segment)}]")
    routing = segment.routing
    if routing is not None and (routing.dtype.kind not in "ui" or routing.ndim != 3 or len(routing) > len(segment)):
        expected = f"integers [at most {len(segment)}, layers, experts]"
        raise InputError(f"{where}.routing: {routing.dtype} {list(routing.shape)}; expected {expected}")


# ------------------------------------------------------------------------------------------- JSON forms


def plain(value: Any, where: str) -> Any:
    """The JSON form of dataclasses, mappings and sequences; InputError names the place of what has none."""
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name), f"{where}.{field.name}") for field in fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    kind = "a mapping whose keys are not all text" if isinstance(value, Mapping) else type(value).__name__
    raise InputError(f"{where}: {kind} has no place in a trace; expected what JSON can hold")


def read(kind: Any, value: Any, where: str) -> Any:
    """A value of a type, from its JSON form; InputError names the place where it is something else."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and NoneType in parts):
        return value
    if origin in (Union, UnionType):
        options = [part for part in parts if part is not NoneType]
        fitting = (part for part in options if isinstance(value, _json_type(part)))
        return read(next(fitting, options[0]), value, where)
    form = _json_type(kind)
    if not isinstance(value, form) or (isinstance(value, bool) and kind is not bool):
        raise InputError(f"{where}: {_shown(value)} where {NAMES[form]} was expected")
    if origin is Literal and value not in parts:
        raise InputError(f"{where}: {_shown(value)} is none of {', '.join(parts)}")
    if is_dataclass(kind):
        return _read_object(kind, value, where)
    if form is list:
        if origin is not tuple and {parts[0]}.issuperset(map(type, value)):  # a hundred thousand numbers, say
            return tuple(value)
        kinds = parts if origin is tuple and parts[-1] is not ... else parts[:1] * len(value)
        if len(kinds) != len(value):
            raise InputError(f"{where}: {len(value)} values where {len(kinds)} were expected")
        return tuple(read(part, item, f"{where}[{i}]") for i, (part, item) in enumerate(zip(kinds, value, strict=True)))
    return value


_hints = functools.cache(get_type_hints)  # a trace has thousands of objects of a dozen kinds


def _read_object(kind: Any, value: dict[str, Any], where: str) -> Any:
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        name = _shown(min(unknown, key=str))
        raise InputError(f"{where}: {name} is not known here; expected {', '.join(hints)}")
    for field in fields(kind):
        if field.name not in value and field.default is MISSING and field.default_factory is MISSING:
            raise InputError(f"{where}: {field.name} is missing")
    return kind(**{name: read(hints[name], item, f"{where}.{name}") for name, item in value.items()})


def _json_type(kind: Any) -> Any:
    """What the JSON form of a type is in Python."""
    if kind in (str, bool, int):
        return kind
    if kind is float:
        return int | float
    if get_origin(kind) is Literal:
        return str
    return dict if is_dataclass(kind) or issubclass(get_origin(kind), Mapping) else list


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return NAMES[type(value)]
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
