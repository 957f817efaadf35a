"""`python -m etude_nano OUT`: make the tokenizer and the corpora that the nano base model is trained on."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.errors import EtudeError
from etude.system.progress import progress_bars, progress_line


def base_data(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that does not exist yet.")],
    sources: Annotated[
        list[str] | None,
        typer.Option("--from", help="Python code: a directory, stdlib, site-packages or a part of it; repeatable."),
    ] = None,
    exercises: Annotated[int, typer.Option(min=0, help="Exercise sessions.")] = 160_000,
    drills: Annotated[int, typer.Option(min=0, help="Copying drills.")] = 40_000,
    code: Annotated[float, typer.Option(min=0.1, help="Megabytes of code.")] = 60.0,
    programs: Annotated[int, typer.Option(min=0, help="Programs of the training side.")] = 120_000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    processes: Annotated[int | None, typer.Option("--at-once", "-j", min=1, help="By default one per core.")] = None,
) -> None:
    """Make the tokenizer and the corpora of the nano base model; recipes/nano-base.toml trains on them."""
    from etude_nano.base_data import Amounts, make_base_data

    amounts = Amounts(practice=exercises, drills=drills, code=code, programs=programs, seed=seed)
    with progress_bars() as bars, progress_line("nano base data", bars) as report:
        made = make_base_data(out, sources or ["stdlib", "site-packages"], amounts, report, processes)
    print(json.dumps(made))


def main() -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        typer.run(base_data)
    except EtudeError as error:
        print(f"etude_nano: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
