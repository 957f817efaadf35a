"""Documents that hold passages of protected text (benchmarks, held-out repositories), found by runs of n words.

The rule is GPT-3's (arXiv:2005.14165, appendix C): a run of 13 words in common is a leak, unless the same run occurs in
more than ten places. Here the places are repositories, and two kinds of text that all code shares are not looked at:
a licence at the head of a file, and lines of imports. Words carry no punctuation, so 13 of them are about three lines.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from etude.data.text_hash import Hashes, Words, hash_ngrams, split_words
from etude.data.worker_pool import ALONE, Crew

_TABLE_BITS = 24  # 16 MiB, one byte a slot: most runs of words are dismissed by one look into it

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
    """`document` has `share` of its n-grams in common with protected text; `ngram` is the first, `source` its owner."""

    document: int
    source: str
    ngram: str
    matches: int
    share: float


@dataclass(frozen=True)
class Overlap:
    """What one document shares with the protected set: for each n-gram in common, its number there."""

    document: int
    repository: str
    protected: npt.NDArray[np.int64]
    ngrams: int


@dataclass(frozen=True)
class Index:
    """Hashes in order, and two tables of the slots that their first and their next bits take."""

    hashes: Hashes
    tables: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, hashes: Hashes) -> "Index":
        tables = np.zeros((2, 1 << _TABLE_BITS), dtype=np.bool_)
        for number in (0, 1):
            tables[number, _slots(hashes, number)] = True
        return cls(hashes, tables)

    def save(self, directory: Path) -> None:
        np.save(directory / "hashes.npy", self.hashes)
        np.save(directory / "tables.npy", self.tables)

    @classmethod
    def open(cls, directory: Path) -> "Index":
        """Mapped, so that all processes hold it in memory once."""
        hashes, tables = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in ("hashes", "tables"))
        return cls(np.asarray(hashes), np.asarray(tables))

    def find(self, ngrams: Hashes) -> npt.NDArray[np.int64]:
        """For each n-gram its number among the hashes, or -1."""
        numbers = np.full(len(ngrams), -1, dtype=np.int64)
        likely = np.flatnonzero(self.tables[0][_slots(ngrams, 0)])
        likely = likely[self.tables[1][_slots(ngrams[likely], 1)]]  # a search costs more than a second look
        places = np.searchsorted(self.hashes, ngrams[likely])
        places[places == len(self.hashes)] = 0
        hits = self.hashes[places] == ngrams[likely] if len(self.hashes) else np.zeros(0, dtype=np.bool_)
        numbers[likely[hits]] = places[hits]
        return numbers


class Protected:
    """The n-grams of the protected texts, as a sorted array; each belongs to the first text that has it."""

    def __init__(self, texts: Iterable[tuple[str, str]], n: int, crew: Crew = ALONE) -> None:
        self.n = n
        self.names: list[str] = []

        def named() -> Iterator[str]:
            for name, text in texts:
                self.names.append(name)
                yield text

        hashes = list(chain.from_iterable(crew.map(partial(_sets_of_runs, n), named(), size=len)))
        owners = [np.full(len(found), number, dtype=np.int32) for number, found in enumerate(hashes)]
        self.too_short = sum(not len(found) for found in hashes)
        merged = np.concatenate(hashes) if hashes else np.empty(0, dtype=np.uint64)
        self.hashes, first = np.unique(merged, return_index=True)
        self.owners = np.concatenate(owners)[first] if owners else np.empty(0, dtype=np.int32)
        self.index = Index.of(self.hashes)

    def __len__(self) -> int:
        return len(self.hashes)


def find_contaminated(
    protected: Protected,
    documents: Sequence[tuple[int, str]],
    text_of: Callable[[int], str],
    *,
    share: float = 0.0,
    boilerplate: int = 10,
    progress: Callable[[int], None] = lambda done: None,
    crew: Crew = ALONE,
) -> list[Contamination]:
    """Those of `documents` (number, repository) of which more than `share` is protected.

    An n-gram found in more than `boilerplate` of their repositories is common property and counts for nothing.
    """

    def with_the_index() -> Callable[[list[str]], _Shared]:
        protected.index.save(crew.directory)
        return partial(_look_up_elsewhere, crew.directory, protected.n)

    texts = (text_of(document) for document, _ in documents)
    looked_up = crew.map(partial(_look_up, protected.index, protected.n), texts, size=len, elsewhere=with_the_index)
    overlaps = []
    for done, (numbers, ngrams) in enumerate(chain.from_iterable(looked_up)):
        if len(numbers):
            overlaps.append(Overlap(*documents[done], numbers, ngrams))
        progress(done + 1)
    common = _repositories_with(overlaps, len(protected)) > boilerplate
    found = []
    for overlap in overlaps:
        telling = overlap.protected[~common[overlap.protected]]
        if len(telling) > share * overlap.ngrams:
            found.append(_describe(protected, overlap, telling, text_of(overlap.document)))
    return found


def informative_words(text: str) -> Words:
    """The words of a text without its licence header and its imports, which are blanked to keep places."""
    data = text.lower().encode()
    head = _HEAD_COMMENT.match(data)
    if head and _LICENCE_WORDS.search(head[1]):
        data = b" " * head.end() + data[head.end() :]
    return split_words(_IMPORTS.sub(lambda found: b" " * len(found[0]), data))


def _sets_of_runs(n: int, texts: Sequence[str]) -> list[Hashes]:
    return [np.unique(hash_ngrams(informative_words(text).hashes, n)) for text in texts]


_Shared = list[tuple[npt.NDArray[np.int64], int]]  # for each text: the protected n-grams in it, of how many


def _look_up(index: Index, n: int, texts: Sequence[str]) -> _Shared:
    found = []
    for text in texts:
        ngrams = hash_ngrams(informative_words(text).hashes, n)
        numbers = index.find(ngrams)
        found.append((numbers[numbers >= 0], len(ngrams)))
    return found


def _look_up_elsewhere(directory: Path, n: int, texts: Sequence[str]) -> _Shared:
    return _look_up(_open_index(directory), n, texts)


@lru_cache(maxsize=1)
def _open_index(directory: Path) -> Index:
    """For the life of a worker: a corpus has one set of protected texts."""
    return Index.open(directory)


def _repositories_with(overlaps: Sequence[Overlap], size: int) -> npt.NDArray[np.int32]:
    """In how many repositories each protected n-gram occurs."""
    counts = np.zeros(size, dtype=np.int32)
    by_repository: dict[str, list[npt.NDArray[np.int64]]] = {}
    for overlap in overlaps:
        by_repository.setdefault(overlap.repository, []).append(overlap.protected)
    for numbers in by_repository.values():
        counts[np.unique(np.concatenate(numbers))] += 1
    return counts


def _describe(protected: Protected, overlap: Overlap, telling: npt.NDArray[np.int64], text: str) -> Contamination:
    words = informative_words(text)
    first = int(telling[0])
    place = int(np.flatnonzero(hash_ngrams(words.hashes, protected.n) == protected.hashes[first])[0])
    return Contamination(
        document=overlap.document,
        source=protected.names[int(protected.owners[first])],
        ngram=words.spell(place, protected.n),
        matches=len(telling),
        share=round(len(telling) / overlap.ngrams, 6),
    )


def _slots(hashes: Hashes, table: int) -> npt.NDArray[np.int64]:
    shifted = hashes << np.uint64(table * _TABLE_BITS)
    return (shifted >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
