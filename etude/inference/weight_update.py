"""New weights for a running engine: from a checkpoint directory, or tensors by the names of either side.

Tensors may carry the model's own names or those of the Hugging Face checkpoint, all of them or some. Those of the
layers that draft are named `mtp.` and then as in their own file; weights that bring none leave those layers as they
are. Everything is checked before the first tensor is written, so a mistake leaves the old weights as they were.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import InputError
from etude.inference.policy import Weights
from etude.model.checkpoint import KINDS, load, views
from etude.model.config import ModelConfig
from etude.model.mtp import FILE, MTP, load_mtp
from etude.model.transformer import Transformer

MTP_PREFIX = "mtp."


def read_weights(weights: Weights, model: Transformer, mtp: MTP | None = None) -> Mapping[str, Tensor]:
    """The tensors of a checkpoint directory of the same model, in its dtype; tensors are passed through.

    Layers that draft come along where there are some to be replaced and the directory has new ones.
    """
    if not isinstance(weights, (str, Path)):
        return weights
    config = ModelConfig.load(weights)
    if config != model.config:
        name = next(f.name for f in fields(config) if getattr(config, f.name) != getattr(model.config, f.name))
        raise InputError(
            f"{weights}: a different model: {name} is {getattr(config, name)!r}, here {getattr(model.config, name)!r}"
        )
    dtype = model.head_weight.dtype
    found = dict(load(weights, dtype=dtype).state_dict())
    if mtp is not None and (Path(weights) / FILE).exists():
        layers = load_mtp(Path(weights), config, dtype).state_dict()
        found |= {f"{MTP_PREFIX}{name}": tensor for name, tensor in layers.items()}
    return found


def check_finite(weights: Mapping[str, Tensor], version: int) -> None:
    """A trainer that diverged must not take its samplers along: weights with NaN or infinity in them are refused."""
    for name, tensor in weights.items():
        if tensor.dtype in KINDS.values() and tensor.numel():
            low, high = torch.aminmax(tensor)  # NaN anywhere is NaN here, and nothing is allocated
            if not torch.isfinite(low) or not torch.isfinite(high):
                raise InputError(f"weights of version {version}: {name} has numbers that are not finite")


def put_weights(weights: Mapping[str, Tensor], model: Transformer, mtp: MTP | None, version: int) -> None:
    """Copy tensors into a model and the layers that draft for it, in place: all of them, or none and an error."""
    pairs = []
    places = _places(weights, model, mtp)
    for name, tensor in weights.items():
        place = places.get(name)
        if place is None:
            lost = mtp is None and name.startswith(MTP_PREFIX)
            advice = "; this engine drafts nothing: leave MTP layers out" if lost else ""
            raise InputError(f"weights of version {version}: {name} is not a tensor of this model{advice}")
        if tensor.shape != place.shape:
            shape = list(tensor.shape)
            raise InputError(f"weights of version {version}: {name} is {shape}, expected {list(place.shape)}")
        if tensor.dtype not in KINDS.values():
            raise InputError(f"weights of version {version}: {name} is {tensor.dtype}; expected float32 or bfloat16")
        pairs.append((place, tensor))
    with torch.no_grad():
        for place, tensor in pairs:
            place.copy_(tensor)


def _places(weights: Mapping[str, Tensor], model: Transformer, mtp: MTP | None) -> dict[str, Tensor]:
    """Where a tensor of each name goes. No name of ours is one of the checkpoint's too."""
    places = dict(model.state_dict())
    if mtp is not None:
        places |= {f"{MTP_PREFIX}{name}": tensor for name, tensor in mtp.state_dict().items()}
    # the checkpoint's are a view for each expert: not made for weights that do without
    return places if all(name in places for name in weights) else views(model) | places
