"""The wire protocol between a pod's guest init and its clients: frames over any ordered byte stream.

    frame   u32 length of the rest | u8 op | u32 call | fields...
    field   u8 key | u32 length | bytes

All integers are little-endian; a number in a field is 8 bytes; a list is a repeated key. The caller chooses `call`;
every reply carries it. The same frames travel over a UNIX socket, a WebSocket or a virtio port, so one conformance
suite covers all backends. `runtime/native/protocol.h` has the same constants.

    request   fields                                                        replies
    PING                                                                    OK
    SPAWN     ARG* ENV* CWD USER DATA(stdin) FLAGS ROWS COLS LIMIT TIME(ms) STARTED, OUT|ERR DATA*, EXITED
    INPUT     JOB DATA, or FLAGS=END                                        OK
    SIGNAL    JOB NUMBER                                                    OK
    RESIZE    JOB ROWS COLS                                                 OK
    READ      PATH OFFSET LIMIT                                             OUT* then OK SIZE
    WRITE     PATH DATA OFFSET MODE FLAGS=TRUNCATE|APPEND                   OK
    LIST      PATH                                                          ENTRY* then OK
    STAT      PATH                                                          ENTRY then OK
    REMOVE    PATH                                                          OK
    MKDIR     PATH MODE                                                     OK
    SYMLINK   PATH DATA(target)                                             OK
    OWN       TIME(ms, 0: forever) FLAGS=ATTACHED                          OK   the pod ends with this connection
    PROCESSES                                                               OK SIZE(processes besides the guest init)
    KILLALL                                                                 OK   every process but the guest init
    any                                                                     FAIL NUMBER(errno) DATA(text)
"""

import struct
from collections.abc import Iterator

VERSION = 1
CHUNK = 1 << 18  # bytes of data in one frame
MAX_FRAME = 1 << 21

# requests
PING, SPAWN, INPUT, SIGNAL, RESIZE, READ, WRITE, LIST, STAT, REMOVE, MKDIR, SYMLINK, OWN, PROCESSES, KILLALL = range(
    1, 16
)
# replies; HELLO is the first frame on every connection, call 0
HELLO, OK, FAIL, STARTED, OUT, ERR, EXITED, ENTRY = range(64, 72)

# fields
ARG, ENV, CWD, USER, DATA, FLAGS, ROWS, COLS, LIMIT, TIME, JOB, NUMBER, PATH, OFFSET, MODE, SIZE = range(1, 17)
KIND, MTIME, TARGET, PID, CODE, UTIME, STIME, MAXRSS = range(17, 25)

# FLAGS of SPAWN: keep standard input open; of EXITED: why it ended
KEEP_STDIN = 1
TIMED_OUT, TRUNCATED = 1, 2
# FLAGS of INPUT, of WRITE and of OWN
END = 1
TRUNCATE, APPEND = 1, 2
ATTACHED = 1

KINDS = {b"f": "file", b"d": "directory", b"l": "symlink", b"o": "other"}  # values of KIND

_HEAD = struct.Struct("<IBI")
_FIELD = struct.Struct("<BI")
_NUMBER = struct.Struct("<q")
_LENGTH = struct.Struct("<I")

Value = bytes | int
Fields = dict[int, list[bytes]]


class WireError(Exception):
    """The peer violated the protocol; the connection must be closed."""


def frame(op: int, call: int, *fields: tuple[int, Value]) -> bytes:
    """Encode one frame; a number is written as 8 bytes."""
    parts = [b""]
    for key, value in fields:
        data = _NUMBER.pack(value) if isinstance(value, int) else value
        parts += (_FIELD.pack(key, len(data)), data)
    size = sum(map(len, parts)) + _HEAD.size - _LENGTH.size
    parts[0] = _HEAD.pack(size, op, call)
    return b"".join(parts)


def parse(body: bytes | memoryview) -> tuple[int, int, Fields]:
    """Return op, call and fields of a frame without its length."""
    if len(body) < _HEAD.size - _LENGTH.size:
        raise WireError("a frame is too short")
    op, call = struct.unpack_from("<BI", body)
    fields: Fields = {}
    at, end = _HEAD.size - _LENGTH.size, len(body)
    while at < end:
        if at + _FIELD.size > end:
            raise WireError("a field is cut off")
        key, size = _FIELD.unpack_from(body, at)
        at += _FIELD.size
        if size > end - at:
            raise WireError("a field is longer than its frame")
        fields.setdefault(key, []).append(bytes(body[at : at + size]))
        at += size
    return op, call, fields


def number(fields: Fields, key: int, default: int = 0) -> int:
    """Return a field as a number."""
    if key not in fields:
        return default
    data = fields[key][0]
    if len(data) != _NUMBER.size:
        raise WireError(f"field {key} is not a number")
    return int(_NUMBER.unpack(data)[0])


def data(fields: Fields, key: int, default: bytes = b"") -> bytes:
    """Return a field as bytes."""
    return fields[key][0] if key in fields else default


class FrameDecoder:
    """Incremental decoder: takes bytes as they arrive and yields complete frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[int, int, Fields]]:
        """Yield the frames that `received` completes."""
        buffer = self._buffer
        buffer += received
        at = 0
        try:
            while len(buffer) - at >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(buffer, at)
                if size > MAX_FRAME:
                    raise WireError(f"a frame of {size} bytes is over the limit of {MAX_FRAME}")
                if len(buffer) - at - _LENGTH.size < size:
                    break
                start = at + _LENGTH.size
                at = start + size
                yield parse(bytes(buffer[start:at]))
        finally:
            del buffer[:at]
