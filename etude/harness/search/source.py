"""Where the files that are searched come from: a listing that is cheap to ask for, and contents of what changed.

Searching happens outside the pod, so everything a source gives is data from a stranger: paths are names to show and to
compare, never opened here; sizes are bounded; a digest is believed only for the source it came from.
"""

import asyncio
import fnmatch
import os
import stat
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class FileEntry:
    """A file below the workspace: its path from there with `/`, its bytes, and what changes when its content does."""

    path: str
    size: int
    digest: str  # any string: a hash of the content, or size, inode and time of change where hashing costs too much


class FileSource(Protocol):
    """The files of one workspace. The same object each time: what was fetched from it is remembered by it."""

    async def listing(self) -> Sequence[FileEntry]:
        """Every regular file that may be searched, in any order; directories such as .git need not be in it."""
        ...

    async def contents(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        """The bytes of these files; one that is gone or cannot be read is left out."""
        ...


# Nobody's own code, and often more of it than of that.
_FOREIGN = """
.git .hg .svn .venv venv node_modules bower_components site-packages __pycache__ .mypy_cache .ruff_cache .pytest_cache
.hypothesis .tox .nox .eggs .idea .gradle
"""
# Not written by people, or not text.
_UNREADABLE = """
.lock .min.js .min.css .map .svg .ipynb .csv .tsv .jsonl .parquet .png .jpg .jpeg .gif .webp .ico .pdf .zip .gz .xz .zst
.bz2 .tar .whl .jar .so .o .a .dll .exe .bin .pyc .pyo .class .wasm .woff .woff2 .ttf .otf .mp3 .mp4 .safetensors .gguf
.onnx .pt .npz .npy .pkl .db .sqlite package-lock.json pnpm-lock.yaml go.sum
"""
FOREIGN = frozenset(_FOREIGN.split())
UNREADABLE = tuple(_UNREADABLE.split())


@dataclass(frozen=True)
class SearchLimits:
    """How much of a workspace is searched, and how long a search may wait for the embedding model."""

    files: int = 20_000
    file_bytes: int = 512 << 10
    total_bytes: int = 64 << 20
    embedded_chunks: int = 60_000  # the rest is found by its words only
    patience_s: float = 30.0  # the first search of a large repository answers with what is embedded by then


@dataclass(frozen=True)
class Selection:
    """What will be searched, by path, and how many files were left out because there was too much."""

    entries: Mapping[str, FileEntry]
    too_large: int = 0
    too_many: int = 0


def select(listing: Iterable[FileEntry], limits: SearchLimits) -> Selection:
    """The files worth searching, in the order of their paths, within the limits."""
    chosen: dict[str, FileEntry] = {}
    too_large = too_many = total = 0
    for entry in sorted(listing, key=lambda entry: entry.path):
        if entry.size <= 0 or not is_readable(entry.path):
            continue
        if entry.size > limits.file_bytes:
            too_large += 1
        elif len(chosen) >= limits.files or total + entry.size > limits.total_bytes:
            too_many += 1
        else:
            chosen[entry.path] = entry
            total += entry.size
    return Selection(chosen, too_large, too_many)


def is_readable(path: str) -> bool:
    """Whether a file is likely to be text that somebody of this project wrote, by its name."""
    *directories, name = path.split("/")
    return bool(name) and not FOREIGN.intersection(directories) and not name.lower().endswith(UNREADABLE)


def is_within(path: str, directories: Collection[str]) -> bool:
    """Whether a path is one of these, or below one; each may be a pattern such as `src/*/tests`. None means all."""
    if not directories:
        return True
    parts = path.split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    for directory in directories:
        wanted = directory.removeprefix("./").removesuffix("/**").strip("/")
        if wanted in ("", ".", "*", "**") or any(fnmatch.fnmatchcase(name, wanted) for name in above):
            return True
    return False


class LocalFiles:
    """The files of a directory of this machine; links are not followed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def listing(self) -> Sequence[FileEntry]:
        return await asyncio.to_thread(self._walk)

    async def contents(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        return await asyncio.to_thread(self._read, paths)

    def _walk(self) -> list[FileEntry]:
        entries: list[FileEntry] = []
        for directory, below, names in os.walk(self.root):
            below[:] = sorted(name for name in below if name not in FOREIGN)
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
                continue  # gone since the listing, as the contract allows
        return found
