"""The command `etude sweep`. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from etude.errors import EtudeError, InputError
from etude.system.terminal import Console, say

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe in TOML.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE,...",
        help="Values of a key; every combination of repeated options is an arm. One value is set in all arms.",
        show_default=False,
    ),
]
Controls = Annotated[
    list[str] | None,
    typer.Option(
        "--control",
        metavar="NAME",
        help="A further arm: the first one with a control of RL in its place (rl.control), or, as KEY=VALUE, with one "
        "other change; repeatable.",
        show_default=False,
    ),
]
Seeds = Annotated[str, typer.Option(help="Seeds of every arm, such as 0..2 or 0,3.")]
Out = Annotated[Path, typer.Option(help="Directory of the runs; a sweep that is there is continued.")]
Parallel = Annotated[int, typer.Option(min=1, help="Runs at a time.")]
LastStage = Annotated[str | None, typer.Option("--stage", help="Run the stages up to this one.", show_default=False)]
Baseline = Annotated[
    str | None, typer.Option(help="Arm to compare the others with; default: the first.", show_default=False)
]
Validation = Annotated[
    str | None,
    typer.Option(help="Task set that arms are chosen on; default: that of the recipe, or validation."),
]
VarianceFrom = Annotated[
    list[Path] | None,
    typer.Option(
        "--variance-from",
        metavar="RUN",
        help="Run or sweep whose results give the variance for the detectable difference; default: those in --out.",
        show_default=False,
    ),
]
Final = Annotated[bool, typer.Option("--final", help="Show the test sets too, once all choices are made.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the runs and what they can detect, and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def sweep(
    recipe: RecipeFile,
    settings: Settings = None,
    seeds: Seeds = "0",
    out: Out = Path("runs/sweep"),
    controls: Controls = None,
    parallel: Parallel = 1,
    stage: LastStage = None,
    baseline: Baseline = None,
    validation: Validation = None,
    variance_from: VarianceFrom = None,
    final: Final = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Run a recipe under several settings and seeds, and compare the arms on the same tasks."""
    from etude.files import write_atomically
    from etude.pipeline import sweep_report
    from etude.pipeline.sweep import plan_sweep, run_sweep
    from etude.system.progress import progress_line

    plan = plan_sweep(recipe, settings or (), controls or (), seeds, out, stage)
    if baseline is not None and baseline not in plan.arms:
        raise InputError(f"--baseline {baseline}: the arms are {', '.join(plan.arms)}")
    sets = sweep_report.sets_of(plan, validation)
    variance = sweep_report.find_variance(plan, sets, variance_from or ())
    lines = sweep_report.power_lines(sets, len(plan.seeds), variance, final=final)
    detectable = sweep_report.detectable(sets, len(plan.seeds), variance, final=final)
    if dry_run:
        names = [run.name for run in plan.runs]
        if as_json:
            print(json.dumps({"runs": names, "detectable": detectable, "variance": variance.origin}))
        else:
            say("\n".join([*names, *lines]))
        return
    for line in lines:
        say(line, file=sys.stderr)
    with progress_line("sweep") as report:
        outcome = run_sweep(plan, parallel, report)
    summary = sweep_report.summarize_sweep(plan, outcome, sets, baseline or plan.arms[0], final=final)
    summary |= {"detectable": detectable, "variance": variance.origin}
    write_atomically(plan.out / "sweep.json", json.dumps(summary, indent=1) + "\n")
    if as_json:
        print(json.dumps(summary))
    else:
        console = Console(width=None if Console().is_terminal else 160)
        if summary["sets"]:
            console.print(sweep_report.result_table(summary))
        for line in sweep_report.conclusions(summary):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if outcome.failed:
        raise EtudeError(f"{len(outcome.failed)} of {len(plan.runs)} runs failed; the same command runs them again")
