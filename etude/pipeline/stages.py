"""Run a recipe: its stages in order, in one run directory.

A stage is a function of the run, the recipe and a progress callback. It writes artefacts and metrics into the run and
returns the facts of its summary. Each imports its package when it starts, so that importing this module loads no
torch. A run can be interrupted anywhere: a resume skips finished stages and starts the unfinished one again.
"""

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from etude.data.settings import DEMONSTRATIONS
from etude.data.sources import sample_evenly, source_files
from etude.errors import InputError, Interrupted
from etude.files import files_digest
from etude.harness.profile import AgentProfile
from etude.model.config import PROFILE_FILE
from etude.recipe.recipe import Recipe
from etude.runs.loggers import attach_loggers
from etude.runs.run import Artefact, Parent, Run
from etude.system.progress import ProgressCallback, progress_bars, progress_line

Facts = dict[str, object]
StageFunction = Callable[[Run, Recipe, ProgressCallback], Facts]


def run_recipe(recipe: Recipe, out: Path, resume: bool = False, only: str | None = None) -> dict[str, dict[str, Any]]:
    """Run the stages that are not done yet, or one of them; return the facts of each. Progress goes to stderr."""
    if only is not None and only not in recipe.stages:
        raise InputError(f'the recipe has no stage "{only}"; its stages are {", ".join(recipe.stages)}')
    stages = recipe.stages if only is None else (only,)
    position, is_new = "", resume and not out.exists()
    try:
        with (
            Run.create_or_resume(out, recipe, resume=resume) as run,
            attach_loggers(run, recipe.loggers),
            progress_bars() as progress,
        ):
            if is_new:
                progress.console.print(f"{out}: there is no run to resume, so a new one starts")
            for stage in stages:
                if run.stage_done(stage):
                    progress.console.print(f"{stage}: done before, skipped")
                    continue
                position = f" in stage {stage}"
                with progress_line(stage, progress) as report:
                    facts = STAGES[stage](run, recipe, report)
                run.finish_stage(stage, **facts)
            return {stage: run.facts(stage) for stage in stages}
    except KeyboardInterrupt:
        raise Interrupted(f"stopped{position}; the same command with --resume continues") from None


def train_tokenizer(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
    """Train a vocabulary on the sources."""
    from etude.chat.tokenizer import train_tokenizer

    settings = recipe.tokenizer
    assert settings is not None  # the recipe checks that every stage it names has its table
    files = source_files(settings.sources)
    tokenizer = train_tokenizer(_texts(files, report), settings.vocab_size)
    parents = _text_parents(settings.sources)
    with run.artefact("tokenizer", kind="tokenizer", stage="tokenizer", parents=parents) as directory:
        tokenizer.save(directory)
    return {"files": len(files), "vocab_size": len(tokenizer)}


def initialize(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
    """Save random weights and the tokenizer as a Hugging Face directory."""
    import torch

    from etude import model as models
    from etude.chat.tokenizer import Tokenizer
    from etude.model.config import ModelConfig

    settings = recipe.init
    assert settings is not None
    origin: Artefact | Path = settings.tokenizer or run.find("tokenizer")
    tokenizer = Tokenizer.load(origin.path if isinstance(origin, Artefact) else origin)
    config = ModelConfig.from_hugging_face({**settings.config, "vocab_size": len(tokenizer)}, where="init.config")
    model = models.initialize(config, seed=recipe.seed, dtype=getattr(torch, settings.dtype))
    with run.checkpoint("init", 0, parents=[origin]) as directory:
        models.save(model, directory)
        tokenizer.save(directory)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def import_base(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
    """Save an open model as the first checkpoint of the run."""
    import torch

    from etude import model as models
    from etude.chat.tokenizer import CHAT_TEMPLATE, Tokenizer
    from etude.model.gguf import import_gguf

    settings = recipe.base
    assert settings is not None
    dtype, source = getattr(torch, settings.dtype), Path(settings.source)
    with run.checkpoint("base", 0, parents=[source] if source.is_dir() else []) as directory:
        if source.is_dir():
            models.save(models.load(source, dtype=dtype), directory)
            Tokenizer.load(source).save(directory)
            if (source / PROFILE_FILE).exists():
                shutil.copy(source / PROFILE_FILE, directory)
        else:
            import_gguf(settings.source, directory, dtype=dtype)
        if settings.chat_template == "chatml":
            tokenizer = Tokenizer.load(directory)
            tokenizer.chat_template = CHAT_TEMPLATE
            tokenizer.save(directory)
    return {"source": settings.source}


def make_task_sets(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
    """Make the task sets and their demonstrations."""
    from etude.tasks.stage import build_task_sets

    assert recipe.tasks is not None
    return build_task_sets(run, recipe.tasks, report)


def build_corpora(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
    """Build every corpus of the recipe, each an artefact of its own."""
    from etude.chat.tokenizer import Tokenizer
    from etude.data.corpus import CorpusOptions, build_corpus

    settings = recipe.corpus
    assert settings is not None
    origin: Artefact | Path = settings.tokenizer or _tokenizer_artefact(run)
    tokenizer = Tokenizer.load(origin.path if isinstance(origin, Artefact) else origin)
    done = {artefact.name for artefact in run.artefacts("corpus")}
    facts: Facts = {}
    for corpus in settings.build:
        name = f"corpus-{corpus.name}"
        if name not in done:
            given = corpus.model_dump(exclude={"name", "sources"}, exclude_none=True)
            options = CorpusOptions(**given, seed=recipe.seed)
            sources = [_source_path(run, source) for source in corpus.sources]
            with run.artefact(name, kind="corpus", stage="corpus", parents=[origin]) as directory:
                build_corpus(sources, tokenizer, directory, options, report)
        facts[corpus.name] = _corpus_facts(run, name)
    return facts


def evaluate_nll(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
    """Evaluate the negative log-likelihood of a codebase, in bits per byte."""
    from etude import model as models
    from etude.chat.tokenizer import Tokenizer
    from etude.evaluation.codebase_nll import codebase_nll

    settings = recipe.nll
    assert settings is not None
    directory = settings.model or run.find("checkpoint").path
    files = sample_evenly(source_files(settings.sources), settings.max_files)
    run.rewind("nll")
    score = codebase_nll(
        models.load(directory),
        Tokenizer.load(directory),
        files,
        window=settings.window,
        stride=settings.stride,
        progress=report,
    )
    facts: Facts = dataclasses.asdict(score)
    run.log("nll", 0, **facts)
    return facts


def training_stage(stage: str) -> StageFunction:
    """Return the training stage of that name; it imports torch when it starts."""

    def start(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
        from etude.train import stages

        # Demonstrations look like the sessions of the rl stage, if the recipe has one.
        profile = AgentProfile.of(recipe.rl, recipe.plugins).to_json() if stage == "sft" and recipe.rl else ""
        context = stages.StageContext(run, recipe.seed, report, recipe.mtp, profile)
        facts: Facts = getattr(stages, stage)(context, getattr(recipe, stage))
        return facts

    return start


def run_rl_stage(run: Run, recipe: Recipe, report: ProgressCallback) -> Facts:
    """Start the processes of reinforcement learning and orchestrate them from here."""
    from etude.rl.orchestrator import run_rl

    assert recipe.rl is not None
    return run_rl(run, recipe.rl, recipe.seed, report)


STAGES: dict[str, StageFunction] = {
    "tokenizer": train_tokenizer,
    "base": import_base,
    "init": initialize,
    "tasks": make_task_sets,
    "corpus": build_corpora,
    "pretrain": training_stage("pretrain"),
    "mtp": training_stage("mtp"),
    "extend": training_stage("extend"),
    "sft": training_stage("sft"),
    "rl": run_rl_stage,
    "nll": evaluate_nll,
}


def _tokenizer_artefact(run: Run) -> Artefact:
    """Return the trained tokenizer, or the base model that came with one."""
    found = [a for a in run.artefacts() if a.kind == "tokenizer" or (a.kind == "checkpoint" and a.stage == "base")]
    return found[-1]


def _source_path(run: Run, source: str) -> str:
    """Return where a source's documents are: demonstrations are an artefact of the run, others name themselves."""
    if not source.startswith(DEMONSTRATIONS):
        return source
    from etude.tasks.stage import demonstrations_file

    return str(demonstrations_file(run, source.removeprefix(DEMONSTRATIONS)))


def _corpus_facts(run: Run, name: str) -> dict[str, int]:
    from etude.data.shards import read_manifest

    corpus = next(artefact.path for artefact in run.artefacts("corpus") if artefact.name == name)
    splits = read_manifest(corpus)["splits"]
    return {split: entry["tokens"] for split, entry in splits.items() if entry["tokens"]}


def _texts(files: Sequence[Path], report: ProgressCallback) -> Iterator[str]:
    for done, file in enumerate(files, start=1):
        yield file.read_text(encoding="utf-8")
        report(done, len(files))


def _text_parents(sources: Sequence[str]) -> list[Parent]:
    """Return sources as parents: named as in the recipe, with one digest over the files of each."""
    files = {source: source_files([source]) for source in sources}
    return [Parent(source, files_digest((path.name, path) for path in files[source])) for source in sources]
