"""Survey the text of a corpus: its amount from names and sizes, and a sample. Most files are never read.

The sample is spread evenly over the files: every n-th is kept, and when there are too many, every other one is dropped
and n doubles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from etude.data.documents import ARCHIVES, ROWS, File, read_source
from etude.data.filters import PATH_FILTERS, Filters
from etude.data.licences import is_licence
from etude.data.sources import locate_source, sample_evenly
from etude.errors import InputError

SAMPLE_FILES = 128  # at most; at least half as many, if there are so many
SAMPLE_BYTES = 1 << 20
COMPRESSED = (".gz", ".zst", ".tgz", ".bz2", ".xz", ".zip", ".whl", ".parquet")
UNPACKED_RATIO = 4  # approximate size of source text relative to its compressed form


@dataclass(frozen=True)
class SourceSurvey:
    """Files and bytes that would be read, and a sample of them."""

    files: int = 0
    bytes: int = 0
    repositories: frozenset[str] = frozenset()
    sample: tuple[File, ...] = ()
    has_archives: bool = False  # some of it is in archives or rows, of which only the size is known

    def __add__(self, other: SourceSurvey) -> SourceSurvey:
        return SourceSurvey(
            self.files + other.files,
            self.bytes + other.bytes,
            self.repositories | other.repositories,
            self.sample + other.sample,
            self.has_archives or other.has_archives,
        )


def survey_source(source: str, filters: Filters) -> SourceSurvey:
    """Survey the files of one source that pass the filters on names and sizes."""
    root = locate_source(source)
    if root.is_file() and root.name.endswith((*ARCHIVES, *ROWS)):
        first = tuple(
            _with_content(islice((file for file in read_source(source) if _passes(file, filters)), SAMPLE_FILES))
        )
        size = root.stat().st_size * (UNPACKED_RATIO if root.name.endswith(COMPRESSED) else 1)
        repositories = frozenset(file.repository for file in first)
        return SourceSurvey(1, size, repositories, limit_sample(first), has_archives=True)
    files = size = 0
    names = set()
    kept: list[File] = []
    every = 1
    for file in read_source(source):
        names.add(file.repository)
        if not _passes(file, filters):
            continue
        if files % every == 0:
            kept += _with_content([file])
            if len(kept) > SAMPLE_FILES:
                del kept[1::2]
                every *= 2
        files += 1
        size += file.size
    if not files:
        raise InputError(f"source {source} holds no file that would be read")
    return SourceSurvey(files, size, frozenset(names), limit_sample(kept))


def survey_files(files: Sequence[Path]) -> SourceSurvey:
    """Survey files that are read one by one, whatever their names."""
    sizes = [file.stat().st_size for file in files]
    some = (File("", path.name, path.stat().st_size, path.read_bytes) for path in sample_evenly(files, SAMPLE_FILES))
    return SourceSurvey(len(files), sum(sizes), sample=limit_sample(list(_with_content(some))))


def limit_sample(files: Sequence[File]) -> tuple[File, ...]:
    """Return every n-th file; n is the smallest power of two with which the sample stays below SAMPLE_BYTES."""
    every = 1
    while len(files[::every]) > 1 and sum(file.size for file in files[::every]) > SAMPLE_BYTES:
        every *= 2
    return tuple(files[::every])


def sample_texts(files: Iterable[File]) -> list[str]:
    return [file.read().decode(errors="replace") for file in files]


def _passes(file: File, filters: Filters) -> bool:
    return not is_licence(file.path) and not any(reason(file, filters) for reason in PATH_FILTERS)


def _with_content(files: Iterable[File]) -> Iterator[File]:
    """Read the files now, so that they can be read again after their source is closed."""
    for file in files:
        yield replace(file, read=partial(bytes, file.read()))
