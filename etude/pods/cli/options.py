"""Shared by the commands of `etude pods`: their options, and how they open pods and handle signals."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core

from etude.errors import Interrupted
from etude.pods.remote.host_client import TOKEN_VARIABLE, PodService, open_pod_service

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
State = Annotated[
    Path | None,
    typer.Option(help="The state directory; default: $ETUDE_PODS, or one in your home.", show_default=False),
]
HostUrl = Annotated[
    str | None,
    typer.Option("--host", metavar="URL", help=f"Use this `etude pods serve`; ${TOKEN_VARIABLE} is its token."),
]
Backend = Annotated[str, typer.Option(help="auto, namespace, landlock or subprocess.")]
PodId = Annotated[str, typer.Argument(metavar="POD", help="The pod's id, or a prefix of it.", show_default=False)]
Kind = Annotated[str | None, typer.Option(help="fs (fast, ends the pod's processes) or fs-live; default: automatic.")]
Input = Annotated[bool, typer.Option("-i", "--stdin", help="Pass standard input to the command.")]
Terminal = Annotated[bool, typer.Option("-t", "--tty", help="Run the command on this terminal.")]
Ttl = Annotated[str | None, typer.Option(help="Close the pod after this time: 90s, 5m, 1h30m.", show_default=False)]
User = Annotated[str | None, typer.Option(help="Run as this user: a name, uid or uid:gid.", show_default=False)]
Cwd = Annotated[str | None, typer.Option(help="Start in this directory of the pod.", show_default=False)]
Env = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Set a variable; repeatable.", show_default=False)]
DETACHED_TTL_S = 3600.0  # default ttl of a detached pod


class TrailingCommand(typer.core.TyperCommand):
    """A CLI command that ends in `-- COMMAND...` after its own options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["etude.command"] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def with_service(
    state: Path | None, url: str | None, work: Callable[[PodService], Coroutine[Any, Any, T]], backend: str = "auto"
) -> T:
    """Run `work` on the pods of a host URL or a state directory; on a signal, close this process's pods first."""

    async def run() -> T:
        loop, task, received = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
        assert task is not None

        def stop(signum: int) -> None:
            received.append(signum)
            task.cancel()

        for signum in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, stop, signum)
        try:
            async with open_pod_service(state, url, backend) as service:
                return await work(service)
        except asyncio.CancelledError:
            if received:
                raise Interrupted(f"ended by {signal.Signals(received[0]).name}") from None
            raise

    return asyncio.run(run())
