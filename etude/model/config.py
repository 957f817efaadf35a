"""What a network is made of: ModelConfig, and the families as short functions from a Hugging Face config.json.

The Hugging Face dictionary is the truth: a ModelConfig is read from it, keeps it, and is written back from it,
so nothing another tool put there is lost. To change a config, change the dictionary (`evolve`) and read it again.
A value this code cannot honour (another activation, a sliding window, dynamic RoPE) is an error here, once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import InputError

HuggingFaceConfig = Mapping[str, Any]


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions: the base, and how they are stretched beyond the length the model was trained at."""

    theta: float
    dim: int
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
    scoring: str = "softmax"  # or "sigmoid", with a correction bias that steers the choice but not the weights
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
    attention_bias: bool = False
    mlp_bias: bool = False
    latent: LatentConfig | None = None
    moe: MoEConfig | None = None
    mtp_layers: int = 0  # present in the checkpoint; the Transformer itself does not hold them
    tensor_prefix: str = ""  # Kimi K2.5 nests its text model under "language_model."
    source: HuggingFaceConfig = field(default_factory=dict, repr=False, compare=False)

    @property
    def quantised(self) -> bool:
        return "quantization_config" in {**self.source, **self.source.get("text_config", {})}

    @classmethod
    def from_hugging_face(cls, source: HuggingFaceConfig, where: str = "config.json") -> ModelConfig:
        family = source.get("model_type")
        if family not in FAMILIES:
            known = ", ".join(sorted(FAMILIES))
            raise InputError(f"{where}: model_type is {family!r}; expected one of {known}")
        try:
            return FAMILIES[family](source)
        except KeyError as missing:
            raise InputError(f"{where}: {missing.args[0]} is missing; {family} needs it") from None
        except (TypeError, ValueError) as problem:
            raise InputError(f"{where}: {problem}") from None

    @classmethod
    def load(cls, directory: Path | str) -> ModelConfig:
        path = Path(directory) / "config.json"
        try:
            source = json.loads(path.read_text())
        except FileNotFoundError:
            raise InputError(f"{path}: not found; expected a Hugging Face model directory") from None
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as problem:
            raise InputError(f"{path}: not readable as JSON ({problem})") from None
        if not isinstance(source, dict):
            raise InputError(f"{path}: expected a JSON object, found {type(source).__name__}")
        return cls.from_hugging_face(source, str(path))

    def evolve(self, **changes: Any) -> ModelConfig:
        """The same model with some Hugging Face keys changed; None removes a key."""
        source = {**self.source, **changes}
        return self.from_hugging_face({k: v for k, v in source.items() if k not in changes or v is not None})


def with_rope(
    config: ModelConfig, *, length: int, theta: float | None = None, scaling: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The same model reading `length` tokens, with another RoPE base, another scaling, or neither."""
    outer = dict(config.source)
    text = dict(outer.get("text_config") or outer)
    rope = {**(text.pop("rope_parameters", None) or {}), **(text.pop("rope_scaling", None) or {})}
    rope_theta = theta or rope.pop("rope_theta", None) or text.get("rope_theta") or 10_000.0
    chosen = dict(scaling) if scaling is not None else {k: v for k, v in rope.items() if v is not None}
    kind = chosen.pop("rope_type", chosen.pop("type", "default"))
    # both spellings of the base, and the scaling as transformers 5 writes it: older readers know rope_theta
    text["rope_theta"] = rope_theta
    text["rope_parameters"] = {"rope_type": kind, "rope_theta": rope_theta, **chosen}
    text["max_position_embeddings"] = max(length, config.max_length)
    if "text_config" in outer:
        return ModelConfig.from_hugging_face({**outer, "text_config": text})
    return ModelConfig.from_hugging_face(text)


def _common(c: HuggingFaceConfig, head_dim: int) -> dict[str, Any]:
    """The keys that every family spells alike, and the values none of them can honour."""
    if (act := c.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act is {act!r}; only 'silu' is supported")
    if c.get("use_sliding_window") or any("sliding" in kind for kind in c.get("layer_types") or ()):
        raise ValueError("sliding-window attention is not supported")
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return {
        "family": c["model_type"],
        "vocab_size": c["vocab_size"],
        "hidden_size": c["hidden_size"],
        "layers": c["num_hidden_layers"],
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "mlp_size": c["intermediate_size"],
        "norm_eps": float(c.get("rms_norm_eps", 1e-6)),
        "tied": bool(c.get("tie_word_embeddings", False)),
        "max_length": c.get("max_position_embeddings", 2048),
        "init_std": float(c.get("initializer_range", 0.02)),
        "attention_bias": bool(c.get("attention_bias", False)),
        "source": dict(c),
    }


def _mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's temperature: attention over a longer context is made sharper by the logarithm of the stretch."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _rope(c: HuggingFaceConfig, dim: int, *, interleaved: bool = False, score_scaling: bool = False) -> RopeConfig:
    """RoPE from either spelling: `rope_theta` + `rope_scaling`, or transformers 5's `rope_parameters`."""
    scaling = {**(c.get("rope_scaling") or {}), **(c.get("rope_parameters") or {})}
    theta = float(scaling.get("rope_theta") or c.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    base = RopeConfig(theta=theta, dim=dim, interleaved=interleaved)
    if kind == "default":
        return base
    if kind not in ("linear", "llama3", "yarn"):
        # dynamic NTK changes every key's rotation as a sequence grows, so cached and packed forwards would disagree
        raise ValueError(f"rope scaling {kind!r} is not supported; expected default, linear, llama3 or yarn")
    factor = float(scaling["factor"])
    original = int(scaling.get("original_max_position_embeddings") or c.get("max_position_embeddings", 2048))
    known = {"theta": theta, "dim": dim, "kind": kind, "factor": factor, "original_length": original}
    known["interleaved"] = interleaved
    if kind == "linear":
        return RopeConfig(**known)
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        return RopeConfig(**known, low_freq_factor=low, high_freq_factor=high)
    weight, all_dim = float(scaling.get("mscale") or 0), float(scaling.get("mscale_all_dim") or 0)
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
        truncate=bool(scaling.get("truncate", True)),
    )


def llama(c: HuggingFaceConfig) -> ModelConfig:
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    return ModelConfig(**_common(c, dim), rope=_rope(c, dim), mlp_bias=bool(c.get("mlp_bias", False)))


def qwen3(c: HuggingFaceConfig) -> ModelConfig:
    dim = c.get("head_dim") or 128
    return ModelConfig(**_common(c, dim), rope=_rope(c, dim), qk_norm=True)


def qwen3_moe(c: HuggingFaceConfig) -> ModelConfig:
    dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    dense, step = c.get("mlp_only_layers") or (), c.get("decoder_sparse_step", 1)
    experts = c["num_experts"] if "num_experts" in c else c["num_local_experts"]  # transformers 5 writes the latter
    moe = MoEConfig(
        experts=experts,
        per_token=c["num_experts_per_tok"],
        expert_size=c["moe_intermediate_size"],
        layers=tuple(i for i in range(c["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0),
        normalize=bool(c.get("norm_topk_prob", False)),
    )
    return ModelConfig(**_common(c, dim), rope=_rope(c, dim), qk_norm=True, moe=_checked(moe))


def deepseek_v3(c: HuggingFaceConfig) -> ModelConfig:
    """DeepSeek-V3, and with it Kimi K2: latent attention, sigmoid router with a correction bias, shared expert."""
    if c.get("moe_layer_freq", 1) != 1:
        raise ValueError("moe_layer_freq other than 1 is not supported")
    latent = LatentConfig(
        q_rank=c.get("q_lora_rank"),
        kv_rank=c["kv_lora_rank"],
        nope_dim=c["qk_nope_head_dim"],
        rope_dim=c["qk_rope_head_dim"],
        v_dim=c["v_head_dim"],
    )
    moe = MoEConfig(
        experts=c["n_routed_experts"],
        per_token=c["num_experts_per_tok"],
        expert_size=c["moe_intermediate_size"],
        layers=tuple(range(c.get("first_k_dense_replace", 0), c["num_hidden_layers"])),
        shared_size=c["moe_intermediate_size"] * c["n_shared_experts"],
        scoring="sigmoid",
        groups=c.get("n_group") or 1,
        groups_per_token=c.get("topk_group") or 1,
        normalize=bool(c.get("norm_topk_prob", True)),
        scale=float(c.get("routed_scaling_factor", 1.0)),
    )
    interleaved = bool(c.get("rope_interleave", True))
    return ModelConfig(
        **_common(c, latent.nope_dim + latent.rope_dim),
        rope=_rope(c, latent.rope_dim, interleaved=interleaved, score_scaling=True),
        latent=latent,
        moe=_checked(moe),
        mtp_layers=c.get("num_nextn_predict_layers") or 0,
    )


def kimi_k25(c: HuggingFaceConfig) -> ModelConfig:
    """The text model inside Kimi K2.5. The vision tower is not ours to train and is not loaded."""
    text = deepseek_v3(c["text_config"])
    known = {name: getattr(text, name) for name in ModelConfig.__dataclass_fields__}
    return ModelConfig(**{**known, "family": "kimi_k25", "tensor_prefix": "language_model.", "source": dict(c)})


def _checked(moe: MoEConfig) -> MoEConfig:
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


FAMILIES: dict[str, Callable[[HuggingFaceConfig], ModelConfig]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "kimi_k2": deepseek_v3,
    "kimi_k25": kimi_k25,
}
