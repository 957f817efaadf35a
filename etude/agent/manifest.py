"""File manifests: the files of a workspace by path, on disk and in a pod. A session's changes are their difference.

The manifest of a pod is untrusted: paths are checked before they are used on the host.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from etude.errors import EtudeError
from etude.pods.pod import Pod

LIST_TIMEOUT_S = 120.0
MAX_LISTING_BYTES = 64 << 20  # bytes
MAX_FILES = 100_000
MAX_BYTES = 512 << 20  # of a workspace, and of its changes: a pod holds its files in memory

# Left by every test run, so never reported as changes unless they were uploaded.
CACHE_DIRECTORIES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")

# Runs in the pod. Lists the files that git does not ignore (all files where there is no git) and every uploaded file,
# even if .gitignore has changed since.
LIST_PROGRAM = """\
import hashlib, json, os, stat, subprocess, sys
caches, most, largest = set(json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3])
known = [path for path in sys.stdin.buffer.read().split(b"\\0") if path]

def below(top):
    for directory, names, files in os.walk(top or b"."):
        names[:] = [name for name in names if name != b".git"]
        for name in files + [name for name in names if os.path.islink(os.path.join(directory, name))]:
            yield os.path.normpath(os.path.join(directory, name))

def candidates():
    if os.path.exists(b".git"):
        command = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", "-co", "--exclude-standard"]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            for path in filter(None, done.stdout.split(b"\\0")):
                nested = os.path.isdir(path) and not os.path.islink(path)
                yield from below(path) if nested else (os.path.normpath(path),)
            return
    yield from below(b"")

def entry(path):
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return "link", os.readlink(path).decode("utf-8", "surrogateescape"), 0, False
    if not stat.S_ISREG(info.st_mode):
        raise OSError("neither a file nor a link")
    if info.st_size > largest:  # a sparse file can have any size
        return "file", "too large", info.st_size, False
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for part in iter(lambda: file.read(1 << 20), b""):
            digest.update(part)
    return "file", digest.hexdigest(), info.st_size, bool(info.st_mode & 0o100)

def text(path):
    return path.decode("utf-8", "surrogateescape")

fresh = (path for path in candidates() if not caches & set(text(path).split("/")))
for number, path in enumerate(dict.fromkeys([*known, *fresh])):
    if number >= most:
        sys.exit("there are more than %d files" % most)
    try:
        print(json.dumps([text(path), *entry(path)]))
    except OSError:
        continue
"""


@dataclass(frozen=True)
class ManifestEntry:
    """A file or a symlink; equal entries have equal contents. The digest of a link is its target."""

    kind: Literal["file", "link"]
    digest: str
    size: int = 0
    executable: bool = False


FileManifest: TypeAlias = Mapping[str, ManifestEntry]  # by path relative to the root, separated by "/"


def is_workspace_path(path: str) -> bool:
    """Return whether a path may be written in a workspace: it stays below the root and outside .git."""
    parts = path.split("/")
    unsafe = {"", ".", ".."} & set(parts) or "\0" in path or any(part.lower() == ".git" for part in parts)
    return bool(path) and not unsafe


async def list_pod_files(pod: Pod, root: str, known: Sequence[str]) -> FileManifest:
    """Return the manifest of a pod's workspace: the files in `known`, and all others that are not ignored."""
    command = ["python3", "-I", "-S", "-c", LIST_PROGRAM, json.dumps(CACHE_DIRECTORIES), str(MAX_FILES), str(MAX_BYTES)]
    given = "\0".join(known).encode("utf-8", "surrogateescape")
    done = await pod.exec(command, cwd=root, stdin=given, timeout=LIST_TIMEOUT_S, max_output=MAX_LISTING_BYTES)
    if not done.ok or done.truncated:
        why = done.stderr.strip()[-300:] or ("it took too long" if done.timed_out else f"exit code {done.exit_code}")
        raise EtudeError(f"pod {pod.id}: cannot list the files of {root}: {why}")
    return parse_listing(done.stdout_bytes)


def parse_listing(data: bytes) -> FileManifest:
    """Parse the output of LIST_PROGRAM. Paths outside the workspace are dropped; malformed rows are an error."""
    found: dict[str, ManifestEntry] = {}
    try:
        for line in data.splitlines():
            row: Any = json.loads(line)
            path, kind, digest, size, executable = row
            entry = ManifestEntry(kind, digest, size, executable)
            kinds = (str, str, int, bool)
            given = (path, digest, size, executable)
            if kind not in ("file", "link") or any(type(v) is not k for v, k in zip(given, kinds, strict=True)):
                raise ValueError(f"malformed row {row!r:.200}")
            if is_workspace_path(path):
                found[path] = entry
    except (ValueError, TypeError) as error:
        raise EtudeError(f"the pod's file listing is malformed: {error}") from None
    return found
