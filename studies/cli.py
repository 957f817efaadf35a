"""`etude reproduce NAME`: one study, its numbers, its plot, its table and its one sentence."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etude.system.progress import progress_line


class Listing(typer.core.TyperCommand):
    """A command whose help names the studies there are; looked up when asked for, because they load torch."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from studies.study import known_studies

        lines = [f"{study.name}: {study.question}" for study in known_studies().values()]
        self.epilog = "\n\n".join(["Studies:", *lines, "Example:  etude reproduce std --out runs/studies"])
        super().format_help(ctx, formatter)


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Which study; see below.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Directory for NAME.json and NAME.svg.", show_default=False)],
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn by lot.")] = 0,
    run: Annotated[
        Path | None, typer.Option(help="A run to look at, for the studies that do.", show_default=False)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Change a setting of the study; repeatable.", show_default=False
        ),
    ] = None,
) -> None:
    """Put one choice of the algorithm to the test, or make one figure in miniature: raw data, a plot, a table, a
    sentence. Minutes on a CPU; fig2 takes a GPU."""
    from studies.study import find_study, run_study

    study = find_study(name)
    started = time.monotonic()
    with progress_line(name) as report:
        finding = run_study(study, out, seed, report, run=run, overrides=overrides or ())
    table = Table(title=finding.title, title_justify="left", box=None, header_style="bold")
    for place, column in enumerate(finding.columns):
        table.add_column(escape(column), justify="right" if place else "left")
    for row in finding.rows:
        table.add_row(*map(escape, row))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    print(finding.conclusion)
    print(f"seed {seed}, {time.monotonic() - started:.0f} s; {out / name}.json and .svg")


app = typer.Typer(add_completion=False, rich_markup_mode="rich")
app.command(cls=Listing)(reproduce)
