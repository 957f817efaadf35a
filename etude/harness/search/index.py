"""An index of a workspace: chunks, their words and their vectors, file by file; and the ranking over all of them.

Files are indexed by path and content, once, and shared by every index that has them. An index is a sorted set of files
with one digest for all, as in a Merkle tree: to update it is to exchange the files that changed.
"""

import bisect
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from etude.harness.search import bm25
from etude.harness.search.chunk_text import counted_text, embedded_text, headline
from etude.harness.search.chunks import Chunk, cut, read_lines
from etude.harness.search.source import is_within

FoundBy = Literal["semantic", "lexical", "both"]

# Reciprocal rank fusion: the scores of two rankings cannot be compared, their ranks can. A small offset brings the
# first few of either to the top; with the usual 60, what only its words find is buried below what is fairly near in
# meaning. `benchmarks/search.py` has questions of both kinds.
DEPTH = 100
RANK_OFFSET = 5


class IndexedFile:
    """One file, cut and counted. Its vectors come later, chunk by chunk; nothing else about it ever changes."""

    def __init__(self, path: str, digest: str, data: bytes) -> None:
        self.path = path
        self.digest = digest  # of the content, computed here
        self.lines: Sequence[str] = read_lines(data) or []
        self.chunks: Sequence[Chunk] = cut(path, self.lines)
        self._headline = headline(path, self.lines)
        self.counts = bm25.count_words([counted_text(chunk, self.lines, self._headline) for chunk in self.chunks])
        self.keys: Sequence[bytes] = ()  # of the texts to embed, once a model says what they are
        self.vectors: npt.NDArray[np.float16] | None = None
        self.embedded = np.zeros(len(self.chunks), dtype=np.bool_)

    def texts(self) -> list[str]:
        """What is embedded of each chunk."""
        return [embedded_text(chunk, self.lines, self._headline) for chunk in self.chunks]

    def missing(self, key: Callable[[str], bytes]) -> list[int]:
        """The chunks that have no vector yet; the keys are there after this."""
        if len(self.keys) != len(self.chunks):
            self.keys = [key(text) for text in self.texts()]
        return [int(number) for number in np.flatnonzero(~self.embedded)]

    def take(self, vectors: Mapping[bytes, npt.NDArray[np.float16]]) -> None:
        """Keep the vectors of these chunks among those given."""
        for number, key in enumerate(self.keys):
            vector = vectors.get(key)
            if vector is not None and not self.embedded[number]:
                if self.vectors is None:
                    self.vectors = np.zeros((len(self.chunks), len(vector)), dtype=np.float16)
                self.vectors[number] = vector
                self.embedded[number] = True


def content_digest(path: str, data: bytes) -> str:
    """What a file is to an index: its path and its bytes."""
    return hashlib.blake2b(
        data, key=hashlib.sha256(path.encode(errors="surrogatepass")).digest(), digest_size=20
    ).hexdigest()


@dataclass(frozen=True)
class Ranked:
    """A chunk that was found, and its worth: fused, by meaning (a cosine) and by words (BM25)."""

    file: IndexedFile
    chunk: Chunk
    found_by: FoundBy
    score: float
    cosine: float | None
    bm25: float


@dataclass(frozen=True)
class CodeIndex:
    """A workspace at one moment: files in the order of their paths."""

    files: Sequence[IndexedFile]
    root: str
    starts: Sequence[int] = field(repr=False)  # the number of the first chunk of each file

    @classmethod
    def of(cls, files: Iterable[IndexedFile]) -> "CodeIndex":
        ordered = sorted(files, key=lambda file: file.path)
        root = hashlib.sha256("\n".join(file.digest for file in ordered).encode()).hexdigest()
        starts = [0]
        for file in ordered:
            starts.append(starts[-1] + len(file.chunks))
        return cls(ordered, root, starts)

    def updated(self, changed: Iterable[IndexedFile], removed: Collection[str] = ()) -> "CodeIndex":
        """The index with these files in place of what was there, and without those removed."""
        files = {file.path: file for file in self.files if file.path not in removed}
        files |= {file.path: file for file in changed}
        return CodeIndex.of(files.values())

    @property
    def size(self) -> int:
        """How many chunks there are."""
        return self.starts[-1]

    @property
    def embedded(self) -> int:
        """How many of them have a vector."""
        return sum(int(file.embedded.sum()) for file in self.files)

    def rank(
        self,
        question: Sequence[str],
        vector: npt.NDArray[np.float32] | None,
        directories: Collection[str] = (),
        limit: int = 10,
    ) -> list[Ranked]:
        """The best chunks for a question: by its words, and by its vector if there is one. Ties go by path and line."""
        if not self.size:
            return []
        allowed = self._allowed(directories)
        by_words = bm25.score([file.counts for file in self.files], question) * allowed
        lexical = best(by_words, DEPTH, above=0.0)
        cosines = (
            None if vector is None else np.where(allowed & self._embedded(), self._matrix(len(vector)) @ vector, -1.0)
        )
        # Rounded: the same text encoded in another batch differs in the seventh place, and must not change the order.
        semantic = np.zeros(0, np.int64) if cosines is None else best(np.round(cosines, 4), DEPTH, above=-1.0)
        fused = fuse(semantic, lexical, self.embedded / self.size if len(semantic) else 0.0)
        in_words, in_meaning = set(lexical.tolist()), set(semantic.tolist())
        ranked = []
        for number, score in fused[:limit]:
            place = bisect.bisect_right(self.starts, number) - 1
            file = self.files[place]
            found_by: FoundBy = "semantic" if number not in in_words else "both" if number in in_meaning else "lexical"
            cosine = None if cosines is None or number not in in_meaning else round(float(cosines[number]), 4)
            chunk = file.chunks[number - self.starts[place]]
            ranked.append(Ranked(file, chunk, found_by, score, cosine, round(float(by_words[number]), 4)))
        return ranked

    def _allowed(self, directories: Collection[str]) -> npt.NDArray[np.bool_]:
        inside = [is_within(file.path, directories) for file in self.files]
        return np.repeat(np.array(inside, dtype=np.bool_), [len(file.chunks) for file in self.files])

    def _embedded(self) -> npt.NDArray[np.bool_]:
        return np.concatenate([np.zeros(0, np.bool_), *(file.embedded for file in self.files)])

    def _matrix(self, dimensions: int) -> npt.NDArray[np.float32]:
        """The vectors of all chunks, zeros where there is none."""
        if self.embedded == self.size:
            return self._whole
        return self._stack(dimensions)

    @cached_property
    def _whole(self) -> npt.NDArray[np.float32]:
        return self._stack(0)

    def _stack(self, dimensions: int) -> npt.NDArray[np.float32]:
        parts = [
            np.zeros((len(file.chunks), dimensions), np.float16) if file.vectors is None else file.vectors
            for file in self.files
            if len(file.chunks)
        ]
        return np.concatenate(parts or [np.zeros((0, dimensions), np.float16)]).astype(np.float32)


def best(scores: npt.NDArray[np.floating], count: int, above: float) -> npt.NDArray[np.int64]:
    """The numbers of the highest scores, highest first, the lower number first among equals."""
    numbers = np.flatnonzero(scores > above)
    if len(numbers) > count:  # all that reach the last place, so that a tie there is decided by number too
        least = np.partition(scores[numbers], len(numbers) - count)[len(numbers) - count]
        numbers = numbers[scores[numbers] >= least]
    return numbers[np.argsort(-scores[numbers], kind="stable")][:count]


def fuse(
    semantic: npt.NDArray[np.int64], lexical: npt.NDArray[np.int64], coverage: float = 1.0
) -> list[tuple[int, float]]:
    """Two rankings as one, by reciprocal rank. Where few chunks have a vector, the best of those mean little."""
    scores: dict[int, float] = {}
    for ranking, voice in ((semantic, coverage), (lexical, 1.0)):
        for rank, number in enumerate(ranking.tolist(), start=1):
            scores[number] = scores.get(number, 0.0) + voice / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
