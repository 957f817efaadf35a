"""The stages that make the first checkpoint (`tokenizer`, `base`, `init`), and the stage `nll`, which scores code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from etude import model as models
from etude.chat.tokenizer import CHAT_TEMPLATE, Tokenizer, train_tokenizer
from etude.data.settings import TokenizerSettings
from etude.data.sources import sample_evenly, source_files
from etude.errors import InputError
from etude.evaluation.codebase_nll import codebase_nll
from etude.evaluation.settings import NllSettings
from etude.files import files_digest
from etude.model.checkpoint import SHARD_BYTES
from etude.model.config import ModelConfig
from etude.model.convert import convert_checkpoint
from etude.model.describe import count_parameters, find_config
from etude.model.gguf import gguf_config, import_gguf
from etude.model.known import KNOWN_MODELS
from etude.model.settings import BaseModelSettings, InitSettings
from etude.pipeline.memory import TORCH_BYTES, ProcessMemory, inference_memory, weights_bytes
from etude.pipeline.stage import PlanContext, RecipeInputs, Stage, StageModel, StagePlan, inspect_model, predict
from etude.pipeline.survey import survey_files
from etude.recipe.recipe import Recipe
from etude.runs.run import Artefact, Parent, Run
from etude.system.progress import ProgressCallback

GIVE_WEIGHTS = "to run, download the model and give its directory with --set base.source=DIR"
COPY_BYTES_PER_S = 100e6  # weights read, converted and written
VOCABULARY_BYTES_PER_S = 1e6  # a vocabulary is learnt from
CORE_OPERATIONS_PER_S = 1e10  # of a forward pass, on one core


class TokenizerStage(Stage[TokenizerSettings]):
    """Train a vocabulary on the sources."""

    def check(self, inputs: RecipeInputs) -> None:
        with inputs.problems_of("tokenizer.sources"):
            inputs.texts["tokenizer"] = survey_files(source_files(self.settings(inputs.recipe).sources))

    def plan(self, context: PlanContext) -> StagePlan:
        size, text = self.settings(context.recipe).vocab_size, context.inputs.texts["tokenizer"]
        line = f"learn {size:,} tokens from {text.files:,} files, {text.bytes / 1e6:,.1f} MB"
        time = predict(1 + text.bytes / VOCABULARY_BYTES_PER_S, "the size of the text")
        return StagePlan("tokenizer", (line,), time, disk=100 * size)

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        settings = self.settings(recipe)
        files = source_files(settings.sources)
        tokenizer = train_tokenizer(_texts(files, report), settings.vocab_size)
        parents = _text_parents(settings.sources)
        with run.artefact("tokenizer", kind="tokenizer", stage="tokenizer", parents=parents) as directory:
            tokenizer.save(directory)
        return {"files": len(files), "vocab_size": len(tokenizer)}


def _texts(files: Sequence[Path], report: ProgressCallback) -> Iterator[str]:
    for done, file in enumerate(files, start=1):
        yield file.read_text(encoding="utf-8")
        report(done, len(files))


def _text_parents(sources: Sequence[str]) -> list[Parent]:
    """Return sources as parents: named as in the recipe, with one digest over the files of each."""
    files = {source: source_files([source]) for source in sources}
    return [Parent(source, files_digest((path.name, path) for path in files[source])) for source in sources]


class BaseStage(Stage[BaseModelSettings]):
    """Save an open model as the first checkpoint of the run."""

    model_key = "base.source"

    def find_model(self, inputs: RecipeInputs) -> StageModel:
        settings = self.settings(inputs.recipe)
        directory = Path(settings.source)
        if settings.source in KNOWN_MODELS:
            return StageModel(find_config(settings.source))
        if not directory.is_dir():
            if directory.is_absolute() and not directory.exists():
                raise InputError(f"{directory} does not exist; name a model's directory, a .gguf file or a package")
            return StageModel(gguf_config(settings.source))
        model = inspect_model(directory)
        if settings.chat_template == "chatml" and model.tokenizer is not None:
            model.tokenizer.chat_template = CHAT_TEMPLATE
        return model

    def plan(self, context: PlanContext) -> StagePlan:
        settings = self.settings(context.recipe)
        known = settings.source in KNOWN_MODELS
        origin = f"the published config {settings.source}: {GIVE_WEIGHTS}" if known else f"from {settings.source}"
        plan = _plan_weights("base", context, settings.dtype, origin)
        if not known and not Path(settings.source).is_dir():
            return plan
        files = min(2 * SHARD_BYTES, plan.disk)  # of a directory, one file is read and one written at a time
        return dataclasses.replace(
            plan, memory=(ProcessMemory("model", "cpu", {"torch": TORCH_BYTES, "files": files}),)
        )

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        settings = self.settings(recipe)
        if settings.source in KNOWN_MODELS:
            raise InputError(f"base.source: {settings.source} is a published config without weights; {GIVE_WEIGHTS}")
        dtype, source = getattr(torch, settings.dtype), Path(settings.source)
        with run.checkpoint("base", 0, parents=[source] if source.is_dir() else []) as directory:
            if source.is_dir():
                convert_checkpoint(source, directory, dtype)
            else:
                import_gguf(settings.source, directory, dtype=dtype)
            if settings.chat_template == "chatml":
                tokenizer = Tokenizer.load(directory)
                tokenizer.chat_template = CHAT_TEMPLATE
                tokenizer.save(directory)
        return {"source": settings.source}


class InitStage(Stage[InitSettings]):
    """Save random weights and the tokenizer as a Hugging Face directory."""

    model_key = "init"

    def find_model(self, inputs: RecipeInputs) -> StageModel:
        settings, run, recipe = self.settings(inputs.recipe), inputs.run, inputs.recipe
        directory = settings.tokenizer
        if directory is None and run is not None and run.stage_done("tokenizer"):
            directory = run.find("tokenizer").path
        if directory is None:
            assert recipe.tokenizer is not None  # one of the two is given
            return StageModel(_config(settings, recipe.tokenizer.vocab_size))
        if not directory.is_dir():
            raise InputError(f"tokenizer {directory} does not exist; name the directory of a tokenizer")
        tokenizer = Tokenizer.load(directory)
        return StageModel(_config(settings, len(tokenizer)), tokenizer)

    def plan(self, context: PlanContext) -> StagePlan:
        return _plan_weights("init", context, self.settings(context.recipe).dtype, "with random weights")

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        settings = self.settings(recipe)
        origin: Artefact | Path = settings.tokenizer or run.find("tokenizer")
        tokenizer = Tokenizer.load(origin.path if isinstance(origin, Artefact) else origin)
        model = models.initialize(
            _config(settings, len(tokenizer)), seed=recipe.seed, dtype=getattr(torch, settings.dtype)
        )
        with run.checkpoint("init", 0, parents=[origin]) as directory:
            models.save(model, directory)
            tokenizer.save(directory)
        return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def _config(settings: InitSettings, vocab_size: int) -> ModelConfig:
    return ModelConfig.from_hugging_face({**settings.config, "vocab_size": vocab_size}, where="init.config")


def _plan_weights(stage: str, context: PlanContext, dtype: str, origin: str) -> StagePlan:
    config = context.inputs.models[stage].config
    size, parameters = weights_bytes(config, dtype), count_parameters(config)
    active = f", {parameters.active / 1e6:,.1f}M active" if parameters.active != parameters.total else ""
    line = f"a {config.family} model of {parameters.total / 1e6:,.1f}M parameters{active}, {origin}"
    time = predict(1 + size / COPY_BYTES_PER_S, "the size of the weights")
    return StagePlan(stage, (line,), time, (inference_memory(config, "cpu", dtype),), size)


class NllStage(Stage[NllSettings]):
    """Evaluate the negative log-likelihood of a codebase, in bits per byte."""

    def _files(self, recipe: Recipe) -> list[Path]:
        settings = self.settings(recipe)
        return list(sample_evenly(source_files(settings.sources), settings.max_files))

    def check(self, inputs: RecipeInputs) -> None:
        with inputs.problems_of("nll.sources"):
            inputs.texts["nll"] = survey_files(self._files(inputs.recipe), inputs.tokenizer)
        inputs.check_length("nll.window", self.settings(inputs.recipe).window, "nll")

    def plan(self, context: PlanContext) -> StagePlan:
        settings, text = self.settings(context.recipe), context.inputs.texts["nll"]
        config = context.inputs.models["nll"].config
        operations = text.tokens * settings.window / settings.stride * 2 * count_parameters(config).active
        line = f"score {text.files:,} files, {text.bytes / 1e6:,.1f} MB, in windows of {settings.window:,} tokens"
        time = predict(1 + operations / (CORE_OPERATIONS_PER_S * context.machine.cores), "the operations of the model")
        return StagePlan("nll", (line,), time, (inference_memory(config, "cpu", "float32"),))

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        settings = self.settings(recipe)
        directory = settings.model or run.find("checkpoint").path
        run.rewind("nll")
        score = codebase_nll(
            models.load(directory),
            Tokenizer.load(directory),
            self._files(recipe),
            window=settings.window,
            stride=settings.stride,
            progress=report,
        )
        facts = dataclasses.asdict(score)
        run.log("nll", 0, **facts)
        return facts


TOKENIZER, BASE, INIT, NLL = TokenizerStage("tokenizer"), BaseStage("base"), InitStage("init"), NllStage("nll")
