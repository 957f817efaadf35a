"""A minimal object store: named bytes that are written atomically.

A path or `file://` is a directory; anything else is an fsspec URL (`s3://bucket/run`, `memory://run`) of a store whose
puts are atomic, as S3's are. Every failure of a store is an OSError.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from etude.errors import EtudeError, InputError
from etude.runs.client import RunClient, RunServiceError
from etude.runs.member import RunMember

WEIGHTS, ROLLOUTS = "weights", "rollouts"  # the stores of a run: weight versions; traces and rollout checkpoints


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


class ServedObjectStore(ObjectStore):
    """A store in a run directory on another machine, read and written through the run service."""

    def __init__(self, client: RunClient, store: str) -> None:
        self.url, self.directory = f"{client.url}/store/{store}", None
        self._client, self._prefix = client, f"/store/{store}"

    def put(self, name: str, data: bytes) -> None:
        with self._errors():
            self._client.send("PUT", f"{self._prefix}/{name}", data, content_type="application/octet-stream")

    def get(self, name: str) -> bytes | None:
        with self._errors():
            try:
                return self._client.send("GET", f"{self._prefix}/{name}")
            except RunServiceError as error:
                if error.status == 404:
                    return None
                raise

    def names(self, prefix: str) -> list[str]:
        with self._errors():
            found: list[str] = json.loads(self._client.send("GET", self._prefix, query={"prefix": prefix}))
            return found

    def remove(self, prefix: str) -> None:
        with self._errors():
            self._client.send("DELETE", f"{self._prefix}/{prefix}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            raise OSError(str(error)) from error


def open_store(member: RunMember, store: str) -> ObjectStore:
    """Return an object store of a run: directly where this process reaches it, else through the run service."""
    url, directory = member.info.stores[store], member.info.directories.get(store, "")
    if url:
        return ObjectStore(url)
    if member.reaches(directory):
        return ObjectStore(directory)
    return ServedObjectStore(member.client, store)
