"""Pack rows of a mixture into tensors: tokens, targets, and the lengths of the packed documents.

A target is the next token of the same document, also where the row ends before the document does. It is IGNORE at the
end of a document, where the loss mask is off, and in the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from etude.data.mixture import DocumentSpan, Mixture
from etude.kernels.attention import Documents
from etude.kernels.loss import IGNORE
from etude.parallel.context import ContextGroup, ContextShard


@dataclass(frozen=True)
class Batch:
    """One micro-batch: rows of tokens, their targets, and the lengths of the documents in each row."""

    tokens: Tensor  # [rows, length] int64
    targets: Tensor  # [rows, length] int64
    lengths: tuple[tuple[int, ...], ...]
    spans: tuple[DocumentSpan, ...]  # where the rows come from, for the failure report
    loss_tokens: int  # targets that are not IGNORE
    context: ContextGroup | None = None  # of a batch that is one rank's part of these rows, see `for_context`
    counted: Tensor | None = None  # bool [rows, length] of such a part: `until_last_target` of the whole rows
    row_loss_tokens: int | None = None  # of such a part: the loss tokens of the whole rows

    # Fields with a value for each token of the rows, and the value that padding has.
    TOKEN_FIELDS: ClassVar[dict[str, int | float]] = {"tokens": 0, "targets": IGNORE, "counted": 0}

    @cached_property
    def documents(self) -> Documents | ContextShard | None:
        """The packing, or None when every row is one document: unpacked rows have a faster kernel."""
        if self.context is not None:
            return ContextShard.pack(self.lengths, self.context, self.tokens.device)
        if all(len(row) == 1 for row in self.lengths):
            return None
        return Documents.pack(self.lengths, self.tokens.device)

    def to(self, device: torch.device | str) -> Self:
        moved: dict[str, Any] = {name: values.to(device) for name, values in self._token_values().items()}
        return replace(self, **moved)

    def for_context(self, context: ContextGroup | None) -> Self:
        """Return this context rank's part of every row; `lengths` stay those of the whole rows.

        Rows that do not divide get padding, as a document of its own.
        """
        if context is None:
            return self
        missing = -self.tokens.shape[1] % (2 * context.size)
        whole = replace(self, counted=until_last_target(self.targets))
        parts: dict[str, Any] = {}
        for name, values in whole._token_values().items():
            padding = values.new_full((len(values), missing, *values.shape[2:]), self.TOKEN_FIELDS[name])
            parts[name] = context.cut(torch.cat((values, padding), dim=1))
        return replace(
            self,
            **parts,
            lengths=tuple((*row, missing) for row in self.lengths) if missing else self.lengths,
            loss_tokens=int((parts["targets"] != IGNORE).sum()),
            context=context,
            row_loss_tokens=self.loss_tokens,
        )

    def _token_values(self) -> dict[str, Tensor]:
        values = {name: getattr(self, name) for name in self.TOKEN_FIELDS}
        return {name: value for name, value in values.items() if value is not None}


def until_last_target(targets: Tensor) -> Tensor:
    """Return which tokens come no later than the last loss token of their row; others may be padding."""
    return (targets != IGNORE).int().flip(1).cummax(dim=1).values.flip(1).bool()


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
