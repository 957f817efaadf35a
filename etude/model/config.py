"""ModelConfig, and the model families as short functions from a Hugging Face config.json.

The Hugging Face dictionary is authoritative: a ModelConfig is read from it, keeps it, and is written back from it, so
keys of other tools are preserved. To change a config, change the dictionary (`evolve`) and read it again. A value that
is not supported (another activation, dynamic RoPE) is an error when the config is read. Where layers attend to a
sliding window, the context is limited to the window: within it the network is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.config import Registry, import_plugins
from etude.errors import InputError

HuggingFaceConfig = Mapping[str, Any]
ADAPTER_CONFIG = "adapter_config.json"  # of a directory that has PEFT's adapter instead of weights
PROFILE_FILE = "agent.json"  # of a checkpoint: how its model is used (etude.harness.profile)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base, and the scaling beyond the original training length."""

    theta: float
    dim: int  # how many dimensions of a head are rotated, the first ones
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    attention_factor: float = 1.0  # multiplies cos and sin
    score_factor: float = 1.0  # multiplies the softmax scale (DeepSeek's mscale_all_dim)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    interleaved: bool = False  # DeepSeek stores rotary pairs as (x0, x1), (x2, x3), ...; the others as two halves


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: keys and values are projections of one small latent per token."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts of the layers in `layers`; the others are dense."""

    experts: int
    per_token: int
    expert_size: int
    layers: tuple[int, ...]
    shared_size: int = 0
    scoring: str = (
        "softmax"  # or "sigmoid", with a correction bias that affects the choice of experts but not their weights
    )
    groups: int = 1
    groups_per_token: int = 1
    normalize: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    family: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    tied: bool
    max_length: int
    rope: RopeConfig
    init_std: float
    qk_norm: bool = False
    attention_bias: bool = False  # of the projections to queries, keys and values
    attention_out_bias: bool = False
    mlp_bias: bool = False
    unrotated_layers: tuple[int, ...] = ()  # without positions (SmolLM3)
    latent: LatentConfig | None = None
    moe: MoEConfig | None = None
    mtp_layers: int = 0  # in the checkpoint; not part of the Transformer
    tensor_prefix: str = ""  # Kimi K2.5 nests its text model under "language_model."
    tensor_names: tuple[tuple[str, str], ...] = ()  # parts of a checkpoint's names: ours, and those of the family
    fused_projections: bool = False  # the checkpoint has queries, keys and values as one matrix, gate and up too
    window: int | None = None  # of sliding-window attention; `max_length` is no longer than it
    source: HuggingFaceConfig = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_hugging_face(cls, source: HuggingFaceConfig, where: str = "config.json") -> ModelConfig:
        name = source.get("model_type")
        if name not in FAMILIES:
            raise InputError(f"{where}: model_type is {name!r}; {FAMILIES.advice(str(name))}")
        try:
            return FAMILIES[str(name)](ConfigReader(source))
        except (TypeError, ValueError, KeyError) as problem:
            raise InputError(f"{where}: {problem}") from None

    @classmethod
    def load(cls, directory: Path | str) -> ModelConfig:
        path = Path(directory) / "config.json"
        try:
            if not path.is_file():
                path = base_directory(Path(directory)) / "config.json"
            source = json.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(f"{path}: not found; expected a Hugging Face model directory") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
            raise InputError(f"{path}: not readable as JSON ({problem})") from None
        if not isinstance(source, dict):
            raise InputError(f"{path}: expected a JSON object, found {type(source).__name__}")
        import_checkpoint_plugins(Path(directory))
        return cls.from_hugging_face(source, str(path))

    def evolve(self, **changes: Any) -> ModelConfig:
        """Return a config with some Hugging Face keys changed; None removes a key."""
        outer = dict(self.source)
        text = {**(outer.get("text_config") or outer), **changes}
        text = {key: value for key, value in text.items() if key not in changes or value is not None}
        return self.from_hugging_face({**outer, "text_config": text} if "text_config" in outer else text)


def quantisation_of(source: HuggingFaceConfig) -> HuggingFaceConfig | None:
    """Return how the weights beside a config.json are quantised; None if they are not."""
    text = source.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, Mapping) else None
    found = source.get("quantization_config") or inner
    if found and not isinstance(found, Mapping):
        raise InputError(f"quantization_config is {found!r}; expected a table")
    return found or None


def without_quantisation(source: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the config of the same model with its weights dequantised."""
    kept = {key: value for key, value in source.items() if key != "quantization_config"}
    text = kept.get("text_config")
    return {**kept, "text_config": without_quantisation(text)} if isinstance(text, Mapping) else kept


def base_directory(directory: Path) -> Path:
    """Return the directory of the base model that an adapter directory names; any other directory is its own."""
    path = directory / ADAPTER_CONFIG
    if not path.is_file():
        return directory
    try:
        base = json.loads(path.read_text(encoding="utf-8"))["base_model_name_or_path"]
        found: Path = directory / base  # an absolute path stays what it is
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise InputError(f"{path}: base_model_name_or_path is missing or not readable ({problem})") from None
    if not found.is_dir():
        raise InputError(
            f"{path}: its base model {base} is not a directory here; put the model's directory in "
            "base_model_name_or_path, absolute or relative to the adapter"
        )
    return found


def import_checkpoint_plugins(directory: Path) -> None:
    """Import the plugins that a checkpoint's agent.json names: its model family or its tools may come from them."""
    file = directory / PROFILE_FILE
    if file.is_file():
        with suppress(ValueError, AttributeError, TypeError):  # AgentProfile.load explains what is wrong
            import_plugins(json.loads(file.read_bytes()).get("plugins", ()))


def with_rope(
    config: ModelConfig, *, length: int, theta: float | None = None, scaling: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Return a config with a context of at least `length` tokens and, if given, another RoPE base or scaling."""
    if config.window is not None and length > config.window:
        raise InputError(
            f"a context of {length} tokens is longer than the window of {config.window} that this {config.family} "
            "model attends to; attention over a sliding window is not supported"
        )
    source = config.source.get("text_config") or config.source
    rope = {**(source.get("rope_parameters") or {}), **(source.get("rope_scaling") or {})}
    old_theta = rope.pop("rope_theta", None) or source.get("rope_theta") or 10_000.0
    rope_theta = theta or old_theta
    new_scaling = dict(scaling) if scaling is not None else {k: v for k, v in rope.items() if v is not None}
    kind = new_scaling.pop("rope_type", new_scaling.pop("type", "default"))
    if kind in ("yarn", "llama3"):  # both scale relative to the original length
        new_scaling.setdefault("original_max_position_embeddings", config.rope.original_length or config.max_length)
    return config.evolve(
        rope_scaling=None,  # only transformers 5's rope_parameters; older readers still find rope_theta
        rope_theta=rope_theta,
        rope_parameters={"rope_type": kind, "rope_theta": rope_theta, **new_scaling},
        max_position_embeddings=max(length, config.max_length),
    )


class ConfigReader:
    """Typed access to a config: a value of the wrong type or range is an error that names its key.

    It records the keys that were read, so that unused keys of a hand-written config can be reported.
    """

    def __init__(self, source: HuggingFaceConfig) -> None:
        self.source = source
        self.keys_read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        value = self.source.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{key} is missing; {self.source.get('model_type')} needs it")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{key} is {value!r}; expected an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if value is None:
            raise ValueError(f"{key} is missing; {self.source.get('model_type')} needs it")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"{key} is {value!r}; expected a number above 0")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{key} is {value!r}; expected true or false")
        return value

    def require(self, key: str, *allowed: Any) -> None:
        if (value := self.get(key, allowed[0])) not in allowed:
            raise ValueError(f"{key} is {value!r}; only {' or '.join(map(repr, allowed))} is supported")

    def section(self, key: str) -> ConfigReader:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ValueError(f"{key} is {value!r}; expected a table")
        return ConfigReader(value)


FAMILIES = Registry[Callable[[ConfigReader], ModelConfig]]("model family")
family = FAMILIES.add  # decorator of a function called like the `model_type` that it reads


def common_keys(c: ConfigReader, head_dim: int, *, windowed: bool = False) -> dict[str, Any]:
    """Read the keys that all families share, and reject values that none of them supports.

    `windowed`: the family has no key that says whether `sliding_window` is used: it is if it is given.
    """
    c.require("hidden_act", "silu")
    length, window = c.size("max_position_embeddings", 2048), None
    if windowed or c.flag("use_sliding_window") or any("sliding" in str(kind) for kind in c.get("layer_types", ())):
        window = None if c.get("sliding_window") is None else c.size("sliding_window")
    heads = c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return {
        "family": c.source["model_type"],
        "vocab_size": c.size("vocab_size"),
        "hidden_size": c.size("hidden_size"),
        "layers": c.size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_size": c.size("intermediate_size"),
        "norm_eps": c.number("rms_norm_eps", 1e-6),
        "tied": c.flag("tie_word_embeddings"),
        "max_length": length if window is None else min(length, window),
        "window": window,
        "init_std": c.number("initializer_range", 0.02),
        "attention_bias": c.flag("attention_bias"),
        "attention_out_bias": c.flag("attention_bias"),
        "source": dict(c.source),
    }


def read_head_dim(c: ConfigReader, default: int | None = None) -> int:
    dim = c.size("head_dim", default or c.size("hidden_size") // c.size("num_attention_heads"))
    if dim % 2:
        raise ValueError(f"head_dim is {dim}; rotary positions rotate pairs, so it must be even")
    return dim


def _mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's attention factor: it grows with the logarithm of the scaling factor."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def read_rope(
    c: ConfigReader,
    dim: int,
    *,
    interleaved: bool = False,
    score_scaling: bool = False,
    partial: float | None = None,
    theta: float = 10_000.0,
) -> RopeConfig:
    """Read RoPE from either format: `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`.

    `dim` is the width of a head. `theta` is the base of a config that names none, `partial` its rotated fraction of a
    head: None if the family always rotates all of it.
    """
    old, new = c.section("rope_scaling"), c.section("rope_parameters")
    scaling = ConfigReader({**old.source, **new.source})
    theta = scaling.number("rope_theta", c.number("rope_theta", theta))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fraction = scaling.number("partial_rotary_factor", c.number("partial_rotary_factor", partial or 1.0))
    rotated = int(dim * fraction)
    if (fraction != 1.0 and partial is None) or fraction > 1 or rotated % 2 or not rotated:
        raise ValueError(f"partial_rotary_factor is {fraction}, of {dim} dimensions; this is not supported")
    dim = rotated
    if kind == "default":
        return RopeConfig(theta=theta, dim=dim, interleaved=interleaved)
    if kind not in ("linear", "llama3", "yarn"):
        # dynamic NTK changes the rotation of all keys as a sequence grows, so cached and packed forwards would differ
        raise ValueError(f"rope scaling {kind!r} is not supported; expected default, linear, llama3 or yarn")
    factor = scaling.number("factor")
    known: dict[str, Any] = {"theta": theta, "dim": dim, "kind": kind, "factor": factor, "interleaved": interleaved}
    known["original_length"] = scaling.size("original_max_position_embeddings", c.size("max_position_embeddings", 2048))
    if kind == "linear":
        return RopeConfig(**known)
    if kind == "llama3":
        low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
        return RopeConfig(**known, low_freq_factor=low, high_freq_factor=high)
    weight, all_dim = float(scaling.get("mscale", 0)), float(scaling.get("mscale_all_dim", 0))
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        both = weight and all_dim
        attention_factor = _mscale(factor, weight) / _mscale(factor, all_dim) if both else _mscale(factor)
    return RopeConfig(
        **known,
        attention_factor=float(attention_factor),
        score_factor=_mscale(factor, all_dim) ** 2 if score_scaling and all_dim else 1.0,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        truncate=scaling.flag("truncate", True),
    )


@family
def llama(c: ConfigReader) -> ModelConfig:
    dim = read_head_dim(c)
    return ModelConfig(**common_keys(c, dim), rope=read_rope(c, dim), mlp_bias=c.flag("mlp_bias"))


@family
def mistral(c: ConfigReader) -> ModelConfig:
    dim = read_head_dim(c)
    return ModelConfig(**common_keys(c, dim, windowed=True), rope=read_rope(c, dim))


@family
def qwen2(c: ConfigReader) -> ModelConfig:
    """Qwen2 and Qwen2.5: biases of queries, keys and values, which the config does not mention."""
    dim = read_head_dim(c)
    keys = common_keys(c, dim) | {"attention_bias": True, "attention_out_bias": False}
    return ModelConfig(**keys, rope=read_rope(c, dim))


@family
def smollm3(c: ConfigReader) -> ModelConfig:
    """Like llama, but every fourth layer has no positions."""
    dim, layers = read_head_dim(c), c.size("num_hidden_layers")
    every = c.size("no_rope_layer_interval", 4)
    rotated = c.get("no_rope_layers", [(layer + 1) % every for layer in range(layers)])  # true: this layer has RoPE
    if not isinstance(rotated, (list, tuple)) or len(rotated) < layers:
        raise ValueError(f"no_rope_layers is {rotated!r}; expected one entry for each of {layers} layers")
    keys = common_keys(c, dim) | {"tied": c.flag("tie_word_embeddings", True)}
    return ModelConfig(
        **keys,
        rope=read_rope(c, dim, theta=2_000_000.0),
        mlp_bias=c.flag("mlp_bias"),
        unrotated_layers=tuple(layer for layer in range(layers) if not rotated[layer]),
    )


@family
def phi3(c: ConfigReader) -> ModelConfig:
    """Phi-3 and Phi-4: llama with queries, keys and values as one matrix, gate and up too. LongRoPE is an error."""
    dim = read_head_dim(c)
    keys = common_keys(c, dim, windowed=True) | {"norm_eps": c.number("rms_norm_eps", 1e-5)}
    if (rope := read_rope(c, dim, partial=1.0)).kind != "default":  # `yarn` is an old name of LongRoPE here
        raise ValueError("rope scaling of a phi3 model is LongRoPE, which is not supported")
    return ModelConfig(**keys, rope=rope, fused_projections=True)


@family
def qwen3(c: ConfigReader) -> ModelConfig:
    dim = read_head_dim(c, 128)
    return ModelConfig(**common_keys(c, dim), rope=read_rope(c, dim), qk_norm=True)


@family
def qwen3_moe(c: ConfigReader) -> ModelConfig:
    dim = read_head_dim(c)
    dense, step = c.get("mlp_only_layers", ()), c.size("decoder_sparse_step", 1)
    layers = range(c.size("num_hidden_layers"))
    moe = MoEConfig(
        experts=c.size("num_experts", c.get("num_local_experts")),  # transformers 5 writes the latter
        per_token=c.size("num_experts_per_tok"),
        expert_size=c.size("moe_intermediate_size"),
        layers=tuple(i for i in layers if i not in dense and (i + 1) % step == 0),
        normalize=c.flag("norm_topk_prob"),
    )
    return ModelConfig(**common_keys(c, dim), rope=read_rope(c, dim), qk_norm=True, moe=_validate_moe(moe))


@family
def mixtral(c: ConfigReader) -> ModelConfig:
    dim = read_head_dim(c)
    c.require("router_jitter_noise", 0.0)
    moe = MoEConfig(
        experts=c.size("num_local_experts"),
        per_token=c.size("num_experts_per_tok"),
        expert_size=c.size("intermediate_size"),
        layers=tuple(range(c.size("num_hidden_layers"))),
    )
    keys = common_keys(c, dim, windowed=True) | {"norm_eps": c.number("rms_norm_eps", 1e-5)}
    names = ((".mlp.", ".block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    rope = read_rope(c, dim, theta=1_000_000.0)
    return ModelConfig(**keys, rope=rope, moe=_validate_moe(moe), tensor_names=names)


@family
def glm4_moe(c: ConfigReader) -> ModelConfig:
    """GLM-4.5: grouped-query attention with half of each head rotated, experts as in DeepSeek-V3."""
    dim = read_head_dim(c)
    keys = common_keys(c, dim) | {"attention_out_bias": False, "norm_eps": c.number("rms_norm_eps", 1e-5)}
    return ModelConfig(
        **keys,
        rope=read_rope(c, dim, partial=0.5),
        qk_norm=c.flag("use_qk_norm"),
        moe=_sigmoid_moe(c),
        mtp_layers=c.size("num_nextn_predict_layers", 0, minimum=0),
    )


@FAMILIES.register("kimi_k2")
@family
def deepseek_v3(c: ConfigReader) -> ModelConfig:
    """DeepSeek-V3 and Kimi K2: latent attention, sigmoid router with a correction bias, shared expert."""
    c.require("moe_layer_freq", 1)
    c.require("scoring_func", "sigmoid")
    c.require("topk_method", "noaux_tc")
    latent = LatentConfig(
        q_rank=None if c.get("q_lora_rank") is None else c.size("q_lora_rank"),
        kv_rank=c.size("kv_lora_rank"),
        nope_dim=c.size("qk_nope_head_dim"),
        rope_dim=c.size("qk_rope_head_dim"),
        v_dim=c.size("v_head_dim"),
    )
    if latent.rope_dim % 2:
        raise ValueError(f"qk_rope_head_dim is {latent.rope_dim}; rotary positions rotate pairs, so it must be even")
    return ModelConfig(
        **common_keys(c, latent.nope_dim + latent.rope_dim),
        rope=read_rope(c, latent.rope_dim, interleaved=c.flag("rope_interleave", True), score_scaling=True),
        latent=latent,
        moe=_sigmoid_moe(c),
        mtp_layers=c.size("num_nextn_predict_layers", 0, minimum=0),
    )


@family
def kimi_k25(c: ConfigReader) -> ModelConfig:
    """The text model of Kimi K2.5; the vision tower is not loaded."""
    text = deepseek_v3(c.section("text_config"))
    return replace(text, family="kimi_k25", tensor_prefix="language_model.", source=dict(c.source))


def _sigmoid_moe(c: ConfigReader) -> MoEConfig:
    """Read the experts of DeepSeek-V3. No defaults where transformers has others: a wrong guess is another network."""
    expert_size = c.size("moe_intermediate_size")
    moe = MoEConfig(
        experts=c.size("n_routed_experts"),
        per_token=c.size("num_experts_per_tok"),
        expert_size=expert_size,
        layers=tuple(range(c.size("first_k_dense_replace", minimum=0), c.size("num_hidden_layers"))),
        shared_size=expert_size * c.size("n_shared_experts", 1),
        scoring="sigmoid",
        groups=c.size("n_group"),
        groups_per_token=c.size("topk_group"),
        normalize=c.flag("norm_topk_prob", True),
        scale=c.number("routed_scaling_factor"),
    )
    return _validate_moe(moe)


def _validate_moe(moe: MoEConfig) -> MoEConfig:
    if not 0 < moe.per_token <= moe.experts:
        raise ValueError(f"num_experts_per_tok {moe.per_token} must be between 1 and the {moe.experts} experts")
    if moe.experts % moe.groups or not 0 < moe.groups_per_token <= moe.groups:
        raise ValueError(
            f"n_group {moe.groups} and topk_group {moe.groups_per_token} do not divide {moe.experts} experts"
        )
    if moe.per_token > moe.experts // moe.groups * moe.groups_per_token:
        raise ValueError(
            f"topk_group {moe.groups_per_token} leaves fewer experts than num_experts_per_tok {moe.per_token}"
        )
    return moe


def unused_keys(source: HuggingFaceConfig) -> list[str]:
    """Return the keys of a hand-written config that have no effect, without those that are known to be ignored."""
    reader = ConfigReader(source)
    FAMILIES[source["model_type"]](reader)
    return [key for key in source if key not in reader.keys_read | UNINTERPRETED_KEYS]


# Keys that describe the file or address other tools; this code ignores them.
UNINTERPRETED_KEYS = {
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "model_type",
    "pad_token_id",
}
UNINTERPRETED_KEYS |= {"torch_dtype", "transformers_version", "use_cache"}
