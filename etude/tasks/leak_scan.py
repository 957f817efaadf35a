"""Looks through a pod for a task's answer, as an agent would. Run inside the pod by `reach.py`; standard library only.

Reads a request in JSON on standard input and prints findings: {"code": ..., "evidence": ...}.

    workspace   the directory the agent works in
    files       what the solution makes of each file: path, the lines only it has, the git ids of the whole
    names       identifiers that only the solution defines
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
ENOUGH = 0.6  # of the lines only the solution has, in what is a version of the same file
ALL_BUT = 0.9  # of them, and several, in any other
SEVERAL = 5
ELSEWHERE = ("/root", "/home", "/tmp", "/var/tmp", "/var/cache", "/opt", "/srv", "/mnt", "/usr/local", "/usr/share/pip")
CACHES = (".cache", "pip", "uv", "wheels", "http", "http-v2")
ARCHIVES = (".whl", ".zip", ".egg", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")


class Search:
    def __init__(self, request: dict[str, Any], deadline: float) -> None:
        self.workspace = request["workspace"].rstrip("/")
        self.files: list[dict[str, Any]] = [file for file in request["files"] if file["lines"]]
        self.ids = {id: file["path"] for file in request["files"] for id in file["ids"]}
        self.names: set[str] = set(request["names"])
        self.changed = {os.path.join(self.workspace, file["path"]) for file in request["files"]}
        self.basenames = {os.path.basename(path) for path in self.changed}
        self.parts = {plain(part) for file in request["files"] for part in file["path"].split("/")}
        self.now: dict[str, set[str]] = {}
        self.deadline = deadline
        self.findings: list[dict[str, str]] = []

    def found(self, code: str, evidence: str) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append({"code": code, "evidence": evidence})

    def holds(self, text: str, name: str) -> str:
        """The changed file whose answer a text has: as another version of that file, or as a copy of the lines."""
        lines = {line.strip() for line in text.splitlines()} - {""}
        for file in self.files:
            own = set(file["lines"])
            common = len(own & lines)
            version = (
                os.path.basename(file["path"]) == os.path.basename(name) or self.likeness(file["path"], lines) > 0.5
            )
            if common >= ENOUGH * len(own) and (version or (common >= SEVERAL and common >= ALL_BUT * len(own))):
                return str(file["path"])
        return ""

    def likeness(self, path: str, lines: set[str]) -> float:
        """How much of a file as it is now is in these lines, and of them in it."""
        if path not in self.now:
            data = read(os.path.join(self.workspace, path)) or b""
            self.now[path] = {line.strip() for line in data.decode("utf-8", "replace").splitlines()} - {""}
        return len(self.now[path] & lines) / max(1, len(self.now[path] | lines))

    # -- git

    def history(self) -> None:
        """Every object of every repository in the workspace, reachable or not."""
        for directory, names, files in os.walk(self.workspace):
            if ".git" in names or ".git" in files:
                self.repository(directory)
            names[:] = [name for name in names if name != ".git"]

    def repository(self, directory: str) -> None:
        git = ["git", "-c", "safe.directory=*", "-C", directory]
        listing = run(
            [*git, "cat-file", "--batch-all-objects", "--batch-check=%(objectname) %(objecttype) %(objectsize)"]
        )
        if listing is None:
            self.found("git-unreadable", f"{directory}: git cannot list its objects")
            return
        objects = [line.split() for line in listing.decode().splitlines()]
        for id, _, _ in objects:
            if id in self.ids:
                self.found("answer-in-history", f"{directory}: object {id[:12]} is the solution's {self.ids[id]}")
                return
        blobs = [id for id, kind, size in objects if kind == "blob" and int(size) <= MAX_FILE]
        contents = run([*git, "cat-file", "--batch"], "".join(f"{id}\n" for id in blobs).encode()) or b""
        stream = io.BytesIO(contents)
        while head := stream.readline().split():
            data = stream.read(int(head[2]))
            stream.read(1)
            if (path := self.holds(data.decode("utf-8", "replace"), "")) and not self.current(data):
                self.found("answer-in-history", f"{directory}: object {head[0].decode()[:12]} has the lines of {path}")
                return

    def current(self, data: bytes) -> bool:
        """Whether these are the contents of a file that is there anyway."""
        for path in self.changed:
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if file.read() == data:
                    return True
        return False

    # -- files

    def everywhere(self) -> None:
        seen: set[str] = set()
        for place in (self.workspace, *ELSEWHERE, *python_places()):
            for path in walk(place, seen, self.deadline):
                self.file(path)

    def file(self, path: str) -> None:
        inside = path.startswith(self.workspace + "/")
        if path.endswith((".pyc", ".pyo")):
            self.bytecode(path, inside)
        elif path.endswith(ARCHIVES):
            # there may be thousands of others: those of this package, by their names
            if inside or plain(os.path.basename(path).split("-")[0]) in self.parts:
                self.archive(path)
        elif path not in self.changed and (inside or os.path.basename(path) in self.basenames):
            data = read(path)
            if data is not None and (of := self.holds(data.decode("utf-8", "replace"), path)):
                self.found(self.code(path, inside), f"{path} has the lines of the solution's {of}")

    def code(self, path: str, inside: bool) -> str:
        parts = path.split("/")
        if any(part in CACHES for part in parts):
            return "answer-in-cache"
        if not inside:
            return "answer-installed"
        build = any(part in ("build", "dist") or part.endswith(".egg-info") for part in parts)
        return "answer-in-build" if build else "answer-in-workspace"

    def archive(self, path: str) -> None:
        """Wheels and source archives: the answer may be packed."""
        with contextlib.suppress(Exception):
            for name, data in members(path, self.basenames):
                if of := self.holds(data.decode("utf-8", "replace"), name):
                    cached = any(part in CACHES for part in path.split("/"))
                    evidence = f"{path}: {name} has the lines of the solution's {of}"
                    self.found("answer-in-cache" if cached else "answer-in-archive", evidence)
                    return

    def bytecode(self, path: str, inside: bool) -> None:
        """A compiled file says what its source said when it was made."""
        source = source_of(path)
        if os.path.basename(source) not in self.basenames:
            return
        data = read(path)
        if data is None or len(data) < 16:
            return
        try:
            code = marshal.loads(data[16:])
        except (ValueError, EOFError, TypeError):
            if inside:
                self.found("answer-in-bytecode", f"{path}: made by another Python, of a file that is to be changed")
            return
        text = read(source) if inside else None
        if text is not None:
            with contextlib.suppress(SyntaxError, ValueError):
                if shape(compile(text, source, "exec")) != shape(code):
                    self.found("answer-in-bytecode", f"{path} is not what {source} compiles to")
        elif inside or self.names & set(names_in(code)):
            self.found("answer-in-bytecode", f"{path}: compiled from a file that is not there")


def walk(place: str, seen: set[str], deadline: float) -> Iterator[str]:
    """Files below a directory that were not seen, as long as there is time; links are not followed."""
    for directory, names, files in os.walk(os.path.realpath(place)):
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
    """The files of these names in an archive."""
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


def same_name(one: str, other: str) -> bool:
    return os.path.basename(one) == os.path.basename(other)


def plain(name: str) -> str:
    """A package's name as archives and directories spell it, in one spelling."""
    return name.lower().replace("-", "_").replace(".", "_")


def source_of(path: str) -> str:
    directory, name = os.path.split(path)
    if os.path.basename(directory) == "__pycache__":
        directory = os.path.dirname(directory)
    return os.path.join(directory, name.split(".")[0] + ".py")


def shape(code: types.CodeType) -> Any:
    """What code does, without where it stood and what it was called from."""
    constants = tuple(shape(item) if isinstance(item, types.CodeType) else repr(item) for item in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants


def names_in(code: types.CodeType) -> Iterator[str]:
    yield from (code.co_name, *code.co_names, *code.co_varnames)
    for item in code.co_consts:
        if isinstance(item, types.CodeType):
            yield from names_in(item)


def python_places() -> list[str]:
    """Where every Python here looks for packages."""
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
    search = Search(request, time.monotonic() + request["seconds"])
    for place in ("/tests", "/solution"):
        if os.path.isdir(place) and os.listdir(place):
            search.found("answer-in-image", f"{place} is there while the agent works")
    search.history()
    search.everywhere()
    print(json.dumps(search.findings))


if __name__ == "__main__":
    main()
