"""Search by words: BM25 over chunks, with identifiers taken apart as people read them.

Word counts belong to a file and are made once; scores are summed over any set of files, so an index that changes
needs no rebuilding. Pure functions over arrays.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

K1 = 1.2  # how soon more of the same word stops helping
B = 0.75  # how much a long chunk has to pay for its length

_WORD = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # HTTPServer2 -> HTTP, Server, 2
_MAX_WORD = 64  # longer ones are hashes and data
# Questions are sentences: these words say nothing of the code, and in code some of them are rare enough to outweigh it.
_STOP = """
a about an and any are as at be been but by can code could did do does file for from function get had has have how i if
in into is it its line make me method not of on or our out should so some that the their them then there these they this
to up use used uses using was we were what when where which while who why will with would you your
"""


@dataclass(frozen=True)
class Counts:
    """How often each word is in each chunk of one file: for the word of row r, entries starts[r] to starts[r + 1]."""

    rows: Mapping[str, int]
    starts: npt.NDArray[np.int32]
    chunks: npt.NDArray[np.int32]
    times: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]  # words of each chunk


def words(text: str) -> list[str]:
    """The words of a text: each identifier, and if it has parts, those too; lower case, plurals and endings cut."""
    return [word for identifier in _WORD.findall(text) for word in _taken_apart(identifier)]


@lru_cache(maxsize=1 << 16)  # code says the same words over and over
def _taken_apart(identifier: str) -> tuple[str, ...]:
    word = identifier.strip("_")
    if not word or len(word) > _MAX_WORD:
        return ()
    parts = _PART.findall(word) if word.isascii() else [word]
    whole = (word.lower(),) if len(parts) > 1 else ()
    return (*whole, *(stem(part.lower()) for part in parts))


def question_words(text: str) -> list[str]:
    """The words of a question that can tell chunks apart, each once; all of them if none can."""
    found = list(dict.fromkeys(words(text)))
    return [word for word in found if word not in _STOPPED] or found


def stem(word: str) -> str:
    """A word without its commonest endings: enough for `caches`, `cached` and `caching` to meet."""
    if len(word) > 3 and word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-3] + "y" if word.endswith("ies") and len(word) > 4 else word[:-1]
    for ending in ("ing", "ed"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            word = word[: -len(ending)]
            if word[-1] == word[-2] and word[-1] not in "lsz":
                word = word[:-1]
            return word
    return word[:-1] if len(word) > 3 and word.endswith("e") else word


_STOPPED = frozenset(stem(word) for word in _STOP.split())


def count_words(texts: Sequence[str]) -> Counts:
    """The word counts of the chunks of one file."""
    entries: dict[str, list[tuple[int, int]]] = {}
    lengths = np.zeros(len(texts), dtype=np.int32)
    for chunk, text in enumerate(texts):
        counted = Counter(words(text))
        lengths[chunk] = counted.total()
        for word, times in counted.items():
            entries.setdefault(word, []).append((chunk, times))
    flat = np.array([entry for found in entries.values() for entry in found], dtype=np.int32).reshape(-1, 2)
    starts = np.cumsum([0, *(len(found) for found in entries.values())], dtype=np.int32)
    rows = {sys.intern(word): row for row, word in enumerate(entries)}
    return Counts(rows, starts, flat[:, 0].copy(), flat[:, 1].copy(), lengths)


def score(files: Sequence[Counts], query: Sequence[str]) -> npt.NDArray[np.float32]:
    """The BM25 score of every chunk of the files, in order, for distinct words; 0 where there is none of them."""
    lengths = np.concatenate([np.zeros(0, np.int32), *(file.lengths for file in files)])
    total = np.zeros(len(lengths), dtype=np.float32)
    if not len(lengths):
        return total
    offsets = np.cumsum([0, *(len(file.lengths) for file in files)])
    weight = K1 * (1 - B + B * lengths / max(1.0, float(lengths.mean())))
    for word in query:
        chunks, times = _entries(files, offsets, word)
        if len(chunks):
            rarity = np.log(1 + (len(lengths) - len(chunks) + 0.5) / (len(chunks) + 0.5))
            total[chunks] += rarity * times * (K1 + 1) / (times + weight[chunks])
    return total


def _entries(
    files: Sequence[Counts], offsets: npt.NDArray[np.int64], word: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Which chunks of all files hold a word, and how often."""
    chunks: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    times: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
    for file, offset in zip(files, offsets, strict=False):
        row = file.rows.get(word)
        if row is not None:
            part = slice(file.starts[row], file.starts[row + 1])
            chunks.append(file.chunks[part] + offset)
            times.append(file.times[part])
    return np.concatenate(chunks), np.concatenate(times)
