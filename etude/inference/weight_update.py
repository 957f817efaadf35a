"""New weights for a running engine, from a checkpoint directory or as tensors by name.

Tensors may have the model's own names or those of the Hugging Face checkpoint, all of them or some. MTP layers have the
prefix `mtp.` before the names of their own file; without such tensors those layers stay unchanged. Everything is
checked before the first tensor is written, so an error leaves the old weights as they were.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from etude.errors import InputError
from etude.inference.policy import Weights
from etude.model.adapters import adapter_views
from etude.model.checkpoint import checkpoint_views, load
from etude.model.config import ModelConfig
from etude.model.mtp import MTP, count_mtp_layers, load_mtp
from etude.model.tensor_files import DTYPES
from etude.model.transformer import Transformer

MTP_PREFIX = "mtp."


def read_weights(weights: Weights, model: Transformer, mtp: MTP | None = None) -> Mapping[str, Tensor]:
    """Return the tensors of a checkpoint directory of the same model, in its dtype; tensors are passed through.

    MTP layers are included if there are some to replace and the directory has new ones.
    """
    if not isinstance(weights, (str, Path)):
        return weights
    config = ModelConfig.load(weights)
    if config != model.config:
        name = next(f.name for f in fields(config) if getattr(config, f.name) != getattr(model.config, f.name))
        raise InputError(
            f"{weights}: a different model: {name} is {getattr(config, name)!r}, expected "
            f"{getattr(model.config, name)!r}"
        )
    dtype = model.head_weight.dtype
    found = dict(load(weights, dtype=dtype).state_dict())
    if mtp is not None and count_mtp_layers(Path(weights)):
        layers = load_mtp(Path(weights), config, dtype).state_dict()
        found |= {f"{MTP_PREFIX}{name}": tensor for name, tensor in layers.items()}
    return found


def check_finite(weights: Mapping[str, Tensor], version: int) -> None:
    """Raise InputError for weights with NaN or infinity, so that a diverged trainer does not break its samplers."""
    for name, tensor in weights.items():
        if tensor.dtype in DTYPES.values() and tensor.numel():
            low, high = torch.aminmax(tensor)  # propagates NaN and allocates nothing
            if not torch.isfinite(low) or not torch.isfinite(high):
                raise InputError(f"weights of version {version}: {name} has values that are not finite")


def copy_weights(weights: Mapping[str, Tensor], model: Transformer, mtp: MTP | None, version: int) -> None:
    """Copy tensors into a model and its MTP layers, in place: all of them, or none and an error."""
    pairs = []
    targets = _targets(weights, model, mtp)
    for name, tensor in weights.items():
        target = targets.get(name)
        if target is None:
            without_mtp = mtp is None and name.startswith(MTP_PREFIX)
            advice = "; this engine does not speculate: leave MTP layers out" if without_mtp else ""
            raise InputError(f"weights of version {version}: {name} is not a tensor of this model{advice}")
        if tensor.shape != target.shape:
            shape = list(tensor.shape)
            raise InputError(f"weights of version {version}: {name} is {shape}, expected {list(target.shape)}")
        if tensor.dtype not in DTYPES.values():
            raise InputError(f"weights of version {version}: {name} is {tensor.dtype}; expected float32 or bfloat16")
        pairs.append((target, tensor))
    with torch.no_grad():
        for target, tensor in pairs:
            target.copy_(tensor)


def _targets(weights: Mapping[str, Tensor], model: Transformer, mtp: MTP | None) -> dict[str, Tensor]:
    """Return the tensors to write by name. No name of the model is also one of the checkpoint."""
    targets = dict(model.state_dict())
    if mtp is not None:
        targets |= {f"{MTP_PREFIX}{name}": tensor for name, tensor in mtp.state_dict().items()}
    # checkpoint names need a view per expert, so they are made only if used
    if all(name in targets for name in weights):
        return targets
    return checkpoint_views(model) | adapter_views(model) | targets
