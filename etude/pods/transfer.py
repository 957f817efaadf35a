"""Copying trees into and out of a pod, over the file calls every agent has: no tar, no program inside the pod.

What comes out of a pod is not trusted: names are checked, directories are made by us and only by us, files are
created and never followed.
"""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.pods.pod import Pod, PodError

IN_FLIGHT = 32  # calls on their way at once; a call is mostly waiting


async def upload(pod: Pod, link: Callable[[str, str], Awaitable[None]], source: Path, path: str) -> None:
    """Copy `source` to `path`; `link(path, target)` makes a symbolic link in the pod."""
    if not source.exists() and not source.is_symlink():
        raise InputError(f"{source}: there is nothing to upload")
    gate = _Gate()
    if not source.is_dir() or source.is_symlink():
        await _send(pod, link, source, path)
        return
    for directory, names, files in os.walk(source):
        here = Path(directory)
        there = os.path.normpath(os.path.join(path, here.relative_to(source)))
        await pod.make_directory(there, stat.S_IMODE(here.stat().st_mode))
        links = [name for name in names if (here / name).is_symlink()]
        for name in files + links:
            await gate.add(_send(pod, link, here / name, f"{there}/{name}"))
    await gate.wait()


async def _send(pod: Pod, link: Callable[[str, str], Awaitable[None]], source: Path, path: str) -> None:
    info = source.lstat()
    if stat.S_ISLNK(info.st_mode):
        await link(path, os.readlink(source))
    elif stat.S_ISREG(info.st_mode):
        await pod.write(path, await asyncio.to_thread(source.read_bytes), mode=stat.S_IMODE(info.st_mode))
    else:
        raise InputError(f"{source}: only files, directories and links can be uploaded")


async def download(pod: Pod, path: str, target: Path) -> None:
    """Copy `path` of the pod to `target`, which must not exist."""
    if target.exists() or target.is_symlink():
        raise InputError(f"{target}: is there already; name a path that is not")
    gate = _Gate()
    await _fetch(pod, path, target, gate)
    await gate.wait()


async def _fetch(pod: Pod, path: str, target: Path, gate: "_Gate") -> None:
    info = await pod.stat(path)
    waiting = [(info, path, target)]
    while waiting:
        info, path, target = waiting.pop()
        if info.kind == "directory":
            target.mkdir()
            for below in await pod.list(path):
                if below.name in ("", ".", "..") or "/" in below.name or "\0" in below.name:
                    raise PodError(f"pod {pod.id}: a file in {path} has the impossible name {below.name!r}")
                waiting.append((below, f"{path}/{below.name}", target / below.name))
        elif info.kind == "symlink":
            os.symlink(info.target, target)
        elif info.kind == "file":
            await gate.add(_receive(pod, path, target, info.mode))


async def _receive(pod: Pod, path: str, target: Path, mode: int) -> None:
    data = await pod.read(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(target, flags, mode & 0o777), "wb") as file:  # no setuid bits from inside
        file.write(data)


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

    async def _some(self) -> None:
        done, self.running = await asyncio.wait(self.running, return_when=asyncio.FIRST_COMPLETED)
        try:
            for task in done:
                task.result()
        except BaseException:
            for task in self.running:
                task.cancel()
            raise
