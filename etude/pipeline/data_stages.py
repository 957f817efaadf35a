"""The stages that make what models are trained on: `tasks` and `corpus`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from etude.chat.dialects import dialect_for
from etude.chat.tokenizer import Tokenizer
from etude.data import worker_pool
from etude.data.corpus import CorpusOptions, build_corpus
from etude.data.documents import read_source
from etude.data.settings import DEMONSTRATIONS, CorporaSettings, CorpusSettings, sessions_file
from etude.data.shards import read_manifest
from etude.errors import InputError
from etude.files import content_digest
from etude.globs import Globs
from etude.pipeline.stage import Facts, PlanContext, RecipeInputs, Stage, StagePlan, predict
from etude.pipeline.survey import SourceSurvey, survey_chats, survey_source
from etude.recipe.recipe import Recipe
from etude.rl.orchestrator import task_directory
from etude.rollouts.settings import EvaluationSettings
from etude.runs.run import Artefact, Run
from etude.system.cores import usable_cores
from etude.system.progress import ProgressCallback
from etude.tasks.harbor import find_tasks, read_task
from etude.tasks.settings import TaskSetSettings, TaskSetsSettings
from etude.tasks.stage import build_task_sets, demonstrations_file, run_answers

TASK_BYTES, DEMONSTRATION_BYTES = 85_000, 2_000  # on disk: a nano task is a dozen small files
DEMONSTRATION_TOKENS = 460  # of a session on nano tasks
TASK_S, DEMONSTRATION_S, RENDERING_S = 0.02, 0.03, 0.003  # to make one, and to render a demonstration in a corpus
CORPUS_BYTES_PER_S = 1e6  # filtered, deduplicated and encoded by one process


class TasksStage(Stage[TaskSetsSettings]):
    """Make the task sets and their demonstrations."""

    def check(self, inputs: RecipeInputs) -> None:
        for task_set in self.settings(inputs.recipe).build:
            with inputs.problems_of(f"tasks.build {task_set.name}"):
                if task_set.demonstrations and not {"tokenizer", "base", "init"} & set(inputs.recipe.stages):
                    raise InputError("demonstrations need a tokenizer: add one of the stages tokenizer, base and init")
                if task_set.demonstrations and inputs.tokenizer is not None:
                    dialect_for(inputs.tokenizer)
                inputs.tasks[task_set.name] = task_count(task_set)

    def plan(self, context: PlanContext) -> StagePlan:
        lines, seconds, disk = [], 0.0, 0
        for task_set in self.settings(context.recipe).build:
            count = context.inputs.tasks[task_set.name]
            made = context.has_artefact(f"tasks-{task_set.name}") and (
                not task_set.demonstrations or context.has_artefact(f"demonstrations-{task_set.name}")
            )
            origin = f"from {task_set.path}" if task_set.path else f"made by {task_set.source}, {task_set.split}"
            extra = f"; {task_set.demonstrations:,} demonstrations on other tasks" if task_set.demonstrations else ""
            lines.append(f"{task_set.name}: {count:,} tasks {origin}{extra}{' (already made)' if made else ''}")
            if not made:
                seconds += count * TASK_S + task_set.demonstrations * DEMONSTRATION_S
                disk += count * TASK_BYTES + task_set.demonstrations * DEMONSTRATION_BYTES
        return StagePlan("tasks", tuple(lines), predict(seconds, "the number of tasks"), disk=disk)

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        sets = self.settings(recipe).for_run_seed(recipe.seed)
        return build_task_sets(run, sets, report, measured_sets(recipe))

    def summarize(self, facts: Facts) -> str:
        sets = [f"{name} {counts['tasks']:,}" for name, counts in facts.items()]
        demonstrations = sum(counts.get("demonstrations", 0) for counts in facts.values())
        return ", ".join(sets) + (f"; {demonstrations:,} demonstrations" if demonstrations else "")


def measured_sets(recipe: Recipe) -> set[str]:
    """Return the task sets that models are measured on: those that evaluations name, and other splits than train."""
    named = [name for _, name in recipe.evaluation.measured()] if recipe.evaluation else []
    return {*named, *(each.name for each in (recipe.tasks.build if recipe.tasks else ()) if each.split != "train")}


def task_count(task_set: TaskSetSettings) -> int:
    """Return the size of a task set: the count to generate, or the tasks in its directory."""
    return task_set.count or len(task_directories(task_set.path or Path()))


def task_directories(directory: Path) -> list[Path]:
    """Return the tasks in a directory, of which there is at least one and all can be read."""
    if not directory.is_dir():
        raise InputError(f"{directory} does not exist; name a directory of tasks")
    tasks = list(find_tasks(directory))
    if not tasks:
        raise InputError(f"{directory} has no task (a directory with a task.toml)")
    for task in tasks:
        read_task(task)
    return tasks


def fix_task_sets(run: Run, settings: EvaluationSettings | None) -> None:
    """Record the digest of every measured task set before training; InputError if one has changed since.

    From then on the table `[evaluation]` cannot change either, because its stage counts as started.
    """
    if settings is None:
        return
    made = {artefact.path: artefact.digest for artefact in run.artefacts("tasks")}
    sets = settings.task_sets() | {each.name: each.tasks for each in settings.benchmarks}
    directories = {key: task_directory(run, name, "evaluation") for key, name in sets.items()}
    digests = {key: made.get(path) or content_digest(path) for key, path in directories.items()}
    recorded = run.facts("evaluation").get("digests", digests)
    for key, digest in digests.items():
        if recorded.get(key, digest) != digest:
            raise InputError(f"evaluation: the task set {key} ({directories[key]}) has changed since training began")
    if run.facts("evaluation").get("digests") != digests:
        run.save_facts("evaluation", digests=digests)


class CorpusStage(Stage[CorporaSettings]):
    """Build every corpus of the recipe, each an artefact of its own."""

    def check(self, inputs: RecipeInputs) -> None:
        for corpus in self.settings(inputs.recipe).build:
            key, text = f"corpus.build {corpus.name}", SourceSurvey()
            with inputs.problems_of(key):
                options = corpus_options(corpus, inputs.recipe.seed)
            for source in corpus.sources:
                with inputs.problems_of(key):
                    if not source.startswith(DEMONSTRATIONS):
                        read = partial(survey_source, filters=options.filters, tokenizer=inputs.tokenizer)
                        text += survey_chats(sessions_file(source)) if corpus.chat else read(source)
            for source in corpus.against:
                with inputs.problems_of(f"{key}, against"):
                    next(read_source(source), None)
            for pattern in corpus.held_out if text.repositories and not text.has_archives else ():
                if not any(map(Globs([pattern]).matches, text.repositories)):
                    some = ", ".join(sorted(text.repositories)[:5])
                    line = f"{key}: held_out {pattern} matches no repository of the sources ({some} ...)"
                    inputs.problems.append(line)
            inputs.texts[corpus.name] = text

    def plan(self, context: PlanContext) -> StagePlan:
        lines, seconds, disk = [], 0.0, 0.0
        sets = {each.name: each for each in context.recipe.tasks.build} if context.recipe.tasks else {}
        speedup = 1.5 * min(worker_pool.MAX_WORKERS, usable_cores())  # of workers, which cache words (docs/data.md)
        for corpus in self.settings(context.recipe).build:
            made, text = context.has_artefact(f"corpus-{corpus.name}"), context.inputs.texts[corpus.name]
            shown = [
                source.removeprefix(DEMONSTRATIONS) for source in corpus.sources if source.startswith(DEMONSTRATIONS)
            ]
            parts = [f"{text.files:,} files, {text.bytes / 1e6:,.1f} MB"] if text.files else []
            parts += [f"{sets[name].demonstrations:,} demonstrations of {name}" for name in shown]
            demonstrations = sum(sets[name].demonstrations for name in shown)
            tokens = text.tokens + demonstrations * DEMONSTRATION_TOKENS
            context.inputs.corpora[corpus.name] = round(tokens)
            words = f"{' and '.join(parts)}, about {tokens / 1e6:,.2f}M tokens{' (already made)' if made else ''}"
            lines.append(f"{corpus.name}: {words}")
            if not made:
                shared = max(0, text.bytes - worker_pool.IN_PROCESS_BYTES)  # left to worker processes, one per core
                alone = text.bytes - shared + shared / speedup
                seconds += 1 + alone / CORPUS_BYTES_PER_S + demonstrations * RENDERING_S
                disk += tokens * (5 if corpus.chat else 4) + text.bytes  # the texts are kept while a corpus is built
        return StagePlan("corpus", tuple(lines), predict(seconds, "the size of the text"), disk=round(disk))

    def run(self, run: Run, recipe: Recipe, report: ProgressCallback) -> dict[str, Any]:
        settings = self.settings(recipe)
        origin: Artefact | Path = settings.tokenizer or _tokenizer_artefact(run)
        tokenizer = Tokenizer.load(origin.path if isinstance(origin, Artefact) else origin)
        done = {artefact.name for artefact in run.artefacts("corpus")}
        for corpus in settings.build:
            name = f"corpus-{corpus.name}"
            if name not in done:
                sources = [_source_path(run, source) for source in corpus.sources]
                with run.artefact(name, kind="corpus", stage="corpus", parents=[origin]) as directory:
                    options = corpus_options(corpus, recipe.seed, run_answers(run, measured_sets(recipe)).digests)
                    build_corpus(sources, tokenizer, directory, options, report)
        return {corpus.name: _corpus_facts(run, f"corpus-{corpus.name}") for corpus in settings.build}

    def summarize(self, facts: Facts) -> str:
        def one(name: str, tokens: Facts) -> str:
            held_out = f", {tokens['held_out']:,} held out" if tokens.get("held_out") else ""
            return f"{name} {tokens.get('train', 0):,} tokens{held_out}"

        return "; ".join(one(name, tokens) for name, tokens in facts.items())


def corpus_options(corpus: CorpusSettings, seed: int, answers: tuple[tuple[str, ...], ...] = ()) -> CorpusOptions:
    """Return the options of a corpus; documents with one of the answers of measured tasks are removed."""
    given = corpus.model_dump(exclude={"name", "sources"}, exclude_none=True)
    return CorpusOptions(**given, seed=seed, answers=answers)


def _tokenizer_artefact(run: Run) -> Artefact:
    """Return the trained tokenizer, or the base model that came with one."""
    found = [a for a in run.artefacts() if a.kind == "tokenizer" or (a.kind == "checkpoint" and a.stage == "base")]
    return found[-1]


def _source_path(run: Run, source: str) -> str:
    """Return where a source's documents are: demonstrations are an artefact of the run, others name themselves."""
    if not source.startswith(DEMONSTRATIONS):
        return sessions_file(source)
    return str(demonstrations_file(run, source.removeprefix(DEMONSTRATIONS)))


def _corpus_facts(run: Run, name: str) -> dict[str, int]:
    corpus = next(artefact.path for artefact in run.artefacts("corpus") if artefact.name == name)
    splits = read_manifest(corpus)["splits"]
    return {split: entry["tokens"] for split, entry in splits.items() if entry["tokens"]}


TASKS, CORPUS = TasksStage("tasks"), CorpusStage("corpus")
