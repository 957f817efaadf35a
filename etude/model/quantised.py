"""Weights that a checkpoint stores quantised: the stored tensors of each, and its values as float32.

Every matrix is recognised by what is stored of it, so a checkpoint may mix formats. `M` is a module's name:

    M.weight (FP8) with M.weight_scale_inv               blocks, DeepSeek-V3 (quant_method fp8)
    M.weight (FP8 or INT8) with M.weight_scale           a scale per tensor, row, group or block (compressed-tensors)
    M.weight_packed (INT4 or INT8 in int32), M.weight_shape, M.weight_scale      pack-quantized, Kimi K2.5
    M.weight_packed (FP4 in bytes) with M.weight_scale   MXFP4; NVFP4 with M.weight_global_scale too

Scales of activations are left out: a dequantised model computes in its own dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from etude.errors import InputError

METHODS = ("fp8", "compressed-tensors")
FORMATS = (
    *("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "mxfp4-pack-quantized"),
    *("mxfp8-quantized", "nvfp4-pack-quantized", "mixed-precision", "dense"),
)
INVERSE_SCALE, SCALE, ZERO_POINT = "weight_scale_inv", "weight_scale", "weight_zero_point"
GLOBAL_SCALE, PACKED, SHAPE = "weight_global_scale", "weight_packed", "weight_shape"
ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale")
NARROW = ("F8_E4M3", "F8_E5M2", "I8")  # dtypes, in the words of safetensors
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the lower three bits; the highest one is the sign


class StoredTensor(NamedTuple):
    """Shape of a tensor in a file, its dtype in the words of safetensors and, of a `weight_shape`, its values."""

    shape: tuple[int, ...]
    dtype: str
    values: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuantisedTensor:
    """A matrix, the stored tensors it is made of by part, and how many values of it share a scale."""

    shape: tuple[int, int]
    parts: Mapping[str, str]
    block: tuple[int, int]
    bits: int = 8

    def read(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the values as float32; `read` returns a stored tensor by name."""
        parts = {part: read(name) for part, name in self.parts.items()}
        if PACKED not in parts:
            values = parts["weight"].to(torch.float32, copy=True)
        elif self.bits == 4 and parts[PACKED].dtype == torch.uint8:
            values = _unpack_fp4(parts[PACKED])
        else:
            values = _unpack_integers(parts[PACKED], self.bits, self.shape[1]).float()
        scale = parts[INVERSE_SCALE] if INVERSE_SCALE in parts else parts[SCALE]
        if ZERO_POINT in parts:
            zero = parts[ZERO_POINT]
            if zero.dtype == torch.int32:  # packed along the rows
                zero = _unpack_integers(zero.T.contiguous(), self.bits, self.shape[0]).T
            _by_block(values, _matrix(zero).float(), self.block, Tensor.sub_)
        # MX formats store the exponent of a power of two
        factors = torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()
        if GLOBAL_SCALE in parts:
            factors = factors / parts[GLOBAL_SCALE].float()
        _by_block(values, _matrix(factors), self.block, Tensor.mul_)
        return values


def find_quantised(
    stored: Mapping[str, StoredTensor], settings: Mapping[str, Any], where: str
) -> dict[str, QuantisedTensor]:
    """Return the quantised matrices by name; `settings` are config.json's `quantization_config`."""
    _check_method(settings, where)
    found = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight_g_idx":
            raise InputError(f"{where}: {name}: groups in the order of activations are not supported")
        if part == PACKED:
            found[f"{module}.weight"] = _packed(module, stored, settings, where)
        elif part == "weight" and tensor.dtype in NARROW:
            found[name] = _narrow(module, stored, settings, where)
    return found


def names_of_parts(quantised: Mapping[str, QuantisedTensor], stored: Mapping[str, StoredTensor]) -> Iterator[str]:
    """Yield the stored tensors that are no weights of their own: parts of others, and scales of activations."""
    for name, tensor in quantised.items():
        yield from tensor.parts.values()
        yield f"{name.removesuffix('weight')}{SHAPE}"
    yield from (name for name in stored if name.rpartition(".")[2] in ACTIVATIONS)


def _check_method(settings: Mapping[str, Any], where: str) -> None:
    """Refuse a quantisation that would be read wrongly."""
    method = settings.get("quant_method")
    if method not in METHODS:
        raise InputError(f"{where}: quantisation {method!r} is not supported; expected {' or '.join(METHODS)}")
    formats = [settings.get("format"), *(group.get("format") for group in _groups(settings, where))]
    if unknown := [name for name in formats if name is not None and name not in FORMATS]:
        raise InputError(
            f"{where}: the format {unknown[0]!r} of compressed-tensors is not supported; expected one of "
            f"{', '.join(FORMATS)}"
        )
    sparse = _table(settings, "sparsity_config", where).get("format", "dense")
    if sparse != "dense":
        raise InputError(f"{where}: sparse weights ({sparse!r}) are not supported; expected dense ones")
    if _table(settings, "transform_config", where).get("config_groups"):
        raise InputError(f"{where}: weights that were transformed before they were quantised are not supported")


def _groups(settings: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    """Return the groups of modules that compressed-tensors' settings describe."""
    groups = _table(settings, "config_groups", where)
    return [_table(groups, name, where) for name in groups]


def _table(settings: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = settings.get(key) or {}
    if not isinstance(found, Mapping):
        raise InputError(f"{where}: {key} of the quantisation is {found!r}; expected a table")
    return found


def _narrow(
    module: str, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any], where: str
) -> QuantisedTensor:
    name = f"{module}.weight"
    part = INVERSE_SCALE if settings["quant_method"] == "fp8" else SCALE
    shape, scale = _matrix_shape(name, stored, where), _required(module, part, stored, where)
    sizes = [settings.get("weight_block_size")]
    sizes += [_table(group, "weights", where).get("block_structure") for group in _groups(settings, where)]
    parts = {"weight": name, part: scale} | _optional(module, (ZERO_POINT,), stored)
    return QuantisedTensor(shape, parts, _block_size(shape, scale, stored, sizes, where))


def _packed(
    module: str, stored: Mapping[str, StoredTensor], settings: Mapping[str, Any], where: str
) -> QuantisedTensor:
    name, scale = f"{module}.{PACKED}", _required(module, SCALE, stored, where)
    rows, words = _matrix_shape(name, stored, where)
    parts = {PACKED: name, SCALE: scale} | _optional(module, (ZERO_POINT, GLOBAL_SCALE), stored)
    if stored[name].dtype == "U8":
        shape, bits = (rows, 2 * words), 4
    else:
        values = stored[_required(module, SHAPE, stored, where)].values
        shape = (values[0], values[1]) if len(values) == 2 else (rows, 0)
        known = [_table(group, "weights", where).get("num_bits") for group in _groups(settings, where)]
        bits = next((bits for bits in (4, 8) if bits in known and words == math.ceil(shape[1] * bits / 32)), 0)
    if shape[0] != rows or not bits:
        raise InputError(
            f"{where}: {name} is {stored[name].dtype} {list(stored[name].shape)} of a matrix {list(shape)}; expected "
            "4 or 8 bits a value, as in config.json, in words of 32"
        )
    return QuantisedTensor(shape, parts, _block_size(shape, scale, stored, [], where), bits)


def _required(module: str, part: str, stored: Mapping[str, StoredTensor], where: str) -> str:
    if (name := f"{module}.{part}") not in stored:
        raise InputError(f"{where}: tensor {name} is missing; {module}.weight is quantised and needs it")
    return name


def _optional(module: str, parts: tuple[str, ...], stored: Mapping[str, StoredTensor]) -> dict[str, str]:
    return {part: f"{module}.{part}" for part in parts if f"{module}.{part}" in stored}


def _matrix_shape(name: str, stored: Mapping[str, StoredTensor], where: str) -> tuple[int, int]:
    shape = stored[name].shape
    if len(shape) != 2:
        raise InputError(f"{where}: {name} is quantised and has shape {list(shape)}; expected a matrix")
    return shape[0], shape[1]


def _block_size(
    shape: tuple[int, int], scale: str, stored: Mapping[str, StoredTensor], blocks: list[Any], where: str
) -> tuple[int, int]:
    """Return how many rows and columns share a scale; `blocks` are sizes that the config names, or None."""
    given = stored[scale].shape
    counts = {0: (1, 1), 1: (given[0], 1) if given else (1, 1), 2: given}.get(len(given), (0, 0))
    for block in blocks:
        if block is None:
            continue
        if not isinstance(block, (list, tuple)) or [type(size) for size in block] != [int, int] or min(block) < 1:
            raise InputError(f"{where}: blocks of the quantisation have the size {block!r}; expected two integers")
        if tuple(math.ceil(size / part) for size, part in zip(shape, block, strict=True)) == counts:
            return block[0], block[1]
    if all(count and size % count == 0 for size, count in zip(shape, counts, strict=True)):
        return shape[0] // counts[0], shape[1] // counts[1]
    raise InputError(f"{where}: {scale} has shape {list(given)}, which does not divide a matrix {list(shape)}")


# ------------------------------------------------------------------------------------------------------ values


def _unpack_integers(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Return the signed integers in rows of 32-bit words, lowest bits first, stored with an offset."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    values = packed[..., None].bitwise_right_shift(shifts).bitwise_and_((1 << bits) - 1)
    return values.flatten(-2)[:, :columns].sub_(1 << (bits - 1))


def _unpack_fp4(packed: Tensor) -> Tensor:
    """Return the values of bytes that hold two FP4 (E2M1) numbers each, the lower half first."""
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    pairs = torch.tensor([[table[byte & 15], table[byte >> 4]] for byte in range(256)])
    return pairs[packed.int()].flatten(-2)


def _matrix(scale: Tensor) -> Tensor:
    """Return scales as a matrix, one value for each block."""
    return scale.reshape(-1, 1) if scale.dim() < 2 else scale


def _by_block(values: Tensor, scale: Tensor, block: tuple[int, int], operate: Callable[[Tensor, Tensor], Any]) -> None:
    """Apply an in-place operation to each block of a matrix and its scale; the last ones may be cut short."""
    for down, height, first in _spans(values.shape[0], block[0]):
        for across, width, second in _spans(values.shape[1], block[1]):
            part = values[down, across].unflatten(0, (-1, height)).unflatten(2, (-1, width))
            operate(part, scale[first, second][:, None, :, None])


def _spans(size: int, block: int) -> Iterator[tuple[slice, int, slice]]:
    """Yield the whole blocks of a dimension, then the rest: indices of values, length of a block, indices of scales."""
    whole = size // block
    if whole:
        yield slice(0, whole * block), block, slice(0, whole)
    if size > whole * block:
        yield slice(whole * block, size), size - whole * block, slice(whole, None)
