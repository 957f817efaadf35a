"""Load and save Hugging Face safetensors directories, one tensor at a time.

`checkpoint_views` is the whole mapping: every tensor of the Hugging Face format as a view of a parameter, so loading
copies into the view and saving reads it. All names and shapes are checked before any weight is read, and a directory
gets its final name only when it is complete. Tensors that only Etude reads are in a subdirectory: other programs load
every *.safetensors file beside config.json as weights.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from etude.errors import EtudeError, InputError
from etude.files import commit_directory, take_lock
from etude.model.attention import GroupedQueryAttention, LatentAttention
from etude.model.config import ADAPTER_CONFIG, ModelConfig, without_quantisation
from etude.model.layers import MLP
from etude.model.moe import MoE
from etude.model.tensor_files import DTYPES, INDEX_FILE, WEIGHTS_FILE, TensorFiles
from etude.model.transformer import Block, Transformer

SHARD_BYTES = 5 * 10**9  # of one file of a checkpoint
TRAINING = "training"  # subdirectory of a checkpoint for the optimizer and the MTP layers
# Class names in transformers that do not follow from the model type.
ARCHITECTURES = {
    "kimi_k2": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
    "smollm3": "SmolLM3ForCausalLM",
}


def load(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    config: ModelConfig | None = None,
) -> Transformer:
    """Load a model from a Hugging Face directory; `dtype` and `config` default to those of its files.

    The directory may hold PEFT's adapter instead of weights: then its base model is loaded with the adapters.
    """
    directory = Path(directory)
    if (directory / ADAPTER_CONFIG).is_file():
        from etude.model.peft import load_adapter_model  # which loads the base model here

        return load_adapter_model(directory, dtype, device, config)
    config = config or ModelConfig.load(directory)
    config = replace(config, source=without_quantisation(config.source))  # what is written from now on is not
    with open_weights(directory, config) as (model, files):
        model = model.to(dtype or files.dtype()).to_empty(device=device or "cpu")
        copy_tensors(files, checkpoint_views(model))
    return model


@contextlib.contextmanager
def open_weights(directory: Path, config: ModelConfig) -> Iterator[tuple[Transformer, TensorFiles]]:
    """Give a model on the meta device and the open files with its tensors, which fit it."""
    with TensorFiles(directory) as files:
        with torch.device("meta"):
            model = Transformer(config)
        check_tensors(files, checkpoint_views(model), config)
        check_tied_head(files, config)
        yield model, files


@torch.no_grad()
def copy_tensors(files: TensorFiles, views: Mapping[str, Tensor]) -> None:
    """Copy tensors of a checkpoint into views of parameters, in the order of the files: each is open once."""
    for name in files.names:
        if name in views:
            views[name].copy_(files.read(name))


def check_tied_head(files: TensorFiles, config: ModelConfig) -> None:
    """Check that a head stored with a tied model equals the embedding; otherwise config and file disagree."""
    head, embedding = (f"{config.tensor_prefix}{name}" for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if config.tied and head in files.names:
        same = files.shape(head) == files.shape(embedding) and torch.equal(files.read(head), files.read(embedding))
        if not same:
            raise InputError(
                f"{files.directory}: {head} differs from the embedding, but config.json ties them; "
                "set tie_word_embeddings to false or remove the tensor"
            )


def save(model: Transformer, directory: Path | str, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a directory that transformers can load. An existing non-empty directory is an error."""
    with new_directory(Path(directory)) as partial:
        write_model(model, partial, shard_bytes)


def write_model(
    model: Transformer,
    directory: Path,
    shard_bytes: int = SHARD_BYTES,
    extra: Iterable[tuple[str, Tensor]] = (),
) -> None:
    """Write weights, with `extra` tensors beside them, and config.json into an existing directory."""
    write_tensors(directory, chain(checkpoint_views(model).items(), extra), shard_bytes=shard_bytes)
    write_config(model.config, model.embed.weight.dtype, directory)


def write_config(config: ModelConfig, dtype: torch.dtype, directory: Path) -> None:
    """Write config.json of weights that have this dtype."""
    family, key = config.family, "torch_dtype" if "torch_dtype" in config.source else "dtype"
    # vLLM loads a model without `architectures` as an embedding model.
    words = "".join(word.capitalize() for word in family.split("_"))
    named = {"architectures": [ARCHITECTURES.get(family, f"{words}ForCausalLM")]}
    keys = {**named, **config.source, key: str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(keys, indent=2) + "\n")


def training_file(directory: Path, name: str) -> Path:
    """Return the path of a file that only Etude reads; in older checkpoints it is beside the weights."""
    old = directory / name
    return old if old.exists() else directory / TRAINING / name


def write_training_file(directory: Path, name: str, tensors: dict[str, Tensor], **metadata: str) -> None:
    """Write tensors that other programs must not load with the weights of a checkpoint."""
    path = directory / TRAINING / name
    path.parent.mkdir(exist_ok=True)
    save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, path, metadata=metadata)
    path.chmod(0o644)  # safetensors makes files readable by their owner only


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary directory that is renamed to `directory` when everything in it has been written."""
    directory = Path(os.path.realpath(directory))
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory}: already exists and is not empty; choose another name or remove it")
    partial = directory.with_name(f".{directory.name}.partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    lock_file = partial.with_suffix(".lock")  # outside of it: the remains of a killed writer are cleared below
    lock = take_lock(lock_file, str(directory))
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        commit_directory(partial, directory)
    except SafetensorError as problem:  # safetensors reports disk errors this way
        raise EtudeError(
            f"{directory}: could not write the weights ({problem}); free some space and try again"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock_file.unlink(missing_ok=True)
        os.close(lock)


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write one model.safetensors, or shards with an index. Holds at most one shard in memory."""
    found = write_shards(directory, tensors, "shard", shard_bytes)
    files = list(dict.fromkeys(file for file, _ in found.values()))
    if len(files) == 1:
        (directory / files[0]).rename(directory / WEIGHTS_FILE)
        return
    names = {file: f"model-{number:05d}-of-{len(files):05d}.safetensors" for number, file in enumerate(files, 1)}
    for file, name in names.items():
        (directory / file).rename(directory / name)
    write_index(directory, {name: (names[file], size) for name, (file, size) in found.items()})


def write_shards(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], stem: str, shard_bytes: int = SHARD_BYTES
) -> dict[str, tuple[str, int]]:
    """Write tensors into files STEM-NUMBER.safetensors; return the file and the bytes of each tensor."""
    found: dict[str, tuple[str, int]] = {}
    pending: dict[str, Tensor] = {}
    files = held = 0

    def flush() -> None:
        nonlocal files, held
        path = directory / f"{stem}-{files:05d}.safetensors"
        save_file(pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors makes files readable by their owner only
        found.update({name: (path.name, tensor.numel() * tensor.element_size()) for name, tensor in pending.items()})
        pending.clear()
        files, held = files + 1, 0

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and held + size > shard_bytes:
            flush()
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += size
    if pending:
        flush()
    return found


def write_index(directory: Path, files: Mapping[str, tuple[str, int]]) -> None:
    """Write the index of sharded weights: the file and the bytes of each tensor."""
    weight_map = {name: file for name, (file, _) in sorted(files.items())}
    index = {"metadata": {"total_size": sum(size for _, size in files.values())}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def checkpoint_views(model: Transformer) -> dict[str, Tensor]:
    """Return every tensor of the Hugging Face checkpoint by its name there, as a view of a model parameter."""
    prefix = model.config.tensor_prefix
    found = {f"{prefix}model.embed_tokens.weight": model.embed.weight, f"{prefix}model.norm.weight": model.norm.weight}
    if model.head is not None:
        found[f"{prefix}lm_head.weight"] = model.head.weight
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        found |= block_views(block, model.config, i)
    return found


def block_views(block: Block, config: ModelConfig, layer: int) -> dict[str, Tensor]:
    """Return the tensors of one block by their names in the checkpoint."""
    at, fused = f"{config.tensor_prefix}model.layers.{layer}.", config.fused_projections
    found: dict[str, Tensor] = {
        f"{at}input_layernorm.weight": block.attention_norm.weight,
        f"{at}post_attention_layernorm.weight": block.mlp_norm.weight,
    }
    if isinstance(block.attention, LatentAttention):
        found |= _latent_views(block.attention, f"{at}self_attn.")
    else:
        found |= _grouped_query_views(block.attention, f"{at}self_attn.", fused)
    if isinstance(block.mlp, MoE):
        found |= _moe_views(block.mlp, f"{at}mlp.")
    else:
        found |= _mlp_views(block.mlp, f"{at}mlp.", fused)
    return {_renamed(name, config): view for name, view in found.items()}


def _renamed(name: str, config: ModelConfig) -> str:
    for ours, theirs in config.tensor_names:
        name = name.replace(ours, theirs)
    return name


def rounded_views(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint, parameters rounded to `dtype`, buffers as they are.

    The only buffer is the router's correction bias. Rounded, it would make samplers choose other experts than the
    trainer: around 8, neighbouring bfloat16 numbers are 0.06 apart.
    """
    buffers = {id(buffer) for buffer in model.buffers()}
    return {name: view if id(view) in buffers else view.to(dtype) for name, view in checkpoint_views(model).items()}


def _grouped_query_views(attention: GroupedQueryAttention, at: str, fused: bool) -> dict[str, Tensor]:
    q, kv = attention.heads * attention.dim, attention.kv_heads * attention.dim
    if fused:
        found = _linear(attention.qkv, f"{at}qkv_proj")
    else:
        found = _split_linear(attention.qkv, at, {"q_proj": q, "k_proj": kv, "v_proj": kv})
    found |= _linear(attention.out, f"{at}o_proj")
    for name, norm in (("q_norm", attention.q_norm), ("k_norm", attention.k_norm)):
        found |= {f"{at}{name}.{key}": value for key, value in norm.named_parameters()}
    return found


def _latent_views(attention: LatentAttention, at: str) -> dict[str, Tensor]:
    if attention.latent.q_rank is None:
        found = _linear(attention.q, f"{at}q_proj")
    else:
        found = _linear(attention.q_down, f"{at}q_a_proj") | _linear(attention.q_up, f"{at}q_b_proj")
        found[f"{at}q_a_layernorm.weight"] = attention.q_norm.weight
    found |= _linear(attention.kv_down, f"{at}kv_a_proj_with_mqa") | _linear(attention.kv_up, f"{at}kv_b_proj")
    found[f"{at}kv_a_layernorm.weight"] = attention.kv_norm.weight
    return found | _linear(attention.out, f"{at}o_proj")


def _mlp_views(mlp: MLP, at: str, fused: bool = False) -> dict[str, Tensor]:
    size = mlp.down.in_features
    if fused:
        return _linear(mlp.gate_up, f"{at}gate_up_proj") | _linear(mlp.down, f"{at}down_proj")
    return _split_linear(mlp.gate_up, at, {"gate_proj": size, "up_proj": size}) | _linear(mlp.down, f"{at}down_proj")


def _moe_views(moe: MoE, at: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {f"{at}gate.weight": moe.router.weight}
    if moe.router.config.scoring == "sigmoid":
        found[f"{at}gate.e_score_correction_bias"] = moe.router.bias
    for e, (gate_up, down) in enumerate(zip(moe.experts.gate_up, moe.experts.down, strict=True)):
        gate, up = gate_up.chunk(2)
        parts = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        found |= {f"{at}experts.{e}.{name}.weight": part for name, part in parts.items()}
    return found | (_mlp_views(moe.shared, f"{at}shared_experts.") if moe.shared else {})


def _linear(linear: nn.Linear, name: str) -> dict[str, Tensor]:
    return {f"{name}.{key}": value for key, value in linear.named_parameters(recurse=False)}


def _split_linear(linear: nn.Linear, at: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return views of a fused matrix as the separate matrices of the Hugging Face format."""
    found: dict[str, Tensor] = {}
    for key, value in linear.named_parameters(recurse=False):
        parts = value.split(list(sizes.values()))
        found |= {f"{at}{name}.{key}": part for name, part in zip(sizes, parts, strict=True)}
    return found


def check_tensors(files: TensorFiles, expected: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Check names, shapes and dtypes of all tensors before any weight is read."""
    check_shapes(files, expected, config)
    directory = files.directory
    extra = [name for name in files.names if name not in expected and not _ignored(name, config)]
    if extra:
        raise InputError(
            f"{directory}: tensor {extra[0]} does not belong to this {config.family} model{_and_more(extra)}"
        )


def check_shapes(files: TensorFiles, expected: Mapping[str, Tensor], config: ModelConfig) -> None:
    """Check that the expected tensors are there, whatever else is."""
    directory = files.directory
    missing = [name for name in expected if name not in files.names]
    if missing:
        raise InputError(f"{directory}: tensor {missing[0]} is missing{_and_more(missing)}; {config.family} needs it")
    for name, view in expected.items():
        if (shape := files.shape(name)) != list(view.shape):
            raise InputError(f"{directory}: tensor {name} has shape {shape}; config.json requires {list(view.shape)}")
        if (dtype := files.stored_dtype(name)) not in DTYPES:
            raise InputError(f"{directory}: tensor {name} is {dtype}; expected one of {', '.join(DTYPES)}")


def _ignored(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor of the files is one that this model does not need."""
    if name.endswith("rotary_emb.inv_freq") or (config.tied and name.endswith("lm_head.weight")):
        return True  # derived from the config, or a copy of the embedding
    if config.family == "kimi_k25" and not name.startswith(config.tensor_prefix):
        return True  # the vision tower and its projector
    return is_mtp_tensor(name, config)


def is_mtp_tensor(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to the MTP layers of a published checkpoint, which follow the others."""
    layer = re.match(re.escape(config.tensor_prefix) + r"model\.layers\.(\d+)\.", name)
    return bool(layer and config.layers <= int(layer[1]) < config.layers + config.mtp_layers)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
