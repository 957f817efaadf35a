"""Building blocks of all layers. Their weights come from a checkpoint or from `initialize`, never from here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from etude.kernels.fused import rms_norm, swiglu
from etude.kernels.linear import linear
from etude.model.lora import Adapter


class Linear(nn.Linear):
    def __init__(self, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__(in_features, out_features, bias)
        self.adapter: Adapter | None = None

    def reset_parameters(self) -> None:
        """Do nothing: torch would draw random weights that are overwritten anyway."""

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        return y if self.adapter is None else y + self.adapter(x)

    def effective_weight(self) -> Tensor:
        """Return the weight with its adapter's update, for products that are not `forward`."""
        if self.adapter is None:
            return self.weight
        return (self.weight.float() + self.adapter.update()).to(self.weight.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class MLP(nn.Module):
    """SwiGLU with gate and up projections as one matrix product."""

    def __init__(self, hidden: int, size: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * size, bias)
        self.down = Linear(size, hidden, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(swiglu(self.gate_up(x)))
        return out
