"""How long work shows itself: one line a task on standard error, so that standard output stays for results."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Report(Protocol):
    def __call__(self, done: int, total: int, note: str = "") -> None: ...


def progress_bars() -> Progress:
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}"),
    )
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def progress_line(name: str, progress: Progress | None = None) -> Iterator[Report]:
    """One task's line; on its own, or under others when they share `progress`."""
    if progress is None:
        with progress_bars() as alone, progress_line(name, alone) as report:
            yield report
        return
    task = progress.add_task(name, total=None, note="")

    def show(done: int, total: int, note: str = "") -> None:
        progress.update(task, completed=done, total=total, note=note)

    yield show
    total = progress.tasks[task].total or 1  # a task that reported nothing was one piece of work
    progress.update(task, completed=total, total=total)
