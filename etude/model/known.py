"""Published configs that can be described, initialised and benchmarked by name, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KnownModel:
    config: dict[str, Any]
    published: str  # total / active parameters, as published
    remark: str = ""


KNOWN_MODELS: dict[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        published="135M",
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.041666666666666664,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        },
    ),
    "qwen3-coder-30b-a3b": KnownModel(
        published="30.5B / 3.3B",
        config={
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 5472,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-06,
            "rope_theta": 10000000,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "torch_dtype": "bfloat16",
        },
    ),
    "kimi-k2.5": KnownModel(
        published="1.04T / 32B",
        remark="the published total matches the count with one multi-token-prediction layer; without it, 1.03T",
        config={
            "architectures": ["KimiK25ForConditionalGeneration"],
            "model_type": "kimi_k25",
            "torch_dtype": "bfloat16",
            "text_config": {
                "architectures": ["DeepseekV3ForCausalLM"],
                "model_type": "kimi_k2",
                "vocab_size": 163840,
                "hidden_size": 7168,
                "intermediate_size": 18432,
                "moe_intermediate_size": 2048,
                "num_hidden_layers": 61,
                "num_attention_heads": 64,
                "num_key_value_heads": 64,
                "n_routed_experts": 384,
                "n_shared_experts": 1,
                "num_experts_per_tok": 8,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "moe_layer_freq": 1,
                "norm_topk_prob": True,
                "scoring_func": "sigmoid",
                "topk_method": "noaux_tc",
                "routed_scaling_factor": 2.827,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "max_position_embeddings": 262144,
                "num_nextn_predict_layers": 0,
                "rms_norm_eps": 1e-05,
                "rope_theta": 50000.0,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 64.0,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
                "tie_word_embeddings": False,
            },
        },
    ),
}
