"""Communication of a training step: the bytes that one process receives from others, by kind, from the config."""

from __future__ import annotations

from dataclasses import dataclass

from etude.model.activations import FLOAT
from etude.model.config import ModelConfig
from etude.model.describe import kv_width
from etude.model.trainer_parts import TrainerSpec, trainer_parts
from etude.parallel.context import gathered_bytes
from etude.parallel.experts import exchanged_bytes


@dataclass(frozen=True)
class StepCommunication:
    """Bytes that one process receives in a step."""

    weights: int  # all-gather of FSDP: of each block for its forward and for its backward
    gradients: int  # reduce-scatter of FSDP, in float32, and the sum over replicas
    context: int  # keys and values or latents, and their gradients
    experts: int  # rows to experts and back, and their gradients, with equal loads

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def step_communication(config: ModelConfig, spec: TrainerSpec) -> StepCommunication:
    """Return the communication of a step of one process."""
    if not spec.is_sharded:
        return StepCommunication(0, 0, 0, 0)
    parts, times, replicas = trainer_parts(config, spec), spec.own_micro_batches, spec.parallel.dp_replicate
    passes = 1 if spec.frozen else 2  # of a block of the main model
    weights = (1 if spec.frozen else times) * parts.root.whole * parts.root.others  # stays gathered up to the backward
    for blocks, gathers in ((parts.blocks, passes), (parts.mtp, 2)):
        weights += times * gathers * sum(part.whole * part.others for block in blocks for part in block.parts)
    gradients = sum(part.whole_trained * part.others for part in parts)
    gradients += sum(part.trained for part in parts) * 2 * (replicas - 1) / replicas  # a ring
    layers = [_in_layer(config, spec, layer) for layer in range(config.layers)]
    layers += [_in_layer(config, spec, config.layers - 1, mtp=True)] * spec.mtp_layers
    return StepCommunication(
        round(spec.itemsize * weights),
        round(FLOAT * times * gradients),
        times * sum(context for context, _ in layers),
        times * sum(experts for _, experts in layers),
    )


def _in_layer(config: ModelConfig, spec: TrainerSpec, layer: int, *, mtp: bool = False) -> tuple[int, int]:
    """Return the bytes that context and expert parallelism move in one layer, for a micro-batch."""
    p, w, backward = spec.parallel, spec.itemsize, mtp or not spec.frozen
    forwards = 2 if spec.recompute and backward and not mtp else 1
    context = gathered_bytes(spec.rows * spec.length, kv_width(config), p.cp, w, forwards=forwards, backward=backward)
    if config.moe is None or layer not in config.moe.layers:
        return context, 0
    rows = spec.tokens * config.moe.per_token
    return context, exchanged_bytes(rows, config.hidden_size, p.ep, w, forwards=forwards, backward=backward)
