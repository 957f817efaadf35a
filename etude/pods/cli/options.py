"""What the verbs of `etude pods` share: their options, where they act, and how they end."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import typer.core

from etude.errors import Interrupted
from etude.pods.remote.host_client import TOKEN, PodService, open_place

T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text for people.")]
State = Annotated[
    Path | None,
    typer.Option(help="The state directory; $ETUDE_PODS or one in your home if not given.", show_default=False),
]
HostUrl = Annotated[
    str | None,
    typer.Option("--host", metavar="URL", help=f"Act on this `etude pods serve`; ${TOKEN} is its token."),
]
Backend = Annotated[str, typer.Option(help="auto, namespace, landlock or subprocess.")]
PodId = Annotated[str, typer.Argument(metavar="POD", help="Its id, or the beginning of it.", show_default=False)]
Kind = Annotated[str | None, typer.Option(help="fs (fast, ends its processes) or fs-live; chosen if not given.")]
Input = Annotated[bool, typer.Option("-i", "--stdin", help="Pass our standard input to the command.")]
Terminal = Annotated[bool, typer.Option("-t", "--tty", help="Run it on a terminal, this one.")]
Ttl = Annotated[str | None, typer.Option(help="End the pod after this: 90s, 5m, 1h30m.", show_default=False)]
User = Annotated[str | None, typer.Option(help="Run as this user: a name, uid or uid:gid.", show_default=False)]
Cwd = Annotated[str | None, typer.Option(help="Start in this directory of the pod.", show_default=False)]
Env = Annotated[list[str] | None, typer.Option(metavar="K=V", help="Set a variable; repeatable.", show_default=False)]
DETACHED_S = 3600.0  # seconds that a detached pod lives unless told otherwise


class WithCommand(typer.core.TyperCommand):
    """A verb that ends in `-- COMMAND...`, whatever is optional before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["etude.command"] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]"]


def act(
    state: Path | None, url: str | None, work: Callable[[PodService], Coroutine[Any, Any, T]], backend: str = "auto"
) -> T:
    """Do something at a place. Whatever ends this process ends its pods first."""

    async def inside() -> T:
        loop, me, got = asyncio.get_running_loop(), asyncio.current_task(), list[int]()
        assert me is not None

        def stop(number: int) -> None:
            got.append(number)
            me.cancel()

        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        try:
            async with open_place(state, url, backend) as place:
                return await work(place)
        except asyncio.CancelledError:
            if got:
                raise Interrupted(f"ended by {signal.Signals(got[0]).name}") from None
            raise

    return asyncio.run(inside())
