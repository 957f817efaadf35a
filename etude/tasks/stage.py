"""The `tasks` stage of a recipe: sets of tasks, and expert sessions to learn the format from.

A set is an artefact `tasks-NAME` of the run, a directory of task directories; its experts, where some are wanted, are
`experts-NAME`, one file of conversations that `[[corpus.build]]` reads as `experts:NAME`. Experts work on other tasks
than those of the set, so that nothing of reinforcement learning is known before.
"""

import asyncio
import json
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

from etude.chat.dialects import dialect_for
from etude.chat.dialects.dialect import Dialect
from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.recipe.recipe import Recipe
from etude.recipe.sections import TaskBuild
from etude.runs.run import Artefact, Run
from etude.system.progress import Report
from etude.tasks.harbor import find_tasks, read_task
from etude_nano.demonstrator import manner_of, read_files
from etude_nano.simulated_sessions import rehearse
from etude_nano.source import generate_nano, nano_tasks, text_digest

EXPERTS = "experts.jsonl"
OTHERS = 1_000_000_000  # added to a set's seed: where its experts' tasks begin


def build_tasks(run: Run, recipe: Recipe, report: Report) -> dict[str, object]:
    """Every set that the recipe names; those that are there from an interrupted run stay."""
    section = recipe.tasks
    assert section is not None  # the recipe checks that every stage it names has its section
    done = {artefact.name for artefact in run.artefacts()}
    facts: dict[str, object] = {}
    for table in section.build:
        name = f"tasks-{table.name}"
        if name not in done:
            parents = [table.path] if table.path else []
            report(0, table.count or 1, f"tasks of {table.name}")
            with run.artefact(name, kind="tasks", stage="tasks", parents=parents) as directory:
                _fill(directory, table)
        found = next(artefact.path for artefact in run.artefacts("tasks") if artefact.name == name)
        facts[table.name] = {"tasks": sum(1 for _ in find_tasks(found))}
        if table.experts:
            origin = _tokenizer_of(run)
            experts = f"experts-{table.name}"
            if experts not in done:
                with run.artefact(experts, kind="experts", stage="tasks", parents=[origin]) as directory:
                    dialect = dialect_for(Tokenizer.load(origin.path))
                    asyncio.run(_write_experts(directory / EXPERTS, found, table, dialect, report))
            facts[table.name] = {**facts[table.name], "experts": table.experts}  # type: ignore[dict-item]
    return facts


def experts_file(run: Run, name: str) -> Path:
    """The expert sessions beside a set of this run."""
    for artefact in run.artefacts("experts"):
        if artefact.name == f"experts-{name}":
            return artefact.path / EXPERTS
    raise InputError(f"this run has no experts:{name}; give the set {name} in [[tasks.build]] some experts")


def _fill(directory: Path, table: TaskBuild) -> None:
    """Make a set, or take over one that is there, after a look at each of its tasks."""
    if table.path is None:
        assert table.count is not None
        directory.rmdir()
        generate_nano(directory, table.count, table.split, table.seed, table.difficulties)
        return
    tasks = list(find_tasks(table.path))
    if not tasks:
        raise InputError(f"tasks.build {table.name}: {table.path} has no task (a directory with a task.toml)")
    for task in tasks:
        read_task(task)
    shutil.copytree(table.path, directory, dirs_exist_ok=True, symlinks=True)


async def _write_experts(file: Path, tasks: Path, table: TaskBuild, dialect: Dialect, report: Report) -> None:
    """Sessions of experts in tasks like those of the set, none of which is in it."""
    manner = manner_of(table)
    taken = {text_digest(read_files(task)) for task in find_tasks(tasks)}
    with file.open("w", encoding="utf-8") as rows:
        written = 0
        for number, files in enumerate(_others(table, taken)):
            shown = await rehearse(files, dialect, seed=number, manner=manner)
            if shown is None or shown.odd:
                continue
            rows.write(json.dumps({**shown.row(), "path": shown.task}) + "\n")
            written += 1
            report(written, table.experts, f"experts of {table.name}")
            if written == table.experts:
                return


def _others(table: TaskBuild, taken: Collection[str]) -> Any:
    """As many tasks that are not taken as anybody asks for."""
    for _, files in nano_tasks(2**40, table.split, table.seed + OTHERS, table.difficulties):
        if text_digest(files) not in taken:
            yield files


def _tokenizer_of(run: Run) -> Artefact:
    """What sessions are written with: the newest tokenizer of the run, with a model or alone."""
    found = [artefact for artefact in run.artefacts() if artefact.kind in ("tokenizer", "checkpoint")]
    if not found:
        raise InputError("experts need a tokenizer: run one of the stages tokenizer, base and init before tasks")
    return found[-1]
