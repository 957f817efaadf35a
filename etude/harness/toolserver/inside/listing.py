"""Finds files by glob; lists the text files with digests, for an index outside the pod.

Digests of unchanged files are cached in the state directory, so that listing again is cheap, in a fork too.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os

from etude.globs import GitGlobs
from etude.harness.toolserver.inside.ignore import is_hidden, walk
from etude.harness.toolserver.inside.paths import SAMPLE, ToolWorkspace, quote_name, refusal_for, replace_file

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from typing import Any

MAX_FILE = 1 << 20
MAX_FILES = 50_000
MAX_FOUND = 1000  # files that a glob shows


def glob_file_search(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """List files whose path matches a glob: first those changed since the session began, each group sorted by path.

    Exact file times differ between runs, so sorting by time would; the set of changed files does not.
    """
    start = workspace.resolve(arguments.get("target_directory") or ".")
    if not os.path.isdir(start):
        raise refusal_for(workspace, start, FileNotFoundError(2, "no such directory"))
    start = os.path.normpath(start)
    pattern = arguments["glob_pattern"].strip()
    if pattern.startswith(start.rstrip("/") + "/"):
        pattern = pattern[len(start.rstrip("/")) + 1 :]
    pattern = pattern[2:] if pattern.startswith("./") else pattern
    globs = GitGlobs([pattern if pattern.startswith("**/") else f"**/{pattern}"])
    below = len(start.rstrip("/")) + 1
    hidden = is_hidden(pattern) or is_hidden(workspace.relative(start))
    changed: list[str] = []
    others: list[str] = []
    for entry in walk(start, workspace.root, hidden=hidden):
        path = entry.path
        if globs.match(path[below:]):
            recent = entry.stat(follow_symlinks=False).st_mtime_ns > workspace.began
            (changed if recent else others).append(path)
    found = sorted(changed) + sorted(others)
    lines = [quote_name(workspace.relative(path)) for path in found[:MAX_FOUND]]
    if not found:
        lines.append("No files match.")
    if len(found) > MAX_FOUND:
        lines.append(f"[the first {MAX_FOUND} of {len(found):,} files]")
    return {"text": "\n".join(lines), "facts": {"files": len(found)}}


def listing(workspace: ToolWorkspace, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return path, size and digest of every text file that is not ignored, sorted by path."""
    cache = os.path.join(workspace.state, "digests.json")
    before = _load_cache(cache)
    after: dict[str, list[Any]] = {}
    files: list[list[Any]] = []
    below = len(workspace.root.rstrip("/")) + 1
    for entry in walk(workspace.root, workspace.root, hidden=True):
        try:
            info = entry.stat(follow_symlinks=False)
            if not entry.is_file(follow_symlinks=False) or info.st_size > MAX_FILE:
                continue
        except OSError:
            continue
        path = entry.path[below:]
        if quote_name(path) != path:
            continue  # a name that needs quoting
        stamp = [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]
        known = before.get(path)
        digest = known[4] if known and known[:4] == stamp else _digest(entry.path)
        after[path] = [*stamp, digest]
        if digest:
            files.append([path, info.st_size, digest])
        if len(files) >= MAX_FILES:
            break
    with contextlib.suppress(OSError):
        replace_file(cache, json.dumps(after).encode())
    return {"files": sorted(files)}


def _load_cache(path: str) -> dict[str, list[Any]]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        return {path: row for path, row in found.items() if len(row) == 5 and isinstance(row[4], str)}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _digest(path: str) -> str:
    """Return the digest of a text file, empty if it is binary or unreadable."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as source:
            data = source.read(MAX_FILE)
    except OSError:
        return ""
    return "" if b"\0" in data[:SAMPLE] else hashlib.blake2b(data, digest_size=16).hexdigest()
