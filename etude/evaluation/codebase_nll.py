"""Negative log-likelihood (NLL) of a codebase under a model, in a rolling window.

The files are joined in the given order (alphabetical) and every token is scored exactly once. The result is a sum and
not a mean per token, because the bytes are the same for every model while the tokens are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import InputError
from etude.model.transformer import Transformer
from etude.system.progress import ProgressCallback
from etude.train.held_out_nll import stream_nll


@dataclass(frozen=True)
class CodebaseNll:
    """The NLL of a codebase, in several units."""

    nats: float  # summed over all tokens: compare this between models
    bits_per_byte: float
    nats_per_token: float
    tokens: int
    bytes: int
    files: int


def codebase_nll(
    model: Transformer,
    tokenizer: Tokenizer,
    files: Sequence[Path],
    *,
    window: int,
    stride: int,
    progress: ProgressCallback | None = None,
) -> CodebaseNll:
    """Score the files as one text; each token sees the `window - stride` tokens before it, if there are that many."""
    if not files:
        raise InputError("there are no files to score")
    if not 1 <= stride <= window:
        raise InputError(f"stride {stride} must be between 1 and the window {window}")
    if window > model.config.max_length:
        raise InputError(f"window {window} is longer than the {model.config.max_length} tokens of the model's context")
    check_vocabulary(tokenizer, model.config.vocab_size, "the model")
    texts = [_read(file) for file in files]
    ids = np.fromiter(chain.from_iterable(tokenizer.encode_batch(texts)), dtype=np.int64)
    if not len(ids):
        raise InputError(f"the {len(files)} files are empty: there is nothing to score")
    nats = stream_nll(model, ids, tokenizer.start, window=window, stride=stride, progress=progress)
    total = len(ids)
    size = sum(len(text.encode()) for text in texts)
    return CodebaseNll(nats, nats / math.log(2) / size, nats / total, total, size, len(files))


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")  # not in text mode, which would turn \r\n into one character
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{file}: cannot be read as UTF-8 text ({problem})") from None
