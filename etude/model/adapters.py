"""Add adapters to the matrices of a model, and merge them into its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from etude.errors import InputError
from etude.model.checkpoint import checkpoint_views, rounded_views
from etude.model.config import ModelConfig
from etude.model.layers import MLP, Linear
from etude.model.lora import Adapter
from etude.model.moe import Experts, MoE
from etude.model.settings import ADAPTER_TARGETS, LoraSettings
from etude.model.transformer import Block, Transformer

PREFIX = "base_model.model."  # of every tensor in PEFT's file


def check_lora(settings: LoraSettings | None, config: ModelConfig, stage: str) -> None:
    """Refuse targets that this model does not have."""
    missing = set(settings.targets or () if settings else ()) - set(_targets_of(config))
    if missing:
        raise InputError(
            f"{stage}.lora.targets names {min(missing)}, which this {config.family} model does not have; it has "
            f"{', '.join(_targets_of(config))}"
        )


def _targets_of(config: ModelConfig) -> tuple[str, ...]:
    moe = config.moe
    dense = moe is None or moe.shared_size or len(moe.layers) < config.layers
    has = {"attention": True, "mlp": dense, "experts": moe is not None}
    return tuple(name for name in ADAPTER_TARGETS if has[name])


def add_adapters(model: Transformer, settings: LoraSettings, seed: int | None = 0) -> Transformer:
    """Freeze the model and give its matrices adapters, whose update is zero; only these are trained.

    Without a seed, the adapters have only shapes, on the meta device.
    """
    if adapters(model):
        raise InputError("the model has adapters already; merge them first (etude model merge)")
    check_lora(settings, model.config, "the model")
    model.requires_grad_(False)
    parts = _parts_by_matrix(model)
    generator = torch.Generator().manual_seed(seed or 0)
    for module, attribute, weight in _target_matrices(model, settings.targets or _targets_of(model.config)):
        names, rows = parts[id(weight)]
        experts = len(weight) if weight.dim() == 3 else None
        sizes = rows[: len(rows) // (experts or 1)]
        with torch.device("meta" if seed is None else "cpu"):
            adapter = Adapter(names, sizes, weight.shape[-1], settings.rank, settings.alpha, experts)
        if seed is not None:
            adapter.initialize(generator)
        # with a seed, adapters are real also if the model has only shapes
        device = "meta" if seed is None else "cpu" if weight.is_meta else weight.device
        setattr(module, attribute, adapter.to(device=device, dtype=weight.dtype))
    model.lora = settings.model_copy(update={"targets": settings.targets or _targets_of(model.config)})
    return model


def fit_adapters(model: Transformer, settings: LoraSettings | None, seed: int) -> Transformer:
    """Make a loaded model one that trains as `settings` say: all weights, its own adapters further, or new ones."""
    if continues_adapters(model, settings):
        return model
    if model.lora is not None:
        merge_adapters(model)
    return model if settings is None else add_adapters(model, settings, seed)


def continues_adapters(model: Transformer, settings: LoraSettings | None) -> bool:
    """Return whether the adapters of a model are those that the settings would add."""
    own = model.lora
    if own is None or settings is None:
        return False
    targets = settings.targets or _targets_of(model.config)
    return (own.rank, own.alpha, set(own.targets or ())) == (settings.rank, settings.alpha, set(targets))


def adapters(model: nn.Module) -> list[Adapter]:
    return [module for module in model.modules() if isinstance(module, Adapter)]


def adapter_views(model: nn.Module) -> dict[str, Tensor]:
    """Return every tensor of PEFT's file by its name there, as a view of a parameter."""
    found = {}
    for adapter in adapters(model):
        for name, (down, up) in adapter.part_views().items():
            found[f"{PREFIX}{name}.lora_A.weight"] = down
            found[f"{PREFIX}{name}.lora_B.weight"] = up
    return found


def published_views(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return what training changes, rounded to `dtype`: the adapters, or every tensor of the checkpoint."""
    if model.lora is None:
        return rounded_views(model, dtype)
    return {name: view.to(dtype) for name, view in adapter_views(model).items()}


@torch.no_grad()
def merge_adapters(model: Transformer) -> Transformer:
    """Add the updates to the weights and remove the adapters."""
    for module, attribute, weight in list(_target_matrices(model, ADAPTER_TARGETS)):
        if (adapter := getattr(module, attribute)) is not None:
            weight.copy_((weight.float() + adapter.update()).to(weight.dtype))
            setattr(module, attribute, None)
    model.lora = None
    return model.requires_grad_(True)


def _target_matrices(model: Transformer, targets: tuple[str, ...]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the module that holds each matrix, the name of its adapter there, and the matrix."""
    for block in model.blocks:
        assert isinstance(block, Block)
        if "attention" in targets:
            yield from ((m, "adapter", m.weight) for m in block.attention.children() if isinstance(m, Linear))
        mlp: MLP | None = block.mlp.shared if isinstance(block.mlp, MoE) else block.mlp
        if "mlp" in targets and mlp is not None:
            yield from ((m, "adapter", m.weight) for m in (mlp.gate_up, mlp.down))
        if "experts" in targets and isinstance(block.mlp, MoE):
            experts: Experts = block.mlp.experts
            yield experts, "gate_up_adapter", experts.gate_up
            yield experts, "down_adapter", experts.down


def _parts_by_matrix(model: Transformer) -> dict[int, tuple[list[str], list[int]]]:
    """Return the Hugging Face modules whose weights are views of each matrix, and their rows, in its order."""
    found: dict[int, list[tuple[int, str, int]]] = {}
    for name, view in checkpoint_views(model).items():
        base = view if view._base is None else view._base
        found.setdefault(id(base), []).append((int(view.storage_offset()), name.removesuffix(".weight"), len(view)))
    ordered = {key: sorted(parts) for key, parts in found.items()}
    return {key: ([name for _, name, _ in parts], [rows for *_, rows in parts]) for key, parts in ordered.items()}
