"""`etude view` and `etude report`: a run as pages, served or written into one file."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]


def view(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A run directory, or a directory of runs.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8321,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
) -> None:
    """Show a run in the browser: curves, rollouts turn by turn, tasks. Live while it goes on; changes nothing."""
    from etude.viewer.serve import serve

    if host not in ("127.0.0.1", "::1", "localhost"):
        print("etude: warning: whoever can reach this address can read the run", file=sys.stderr)
    asyncio.run(serve(run, host, port, lambda url: print(f"{url}  (Ctrl-C ends it)", flush=True)))


def report(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("report.html"),
    most_mb: Annotated[float, typer.Option(min=1, help="Size of the file; some rollouts are left out for it.")] = 8.0,
) -> None:
    """Write a run's pages as one file that needs nothing else: no server, no network."""
    from etude.viewer.report import write_report

    written = write_report(run, out, most=int(most_mb * 1e6))
    print(f"{out}: {written.size / 1e6:.1f} MB, {written.rollouts} of {written.of} rollouts in full")
