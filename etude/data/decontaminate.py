"""Find documents that contain passages of protected text (benchmarks, held-out repositories), by word n-grams.

The rule is GPT-3's (arXiv:2005.14165, appendix C): a common 13-gram is a leak, unless it occurs in more than ten
documents. Here repositories are counted instead of documents, and two kinds of text that all code shares are ignored:
licence headers and import lines. Words carry no punctuation, so 13 of them are about three lines of code.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.data.text_hash import HashedWords, Hashes, hash_ngrams, split_words
from etude.data.worker_pool import IN_PROCESS, WorkerPool

_TABLE_BITS = 24  # 16 MiB, one byte per slot: one look-up dismisses most n-grams

_HEAD_COMMENT = re.compile(
    rb"\A(?:#!.*\n)?\s*"
    rb"((?:[ \t]*(?:#|//|;|--|%).*\n)+|/\*(?s:.*?)\*/|<!--(?s:.*?)-->|\"\"\"(?s:.*?)\"\"\")"
)
_LICENCE_WORDS = re.compile(rb"licen[cs]e|copyright|spdx-|all rights reserved")
_IMPORTS = re.compile(
    rb"^[ \t]*(?:from[ \t]+[\w.]+[ \t]+import[ \t]*\([^)]*\)"
    rb"|(?:import[ \t]|from[ \t]+[\w.]+[ \t]+import\b|#[ \t]*include\b|package[ \t]+[\w.]+;?[ \t]*$"
    rb"|using[ \t]+[\w.:]+[ \t]*;|use[ \t]+\w+(?:::|;))[^\n]*)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Contamination:
    """`document` shares `matches` n-grams (`share` of all) with protected text; `ngram` of `source` comes first."""

    document: int
    source: str
    ngram: str
    matches: int
    share: float


@dataclass(frozen=True)
class Overlap:
    """Numbers of the protected n-grams that occur in one document, and the count of all its n-grams."""

    document: int
    repository: str
    protected: npt.NDArray[np.int64]
    ngrams: int


@dataclass(frozen=True)
class NgramIndex:
    """Sorted hashes, and two tables of the slots taken by their first and their next bits."""

    hashes: Hashes
    tables: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, hashes: Hashes) -> "NgramIndex":
        tables = np.zeros((2, 1 << _TABLE_BITS), dtype=np.bool_)
        for number in (0, 1):
            tables[number, _slots(hashes, number)] = True
        return cls(hashes, tables)

    def save(self, directory: Path) -> None:
        np.save(directory / "hashes.npy", self.hashes)
        np.save(directory / "tables.npy", self.tables)

    @classmethod
    def open(cls, directory: Path) -> "NgramIndex":
        """Map an index into memory, so that all processes share it."""
        hashes, tables = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("hashes", "tables"))
        return cls(np.asarray(hashes), np.asarray(tables))

    def find(self, ngrams: Hashes) -> npt.NDArray[np.int64]:
        """Return the number of each n-gram among the hashes, or -1."""
        numbers = np.full(len(ngrams), -1, dtype=np.int64)
        likely = np.flatnonzero(self.tables[0][_slots(ngrams, 0)])
        likely = likely[self.tables[1][_slots(ngrams[likely], 1)]]  # a second look-up is cheaper than a search
        positions = np.searchsorted(self.hashes, ngrams[likely])
        positions[positions == len(self.hashes)] = 0
        hits = self.hashes[positions] == ngrams[likely] if len(self.hashes) else np.zeros(0, dtype=np.bool_)
        numbers[likely[hits]] = positions[hits]
        return numbers


class ProtectedNgrams:
    """The n-grams of the protected texts as a sorted array; each belongs to the first text that has it."""

    def __init__(self, texts: Iterable[tuple[str, str]], n: int, pool: WorkerPool = IN_PROCESS) -> None:
        self.n = n
        self.names: list[str] = []

        def record_names() -> Iterator[str]:
            for name, text in texts:
                self.names.append(name)
                yield text

        hashes = list(chain.from_iterable(pool.map(partial(_ngram_sets, n), record_names(), size=len)))
        owners = [np.full(len(found), number, dtype=np.int32) for number, found in enumerate(hashes)]
        self.too_short = sum(not len(found) for found in hashes)
        merged = np.concatenate(hashes) if hashes else np.empty(0, dtype=np.uint64)
        self.hashes, first = np.unique(merged, return_index=True)
        self.owners = np.concatenate(owners)[first] if owners else np.empty(0, dtype=np.int32)
        self.index = NgramIndex.of(self.hashes)

    def __len__(self) -> int:
        return len(self.hashes)


def find_contaminated(
    protected: ProtectedNgrams,
    documents: Sequence[tuple[int, str]],
    text_of: Callable[[int], str],
    *,
    max_share: float = 0.0,
    boilerplate: int = 10,
    progress: Callable[[int], None] = lambda done: None,
    pool: WorkerPool = IN_PROCESS,
) -> list[Contamination]:
    """Return those of `documents` (number, repository) with more than `max_share` of their n-grams protected.

    N-grams that occur in more than `boilerplate` repositories are ignored.
    """

    def make_worker_function() -> Callable[[list[str]], _Matches]:
        protected.index.save(pool.directory)
        return partial(_look_up_in_worker, pool.directory, protected.n)

    texts = (text_of(document) for document, _ in documents)
    look_up = partial(_look_up, protected.index, protected.n)
    looked_up = pool.map(look_up, texts, size=len, make_worker_function=make_worker_function)
    overlaps = []
    for done, (numbers, ngrams) in enumerate(chain.from_iterable(looked_up)):
        if len(numbers):
            overlaps.append(Overlap(*documents[done], numbers, ngrams))
        progress(done + 1)
    common = _count_repositories(overlaps, len(protected)) > boilerplate
    found = []
    for overlap in overlaps:
        matches = overlap.protected[~common[overlap.protected]]
        if len(matches) > max_share * overlap.ngrams:
            found.append(_describe(protected, overlap, matches, text_of(overlap.document)))
    return found


def informative_words(text: str) -> HashedWords:
    """Return the words of a text without licence header and imports, which are blanked to keep the offsets."""
    data = text.lower().encode()
    head = _HEAD_COMMENT.match(data)
    if head and _LICENCE_WORDS.search(head[1]):
        data = b" " * head.end() + data[head.end() :]
    return split_words(_IMPORTS.sub(lambda found: b" " * len(found[0]), data))


def _ngram_sets(n: int, texts: Sequence[str]) -> list[Hashes]:
    return [np.unique(hash_ngrams(informative_words(text).hashes, n)) for text in texts]


_Matches = list[tuple[npt.NDArray[np.int64], int]]  # per text: its protected n-grams, and the count of all


def _look_up(index: NgramIndex, n: int, texts: Sequence[str]) -> _Matches:
    found = []
    for text in texts:
        ngrams = hash_ngrams(informative_words(text).hashes, n)
        numbers = index.find(ngrams)
        found.append((numbers[numbers >= 0], len(ngrams)))
    return found


def _look_up_in_worker(directory: Path, n: int, texts: Sequence[str]) -> _Matches:
    return _look_up(_open_index(directory), n, texts)


@lru_cache(maxsize=1)
def _open_index(directory: Path) -> NgramIndex:
    """Open the index, cached for the life of a worker: a corpus has one set of protected texts."""
    return NgramIndex.open(directory)


def _count_repositories(overlaps: Sequence[Overlap], size: int) -> npt.NDArray[np.int32]:
    """Return the number of repositories in which each protected n-gram occurs."""
    counts = np.zeros(size, dtype=np.int32)
    by_repository: dict[str, list[npt.NDArray[np.int64]]] = {}
    for overlap in overlaps:
        by_repository.setdefault(overlap.repository, []).append(overlap.protected)
    for numbers in by_repository.values():
        counts[np.unique(np.concatenate(numbers))] += 1
    return counts


def _describe(protected: ProtectedNgrams, overlap: Overlap, matches: npt.NDArray[np.int64], text: str) -> Contamination:
    words = informative_words(text)
    first = int(matches[0])
    position = int(np.flatnonzero(hash_ngrams(words.hashes, protected.n) == protected.hashes[first])[0])
    return Contamination(
        document=overlap.document,
        source=protected.names[int(protected.owners[first])],
        ngram=words.join(position, protected.n),
        matches=len(matches),
        share=round(len(matches) / overlap.ngrams, 6),
    )


def _slots(hashes: Hashes, table: int) -> npt.NDArray[np.int64]:
    shifted = hashes << np.uint64(table * _TABLE_BITS)
    return (shifted >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
