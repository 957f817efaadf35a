"""The commands: `python -m studies` lists the studies, `python -m studies.NAME` runs one."""

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from etude.errors import EtudeError
from etude.system.progress import progress_line
from etude.system.terminal import Console
from studies.study import Study, StudyResult, find_study, known_studies, run_study

EXIT_CODES = "Exit codes: 0 ok, 1 failed, 2 bad input or usage, 130 interrupted."


def study_app(study: Study) -> typer.Typer:
    """Return the command that runs one study."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    example = f"Example:  python -m studies.{study.name} --out runs/studies"

    @app.command(help=escape(study.question), epilog=f"{example}\n\n{EXIT_CODES}")
    def run_command(
        out: Annotated[
            Path, typer.Option(help=f"Directory for {study.name}.json and {study.name}.svg.", show_default=False)
        ],
        seed: Annotated[int, typer.Option(min=0, help="Seed of all random choices.")] = 0,
        run: Annotated[
            Path | None, typer.Option(help="A run directory to read, for studies that read one.", show_default=False)
        ] = None,
        overrides: Annotated[
            list[str] | None,
            typer.Option(
                "--set", metavar="KEY=VALUE", help="Change a setting of the study; repeatable.", show_default=False
            ),
        ] = None,
    ) -> None:
        started = time.monotonic()
        with progress_line(study.name) as progress:
            result = run_study(study, out, seed, progress, run=run, overrides=overrides or ())
        print_result(result)
        print(f"seed {seed}, {time.monotonic() - started:.0f} s; {out / study.name}.json and .svg")

    return app


def list_app() -> typer.Typer:
    """Return the command whose help lists the studies."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    lines = [f"{study.name}: {escape(study.question)}" for study in known_studies().values()]
    example = "Example:  python -m studies.std --out runs/studies"

    @app.command(
        help="Ablations of the algorithm and miniatures of the report's figures. `python -m studies.NAME --out DIR` "
        "runs one and writes its data, a plot, a table and one sentence; minutes on a CPU.",
        epilog="\n\n".join(["Studies:", *lines, example, EXIT_CODES]),
    )
    def list_studies(ctx: typer.Context) -> None:
        print(ctx.get_help())

    return app


def print_result(result: StudyResult) -> None:
    """Print the table and the conclusion."""
    table = Table(title=result.title, title_justify="left", box=None, header_style="bold")
    for index, column in enumerate(result.columns):
        table.add_column(escape(column), justify="right" if index else "left")
    for row in result.rows:
        table.add_row(*map(escape, row))
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    print(result.conclusion)


def main(name: str = "") -> None:
    """Run the command of a study, or the list; an error meant for the user has no traceback and sets the exit code."""
    try:
        app = study_app(find_study(name)) if name else list_app()
        app()
    except (EtudeError, OSError, KeyboardInterrupt) as error:
        if os.environ.get("ETUDE_TRACEBACK"):
            raise
        if isinstance(error, KeyboardInterrupt):
            print("studies: interrupted", file=sys.stderr)
            sys.exit(130)
        for line in str(error).splitlines():
            print(line if line.startswith(" ") else f"studies: {line}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)
