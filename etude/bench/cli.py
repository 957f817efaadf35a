"""`etude bench ...`: one short function per verb. Results on standard output, the rest on standard error."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from etude.errors import EtudeError, InputError, Interrupted
from etude.system.cores import usable_cores
from etude.tasks.cli import Allow, BuildAllow, Maps, State, Variables, provision_of

if TYPE_CHECKING:
    from etude.bench.directory import Place, Question

app = typer.Typer(no_args_is_help=True)

Policies = Annotated[
    list[str],
    typer.Option(
        "--policy",
        metavar="[NAME=]WHO",
        help="A checkpoint's directory, or URL#MODEL of an OpenAI-compatible endpoint; repeatable.",
        show_default=False,
    ),
]
TaskDirectories = Annotated[
    list[Path], typer.Option("--tasks", metavar="DIR", help="A directory of tasks; repeatable.", show_default=False)
]
Samples = Annotated[int, typer.Option("--samples", "-k", min=1, help="Trials of every task.")]
Out = Annotated[Path, typer.Option(help="Directory of the comparison; made if it is not there.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the comparison in --out; policies may be added.")]
AtOnce = Annotated[
    int | None, typer.Option("--at-once", "-j", min=1, help="Trials at once, over all policies; by default one a core.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")]
Limit = Annotated[int | None, typer.Option(min=1, help="At most so many tasks, evenly chosen.", show_default=False)]
KeyEnvs = Annotated[
    list[str] | None,
    typer.Option(
        "--key-env",
        metavar="NAME=VARIABLE",
        help="The variable that holds the key of an endpoint; $ETUDE_API_KEY if not given; repeatable.",
        show_default=False,
    ),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="NAME=IN,OUT[,CACHED]",
        help="Dollars for a million tokens read, made, and read from a cache; repeatable.",
        show_default=False,
    ),
]
Turns = Annotated[int, typer.Option("--budget-turns", min=1, help="Most turns of a session.")]
Tokens = Annotated[
    int | None, typer.Option("--budget-tokens", min=1, help="Most tokens that a session makes.", show_default=False)
]
Seconds = Annotated[
    float | None,
    typer.Option("--budget-seconds", min=0.001, help="Longest session; else the task's own.", show_default=False),
]
AnswerTokens = Annotated[int, typer.Option("--budget-answer", min=1, help="Most tokens of one answer.")]
Temperature = Annotated[float, typer.Option(min=0.0)]
Window = Annotated[int, typer.Option(min=0, help="Tokens of context; 0: what each model has.")]
SummaryMode = Annotated[
    Literal["self", "compaction", "off"],
    typer.Option("--summaries", help="What happens when the window is full; off ends the session."),
]
Reserve = Annotated[int, typer.Option(min=1, help="Tokens of the window kept free for a summary.")]
DialectName = Annotated[
    str, typer.Option(help="How a checkpoint writes calls, where its template does not say.", show_default=False)
]
Tools = Annotated[
    str, typer.Option(metavar="A,B,...", help="Which tools there are; all if not given.", show_default=False)
]
Toolset = Annotated[str, typer.Option(help="Names of the tools: cursor, claude-code or bash.")]
Brief = Annotated[bool, typer.Option("--brief", help="The shortest prompt, for small windows.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the samples of checkpoints.")]
Device = Annotated[str, typer.Option(help="For checkpoints: cpu, cuda, ...")]
Directory = Annotated[Path, typer.Argument(metavar="OUT", help="The directory of a comparison.", show_default=False)]


@app.command(
    epilog="Examples:\n\n  etude bench run --policy base=runs/base --policy tuned=runs/nano/checkpoints/sft-100 "
    "--tasks held-out/ -k 4 --out runs/compare\n\n"
    "  etude bench run --policy runs/mine --policy https://HOST/v1#MODEL --tasks held-out/ --price MODEL=0.5,1.5"
)
def run(
    policies: Policies,
    tasks: TaskDirectories,
    samples: Samples = 1,
    out: Out = Path("runs/bench"),
    resume: Resume = False,
    at_once: AtOnce = None,
    as_json: AsJson = False,
    limit: Limit = None,
    key_envs: KeyEnvs = None,
    prices: Prices = None,
    turns: Turns = 50,
    tokens: Tokens = None,
    seconds: Seconds = None,
    answer: AnswerTokens = 4096,
    temperature: Temperature = 1.0,
    window: Window = 0,
    summaries: SummaryMode = "self",
    reserve: Reserve = 2048,
    dialect: DialectName = "",
    tools: Tools = "",
    toolset: Toolset = "cursor",
    brief: Brief = False,
    seed: Seed = 0,
    device: Device = "auto",
    maps: Maps = None,
    build_allow: BuildAllow = None,
    allow: Allow = None,
    env: Variables = None,
    state: State = None,
) -> None:
    """Compare policies on tasks: each trial a session in a pod, graded; what is done is not done again."""
    from etude.bench.candidates import read_candidates, read_prices
    from etude.bench.directory import Place, Question, check_place, find_named_tasks, look_at_all
    from etude.harness.search.searcher import open_searcher
    from etude.harness.session import Budget
    from etude.harness.summary import Summaries
    from etude.harness.tool_set import ALL_TOOLS, ToolSet
    from etude.harness.tools.executor import shown_tools
    from etude.rollouts.rollout import Settings

    place = Place(Path(os.path.abspath(out)))
    check_place(place, resume)
    candidates = read_candidates(policies, key_envs or ())
    if dialect and not any(each.directory for each in candidates):
        raise InputError(
            f"--dialect {dialect}: there is no checkpoint among the policies, and endpoints have their own"
        )
    environment = ToolSet(
        tools=tuple(name.strip() for name in tools.split(",")) if tools else ALL_TOOLS, naming=toolset, brief=brief
    )
    shown_tools(environment)  # one that does not exist is found out now
    settings = Settings(
        environment=environment,
        budget=Budget(turns, tokens, seconds, answer),
        summaries=Summaries(summaries, reserve=reserve),
        temperature=temperature,
        provision=provision_of(maps, build_allow, allow, env),
        searcher=open_searcher() if "codebase_search" in environment.tools else None,
    )
    found = find_named_tasks(tasks, limit)
    priced = read_prices(prices or (), [each.name for each in candidates])
    known = asyncio.run(look_at_all(place, candidates, dialect, window))
    question = Question(candidates, known, found, samples, settings, seed, priced)
    said, broken = _run(place, question, resume, at_once or max(2, usable_cores()), device, state)
    _show(said, as_json)
    if not as_json:
        print(f"report: {place.report}")
    if broken:
        raise EtudeError("\n".join([*broken, f"what was graded is in {place.root}; --resume goes on from there"]))


@app.command(epilog="Example:  etude bench show runs/compare --price tuned=0.1,0.4")
def show(
    directory: Directory,
    prices: Prices = None,
    html: Annotated[Path | None, typer.Option(help="Write the page there.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show what the trials of a comparison say up to now; one that is running is not disturbed."""
    from etude.bench.candidates import read_prices
    from etude.bench.directory import Place, read_questions
    from etude.bench.report import page
    from etude.bench.run import describe
    from etude.runs.layout import write_whole

    place = Place(Path(os.path.abspath(directory)))
    names = [policy["name"] for policy in read_questions(place)["policies"]]
    said = describe(place, read_prices(prices or (), names))
    if html is not None:
        write_whole(html, page(said, place.root.name))
    _show(said, as_json)


def _run(
    place: Place, question: Question, resume: bool, at_once: int, device: str, state: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """Run what is missing; what there is then, and what broke."""
    from etude.bench.directory import open_place
    from etude.bench.run import run_trials, shown_progress, write_outputs
    from etude.pods.fleet import open_fleet

    async def work() -> dict[str, EtudeError]:
        whole = asyncio.current_task()
        assert whole is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, whole.cancel)
        with shown_progress([each.name for each in question.candidates]) as report:
            async with open_fleet(state=state) as fleet:
                return await run_trials(place, question, fleet, at_once=at_once, device=device, report=report)

    with open_place(place, question, resume):
        try:
            broken = asyncio.run(work())
        except (KeyboardInterrupt, asyncio.CancelledError):
            write_outputs(place)
            raise Interrupted("interrupted; the same command with --resume goes on where it was") from None
        said = write_outputs(place)
    lost = [policy["name"] for policy in said["policies"] if not policy["tasks"] and policy["name"] not in broken]
    whys = dict.fromkeys(lost, f"every task was given up; {place.summary} says why")
    return said, [f"policy {name}: {why}" for name, why in {**broken, **whys}.items()]


def _show(said: dict[str, Any], as_json: bool) -> None:
    from etude.bench.report import conclusions, results_table

    if as_json:
        print(json.dumps(said))
        return
    console = Console(width=None if Console().is_terminal else 140)
    console.print(results_table(said))
    for line in conclusions(said):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
