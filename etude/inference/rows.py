"""Decoding streams side by side: their keys and values once more, dense, so that a CPU need not collect pages.

Collecting the pages of 32 streams for every token and layer costs several times what attending to them does. Here each
decoding stream has a row; a step adds one token to every row, and a row is copied from the pages only when its stream
joins. Pages stay the truth: rows can be dropped at any time, and they are when a stream leaves or there is no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from etude.inference.request import Stream
from etude.kernels.paged import attend_rows

if TYPE_CHECKING:
    from etude.inference.paged import PagedCache

STRIDE = 64  # tokens by which rows grow at least


@dataclass(frozen=True)
class RowStep:
    """One step over the rows: where each stream's new token goes, and what it may look at."""

    keys: list[Tensor]  # by layer, [rows, kv heads, tokens, dim]
    values: list[Tensor]  # likewise; the first part of the keys where latents are kept
    rows: Tensor  # [n], 0 to n - 1
    places: Tensor  # [n], of the new token
    mask: Tensor  # [n * kv heads, 1, tokens]: 0, or minus infinity after the new token

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float) -> Tensor:
        """Add a token to every row and attend: q [n, heads, dim] -> [n, heads, value dim]."""
        n, tokens = len(q), self.mask.shape[-1]
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.places] = k
        if v is not None:
            values[self.rows, :, self.places] = v
        return attend_rows(q, keys[:n, :, :tokens], values[:n, :, :tokens], self.mask, scale=scale)


class Rows:
    """Which stream lies in which row. At most `limit` tokens are kept, padding included."""

    def __init__(self, pages: PagedCache, limit: int) -> None:
        self._pages, self.limit = pages, limit
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.capacity = (0, 0)  # rows, tokens
        self._row: dict[Stream, int] = {}
        self._filled: dict[Stream, int] = {}  # tokens of each stream that are here

    @property
    def streams(self) -> list[Stream]:
        """Those who have a row now."""
        return list(self._row)

    def forget(self, stream: Stream) -> None:
        """A stream's pages are gone, and so is its row."""
        self._row.pop(stream, None)
        self._filled.pop(stream, None)

    def arrange(self, streams: Sequence[Stream]) -> tuple[list[Stream], RowStep | None]:
        """The streams in the order of their rows, and the step over them; None where they do not fit."""
        longest = max(stream.length for stream in streams)
        if not self._make_room(len(streams), longest):
            return list(streams), None
        order = self._seat(streams)
        for row, stream in enumerate(order):
            self._fill(row, stream)
        places = torch.tensor([stream.length - 1 for stream in order])
        keys = self._keys[0]
        mask = torch.zeros(len(order), longest, dtype=keys.dtype)
        mask.masked_fill_(torch.arange(longest) > places[:, None], float("-inf"))
        mask = mask[:, None].expand(-1, keys.shape[1], -1).reshape(-1, 1, longest)
        return order, RowStep(self._keys, self._values, torch.arange(len(order)), places, mask)

    def _seat(self, streams: Sequence[Stream]) -> list[Stream]:
        """A row below their number for every stream; whoever lies above moves down."""
        n, here = len(streams), set(streams)
        for stream in [stream for stream in self._row if stream not in here]:
            self.forget(stream)
        seated: list[Stream | None] = [None] * n
        for stream, row in self._row.items():
            if row < n:
                seated[row] = stream
        free = iter([row for row, stream in enumerate(seated) if stream is None])
        for stream in streams:
            old = self._row.get(stream)
            if old is None or old >= n:
                seated[row := next(free)] = stream
                self._row[stream] = row
                if old is not None:
                    for slab in self._slabs():
                        slab[row].copy_(slab[old])
        return [stream for stream in seated if stream is not None]

    def _fill(self, row: int, stream: Stream) -> None:
        """Copy what is missing of a stream from its pages, up to the token that the step adds."""
        have, end = self._filled.get(stream, 0), stream.length - 1
        if have < end:
            places, size = np.arange(have, end), self._pages.size
            slots = torch.from_numpy(np.asarray(stream.pages, np.int64)[places // size] * size + places % size)
            for slab, pages in zip(self._slabs(), (*self._pages.keys, *self._pages.values), strict=True):
                slab[row, :, have:end] = pages[slots].transpose(0, 1)
        self._filled[stream] = end + 1

    def _slabs(self) -> list[Tensor]:
        return self._keys + self._values if self._pages.values else self._keys

    def _make_room(self, rows: int, tokens: int) -> bool:
        """Storage for that many rows and tokens; False, and nothing kept, when it would pass the limit."""
        if rows <= self.capacity[0] and tokens <= self.capacity[1]:
            return True
        more = max(self.capacity[0], 1 << (rows - 1).bit_length()), max(self.capacity[1], _stretched(tokens))
        if more[0] * more[1] > self.limit:
            more = rows, tokens
            self._row.clear()
            self._filled.clear()
        old, (kept_rows, kept_tokens) = self._slabs(), self.capacity
        if not self._row:
            kept_rows = kept_tokens = 0
        self.capacity = more if more[0] * more[1] <= self.limit else (0, 0)
        shapes = [slab.shape[1:] for slab in (*self._pages.keys, *self._pages.values)]
        dtype = self._pages.keys[0].dtype
        # zeros, because what is masked still takes part: nothing times NaN is not nothing
        new = [torch.zeros(self.capacity[0], heads, self.capacity[1], dim, dtype=dtype) for heads, dim in shapes]
        for slab, before in zip(new, old, strict=bool(old)):
            slab[:kept_rows, :, :kept_tokens] = before[:kept_rows, :, :kept_tokens]
        layers = len(self._pages.keys)
        self._keys = new[:layers]
        self._values = new[layers:] or [slab[..., : self._pages.value_dim] for slab in self._keys]
        return self.capacity != (0, 0)


def _stretched(tokens: int) -> int:
    return -(-(tokens + tokens // 4) // STRIDE) * STRIDE
