"""The contract of a stage, which is described in one place: its checks, its plan, its work and its summary.

A dry run finds the model that each stage starts from (`find_model`), checks all stages (`check`), and then plans each
(`plan`); it writes nothing. A run calls `run`, and prints `summarize` of the facts that it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.cluster.cluster import ClusterSize
from etude.config import StageSettings
from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.config import ModelConfig
from etude.model.mtp import count_mtp_layers
from etude.pipeline.measure import FIRST_TOKENS, TimeEstimate
from etude.pipeline.memory import ProcessMemory, tokens_that_fit
from etude.pipeline.survey import SourceSurvey
from etude.recipe.recipe import Recipe, stage_settings
from etude.rl.settings import RlSettings
from etude.runs.run import Run
from etude.system.progress import ProgressCallback
from etude.train.settings import TrainingSettings

Facts = Mapping[str, Any]
S = TypeVar("S", bound=StageSettings)


@dataclass(frozen=True)
class StageModel:
    """The model that a stage starts from, without its weights."""

    config: ModelConfig
    tokenizer: Tokenizer | None = None  # None: not made yet, or inside a GGUF file
    mtp_layers: int = 0  # layers of multi-token prediction that are trained with it
    directory: Path | None = None  # with its weights, or with those it will be trained from


@dataclass
class RecipeInputs:
    """The inputs of a recipe as far as they exist, and the problems with them."""

    recipe: Recipe
    run: Run | None = None  # that the recipe would continue
    problems: list[str] = field(default_factory=list)
    models: dict[str, StageModel] = field(default_factory=dict)  # by the stage that starts from it
    tokenizer: Tokenizer | None = None  # of this run's corpora and sessions, if it exists already
    texts: dict[str, SourceSurvey] = field(default_factory=dict)  # by corpus, or by the stage that reads them
    corpora: dict[str, int] = field(default_factory=dict)  # tokens of corpora that are built
    tasks: dict[str, int] = field(default_factory=dict)  # sizes of task sets
    pods: str = ""  # the pods that this machine can make
    cluster: ClusterSize | None = None  # where services run; None: this machine

    @contextmanager
    def problems_of(self, key: str) -> Iterator[None]:
        """Record an InputError of the block as a problem of this key."""
        try:
            yield
        except InputError as error:
            self.problems.append(f"{key}: {error}")

    def check_length(self, key: str, length: int, stage: str) -> None:
        """Record a problem if the stage's model has a shorter context."""
        model = self.models.get(stage)
        if model is not None and length > model.config.max_length:
            line = f"{key} {length:,} exceeds the model's context of {model.config.max_length:,} tokens"
            self.problems.append(line)


@dataclass(frozen=True)
class StagePlan:
    """What a stage would do, how long it would take, and with how much memory and disk."""

    stage: str
    does: tuple[str, ...] = ()
    time: TimeEstimate | None = None  # None: it cannot be estimated
    memory: tuple[ProcessMemory, ...] = ()  # of all processes that run at once
    disk: int = 0
    launches: tuple[str, ...] = ()
    cluster: ClusterSize | None = None  # where they are launched; None: on this machine
    warnings: tuple[str, ...] = ()
    done: bool = False


def planned_device(name: str, cluster: ClusterSize | None = None) -> str:
    """Return the device that a plan is for. "cuda" is a plan for a GPU, also where this machine has none."""
    if cluster is not None and name == "auto":
        return "cuda" if cluster.gpus else "cpu"
    return name if name == "cuda" else str(usable_device(name))


def planned_gpus(recipe: Recipe) -> int:
    """Return how many GPUs a plan is for: those of this machine or, without any, as many as a stage has processes."""
    tables = (getattr(recipe, name) for name in recipe.stages)
    wanted = [table.parallel.processes for table in tables if isinstance(table, TrainingSettings | RlSettings)]
    return torch.cuda.device_count() or max(wanted, default=1)


def predict(seconds: float, basis: str) -> TimeEstimate:
    """Return an estimate that nothing was measured for."""
    return TimeEstimate(seconds, f"predicted from {basis}")


@dataclass(frozen=True)
class FreeResources:
    """The free resources of this machine now."""

    cores: float
    memory: dict[str, int]  # bytes by device
    names: dict[str, str]  # of the GPUs
    disk: int

    def available(self, device: str, default: int) -> int:
        """Return the free bytes of a device; `default` if it is not known."""
        return self.memory.get("cuda:0" if device == "cuda" else device, default)


@dataclass
class PlanContext:
    """What a plan is made from."""

    inputs: RecipeInputs
    machine: FreeResources
    budget: float  # seconds of measuring per stage
    session_s: float | None = None  # seconds of one session alone, if the plan of a stage has measured it

    @property
    def recipe(self) -> Recipe:
        return self.inputs.recipe

    def has_device(self, device: str) -> bool:
        """Return whether this machine has the device of a plan, or its first one."""
        return ("cuda:0" if device == "cuda" else device) in self.machine.memory

    def measurable_tokens(self, memory: ProcessMemory, tokens: int) -> int | None:
        """Return how many of a trainer's tokens can be measured here; None if not even a few fit into memory."""
        if not self.has_device(memory.device):
            return None
        fitting = tokens_that_fit(memory, self.machine.available(memory.device, memory.total), tokens)
        return fitting if fitting >= min(tokens, FIRST_TOKENS) else None

    def has_artefact(self, name: str) -> bool:
        """Return whether an interrupted stage has already made this artefact."""
        return self.inputs.run is not None and any(each.name == name for each in self.inputs.run.artefacts())


class Stage(Generic[S]):
    """One stage of the pipeline; subclasses say what it needs, does and reports."""

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def model_key(self) -> str:
        """The key that an error of `find_model` is reported under."""
        return f"{self.name}.model"

    def settings(self, recipe: Recipe) -> S:
        """Return the stage's table; the recipe checks that every stage it names has one."""
        table: S = getattr(recipe, self.name)
        return table

    def model_makers(self) -> list[str]:
        """Return the stages whose weights this one may start from, in pipeline order."""
        key = stage_settings()[self.name].model_fields.get("model")
        extra = key.json_schema_extra if key is not None else None
        return [str(name) for name in extra["made_by"]] if isinstance(extra, dict) else []  # type: ignore[union-attr]

    def find_model(self, inputs: RecipeInputs) -> StageModel | None:
        """Return the model that the stage trains or uses; None if it has none or that cannot be known yet."""
        makers = self.model_makers()
        directory: Path | None = getattr(self.settings(inputs.recipe), "model", None)
        if makers and directory is not None:
            return inspect_model(directory)
        return next((inputs.models[name] for name in reversed(makers) if name in inputs.models), None)

    def check(self, inputs: RecipeInputs) -> None:
        """Find every problem with the inputs of the stage, without loading anything larger than a tokenizer."""

    def needed_artefacts(self, recipe: Recipe) -> list[tuple[str, str]]:
        """Return kind and name of what the stage reads from its run; names that are paths are read from there."""
        return []

    def plan(self, context: PlanContext) -> StagePlan:
        """Estimate the stage. Rates are measured where that takes a moment, and otherwise labelled as predicted."""
        raise NotImplementedError

    def notices(self, recipe: Recipe) -> list[str]:
        """Return lines that a run prints before the stage: what is weaker on this machine than elsewhere."""
        return []

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        """Do the work of the stage: write artefacts and metrics into the run, and return the facts of its summary."""
        raise NotImplementedError

    def summarize(self, facts: Facts) -> str:
        """Return the facts in one or a few lines for people; programs use the facts themselves (`--json`)."""
        return list_facts(facts)


def list_facts(facts: Facts) -> str:
    """Return every fact with its name."""
    return ", ".join(f"{name} {_show_fact(value)}" for name, value in facts.items())


def _show_fact(value: object) -> str:
    if isinstance(value, dict):
        return f"({list_facts(value)})"
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def inspect_model(directory: Path) -> StageModel:
    """Return the model in a directory, without its weights."""
    if not directory.is_dir():
        raise InputError(f"{directory} does not exist; name a directory with a model")
    config = ModelConfig.load(directory)
    if not any(directory.glob("*.safetensors")):
        raise InputError(f"{directory} has a config.json but no weights (*.safetensors)")
    tokenizer = Tokenizer.load(directory)
    check_vocabulary(tokenizer, config.vocab_size, str(directory))
    return StageModel(config, tokenizer, count_mtp_layers(directory), directory)
