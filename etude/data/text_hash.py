"""Words of a text as 64-bit hashes, and hashes of runs of n of them: what duplicates and overlaps are found by.

A word is a run of letters (with _ and everything outside ASCII) or a run of digits, in lower case; white space and
punctuation only separate. Our own, in numpy on the bytes, because a loop over words in Python is ten times slower
and both users need the same words. The hashes are fixed for good: nothing depends on the process or the machine.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_POSITIONS = 64  # of a byte in its word that hash differently; longer words wrap around


def _mix(values: Hashes) -> Hashes:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the input."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _numbers(count: int, stream: int) -> Hashes:
    """The splitmix64 sequence: fixed random numbers that do not depend on a numpy version."""
    start = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 32)
    return _mix(start * np.uint64(0x9E3779B97F4A7C15))


# Tabulation hashing: a word is the sum of one random number per (position, byte).
_TABLE = _numbers(_POSITIONS * 256, stream=1)
_STEPS = _numbers(256, stream=2) | np.uint64(1)

_SEPARATOR, _LETTER, _DIGIT = 0, 1, 2
_KIND = np.full(256, _LETTER, dtype=np.uint8)
_KIND[:128] = _SEPARATOR
for _byte in b"abcdefghijklmnopqrstuvwxyz_":
    _KIND[_byte] = _LETTER
for _byte in b"0123456789":
    _KIND[_byte] = _DIGIT


@dataclass(frozen=True)
class Words:
    """The words of one text: their hashes, and where each lies in `data`, the text in lower case."""

    data: bytes
    hashes: Hashes
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.hashes)

    def spell(self, first: int, count: int) -> str:
        """The words themselves, for people."""
        spans = zip(self.starts[first : first + count], self.ends[first : first + count], strict=True)
        return " ".join(self.data[start:end].decode(errors="replace") for start, end in spans)


def split_words(text: str | bytes) -> Words:
    """`text` as str, or as bytes that are in lower case already."""
    data = text.lower().encode() if isinstance(text, str) else text
    if not data:
        nothing = np.empty(0, dtype=np.int64)
        return Words(data, np.empty(0, dtype=np.uint64), nothing, nothing)
    letters = np.frombuffer(data, dtype=np.uint8)
    kinds = _KIND[letters]
    edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    starts = np.concatenate(([0], edges))
    ends = np.concatenate((edges, [len(letters)]))
    inside = kinds[starts] != _SEPARATOR
    # Offset of each byte in its run: the distance to the run's start, repeated over the run.
    places = np.arange(len(letters), dtype=np.int32) - np.repeat(starts.astype(np.int32), ends - starts)
    places &= _POSITIONS - 1
    places <<= 8
    places |= letters
    sums = np.add.reduceat(_TABLE.take(places), starts)
    return Words(data, sums[inside], starts[inside], ends[inside])


def hash_ngrams(hashes: Hashes, n: int) -> Hashes:
    """One hash for each run of n words, in order; none when there are fewer words."""
    count = len(hashes) - n + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for step in range(n):
        total += hashes[step : step + count] * _STEPS[step]
    return _mix(total)
