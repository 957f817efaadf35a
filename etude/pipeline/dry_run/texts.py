"""How much text a corpus would be made of, and a sample of it, from names and sizes: most files are never read.

The sample is spread evenly over the files, whatever their number: every n-th is kept, and when there are too many,
every other one is dropped and n doubles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from etude.chat.tokenizer import Tokenizer
from etude.data.documents import ARCHIVES, ROWS, File, read_source
from etude.data.filters import PATH_FILTERS, Filters
from etude.data.ingest import IngestResult, read_rendered_chats
from etude.data.licences import is_licence
from etude.data.sources import locate_source, sample_evenly
from etude.errors import InputError

SAMPLE_FILES = 128  # at most; and at least half as many, where there are so many
SAMPLE_BYTES = 1 << 20
SAMPLE_ROWS = 64
COMPRESSED = (".gz", ".zst", ".tgz", ".bz2", ".xz", ".zip", ".whl", ".parquet")
UNPACKED = 4  # times the size of compressed source text, about


@dataclass(frozen=True)
class Text:
    """What would be read, in files and bytes, and some of it."""

    files: int = 0
    bytes: int = 0
    repositories: frozenset[str] = frozenset()
    sample: tuple[File, ...] = ()
    closed: bool = False  # some of it lies in archives or rows, and is known by its size alone

    def __add__(self, other: Text) -> Text:
        return Text(
            self.files + other.files,
            self.bytes + other.bytes,
            self.repositories | other.repositories,
            self.sample + other.sample,
            self.closed or other.closed,
        )


def survey(source: str, filters: Filters) -> Text:
    """The files of one source that the filters on names and sizes let pass."""
    root = locate_source(source)
    if root.is_file() and root.name.endswith((*ARCHIVES, *ROWS)):
        first = tuple(_held(islice(_passing(read_source(source), filters), SAMPLE_FILES)))
        size = root.stat().st_size * (UNPACKED if root.name.endswith(COMPRESSED) else 1)
        return Text(1, size, frozenset(file.repository for file in first), small(first), closed=True)
    files = size = 0
    repositories = set()
    kept: list[File] = []
    every = 1
    for file in read_source(source):
        repositories.add(file.repository)
        if not _passes(file, filters):
            continue
        if files % every == 0:
            kept += _held([file])
            if len(kept) > SAMPLE_FILES:
                del kept[1::2]
                every *= 2
        files += 1
        size += file.size
    if not files:
        raise InputError(f"source {source} holds no file that would be read")
    return Text(files, size, frozenset(repositories), small(kept))


def text_of(files: Sequence[Path]) -> Text:
    """Files that are read one by one, whatever they are called."""
    sizes = [file.stat().st_size for file in files]
    some = (File("", path.name, path.stat().st_size, path.read_bytes) for path in sample_evenly(files, SAMPLE_FILES))
    return Text(len(files), sum(sizes), sample=small(list(_held(some))))


def small(files: Sequence[File]) -> tuple[File, ...]:
    """The first of them, spread again if together they are too large to work on for a moment."""
    every = 1
    while len(files[::every]) > 1 and sum(file.size for file in files[::every]) > SAMPLE_BYTES:
        every *= 2
    return tuple(files[::every])


def sample_texts(files: Iterable[File]) -> list[str]:
    return [file.read().decode(errors="replace") for file in files]


def chat_sample(source: str, tokenizer: Tokenizer) -> list[IngestResult]:
    """The first conversations of a file of rows, rendered."""
    return list(islice(read_rendered_chats(source, tokenizer), SAMPLE_ROWS))


def _passing(files: Iterable[File], filters: Filters) -> Iterator[File]:
    return (file for file in files if _passes(file, filters))


def _passes(file: File, filters: Filters) -> bool:
    return not is_licence(file.path) and not any(reason(file, filters) for reason in PATH_FILTERS)


def _held(files: Iterable[File]) -> Iterator[File]:
    """With their content: a source need not be open for it to be read again."""
    for file in files:
        yield replace(file, read=partial(bytes, file.read()))
