"""Multi-token-prediction layers in DeepSeek-V3's design: each looks one token further than the one before it.

Layer k reads the last hidden state of position i and the embedding of token i + k, runs one transformer block and
shares the main head: it predicts token i + k + 1, which the main head predicts at position i + k. That distribution is
its target (self-distillation). Nothing flows back into the main model, so training it with or without these layers is
the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from etude.errors import InputError
from etude.kernels.attention import Documents
from etude.kernels.loss import IGNORE
from etude.model.attention import Rotation
from etude.model.cache import KVCache
from etude.model.config import ModelConfig
from etude.model.layers import Linear, RMSNorm
from etude.model.transformer import Block, Transformer, draw_weights

FILE = "mtp.safetensors"  # beside model.safetensors; transformers and vLLM leave it alone


class MTPLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.token_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.project = Linear(2 * config.hidden_size, config.hidden_size, False)
        self.block = Block(config, config.layers - 1)  # of the kind the last layer is: dense or with experts
        self.block.attention.layer = 0  # while decoding it has a cache of its own, with one layer
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
        x, _ = self.block(x, rotation, documents, cache)
        normed: Tensor = self.norm(x)
        return normed


class Draft(NamedTuple):
    """What one layer predicts, and from whom it should learn it; weights are 0 where there is nothing to learn."""

    hidden: Tensor  # [rows, tokens, width], of the draft
    teacher: Tensor  # the main model's hidden state, `ahead` positions later
    weights: Tensor  # [rows, tokens]


class MTP(nn.Module):
    def __init__(self, config: ModelConfig, layers: int = 1) -> None:
        super().__init__()
        if layers < 1:
            raise InputError(f"a model has at least one multi-token-prediction layer, not {layers}")
        self.config = config
        self.layers = nn.ModuleList(MTPLayer(config) for _ in range(layers))

    def drafts(
        self, model: Transformer, hidden: Tensor, tokens: Tensor, targets: Tensor, documents: Documents | None = None
    ) -> Iterator[Draft]:
        """One draft per layer for whole or packed rows; `hidden` are the main model's states of these tokens."""
        hidden = hidden.detach()
        if documents is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        else:
            positions = documents.positions
        with torch.no_grad():
            embedded = model.embed(tokens)
        rotation = model.rope(positions, hidden.dtype)
        state = hidden
        for ahead, layer in enumerate(self.layers, start=1):
            state = layer(state, shifted(embedded, ahead), rotation, documents)
            # position i + ahead must belong to the document of position i: there, positions have grown by `ahead`
            inside = shifted(positions, ahead) == positions + ahead
            wanted = inside & (shifted(targets, ahead) != IGNORE)
            yield Draft(state, shifted(hidden, ahead), wanted.float())


def shifted(values: Tensor, ahead: int) -> Tensor:
    """What stands `ahead` tokens later in each row; zeros after its end."""
    padding = [0, 0] * (values.dim() - 2) + [0, ahead]
    return F.pad(values[:, ahead:], padding)


def initialize_mtp(config: ModelConfig, layers: int, seed: int, dtype: torch.dtype) -> MTP:
    """Fresh layers; same seed, same weights."""
    mtp = MTP(config, layers)
    draw_weights(mtp, config.init_std, seed)
    return mtp.to(dtype)


def save_mtp(mtp: MTP, directory: Path) -> None:
    tensors = {name: value.detach().cpu().contiguous() for name, value in mtp.state_dict().items()}
    save_file(tensors, directory / FILE, metadata={"layers": str(len(mtp.layers))})
    (directory / FILE).chmod(0o644)


def load_mtp(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> MTP:
    path = Path(directory) / FILE
    try:
        tensors = load_file(path)
    except Exception as problem:  # safetensors raises its own, and OSError
        raise InputError(f"{path}: not readable as multi-token-prediction layers ({problem})") from None
    layers = 1 + max((int(name.split(".")[1]) for name in tensors if name.startswith("layers.")), default=-1)
    mtp = MTP(config, layers)
    wanted = mtp.state_dict()
    wrong = set(wanted) ^ set(tensors) or {n for n in wanted if wanted[n].shape != tensors[n].shape}
    if wrong:
        raise InputError(f"{path}: tensor {min(wrong)} does not fit a {config.family} model of this config")
    mtp.load_state_dict(tensors)
    return mtp.to(device=device, dtype=dtype)
