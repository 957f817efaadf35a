"""Copy trees into and out of a pod with the guest protocol's file requests: no tar, no program inside the pod.

The content of a pod is not trusted: names are checked, we create every directory ourselves, files are created
exclusively and links never followed, and the total size is limited, whatever sizes the pod claims.
"""

import asyncio
import os
import stat
from pathlib import Path

from etude.errors import InputError
from etude.pods.images.trees import MAX_DEPTH, remove_tree
from etude.pods.pod import FileInfo, Pod, PodError
from etude.system.run_limited import run_limited

PART_SIZE = 1 << 20  # bytes of a file held in memory at a time
MAX_BYTES = 16 << 30  # of all files in one download
MAX_FILES = 1_000_000


async def upload(pod: Pod, source: Path, path: str) -> None:
    """Copy `source` to `path`; links are copied as links."""
    if not source.exists() and not source.is_symlink():
        raise InputError(f"{source}: no such file or directory; nothing to upload")
    if not source.is_dir() or source.is_symlink():
        await _send(pod, source, path)
        return
    found: list[tuple[Path, str]] = []
    modes: list[tuple[str, int]] = []
    for directory, names, files in os.walk(source):
        here = Path(directory)
        there = os.path.normpath(os.path.join(path, here.relative_to(source)))
        await pod.make_directory(there)
        modes.append((there, stat.S_IMODE(here.stat().st_mode)))
        links = [name for name in names if (here / name).is_symlink()]
        found += [(here / name, f"{there}/{name}") for name in files + links]
    await run_limited(_send(pod, file, there) for file, there in found)
    for there, mode in reversed(modes):  # last: a directory may be read-only
        await pod.make_directory(there, mode)


async def _send(pod: Pod, source: Path, path: str) -> None:
    info = source.lstat()
    if stat.S_ISLNK(info.st_mode):
        await pod.symlink(os.readlink(source), path)
        return
    if not stat.S_ISREG(info.st_mode):
        raise InputError(f"{source}: only files, directories and links can be uploaded")
    mode, first = stat.S_IMODE(info.st_mode), True
    with open(source, "rb") as file:
        part = await asyncio.to_thread(file.read, PART_SIZE)
        while first or part:
            following = await asyncio.to_thread(file.read, PART_SIZE) if len(part) == PART_SIZE else b""
            await pod.write(path, part, mode=None if following else mode, append=not first)
            part, first = following, False


async def download(pod: Pod, path: str, target: Path) -> None:
    """Copy `path` of the pod to `target`, which must not exist; only files, directories and links are copied."""
    if target.exists() or target.is_symlink():
        raise InputError(f"{target}: already exists; expected a path that does not exist")
    info = await pod.stat(path)
    if info.kind == "other":
        raise PodError(f"pod {pod.id}: {path} is neither a file nor a directory nor a link")
    try:
        await _fetch(pod, info, path, target)
    except BaseException as error:
        await asyncio.to_thread(remove_tree, target)  # a partial tree is useless, and may be hard to remove by hand
        if isinstance(error, OSError):  # a name too long for this file system, or a duplicate name
            raise PodError(f"pod {pod.id}: {path} cannot be copied to {target}: {error.strerror}") from error
        raise


async def _fetch(pod: Pod, info: FileInfo, path: str, target: Path) -> None:
    waiting = [(info, path, target)]
    above = len(target.parts)
    modes: list[tuple[Path, int]] = []
    files: list[tuple[str, Path, FileInfo]] = []
    budget, seen = _Budget(pod.id), 0
    while waiting:
        info, path, target = waiting.pop()
        seen += 1
        if seen > MAX_FILES:
            raise PodError(f"pod {pod.id}: a download is limited to {MAX_FILES:,} files")
        if len(target.parts) - above > MAX_DEPTH:
            raise PodError(f"pod {pod.id}: a download is limited to {MAX_DEPTH} nested directories")
        if info.kind == "directory":
            target.mkdir(mode=0o700)
            modes.append((target, info.mode & 0o777 | 0o700))  # no set-id bits, and removable by us
            for below in await pod.list(path):
                if below.name in ("", ".", "..") or "/" in below.name or "\0" in below.name:
                    raise PodError(f"pod {pod.id}: a file in {path} has the invalid name {below.name!r}")
                waiting.append((below, f"{path}/{below.name}", target / below.name))
        elif info.kind == "symlink":
            os.symlink(info.target, target)
        elif info.kind == "file":
            budget.take(info.size, path)
            files.append((path, target, info))
    await run_limited(_receive(pod, *file, budget) for file in files)
    for directory, mode in modes:
        directory.chmod(mode)


class _Budget:
    """The bytes that a download may still take."""

    def __init__(self, pod: str) -> None:
        self.pod, self.left = pod, MAX_BYTES

    def take(self, size: int, path: str) -> None:
        self.left -= size
        if self.left < 0 or size < 0:
            raise PodError(f"pod {self.pod}: {path} exceeds the limit of {MAX_BYTES:,} bytes of a download")


async def _receive(pod: Pod, path: str, target: Path, info: FileInfo, budget: _Budget) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(target, flags, 0o600), "wb") as file:
        at = 0
        while True:
            part = await pod.read(path, offset=at, length=PART_SIZE)
            if at + len(part) > info.size:  # it grew since it was listed
                budget.take(at + len(part) - max(at, info.size), path)
            at += len(part)
            if part.count(0) == len(part):
                file.truncate(at)  # keep holes sparse
                file.seek(at)
            else:
                file.write(part)
            if len(part) < PART_SIZE:
                break
        os.fchmod(file.fileno(), info.mode & 0o777)  # no set-id bits from the pod
