"""A minimal object store: named bytes that are written atomically.

A path or `file://` is a directory; anything else is an fsspec URL (`s3://bucket/run`, `memory://run`) of a store whose
puts are atomic, as S3's are. Every failure of a store is an OSError.
"""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from etude.errors import InputError


class ObjectStore:
    """A prefix in an object store."""

    def __init__(self, url: str | Path, **options: Any) -> None:
        self.url = str(url)
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, **options)
        except (ValueError, ImportError) as error:
            raise InputError(f"{url}: no such object store: {error}") from error
        self._local = "file" in self._protocols()
        self.directory = Path(self._root) if self._local else None  # of a store in the file system

    def _protocols(self) -> tuple[str, ...]:
        found = self._fs.protocol
        return (found,) if isinstance(found, str) else tuple(found)

    def put(self, name: str, data: bytes) -> None:
        """Write an object, replacing any of that name."""
        path = self._path(name)
        if not self._local:
            with self._errors():
                self._fs.pipe_file(path, data)
            return
        part = Path(f"{path}.{uuid.uuid4().hex}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)

    def get(self, name: str) -> bytes | None:
        """Return an object, or None if there is none of that name."""
        try:
            with self._errors():
                data: bytes = self._fs.cat_file(self._path(name))
        except FileNotFoundError:
            return None
        return data

    def names(self, prefix: str) -> list[str]:
        """Return the names directly under a prefix."""
        try:
            with self._errors():
                self._fs.invalidate_cache()
                found = self._fs.ls(self._path(prefix), detail=False)
        except FileNotFoundError:
            return []
        return sorted(Path(path).name for path in found if not str(path).endswith(".part"))

    def remove(self, prefix: str) -> None:
        """Remove everything under a prefix, if there is anything."""
        try:
            with self._errors():
                self._fs.invalidate_cache()  # a removal works on the cached listing
                self._fs.rm(self._path(prefix), recursive=True)
        except FileNotFoundError:
            return

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the own error types of some clients, for connections and credentials, into OSError."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.url}: {type(error).__name__}: {error}") from error

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"
