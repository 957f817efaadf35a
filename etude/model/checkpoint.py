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
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from etude.errors import EtudeError, InputError
from etude.files import commit_directory, take_lock
from etude.model.attention import GroupedQueryAttention, LatentAttention
from etude.model.config import ModelConfig
from etude.model.layers import MLP
from etude.model.moe import MoE
from etude.model.transformer import Block, Transformer

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
TRAINING = "training"  # subdirectory of a checkpoint for the optimizer and the MTP layers
# Class names in transformers that do not follow from the model type.
ARCHITECTURES = {"kimi_k2": "DeepseekV3ForCausalLM", "kimi_k25": "KimiK25ForConditionalGeneration"}


def load(
    directory: Path | str,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    config: ModelConfig | None = None,
) -> Transformer:
    """Load a model from a Hugging Face directory; `dtype` and `config` default to those of its files."""
    directory = Path(directory)
    config = config or ModelConfig.load(directory)
    if config.quantised:
        raise InputError(f"{directory}: the weights are quantised; dequantise them to bfloat16 or float32 first")
    with TensorFiles(directory) as files:
        with torch.device("meta"):
            model = Transformer(config)
        _check(files, checkpoint_views(model), config, directory)
        model = model.to(dtype or files.dtype()).to_empty(device=device or "cpu")
        with torch.no_grad():
            for name, view in checkpoint_views(model).items():
                view.copy_(files.read(name))
        _check_tied_head(files, config, directory)
    return model


def _check_tied_head(files: TensorFiles, config: ModelConfig, directory: Path) -> None:
    """Check that a head stored with a tied model equals the embedding; otherwise config and file disagree."""
    head, embedding = (f"{config.tensor_prefix}{name}" for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if config.tied and head in files.names:
        same = files.shape(head) == files.shape(embedding) and torch.equal(files.read(head), files.read(embedding))
        if not same:
            raise InputError(
                f"{directory}: {head} differs from the embedding, but config.json ties them; "
                "set tie_word_embeddings to false or remove the tensor"
            )


def save(model: Transformer, directory: Path | str, shard_bytes: int = 5 * 10**9) -> None:
    """Write a directory that transformers can load. An existing non-empty directory is an error."""
    with new_directory(Path(directory)) as partial:
        write_model(model, partial, shard_bytes)


def write_model(model: Transformer, directory: Path, shard_bytes: int = 5 * 10**9) -> None:
    """Write weights and config.json into an existing directory."""
    write_tensors(directory, checkpoint_views(model).items(), shard_bytes=shard_bytes)
    family, dtype = model.config.family, str(model.embed.weight.dtype).removeprefix("torch.")
    key = "torch_dtype" if "torch_dtype" in model.config.source else "dtype"
    # vLLM loads a model without `architectures` as an embedding model.
    words = "".join(word.capitalize() for word in family.split("_"))
    named = {"architectures": [ARCHITECTURES.get(family, f"{words}ForCausalLM")]}
    config = {**named, **model.config.source, key: dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], *, shard_bytes: int = 5 * 10**9) -> None:
    """Write one model.safetensors, or shards with an index. Holds at most one shard in memory."""
    shards: list[tuple[Path, list[str]]] = []
    pending: dict[str, Tensor] = {}
    total = held = 0

    def flush() -> None:
        path = directory / f"shard-{len(shards)}"
        save_file(pending, path, metadata={"format": "pt"})
        shards.append((path, list(pending)))
        pending.clear()

    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if pending and held + size > shard_bytes:
            flush()
            held = 0
        pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held, total = held + size, total + size
    flush()
    for path, _ in shards:
        path.chmod(0o644)  # safetensors makes files readable by their owner only
    if len(shards) == 1:
        shards[0][0].rename(directory / WEIGHTS_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (path, names) in enumerate(shards, 1):
        final = path.rename(directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        weight_map.update(dict.fromkeys(names, final.name))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def checkpoint_views(model: Transformer) -> dict[str, Tensor]:
    """Return every tensor of the Hugging Face checkpoint by its name there, as a view of a model parameter."""
    prefix = model.config.tensor_prefix
    found = {f"{prefix}model.embed_tokens.weight": model.embed.weight, f"{prefix}model.norm.weight": model.norm.weight}
    if model.head is not None:
        found[f"{prefix}lm_head.weight"] = model.head.weight
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        at = f"{prefix}model.layers.{i}."
        found[f"{at}input_layernorm.weight"] = block.attention_norm.weight
        found[f"{at}post_attention_layernorm.weight"] = block.mlp_norm.weight
        if isinstance(block.attention, LatentAttention):
            found |= _latent_views(block.attention, f"{at}self_attn.")
        else:
            found |= _grouped_query_views(block.attention, f"{at}self_attn.")
        found |= (_moe_views if isinstance(block.mlp, MoE) else _mlp_views)(block.mlp, f"{at}mlp.")  # type: ignore[arg-type]
    return found


def rounded_views(model: Transformer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return every tensor of the checkpoint, parameters rounded to `dtype`, buffers as they are.

    The only buffer is the router's correction bias. Rounded, it would make samplers choose other experts than the
    trainer: around 8, neighbouring bfloat16 numbers are 0.06 apart.
    """
    buffers = {id(buffer) for buffer in model.buffers()}
    return {name: view if id(view) in buffers else view.to(dtype) for name, view in checkpoint_views(model).items()}


def _grouped_query_views(attention: GroupedQueryAttention, at: str) -> dict[str, Tensor]:
    q, kv = attention.heads * attention.dim, attention.kv_heads * attention.dim
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


def _mlp_views(mlp: MLP, at: str) -> dict[str, Tensor]:
    size = mlp.down.in_features
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
    return {f"{name}.{key}": value for key, value in linear.named_parameters()}


def _split_linear(linear: nn.Linear, at: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Return views of a fused matrix as the separate matrices of the Hugging Face format."""
    found: dict[str, Tensor] = {}
    for key, value in linear.named_parameters():
        parts = value.split(list(sizes.values()))
        found |= {f"{at}{name}.{key}": part for name, part in zip(sizes, parts, strict=True)}
    return found


def _check(files: TensorFiles, expected: dict[str, Tensor], config: ModelConfig, directory: Path) -> None:
    """Check names, shapes and dtypes of all tensors before any weight is read."""
    missing = [name for name in expected if name not in files.names]
    if missing:
        raise InputError(f"{directory}: tensor {missing[0]} is missing{_and_more(missing)}; {config.family} needs it")
    extra = [name for name in files.names if name not in expected and not _ignored(name, config)]
    if extra:
        raise InputError(
            f"{directory}: tensor {extra[0]} does not belong to this {config.family} model{_and_more(extra)}"
        )
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
    layer = re.match(re.escape(config.tensor_prefix) + r"model\.layers\.(\d+)\.", name)
    return bool(layer and config.layers <= int(layer[1]) < config.layers + config.mtp_layers)


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


class TensorFiles:
    """The open safetensors files of a directory: names and shapes at once, tensors on demand."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stack = contextlib.ExitStack()
        index = directory / INDEX_FILE
        files = sorted(set(_weight_map(index).values())) if index.exists() else [WEIGHTS_FILE]
        self._file_of: dict[str, Any] = {}
        for file in files:
            opened = self._open(directory / file)
            self._file_of.update(dict.fromkeys(opened.keys(), opened))

    @property
    def names(self) -> Collection[str]:
        return self._file_of.keys()

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="pt"))
        except FileNotFoundError:
            raise InputError(f"{path}: not found; the checkpoint is incomplete") from None
        except (SafetensorError, OSError) as problem:
            raise InputError(
                f"{path}: not a complete safetensors file ({problem}); copy or download it again"
            ) from None

    def shape(self, name: str) -> list[int]:
        return list(self._file_of[name].get_slice(name).get_shape())

    def stored_dtype(self, name: str) -> str:
        return str(self._file_of[name].get_slice(name).get_dtype())

    def dtype(self) -> torch.dtype:
        """Return the dtype of the first matrix, which most of the weights are stored in."""
        for name in self.names:
            if len(self.shape(name)) > 1 and self.stored_dtype(name) in DTYPES:
                return DTYPES[self.stored_dtype(name)]
        raise InputError(f"{self.directory}: has no weight matrices")

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._stack.close()


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = {str(key): Path(value).name for key, value in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InputError(f"{index}: not a checkpoint index ({problem})") from None
    return names
