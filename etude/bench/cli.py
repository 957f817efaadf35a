"""The command line of `etude bench`. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.bench import build_cli
from etude.errors import EtudeError, InputError, Interrupted
from etude.harness.model_options import (
    Brief,
    DialectName,
    Reserve,
    SummaryModeName,
    Temperature,
    Tools,
    Toolset,
    Window,
    session_changes,
)
from etude.pods.cli.options import PodHosts, pod_settings
from etude.pods.settings import PodSettings
from etude.system.cores import usable_cores
from etude.system.terminal import Console, say
from etude.tasks.cli import Allow, BuildAllow, Maps, State, Variables, host_settings_from_options

if TYPE_CHECKING:
    from etude.bench.directory import BenchDirectory, BenchSpec
    from etude.bench.spending import BenchLimits

app = typer.Typer(no_args_is_help=True)
build_cli.mount(app)

Policies = Annotated[
    list[str],
    typer.Option(
        "--policy",
        metavar="[NAME=]POLICY",
        help="Directory of a checkpoint, or URL#MODEL of an OpenAI-compatible endpoint; repeatable.",
        show_default=False,
    ),
]
TaskDirectories = Annotated[
    list[Path], typer.Option("--tasks", metavar="DIR", help="Directory of tasks; repeatable.", show_default=False)
]
Samples = Annotated[int, typer.Option("--samples", "-k", min=1, help="Trials per task and policy.")]
Out = Annotated[Path, typer.Option(help="Directory of the comparison; created if it does not exist.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the comparison in --out; policies may be added.")]
AtOnce = Annotated[
    int | None,
    typer.Option("--at-once", "-j", min=1, help="Concurrent trials over all policies; default: one per core."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON instead of a table.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Maximum number of tasks, evenly chosen.", show_default=False)]
KeyEnvs = Annotated[
    list[str] | None,
    typer.Option(
        "--key-env",
        metavar="NAME=VARIABLE",
        help="Environment variable that holds an endpoint's API key; default: ETUDE_API_KEY; repeatable.",
        show_default=False,
    ),
]
Prices = Annotated[
    list[str] | None,
    typer.Option(
        "--price",
        metavar="NAME=IN,OUT[,CACHED]",
        help="Dollars per million prompt, sampled, and cached prompt tokens; repeatable.",
        show_default=False,
    ),
]
RequestsPerMinute = Annotated[
    list[str] | None,
    typer.Option(
        "--requests-per-minute",
        metavar="[NAME=]N",
        help="Most requests a minute to each endpoint, retries included; repeatable.",
        show_default=False,
    ),
]
TokensPerMinute = Annotated[
    list[str] | None,
    typer.Option(
        "--tokens-per-minute",
        metavar="[NAME=]N",
        help="Most prompt and sampled tokens of the requests sent to each endpoint within a minute; repeatable.",
        show_default=False,
    ),
]
MaxCost = Annotated[
    float | None,
    typer.Option(min=0.0, help="Dollars that all endpoints together may cost; needs prices.", show_default=False),
]
Efforts = Annotated[
    list[str] | None,
    typer.Option(
        "--effort",
        metavar="[NAME=]LEVEL,...",
        help="Levels of reasoning_effort: a variant NAME@LEVEL of each endpoint; repeatable.",
        show_default=False,
    ),
]
ThinkingBudgets = Annotated[
    list[str] | None,
    typer.Option(
        "--thinking-budget",
        metavar="[NAME=]N,...",
        help="Most tokens of thinking in a turn: a variant NAME@N of each endpoint; repeatable.",
        show_default=False,
    ),
]
ThinkingFormat = Annotated[
    str,
    typer.Option(
        metavar="FORMAT",
        help="Field of the thinking budget: anthropic, openrouter, gemini, qwen or vllm; default: by the host.",
        show_default=False,
    ),
]
Turns = Annotated[
    int | None,
    typer.Option(
        "--budget-turns", min=1, help="Maximum turns of a session; default: as trained, else 50.", show_default=False
    ),
]
Tokens = Annotated[
    int | None, typer.Option("--budget-tokens", min=1, help="Maximum tokens sampled in a session.", show_default=False)
]
Seconds = Annotated[
    float | None,
    typer.Option(
        "--budget-seconds", min=0.001, help="Time limit of a session; default: the task's own.", show_default=False
    ),
]
AnswerTokens = Annotated[
    int | None, typer.Option("--budget-answer", min=1, help="Maximum tokens of one turn.", show_default=False)
]
Seed = Annotated[int, typer.Option(min=0, help="Sampling seed of checkpoints.")]
Device = Annotated[str, typer.Option(help="Device for checkpoints: auto, cpu, cuda, ...")]
Directory = Annotated[Path, typer.Argument(metavar="OUT", help="Directory of a comparison.", show_default=False)]


@app.command(
    epilog="Examples:\n\n  etude bench run --policy base=runs/base --policy tuned=runs/nano/checkpoints/sft-20 "
    "--tasks held-out/ -k 4 --out runs/compare\n\n"
    "  etude bench run --policy runs/mine --policy https://HOST/v1#MODEL --tasks held-out/ --price MODEL=0.5,1.5 "
    "--max-cost 20 --effort low,high --requests-per-minute 60"
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
    max_cost: MaxCost = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    efforts: Efforts = None,
    thinking_budgets: ThinkingBudgets = None,
    thinking_format: ThinkingFormat = "",
    turns: Turns = None,
    tokens: Tokens = None,
    seconds: Seconds = None,
    answer: AnswerTokens = None,
    temperature: Temperature = None,
    window: Window = None,
    summaries: SummaryModeName = None,
    reserve: Reserve = None,
    dialect: DialectName = "",
    tools: Tools = "",
    toolset: Toolset = "",
    brief: Brief = None,
    seed: Seed = 0,
    device: Device = "auto",
    maps: Maps = None,
    build_allow: BuildAllow = None,
    allow: Allow = None,
    env: Variables = None,
    state: State = None,
    pod_hosts: PodHosts = None,
) -> None:
    """Compare policies on tasks. Each trial is a session in a pod, scored by the task's verifier."""
    from etude.bench.directory import BenchDirectory, BenchSpec, check_directory, find_named_tasks, probe_policies
    from etude.bench.policies import parse_policies, parse_prices
    from etude.bench.spending import BenchLimits
    from etude.bench.variants import check_thinking_budgets, expand_variants, parse_rates, prices_of, with_base_names

    bench = BenchDirectory(Path(os.path.abspath(out)))
    check_directory(bench, resume)
    compared = parse_policies(policies, key_envs or ())
    rates = parse_rates(compared, requests_per_minute or (), tokens_per_minute or ())
    compared = expand_variants(compared, efforts or (), thinking_budgets or (), thinking_format)
    if dialect and not any(each.directory for each in compared):
        raise InputError(f"--dialect {dialect}: no checkpoint among the policies, and endpoints have their own dialect")
    changes = session_changes(
        tools=tools,
        toolset=toolset,
        brief=brief,
        window=window,
        temperature=temperature,
        dialect=dialect,
        summaries=summaries,
        reserve=reserve,
        turns=turns,
        tokens=tokens,
        seconds=seconds,
        max_turn_tokens=answer,
    )
    host_settings = host_settings_from_options(maps, build_allow, allow, env)
    found = find_named_tasks(tasks, limit)
    names = [each.name for each in compared]
    token_prices = prices_of(names, parse_prices(prices or (), with_base_names(names)))
    limits = BenchLimits(rates, max_cost)
    limits.check_prices(compared, token_prices)
    profiles = asyncio.run(probe_policies(bench, compared, changes))
    check_thinking_budgets(compared, {name: each.session.budget.max_turn_tokens for name, each in profiles.items()})
    spec = BenchSpec(compared, profiles, found, samples, host_settings, seed, token_prices)
    at_once, pods = at_once or max(2, usable_cores()), pod_settings(pod_hosts)
    summary, errors = _run(bench, spec, limits, resume, at_once, device, state, pods)
    _show(summary, as_json)
    if not as_json:
        print(f"report: {bench.report}")
    if errors:
        raise EtudeError("\n".join([*errors, f"the scored trials are in {bench.root}; --resume runs the others"]))


@app.command(epilog="Example:  etude bench show runs/compare --price tuned=0.1,0.4")
def show(
    directory: Directory,
    prices: Prices = None,
    html: Annotated[Path | None, typer.Option(help="Write the HTML report to this file.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Show the results of a comparison so far; it may be running."""
    from etude.bench.directory import BenchDirectory, read_spec
    from etude.bench.policies import parse_prices
    from etude.bench.report import render_page
    from etude.bench.run import describe
    from etude.bench.variants import prices_of, with_base_names
    from etude.files import write_atomically

    bench = BenchDirectory(Path(os.path.abspath(directory)))
    names = [policy["name"] for policy in read_spec(bench)["policies"]]
    summary = describe(bench, prices_of(names, parse_prices(prices or (), with_base_names(names))))
    if html is not None:
        write_atomically(html, render_page(summary, bench.root.name))
    _show(summary, as_json)


@app.command(
    epilog="Examples:\n\n  etude bench compare runs/monday runs/friday\n\n  etude bench compare runs/a#base runs/b#rl"
)
def compare(
    before: Annotated[str, typer.Argument(metavar="A[#POLICY]", show_default=False)],
    after: Annotated[str, typer.Argument(metavar="B[#POLICY]", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compare two results on the same tasks: how much better B is than A, with an interval, and what else differs."""
    from etude.bench.compare import compare_results, comparison_lines, read_pairs

    found = [compare_results(*pair) for pair in read_pairs(before, after)]
    if as_json:
        print(json.dumps(found))
        return
    for each in found:
        say("\n".join(comparison_lines(each)))


@app.command(
    epilog="Examples:\n\n  etude bench stats tasks/v1 tasks/v2 --results runs/compare\n\n"
    "  etude bench stats tasks/ --cutoff 2026-01-31"
)
def stats(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Directories of tasks.", show_default=False)
    ],
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--results", metavar="OUT[#POLICY]", help="Results with the solve rates; repeatable.", show_default=False
        ),
    ] = None,
    cutoff: Annotated[
        str, typer.Option(metavar="DATE", help="A model's cutoff: which tasks are newer.", show_default=False)
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Describe sets of tasks side by side: size of the changes, requests, categories, difficulty and age."""
    from etude.bench.stats import describe_benchmarks, read_date
    from etude.bench.stats_table import stats_table
    from etude.system.progress import progress_line

    day = read_date(cutoff, "--cutoff") if cutoff else None
    with progress_line("read") as progress:
        found = describe_benchmarks(directories, results or (), day, progress)
    if as_json:
        print(json.dumps(found))
        return
    console = Console(width=None if Console().is_terminal else 140)
    console.print(stats_table(found))
    if found["common"] is not None:
        say(f"{found['common']} tasks are the same in all of them")


def _run(
    bench: BenchDirectory,
    spec: BenchSpec,
    limits: BenchLimits,
    resume: bool,
    at_once: int,
    device: str,
    state: Path | None,
    pods: PodSettings,
) -> tuple[dict[str, Any], list[str]]:
    """Run the missing trials; return the summary and the errors."""
    from etude.bench.directory import lock_directory
    from etude.bench.run import run_trials, run_with_fleet, write_outputs
    from etude.bench.spending import UsageLedger, endpoint_limits

    with lock_directory(bench, spec, resume):
        ledger = UsageLedger(bench.usage, spec.prices, limits.max_cost)
        endpoints = endpoint_limits(spec.policies, limits.rates, ledger)
        work = partial(
            run_trials,
            bench,
            spec,
            at_once=at_once,
            device=device,
            limits=endpoints,
            may_start=ledger.start_rule,
        )
        try:
            errors = run_with_fleet([each.name for each in spec.policies], state, pods, work)
        except (KeyboardInterrupt, asyncio.CancelledError):
            write_outputs(bench)
            raise Interrupted("interrupted; the same command with --resume continues") from None
        summary = write_outputs(bench, ledger.stop_reason())
    if ledger.declined:
        return summary, [f"policy {name}: {reason}" for name, reason in errors.items()]
    lost = [policy["name"] for policy in summary["policies"] if not policy["tasks"] and policy["name"] not in errors]
    reasons = dict.fromkeys(lost, f"every task was given up; {bench.summary} has the reasons")
    return summary, [f"policy {name}: {reason}" for name, reason in {**errors, **reasons}.items()]


def _show(summary: dict[str, Any], as_json: bool) -> None:
    from etude.bench.report import conclusions, results_table

    if as_json:
        print(json.dumps(summary))
        return
    console = Console(width=None if Console().is_terminal else 140)
    console.print(results_table(summary))
    for line in conclusions(summary):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
