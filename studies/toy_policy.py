"""Policies of a hundred thousand parameters: made, taught, sampled and reinforced by the code that serves large ones.

Transformer, engine, trainer and objective are those of a run. What differs is that everything happens in one thread,
in one order: the same seed gives the same numbers on the same machine.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from etude.errors import InputError
from etude.harness.trace import Segment
from etude.inference.engine import Engine, EngineOptions
from etude.inference.policy import OneSample, Weights
from etude.inference.request import Sample, Stream
from etude.inference.sampling import Sampling
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize
from etude.rl.advantages import advantages, worths
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rl.packing import Piece, pack
from etude.train.objectives import next_token
from etude.train.trainer import StepResult, Trainer

SETTLE = 8  # turns of the event loop in which sessions run their tools and ask again
ROWS = 1 << 16  # of one micro-batch: all


def tiny_config(vocabulary: int, *, hidden: int = 64, layers: int = 2, experts: int = 0) -> ModelConfig:
    """Normalised queries and keys and wide weights: what learns to copy soonest at this size."""
    source = {
        "model_type": "qwen3_moe" if experts else "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": hidden // 4,
        "max_position_embeddings": 1024,
        "rope_theta": 1000.0,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
    }
    if experts:
        source |= {
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden // 2,
            "norm_topk_prob": True,
        }
    return ModelConfig.from_hugging_face(source)


@contextmanager
def one_thread() -> Iterator[None]:
    """Small products are fastest so, and sums have one order however many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def copy_of(model: Transformer) -> Transformer:
    twin = initialize(model.config)
    twin.load_state_dict(model.state_dict())
    return twin.to(model.head_weight.dtype)


# ------------------------------------------------------------------------------------------------- sampling


class Lockstep(OneSample):
    """An engine that steps when every session waits for it, in the sessions' own event loop."""

    def __init__(self, model: Transformer, *, streams: int = 256) -> None:
        self.engine = Engine(copy_of(model), EngineOptions(tokens=streams * 256, max_streams=streams, budget=16_384))
        self._waiting: dict[Stream, asyncio.Future[Sample]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        asked = self.engine.submit(tokens, sampling)
        loop = asyncio.get_running_loop()
        futures = [self._waiting.setdefault(stream, loop.create_future()) for stream in asked]
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        return [await future for future in futures]

    async def _step(self) -> None:
        while self._waiting:
            for _ in range(SETTLE):
                await asyncio.sleep(0)
            try:
                self.engine.step()
            except Exception as error:  # whatever it is, it is raised by those who wait
                self._tell_all(error)
                return
            for stream in [stream for stream in self._waiting if stream.ending is not None]:
                future = self._waiting.pop(stream)
                if not future.done():
                    future.set_result(stream.result())

    def _tell_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    async def load(self, weights: Weights, version: int) -> None:
        if isinstance(weights, str | Path):
            raise InputError("a policy in lockstep is given its weights as tensors, not as a path")
        self.engine.load(weights, version)

    def follow(self, model: Transformer, version: int) -> None:
        """The trainer's weights."""
        self.engine.load({name: value.detach().clone() for name, value in model.state_dict().items()}, version)

    async def version(self) -> int:
        return self.engine.version

    async def close(self) -> None:
        """Nothing is open."""


def continue_rows(model: Transformer, prompts: torch.Tensor, new: int, generator: torch.Generator) -> list[Segment]:
    """Rows of equal length, each continued by `new` tokens: for tasks without turns."""
    tokens, logprobs = prompts, []
    with torch.inference_mode():
        for _ in range(new):
            odds = model(tokens)[:, -1].log_softmax(-1)
            drawn = torch.multinomial(odds.exp(), 1, generator=generator)
            logprobs.append(odds.gather(1, drawn))
            tokens = torch.cat((tokens, drawn), dim=1)
    return [segment_of(row, prompts.shape[1], odds) for row, odds in zip(tokens, torch.cat(logprobs, 1), strict=True)]


def segment_of(tokens: torch.Tensor, prompt: int, logprobs: torch.Tensor) -> Segment:
    made = np.arange(len(tokens)) >= prompt
    known = np.zeros(len(tokens), np.float32)
    known[prompt:] = logprobs.numpy()
    versions = np.where(made, 0, -1).astype(np.int32)
    return Segment("start", tokens.numpy().astype(np.uint32), made, known, known, versions)


# ------------------------------------------------------------------------------------------------- learning


def whole_rows(pieces: Sequence[Piece], config: ModelConfig) -> list[RolloutBatch]:
    """One piece a row. The padding behind it is seen by nothing, so a row is one document and has the fast kernel."""
    batches = pack(pieces, config, length=1, rows=ROWS, padding=0)[0]
    return [replace(batch, lengths=tuple((batch.tokens.shape[1],) for _ in batch.tokens)) for batch in batches]


def imitate(trainer: Trainer, segments: Sequence[Segment], factor: float = 1.0) -> float:
    """One step of fine-tuning on what was made in these; the loss."""
    pieces = [Piece(segment, np.ones(int(segment.made.sum()), np.float32)) for segment in segments]
    return trainer.step(whole_rows(pieces, trainer.model.config), next_token, factor).values["loss"]


def advantages_by_group(rewards: Sequence[float], size: int, *, divide_by_std: bool = False) -> list[float]:
    """Of rollouts that stand group after group."""
    groups = (rewards[at : at + size] for at in range(0, len(rewards), size))
    return [value for group in groups for value in advantages(group, divide_by_std=divide_by_std)]


def weigh(segments: Sequence[Segment], advantage: float) -> list[Piece]:
    """A rollout's segments with its advantage on every made token of all of them."""
    shares = worths(advantage, [int(segment.made.sum()) for segment in segments])
    return [Piece(segment, share) for segment, share in zip(segments, shares, strict=True)]


def reinforce(trainer: Trainer, pieces: Sequence[Piece], objective: PolicyGradient) -> StepResult:
    return trainer.step(whole_rows(pieces, trainer.model.config), objective)
