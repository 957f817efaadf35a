"""A recipe, carried out: the stages it names, in order, in one run directory.

A stage is a function of the run, the recipe and a progress line. It leaves artefacts and metrics in the run
and returns the facts worth telling. Each imports its room when it starts, so that nothing here loads torch.
Interrupt it anywhere: stages that finished are skipped on resume, the one that did not starts again.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.data.sources import source_files, spread
from etude.errors import InputError, Interrupted
from etude.recipe.recipe import Recipe
from etude.recipe.sections import EXPERTS
from etude.runs.loggers import tracking
from etude.runs.run import Artefact, Parent, Run, files_digest
from etude.system.progress import Report, progress_bars, progress_line

Facts = dict[str, object]


def run_recipe(recipe: Recipe, out: Path, resume: bool = False, only: str | None = None) -> dict[str, dict[str, Any]]:
    """Run the stages that are not done yet, or one of them; return the facts of each. Progress goes to stderr."""
    if only is not None and only not in recipe.stages:
        raise InputError(f'the recipe has no stage "{only}"; its stages are {", ".join(recipe.stages)}')
    stages = recipe.stages if only is None else (only,)
    at, begins = "", resume and not out.exists()
    try:
        with (
            Run.create_or_resume(out, recipe, resume=resume) as run,
            tracking(run, recipe.track),
            progress_bars() as progress,
        ):
            if begins:
                progress.console.print(f"{out}: there is no run to go on with, so one begins")
            for stage in stages:
                if run.stage_done(stage):
                    progress.console.print(f"{stage}: done before, skipped")
                    continue
                at = f" in stage {stage}"
                with progress_line(stage, progress) as report:
                    facts = STAGES[stage](run, recipe, report)
                run.finish_stage(stage, **facts)
            return {stage: run.facts(stage) for stage in stages}
    except KeyboardInterrupt:
        raise Interrupted(f"stopped{at}; the same command with --resume goes on") from None


def train_tokenizer(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Learn a vocabulary from the sources."""
    from etude.chat.tokenizer import train_tokenizer

    section = recipe.tokenizer
    assert section is not None  # the recipe checks that every stage it names has its section
    files = source_files(section.sources)
    tokenizer = train_tokenizer(_texts(files, report), section.vocab_size)
    parents = _text_parents(section.sources)
    with run.artefact("tokenizer", kind="tokenizer", stage="tokenizer", parents=parents) as directory:
        tokenizer.save(directory)
    return {"files": len(files), "vocab_size": len(tokenizer)}


def initialize(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Random weights, saved beside the tokenizer as a directory others can load."""
    import torch

    from etude import model as models
    from etude.chat.tokenizer import Tokenizer
    from etude.model.config import ModelConfig

    section = recipe.init
    assert section is not None
    origin: Artefact | Path = section.tokenizer or run.find("tokenizer")
    tokenizer = Tokenizer.load(origin.path if isinstance(origin, Artefact) else origin)
    config = ModelConfig.from_hugging_face({**section.config, "vocab_size": len(tokenizer)}, where="init.config")
    model = models.initialize(config, seed=recipe.seed, dtype=getattr(torch, section.dtype))
    with run.checkpoint("init", 0, parents=[origin]) as directory:
        models.save(model, directory)
        tokenizer.save(directory)
    return {"parameters": sum(parameter.numel() for parameter in model.parameters())}


def import_base(run: Run, recipe: Recipe, report: Report) -> Facts:
    """An open model as the first checkpoint of the run."""
    import torch

    from etude import model as models
    from etude.chat.tokenizer import CHAT_TEMPLATE, Tokenizer
    from etude.model.gguf import import_gguf

    section = recipe.base
    assert section is not None
    dtype, source = getattr(torch, section.dtype), Path(section.source)
    with run.checkpoint("base", 0, parents=[source] if source.is_dir() else []) as directory:
        if source.is_dir():
            models.save(models.load(source, dtype=dtype), directory)
            Tokenizer.load(source).save(directory)
        else:
            import_gguf(section.source, directory, dtype=dtype)
        if section.chat_template == "chatml":
            tokenizer = Tokenizer.load(directory)
            tokenizer.chat_template = CHAT_TEMPLATE
            tokenizer.save(directory)
    return {"source": section.source}


def build_task_sets(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Sets of tasks, and expert sessions beside them."""
    from etude.tasks.stage import build_tasks

    return build_tasks(run, recipe, report)


def build_corpora(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Every corpus the recipe names, each an artefact of its own."""
    from etude.chat.tokenizer import Tokenizer
    from etude.data.corpus import CorpusOptions, build_corpus

    section = recipe.corpus
    assert section is not None
    origin: Artefact | Path = section.tokenizer or _tokenizer_of(run)
    tokenizer = Tokenizer.load(origin.path if isinstance(origin, Artefact) else origin)
    done = {artefact.name for artefact in run.artefacts("corpus")}
    facts: Facts = {}
    for table in section.build:
        name = f"corpus-{table.name}"
        if name not in done:
            options = CorpusOptions(
                **table.model_dump(exclude={"name", "sources"}, exclude_none=True), seed=recipe.seed
            )
            with run.artefact(name, kind="corpus", stage="corpus", parents=[origin]) as directory:
                build_corpus([_source(run, each) for each in table.sources], tokenizer, directory, options, report)
        facts[table.name] = _corpus_facts(run, name)
    return facts


def measure_nll(run: Run, recipe: Recipe, report: Report) -> Facts:
    """How many bits per byte the model needs for a codebase."""
    from etude import model as models
    from etude.chat.tokenizer import Tokenizer
    from etude.evaluation.codebase_nll import codebase_nll

    section = recipe.nll
    assert section is not None
    directory = section.model or run.find("checkpoint").path
    files = spread(source_files(section.sources), section.max_files)
    run.rewind("nll")
    score = codebase_nll(
        models.load(directory),
        Tokenizer.load(directory),
        files,
        window=section.window,
        stride=section.stride,
        progress=report,
    )
    facts: Facts = dataclasses.asdict(score)
    run.log("nll", 0, **facts)
    return facts


def training(stage: str) -> Callable[[Run, Recipe, Report], Facts]:
    """A stage of the training room, imported when it starts."""

    def start(run: Run, recipe: Recipe, report: Report) -> Facts:
        found: Facts = getattr(import_module("etude.train.stages"), stage)(run, recipe, report)
        return found

    return start


def reinforce(run: Run, recipe: Recipe, report: Report) -> Facts:
    """Reinforcement learning: its processes, and the orchestrator here."""
    from etude.rl.orchestrator import rl

    return rl(run, recipe, report)


STAGES: dict[str, Callable[[Run, Recipe, Report], Facts]] = {
    "tokenizer": train_tokenizer,
    "base": import_base,
    "init": initialize,
    "tasks": build_task_sets,
    "corpus": build_corpora,
    "pretrain": training("pretrain"),
    "mtp": training("mtp"),
    "extend": training("extend"),
    "sft": training("sft"),
    "rl": reinforce,
    "nll": measure_nll,
}


def _tokenizer_of(run: Run) -> Artefact:
    """What the tokenizer stage trained, or what came with the base model."""
    found = [a for a in run.artefacts() if a.kind == "tokenizer" or (a.kind == "checkpoint" and a.stage == "base")]
    return found[-1]


def _source(run: Run, source: str) -> str:
    """Where the documents are: experts are an artefact of the run, all others what they say."""
    if not source.startswith(EXPERTS):
        return source
    from etude.tasks.stage import experts_file

    return str(experts_file(run, source.removeprefix(EXPERTS)))


def _corpus_facts(run: Run, name: str) -> dict[str, int]:
    from etude.data.shards import read_manifest

    corpus = next(artefact.path for artefact in run.artefacts("corpus") if artefact.name == name)
    splits = read_manifest(corpus)["splits"]
    return {split: entry["tokens"] for split, entry in splits.items() if entry["tokens"]}


def _texts(files: Sequence[Path], report: Report) -> Iterator[str]:
    for done, file in enumerate(files, start=1):
        yield file.read_text(encoding="utf-8")
        report(done, len(files))


def _text_parents(sources: Sequence[str]) -> list[Parent]:
    """Sources as parents: named as the recipe names them, with one digest over the files of each."""
    files = {source: source_files([source]) for source in sources}
    return [Parent(source, files_digest((path.name, path) for path in files[source])) for source in sources]
