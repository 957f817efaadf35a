"""Documents that hold passages of protected text (benchmarks, held-out repositories), found by runs of n words.

The rule is GPT-3's (arXiv:2005.14165, appendix C): a run of 13 words in common is a leak, unless the same run occurs in
more than ten places. Here the places are repositories, and two kinds of text that all code shares are not looked at:
a licence at the head of a file, and lines of imports. Words carry no punctuation, so 13 of them are about three lines.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from etude.data.words import Hashes, Words, hash_ngrams, split_words

_TABLE_BITS = 24  # 16 MiB, one byte a slot: most words of the corpus are dismissed by one look into it

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


class Protected:
    """The n-grams of the protected texts, as a sorted array; each belongs to the first text that has it."""

    def __init__(self, texts: Iterable[tuple[str, str]], n: int) -> None:
        self.n = n
        self.names: list[str] = []
        self.too_short = 0
        hashes, owners = [], []
        for name, text in texts:
            found = hash_ngrams(informative_words(text).hashes, n)
            self.too_short += not len(found)
            hashes.append(np.unique(found))
            owners.append(np.full(len(hashes[-1]), len(self.names), dtype=np.int32))
            self.names.append(name)
        merged = np.concatenate(hashes) if hashes else np.empty(0, dtype=np.uint64)
        self.hashes, first = np.unique(merged, return_index=True)
        self.owners = np.concatenate(owners)[first] if owners else np.empty(0, dtype=np.int32)
        self._table = np.zeros(1 << _TABLE_BITS, dtype=np.bool_)
        self._table[_slots(self.hashes)] = True

    def __len__(self) -> int:
        return len(self.hashes)

    def find(self, ngrams: Hashes) -> npt.NDArray[np.int64]:
        """For each n-gram its number in the protected set, or -1."""
        numbers = np.full(len(ngrams), -1, dtype=np.int64)
        likely = np.flatnonzero(self._table[_slots(ngrams)])
        places = np.searchsorted(self.hashes, ngrams[likely])
        places[places == len(self.hashes)] = 0
        hits = self.hashes[places] == ngrams[likely] if len(self.hashes) else np.zeros(0, dtype=np.bool_)
        numbers[likely[hits]] = places[hits]
        return numbers


def find_contaminated(
    protected: Protected,
    documents: Sequence[tuple[int, str]],
    text_of: Callable[[int], str],
    *,
    share: float = 0.0,
    boilerplate: int = 10,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Contamination]:
    """Those of `documents` (number, repository) of which more than `share` is protected.

    An n-gram found in more than `boilerplate` of their repositories is common property and counts for nothing.
    """
    overlaps = []
    for done, (document, repository) in enumerate(documents, 1):
        ngrams = hash_ngrams(informative_words(text_of(document)).hashes, protected.n)
        numbers = protected.find(ngrams)
        if len(shared := numbers[numbers >= 0]):
            overlaps.append(Overlap(document, repository, shared, len(ngrams)))
        progress(done)
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


def _slots(hashes: Hashes) -> npt.NDArray[np.int64]:
    return (hashes >> np.uint64(64 - _TABLE_BITS)).astype(np.int64)
