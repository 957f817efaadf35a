"""Small RL runs: a random model of a few thousand weights, nano tasks, a recipe."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from run_services import threaded_service

from etude.chat.tokenizer import Tokenizer, train_tokenizer
from etude.data.packing import Batch
from etude.harness.trace import NO_VERSION, Segment, SegmentKind, SessionEnding, Trace
from etude.harness.trace_store import save_trace
from etude.model import save
from etude.model.config import ModelConfig
from etude.model.transformer import Transformer, initialize
from etude.rl import trainer_process
from etude.rl.loop import RlLoop
from etude.rl.settings import RlSettings
from etude.rollouts.queue import RolloutQueue
from etude.rollouts.settings import load_queues
from etude.runs.layout import RunLayout
from etude.train.objectives import next_token
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude_nano.pod_sessions import vocabulary_texts
from etude_nano.source import generate_nano

TINY: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
}


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Tokenizer:
    return train_tokenizer(vocabulary_texts(60), 512)


def tiny_model(seed: int = 0) -> Transformer:
    return initialize(ModelConfig.from_hugging_face({**TINY, "vocab_size": len(tiny_tokenizer())}), seed=seed)


@lru_cache(maxsize=2)
def rambling_model(seed: int = 0) -> Transformer:
    """Return a model that samples random tokens and ends its turn after about ten: rollouts differ in length."""
    model, end = tiny_model(seed), tiny_tokenizer().encode("<|im_end|>", special=True)[-1]
    generator = torch.Generator().manual_seed(seed)
    trainer = Trainer(model, AdamSettings(learning_rate=1e-2))
    for _ in range(30):
        tokens = torch.randint(300, 500, (4, 65), generator=generator)
        tokens[torch.rand(tokens.shape, generator=generator) < 0.1] = end
        rows = tokens[:, :-1], tokens[:, 1:]
        trainer.step([Batch(*rows, tuple((64,) for _ in range(4)), (), 4 * 64)], next_token)
    return model


def make_model(directory: Path, seed: int = 0) -> Path:
    save(rambling_model(seed), directory)
    tiny_tokenizer().save(directory)
    return directory


def make_recipe(
    directory: Path, *, tasks: int = 24, held_out: int = 3, evaluation: dict[str, Any] | None = None, **rl: Any
) -> Path:
    """Write a recipe with the model and tasks it names; return its path. `evaluation` is the table of that stage."""
    make_model(directory / "model")
    generate_nano(directory / "tasks", tasks, "train", 0, (1,))
    generate_nano(directory / "held-out", held_out, "unseen", 0, (1,))
    table: dict[str, Any] = {
        "model": "model",
        "tasks": "./tasks",
        "steps": 3,
        "group_size": 2,
        "groups_per_step": 2,
        "in_flight": 8,
        "window": 1024,
        "length": 1024,
        "device": "cpu",
        "threads": 1,
        "learning_rate": 1e-3,
        "checkpoint_every": 1,
        "tool_set": {"tools": ["read_file", "search_replace", "run_terminal_cmd"], "short_system_prompt": True},
        "budget": {"turns": 2, "max_turn_tokens": 16},
        "summaries": {"mode": "off"},
        "rewards": {"correctness": 1.0, "effort_spent": 0.5},  # a random model solves nothing, but its effort varies
        "sampler": {"device": "cpu", "kv_cache_tokens": 16384, "max_sequences": 8, "threads": 1},
        **rl,
    }
    recipe = directory / "recipe.toml"
    measured = {} if evaluation is None else {"evaluation": {"validation": "./held-out", "test": [], **evaluation}}
    recipe.write_text(tomli_w.dumps({"name": "tiny", "stages": ["rl", *measured], "rl": table, **measured}))
    return recipe


def random_segment(rng: np.random.Generator, size: int = 40, kind: SegmentKind = "start", version: int = 0) -> Segment:
    sampled = rng.random(size) < 0.4
    sampled[0] = False
    sampled[-1] = True
    logprobs = np.where(sampled, -rng.random(size) * 4, 0).astype(np.float32)
    versions = np.where(sampled, version, NO_VERSION).astype(np.int32)
    tokens = rng.integers(0, 500, size).astype(np.uint32)
    return Segment(kind, tokens, sampled, logprobs, logprobs, versions)


def random_trace(rng: np.random.Generator, *segments: Segment, ending: SessionEnding = "final") -> Trace:
    used = segments or (random_segment(rng),)
    return Trace(f"{rng.integers(1 << 30)}", "task", "qwen3", "tiny", (), used, (), ending)


@contextmanager
def open_loop(layout: RunLayout, settings: RlSettings) -> Iterator[RlLoop]:
    """Open the learning loop of a run, with a run service."""
    with threaded_service(layout, load_queues(layout)), trainer_process.open_loop(layout, settings) as loop:
        yield loop


def finish_slots(
    layout: RunLayout, queue: RolloutQueue, rng: np.random.Generator, version: int = 0, *, may_be_alike: bool = False
) -> int:
    """Finish every slot that can be claimed, with random tokens and rewards of 0 or 1; return how many.

    The two rewards of a group differ, unless they `may_be_alike`.
    """
    layout.traces.mkdir(parents=True, exist_ok=True)
    done = 0
    while (slot := queue.claim("worker", time.time())) is not None:
        name = f"traces/{slot.id}-{slot.attempt}.trace"
        save_trace(random_trace(rng, random_segment(rng, version=version)), layout.root / name)
        reward = rng.integers(2) if may_be_alike else (slot.number + slot.group) % 2
        queue.finish(slot, {"total": float(reward)}, name, (version, version))
        done += 1
    return done
