"""Multi-token-prediction layers in DeepSeek-V3's design: each predicts one token further than the one before it.

Layer k reads the previous layer's hidden state of position i (the main model's for k = 1) and the embedding of token
i + k, runs one transformer block and shares the main head: it predicts token i + k + 1, which the main head predicts at
position i + k. That distribution is its target (self-distillation). No gradient reaches the main model, so training the
main model with or without these layers is bit-identical.

Layers of a family whose published checkpoints have some (DeepSeek-V3, GLM-4.5) are read and written where those have
them: as layers after the last one. Others are in a file that only Etude reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from etude.errors import InputError
from etude.kernels.loss import IGNORE
from etude.model.attention import Packing, Rotation
from etude.model.cache import KVCache
from etude.model.checkpoint import (
    block_views,
    check_shapes,
    is_mtp_tensor,
    training_file,
    write_model,
    write_training_file,
)
from etude.model.config import ModelConfig, base_directory
from etude.model.layers import Linear, RMSNorm
from etude.model.tensor_files import TensorFiles
from etude.model.transformer import Block, Transformer, draw_weights
from etude.parallel.context import ContextShard

MTP_FILE = "mtp.safetensors"
# Parts of a published layer's names.
PROJECTION, EMBEDDING_COPY, HEAD_COPY = "eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight"
CORRECTION_BIAS = "e_score_correction_bias"  # stays float32


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
        documents: Packing = None,
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
        self, model: Transformer, hidden: Tensor, tokens: Tensor, targets: Tensor, documents: Packing = None
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
        shift = documents.context.shifted if isinstance(documents, ContextShard) else shifted
        state = hidden
        for depth, layer in enumerate(self.layers, start=1):
            state = layer(state, shift(embedded, depth), rotation, documents)
            # Token i + depth must be in the document of token i: then its position is larger by exactly `depth`.
            same_document = shift(positions, depth) == positions + depth
            has_target = same_document & (shift(targets, depth) != IGNORE)
            yield MtpDraft(state, shift(hidden, depth), has_target.float())


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
    """Return the file that only Etude reads with a checkpoint's MTP layers; None if there is none."""
    path = training_file(directory, MTP_FILE)
    return path if path.exists() else None


def count_mtp_layers(directory: Path) -> int:
    """Return how many MTP layers a checkpoint has, in a file of their own or after the layers of the model."""
    if path := mtp_file(directory):
        try:
            with safe_open(path, "pt") as tensors:
                return int((tensors.metadata() or {}).get("layers", 1))
        except SafetensorError as problem:
            raise InputError(f"{path}: not readable as multi-token-prediction layers ({problem})") from None
    config = ModelConfig.load(directory)
    if not config.mtp_layers:
        return 0
    with TensorFiles(base_directory(directory)) as files:
        return config.mtp_layers if f"{_layer_name(config, 0)}eh_proj.weight" in files.names else 0


def save_mtp(state: dict[str, Tensor], layers: int, directory: Path) -> None:
    """Write the state of that many layers beside the weights in a checkpoint."""
    write_training_file(directory, MTP_FILE, state, layers=str(layers))


def write_model_with_mtp(model: Transformer, mtp: MTP | None, directory: Path) -> None:
    """Write a model and its MTP layers, where the family's published checkpoints have them if they have as many."""
    if mtp is None or not is_published(mtp):
        write_model(model, directory)
        if mtp is not None:
            save_mtp(mtp.state_dict(), len(mtp.layers), directory)
    else:
        write_model(model, directory, extra=published_tensors(mtp, model.embed.weight, model.head_weight))


def is_published(mtp: MTP) -> bool:
    """Return whether the family's published checkpoints have as many layers, after those of the model."""
    return len(mtp.layers) == mtp.config.mtp_layers


def carried_mtp(
    directory: Path, model: Transformer, shared: tuple[Tensor, Tensor] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield the published MTP layers of the checkpoint that a model was trained from, to write them with the model.

    `shared` are the whole embedding and head of a sharded model.
    """
    embedding, head = shared or (model.embed.weight, model.head_weight)
    config, dtype = model.config, embedding.dtype
    if mtp_file(directory) is not None or not count_mtp_layers(directory):
        return
    copies = _shared_copies(config, embedding, head)
    with TensorFiles(base_directory(directory)) as files:
        for name in files.names:
            if is_mtp_tensor(name, config) and name not in copies:
                yield name, files.read(name).to(torch.float32 if name.endswith(CORRECTION_BIAS) else dtype)
    yield from copies.items()


def load_mtp(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> MTP:
    directory = Path(directory)
    if mtp_file(directory) is None and config.mtp_layers:
        return _load_published(base_directory(directory), config, dtype, device)
    path = training_file(directory, MTP_FILE)
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


# --------------------------------------------------------------------------------- layers of published checkpoints


def mtp_views(mtp: MTP, config: ModelConfig) -> dict[str, Tensor]:
    """Return the tensors of the layers by their published names; of `eh_proj`, the halves are the other way round."""
    found: dict[str, Tensor] = {}
    for number, layer in enumerate(mtp.layers):
        assert isinstance(layer, MTPLayer)
        at = _layer_name(config, number)
        found |= block_views(layer.block, config, config.layers + number)
        found |= {
            f"{at}enorm.weight": layer.token_norm.weight,
            f"{at}hnorm.weight": layer.hidden_norm.weight,
            f"{at}{PROJECTION}": layer.project.weight,
            f"{at}shared_head.norm.weight": layer.norm.weight,
        }
    return found


def _layer_name(config: ModelConfig, number: int) -> str:
    return f"{config.tensor_prefix}model.layers.{config.layers + number}."


def _in_their_order(name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as published, or a published one as ours: there, the embedding comes before the hidden state."""
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1) if name.endswith(PROJECTION) else tensor


def _load_published(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> MTP:
    with torch.device("meta"):
        mtp = MTP(config, config.mtp_layers)
    with TensorFiles(directory) as files:
        check_shapes(files, mtp_views(mtp, config), config)
        mtp = mtp.to(dtype).to_empty(device=device)
        views = mtp_views(mtp, config)
        with torch.no_grad():
            for name in files.names:
                if name in views:
                    views[name].copy_(_in_their_order(name, files.read(name)))
        _check_copies(files, config)
    return mtp


def _check_copies(files: TensorFiles, config: ModelConfig) -> None:
    """Check that the layers share embedding and head with the model: published checkpoints have copies of both."""
    embedding = f"{config.tensor_prefix}model.embed_tokens.weight"
    head = embedding if config.tied else f"{config.tensor_prefix}lm_head.weight"
    for number in range(config.mtp_layers):
        for part, main in ((EMBEDDING_COPY, embedding), (HEAD_COPY, head)):
            name = f"{_layer_name(config, number)}{part}"
            if name in files.names and not torch.equal(files.read(name), files.read(main)):
                raise InputError(
                    f"{files.directory}: {name} differs from {main}; layers of their own are not supported"
                )


def _shared_copies(config: ModelConfig, embedding: Tensor, head: Tensor) -> dict[str, Tensor]:
    """Return the copies of embedding and head that published MTP layers have."""
    shared = {EMBEDDING_COPY: embedding, HEAD_COPY: head}
    layers = range(config.mtp_layers)
    return {f"{_layer_name(config, i)}{part}": weight for i in layers for part, weight in shared.items()}


def published_tensors(mtp: MTP, embedding: Tensor, head: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the layers' tensors as published checkpoints have them, with their copies of embedding and head."""
    for name, view in mtp_views(mtp, mtp.config).items():
        yield name, _in_their_order(name, view.detach())
    yield from _shared_copies(mtp.config, embedding, head).items()
