"""Measure how fast this machine does the work of a recipe, by doing a few seconds of it.

A training step uses the real network, objective and optimizer on random weights and tokens. If whole rows take too
long, fewer or shorter ones are measured and scaled by the number of operations. A corpus is built from a sample, and
tasks and demonstrations are generated; both are thrown away.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer, train_tokenizer
from etude.data.conversations import chat_parts, load_chat
from etude.data.corpus import CorpusOptions, build_corpus
from etude.data.document_format import encode_documents
from etude.data.documents import File
from etude.data.ingest import IngestResult, read_rendered_chats
from etude.data.packing import Batch
from etude.kernels import usable_device
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.config import ModelConfig
from etude.model.describe import training_flops_per_token
from etude.model.mtp import MTP
from etude.model.transformer import Transformer
from etude.tasks.settings import TaskSetSettings
from etude.tasks.sources import TASK_SOURCES, TaskSource
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings, MasterAdamW
from etude.train.settings import SftSettings, TrainingSettings

Module = TypeVar("Module", bound=torch.nn.Module)
BUDGET_S = 3.0  # for one stage
FIRST_TOKENS = 64  # size of the first measurement
DOCUMENT_TOKENS = 512  # of one document in a packed row: a source file, a session
ASSISTANT_SHARE = 0.25  # share of a conversation's tokens that the assistant wrote
SAMPLE_ROWS = 64  # conversations of a sample
PATTERN_SIZE = 1 << 16  # random numbers that are repeated to fill the weights: drawing all of them takes too long


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of some work, and in words how they were found."""

    seconds: float
    basis: str


# ------------------------------------------------------------------------------------------------ training


def step_seconds(
    config: ModelConfig,
    settings: TrainingSettings,
    forwards: float,
    *,
    mtp_layers: int = 0,
    frozen: bool = False,
    max_tokens: int | None = None,
    budget: float = BUDGET_S,
) -> TimeEstimate:
    """Measure one step of a stage: `forwards` forward and backward passes of its rows, and the optimizer's update.

    No pass uses more than `max_tokens`, however long a row is: there may be no memory for more.
    """
    device, dtype = usable_device(settings.device), getattr(torch, settings.precision)
    model = fill_randomly(Transformer(config), config, device, dtype)
    mtp = fill_randomly(MTP(config, mtp_layers), config, device, dtype) if mtp_layers else None
    model.recompute = settings.recompute
    if frozen:
        model.requires_grad_(False)
    objective: Objective = with_mtp(mtp, joint=not frozen) if mtp else next_token
    optimizer = MasterAdamW({"model": model, **({"mtp": mtp} if mtp else {})}, AdamSettings())
    loss_share = ASSISTANT_SHARE if isinstance(settings, SftSettings) else 1.0
    document = settings.length if getattr(settings, "min_document", 1) >= settings.length else DOCUMENT_TOKENS

    def work(rows: int, length: int) -> None:
        batch = random_batch(config.vocab_size, rows, length, loss_share, document).to(device)
        objective(model, batch).loss.div(rows * length).backward()
        optimizer.accumulate_gradients()

    def update() -> float:
        work(1, min(settings.length, FIRST_TOKENS))  # the optimizer needs gradients
        return time_call(device, optimizer.step, 1.0)

    cost = flop_counter(config, document)
    forward = measure_scaled(work, settings.rows, settings.length, cost, device, budget, max_tokens)
    update()  # the first update allocates the moments
    basis = forward.basis + (", not compiled" if settings.compile else "")
    return TimeEstimate(forwards * forward.seconds + update(), basis)


def scoring_seconds(config: ModelConfig, window: int, *, budget: float = BUDGET_S) -> TimeEstimate:
    """Measure how long the model takes to score one window on the CPU."""
    device = torch.device("cpu")
    model = fill_randomly(Transformer(config), config, device, torch.float32)

    def work(rows: int, length: int) -> None:
        tokens = torch.randint(config.vocab_size, (rows, length))
        with torch.inference_mode():
            token_logprobs(model.hidden(tokens).flatten(0, 1), model.head_weight, tokens.flatten())

    return measure_scaled(work, 1, window, flop_counter(config), device, budget)


def measure_scaled(
    work: Callable[[int, int], None],
    rows: int,
    length: int,
    cost: Callable[[int, int], float],
    device: torch.device,
    budget: float,
    max_tokens: int | None = None,
) -> TimeEstimate:
    """Measure `work(rows, length)`: a small shape first, then as large as the budget allows, each shape twice."""
    deadline = time.perf_counter() + budget
    shape = (1, min(length, FIRST_TOKENS))
    time_call(device, work, *shape)  # the first call also starts threads and allocates memory
    seconds = time_call(device, work, *shape)
    while shape != (rows, length):
        affordable = cost(*shape) / seconds * (deadline - time.perf_counter()) / 2
        fitting = [each for each in batch_shapes(rows, length) if _tokens(each) <= (max_tokens or _tokens(each))]
        larger = max((each for each in fitting if cost(*each) < affordable), key=_tokens, default=shape)
        if _tokens(larger) <= _tokens(shape):
            break
        shape = larger
        seconds = min(time_call(device, work, *shape) for _ in range(2))
    basis = "measured here"
    if shape != (rows, length):
        basis += f" on {shape[0]} x {shape[1]:,} tokens and scaled"
    return TimeEstimate(seconds * cost(rows, length) / cost(*shape), basis)


def batch_shapes(rows: int, length: int) -> list[tuple[int, int]]:
    """Return shapes to measure: parts of one row, powers of two of whole rows, and all rows."""
    fewer = [(1 << power, length) for power in range(rows.bit_length())]
    parts = [(1, length >> power) for power in range(1, length.bit_length())]
    return [*parts, *fewer, (rows, length)]


def _tokens(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def flop_counter(config: ModelConfig, document: int | None = None) -> Callable[[int, int], float]:
    """Return a function of rows and length that counts operations; attention spans `document` tokens or the row."""
    products = training_flops_per_token(config, 0)
    attention = training_flops_per_token(config, 1) - products  # per token of the document
    return lambda rows, length: rows * length * (products + attention * min(length, document or length))


def random_batch(vocabulary: int, rows: int, length: int, loss_share: float, document: int) -> Batch:
    """Return rows of documents of `document` tokens each, with the loss on a share of the tokens."""
    tokens = torch.randint(vocabulary, (rows, length))
    masked = torch.rand(rows, length) >= loss_share
    targets = torch.randint(vocabulary, (rows, length)).masked_fill(masked, IGNORE)
    sizes = tuple(min(document, length - at) for at in range(0, length, document))
    return Batch(tokens, targets, (sizes,) * rows, (), int((targets != IGNORE).sum()))


@torch.no_grad()
def fill_randomly(module: Module, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Module:
    """Fill the weights with random numbers, quickly."""
    pattern = torch.randn(PATTERN_SIZE) * config.init_std
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            count = parameter.numel()
            numbers = pattern.expand(math.ceil(count / PATTERN_SIZE), PATTERN_SIZE).reshape(-1)[:count]
            parameter.copy_(numbers.view_as(parameter))
        elif name.endswith("bias"):
            parameter.zero_()
    return module.to(device=device, dtype=dtype)


def time_call(device: torch.device, work: Callable[..., object], *arguments: object) -> float:
    """Return the seconds of one call, kernels on the device included."""
    start = time.perf_counter()
    work(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class TextRate:
    """Seconds and tokens per byte of source text."""

    seconds: float
    tokens: float


def corpus_rate(sample: Sequence[File] | str, options: CorpusOptions, tokenizer: Tokenizer) -> TextRate:
    """Build a corpus of these files, or of the first conversations of a file, in a temporary directory."""
    if isinstance(sample, str):
        return _chat_rate(list(islice(read_rendered_chats(sample, tokenizer), SAMPLE_ROWS)), tokenizer)
    with tempfile.TemporaryDirectory(prefix="etude-dry-run-") as directory:
        for file in sample:
            path = Path(directory, "source", file.repository, file.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read())
        alone = replace(options, held_out=(), against=())  # a sample may have nothing of what they name
        start = time.perf_counter()
        built = build_corpus([f"{directory}/source"], tokenizer, Path(directory, "corpus"), alone)
        return _rate(start, sum(split.tokens for split in built.splits.values()), sum(file.size for file in sample))


def _chat_rate(rows: Sequence[IngestResult], tokenizer: Tokenizer) -> TextRate:
    start = time.perf_counter()
    loaded = [load_chat(row.text) for row in rows if row.text is not None]
    planned = (("", chat_parts(segments, tokenizer.end_of_text)) for _, segments in loaded)
    tokens = sum(len(encoded.tokens) for encoded in encode_documents(planned, tokenizer))
    return _rate(start, tokens, sum(row.size for row in rows))


def _rate(start: float, tokens: int, size: int) -> TextRate:
    return TextRate((time.perf_counter() - start) / max(1, size), tokens / max(1, size))


def vocabulary_seconds(texts: Sequence[str], size: int) -> float:
    """Return the seconds per byte of training a vocabulary of `size`."""
    start = time.perf_counter()
    train_tokenizer(texts, size)
    return _rate(start, 0, sum(len(text.encode()) for text in texts)).seconds


# ------------------------------------------------------------------------------------------------ tasks


@dataclass(frozen=True)
class TaskRate:
    """Seconds per task and per demonstration, and the tokens of a demonstration."""

    task: float
    demonstration: float = 0.0
    tokens: float = 0.0


def task_rate(task_set: TaskSetSettings, tokenizer: Tokenizer, budget: float = 1.0) -> TaskRate:
    """Measure how fast a task source generates tasks and demonstrations; what it makes is thrown away."""
    assert task_set.source is not None
    source = TASK_SOURCES[task_set.source]()
    start, made = time.perf_counter(), 0
    for _ in source.tasks(task_set):
        made += 1
        if time.perf_counter() - start > budget / 4:
            break
    seconds = (time.perf_counter() - start) / made
    if not task_set.demonstrations:
        return TaskRate(seconds)
    return TaskRate(seconds, *asyncio.run(_demonstration_rate(source, task_set, tokenizer, budget)))


async def _demonstration_rate(
    source: TaskSource, task_set: TaskSetSettings, tokenizer: Tokenizer, budget: float
) -> tuple[float, float]:
    """Return seconds and tokens of one demonstration."""
    start, made, tokens = time.perf_counter(), 0, 0
    async for demonstration in source.demonstrations(task_set, (), dialect_for(tokenizer)):
        made += 1
        tokens += demonstration.tokens
        if made == task_set.demonstrations or time.perf_counter() - start > budget:
            break
    return (time.perf_counter() - start) / max(1, made), tokens / max(1, made)
