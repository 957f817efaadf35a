"""One function per stage of a recipe: what it would do, how long it would take, with how much memory and disk.

Rates are measured where that takes a moment (`measure`), taken from the run itself if it has taken steps, and are
otherwise guesses that are labelled so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

from etude.chat.tokenizer import Tokenizer
from etude.data import worker_pool
from etude.data.settings import DEMONSTRATIONS, CorpusSettings
from etude.kernels import usable_device
from etude.model.describe import count_parameters
from etude.pipeline.dry_run import measure, rl_estimate
from etude.pipeline.dry_run.check import RecipeInputs, corpus_options
from etude.pipeline.dry_run.measure import TimeEstimate
from etude.pipeline.dry_run.memory import (
    ProcessMemory,
    checkpoint_bytes,
    inference_memory,
    max_checkpoints,
    tokens_that_fit,
    training_memory,
    weights_bytes,
)
from etude.pipeline.dry_run.texts import chat_sample, sample_texts
from etude.recipe.recipe import Recipe
from etude.rl.trainer_process import checkpoints
from etude.runs.layout import RunLayout
from etude.runs.run import Run
from etude.system.cores import usable_cores
from etude.tasks.sources import TASK_SOURCES
from etude.train.phase import list_checkpoints
from etude.train.settings import TrainingSettings

COPY_BYTES_PER_S = 100e6  # weights read, converted and written
TASK_BYTES, DEMONSTRATION_BYTES = 85_000, 2_000  # on disk: a nano task is a dozen small files
WORKER_SPEEDUP = 1.5  # of a corpus worker over this process: it caches words (docs/data.md)
WRITING_S, RENDERING_S = 0.008, 0.003  # per task, writing its files; per demonstration, rendering it in a corpus
SETTLED_STEPS = 5  # steps after which a run's own speed is known
MEASURED = "measured here"


@dataclass(frozen=True)
class StagePlan:
    """The plan of one stage."""

    stage: str
    does: tuple[str, ...] = ()
    time: TimeEstimate | None = None  # None: it cannot be estimated
    memory: tuple[ProcessMemory, ...] = ()  # of all processes that run at once
    disk: int = 0
    launches: tuple[str, ...] = ()
    done: bool = False


@dataclass(frozen=True)
class FreeResources:
    """The free resources of this machine now."""

    cores: float
    memory: dict[str, int]  # bytes by device
    names: dict[str, str]  # of the GPUs
    disk: int


@dataclass
class PlanContext:
    """The argument of every function here that plans a stage."""

    recipe: Recipe
    inputs: RecipeInputs
    machine: FreeResources
    run: Run | None
    budget: float  # seconds of measuring per stage
    demonstration_tokens: dict[str, float] = field(default_factory=dict)  # of one demonstration, by task set

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run, or a stand-in trained on its texts."""
        if self.inputs.tokenizer is None:
            texts = [text for each in self.inputs.texts.values() for text in sample_texts(each.sample)]
            self.inputs.tokenizer = measure.stand_in_tokenizer(texts or self._source_texts())
        return self.inputs.tokenizer

    def _source_texts(self) -> list[str]:
        """Return texts of the recipe's task sources; without one, some code of the standard library."""
        sets = self.recipe.tasks.build if self.recipe.tasks else ()
        made = [islice(TASK_SOURCES[each.source]().tasks(each), 60) for each in sets if each.source is not None]
        texts = [text for tasks in made for _, files in tasks for text in files.values()]
        return texts or [Path(json.__file__).read_text(encoding="utf-8")]

    def measurable_tokens(self, memory: ProcessMemory, tokens: int) -> int | None:
        """Return how many of a trainer's tokens can be measured here; None if not even a few fit into memory."""
        free = self.machine.memory.get("cuda:0" if memory.device == "cuda" else memory.device, memory.total)
        fitting = tokens_that_fit(memory, free, tokens)
        return fitting if fitting >= min(tokens, measure.FIRST_TOKENS) else None

    def has_artefact(self, name: str) -> bool:
        """Return whether an interrupted stage has already made this artefact."""
        return self.run is not None and any(each.name == name for each in self.run.artefacts())


def devices_exceeded(memory: Sequence[ProcessMemory], machine: FreeResources) -> dict[str, int]:
    """Return the bytes needed on each device that has fewer free."""
    needed: defaultdict[str, int] = defaultdict(int)
    for each in memory:
        needed["cuda:0" if each.device == "cuda" else each.device] += each.total
    return {device: total for device, total in needed.items() if total > machine.memory.get(device, total)}


# ------------------------------------------------------------------------------------------------ models


def plan_tokenizer(context: PlanContext) -> StagePlan:
    settings, text = context.recipe.tokenizer, context.inputs.texts["tokenizer"]
    assert settings is not None
    rate = measure.vocabulary_rate(sample_texts(text.sample), settings.vocab_size)
    line = f"learn {settings.vocab_size:,} tokens from {text.files:,} files, {text.bytes / 1e6:,.1f} MB"
    time = TimeEstimate(rate.seconds * text.bytes, MEASURED)
    return StagePlan("tokenizer", (line,), time, disk=100 * settings.vocab_size)


def plan_base(context: PlanContext) -> StagePlan:
    settings = context.recipe.base
    assert settings is not None
    return _plan_weights("base", context, settings.dtype, f"from {settings.source}")


def plan_init(context: PlanContext) -> StagePlan:
    settings = context.recipe.init
    assert settings is not None
    return _plan_weights("init", context, settings.dtype, "with random weights")


def _plan_weights(stage: str, context: PlanContext, dtype: str, origin: str) -> StagePlan:
    config = context.inputs.models[stage].config
    size = weights_bytes(config, dtype)
    parameters = count_parameters(config)
    active = f", {parameters.active / 1e6:,.1f}M active" if parameters.active != parameters.total else ""
    line = f"a {config.family} model of {parameters.total / 1e6:,.1f}M parameters{active}, {origin}"
    time = TimeEstimate(1 + size / COPY_BYTES_PER_S, "a guess: by the size of the weights")
    return StagePlan(stage, (line,), time, (inference_memory(config, "cpu", dtype),), size)


# ------------------------------------------------------------------------------------------------ tasks and text


def plan_tasks(context: PlanContext) -> StagePlan:
    settings = context.recipe.tasks
    assert settings is not None
    lines, seconds, disk = [], 0.0, 0
    for task_set in settings.build:
        count = context.inputs.tasks[task_set.name]
        made = context.has_artefact(f"tasks-{task_set.name}") and (
            not task_set.demonstrations or context.has_artefact(f"demonstrations-{task_set.name}")
        )
        origin = f"from {task_set.path}" if task_set.path else f"made by {task_set.source}, {task_set.split}"
        extra = f"; {task_set.demonstrations:,} demonstrations on other tasks" if task_set.demonstrations else ""
        lines.append(f"{task_set.name}: {count:,} tasks {origin}{extra}{' (already made)' if made else ''}")
        rate = measure.TaskRate(0.0)
        if task_set.source is not None:
            rate = measure.task_rate(task_set, context.tokenizer, context.budget / 2)
            context.demonstration_tokens[task_set.name] = rate.tokens
        if not made:
            seconds += count * (rate.task + WRITING_S) + task_set.demonstrations * rate.demonstration
            disk += count * TASK_BYTES + task_set.demonstrations * DEMONSTRATION_BYTES
    return StagePlan("tasks", tuple(lines), TimeEstimate(seconds, MEASURED), disk=disk)


def plan_corpora(context: PlanContext) -> StagePlan:
    settings = context.recipe.corpus
    assert settings is not None
    lines, seconds, disk = [], 0.0, 0
    for corpus in settings.build:
        made = context.has_artefact(f"corpus-{corpus.name}")
        line, tokens, corpus_seconds = _plan_corpus(context, corpus)
        context.inputs.corpora[corpus.name] = round(tokens)
        lines.append(f"{corpus.name}: {line}{' (already made)' if made else ''}")
        if not made:
            seconds += corpus_seconds
            width = (2 if len(context.tokenizer) <= 1 << 16 else 4) + (1 if corpus.chat else 0)
            # The texts are kept on disk while the corpus is built.
            disk += round(tokens * width) + context.inputs.texts[corpus.name].bytes
    return StagePlan("corpus", tuple(lines), TimeEstimate(seconds, MEASURED), disk=disk)


def _plan_corpus(context: PlanContext, corpus: CorpusSettings) -> tuple[str, float, float]:
    """Return a corpus in words, its tokens and the seconds it takes to build."""
    options, text = corpus_options(corpus, context.recipe.seed), context.inputs.texts[corpus.name]
    parts, tokens, seconds = [], 0.0, 0.0
    if text.files:
        if corpus.chat:
            source = next(source for source in corpus.sources if not source.startswith(DEMONSTRATIONS))
            rate = measure.chat_rate(chat_sample(source, context.tokenizer), options, context.tokenizer)
        else:
            rate = measure.corpus_rate(text.sample, options, context.tokenizer)
        shared = max(0, text.bytes - worker_pool.IN_PROCESS_BYTES)  # left to worker processes, one per core
        speedup = WORKER_SPEEDUP * min(worker_pool.MAX_WORKERS, usable_cores())
        tokens, seconds = rate.tokens * text.bytes, rate.seconds * (text.bytes - shared * (1 - 1 / speedup))
        parts.append(f"{text.files:,} files, {text.bytes / 1e6:,.1f} MB")
    for name in (source.removeprefix(DEMONSTRATIONS) for source in corpus.sources if source.startswith(DEMONSTRATIONS)):
        assert context.recipe.tasks is not None
        count = next(each.demonstrations for each in context.recipe.tasks.build if each.name == name)
        tokens += count * context.demonstration_tokens.get(name, float(rl_estimate.SESSION_TOKENS))
        seconds += count * RENDERING_S
        parts.append(f"{count:,} demonstrations of {name}")
    return f"{' and '.join(parts)}, about {tokens / 1e6:,.2f}M tokens", tokens, seconds


# ------------------------------------------------------------------------------------------------ training


def training_planner(stage: str) -> Callable[[PlanContext], StagePlan]:
    """Return the planner of the training stage of that name."""
    return lambda context: plan_training(stage, context)


def plan_training(stage: str, context: PlanContext) -> StagePlan:
    settings, model = getattr(context.recipe, stage), context.inputs.models[stage]
    assert isinstance(settings, TrainingSettings)
    steps = -(-settings.tokens // (settings.rows * settings.micro_batches * settings.length))
    saved = list_checkpoints(context.run, stage) if context.run is not None else []
    step = saved[-1][0] if saved else 0
    frozen = stage == "mtp"
    device = str(usable_device(settings.device))
    memory = training_memory(model.config, settings, device, mtp_layers=model.mtp_layers, frozen=frozen)
    halfway = stage == "pretrain" and context.recipe.mtp is not None
    checkpoint = checkpoint_bytes(model.config, settings, mtp_layers=model.mtp_layers, frozen=frozen)
    return StagePlan(
        stage,
        tuple(_training_lines(stage, context, settings, steps, step)),
        _training_time(stage, context, settings, memory, steps, step),
        (memory,),
        max_checkpoints(settings, steps, halfway=halfway) * checkpoint,
    )


def _training_lines(stage: str, context: PlanContext, settings: TrainingSettings, steps: int, step: int) -> list[str]:
    micro = f"{settings.micro_batches} x " if settings.micro_batches > 1 else ""
    tokens = steps * settings.rows * settings.micro_batches * settings.length
    lines = [f"{steps:,} steps of {micro}{settings.rows} rows of {settings.length:,} tokens: {tokens:,} tokens"]
    if step:
        lines.append(f"continues after step {step:,}")
    elif context.run is not None and context.run.metrics(stage):
        lines.append("was interrupted before its first checkpoint: starts again")
    total = sum(part.weight for part in settings.mix)
    for part in settings.mix:
        available = context.inputs.corpora.get(part.corpus) or _built_tokens(context, part.corpus)
        if available:
            passes = tokens * part.weight / total / available
            amount = f"{passes:.0%}" if passes < 1 else f"{passes:,.1f} times all"
            lines.append(f"reads {amount} of {Path(part.corpus).name} ({available / 1e6:,.2f}M tokens)")
    if layers := context.inputs.models[stage].mtp_layers:
        how = "alone, with the model frozen" if stage == "mtp" else "with the model"
        lines.append(f"trains {layers} layer{'s' if layers > 1 else ''} of multi-token prediction {how}")
    return lines


def _built_tokens(context: PlanContext, corpus: str) -> int:
    """Return the tokens of a corpus that an earlier stage of this run has made."""
    facts = context.run.facts("corpus") if context.run is not None else {}
    return int(facts.get(corpus, {}).get("train", 0))


def _training_time(
    stage: str, context: PlanContext, settings: TrainingSettings, memory: ProcessMemory, steps: int, step: int
) -> TimeEstimate | None:
    model, estimate = context.inputs.models[stage], None
    logged = context.run.metrics(stage) if context.run is not None else []
    speeds = [record["tokens_per_second"] for record in logged if "tokens_per_second" in record]
    tokens = settings.rows * settings.micro_batches * settings.length
    if len(speeds) >= SETTLED_STEPS:
        estimate = TimeEstimate(tokens / median(speeds), f"from the {len(speeds)} earlier steps of this run")
    elif (max_tokens := context.measurable_tokens(memory, settings.rows * settings.length)) is not None:
        estimate = measure.step_seconds(
            model.config,
            settings,
            settings.micro_batches,
            mtp_layers=model.mtp_layers,
            frozen=stage == "mtp",
            max_tokens=max_tokens,
            budget=context.budget,
        )
    if estimate is None:
        return None
    seconds = (steps - step) * estimate.seconds
    if settings.held_out is not None:
        evaluations = 2 + ((steps - 1) // settings.evaluate_every if settings.evaluate_every else 0)
        read = settings.held_out.max_tokens or tokens
        # Every token is read twice, in windows that overlap by half; a forward pass is a third of a step.
        seconds += evaluations * 2 * read * estimate.seconds / tokens / 3
    return TimeEstimate(seconds, f"{estimate.basis}: {estimate.seconds:,.2f} s a step")


def plan_nll(context: PlanContext) -> StagePlan:
    settings, text = context.recipe.nll, context.inputs.texts["nll"]
    config = context.inputs.models["nll"].config
    assert settings is not None
    sample = sample_texts(text.sample)
    sample_bytes = max(1, sum(len(each.encode()) for each in sample))
    tokens_per_byte = sum(map(len, context.tokenizer.encode_batch(sample))) / sample_bytes
    windows = max(1.0, tokens_per_byte * text.bytes / settings.stride)
    window = measure.scoring_seconds(config, settings.window, "float32", budget=context.budget)
    line = f"score {text.files:,} files, {text.bytes / 1e6:,.1f} MB, in windows of {settings.window:,} tokens"
    memory = inference_memory(config, "cpu", "float32")
    return StagePlan("nll", (line,), TimeEstimate(windows * window.seconds, window.basis), (memory,))


def plan_rl(context: PlanContext) -> StagePlan:
    settings, config = context.recipe.rl, context.inputs.models["rl"].config
    assert settings is not None
    run, held_out = context.run, rl_estimate.held_out_tasks(settings, context.inputs.tasks)
    lines = rl_estimate.rl_lines(settings, context.inputs.tasks[settings.tasks], held_out)
    saved = checkpoints(RunLayout(run.path)) if run is not None else []
    step = saved[-1][0] if saved else 0
    if step:
        lines.append(f"continues after step {step:,}")
    memory, time = rl_estimate.rl_memory(settings, config), None
    records = run.metrics("rl") if run is not None else []
    if (max_tokens := context.measurable_tokens(memory[0], settings.rows * settings.length)) is not None:
        time = rl_estimate.rl_seconds(
            settings,
            config,
            context.machine.cores,
            held_out,
            records,
            step,
            max_tokens=max_tokens,
            budget=context.budget,
        )
    disk = rl_estimate.rl_disk(settings, config, held_out)
    launches = tuple(rl_estimate.rl_launches(settings, context.inputs.pods))
    return StagePlan("rl", tuple(lines), time, tuple(memory), disk, launches)


STAGE_PLANNERS: dict[str, Callable[[PlanContext], StagePlan]] = {
    "tokenizer": plan_tokenizer,
    "base": plan_base,
    "init": plan_init,
    "tasks": plan_tasks,
    "corpus": plan_corpora,
    "pretrain": training_planner("pretrain"),
    "mtp": training_planner("mtp"),
    "extend": training_planner("extend"),
    "sft": training_planner("sft"),
    "rl": plan_rl,
    "nll": plan_nll,
}
