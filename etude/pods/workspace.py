"""Workspaces: the states of files, what changed in a pod, and applying changes to a pod or to a local directory.

The changes of a pod come from `Pod.diff`, so finding them takes time in the number of changed files. Files of a pod are
untrusted: sizes are bounded and links never followed. `apply_to_directory` opens directories from the root by
descriptor, so nothing outside is written; it does not touch .git, creates no link that points outside, and leaves a
file alone that is not as the change expects it.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from etude.errors import EtudeError
from etude.pods.pod import FileInfo, Pod, PodFileError
from etude.system.run_limited import run_limited

# Left by test runs. Python would prefer stale or planted bytecode to its source.
CACHE_DIRECTORIES = frozenset({"__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True)
class FileState:
    """A file or symbolic link. Equal states have equal contents; `data` is None where only the digest is known."""

    kind: Literal["file", "symlink"]
    digest: str
    executable: bool = False
    data: bytes | None = field(default=None, compare=False, repr=False)  # a link's target

    @classmethod
    def file(cls, data: bytes, executable: bool = False) -> "FileState":
        return cls("file", hashlib.sha256(data).hexdigest(), executable, data)

    @classmethod
    def symlink(cls, target: str) -> "FileState":
        data = os.fsencode(target)
        return cls("symlink", hashlib.sha256(data).hexdigest(), False, data)

    @property
    def contents(self) -> bytes:
        """The contents, where they are known to be known."""
        if self.data is None:
            raise ValueError(f"the contents of the {self.kind} with digest {self.digest} are not known")
        return self.data

    @property
    def target(self) -> str:
        """The target of a link."""
        return os.fsdecode(self.contents)


@dataclass(frozen=True)
class FileChange:
    """One path before and after; None where there is no file. Paths are relative to the workspace or absolute."""

    path: str
    before: FileState | None
    after: FileState | None

    def text(self, which: Literal["before", "after"]) -> bytes:
        """Return the contents of the file on one side; empty if there is none, or a link."""
        state = self.before if which == "before" else self.after
        return state.contents if state is not None and state.kind == "file" else b""

    def lines(self, which: Literal["before", "after"]) -> list[str]:
        """Return the lines of one side; none if there is no file."""
        return self.text(which).decode("utf-8", "replace").splitlines()


def parents(path: str) -> Iterator[str]:
    """Yield the directories above a path, from the nearest."""
    while path := path.rpartition("/")[0]:
        yield path


# ------------------------------------------------------------------------------------------------- reading a pod


async def touched_paths(pod: Pod, root: str, others: Sequence[str] = ()) -> dict[str, FileInfo | None]:
    """Return what changed at and below `root` and other paths since the pod was created (see `Pod.diff`).

    Paths below `root` are relative to it, others absolute. "" is `root` itself: None if that or a directory above it
    was removed, or replaced by a file or a link, so that only the paths listed are there.
    """
    tops = {top: await _real_path(pod, top) for top in (root, *others)}
    found: dict[str, FileInfo | None] = {}
    for path, info in (await pod.diff(tuple({*tops, *tops.values()}))).items():
        gone = info is None or info.kind != "directory"
        if gone and any(each == path or each.startswith(f"{path}/") for each in (root, tops[root])):
            found[""] = None
        for top, real in tops.items():
            if path.startswith(f"{real}/") or (path == real and top != root):
                found[f"{top}{path.removeprefix(real)}".removeprefix(f"{root}/")] = info
                break
            if gone and top != root and real.startswith(f"{path}/"):
                found.setdefault(top, None)
    return found


async def _real_path(pod: Pod, path: str, links: int = 16) -> str:
    """Resolve the links in a path of a pod: the paths of a diff contain none."""
    found = ""
    parts = path.strip("/").split("/")
    for number, part in enumerate(parts, 1):
        try:
            info = await pod.stat(f"{found}/{part}")
        except PodFileError:
            return path
        if info.kind == "symlink" and links:
            target = os.path.normpath("/".join((found if info.target[:1] != "/" else "", info.target, *parts[number:])))
            return await _real_path(pod, target, links - 1)
        found += f"/{part}"
    return found


def changed_files(touched: Mapping[str, FileInfo | None], known: Collection[str]) -> dict[str, FileInfo | None]:
    """Return the files among touched paths, and the known files that were removed with a directory.

    `known` has the paths of the files that there were before.
    """
    files = {path: info for path, info in touched.items() if info is not None and info.kind != "directory"}
    removed = {path for path, info in touched.items() if info is None}

    def is_gone(path: str) -> bool:
        return "" in removed and not path.startswith("/")

    gone = [
        path
        for path in known
        if path not in files
        and (path in touched or any(each in files or each in removed for each in parents(path)) or is_gone(path))
    ]
    return {**files, **dict.fromkeys(gone)}


async def read_files(
    pod: Pod, root: str, files: Mapping[str, FileInfo | None], max_file: int, max_bytes: int
) -> tuple[dict[str, FileState | None], list[str]]:
    """Return the states of files in a pod, and the paths left out: special files, and those over a limit of bytes."""
    found: dict[str, FileState | None] = {}
    left_out: list[str] = []
    left = max_bytes

    async def read(path: str, info: FileInfo) -> None:
        nonlocal left
        try:
            data = await pod.read(full_path(root, path), length=max_file + 1)
        except PodFileError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise
            found[path] = None  # removed meanwhile
            return
        left -= len(data)
        if len(data) > max_file or left < 0:
            left_out.append(path)
        else:
            found[path] = FileState.file(data, bool(info.mode & 0o100))

    pending: list[tuple[str, FileInfo]] = []
    for path, info in files.items():
        if info is None:
            found[path] = None
        elif info.kind == "symlink":
            found[path] = FileState.symlink(info.target)
        elif info.kind == "file" and info.size <= max_file:
            pending.append((path, info))
        else:
            left_out.append(path)
    await run_limited(read(path, info) for path, info in pending)
    return found, sorted(left_out)


def full_path(root: str, path: str) -> str:
    return path if path.startswith("/") else f"{root}/{path}"


# ------------------------------------------------------------------------------------------------- applying


async def apply_to_pod(pod: Pod, root: str, changes: Sequence[FileChange]) -> None:
    """Apply changes in a pod whose files are as before them. Links come last: nothing is written through one."""
    removed = {change.path for change in changes if change.after is None}
    above = {parent for path in removed for parent in parents(path)}  # directories that a file or link may replace
    files: list[tuple[str, FileState]] = []
    links: list[tuple[str, FileState]] = []
    for change in changes:
        if change.after is not None:
            (links if change.after.kind == "symlink" else files).append((change.path, change.after))
            both_files = change.before is not None and change.before.kind == change.after.kind == "file"
            if change.path in above or (change.before is not None and not both_files):
                removed.add(change.path)
    for path in sorted(removed, reverse=True):
        await remove_if_exists(pod, full_path(root, path))
    await run_limited(
        pod.write(full_path(root, path), state.contents, mode=0o755 if state.executable else 0o644)
        for path, state in files
    )
    await run_limited(pod.symlink(state.target, full_path(root, path)) for path, state in links)


async def stat_if_exists(pod: Pod, path: str) -> FileInfo | None:
    try:
        return await pod.stat(path)
    except PodFileError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None


async def remove_if_exists(pod: Pod, path: str) -> None:
    try:
        await pod.remove(path)
    except PodFileError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise


class ChangeRefused(EtudeError):
    """A change was not applied; the message says why."""


@dataclass(frozen=True)
class ApplyResult:
    """Changes that were applied, and those that were not with the reason."""

    applied: tuple[FileChange, ...]
    refused: tuple[tuple[FileChange, str], ...]


def apply_to_directory(directory: Path, changes: Sequence[FileChange]) -> ApplyResult:
    """Apply every change that can be applied. Deletions come first, so that a file can replace a directory."""
    applied, refused = [], []
    root = os.open(directory, OPEN_DIRECTORY)
    try:
        for change in sorted(changes, key=lambda change: (change.after is not None, change.path)):
            try:
                _apply(root, change)
                applied.append(change)
            except ChangeRefused as error:
                refused.append((change, str(error)))
            except OSError as error:
                refused.append((change, f"{error.strerror}".lower()))
    finally:
        os.close(root)
    return ApplyResult(tuple(applied), tuple(refused))


def _apply(root: int, change: FileChange) -> None:
    before, after = change.before, change.after
    if not is_workspace_path(change.path):
        raise ChangeRefused("the path is outside the directory or in .git")
    if after is not None and after.kind == "symlink" and link_escapes(change.path, after.target):
        raise ChangeRefused(f"the link points outside the directory, to {after.target}")
    try:
        with _open_parent(root, change.path, make=after is not None) as (here, name):
            if read_state(here, name) == after:
                return  # the same change was already made on disk
            _check_unchanged(here, name, before)
            if after is None:
                os.unlink(name, dir_fd=here)
            else:
                _replace(here, name, before, after)
    except FileNotFoundError:
        if after is not None:
            raise
    if after is None:
        for parent in parents(change.path):  # directories that the deletion left empty
            with contextlib.suppress(OSError, ChangeRefused), _open_parent(root, parent, make=False) as (here, name):
                os.rmdir(name, dir_fd=here)


@contextlib.contextmanager
def _open_parent(root: int, path: str, make: bool) -> Iterator[tuple[int, str]]:
    """Open the parent directory of a path, creating it if `make`; yield its descriptor and the last name."""
    *above, name = path.split("/")
    here = os.dup(root)
    try:
        for part in above:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, dir_fd=here)
            try:
                below = os.open(part, OPEN_DIRECTORY, dir_fd=here)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise ChangeRefused(f"{part} in its path is not a directory") from None
                raise
            os.close(here)
            here = below
        yield here, name
    finally:
        os.close(here)


def _check_unchanged(here: int, name: str, before: FileState | None) -> None:
    now = read_state(here, name)
    if now == before:
        return
    if now is None:
        raise ChangeRefused("it was deleted on disk meanwhile")
    if not now.digest:
        raise ChangeRefused("something that is not a file has that name")
    appeared = "a file of that name appeared on disk meanwhile"
    raise ChangeRefused(appeared if before is None else "it changed on disk meanwhile")


def _replace(here: int, name: str, before: FileState | None, after: FileState) -> None:
    """Write the new file next to the old one, then rename it over the old one."""
    part = f".etude-{secrets.token_hex(8)}"
    try:
        if after.kind == "symlink":
            os.symlink(after.target, part, dir_fd=here)
        else:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(part, flags, 0o777 if after.executable else 0o666, dir_fd=here), "wb") as file:
                file.write(after.contents)
                file.flush()
                if before is not None and before.kind == "file":
                    # Keep the permissions; users that may read an executable file may execute it.
                    mode = os.stat(name, dir_fd=here, follow_symlinks=False).st_mode & 0o777
                    mode = mode | (mode & 0o444) >> 2 if after.executable else mode & ~0o111
                    os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
        _check_unchanged(here, name, before)  # again: it may have changed during the write
        os.replace(part, name, src_dir_fd=here, dst_dir_fd=here)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=here)
        raise


def read_state(here: int | None, name: str) -> FileState | None:
    """Return the state of a file of this machine; None if it does not exist, digest "" if it is no file.

    The name is relative to the open directory `here`, if given.
    """
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(info.st_mode):
        return FileState.symlink(os.readlink(name, dir_fd=here))
    if not stat.S_ISREG(info.st_mode):
        return FileState("file", "")
    with os.fdopen(os.open(name, OPEN_FILE, dir_fd=here), "rb") as file:
        return FileState.file(file.read(), bool(info.st_mode & 0o100))


def is_workspace_path(path: str) -> bool:
    """Return whether a path may be written in a workspace: it stays below the root and outside .git."""
    parts = path.split("/")
    unsafe = {"", ".", ".."} & set(parts) or "\0" in path or any(part.lower() == ".git" for part in parts)
    return bool(path) and not unsafe


def link_escapes(path: str, target: str) -> bool:
    """Return whether a symlink may point outside the directory. ".." is allowed only at the front of the target: after
    a name, which may itself be a link, its meaning is unknown."""
    parts = [part for part in target.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    return target.startswith("/") or not target or ".." in parts[up:] or up > path.count("/")
