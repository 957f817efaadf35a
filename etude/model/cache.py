"""A contiguous KV cache: one tensor per layer, rows of unequal length. The inference engine has a paged one.

All rows advance by the same number of tokens but may differ in length: after a padded prefill, `truncate` sets how many
tokens of each row were real, and later tokens overwrite the padding. Latent attention stores latents.
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
        self.length, self.extent = (
            length,
            0,
        )  # extent: tokens of the longest row, known without a device synchronization
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        latent = config.latent
        self._value_dim = latent.kv_rank if latent else config.head_dim
        k_shape = (1, latent.kv_rank + latent.rope_dim) if latent else (config.kv_heads, config.head_dim)
        v_shape = (0, 0) if latent else k_shape

        def tensors(shape: tuple[int, int]) -> list[Tensor]:
            return [torch.zeros(rows, length, *shape, dtype=dtype, device=device) for _ in range(config.layers)]

        self.keys, self.values = tensors(k_shape), tensors(v_shape)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the next `tokens` tokens of every row, [rows, tokens]."""
        if self.extent + tokens > self.length:
            raise InputError(f"the KV cache holds {self.length} tokens a row; {self.extent} + {tokens} do not fit")
        return self.lengths[:, None] + torch.arange(tokens, device=self.lengths.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float) -> Tensor:
        """Store the new keys and values of a layer and attend to all tokens up to each query."""
        tokens = q.shape[1]
        at, end = self.positions(tokens), self.extent + tokens
        self.keys[layer][self._rows, at] = k
        keys = self.keys[layer][:, :end]
        if v is None:
            values = keys[..., : self._value_dim]
        else:
            self.values[layer][self._rows, at] = v
            values = self.values[layer][:, :end]
        visible = torch.arange(end, device=at.device) <= at[..., None]
        return attend_masked(q, keys, values, scale=scale, mask=visible)

    def advance(self, tokens: int) -> None:
        """Count the tokens of a forward pass as stored; called once, after the last layer."""
        self.lengths += tokens
        self.extent += tokens

    def truncate(self, lengths: Tensor) -> None:
        """Drop everything after `lengths` tokens of each row: padding after a prefill, or rejected drafts."""
        if lengths.shape != self.lengths.shape or bool(((lengths > self.lengths) | (lengths < 0)).any()):
            raise InputError(f"cannot truncate rows of {self.lengths.tolist()} tokens to {lengths.tolist()}")
        self.lengths = lengths.to(self.lengths)
        self.extent = int(self.lengths.max())
