"""Measure how fast this machine trains a model, by a few seconds of it.

A step uses the real network, objective and optimizer on random weights and tokens. If whole rows take too long, fewer
or shorter ones are measured and scaled by the number of operations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from etude.data.packing import Batch
from etude.kernels import usable_device
from etude.kernels.loss import IGNORE
from etude.model.adapters import add_adapters
from etude.model.config import ModelConfig
from etude.model.describe import training_flops_per_token
from etude.model.mtp import MTP
from etude.model.transformer import Transformer
from etude.train.objectives import Objective, next_token, with_mtp
from etude.train.optim import AdamSettings, MasterAdamW
from etude.train.settings import SftSettings, TrainingSettings

Module = TypeVar("Module", bound=torch.nn.Module)
BUDGET_S = 3.0  # for one stage
FIRST_TOKENS = 64  # size of the first measurement
DOCUMENT_TOKENS = 512  # of one document in a packed row: a source file, a session
ASSISTANT_SHARE = 0.25  # share of a conversation's tokens that the assistant wrote
PATTERN_SIZE = 1 << 16  # random numbers that are repeated to fill the weights: drawing all of them takes too long


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of some work, and in words how they were found."""

    seconds: float
    basis: str


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
    if settings.lora is not None:
        add_adapters(model, settings.lora)
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
