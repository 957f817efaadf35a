"""64-bit hashes of the words of a text and of n-grams of words, for deduplication and decontamination.

A word is a run of letters (including _ and everything outside ASCII) or a run of digits, in lower case; white space
and punctuation only separate. Implemented in numpy on the bytes, because a Python loop over words is ten times slower.
The hashes never change: they depend on neither the process nor the machine.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]

_POSITIONS = 64  # byte positions within a word that hash differently; longer words wrap around


def _mix(values: Hashes) -> Hashes:
    """Apply the finaliser of splitmix64: every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _numbers(count: int, stream: int) -> Hashes:
    """Return the splitmix64 sequence: random numbers that do not depend on the numpy version."""
    start = np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 32)
    return _mix(start * np.uint64(0x9E3779B97F4A7C15))


# Tabulation hashing: a word's hash is the sum of one random number per (position, byte).
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
class HashedWords:
    """Hashes of the words of one text, and the span of each word in `data`, the lower-case text."""

    data: bytes
    hashes: Hashes
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.hashes)

    def join(self, first: int, count: int) -> str:
        """Return `count` words from number `first` on, separated by spaces."""
        spans = zip(self.starts[first : first + count], self.ends[first : first + count], strict=True)
        return " ".join(self.data[start:end].decode(errors="replace") for start, end in spans)


def split_words(text: str | bytes) -> HashedWords:
    """Hash the words of `text`: a str, or bytes that are already in lower case."""
    data = text.lower().encode() if isinstance(text, str) else text
    if not data:
        no_offsets = np.empty(0, dtype=np.int64)
        return HashedWords(data, np.empty(0, dtype=np.uint64), no_offsets, no_offsets)
    letters = np.frombuffer(data, dtype=np.uint8)
    kinds = _KIND[letters]
    edges = np.flatnonzero(kinds[1:] != kinds[:-1]) + 1
    starts = np.concatenate(([0], edges))
    ends = np.concatenate((edges, [len(letters)]))
    inside = kinds[starts] != _SEPARATOR
    # Offset of each byte in its run: the distance to the run's start, repeated over the run.
    slots = np.arange(len(letters), dtype=np.int32) - np.repeat(starts.astype(np.int32), ends - starts)
    slots &= _POSITIONS - 1
    slots <<= 8
    slots |= letters
    sums = np.add.reduceat(_TABLE.take(slots), starts)
    return HashedWords(data, sums[inside], starts[inside], ends[inside])


def hash_ngrams(hashes: Hashes, n: int) -> Hashes:
    """Return one hash per n-gram of words, in order; empty when there are fewer than n words."""
    count = len(hashes) - n + 1
    if count < 1:
        return np.empty(0, dtype=np.uint64)
    total = np.zeros(count, dtype=np.uint64)
    for step in range(n):
        total += hashes[step : step + count] * _STEPS[step]
    return _mix(total)
