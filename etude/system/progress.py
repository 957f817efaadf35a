"""Progress of long tasks: one line per task on standard error; standard output is for results."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

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

from etude.system.terminal import Console

LOG_INTERVAL_S = 30.0  # between progress lines without a terminal
WIDE_TERMINAL_COLUMNS = 110  # from this width on the bar is long


class ProgressCallback(Protocol):
    """Reports how much of a task is done; `total` 0 means unknown."""

    def __call__(self, done: int, total: int, note: str = "") -> None: ...


class NoteColumn(ProgressColumn):
    """The note, in the rest of the line; in a narrow terminal only this column is truncated."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=False))  # rich narrows only columns that may wrap

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
    """Show one task as a line and yield its callback; several tasks can share `progress`."""
    if progress is None:
        with progress_bars() as own, progress_line(name, own) as report:
            yield report
        return
    task = progress.add_task(name, total=None, note="")

    last_logged = time.monotonic()

    def update(done: int, total: int, note: str = "") -> None:
        nonlocal last_logged
        progress.update(task, completed=done, total=total, note=note)
        # Without a terminal rich draws the bar only once, at the end.
        if not progress.console.is_terminal and (now := time.monotonic()) - last_logged >= LOG_INTERVAL_S:
            last_logged = now
            progress.console.print(f"{name} {done}/{total or '?'} {note}".rstrip(), markup=False, soft_wrap=True)

    yield update
    total = progress.tasks[task].total or 1  # a task that never reported counts as one step
    progress.update(task, completed=total, total=total)


def time_left(done: int, left: int, seconds: float) -> str:
    """Return the time for what is left, at the rate at which so many were done, as "about 3 min left"; "" if none is
    known."""
    if not done or not left:
        return ""
    rest = seconds * left / done
    return f"about {rest:.0f} s left" if rest < 100 else f"about {rest / 60:.0f} min left"
