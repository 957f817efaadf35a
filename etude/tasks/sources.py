"""Generators of task sets that a recipe names with `[[tasks.build]] source = NAME`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.config import Registry
from etude.tasks.settings import TaskSetSettings

if TYPE_CHECKING:
    from etude.chat.dialects.dialect import Dialect


@dataclass(frozen=True)
class DemonstrationRow:
    """One demonstration as a row of a conversation corpus."""

    task: str
    row: Mapping[str, Any]
    tokens: int


def write_task(directory: Path, files: Mapping[str, str]) -> None:
    """Write the files of a task, given by their relative paths; scripts are executable."""
    for path, text in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        target.chmod(0o755 if text.startswith("#!") else 0o644)


class TaskSource:
    """Base class of task sources. Every result is a pure function of the settings and their seed."""

    def tasks(self, settings: TaskSetSettings) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the name and the files of each task of the set, at least `settings.count`."""
        raise NotImplementedError

    def write_task_set(self, directory: Path, settings: TaskSetSettings) -> None:
        """Write the set as task directories below `directory`, which does not exist yet."""
        for name, files in islice(self.tasks(settings), settings.count):
            write_task(directory / name, files)

    def demonstrations(
        self, settings: TaskSetSettings, exclude: Collection[Path], dialect: Dialect
    ) -> AsyncIterator[DemonstrationRow]:
        """Yield demonstrations on tasks like those of the set, none of which is among the directories `exclude`."""
        raise NotImplementedError

    def harder(self, task: Path, out: Path, seed: int, exclude: Collection[Path]) -> bool:
        """Write a harder sibling of a task as the task directory `out`, which does not exist yet; optional.

        RL calls it while a run goes on, for tasks that are always solved. Return False if the task has no harder
        sibling. The sibling is trained on: it must not be like any of the tasks `exclude`, which are measured on. It
        has a solution, and metadata (category, family, difficulty) that tell its kind from the parent's.
        """
        return False


TASK_SOURCES = Registry[type[TaskSource]]("task source")
task_source = TASK_SOURCES.register  # decorator
