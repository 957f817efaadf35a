"""The files to search: a cheap listing, and the contents of changed files.

Search runs outside the pod, so data from a source is untrusted: paths are only shown and compared, never opened; sizes
are bounded; a digest is trusted only for the source that gave it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from etude.globs import Globs


@dataclass(frozen=True)
class FileEntry:
    """A file of the workspace: its relative path with `/`, its size, and a digest that changes with its content."""

    path: str
    size: int
    digest: str  # any string: a content hash, or size, inode and mtime where hashing is too expensive


class FileSource(Protocol):
    """The files of one workspace. Use the same object each time: the searcher caches by object."""

    async def listing(self) -> Sequence[FileEntry]:
        """Return every regular file that may be searched, in any order; directories such as .git may be left out."""
        ...

    async def contents(self, paths: Sequence[str]) -> Mapping[str, bytes]:
        """Return the content of these files; missing or unreadable ones are left out."""
        ...


# Third-party code and caches, often larger than the project itself.
_SKIPPED_DIRECTORIES = """
.git .hg .svn .venv venv node_modules bower_components site-packages __pycache__ .mypy_cache .ruff_cache .pytest_cache
.hypothesis .tox .nox .eggs .idea .gradle
"""
# Generated files, or not text.
_SKIPPED_SUFFIXES = """
.lock .min.js .min.css .map .svg .ipynb .csv .tsv .jsonl .parquet .png .jpg .jpeg .gif .webp .ico .pdf .zip .gz .xz .zst
.bz2 .tar .whl .jar .so .o .a .dll .exe .bin .pyc .pyo .class .wasm .woff .woff2 .ttf .otf .mp3 .mp4 .safetensors .gguf
.onnx .pt .npz .npy .pkl .db .sqlite package-lock.json pnpm-lock.yaml go.sum
"""
SKIPPED_DIRECTORIES = frozenset(_SKIPPED_DIRECTORIES.split())
SKIPPED_SUFFIXES = tuple(_SKIPPED_SUFFIXES.split())


@dataclass(frozen=True)
class SearchLimits:
    """How much of a workspace is searched, and how long a search waits for the embedding model."""

    files: int = 20_000
    file_bytes: int = 512 << 10
    total_bytes: int = 64 << 20
    embedded_chunks: int = 60_000  # the rest is searched by words only
    max_wait_s: float = 30.0  # then the first search of a large repository uses what is embedded so far


@dataclass(frozen=True)
class Selection:
    """The files to search by path, and how many were left out by the limits."""

    entries: Mapping[str, FileEntry]
    too_large: int = 0
    too_many: int = 0


def select(listing: Iterable[FileEntry], limits: SearchLimits) -> Selection:
    """Select the files to search, ordered by path, within the limits."""
    chosen: dict[str, FileEntry] = {}
    too_large = too_many = total = 0
    for entry in sorted(listing, key=lambda entry: entry.path):
        if entry.size <= 0 or not is_searchable(entry.path):
            continue
        if entry.size > limits.file_bytes:
            too_large += 1
        elif len(chosen) >= limits.files or total + entry.size > limits.total_bytes:
            too_many += 1
        else:
            chosen[entry.path] = entry
            total += entry.size
    return Selection(chosen, too_large, too_many)


def is_searchable(path: str) -> bool:
    """Return whether a file name suggests text written for this project."""
    *directories, name = path.split("/")
    return (
        bool(name) and not SKIPPED_DIRECTORIES.intersection(directories) and not name.lower().endswith(SKIPPED_SUFFIXES)
    )


def within(directories: Collection[str]) -> Callable[[str], bool]:
    """Return a predicate: whether a path is one of these or below one (or a glob such as `src/*/tests`).

    With no directories, all paths are.
    """
    wanted = [directory.removeprefix("./").strip("/") for directory in directories]
    if not wanted or not {"", "."}.isdisjoint(wanted):
        return lambda path: True
    return Globs(f"/{each}" for each in wanted).matches
