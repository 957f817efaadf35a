"""Rows of a mixture as tensors: tokens, what each must predict, and where documents begin.

A target is the next token of the same document, also when the row ends before the document does. It is IGNORE where
there is none, where the loss mask says so, and in the empty end of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from etude.data.mixture import Mixture, Piece
from etude.kernels.attention import Documents
from etude.kernels.loss import IGNORE


@dataclass(frozen=True)
class Batch:
    """One forward: rows of tokens, their targets, and the lengths of the documents in each row."""

    tokens: Tensor  # [rows, length] int64
    targets: Tensor  # [rows, length] int64
    lengths: tuple[tuple[int, ...], ...]
    pieces: tuple[Piece, ...]  # what the rows were made of, for the report of a failure
    trained: int  # targets that are not IGNORE

    @cached_property
    def documents(self) -> Documents | None:
        """None when every row is one document: whole rows have the faster kernel."""
        if all(len(row) == 1 for row in self.lengths):
            return None
        return Documents.pack(self.lengths, self.tokens.device)

    def to(self, device: torch.device | str) -> Batch:
        return replace(self, tokens=self.tokens.to(device), targets=self.targets.to(device))


def next_batch(mixture: Mixture, rows: int, padding: int) -> Batch:
    """The next `rows` rows; `padding` fills what stays empty and is a document of its own."""
    return pack_rows(mixture, [mixture.next_row() for _ in range(rows)], padding)


def pack_rows(mixture: Mixture, rows: Sequence[Sequence[Piece]], padding: int) -> Batch:
    length = mixture.length
    tokens = np.full((len(rows), length), padding, dtype=np.int64)
    targets = np.full((len(rows), length), IGNORE, dtype=np.int64)
    lengths = []
    for row, pieces in enumerate(rows):
        at = 0
        for piece in pieces:
            store, size = mixture.sources[piece.source].documents, piece.stop - piece.start
            # one more, if there is one, to be predicted; int64, because IGNORE does not fit the stored type
            ids = store.read(piece.document, piece.start, piece.stop + 1).astype(np.int64)
            wanted = store.mask(piece.document, piece.start, piece.stop + 1)[1:]
            tokens[row, at : at + size] = ids[:size]
            targets[row, at : at + len(ids) - 1] = np.where(wanted, ids[1:], IGNORE)
            at += size
        sizes = [piece.stop - piece.start for piece in pieces]
        lengths.append(tuple([*sizes, length - at] if at < length else sizes))
    everything = tuple(piece for pieces in rows for piece in pieces)
    trained = int((targets != IGNORE).sum())
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), tuple(lengths), everything, trained)
