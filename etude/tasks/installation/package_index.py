"""A package index on the host for set-up pods: files of another index, and of those only what existed at a date.

    with open_package_index(IndexSettings(as_of=...)) as index:
        pod = await fleet.create(image, egress=Egress.to(index.rule))
        await pod.exec(command, env=index.environment("dated"))

Packages of npm are served from `/npm/` (npm_registry.py).

Pods reach this address and no index themselves: credentials, proxies and certificates of the real index stay on the
host. The upload times are those of the simple JSON API (PEP 700), or of `data-upload-time` in its HTML form; a file
without one is kept. Three views: `dated` has files uploaded before the date, `tools` also newer files of build tools
and test runners, for interpreters that are younger than the date, `all` everything.
"""

import base64
import hashlib
import html
import json
import os
import re
import secrets
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from etude.errors import InputError
from etude.pods.network.policy import PROXY_ADDRESS, PROXY_PORT
from etude.tasks.installation.npm_registry import NpmRegistry

JSON_TYPE = "application/vnd.pypi.simple.v1+json"
ACCEPT = f"{JSON_TYPE}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
TIMEOUT_S = 60.0
MAX_PAGE = 64 << 20
MAX_FILE = 4 << 30
CHUNK = 1 << 16
View = Literal["dated", "tools", "all"]
VIEWS: tuple[View, ...] = ("dated", "tools", "all")
# What builds packages and runs tests: releases from before the interpreter cannot work with it.
TOOLS = frozenset(
    {
        "setuptools",
        "wheel",
        "pip",
        "pytest",
        "pluggy",
        "iniconfig",
        "packaging",
        "attrs",
        "py",
        "tomli",
        "exceptiongroup",
    }
    | {"hatchling", "hatch-vcs", "flit-core", "flit", "poetry-core", "pdm-backend", "setuptools-scm", "cython", "numpy"}
    | {"meson-python", "meson", "ninja", "scikit-build-core", "maturin", "cffi", "pbr", "typing-extensions", "pyyaml"}
)


@dataclass(frozen=True)
class IndexSettings:
    """Where packages come from. The URL may contain a name and a password; they never reach a pod."""

    url: str
    as_of: str = ""  # ISO 8601 date or time; empty: no limit
    proxy: str = ""  # of the host's own requests; empty: that of the environment
    certificates: Path | None = None  # bundle that the host's requests trust, besides the default one
    cache: Path | None = None  # directory of downloaded files; None: no cache
    address: str = "127.0.0.1"  # of this machine, at which the hosts of pods reach it
    npm: str = ""  # URL of the npm registry; empty: the index serves no packages of npm


@dataclass(frozen=True)
class IndexFile:
    """One file of a project in the index."""

    name: str
    url: str
    sha256: str = ""
    uploaded: str = ""
    fields: Mapping[str, Any] = field(
        default_factory=dict
    )  # as in the JSON API: requires-python, yanked, core-metadata


def parse_time(text: str) -> datetime:
    """Return a date or time of ISO 8601 as a time with zone; a date is its end, in UTC."""
    try:
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
            text += "T23:59:59"
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise InputError(f"--as-of {text}: expected a date such as 2024-05-31, commit or none") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


# ------------------------------------------------------------------------------------------------- pages


def parse_page(data: bytes, content_type: str, url: str) -> list[IndexFile]:
    """Return the files on a project's page of a simple index, in its JSON or HTML form."""
    if "json" in content_type:
        value = json.loads(data)
        return [_json_file(each, url) for each in value.get("files", ()) if isinstance(each, dict)]
    parser = _LinkParser(url)
    parser.feed(data.decode("utf-8", "replace"))
    return parser.found


def _json_file(each: Mapping[str, Any], url: str) -> IndexFile:
    kept = {key: each[key] for key in ("requires-python", "yanked", "core-metadata", "size") if key in each}
    sha256 = str((each.get("hashes") or {}).get("sha256", ""))
    return IndexFile(
        str(each["filename"]), urljoin(url, str(each["url"])), sha256, str(each.get("upload-time") or ""), kept
    )


class _LinkParser(HTMLParser):
    """Collects the links of a page in the HTML form."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url, self.found = url, list[IndexFile]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag != "a" or not (href := given.get("href")):
            return
        target, _, fragment = urljoin(self.url, href).partition("#")
        kept: dict[str, Any] = {}
        if required := given.get("data-requires-python"):
            kept["requires-python"] = html.unescape(required)
        if "data-yanked" in given:
            kept["yanked"] = given["data-yanked"] or True
        if metadata := given.get("data-core-metadata") or given.get("data-dist-info-metadata"):
            name, _, value = metadata.partition("=")
            kept["core-metadata"] = {name: value} if value else True
        sha256 = fragment.partition("sha256=")[2].partition("&")[0]
        name = unquote(urlsplit(target).path.rpartition("/")[2])
        self.found.append(IndexFile(name, target, sha256, given.get("data-upload-time") or "", kept))


def existing_at(files: list[IndexFile], project: str, view: View, as_of: datetime | None) -> list[IndexFile]:
    """Return the files of a project that a view has."""
    if view == "all" or as_of is None or (view == "tools" and project in TOOLS):
        return files
    return [each for each in files if not each.uploaded or parse_time(each.uploaded) <= as_of]


# ------------------------------------------------------------------------------------------------- server


class PackageIndex:
    """The running index. `rule` is what a pod's egress must allow."""

    def __init__(self, settings: IndexSettings) -> None:
        self.settings = settings
        self.as_of = parse_time(settings.as_of) if settings.as_of else None
        self.token = secrets.token_hex(12)  # other programs that reach the address do not know it
        self.files: dict[str, IndexFile] = {}  # by key in our URLs
        self.pages: dict[str, tuple[int, list[IndexFile]]] = {}
        self.undated: set[str] = set()  # projects with files of which the index does not say when they were uploaded
        self.bytes_fetched = 0  # from the real index; the rest was in the cache
        self.bytes_served = 0
        self._lock = threading.Lock()
        self._opener = _opener(settings)
        self._url, self._authorization = _without_credentials(settings.url)
        self.npm = NpmRegistry(self.open, settings.npm, settings.cache, self.as_of) if settings.npm else None
        self.server = ThreadingHTTPServer((settings.address, 0), _handler(self))
        self.server.daemon_threads = True

    @property
    def rule(self) -> str:
        return f"{self.settings.address}:{self.server.server_address[1]}"

    def url(self, view: View) -> str:
        return f"http://{self.rule}/{self.token}/{view}/simple/"

    @property
    def npm_url(self) -> str:
        return f"http://{self.rule}/{self.token}/npm/"

    def environment(self, view: View) -> dict[str, str]:
        """Return the variables with which programs in a pod use this index through the pod's egress proxy."""
        url = self.url(view)
        direct = {"NO_PROXY": "", "no_proxy": ""}  # this machine is behind the pod's proxy, too
        dated = {"NPM_CONFIG_BEFORE": self.as_of.isoformat()} if self.as_of is not None and view != "all" else {}
        # With its own setting pip asks the proxy also for this machine, which NO_PROXY of a pod excludes.
        pip = {
            "PIP_INDEX_URL": url,
            "PIP_PROXY": f"http://{PROXY_ADDRESS}:{PROXY_PORT}",
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_RETRIES": "1",
        }
        npm = {"NPM_CONFIG_REGISTRY": self.npm_url} if self.npm is not None else {}
        return {
            **pip,
            **npm,
            "PIP_NO_CACHE_DIR": "1",
            "PIP_ROOT_USER_ACTION": "ignore",
            "UV_INDEX_URL": url,
            **direct,
            **dated,
        }

    # -- requests of pods

    def page(self, project: str, view: View) -> bytes | None:
        """Return a project's page in the JSON form; None if the index has no such project."""
        status, files = self._files_of(project)
        if status != 200:
            return None
        rows = []
        for each in existing_at(files, project, view, self.as_of):
            key = hashlib.sha256(each.url.encode()).hexdigest()[:32]
            self.files[key] = each
            url = f"/{self.token}/files/{key}/{quote(each.name)}"
            hashes = {"sha256": each.sha256} if each.sha256 else {}
            rows.append({"filename": each.name, "url": url, "hashes": hashes, **each.fields})
        return json.dumps({"meta": {"api-version": "1.0"}, "name": project, "files": rows}).encode()

    def _files_of(self, project: str) -> tuple[int, list[IndexFile]]:
        with self._lock:
            if project in self.pages:
                return self.pages[project]
        url = urljoin(self._url, f"{project}/")
        try:
            with self.open(url, {"Accept": ACCEPT}) as response:
                data = response.read(MAX_PAGE)
                found = (200, parse_page(data, response.headers.get("content-type", ""), response.url))
        except urllib.error.HTTPError as error:
            found = (error.code, [])
        if any(not each.uploaded for each in found[1]):
            self.undated.add(project)
        with self._lock:
            if found[0] in (200, 404):
                self.pages[project] = found
        return found

    def open(self, url: str, headers: Mapping[str, str] | None = None) -> Any:
        request = urllib.request.Request(url, headers={"User-Agent": "etude", **(headers or {})})
        if self._authorization and urlsplit(url).netloc == urlsplit(self._url).netloc:
            request.add_unredirected_header("Authorization", self._authorization)
        return self._opener.open(request, timeout=TIMEOUT_S)

    def contents(self, each: IndexFile, metadata: bool) -> Iterator[bytes]:
        """Yield a file, or its metadata (PEP 658), from the cache or from the index."""
        name = each.sha256 + (".metadata" if metadata else "")
        cached = (
            self.settings.cache / name if self.settings.cache and re.fullmatch(r"[0-9a-f]{64}", each.sha256) else None
        )
        if cached is not None and cached.is_file():
            with open(cached, "rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
            return
        url = each.url + (".metadata" if metadata else "")
        with self.open(url) as response, _cache_writer(cached, "" if metadata else each.sha256) as keep:
            while chunk := response.read(CHUNK):
                self.bytes_fetched += len(chunk)
                keep(chunk)
                yield chunk


@contextmanager
def _cache_writer(path: Path | None, sha256: str) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that takes the parts of a file; the whole is kept at `path` if it has the digest."""
    if path is None:
        yield lambda chunk: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part, running = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part"), hashlib.sha256()
    try:
        with open(part, "wb") as file:

            def keep(chunk: bytes) -> None:
                running.update(chunk)
                file.write(chunk)

            yield keep
        if sha256 in ("", running.hexdigest()):
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _without_credentials(url: str) -> tuple[str, str]:
    """Return the URL without name and password, and the header that has them."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(
            "--index-url: expected the http(s) URL of a simple index, such as https://packages.example.org/simple/"
        )
    host = parts.netloc.rpartition("@")[2]
    header = ""
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        header = "Basic " + base64.b64encode(pair.encode()).decode()
    path = parts.path if parts.path.endswith("/") else f"{parts.path}/"
    return urlunsplit((parts.scheme, host, path, "", "")), header


def _opener(settings: IndexSettings) -> urllib.request.OpenerDirector:
    context = ssl.create_default_context()
    if settings.certificates is not None:
        try:
            context.load_verify_locations(settings.certificates)
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"--certificates {settings.certificates}: {error}; expected a file in PEM form") from None
    handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=context)]
    if settings.proxy:
        handlers.append(urllib.request.ProxyHandler({"http": settings.proxy, "https": settings.proxy}))
    return urllib.request.build_opener(*handlers)


def _handler(index: PackageIndex) -> type[BaseHTTPRequestHandler]:
    class IndexRequestHandler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            found = re.fullmatch(rf"/{index.token}/(dated|tools|all)/simple/([A-Za-z0-9._-]+)/?", path)
            file = re.fullmatch(rf"/{index.token}/files/([0-9a-f]{{32}})/[^/]+", path)
            npm = path.partition(f"/{index.token}/npm/")[2]
            try:
                if found is not None:
                    project = re.sub(r"[-_.]+", "-", found[2]).lower()
                    data = index.page(project, found[1])  # type: ignore[arg-type]
                    self._send(data, JSON_TYPE) if data is not None else self._refuse(404)
                elif file is not None and file[1] in index.files:
                    self._stream(index.files[file[1]], path.endswith(".metadata"))
                elif npm and index.npm is not None:
                    answer = index.npm.get(npm, self.headers.get("accept", "*/*"), index.npm_url)
                    self._send(answer.data, answer.kind) if answer.status == 200 else self._refuse(answer.status)
                else:
                    self._refuse(404)
            except urllib.error.HTTPError as error:
                self._refuse(error.code)
            except (OSError, ValueError):
                self._refuse(502)

        def _send(self, data: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            index.bytes_served += len(data)

        def _stream(self, each: IndexFile, metadata: bool) -> None:
            chunks = index.contents(each, metadata)
            first = next(chunks, b"")  # errors come before the status line
            self.send_response(200)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            for chunk in (first, *chunks):
                self.wfile.write(chunk)
                index.bytes_served += len(chunk)
            self.close_connection = True

        def _refuse(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Write nothing: requests are no news."""

    return IndexRequestHandler


@contextmanager
def open_package_index(settings: IndexSettings) -> Iterator[PackageIndex]:
    """Run the index on this machine while the block runs."""
    index = PackageIndex(settings)
    thread = threading.Thread(target=index.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield index
    finally:
        index.server.shutdown()
        index.server.server_close()
        thread.join()


def default_index_cache() -> Path:
    """Return the cache directory of package files, following the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "etude" / "packages"
