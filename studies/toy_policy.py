"""Toy policies of a hundred thousand parameters, sampled and trained by the code that serves large ones.

Transformer, engine, trainer and objective are those of a run. Here everything happens in one thread and in one order,
so that the same seed gives the same numbers on the same machine.
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
from etude.inference.engine import Engine
from etude.inference.policy import PolicyBase, Weights
from etude.inference.request import Completion, SequenceState
from etude.inference.sampling import Sampling
from etude.inference.settings import EngineOptions
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize
from etude.rl.advantages import token_advantages
from etude.rl.objective import PolicyGradient, RolloutBatch
from etude.rl.packing import TrainingSequence, pack
from etude.rollouts.group_advantages import group_advantages
from etude.train.objectives import next_token
from etude.train.trainer import StepResult, Trainer

SETTLE_ITERATIONS = 8  # of the event loop, in which sessions run their tools and request the next turn
MAX_ROWS = 1 << 16  # of one micro-batch: all rows


def toy_config(vocabulary: int, *, hidden: int = 64, layers: int = 2, experts: int = 0) -> ModelConfig:
    """Return a Qwen3 configuration: q/k norm and wide initial weights learn to copy soonest at this size."""
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
    """Let torch use one thread: fastest for small products, and sums have one order on any number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def copy_model(model: Transformer) -> Transformer:
    copy = initialize(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.to(model.head_weight.dtype)


# ------------------------------------------------------------------------------------------------- sampling


class LockstepPolicy(PolicyBase):
    """An engine in the event loop of the sessions, which steps when every session waits for it."""

    def __init__(self, model: Transformer, *, sequences: int = 256) -> None:
        self.engine = Engine(
            copy_model(model),
            EngineOptions(kv_cache_tokens=sequences * 256, max_sequences=sequences, max_step_tokens=16_384),
        )
        self._waiting: dict[SequenceState, asyncio.Future[Completion]] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        submitted = self.engine.submit(tokens, sampling)
        loop = asyncio.get_running_loop()
        futures = [self._waiting.setdefault(sequence, loop.create_future()) for sequence in submitted]
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._step())
        return [await future for future in futures]

    async def _step(self) -> None:
        while self._waiting:
            for _ in range(SETTLE_ITERATIONS):
                await asyncio.sleep(0)
            try:
                self.engine.step()
            except Exception as error:  # raised in every waiting session
                self._fail_all(error)
                return
            for sequence in [sequence for sequence in self._waiting if sequence.ending is not None]:
                future = self._waiting.pop(sequence)
                if not future.done():
                    future.set_result(sequence.result())

    def _fail_all(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(error)

    async def load(self, weights: Weights, version: int) -> None:
        if isinstance(weights, str | Path):
            raise InputError("a lockstep policy loads tensors, not a path; pass the state dict")
        self.engine.load(weights, version)

    def load_model(self, model: Transformer, version: int) -> None:
        """Load a copy of the trainer's weights."""
        self.engine.load({name: value.detach().clone() for name, value in model.state_dict().items()}, version)

    async def version(self) -> int:
        return self.engine.version

    async def close(self) -> None:
        """Do nothing: the engine holds no resources."""


def sample_rows(model: Transformer, prompts: torch.Tensor, new: int, generator: torch.Generator) -> list[Segment]:
    """Sample `new` tokens after prompts of equal length: for tasks without turns."""
    tokens, logprobs = prompts, []
    with torch.inference_mode():
        for _ in range(new):
            distribution = model(tokens)[:, -1].log_softmax(-1)
            sampled = torch.multinomial(distribution.exp(), 1, generator=generator)
            logprobs.append(distribution.gather(1, sampled))
            tokens = torch.cat((tokens, sampled), dim=1)
    return [make_segment(row, prompts.shape[1], own) for row, own in zip(tokens, torch.cat(logprobs, 1), strict=True)]


def make_segment(tokens: torch.Tensor, prompt: int, logprobs: torch.Tensor) -> Segment:
    """Return a segment of `prompt` prompt tokens and sampled tokens with these log-probabilities."""
    sampled = np.arange(len(tokens)) >= prompt
    padded = np.zeros(len(tokens), np.float32)
    padded[prompt:] = logprobs.numpy()
    versions = np.where(sampled, 0, -1).astype(np.int32)
    return Segment("start", tokens.numpy().astype(np.uint32), sampled, padded, padded, versions)


# ------------------------------------------------------------------------------------------------- training


def one_sequence_per_row(sequences: Sequence[TrainingSequence], config: ModelConfig) -> list[RolloutBatch]:
    """Pack one training sequence per row. Nothing attends to the padding, so a row is one document: the fast kernel."""
    batches = pack(sequences, config, length=1, rows=MAX_ROWS, padding=0)
    return [replace(batch, lengths=tuple((batch.tokens.shape[1],) for _ in batch.tokens)) for batch in batches]


def sft_step(trainer: Trainer, segments: Sequence[Segment], factor: float = 1.0) -> float:
    """Take one fine-tuning step on the sampled tokens of the segments; return the loss."""
    sequences = [TrainingSequence(segment, np.ones(int(segment.sampled.sum()), np.float32)) for segment in segments]
    return trainer.step(one_sequence_per_row(sequences, trainer.model.config), next_token, factor).metrics["loss"]


def advantages_by_group(rewards: Sequence[float], size: int, *, divide_by_std: bool = False) -> list[float]:
    """Return the advantages of rollouts that are listed group after group."""
    groups = (rewards[at : at + size] for at in range(0, len(rewards), size))
    return [value for group in groups for value in group_advantages(group, divide_by_std=divide_by_std)]


def training_sequences(segments: Sequence[Segment], advantage: float) -> list[TrainingSequence]:
    """Return a rollout's segments with its advantage on every sampled token."""
    shares = token_advantages(advantage, [int(segment.sampled.sum()) for segment in segments])
    return [TrainingSequence(segment, share) for segment, share in zip(segments, shares, strict=True)]


def rl_step(trainer: Trainer, sequences: Sequence[TrainingSequence], objective: PolicyGradient) -> StepResult:
    """Take one policy-gradient step."""
    return trainer.step(one_sequence_per_row(sequences, trainer.model.config), objective)
