"""The `etude` command: one short function per subcommand, no logic of its own.

Results go to standard output (`--json` for programs), progress and errors to standard error. Packages that need torch
are imported when one of their subcommands runs, so that `etude --help` answers at once.
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
from rich.markup import escape
from rich.table import Table

from etude import __version__
from etude.agent.cli import agent
from etude.errors import EtudeError, InputError
from etude.inference.cli import serve
from etude.pipeline.sweep_cli import sweep
from etude.rl.live_cli import change, drain
from etude.system.terminal import Console, say
from etude.viewer.cli import report, view

EXIT_CODES = "Exit codes: 0 ok, 1 failed, 2 bad input or usage, 3 busy (another process holds it), 130 interrupted."


def lazy_group(*modules: str) -> type[typer.core.TyperGroup]:
    """Return a command group whose subcommands are those of the typer apps `module.app`, imported when needed."""

    class LazyGroup(typer.core.TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            return [name for module in modules for name in _subcommands(module).list_commands(ctx)]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            found = (_subcommands(module).get_command(ctx, cmd_name) for module in modules)
            return next((command for command in found if command is not None), None)

    return LazyGroup


def _subcommands(module: str) -> typer.core.TyperGroup:
    try:
        return typer.main.get_group(import_module(module).app)
    except ModuleNotFoundError as error:
        raise EtudeError(f"this command needs the Python module {error.name}, which is not installed") from error


app = typer.Typer(
    name="etude",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=f"Start here:  etude run recipes/nano.toml --out runs/nano\n\n{EXIT_CODES}",
)
recipe_app = typer.Typer(
    no_args_is_help=True, help="Show a recipe without running it, or list the keys a recipe may have."
)
app.add_typer(recipe_app, name="recipe")
app.add_typer(
    typer.Typer(
        cls=lazy_group("etude.evaluation.cli"),
        no_args_is_help=True,
        help="Import, inspect, sample from and score a model.",
    ),
    name="model",
)

app.add_typer(
    typer.Typer(
        cls=lazy_group("etude.data.cli", "etude.bench.sessions_cli"),
        no_args_is_help=True,
        help="Build and inspect corpora of token shards; collect sessions to learn from.",
    ),
    name="data",
)
app.add_typer(
    typer.Typer(
        cls=lazy_group("etude.pods.cli.main"),
        no_args_is_help=True,
        help="Run, inspect, snapshot and fork pods (sandboxes).",
    ),
    name="pods",
)
app.add_typer(
    typer.Typer(
        cls=lazy_group("etude.tasks.cli"),
        no_args_is_help=True,
        help="Inspect, run, validate, import and export tasks.",
    ),
    name="tasks",
)

app.add_typer(
    typer.Typer(
        cls=lazy_group("etude.bench.cli"),
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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Out = Annotated[
    Path | None, typer.Option(help="Directory of the run; created if it does not exist.", show_default=False)
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out, if there is one.")]
Control = Annotated[
    str | None,
    typer.Option(
        "--control",
        metavar="placebo|rejection|imitation",
        help="Run a control in place of RL: the key rl.control.",
        show_default=False,
    ),
]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="local|ray|ray://HOST:PORT",
        help="Where the services of rl and evaluation run: the key cluster.address.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check the recipe, print what it would do and need, and stop.")]


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
    "  etude run recipes/nano-gpu.toml --out runs/placebo --control placebo\n\n"
    "  etude run recipes/nano-gpu.toml --out runs/nano --cluster ray\n\n"
    f"  etude run recipes/nano.toml --out runs/nano --resume\n\n{EXIT_CODES}"
)
def run(
    recipe: RecipeFile,
    out: Out = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    control: Control = None,
    cluster: OnCluster = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Run the stages of a recipe; everything they make is in one run directory."""
    changes = [*(overrides or ()), *([f"rl.control={control}"] if control else ())]
    _run(recipe, out, resume, dry_run, changes, as_json, cluster=cluster)


def _add_stage_command(stage: str, what: str) -> None:
    """Add a command that runs one stage of a recipe, with the options of `run`."""

    def run_stage(
        recipe: RecipeFile,
        out: Out = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        overrides: Overrides = None,
        as_json: AsJson = False,
    ) -> None:
        _run(recipe, out, resume, dry_run, overrides, as_json, only=stage)

    def run_on_cluster(
        recipe: RecipeFile,
        out: Out = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        cluster: OnCluster = None,
        overrides: Overrides = None,
        as_json: AsJson = False,
    ) -> None:
        _run(recipe, out, resume, dry_run, overrides, as_json, only=stage, cluster=cluster)

    examples = f"etude {stage} RECIPE --dry-run\n\n  etude {stage} RECIPE --out RUN --resume"
    epilog = f"Examples:\n\n  {examples}\n\n{EXIT_CODES}"
    add = app.command(stage, help=f"Run only the stage {stage} of a recipe: {what}.", epilog=epilog)
    add(run_on_cluster if stage in ("rl", "evaluation") else run_stage)


_add_stage_command("pretrain", "continue pretraining on text")
_add_stage_command("mtp", "train multi-token-prediction layers for a model")
_add_stage_command("extend", "extend the context")
_add_stage_command("sft", "fine-tune on conversations")
_add_stage_command("rl", "reinforcement learning from the model of the recipe or the run")
_add_stage_command("evaluation", "score the model of every stage on validation and test tasks")


app.command(
    epilog="Examples:\n\n  etude sweep recipes/nano.toml --set rl.learning_rate=1e-4,3e-4 --seeds 0..2 --dry-run\n\n"
    "  etude sweep RECIPE --set rl.learning_rate=1e-4,3e-4 --set sft.tokens=80000,160000 --seeds 0..2 --out runs/sweep"
    f"\n\n{EXIT_CODES}"
)(sweep)


@app.command(epilog="Example:  etude status runs/nano")
def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show the progress of a run; for RL also its processes, what each waits for, and the rollouts by state."""
    from etude.rl.health import health_table, rl_health
    from etude.runs.layout import RunLayout
    from etude.runs.run_status import run_status

    lines, has_rl = run_status(run), RunLayout(run).root.is_dir()
    if as_json:
        print(json.dumps({"run": lines, "rl": asdict(rl_health(run)) if has_rl else None}))
        return
    say("\n".join(lines))
    if has_rl:
        Console().print(health_table(run))


app.command(
    epilog="Examples:\n\n  etude change runs/mine rl.temperature=0.9 rl.in_flight=32 rl.rewards.effort_spent=0.05\n\n"
    f"  etude change runs/mine\n\n{EXIT_CODES}"
)(change)
app.command(epilog=f"Examples:\n\n  etude drain runs/mine\n\n  etude drain runs/mine worker-3\n\n{EXIT_CODES}")(drain)


@app.command(
    epilog="Examples:\n\n  etude rollouts runs/nano\n\n  etude rollouts runs/nano traces/000012 --atif trajectories"
)
def rollouts(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    prefix: Annotated[str, typer.Argument(metavar="NAME", help="Only rollouts whose name has this prefix.")] = "",
    atif: Annotated[Path | None, typer.Option(help="Write them here as ATIF trajectories.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """List the rollouts a run has stored, or export them in the agent trajectory interchange format."""
    from etude.rollouts.listing import export_rollouts, list_rollouts, rollouts_table
    from etude.runs.layout import RunLayout

    stored = list_rollouts(RunLayout(run), prefix)
    if prefix and not stored:
        raise InputError(f"{run} has no rollout named {prefix}...; `etude rollouts {run}` lists them")
    if atif is not None:
        count, problems = export_rollouts(RunLayout(run), stored, atif)
        print(f"{count} trajectories in {atif}")
        if problems:
            raise EtudeError("\n".join(f"left out: {problem}" for problem in problems))
    elif as_json:
        print(json.dumps([each.row for each in stored]))
    else:
        Console().print(rollouts_table(stored))


app.command(
    epilog="Examples:\n\n  etude serve runs/smollm2-135m\n\n"
    "  etude serve runs/nano/checkpoints/rl-12 --port 8001 --name nano --max-streams 16 --tokens 16384"
)(serve)
app.command(
    epilog="Examples:\n\n  etude agent --model runs/smollm2-135m\n\n"
    '  etude agent --endpoint http://127.0.0.1:8000/v1 "fix the failing test"\n\n'
    f'  etude agent -p --json --apply "add a changelog entry"\n\n{EXIT_CODES}'
)(agent)


app.command(epilog="Examples:\n\n  etude view runs/nano\n\n  etude view runs --port 8400")(view)
app.command(epilog="Example:  etude report runs/nano --out report.html")(report)


@recipe_app.command("show", epilog="Example:  etude recipe show recipes/nano.toml --set rl.steps=6")
def recipe_show(recipe: RecipeFile, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Check a recipe and print it resolved: defaults filled in, overrides applied, paths absolute."""
    from etude.config import render_toml, settings_data
    from etude.recipe.recipe import load_recipe

    resolved = load_recipe(recipe, overrides or ())
    print(json.dumps(settings_data(resolved)) if as_json else render_toml(resolved).rstrip())


@recipe_app.command("keys", epilog="Example:  etude recipe keys --json")
def recipe_keys(as_json: AsJson = False) -> None:
    """List every key a recipe may have, with its type, default and meaning."""
    from etude.config import settings_keys
    from etude.recipe.recipe import Recipe

    keys = settings_keys(Recipe)
    if as_json:
        print(json.dumps([vars(key) for key in keys]))
        return
    table = Table(box=None, header_style="bold")
    for column in ("key", "type", "default", "meaning"):
        table.add_column(column, overflow="fold", no_wrap=column == "key")
    for key in keys:
        table.add_row(*(escape(text) for text in (key.name, key.type, key.default, key.doc)))
    Console(width=None if Console().is_terminal else 160).print(table)


def _run(
    recipe: Path,
    out: Path | None,
    resume: bool,
    dry_run: bool,
    overrides: list[str] | None,
    as_json: bool,
    only: str | None = None,
    cluster: str | None = None,
) -> None:
    """Run a recipe or one stage of it, or describe what that would do."""
    from etude.recipe.recipe import load_recipe

    resolved = load_recipe(recipe, [*(overrides or ()), *([f"cluster.address={cluster}"] if cluster else ())])
    if dry_run:
        from etude.pipeline.plan import make_plan
        from etude.pipeline.render import plan_data, plan_text
        from etude.system.progress import progress_line

        with progress_line("dry run") as report:
            plan = make_plan(resolved, out, only, report=report)
        print(json.dumps(plan_data(plan)) if as_json else plan_text(plan))
        return
    if out is None:
        raise InputError("--out is missing: name the directory of the run, or use --dry-run")
    from etude.pipeline.ranks import under_torchrun
    from etude.pipeline.stages import run_recipe

    with under_torchrun() as follows:
        if not follows:
            _show(run_recipe(resolved, out, resume, only=only), out, as_json)


def _show(stages: dict[str, dict[str, Any]], out: Path, as_json: bool) -> None:
    """Print a summary of each stage."""
    from etude.pipeline.stages import summarize_stage

    if as_json:
        print(json.dumps({"run": str(out), "stages": stages}))
        return
    for stage, facts in stages.items():
        say(summarize_stage(stage, facts))
    print(f"run: {out}")


def main() -> None:
    """Run the command; an error meant for the user is printed without a traceback and sets the exit code."""
    # Before torch is loaded: spinning threads make small products twenty times slower on busy cores.
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
            say(line if line.startswith(" ") else f"etude: {line}", file=sys.stderr)
        sys.exit(error.exit_code if isinstance(error, EtudeError) else 1)


if __name__ == "__main__":
    main()
