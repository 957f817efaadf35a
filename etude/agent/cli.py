"""The command line of `etude agent`. The implementation is imported when the command runs."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from etude.errors import InputError
from etude.harness.model_options import (
    Brief,
    DialectName,
    ModelOptions,
    SummaryModeName,
    Temperature,
    Tools,
    Toolset,
    Window,
    session_changes,
)

if TYPE_CHECKING:
    from etude.agent.options import AgentOptions
    from etude.agent.session_store import SessionRecord


RequestWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="[REQUEST]", help="The request; - reads it from standard input.", show_default=False),
]
ModelName = Annotated[
    str,
    typer.Option(
        envvar="ETUDE_AGENT_MODEL",
        help="Directory of a checkpoint, or the model's name at --endpoint.",
        show_default=False,
    ),
]
Endpoint = Annotated[
    str, typer.Option(envvar="ETUDE_AGENT_ENDPOINT", help="URL of an OpenAI-compatible server.", show_default=False)
]
KeyEnv = Annotated[
    str,
    typer.Option(metavar="NAME", help="Environment variable that holds the endpoint's API key.", show_default=False),
]
Directory = Annotated[Path, typer.Option("--directory", "-C", help="Directory to work on.")]
Direct = Annotated[
    bool,
    typer.Option("--direct", help="Work on the directory itself, without a pod; asks before each change or command."),
]
PrintMode = Annotated[
    bool,
    typer.Option(
        "--print", "-p", help="Run one request without asking anything; print the final message to standard output."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="With --print or --list: print JSON.")]
Apply = Annotated[bool, typer.Option("--apply", help="With --print: apply the changes.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the session whose id follows, or the last one of this directory.")
]
List = Annotated[bool, typer.Option("--list", help="List the saved sessions of this directory.")]
Instructions = Annotated[
    Path | None, typer.Option(help="File with instructions, used in place of AGENTS.md.", show_default=False)
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Copy an ignored path into the pod too; repeatable.", show_default=False),
]
History = Annotated[bool, typer.Option("--history/--no-history", help="Copy the git history into the pod.")]
Image = Annotated[str, typer.Option(help="Image of the pod; see `etude pods image`.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST[:PORT]", help="Allow the pod to connect to this host; repeatable.", show_default=False),
]
Turns = Annotated[int | None, typer.Option(min=1, help="Maximum turns of the session.", show_default=False)]
Tokens = Annotated[int | None, typer.Option(min=1, help="Maximum tokens sampled in the session.", show_default=False)]
Seconds = Annotated[float | None, typer.Option(min=0.001, help="Maximum duration of the session.", show_default=False)]
AnswerTokens = Annotated[int | None, typer.Option(min=1, help="Maximum tokens of one turn.", show_default=False)]
Seed = Annotated[int | None, typer.Option(min=0, help="Sampling seed; random if not given.", show_default=False)]
Device = Annotated[str, typer.Option(help="Device for a checkpoint: auto, cpu, cuda, ...")]


def agent(
    words: RequestWords = None,
    model: ModelName = "",
    endpoint: Endpoint = "",
    key_env: KeyEnv = "",
    directory: Directory = Path("."),
    direct: Direct = False,
    print_mode: PrintMode = False,
    as_json: AsJson = False,
    apply: Apply = False,
    resume: Resume = False,
    list_: List = False,
    tools: Tools = "",
    toolset: Toolset = "",
    brief: Brief = None,
    instructions: Instructions = None,
    include: Include = None,
    history: History = True,
    image: Image = "host",
    allow: Allow = None,
    turns: Turns = None,
    tokens: Tokens = None,
    seconds: Seconds = None,
    answer: AnswerTokens = None,
    window: Window = None,
    temperature: Temperature = None,
    summaries: SummaryModeName = None,
    seed: Seed = None,
    dialect: DialectName = "",
    device: Device = "auto",
) -> None:
    """Let a model work on a directory: in a pod, with the changes shown before they are applied."""
    from etude.agent.options import AgentOptions

    if model and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
    workspace = directory.expanduser().resolve()
    if not workspace.is_dir():
        raise InputError(f"-C {directory}: not a directory")
    if list_:
        print_sessions(workspace, as_json)
        return
    changes = session_changes(
        tools=tools,
        toolset=toolset,
        brief=brief,
        instructions=_read_instructions(instructions),
        window=window,
        temperature=temperature,
        dialect=dialect,
        summaries=summaries,
        max_turn_tokens=answer,
    )
    # Limits of training sessions as a whole are not limits of use.
    changes["budget"] = {"turns": turns, "tokens": tokens, "seconds": seconds, **changes.get("budget", {})}
    options = AgentOptions(
        directory=workspace,
        model=ModelOptions(model, endpoint, key_env, device, seed, changes),
        direct=direct,
        image=image,
        egress=tuple(allow or ()),
        include=tuple(include or ()),
        history=history,
    )
    if not print_mode and (as_json or apply):
        raise InputError("--json and --apply need --print; without it changes are applied interactively")
    if print_mode and direct:
        raise InputError("--direct asks before each change, which --print cannot answer; leave one of them out")
    code = run_agent(options, list(words or ()), resume, print_mode, apply, as_json)
    if code:
        raise typer.Exit(code)


def run_agent(
    options: AgentOptions, words: list[str], resume: bool, print_mode: bool, apply: bool, as_json: bool
) -> int:
    """Start or resume a session; return the exit code."""
    from etude.agent import session_store
    from etude.agent.screen import Screen
    from etude.system.terminal import Console

    id = ""
    if resume:
        named = bool(words) and session_store.is_session_id(words[0])
        id = words.pop(0) if named else session_store.latest_session_id(options.directory)
    request = " ".join(words)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if request == "-":
        request = sys.stdin.read().strip()
    if print_mode and not request:
        raise InputError("--print needs a request; give it as an argument, or - to read it from standard input")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # unencodable characters must not end it
    screen = Screen(Console(stderr=print_mode, highlight=False, markup=False, emoji=False))

    from etude.agent.conversation import LoadedSession

    loaded = None
    if id:
        loaded = LoadedSession(*session_store.load_session(id))
        options = resume_options(options, loaded.record)
    if print_mode:
        from etude.agent.print_mode import run_print_mode

        return asyncio.run(run_print_mode(options, screen, request, loaded, apply=apply, as_json=as_json))
    from etude.agent.terminal import run_terminal

    return run_terminal(options, screen, request, loaded)


def resume_options(options: AgentOptions, record: SessionRecord) -> AgentOptions:
    """Return the options of a resumed session: its own, with the model given now, if any."""
    own = record.options
    if own.directory != options.directory:
        raise InputError(f"session {record.id[:12]} worked in {own.directory}; run it there, or name it with -C")
    if options.direct and not own.direct:
        raise InputError(f"session {record.id[:12]} works in a pod and may hold changes; leave out --direct")
    model = options.model
    session = {key: value for key, value in model.session.items() if key != "tool_set"}
    if not model.name and not model.endpoint:
        model, session = own.model, {**own.model.session, **session}
    session["tool_set"] = own.model.session["tool_set"]
    return replace(own, model=replace(model, session=session))


def print_sessions(directory: Path, as_json: bool) -> None:
    """Print the sessions of a directory, newest first."""
    from etude.agent.session_store import sessions_of_directory
    from etude.system.terminal import escape_control

    found = sessions_of_directory(directory)
    if as_json:
        rows = [
            {
                "id": each.id,
                "updated": each.updated,
                "ending": each.ending,
                "model": each.options.model.name,
                "request": each.request.text,
            }
            for each in found
        ]
        print(json.dumps(rows))
        return
    if not found:
        print(f"no sessions of {directory}", file=sys.stderr)
    for each in found:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.updated))
        asked = escape_control(" ".join(each.request.text.split()))[:60]
        print(f"{each.id[:12]}  {when}  {each.ending:<11}  {Path(each.options.model.name).name}  {asked}")


def _read_instructions(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--instructions {file}: cannot be read: {error}") from None
