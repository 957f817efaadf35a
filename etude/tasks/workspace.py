"""Scan a workspace in a pod, compute its changes from a manifest (path -> entry), and apply changes in another pod.

Files from a pod are untrusted: names are checked, sizes are bounded, links are never followed, and files that could
hide a cheat (bytecode, git's own) are skipped unless the task carries them. Paths are relative to the workspace; those
of carried files outside it are absolute.
"""

import asyncio
import errno
import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from etude.globs import Globs
from etude.pods.pod import FileInfo, Pod, PodFileError
from etude.tasks.verifier_result import FileChange

MAX_FILE = 16 << 20  # bytes of one file
MAX_BYTES = 256 << 20  # bytes of all changed files
MAX_FILES = 50_000  # files scanned
MAX_DEPTH = 64
MAX_CONCURRENT_CALLS = 32  # calls to a pod; a call is mostly waiting
# caches; Python would prefer stale or planted bytecode to its source
IGNORED_NAMES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})
GIT = ".git"


@dataclass(frozen=True)
class WorkspaceEntry:
    """A file or link: digest of its contents or target, and whether it is executable."""

    kind: Literal["file", "symlink"]
    digest: str
    executable: bool = False
    source: Path | None = None  # a file on this host with the same contents, if known


Manifest = Mapping[str, WorkspaceEntry]


@dataclass
class WorkspaceScan:
    """Entries, contents of those that differ from the known manifest, and skipped paths (directories end in "/")."""

    entries: dict[str, WorkspaceEntry] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    bytes: int = 0


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def file_entry(data: bytes, mode: int, source: Path | None = None) -> WorkspaceEntry:
    return WorkspaceEntry("file", sha256_hex(data), bool(mode & 0o111), source)


def symlink_entry(target: str) -> WorkspaceEntry:
    return WorkspaceEntry("symlink", sha256_hex(os.fsencode(target)))


async def run_limited(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await coroutines, MAX_CONCURRENT_CALLS at a time; the first failure cancels the rest."""
    semaphore = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def one(each: Coroutine[Any, Any, None]) -> None:
        async with semaphore:
            await each

    tasks = [asyncio.create_task(one(each)) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# ------------------------------------------------------------------------------------------------- scanning


async def scan_workspace(
    pod: Pod, workspace: str, carry: Sequence[str] = (), known: Manifest | None = None
) -> WorkspaceScan:
    """Scan a workspace and the carried paths; with `known`, keep the contents that differ from it."""
    found = WorkspaceScan()
    pending = [(directory, key, 0) async for directory, key in _roots(pod, workspace, carry, found, known)]
    while pending:
        directory, key, depth = pending.pop()
        if len(found.entries) > MAX_FILES or depth > MAX_DEPTH:
            found.left_out.append(f"{key or '.'}/")
            continue
        try:
            listed = await pod.list(directory)
        except PodFileError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            raise
        files = []
        for info in listed:
            path = f"{key}/{info.name}" if key else info.name
            if not _includes(info.name, GIT in carry) or (key == "" and path in carry):
                continue
            if not _is_utf8(info.name) or "/" in info.name or info.name in ("", ".", ".."):
                found.left_out.append(repr(path))
            elif info.kind == "directory":
                pending.append((f"{directory}/{info.name}", path, depth + 1))
            else:
                files.append(_scan_file(pod, info, f"{directory}/{info.name}", path, found, known))
        await run_limited(files)
    return found


async def _roots(
    pod: Pod, workspace: str, carry: Sequence[str], found: WorkspaceScan, known: Manifest | None
) -> AsyncIterator[tuple[str, str]]:
    """Yield the workspace and the carried directories with their key prefix; scan carried single files directly."""
    yield workspace, ""
    for name in carry:
        path = name.rstrip("/")
        full_path = path if path.startswith("/") else f"{workspace}/{path}"
        if path.startswith(f"{workspace}/") or path == workspace:
            continue
        try:
            info = await pod.stat(full_path)
        except PodFileError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            raise
        if info.kind == "directory":
            yield full_path, path
        else:
            await _scan_file(pod, info, full_path, path, found, known)


def _includes(name: str, git: bool) -> bool:
    if name == GIT:
        return git
    return name not in IGNORED_NAMES and not name.endswith((".pyc", ".pyo"))


def is_tracked(path: str, carry: Sequence[str]) -> bool:
    """Whether changes to a file of the workspace, or to a carried one, are seen by a scan."""
    if path.startswith("/") and not any(path == top or path.startswith(f"{top}/") for top in carry):
        return False
    return all(_includes(name, GIT in carry) for name in path.split("/"))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


async def _scan_file(
    pod: Pod, info: FileInfo, full_path: str, path: str, found: WorkspaceScan, known: Manifest | None
) -> None:
    if info.kind == "symlink":
        entry, data = symlink_entry(info.target), os.fsencode(info.target)
    elif info.kind == "file" and info.size <= MAX_FILE and found.bytes <= MAX_BYTES:
        try:
            data = await pod.read(full_path, length=MAX_FILE)
        except PodFileError as error:
            if error.errno != errno.ENOENT:
                raise
            return  # removed since it was listed
        entry = file_entry(data, info.mode)
    else:
        found.left_out.append(path)  # too large, or not a regular file
        return
    found.entries[path] = entry
    if known is None:
        return
    before = known.get(path)
    if before is None or (before.kind, before.digest) != (entry.kind, entry.digest):
        found.contents[path] = data
        found.bytes += len(data)


def changed_paths(before: Manifest, after: WorkspaceScan) -> list[str]:
    """Return the paths that differ, sorted. Skipped files count as unchanged."""
    differs = {path for path, entry in after.entries.items() if _differs(before.get(path), entry)}
    skipped = set(after.left_out)
    gone = {path for path in set(before) - set(after.entries) if path not in skipped}
    return sorted(differs | {path for path in gone if not any(f"{parent}/" in skipped for parent in _parents(path))})


def _differs(before: WorkspaceEntry | None, after: WorkspaceEntry) -> bool:
    return before is None or (before.kind, before.digest, before.executable) != (
        after.kind,
        after.digest,
        after.executable,
    )


def changes_between(before: Manifest, after: WorkspaceScan, originals: Mapping[str, bytes]) -> tuple[FileChange, ...]:
    """Return the changes from a manifest to a scan; `originals` has the earlier contents of changed files.

    A file that became a link is two changes, one of each kind. A change of the executable bit has the kind "mode" and
    the contents b"755" and b"644" (None where there was no file).
    """
    found: list[FileChange] = []
    for path in changed_paths(before, after):
        was, now = before.get(path), after.entries.get(path)
        if was and now and was.kind == now.kind and was.digest == now.digest:
            pass  # only the mode differs
        elif was and now and was.kind == now.kind:
            found.append(FileChange(path, originals[path], after.contents[path], now.kind))
        else:
            if was:
                found.append(FileChange(path, originals[path], None, was.kind))
            if now:
                found.append(FileChange(path, None, after.contents[path], now.kind))
        if now and now.kind == "file" and now.executable != bool(was and was.executable):
            found.append(FileChange(path, _mode(was), _mode(now), "mode"))
    return tuple(found)


def _mode(entry: WorkspaceEntry | None) -> bytes | None:
    if entry is None or entry.kind != "file":
        return None
    return b"755" if entry.executable else b"644"


# ------------------------------------------------------------------------------------------------- applying


def split_changes(
    changes: Sequence[FileChange], before: Manifest, protected: Globs, carry: Sequence[str] = ()
) -> tuple[list[FileChange], list[FileChange]]:
    """Split changes into allowed and refused ones. Refused are changes to protected files or to a parent directory of
    one, and changes to files that no scan reports."""
    parents = {parent for path in before if protected.matches(path) for parent in _parents(path)}
    allowed: list[FileChange] = []
    refused: list[FileChange] = []
    for change in changes:
        replaces_parent = change.after is not None and change.kind != "mode" and change.path in parents
        untracked = ".." in change.path.split("/") or not is_tracked(change.path, carry)
        (refused if replaces_parent or untracked or protected.matches(change.path) else allowed).append(change)
    return allowed, refused


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


async def apply_changes(pod: Pod, workspace: str, before: Manifest, changes: Sequence[FileChange]) -> None:
    """Apply changes in a pod whose workspace matches `before`. Links come last: nothing is written through one."""

    def full_path(path: str) -> str:
        return path if path.startswith("/") else f"{workspace}/{path}"

    modes = {change.path: change.after for change in changes if change.kind == "mode"}
    written = [change for change in changes if change.kind == "file" and change.after is not None]
    links = [change for change in changes if change.kind == "symlink" and change.after is not None]
    gone = {each.path for each in changes if each.before is not None and each.kind != "mode" and each not in written}
    # directories that became a file or link
    gone |= {change.path for change in (*written, *links)} & {parent for path in before for parent in _parents(path)}
    for path in sorted(gone, reverse=True):
        await remove_if_exists(pod, full_path(path))
    executable = {path for path, entry in before.items() if entry.executable}

    async def write(change: FileChange) -> None:
        mode = modes.get(change.path, b"755" if change.path in executable else b"644")
        await pod.write(full_path(change.path), change.after or b"", mode=int(mode or b"644", 8))

    await run_limited(write(change) for change in written)
    mode_only = [path for path in modes if path not in {change.path for change in written} and modes[path] is not None]
    for path in mode_only:
        data = await pod.read(full_path(path), length=MAX_FILE)
        await pod.write(full_path(path), data, mode=int(modes[path] or b"644", 8))
    for change in links:
        await create_symlink(pod, full_path(change.path), os.fsdecode(change.after or b""))


async def remove_if_exists(pod: Pod, path: str) -> None:
    try:
        await pod.remove(path)
    except PodFileError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


async def create_symlink(pod: Pod, path: str, target: str) -> None:
    """Create a symbolic link in a pod."""
    with tempfile.TemporaryDirectory(prefix="etude-link-") as directory:
        link = Path(directory) / "link"
        os.symlink(target, link)
        await pod.upload(link, path)
