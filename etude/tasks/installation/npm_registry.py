"""The npm registry of this host for set-up pods, with a cache of packages that later installations share.

    registry = NpmRegistry(fetch, "https://npm.example.org/", cache)
    answer = registry.get("left-pad", "application/json", "http://127.0.0.1:1234/TOKEN/npm/")

Pods only read: what is cached comes from the registry itself. npm checks packages by the digest that the document of
the package or the lock file names. Documents are fetched again, unless they were fetched after the date of the packages
that are wanted, or the registry says that they have not changed.
"""

import hashlib
import re
import urllib.error
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from etude.files import write_atomically

MAX_BYTES = 256 << 20
_NAME = r"(?:@[A-Za-z0-9._~-]+/)?[A-Za-z0-9._~-]+"
PACKAGE = re.compile(rf"{_NAME}/-/[A-Za-z0-9._~+-]+\.tgz")
DOCUMENT = re.compile(rf"{_NAME}(/[A-Za-z0-9._~+-]+)?")
Fetch = Callable[[str, Mapping[str, str]], Any]  # URL and headers -> response; urllib.error.HTTPError otherwise


@dataclass(frozen=True)
class RegistryAnswer:
    """An answer to npm."""

    status: int
    kind: str = ""
    data: bytes = b""


class NpmRegistry:
    """Answers the requests of npm with what the registry at `url` has; `cache` is a directory, None for no cache.

    With `as_of` npm is told to install what existed then, so a document of any later time will do.
    """

    def __init__(self, fetch: Fetch, url: str, cache: Path | None, as_of: datetime | None = None) -> None:
        self.fetch, self.url, self.cache, self.as_of = fetch, url.rstrip("/") + "/", cache, as_of

    def get(self, path: str, accept: str, base: str) -> RegistryAnswer:
        """Return a package, or the document of one, in which the URLs of packages begin with `base`."""
        path = unquote(path)
        try:
            if PACKAGE.fullmatch(path):
                return RegistryAnswer(200, "application/octet-stream", self._package(path))
            if DOCUMENT.fullmatch(path):
                kind, data = self._document(path, accept)
                own = rb'("tarball"\s*:\s*")' + re.escape(self.url).encode()
                return RegistryAnswer(200, kind, re.sub(own, lambda found: found[1] + base.encode(), data))
        except urllib.error.HTTPError as error:
            return RegistryAnswer(error.code)
        return RegistryAnswer(404)

    def _package(self, path: str) -> bytes:
        cached = self._place(path)
        if cached is not None and cached.is_file():
            return cached.read_bytes()
        _, _, data = self._read(path, {})
        if cached is not None:
            write_atomically(cached, data)
        return data

    def _document(self, path: str, accept: str) -> tuple[str, bytes]:
        """Return the type and the text of a document."""
        cached = self._place(f"{path} {accept}")
        tag, kind, data = "", "", b""
        if cached is not None and cached.is_file():
            first, second, data = cached.read_bytes().split(b"\n", 2)
            tag, kind = first.decode(), second.decode()
            if self.as_of is not None and cached.stat().st_mtime > self.as_of.timestamp():
                return kind, data
        try:
            tag, kind, data = self._read(
                path.replace("/", "%2f", 1) if path.startswith("@") else path,
                {"Accept": accept, **({"If-None-Match": tag} if tag else {})},
            )
        except urllib.error.HTTPError as error:
            if error.code != 304 or not tag:
                raise
            return kind, data
        if cached is not None and "\n" not in tag + kind:
            write_atomically(cached, f"{tag}\n{kind}\n".encode() + data)
        return kind, data

    def _read(self, path: str, headers: Mapping[str, str]) -> tuple[str, str, bytes]:
        """Return the ETag, the type and the contents of a URL; raise OSError if it was cut off."""
        with self.fetch(self.url + quote(path, safe="/%@"), headers) as response:
            data = bytes(response.read(MAX_BYTES))
            length = response.headers.get("content-length")
            if len(data) == MAX_BYTES or (length and len(data) != int(length)):
                raise OSError(f"{path}: {len(data)} bytes of {length or 'too many'}")
            return response.headers.get("etag", ""), response.headers.get("content-type", ""), data

    def _place(self, name: str) -> Path | None:
        digest = hashlib.sha256(f"{self.url}\0{name}".encode()).hexdigest()
        return None if self.cache is None else self.cache / "npm" / digest[:2] / digest
