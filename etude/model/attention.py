"""Grouped-query and multi-head latent attention, and the rotary positions both use.

Without a cache, attention runs over the given tokens; with context parallelism the keys of other ranks are gathered.
With one, the new keys are added to the cache and attention runs over everything in it. Latent attention caches one
latent per token and attends to it directly: the key up-projection is absorbed into the query and the value
up-projection is applied after the sum, so decoding never expands keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from etude.kernels.attention import Documents, QueryChunks, attend
from etude.kernels.fused import rotate
from etude.model.config import LatentConfig, ModelConfig, RopeConfig
from etude.model.layers import Linear, RMSNorm
from etude.parallel.context import gather_keys

# How the tokens are packed: whole rows, documents, or this rank's part of rows (`etude.parallel.context.ContextShard`).
Packing = Documents | QueryChunks | None


class Rotation(NamedTuple):
    """cos and sin of every position's angles, [rows, tokens, 1, dim / 2], rounded where transformers and vLLM round."""

    cos: Tensor
    sin: Tensor


class AttentionCache(Protocol):
    """Keys and values of earlier tokens. `v` is None for latent attention, where the values are the first part of k."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, *, scale: float) -> Tensor: ...


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """Return the rotation per position of each pair of dimensions, with the long-context scaling applied."""
    plain = rope.theta ** -(torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_length * plain / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:  # yarn: high frequencies are kept, low ones are interpolated, with a ramp in between
        low, high = (_yarn_bound(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        keep = 1 - ramp.clamp(0, 1)
    keep = keep.clamp(0, 1)
    return plain * keep + plain / rope.factor * (1 - keep)


def _yarn_bound(rope: RopeConfig, turns: float) -> float:
    """Return the (fractional) pair that makes `turns` full turns over the original context."""
    return rope.dim * math.log(rope.original_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


class Rope(nn.Module):
    frequencies: Tensor

    def __init__(self, config: RopeConfig) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("frequencies", inverse_frequencies(config), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rope:
        """Follow the model's device but not its dtype: bfloat16 angles are too coarse to tell positions apart."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        with torch.device(self.frequencies.device):
            self.frequencies = inverse_frequencies(self.config)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        angles = positions[..., None, None].float() * self.frequencies
        factor = self.config.attention_factor
        return Rotation((angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype))


class GroupedQueryAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.dim = layer, config.head_dim
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.rotated_dim = 0 if layer in config.unrotated_layers else config.rope.dim
        self.scale = config.head_dim**-0.5
        self.qkv = Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.dim, config.attention_bias)
        self.out = Linear(self.heads * self.dim, config.hidden_size, config.attention_out_bias)
        self.q_norm = RMSNorm(self.dim, config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(self.dim, config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rotation: Rotation, documents: Packing, cache: AttentionCache | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=-2)
        q, k = self._rotate(self.q_norm(q), rotation), self._rotate(self.k_norm(k), rotation)
        if cache is None:
            k, v = gather_keys(documents, k, v)
            y = attend(q, k, v, scale=self.scale, documents=documents)
        else:
            y = cache.attend(self.layer, q, k, v, scale=self.scale)
        out: Tensor = self.out(y.flatten(-2))
        return out

    def _rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the first dimensions of each head: all of them, or none, in most models."""
        if self.rotated_dim == self.dim:
            return rotate(x, *rotation)
        if not self.rotated_dim:
            return x
        turned, rest = x.split((self.rotated_dim, self.dim - self.rotated_dim), dim=-1)
        return torch.cat((rotate(turned, *rotation), rest), dim=-1)


class LatentAttention(nn.Module):
    def __init__(self, config: ModelConfig, latent: LatentConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.heads, self.latent = layer, config.heads, latent
        self.interleaved = config.rope.interleaved
        self.scale = config.head_dim**-0.5 * config.rope.score_factor
        hidden, bias, width = config.hidden_size, config.attention_bias, config.heads * config.head_dim
        # The two inner norms use epsilon 1e-6 whatever the config says, as in all DeepSeek implementations.
        if latent.q_rank is None:
            self.q = Linear(hidden, width, False)
        else:
            self.q_down = Linear(hidden, latent.q_rank, bias)
            self.q_norm = RMSNorm(latent.q_rank, 1e-6)
            self.q_up = Linear(latent.q_rank, width, False)
        self.kv_down = Linear(hidden, latent.kv_rank + latent.rope_dim, bias)
        self.kv_norm = RMSNorm(latent.kv_rank, 1e-6)
        self.kv_up = Linear(latent.kv_rank, self.heads * (latent.nope_dim + latent.v_dim), False)
        self.out = Linear(self.heads * latent.v_dim, hidden, bias)

    def forward(self, x: Tensor, rotation: Rotation, documents: Packing, cache: AttentionCache | None) -> Tensor:
        dims = self.latent
        q = self.q(x) if dims.q_rank is None else self.q_up(self.q_norm(self.q_down(x)))
        q_nope, q_rope = q.unflatten(-1, (self.heads, -1)).split((dims.nope_dim, dims.rope_dim), dim=-1)
        latent, k_rope = self.kv_down(x).split((dims.kv_rank, dims.rope_dim), dim=-1)
        latent = self.kv_norm(latent)
        q_rope = rotate(q_rope, *rotation, self.interleaved)
        k_rope = rotate(k_rope[..., None, :], *rotation, self.interleaved)
        if cache is None:
            latent, k_rope = gather_keys(documents, latent, k_rope)  # much less than the keys and values made of them
            kv = self.kv_up(latent).unflatten(-1, (self.heads, -1))
            k_nope, v = kv.split((dims.nope_dim, dims.v_dim), dim=-1)
            k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
            y = attend(torch.cat((q_nope, q_rope), dim=-1), k, v, scale=self.scale, documents=documents)
        else:
            y = self._attend_latents(q_nope, q_rope, latent, k_rope, cache)
        out: Tensor = self.out(y.flatten(-2))
        return out

    def _attend_latents(
        self, q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, cache: AttentionCache
    ) -> Tensor:
        up = self.kv_up.effective_weight().view(self.heads, -1, self.latent.kv_rank)
        k_up, v_up = up.split((self.latent.nope_dim, self.latent.v_dim), dim=1)
        q = torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, k_up), q_rope), dim=-1)
        k = torch.cat((latent[..., None, :], k_rope), dim=-1)
        y = cache.attend(self.layer, q, k, None, scale=self.scale)
        return torch.einsum("bthr,hvr->bthv", y, v_up)
