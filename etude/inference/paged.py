"""Keys and values in pages, and one step's batch over them: what `etude.model` sees as its cache.

A step is one flat row of tokens: first one for each decoding stream, then pieces of prompts. Latent attention keeps
latents, as everywhere. Attention itself is in `kernels/paged.py`; this file decides where things lie.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.inference.request import Stream
from etude.inference.scheduler import Step
from etude.kernels.paged import Blocks, Spans, attend_blocks, attend_pages, attend_spans, store_pages
from etude.model.config import ModelConfig


@dataclass(frozen=True)
class Batch:
    """One step as tensors. Decoding streams come first, one token each."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T], where each token's keys and values go: page * size + offset
    decoding: int  # how many of the tokens are decoding streams; in a graph that reads, as many as there may be
    tables: Tensor  # [decoding, most pages], page numbers, padded; with blocks, of those that read too
    lengths: Tensor  # [decoding], tokens visible to each, itself included; 0: it does not decode
    spans: Spans | Blocks | None  # pieces of prompts, after the decoding streams
    writers: Tensor  # rows of the step from which a next token is drawn


@dataclass(frozen=True)
class Layout:
    """The tokens of a step on the host, one after another."""

    tokens: list[int]
    positions: list[int]
    slots: npt.NDArray[np.int64]
    writers: list[int]
    starts: list[int]  # where each piece of a prompt begins among them


def lay_out(step: Step, size: int) -> Layout:
    tokens = [stream.made[-1] for stream in step.decoding]
    positions = [stream.length - 1 for stream in step.decoding]
    places = zip(step.decoding, positions, strict=True)
    slots = [np.array([stream.pages[at // size] * size + at % size for stream, at in places], np.int64)]
    writers, starts = list(range(len(step.decoding))), []
    for piece in step.reading:
        starts.append(len(tokens))
        tokens += piece.stream.tokens(piece.start, piece.end)
        positions += range(piece.start, piece.end)
        slots.append(stream_slots(piece.stream.pages, piece.start, piece.end, size))
        if piece.writes:
            writers.append(len(tokens) - 1)
    return Layout(tokens, positions, np.concatenate(slots), writers, starts)


def make_batch(step: Step, size: int, device: torch.device | str) -> Batch:
    """A step as tensors. Built with numpy on the host and moved once."""
    laid = lay_out(step, size)
    runs = [stream_slots(piece.stream.pages, 0, piece.end, size) for piece in step.reading]
    tables = _tables(step.decoding)

    def move(values: object) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64)).to(device, non_blocking=True)

    return Batch(
        move(laid.tokens),
        move(laid.positions),
        move(laid.slots),
        len(step.decoding),
        torch.from_numpy(tables).to(device),
        move([stream.length for stream in step.decoding]),
        Spans.of([piece.end - piece.start for piece in step.reading], runs, device) if runs else None,
        move(laid.writers),
    )


def _tables(streams: list[Stream]) -> npt.NDArray[np.int64]:
    tables = np.zeros((len(streams), max((len(stream.pages) for stream in streams), default=0)), np.int64)
    for row, stream in enumerate(streams):
        tables[row, : len(stream.pages)] = stream.pages
    return tables


def stream_slots(pages: list[int], start: int, end: int, size: int) -> npt.NDArray[np.int64]:
    """Where tokens `start` to `end` of a stream lie."""
    places = np.arange(start, end)
    return np.asarray(pages, np.int64)[places // size] * size + places % size


class PagedCache:
    """The pages of every layer. `batch` is the step that is running."""

    def __init__(
        self, config: ModelConfig, pages: int, size: int, dtype: torch.dtype, device: torch.device | str, exact: bool
    ) -> None:
        self.size, self.exact = size, exact
        latent = config.latent
        self.value_dim = latent.kv_rank if latent else config.head_dim
        k_shape = (1, latent.kv_rank + latent.rope_dim) if latent else (config.kv_heads, config.head_dim)

        def slabs() -> list[Tensor]:
            # one page more than the pool has: rows that only fill a captured graph write there
            shape = ((pages + 1) * size, *k_shape)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

        self.keys = slabs()
        self.values = [] if latent else slabs()
        self.batch: Batch | None = None
        self.lengths = torch.zeros(1, dtype=torch.int64, device=device)  # the model sees one row

    def positions(self, tokens: int) -> Tensor:
        assert self.batch is not None
        return self.batch.positions[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float) -> Tensor:
        batch = self.batch
        assert batch is not None
        keys = self.keys[layer]
        values = self.values[layer] if v is not None else keys[..., : self.value_dim]
        store_pages(k[0], None if v is None else v[0], keys, values, batch.slots)
        tables, lengths = batch.tables, batch.lengths
        if isinstance(batch.spans, Blocks):
            return attend_blocks(q[0], keys, values, tables, lengths, batch.spans, self.size, scale=scale)[None]
        n, parts = batch.decoding, []
        if n:
            parts.append(
                attend_pages(q[0, :n], keys, values, tables, lengths, self.size, scale=scale, exact=self.exact)
            )
        if batch.spans:
            parts.append(attend_spans(q[0, n:], keys, values, batch.spans, scale=scale))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]

    def advance(self, tokens: int) -> None:
        """The scheduler keeps count."""
