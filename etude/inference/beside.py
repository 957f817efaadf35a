"""Decoding streams side by side: their keys and values once more, dense, so that a CPU need not collect pages.

Collecting the pages of 32 streams for every token and layer costs several times what attending to them does. Here each
decoding stream has a row; a step adds one token to every row, and a row is copied from the pages only when its stream
joins. Pages stay the truth: rows can be dropped at any time, and they are when a stream leaves or there is no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etude.inference.request import Stream
from etude.kernels.paged import attend_rows

STRIDE = 64  # rows grow by this many tokens at least


@dataclass(frozen=True)
class Beside:
    """One step over the rows: where each stream's new token goes, and what it may look at."""

    keys: list[Tensor]  # by layer, [rows, kv heads, tokens, dim]
    values: list[Tensor]  # likewise; empty when values are the first part of the keys
    value_dim: int
    rows: Tensor  # [n], 0 to n - 1
    places: Tensor  # [n], of the new token
    mask: Tensor  # [n, 1, tokens], 0 or minus infinity

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float) -> Tensor:
        """Add a token to every row and attend: q [n, heads, dim] -> [n, heads, value dim]."""
        n, tokens = len(q), self.mask.shape[-1]
        keys = self.keys[layer]
        keys[self.rows, :, self.places] = k
        if v is None:
            values = keys[..., : self.value_dim]
        else:
            values = self.values[layer]
            values[self.rows, :, self.places] = v
        return attend_rows(q, keys[:n, :, :tokens], values[:n, :, :tokens], self.mask, scale=scale)


class Rows:
    """Which stream lies in which row. At most `limit` tokens are kept, padding included."""

    def __init__(self, pages: tuple[list[Tensor], list[Tensor]], size: int, value_dim: int, limit: int) -> None:
        self._pages, self.size, self.value_dim, self.limit = pages, size, value_dim, limit
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.capacity = (0, 0)  # rows, tokens
        self._streams: list[Stream | None] = []  # by row
        self._filled: dict[Stream, int] = {}  # tokens of it that are here

    def forget(self, stream: Stream) -> None:
        """A stream's pages are gone; so is its row."""
        if self._filled.pop(stream, None) is not None:
            self._streams[self._streams.index(stream)] = None

    def arrange(self, streams: Sequence[Stream]) -> tuple[list[Stream], Beside | None]:
        """The streams in the order of their rows, and the step over them; None when there is no room for it."""
        longest = max(stream.length for stream in streams)
        if not self._make_room(len(streams), longest):
            for stream in list(self._filled):
                self.forget(stream)
            return list(streams), None
        self._seat(streams)
        places = torch.tensor([stream.length - 1 for stream in streams_of(self._streams)])
        for row, stream in enumerate(streams_of(self._streams)):
            self._fill(row, stream)
        visible = torch.arange(longest) <= places[:, None]
        mask = torch.zeros(visible.shape, dtype=self._keys[0].dtype).masked_fill_(~visible, float("-inf"))[:, None]
        rows = torch.arange(len(streams))
        return streams_of(self._streams), Beside(self._keys, self._values, self.value_dim, rows, places, mask)
