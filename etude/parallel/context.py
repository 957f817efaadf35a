"""Context parallelism: the tokens of a row are divided over ranks; queries stay, keys and values are gathered.

A row is cut into 2 x size chunks and rank r holds chunks r and 2 x size - 1 - r, so that all ranks have the same number
of (query, key) pairs in a causal row. Every rank gathers the keys and values (latent attention: the latents) of the
whole row, and the gradients of what it gathered are summed over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Lazy, unlike torch.compiler.disable: importing the compiler takes seconds, and few processes need it.
from torch._compile import _disable_dynamo

from etude.errors import InputError
from etude.kernels.attention import Documents, QueryChunk, QueryChunks


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the tokens of a row, as one of them sees it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def cut(self, whole: Tensor) -> Tensor:
        """Return this rank's tokens [rows, length / size, ...] of whole rows [rows, length, ...]."""
        self.chunk_size(whole.shape[1])
        return _by_rank(whole, self.size)[self.rank].contiguous()

    def chunk_size(self, length: int) -> int:
        """Return the tokens of a chunk, of which each rank has two."""
        if length % (2 * self.size):
            raise InputError(
                f"context parallelism over {self.size} ranks cuts a row into {2 * self.size} equal chunks; a row of "
                f"{length} tokens does not divide"
            )
        return length // (2 * self.size)

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, without a gradient."""
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def shifted(self, values: Tensor, offset: int) -> Tensor:
        """Return the values `offset` tokens later in each row, zeros at its end; without a gradient.

        Both are this rank's tokens [rows, tokens, ...]; only the first tokens of chunks travel.
        """
        chunks = values.detach().unflatten(1, (2, -1))
        if offset > chunks.shape[2]:
            raise InputError(
                f"rows of {self.size * values.shape[1]} tokens over {self.size} context ranks are chunks of "
                f"{chunks.shape[2]} tokens; expected at least {offset}, one for each multi-token-prediction layer"
            )
        heads = _in_sequence(self._gathered(chunks[:, :, :offset].flatten(1, 2)))
        after = torch.cat((heads[:, offset:], torch.zeros_like(heads[:, :offset])), dim=1)  # each chunk's successor
        return torch.cat((chunks[:, :, offset:], self.cut(after).unflatten(1, (2, -1))), dim=2).flatten(1, 2)

    def _gathered(self, part: Tensor) -> Tensor:
        """Return the tensors of all ranks [size, ...]."""
        found = part.new_empty(self.size, *part.shape)
        # Contiguous tensors only: the collective ignores strides. gloo wants equal numbers of dimensions.
        dist.all_gather_into_tensor(found.flatten(0, 1), part.contiguous(), group=self.group)
        return found

    def _reduced(self, parts: Tensor) -> Tensor:
        """Return this rank's part [...] of the sum over the ranks of tensors [size, ...], in float32 at least."""
        wide = parts.to(torch.promote_types(parts.dtype, torch.float32)).contiguous()
        found = wide.new_empty(wide.shape[1:])
        dist.reduce_scatter_tensor(found, wide.flatten(0, 1), group=self.group)
        return found.to(parts.dtype)


@dataclass(frozen=True)
class ContextShard(QueryChunks):
    """The part of packed rows that one context rank has: its queries, and how to get the keys they attend to."""

    context: ContextGroup
    keys: int  # tokens of each row, from its first, that this rank's last query may attend to

    @classmethod
    def pack(cls, rows: Sequence[Sequence[int]], context: ContextGroup, device: torch.device) -> ContextShard:
        """Cut rows with these document lengths, which may cross chunks."""
        whole = Documents.pack(rows)
        size, local = context.chunk_size(whole.positions.shape[1]), (context.rank, 2 * context.size - 1 - context.rank)
        chunks = tuple(
            QueryChunk.cut(row, at * size, number * size, (number + 1) * size, lengths, device)
            for row, lengths in enumerate(rows)
            for at, number in enumerate(local)
        )
        return cls(context.cut(whole.positions).to(device), chunks, context, max(c.keys.stop for c in chunks))

    @_disable_dynamo
    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return tensors [rows, keys, ...] of the rows in sequence, given this rank's [rows, tokens, ...].

        They travel together. The gradient of each is the sum of all ranks' gradients.
        """
        flat = [part.flatten(2) for part in parts]
        whole: Tensor = _Gather.apply(torch.cat(flat, dim=-1), self.context)  # type: ignore[no-untyped-call]
        found = whole[:, : self.keys].split([part.shape[-1] for part in flat], dim=-1)
        return tuple(part.unflatten(-1, own.shape[2:]) for part, own in zip(found, parts, strict=True))


def gather_keys(documents: Documents | QueryChunks | None, *parts: Tensor) -> tuple[Tensor, ...]:
    """Return keys, values or latents of the whole rows: those of other ranks are gathered, if there are any."""
    return documents.gather(*parts) if isinstance(documents, ContextShard) else parts


def gathered_bytes(
    tokens: int, width: int, size: int, itemsize: int, *, forwards: int = 1, backward: bool = True
) -> int:
    """Return the bytes that a rank receives in one layer's forward and backward for rows of `tokens` tokens.

    `width` numbers of a token are gathered: keys and values of all heads, or the latent and the rotary key. Their
    gradients return in float32; with recomputation there are two forwards.
    """
    others = tokens * width * (size - 1) // size
    return others * (itemsize * forwards + (max(itemsize, 4) if backward else 0))


class _Gather(torch.autograd.Function):
    # torch.distributed.nn.functional.all_gather gives wrong gradients on gloo for permuted layouts.
    @staticmethod
    def forward(ctx: Any, part: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return _in_sequence(context._gathered(part))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        context: ContextGroup = ctx.context
        return context._reduced(_by_rank(gradient, context.size)), None


def _by_rank(whole: Tensor, size: int) -> Tensor:
    """Turn rows [rows, length, ...] into the parts of all ranks [size, rows, length / size, ...]."""
    first, second = whole.unflatten(1, (2, size, -1)).unbind(1)
    return torch.stack((first, second.flip(1)), dim=2).movedim(1, 0).flatten(2, 3)


def _in_sequence(parts: Tensor) -> Tensor:
    """Turn the parts of all ranks into rows: the inverse of `_by_rank`."""
    first, second = parts.unflatten(2, (2, -1)).unbind(2)
    return torch.cat((first, second.flip(0))).movedim(0, 1).flatten(1, 2)
