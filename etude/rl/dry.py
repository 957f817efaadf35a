"""What a run of reinforcement learning would do and need, without doing it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.config import ModelConfig
from etude.model.describe import Mesh, count_parameters, kv_bytes_per_token, memory_per_gpu
from etude.model.gguf import gguf_config
from etude.model.tokenizer import Tokenizer
from etude.recipe import Recipe
from etude.sections import RlStage, TrainingStage
from etude.tasks.harbor import find_tasks

GIB = 1 << 30


@dataclass(frozen=True)
class Line:
    """One fact of a plan."""

    what: str
    says: str


def plan_lines(section: RlStage, config: ModelConfig, prompts: int | None, held_out: int | None) -> list[Line]:
    """The plan and the memory it takes."""
    plan = section.steps * section.groups_per_step
    rollouts = plan * section.group_size
    there = "as many as the tasks stage makes" if prompts is None else f"{prompts:,}"
    lines = [
        Line(
            "processes",
            f"1 trainer on {_device(section.device)}, {section.sampler.count} samplers on "
            f"{_device(section.sampler.device)}, {section.workers} workers with pods, this orchestrator",
        ),
        Line(
            "prompts",
            f"{plan:,} of {there}: {section.steps:,} steps of {section.groups_per_step} groups, each trained on once",
        ),
        Line(
            "rollouts",
            f"{rollouts:,}: groups of {section.group_size}, at most {section.in_flight} at once, tokens at most "
            f"{section.max_staleness} steps old",
        ),
    ]
    if table := section.evaluation:
        times = 2 + (max(0, section.steps - 1) // table.every if table.every else 0)
        count = held_out if held_out is None or table.most is None else min(held_out, table.most)
        each = "held-out tasks" if count is None else f"{count} held-out tasks"
        lines.append(Line("measurements", f"{times}, each {table.samples} sessions on each of {each}"))
    return lines + memory_lines(section, config)


def describe(recipe: Recipe) -> list[Line]:
    """The plan of a recipe's stage rl; what earlier stages make is told as far as it is known before they run."""
    section = recipe.rl
    if section is None:
        raise InputError(f'the recipe has no stage "rl"; its stages are {", ".join(recipe.stages)}')
    counts = [_count(name) for name in (section.tasks, section.evaluation.tasks if section.evaluation else "")]
    needed = section.steps * section.groups_per_step
    if counts[0] is not None and counts[0] < needed:
        raise InputError(f"rl.tasks has {counts[0]} prompts, but the steps take {needed}, each once")
    return plan_lines(section, config_of(recipe, section), *counts)


def config_of(recipe: Recipe, section: RlStage) -> ModelConfig:
    """The network that will be trained, from wherever the recipe takes it."""
    if section.model is not None:
        return ModelConfig.load(section.model)
    if recipe.init is not None:
        origin = recipe.init.tokenizer
        size = len(Tokenizer.load(origin)) if origin else recipe.tokenizer.vocab_size if recipe.tokenizer else 0
        return ModelConfig.from_hugging_face({**recipe.init.config, "vocab_size": size}, where="init.config")
    if recipe.base is not None:
        directory = Path(recipe.base.source)
        return ModelConfig.load(directory) if directory.is_dir() else gguf_config(recipe.base.source)
    first = next(stage for _, stage in recipe if isinstance(stage, TrainingStage) and stage.model)
    return ModelConfig.load(cast(Path, first.model))


def _count(name: str) -> int | None:
    """How many tasks there are; None of a set that is not made yet."""
    return sum(1 for _ in find_tasks(name)) if os.path.isabs(name) else None


def memory_lines(section: RlStage, config: ModelConfig) -> list[Line]:
    """The largest pieces of memory, each process by itself."""
    parameters = count_parameters(config)
    mesh = Mesh(1, sequence=section.length, rows=section.rows)
    need = memory_per_gpu(config, parameters, mesh)
    scale = 2 if section.precision == "float32" else 1  # the estimate is for bfloat16
    trainer = scale * (need.weights + need.gradients + need.head_and_loss) + need.optimizer
    kept = scale * need.activations * (1 if section.recompute else 8)  # a block keeps about eight times its input
    reference = 0 if section.estimator.kl == "none" else scale * need.weights
    full = parameters.total * (2 if section.weights.dtype == "bfloat16" else 4)
    lines = [
        Line("model", f"{parameters.total / 1e6:,.1f}M parameters, {parameters.active / 1e6:,.1f}M for a token"),
        Line(
            "trainer",
            f"{(trainer + kept + reference) / GIB:,.2f} GiB: weights, gradients and Adam {trainer / GIB:,.2f}, "
            f"activations of {section.rows} rows of {section.length:,} tokens {kept / GIB:,.2f}"
            + (f", reference {reference / GIB:,.2f}" if reference else ""),
        ),
    ]
    width = 1 if _is_gpu(section.sampler.device) else 2
    cache = section.sampler.tokens * kv_bytes_per_token(config) * width
    weights = parameters.total * 2 * width
    lines += [
        Line(
            "each sampler",
            f"{(weights + cache) / GIB:,.2f} GiB: weights {weights / GIB:,.2f}, keys and values of "
            f"{section.sampler.tokens:,} tokens {cache / GIB:,.2f}",
        ),
        Line(
            "store",
            f"at most {section.weights.keep * full * 2 / GIB:,.2f} GiB: {section.weights.keep} full versions of "
            f"{full / GIB:,.2f} and the deltas between, in {section.weights.store or 'the run directory'}",
        ),
    ]
    return lines


def _is_gpu(name: str) -> bool:
    return name.startswith("cuda") or (name == "auto" and torch.cuda.is_available())


def _device(name: str) -> str:
    """Where a process would run here; a device that is not here is said so by whoever would use it."""
    return str(usable_device(name)) if name == "auto" else name
