"""The files of a workspace in a pod: what they are, what a session changed, and the same changes made elsewhere.

A manifest is path -> digest. What comes out of a pod is not trusted: names are checked, sizes are bounded, links are
never followed, and what a cheat could hide behind (compiled files, git's own) is not taken along unless the task says.
Paths are from the workspace; those of files outside, which only `carry` brings, are absolute.
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

from etude.harness.toolserver.inside.ignore import Pattern
from etude.pods.pod import FileInfo, Pod, PodFileError
from etude.tasks.verifier_result import FileChange

MAX_FILE = 16 << 20  # bytes of a file that is taken along
MAX_BYTES = 256 << 20  # of all of them
MAX_FILES = 50_000  # that are looked at
MAX_DEPTH = 64
IN_FLIGHT = 32  # calls to a pod at once; a call is mostly waiting
# made by running things; stale or planted bytecode would be believed over its source
PASSED_OVER = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})
GIT = ".git"


@dataclass(frozen=True)
class Entry:
    """A file or link as it is: digest of the contents (or the target), and whether it can be executed."""

    kind: Literal["file", "symlink"]
    digest: str
    executable: bool = False
    source: Path | None = None  # the same contents on this side, if they are known here


Manifest = Mapping[str, Entry]


@dataclass
class Scan:
    """What was found: entries, contents of those that are not as they were known, and what was not taken (a directory
    ends in a slash)."""

    entries: dict[str, Entry] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    bytes: int = 0


def digest_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def entry_of(data: bytes, mode: int, source: Path | None = None) -> Entry:
    return Entry("file", digest_of(data), bool(mode & 0o111), source)


def link_entry(target: str) -> Entry:
    return Entry("symlink", digest_of(os.fsencode(target)))


async def together(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """A few at a time; the first failure stops the rest."""
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def one(each: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await each

    tasks = [asyncio.create_task(one(each)) for each in work]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# ------------------------------------------------------------------------------------------------- looking


async def scan(pod: Pod, workspace: str, carry: Sequence[str] = (), known: Manifest | None = None) -> Scan:
    """Look at a workspace, and at the places in `carry`; contents are kept where they differ from `known`, if given."""
    found = Scan()
    waiting = [(place, key, 0) async for place, key in _roots(pod, workspace, carry, found, known)]
    while waiting:
        place, key, depth = waiting.pop()
        if len(found.entries) > MAX_FILES or depth > MAX_DEPTH:
            found.left_out.append(f"{key or '.'}/")
            continue
        try:
            listed = await pod.list(place)
        except PodFileError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            raise
        files = []
        for info in listed:
            path = f"{key}/{info.name}" if key else info.name
            if not _takes(info.name, GIT in carry) or (key == "" and path in carry):
                continue
            if not _is_text(info.name) or "/" in info.name or info.name in ("", ".", ".."):
                found.left_out.append(repr(path))
            elif info.kind == "directory":
                waiting.append((f"{place}/{info.name}", path, depth + 1))
            else:
                files.append(_look(pod, info, f"{place}/{info.name}", path, found, known))
        await together(files)
    return found


async def _roots(
    pod: Pod, workspace: str, carry: Sequence[str], found: Scan, known: Manifest | None
) -> AsyncIterator[tuple[str, str]]:
    """The workspace and what else is carried: directories to go through; single files are looked at here."""
    yield workspace, ""
    for name in carry:
        path = name.rstrip("/")
        place = path if path.startswith("/") else f"{workspace}/{path}"
        if path.startswith(f"{workspace}/") or path == workspace:
            continue
        try:
            info = await pod.stat(place)
        except PodFileError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                continue
            raise
        if info.kind == "directory":
            yield place, path
        else:
            await _look(pod, info, place, path, found, known)


def _takes(name: str, git: bool) -> bool:
    if name == GIT:
        return git
    return name not in PASSED_OVER and not name.endswith((".pyc", ".pyo"))


def counts(path: str, carry: Sequence[str]) -> bool:
    """Whether a file of the workspace, or one that is carried, is looked at when changes are taken."""
    if path.startswith("/") and not any(path == place or path.startswith(f"{place}/") for place in carry):
        return False
    return all(_takes(name, GIT in carry) for name in path.split("/"))


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # not UTF-8: nothing of ours could name it
        return False
    return True


async def _look(pod: Pod, info: FileInfo, place: str, path: str, found: Scan, known: Manifest | None) -> None:
    if info.kind == "symlink":
        entry, data = link_entry(info.target), os.fsencode(info.target)
    elif info.kind == "file" and info.size <= MAX_FILE and found.bytes <= MAX_BYTES:
        try:
            data = await pod.read(place, length=MAX_FILE)
        except PodFileError as error:
            if error.errno != errno.ENOENT:
                raise
            return  # removed since it was listed
        entry = entry_of(data, info.mode)
    else:
        found.left_out.append(path)  # too large, or a pipe, a socket, a device
        return
    found.entries[path] = entry
    if known is None:
        return
    before = known.get(path)
    if before is None or (before.kind, before.digest) != (entry.kind, entry.digest):
        found.contents[path] = data
        found.bytes += len(data)


def changed_paths(before: Manifest, after: Scan) -> list[str]:
    """What is not as it was, in order. What was left out counts as it was: nobody knows."""
    differs = {path for path, entry in after.entries.items() if _differs(before.get(path), entry)}
    unseen = set(after.left_out)
    gone = {path for path in set(before) - set(after.entries) if path not in unseen}
    return sorted(differs | {path for path in gone if not any(f"{above}/" in unseen for above in _parents(path))})


def _differs(before: Entry | None, after: Entry) -> bool:
    return before is None or (before.kind, before.digest, before.executable) != (
        after.kind,
        after.digest,
        after.executable,
    )


def changes_between(before: Manifest, after: Scan, originals: Mapping[str, bytes]) -> tuple[FileChange, ...]:
    """The changes as data; `originals` has the earlier contents of what changed.

    A file that became a link is two changes, one of each kind; one that can be executed now, or not any more, has a
    change of kind "mode" whose sides are b"755" and b"644" (None where there was no file).
    """
    found: list[FileChange] = []
    for path in changed_paths(before, after):
        was, now = before.get(path), after.entries.get(path)
        if was and now and was.kind == now.kind and was.digest == now.digest:
            pass  # the mode alone
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


def _mode(entry: Entry | None) -> bytes | None:
    if entry is None or entry.kind != "file":
        return None
    return b"755" if entry.executable else b"644"


# ------------------------------------------------------------------------------------------------- changing


class Globs:
    """Protected files: a path is meant by a pattern of git's kind, or lies in a directory that is."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.patterns = [Pattern(pattern) for pattern in patterns]

    def cover(self, path: str) -> bool:
        parts = path.split("/")
        return any(
            pattern.match("/".join(parts[:depth]), depth < len(parts))
            for pattern in self.patterns
            for depth in range(1, len(parts) + 1)
        )


def applicable(
    changes: Sequence[FileChange], before: Manifest, protected: Globs, carry: Sequence[str] = ()
) -> tuple[list[FileChange], list[FileChange]]:
    """Changes that are the agent's to make, and those that are not: to protected files, or to what they lie in, or to
    files that are not looked at and so cannot have come from a session."""
    above = {parent for path in before if protected.cover(path) for parent in _parents(path)}
    mine: list[FileChange] = []
    refused: list[FileChange] = []
    for change in changes:
        takes_place = change.after is not None and change.kind != "mode" and change.path in above
        foreign = ".." in change.path.split("/") or not counts(change.path, carry)
        (refused if takes_place or foreign or protected.cover(change.path) else mine).append(change)
    return mine, refused


def _parents(path: str) -> Iterator[str]:
    while path := path.rpartition("/")[0]:
        yield path


async def apply_changes(pod: Pod, workspace: str, before: Manifest, changes: Sequence[FileChange]) -> None:
    """Make the changes in a pod whose workspace is as `before` says. Links last: nothing is written through one."""

    def place(path: str) -> str:
        return path if path.startswith("/") else f"{workspace}/{path}"

    modes = {change.path: change.after for change in changes if change.kind == "mode"}
    written = [change for change in changes if change.kind == "file" and change.after is not None]
    links = [change for change in changes if change.kind == "symlink" and change.after is not None]
    gone = {each.path for each in changes if each.before is not None and each.kind != "mode" and each not in written}
    # what was a directory and is a file or link now
    gone |= {change.path for change in (*written, *links)} & {parent for path in before for parent in _parents(path)}
    for path in sorted(gone, reverse=True):
        await remove_if_there(pod, place(path))
    executable = {path for path, entry in before.items() if entry.executable}

    async def write(change: FileChange) -> None:
        mode = modes.get(change.path, b"755" if change.path in executable else b"644")
        await pod.write(place(change.path), change.after or b"", mode=int(mode or b"644", 8))

    await together(write(change) for change in written)
    only = [path for path in modes if path not in {change.path for change in written} and modes[path] is not None]
    for path in only:
        data = await pod.read(place(path), length=MAX_FILE)
        await pod.write(place(path), data, mode=int(modes[path] or b"644", 8))
    for change in links:
        await make_link(pod, place(change.path), os.fsdecode(change.after or b""))


async def remove_if_there(pod: Pod, path: str) -> None:
    try:
        await pod.remove(path)
    except PodFileError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


async def make_link(pod: Pod, path: str, target: str) -> None:
    """Make a symbolic link in a pod."""
    with tempfile.TemporaryDirectory(prefix="etude-link-") as directory:
        link = Path(directory) / "link"
        os.symlink(target, link)
        await pod.upload(link, path)
