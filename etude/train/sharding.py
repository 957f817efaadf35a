"""A model divided over the ranks of a mesh: sharding, loading its parts, and collecting its tensors again.

Parameters are float32 shards, which the optimizer trains as master weights; a forward pass gathers each block in the
dtype of the stage. Gradients are summed, not averaged: the trainer divides the loss by a count over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard

from etude.errors import InputError
from etude.model.adapters import adapter_views, add_adapters
from etude.model.adapters import adapters as adapters_of
from etude.model.checkpoint import open_weights
from etude.model.config import ModelConfig, base_directory
from etude.model.layout import Piece, adapter_pieces, checkpoint_pieces
from etude.model.moe import MoE, shard_experts
from etude.model.mtp import MTP
from etude.model.peft import read_adapter
from etude.model.settings import LoraSettings
from etude.model.transformer import Transformer
from etude.parallel.mesh import EXPERT, TrainingMesh
from etude.parallel.tensors import Box, local_box, local_part

# Reads a block of a tensor of the checkpoint.
ReadBlock = Callable[[str, tuple[slice, ...]], Tensor]


def shard_model(model: Transformer, mesh: TrainingMesh, dtype: torch.dtype) -> Transformer:
    """Divide a model, in place; forward passes compute in `dtype`. It may be on the meta device."""
    for block in model.blocks:
        _shard_block(block, mesh, dtype)
    # The embedding and the head stay gathered between forward and backward: the loss uses the head in between.
    _shard(model, mesh, dtype, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")
    return model


def shard_mtp(mtp: MTP, mesh: TrainingMesh, dtype: torch.dtype) -> MTP:
    """Divide multi-token-prediction layers, each on its own, in place."""
    for layer in mtp.layers:
        _shard_block(layer, mesh, dtype)
    return mtp


def _shard_block(block: nn.Module, mesh: TrainingMesh, dtype: torch.dtype) -> None:
    for module in block.modules():
        if isinstance(module, MoE) and mesh.settings.ep > 1:
            shard_experts(module, mesh)
            _check_even(module, mesh)
            _shard(module.experts, mesh, dtype, experts=True)
    _shard(block, mesh, dtype)


def _shard(
    module: nn.Module,
    mesh: TrainingMesh,
    dtype: torch.dtype,
    *,
    experts: bool = False,
    reshard_after_forward: bool = True,
) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    sharded = fully_shard(
        module,
        mesh=mesh.experts if experts else mesh.dense,
        mp_policy=policy,
        reshard_after_forward=reshard_after_forward,
        shard_placement_fn=(lambda _: Shard(1)) if experts else None,  # dimension 0 is divided over expert ranks
    )
    assert isinstance(sharded, FSDPModule)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)


def _check_even(moe: MoE, mesh: TrainingMesh) -> None:
    """Refuse experts whose matrices do not divide evenly over the ranks that share an expert."""
    parts = mesh.experts.size(mesh.experts.ndim - 1)
    for name, parameter in moe.experts.named_parameters():
        if parameter.shape[1] % parts:
            raise InputError(
                f"experts.{name} has {parameter.shape[1]} rows per expert, which do not divide over the {parts} ranks "
                "of dp_shard x cp / ep that share it; choose another ep"
            )


def release(*modules: nn.Module) -> None:
    """Drop gathered weights that a forward pass without a backward has left; the next one gathers current ones."""
    for module in modules:
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()


def load_sharded(
    directory: Path,
    mesh: TrainingMesh,
    dtype: torch.dtype,
    *,
    config: ModelConfig | None = None,
    lora: LoraSettings | None = None,
    seed: int = 0,
    frozen: bool = False,
) -> Transformer:
    """Load a model of which every rank reads its parts only; forward passes compute in `dtype`.

    With `lora`, it gets the adapters of the directory or, if that has none, new ones. What is not trained, the weights
    beside adapters or of a `frozen` model, is stored in `dtype`.
    """
    config, base = config or ModelConfig.load(directory), base_directory(directory)
    with open_weights(base, config) as (model, files):
        model = model.to(dtype if lora or frozen else torch.float32).requires_grad_(not frozen)
        adapters: dict[str, Tensor] = {}
        if lora is not None:
            add_adapters(model, lora, seed) if base == directory else read_adapter(model, directory)
            adapters = {name: view.detach().float() for name, view in adapter_views(model).items()}
            for module in adapters_of(model):
                module.to_empty(device="meta").float()
        shard_model(model, mesh, dtype)
        model.to_empty(device=mesh.device)
        read_parts(model, checkpoint_pieces(config), files.read_block)
        if lora is not None:
            read_parts(model, adapter_pieces(config, lora), lambda name, index: adapters[name][index])
    return model


# ------------------------------------------------------------------------------------------------ parts


@torch.no_grad()
def read_parts(model: nn.Module, pieces: Mapping[str, Sequence[Piece]], read: ReadBlock) -> None:
    """Fill this rank's parts of the parameters and buffers, reading nothing else of the checkpoint."""
    tensors = _named_tensors(model)
    for name, found in pieces.items():
        own, part = local_box(tensors[name]), local_part(tensors[name])
        for piece in found:
            if (block := piece.box.intersect(own)) is not None:
                values = read(piece.name, block.within(piece.box)[len(block.sizes) - len(piece.shape) :])
                part[block.within(own)] = values.reshape(block.sizes).to(part.device, part.dtype)


@torch.no_grad()
def collect_tensors(
    model: nn.Module, mesh: TrainingMesh, pieces: Mapping[str, Sequence[Piece]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's share of the checkpoint's tensors, whole, parameters rounded to `dtype`.

    Each tensor is yielded by one rank of the first replica; experts by one that has them. Every rank must iterate to
    the end: one parameter at a time is gathered by all.
    """
    tensors, buffers = _named_tensors(model), {name for name, _ in model.named_buffers()}
    load = [0] * (mesh.size // mesh.settings.dp_replicate)  # bytes of each rank of the first replica
    for name, found in pieces.items():
        tensor = tensors[name] if name in buffers else tensors[name].detach().to(dtype)
        whole, box = _gathered(tensor)
        for expert in range(mesh.settings.ep) if _is_divided_over_experts(tensor) else [None]:
            having = range(len(load)) if expert is None else range(expert, len(load), mesh.settings.ep)
            owner = min(having, key=lambda rank: (load[rank], rank))
            load[owner] += whole.numel() * whole.element_size()
            if owner != mesh.rank:
                continue
            for piece in found:
                if (block := piece.box.intersect(box)) is not None:
                    yield piece.name, whole[block.within(box)].reshape(piece.shape)


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _is_divided_over_experts(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and EXPERT in (tensor.device_mesh.mesh_dim_names or ())


def _gathered(tensor: Tensor) -> tuple[Tensor, Box]:
    """Return a tensor gathered from all ranks that share it, and its place in the whole: of experts, the own ones."""
    if not isinstance(tensor, DTensor):
        return tensor, local_box(tensor)
    names = tensor.device_mesh.mesh_dim_names or ()
    kept = [
        placement if name == EXPERT else Replicate() for name, placement in zip(names, tensor.placements, strict=True)
    ]
    gathered = tensor.redistribute(placements=kept)
    return gathered.to_local(), local_box(gathered)
