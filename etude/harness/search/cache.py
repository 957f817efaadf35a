"""Embeddings on disk, shared by all processes of a user.

Losing the cache costs only time. It never returns a wrong vector and never blocks: a vector with a wrong checksum
counts as missing, a damaged file is replaced, and with a full, read-only or busy disk nothing is cached.
"""

import fcntl
import logging
import os
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

MAX_BYTES = 1 << 30  # about 1.2 million vectors of 384 numbers
BUSY_S = 10.0  # to wait for a write of another process, which takes milliseconds
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_MISMATCH}
_REFRESH_S = 3600  # minimum age of a time of use before it is updated, so that reads rarely write

Vector = npt.NDArray[np.float16]
log = logging.getLogger(__name__)


def default_directory() -> Path:
    """Return the directory of this user's embeddings."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "etude" / "embeddings"


class VectorCache:
    """Vectors by key in one SQLite file, for any number of threads and processes; least recently used are evicted.

    The file name has a number, and a damaged file is replaced by the next number: another process may still have the
    old file open, and SQLite's journal is found by file name.
    """

    def __init__(self, directory: Path, max_bytes: int = MAX_BYTES) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._file = directory
        self._owner = 0
        self._warned = False

    def get(self, keys: Sequence[bytes]) -> dict[bytes, Vector]:
        """Return the cached vectors."""
        found: dict[bytes, Vector] = {}
        self._try(lambda connection: _read(connection, keys, found))
        return found

    def put(self, vectors: Mapping[bytes, Vector]) -> None:
        """Store vectors; evict the least recently used if the cache is full."""
        self._try(lambda connection: _write(connection, vectors, self.max_bytes))

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _try(self, action: Callable[[sqlite3.Connection], None]) -> None:
        """Run an action on the open database; errors are logged and end the action."""
        with self._lock:
            try:
                action(self._open())
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
                if code in _DAMAGED:
                    self._replace(error)
                elif code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    log.debug("the embedding cache %s is busy: %s", self._file, error)
                    self._drop()
                else:
                    self._disable(error)
            except OSError as error:
                self._disable(error)

    def _open(self) -> sqlite3.Connection:
        if self._connection is None or self._owner != os.getpid():  # connections do not survive a fork
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self.directory / f"vectors-{self._newest()}.sqlite"
            connection = sqlite3.connect(self._file, timeout=BUSY_S, check_same_thread=False)
            connection.execute("PRAGMA synchronous = OFF")  # checksums detect damage after a power failure
            connection.execute(
                "CREATE TABLE IF NOT EXISTS vectors (key BLOB PRIMARY KEY, vector BLOB, used INTEGER) WITHOUT ROWID"
            )
            self._connection, self._owner = connection, os.getpid()
        return self._connection

    def _newest(self) -> int:
        numbers = (path.stem.partition("-")[2] for path in self.directory.glob("vectors-*.sqlite"))
        return max((int(number) for number in numbers if number.isdigit()), default=1)

    def _replace(self, error: sqlite3.Error) -> None:
        """Replace a damaged file by a new one, unless another process has done so."""
        log.warning("embedding cache %s is damaged (%s); starting a new one", self._file, error)
        self._drop()
        try:
            with open(self.directory / "lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                newest = self._newest()
                if self._file == self.directory / f"vectors-{newest}.sqlite":
                    (self.directory / f"vectors-{newest + 1}.sqlite").touch(mode=0o600)
                    self._file.unlink(missing_ok=True)
                    self._file.with_name(self._file.name + "-journal").unlink(missing_ok=True)
        except OSError as problem:
            self._disable(problem)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection and self._owner == os.getpid():
            connection.close()

    def _disable(self, error: Exception) -> None:
        self._drop()
        if not self._warned:
            self._warned = True
            log.warning("embeddings are not kept in %s: %s", self.directory, error)


def _read(connection: sqlite3.Connection, keys: Sequence[bytes], found: dict[bytes, Vector]) -> None:
    now = int(time.time())
    stale = []
    for start in range(0, len(keys), 500):  # SQLite may be limited to 999 variables
        part = keys[start : start + 500]
        marks = ",".join("?" * len(part))
        for key, stored, used in connection.execute(
            f"SELECT key, vector, used FROM vectors WHERE key IN ({marks})", part
        ):
            vector = _decode(stored)
            if vector is not None:
                found[bytes(key)] = vector
                if now - used > _REFRESH_S:
                    stale.append((now, key))
    if stale:
        connection.executemany("UPDATE vectors SET used = ? WHERE key = ?", stale)
        connection.commit()


def _write(connection: sqlite3.Connection, vectors: Mapping[bytes, Vector], max_bytes: int) -> None:
    now = int(time.time())
    rows = [(key, _encode(vector), now) for key, vector in vectors.items()]
    connection.executemany("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?)", rows)
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    if (pages - free) * size > max_bytes:
        quarter = connection.execute("SELECT COUNT(*) FROM vectors").fetchone()[0] // 4 + 1
        oldest = "SELECT key FROM vectors ORDER BY used, key LIMIT ?"
        connection.execute(f"DELETE FROM vectors WHERE key IN ({oldest})", (quarter,))
    connection.commit()


def _encode(vector: Vector) -> bytes:
    data = vector.astype("<f2").tobytes()
    return data + zlib.crc32(data).to_bytes(4, "little")


def _decode(stored: object) -> Vector | None:
    """Return the vector of a stored value, None if its checksum is wrong."""
    if not isinstance(stored, bytes) or len(stored) <= 4:
        return None
    data, check = stored[:-4], stored[-4:]
    if zlib.crc32(data).to_bytes(4, "little") != check:
        return None
    return np.frombuffer(data, dtype="<f2").astype(np.float16)
