"""Export a task set: clean copies of the task directories and a dataset.toml that lists them."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from etude.errors import InputError
from etude.tasks.harbor import read_task, task_digest

# files and directories the format defines in a task directory
_FILES = ("task.toml", "instruction.md", "README.md", ".harborignore", "trajectory.json")
_DIRECTORIES = ("environment", "tests", "solution", "steps")
_CACHES = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".DS_Store")


@dataclass(frozen=True)
class ExportedTask:
    """One exported task."""

    name: str
    directory: Path
    digest: str


def export_tasks(directories: Sequence[Path], target: Path, *, name: str, description: str = "") -> list[ExportedTask]:
    """Copy tasks into a new directory as the set `name` ("org/name"). A task without a name gets one."""
    if target.exists():
        raise InputError(f"{target}: already exists; name a new directory")
    organisation, _, short = name.partition("/")
    if not organisation or not short:
        raise InputError(f'--name {name}: expected "org/name"')
    staging = target.with_name(f".{target.name}.export-{os.getpid()}")
    exported: list[ExportedTask] = []
    seen: dict[str, Path] = {}
    try:
        staging.mkdir(parents=True)
        for directory in directories:
            task = read_task(directory)
            short_name = task.name.rpartition("/")[2]
            if short_name in seen:
                raise InputError(f"{directory}: has the same name {short_name} as {seen[short_name]}; rename one")
            seen[short_name] = directory
            copy = staging / short_name
            _copy(directory, copy)
            full_name = task.name
            if "task" not in task.config:
                full_name = f"{organisation}/{short_name}"
                with open(copy / "task.toml", "a") as file:
                    file.write(f'\n[task]\nname = "{full_name}"\n')
            read_task(copy)
            exported.append(ExportedTask(full_name, target / short_name, f"sha256:{task_digest(copy)}"))
        listed = [{"name": each.name, "digest": each.digest} for each in exported]
        dataset = {"name": name, "description": description}
        (staging / "dataset.toml").write_text(tomli_w.dumps({"dataset": dataset, "tasks": listed}))
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return exported


def _copy(source: Path, target: Path) -> None:
    """Copy a task's own files, without caches or anything else in the directory."""
    target.mkdir()
    for name in _FILES:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    ignore = shutil.ignore_patterns(*_CACHES, "*.pyc")
    for name in _DIRECTORIES:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, symlinks=True, ignore=ignore)
