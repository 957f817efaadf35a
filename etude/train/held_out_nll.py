"""Held-out negative log-likelihood: summed over a rolling window, and by position in long documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from etude.data.mixture import DocumentStore
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.transformer import Transformer
from etude.system.progress import ProgressCallback

_BATCH_TOKENS = 8192  # tokens of one forward pass; short windows are batched


def stream_nll(
    model: Transformer,
    ids: npt.NDArray[np.integer[Any]],
    start: int,
    *,
    window: int,
    stride: int,
    progress: ProgressCallback | None = None,
) -> float:
    """Return the summed negative log-likelihood of a token stream, in nats.

    `start` precedes the first token: the end-of-text token, as between documents in training.
    """
    tokens_and_start = torch.from_numpy(np.concatenate([[start], ids]).astype(np.int64))
    nats = 0.0
    for tokens, targets, done in _windows(tokens_and_start, window, stride):
        nats -= _score(model, tokens, targets)
        if progress:
            progress(done, len(ids))
    return nats


@torch.no_grad()
def loss_by_position(
    model: Transformer, documents: DocumentStore, length: int, *, rows: int, buckets: int = 8
) -> list[float]:
    """Return the mean loss in each of `buckets` parts of `length`-token stretches.

    At most `rows` stretches are read; the list is empty if no document is that long.
    """
    long = [int(document) for document in np.flatnonzero(documents.lengths > length)]
    starts = [(d, at) for d in long for at in range(0, int(documents.lengths[d]) - length, length)][:rows]
    device, sums = model.head_weight.device, torch.zeros(length, dtype=torch.float64)
    for document, at in starts:
        ids = torch.from_numpy(documents.read(document, at, at + length + 1).astype(np.int64)).to(device)
        hidden = model.hidden(ids[None, :-1])[0]
        sums += token_logprobs(hidden, model.head_weight, ids[1:]).double().cpu()
    return [round(-part.mean().item() / len(starts), 4) for part in sums.chunk(buckets)] if starts else []


def rolling_spans(total: int, window: int, stride: int) -> list[tuple[int, int, int]]:
    """Return (begin, first, end) of each window: tokens begin+1..end are predicted, those after `first` are scored."""
    spans, scored = [], 0
    while scored < total:
        end = min(scored + (stride if scored else window), total)
        spans.append((max(0, end - window), scored, end))
        scored = end
    return spans


def _windows(ids: torch.Tensor, window: int, stride: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Yield inputs, targets and tokens scored so far. All windows of one text have the same length, so they stack."""
    spans = rolling_spans(len(ids) - 1, window, stride)
    rows = max(1, _BATCH_TOKENS // window)
    for at in range(0, len(spans), rows):
        some = spans[at : at + rows]
        tokens = torch.stack([ids[begin:end] for begin, _, end in some])
        targets = torch.stack([ids[begin + 1 : end + 1] for begin, _, end in some])
        for row, (begin, first, _) in zip(targets, some, strict=True):
            row[: first - begin] = IGNORE
        yield tokens, targets, some[-1][2]


@torch.no_grad()
def _score(model: Transformer, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    device = model.head_weight.device
    kept = (targets != IGNORE).to(device)
    hidden = model.hidden(tokens.to(device))[kept]  # the head runs on scored positions only
    return token_logprobs(hidden, model.head_weight, targets.to(device)[kept]).double().sum().item()
