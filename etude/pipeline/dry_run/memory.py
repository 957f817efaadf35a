"""What training and sampling take in memory and on disk, from the model's config and the numbers of the recipe.

The count is of the pieces that dominate, each with its reason; it is meant to be right within a third. What a process
with torch takes before it has done anything is counted too, because on a CPU it is often the larger part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from etude.kernels.loss import CHUNK_ELEMENTS
from etude.model.config import ModelConfig
from etude.model.describe import Mesh, count_parameters, kv_bytes_per_token, memory_per_gpu
from etude.rl.settings import RlSettings
from etude.train.settings import TrainingSettings

PROCESS = 350 << 20  # of a process that has loaded torch; on a GPU about what a CUDA context takes
WORKER = 300 << 20  # of a process that runs sessions
POD = 30 << 20  # of a pod in which an agent works: its tool server, and a command now and then
# Numbers kept for the backward in each layer, as a multiple of the layer's own width: SmolLM2-135M with 16 x 2048
# tokens on an H200 peaks at 25.5 GiB, compiled at 18.5 (docs/performance.md); the nano base on a CPU keeps 1.6.
KEPT, KEPT_COMPILED = 1.6, 1.15
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Memory:
    """What one process takes on one device, by piece, in bytes."""

    process: str
    device: str
    pieces: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.pieces.values())


def training_memory(
    config: ModelConfig, section: TrainingSettings | RlSettings, device: str, *, layers: int = 0, frozen: bool = False
) -> Memory:
    """Of a trainer; `layers` of multi-token prediction are beside the model and, if it is `frozen`, alone learn."""
    counted, width = count_parameters(config), BYTES[section.precision]
    total = counted.total + layers * counted.mtp_layer
    taught = layers * counted.mtp_layer if frozen else total
    tokens = section.rows * section.length
    pieces = {
        "torch": PROCESS,
        "weights": width * total,
        "gradients": _gradients(section) * taught,
        "optimizer": _optimizer(section) * taught,
        "activations": _activations(config, section, layers, frozen),
        "head": (width + 4) * counted.embedding + width * min(CHUNK_ELEMENTS, tokens * config.vocab_size),
    }
    if isinstance(section, RlSettings) and section.estimator.kl != "none":
        pieces["reference"] = width * counted.total
    return Memory("trainer", device, pieces)


def tokens_that_fit(memory: Memory, free: int, tokens: int) -> int:
    """Of the tokens that a trainer's activations are of, how many there is room for, with something to spare."""
    fixed = memory.total - memory.pieces["activations"]
    return max(0, min(tokens, round(tokens * 0.8 * (free - fixed) / max(1, memory.pieces["activations"]))))


def _rounded(section: TrainingSettings | RlSettings) -> bool:
    """Whether the weights are a rounded copy of their float32 masters."""
    return section.precision == "bfloat16" or (isinstance(section, RlSettings) and section.weights.dtype == "bfloat16")


def _gradients(section: TrainingSettings | RlSettings) -> int:
    """Bytes for a weight: where there are masters, gradients are summed in float32 beside the model's own."""
    return BYTES[section.precision] + (4 if _rounded(section) else 0)


def _optimizer(section: TrainingSettings | RlSettings) -> int:
    """Bytes for a weight: two moments, and a master where the weights are rounded."""
    return 12 if _rounded(section) else 8


def _activations(config: ModelConfig, section: TrainingSettings | RlSettings, layers: int, frozen: bool) -> int:
    """What is kept for the backward."""
    width, tokens = BYTES[section.precision], section.rows * section.length
    mesh = Mesh(1, sequence=1, rows=tokens)  # a row may hold several sequences, and more than the model's longest
    checkpointed = memory_per_gpu(config, count_parameters(config), mesh).activations // 2  # numbers
    inside = checkpointed - tokens * config.layers * config.hidden_size  # of one layer
    if section.recompute:
        return width * (checkpointed + layers * inside)
    deep = layers if frozen else config.layers + layers
    return round(width * deep * inside * (KEPT_COMPILED if section.compile else KEPT))


def sampler_memory(config: ModelConfig, section: RlSettings, device: str) -> Memory:
    """Of one engine: weights, and the keys and values it may hold."""
    width = 2 if device.startswith("cuda") else 4
    cache = section.sampler.kv_cache_tokens * kv_bytes_per_token(config) * width // 2
    weights = width * count_parameters(config).total
    return Memory("sampler", device, {"torch": PROCESS, "weights": weights, "keys and values": cache})


def reading_memory(config: ModelConfig, device: str, dtype: str) -> Memory:
    """Of a model that is only read with."""
    return Memory("model", device, {"torch": PROCESS, "weights": BYTES[dtype] * count_parameters(config).total})


# ------------------------------------------------------------------------------------------------ disk


def weights_bytes(config: ModelConfig, dtype: str) -> int:
    return BYTES[dtype] * count_parameters(config).total


def checkpoint_bytes(config: ModelConfig, section: TrainingSettings | RlSettings, *, layers: int, frozen: bool) -> int:
    """One checkpoint: weights, and what the optimizer must remember."""
    counted = count_parameters(config)
    taught = layers * counted.mtp_layer + (0 if frozen else counted.total)
    return (BYTES[section.precision] + _optimizer(section)) * taught


def kept_checkpoints(section: TrainingSettings | RlSettings, steps: int, *, half_way: bool) -> int:
    """How many there are at most at once: those that are kept, the one at half the way, and the one being written."""
    every = section.checkpoint_every
    written = 1 + (steps - 1) // every if every else 1
    kept = min(section.keep, written)
    return kept + (1 if half_way and steps > 1 else 0) + (1 if written > kept else 0)


def store_bytes(config: ModelConfig, section: RlSettings) -> int:
    """The chain of weight versions: full ones, and as much again in deltas between them."""
    return 2 * section.weights.keep * weights_bytes(config, section.weights.dtype)
