"""An endless, deterministic stream of rows from weighted sources.

Each row comes from one source: the one furthest behind its share, so after any number of rows every source has its
share to within one row. Within a source, documents are shuffled by seed and epoch. The position is a small dictionary;
a mixture restored from it continues with the same next token as one that was never interrupted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from etude.errors import InputError


class DocumentStore(Protocol):
    """Documents of one source; implemented by `etude.data.shards.Shards`."""

    digest: str
    lengths: npt.NDArray[np.int64]

    def read(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]: ...
    def mask(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]: ...


@dataclass(frozen=True)
class DocumentSpan:
    """Tokens start up to stop of one document, as packed into a row."""

    source: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class MixtureSource:
    name: str
    documents: DocumentStore
    weight: float


@dataclass
class Cursor:
    """Position in one source. The fields are stored in checkpoints (training.json)."""

    epoch: int = 0
    index: int = 0  # in the epoch's document order
    offset: int = 0  # in that document, when documents are split at row ends
    rows: int = 0
    waiting: list[int] = field(default_factory=list)  # look-ahead documents not placed yet, when kept whole


def read_concatenated(documents: DocumentStore, limit: int | None) -> npt.NDArray[np.int64]:
    """Return the documents concatenated in order, at most `limit` tokens."""
    found, remaining = [], int(documents.lengths.sum()) if limit is None else limit
    for document in range(len(documents.lengths)):
        if remaining <= 0:
            break
        found.append(documents.read(document, 0, remaining).astype(np.int64))
        remaining -= len(found[-1])
    return np.concatenate(found)


class Mixture:
    """Rows of `length` tokens.

    `keep_whole` never splits a document over two rows (for conversations): a row takes the documents that fit and the
    rest stays empty; a document longer than a row is truncated. Otherwise documents are split at the row's end and
    continue in the source's next row. Documents shorter than `min_document` tokens are skipped.
    """

    LOOK_AHEAD = 32  # documents a row may choose from; more pack tighter but deviate more from the shuffled order

    def __init__(
        self,
        sources: Sequence[MixtureSource],
        *,
        length: int,
        seed: int,
        keep_whole: bool = False,
        min_document: int = 1,
    ) -> None:
        if not sources or any(not source.weight > 0 for source in sources):
            raise InputError("a mixture needs at least one source, each with a weight above 0")
        if len({source.name for source in sources}) != len(sources):
            raise InputError(f"a mixture names a source twice: {', '.join(s.name for s in sources)}")
        self.sources = {source.name: source for source in sources}
        self.length, self.seed, self.keep_whole = length, seed, keep_whole
        total = sum(source.weight for source in sources)
        self.shares = {source.name: source.weight / total for source in sources}
        self._usable = {s.name: np.flatnonzero(s.documents.lengths >= max(1, min_document)) for s in sources}
        self.truncated = 0  # documents longer than a row, with keep_whole
        for name, usable in self._usable.items():
            if not len(usable):
                raise InputError(f"source {name} has no document of at least {min_document} tokens")
            if keep_whole:
                self._usable[name] = self._with_targets(name, usable)
        self._orders: dict[str, tuple[int, npt.NDArray[np.int64]]] = {}
        self.cursors = {name: Cursor() for name in self.sources}

    def _with_targets(self, name: str, usable: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the documents that have at least one target within the first `length` tokens."""
        store = self.sources[name].documents
        kept = [int(d) for d in usable if store.mask(int(d), 1, self.length).any()]
        if not kept:
            raise InputError(f"source {name} has no loss token within the first {self.length} tokens of any document")
        self.truncated += int((store.lengths[kept] > self.length).sum())
        return np.array(kept, dtype=np.int64)

    def next_row(self) -> list[DocumentSpan]:
        """Return the spans that fill the next row, all of one source."""
        rows = 1 + sum(cursor.rows for cursor in self.cursors.values())
        name = max(self.cursors, key=lambda n: (self.shares[n] * rows - self.cursors[n].rows, n))
        self.cursors[name].rows += 1
        return self._whole_documents(name) if self.keep_whole else self._split_documents(name)

    def _split_documents(self, name: str) -> list[DocumentSpan]:
        cursor, store, remaining = self.cursors[name], self.sources[name].documents, self.length
        spans = []
        while remaining:
            document = self._current_document(name, cursor)
            take = min(remaining, int(store.lengths[document]) - cursor.offset)
            spans.append(DocumentSpan(name, document, cursor.offset, cursor.offset + take))
            remaining, cursor.offset = remaining - take, cursor.offset + take
            if cursor.offset == store.lengths[document]:
                cursor.index, cursor.offset = cursor.index + 1, 0
        return spans

    def _whole_documents(self, name: str) -> list[DocumentSpan]:
        cursor, store, remaining = self.cursors[name], self.sources[name].documents, self.length
        spans: list[DocumentSpan] = []
        while True:
            while len(cursor.waiting) < self.LOOK_AHEAD:
                cursor.waiting.append(self._current_document(name, cursor))
                cursor.index += 1
            sizes = [min(int(store.lengths[d]), self.length) for d in cursor.waiting]
            fitting = next((i for i, size in enumerate(sizes) if size <= remaining), None)
            if fitting is None:
                return spans
            spans.append(DocumentSpan(name, cursor.waiting.pop(fitting), 0, sizes[fitting]))
            remaining -= sizes[fitting]

    def _current_document(self, name: str, cursor: Cursor) -> int:
        usable = self._usable[name]
        if cursor.index >= len(usable):
            cursor.epoch, cursor.index = cursor.epoch + 1, 0
        epoch, order = self._orders.get(name, (-1, usable))
        if epoch != cursor.epoch:
            key = f"{self.seed}/{name}/{cursor.epoch}".encode()
            generator = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(key).digest()[:16])))
            order = generator.permutation(usable)
            self._orders[name] = (cursor.epoch, order)
        return int(order[cursor.index])

    def state_dict(self) -> dict[str, Any]:
        """Return the position, with digests to recognise the corpora."""
        return {
            "digests": {name: source.documents.digest for name, source in self.sources.items()},
            "shares": self.shares,
            "cursors": {
                name: {**vars(cursor), "waiting": list(cursor.waiting)} for name, cursor in self.cursors.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; refuse if the weights or the content of a corpus have changed since."""
        if state["shares"] != self.shares:
            raise InputError(
                f"the mixture was {state['shares']} and is now {self.shares}; resume with the same weights"
            )
        for name, digest in state["digests"].items():
            if self.sources[name].documents.digest != digest:
                raise InputError(f"corpus {name} has changed since the checkpoint; restore it or start a new run")
        self.cursors = {name: Cursor(**values) for name, values in state["cursors"].items()}
