"""`etude tasks generate`: mounted by etude/tasks/cli.py."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from etude.errors import EtudeError, Interrupted
from etude.pods.cli.options import PodHosts, pod_settings
from etude.system.terminal import Console

if TYPE_CHECKING:
    from etude.tasks.generators.journal import GeneratorYield

EPILOG = (
    "Examples:\n\n  pip download --no-deps --no-binary :all: attrs click\n\n"
    "  etude tasks generate attrs-*.tar.gz click-*.tar.gz --out tasks/ --count 100"
)


def generate(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...", help="Python repositories: source archives or directories.", show_default=False
        ),
    ],
    out: Annotated[Path, typer.Option(help="Output directory; an earlier run in it is resumed.", show_default=False)],
    count: Annotated[int, typer.Option(min=1, help="Number of tasks to generate.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same tasks.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of concurrent candidates.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="GENERATOR", help="Only these generators; repeatable.")
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE", help="Additional package the tests need; repeatable."),
    ] = None,
    wheels: Annotated[
        Path | None, typer.Option(help="Install packages only from the wheels in this directory.", show_default=False)
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            help="State directory of pods; default: $ETUDE_PODS, else one in the home directory.", show_default=False
        ),
    ] = None,
    pod_hosts: PodHosts = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Generate validated tasks of all categories from Python repositories that have tests."""
    from etude.pods.fleet import open_fleet
    from etude.system.progress import progress_line
    from etude.tasks.generators.generator_run import GenerationOptions
    from etude.tasks.generators.generator_run import generate as run

    options = GenerationOptions(out=out, count=count, seed=seed, jobs=jobs, only=tuple(only or ()))

    async def work() -> list[GeneratorYield]:
        async with open_fleet(pods=pod_settings(pod_hosts), state=state) as fleet:
            with progress_line("generate") as show:
                return await run(fleet, sources, options, extra=tuple(extra or ()), wheels=wheels, progress=show)

    try:
        rows = asyncio.run(work())
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again to resume") from None
    if as_json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        print_yields(rows)
    made = sum(row.made for row in rows)
    if made < count:
        raise EtudeError(describe_shortfall(out, rows, count))
    print(f"{out}: {made} tasks", file=sys.stderr)


def describe_shortfall(out: Path, rows: list[GeneratorYield], count: int) -> str:
    """Return how many tasks were possible, why there are no more, and what to do."""
    made, tried = sum(row.made for row in rows), sum(row.tried for row in rows)
    reasons = sum((Counter(row.reasons) for row in rows), Counter[str]())
    why = ", ".join(f"{reason} {number}" for reason, number in reasons.most_common())
    none = ", ".join(row.generator for row in rows if not row.tried)
    return (
        f"{out}: {made} of {count} tasks, and no generator has another candidate: {tried} were tried"
        + (f", and rejected because of {why}" if why else "")
        + (f"; nothing to try for {none}" if none else "")
        + f". The {made} tasks are kept. Name further repositories in the same command, or another --seed, or use "
        f"--count {made}; docs/tasks-generators.md has the reasons"
    )


def print_yields(rows: list[GeneratorYield]) -> None:
    """Print the yield of each generator and the reasons for rejected candidates."""
    table = Table(box=None, header_style="bold")
    for column in ("generator", "tried", "tasks", "pod s/task", "rejected because"):
        table.add_column(column, justify="left" if column in ("generator", "rejected because") else "right")
    for row in rows:
        why = ", ".join(f"{reason} {count}" for reason, count in row.reasons.items())
        each = f"{row.pod_seconds / row.made:.1f}" if row.made else "-"
        table.add_row(row.generator, str(row.tried), str(row.made), each, why)
    seconds = sum(row.pod_seconds for row in rows)
    table.add_row("all", str(sum(r.tried for r in rows)), str(sum(r.made for r in rows)), f"{seconds:.0f} s", "")
    Console().print(table)


def mount(app: typer.Typer) -> None:
    """Add the `generate` command to `etude tasks`."""
    app.command("generate", epilog=EPILOG)(generate)
