"""What a recipe names, as far as it is there now: models, tokenizers, text, tasks, devices, packages, pods.

Every stage that would run is looked at, and what is wrong is kept as a line under the key that names it, so that all of
it is told at once. What an earlier stage of the same run makes is taken for granted, as far as the recipe says what it
will be. Nothing here is loaded that is larger than a config or a tokenizer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
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
from etude.harness.tools.executor import exposed_tools
from etude.kernels import usable_device
from etude.model.config import ModelConfig, with_rope
from etude.model.gguf import gguf_config
from etude.model.mtp import MTP_FILE
from etude.pipeline.dry_run.texts import COMPRESSED, UNPACKED, Text, survey, text_of
from etude.pods.runtime.probe import ORDER, probe
from etude.recipe.recipe import Recipe, stage_settings
from etude.rewards.live_weights import check_weights
from etude.rl.settings import RlSettings
from etude.runs.run import Run
from etude.tasks.harbor import find_tasks, read_task
from etude.train.settings import ExtendSettings, HeldOutSettings, TrainingSettings
from etude.weights.object_store import ObjectStore


@dataclass(frozen=True)
class Model:
    """What a stage begins with."""

    config: ModelConfig
    tokenizer: Tokenizer | None = None  # None: not made yet, or inside a GGUF file
    layers: int = 0  # of multi-token prediction, trained beside it


@dataclass
class Found:
    """What there is."""

    problems: list[str] = field(default_factory=list)
    models: dict[str, Model] = field(default_factory=dict)  # that a stage begins with, by stage
    tokenizer: Tokenizer | None = None  # that this run's text is written with, if it is there already
    texts: dict[str, Text] = field(default_factory=dict)  # by the name of the corpus, or of the stage that reads
    corpora: dict[str, int] = field(default_factory=dict)  # tokens of those that are built
    tasks: dict[str, int] = field(default_factory=dict)  # sizes of sets, by name
    pods: str = ""  # the backend that works here

    @contextmanager
    def under(self, key: str) -> Iterator[None]:
        """What is wrong in here is wrong with this key."""
        try:
            yield
        except InputError as error:
            self.problems.append(f"{key}: {error}")


def look(recipe: Recipe, stages: Sequence[str], run: Run | None = None) -> Found:
    """Look at all that these stages of a recipe need; `run` is the one they would go on in."""
    found = Found()
    for tool in recipe.loggers:
        if find_spec(tool) is None:
            found.problems.append(f"track names {tool}, which is not installed; pip install {tool}, or leave it out")
    follow_models(recipe, run, found)
    for artefact in run.artefacts("tasks") if run is not None else ():
        found.tasks[artefact.name.removeprefix("tasks-")] = sum(1 for _ in find_tasks(artefact.path))
    for stage in recipe.stages:
        if stage not in stages:
            continue
        section: StageSettings = getattr(recipe, stage)
        if stage in ("tokenizer", "nll"):
            _look_at_files(stage, recipe, found)
        elif stage == "tasks":
            _look_at_tasks(recipe, found)
        elif stage == "corpus":
            _look_at_corpora(recipe, found)
        elif isinstance(section, TrainingSettings):
            _look_at_training(stage, section, recipe, found)
        elif isinstance(section, RlSettings):
            _look_at_rl(section, recipe, found)
    return found


# ------------------------------------------------------------------------------------------------ models


def follow_models(recipe: Recipe, run: Run | None, found: Found) -> None:
    """Which model each stage begins with, through the pipeline."""
    left: dict[str, Model] = {}  # by the stage that leaves it
    for stage in recipe.stages:
        model = None
        if run is not None and run.stage_done(stage) and (checkpoint := newest(run, stage)):
            with found.under(f"run {run.path}"):
                model = load_model(checkpoint)
        elif stage == "base":
            with found.under("base.source"):
                model = base_model(recipe)
        elif stage == "init":
            with found.under("init"):
                model = fresh_model(recipe, run)
        elif names := makers(stage):
            section = getattr(recipe, stage)
            if section.model is not None:
                with found.under(f"{stage}.model"):
                    model = load_model(section.model)
            else:
                model = next((left[name] for name in reversed(names) if name in left), None)
            if model is not None:
                with found.under(stage):
                    model = _changed(stage, model, recipe)
        if model is not None:
            found.models[stage] = left[stage] = model
    found.tokenizer = _tokenizer(recipe, run, found)


def makers(stage: str) -> list[str]:
    """The stages that leave the weights this one begins with, in the order of the pipeline."""
    key = stage_settings()[stage].model_fields.get("model")
    extra = key.json_schema_extra if key is not None else None
    return [str(name) for name in extra["made_by"]] if isinstance(extra, dict) else []  # type: ignore[union-attr]


def newest(run: Run, stage: str) -> Path | None:
    """The last checkpoint that a stage of this run left."""
    there = [artefact.path for artefact in run.artefacts("checkpoint") if artefact.stage == stage]
    return there[-1] if there else None


def _changed(stage: str, model: Model, recipe: Recipe) -> Model:
    """A model as the stage trains it: a longer context, layers beside it."""
    section = getattr(recipe, stage)
    if isinstance(section, ExtendSettings):
        config = with_rope(model.config, length=section.length, theta=section.rope_theta, scaling=section.rope_scaling)
        model = replace(model, config=config)
    if stage in ("mtp", "extend", "sft"):
        return replace(model, layers=recipe.mtp.layers if recipe.mtp else model.layers)
    return replace(model, layers=0)


def load_model(directory: Path) -> Model:
    """The model in a directory, without its weights."""
    if not directory.is_dir():
        raise InputError(f"{directory} does not exist; name a directory with a model")
    config = ModelConfig.load(directory)
    if not any(directory.glob("*.safetensors")):
        raise InputError(f"{directory} has a config.json but no weights (*.safetensors)")
    tokenizer = Tokenizer.load(directory)
    check_vocabulary(tokenizer, config.vocab_size, str(directory))
    return Model(config, tokenizer, _layers(directory / MTP_FILE))


def _layers(file: Path) -> int:
    """How many layers of multi-token prediction a file holds, if it is there."""
    if not file.exists():
        return 0
    try:
        with safe_open(file, "pt") as tensors:
            return int((tensors.metadata() or {}).get("layers", 1))
    except SafetensorError as error:
        raise InputError(f"{file}: not readable as multi-token-prediction layers ({error})") from None


def base_model(recipe: Recipe) -> Model:
    section = recipe.base
    assert section is not None
    directory = Path(section.source)
    if not directory.is_dir():
        if directory.is_absolute() and not directory.exists():
            raise InputError(f"{directory} does not exist; name a model's directory, a .gguf file or a package")
        return Model(gguf_config(section.source))
    model = load_model(directory)
    if section.chat_template == "chatml" and model.tokenizer is not None:
        model.tokenizer.chat_template = CHAT_TEMPLATE
    return model


def fresh_model(recipe: Recipe, run: Run | None) -> Model:
    section = recipe.init
    assert section is not None
    directory = section.tokenizer
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
    config = ModelConfig.from_hugging_face({**section.config, "vocab_size": size}, where="config")
    return Model(config, tokenizer)


def _tokenizer(recipe: Recipe, run: Run | None, found: Found) -> Tokenizer | None:
    """What corpora and sessions of this run are written with."""
    if recipe.corpus is not None and recipe.corpus.tokenizer is not None:
        with found.under("corpus.tokenizer"):
            return Tokenizer.load(recipe.corpus.tokenizer)
    if run is not None and run.stage_done("tokenizer"):
        return Tokenizer.load(run.find("tokenizer").path)
    return next((model.tokenizer for model in found.models.values()), None)


# ------------------------------------------------------------------------------------------------ text and tasks


def _look_at_files(stage: str, recipe: Recipe, found: Found) -> None:
    section = recipe.tokenizer if stage == "tokenizer" else recipe.nll
    assert section is not None
    with found.under(f"{stage}.sources"):
        files = source_files(section.sources)
        if recipe.nll is not None and stage == "nll":
            files = sample_evenly(files, recipe.nll.max_files)
        found.texts[stage] = text_of(files)
    if recipe.nll is not None and stage == "nll" and (model := found.models.get("nll")):
        _fits(found, "nll.window", recipe.nll.window, model)


def _look_at_tasks(recipe: Recipe, found: Found) -> None:
    assert recipe.tasks is not None
    for table in recipe.tasks.build:
        with found.under(f"tasks.build {table.name}"):
            if table.demonstrations and not {"tokenizer", "base", "init"} & set(recipe.stages):
                raise InputError("experts need a tokenizer: add one of the stages tokenizer, base and init")
            if table.demonstrations and found.tokenizer is not None:
                dialect_for(found.tokenizer)
            found.tasks[table.name] = table.count or _count_tasks(table.path)


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


def corpus_options(table: CorpusSettings, seed: int) -> CorpusOptions:
    return CorpusOptions(**table.model_dump(exclude={"name", "sources"}, exclude_none=True), seed=seed)


def _look_at_corpora(recipe: Recipe, found: Found) -> None:
    assert recipe.corpus is not None
    for table in recipe.corpus.build:
        with found.under(f"corpus.build {table.name}"):
            _look_at_corpus(table, corpus_options(table, recipe.seed), found)


def _look_at_corpus(table: CorpusSettings, options: CorpusOptions, found: Found) -> None:
    key, text = f"corpus.build {table.name}", Text()
    for source in table.sources:
        with found.under(key):
            if not source.startswith(DEMONSTRATIONS):
                text += _chats(source) if table.chat else survey(source, options.filters)
    for source in table.against:
        with found.under(f"{key}, against"):
            next(read_source(source), None)
    for pattern in table.held_out if text.repositories and not text.closed else ():
        if not any(fnmatchcase(name, pattern) for name in text.repositories):
            some = ", ".join(sorted(text.repositories)[:5])
            found.problems.append(f"{key}: held_out {pattern} is the name of no repository there; there are {some} ...")
    found.texts[table.name] = text


def _chats(source: str) -> Text:
    if next(read_conversations(source, READ_LIMITS), None) is None:
        raise InputError(f"source {source} holds no conversation")
    size = os.path.getsize(source)
    return Text(1, size * UNPACKED if source.endswith(COMPRESSED) else size, closed=True)


# ------------------------------------------------------------------------------------------------ training


def _look_at_training(stage: str, section: TrainingSettings, recipe: Recipe, found: Found) -> None:
    with found.under(f"{stage}.device"):
        usable_device(section.device)
    model = found.models.get(stage)
    if model is not None:
        _fits(found, f"{stage}.length", section.length, model)
    for part in section.mix:
        with found.under(f"{stage}.mix"):
            found.corpora[part.corpus] = _tokens(part.corpus, "train", stage == "sft", model, recipe)
    if (asked := section.held_out) is not None:
        if model is not None:
            _fits(found, f"{stage}.held_out.window", asked.window, model)
        with found.under(f"{stage}.held_out"):
            _look_at_held_out(asked, model, recipe)


def _fits(found: Found, key: str, length: int, model: Model) -> None:
    if length > model.config.max_length:
        found.problems.append(f"{key} {length:,} exceeds the {model.config.max_length:,} tokens this model reads")


def _tokens(name: str, split: str, chat: bool, model: Model | None, recipe: Recipe) -> int:
    """How many there are in a corpus; 0 of one that is not built yet."""
    if not os.path.isabs(name):
        assert recipe.corpus is not None  # the recipe checks that it builds what it names
        table = next(each for each in recipe.corpus.build if each.name == name)
        if chat and not table.chat:
            raise InputError(f"sft learns from conversations; corpus {name} has none: build it with chat = true")
        return 0
    if not os.path.isdir(name):
        raise InputError(f"corpus {name} does not exist; name a directory made by `etude data build`")
    shards = Shards.open(Path(name), split)
    if model is not None and model.tokenizer is not None and shards.tokenizer_digest != model.tokenizer.digest:
        raise InputError(f"corpus {name} was made with another tokenizer than the model's; build it again")
    if chat and not shards.has_mask:
        raise InputError(f"sft learns from conversations; corpus {name} has none: build it with chat = true")
    return shards.tokens


def _look_at_held_out(asked: HeldOutSettings, model: Model | None, recipe: Recipe) -> None:
    if os.path.isabs(asked.corpus):
        _tokens(asked.corpus, asked.split, False, model, recipe)
        chat = bool(read_manifest(Path(asked.corpus))["mask"])
    else:
        assert recipe.corpus is not None
        table = next(each for each in recipe.corpus.build if each.name == asked.corpus)
        chat = table.chat
        if not (table.held_out if asked.split == "held_out" else table.validation):
            raise InputError(f"corpus {asked.corpus} will have nothing in the split {asked.split}: set {asked.split}")
    if chat:
        raise InputError(f"{asked.corpus} is a corpus of chats; the measure is for plain text")


# ------------------------------------------------------------------------------------------- reinforcement learning


def _look_at_rl(section: RlSettings, recipe: Recipe, found: Found) -> None:
    for key, device in (("rl.device", section.device), ("rl.sampler.device", section.sampler.device)):
        with found.under(key):
            usable_device(device)
    _look_at_prompts(section, recipe, found)
    with found.under("rl"):
        check_weights(section.rewards, "rewards")
    with found.under("rl"):
        exposed_tools(section.tool_set)
    if section.weights.store:
        with found.under("rl.weights.store"):
            ObjectStore(section.weights.store)
    if section.estimator.reference != "start":
        with found.under("rl.estimator.reference"):
            load_model(Path(section.estimator.reference))
    if (model := found.models.get("rl")) is not None:
        _fits(found, "rl.window", section.window or 0, model)
        if model.tokenizer is not None:
            with found.under("rl.dialect"):
                dialect_for(model.tokenizer, None if section.dialect == "auto" else section.dialect)
    with found.under("rl"):
        found.pods = working_pods()


def _look_at_prompts(section: RlSettings, recipe: Recipe, found: Found) -> None:
    named = [("rl.tasks", section.tasks)]
    named += [("rl.evaluation.tasks", name) for name in (section.evaluation.tasks if section.evaluation else ())]
    built = {table.name: table for table in recipe.tasks.build} if recipe.tasks else {}
    for key, name in named:
        with found.under(key):
            if os.path.isabs(name):
                found.tasks[name] = _count_tasks(Path(name))
            elif name not in found.tasks:  # its stage does not run this time
                found.tasks[name] = built[name].count or _count_tasks(built[name].path)
    needed = section.steps * section.groups_per_step
    if (there := found.tasks.get(section.tasks)) is not None and there < needed:
        found.problems.append(
            f"rl.tasks has {there:,} prompts, but {section.steps} steps of {section.groups_per_step} groups take "
            f"{needed:,}, and a prompt is trained on once: give more tasks or fewer steps"
        )


def working_pods() -> str:
    """The strongest backend that can make a pod on this machine."""
    reasons = []
    for name in ORDER:
        verdict = asyncio.run(probe(name, compiled=False))
        if verdict.works:
            return name
        reasons.append(f"{name}: {verdict.reason}")
    raise InputError(f"no backend can isolate a pod on this machine ({'; '.join(reasons)})")
