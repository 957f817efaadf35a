"""`etude tasks ...`: one short function per verb. Results on standard output, the rest on standard error."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from etude.errors import EtudeError, InputError, Interrupted
from etude.pods.fleet import Fleet, open_fleet
from etude.pods.pod import Egress
from etude.tasks.base_images import Provision
from etude.tasks.generators.cli import mount as mount_generate
from etude.tasks.harbor import find_tasks, read_task, task_digest
from etude.tasks.task import Task

app = typer.Typer(no_args_is_help=True)
T = TypeVar("T")

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Tasks, or directories of tasks.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
State = Annotated[
    Path | None, typer.Option(help="Where pods live; $ETUDE_PODS or one in your home if not given.", show_default=False)
]
Maps = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="FROM=IMAGE", help="Which image of the store a name after FROM means; repeatable."),
]
BuildAllow = Annotated[
    list[str] | None, typer.Option("--build-allow", metavar="HOST[:PORT]", help="Let RUN connect there; repeatable.")
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="HOST[:PORT]", help="Let tasks with a public network connect there; repeatable."),
]
Variables = Annotated[
    list[str] | None, typer.Option("--env", metavar="K=V", help="What ${K} in task.toml means; repeatable.")
]
AtOnce = Annotated[int | None, typer.Option("--at-once", "-j", min=1, help="Tasks at once; by default one a core.")]


def provision_of(
    maps: list[str] | None, build: list[str] | None, allow: list[str] | None, env: list[str] | None
) -> Provision:
    """What the caller gives to tasks."""
    return Provision(
        images=_pairs(maps, "--map", "FROM=IMAGE"),
        build=Egress.to(*build or (), transparent=True, private=True),
        egress=Egress.to(*allow or (), transparent=True),
        variables=_pairs(env, "--env", "K=V"),
    )


def _pairs(given: list[str] | None, option: str, form: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in given or ():
        name, equals, value = each.rpartition("=") if option == "--map" else each.partition("=")
        if not equals or not name:
            raise InputError(f"{option} {each}: expected {form}")
        found[name] = value
    return found


def tasks_in(directories: list[Path]) -> list[Path]:
    """The task directories that were meant; none is an error."""
    found = [task for directory in directories for task in find_tasks(directory)]
    if not found:
        raise InputError(f"{', '.join(map(str, directories))}: no task there (a directory with a task.toml)")
    return found


def with_fleet(state: Path | None, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
    """Do something with pods on this machine."""

    async def inside() -> T:
        async with open_fleet(state=state) as fleet:
            return await work(fleet)

    return asyncio.run(inside())


# ------------------------------------------------------------------------------------------------- looking


@app.command(epilog="Example:  etude tasks lint my-tasks/")
def lint(directories: Directories, as_json: AsJson = False) -> None:
    """Say what is doubtful in tasks, without running anything. Exit code 1 when there are errors."""
    from etude.tasks.lint import doubt_json, lint_task

    found = {str(directory): lint_task(directory) for directory in tasks_in(directories)}
    if as_json:
        print(json.dumps({name: [doubt_json(doubt) for doubt in doubts] for name, doubts in found.items()}))
    else:
        for name, doubts in found.items():
            for doubt in doubts:
                where = doubt.where if doubt.where.startswith(name) else f"{name}/{doubt.where}"
                print(f"{where}: {doubt.level}: {doubt.message} [{doubt.rule}]")
        levels = Counter(doubt.level for doubts in found.values() for doubt in doubts)
        counted = ", ".join(f"{levels[level]} {level}s" for level in ("error", "warning", "note"))
        print(f"{len(found)} tasks: {counted}", file=sys.stderr)
    if any(doubt.level == "error" for doubts in found.values() for doubt in doubts):
        raise typer.Exit(1)


@app.command(epilog="Example:  etude tasks show my-tasks/fix-add")
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)], as_json: AsJson = False
) -> None:
    """Show a task: what the agent is told, where it works, how it is graded."""
    task = read_task(directory)
    facts = _facts(task)
    if as_json:
        print(json.dumps(facts))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if name not in ("instruction", "steps") and value not in (None, "", [], {}):
            table.add_row(name, escape(value if isinstance(value, str) else json.dumps(value)))
    console = Console()
    console.print(table)
    for name, text in [("", facts["instruction"]), *facts["steps"].items()]:
        if text:
            console.print(f"\n[bold]{escape(name) or 'instruction'}[/bold]")
            console.print(escape(text.strip()))


def _facts(task: Task) -> dict[str, Any]:
    network = task.agent.network or task.machine.network
    files = [path for path in sorted(task.directory.rglob("*")) if path.is_file() and ".git" not in path.parts]
    return {
        "name": task.name,
        "digest": task_digest(task.directory),
        "category": task.category,
        "instruction": task.instruction,
        "steps": {step.name: step.instruction for step in task.steps},
        "network": network.mode + (f" ({', '.join(network.hosts)})" if network.hosts else ""),
        "machine": {key: value for key, value in vars(task.machine).items() if value and key != "network"},
        "agent": {key: value for key, value in vars(task.agent).items() if value and key != "network"},
        "verifier": {key: value for key, value in vars(task.verifier).items() if value and key != "network"},
        "separate": task.separate is not None,
        "metadata": dict(task.metadata),
        "files": [path.relative_to(task.directory).as_posix() for path in files][:200],
    }


@app.command("nano-base", epilog="Example:  etude tasks nano-base runs/nano-data --from stdlib --from site-packages")
def nano_base(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A directory that is not there yet.", show_default=False)],
    sources: Annotated[
        list[str] | None,
        typer.Option("--from", help="Python code: a directory, stdlib, site-packages or a part of it; repeatable."),
    ] = None,
    practice: Annotated[int, typer.Option(min=0, help="Practice sessions.")] = 160_000,
    sessions: Annotated[int, typer.Option(min=0, help="Expert sessions of training tasks.")] = 0,
    drills: Annotated[int, typer.Option(min=0, help="Drills in copying.")] = 40_000,
    code: Annotated[float, typer.Option(min=0.1, help="Megabytes of code.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    processes: Annotated[int | None, typer.Option("--at-once", "-j", min=1, help="By default one a core.")] = None,
) -> None:
    """Make the tokenizer and the corpora of a nano base model; recipes/nano-base.toml trains on them."""
    from etude.system.progress import progress_bars, progress_line
    from etude_nano.base_data import Amounts, make_base_data

    amounts = Amounts(practice=practice, sessions=sessions, drills=drills, code=code, seed=seed)
    with progress_bars() as bars, progress_line("nano-base", bars) as report:
        made = make_base_data(out, sources or ["stdlib", "site-packages"], amounts, report, processes)
    print(json.dumps(made))


# ------------------------------------------------------------------------------------------------- running


@app.command(
    epilog="Examples:\n\n  etude tasks run my-tasks/fix-add --as solution\n\n"
    "  etude tasks run my-tasks/fix-add --as my-commands.sh\n\n"
    "  etude tasks run my-tasks/ --endpoint http://127.0.0.1:8000/v1 --out runs/tasks"
)
def run(
    directories: Directories,
    who: Annotated[
        str, typer.Option("--as", metavar="WHO", help="nothing, solution, or a file of shell commands.")
    ] = "solution",
    model: Annotated[str, typer.Option(help="A checkpoint's directory, or a model of --endpoint.")] = "",
    endpoint: Annotated[str, typer.Option(help="An OpenAI-compatible server; the model works on the tasks.")] = "",
    key_env: Annotated[str, typer.Option(help="The variable that holds the endpoint's key.")] = "",
    turns: Annotated[int, typer.Option(min=1, help="Turns of a session at most.")] = 50,
    out: Annotated[Path | None, typer.Option(help="Keep traces, logs and artifacts here.", show_default=False)] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Grade in the agent's own pod, as Harbor's shared mode does.")
    ] = False,
    maps: Maps = None,
    build_allow: BuildAllow = None,
    allow: Allow = None,
    env: Variables = None,
    at_once: AtOnce = None,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Let somebody work on tasks, grade what came of it, and show the rewards."""
    from etude.tasks.run import Runner, actor_for, model_actor

    provision = provision_of(maps, build_allow, allow, env)
    runner = Runner(provision, in_place, out, at_once)
    paths = tasks_in(directories)
    act = model_actor(model, endpoint, key_env, turns, out) if model or endpoint else actor_for(who)
    rows = with_fleet(state, lambda fleet: runner.run(fleet, paths, act))
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(box=None, header_style="bold")
    for column in ("task", "reward", "seconds", "changed", "note"):
        table.add_column(column, justify="right" if column in ("reward", "seconds", "changed") else "left")
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:g}"
        table.add_row(escape(row["task"]), reward, f"{row['seconds']:.2f}", str(row["changed"]), escape(row["note"]))
    Console().print(table)
    if len(rows) == 1 and rows[0]["log"]:
        print(rows[0]["log"])


@app.command(epilog="Example:  etude tasks validate my-tasks/ --json > report.json")
def validate(
    directories: Directories,
    reruns: Annotated[int, typer.Option(min=1, help="How often nothing and the solution are graded.")] = 3,
    again: Annotated[bool, typer.Option("--again", help="Do not use results that are known.")] = False,
    maps: Maps = None,
    build_allow: BuildAllow = None,
    allow: Allow = None,
    env: Variables = None,
    at_once: AtOnce = None,
    state: State = None,
    as_json: AsJson = False,
) -> None:
    """Admit tasks: nothing fails, the solution passes, reruns agree, no answer to be found. Exit code 1 if not all."""
    from etude.system.progress import progress_line
    from etude.tasks.validate import Report, Shelf, default_shelf, validate_all

    provision = provision_of(maps, build_allow, allow, env)
    paths = tasks_in(directories)
    shelf = Shelf(default_shelf())

    async def work(fleet: Fleet) -> list[Report]:
        with progress_line("validate") as progress:
            done: list[Report] = []

            def note(report: Report) -> None:
                done.append(report)
                progress(len(done), len(paths), f"{sum(each.admitted for each in done)} admitted")

            return await validate_all(
                fleet,
                paths,
                provision=provision,
                reruns=reruns,
                at_once=at_once,
                shelf=None if again else shelf,
                on_report=note,
            )

    try:
        reports = with_fleet(state, work)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the same command goes on where it was") from None
    if as_json:
        print(json.dumps([{**asdict(report), "admitted": report.admitted} for report in reports]))
    else:
        _show_reports(reports)
    if not all(report.admitted for report in reports):
        raise typer.Exit(1)


def _show_reports(reports: list[Any]) -> None:
    from etude.tasks.validate import REASONS

    table = Table(box=None, header_style="bold")
    for column in ("task", "nothing", "solution", "seconds", "verdict", "evidence"):
        table.add_column(column, overflow="fold", no_wrap=column in ("verdict",))
    for report in reports:
        scores = {name: ",".join(f"{score:g}" for score in found) or "-" for name, found in report.scores.items()}
        codes = [reason.code for reason in report.reasons]
        verdict = "[green]admitted[/green]" if report.admitted else "[red]" + escape(", ".join(codes)) + "[/red]"
        evidence = " ".join((report.reasons[0].evidence if report.reasons else "").split())[:200]
        seconds = f"{report.seconds:.1f}" + (" (known)" if report.cached else "")
        row = (report.task, scores.get("noop", "-"), scores.get("solution", "-"), seconds)
        table.add_row(*map(escape, row), verdict, escape(evidence))
    Console().print(table)
    counted = Counter(reason.code for report in reports for reason in report.reasons)
    print(f"{sum(report.admitted for report in reports)} of {len(reports)} admitted")
    for code, count in counted.most_common():
        print(f"  {count:4d}  {code}: {REASONS.get(code, '')}")


# ------------------------------------------------------------------------------------------------- sets


@app.command(epilog="Example:  etude tasks export my-tasks/ --out set/ --name ours/fixes")
def export(
    directories: Directories,
    out: Annotated[Path, typer.Option(help="The directory of the set; must not exist.", show_default=False)],
    name: Annotated[str, typer.Option(metavar="ORG/NAME", help="The set's name.", show_default=False)],
    description: Annotated[str, typer.Option(help="One line about it.")] = "",
    admitted: Annotated[bool, typer.Option("--admitted", help="Only tasks that `validate` has admitted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy tasks as a clean set in the Harbor format, with a dataset.toml."""
    from etude.tasks.export import export_tasks
    from etude.tasks.validate import Shelf, default_shelf

    paths = tasks_in(directories)
    if admitted:
        shelf = Shelf(default_shelf())
        known = {path: shelf.recall(task_digest(path)) for path in paths}
        paths = [path for path, report in known.items() if report is not None and report.admitted]
        if not paths:
            raise InputError("--admitted: none of these tasks was admitted; run `etude tasks validate` on them first")
    made = export_tasks(paths, out, name=name, description=description)
    if as_json:
        print(json.dumps([{**asdict(each), "directory": str(each.directory)} for each in made]))
    else:
        print(f"{out}: {len(made)} tasks")


@app.command(
    "import",
    epilog="Examples:\n\n  etude tasks import swebench tasks/ --out imported/\n\n"
    "  etude tasks import swe-smith rows.jsonl --repositories clones/ --out imported/",
)
def import_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="swebench, swe-smith, swe-gym or swe-rebench.")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Task directories, or rows (JSON lines, Parquet).")],
    out: Annotated[Path, typer.Option(help="Directory of the tasks that are made.", show_default=False)],
    repositories: Annotated[
        Path | None, typer.Option(help="Clones, as OWNER__NAME or OWNER/NAME; without, images are used.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most this many.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make Harbor tasks from SWE-bench task directories, or from rows of SWE-smith, SWE-Gym or SWE-rebench."""
    from etude.tasks.importers import import_tasks

    made, failed = import_tasks(kind, source, out, repositories=repositories, limit=limit)
    if as_json:
        print(json.dumps({"made": [str(path) for path in made], "failed": failed}))
        return
    for instance, why in failed.items():
        print(f"{instance}: {why}", file=sys.stderr)
    print(f"{out}: {len(made)} tasks" + (f", {len(failed)} could not be made" if failed else ""))
    if not made:
        raise EtudeError(f"{source}: no task could be made of it")


mount_generate(app)
