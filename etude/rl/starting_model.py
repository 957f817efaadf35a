"""The model that a set of processes starts from, as a directory of their own: RL's, or one that is evaluated.

RL with adapters starts from an adapter directory: trainer and samplers load the same base model and exchange only the
adapters afterwards.
"""

import json
import shutil
import uuid
from dataclasses import asdict
from pathlib import Path

import torch

from etude.files import write_atomically
from etude.model.adapters import add_adapters, continues_adapters, merge_adapters
from etude.model.checkpoint import load, write_model
from etude.model.config import ADAPTER_CONFIG, ModelConfig
from etude.model.mtp import carried_mtp
from etude.model.peft import ADAPTER_FILE, copy_adapter, relative_base, write_adapter
from etude.model.settings import LoraSettings
from etude.model.transformer import Transformer
from etude.runs.copy_stages import link_or_copy
from etude.runs.layout import RunLayout
from etude.runs.run import Artefact, Run

TRAINER = ("optimizer.*", "training.json")  # of the process that trained it
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", "config.json")  # of a plain model
ADAPTER = (ADAPTER_FILE, ADAPTER_CONFIG, "config.json")


def copy_model(run: Run, origin: Artefact | Path, layout: RunLayout) -> None:
    """Copy a model into the directory of these processes; one with adapters keeps them."""
    if (draft := _begin(run, origin, layout)) is None:
        return
    copy_checkpoint(origin if isinstance(origin, Path) else origin.path, draft, run.path)
    draft.rename(layout.model)


def copy_checkpoint(source: Path, target: Path, inside: Path) -> None:
    """Copy a model or adapters into an existing directory; `inside` is the run of the copy."""
    if (source / ADAPTER_CONFIG).is_file():
        copy_adapter(source, target, inside)
    else:
        _copy(source, target)


def make_starting_model(
    run: Run, origin: Artefact | Path, layout: RunLayout, lora: LoraSettings | None, seed: int
) -> None:
    """Make the model that RL starts from: the origin's weights, or these with the adapters that are trained."""
    source = origin if isinstance(origin, Path) else origin.path
    adapted = load(source) if (source / ADAPTER_CONFIG).is_file() else None
    if (adapted is None and lora is None) or (adapted is not None and continues_adapters(adapted, lora)):
        copy_model(run, origin, layout)
        return
    if (draft := _begin(run, origin, layout)) is None:
        return
    plain = draft if lora is None else layout.root / "base"
    if lora is not None:
        shutil.rmtree(plain, ignore_errors=True)
    if adapted is None:
        _copy(source, plain)
    else:
        _copy(source, plain, *ADAPTER)
        write_model(merge_adapters(adapted), plain, extra=carried_mtp(source, adapted))
    if lora is not None:
        _copy(plain, draft, *WEIGHTS)
        with torch.device("meta"):
            shapes = Transformer(ModelConfig.load(plain))
        write_adapter(add_adapters(shapes, lora, seed), draft, relative_base(draft, plain, run.path))
    draft.rename(layout.model)


def _begin(run: Run, origin: Artefact | Path, layout: RunLayout) -> Path | None:
    """Make the directory that the processes share, and an empty draft of the model; None if there is a model."""
    layout.make()
    if not layout.id.exists():
        write_atomically(layout.id, uuid.uuid4().hex, durable=True)
    if layout.model.is_dir():
        return None
    write_atomically(layout.origin, json.dumps(asdict(run.parent(origin))))
    draft = layout.root / ".model.making"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    return draft


def _copy(source: Path, target: Path, *without: str) -> None:
    """Copy the files of a model, as hard links where that is possible."""
    ignored = shutil.ignore_patterns(*TRAINER, *without)
    shutil.copytree(source, target, copy_function=link_or_copy, ignore=ignored, dirs_exist_ok=True)
