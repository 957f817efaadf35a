"""Copying trees into and out of a pod, over the file calls every agent has: no tar, no program inside the pod.

What comes out of a pod is not trusted: names are checked, directories are made by us and only by us, files are
created and never followed, and there is an end to how much is taken, whatever sizes the pod claims.
"""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.pods.images.trees import MAX_DEPTH, remove_tree
from etude.pods.pod import FileInfo, Pod, PodError

IN_FLIGHT = 32  # calls on their way at once; a call is mostly waiting
PART = 1 << 20  # bytes of a file in our memory at a time
MAX_BYTES = 16 << 30  # of all files of one download
MAX_FILES = 1_000_000


async def upload(pod: Pod, link: Callable[[str, str], Awaitable[None]], source: Path, path: str) -> None:
    """Copy `source` to `path`; `link(path, target)` makes a symbolic link in the pod."""
    if not source.exists() and not source.is_symlink():
        raise InputError(f"{source}: there is nothing to upload")
    if not source.is_dir() or source.is_symlink():
        await _send(pod, link, source, path)
        return
    gate = _Gate()
    modes: list[tuple[str, int]] = []
    try:
        for directory, names, files in os.walk(source):
            here = Path(directory)
            there = os.path.normpath(os.path.join(path, here.relative_to(source)))
            await pod.make_directory(there)
            modes.append((there, stat.S_IMODE(here.stat().st_mode)))
            links = [name for name in names if (here / name).is_symlink()]
            for name in files + links:
                await gate.add(_send(pod, link, here / name, f"{there}/{name}"))
        await gate.wait()
    finally:
        await gate.stop()
    for there, mode in reversed(modes):  # last: a directory may be closed to writing
        await pod.make_directory(there, mode)


async def _send(pod: Pod, link: Callable[[str, str], Awaitable[None]], source: Path, path: str) -> None:
    info = source.lstat()
    if stat.S_ISLNK(info.st_mode):
        await link(path, os.readlink(source))
        return
    if not stat.S_ISREG(info.st_mode):
        raise InputError(f"{source}: only files, directories and links can be uploaded")
    mode, first = stat.S_IMODE(info.st_mode), True
    with open(source, "rb") as file:
        part = await asyncio.to_thread(file.read, PART)
        while first or part:
            following = await asyncio.to_thread(file.read, PART) if len(part) == PART else b""
            await pod.write(path, part, mode=None if following else mode, append=not first)
            part, first = following, False


async def download(pod: Pod, path: str, target: Path) -> None:
    """Copy `path` of the pod to `target`, which must not exist; what is no file, directory or link stays there."""
    if target.exists() or target.is_symlink():
        raise InputError(f"{target}: is there already; name a path that is not")
    info = await pod.stat(path)
    if info.kind == "other":
        raise PodError(f"pod {pod.id}: {path} is neither a file nor a directory nor a link")
    gate = _Gate()
    try:
        await _fetch(pod, info, path, target, gate)
        await gate.wait()
    except BaseException as error:
        await gate.stop()
        await asyncio.to_thread(remove_tree, target)  # a part of a tree is of no use, and may be hard to remove
        if isinstance(error, OSError):  # a name as long as ours cannot be, or one given twice
            raise PodError(f"pod {pod.id}: {path} cannot be copied to {target}: {error.strerror}") from error
        raise


async def _fetch(pod: Pod, info: FileInfo, path: str, target: Path, gate: "_Gate") -> None:
    waiting = [(info, path, target)]
    above = len(target.parts)
    modes: list[tuple[Path, int]] = []
    budget, seen = _Budget(pod.id), 0
    while waiting:
        info, path, target = waiting.pop()
        seen += 1
        if seen > MAX_FILES:
            raise PodError(f"pod {pod.id}: a download ends at {MAX_FILES:,} files")
        if len(target.parts) - above > MAX_DEPTH:
            raise PodError(f"pod {pod.id}: a download ends at {MAX_DEPTH} directories in each other")
        if info.kind == "directory":
            target.mkdir(mode=0o700)
            modes.append((target, info.mode & 0o777 | 0o700))  # no set-id bits, and we can remove it
            for below in await pod.list(path):
                if below.name in ("", ".", "..") or "/" in below.name or "\0" in below.name:
                    raise PodError(f"pod {pod.id}: a file in {path} has the impossible name {below.name!r}")
                waiting.append((below, f"{path}/{below.name}", target / below.name))
        elif info.kind == "symlink":
            os.symlink(info.target, target)
        elif info.kind == "file":
            budget.take(info.size, path)
            await gate.add(_receive(pod, path, target, info, budget))
    await gate.wait()
    for directory, mode in modes:
        directory.chmod(mode)


class _Budget:
    """What a download may still take."""

    def __init__(self, pod: str) -> None:
        self.pod, self.left = pod, MAX_BYTES

    def take(self, size: int, path: str) -> None:
        self.left -= size
        if self.left < 0 or size < 0:
            raise PodError(f"pod {self.pod}: {path} is more than is left of the {MAX_BYTES:,} bytes of a download")


async def _receive(pod: Pod, path: str, target: Path, info: FileInfo, budget: _Budget) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(target, flags, 0o600), "wb") as file:
        at = 0
        while True:
            part = await pod.read(path, offset=at, length=PART)
            if at + len(part) > info.size:  # it grew since it was listed
                budget.take(at + len(part) - max(at, info.size), path)
            at += len(part)
            if part.count(0) == len(part):
                file.truncate(at)  # a hole stays one
                file.seek(at)
            else:
                file.write(part)
            if len(part) < PART:
                break
        os.fchmod(file.fileno(), info.mode & 0o777)  # no set-id bits from inside


class _Gate:
    """A few tasks at once; the first failure stops the rest."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[Any]] = set()

    async def add(self, work: Coroutine[Any, Any, None]) -> None:
        self.running.add(asyncio.create_task(work))
        if len(self.running) >= IN_FLIGHT:
            await self._some()

    async def wait(self) -> None:
        while self.running:
            await self._some()

    async def stop(self) -> None:
        """Nothing goes on afterwards."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)

    async def _some(self) -> None:
        done, self.running = await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
