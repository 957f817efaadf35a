"""Small weights, and what a training step makes of them."""

import torch
from torch import Tensor

State = dict[str, Tensor]


def weights(seed: int, size: int = 500) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator).bfloat16() for name in ("a", "b.weight", "c")}


def stepped(state: State, seed: int) -> State:
    """Return weights with some values moved to a neighbour, as after a training step."""
    chance = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in state.items():
        bits = tensor.view(torch.int16).clone()
        bits[torch.rand(len(bits), generator=chance) < 0.02] += 1
        moved[name] = bits.view(torch.bfloat16)
    return moved
