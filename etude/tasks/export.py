"""A set of tasks as others can run it: clean copies of the directories, and a dataset.toml that names them."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from etude.errors import InputError
from etude.tasks.harbor import read_task, task_digest

# what the format knows in a task's directory
_TOP = ("task.toml", "instruction.md", "README.md", ".harborignore", "trajectory.json")
_TREES = ("environment", "tests", "solution", "steps")
_JUNK = ("__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".DS_Store")


@dataclass(frozen=True)
class Exported:
    """One task of the set."""

    name: str
    directory: Path
    digest: str


def export_tasks(directories: Sequence[Path], target: Path, *, name: str, description: str = "") -> list[Exported]:
    """Copy tasks into a new directory `target`, as the set `name` ("org/name"). A task without a name gets one."""
    if target.exists():
        raise InputError(f"{target}: is there already; name a directory that is not")
    organisation, _, short = name.partition("/")
    if not organisation or not short:
        raise InputError(f'--name {name}: expected "org/name"')
    staging = target.with_name(f".{target.name}.export-{os.getpid()}")
    exported: list[Exported] = []
    seen: dict[str, Path] = {}
    try:
        staging.mkdir(parents=True)
        for directory in directories:
            task = read_task(directory)
            place = task.name.rpartition("/")[2]
            if place in seen:
                raise InputError(f"{directory}: has the name {place} of {seen[place]}; a set's names differ")
            seen[place] = directory
            _copy(directory, staging / place)
            full = task.name
            if "task" not in task.config:
                full = f"{organisation}/{place}"
                with open(staging / place / "task.toml", "a") as file:
                    file.write(f'\n[task]\nname = "{full}"\n')
            read_task(staging / place)
            exported.append(Exported(full, target / place, f"sha256:{task_digest(staging / place)}"))
        listed = [{"name": each.name, "digest": each.digest} for each in exported]
        about = {"name": name, "description": description}
        (staging / "dataset.toml").write_text(tomli_w.dumps({"dataset": about, "tasks": listed}))
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return exported


def _copy(source: Path, target: Path) -> None:
    """A task's files and no others; caches stay behind."""
    target.mkdir()
    for name in _TOP:
        if (source / name).is_file():
            shutil.copy(source / name, target / name)
    ignore = shutil.ignore_patterns(*_JUNK, "*.pyc")
    for name in _TREES:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, symlinks=True, ignore=ignore)
