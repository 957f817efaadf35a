"""An endless, exact and repeatable stream of rows from weighted sources.

Each row comes from one source: the one that is furthest behind its share, so after any number of rows every source
has its share to within one row. Inside a source documents come in an order shuffled by seed and epoch. The position
is a small dictionary; a reader restored from it gives the same next token as one that never stopped.
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
    """What a mixture needs of a source; `data.shards.Shards` is one."""

    digest: str
    lengths: npt.NDArray[np.int64]

    def read(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]: ...
    def mask(self, document: int, start: int = 0, stop: int | None = None) -> npt.NDArray[np.bool_]: ...


@dataclass(frozen=True)
class Piece:
    """Part of a document: its tokens from start up to stop."""

    source: str
    document: int
    start: int
    stop: int


@dataclass(frozen=True)
class Source:
    name: str
    documents: DocumentStore
    weight: float


@dataclass
class Cursor:
    """Where the reader stands in one source."""

    epoch: int = 0
    index: int = 0  # in the epoch's order
    offset: int = 0  # in that document, when documents are cut
    rows: int = 0
    waiting: list[int] = field(default_factory=list)  # documents looked at but not placed yet, when kept whole


def read_on(documents: DocumentStore, limit: int | None) -> npt.NDArray[np.int64]:
    """The documents one after another, as one text of at most `limit` tokens."""
    found, room = [], int(documents.lengths.sum()) if limit is None else limit
    for document in range(len(documents.lengths)):
        if room <= 0:
            break
        found.append(documents.read(document, 0, room).astype(np.int64))
        room -= len(found[-1])
    return np.concatenate(found)


class Mixture:
    """Rows of `length` tokens.

    `whole` keeps documents whole (conversations): a row takes those that fit and the rest of it stays empty; one
    longer than a row loses its end. Otherwise documents are cut at the row's end and continue in the source's next
    row. `min_document` leaves out shorter ones (the long-context phase prefers long documents).
    """

    LOOK_AHEAD = 32  # documents a row may choose from; more packs tighter and strays further from the order

    def __init__(
        self, sources: Sequence[Source], *, length: int, seed: int, whole: bool = False, min_document: int = 1
    ) -> None:
        if not sources or any(not source.weight > 0 for source in sources):
            raise InputError("a mixture needs at least one source, each with a weight above 0")
        if len({source.name for source in sources}) != len(sources):
            raise InputError(f"a mixture names a source twice: {', '.join(s.name for s in sources)}")
        self.sources = {source.name: source for source in sources}
        self.length, self.seed, self.whole = length, seed, whole
        total = sum(source.weight for source in sources)
        self.shares = {source.name: source.weight / total for source in sources}
        self._usable = {s.name: np.flatnonzero(s.documents.lengths >= max(1, min_document)) for s in sources}
        self.cut = 0  # whole documents that are longer than a row and lose their end
        for name, usable in self._usable.items():
            if not len(usable):
                raise InputError(f"source {name} has no document of at least {min_document} tokens")
            if whole:
                self._usable[name] = self._with_something_to_learn(name, usable)
        self._orders: dict[str, tuple[int, npt.NDArray[np.int64]]] = {}
        self.cursors = {name: Cursor() for name in self.sources}

    def _with_something_to_learn(self, name: str, usable: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Of documents kept whole, those that have a target inside a row."""
        store = self.sources[name].documents
        kept = [int(d) for d in usable if store.mask(int(d), 1, self.length).any()]
        if not kept:
            raise InputError(
                f"in source {name} nothing to learn lies within the first {self.length} tokens of a document"
            )
        self.cut += int((store.lengths[kept] > self.length).sum())
        return np.array(kept, dtype=np.int64)

    def next_row(self) -> list[Piece]:
        rows = 1 + sum(cursor.rows for cursor in self.cursors.values())
        name = max(self.cursors, key=lambda n: (self.shares[n] * rows - self.cursors[n].rows, n))
        self.cursors[name].rows += 1
        return self._whole_row(name) if self.whole else self._cut_row(name)

    def _cut_row(self, name: str) -> list[Piece]:
        cursor, store, room = self.cursors[name], self.sources[name].documents, self.length
        pieces = []
        while room:
            document = self._document(name, cursor)
            take = min(room, int(store.lengths[document]) - cursor.offset)
            pieces.append(Piece(name, document, cursor.offset, cursor.offset + take))
            room, cursor.offset = room - take, cursor.offset + take
            if cursor.offset == store.lengths[document]:
                cursor.index, cursor.offset = cursor.index + 1, 0
        return pieces

    def _whole_row(self, name: str) -> list[Piece]:
        cursor, store, room = self.cursors[name], self.sources[name].documents, self.length
        pieces: list[Piece] = []
        while True:
            while len(cursor.waiting) < self.LOOK_AHEAD:
                cursor.waiting.append(self._document(name, cursor))
                cursor.index += 1
            sizes = [min(int(store.lengths[d]), self.length) for d in cursor.waiting]
            place = next((i for i, size in enumerate(sizes) if size <= room), None)
            if place is None:
                return pieces
            pieces.append(Piece(name, cursor.waiting.pop(place), 0, sizes[place]))
            room -= sizes[place]

    def _document(self, name: str, cursor: Cursor) -> int:
        usable = self._usable[name]
        if cursor.index >= len(usable):
            cursor.epoch, cursor.index = cursor.epoch + 1, 0
        epoch, order = self._orders.get(name, (-1, usable))
        if epoch != cursor.epoch:
            words = f"{self.seed}/{name}/{cursor.epoch}".encode()
            generator = np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(words).digest()[:16])))
            order = generator.permutation(usable)
            self._orders[name] = (cursor.epoch, order)
        return int(order[cursor.index])

    def state(self) -> dict[str, Any]:
        return {
            "digests": {name: source.documents.digest for name, source in self.sources.items()},
            "shares": self.shares,
            "cursors": {
                name: {**vars(cursor), "waiting": list(cursor.waiting)} for name, cursor in self.cursors.items()
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Stand where `state` was taken; refuse if a corpus is not the one that was read then."""
        if state["shares"] != self.shares:
            raise InputError(
                f"the mixture was {state['shares']} and is now {self.shares}; resume with the same weights"
            )
        for name, digest in state["digests"].items():
            if self.sources[name].documents.digest != digest:
                raise InputError(f"corpus {name} has changed since the checkpoint; restore it or start a new run")
        self.cursors = {name: Cursor(**values) for name, values in state["cursors"].items()}
