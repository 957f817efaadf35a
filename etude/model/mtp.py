"""Multi-token-prediction layers in DeepSeek-V3's design: each predicts one token further than the one before it.

Layer k reads the previous layer's hidden state of position i (the main model's for k = 1) and the embedding of token
i + k, runs one transformer block and shares the main head: it predicts token i + k + 1, which the main head predicts at
position i + k. That distribution is its target (self-distillation). No gradient reaches the main model, so training the
main model with or without these layers is bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from etude.errors import InputError
from etude.kernels.attention import Documents
from etude.kernels.loss import IGNORE
from etude.model.attention import Rotation
from etude.model.cache import KVCache
from etude.model.checkpoint import training_file, write_training_file
from etude.model.config import ModelConfig
from etude.model.layers import Linear, RMSNorm
from etude.model.transformer import Block, Transformer, draw_weights

MTP_FILE = "mtp.safetensors"


class MTPLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.project = Linear(2 * config.hidden_size, config.hidden_size, False)
        self.block = Block(config, config.layers - 1)  # same type as the last layer: dense or MoE
        self.block.attention.layer = 0  # decoding uses a separate cache with one layer
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        rotation: Rotation,
        documents: Documents | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        x = self.project(torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), dim=-1))
        x, _, _ = self.block(x, rotation, documents, cache)
        normed: Tensor = self.norm(x)
        return normed


class MtpDraft(NamedTuple):
    """Prediction of one layer and its target; weights are 0 where there is no target."""

    hidden: Tensor  # [rows, tokens, width], of the draft
    teacher: Tensor  # the main model's hidden state, `depth` positions later
    weights: Tensor  # [rows, tokens]


class MTP(nn.Module):
    def __init__(self, config: ModelConfig, layers: int = 1) -> None:
        super().__init__()
        if layers < 1:
            raise InputError(f"the number of multi-token-prediction layers must be at least 1, not {layers}")
        self.config = config
        self.layers = nn.ModuleList(MTPLayer(config) for _ in range(layers))

    def drafts(
        self, model: Transformer, hidden: Tensor, tokens: Tensor, targets: Tensor, documents: Documents | None = None
    ) -> Iterator[MtpDraft]:
        """Yield one draft per layer for whole or packed rows; `hidden` is the main model's output for these tokens."""
        hidden = hidden.detach()
        if documents is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        else:
            positions = documents.positions
        with torch.no_grad():
            embedded = model.embed(tokens)
        rotation = model.rope(positions, hidden.dtype)
        state = hidden
        for depth, layer in enumerate(self.layers, start=1):
            state = layer(state, shifted(embedded, depth), rotation, documents)
            # Token i + depth must be in the document of token i: then its position is larger by exactly `depth`.
            same_document = shifted(positions, depth) == positions + depth
            has_target = same_document & (shifted(targets, depth) != IGNORE)
            yield MtpDraft(state, shifted(hidden, depth), has_target.float())


def shifted(values: Tensor, offset: int) -> Tensor:
    """Return the values `offset` tokens later in each row, zero-padded at its end."""
    padding = [0, 0] * (values.dim() - 2) + [0, offset]
    return F.pad(values[:, offset:], padding)


def initialize_mtp(config: ModelConfig, layers: int, seed: int, dtype: torch.dtype) -> MTP:
    """Return randomly initialised layers; the same seed gives the same weights."""
    mtp = MTP(config, layers)
    draw_weights(mtp, config.init_std, seed)
    return mtp.to(dtype)


def mtp_file(directory: Path) -> Path | None:
    """Return the file of a checkpoint's MTP layers; None if it has none."""
    path = training_file(directory, MTP_FILE)
    return path if path.exists() else None


def save_mtp(mtp: MTP, directory: Path) -> None:
    write_training_file(directory, MTP_FILE, mtp.state_dict(), layers=str(len(mtp.layers)))


def load_mtp(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> MTP:
    path = training_file(Path(directory), MTP_FILE)
    try:
        tensors = load_file(path)
    except Exception as problem:  # safetensors raises its own type, and OSError
        raise InputError(f"{path}: not readable as multi-token-prediction layers ({problem})") from None
    layers = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=-1)
    mtp = MTP(config, layers)
    expected = mtp.state_dict()
    wrong = set(expected) ^ set(tensors) or {n for n in expected if expected[n].shape != tensors[n].shape}
    if wrong:
        raise InputError(f"{path}: tensor {min(wrong)} does not fit a {config.family} model of this config")
    mtp.load_state_dict(tensors)
    return mtp.to(device=device, dtype=dtype)
