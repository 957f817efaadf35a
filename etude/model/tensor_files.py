"""The safetensors files of a checkpoint: names and shapes at once, tensors on demand, dequantised.

A file is mapped into memory while it is open, and one is open at a time (two if a tensor's parts are in two): reading
in the order of `names` needs memory for one file and one tensor, however many there are.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from etude.errors import InputError
from etude.model.config import quantisation_of
from etude.model.quantised import SHAPE, QuantisedTensor, StoredTensor, find_quantised, names_of_parts

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"
OPEN_FILES = 2


class TensorFiles:
    """Files of a directory. Quantised matrices have the name, the shape and (float32) the values they stand for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open_files: dict[Path, Any] = {}
        self._stored: dict[str, StoredTensor] = {}
        self._file_of: dict[str, Path] = {}
        index = directory / INDEX_FILE
        for file in sorted(set(_weight_map(index).values())) if index.exists() else [WEIGHTS_FILE]:
            self._scan(directory / file)
        settings = quantisation_of(_read_config(directory))
        self._quantised: dict[str, QuantisedTensor] = {}
        if settings is not None:
            self._quantised = find_quantised(self._stored, settings, str(directory))
        parts = set(names_of_parts(self._quantised, self._stored))
        # a quantised matrix stands where the first of its parts is
        where = {next(iter(tensor.parts.values())): name for name, tensor in self._quantised.items()}
        self._names = {where.get(name, name): None for name in self._stored if name in where or name not in parts}

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors, file by file."""
        return self._names.keys()

    def shape(self, name: str) -> list[int]:
        return list((self._quantised.get(name) or self._stored[name]).shape)

    def stored_dtype(self, name: str) -> str:
        """Return the dtype in which `read` returns a tensor, in the words of safetensors."""
        return "F32" if name in self._quantised else self._stored[name].dtype

    def dtype(self) -> torch.dtype:
        """Return the dtype of the first matrix that is not quantised, which most of the others are stored in."""
        for name in self.names:
            if name not in self._quantised and len(self.shape(name)) > 1 and self.stored_dtype(name) in DTYPES:
                return DTYPES[self.stored_dtype(name)]
        raise InputError(f"{self.directory}: has no weight matrices")

    def read(self, name: str) -> Tensor:
        """Return a tensor as it is stored, or dequantised to float32; it keeps its file mapped while it lives."""
        quantised = self._quantised.get(name)
        return self._read_stored(name) if quantised is None else quantised.read(self._read_stored)

    def read_block(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Return a block of a tensor; of one that is not quantised, only its bytes are read."""
        if name in self._quantised:
            return self.read(name)[index]
        block: Tensor = self._open(self._file_of[name]).get_slice(name)[index]
        return block

    def _read_stored(self, name: str) -> Tensor:
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        return tensor

    def _scan(self, path: Path) -> None:
        """Read the names, shapes and dtypes of a file."""
        opened = self._open(path)
        for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
            part = opened.get_slice(name)
            values = tuple(opened.get_tensor(name).tolist()) if name.endswith(f".{SHAPE}") else ()
            self._stored[name] = StoredTensor(tuple(part.get_shape()), str(part.get_dtype()), values)
            self._file_of[name] = path

    def _open(self, path: Path) -> Any:
        if path not in self._open_files:
            while len(self._open_files) >= OPEN_FILES:
                oldest = next(iter(self._open_files))
                self._open_files.pop(oldest).__exit__(None, None, None)
            try:
                self._open_files[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise InputError(f"{path}: not found; the checkpoint is incomplete") from None
            except (SafetensorError, OSError) as problem:
                raise InputError(
                    f"{path}: not a complete safetensors file ({problem}); copy or download it again"
                ) from None
        return self._open_files[path]

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open_files:
            self._open_files.popitem()[1].__exit__(None, None, None)


def _read_config(directory: Path) -> dict[str, Any]:
    """Return config.json; a directory without a readable one has no quantised weights."""
    try:
        found = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        names = {str(key): Path(value).name for key, value in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise InputError(f"{index}: not a checkpoint index ({problem})") from None
    return names
