"""Memory and disk that training and sampling need, computed from the model's config and the recipe.

Only the dominant parts are counted, each for the reason given; the sum should be right within a third. The memory of a
process that has only loaded torch is counted too, because on a CPU it is often the larger part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.inference.settings import SamplerRunSettings
from etude.kernels.loss import CHUNK_ELEMENTS
from etude.model.config import ModelConfig
from etude.model.describe import Mesh, count_parameters, kv_bytes_per_token, memory_per_gpu
from etude.rl.settings import RlSettings
from etude.train.settings import TrainingSettings

TORCH_BYTES = 350 << 20  # a process that has loaded torch; on a GPU about the size of a CUDA context
WORKER_BYTES = 300 << 20  # a process that runs sessions
POD_BYTES = 30 << 20  # a pod in which an agent works: its tool server, and a command now and then
# Numbers kept for the backward pass in each layer, as a multiple of the layer's own width: SmolLM2-135M with 16 x 2048
# tokens on an H200 peaks at 25.5 GiB, compiled at 18.5 (docs/performance.md); the nano base on a CPU keeps 1.6.
KEPT_ACTIVATIONS, KEPT_ACTIVATIONS_COMPILED = 1.6, 1.15
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes that one process needs on one device, by use."""

    process: str
    device: str
    pieces: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.pieces.values())


def training_memory(
    config: ModelConfig,
    settings: TrainingSettings | RlSettings,
    device: str,
    *,
    mtp_layers: int = 0,
    frozen: bool = False,
) -> ProcessMemory:
    """Return the memory of a trainer. With `frozen`, only the layers of multi-token prediction are trained."""
    parameters, width = count_parameters(config), DTYPE_BYTES[settings.precision]
    total = parameters.total + mtp_layers * parameters.mtp_layer
    trained = mtp_layers * parameters.mtp_layer if frozen else total
    tokens = settings.rows * settings.length
    pieces = {
        "torch": TORCH_BYTES,
        "weights": width * total,
        "gradients": _gradient_bytes(settings) * trained,
        "optimizer": _optimizer_bytes(settings) * trained,
        "activations": _activation_bytes(config, settings, mtp_layers, frozen),
        "head": (width + 4) * parameters.embedding + width * min(CHUNK_ELEMENTS, tokens * config.vocab_size),
    }
    if isinstance(settings, RlSettings) and settings.estimator.kl != "none":
        pieces["reference"] = width * parameters.total
    return ProcessMemory("trainer", device, pieces)


def tokens_that_fit(memory: ProcessMemory, free: int, tokens: int) -> int:
    """Return how many of a trainer's `tokens` fit into `free` bytes, with a fifth of the room to spare."""
    fixed = memory.total - memory.pieces["activations"]
    return max(0, min(tokens, round(tokens * 0.8 * (free - fixed) / max(1, memory.pieces["activations"]))))


def _has_master_weights(settings: TrainingSettings | RlSettings) -> bool:
    """Return whether the weights are a rounded copy of float32 master weights."""
    return settings.precision == "bfloat16" or (
        isinstance(settings, RlSettings) and settings.weights.dtype == "bfloat16"
    )


def _gradient_bytes(settings: TrainingSettings | RlSettings) -> int:
    """Return bytes per weight. With master weights, gradients are also summed in float32."""
    return DTYPE_BYTES[settings.precision] + (4 if _has_master_weights(settings) else 0)


def _optimizer_bytes(settings: TrainingSettings | RlSettings) -> int:
    """Return bytes per weight: two moments, and the master weight if there is one."""
    return 12 if _has_master_weights(settings) else 8


def _activation_bytes(
    config: ModelConfig, settings: TrainingSettings | RlSettings, mtp_layers: int, frozen: bool
) -> int:
    """Return the bytes that are kept for the backward pass."""
    width, tokens = DTYPE_BYTES[settings.precision], settings.rows * settings.length
    mesh = Mesh(1, sequence=1, rows=tokens)  # a row may hold several sequences, and more than the model's longest
    checkpointed = memory_per_gpu(config, count_parameters(config), mesh).activations // 2  # in numbers, not bytes
    one_layer = checkpointed - tokens * config.layers * config.hidden_size
    if settings.recompute:
        return width * (checkpointed + mtp_layers * one_layer)
    layers = mtp_layers if frozen else config.layers + mtp_layers
    return round(width * layers * one_layer * (KEPT_ACTIVATIONS_COMPILED if settings.compile else KEPT_ACTIVATIONS))


def sampler_memory(config: ModelConfig, settings: SamplerRunSettings, device: str) -> ProcessMemory:
    """Return the memory of one engine: weights and a full KV cache."""
    width = 2 if device.startswith("cuda") else 4
    cache = settings.sampler.kv_cache_tokens * kv_bytes_per_token(config) * width // 2
    weights = width * count_parameters(config).total
    return ProcessMemory("sampler", device, {"torch": TORCH_BYTES, "weights": weights, "keys and values": cache})


def inference_memory(config: ModelConfig, device: str, dtype: str) -> ProcessMemory:
    """Return the memory of a model without gradients or KV cache."""
    return ProcessMemory("model", device, {"torch": TORCH_BYTES, "weights": weights_bytes(config, dtype)})


# ------------------------------------------------------------------------------------------------ disk


def weights_bytes(config: ModelConfig, dtype: str) -> int:
    return DTYPE_BYTES[dtype] * count_parameters(config).total


def checkpoint_bytes(
    config: ModelConfig, settings: TrainingSettings | RlSettings, *, mtp_layers: int, frozen: bool
) -> int:
    """Return the size of one checkpoint: weights and optimizer state."""
    parameters = count_parameters(config)
    trained = mtp_layers * parameters.mtp_layer + (0 if frozen else parameters.total)
    return (DTYPE_BYTES[settings.precision] + _optimizer_bytes(settings)) * trained


def max_checkpoints(settings: TrainingSettings | RlSettings, steps: int, *, halfway: bool) -> int:
    """Return how many checkpoints exist at once: the kept ones, the one at half of the steps, and one being written."""
    every = settings.checkpoint_every
    written = 1 + (steps - 1) // every if every else 1
    kept = min(settings.keep, written)
    return kept + (1 if halfway and steps > 1 else 0) + (1 if written > kept else 0)


def store_bytes(config: ModelConfig, settings: RlSettings) -> int:
    """Return the size of the chain of weight versions: full ones, and about as much again in deltas."""
    return 2 * settings.weights.keep * weights_bytes(config, settings.weights.dtype)
