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

from etude.config import make_settings
from etude.errors import InputError

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
Toolset = Annotated[
    str, typer.Option(help="Names under which the tools are shown to the model: cursor, claude-code or bash.")
]
Brief = Annotated[bool, typer.Option("--brief", help="Use the short system prompt, for small context windows.")]
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
AnswerTokens = Annotated[int, typer.Option(min=1, help="Maximum tokens of one turn.")]
Window = Annotated[int, typer.Option(min=0, help="Context window in tokens; 0: the model's own.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Sampling temperature.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Sampling seed; random if not given.", show_default=False)]
DialectName = Annotated[
    str, typer.Option(help="Dialect of tool calls, if the chat template does not determine it.", show_default=False)
]
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
    toolset: Toolset = "cursor",
    brief: Brief = False,
    instructions: Instructions = None,
    include: Include = None,
    history: History = True,
    image: Image = "host",
    allow: Allow = None,
    turns: Turns = None,
    tokens: Tokens = None,
    seconds: Seconds = None,
    answer: AnswerTokens = 4096,
    window: Window = 0,
    temperature: Temperature = 1.0,
    seed: Seed = None,
    dialect: DialectName = "",
    device: Device = "auto",
) -> None:
    """Let a model work on a directory: in a pod, with the changes shown before they are applied."""
    from etude.agent.options import AgentOptions
    from etude.harness.model_options import ModelOptions
    from etude.harness.tool_set import ToolSet

    if model and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
    workspace = directory.expanduser().resolve()
    if not workspace.is_dir():
        raise InputError(f"-C {directory}: not a directory")
    if list_:
        print_sessions(workspace, as_json)
        return
    options = AgentOptions(
        directory=workspace,
        model=ModelOptions(model, endpoint, key_env, window, dialect, device, temperature, seed),
        tool_set=make_settings(
            ToolSet,
            "--toolset",
            aliases=toolset,
            short_system_prompt=brief,
            instructions=_read_instructions(instructions),
        ),
        direct=direct,
        image=image,
        egress=tuple(allow or ()),
        include=tuple(include or ()),
        history=history,
        turns=turns,
        tokens=tokens,
        seconds=seconds,
        max_turn_tokens=answer,
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
    from rich.console import Console

    from etude.agent import session_store
    from etude.agent.screen import Screen

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
    if record.directory != str(options.directory):
        raise InputError(f"session {record.id[:12]} worked in {record.directory}; run it there, or name it with -C")
    if options.direct and not record.direct:
        raise InputError(f"session {record.id[:12]} works in a pod and may hold changes; leave out --direct")
    model = options.model
    if not model.name and not model.endpoint:
        model = record.model
    return replace(
        options,
        model=model,
        tool_set=record.environment,
        direct=record.direct,
        image=record.image,
        egress=record.egress,
        include=record.include,
        history=record.history,
    )


def print_sessions(directory: Path, as_json: bool) -> None:
    """Print the sessions of a directory, newest first."""
    from etude.agent.screen import escape_control
    from etude.agent.session_store import sessions_of_directory

    found = sessions_of_directory(directory)
    if as_json:
        rows = [
            {
                "id": each.id,
                "updated": each.updated,
                "ending": each.ending,
                "model": each.model.name,
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
        print(f"{each.id[:12]}  {when}  {each.ending:<11}  {Path(each.model.name).name}  {asked}")


def _read_instructions(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--instructions {file}: cannot be read: {error}") from None
