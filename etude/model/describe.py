"""Cost of a model from its config alone: parameters, FLOPs and KV cache.

Parameters are counted on the model itself, built on torch's meta device, so the count always matches the network. The
memory of a trainer is in `trainer_memory`, its communication in `communication`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from etude.errors import InputError
from etude.model.adapters import adapters, add_adapters
from etude.model.config import ModelConfig
from etude.model.known import KNOWN_MODELS
from etude.model.moe import MoE
from etude.model.settings import LoraSettings
from etude.model.transformer import Block, Transformer


@dataclass(frozen=True)
class ParameterCounts:
    total: int
    active: int  # per token: without the experts it is not routed to; embeddings included
    experts: int
    embedding: int
    mtp_layer: int  # of one additional multi-token-prediction layer in DeepSeek-V3's design


def find_config(name: str) -> ModelConfig:
    """Return the config of a known name, a model directory, or a config.json."""
    if name in KNOWN_MODELS:
        return ModelConfig.from_hugging_face(KNOWN_MODELS[name].config, name)
    path = Path(name)
    if path.is_dir():
        return ModelConfig.load(path)
    if path.is_file():
        try:
            return ModelConfig.from_hugging_face(json.loads(path.read_text()), name)
        except (ValueError, AttributeError) as problem:
            raise InputError(f"{name}: not readable as a JSON config ({problem})") from None
    raise InputError(f"{name}: neither a model directory nor a config.json nor one of {', '.join(KNOWN_MODELS)}")


@lru_cache(maxsize=32)
def count_parameters(config: ModelConfig) -> ParameterCounts:
    with torch.device("meta"):
        model = Transformer(config)
        last = Block(config, config.layers - 1)
    total, embedding = _count(model), model.embed.weight.numel()
    experts = sum(_count(m.experts) for m in model.modules() if isinstance(m, MoE))
    idle = experts * (config.moe.experts - config.moe.per_token) // config.moe.experts if config.moe else 0
    # DeepSeek-V3: one more block, a projection of (hidden, next embedding) and three norms; embedding and head shared
    mtp_layer = _count(last) + 2 * config.hidden_size**2 + 3 * config.hidden_size
    return ParameterCounts(total, total - idle, experts, embedding, mtp_layer)


@lru_cache(maxsize=32)
def adapter_parameters(config: ModelConfig, settings: LoraSettings | None) -> int:
    """Return the number of values of a model's adapters; 0 without settings."""
    if settings is None:
        return 0
    with torch.device("meta"):
        model = Transformer(config)
    return sum(_count(adapter) for adapter in adapters(add_adapters(model, settings, seed=None)))


def kv_width(config: ModelConfig) -> int:
    """Return the numbers of a token that attention keeps per layer: keys and values, or a latent and a rotary key."""
    latent = config.latent
    return latent.kv_rank + latent.rope_dim if latent else 2 * config.kv_heads * config.head_dim


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Return the bfloat16 KV cache bytes of a token."""
    return 2 * kv_width(config) * config.layers


def training_flops_per_token(config: ModelConfig, length: int, *, frozen: bool = False) -> float:
    """Return the FLOPs of forward and backward without recomputation; the embedding look-up is free.

    Six per active weight, four of a frozen one, which adapters beside it leave without a gradient; plus causal
    attention over half of the row on average.
    """
    counted = count_parameters(config)
    weights = counted.active - (0 if config.tied else counted.embedding)
    latent = config.latent
    width = config.heads * (config.head_dim + (latent.v_dim if latent else config.head_dim))
    return (4 if frozen else 6) * weights + 3 * config.layers * 2 * width * length / 2


def _count(module: torch.nn.Module) -> int:
    """Return the number of values in a checkpoint: parameters and the router's correction bias."""
    return sum(tensor.numel() for tensor in module.state_dict().values())
