"""How long work shows itself: one line a task on standard error, so that standard output stays for results."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[int, int], None]  # done, total


def progress_bars() -> Progress:
    columns = (
        SpinnerColumn(finished_text="[green]✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


@contextmanager
def progress_line(name: str, progress: Progress | None = None) -> Iterator[Report]:
    """One task's line; on its own, or under others when they share `progress`."""
    if progress is None:
        with progress_bars() as alone, progress_line(name, alone) as report:
            yield report
        return
    task = progress.add_task(name, total=None)
    yield lambda done, total: progress.update(task, completed=done, total=total)
    total = progress.tasks[task].total or 1  # a task that reported nothing was one piece of work
    progress.update(task, completed=total, total=total)
