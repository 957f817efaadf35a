"""Low-rank adapters: a frozen weight W is trained as W + scale x up x down, with two small matrices.

An adapter belongs to one of our matrices, which may hold several of the Hugging Face checkpoint (queries, keys and
values, or gate and up projection). Each of these parts has a pair of matrices of its own, as in PEFT, so adapters can
be exchanged with it. The products run beside the frozen weight, in the trainer and in the sampler: merging them into a
bfloat16 weight would round away most of a small update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from etude.kernels.grouped import grouped_matmul
from etude.kernels.linear import linear
from etude.parallel.experts import local_experts


class Adapter(nn.Module):
    """The low-rank update of one matrix [out, in], or of a stack of them, one for each expert."""

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], width: int, rank: int, alpha: float, experts: int | None
    ) -> None:
        super().__init__()
        self.names = tuple(names)  # Hugging Face modules of the parts; with experts, expert by expert
        self.sizes = list(sizes)  # rows of each part of one matrix
        self.rank, self.scale = rank, alpha / rank
        stack = () if experts is None else (experts,)
        self.down = nn.Parameter(torch.empty(*stack, len(sizes) * rank, width))
        self.up = nn.Parameter(torch.empty(*stack, sum(sizes), rank))

    def initialize(self, generator: torch.Generator) -> None:
        """Draw `down` as PEFT does and zero `up`: the update is zero at first."""
        bound = 1 / math.sqrt(self.down.shape[-1])
        with torch.no_grad():
            drawn = torch.empty(self.down.shape).uniform_(-bound, bound, generator=generator)
            self.down.copy_(drawn)
            self.up.zero_()

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """Return the update's product with x [..., in]; with experts, x is sorted by expert and `ends` bounds them."""
        down, up = local_experts(self.down), local_experts(self.up)  # experts may be divided over ranks
        inner = linear(x, down) if ends is None else grouped_matmul(x, down, ends)
        parts = zip(inner.split(self.rank, dim=-1), up.split(self.sizes, dim=-2), strict=True)
        if ends is None:
            found = [linear(part, matrix) for part, matrix in parts]
        else:
            found = [grouped_matmul(part.contiguous(), matrix.contiguous(), ends) for part, matrix in parts]
        return self.scale * (found[0] if len(found) == 1 else torch.cat(found, dim=-1))

    def update(self) -> Tensor:
        """Return what is added to the weight, in float32."""
        parts = zip(self.down.float().split(self.rank, dim=-2), self.up.float().split(self.sizes, dim=-2), strict=True)
        return self.scale * torch.cat([up @ down for down, up in parts], dim=-2)

    def part_views(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return views of `down` and `up` of every Hugging Face module: PEFT's lora_A and lora_B."""
        stacked = self.down.dim() == 3
        found: list[tuple[Tensor, Tensor]] = []
        for down, up in zip(self.down, self.up, strict=True) if stacked else [(self.down, self.up)]:
            found += zip(down.split(self.rank), up.split(self.sizes), strict=True)
        return dict(zip(self.names, found, strict=True))
