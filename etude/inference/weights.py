"""New weights for a running engine: from a checkpoint directory, or tensors by the names of either side.

Tensors may carry the model's own names or those of the Hugging Face checkpoint, all of them or some. Everything is
checked before the first one is written, so a mistake leaves the old weights as they were.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import InputError
from etude.inference.engine import Engine
from etude.inference.policy import Weights
from etude.model.checkpoint import load, views
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer


def read_weights(weights: Weights, model: Transformer) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint directory of the same model, in its dtype; tensors are passed through."""
    if not isinstance(weights, (str, Path)):
        return weights
    config = ModelConfig.load(weights)
    if config != model.config:
        name = next(f.name for f in fields(config) if getattr(config, f.name) != getattr(model.config, f.name))
        raise InputError(
            f"{weights}: a different model: {name} is {getattr(config, name)!r}, here {getattr(model.config, name)!r}"
        )
    return load(weights, dtype=model.head_weight.dtype).state_dict()


def put_weights(engine: Engine, weights: Mapping[str, Tensor], version: int) -> None:
    """Copy tensors into the engine's model, between two steps."""
    if set(weights) <= set(engine.model.state_dict()):
        engine.load(weights, version)
        return
    stored = views(engine.model)
    for name, tensor in weights.items():
        if name not in stored:
            raise InputError(f"weights of version {version}: {name} is not a tensor of this model")
        if tensor.shape != stored[name].shape:
            shape = list(tensor.shape)
            raise InputError(f"weights of version {version}: {name} is {shape}, expected {list(stored[name].shape)}")
    with torch.no_grad():
        for name, tensor in weights.items():
            stored[name].copy_(tensor)
    engine.load({}, version)  # nothing more to copy: the version, and what it means for the cache
