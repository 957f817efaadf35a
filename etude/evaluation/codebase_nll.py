"""How well a model knows a codebase: the summed negative log-likelihood of its files, in a rolling window.

The report's measure: files in the order given (alphabetical), joined, every token scored exactly once. It is a sum
and not a mean per token, because the bytes are the same for every model while the tokens are not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.data.mixture import DocumentStore
from etude.errors import InputError
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.transformer import Transformer
from etude.system.progress import Report

_BATCH_TOKENS = 8192  # tokens of one forward; several windows when they are short


@dataclass(frozen=True)
class CodebaseNll:
    nats: float  # summed over all tokens: the figure to compare between models
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
    progress: Report | None = None,
) -> CodebaseNll:
    """Score the files as one text; a token sees at least `window - stride` tokens before it, once there are so many."""
    if not files:
        raise InputError("there are no files to score")
    if not 1 <= stride <= window:
        raise InputError(f"stride {stride} must be between 1 and the window {window}")
    if window > model.config.max_length:
        raise InputError(f"window {window} is longer than the {model.config.max_length} tokens this model can read")
    check_vocabulary(tokenizer, model.config.vocab_size, "the model")
    texts = [_read(file) for file in files]
    ids = np.fromiter(chain.from_iterable(tokenizer.encode_batch(texts)), dtype=np.int64)
    if not len(ids):
        raise InputError(f"the {len(files)} files are empty: there is nothing to score")
    nats = stream_nll(model, ids, tokenizer.start, window=window, stride=stride, progress=progress)
    total = len(ids)
    size = sum(len(text.encode()) for text in texts)
    return CodebaseNll(nats, nats / math.log(2) / size, nats / total, total, size, len(files))


def stream_nll(
    model: Transformer,
    ids: npt.NDArray[np.integer[Any]],
    start: int,
    *,
    window: int,
    stride: int,
    progress: Report | None = None,
) -> float:
    """Summed negative log-likelihood of one long text of tokens, in nats.

    The first token needs something before it: `start`, the end of an earlier document, as in training.
    """
    tokens_and_start = torch.from_numpy(np.concatenate([[start], ids]).astype(np.int64))
    nats = 0.0
    for tokens, targets, done in _windows(tokens_and_start, window, stride):
        nats -= _score(model, tokens, targets)
        if progress:
            progress(done, len(ids))
    return nats


@torch.inference_mode()
def loss_by_position(
    model: Transformer, documents: DocumentStore, length: int, *, rows: int, buckets: int = 8
) -> list[float]:
    """Mean loss in each eighth of long stretches of documents: what more context is worth. Empty if none is so long."""
    long = [int(document) for document in np.flatnonzero(documents.lengths > length)]
    starts = [(d, at) for d in long for at in range(0, int(documents.lengths[d]) - length, length)][:rows]
    device, sums = model.head_weight.device, torch.zeros(length, dtype=torch.float64)
    for document, at in starts:
        ids = torch.from_numpy(documents.read(document, at, at + length + 1).astype(np.int64)).to(device)
        hidden = model.hidden(ids[None, :-1])[0]
        sums += token_logprobs(hidden, model.head_weight, ids[1:]).double().cpu()
    return [round(-part.mean().item() / len(starts), 4) for part in sums.chunk(buckets)] if starts else []


def rolling_spans(total: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """(begin, first, end) of each window: tokens begin+1..end are predicted, those after `first` are scored."""
    spans, scored = [], 0
    while scored < total:
        end = min(scored + (stride if scored else window), total)
        spans.append((max(0, end - window), scored, end))
        scored = end
    return spans


def _windows(ids: torch.Tensor, window: int, stride: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Batches of inputs and targets; all windows of one text are of one length, so they stack."""
    spans = rolling_spans(len(ids) - 1, window, stride)
    rows = max(1, _BATCH_TOKENS // window)
    for at in range(0, len(spans), rows):
        some = spans[at : at + rows]
        tokens = torch.stack([ids[begin:end] for begin, _, end in some])
        targets = torch.stack([ids[begin + 1 : end + 1] for begin, _, end in some])
        for row, (begin, first, _) in zip(targets, some, strict=True):
            row[: first - begin] = IGNORE
        yield tokens, targets, some[-1][2]


@torch.inference_mode()
def _score(model: Transformer, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    device = model.head_weight.device
    kept = (targets != IGNORE).to(device)
    hidden = model.hidden(tokens.to(device))[kept]  # context is read but not scored: the head need not see it
    return token_logprobs(hidden, model.head_weight, targets.to(device)[kept]).double().sum().item()


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8")  # as it is: text mode would turn \r\n into one character
    except (OSError, UnicodeDecodeError) as problem:
        raise InputError(f"{file}: cannot be read as UTF-8 text ({problem})") from None
