"""Bytes that training keeps of its activations: for the backward pass, in the loss, and while a layer is in work.

The terms follow the modules of a block: what autograd saves for each of them, at the precision it is saved in (norms,
routers and the weighting of experts compute in float32). `tests/parallel/test_memory.py` compares peaks.
"""

from __future__ import annotations

from etude.kernels.loss import CHUNK_ELEMENTS
from etude.model.config import LatentConfig, ModelConfig
from etude.model.trainer_parts import TrainerSpec

FLOAT = 4  # bytes of a float32
# Of what is kept without: SmolLM2-135M with 16 x 2048 tokens on an H200 peaks at 18.5 GiB, and at 25.5 without
# (docs/performance.md).
COMPILED_SHARE = 0.7
TILES = 6  # float32 tiles of logits that `etude.kernels.distill` holds at once; it leaves room for eight


def kept_bytes(config: ModelConfig, spec: TrainerSpec) -> int:
    """Return the bytes that are kept between forward and backward, without those of the loss."""
    w, hidden = spec.itemsize, config.hidden_size
    mtp_input = 3 * _norm(hidden, w) + 3 * w * hidden  # three norms, their inputs and the draft
    layers = spec.mtp_layers * (spec.tokens * mtp_input + layer_bytes(config, config.layers - 1, spec, mtp=True))
    if spec.frozen:
        return layers
    layers += spec.tokens * (_norm(hidden, w) + w * hidden)  # the final norm, and what the loss reads
    if spec.recompute:
        return layers + config.layers * spec.tokens * w * hidden
    return layers + sum(layer_bytes(config, layer, spec) for layer in range(config.layers))


def layer_bytes(config: ModelConfig, layer: int, spec: TrainerSpec, *, mtp: bool = False) -> int:
    """Return the bytes that the backward pass of one layer needs of its forward pass."""
    trained = spec.lora is None or mtp
    per_token = 2 * _norm(config.hidden_size, spec.itemsize, trained) + _mlp(config, layer, spec.itemsize)
    if config.latent is None:
        per_token += _attention(config, spec)
    else:
        per_token += _latent_attention(config, config.latent, spec, trained)
    return round(spec.tokens * per_token * (COMPILED_SHARE if spec.compile else 1))


def work_bytes(config: ModelConfig, spec: TrainerSpec) -> int:
    """Return the bytes of gradients that the backward pass of a layer holds beside what was kept.

    Those of the experts or the projections come first. Those of attention follow, in the place of what these had kept.
    """
    w, moe, layer = spec.itemsize, config.moe, config.layers - 1
    experts = moe.per_token * (FLOAT + w) * config.hidden_size if moe else 0  # of the experts' results, also rounded
    dense = 3 * w * config.mlp_size if moe is None or len(moe.layers) < config.layers else 0
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = w * (queries + 2 * keys * spec.parallel.cp) - _mlp(config, layer, w)
    return spec.tokens * (2 * w * config.hidden_size + max(experts, dense, attention))


def loss_bytes(config: ModelConfig, spec: TrainerSpec, *, trained_head: bool) -> int:
    """Return the bytes of the loss: a chunk of logits, and the gradients of the head and of the hidden states."""
    w, logits = spec.itemsize, spec.tokens * config.vocab_size
    chunk = min(CHUNK_ELEMENTS, logits)
    copies = 0 if spec.device != "cpu" else 2 * FLOAT if w < FLOAT else FLOAT  # softmax in float32; in place on a GPU
    gradient = (FLOAT + w) * config.vocab_size * config.hidden_size if trained_head else 0  # the sum, and a chunk's
    main = 0 if spec.frozen else (w + copies) * chunk + gradient + w * spec.tokens * config.hidden_size
    drafts = TILES * FLOAT * min(CHUNK_ELEMENTS // 8, logits) if spec.mtp_layers else 0
    return max(main, drafts)


def _norm(width: int, w: int, trained: bool = True) -> int:
    """Return the bytes of a norm: its input in float32, the scaled values and, for its weight, those before."""
    return (FLOAT + w * (2 if trained else 1)) * width


def _attention(config: ModelConfig, spec: TrainerSpec) -> int:
    """Return the bytes per token of this process; with context parallelism the keys are those of whole rows."""
    w, cp = spec.itemsize, spec.parallel.cp
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    normed = (FLOAT + w) * (queries + keys) if config.qk_norm else 0
    projected = queries + 2 * keys if cp == 1 else keys * cp  # values are a view of the projection, or gathered
    results = queries * (2 if spec.device == "cpu" else 1)  # a CPU attends document by document
    return normed + w * (projected + queries + keys * cp + results) + FLOAT * config.heads


def _latent_attention(config: ModelConfig, latent: LatentConfig, spec: TrainerSpec, trained: bool) -> int:
    w, cp = spec.itemsize, spec.parallel.cp
    queries, values = config.heads * config.head_dim, config.heads * latent.v_dim
    down = _norm(latent.kv_rank, w, trained) + w * (latent.kv_rank * (cp - 1) + latent.rope_dim)
    down += _norm(latent.q_rank, w, trained) if latent.q_rank else 0
    projected = config.heads * latent.nope_dim + values  # of which values are a view
    if spec.device == "cpu":
        # torch has no kernel there for values that are narrower than keys: it keeps the scores of all pairs, and
        # float32 copies of what is not float32.
        projected = projected if w == FLOAT else values
        return down + FLOAT * (queries + (projected + queries) * cp + config.heads * spec.length) + w * values
    padded = queries * cp + queries - values if values != queries else 0  # the flash kernel wants equal widths
    return down + w * (queries + (projected + queries) * cp + values + padded) + FLOAT * config.heads


def _mlp(config: ModelConfig, layer: int, w: int) -> int:
    """Return the bytes per token of gate and up projections, the gate, their product, and of a router."""
    moe = config.moe
    if moe is None or layer not in moe.layers:
        return 4 * w * config.mlp_size
    router = FLOAT * moe.experts + (FLOAT * config.hidden_size if w < FLOAT else 0)
    experts = moe.per_token * (4 * w * moe.expert_size + (w + FLOAT) * config.hidden_size)
    return router + experts + 4 * w * moe.shared_size
