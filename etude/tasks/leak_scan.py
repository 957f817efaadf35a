"""Search a pod for a task's solution. `leak_check.py` runs this program inside the pod; standard library only.

Reads a JSON request from standard input and prints a list of findings: {"code": ..., "evidence": ...}.

    workspace   the directory the agent works in
    files       each file the solution changes: path, lines only the solution has, git ids of the whole file
    names       identifiers that only the solution defines
    seconds     time limit of the search
"""

from __future__ import annotations

import contextlib
import io
import json
import marshal
import os
import subprocess
import sys
import tarfile
import time
import types
import zipfile
from collections.abc import Iterator
from typing import Any

MAX_FILE = 4 << 20
MAX_FINDINGS = 20
VERSION_SHARE = 0.6  # share of the solution's lines that makes another version of the same file a leak
COPY_SHARE = 0.9  # the same for any other file, with at least MIN_COPIED_LINES
MIN_COPIED_LINES = 5
OTHER_ROOTS = (
    "/root",
    "/home",
    "/tmp",
    "/var/tmp",
    "/var/cache",
    "/opt",
    "/srv",
    "/mnt",
    "/usr/local",
    "/usr/share/pip",
)
CACHES = (".cache", "pip", "uv", "wheels", "http", "http-v2")
ARCHIVES = (".whl", ".zip", ".egg", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class LeakScan:
    def __init__(self, request: dict[str, Any], deadline: float) -> None:
        self.workspace = request["workspace"].rstrip("/")
        self.files: list[dict[str, Any]] = [file for file in request["files"] if file["lines"]]
        self.ids = {id: file["path"] for file in request["files"] for id in file["ids"]}
        self.names: set[str] = set(request["names"])
        self.changed = {os.path.join(self.workspace, file["path"]) for file in request["files"]}
        self.basenames = {os.path.basename(path) for path in self.changed}
        self.parts = {normalized(part) for file in request["files"] for part in file["path"].split("/")}
        self.current_lines: dict[str, set[str]] = {}  # by changed path
        self.deadline = deadline
        self.findings: list[dict[str, str]] = []

    def report(self, code: str, evidence: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append({"code": code, "evidence": evidence})

    def leaked_file(self, text: str, name: str) -> str:
        """Return the changed file whose solution a text contains, as another version of it or as copied lines."""
        lines = {line.strip() for line in text.splitlines()} - {""}
        for file in self.files:
            own = set(file["lines"])
            common = len(own & lines)
            version = (
                os.path.basename(file["path"]) == os.path.basename(name) or self.similarity(file["path"], lines) > 0.5
            )
            copied = common >= MIN_COPIED_LINES and common >= COPY_SHARE * len(own)
            if common >= VERSION_SHARE * len(own) and (version or copied):
                return str(file["path"])
        return ""

    def similarity(self, path: str, lines: set[str]) -> float:
        """Return the Jaccard similarity of these lines and those of a file as it is now."""
        if path not in self.current_lines:
            data = read(os.path.join(self.workspace, path)) or b""
            self.current_lines[path] = {line.strip() for line in data.decode("utf-8", "replace").splitlines()} - {""}
        current = self.current_lines[path]
        return len(current & lines) / max(1, len(current | lines))

    # -- git

    def scan_repositories(self) -> None:
        """Search every object, reachable or not, of every repository in the workspace."""
        for directory, names, files in os.walk(self.workspace):
            if ".git" in names or ".git" in files:
                self.scan_repository(directory)
            names[:] = [name for name in names if name != ".git"]

    def scan_repository(self, directory: str) -> None:
        git = ["git", "-c", "safe.directory=*", "-C", directory]
        listing = run(
            [*git, "cat-file", "--batch-all-objects", "--batch-check=%(objectname) %(objecttype) %(objectsize)"]
        )
        if listing is None:
            self.report("git-unreadable", f"{directory}: git cannot list its objects")
            return
        objects = [line.split() for line in listing.decode().splitlines()]
        for id, _, _ in objects:
            if id in self.ids:
                self.report("answer-in-history", f"{directory}: object {id[:12]} is the solution's {self.ids[id]}")
                return
        blobs = [id for id, kind, size in objects if kind == "blob" and int(size) <= MAX_FILE]
        contents = run([*git, "cat-file", "--batch"], "".join(f"{id}\n" for id in blobs).encode()) or b""
        stream = io.BytesIO(contents)
        while head := stream.readline().split():
            data = stream.read(int(head[2]))
            stream.read(1)
            if (path := self.leaked_file(data.decode("utf-8", "replace"), "")) and not self.is_current(data):
                self.report("answer-in-history", f"{directory}: object {head[0].decode()[:12]} has the lines of {path}")
                return

    def is_current(self, data: bytes) -> bool:
        """Whether these are the current contents of a file to be changed."""
        for path in self.changed:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if file.read() == data:
                    return True
        return False

    # -- files

    def scan_files(self) -> None:
        seen: set[str] = set()
        for top in (self.workspace, *OTHER_ROOTS, *python_directories()):
            for path in walk(top, seen, self.deadline):
                self.scan_file(path)

    def scan_file(self, path: str) -> None:
        inside = path.startswith(self.workspace + "/")
        if path.endswith((".pyc", ".pyo")):
            self.scan_bytecode(path, inside)
        elif path.endswith(ARCHIVES):
            # outside the workspace there may be thousands of archives: only those named like this package
            if inside or normalized(os.path.basename(path).split("-")[0]) in self.parts:
                self.scan_archive(path)
        elif path not in self.changed and (inside or os.path.basename(path) in self.basenames):
            data = read(path)
            if data is not None and (leaked := self.leaked_file(data.decode("utf-8", "replace"), path)):
                self.report(self.reason_code(path, inside), f"{path} has the lines of the solution's {leaked}")

    def reason_code(self, path: str, inside: bool) -> str:
        parts = path.split("/")
        if any(part in CACHES for part in parts):
            return "answer-in-cache"
        if not inside:
            return "answer-installed"
        build = any(part in ("build", "dist") or part.endswith(".egg-info") for part in parts)
        return "answer-in-build" if build else "answer-in-workspace"

    def scan_archive(self, path: str) -> None:
        """Search a wheel or source archive."""
        with contextlib.suppress(Exception):
            for name, data in members(path, self.basenames):
                if leaked := self.leaked_file(data.decode("utf-8", "replace"), name):
                    cached = any(part in CACHES for part in path.split("/"))
                    evidence = f"{path}: {name} has the lines of the solution's {leaked}"
                    self.report("answer-in-cache" if cached else "answer-in-archive", evidence)
                    return

    def scan_bytecode(self, path: str, inside: bool) -> None:
        """Report bytecode that does not match its source: it may have been compiled from the solution."""
        source = source_path(path)
        if os.path.basename(source) not in self.basenames:
            return
        data = read(path)
        if data is None or len(data) < 16:
            return
        try:
            code = marshal.loads(data[16:])
        except (ValueError, EOFError, TypeError):
            if inside:
                message = f"{path}: bytecode of another Python version, of a file that the solution changes"
                self.report("answer-in-bytecode", message)
            return
        suspicious = inside or bool(self.names & set(names_in(code)))
        text = read(source) if suspicious else None
        if text is not None:
            with contextlib.suppress(SyntaxError, ValueError):
                if code_key(compile(text, source, "exec", dont_inherit=True)) != code_key(code):
                    self.report("answer-in-bytecode", f"{path} is not what {source} compiles to")
        elif suspicious:
            self.report("answer-in-bytecode", f"{path}: compiled from a file that does not exist")


def walk(top: str, seen: set[str], deadline: float) -> Iterator[str]:
    """Yield the files below a directory until the deadline; skip seen directories and links."""
    for directory, names, files in os.walk(os.path.realpath(top)):
        if time.monotonic() > deadline or directory in seen:
            names.clear()
            continue
        seen.add(directory)
        names[:] = [name for name in names if name not in (".git", "proc", "sys")]
        for name in files:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                yield path


def read(path: str) -> bytes | None:
    try:
        if os.path.getsize(path) > MAX_FILE:
            return None
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None


def members(path: str, names: set[str]) -> Iterator[tuple[str, bytes]]:
    """Yield the files with these base names in an archive."""
    if path.endswith((".whl", ".zip", ".egg")):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if os.path.basename(entry.filename) in names and entry.file_size <= MAX_FILE:
                    yield entry.filename, archive.read(entry)
        return
    with tarfile.open(path) as tar:
        for item in tar:
            wanted = os.path.basename(item.name) in names and item.isfile() and item.size <= MAX_FILE
            if wanted and (file := tar.extractfile(item)):
                yield item.name, file.read()


def normalized(name: str) -> str:
    """Return a package name in one spelling, for archives and directories alike."""
    return name.lower().replace("-", "_").replace(".", "_")


def source_path(path: str) -> str:
    directory, name = os.path.split(path)
    if os.path.basename(directory) == "__pycache__":
        directory = os.path.dirname(directory)
    return os.path.join(directory, name.split(".")[0] + ".py")


def code_key(code: types.CodeType) -> Any:
    """Return the parts of a code object that determine its behaviour, without file name and line numbers."""
    constants = tuple(code_key(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants


def names_in(code: types.CodeType) -> Iterator[str]:
    yield from (code.co_name, *code.co_names, *code.co_varnames)
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from names_in(item)


def python_directories() -> list[str]:
    """Return the package directories of every Python on PATH."""
    found = []
    for program in {os.path.realpath(path) for path in pythons()}:
        code = "import sys, site; print('\\n'.join(sys.path + site.getsitepackages() + [site.getusersitepackages()]))"
        listing = run([program, "-c", code])
        if listing is not None:
            found += [line for line in listing.decode().splitlines() if "packages" in line]
    found += [path for path in sys.path if "packages" in path]
    return sorted(set(found))


def pythons() -> Iterator[str]:
    for directory in os.environ.get("PATH", "/usr/bin").split(":"):
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                if name in ("python", "python3") or (name.startswith("python3.") and name[8:].isdigit()):
                    yield os.path.join(directory, name)


def run(command: list[str], stdin: bytes = b"") -> bytes | None:
    try:
        done = subprocess.run(command, input=stdin, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def main() -> None:
    request = json.load(sys.stdin)
    scan = LeakScan(request, time.monotonic() + request["seconds"])
    for directory in ("/tests", "/solution"):
        if os.path.isdir(directory) and os.listdir(directory):
            scan.report("answer-in-image", f"{directory} exists while the agent works")
    scan.scan_repositories()
    scan.scan_files()
    print(json.dumps(scan.findings))
