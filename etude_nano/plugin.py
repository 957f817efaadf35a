"""The nano tasks as an Etude plugin: registers the task source `nano`. Importing this loads no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from etude.tasks.settings import TaskSetSettings
from etude.tasks.sources import DemonstrationRow, TaskSource, task_source, write_task

if TYPE_CHECKING:
    from etude.chat.dialects.dialect import Dialect

DEMONSTRATION_SEED_OFFSET = 1_000_000_000  # added to a set's seed: the first task that is used for demonstrations


@task_source("nano")
class NanoTaskSource(TaskSource):
    """Tiny tasks from templates, with scripted demonstrations that run without pods."""

    def tasks(self, settings: TaskSetSettings) -> Iterator[tuple[str, Mapping[str, str]]]:
        from etude_nano import source

        return source.nano_tasks(settings.count or 1, settings.split, settings.seed, settings.difficulties)

    def write_task_set(self, directory: Path, settings: TaskSetSettings) -> None:
        from etude_nano import source

        assert settings.count is not None  # checked by the settings
        source.generate_nano(directory, settings.count, settings.split, settings.seed, settings.difficulties)

    def harder(self, task: Path, out: Path, seed: int, exclude: Collection[Path]) -> bool:
        from etude_nano.siblings import harder_sibling

        files = harder_sibling(task, seed, exclude)
        if files is not None:
            write_task(out, files)
        return files is not None

    async def demonstrations(
        self, settings: TaskSetSettings, exclude: Collection[Path], dialect: Dialect
    ) -> AsyncIterator[DemonstrationRow]:
        from etude_nano import demonstrator, simulated_sessions, source

        excluded = {source.text_digest(demonstrator.read_files(task)) for task in exclude}
        style = demonstrator.style_of(settings)
        seed = settings.seed + DEMONSTRATION_SEED_OFFSET
        candidates = source.nano_tasks(2**40, settings.split, seed, settings.difficulties)
        unseen = (files for _, files in candidates if source.text_digest(files) not in excluded)
        for number, files in enumerate(unseen):
            shown = await simulated_sessions.simulate_demonstration(files, dialect, seed=number, style=style)
            if shown is not None and not shown.deviation:
                tokens = sum(len(segment.tokens) for segment in shown.trace.segments)
                yield DemonstrationRow(shown.task, shown.row(), tokens)
