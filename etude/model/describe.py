"""Cost of a model from its config alone: parameters, FLOPs, KV cache, and training memory per GPU on a mesh.

Parameters are counted on the model itself, built on torch's meta device, so the count always matches the network.
Memory is an estimate under these assumptions: bfloat16 weights and gradients, float32 master weights and two Adam
moments, all sharded over every GPU (including context-parallel ranks); one layer gathered at a time, its experts
divided by EP; activations checkpointed at layer boundaries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.errors import InputError
from etude.kernels.loss import CHUNK_ELEMENTS
from etude.model.config import ModelConfig
from etude.model.known import KNOWN_MODELS
from etude.model.moe import MoE
from etude.model.transformer import Block, Transformer

WEIGHT_BYTES = GRADIENT_BYTES = 2
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class Mesh:
    gpus: int
    ep: int = 1
    cp: int = 1
    sequence: int = 32_768
    rows: int = 1  # sequences per context-parallel group and micro-batch


@dataclass(frozen=True)
class ParameterCounts:
    total: int
    active: int  # per token: without the experts it is not routed to; embeddings included
    experts: int
    embedding: int
    mtp_layer: int  # of one additional multi-token-prediction layer in DeepSeek-V3's design


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


def kv_bytes_per_token(config: ModelConfig) -> int:
    """Return the bfloat16 KV cache bytes of a token; latent attention keeps a latent and a rotary key per layer."""
    latent = config.latent
    width = latent.kv_rank + latent.rope_dim if latent else 2 * config.kv_heads * config.head_dim
    return 2 * width * config.layers


def memory_per_gpu(config: ModelConfig, parameters: ParameterCounts, mesh: Mesh) -> MemoryPerGpu:
    _check_mesh(config, mesh)
    shard = -(-parameters.total // mesh.gpus)
    moe_layers = len(config.moe.layers) if config.moe else 0
    layer_experts = parameters.experts // moe_layers if moe_layers else 0
    with torch.device("meta"):
        layer_dense = _count(Block(config, config.layers - 1)) - layer_experts
    layer = layer_dense + layer_experts // mesh.ep
    tokens = mesh.rows * mesh.sequence // mesh.cp
    return MemoryPerGpu(
        weights=WEIGHT_BYTES * shard,
        gradients=GRADIENT_BYTES * shard,
        optimizer=OPTIMIZER_BYTES * shard,
        gathered_layers=(2 * WEIGHT_BYTES + GRADIENT_BYTES)
        * layer,  # this layer, the prefetched next one, and the gradients of this one
        activations=2 * tokens * (config.layers * config.hidden_size + _layer_width(config)),
        head_and_loss=(WEIGHT_BYTES + 4) * parameters.embedding + 2 * min(CHUNK_ELEMENTS, tokens * config.vocab_size),
    )


def training_flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the FLOPs of forward and backward without recomputation; the embedding look-up is free.

    Six per active weight, plus causal attention over half of the row on average.
    """
    counted = count_parameters(config)
    weights = counted.active - (0 if config.tied else counted.embedding)
    latent = config.latent
    width = config.heads * (config.head_dim + (latent.v_dim if latent else config.head_dim))
    return 6 * weights + 3 * config.layers * 2 * width * length / 2


def _layer_width(config: ModelConfig) -> int:
    """Return the values stored per token in one layer during its backward, without attention's scratch space."""
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


def _count(module: torch.nn.Module) -> int:
    """Return the number of values in a checkpoint: parameters and the router's correction bias."""
    return sum(tensor.numel() for tensor in module.state_dict().values())
