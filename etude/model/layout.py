"""Where every tensor of a checkpoint is in the parameters of a model, from its shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.model.adapters import adapter_views, add_adapters
from etude.model.checkpoint import checkpoint_views
from etude.model.config import ModelConfig
from etude.model.settings import LoraSettings
from etude.model.transformer import Transformer
from etude.parallel.tensors import Box


@dataclass(frozen=True)
class Piece:
    """One tensor of the Hugging Face checkpoint, or of PEFT's file: a block of a parameter or buffer."""

    name: str
    box: Box  # in the parameter
    shape: tuple[int, ...]  # without the leading dimensions of size 1 that the block has


def checkpoint_pieces(config: ModelConfig) -> dict[str, list[Piece]]:
    """Return the tensors of the Hugging Face checkpoint by the parameter or buffer that they are in."""
    model = _shapes(config)
    return _by_parameter(model, checkpoint_views(model))


def adapter_pieces(config: ModelConfig, lora: LoraSettings) -> dict[str, list[Piece]]:
    """Return the tensors of PEFT's file by the parameter that they are in."""
    model = add_adapters(_shapes(config), lora, seed=None)
    return _by_parameter(model, adapter_views(model))


def _shapes(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def _by_parameter(model: Transformer, views: Mapping[str, Tensor]) -> dict[str, list[Piece]]:
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    found: dict[str, list[Piece]] = {}
    for name, view in views.items():
        base = view if view._base is None else view._base
        start, rest = [], int(view.storage_offset())
        for stride in base.stride():
            start.append(rest // stride)
            rest %= stride
        sizes = (1,) * (base.dim() - view.dim()) + tuple(view.shape)
        found.setdefault(names[id(base)], []).append(Piece(name, Box(tuple(start), sizes), tuple(view.shape)))
    return found
