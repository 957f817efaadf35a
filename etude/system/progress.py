"""How long work shows itself: one line a task on standard error, so that standard output stays for results."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

LOG_INTERVAL_S = 30.0  # between lines where there is no terminal
WIDE_TERMINAL_COLUMNS = 110  # columns of a terminal with room for a long bar


class ProgressCallback(Protocol):
    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class NoteColumn(ProgressColumn):
    """What is left of the line. Where that is too little the note loses its end, and no other column anything."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=False))  # of a row that is too long only columns that may wrap are narrowed

    def render(self, task: Task) -> Text:
        return Text(task.fields["note"], no_wrap=True, overflow="ellipsis")


def progress_bars() -> Progress:
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24 if console.width >= WIDE_TERMINAL_COLUMNS else 8),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(compact=True),
        NoteColumn(),
    )
    return Progress(*columns, console=console)


@contextmanager
def progress_line(name: str, progress: Progress | None = None) -> Iterator[ProgressCallback]:
    """One task's line; on its own, or under others when they share `progress`."""
    if progress is None:
        with progress_bars() as alone, progress_line(name, alone) as report:
            yield report
        return
    task = progress.add_task(name, total=None, note="")

    said = time.monotonic()

    def show(done: int, total: int, note: str = "") -> None:
        nonlocal said
        progress.update(task, completed=done, total=total, note=note)
        # into a file a bar is drawn once, at its end; whoever reads the file wants to know how far it is
        if not progress.console.is_terminal and (now := time.monotonic()) - said >= LOG_INTERVAL_S:
            said = now
            progress.console.print(f"{name} {done}/{total or '?'} {note}".rstrip(), markup=False, soft_wrap=True)

    yield show
    total = progress.tasks[task].total or 1  # a task that reported nothing was one piece of work
    progress.update(task, completed=total, total=total)
