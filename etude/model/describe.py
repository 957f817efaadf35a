"""What a model costs, from its config alone: parameters, bytes, and memory per GPU on a named mesh.

Parameters are counted on the model itself, built on torch's meta device, so the count cannot drift from the network.
Memory is an estimate with its assumptions in the open: bfloat16 weights and gradients, float32 master weights and two
Adam moments, all sharded over every GPU (context-parallel ranks shard too); one layer at a time gathered whole, its
experts divided by EP; activations checkpointed at layer boundaries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.errors import InputError
from etude.kernels.loss import CHUNK_ELEMENTS
from etude.model.config import ModelConfig
from etude.model.known import KNOWN
from etude.model.moe import MoE
from etude.model.transformer import Block, Transformer

WEIGHT = GRADIENT = 2
MASTER_AND_MOMENTS = 12


@dataclass(frozen=True)
class Mesh:
    gpus: int
    ep: int = 1
    cp: int = 1
    sequence: int = 32_768
    rows: int = 1  # sequences a context-parallel group works on at once


@dataclass(frozen=True)
class Parameters:
    total: int
    active: int  # per token: all but the experts it is not routed to; embeddings included
    experts: int
    embedding: int
    mtp_layer: int  # what one multi-token-prediction layer in DeepSeek-V3's design would add


@dataclass(frozen=True)
class MemoryPerGpu:
    weights: int
    gradients: int
    optimizer: int
    gathered_layers: int
    activations: int
    head_and_loss: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def find_config(name: str) -> ModelConfig:
    """A known name, a model directory, or a config.json."""
    if name in KNOWN:
        return ModelConfig.from_hugging_face(KNOWN[name].config, name)
    path = Path(name)
    if path.is_dir():
        return ModelConfig.load(path)
    if path.is_file():
        try:
            return ModelConfig.from_hugging_face(json.loads(path.read_text()), name)
        except (ValueError, AttributeError) as problem:
            raise InputError(f"{name}: not readable as a JSON config ({problem})") from None
    raise InputError(f"{name}: neither a model directory nor a config.json nor one of {', '.join(KNOWN)}")


def count_parameters(config: ModelConfig) -> Parameters:
    with torch.device("meta"):
        model = Transformer(config)
        last = Block(config, config.layers - 1)
    total, embedding = _size(model), model.embed.weight.numel()
    experts = sum(_size(m.experts) for m in model.modules() if isinstance(m, MoE))
    idle = experts * (config.moe.experts - config.moe.per_token) // config.moe.experts if config.moe else 0
    # DeepSeek-V3: one more block, a projection of (hidden, next embedding) and three norms; embedding and head shared
    mtp_layer = _size(last) + 2 * config.hidden_size**2 + 3 * config.hidden_size
    return Parameters(total, total - idle, experts, embedding, mtp_layer)


def kv_bytes_per_token(config: ModelConfig) -> int:
    """bfloat16; latent attention keeps one latent and one rotary key a layer, for all heads."""
    latent = config.latent
    width = latent.kv_rank + latent.rope_dim if latent else 2 * config.kv_heads * config.head_dim
    return 2 * width * config.layers


def memory_per_gpu(config: ModelConfig, parameters: Parameters, mesh: Mesh) -> MemoryPerGpu:
    _check_mesh(config, mesh)
    shard = -(-parameters.total // mesh.gpus)
    moe_layers = len(config.moe.layers) if config.moe else 0
    layer_experts = parameters.experts // moe_layers if moe_layers else 0
    with torch.device("meta"):
        layer_dense = _size(Block(config, config.layers - 1)) - layer_experts
    layer = layer_dense + layer_experts // mesh.ep
    tokens = mesh.rows * mesh.sequence // mesh.cp
    return MemoryPerGpu(
        weights=WEIGHT * shard,
        gradients=GRADIENT * shard,
        optimizer=MASTER_AND_MOMENTS * shard,
        gathered_layers=(2 * WEIGHT + GRADIENT) * layer,  # this layer, the next one on its way, gradients of this one
        activations=2 * tokens * (config.layers * config.hidden_size + _layer_width(config)),
        head_and_loss=(WEIGHT + 4) * parameters.embedding + 2 * min(CHUNK_ELEMENTS, tokens * config.vocab_size),
    )


def training_flops_per_token(config: ModelConfig, length: int) -> float:
    """Forward and backward, nothing recomputed: three times the forward's products; the embedding look-up is free.

    Six for each active weight, and causal attention over half the row on average.
    """
    counted = count_parameters(config)
    products = counted.active - (0 if config.tied else counted.embedding)
    latent = config.latent
    width = config.heads * (config.head_dim + (latent.v_dim if latent else config.head_dim))
    return 6 * products + 3 * config.layers * 2 * width * length / 2


def _layer_width(config: ModelConfig) -> int:
    """Numbers kept per token inside one layer while its backward runs, without attention's own scratch space."""
    heads = config.heads * config.head_dim
    attention = 4 * config.hidden_size + 2 * heads + 2 * config.kv_heads * config.head_dim
    if config.latent:
        attention += 2 * config.heads * config.latent.v_dim
    if config.moe is None:
        return attention + 3 * config.mlp_size
    rows = config.moe.per_token * (2 * config.hidden_size + 3 * config.moe.expert_size)
    return attention + rows + 3 * config.moe.shared_size


def _check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    if min(mesh.gpus, mesh.ep, mesh.cp, mesh.sequence, mesh.rows) < 1:
        raise InputError("gpus, ep, cp, sequence and rows must all be at least 1")
    if mesh.gpus % mesh.ep or mesh.gpus % mesh.cp:
        raise InputError(f"{mesh.gpus} GPUs do not divide into EP {mesh.ep} and CP {mesh.cp} groups")
    if mesh.ep > 1 and config.moe is None:
        raise InputError(f"EP {mesh.ep} needs experts; this {config.family} model is dense")
    if config.moe and config.moe.experts % mesh.ep:
        raise InputError(f"{config.moe.experts} experts do not divide over EP {mesh.ep}")
    if mesh.sequence % mesh.cp:
        raise InputError(f"a sequence of {mesh.sequence} does not divide over CP {mesh.cp}")
    if mesh.sequence > config.max_length:
        raise InputError(f"a sequence of {mesh.sequence} exceeds the model's {config.max_length} positions")


def _size(module: torch.nn.Module) -> int:
    """What a checkpoint of it holds: parameters, and the router's correction bias, which no gradient trains."""
    return sum(tensor.numel() for tensor in module.state_dict().values())
