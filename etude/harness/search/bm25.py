"""BM25 over chunks, with identifiers split into words.

Word counts belong to a file and are computed once; scores are computed over any set of files, so a changed index needs
no rebuild. Pure functions over arrays. Written by hand because bm25s has no incremental index; this is 120 lines.
"""

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

K1 = 1.2  # term frequency saturation
B = 0.75  # length normalization

_WORD = re.compile(r"\w+")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # HTTPServer2 -> HTTP, Server, 2
_MAX_WORD = 64  # longer words are hashes and data
# Stop words of questions: they say nothing about the code, and some are rare enough in code to outweigh the rest.
_STOP = """
a about an and any are as at be been but by can code could did do does file for from function get had has have how i if
in into is it its line make me method not of on or our out should so some that the their them then there these they this
to up use used uses using was we were what when where which while who why will with would you your
"""


@dataclass(frozen=True)
class WordCounts:
    """Word counts of the chunks of one file: the word of row r has the entries starts[r] to starts[r + 1]."""

    rows: Mapping[str, int]
    starts: npt.NDArray[np.int32]
    chunks: npt.NDArray[np.int32]
    times: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int32]  # words of each chunk


def words(text: str) -> list[str]:
    """Return the words of a text: each identifier and its parts, in lower case, stemmed."""
    return [word for identifier in _WORD.findall(text) for word in _split_identifier(identifier)]


@lru_cache(maxsize=1 << 16)  # code repeats the same words
def _split_identifier(identifier: str) -> tuple[str, ...]:
    word = identifier.strip("_")
    if not word or len(word) > _MAX_WORD:
        return ()
    parts = _PART.findall(word) if word.isascii() else [word]
    whole = (word.lower(),) if len(parts) > 1 else ()
    return (*whole, *(stem(part.lower()) for part in parts))


def question_words(text: str) -> list[str]:
    """Return the distinct words of a question without stop words; all of them if only stop words remain."""
    found = list(dict.fromkeys(words(text)))
    return [word for word in found if word not in _STOPPED] or found


def stem(word: str) -> str:
    """Strip common endings: `caches`, `cached` and `caching` get the same stem."""
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


def count_words(texts: Sequence[str]) -> WordCounts:
    """Count the words of the chunks of one file."""
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
    return WordCounts(rows, starts, flat[:, 0].copy(), flat[:, 1].copy(), lengths)


def score(files: Sequence[WordCounts], query: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return the BM25 score of every chunk of the files, in order, for distinct words; 0 where none occurs."""
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
    files: Sequence[WordCounts], offsets: npt.NDArray[np.int64], word: str
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the chunks of all files that contain a word, and how often."""
    chunks: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    times: list[npt.NDArray[np.int32]] = [np.zeros(0, np.int32)]
    for file, offset in zip(files, offsets, strict=False):
        row = file.rows.get(word)
        if row is not None:
            part = slice(file.starts[row], file.starts[row + 1])
            chunks.append(file.chunks[part] + offset)
            times.append(file.times[part])
    return np.concatenate(chunks), np.concatenate(times)
