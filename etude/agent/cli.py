"""`etude agent`: the options of the command. What it does is in `harness/agent/`, loaded when it runs."""

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

if TYPE_CHECKING:
    from etude.agent.options import Options
    from etude.agent.session_store import Saved


Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="[REQUEST]", help="What to do; - reads it from standard input.", show_default=False),
]
ModelName = Annotated[
    str,
    typer.Option(
        envvar="ETUDE_AGENT_MODEL", help="A checkpoint's directory, or a name at --endpoint.", show_default=False
    ),
]
Endpoint = Annotated[
    str, typer.Option(envvar="ETUDE_AGENT_ENDPOINT", help="URL of an OpenAI-compatible server.", show_default=False)
]
KeyEnv = Annotated[
    str, typer.Option(metavar="NAME", help="Variable that holds the endpoint's key.", show_default=False)
]
Directory = Annotated[Path, typer.Option("--directory", "-C", help="Where to work.")]
Direct = Annotated[
    bool, typer.Option("--direct", help="Work on the directory itself; asks before each change or command.")
]
Once = Annotated[
    bool, typer.Option("--print", "-p", help="One request, no questions: the final message on standard output.")
]
AsJson = Annotated[bool, typer.Option("--json", help="With --print or --list: one JSON object.")]
Apply = Annotated[bool, typer.Option("--apply", help="With --print: apply the changes.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the session whose id comes next, or the last one here.")
]
List = Annotated[bool, typer.Option("--list", help="List the sessions of this directory.")]
Toolset = Annotated[str, typer.Option(help="Names of the tools: cursor, claude-code or bash.")]
Brief = Annotated[bool, typer.Option("--brief", help="The shortest prompt, for small windows.")]
Instructions = Annotated[
    Path | None, typer.Option(help="A file with instructions, in place of AGENTS.md.", show_default=False)
]
Include = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH", help="Take an ignored path along into the pod; repeatable.", show_default=False),
]
History = Annotated[bool, typer.Option("--history/--no-history", help="Take git's history along.")]
Image = Annotated[str, typer.Option(help="Image of the pod; see `etude pods image`.")]
Allow = Annotated[
    list[str] | None,
    typer.Option(metavar="HOST[:PORT]", help="Let the pod connect there; repeatable.", show_default=False),
]
Turns = Annotated[int | None, typer.Option(min=1, help="Most turns of the session.", show_default=False)]
Tokens = Annotated[int | None, typer.Option(min=1, help="Most tokens it makes.", show_default=False)]
Seconds = Annotated[float | None, typer.Option(min=0.001, help="Longest time.", show_default=False)]
AnswerTokens = Annotated[int, typer.Option(min=1, help="Most tokens of one answer.")]
Window = Annotated[int, typer.Option(min=0, help="Tokens of context; 0: what the model has.")]
Temperature = Annotated[float, typer.Option(min=0.0)]
Seed = Annotated[int | None, typer.Option(min=0, show_default=False)]
DialectName = Annotated[
    str, typer.Option(help="How the model writes calls, where its template does not say.", show_default=False)
]
Device = Annotated[str, typer.Option(help="For a checkpoint: cpu, cuda, ...")]


def agent(
    words: Words = None,
    model: ModelName = "",
    endpoint: Endpoint = "",
    key_env: KeyEnv = "",
    directory: Directory = Path("."),
    direct: Direct = False,
    once: Once = False,
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
    """Work on a directory with a model: in a pod, with the changes shown before they are applied."""
    from etude.agent.options import Model, Options
    from etude.harness.tool_set import ToolSet

    if model and Path(model).expanduser().is_dir():
        model = str(Path(model).expanduser().resolve())
    place = directory.expanduser().resolve()
    if not place.is_dir():
        raise InputError(f"-C {directory}: not a directory")
    if list_:
        print_sessions(place, as_json)
        return
    options = Options(
        directory=place,
        model=Model(model, endpoint, key_env, window, dialect, device, temperature, seed),
        environment=ToolSet(naming=toolset, brief=brief, instructions=_read_instructions(instructions)),
        direct=direct,
        image=image,
        egress=tuple(allow or ()),
        include=tuple(include or ()),
        history=history,
        turns=turns,
        tokens=tokens,
        seconds=seconds,
        answer=answer,
    )
    if not once and (as_json or apply):
        raise InputError("--json and --apply are for --print; in a conversation you are asked")
    if once and direct:
        raise InputError("--direct asks before each change, and with --print nobody answers; leave one of them out")
    code = start(options, list(words or ()), resume, once, apply, as_json)
    if code:
        raise typer.Exit(code)


def start(options: Options, words: list[str], resume: bool, once: bool, apply: bool, as_json: bool) -> int:
    """Begin, or go on with, a session."""
    from rich.console import Console

    from etude.agent import session_store
    from etude.agent.screen import Screen

    id = (
        (words.pop(0) if words and session_store.is_id(words[0]) else session_store.last_of(options.directory))
        if resume
        else ""
    )
    request = " ".join(words)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if request == "-":
        request = sys.stdin.read().strip()
    if once and not request:
        raise InputError("--print needs a request; give it as an argument, or - to read it from standard input")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a sign that cannot be shown ends no session
    screen = Screen(Console(stderr=once, highlight=False, markup=False, emoji=False))

    from etude.agent.conversation import Earlier

    earlier = None
    if id:
        earlier = Earlier(*session_store.load(id))
        options = resumed(options, earlier.saved)
    if once:
        from etude.agent.print_mode import run_once

        return asyncio.run(run_once(options, screen, request, earlier, apply=apply, as_json=as_json))
    from etude.agent.terminal import converse

    return converse(options, screen, request, earlier)


def resumed(options: Options, before: Saved) -> Options:
    """The options of a session that goes on: its own, with the model that is named now if one is."""
    if before.directory != str(options.directory):
        raise InputError(f"session {before.id[:12]} worked in {before.directory}; go there, or name it with -C")
    if options.direct and not before.direct:
        raise InputError(f"session {before.id[:12]} works in a pod and may hold changes; leave --direct out")
    model = options.model
    if not model.name and not model.endpoint:
        model = before.model
    return replace(
        options,
        model=model,
        environment=before.environment,
        direct=before.direct,
        image=before.image,
        egress=before.egress,
        include=before.include,
        history=before.history,
    )


def print_sessions(directory: Path, as_json: bool) -> None:
    """The sessions of a directory, newest first."""
    from etude.agent.screen import visible
    from etude.agent.session_store import of_directory

    found = of_directory(directory)
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
        asked = visible(" ".join(each.request.text.split()))[:60]
        print(f"{each.id[:12]}  {when}  {each.ending:<11}  {Path(each.model.name).name}  {asked}")


def _read_instructions(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--instructions {file}: cannot be read: {error}") from None
