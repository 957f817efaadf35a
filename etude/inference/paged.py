"""The paged KV cache as `etude.model` sees it, and the batch of one step laid out over it.

A step is one flat row of tokens: first one for each decoding sequence, then prefill chunks. For latent attention the
cache holds latents. Attention itself is in `kernels/paged.py`; this file computes the layout.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etude.inference.request import SequenceState
from etude.inference.scheduler import ScheduledStep
from etude.kernels.paged import Blocks, Spans, attend_blocks, attend_pages, attend_spans, store_pages
from etude.model.config import ModelConfig


@dataclass(frozen=True)
class PagedBatch:
    """One step as tensors. Decoding sequences come first, one token each."""

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    slots: Tensor  # [T], where each token's keys and values go: page * size + offset
    decoding: int  # number of tokens that belong to decoding sequences; in a mixed graph, the most there can be
    tables: Tensor  # [decoding, most pages], page numbers, padded; with blocks, prefilling sequences too
    lengths: Tensor  # [decoding], tokens visible to each, itself included; 0: it does not decode
    spans: Spans | Blocks | None  # prefill chunks, after the decoding sequences
    sampled_rows: Tensor  # rows of the step from which a next token is sampled


@dataclass(frozen=True)
class StepLayout:
    """The tokens of a step on the host, one after another."""

    tokens: list[int]
    positions: list[int]
    slots: npt.NDArray[np.int64]
    sampled_rows: list[int]
    starts: list[int]  # where each prefill chunk begins among the tokens


def lay_out_step(step: ScheduledStep, size: int) -> StepLayout:
    tokens = [sequence.output[-1] for sequence in step.decoding]
    positions = [sequence.length - 1 for sequence in step.decoding]
    pairs = zip(step.decoding, positions, strict=True)
    slots = [np.array([sequence.pages[at // size] * size + at % size for sequence, at in pairs], np.int64)]
    sampled_rows, starts = list(range(len(step.decoding))), []
    for chunk in step.prefill:
        starts.append(len(tokens))
        tokens += chunk.sequence.tokens(chunk.start, chunk.end)
        positions += range(chunk.start, chunk.end)
        slots.append(slots_of(chunk.sequence.pages, chunk.start, chunk.end, size))
        if chunk.is_last:
            sampled_rows.append(len(tokens) - 1)
    return StepLayout(tokens, positions, np.concatenate(slots), sampled_rows, starts)


def make_batch(step: ScheduledStep, size: int, device: torch.device | str) -> PagedBatch:
    """Return a step as tensors, built with numpy on the host and moved once."""
    layout = lay_out_step(step, size)
    runs = [slots_of(chunk.sequence.pages, 0, chunk.end, size) for chunk in step.prefill]
    tables = _page_tables(step.decoding)

    def move(values: object) -> Tensor:
        return torch.as_tensor(np.asarray(values, np.int64)).to(device, non_blocking=True)

    return PagedBatch(
        move(layout.tokens),
        move(layout.positions),
        move(layout.slots),
        len(step.decoding),
        torch.from_numpy(tables).to(device),
        move([sequence.length for sequence in step.decoding]),
        Spans.of([chunk.end - chunk.start for chunk in step.prefill], runs, device) if runs else None,
        move(layout.sampled_rows),
    )


def _page_tables(sequences: list[SequenceState]) -> npt.NDArray[np.int64]:
    tables = np.zeros((len(sequences), max((len(sequence.pages) for sequence in sequences), default=0)), np.int64)
    for row, sequence in enumerate(sequences):
        tables[row, : len(sequence.pages)] = sequence.pages
    return tables


def slots_of(pages: list[int], start: int, end: int, size: int) -> npt.NDArray[np.int64]:
    """Return the slots of tokens `start` to `end` of a sequence."""
    positions = np.arange(start, end)
    return np.asarray(pages, np.int64)[positions // size] * size + positions % size


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
            # one page more than the pool has: padding rows of a captured graph write there
            shape = ((pages + 1) * size, *k_shape)
            return [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]

        self.keys = slabs()
        self.values = [] if latent else slabs()
        self.batch: PagedBatch | None = None
        self.rows = 1  # the model sees one row

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
        """Do nothing: the scheduler counts computed tokens."""
