"""How fast this machine is at what a recipe asks for: each answer comes from a few seconds of the real work.

A training step is taken with the real network, objective and optimizer, on random weights and tokens; where whole rows
take too long, on fewer or shorter ones, and the rest is worked out from the number of operations. A corpus is built
from a sample in memory, tasks and expert sessions are made and thrown away. Nothing is written.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer, train_tokenizer
from etude.data.conversations import chat_parts, load_chat
from etude.data.corpus import CorpusOptions
from etude.data.decontaminate import ProtectedNgrams, find_contaminated
from etude.data.dedup import find_near_duplicates, text_digest
from etude.data.document_format import Markers, encode_documents, file_parts
from etude.data.documents import Document, File
from etude.data.filters import filter_file
from etude.data.ingest import IngestResult
from etude.data.packing import Batch
from etude.kernels import usable_device
from etude.kernels.loss import IGNORE, token_logprobs
from etude.model.config import ModelConfig
from etude.model.describe import training_flops_per_token
from etude.model.mtp import MTP
from etude.model.transformer import Transformer
from etude.rl.settings import RlSettings
from etude.tasks.settings import TaskSetSettings
from etude.tasks.sources import TaskSource, task_sources
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings, MasterAdamW
from etude.train.settings import SftSettings, TrainingSettings

Module = TypeVar("Module", bound=torch.nn.Module)
SECONDS = 3.0  # for one stage
SMALL = 64  # tokens of the first try
DOCUMENT = 512  # tokens of a document among others in a row: a source file, a session
WRITTEN = 0.25  # share of a conversation's tokens that the assistant wrote
PATTERN = 1 << 16  # random numbers that weights are filled with again and again: drawing all of them takes too long


@dataclass(frozen=True)
class Measured:
    """Seconds of one piece of work, and in words how they were found."""

    seconds: float
    basis: str


# ------------------------------------------------------------------------------------------------ training


def step_seconds(
    config: ModelConfig,
    section: TrainingSettings | RlSettings,
    forwards: float,
    *,
    layers: int = 0,
    frozen: bool = False,
    most: int | None = None,
    budget: float = SECONDS,
) -> Measured:
    """One step of a stage: so many forwards and backwards of its rows, and the optimizer's part.

    No more than `most` tokens are tried at once, however many a row has: there may be no memory for more.
    """
    device, dtype = usable_device(section.device), getattr(torch, section.precision)
    model = filled(Transformer(config), config, device, dtype)
    mtp = filled(MTP(config, layers), config, device, dtype) if layers else None
    model.recompute = section.recompute
    if frozen:
        model.requires_grad_(False)
    objective: Objective = with_mtp(mtp, joint=not frozen) if mtp else next_token
    optimizer = MasterAdamW({"model": model, **({"mtp": mtp} if mtp else {})}, AdamSettings())
    taught = WRITTEN if isinstance(section, SftSettings | RlSettings) else 1.0
    document = section.length if getattr(section, "min_document", 1) >= section.length else DOCUMENT

    def work(rows: int, length: int) -> None:
        batch = random_batch(config.vocab_size, rows, length, taught, document).to(device)
        objective(model, batch).loss.div(rows * length).backward()
        optimizer.accumulate_gradients()

    def update() -> float:
        work(1, min(section.length, SMALL))  # it needs gradients
        return timed(device, optimizer.step, 1.0)

    cost = operations(config, document)
    forward = growing(work, section.rows, section.length, cost, device, budget, most)
    update()  # the first makes the moments
    basis = forward.basis + (", not compiled" if section.compile else "")
    return Measured(forwards * forward.seconds + update(), basis)


def reading_seconds(config: ModelConfig, window: int, dtype: str, *, budget: float = SECONDS) -> Measured:
    """The model reads and scores one window, on the CPU."""
    device = torch.device("cpu")
    model = filled(Transformer(config), config, device, getattr(torch, dtype))

    def work(rows: int, length: int) -> None:
        tokens = torch.randint(config.vocab_size, (rows, length))
        with torch.inference_mode():
            token_logprobs(model.hidden(tokens).flatten(0, 1), model.head_weight, tokens.flatten())

    return growing(work, 1, window, operations(config), device, budget)


def growing(
    work: Callable[[int, int], None],
    rows: int,
    length: int,
    cost: Callable[[int, int], float],
    device: torch.device,
    budget: float,
    most: int | None = None,
) -> Measured:
    """Seconds of `work(rows, length)`: tried small first, then as large as the budget allows, each shape twice."""
    deadline = time.perf_counter() + budget
    shape = (1, min(length, SMALL))
    timed(device, work, *shape)  # the first time is of threads starting and memory being found
    seconds = timed(device, work, *shape)
    while shape != (rows, length):
        affordable = cost(*shape) / seconds * (deadline - time.perf_counter()) / 2
        tried = [each for each in shapes(rows, length) if _tokens(each) <= (most or _tokens(each))]
        larger = max((each for each in tried if cost(*each) < affordable), key=_tokens, default=shape)
        if _tokens(larger) <= _tokens(shape):
            break
        shape = larger
        seconds = min(timed(device, work, *shape) for _ in range(2))
    basis = "measured here"
    if shape != (rows, length):
        basis += f" on {shape[0]} x {shape[1]:,} tokens and scaled"
    return Measured(seconds * cost(rows, length) / cost(*shape), basis)


def shapes(rows: int, length: int) -> list[tuple[int, int]]:
    """Whole rows, fewer of them, or a part of one."""
    fewer = [(1 << power, length) for power in range(rows.bit_length())]
    parts = [(1, length >> power) for power in range(1, length.bit_length())]
    return [*parts, *fewer, (rows, length)]


def _tokens(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def operations(config: ModelConfig, document: int | None = None) -> Callable[[int, int], float]:
    """Of rows in which attention reaches over documents of so many tokens, or over the whole row."""
    products = training_flops_per_token(config, 0)
    attention = training_flops_per_token(config, 1) - products  # for each token of the document
    return lambda rows, length: rows * length * (products + attention * min(length, document or length))


def random_batch(vocabulary: int, rows: int, length: int, taught: float, document: int) -> Batch:
    """Rows of documents of so many tokens, of which a share is taught."""
    tokens = torch.randint(vocabulary, (rows, length))
    untaught = torch.rand(rows, length) >= taught
    targets = torch.randint(vocabulary, (rows, length)).masked_fill(untaught, IGNORE)
    sizes = tuple(min(document, length - at) for at in range(0, length, document))
    return Batch(tokens, targets, (sizes,) * rows, (), int((targets != IGNORE).sum()))


@torch.no_grad()
def filled(module: Module, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Module:
    """Random weights, quickly."""
    pattern = torch.randn(PATTERN) * config.init_std
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            count = parameter.numel()
            numbers = pattern.expand(math.ceil(count / PATTERN), PATTERN).reshape(-1)[:count]
            parameter.copy_(numbers.view_as(parameter))
        elif name.endswith("bias"):
            parameter.zero_()
    return module.to(device=device, dtype=dtype)


def timed(device: torch.device, work: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class TextRate:
    """What a byte of source costs, and what becomes of it."""

    seconds: float
    tokens: float


def corpus_rate(sample: Sequence[File], options: CorpusOptions, tokenizer: Tokenizer) -> TextRate:
    """A corpus of these files, built in memory: filtered, compared with each other, encoded."""
    start = time.perf_counter()
    found = [filter_file(file, options.filters) for file in sample]
    documents = [each for each in found if isinstance(each, Document)]
    texts = [document.text for document in documents]
    for text in texts:
        text_digest(text)
    compare(texts, options)
    markers = Markers.find(tokenizer, fim=options.fim > 0)
    planned = ((each.name, file_parts(each, markers, options.fim, options.seed)) for each in documents)
    tokens = sum(len(encoded.tokens) for encoded in encode_documents(planned, tokenizer))
    return _rate(start, tokens, sum(file.size for file in sample))


def chat_rate(rows: Sequence[IngestResult], options: CorpusOptions, tokenizer: Tokenizer) -> TextRate:
    """The same of conversations that have been rendered."""
    start = time.perf_counter()
    loaded = [load_chat(row.text) for row in rows if row.text is not None]
    compare([text for text, _ in loaded], options)
    planned = (("", chat_parts(segments, tokenizer.end_of_text)) for _, segments in loaded)
    tokens = sum(len(encoded.tokens) for encoded in encode_documents(planned, tokenizer))
    return _rate(start, tokens, sum(row.size for row in rows))


def compare(texts: Sequence[str], options: CorpusOptions) -> None:
    """Look for texts that repeat others, and for those that leak what is held out."""
    if options.near < 1:
        find_near_duplicates(range(len(texts)), texts.__getitem__, threshold=options.near, shingle=options.shingle)
    if options.held_out or options.against:
        protected = ProtectedNgrams(((str(at), text) for at, text in enumerate(texts[::10])), options.ngram)
        checked = [(at, str(at)) for at in range(len(texts))]
        find_contaminated(protected, checked, texts.__getitem__, max_share=options.leak, boilerplate=options.boilerplate)


def _rate(start: float, tokens: int, size: int) -> TextRate:
    return TextRate((time.perf_counter() - start) / max(1, size), tokens / max(1, size))


def vocabulary_rate(texts: Sequence[str], size: int) -> TextRate:
    """Learning a vocabulary of `size` from these texts."""
    start = time.perf_counter()
    train_tokenizer(texts, size)
    return _rate(start, 0, sum(len(text.encode()) for text in texts))


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
    source = task_sources.get(task_set.source)
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
    async for shown in source.demonstrations(task_set, (), dialect_for(tokenizer)):
        made += 1
        tokens += shown.tokens
        if made == task_set.demonstrations or time.perf_counter() - start > budget:
            break
    return (time.perf_counter() - start) / max(1, made), tokens / max(1, made)


def stand_in(texts: Sequence[str]) -> Tokenizer:
    """A vocabulary for measuring with, where the real one is not there yet."""
    return train_tokenizer(texts, 2048)
