"""Pack rows of a mixture into tensors: tokens, targets, and the lengths of the packed documents.

A target is the next token of the same document, also where the row ends before the document does. It is IGNORE at the
end of a document, where the loss mask is off, and in the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from etude.data.mixture import DocumentSpan, Mixture
from etude.kernels.attention import Documents
from etude.kernels.loss import IGNORE


@dataclass(frozen=True)
class Batch:
    """One micro-batch: rows of tokens, their targets, and the lengths of the documents in each row."""

    tokens: Tensor  # [rows, length] int64
    targets: Tensor  # [rows, length] int64
    lengths: tuple[tuple[int, ...], ...]
    spans: tuple[DocumentSpan, ...]  # where the rows come from, for the failure report
    loss_tokens: int  # targets that are not IGNORE

    @cached_property
    def documents(self) -> Documents | None:
        """The packing, or None when every row is one document: unpacked rows have a faster kernel."""
        if all(len(row) == 1 for row in self.lengths):
            return None
        return Documents.pack(self.lengths, self.tokens.device)

    def to(self, device: torch.device | str) -> Batch:
        return replace(self, tokens=self.tokens.to(device), targets=self.targets.to(device))


def next_batch(mixture: Mixture, rows: int, padding: int) -> Batch:
    """Return the next `rows` rows; the rest of a row is filled with `padding`, as a document of its own."""
    return pack_rows(mixture, [mixture.next_row() for _ in range(rows)], padding)


def pack_rows(mixture: Mixture, rows: Sequence[Sequence[DocumentSpan]], padding: int) -> Batch:
    length = mixture.length
    tokens = np.full((len(rows), length), padding, dtype=np.int64)
    targets = np.full((len(rows), length), IGNORE, dtype=np.int64)
    lengths = []
    for row, spans in enumerate(rows):
        at = 0
        for span in spans:
            store, size = mixture.sources[span.source].documents, span.stop - span.start
            # One more token, if there is one, as the last target; int64, because IGNORE does not fit the stored dtype.
            ids = store.read(span.document, span.start, span.stop + 1).astype(np.int64)
            loss_mask = store.mask(span.document, span.start, span.stop + 1)[1:]
            tokens[row, at : at + size] = ids[:size]
            targets[row, at : at + len(ids) - 1] = np.where(loss_mask, ids[1:], IGNORE)
            at += size
        sizes = [span.stop - span.start for span in spans]
        lengths.append(tuple([*sizes, length - at] if at < length else sizes))
    everything = tuple(span for spans in rows for span in spans)
    loss_tokens = int((targets != IGNORE).sum())
    return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), tuple(lengths), everything, loss_tokens)
