"""The tables of a recipe, one class each: every key with type, default and meaning. No default lives elsewhere.

To add a stage: write one `Stage` subclass here and give `Recipe` one line for it (`etude/recipe/recipe.py`).
"""

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    model_validator,
)

from etude.data.sources import is_word
from etude.errors import InputError
from etude.model.config import ModelConfig, unread_keys


class Typed(str):
    """A string typed on the command line: a relative path in it is meant from the working directory."""


def _absolute(value: object, info: ValidationInfo) -> object:
    if not isinstance(value, str):
        return value  # a Path is taken as it is, anything else is for the type check to refuse
    if not value:
        raise ValueError("must be a path, not an empty string")
    directory = Path.cwd() if isinstance(value, Typed) else (info.context or {}).get("directory", Path.cwd())
    return os.path.abspath(os.path.join(directory, os.path.expanduser(value)))


def _absolute_source(value: object, info: ValidationInfo) -> object:
    return value if isinstance(value, str) and is_word(value) else _absolute(value, info)


def _toml_can_hold(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    def check(value: JsonValue, key: str) -> None:
        if value is None:
            raise ValueError(f"{key} is null, which TOML cannot hold: leave the key out")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key} is {value}, which JSON cannot hold")
        if isinstance(value, dict | list):
            for name, item in value.items() if isinstance(value, dict) else enumerate(value):
                check(item, f"{key}.{name}")

    for name, item in config.items():
        check(item, name)
    return config


AbsolutePath = Annotated[Path, Field(strict=False), BeforeValidator(_absolute)]
Source = Annotated[str, BeforeValidator(_absolute_source)]
# strict=False here only lets a TOML array become a tuple; the items stay strict.
Sources = Annotated[tuple[Source, ...], Field(strict=False, min_length=1)]
HfConfig = Annotated[dict[str, JsonValue], AfterValidator(_toml_can_hold)]


def made_by(*stages: str, doc: str) -> Any:
    """A field for what an earlier stage may make: refused when such a stage runs, needed when none does."""
    return Field(default=None, description=doc, json_schema_extra={"made_by": list(stages)})


class Section(BaseModel):
    """A table of the recipe: frozen, strict, closed."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class Stage(Section):
    """A section that configures the stage of the same name, and is given only when that stage runs."""


class TokenizerStage(Stage):
    """Train a byte-level BPE tokenizer."""

    sources: Sources = Field(description='text to learn from: directories, files, "stdlib" or "site-packages"')
    vocab_size: int = Field(default=1024, ge=300, description="entries, single bytes and special tokens included")


def _name_or_path(value: object, info: ValidationInfo) -> object:
    return _absolute(value, info) if isinstance(value, str) and os.sep in value else value


class BaseStage(Stage):
    """Start from an open model: a directory of one, or a GGUF file, as the first checkpoint."""

    source: Annotated[str, Field(min_length=1), BeforeValidator(_name_or_path)] = Field(
        description="a model's directory, a .gguf file, or an installed package that carries one"
    )
    chat_template: Literal["own", "chatml"] = Field(
        default="own", description="chatml: one with tools, for models whose own knows none"
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of the weights")


class InitStage(Stage):
    """Make a model with random weights."""

    config: HfConfig = Field(description="a Hugging Face config.json as a table, without vocab_size")
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of the weights")
    tokenizer: AbsolutePath | None = made_by("tokenizer", doc="directory of a tokenizer, when no stage trains one")

    @model_validator(mode="after")
    def _config_is_one_we_can_build(self) -> Self:
        if "vocab_size" in self.config:
            raise ValueError("config.vocab_size would not be used: the tokenizer decides it; remove it")
        stand_in = {**self.config, "vocab_size": 1024}
        try:
            ModelConfig.from_hugging_face(stand_in, "config")
        except InputError as problem:
            raise ValueError(str(problem)) from None
        if unread := unread_keys(stand_in):
            raise ValueError(
                f"config.{unread[0]} would not be used: a {self.config['model_type']} model has no such key"
            )
        return self


class NllStage(Stage):
    """Measure the model's negative log-likelihood on a codebase."""

    sources: Sources = Field(description='code to score: directories, files, "stdlib" or "site-packages"')
    window: int = Field(default=512, ge=2, description="tokens the model sees at once")
    stride: int = Field(default=256, ge=1, description="tokens scored per window, at most window")
    max_files: int | None = Field(default=None, ge=1, description="score at most so many files, spread evenly")
    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", "sft", "rl", doc="directory of a model, when no stage makes one"
    )

    @model_validator(mode="after")
    def _windows_leave_no_gap(self) -> Self:
        if self.stride > self.window:
            raise ValueError(f"stride must be at most window = {self.window}, not {self.stride}")
        return self


CorpusRef = Annotated[str, Field(min_length=1), BeforeValidator(_name_or_path)]


EXPERTS = "experts:"  # before the name of a set of tasks: the sessions of its experts


def _absolute_corpus_source(value: object, info: ValidationInfo) -> object:
    return value if isinstance(value, str) and value.startswith(EXPERTS) else _absolute_source(value, info)


CorpusSource = Annotated[str, BeforeValidator(_absolute_corpus_source)]


class CorpusBuild(Section):
    """One corpus of this run."""

    name: str = Field(min_length=1, description="what mixtures call it", pattern=r"^[A-Za-z0-9_-]+$")
    sources: tuple[CorpusSource, ...] = Field(
        strict=False,
        min_length=1,
        description='directories, repositories, archives, .jsonl, .parquet, "stdlib", "site-packages", "experts:SET"',
    )
    chat: bool = Field(default=False, description="rows are conversations; learn only what the assistant wrote")
    layout: Literal["file", "repository"] = Field(default="file", description="what one document is")
    suffixes: tuple[str, ...] | None = Field(default=None, strict=False, description="file endings to read")
    fim: float = Field(default=0.0, ge=0, le=1, description="share of documents in fill-in-the-middle form")
    validation: float = Field(default=0.0, ge=0, lt=1, description="share of repositories set aside by hash")
    held_out: tuple[str, ...] = Field(default=(), strict=False, description="repositories set aside, names or globs")
    against: tuple[Source, ...] = Field(default=(), strict=False, description="sources to decontaminate against")

    @model_validator(mode="after")
    def _experts_are_conversations(self) -> Self:
        if not self.chat and any(source.startswith(EXPERTS) for source in self.sources):
            raise ValueError(f"sources names {EXPERTS}..., which are conversations: set chat = true")
        return self


class CorpusStage(Stage):
    """Build corpora: filter, deduplicate, decontaminate, split, tokenize."""

    build: tuple[CorpusBuild, ...] = Field(strict=False, min_length=1, description="one table per corpus")
    tokenizer: AbsolutePath | None = made_by(
        "tokenizer", "base", doc="directory of a tokenizer, when no stage makes one"
    )

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [corpus.name for corpus in self.build]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"build names {sorted(twice)[0]} twice")
        return self


class MixPart(Section):
    """One source of a mixture."""

    corpus: CorpusRef = Field(description="a corpus of this run by name, or a built one by path")
    weight: float = Field(default=1.0, gt=0, description="share of the rows, relative to the others")


class HeldOut(Section):
    """What is measured while training and never trained on."""

    corpus: CorpusRef = Field(description="a corpus of this run by name, or a built one by path")
    split: Literal["held_out", "validation"] = Field(default="held_out", description="which part of it")
    max_tokens: int | None = Field(default=None, ge=1, description="read no further than this")
    window: int = Field(default=1024, ge=2, description="tokens the model sees at once")
    long_rows: int = Field(
        default=8, ge=1, description="stretches of `length` tokens for the loss by position (extend)"
    )


class TrainingStage(Stage):
    """What pretrain, mtp, extend and sft have in common."""

    model: AbsolutePath | None = None
    mix: tuple[MixPart, ...] = Field(strict=False, min_length=1, description="sources and their weights")
    length: int = Field(ge=2, description="tokens of a row")
    tokens: int = Field(ge=1, description="tokens to train on, rounded up to whole steps")
    rows: int = Field(default=8, ge=1, description="rows of one forward")
    micro_batches: int = Field(default=1, ge=1, description="forwards of one step: gradient accumulation")
    learning_rate: float = Field(default=3e-4, gt=0, description="at its peak")
    warmup: float = Field(default=0.02, ge=0, le=1, description="share of the steps on the way up")
    decay: Literal["cosine", "linear", "constant"] = Field(default="cosine", description="how it comes down")
    final: float = Field(default=0.1, ge=0, le=1, description="learning rate of the last step, as a share of the peak")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False, description="of Adam")
    weight_decay: float = Field(default=0.1, ge=0, description="on matrices only")
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 for no clipping")
    device: str = Field(default="auto", description="cpu, cuda ...; auto takes a GPU if there is one")
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of weights and products; masters and moments are float32 always"
    )
    compile: bool = Field(default=False, description="compile the blocks; pays on a GPU")
    recompute: bool = Field(default=False, description="activation checkpointing: less memory, a third more work")
    held_out: HeldOut | None = Field(default=None, description="what to measure on")
    evaluate_every: int = Field(default=0, ge=0, description="steps between measurements; 0 for before and after only")
    checkpoint_every: int = Field(default=0, ge=0, description="steps between checkpoints; 0 for the last only")
    keep: int = Field(default=2, ge=1, description="newest checkpoints to keep, beside the one at half the way")
    spike: float = Field(default=3.0, ge=0, description="stop when the loss is so many nats above usual; 0 never")

    @model_validator(mode="after")
    def _measurements_have_something_to_measure(self) -> Self:
        if self.evaluate_every and self.held_out is None:
            raise ValueError("evaluate_every would not be used: there is no held_out to measure on")
        if self.held_out and self.held_out.long_rows != 8 and not isinstance(self, ExtendStage):
            raise ValueError("held_out.long_rows would not be used: only extend measures the loss by position")
        return self

    @model_validator(mode="after")
    def _numbers_make_sense(self) -> Self:
        if self.decay == "constant" and self.final != 0.1:
            raise ValueError('final would not be used: decay = "constant" stays at the peak')
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        names = [part.corpus for part in self.mix]
        if len(set(names)) != len(names):
            raise ValueError(f"mix names a corpus twice: {', '.join(names)}")
        return self


# rope_theta is not among them: it has a key of its own
ROPE_SCALING_KEYS = {"rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "truncate"}
ROPE_SCALING_KEYS |= {"beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor"}


class PretrainStage(TrainingStage):
    """Continue pretraining at the base length."""

    model: AbsolutePath | None = made_by("base", "init", doc="directory of a model, when no stage makes one")


class MtpStage(TrainingStage):
    """Train multi-token-prediction layers on a mid-run checkpoint."""

    model: AbsolutePath | None = made_by("pretrain", doc="directory of a model, when no stage makes one")
    layers: int = Field(default=1, ge=1, description="how many tokens further to look")
    distance: Literal["kl", "tv"] = Field(default="kl", description="to the main head: KL, or total variation")


class ExtendStage(TrainingStage):
    """Extend the context."""

    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", doc="directory of a model, when no stage makes one"
    )
    rope_theta: float | None = Field(default=None, gt=0, description="another RoPE base")
    rope_scaling: HfConfig | None = Field(default=None, description='such as {rope_type = "yarn", factor = 4.0, ...}')
    min_document: int = Field(default=1, ge=1, description="leave out documents of fewer tokens")

    @model_validator(mode="after")
    def _scaling_is_spelt_right(self) -> Self:
        if unknown := set(self.rope_scaling or {}) - ROPE_SCALING_KEYS:
            what = f"rope_scaling.{min(unknown)} would not be used"
            raise ValueError(f"{what}; known are {', '.join(sorted(ROPE_SCALING_KEYS))}")
        return self


class SftStage(TrainingStage):
    """Fine-tune on conversations."""

    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", doc="directory of a model, when no stage makes one"
    )


# ------------------------------------------------------------------------------------------- tasks


class TaskBuild(Section):
    """One set of tasks of this run: made by a source, or a directory of them."""

    name: str = Field(min_length=1, description="what other stages call it", pattern=r"^[A-Za-z0-9_-]+$")
    source: Literal["nano"] | None = Field(default=None, description="who makes the tasks")
    path: AbsolutePath | None = Field(default=None, description="a directory of tasks to take instead")
    split: Literal["train", "held-out"] = Field(default="train", description="of the source's shapes and faults")
    count: int | None = Field(default=None, ge=1, description="tasks to make")
    difficulties: tuple[Annotated[int, Field(ge=1, le=5)], ...] = Field(
        default=(1, 2, 3, 4, 5), strict=False, min_length=1, description="in turn; 1 is the easiest"
    )
    seed: int = Field(default=0, ge=0, lt=10**9, description="of the first task; the others follow")
    experts: int = Field(default=0, ge=0, description="expert sessions to make beside it, on other tasks")
    unfinished: float = Field(
        default=0.0, ge=0, le=1, description="share of those that stop half-way, as some people do"
    )
    mistakes: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="chance of a mistake in a session, which is not imitated, and the way out of it, which is; "
        "not given: one in eight",
    )

    @model_validator(mode="after")
    def _made_or_taken(self) -> Self:
        if (self.source is None) == (self.path is None):
            raise ValueError("source and path: give the one or the other")
        if self.path is not None:
            fields = type(self).model_fields
            given = [key for key, value in self if key not in ("name", "path") and value != fields[key].default]
            if given:
                raise ValueError(f"{given[0]} would not be used: the tasks are those of path")
        elif self.count is None:
            raise ValueError("count is missing: how many tasks to make")
        if not self.experts and (self.unfinished or self.mistakes is not None):
            name = "unfinished" if self.unfinished else "mistakes"
            raise ValueError(f"{name} would not be used: there are no experts")
        if self.experts and self.split != "train":
            raise ValueError("experts would show what is held out; set them beside a set of the train split")
        return self


class TasksStage(Stage):
    """Make sets of tasks, and expert sessions beside them."""

    build: tuple[TaskBuild, ...] = Field(strict=False, min_length=1, description="one table per set")

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        names = [each.name for each in self.build]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"build names {sorted(twice)[0]} twice")
        return self


# ------------------------------------------------------------------------------------------- reinforcement learning

TaskSet = Annotated[str, Field(min_length=1), BeforeValidator(_name_or_path)]


class EnvironmentTable(Section):
    """What the agent is shown and may use; the rest is the harness as everybody runs it."""

    tools: tuple[str, ...] | None = Field(default=None, strict=False, description="names of tools; none given: all")
    naming: Literal["cursor", "claude-code", "bash"] = Field(default="cursor", description="what tools are called")
    brief: bool = Field(default=False, description="shortest system message and descriptions, for small windows")
    strict: bool = Field(default=False, description="loose arguments of calls are errors")
    command_timeout_s: float = Field(default=600.0, gt=0, description="after which a command is killed")


class BudgetTable(Section):
    """What a session may take; what is not given is not bounded."""

    turns: int | None = Field(default=None, ge=1, description="answers of the model")
    tokens: int | None = Field(default=None, ge=1, description="tokens the model makes, over all segments")
    seconds: float | None = Field(default=None, gt=0, description="of the clock; not given: the task's own limit")
    answer: int = Field(default=4096, ge=1, description="tokens of one answer")


class SummariesTable(Section):
    """Sessions longer than the window."""

    mode: Literal["self", "compaction", "off"] = Field(default="self", description="who sums up; off ends the session")
    trigger: int = Field(default=0, ge=0, description="tokens of a segment at which it is time; 0: when nearly full")
    reserve: int = Field(default=2048, ge=1, description="tokens kept free for a summary")
    attempts: int = Field(default=2, ge=1, description="at a usable summary")
    most: int = Field(default=0, ge=0, description="summaries of one session; 0: no bound")


class EstimatorTable(Section):
    """The report's choices are the defaults; every other value undoes one of them, for study."""

    divide_by_std: bool = Field(default=False, description="divide advantages by the group's standard deviation")
    divide_by_length: bool = Field(default=False, description="divide each rollout by its own tokens")
    mask_overlong: bool = Field(default=False, description="leave rollouts out that were cut off")
    kl: Literal["none", "k1", "k3"] = Field(default="none", description="estimator of the divergence, in the reward")
    kl_weight: float = Field(default=0.0, ge=0, description="of the divergence")
    reference: str = Field(
        default="start", min_length=1, description="diverging from what: start, or a model directory"
    )
    correction: float = Field(
        default=0.0, ge=0, description="largest importance ratio to the sampler; 0: no correction"
    )
    replay: bool = Field(default=True, description="train through the experts the sampler used")
    plausibility: float = Field(default=0.0, ge=0, le=1, description="least router score of a replayed expert")

    @model_validator(mode="after")
    def _knobs_act(self) -> Self:
        if (self.kl == "none") != (self.kl_weight == 0):
            raise ValueError("kl and kl_weight go together: give both or neither")
        if self.kl == "none" and self.reference != "start":
            raise ValueError("reference would not be used: there is no kl")
        if not self.replay and self.plausibility:
            raise ValueError("plausibility would not be used: replay is off")
        return self


class EffortTable(Section):
    """Units of effort, and the curve of the penalty; how much it counts is rewards.effort_spent."""

    thinking_token: float = Field(default=0.001, ge=0, description="units for a token of thinking")
    call_token: float = Field(default=0.001, ge=0, description="units for a token of a call")
    output_token: float = Field(default=0.0002, ge=0, description="units for a token of a result")
    final_token: float = Field(default=0.001, ge=0, description="units for a token of a message")
    call: float = Field(default=0.1, ge=0, description="units for a call")
    turn: float = Field(default=0.2, ge=0, description="units for a turn")
    k: float = Field(default=1.0, ge=0, description="how soon the curve bends")
    q: float = Field(default=1.0, description="how much it bends: 0 is a line, 1 a logarithm")


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class EvaluationTable(Section):
    """Measuring on held-out tasks, through the same harness."""

    tasks: Annotated[tuple[TaskSet, ...], BeforeValidator(_one_or_many)] = Field(
        strict=False, min_length=1, description="sets of this run by their names, or directories of tasks"
    )
    most: int | None = Field(default=None, ge=1, description="take at most so many of each, evenly")
    samples: int = Field(default=4, ge=1, le=16, description="K of best-of-K: sessions for each task")
    every: int = Field(default=0, ge=0, description="steps between measurements; 0: before and after only")
    temperature: float = Field(default=1.0, ge=0, description="of sampling while measuring")


class WeightsTable(Section):
    """How new weights reach the samplers."""

    store: str = Field(default="", description="an fsspec URL such as s3://bucket/run; not given: in the run directory")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="of what travels; the trainer computes with the same values"
    )
    full_every: int = Field(default=20, ge=1, description="versions from one full snapshot to the next")
    keep: int = Field(default=2, ge=1, description="full snapshots to keep, with what follows them")
    poll_s: float = Field(default=0.2, gt=0, description="seconds between looks for a new version")


class SamplerTable(Section):
    """The engines."""

    count: int = Field(default=1, ge=1, description="processes, each with the whole model")
    device: str = Field(default="auto", description="cpu, cuda ...; auto takes a GPU if there is one")
    tokens: int = Field(default=65_536, ge=1, description="of KV cache")
    max_streams: int = Field(default=64, ge=1, description="samples running at once, in each")
    budget: int = Field(default=512, ge=1, description="tokens of one step of the engine")
    on_swap: Literal["keep", "recompute"] = Field(default="keep", description="keys and values of older weights")
    threads: int = Field(default=0, ge=0, description="of a CPU; 0: torch's own choice")


class CurriculumTable(Section):
    """Which prompts come when."""

    hard_after: float = Field(
        default=0.6, ge=0, le=1, description="share of the steps after which hard kinds come more"
    )
    hard_weight: float = Field(default=1.0, ge=0, description="how much more; 0: as often as any")


class RlStage(Stage):
    """Asynchronous reinforcement learning: every sample is a whole session of the agent."""

    model: AbsolutePath | None = made_by(
        "base", "init", "pretrain", "extend", "sft", doc="directory of a model, when no stage makes one"
    )
    tasks: TaskSet = Field(description="prompts: a set of this run by its name, or a directory of tasks")
    steps: int = Field(ge=1, description="steps of the trainer")
    group_size: int = Field(default=8, ge=2, description="rollouts of a prompt")
    groups_per_step: int = Field(default=8, ge=1, description="prompts of a step")
    max_staleness: int = Field(default=4, ge=0, description="steps a token may be older than the weights it trains")
    ahead: float | None = Field(
        default=None, ge=0, description="steps' groups begun beside those of the next; not given: half of max_staleness"
    )
    in_flight: int = Field(default=64, ge=1, description="rollouts at once, over all workers")
    workers: int = Field(default=1, ge=1, description="processes that run sessions")
    lease_s: float = Field(default=120.0, gt=0, description="without a sign of life after which a rollout is given up")
    attempts: int = Field(default=4, ge=1, description="failures of the infrastructure after which a prompt is dropped")
    stall_s: float = Field(default=600.0, gt=0, description="without progress after which the run stops and says why")
    checkpoint_rollouts_s: float = Field(default=60.0, ge=0, description="between checkpoints of a rollout; 0: none")

    dialect: str = Field(default="auto", min_length=1, description="how turns are written; auto: by the tokenizer")
    window: int | None = Field(default=None, ge=64, description="tokens of context; not given: the model's own")
    temperature: float = Field(default=1.0, gt=0, description="of sampling")
    environment: EnvironmentTable = Field(default_factory=EnvironmentTable)
    budget: BudgetTable = Field(default_factory=BudgetTable)
    summaries: SummariesTable = Field(default_factory=SummariesTable)

    rewards: dict[str, float] = Field(default={"correctness": 1.0}, strict=False, description="weights of the terms")
    effort: EffortTable = Field(default_factory=EffortTable)
    estimator: EstimatorTable = Field(default_factory=EstimatorTable)
    curriculum: CurriculumTable = Field(default_factory=CurriculumTable)

    learning_rate: float = Field(default=1e-6, gt=0, description="constant after the warm-up")
    warmup: int = Field(default=0, ge=0, description="steps on the way up")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), strict=False, description="of Adam")
    weight_decay: float = Field(default=0.0, ge=0, description="on matrices only")
    clip: float = Field(default=1.0, ge=0, description="largest gradient norm; 0 for no clipping")
    length: int = Field(default=4096, ge=2, description="tokens of a row; a longer segment is a row of its own")
    rows: int = Field(default=4, ge=1, description="rows of one forward")
    device: str = Field(default="auto", description="of the trainer: cpu, cuda ...; auto takes a GPU if there is one")
    threads: int = Field(default=0, ge=0, description="of the trainer on a CPU; 0: torch's own choice")
    precision: Literal["float32", "bfloat16"] = Field(default="float32", description="of the products")
    compile: bool = Field(default=False, description="compile the blocks; pays on a GPU")
    recompute: bool = Field(default=False, description="activation checkpointing: less memory, a third more work")
    checkpoint_every: int = Field(default=10, ge=1, description="steps between checkpoints of the trainer")
    keep: int = Field(default=2, ge=1, description="newest checkpoints to keep")

    sampler: SamplerTable = Field(default_factory=SamplerTable)
    weights: WeightsTable = Field(default_factory=WeightsTable)
    evaluation: EvaluationTable | None = Field(default=None, description="what to measure on")

    @model_validator(mode="after")
    def _knobs_act(self) -> Self:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, not {list(self.betas)}")
        if self.ahead is not None and self.ahead > self.max_staleness:
            raise ValueError(
                f"ahead = {self.ahead:g} is more than max_staleness = {self.max_staleness} lets be trained"
            )
        if self.evaluation is not None and self.tasks in self.evaluation.tasks:
            raise ValueError(f'evaluation.tasks has "{self.tasks}", which is trained on: measure with others')
        if self.precision == "bfloat16" and self.weights.dtype == "float32":
            raise ValueError('weights.dtype must be "bfloat16" where precision is: there are no finer weights')
        if self.summaries.mode == "off" and self.summaries.trigger:
            raise ValueError("summaries.trigger would not be used: the mode is off")
        if self.effort != EffortTable() and not self.rewards.get("effort_spent"):
            raise ValueError("effort would not count: give rewards.effort_spent a weight")
        if self.window and self.sampler.tokens < self.window:
            held = f"sampler.tokens = {self.sampler.tokens} does not hold one session"
            raise ValueError(f"{held}: give at least window = {self.window}, better that for each of in_flight")
        if self.window and self.budget.answer and self.budget.answer >= self.window:
            raise ValueError(f"budget.answer = {self.budget.answer} must be less than window = {self.window}")
        return self
