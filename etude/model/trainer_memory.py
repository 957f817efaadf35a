"""Memory of one process of a trainer, by part: what it always holds, and what it holds at the moment of its peak.

Weights, gradients and moments follow `etude.train.optim`: one process trains weights of its precision with float32
masters; on a mesh the float32 shards are the masters. What comes and goes is counted at four moments of a step: in the
loss, in the backward of the last block (the first to run) and of the first one, and when FSDP reduces the gradients of
embedding and head. The moment that needs most is the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from etude.model.activations import FLOAT, kept_bytes, layer_bytes, loss_bytes, work_bytes
from etude.model.config import ModelConfig
from etude.model.trainer_parts import BlockParts, ParameterPart, TrainerParts, TrainerSpec, trainer_parts


@dataclass(frozen=True)
class TrainerMemory:
    """Bytes of one process by part, at the moment of a step that needs most."""

    weights: int
    gradients: int
    optimizer: int
    gathered: int = 0  # whole weights of the blocks in work, of embedding and head, and buffers to gather them
    reduction: int = 0  # whole gradients, and buffers to sum them over the ranks
    activations: int = 0
    loss: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def trainer_memory(config: ModelConfig, spec: TrainerSpec) -> TrainerMemory:
    """Return the memory of one process of a trainer."""
    parts = trainer_parts(config, spec)
    moments = _moments(config, spec, parts) if spec.is_sharded else _moments_of_one(config, spec, parts)
    return max(moments, key=lambda moment: moment.total)


def weight_bytes(spec: TrainerSpec, parts: TrainerParts) -> int:
    """Return the bytes of the stored weights: on a mesh, trained ones are float32; frozen ones are as computed with."""
    w = spec.itemsize
    return (FLOAT if spec.is_sharded else w) * parts.trained + w * parts.frozen


def has_masters(spec: TrainerSpec) -> bool:
    """Return whether the optimizer has masters beside the weights, of which these are rounded copies."""
    return spec.rounded or (spec.precision == "bfloat16" and not spec.is_sharded)


def optimizer_bytes(spec: TrainerSpec, parts: TrainerParts) -> int:
    """Return the bytes of both moments, and of the masters if there are any."""
    return FLOAT * (3 if has_masters(spec) else 2) * parts.trained


def _moments_of_one(config: ModelConfig, spec: TrainerSpec, parts: TrainerParts) -> Iterator[TrainerMemory]:
    """Yield the memory of a single process at each of the moments: it gathers nothing and sums over no ranks."""
    masters = has_masters(spec)
    weights, own = weight_bytes(spec, parts), spec.itemsize * parts.trained
    summed = FLOAT * parts.trained if masters else own  # over micro-batches
    before = summed if spec.own_micro_batches > 1 else 0
    kept, layer, work = kept_bytes(config, spec), layer_bytes(config, config.layers - 1, spec), work_bytes(config, spec)
    loss = loss_bytes(config, spec, trained_head=parts.root.trained > 0)
    head = spec.itemsize * config.vocab_size * config.hidden_size if parts.root.trained else 0
    recomputed = layer if spec.recompute and not spec.frozen else 0
    always = TrainerMemory(weights, before, optimizer_bytes(spec, parts))
    yield replace(always, activations=kept, loss=loss)
    yield replace(always, gradients=max(before, head), activations=kept + recomputed + work)
    yield replace(always, gradients=own + (before if masters else 0), activations=layer + work)
    yield replace(always, gradients=max(own, summed))


def _moments(config: ModelConfig, spec: TrainerSpec, parts: TrainerParts) -> Iterator[TrainerMemory]:
    """Yield the memory of a process of a mesh at each of the moments."""
    w, gradients = spec.itemsize, FLOAT * parts.trained
    always = TrainerMemory(weight_bytes(spec, parts), gradients, optimizer_bytes(spec, parts))
    before = replace(always, gradients=gradients if spec.own_micro_batches > 1 else 0)  # summed over micro-batches
    last = (parts.mtp or parts.blocks)[-1].parts[-1]
    buffer = w * last.whole if last.ranks > 1 else 0  # FSDP keeps what it gathered last in the forward
    root, kept, work = w * parts.root.whole, kept_bytes(config, spec), work_bytes(config, spec)
    trained_head = parts.root.trained > 0
    head = w * config.vocab_size * config.hidden_size if trained_head else 0  # its gradient, until the end
    yield replace(
        before,
        gathered=root + buffer,
        activations=kept,
        loss=loss_bytes(config, spec, trained_head=trained_head),
    )
    blocks = [block for block in (*parts.blocks, *parts.mtp) if block in parts.mtp or not spec.frozen]
    gathered, reduction = max((each for block in blocks for each in _in_backward(block, w)), key=sum)
    layer = layer_bytes(config, config.layers - 1, spec)
    recomputed = layer if spec.recompute and not spec.frozen else 0
    yield replace(
        before, gathered=root + buffer + gathered, reduction=head + reduction, activations=kept + recomputed + work
    )
    yield replace(always, gathered=root + buffer + gathered, reduction=head + reduction, activations=layer + work)
    yield replace(always, gathered=buffer, reduction=_reduction(parts.root, w))


def _in_backward(block: BlockParts, w: int) -> Iterator[tuple[int, int]]:
    """Yield the bytes of gathered weights and of gradients at the moments of a block's backward.

    While a part is in work, the weights of the next one are gathered, and the buffer of the last reduction is kept.
    """
    dense, experts = block.dense, block.experts
    ahead = w * dense.whole if dense.ranks > 1 else 0
    if experts is None:
        yield w * dense.whole + ahead, (w + FLOAT) * dense.whole_trained
        yield ahead, _reduction(dense, w)
        return
    yield w * (dense.whole + experts.whole) + ahead, w * experts.whole_trained + FLOAT * dense.whole_trained
    yield w * dense.whole + ahead, _reduction(experts, w) + (w * experts.whole_trained if experts.ranks > 1 else 0)
    yield w * dense.whole + ahead, w * dense.whole_trained + FLOAT * experts.whole_trained


def _reduction(part: ParameterPart, w: int) -> int:
    """Return the bytes of whole gradients, of their float32 copy that is summed, and of this process's part of it."""
    return (w + FLOAT) * part.whole_trained + FLOAT * part.trained
