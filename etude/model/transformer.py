"""The network. Trainer and sampler run the same forward, so they can differ only in numerics.

Arguments choose between four uses of one code path: whole rows (none), packed documents (`documents`), incremental
decoding (`cache`), routing replay and recording (`routing`). `hidden` stops before the output head, so that a loss can
be computed in chunks without materialising all logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from etude.errors import InputError
from etude.kernels.linear import linear
from etude.model.attention import AttentionCache, GroupedQueryAttention, LatentAttention, Packing, Rope, Rotation
from etude.model.cache import KVCache
from etude.model.config import ModelConfig
from etude.model.layers import MLP, Linear, RMSNorm
from etude.model.moe import MoE, Routing
from etude.model.settings import LoraSettings


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention: GroupedQueryAttention | LatentAttention
        if config.latent:
            self.attention = LatentAttention(config, config.latent, layer)
        else:
            self.attention = GroupedQueryAttention(config, layer)
        self.mlp: MLP | MoE
        if config.moe and layer in config.moe.layers:
            self.mlp = MoE(config.hidden_size, config.moe)
        else:
            self.mlp = MLP(config.hidden_size, config.mlp_size, config.mlp_bias)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        documents: Packing = None,
        cache: AttentionCache | None = None,
        replay: Tensor | None = None,
        plausibility: float = 0.0,
        keep_scores: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the new hidden states and, of a MoE layer, the chosen experts and the gate scores if asked for."""
        x = x + self.attention(self.attention_norm(x), rotation, documents, cache)
        if isinstance(self.mlp, MoE):
            y, chosen, scores = self.mlp(self.mlp_norm(x), replay, plausibility)
            return x + y, chosen, scores if keep_scores else None
        return x + self.mlp(self.mlp_norm(x)), None, None


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        shape = config.vocab_size, config.hidden_size
        # with a given weight, torch skips its random initialisation
        self.embed = nn.Embedding(*shape, _weight=torch.empty(shape))
        self.rope = Rope(config.rope)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.keep_scores = False  # training: objectives record gate scores, for a loss that balances experts
        self.lora: LoraSettings | None = None  # of its adapters, if it has some
        self.recompute = False  # activation checkpointing: less memory, one more forward of each block
        self.head = None if config.tied else Linear(config.hidden_size, config.vocab_size, False)

    def forward(
        self,
        tokens: Tensor,
        *,
        documents: Packing = None,
        cache: KVCache | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return the logits [rows, tokens, vocabulary] of tokens [rows, tokens]."""
        return self.logits(self.hidden(tokens, documents=documents, cache=cache, routing=routing))

    def hidden(
        self,
        tokens: Tensor,
        *,
        documents: Packing = None,
        cache: KVCache | None = None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return the last hidden states after the final norm: the input of the head and of MTP layers."""
        positions = self._positions(tokens, documents, cache)
        layers = iter(self._replayed(tokens, routing))
        plausibility, keep_scores = (routing.plausibility, routing.keep_scores) if routing else (0.0, False)
        x, choices, scores = self.embed(tokens), [], []
        rotation = self.rope(positions, x.dtype)
        for block in self.blocks:
            replay = next(layers, None) if isinstance(cast(Block, block).mlp, MoE) else None
            x, chosen, scored = self._run(block, x, rotation, documents, cache, replay, plausibility, keep_scores)
            if chosen is not None:
                choices.append(chosen)
            if scored is not None:
                scores.append(scored)
        if cache is not None:
            cache.advance(tokens.shape[1])
        if routing is not None:
            routing.chosen = torch.stack(choices, dim=2)
            routing.scores = torch.stack(scores, dim=2) if scores else None
        return cast(Tensor, self.norm(x))

    def _run(self, block: nn.Module, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if self.recompute and torch.is_grad_enabled():
            # keeps only the block's input and recomputes the rest in the backward
            return cast(tuple[Tensor, Tensor | None, Tensor | None], checkpoint(block, *inputs, use_reentrant=False))
        return cast(tuple[Tensor, Tensor | None, Tensor | None], block(*inputs))

    def logits(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        return self.embed.weight if self.head is None else self.head.weight

    def _positions(self, tokens: Tensor, documents: Packing, cache: KVCache | None) -> Tensor:
        if documents is not None and cache is not None:
            raise InputError("packed documents and a KV cache cannot be combined; pass only one of them")
        if cache is not None:
            if cache.rows != len(tokens):
                raise InputError(f"the KV cache has {cache.rows} rows; the tokens have {len(tokens)}")
            return cache.positions(tokens.shape[1])
        if documents is None:
            return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if documents.positions.shape != tokens.shape:
            want, got = list(tokens.shape), list(documents.positions.shape)
            raise InputError(f"the documents fill rows of shape {got}, the tokens are {want}")
        return documents.positions

    def _replayed(self, tokens: Tensor, routing: Routing | None) -> tuple[Tensor, ...]:
        if routing is None:
            return ()
        routing.check(self.config, *tokens.shape)
        return () if routing.replay is None else routing.replay.to(tokens.device).unbind(dim=2)


def initialize(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return a new model: normal weights with the config's standard deviation, norms 1, biases 0; same for a seed."""
    model = Transformer(config)
    draw_weights(model, config.init_std, seed)
    return model.to(dtype)


def draw_weights(module: nn.Module, std: float, seed: int) -> None:
    """Draw matrices from a normal distribution and zero the biases, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()


# packed or whole rows, training or evaluation, two lengths: more variants than dynamo's default of eight
RECOMPILE_LIMIT = 64


def compile_blocks(model: Transformer) -> Transformer:
    """Compile each block in place. All layers have the same code, so they share one compilation."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for block in model.blocks:
        block.compile()
    return model


def compile_forwards(modules: Iterable[nn.Module]) -> None:
    """Compile the forward functions of modules, without the hooks that gather the weights of sharded ones."""
    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    for module in modules:
        module.forward = torch.compile(module.forward)
