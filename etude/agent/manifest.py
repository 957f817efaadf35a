"""A workspace as a table of its files, here and in a pod: what two tables differ in is what a session has changed.

What a pod says of its files is a stranger's word: names are checked before they mean anything here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from etude.errors import EtudeError
from etude.pods.pod import Pod

LIST_S = 120.0
MAX_LISTING = 64 << 20  # bytes
MAX_FILES = 100_000
MAX_BYTES = 512 << 20  # of a workspace, and of what changed in it: a pod holds its files in memory

# Never offered as somebody's work unless they were there before: every test run leaves them.
CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")

# Runs in the pod. Candidates are what git does not ignore, or everything where there is no git, and all that was there
# at the beginning; whatever .gitignore says now, a file that we brought is a file that we look after.
LISTING = """\
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
    if info.st_size > largest:  # with a hole a file can claim to be as large as it likes
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
class Entry:
    """A file or a link; equal entries are the same. The digest of a link is where it leads."""

    kind: Literal["file", "link"]
    digest: str
    size: int = 0
    executable: bool = False


Tree: TypeAlias = Mapping[str, Entry]  # by path from the root, with "/" between


def is_ours(path: str) -> bool:
    """Whether a path names something in a workspace that may be written there: never above it, never git's own."""
    parts = path.split("/")
    odd = {"", ".", ".."} & set(parts) or "\0" in path or any(part.lower() == ".git" for part in parts)
    return bool(path) and not odd


async def list_pod(pod: Pod, root: str, known: Sequence[str]) -> Tree:
    """The files of a pod's workspace that count: those in `known`, and others that nothing ignores."""
    command = ["python3", "-I", "-S", "-c", LISTING, json.dumps(CACHES), str(MAX_FILES), str(MAX_BYTES)]
    given = "\0".join(known).encode("utf-8", "surrogateescape")
    done = await pod.exec(command, cwd=root, stdin=given, timeout=LIST_S, max_output=MAX_LISTING)
    if not done.ok or done.truncated:
        why = done.stderr.strip()[-300:] or ("it took too long" if done.timed_out else f"exit code {done.exit_code}")
        raise EtudeError(f"pod {pod.id}: the files of {root} cannot be listed: {why}")
    return read_listing(done.stdout_bytes)


def read_listing(data: bytes) -> Tree:
    """What LISTING prints; names that mean nothing here are left out, and anything else is refused."""
    found: dict[str, Entry] = {}
    try:
        for line in data.splitlines():
            row: Any = json.loads(line)
            path, kind, digest, size, executable = row
            entry = Entry(kind, digest, size, executable)
            kinds = (str, str, int, bool)
            given = (path, digest, size, executable)
            if kind not in ("file", "link") or any(type(v) is not k for v, k in zip(given, kinds, strict=True)):
                raise ValueError(f"a row is {row!r:.200}")
            if is_ours(path):
                found[path] = entry
    except (ValueError, TypeError) as error:
        raise EtudeError(f"the pod's list of files makes no sense: {error}") from None
    return found
