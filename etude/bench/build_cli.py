"""`etude bench build`: mounted by etude/bench/cli.py."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from etude.errors import InputError, Interrupted
from etude.pods.cli.options import PodHosts, pod_settings
from etude.pods.settings import PodSettings
from etude.system.terminal import Console
from etude.tasks.cli import Maps, State, host_settings_from_options

if TYPE_CHECKING:
    from etude.tasks.installation.setup_pod import InstallOptions
    from etude.tasks.mining.history import History
    from etude.tasks.mining.options import MiningOptions
    from etude.tasks.mining.report import MiningReport

EPILOG = (
    "Examples:\n\n  etude bench build clones/humanize --out tasks/humanize --count 20\n\n"
    "  etude bench build . --out tasks/ours --split 2026-01-01 --logs --session-logs ~/sessions"
)

Issues = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="Texts of issues as NUMBER.md; used where a commit names one.", show_default=False
    ),
]
SessionLogs = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="ATIF logs; the session whose lines a commit kept has its request.", show_default=False
    ),
]
SplitAt = Annotated[
    str,
    typer.Option(
        metavar="DATE|FRACTION",
        help="Newer tasks go to OUT/bench, older ones to OUT/train: from a date, or a fraction for the benchmark.",
        show_default=False,
    ),
]
SetupHosts = Annotated[
    list[str] | None,
    typer.Option("--build-allow", metavar="HOST", help="Further host that set-up may connect to; repeatable."),
]


def build(
    repository: Annotated[
        str, typer.Argument(metavar="REPO[@REV]", help="A clone, bare or with a working tree.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="Directory of the tasks; an earlier build in it is resumed.")],
    count: Annotated[int, typer.Option(min=1, help="Maximum number of tasks; the newest changes first.")] = 50,
    since: Annotated[str, typer.Option(metavar="DATE", help="Only changes since this date.", show_default=False)] = "",
    limit_commits: Annotated[
        int | None, typer.Option(min=1, help="Look at this many changes at most.", show_default=False)
    ] = None,
    min_files: Annotated[int, typer.Option(min=1, help="Least number of source files that a change touches.")] = 1,
    min_lines: Annotated[int, typer.Option(min=1, help="Least number of source lines that a change touches.")] = 3,
    max_lines: Annotated[
        int, typer.Option(min=1, help="Greatest number of source lines that a change touches.")
    ] = 1500,
    min_noticed: Annotated[
        float,
        typer.Option(min=0, max=1, help="Least share of dropped hunks and stubbed functions that tests notice."),
    ] = 0.75,
    min_fully_noticed: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of tasks whose tests notice every one of these.")
    ] = 0.8,
    prompts: Annotated[
        Literal["terse", "full"], typer.Option(help="Requests as people write them, or over-specified ones.")
    ] = "terse",
    issues: Issues = None,
    session_logs: SessionLogs = None,
    logs: Annotated[bool, typer.Option("--logs", help="Add tracebacks and logs of CI jobs and services.")] = False,
    split: SplitAt = "",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Number of concurrent changes.")] = 2,
    index_url: Annotated[
        str,
        typer.Option(help="Index of Python packages; default: that of pip on this host.", show_default=False),
    ] = "",
    maps: Maps = None,
    allow: SetupHosts = None,
    state: State = None,
    pod_hosts: PodHosts = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the yields as JSON instead of a table.")] = False,
) -> None:
    """Make benchmark tasks from the changes in a repository's history."""
    from etude.tasks.mining.classify import MiningLimits
    from etude.tasks.mining.history import open_history
    from etude.tasks.mining.install_parent import install_options
    from etude.tasks.mining.options import MiningOptions, read_issues
    from etude.tasks.mining.session_logs import read_session_logs
    from etude.tasks.mining.time_split import TimeSplit

    if min_lines > max_lines:
        raise InputError(f"--min-lines {min_lines} is above --max-lines {max_lines}")
    options = MiningOptions(
        out=out,
        count=count,
        since=since,
        limit_commits=limit_commits,
        limits=MiningLimits(min_lines=min_lines, max_lines=max_lines, min_files=min_files),
        min_noticed=min_noticed,
        min_fully_noticed=min_fully_noticed,
        prompts=prompts,
        logs=logs,
        jobs=jobs,
        issues=read_issues(issues) if issues else {},
        sessions=tuple(read_session_logs(session_logs)) if session_logs else (),
        split=TimeSplit.parse(split) if split else None,
    )
    images = dict(host_settings_from_options(maps, None, None, None).images)
    installing = install_options(images, tuple(allow or ()), index_url)
    history = open_history(repository)
    try:
        report = asyncio.run(_work(history, options, installing, state, pod_settings(pod_hosts)))
    except KeyboardInterrupt:
        raise Interrupted("interrupted; run the same command again to resume") from None
    print(json.dumps(report.as_json())) if as_json else print_report(report)


async def _work(
    history: History, options: MiningOptions, installing: InstallOptions, state: Path | None, pods: PodSettings
) -> MiningReport:
    from etude.pods.fleet import open_fleet
    from etude.system.progress import progress_line
    from etude.tasks.mining.install_parent import default_installer, mining_host_settings
    from etude.tasks.mining.report import build_benchmark

    async with open_fleet(pods=pods, state=state) as fleet:
        host_settings = await mining_host_settings(fleet, dict(installing.images))
        with progress_line("build") as show:
            return await build_benchmark(fleet, history, options, default_installer(installing), host_settings, show)


def print_report(report: MiningReport) -> None:
    """Print the yield by reason, and what the mutations say about the tests."""
    console = Console(width=None if Console().is_terminal else 140)
    table = Table(box=None, header_style="bold")
    table.add_column("fate of a change")
    table.add_column("changes", justify="right")
    for reason, number in report.reasons.items():
        table.add_row(reason, str(number))
    console.print(table)
    for line in report.sentences():
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def mount(app: typer.Typer) -> None:
    """Add the `build` command to `etude bench`."""
    app.command("build", epilog=EPILOG)(build)
