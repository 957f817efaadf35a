"""One function for each stage of a recipe: what it would do, how long, with how much memory and disk.

Rates are measured where that takes a moment (`probe`), taken from the run itself where it has taken steps, and
otherwise a guess that says so.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from etude.chat.tokenizer import Tokenizer
from etude.data import worker_pool
from etude.data.settings import DEMONSTRATIONS, CorpusSettings
from etude.kernels import usable_device
from etude.model.describe import count_parameters
from etude.pipeline.dry_run import measure as probe
from etude.pipeline.dry_run import rl_estimate
from etude.pipeline.dry_run.check import Found, corpus_options
from etude.pipeline.dry_run.measure import Measured
from etude.pipeline.dry_run.memory import (
    Memory,
    checkpoint_bytes,
    kept_checkpoints,
    reading_memory,
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
from etude.tasks.sources import task_sources
from etude.train.phase import list_checkpoints
from etude.train.settings import TrainingSettings

COPIED = 100e6  # bytes a second of weights read, converted and written
TASK, EXPERT = 85_000, 2_000  # bytes on disk: a nano task is a dozen small files
WORKER = 1.5  # times as fast as this process is a worker of a corpus: it remembers words (docs/data.md)
WRITING_S, RENDERING_S = 0.008, 0.003  # for the files of a task, onto the disk; for an expert's session in a corpus
SETTLED = 5  # steps after which a run's own speed is known
HERE = "measured here"


@dataclass(frozen=True)
class StagePlan:
    """One stage."""

    stage: str
    does: tuple[str, ...] = ()
    time: Measured | None = None  # None: it cannot be told
    memory: tuple[Memory, ...] = ()  # of all that runs at once
    disk: int = 0
    launches: tuple[str, ...] = ()
    done: bool = False


@dataclass(frozen=True)
class Machine:
    """What is free, now."""

    cores: float
    memory: dict[str, int]  # bytes by device
    names: dict[str, str]  # of the GPUs
    disk: int


@dataclass
class View:
    """What every function here is given."""

    recipe: Recipe
    found: Found
    machine: Machine
    run: Run | None
    budget: float  # seconds to measure in, for each stage
    sessions: dict[str, float] = field(default_factory=dict)  # tokens of an expert's session, by set of tasks

    @property
    def tokenizer(self) -> Tokenizer:
        """The run's own, or one like it."""
        if self.found.tokenizer is None:
            texts = [text for each in self.found.texts.values() for text in sample_texts(each.sample)]
            self.found.tokenizer = probe.stand_in(texts or self._source_texts())
        return self.found.tokenizer

    def _source_texts(self) -> list[str]:
        """Return texts of the recipe's task sources; without one, some code of the standard library."""
        sets = self.recipe.tasks.build if self.recipe.tasks else ()
        names = sorted({task_set.source for task_set in sets if task_set.source is not None})
        texts = [text for name in names for text in task_sources.get(name).vocabulary_texts(60)]
        return texts or [Path(json.__file__).read_text(encoding="utf-8")]

    def room(self, memory: Memory, tokens: int) -> int | None:
        """How many of its tokens a trainer can be tried with here; None if not even a few."""
        free = self.machine.memory.get("cuda:0" if memory.device == "cuda" else memory.device, memory.total)
        most = tokens_that_fit(memory, free, tokens)
        return most if most >= min(tokens, probe.SMALL) else None

    def made(self, artefact: str) -> bool:
        """Whether an interrupted stage has this already."""
        return self.run is not None and any(each.name == artefact for each in self.run.artefacts())


def beyond(memory: Sequence[Memory], machine: Machine) -> dict[str, int]:
    """Bytes wanted on each device that has fewer."""
    wanted: defaultdict[str, int] = defaultdict(int)
    for each in memory:
        wanted["cuda:0" if each.device == "cuda" else each.device] += each.total
    return {device: total for device, total in wanted.items() if total > machine.memory.get(device, total)}


# ------------------------------------------------------------------------------------------------ models


def tokenizer(view: View) -> StagePlan:
    section, text = view.recipe.tokenizer, view.found.texts["tokenizer"]
    assert section is not None
    rate = probe.vocabulary_rate(sample_texts(text.sample), section.vocab_size)
    line = f"learn {section.vocab_size:,} tokens from {text.files:,} files, {text.bytes / 1e6:,.1f} MB"
    return StagePlan("tokenizer", (line,), Measured(rate.seconds * text.bytes, HERE), disk=100 * section.vocab_size)


def base(view: View) -> StagePlan:
    section = view.recipe.base
    assert section is not None
    return _weights("base", view, section.dtype, f"from {section.source}")


def init(view: View) -> StagePlan:
    section = view.recipe.init
    assert section is not None
    return _weights("init", view, section.dtype, "drawn at random")


def _weights(stage: str, view: View, dtype: str, origin: str) -> StagePlan:
    config = view.found.models[stage].config
    size = weights_bytes(config, dtype)
    counted = count_parameters(config)
    active = f", {counted.active / 1e6:,.1f}M for a token" if counted.active != counted.total else ""
    line = f"a {config.family} model of {counted.total / 1e6:,.1f}M parameters{active}, {origin}"
    time = Measured(1 + size / COPIED, "a guess: by the size of the weights")
    return StagePlan(stage, (line,), time, (reading_memory(config, "cpu", dtype),), size)


# ------------------------------------------------------------------------------------------------ tasks and text


def tasks(view: View) -> StagePlan:
    section = view.recipe.tasks
    assert section is not None
    lines, seconds, disk = [], 0.0, 0
    for table in section.build:
        count = view.found.tasks[table.name]
        made = view.made(f"tasks-{table.name}") and (
            not table.demonstrations or view.made(f"demonstrations-{table.name}")
        )
        origin = f"taken from {table.path}" if table.path else f"made by {table.source}, {table.split}"
        experts = f"; {table.demonstrations:,} sessions of experts on others" if table.demonstrations else ""
        lines.append(f"{table.name}: {count:,} tasks {origin}{experts}{' (made before)' if made else ''}")
        rate = probe.TaskRate(0.0)
        if table.source is not None:
            rate = probe.task_rate(table, view.tokenizer, view.budget / 2)
            view.sessions[table.name] = rate.tokens
        if not made:
            seconds += count * (rate.task + WRITING_S) + table.demonstrations * rate.demonstration
            disk += count * TASK + table.demonstrations * EXPERT
    return StagePlan("tasks", tuple(lines), Measured(seconds, HERE), disk=disk)


def corpus(view: View) -> StagePlan:
    section = view.recipe.corpus
    assert section is not None
    lines, seconds, disk = [], 0.0, 0
    for table in section.build:
        made = view.made(f"corpus-{table.name}")
        line, tokens, took = _corpus(view, table)
        view.found.corpora[table.name] = round(tokens)
        lines.append(f"{table.name}: {line}{' (made before)' if made else ''}")
        if not made:
            seconds += took
            width = (2 if len(view.tokenizer) <= 1 << 16 else 4) + (1 if table.chat else 0)
            disk += round(tokens * width) + view.found.texts[table.name].bytes  # the texts lie beside while it is built
    return StagePlan("corpus", tuple(lines), Measured(seconds, HERE), disk=disk)


def _corpus(view: View, table: CorpusSettings) -> tuple[str, float, float]:
    """A corpus in words, its tokens and the seconds it takes."""
    options, text = corpus_options(table, view.recipe.seed), view.found.texts[table.name]
    words, tokens, seconds = [], 0.0, 0.0
    if text.files:
        if table.chat:
            source = next(source for source in table.sources if not source.startswith(DEMONSTRATIONS))
            rate = probe.chat_rate(chat_sample(source, view.tokenizer), options, view.tokenizer)
        else:
            rate = probe.corpus_rate(text.sample, options, view.tokenizer)
        shared = max(0, text.bytes - worker_pool.IN_PROCESS_BYTES)  # what worker processes do, one for each core
        alone = text.bytes - shared * (1 - 1 / (WORKER * min(worker_pool.MAX_WORKERS, usable_cores())))
        tokens, seconds = rate.tokens * text.bytes, rate.seconds * alone
        words.append(f"{text.files:,} files, {text.bytes / 1e6:,.1f} MB")
    for name in (source.removeprefix(DEMONSTRATIONS) for source in table.sources if source.startswith(DEMONSTRATIONS)):
        assert view.recipe.tasks is not None
        count = next(each.demonstrations for each in view.recipe.tasks.build if each.name == name)
        tokens += count * view.sessions.get(name, float(rl_estimate.LENGTH))
        seconds += count * RENDERING_S
        words.append(f"{count:,} sessions of the experts of {name}")
    return f"{' and '.join(words)}, about {tokens / 1e6:,.2f}M tokens", tokens, seconds


# ------------------------------------------------------------------------------------------------ training


def training(stage: str) -> Callable[[View], StagePlan]:
    return lambda view: train(stage, view)


def train(stage: str, view: View) -> StagePlan:
    section, model = getattr(view.recipe, stage), view.found.models[stage]
    assert isinstance(section, TrainingSettings)
    steps = -(-section.tokens // (section.rows * section.micro_batches * section.length))
    own = list_checkpoints(view.run, stage) if view.run is not None else []
    at = own[-1][0] if own else 0
    frozen = stage == "mtp"
    device = str(usable_device(section.device))
    memory = training_memory(model.config, section, device, layers=model.layers, frozen=frozen)
    half_way = stage == "pretrain" and view.recipe.mtp is not None
    one = checkpoint_bytes(model.config, section, layers=model.layers, frozen=frozen)
    return StagePlan(
        stage,
        tuple(_training_lines(stage, view, section, steps, at)),
        _training_time(stage, view, section, memory, steps, at),
        (memory,),
        kept_checkpoints(section, steps, half_way=half_way) * one,
    )


def _training_lines(stage: str, view: View, section: TrainingSettings, steps: int, at: int) -> list[str]:
    micro = f"{section.micro_batches} x " if section.micro_batches > 1 else ""
    tokens = steps * section.rows * section.micro_batches * section.length
    lines = [f"{steps:,} steps of {micro}{section.rows} rows of {section.length:,} tokens: {tokens:,} tokens"]
    if at:
        lines.append(f"goes on after step {at:,}")
    elif view.run is not None and view.run.metrics(stage):
        lines.append("was interrupted before its first checkpoint: begins again")
    total = sum(part.weight for part in section.mix)
    for part in section.mix:
        there = view.found.corpora.get(part.corpus) or _built(view, part.corpus)
        if there:
            passes = tokens * part.weight / total / there
            often = f"{passes:.0%}" if passes < 1 else f"{passes:,.1f} times all"
            lines.append(f"reads {often} of {Path(part.corpus).name} ({there / 1e6:,.2f}M tokens)")
    if layers := view.found.models[stage].layers:
        alone = "alone, the model frozen" if stage == "mtp" else "along"
        lines.append(f"trains {layers} layer{'s' if layers > 1 else ''} of multi-token prediction {alone}")
    return lines


def _built(view: View, corpus: str) -> int:
    """Tokens of a corpus that an earlier stage of this run has made."""
    facts = view.run.facts("corpus") if view.run is not None else {}
    return int(facts.get(corpus, {}).get("train", 0))


def _training_time(
    stage: str, view: View, section: TrainingSettings, memory: Memory, steps: int, at: int
) -> Measured | None:
    model, measured = view.found.models[stage], None
    records = [] if view.run is None else [each for each in view.run.metrics(stage) if "tokens_per_second" in each]
    tokens = section.rows * section.micro_batches * section.length
    if len(records) >= SETTLED:
        speed = median(record["tokens_per_second"] for record in records)
        measured = Measured(tokens / speed, f"as the {len(records)} steps of this run before went")
    elif (most := view.room(memory, section.rows * section.length)) is not None:
        measured = probe.step_seconds(
            model.config,
            section,
            section.micro_batches,
            layers=model.layers,
            frozen=stage == "mtp",
            most=most,
            budget=view.budget,
        )
    if measured is None:
        return None
    seconds = (steps - at) * measured.seconds
    if section.held_out is not None:
        times = 2 + ((steps - 1) // section.evaluate_every if section.evaluate_every else 0)
        read = section.held_out.max_tokens or tokens
        # read twice, in windows that overlap by half; a forward is a third of a step
        seconds += times * 2 * read * measured.seconds / tokens / 3
    return Measured(seconds, f"{measured.basis}: {measured.seconds:,.2f} s a step")


def nll(view: View) -> StagePlan:
    section, text, config = view.recipe.nll, view.found.texts["nll"], view.found.models["nll"].config
    assert section is not None
    sample = sample_texts(text.sample)
    tokens = sum(map(len, view.tokenizer.encode_batch(sample))) / max(1, sum(len(each.encode()) for each in sample))
    windows = max(1.0, tokens * text.bytes / section.stride)
    one = probe.reading_seconds(config, section.window, "float32", budget=view.budget)
    line = f"score {text.files:,} files, {text.bytes / 1e6:,.1f} MB, in windows of {section.window:,} tokens"
    memory = reading_memory(config, "cpu", "float32")
    return StagePlan("nll", (line,), Measured(windows * one.seconds, one.basis), (memory,))


def rl(view: View) -> StagePlan:
    section, config = view.recipe.rl, view.found.models["rl"].config
    assert section is not None
    run, held_out = view.run, rl_estimate.held_out_tasks(section, view.found.tasks)
    lines = rl_estimate.rl_lines(section, view.found.tasks[section.tasks], held_out)
    standing = checkpoints(RunLayout(run.path)) if run is not None else []
    at = standing[-1][0] if standing else 0
    if at:
        lines.append(f"goes on after step {at:,}")
    memory, time = rl_estimate.rl_memory(section, config), None
    records = run.metrics("rl") if run is not None else []
    if (most := view.room(memory[0], section.rows * section.length)) is not None:
        cores = view.machine.cores
        time = rl_estimate.rl_seconds(section, config, cores, held_out, records, at, most=most, budget=view.budget)
    disk = rl_estimate.rl_disk(section, config, held_out)
    launches = tuple(rl_estimate.rl_launches(section, view.found.pods))
    return StagePlan("rl", tuple(lines), time, tuple(memory), disk, launches)


STAGES: dict[str, Callable[[View], StagePlan]] = {
    "tokenizer": tokenizer,
    "base": base,
    "init": init,
    "tasks": tasks,
    "corpus": corpus,
    "pretrain": training("pretrain"),
    "mtp": training("mtp"),
    "extend": training("extend"),
    "sft": training("sft"),
    "rl": rl,
    "nll": nll,
}
