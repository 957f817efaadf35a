"""The parts into which a trainer's parameters are divided, as `etude.train.sharding` divides them, and their sizes.

FSDP gathers a block at a time; the experts of a block are a part of their own if they are divided over expert ranks.
Embedding, final norm and head are one more part. Sizes are those of the model itself, built on torch's meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import torch
from torch import nn

from etude.errors import InputError
from etude.model.adapters import add_adapters
from etude.model.config import ModelConfig
from etude.model.moe import Experts
from etude.model.mtp import MTPLayer
from etude.model.settings import LoraSettings
from etude.model.transformer import Transformer
from etude.parallel.settings import ParallelSettings


@dataclass(frozen=True)
class TrainerSpec:
    """What decides the memory and the communication of a trainer, beside the config of its model."""

    length: int  # tokens of a row
    rows: int = 1  # of a micro-batch
    micro_batches: int = 1  # of a step, over all processes
    precision: Literal["float32", "bfloat16"] = "bfloat16"
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    recompute: bool = False
    compile: bool = False
    lora: LoraSettings | None = None
    mtp_layers: int = 0
    frozen: bool = False  # only the layers of multi-token prediction are trained
    rounded: bool = False  # the weights are a rounded copy of masters, also if they are float32
    device: str = "cuda"

    @property
    def itemsize(self) -> int:
        """Return the bytes of a number of the matrix products."""
        return 2 if self.precision == "bfloat16" else 4

    @property
    def is_sharded(self) -> bool:
        return self.parallel.processes > 1

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch that one process has."""
        return self.rows * self.length // self.parallel.cp

    @property
    def own_micro_batches(self) -> int:
        """Return the micro-batches of a step that one process has."""
        return max(1, self.micro_batches // self.parallel.data_ranks)


def check_expert_ranks(parallel: ParallelSettings, config: ModelConfig) -> None:
    """Raise InputError if the experts of the model do not divide over the mesh."""
    ep = parallel.ep
    if ep > 1 and config.moe is None:
        raise InputError(f"ep = {ep} needs experts; this {config.family} model is dense")
    if config.moe and config.moe.experts % ep:
        raise InputError(f"ep = {ep} must divide the number of experts, {config.moe.experts}")


@dataclass(frozen=True)
class ParameterPart:
    """Parameters that FSDP gathers together, as numbers of values of one process."""

    ranks: int  # that have one copy of them together
    trained: int
    frozen: int = 0

    @property
    def own(self) -> int:
        return self.trained + self.frozen

    @property
    def whole(self) -> int:
        """Return the gathered values: of experts, those of this expert rank. Uneven parts are padded."""
        return self.own * self.ranks

    @property
    def whole_trained(self) -> int:
        return self.trained * self.ranks

    @property
    def others(self) -> float:
        """Return the share of the whole that other ranks have."""
        return (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class BlockParts:
    """The parts of one layer."""

    dense: ParameterPart  # with its experts, unless they are divided over expert ranks
    experts: ParameterPart | None = None

    @property
    def parts(self) -> tuple[ParameterPart, ...]:
        return (self.dense,) if self.experts is None else (self.dense, self.experts)


@dataclass(frozen=True)
class TrainerParts:
    """All parameters of a trainer."""

    root: ParameterPart  # embedding, final norm and head
    blocks: tuple[BlockParts, ...]
    mtp: tuple[BlockParts, ...]

    def __iter__(self) -> Iterator[ParameterPart]:
        yield self.root
        for block in (*self.blocks, *self.mtp):
            yield from block.parts

    @property
    def trained(self) -> int:
        return sum(part.trained for part in self)

    @property
    def frozen(self) -> int:
        return sum(part.frozen for part in self)


@lru_cache(maxsize=32)  # a plan asks several times, and a model with many experts takes a second
def trainer_parts(config: ModelConfig, spec: TrainerSpec) -> TrainerParts:
    """Return the parts of a trainer's parameters with the sizes that one process has."""
    check_expert_ranks(spec.parallel, config)
    with torch.device("meta"):
        model = Transformer(config)
        layer = MTPLayer(config) if spec.mtp_layers else None
    if spec.frozen:
        model.requires_grad_(False)
    if spec.lora is not None:
        add_adapters(model, spec.lora, seed=None)
    shards = spec.parallel.dp_shard * spec.parallel.cp
    blocks = tuple(_block(block, spec) for block in model.blocks)
    inner = {id(parameter) for parameter in model.blocks.parameters()}
    root = _part((p for p in model.parameters() if id(p) not in inner), shards)
    return TrainerParts(root, blocks, (_block(layer, spec),) * spec.mtp_layers if layer is not None else ())


def _block(module: nn.Module, spec: TrainerSpec) -> BlockParts:
    ep, shards = spec.parallel.ep, spec.parallel.dp_shard * spec.parallel.cp
    if ep == 1:
        return BlockParts(_part(module.parameters(), shards))
    experts = [p for each in module.modules() if isinstance(each, Experts) for p in each.parameters()]
    divided = {id(parameter) for parameter in experts}
    dense = _part((p for p in module.parameters() if id(p) not in divided), shards)
    return BlockParts(dense, _part(experts, shards // ep, ep) if experts else None)


def _part(parameters: Iterable[nn.Parameter], ranks: int, ep: int = 1) -> ParameterPart:
    """Return the part of these parameters: experts are divided over `ep` ranks, and then by dimension 1."""
    sizes = {True: 0, False: 0}
    for parameter in parameters:
        divided = 0 if ep == 1 else 1
        size = parameter.shape[divided]
        sizes[parameter.requires_grad] += parameter.numel() // size // ep * math.ceil(size / ranks)
    return ParameterPart(ranks, sizes[True], sizes[False])
