"""`etude serve`: serve a checkpoint over HTTP. Torch is imported only when the command runs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from etude.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from etude.inference import server

TOKEN_HELP = (
    "File with the token that clients must send. Default: a new one, printed, which on a loopback address only "
    "/weights, /pause, /resume and /drain need."
)


def serve(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A Hugging Face model directory.", show_default=False)
    ],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; on one that other machines can reach, all requests need the token."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    token_file: Annotated[Path | None, typer.Option(help=TOKEN_HELP, show_default=False)] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="No token: every program of this machine may replace the weights.")
    ] = False,
    allow_host: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A further name of this server; repeatable.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Model name for clients; the directory's name by default.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; the checkpoint's own by default.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.")] = "auto",
    tokens: Annotated[int, typer.Option(min=1, help="Size of the KV cache in tokens.")] = 65_536,
    page: Annotated[int, typer.Option(min=1, help="Tokens per page of the KV cache.")] = 16,
    max_streams: Annotated[int, typer.Option(min=1, help="Sequences that run at the same time.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=0, help="Sequences that may wait; more are refused.")] = 1024,
    on_swap: Annotated[
        Literal["keep", "recompute"], typer.Option(help="Keep or recompute the KV cache when new weights are loaded.")
    ] = "keep",
    drafts: Annotated[
        int, typer.Option(min=0, help="Tokens that the MTP layers draft per verification (slower so far); 0: none.")
    ] = 0,
    dialect: Annotated[
        str,
        typer.Option(help="Dialect of chats; default: that of the checkpoint's profile, else by its chat template."),
    ] = "",
    invariant: Annotated[
        bool, typer.Option("--invariant", help="Make results independent of what else is in the batch; slower.")
    ] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests to finish at shutdown.")] = 30.0,
) -> None:
    """Serve a model over HTTP, OpenAI-compatible and token-exact, until SIGTERM."""
    from etude.inference import server
    from etude.inference.engine import open_engine
    from etude.inference.service import EngineService
    from etude.inference.settings import EngineOptions
    from etude.system.http import bind, url_of

    access, torch_dtype = _access(host, token_file, no_token, allow_host or ()), _dtype(dtype)
    options = EngineOptions(
        kv_cache_tokens=tokens,
        page_size=page,
        max_sequences=max_streams,
        on_swap=on_swap,
        drafts=drafts,
        invariant=invariant,
    )
    model_name = name or checkpoint.resolve().name
    with bind(host, port) as listener:  # before loading, which takes minutes: the port may be taken
        engine = open_engine(checkpoint, options, dtype=torch_dtype, device=device)
        model = server.ServedModel.of(model_name, engine.tokenizer, dialect, _read_profile(checkpoint))
        if model.dialect is None:
            print(f"etude: warning: no chats: {model.problem}", file=sys.stderr)

        async def serve_until_stopped() -> None:
            def ready() -> None:
                where = f"{url_of(listener)}/v1"
                print(f"{where}  {model_name} on {engine.device}, room for {tokens:,} tokens", flush=True)

            async with EngineService(engine, max_waiting=max_waiting) as service:
                await server.run(service, listener, model, access, grace=grace, ready=ready)
                if service.failure is not None:
                    raise service.failure

        asyncio.run(serve_until_stopped())


def _access(host: str, token_file: Path | None, no_token: bool, hosts: Sequence[str]) -> server.Access:
    """Return who is answered; a token that is not given is made and printed."""
    from etude.inference.server import Access
    from etude.system.http import is_loopback, new_token, read_token

    given = read_token(host, token_file, no_token)
    access = Access(new_token() if given is None else given, given is None and is_loopback(host), tuple(hosts))
    if given is None:
        scope = "POST /weights, /pause, /resume and /drain" if access.changes_only else "all requests"
        print(f"etude: token for {scope}: {access.token}", file=sys.stderr)
    if not is_loopback(host):
        print("etude: warning: no TLS: the token and all traffic are sent in the clear", file=sys.stderr)
    return access


def _read_profile(checkpoint: Path) -> dict[str, Any] | None:
    """Return the agent.json of a checkpoint; its clients check it."""
    from etude.config import import_plugins
    from etude.model.config import PROFILE_FILE

    file = checkpoint / PROFILE_FILE
    if not file.exists():
        return None
    try:
        profile = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{file}: not readable as a JSON object: {error}") from None
    import_plugins(profile.get("plugins", ()))  # its dialect may come from one
    return profile


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    known = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise InputError(f"--dtype {name}: expected float32 or bfloat16")
    return known[name]
