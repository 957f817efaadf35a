"""The `etude tasks` commands. Results go to standard output, everything else to standard error."""

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
from rich.markup import escape
from rich.table import Table

from etude.errors import EtudeError, InputError, Interrupted
from etude.harness.model_options import (
    Brief,
    ModelOptions,
    Temperature,
    Tools,
    Toolset,
    Window,
    session_changes,
)
from etude.pods.cli.options import PodHosts, pod_settings
from etude.pods.fleet import Fleet, open_fleet
from etude.pods.pod import Egress
from etude.system.terminal import Console, say
from etude.tasks.base_images import HostSettings
from etude.tasks.generators.cli import mount as mount_generate
from etude.tasks.harbor import find_tasks, read_task, task_digest
from etude.tasks.installation.cli import mount as mount_install
from etude.tasks.task import Task

app = typer.Typer(no_args_is_help=True)
T = TypeVar("T")

Directories = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Tasks, or directories of tasks.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
State = Annotated[
    Path | None,
    typer.Option(help="State directory of pods. Default: $ETUDE_PODS, else one in your home.", show_default=False),
]
Maps = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="FROM=IMAGE", help="Use this image of the store for a name after FROM; repeatable."),
]
BuildAllow = Annotated[
    list[str] | None,
    typer.Option("--build-allow", metavar="HOST[:PORT]", help="Allow RUN to connect to this host; repeatable."),
]
Allow = Annotated[
    list[str] | None,
    typer.Option(
        "--allow", metavar="HOST[:PORT]", help="Allow tasks with a public network to connect to this host; repeatable."
    ),
]
Variables = Annotated[
    list[str] | None, typer.Option("--env", metavar="K=V", help="Value of ${K} in task.toml; repeatable.")
]
AtOnce = Annotated[int | None, typer.Option("--at-once", "-j", min=1, help="Concurrent tasks. Default: one per core.")]


def host_settings_from_options(
    maps: list[str] | None, build: list[str] | None, allow: list[str] | None, env: list[str] | None
) -> HostSettings:
    """Return the host settings that the command-line options describe."""
    return HostSettings(
        images=_pairs(maps, "--map", "FROM=IMAGE"),
        build_egress=Egress.to(*build or (), transparent=True, private=True),
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


def find_all_tasks(directories: list[Path]) -> list[Path]:
    """Return all task directories at and below these; raise InputError if there is none."""
    found = [task for directory in directories for task in find_tasks(directory)]
    if not found:
        raise InputError(f"{', '.join(map(str, directories))}: no task found (a directory with a task.toml)")
    return found


def with_fleet(state: Path | None, hosts: list[str] | None, work: Callable[[Fleet], Coroutine[Any, Any, T]]) -> T:
    """Run an async function with a fleet of pods on this machine, or on the hosts of `--pod-host`."""

    async def inside() -> T:
        async with open_fleet(pods=pod_settings(hosts), state=state) as fleet:
            return await work(fleet)

    return asyncio.run(inside())


# ------------------------------------------------------------------------------------------------- reading


@app.command(epilog="Example:  etude tasks lint my-tasks/")
def lint(directories: Directories, as_json: AsJson = False) -> None:
    """Lint tasks without running anything. Exit code 1 if there are errors."""
    from etude.tasks.lint import finding_json, lint_task

    found = {str(directory): lint_task(directory) for directory in find_all_tasks(directories)}
    if as_json:
        print(json.dumps({name: [finding_json(finding) for finding in findings] for name, findings in found.items()}))
    else:
        for name, findings in found.items():
            for finding in findings:
                where = finding.where if finding.where.startswith(name) else f"{name}/{finding.where}"
                say(f"{where}: {finding.level}: {finding.message} [{finding.rule}]")
        levels = Counter(finding.level for findings in found.values() for finding in findings)
        counted = ", ".join(f"{levels[level]} {level}s" for level in ("error", "warning", "note"))
        print(f"{len(found)} tasks: {counted}", file=sys.stderr)
    if any(finding.level == "error" for findings in found.values() for finding in findings):
        raise typer.Exit(1)


@app.command(epilog="Example:  etude tasks show my-tasks/fix-add")
def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", show_default=False)], as_json: AsJson = False
) -> None:
    """Show a task: its instruction, machine, agent and verifier settings."""
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
        "separate": task.verifier_machine is not None,
        "metadata": dict(task.metadata),
        "files": [path.relative_to(task.directory).as_posix() for path in files][:200],
    }


@app.command(epilog="Example:  etude tasks leaks held-out/ --training tasks/ --training corpus/")
def leaks(
    measured: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Measured tasks, or directories of them.", show_default=False)
    ],
    training: Annotated[
        list[Path], typer.Option("--training", help="Training tasks, a corpus, or files of text; repeatable.")
    ],
    as_json: AsJson = False,
) -> None:
    """Find training data that contains the answers of measured tasks. Exit code 1 if there is any."""
    from etude.tasks.leaks import find_leaks, measured_answers

    answers = measured_answers(measured)
    if not answers.tasks:
        raise InputError(f"{', '.join(map(str, measured))}: no task found (a directory with a task.toml)")
    found = list(find_leaks(answers, training))
    if as_json:
        print(json.dumps({"tasks": answers.tasks, "leaks": [asdict(leak) for leak in found]}))
    else:
        for leak in found:
            say(f"{leak.task}: its answer is in {leak.source}\n{leak.definition}")
        leaked = len({leak.task for leak in found})
        print(f"{len(found)} leaks: {leaked} of {answers.tasks} measured tasks are given away by training data")
    raise typer.Exit(1 if found else 0)


# ------------------------------------------------------------------------------------------------- running


@app.command(
    epilog="Examples:\n\n  etude tasks run my-tasks/fix-add --as solution\n\n"
    "  etude tasks run my-tasks/fix-add --as my-commands.sh\n\n"
    "  etude tasks run my-tasks/ --endpoint http://127.0.0.1:8000/v1 --out runs/tasks"
)
def run(
    directories: Directories,
    agent_name: Annotated[
        str, typer.Option("--as", metavar="AGENT", help="nothing, solution, or a file of shell commands.")
    ] = "solution",
    model: Annotated[str, typer.Option(help="A checkpoint directory, or a model of --endpoint, to run as agent.")] = "",
    endpoint: Annotated[str, typer.Option(help="An OpenAI-compatible server whose model runs as agent.")] = "",
    key_env: Annotated[str, typer.Option(help="Environment variable with the endpoint's key.")] = "",
    tools: Tools = "",
    toolset: Toolset = "",
    brief: Brief = None,
    window: Window = None,
    temperature: Temperature = None,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Maximum turns of a session; default: as trained, else 50.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory for traces, logs and artifacts.", show_default=False)
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Run the verifier in the agent's own pod, like Harbor's shared mode.")
    ] = False,
    maps: Maps = None,
    build_allow: BuildAllow = None,
    allow: Allow = None,
    env: Variables = None,
    at_once: AtOnce = None,
    state: State = None,
    pod_hosts: PodHosts = None,
    as_json: AsJson = False,
) -> None:
    """Run one trial of each task and show the rewards."""
    from etude.tasks.run import TrialRunner, agent_by_name, model_agent

    host_settings = host_settings_from_options(maps, build_allow, allow, env)
    runner = TrialRunner(host_settings, in_place, out, at_once)
    paths = find_all_tasks(directories)
    changes = session_changes(
        tools=tools, toolset=toolset, brief=brief, window=window, temperature=temperature, turns=turns
    )
    chosen = ModelOptions(model, endpoint, key_env, session=changes)
    agent = model_agent(chosen) if model or endpoint else agent_by_name(agent_name)
    rows = with_fleet(state, pod_hosts, lambda fleet: runner.run(fleet, paths, agent))
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
        say(rows[0]["log"])


@app.command(epilog="Example:  etude tasks validate my-tasks/ --json > report.json")
def validate(
    directories: Directories,
    reruns: Annotated[int, typer.Option(min=1, help="Verifier runs each for doing nothing and the solution.")] = 3,
    again: Annotated[bool, typer.Option("--again", help="Ignore cached reports.")] = False,
    maps: Maps = None,
    build_allow: BuildAllow = None,
    allow: Allow = None,
    env: Variables = None,
    at_once: AtOnce = None,
    state: State = None,
    pod_hosts: PodHosts = None,
    as_json: AsJson = False,
) -> None:
    """Admit tasks for which doing nothing fails, the solution passes, reruns agree and nothing leaks the solution.

    Exit code 1 if a task is not admitted.
    """
    from etude.system.progress import progress_line
    from etude.tasks.validate import ValidationCache, ValidationReport, default_validation_cache, validate_all

    host_settings = host_settings_from_options(maps, build_allow, allow, env)
    paths = find_all_tasks(directories)
    cache = ValidationCache(default_validation_cache())

    async def work(fleet: Fleet) -> list[ValidationReport]:
        with progress_line("validate") as progress:
            done: list[ValidationReport] = []

            def note(report: ValidationReport) -> None:
                done.append(report)
                progress(len(done), len(paths), f"{sum(each.admitted for each in done)} admitted")

            return await validate_all(
                fleet,
                paths,
                host_settings=host_settings,
                reruns=reruns,
                at_once=at_once,
                cache=None if again else cache,
                on_report=note,
            )

    try:
        reports = with_fleet(state, pod_hosts, work)
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again to resume") from None
    if as_json:
        print(json.dumps([{**asdict(report), "admitted": report.admitted} for report in reports]))
    else:
        _show_reports(reports)
    if not all(report.admitted for report in reports):
        raise typer.Exit(1)


def _show_reports(reports: list[Any]) -> None:
    from etude.tasks.validate import REASONS

    table = Table(box=None, header_style="bold")
    for column in ("task", "nothing", "solution", "seconds", "result", "evidence"):
        table.add_column(column, overflow="fold", no_wrap=column == "result")
    for report in reports:
        scores = {name: ",".join(f"{score:g}" for score in found) or "-" for name, found in report.scores.items()}
        codes = [reason.code for reason in report.reasons]
        result = "[green]admitted[/green]" if report.admitted else "[red]" + escape(", ".join(codes)) + "[/red]"
        evidence = " ".join((report.reasons[0].evidence if report.reasons else "").split())[:200]
        seconds = f"{report.seconds:.1f}" + (" (cached)" if report.cached else "")
        row = (report.task, scores.get("noop", "-"), scores.get("solution", "-"), seconds)
        table.add_row(*map(escape, row), result, escape(evidence))
    Console().print(table)
    counted = Counter(reason.code for report in reports for reason in report.reasons)
    print(f"{sum(report.admitted for report in reports)} of {len(reports)} admitted")
    for code, count in counted.most_common():
        print(f"  {count:4d}  {code}: {REASONS.get(code, '')}")


# ------------------------------------------------------------------------------------------------- task sets


@app.command(epilog="Example:  etude tasks export my-tasks/ --out set/ --name ours/fixes")
def export(
    directories: Directories,
    out: Annotated[Path, typer.Option(help="Directory of the set; must not exist.", show_default=False)],
    name: Annotated[str, typer.Option(metavar="ORG/NAME", help="Name of the set.", show_default=False)],
    description: Annotated[str, typer.Option(help="One-line description.")] = "",
    admitted: Annotated[bool, typer.Option("--admitted", help="Export only tasks that `validate` admitted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Copy tasks as a clean set in the Harbor format, with a dataset.toml."""
    from etude.tasks.export import export_tasks
    from etude.tasks.validate import ValidationCache, default_validation_cache

    paths = find_all_tasks(directories)
    if admitted:
        cache = ValidationCache(default_validation_cache())
        reports = {path: cache.load(task_digest(path)) for path in paths}
        paths = [path for path, report in reports.items() if report is not None and report.admitted]
        if not paths:
            raise InputError("--admitted: none of these tasks was admitted; run `etude tasks validate` on them first")
    exported = export_tasks(paths, out, name=name, description=description)
    if as_json:
        print(json.dumps([{**asdict(each), "directory": str(each.directory)} for each in exported]))
    else:
        print(f"{out}: {len(exported)} tasks")


@app.command(
    "import",
    epilog="Examples:\n\n  etude tasks import swebench tasks/ --out imported/\n\n"
    "  etude tasks import swe-smith rows.jsonl --repositories clones/ --out imported/",
)
def import_(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="swebench, swe-smith, swe-gym or swe-rebench.")],
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="Task directories, or rows (JSON lines, Parquet).")],
    out: Annotated[Path, typer.Option(help="Directory for the new tasks.", show_default=False)],
    repositories: Annotated[
        Path | None,
        typer.Option(help="Directory of clones, as OWNER__NAME or OWNER/NAME. Default: use the rows' images."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum number of tasks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make Harbor tasks from SWE-bench task directories, or from rows of SWE-smith, SWE-Gym or SWE-rebench."""
    from etude.tasks.importers import import_tasks

    made, failed = import_tasks(kind, source, out, repositories=repositories, limit=limit)
    if as_json:
        print(json.dumps({"made": [str(path) for path in made], "failed": failed}))
        return
    for instance, why in failed.items():
        say(f"{instance}: {why}", file=sys.stderr)
    print(f"{out}: {len(made)} tasks" + (f", {len(failed)} failed" if failed else ""))
    if not made:
        raise EtudeError(f"{source}: no task could be imported; the reasons are listed above")


mount_generate(app)
mount_install(app)
