"""The files of a local directory as the source of a search: for benchmarks and tests; sessions search a pod."""

import asyncio
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.harness.search.source import SKIPPED_DIRECTORIES, FileEntry


class LocalFiles:
    """The files of a local directory; links are not followed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def listing(self) -> Sequence[FileEntry]:
        return await asyncio.to_thread(self._walk)

    async def contents(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        return await asyncio.to_thread(self._read, paths)

    def _walk(self) -> list[FileEntry]:
        entries: list[FileEntry] = []
        for directory, below, names in os.walk(self.root):
            below[:] = sorted(name for name in below if name not in SKIPPED_DIRECTORIES)
            for name in names:
                path = Path(directory, name)
                try:
                    info = path.lstat()
                except OSError:
                    continue
                if stat.S_ISREG(info.st_mode):
                    digest = f"{info.st_ino}-{info.st_size}-{info.st_mtime_ns}"
                    entries.append(FileEntry(path.relative_to(self.root).as_posix(), info.st_size, digest))
        return entries

    def _read(self, paths: Sequence[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for path in paths:
            try:
                found[path] = (self.root / path).read_bytes()
            except OSError:
                continue  # deleted since the listing
        return found
