"""Survey text sources: their amount from names and sizes, and their tokens predicted from the first files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from etude.chat.tokenizer import Tokenizer
from etude.data.conversations import read_conversations
from etude.data.documents import ARCHIVES, READ_LIMITS, ROWS, File, read_source
from etude.data.filters import PATH_FILTERS, Filters
from etude.data.licences import is_licence
from etude.data.sources import locate_source
from etude.errors import InputError

SAMPLE_FILES = 64  # that are read
BYTES_PER_TOKEN = 3.0  # of code, if there is no tokenizer yet
COMPRESSED = (".gz", ".zst", ".tgz", ".bz2", ".xz", ".zip", ".whl", ".parquet")
UNPACKED_RATIO = 4  # approximate size of source text relative to its compressed form


@dataclass(frozen=True)
class SourceSurvey:
    """Files and bytes that would be read, and the tokens predicted for them."""

    files: int = 0
    bytes: int = 0
    tokens: float = 0.0
    repositories: frozenset[str] = frozenset()
    has_archives: bool = False  # some of it is in archives or rows, of which only the size is known

    def __add__(self, other: SourceSurvey) -> SourceSurvey:
        return SourceSurvey(
            self.files + other.files,
            self.bytes + other.bytes,
            self.tokens + other.tokens,
            self.repositories | other.repositories,
            self.has_archives or other.has_archives,
        )


def survey_source(source: str, filters: Filters, tokenizer: Tokenizer | None) -> SourceSurvey:
    """Survey the files of one source that pass the filters on names and sizes."""
    root = locate_source(source)
    if root.is_file() and root.name.endswith((*ARCHIVES, *ROWS)):
        first = list(islice((file for file in read_source(source) if _passes(file, filters)), SAMPLE_FILES))
        size = root.stat().st_size * (UNPACKED_RATIO if root.name.endswith(COMPRESSED) else 1)
        repositories = frozenset(file.repository for file in first)
        return SourceSurvey(1, size, size / BYTES_PER_TOKEN, repositories, has_archives=True)
    names: set[str] = set()
    texts: list[str] = []
    passing = size = 0
    for file in read_source(source):
        names.add(file.repository)
        if _passes(file, filters):
            passing, size = passing + 1, size + file.size
            if tokenizer is not None and len(texts) < SAMPLE_FILES:
                texts.append(file.read().decode(errors="replace"))
    if not passing:
        raise InputError(f"source {source} holds no file that would be read")
    return SourceSurvey(passing, size, size / bytes_per_token(texts, tokenizer), frozenset(names))


def survey_files(files: Sequence[Path], tokenizer: Tokenizer | None = None) -> SourceSurvey:
    """Survey files that are read one by one, whatever their names."""
    size = sum(file.stat().st_size for file in files)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files[:SAMPLE_FILES]] if tokenizer else []
    return SourceSurvey(len(files), size, size / bytes_per_token(texts, tokenizer))


def survey_chats(source: str) -> SourceSurvey:
    """Survey a file of conversations."""
    if next(read_conversations(source, READ_LIMITS), None) is None:
        raise InputError(f"source {source} holds no conversation")
    size = os.path.getsize(source) * (UNPACKED_RATIO if source.endswith(COMPRESSED) else 1)
    return SourceSurvey(1, size, size / BYTES_PER_TOKEN, has_archives=True)


def bytes_per_token(texts: Sequence[str], tokenizer: Tokenizer | None) -> float:
    """Return the mean bytes of a token of these texts; that of code in general if there is no tokenizer yet."""
    if tokenizer is None or not any(texts):
        return BYTES_PER_TOKEN
    return sum(len(text.encode()) for text in texts) / sum(map(len, tokenizer.encode_batch(list(texts))))


def _passes(file: File, filters: Filters) -> bool:
    return not is_licence(file.path) and not any(reason(file, filters) for reason in PATH_FILTERS)
