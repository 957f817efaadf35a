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


class TaskSource:
    """Base class of task sources. Every result is a pure function of the settings and their seed."""

    def tasks(self, settings: TaskSetSettings) -> Iterator[tuple[str, Mapping[str, str]]]:
        """Yield the name and the files of each task of the set, at least `settings.count`."""
        raise NotImplementedError

    def write_task_set(self, directory: Path, settings: TaskSetSettings) -> None:
        """Write the set as task directories below `directory`, which does not exist yet."""
        for name, files in islice(self.tasks(settings), settings.count):
            for path, text in files.items():
                target = directory / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(text, encoding="utf-8")
                target.chmod(0o755 if text.startswith("#!") else 0o644)

    def demonstrations(
        self, settings: TaskSetSettings, exclude: Collection[Path], dialect: Dialect
    ) -> AsyncIterator[DemonstrationRow]:
        """Yield demonstrations on tasks like those of the set, none of which is among the directories `exclude`."""
        raise NotImplementedError


TASK_SOURCES = Registry[type[TaskSource]]("task source")
task_source = TASK_SOURCES.register  # decorator
