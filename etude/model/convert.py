"""Copy a checkpoint tensor by tensor: dequantised, in another dtype, without ever holding the model in memory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import InputError
from etude.model.checkpoint import (
    TRAINING,
    check_tensors,
    check_tied_head,
    checkpoint_views,
    is_mtp_tensor,
    new_directory,
    training_file,
    write_config,
    write_tensors,
)
from etude.model.config import ADAPTER_CONFIG, PROFILE_FILE, ModelConfig, without_quantisation
from etude.model.mtp import CORRECTION_BIAS, MTP_FILE, mtp_file
from etude.model.tensor_files import TensorFiles
from etude.model.transformer import Transformer


def import_directory(source: Path, out: Path, dtype: torch.dtype | None = None) -> None:
    """Convert a Hugging Face directory, quantised or not, into the new directory `out`."""
    with new_directory(out) as directory:
        convert_checkpoint(source, directory, dtype)


def convert_checkpoint(
    source: Path, directory: Path, dtype: torch.dtype | None = None, shard_bytes: int = 5 * 10**9
) -> None:
    """Write the model of `source` into an existing directory: weights, config, tokenizer, agent profile, MTP layers.

    Memory is needed for one file of the source, one of the copy and one tensor. The default dtype is that of the
    matrices that are not quantised.
    """
    if (source / ADAPTER_CONFIG).is_file():
        raise InputError(f"{source} is an adapter; merge it into its base model first (etude model merge)")
    config = ModelConfig.load(source)
    config = replace(config, source=without_quantisation(config.source))
    tokenizer = Tokenizer.load(source)
    check_vocabulary(tokenizer, config.vocab_size, str(source))
    with TensorFiles(source) as files:
        with torch.device("meta"):
            model = Transformer(config)
        views = checkpoint_views(model)
        check_tensors(files, views, config)
        check_tied_head(files, config)
        target = dtype or files.dtype()
        kept = [name for name in files.names if name in views or is_mtp_tensor(name, config)]
        write_tensors(directory, _converted(files, kept, target), shard_bytes=shard_bytes)
    write_config(config, target, directory)
    tokenizer.save(directory)
    if (source / PROFILE_FILE).exists():
        shutil.copy(source / PROFILE_FILE, directory)
    if layers := mtp_file(source):
        (directory / TRAINING).mkdir(exist_ok=True)
        shutil.copy(layers, training_file(directory, MTP_FILE))


def _converted(files: TensorFiles, names: list[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        yield name, files.read(name).to(torch.float32 if name.endswith(CORRECTION_BIAS) else dtype)
