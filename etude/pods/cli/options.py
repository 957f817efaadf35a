"""Shared by the commands of `etude pods`: their options, and how they open pods and handle signals."""

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer
import typer.core
from pydantic_core import to_jsonable_python
from rich.table import Table

from etude.config import make_settings
from etude.errors import EtudeError, InputError, Interrupted
from etude.pods.fleet import default_state, open_host
from etude.pods.host import Host
from etude.pods.host_client import HostClient, LocalHostClient
from etude.pods.pod import PodError
from etude.pods.settings import TOKEN_VARIABLE, PodSettings
from etude.system.terminal import Console, say

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
State = Annotated[
    Path | None,
    typer.Option(help="The state directory; default: $ETUDE_PODS, or one in your home."),
]
HostUrl = Annotated[
    str | None,
    typer.Option("--host", metavar="URL", help=f"Use this `etude pods serve`; ${TOKEN_VARIABLE} is its token."),
]
HostUrls = Annotated[
    list[str] | None,
    typer.Option(
        "--host", metavar="URL", help=f"Use this `etude pods serve`; ${TOKEN_VARIABLE} is its token; repeatable."
    ),
]
PodHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--pod-host",
        metavar="URL",
        help=f"Run pods on this `etude pods serve`, not here; ${TOKEN_VARIABLE} is its token; repeatable.",
        show_default=False,
    ),
]
Backend = Annotated[str, typer.Option(help="auto, namespace, landlock or subprocess.")]
PodId = Annotated[str, typer.Argument(metavar="POD", help="The pod's id, or a prefix of it.")]
Kind = Annotated[
    Literal["fs", "fs-live"] | None,
    typer.Option(help="fs (fast, ends the pod's processes) or fs-live; default: automatic."),
]
Input = Annotated[bool, typer.Option("-i", "--stdin", help="Pass standard input to the command.")]
Terminal = Annotated[bool, typer.Option("-t", "--tty", help="Run the command on this terminal.")]
Ttl = Annotated[str | None, typer.Option(help="Close the pod after this time: 90s, 5m, 1h30m.")]
User = Annotated[str | None, typer.Option(help="Run as this user: a name, uid or uid:gid.")]
Cwd = Annotated[str | None, typer.Option(help="Start in this directory of the pod.")]
Timeout = Annotated[str | None, typer.Option(help="Kill the command after this time.")]
Allow = Annotated[
    list[str] | None, typer.Option(metavar="HOST[:PORT]", help="Allow connections to this host; repeatable.")
]
Transparent = Annotated[
    bool, typer.Option("--transparent", help="Forward connections of programs that do not use a proxy.")
]
Env = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Set a variable; repeatable.")]
DETACHED_TTL_S = 3600.0  # default ttl of a detached pod


def show(found: object, as_json: bool, text: object) -> None:
    """Print a result as JSON, or as text: a string or a table."""
    if as_json:
        print(json.dumps(to_jsonable_python(found)))
    else:
        Console().print(text) if isinstance(text, Table) else say(str(text))


def parse_pairs(texts: list[str] | None, option: str) -> dict[str, str]:
    """Parse options of the form `NAME=VALUE`."""
    split = [text.partition("=") for text in texts or ()]
    if bad := [name for name, sign, _ in split if not sign or not name]:
        raise InputError(f"{option} {bad[0]}: expected NAME=VALUE")
    return {name: value for name, _, value in split}


class TrailingCommand(typer.core.TyperCommand):
    """A CLI command that ends in `-- COMMAND...` after its own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["etude.command"] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def with_client(
    state: Path | None, url: str | None, work: Callable[[HostClient], Coroutine[Any, Any, T]], backend: str = "auto"
) -> T:
    """Run `work` on the pods of a host URL or a state directory; on a signal too, close those created here."""

    async def run() -> T:
        loop, task, received = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
        assert task is not None

        def stop(signum: int) -> None:
            received.append(signum)
            task.cancel()

        for signum in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, stop, signum)
        try:
            client = await open_client(state, url, backend)
            try:
                return await work(client)
            finally:
                await client.close()
        except asyncio.CancelledError:
            if received:
                raise Interrupted(f"ended by {signal.Signals(received[0]).name}") from None
            raise

    return asyncio.run(run())


def with_host(state: Path | None, work: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
    """Run `work` on the host of a state directory of this machine."""

    def on_host(client: HostClient) -> Coroutine[Any, Any, T]:
        assert isinstance(client, LocalHostClient)
        return work(client.host)

    return with_client(state, None, on_host)


def with_clients(
    state: Path | None, urls: list[str] | None, work: Callable[[HostClient], Coroutine[Any, Any, T]]
) -> tuple[dict[str, T], dict[str, EtudeError]]:
    """Run `work` on each of several hosts, or on this machine; return the results and the errors by address."""
    found: dict[str, T] = {}
    failed: dict[str, EtudeError] = {}
    for url in dict.fromkeys(urls or ()) or (None,):
        try:
            found[url or ""] = with_client(state, url, work)
        except EtudeError as error:
            if len(urls or ()) < 2:
                raise
            failed[url or ""] = error
    return found, failed


def raise_failed(failed: Mapping[str, EtudeError]) -> None:
    """Raise one error for the hosts that did not do what was asked."""
    if failed:
        raise PodError("\n".join(map(str, failed.values())))


def pod_settings(hosts: list[str] | None) -> PodSettings:
    """Return where pods run, by the option `--pod-host`; token and certificate are those of the variables."""
    return make_settings(PodSettings, "--pod-host", hosts=hosts or ())


async def open_client(state: Path | None, url: str | None, backend: str) -> HostClient:
    """Return a client of a host URL, or of a state directory on this machine."""
    if url is not None:
        from etude.pods.remote.client import RemoteHostClient

        if state is not None:
            raise InputError("--host and --state: a remote host has its own state directory; give one of them")
        return await RemoteHostClient.open(url)
    directory, boot = state or default_state(), boot_id()
    with contextlib.suppress(OSError, ValueError):  # probing all backends would cost a second
        name, cached_boot = (directory / "backend").read_text().split()
        backend = name if backend == "auto" and cached_boot == boot else backend
    host = await open_host(backend, directory)
    with contextlib.suppress(OSError):  # only a cache
        (host.state / "backend").write_text(f"{host.backend.name} {boot}")
    return LocalHostClient(host)


def boot_id() -> str:
    """Return an id of this boot and user, for which a backend's capabilities practically do not change."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}-{os.geteuid()}"
    except OSError:
        return "unknown"
