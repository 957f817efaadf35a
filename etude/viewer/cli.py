"""The command lines of `etude view` and `etude report`: a run as web pages, served or written to one file."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False)]


def view(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory, or a directory of runs.", show_default=False)
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free one.")] = 8321,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name of this server; repeatable.")
    ] = None,
) -> None:
    """Serve the pages of a run: charts, rollouts turn by turn, tasks. Updates while the run goes on; only reads."""
    from etude.viewer.serve import serve

    if host not in ("127.0.0.1", "::1", "localhost"):
        print("etude: warning: the run can be read from every machine that reaches this address", file=sys.stderr)

    def ready(url: str) -> None:
        print(f"{url}  (Ctrl-C stops the server)", flush=True)

    asyncio.run(serve(run, host, port, ready, allow_host or ()))


def report(
    run: RunPath,
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("report.html"),
    most_mb: Annotated[
        float, typer.Option(min=1, help="Maximum size of the file in MB; rollouts beyond it are left out.")
    ] = 8.0,
) -> None:
    """Write the pages of a run as one self-contained file that needs neither server nor network."""
    from etude.viewer.report import write_report

    written = write_report(run, out, max_bytes=int(most_mb * 1e6))
    print(f"{out}: {written.size / 1e6:.1f} MB, {written.rollouts} of {written.of} rollouts in full")
