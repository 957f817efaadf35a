"""Memory and disk that training and sampling need, computed from the model's config and the recipe.

Trainers are planned by `etude.model.trainer_memory`. Of the others only the dominant parts are counted, each for the
reason given; the sum should be right within a third. The memory of a process that has only loaded torch is counted too,
because on a CPU it is often the larger part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from etude.inference.settings import SamplerRunSettings
from etude.model.communication import step_communication
from etude.model.config import ModelConfig
from etude.model.describe import adapter_parameters, count_parameters, kv_bytes_per_token
from etude.model.settings import LoraSettings
from etude.model.trainer_memory import has_masters, trainer_memory, weight_bytes
from etude.model.trainer_parts import TrainerSpec, trainer_parts
from etude.rl.settings import RlSettings
from etude.train.settings import TrainingSettings

TORCH_BYTES = 350 << 20  # a process that has loaded torch; on a GPU about the size of a CUDA context
WORKER_BYTES = 300 << 20  # a process that runs sessions
POD_BYTES = 30 << 20  # a pod in which an agent works: its tool server, and a command now and then
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


def trainer_spec(
    settings: TrainingSettings | RlSettings, device: str, *, mtp_layers: int = 0, frozen: bool = False
) -> TrainerSpec:
    """Return what a stage's trainer computes. With `frozen`, only the layers of multi-token prediction are trained."""
    s = settings
    return TrainerSpec(
        length=s.length,
        rows=s.rows,
        micro_batches=s.micro_batches if isinstance(s, TrainingSettings) else 2 * s.parallel.data_ranks,  # rl: several
        precision=s.precision,
        parallel=s.parallel,
        recompute=s.recompute,
        compile=s.compile,
        lora=None if frozen else s.lora,
        mtp_layers=mtp_layers,
        frozen=frozen,
        rounded=isinstance(s, RlSettings) and s.precision == "float32" and s.weights.dtype == "bfloat16",
        device="cpu" if device == "cpu" else "cuda",
    )


def training_memory(
    config: ModelConfig,
    settings: TrainingSettings | RlSettings,
    device: str,
    *,
    mtp_layers: int = 0,
    frozen: bool = False,
) -> tuple[ProcessMemory, ...]:
    """Return the memory of the processes of a trainer, one for each device of its mesh, and of a checkpoint.

    While the files of a checkpoint are written, training goes on, and the optimizer's state is copied in host memory.
    """
    spec = trainer_spec(settings, device, mtp_layers=mtp_layers, frozen=frozen)
    parts = trainer_parts(config, spec)
    pieces = {"torch": TORCH_BYTES, **vars(trainer_memory(config, spec))}
    if isinstance(settings, RlSettings) and settings.estimator.kl != "none":
        starts = settings.estimator.reference == "start"
        if settings.lora is not None and starts and not spec.is_sharded:  # shares the frozen weights
            pieces["reference"] = spec.itemsize * adapter_parameters(config, settings.lora)
        else:
            pieces["reference"] = weight_bytes(spec, trainer_parts(config, replace(spec, lora=None, frozen=True)))
    ranks = range(spec.parallel.processes)
    devices = [f"cuda:{rank}" for rank in ranks] if spec.is_sharded and device != "cpu" else [device] * len(ranks)
    copied = _stored_state_bytes(spec) * parts.trained * len(ranks)
    return (
        *(ProcessMemory("trainer", each, pieces) for each in devices),
        ProcessMemory("checkpoint", "cpu", {"optimizer": copied}),
    )


def describe_communication(config: ModelConfig, spec: TrainerSpec) -> str:
    """Say what a process receives from the others in a step."""
    moved = {name: size for name, size in vars(step_communication(config, spec)).items() if size}
    kinds = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in moved.items())
    return f"each of {spec.parallel.processes} processes receives {sum(moved.values()) / 1e9:,.2f} GB a step: {kinds}"


def describe_lora(lora: LoraSettings, config: ModelConfig) -> str:
    """Say how many values the adapters have beside the model's."""
    values, total = adapter_parameters(config, lora), count_parameters(config).total
    return f"trains adapters of rank {lora.rank}: {values:,} values beside {total:,} frozen ones ({values / total:.1%})"


def trained_parameters(
    config: ModelConfig, settings: TrainingSettings | RlSettings, *, mtp_layers: int, frozen: bool
) -> int:
    """Return the number of values that have a gradient and are saved: MTP layers, and adapters or the whole model."""
    parameters = count_parameters(config)
    main = parameters.total if settings.lora is None else adapter_parameters(config, settings.lora)
    return mtp_layers * parameters.mtp_layer + (0 if frozen else main)


def tokens_that_fit(memory: ProcessMemory, free: int, tokens: int) -> int:
    """Return how many of a trainer's `tokens` fit into `free` bytes, with a fifth of the room to spare."""
    fixed = memory.total - memory.pieces["activations"]
    return max(0, min(tokens, round(tokens * 0.8 * (free - fixed) / max(1, memory.pieces["activations"]))))


def sampler_memory(config: ModelConfig, settings: SamplerRunSettings, device: str) -> ProcessMemory:
    """Return the memory of one engine: weights and a full KV cache."""
    width = 2 if device.startswith("cuda") else 4
    cache = settings.sampler.kv_cache_tokens * kv_bytes_per_token(config) * width // 2
    weights = width * count_parameters(config).total
    return ProcessMemory("sampler", device, {"torch": TORCH_BYTES, "weights": weights, "keys and values": cache})


def server_memory(config: ModelConfig, settings: SamplerRunSettings, devices: Sequence[str]) -> list[ProcessMemory]:
    """Return the memory of servers on these devices, without keys and values, and of the processes in front of them."""
    sampler, parameters = settings.sampler, count_parameters(config)
    size = DTYPE_BYTES[settings.precision] * parameters.total // (sampler.tensor_parallel if devices else 1)
    servers = [ProcessMemory("server", device, {"torch": TORCH_BYTES, "weights": size}) for device in devices]
    published = DTYPE_BYTES[settings.weights.dtype] * parameters.total
    return [*servers, *[ProcessMemory("sampler", "cpu", {"torch": TORCH_BYTES, "weights": published})] * sampler.count]


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
    trained = trained_parameters(config, settings, mtp_layers=mtp_layers, frozen=frozen)
    state = _stored_state_bytes(trainer_spec(settings, "cpu", mtp_layers=mtp_layers, frozen=frozen))
    return (DTYPE_BYTES[settings.precision] + state) * trained


def _stored_state_bytes(spec: TrainerSpec) -> int:
    """Return the bytes per value of the optimizer's state in a checkpoint: with masters, if its weights are rounded."""
    return 12 if has_masters(spec) or spec.precision == "bfloat16" else 8


def max_checkpoints(settings: TrainingSettings | RlSettings, steps: int, *, halfway: bool) -> int:
    """Return how many checkpoints exist at once: the kept ones, the one at half of the steps, and one being written."""
    every = settings.checkpoint_every
    written = 1 + (steps - 1) // every if every else 1
    kept = min(settings.keep, written)
    return kept + (1 if halfway and steps > 1 else 0) + (1 if written > kept else 0)


def store_bytes(config: ModelConfig, settings: RlSettings) -> int:
    """Return the size of the chain of weight versions: full ones, and about as much again in deltas."""
    if settings.lora is None:
        return 2 * settings.weights.keep * weights_bytes(config, settings.weights.dtype)
    adapters = DTYPE_BYTES[settings.weights.dtype] * adapter_parameters(config, settings.lora)
    return 2 * settings.weights.keep * adapters
