"""The command `etude data sessions`. Results go to standard output, everything else to standard error."""

from __future__ import annotations

import asyncio
import json
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.bench.cli import (
    AnswerTokens,
    Device,
    Limit,
    RequestsPerMinute,
    Seconds,
    Seed,
    TaskDirectories,
    Tokens,
    TokensPerMinute,
    Turns,
)
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
from etude.system.terminal import say
from etude.tasks.cli import Allow, BuildAllow, Maps, State, Variables, host_settings_from_options

if TYPE_CHECKING:
    from etude.bench.directory import BenchDirectory, BenchSpec
    from etude.bench.policies import TokenPrice
    from etude.bench.sessions import CollectionLimits, RowWriter

app = typer.Typer(no_args_is_help=True)

Policy = Annotated[
    str,
    typer.Option(
        metavar="POLICY",
        help="URL#MODEL of an OpenAI-compatible endpoint, or the directory of a checkpoint.",
        show_default=False,
    ),
]
Samples = Annotated[int, typer.Option("--samples", "-k", min=1, help="Sessions per task.")]
Out = Annotated[Path, typer.Option(help="Directory of the sessions; a collection that is there is continued.")]
TokenizerDirectory = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        metavar="MODELDIR",
        help="Model to be trained: rows have the exact tokens of its dialect; default: a checkpoint's own.",
        show_default=False,
    ),
]
MaxSessions = Annotated[int | None, typer.Option(min=1, help="Stop after so many scored sessions.", show_default=False)]
MaxCost = Annotated[
    float | None,
    typer.Option(min=0.0, help="Dollars that the endpoint may cost; needs the prices.", show_default=False),
]
PriceIn = Annotated[float | None, typer.Option(min=0.0, help="Dollars per million prompt tokens.", show_default=False)]
PriceOut = Annotated[
    float | None, typer.Option(min=0.0, help="Dollars per million sampled tokens.", show_default=False)
]
PriceCached = Annotated[
    float | None,
    typer.Option(min=0.0, help="Dollars per million cached prompt tokens; default: --price-in.", show_default=False),
]
KeyEnv = Annotated[
    str, typer.Option(metavar="VARIABLE", help="Environment variable of the API key; default: ETUDE_API_KEY.")
]
AtOnce = Annotated[
    int | None, typer.Option("--at-once", "-j", min=1, help="Concurrent sessions; default: one per core.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]


@app.callback()
def data() -> None:
    """Collect sessions."""


@app.command(
    epilog="Examples:\n\n  etude data sessions --policy https://HOST/v1#MODEL --tasks tasks/ --out runs/sessions "
    "--tokenizer base/nano --max-cost 5 --price-in 0.5 --price-out 1.5\n\n"
    "  etude data sessions --policy runs/nano/checkpoints/rl-12 --tasks tasks/ -k 4 --out runs/own-sessions"
)
def sessions(
    policy: Policy,
    tasks: TaskDirectories,
    out: Out,
    samples: Samples = 1,
    tokenizer: TokenizerDirectory = None,
    max_sessions: MaxSessions = None,
    max_cost: MaxCost = None,
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    price_cached: PriceCached = None,
    requests_per_minute: RequestsPerMinute = None,
    tokens_per_minute: TokensPerMinute = None,
    key_env: KeyEnv = "",
    at_once: AtOnce = None,
    as_json: AsJson = False,
    limit: Limit = None,
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
    """Collect sessions that solve tasks, as data for SFT: the source sessions:DIR of a corpus of conversations.

    Sessions run as in `etude bench`; those that the verifier and the gates accept are kept. The same command
    continues a collection that was interrupted or has reached a limit."""
    from etude.bench.directory import BenchDirectory, BenchSpec, check_directory, find_named_tasks, probe_policies
    from etude.bench.policies import parse_policies
    from etude.bench.sessions import CollectionLimits, RowWriter, summary_lines
    from etude.bench.variants import parse_rates

    (name,) = (each.name for each in parse_policies([policy]))
    (chosen,) = parse_policies([policy], [f"{name}={key_env}"] if key_env else ())
    price = _price(price_in, price_out, price_cached, needed=max_cost is not None)
    if chosen.directory is not None and (price is not None or requests_per_minute or tokens_per_minute):
        raise InputError(f"{chosen.name} is a checkpoint: prices and rates apply to endpoints only")
    rates = parse_rates([chosen], requests_per_minute or (), tokens_per_minute or ())[chosen.name]
    limits = CollectionLimits(max_sessions, max_cost, price, rates)
    bench = BenchDirectory(Path(os.path.abspath(out)))
    check_directory(bench, resume=True)
    writer = RowWriter.of(chosen, tokenizer, dialect)
    changes = session_changes(
        tools=tools,
        toolset=toolset,
        brief=brief,
        window=window,
        temperature=temperature,
        dialect=dialect if chosen.directory is not None else "",
        summaries=summaries,
        reserve=reserve,
        turns=turns,
        tokens=tokens,
        seconds=seconds,
        max_turn_tokens=answer,
    )
    found, host_settings = find_named_tasks(tasks, limit), host_settings_from_options(maps, build_allow, allow, env)
    profiles = asyncio.run(probe_policies(bench, [chosen], changes))
    spec = BenchSpec((chosen,), profiles, found, samples, host_settings, seed)
    summary, error = _collect(bench, spec, limits, writer, at_once, device, state, pod_settings(pod_hosts))
    if as_json:
        print(json.dumps(summary))
    else:
        say("\n".join(summary_lines(summary)))
    if error is not None:
        raise EtudeError(f"policy {chosen.name}: {error}\nwhat was collected is in {bench.root}; run the command again")


def _price(read: float | None, sampled: float | None, cached: float | None, needed: bool) -> TokenPrice | None:
    """Return the price of an endpoint's tokens; None if none is given."""
    from etude.bench.policies import TokenPrice

    if needed and read is None and sampled is None:
        raise InputError("--max-cost: give the prices too, with --price-in and --price-out")
    if (read is None) != (sampled is None) or (cached is not None and read is None):
        raise InputError("--price-in and --price-out: give both, in dollars per million tokens")
    if read is None or sampled is None:
        return None
    return TokenPrice(read, sampled, read if cached is None else cached)


def _collect(
    bench: BenchDirectory,
    spec: BenchSpec,
    limits: CollectionLimits,
    writer: RowWriter,
    at_once: int | None,
    device: str,
    state: Path | None,
    pods: PodSettings,
) -> tuple[dict[str, Any], EtudeError | None]:
    """Run the missing sessions and write the accepted ones; return the summary and why the policy failed."""
    from etude.bench.directory import lock_directory
    from etude.bench.run import run_with_fleet
    from etude.bench.sessions import collect_sessions, write_sessions

    at_once = at_once or max(2, usable_cores())
    collect = partial(collect_sessions, bench, spec, limits, at_once=at_once, device=device)
    with lock_directory(bench, spec, resume=True):
        try:
            error = run_with_fleet([each.name for each in spec.policies], state, pods, collect)
        except (KeyboardInterrupt, asyncio.CancelledError):
            write_sessions(bench, writer, limits)
            raise Interrupted("interrupted; the same command continues") from None
        return write_sessions(bench, writer, limits), error
