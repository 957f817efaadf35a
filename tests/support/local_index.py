"""A package index on this machine, with wheels of what is installed here and of packages that tests make up."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

from etude.tasks.generators.packages import pack_wheel

OLD = "2020-01-01T00:00:00Z"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def small_wheel(name: str, version: str, code: str) -> tuple[str, bytes]:
    """Return a wheel with one module."""
    info = f"{name}-{version}.dist-info"
    texts = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    wheel = pack_wheel({key: text.encode() for key, text in texts.items()}, info)
    return f"{name}-{version}-py3-none-any.whl", wheel


def installed_wheel(name: str) -> tuple[str, bytes]:
    """Return a wheel of a pure Python package that is installed here."""
    found = metadata.distribution(name)
    top = Path(str(found.locate_file(""))).resolve()
    members = {}
    for file in found.files or ():
        path = Path(str(found.locate_file(file))).resolve()
        skipped = path.suffix == ".pyc" or path.name in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
        if path.is_relative_to(top) and path.is_file() and not skipped:
            members[path.relative_to(top).as_posix()] = path.read_bytes()
    info = next(key.split("/")[0] for key in members if ".dist-info/" in key)
    members.setdefault(f"{info}/WHEEL", b"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return f"{info.removesuffix('.dist-info')}-py3-none-any.whl", pack_wheel(members, info)


@dataclass
class LocalIndex:
    """Files by project, with upload times, and the requests that came."""

    files: dict[str, list[tuple[str, bytes, str]]] = field(default_factory=dict)
    requests: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)
    url: str = ""
    json: bool = True

    def add(self, wheel: tuple[str, bytes], uploaded: str = OLD) -> None:
        name = wheel[0].split("-")[0].replace("_", "-").lower()
        self.files.setdefault(name, []).append((*wheel, uploaded))

    def page(self, project: str) -> tuple[bytes, str]:
        found = self.files[project]
        if self.json:
            rows = [
                {
                    "filename": name,
                    "url": f"../../files/{name}",
                    "hashes": {"sha256": sha256(data)},
                    "upload-time": when,
                }
                for name, data, when in found
            ]
            return json.dumps({"files": rows}).encode(), "application/vnd.pypi.simple.v1+json"
        links = (
            f'<a href="../../files/{name}#sha256={sha256(data)}" data-upload-time="{when}">{name}</a>'
            for name, data, when in found
        )
        return "\n".join(links).encode(), "text/html"


@contextlib.contextmanager
def _serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Run a server on this machine and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def serving_index(index: LocalIndex) -> Iterator[LocalIndex]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            index.requests.append((self.path, dict(self.headers)))
            parts = self.path.strip("/").split("/")
            wheels = {name: data for each in index.files.values() for name, data, _ in each}
            if parts[0] == "simple" and parts[-1] in index.files:
                data, kind = index.page(parts[-1])
            elif parts[0] == "files" and parts[-1] in wheels:
                data, kind = wheels[parts[-1]], "application/zip"
            else:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    with _serving(Handler) as url:
        index.url = f"{url}/simple/"
        yield index


def tools_index() -> LocalIndex:
    """Return an index with what installs a setuptools project and runs its tests."""
    index = LocalIndex()
    for name in ("setuptools", "pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        index.add(installed_wheel(name))
    return index


@contextlib.contextmanager
def serving_files(files: Mapping[str, bytes]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Serve files by path, with ETags; yield the URL and the requests that came, as path and status."""
    requests: list[tuple[str, int]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = files.get(self.path)
            tag = f'"{sha256(data)}"' if data is not None else ""
            status = 404 if data is None else 304 if self.headers.get("If-None-Match") == tag else 200
            requests.append((self.path, status))
            body = data if data is not None and status == 200 else b""
            self.send_response(status)
            self.send_header("ETag", tag)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing."""

    with _serving(Handler) as url:
        yield url, requests
