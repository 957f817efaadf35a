"""The index of a workspace: chunks with word counts and vectors for each file, and the ranking over all of them.

A file is indexed once by path and content and shared by every index that contains it. An index is a sorted set of
files with one digest over all, as in a Merkle tree: an update exchanges the changed files.
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
from etude.harness.search.chunks import Chunk, cut_chunks, read_lines
from etude.harness.search.source import within

FoundBy = Literal["semantic", "lexical", "both"]

# Reciprocal rank fusion: scores of two rankings are not comparable, ranks are. A small offset brings the first few of
# either ranking to the top; with the usual 60, results found only by words drop below moderately similar ones.
# `benchmarks/search.py` has questions of both kinds.
DEPTH = 100
RANK_OFFSET = 5


class IndexedFile:
    """One indexed file. Vectors are added chunk by chunk; nothing else changes."""

    def __init__(self, path: str, digest: str, data: bytes) -> None:
        self.path = path
        self.digest = digest  # of path and content, computed here
        self.lines: Sequence[str] = read_lines(data) or []
        self.chunks: Sequence[Chunk] = cut_chunks(path, self.lines)
        self._headline = headline(path, self.lines)
        self.counts = bm25.count_words([counted_text(chunk, self.lines, self._headline) for chunk in self.chunks])
        self.keys: Sequence[bytes] = ()  # of the texts to embed; set when the model is loaded
        self.vectors: npt.NDArray[np.float16] | None = None
        self.embedded = np.zeros(len(self.chunks), dtype=np.bool_)

    def texts(self) -> list[str]:
        """Return the text to embed of each chunk."""
        return [embedded_text(chunk, self.lines, self._headline) for chunk in self.chunks]

    def missing(self, key: Callable[[str], bytes]) -> list[int]:
        """Return the chunks without a vector; compute `keys` first if necessary."""
        if len(self.keys) != len(self.chunks):
            self.keys = [key(text) for text in self.texts()]
        return [int(number) for number in np.flatnonzero(~self.embedded)]

    def add_vectors(self, vectors: Mapping[bytes, npt.NDArray[np.float16]]) -> None:
        """Store the vectors that belong to chunks of this file."""
        for number, key in enumerate(self.keys):
            vector = vectors.get(key)
            if vector is not None and not self.embedded[number]:
                if self.vectors is None:
                    self.vectors = np.zeros((len(self.chunks), len(vector)), dtype=np.float16)
                self.vectors[number] = vector
                self.embedded[number] = True


def content_digest(path: str, data: bytes) -> str:
    """Return the digest of a file's path and content."""
    return hashlib.blake2b(
        data, key=hashlib.sha256(path.encode(errors="surrogatepass")).digest(), digest_size=20
    ).hexdigest()


@dataclass(frozen=True)
class RankedChunk:
    """A search hit: a chunk, how it was found, its fused score, cosine similarity and BM25 score."""

    file: IndexedFile
    chunk: Chunk
    found_by: FoundBy
    score: float
    cosine: float | None
    bm25: float

    @property
    def lines(self) -> Sequence[str]:
        return self.file.lines[self.chunk.first - 1 : self.chunk.last]


@dataclass(frozen=True)
class CodeIndex:
    """A snapshot of a workspace: files ordered by path."""

    files: Sequence[IndexedFile]
    root: str
    starts: Sequence[int] = field(repr=False)  # number of the first chunk of each file

    @classmethod
    def from_files(cls, files: Iterable[IndexedFile]) -> "CodeIndex":
        ordered = sorted(files, key=lambda file: file.path)
        root = hashlib.sha256("\n".join(file.digest for file in ordered).encode()).hexdigest()
        starts = [0]
        for file in ordered:
            starts.append(starts[-1] + len(file.chunks))
        return cls(ordered, root, starts)

    def updated(self, changed: Iterable[IndexedFile], removed: Collection[str] = ()) -> "CodeIndex":
        """Return the index with changed files replaced or added and `removed` files left out."""
        files = {file.path: file for file in self.files if file.path not in removed}
        files |= {file.path: file for file in changed}
        return CodeIndex.from_files(files.values())

    @property
    def size(self) -> int:
        """The number of chunks."""
        return self.starts[-1]

    @property
    def embedded(self) -> int:
        """The number of chunks that have a vector."""
        return sum(int(file.embedded.sum()) for file in self.files)

    def rank(
        self,
        question: Sequence[str],
        vector: npt.NDArray[np.float32] | None,
        directories: Collection[str] = (),
        limit: int = 10,
    ) -> list[RankedChunk]:
        """Return the best chunks for a question by its words, and by its vector if given; ties go by path and line."""
        if not self.size:
            return []
        allowed = self._allowed(directories)
        by_words = bm25.score([file.counts for file in self.files], question) * allowed
        lexical = top_scores(by_words, DEPTH, above=0.0)
        cosines = (
            None if vector is None else np.where(allowed & self._embedded(), self._matrix(len(vector)) @ vector, -1.0)
        )
        # Rounded: the same text in another batch differs in the seventh digit, which must not change the order.
        semantic = np.zeros(0, np.int64) if cosines is None else top_scores(np.round(cosines, 4), DEPTH, above=-1.0)
        fused = fuse(semantic, lexical, self.embedded / self.size if len(semantic) else 0.0)
        in_words, in_meaning = set(lexical.tolist()), set(semantic.tolist())
        ranked = []
        for number, score in fused[:limit]:
            position = bisect.bisect_right(self.starts, number) - 1
            file = self.files[position]
            found_by: FoundBy = "semantic" if number not in in_words else "both" if number in in_meaning else "lexical"
            cosine = None if cosines is None or number not in in_meaning else round(float(cosines[number]), 4)
            chunk = file.chunks[number - self.starts[position]]
            ranked.append(RankedChunk(file, chunk, found_by, score, cosine, round(float(by_words[number]), 4)))
        return ranked

    def _allowed(self, directories: Collection[str]) -> npt.NDArray[np.bool_]:
        is_within = within(directories)
        inside = [is_within(file.path) for file in self.files]
        return np.repeat(np.array(inside, dtype=np.bool_), [len(file.chunks) for file in self.files])

    def _embedded(self) -> npt.NDArray[np.bool_]:
        return np.concatenate([np.zeros(0, np.bool_), *(file.embedded for file in self.files)])

    def _matrix(self, dimensions: int) -> npt.NDArray[np.float32]:
        """Return the vectors of all chunks, zeros where there is none."""
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


def top_scores(scores: npt.NDArray[np.floating], count: int, above: float) -> npt.NDArray[np.int64]:
    """Return the numbers of the highest scores, highest first; ties by lower number."""
    numbers = np.flatnonzero(scores > above)
    if len(numbers) > count:  # keep all that tie for the last place, so that the number decides there too
        least = np.partition(scores[numbers], len(numbers) - count)[len(numbers) - count]
        numbers = numbers[scores[numbers] >= least]
    return numbers[np.argsort(-scores[numbers], kind="stable")][:count]


def fuse(
    semantic: npt.NDArray[np.int64], lexical: npt.NDArray[np.int64], coverage: float = 1.0
) -> list[tuple[int, float]]:
    """Fuse two rankings by reciprocal rank; the semantic one is weighted by the share of chunks with a vector."""
    scores: dict[int, float] = {}
    for ranking, weight in ((semantic, coverage), (lexical, 1.0)):
        for rank, number in enumerate(ranking.tolist(), start=1):
            scores[number] = scores.get(number, 0.0) + weight / (RANK_OFFSET + rank)
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
