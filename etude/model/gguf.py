"""Convert a GGUF file of llama.cpp into a Hugging Face directory (weights, config, tokenizer, chat template).

Tensors are dequantised one at a time, while they are written. An unsupported architecture, tensor, RoPE scaling or
pre-tokenizer is an error, never a guess: a wrong guess would load and show only as a worse model. The directory gets
its name only when it is complete.
"""

import json
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from etude.chat.tokenizer import Tokenizer, check_vocabulary, split_digits_then_words
from etude.errors import InputError
from etude.model.checkpoint import new_directory, write_tensors
from etude.model.config import ModelConfig

WHOLE_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# By `tokenizer.ggml.pre`. Only those whose ids have been compared with the original tokenizer.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    "smollm": split_digits_then_words,
}

# `tokenizer.ggml.token_type`: control tokens are special, user-defined ones are only added.
CONTROL, USER_DEFINED = 3, 4


def import_gguf(source: str | Path, out: Path, *, dtype: torch.dtype = torch.float32) -> None:
    """Convert `source`, a .gguf file or an installed package that contains one, into the new directory `out`."""
    with new_directory(Path(out)) as directory:
        file = GgufFile(_locate(source))
        config = _config(file, dtype)
        tokenizer = _tokenizer(file)
        check_vocabulary(tokenizer, config["vocab_size"], str(file.path))
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        tokenizer.save(directory)
        write_tensors(directory, _tensors(file, config, dtype))


def gguf_config(source: str | Path) -> ModelConfig:
    """Return the model config of a GGUF file, without reading its weights."""
    file = GgufFile(_locate(source))
    return ModelConfig.from_hugging_face(_config(file, torch.float32), where=str(file.path))


class GgufFile:
    """An open GGUF file: metadata by key, tensors by name; every defect is an InputError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _library()
        try:
            reader = self._gguf.GGUFReader(path)
        except Exception as error:  # the type depends on where the file ends
            raise InputError(f"{path}: not a GGUF file, or cut short: {error}") from error
        self._fields = reader.fields
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def names(self) -> list[str]:
        """Return the tensor names, in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape in torch's order: rows first."""
        if name not in self._tensors:
            raise InputError(f"{self.path}: the tensor {name} is missing")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str) -> npt.NDArray[np.float32]:
        """Return a dequantised copy of one tensor; the file itself is mapped read-only."""
        tensor = self._tensors[name]
        try:
            values = self._gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise InputError(f"{self.path}: {name}: {error}") from error
        return np.array(values, dtype=np.float32).reshape(self.shape(name))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value, or `default` if it is missing."""
        return self._fields[key].contents() if key in self._fields else default

    def need(self, key: str) -> Any:
        """Return a required metadata value."""
        if key not in self._fields:
            raise InputError(f"{self.path}: the metadata key {key} is missing")
        return self.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        """Return a positive integer, required if it has no default; a list with one per layer is an error."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or value <= 0:
            raise InputError(f"{self.path}: {key} is {value!r}; only one positive number is supported")
        return value


def _library() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise InputError("reading GGUF files needs the gguf package: pip install etude[gguf]") from error
    return gguf


def _locate(source: str | Path) -> Path:
    """Return the path of a file, or of the .gguf file in an installed distribution, which is not imported."""
    path = Path(source)
    if path.is_file():
        return path
    if isinstance(source, Path) or path.suffix == ".gguf" or len(path.parts) != 1:
        raise InputError(f"{source}: no such file")
    try:
        distribution = metadata.distribution(source)
    except metadata.PackageNotFoundError:
        raise InputError(f"{source}: neither a .gguf file nor an installed package; pip install {source}?") from None
    found = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise InputError(f"{source}: expected one .gguf file in the installed package, found {names}")
    return Path(str(found[0].locate()))


def _config(file: GgufFile, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of a Llama model; unsupported features of the file are an error."""
    _refuse_unsupported(file)
    hidden = file.number("llama.embedding_length")
    heads = file.number("llama.attention.head_count")
    head_dim = file.number("llama.attention.key_length", hidden // heads)
    if (rotary := file.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise InputError(f"{file.path}: rope over {rotary} of {head_dim} dimensions of a head is not supported")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": file.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": file.number("llama.feed_forward_length"),
        "num_hidden_layers": file.number("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.number("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": file.number("llama.context_length"),
        "rope_theta": _float32(file.get("llama.rope.freq_base", 10000.0)),
        "rms_norm_eps": _float32(file.need("llama.attention.layer_norm_rms_epsilon")),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in file.names(),
        "dtype": str(dtype).removeprefix("torch."),
    }
    for role in ("bos", "eos"):
        config[f"{role}_token_id"] = file.get(f"tokenizer.ggml.{role}_token_id")
    return config


def _refuse_unsupported(file: GgufFile) -> None:
    if (architecture := file.need("general.architecture")) != "llama":
        raise InputError(f"{file.path}: the architecture {architecture} is not supported; only llama is")
    if (scaling := file.get("llama.rope.scaling.type", "none")) != "none":
        raise InputError(f"{file.path}: rope scaling of type {scaling} is not supported")
    if experts := file.get("llama.expert_count", 0):
        raise InputError(f"{file.path}: a mixture of {experts} experts is not supported; only dense models are")


def _float32(value: float) -> float:
    # GGUF stores float32: 1e-5 reads back as 9.999999747378752e-06; use the shortest decimal instead.
    return float(str(np.float32(value)))


def _tensors(file: GgufFile, config: dict[str, Any], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor under its Hugging Face name, in file order."""
    names = {name: _hugging_face_name(name, file.path) for name in file.names()}
    _check_complete(set(names.values()), config, file.path)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, target in names.items():
        values = file.read(name)
        for part, count in heads.items():
            if name.endswith(f".{part}.weight"):
                values = _halves_from_pairs(values, count)
        yield target, torch.from_numpy(values).to(dtype)


def _hugging_face_name(name: str, path: Path) -> str:
    if name in WHOLE_TENSORS:
        return WHOLE_TENSORS[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in BLOCK_TENSORS:
        raise InputError(f"{path}: the tensor {name} does not belong to a llama model")
    return f"model.layers.{match[1]}.{BLOCK_TENSORS[match[2]]}.weight"


def _check_complete(found: set[str], config: dict[str, Any], path: Path) -> None:
    layers = range(config["num_hidden_layers"])
    expected = {f"model.layers.{layer}.{part}.weight" for layer in layers for part in BLOCK_TENSORS.values()}
    expected |= {"model.embed_tokens.weight", "model.norm.weight"}
    if missing := sorted(expected - found):
        raise InputError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if surplus := sorted(found - expected - {"lm_head.weight"}):
        raise InputError(f"{path}: {surplus[0]} is beyond the {len(layers)} layers of the metadata")


def _halves_from_pairs(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo llama.cpp's row order: it rotates pairs (0, 1), Hugging Face rotates pairs (0, d/2)."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _tokenizer(file: GgufFile) -> Tokenizer:
    tokens = _vocabulary(file)
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    try:
        backend = Backend(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{file.path}: tokenizer.ggml.merges do not fit the vocabulary: {error}") from error
    backend.pre_tokenizer = _pre_tokenizer(file)
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, file.need("tokenizer.ggml.token_type"), strict=True):
        if kind in (CONTROL, USER_DEFINED):
            backend.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False)])
    config: dict[str, Any] = {"model_max_length": file.number("llama.context_length")}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        if (index := file.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            if index >= len(tokens):
                raise InputError(f"{file.path}: tokenizer.ggml.{key}_token_id {index} is not in the vocabulary")
            config[f"{role}_token"] = tokens[index]
    return Tokenizer(backend, chat_template=file.get("tokenizer.chat_template"), config=config)


def _vocabulary(file: GgufFile) -> list[str]:
    kind = file.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InputError(f"{file.path}: a tokenizer of type {kind} is not supported; only gpt2 (byte-level BPE) is")
    if file.get("tokenizer.ggml.add_bos_token", False):
        raise InputError(f"{file.path}: a tokenizer that begins every text with a token is not supported")
    tokens: list[str] = file.need("tokenizer.ggml.tokens")
    if len(set(tokens)) != len(tokens):
        raise InputError(f"{file.path}: tokenizer.ggml.tokens holds a token twice")
    return tokens


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    name = file.need("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise InputError(f"{file.path}: the pre-tokenizer {name} is not supported; known are {known}")
    return PRE_TOKENIZERS[name]()
