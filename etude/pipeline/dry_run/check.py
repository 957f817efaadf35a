"""Check that everything a recipe names exists and fits: models, tokenizers, text, tasks, devices, packages, pods.

All stages that would run are checked, and every problem is kept as a line under the key that names it, so that all are
reported at once. Outputs of earlier stages of the same run are assumed to be there, as far as the recipe determines
them. Nothing larger than a config or a tokenizer is loaded.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError, safe_open

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import CHAT_TEMPLATE, Tokenizer, check_vocabulary
from etude.config import StageSettings
from etude.data.conversations import read_conversations
from etude.data.corpus import CorpusOptions
from etude.data.documents import READ_LIMITS, read_source
from etude.data.settings import DEMONSTRATIONS, CorpusSettings
from etude.data.shards import Shards, read_manifest
from etude.data.sources import sample_evenly, source_files
from etude.errors import InputError
from etude.globs import Globs
from etude.kernels import usable_device
from etude.model.config import ModelConfig, with_rope
from etude.model.gguf import gguf_config
from etude.model.mtp import mtp_file
from etude.pipeline.dry_run.texts import COMPRESSED, UNPACKED_RATIO, SourceSurvey, survey_files, survey_source
from etude.pods.runtime.probe import ORDER, probe
from etude.recipe.recipe import Recipe, stage_settings
from etude.rl.settings import RlSettings
from etude.runs.run import Run
from etude.tasks.harbor import find_tasks, read_task
from etude.train.settings import ExtendSettings, HeldOutSettings, TrainingSettings
from etude.weights.object_store import ObjectStore


@dataclass(frozen=True)
class StageModel:
    """The model that a stage starts from, without its weights."""

    config: ModelConfig
    tokenizer: Tokenizer | None = None  # None: not made yet, or inside a GGUF file
    mtp_layers: int = 0  # layers of multi-token prediction that are trained with it


@dataclass
class RecipeInputs:
    """The inputs of a recipe as far as they exist, and the problems with them."""

    problems: list[str] = field(default_factory=list)
    models: dict[str, StageModel] = field(default_factory=dict)  # by the stage that starts from it
    tokenizer: Tokenizer | None = None  # of this run's corpora and sessions, if it exists already
    texts: dict[str, SourceSurvey] = field(default_factory=dict)  # by corpus, or by the stage that reads them
    corpora: dict[str, int] = field(default_factory=dict)  # tokens of corpora that are built
    tasks: dict[str, int] = field(default_factory=dict)  # sizes of task sets
    pods: str = ""  # the pod backend that works here

    @contextmanager
    def problems_of(self, key: str) -> Iterator[None]:
        """Record an InputError of the block as a problem of this key."""
        try:
            yield
        except InputError as error:
            self.problems.append(f"{key}: {error}")


def check_recipe(recipe: Recipe, stages: Sequence[str], run: Run | None = None) -> RecipeInputs:
    """Check everything that these stages of a recipe need; `run` is the run that they would continue."""
    inputs = RecipeInputs()
    for tool in recipe.loggers:
        if find_spec(tool) is None:
            line = f"loggers names {tool}, which is not installed; pip install {tool}, or leave it out"
            inputs.problems.append(line)
    resolve_models(recipe, run, inputs)
    for artefact in run.artefacts("tasks") if run is not None else ():
        inputs.tasks[artefact.name.removeprefix("tasks-")] = sum(1 for _ in find_tasks(artefact.path))
    for stage in recipe.stages:
        if stage not in stages:
            continue
        settings: StageSettings = getattr(recipe, stage)
        if stage in ("tokenizer", "nll"):
            _check_files(stage, recipe, inputs)
        elif stage == "tasks":
            _check_task_sets(recipe, inputs)
        elif stage == "corpus":
            _check_corpora(recipe, inputs)
        elif isinstance(settings, TrainingSettings):
            _check_training(stage, settings, recipe, inputs)
        elif isinstance(settings, RlSettings):
            _check_rl(settings, recipe, inputs)
    return inputs


# ------------------------------------------------------------------------------------------------ models


def resolve_models(recipe: Recipe, run: Run | None, inputs: RecipeInputs) -> None:
    """Find the model that each stage starts from, through the pipeline."""
    outputs: dict[str, StageModel] = {}  # by the stage that leaves it
    for stage in recipe.stages:
        model = None
        if run is not None and run.stage_done(stage) and (checkpoint := newest_checkpoint(run, stage)):
            with inputs.problems_of(f"run {run.path}"):
                model = inspect_model(checkpoint)
        elif stage == "base":
            with inputs.problems_of("base.source"):
                model = base_model(recipe)
        elif stage == "init":
            with inputs.problems_of("init"):
                model = initial_model(recipe, run)
        elif names := model_makers(stage):
            settings = getattr(recipe, stage)
            if settings.model is not None:
                with inputs.problems_of(f"{stage}.model"):
                    model = inspect_model(settings.model)
            else:
                model = next((outputs[name] for name in reversed(names) if name in outputs), None)
            if model is not None:
                with inputs.problems_of(stage):
                    model = _as_trained(stage, model, recipe)
        if model is not None:
            inputs.models[stage] = outputs[stage] = model
    inputs.tokenizer = _find_tokenizer(recipe, run, inputs)


def model_makers(stage: str) -> list[str]:
    """Return the stages whose weights this one may start from, in pipeline order."""
    key = stage_settings()[stage].model_fields.get("model")
    extra = key.json_schema_extra if key is not None else None
    return [str(name) for name in extra["made_by"]] if isinstance(extra, dict) else []  # type: ignore[union-attr]


def newest_checkpoint(run: Run, stage: str) -> Path | None:
    """Return the last checkpoint of a stage in this run."""
    found = [artefact.path for artefact in run.artefacts("checkpoint") if artefact.stage == stage]
    return found[-1] if found else None


def _as_trained(stage: str, model: StageModel, recipe: Recipe) -> StageModel:
    """Return the model as the stage trains it: with a longer context, or with multi-token prediction."""
    settings = getattr(recipe, stage)
    if isinstance(settings, ExtendSettings):
        config = with_rope(
            model.config, length=settings.length, theta=settings.rope_theta, scaling=settings.rope_scaling
        )
        model = replace(model, config=config)
    if stage in ("mtp", "extend", "sft"):
        return replace(model, mtp_layers=recipe.mtp.layers if recipe.mtp else model.mtp_layers)
    return replace(model, mtp_layers=0)


def inspect_model(directory: Path) -> StageModel:
    """Return the model in a directory, without its weights."""
    if not directory.is_dir():
        raise InputError(f"{directory} does not exist; name a directory with a model")
    config = ModelConfig.load(directory)
    if not any(directory.glob("*.safetensors")):
        raise InputError(f"{directory} has a config.json but no weights (*.safetensors)")
    tokenizer = Tokenizer.load(directory)
    check_vocabulary(tokenizer, config.vocab_size, str(directory))
    return StageModel(config, tokenizer, _mtp_layers(mtp_file(directory)))


def _mtp_layers(file: Path | None) -> int:
    """Return how many layers of multi-token prediction a file holds; 0 without a file."""
    if file is None:
        return 0
    try:
        with safe_open(file, "pt") as tensors:
            return int((tensors.metadata() or {}).get("layers", 1))
    except SafetensorError as error:
        raise InputError(f"{file}: not readable as multi-token-prediction layers ({error})") from None


def base_model(recipe: Recipe) -> StageModel:
    """Return the model that the stage `base` imports."""
    settings = recipe.base
    assert settings is not None
    directory = Path(settings.source)
    if not directory.is_dir():
        if directory.is_absolute() and not directory.exists():
            raise InputError(f"{directory} does not exist; name a model's directory, a .gguf file or a package")
        return StageModel(gguf_config(settings.source))
    model = inspect_model(directory)
    if settings.chat_template == "chatml" and model.tokenizer is not None:
        model.tokenizer.chat_template = CHAT_TEMPLATE
    return model


def initial_model(recipe: Recipe, run: Run | None) -> StageModel:
    """Return the model that the stage `init` makes."""
    settings = recipe.init
    assert settings is not None
    directory = settings.tokenizer
    if directory is None and run is not None and run.stage_done("tokenizer"):
        directory = run.find("tokenizer").path
    if directory is None:
        assert recipe.tokenizer is not None  # one of the two is given
        tokenizer, size = None, recipe.tokenizer.vocab_size
    else:
        if not directory.is_dir():
            raise InputError(f"tokenizer {directory} does not exist; name the directory of a tokenizer")
        tokenizer = Tokenizer.load(directory)
        size = len(tokenizer)
    config = ModelConfig.from_hugging_face({**settings.config, "vocab_size": size}, where="config")
    return StageModel(config, tokenizer)


def _find_tokenizer(recipe: Recipe, run: Run | None, inputs: RecipeInputs) -> Tokenizer | None:
    """Return the tokenizer of this run's corpora and sessions, if it exists."""
    if recipe.corpus is not None and recipe.corpus.tokenizer is not None:
        with inputs.problems_of("corpus.tokenizer"):
            return Tokenizer.load(recipe.corpus.tokenizer)
    if run is not None and run.stage_done("tokenizer"):
        return Tokenizer.load(run.find("tokenizer").path)
    return next((model.tokenizer for model in inputs.models.values()), None)


# ------------------------------------------------------------------------------------------------ text and tasks


def _check_files(stage: str, recipe: Recipe, inputs: RecipeInputs) -> None:
    settings = recipe.tokenizer if stage == "tokenizer" else recipe.nll
    assert settings is not None
    with inputs.problems_of(f"{stage}.sources"):
        files = source_files(settings.sources)
        if recipe.nll is not None and stage == "nll":
            files = sample_evenly(files, recipe.nll.max_files)
        inputs.texts[stage] = survey_files(files)
    if recipe.nll is not None and stage == "nll" and (model := inputs.models.get("nll")):
        _check_length(inputs, "nll.window", recipe.nll.window, model)


def _check_task_sets(recipe: Recipe, inputs: RecipeInputs) -> None:
    assert recipe.tasks is not None
    for task_set in recipe.tasks.build:
        with inputs.problems_of(f"tasks.build {task_set.name}"):
            if task_set.demonstrations and not {"tokenizer", "base", "init"} & set(recipe.stages):
                raise InputError("demonstrations need a tokenizer: add one of the stages tokenizer, base and init")
            if task_set.demonstrations and inputs.tokenizer is not None:
                dialect_for(inputs.tokenizer)
            inputs.tasks[task_set.name] = task_set.count or _count_tasks(task_set.path)


def _count_tasks(directory: Path | None) -> int:
    assert directory is not None
    if not directory.is_dir():
        raise InputError(f"{directory} does not exist; name a directory of tasks")
    tasks = list(find_tasks(directory))
    if not tasks:
        raise InputError(f"{directory} has no task (a directory with a task.toml)")
    for task in tasks:
        read_task(task)
    return len(tasks)


def corpus_options(corpus: CorpusSettings, seed: int) -> CorpusOptions:
    return CorpusOptions(**corpus.model_dump(exclude={"name", "sources"}, exclude_none=True), seed=seed)


def _check_corpora(recipe: Recipe, inputs: RecipeInputs) -> None:
    assert recipe.corpus is not None
    for corpus in recipe.corpus.build:
        with inputs.problems_of(f"corpus.build {corpus.name}"):
            _check_corpus(corpus, corpus_options(corpus, recipe.seed), inputs)


def _check_corpus(corpus: CorpusSettings, options: CorpusOptions, inputs: RecipeInputs) -> None:
    key, text = f"corpus.build {corpus.name}", SourceSurvey()
    for source in corpus.sources:
        with inputs.problems_of(key):
            if not source.startswith(DEMONSTRATIONS):
                text += _survey_chats(source) if corpus.chat else survey_source(source, options.filters)
    for source in corpus.against:
        with inputs.problems_of(f"{key}, against"):
            next(read_source(source), None)
    for pattern in corpus.held_out if text.repositories and not text.has_archives else ():
        if not any(map(Globs([pattern]).matches, text.repositories)):
            some = ", ".join(sorted(text.repositories)[:5])
            inputs.problems.append(f"{key}: held_out {pattern} matches no repository of the sources ({some} ...)")
    inputs.texts[corpus.name] = text


def _survey_chats(source: str) -> SourceSurvey:
    if next(read_conversations(source, READ_LIMITS), None) is None:
        raise InputError(f"source {source} holds no conversation")
    size = os.path.getsize(source)
    return SourceSurvey(1, size * UNPACKED_RATIO if source.endswith(COMPRESSED) else size, has_archives=True)


# ------------------------------------------------------------------------------------------------ training


def _check_training(stage: str, settings: TrainingSettings, recipe: Recipe, inputs: RecipeInputs) -> None:
    with inputs.problems_of(f"{stage}.device"):
        usable_device(settings.device)
    model = inputs.models.get(stage)
    if model is not None:
        _check_length(inputs, f"{stage}.length", settings.length, model)
    for part in settings.mix:
        with inputs.problems_of(f"{stage}.mix"):
            inputs.corpora[part.corpus] = _corpus_tokens(part.corpus, "train", stage == "sft", model, recipe)
    if (held_out := settings.held_out) is not None:
        if model is not None:
            _check_length(inputs, f"{stage}.held_out.window", held_out.window, model)
        with inputs.problems_of(f"{stage}.held_out"):
            _check_held_out(held_out, model, recipe)


def _check_length(inputs: RecipeInputs, key: str, length: int, model: StageModel) -> None:
    if length > model.config.max_length:
        inputs.problems.append(f"{key} {length:,} exceeds the model's context of {model.config.max_length:,} tokens")


def _corpus_tokens(name: str, split: str, chat: bool, model: StageModel | None, recipe: Recipe) -> int:
    """Return the number of tokens of a corpus; 0 if it is not built yet."""
    if not os.path.isabs(name):
        assert recipe.corpus is not None  # the recipe checks that it builds what it names
        corpus = next(each for each in recipe.corpus.build if each.name == name)
        if chat and not corpus.chat:
            raise InputError(f"sft trains on conversations; corpus {name} has none: build it with chat = true")
        return 0
    if not os.path.isdir(name):
        raise InputError(f"corpus {name} does not exist; name a directory made by `etude data build`")
    shards = Shards.open(Path(name), split)
    if model is not None and model.tokenizer is not None and shards.tokenizer_digest != model.tokenizer.digest:
        raise InputError(f"corpus {name} was made with another tokenizer than the model's; build it again")
    if chat and not shards.has_mask:
        raise InputError(f"sft trains on conversations; corpus {name} has none: build it with chat = true")
    return shards.tokens


def _check_held_out(held_out: HeldOutSettings, model: StageModel | None, recipe: Recipe) -> None:
    if os.path.isabs(held_out.corpus):
        _corpus_tokens(held_out.corpus, held_out.split, False, model, recipe)
        chat = bool(read_manifest(Path(held_out.corpus))["mask"])
    else:
        assert recipe.corpus is not None
        corpus = next(each for each in recipe.corpus.build if each.name == held_out.corpus)
        chat = corpus.chat
        if not (corpus.held_out if held_out.split == "held_out" else corpus.validation):
            raise InputError(
                f"corpus {held_out.corpus} will have nothing in the split {held_out.split}: set {held_out.split}"
            )
    if chat:
        raise InputError(f"{held_out.corpus} is a corpus of conversations; the held-out loss needs plain text")


# ------------------------------------------------------------------------------------------- reinforcement learning


def _check_rl(settings: RlSettings, recipe: Recipe, inputs: RecipeInputs) -> None:
    for key, device in (("rl.device", settings.device), ("rl.sampler.device", settings.sampler.device)):
        with inputs.problems_of(key):
            usable_device(device)
    _check_prompts(settings, recipe, inputs)
    if settings.weights.store:
        with inputs.problems_of("rl.weights.store"):
            ObjectStore(settings.weights.store)
    if settings.estimator.reference != "start":
        with inputs.problems_of("rl.estimator.reference"):
            inspect_model(Path(settings.estimator.reference))
    if (model := inputs.models.get("rl")) is not None:
        _check_length(inputs, "rl.window", settings.window or 0, model)
        if model.tokenizer is not None:
            with inputs.problems_of("rl.dialect"):
                dialect_for(model.tokenizer, settings.dialect)
    with inputs.problems_of("rl"):
        inputs.pods = working_pod_backend()


def _check_prompts(settings: RlSettings, recipe: Recipe, inputs: RecipeInputs) -> None:
    named = [("rl.tasks", settings.tasks)]
    named += [("rl.evaluation.tasks", name) for name in (settings.evaluation.tasks if settings.evaluation else ())]
    built = {task_set.name: task_set for task_set in recipe.tasks.build} if recipe.tasks else {}
    for key, name in named:
        with inputs.problems_of(key):
            if os.path.isabs(name):
                inputs.tasks[name] = _count_tasks(Path(name))
            elif name not in inputs.tasks:  # the stage that makes it does not run this time
                inputs.tasks[name] = built[name].count or _count_tasks(built[name].path)
    needed = settings.steps * settings.groups_per_step
    if (available := inputs.tasks.get(settings.tasks)) is not None and available < needed:
        inputs.problems.append(
            f"rl.tasks has {available:,} prompts, but {settings.steps} steps of {settings.groups_per_step} groups take "
            f"{needed:,}, and a prompt is trained on once: give more tasks or fewer steps"
        )


def working_pod_backend() -> str:
    """Return the strongest backend that can make a pod on this machine."""
    reasons = []
    for name in ORDER:
        verdict = asyncio.run(probe(name))
        if verdict.works:
            return name
        reasons.append(f"{name}: {verdict.reason}")
    raise InputError(f"no backend can isolate a pod on this machine ({'; '.join(reasons)})")
