"""Adapters in PEFT's format.

An adapter directory has PEFT's two files, adapter_config.json and adapter_model.safetensors, and ours beside them:
config.json, tokenizer, `training/`. It names its base model, by an absolute path or one relative to itself. Loading
reads both and leaves the adapters unmerged.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.chat.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.errors import InputError
from etude.model.adapters import adapter_views, adapters, add_adapters, merge_adapters
from etude.model.checkpoint import TRAINING, load, new_directory, write_model
from etude.model.config import ADAPTER_CONFIG, PROFILE_FILE, ModelConfig, base_directory
from etude.model.layout import checkpoint_pieces
from etude.model.mtp import MTP_FILE, carried_mtp
from etude.model.settings import ADAPTER_TARGETS, LoraSettings
from etude.model.transformer import Transformer

ADAPTER_FILE = "adapter_model.safetensors"
# Keys of adapter_config.json that change the network, with the values that mean they are not used.
UNUSED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("modules_to_save", "target_parameters"), (None, [])),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias"), (False, None)),
}


def write_adapter(model: Transformer, directory: Path, base: str, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write PEFT's files and config.json into an existing directory; `base` is the model that was adapted.

    The adapters' tensors are those of the model, unless given.
    """
    settings = model.lora
    assert settings is not None
    if tensors is None:
        tensors = adapter_views(model)
    tensors = {name: view.detach().cpu().contiguous() for name, view in tensors.items()}
    save_file(tensors, directory / ADAPTER_FILE, metadata={"format": "pt"})
    (directory / ADAPTER_FILE).chmod(0o644)  # safetensors makes files readable by their owner only
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": _target_modules(model),
        "inference_mode": True,
    }
    _write_json(directory / ADAPTER_CONFIG, described)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    _write_json(directory / "config.json", {**model.config.source, "dtype": dtype})


def _target_modules(model: Transformer) -> list[str] | str:
    """Return the last words of the adapted modules or, where other modules have the same words, a pattern."""
    adapted = {name for adapter in adapters(model) for name in adapter.names}
    words = sorted({name.rpartition(".")[2] for name in adapted})
    pieces = [piece for found in checkpoint_pieces(model.config).values() for piece in found]
    modules = {piece.name.removesuffix(".weight") for piece in pieces if len(piece.shape) == 2}
    if all(name in adapted for name in modules if name.rpartition(".")[2] in words):
        return words
    return "|".join(sorted({re.sub(r"\\\.\d+\\\.", r"\\.\\d+\\.", re.escape(name)) for name in adapted}))


def load_adapter_model(
    directory: Path, dtype: torch.dtype | None, device: torch.device | str | None, config: ModelConfig | None
) -> Transformer:
    """Load the base model of an adapter directory, with its adapters; only these require gradients."""
    base = base_directory(directory)
    if (base / ADAPTER_CONFIG).is_file():
        raise InputError(f"{directory}: its base model {base} is an adapter itself; merge that one first")
    # The directory's own config.json counts: a longer context may have been trained with the adapter.
    return read_adapter(load(base, dtype, device, config or ModelConfig.load(directory)), directory)


def read_adapter(model: Transformer, directory: Path) -> Transformer:
    """Give a base model the adapters of a directory."""
    settings, path = read_lora_settings(directory), directory / ADAPTER_FILE
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as problem:
        raise InputError(f"{path}: not readable as PEFT's adapter ({problem})") from None
    add_adapters(model, settings.model_copy(update={"targets": _targets_in(tensors)}))
    views = adapter_views(model)  # a part that the file does not have stays without an update
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in views or views[name].shape != tensor.shape:
                want = f"expected {list(views[name].shape)}" if name in views else "the model has no such matrix"
                raise InputError(f"{path}: {name} has shape {list(tensor.shape)}; {want} ({model.config.family})")
            views[name].copy_(tensor)
    return model


def load_beside(model: Transformer, directory: Path) -> Transformer:
    """Load an adapter directory with the base of `model`, whose frozen weights it shares."""
    with torch.device("meta"):
        twin = Transformer(model.config)
    own = set(twin.state_dict())
    twin.load_state_dict({name: part for name, part in model.state_dict().items() if name in own}, assign=True)
    twin.rope = model.rope  # its frequencies are not part of the state
    return read_adapter(twin, directory).requires_grad_(False)


def _targets_in(tensors: dict[str, Tensor]) -> tuple[str, ...]:
    """Return the kinds of matrices that the tensors of PEFT's file adapt."""
    parts = {".self_attn.": "attention", ".experts.": "experts", ".mlp.": "mlp"}
    found = {next((kind for part, kind in parts.items() if part in name), "") for name in tensors}
    return tuple(kind for kind in ADAPTER_TARGETS if kind in found) or ADAPTER_TARGETS[:1]


def read_lora_settings(directory: Path) -> LoraSettings:
    """Return rank and alpha of adapter_config.json; InputError for a kind of adapter that is not supported."""
    path = directory / ADAPTER_CONFIG
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = found["r"], found["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{path}: not readable as PEFT's configuration of a LoRA adapter ({problem})") from None
    for key, unused in UNUSED.items():
        if key in found and found[key] not in unused:
            raise InputError(f"{path}: {key} = {json.dumps(found[key])} is not supported; expected {unused[0]!r}")
    try:
        return LoraSettings(rank=rank, alpha=float(alpha))
    except (TypeError, ValueError) as problem:
        raise InputError(f"{path}: r and lora_alpha: {problem}") from None


# ------------------------------------------------------------------------------------------------ directories


def relative_base(directory: Path, base: Path, inside: Path) -> str:
    """Return how an adapter names its base: relative if both are below `inside`, which may be moved as a whole."""
    own, other, root = (Path(os.path.abspath(path)) for path in (directory, base, inside))
    return os.path.relpath(other, own) if other.is_relative_to(root) and own.is_relative_to(root) else str(other)


def copy_adapter(source: Path, target: Path, inside: Path) -> None:
    """Copy the files of an adapter directory into an existing one, which names the same base model."""
    ignored = shutil.ignore_patterns("optimizer.*", "training.json", ADAPTER_CONFIG)
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
    found = json.loads((source / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    base = relative_base(target, base_directory(source), inside)
    _write_json(target / ADAPTER_CONFIG, {**found, "base_model_name_or_path": base})


def merge_directory(source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write an adapter directory's model as a plain one, with tokenizer, agent profile and MTP layers."""
    if not (source / ADAPTER_CONFIG).is_file():
        raise InputError(f"{source}: there is no {ADAPTER_CONFIG}; expected a directory with PEFT's adapter")
    base = base_directory(source)
    tokenizer = Tokenizer.load(source if (source / TOKENIZER_FILE).is_file() else base)
    model = merge_adapters(load(source, dtype))
    with new_directory(target) as directory:
        write_model(model, directory, extra=carried_mtp(source, model))
        tokenizer.save(directory)
        for name in (PROFILE_FILE, f"{TRAINING}/{MTP_FILE}"):
            if found := next((each / name for each in (source, base) if (each / name).is_file()), None):
                (directory / name).parent.mkdir(exist_ok=True)
                shutil.copy(found, directory / name)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
