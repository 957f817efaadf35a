"""A contiguous KV cache: one tensor per layer, rows of equal length. The inference engine has a paged one.

Latent attention stores latents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etude.errors import InputError
from etude.kernels.attention import attend_masked
from etude.model.config import ModelConfig


class KVCache:
    def __init__(
        self, config: ModelConfig, rows: int, length: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.rows, self.length, self.stored = rows, length, 0  # tokens a row can hold, and tokens it holds
        latent = config.latent
        self._value_dim = latent.kv_rank if latent else config.head_dim
        k_shape = (1, latent.kv_rank + latent.rope_dim) if latent else (config.kv_heads, config.head_dim)
        v_shape = (0, 0) if latent else k_shape

        def tensors(shape: tuple[int, int]) -> list[Tensor]:
            return [torch.zeros(rows, length, *shape, dtype=dtype, device=device) for _ in range(config.layers)]

        self.keys, self.values = tensors(k_shape), tensors(v_shape)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the next `tokens` tokens of every row, [rows, tokens]."""
        if (end := self.stored + tokens) > self.length:
            raise InputError(f"the KV cache holds {self.length} tokens a row; {self.stored} + {tokens} do not fit")
        return torch.arange(self.stored, end, device=self.keys[0].device).expand(self.rows, tokens)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float) -> Tensor:
        """Store the new keys and values of a layer and attend to all tokens up to each query."""
        start, end = self.stored, self.stored + q.shape[1]
        self.keys[layer][:, start:end] = k
        keys = self.keys[layer][:, :end]
        if v is None:
            values = keys[..., : self._value_dim]
        else:
            self.values[layer][:, start:end] = v
            values = self.values[layer][:, :end]
        visible = torch.arange(end, device=q.device) <= self.positions(q.shape[1])[..., None]
        return attend_masked(q, keys, values, scale=scale, mask=visible)

    def advance(self, tokens: int) -> None:
        """Count the tokens of a forward pass as stored; called once, after the last layer."""
        self.stored += tokens
