"""The `etude` command: one short function per verb, no logic of its own.

Results go to standard output (`--json` for programs), progress and errors to standard error. Rooms that need
torch are loaded when one of their verbs is asked for, so that `etude --help` answers at once.
"""

import json
import os
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etude import __version__
from etude.agent.cli import agent
from etude.errors import EtudeError, InputError
from etude.inference.cli import serve
from etude.viewer.cli import report, view
from studies.cli import Listing, reproduce

EXIT_CODES = "Exit codes: 0 ok, 1 failed, 2 bad input or usage, 3 busy (another process holds it), 130 interrupted."


def lazy_room(module: str) -> type[typer.core.TyperGroup]:
    """A command group whose verbs are the typer app `module.app`, imported when one of them is needed."""

    class Room(typer.core.TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return _verbs(module).list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            return _verbs(module).get_command(ctx, cmd_name)

    return Room


def _verbs(module: str) -> typer.core.TyperGroup:
    try:
        return typer.main.get_group(import_module(module).app)
    except ModuleNotFoundError as error:
        raise EtudeError(f"this verb needs the Python module {error.name}, which is not installed") from error


app = typer.Typer(
    name="etude",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Start here:  etude run recipes/nano.toml --out runs/nano\n\n{EXIT_CODES}",
)
recipe_app = typer.Typer(no_args_is_help=True, help="Look at a recipe without running it, or at what one may say.")
app.add_typer(recipe_app, name="recipe")
app.add_typer(
    typer.Typer(
        cls=lazy_room("etude.model.cli"),
        no_args_is_help=True,
        help="Import, inspect, sample from and score a model.",
    ),
    name="model",
)

app.add_typer(
    typer.Typer(
        cls=lazy_room("etude.data.cli"),
        no_args_is_help=True,
        help="Build and inspect corpora of token shards.",
    ),
    name="data",
)
app.add_typer(
    typer.Typer(
        cls=lazy_room("etude.pods.cli.main"),
        no_args_is_help=True,
        help="Sandboxes: run, look into, snapshot and fork pods.",
    ),
    name="pods",
)
app.add_typer(
    typer.Typer(
        cls=lazy_room("etude.tasks.cli"),
        no_args_is_help=True,
        help="Tasks: look at, run, validate, import and export them.",
    ),
    name="tasks",
)

app.add_typer(
    typer.Typer(
        cls=lazy_room("etude.bench.cli"),
        no_args_is_help=True,
        help="Compare policies on tasks, in the harness.",
    ),
    name="bench",
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe in TOML.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the recipe, such as nll.window=256; repeatable. VALUE is TOML, else a string.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]
Out = Annotated[Path | None, typer.Option(help="Directory of the run; made if it is not there.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out, if there is one.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything, print what it would do, take and start, and stop.")
]


def _print_version(asked: bool) -> None:
    if asked:
        print(f"etude {__version__}")
        raise typer.Exit


@app.callback()
def etude(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Train coding agents: from a base model to reinforcement learning in real sandboxes."""


@app.command(
    epilog="Examples:\n\n  etude run recipes/nano.toml --dry-run\n\n"
    "  etude run recipes/nano.toml --out runs/nano\n\n"
    "  etude run recipes/nano.toml --out runs/short --set rl.steps=6 --set name=short\n\n"
    f"  etude run recipes/nano.toml --out runs/nano --resume\n\n{EXIT_CODES}"
)
def run(
    recipe: RecipeFile,
    out: Out = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the stages a recipe names and leave everything they made in one run directory."""
    _carry_out(recipe, out, resume, dry_run, overrides, as_json)


def _stage_alone(stage: str, what: str) -> None:
    """A verb that runs one stage of a recipe, with the options of `run`."""

    def alone(
        recipe: RecipeFile,
        out: Out = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        overrides: Overrides = None,
        as_json: AsJson = False,
    ) -> None:
        _carry_out(recipe, out, resume, dry_run, overrides, as_json, only=stage)

    examples = f"etude {stage} RECIPE --dry-run\n\n  etude {stage} RECIPE --out RUN --resume"
    epilog = f"Examples:\n\n  {examples}\n\n{EXIT_CODES}"
    app.command(stage, help=f"The stage {stage} of a recipe alone: {what}.", epilog=epilog)(alone)


_stage_alone("pretrain", "continue pretraining on text")
_stage_alone("mtp", "train multi-token-prediction layers beside a model")
_stage_alone("extend", "lengthen the context")
_stage_alone("sft", "fine-tune on conversations")
_stage_alone("rl", "reinforcement learning, on the weights the recipe names or its run has")


@app.command(epilog="Example:  etude status runs/nano")
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """How far a run is; of its reinforcement learning the processes, what each waits for, and rollouts by state."""
    from etude.rl import metrics
    from etude.runs.layout import Place
    from etude.runs.run_status import standing

    lines, learning = standing(run), Place(run).root.is_dir()
    if as_json:
        print(json.dumps({"run": lines, "rl": asdict(metrics.health(run)) if learning else None}))
        return
    print("\n".join(lines))
    if learning:
        Console().print(metrics.table(run))


@app.command(
    epilog="Examples:\n\n  etude rollouts runs/nano\n\n  etude rollouts runs/nano traces/000012 --atif trajectories"
)
def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    prefix: Annotated[str, typer.Argument(metavar="NAME", help="Only those whose name begins so.")] = "",
    atif: Annotated[Path | None, typer.Option(help="Write them here as ATIF trajectories.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the rollouts a run has kept, or write them in the agent trajectory interchange format."""
    from etude.rl.metrics import export_rollouts, rollouts, rollouts_table
    from etude.runs.layout import Place

    kept = rollouts(Place(run), prefix)
    if prefix and not kept:
        raise InputError(f"{run} has kept no rollout named {prefix}...; `etude rollouts {run}` lists them")
    if atif is not None:
        count, problems = export_rollouts(kept, atif)
        print(f"{count} trajectories in {atif}")
        if problems:
            raise EtudeError("\n".join(f"left out: {problem}" for problem in problems))
    elif as_json:
        print(json.dumps([each.row for each in kept]))
    else:
        Console().print(rollouts_table(kept))


app.command(
    epilog="Examples:\n\n  etude serve runs/smollm2-135m\n\n"
    "  etude serve runs/nano/checkpoints/init-0 --port 8001 --name nano --max-streams 16 --tokens 16384"
)(serve)
app.command(
    epilog="Examples:\n\n  etude agent --model runs/smollm2-135m\n\n"
    '  etude agent --endpoint http://127.0.0.1:8000/v1 "fix the failing test"\n\n'
    f'  etude agent -p --json --apply "add a changelog entry"\n\n{EXIT_CODES}'
)(agent)


app.command(epilog="Examples:\n\n  etude view runs/nano\n\n  etude view runs --port 8400")(view)
app.command(epilog="Example:  etude report runs/nano --out report.html")(report)
app.command(cls=Listing, epilog="Example:  etude reproduce kl --out runs/kl")(reproduce)


@recipe_app.command("show", epilog="Example:  etude recipe show recipes/nano.toml --set rl.steps=6")
def recipe_show(recipe: RecipeFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and print it resolved: defaults filled in, overrides applied, paths absolute."""
    from etude.recipe.recipe import load_recipe, recipe_data, render_toml

    resolved = load_recipe(recipe, overrides or ())
    print(json.dumps(recipe_data(resolved)) if as_json else render_toml(resolved).rstrip())


@recipe_app.command("keys", epilog="Example:  etude recipe keys --json")
def recipe_keys(as_json: AsJson = False) -> None:
    """List every key a recipe may hold, with its type, its default and what it does."""
    from etude.recipe.recipe import recipe_keys

    keys = recipe_keys()
    if as_json:
        print(json.dumps([vars(key) for key in keys]))
        return
    table = Table(box=None, header_style="bold")
    for column in ("key", "type", "default", "meaning"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    for key in keys:
        table.add_row(*(escape(text) for text in (key.name, key.type, key.default, key.doc)))
    Console().print(table)


def _carry_out(
    recipe: Path,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    overrides: list[str] | None,
    as_json: bool,
    only: str | None = None,
) -> None:
    """Run a recipe, or one stage of it; or say what that would be."""
    from etude.recipe.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    if dry_run:
        from etude.pipeline.dry_run.plan import describe
        from etude.pipeline.dry_run.render import plan_data, plan_text
        from etude.system.progress import progress_line

        with progress_line("dry run") as report:
            plan = describe(resolved, out, only, report=report)
        print(json.dumps(plan_data(plan)) if as_json else plan_text(plan))
        return
    if out is None:
        raise InputError("--out is missing: name the directory of the run, or ask for --dry-run")
    from etude.pipeline.stages import run_recipe

    _show(run_recipe(resolved, out, resume, only=only), out, as_json)


def _show(stages: dict[str, dict[str, Any]], out: Path, as_json: bool) -> None:
    """What the stages of a run found."""
    from etude.pipeline.stage_summary import tell

    if as_json:
        print(json.dumps({"run": str(out), "stages": stages}))
        return
    for stage, facts in stages.items():
        print(tell(stage, facts))
    print(f"run: {out}")


def main() -> None:
    """Run the command; an error meant for the user becomes lines and an exit code, a bug a traceback."""
    # Before torch is loaded: spinning threads make small products twenty times slower when others use the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app()
    except (EtudeError, OSError, KeyboardInterrupt) as error:
        if os.environ.get("ETUDE_TRACEBACK"):
            raise
        if isinstance(error, KeyboardInterrupt):
            print("etude: interrupted", file=sys.stderr)
            sys.exit(130)
        for line in str(error).splitlines():
            print(line if line.startswith(" ") else f"etude: {line}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)


if __name__ == "__main__":
    main()
