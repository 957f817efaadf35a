"""Hugging Face directories of weight versions, for a server that loads new weights from files.

Weights are written as a whole, with a head of their own if the model is tied (see `etude.model.untied`); a run that
trains adapters writes PEFT directories of the adapters. `control` is a directory with random weights of the same
shapes: with them a probe shows whether a server takes every tensor.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.model.checkpoint import checkpoint_views, write_config, write_tensors
from etude.model.config import ADAPTER_CONFIG, ModelConfig, base_directory
from etude.model.peft import ADAPTER_FILE, read_lora_settings
from etude.model.tensor_files import TensorFiles
from etude.model.transformer import Transformer
from etude.model.untied import head_names, untied, with_own_head

NOISE = (1 << 20) + 7  # random values that are repeated; not a multiple of any row's length
CONTROL = "control"

TensorReader = Callable[[str], Tensor]


class WeightFiles:
    """Directories of weights in one directory of this process, which `parent` is to contain (default: temporary)."""

    def __init__(self, model: Path, parent: Path | None = None) -> None:
        self.model = model
        self.config = ModelConfig.load(model)
        self.adapters = (model / ADAPTER_CONFIG).is_file()
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        self.root = Path(tempfile.mkdtemp(prefix="etude-sampler-", dir=parent))
        if parent is not None:
            self.root.chmod(0o755)  # the server may run as another user

    @property
    def base(self) -> Path | None:
        """The frozen weights of a run that trains adapters."""
        return base_directory(self.model) if self.adapters else None

    def adapted_modules(self) -> tuple[str, ...]:
        """Return the last words of the names of adapted modules, such as q_proj."""
        names = load_file(self.model / ADAPTER_FILE)
        return tuple(sorted({name.rsplit(".lora_", 1)[0].rpartition(".")[2] for name in names}))

    def write(self, name: str, weights: Mapping[str, Tensor]) -> Path:
        """Write weights with the names of a checkpoint, or adapters with PEFT's, into the directory `name`."""
        directory = self.root / name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        if self.adapters:
            shutil.copy(self.model / ADAPTER_CONFIG, directory)
            tensors = {key: tensor.contiguous() for key, tensor in weights.items()}
            save_file(tensors, directory / ADAPTER_FILE, metadata={"format": "pt"})
        else:
            write_tensors(directory, with_own_head(weights, self.config))
            dtype = weights[head_names(self.config)[1]].dtype
            write_config(untied(self.config), dtype, directory)
        for file in directory.iterdir():
            os.chmod(file, 0o644)  # safetensors makes files readable by their owner only
        return directory

    def write_control(self, dtype: torch.dtype) -> Path:
        """Write random weights of the same shapes."""
        return self.write(CONTROL, self.control(dtype))

    def control(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return random weights of the same shapes, as large as those of a new model."""
        generator = torch.Generator().manual_seed(0)
        noise, found = torch.randn(NOISE, generator=generator), {}
        if self.adapters:
            shapes = {name: tensor.shape for name, tensor in load_file(self.model / ADAPTER_FILE).items()}
        else:
            with torch.device("meta"):
                shapes = {name: view.shape for name, view in checkpoint_views(Transformer(self.config)).items()}
        outer = dict.fromkeys(head_names(self.config), self.config.hidden_size**-0.5)  # logits that differ by about 1
        for number, (name, shape) in enumerate(shapes.items()):
            size = shape.numel()
            values = noise.roll(number).repeat(-(-size // NOISE))[:size].view(shape)
            width = shape[-1] ** -0.5  # an update as large as what it is added to
            matrix = width if self.adapters else outer.get(name, 0.02)
            scale, mean = (0.1, 1.0) if len(shape) == 1 else (matrix, 0.0)
            found[name] = (mean + scale * values).to(dtype)
        return found

    def keep_only(self, *names: str) -> None:
        """Remove all other directories."""
        for path in self.root.iterdir():
            if path.name not in names:
                shutil.rmtree(path, ignore_errors=True)

    def reader(self, weights: Mapping[str, Tensor]) -> TensorReader:
        """Return a function that reads a tensor of the model with these weights, by its name in the checkpoint."""
        if not self.adapters:
            return weights.__getitem__
        base = self.base
        assert base is not None
        files, lora = TensorFiles(base), read_lora_settings(self.model)

        def read(name: str) -> Tensor:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensor = files.read(name).float()
            if (up := weights.get(f"{module}.lora_B.weight")) is not None:
                tensor += lora.alpha / lora.rank * (up.float() @ weights[f"{module}.lora_A.weight"].float())
            return tensor

        return read

    def remove(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
