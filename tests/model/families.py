"""Random tiny configs of every family, and transformers models of them with large random weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from hypothesis import strategies as st

from etude.model import Transformer, load

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
FAMILIES = ("llama", "qwen3", "qwen3_moe", "deepseek_v3")
# Families that differ from these in a few lines; test_families.py holds all of them against transformers.
VARIANTS = ("mistral", "mixtral", "qwen2", "smollm3", "phi3", "glm4_moe")


def rope_scaling() -> st.SearchStrategy[dict[str, Any]]:
    linear = st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": st.sampled_from([2.0, 4.0])})
    yarn = st.fixed_dictionaries(
        {
            "rope_type": st.just("yarn"),
            "factor": st.sampled_from([2.0, 8.0, 40.0]),
            "original_max_position_embeddings": st.sampled_from([16, 64]),
        },
        optional={"beta_fast": st.just(16.0), "beta_slow": st.just(2.0), "truncate": st.just(False)},
    )
    deepseek_yarn = yarn.map(lambda d: {**d, "mscale": 1.0, "mscale_all_dim": 0.707})
    llama3 = st.just(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    )
    return st.one_of(st.just({"rope_type": "default"}), linear, yarn, deepseek_yarn, llama3)


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    heads_per_group, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    head_dim = 2 * draw(st.integers(2, 9))
    common = {
        "model_type": family,
        "vocab_size": draw(st.integers(11, 97)),
        "hidden_size": heads_per_group * kv_heads * draw(st.integers(3, 9)),  # transformers wants a multiple
        "intermediate_size": draw(st.integers(7, 50)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads_per_group * kv_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "max_position_embeddings": 128,
        "rope_parameters": {"rope_theta": draw(st.sampled_from([1e4, 5e4, 1e6])), **draw(rope_scaling())},
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    }
    if family == "llama":
        return {**common, "mlp_bias": draw(st.booleans())}
    if family == "qwen3":
        return common
    groups = draw(st.integers(1, 3))
    experts = groups * draw(st.integers(2, 5))
    per_token = draw(st.integers(1, min(4, experts // groups)))
    moe = {
        **common,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": draw(st.integers(5, 30)),
        "norm_topk_prob": draw(st.booleans()),
    }
    if family == "qwen3_moe":
        dense = draw(st.sets(st.integers(1, 2), max_size=1))
        return {**moe, "num_experts": experts, "mlp_only_layers": sorted(dense), "decoder_sparse_step": 1}
    rope_dim = 2 * draw(st.integers(1, 6))
    moe.pop("head_dim")
    return {
        **moe,
        "num_key_value_heads": common["num_attention_heads"],
        "n_routed_experts": experts,
        "n_group": groups,
        "topk_group": draw(st.integers(1, groups)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "first_k_dense_replace": draw(st.integers(0, common["num_hidden_layers"] - 1)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "q_lora_rank": draw(st.one_of(st.none(), st.integers(3, 20))),
        "kv_lora_rank": draw(st.integers(3, 20)),
        "qk_nope_head_dim": draw(st.integers(3, 16)),
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": draw(st.integers(3, 16)),
        "rope_interleave": draw(st.booleans()),
        "num_nextn_predict_layers": 0,
    }


SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 36,
        "intermediate_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "qwen3": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
    },
    "qwen3_moe": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "n_shared_experts": 1,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "num_nextn_predict_layers": 0,
    },
}
DENSE = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {
    "mistral": {**DENSE, "head_dim": 12, "sliding_window": None},
    "mixtral": {**DENSE, "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2": {**DENSE},
    "smollm3": {**DENSE, "num_hidden_layers": 5, "tie_word_embeddings": False, "mlp_bias": True},
    "phi3": {**DENSE},
    "glm4_moe": {
        **{key: SMALL["deepseek_v3"][key] for key in SMALL["deepseek_v3"] if not key.endswith(("_rank", "_dim"))},
        "num_key_value_heads": 2,
        "head_dim": 12,
        "attention_bias": True,
        "use_qk_norm": True,
    },
}


def small_config(family: str, **changes: Any) -> dict[str, Any]:
    """One fixed ordinary config per family, three layers, for tests that are not about configs."""
    common = {"model_type": family, "vocab_size": 61, "num_hidden_layers": 3, "max_position_embeddings": 128}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    return {**common, **rope, **ids, **SMALL[family], **changes}


def twin(config: dict[str, Any], seed: int, lively: bool = True) -> transformers.PreTrainedModel:
    """Return transformers' model of this config. With `lively`, weights are large and norms uneven: 0.02 hides bugs."""
    wanted = {k: v for k, v in config.items() if k != "model_type"}
    torch.manual_seed(seed)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config["model_type"], **wanted),
        dtype=torch.float32,
        experts_implementation="eager",  # a loop over experts: independent of ours, and it takes odd sizes
    )
    with torch.no_grad():
        for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()] if lively else ():
            if tensor.is_floating_point() and "inv_freq" not in name:
                noise = torch.randn(tensor.shape)
                tensor.copy_(1 + 0.2 * noise if "norm" in name else 0.2 * noise)
    return theirs.eval()


def pair(config: dict[str, Any], seed: int, directory: Path) -> tuple[transformers.PreTrainedModel, Transformer]:
    """Return a model of transformers, and ours loaded from its checkpoint."""
    theirs = twin(config, seed)
    theirs.save_pretrained(directory)
    return theirs, load(directory)


def random_tokens(config: dict[str, Any], rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config["vocab_size"], (rows, tokens), generator=generator)
