"""The `tasks` stage of a recipe: make task sets, and demonstrations for SFT.

A set is an artefact `tasks-NAME`, a directory of task directories. Its demonstrations, if any, are an artefact
`demonstrations-NAME`: one JSONL file of conversations that `[[corpus.build]]` reads as `demonstrations:NAME`. They are
made on other tasks than those of the set, so that RL does not train on tasks whose solution SFT has shown.

Measured sets are made first. Training tasks and demonstrations that contain the answer of a measured task
(`etude.tasks.leaks`) are refused and counted.
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
from etude.runs.run import Artefact, Run
from etude.system.progress import ProgressCallback
from etude.tasks.harbor import find_tasks, read_task
from etude.tasks.leaks import Answers, find_leaks, measured_answers, strings_in
from etude.tasks.settings import TaskSetSettings, TaskSetsSettings
from etude.tasks.sources import TASK_SOURCES

DEMONSTRATIONS_FILE = "demonstrations.jsonl"


def build_task_sets(
    run: Run, settings: TaskSetsSettings, report: ProgressCallback, measured: Collection[str] = ()
) -> dict[str, Any]:
    """Make every set of the recipe, those named in `measured` first; sets that an interrupted run finished are kept."""
    done = {artefact.name for artefact in run.artefacts()}
    facts: dict[str, Any] = {}
    for task_set in sorted(settings.build, key=lambda each: each.name not in measured):
        name = f"tasks-{task_set.name}"
        if name not in done:
            parents = [task_set.path] if task_set.path else []
            report(0, task_set.count or 1, f"tasks of {task_set.name}")
            with run.artefact(name, kind="tasks", stage="tasks", parents=parents) as directory:
                _write_task_set(directory, task_set)
                refused = [] if task_set.name in measured else remove_leaks(directory, run_answers(run, measured))
            if refused:
                report(0, 1, f"{task_set.name}: {len(refused)} tasks refused, with the answer of a measured task")
        tasks = next(artefact.path for artefact in run.artefacts("tasks") if artefact.name == name)
        facts[task_set.name] = {"tasks": sum(1 for _ in find_tasks(tasks))}
        if task_set.demonstrations:
            name = f"demonstrations-{task_set.name}"
            if name not in done:
                tokenizer = _newest_tokenizer(run)
                with run.artefact(name, kind="demonstrations", stage="tasks", parents=[tokenizer]) as directory:
                    dialect = dialect_for(Tokenizer.load(tokenizer.path))
                    answers, file = run_answers(run, measured), directory / DEMONSTRATIONS_FILE
                    asyncio.run(_write_demonstrations(file, tasks, task_set, dialect, answers, report))
            facts[task_set.name]["demonstrations"] = task_set.demonstrations
    return facts


def run_answers(run: Run, measured: Collection[str]) -> Answers:
    """Return the answers of the measured task sets that a run has made."""
    sets = {artefact.name.removeprefix("tasks-"): artefact.path for artefact in run.artefacts("tasks")}
    return measured_answers([path for name, path in sorted(sets.items()) if name in measured])


def remove_leaks(directory: Path, answers: Answers) -> list[str]:
    """Remove the tasks below a directory that contain the answer of a measured task; return their names."""
    refused = sorted({leak.source for leak in find_leaks(answers, [directory])})
    for task in refused:
        shutil.rmtree(task)
    return [Path(task).name for task in refused]


def demonstrations_file(run: Run, name: str) -> Path:
    """Return the file of demonstrations for the task set `name` of this run."""
    for artefact in run.artefacts("demonstrations"):
        if artefact.name == f"demonstrations-{name}":
            return artefact.path / DEMONSTRATIONS_FILE
    raise InputError(f"this run has no demonstrations:{name}; set demonstrations for the set {name} in [[tasks.build]]")


def _write_task_set(directory: Path, task_set: TaskSetSettings) -> None:
    """Generate a set, or copy one from a directory after checking each of its tasks."""
    if task_set.source is not None:
        directory.rmdir()
        TASK_SOURCES[task_set.source]().write_task_set(directory, task_set)
        return
    assert task_set.path is not None
    tasks = list(find_tasks(task_set.path))
    if not tasks:
        raise InputError(f"tasks.build {task_set.name}: {task_set.path} has no task (a directory with a task.toml)")
    for task in tasks:
        read_task(task)
    shutil.copytree(task_set.path, directory, dirs_exist_ok=True, symlinks=True)


async def _write_demonstrations(
    file: Path, tasks: Path, task_set: TaskSetSettings, dialect: Dialect, answers: Answers, report: ProgressCallback
) -> None:
    assert task_set.source is not None
    source = TASK_SOURCES[task_set.source]()
    written = 0
    with file.open("w", encoding="utf-8") as rows:
        async for shown in source.demonstrations(task_set, list(find_tasks(tasks)), dialect):
            if answers.leaks_in("\n".join(strings_in(shown.row)), shown.task):
                continue
            rows.write(json.dumps({**shown.row, "path": shown.task}) + "\n")
            written += 1
            report(written, task_set.demonstrations, f"demonstrations of {task_set.name}")
            if written == task_set.demonstrations:
                return


def _newest_tokenizer(run: Run) -> Artefact:
    """Return the newest artefact with a tokenizer: a tokenizer alone, or a checkpoint."""
    found = [artefact for artefact in run.artefacts() if artefact.kind in ("tokenizer", "checkpoint")]
    if not found:
        raise InputError("demonstrations need a tokenizer: run the stage tokenizer, base or init before tasks")
    return found[-1]
