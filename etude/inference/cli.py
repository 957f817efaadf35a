"""`etude serve`: a checkpoint behind HTTP. Torch is imported when it runs, not before."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from etude.errors import InputError

if TYPE_CHECKING:
    import torch

    from etude.inference.engine import Engine, EngineOptions


def serve(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A Hugging Face model directory.", show_default=False)
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine need a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="Holds the token that clients must send.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="What clients call the model; else the directory's name.", show_default=False),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32 or bfloat16; the stored one by default.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.")] = "auto",
    tokens: Annotated[int, typer.Option(min=1, help="Room of the KV cache, over all streams.")] = 65_536,
    page: Annotated[int, typer.Option(min=1, help="Tokens of a page of the cache.")] = 16,
    max_streams: Annotated[int, typer.Option(min=1, help="Samples made at the same time.")] = 64,
    max_waiting: Annotated[int, typer.Option(min=0, help="Samples that may wait; more are refused.")] = 1024,
    on_swap: Annotated[
        Literal["keep", "recompute"], typer.Option(help="What new weights do to the cache of running samples.")
    ] = "keep",
    drafts: Annotated[
        int, typer.Option(min=0, help="Tokens drafted by the checkpoint's MTP layers and verified at once; 0: none.")
    ] = 0,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="The same request gives the same numbers whatever else runs; slower.")
    ] = False,
    grace: Annotated[float, typer.Option(min=0, help="Seconds for running requests to finish at the end.")] = 30.0,
) -> None:
    """Serve a model over HTTP, OpenAI-compatible and token-exact, until SIGTERM."""
    from etude.inference import server
    from etude.inference.engine import EngineOptions
    from etude.inference.service import EngineService

    secret, kind = server.read_token(host, token_file), _dtype(dtype)
    options = EngineOptions(
        tokens=tokens, page=page, max_streams=max_streams, on_swap=on_swap, drafts=drafts, invariant=invariant
    )
    called = name or checkpoint.resolve().name
    with server.bind(host, port) as listener:  # first: that a port is taken should not be found out minutes later
        engine = _engine(checkpoint, kind, device, options)

        async def work() -> None:
            address = listener.getsockname()
            url = f"http://{f'[{address[0]}]' if ':' in address[0] else address[0]}:{address[1]}"

            def ready() -> None:
                print(f"{url}/v1  {called} on {engine.device}, room for {tokens:,} tokens", flush=True)

            async with EngineService(engine, max_waiting=max_waiting) as service:
                await server.run(service, listener, name=called, token=secret, grace=grace, ready=ready)
                if service.failure is not None:
                    raise service.failure

        if not server.is_loopback(host):
            print("etude: warning: no TLS: the token and all that is said can be read on the way", file=sys.stderr)
        asyncio.run(work())


def _engine(checkpoint: Path, dtype: torch.dtype | None, device: str, options: EngineOptions) -> Engine:
    """The engine around a checkpoint, with the layers that draft if drafts are asked for."""
    from etude.chat.tokenizer import Tokenizer, check_vocabulary
    from etude.inference.engine import Engine
    from etude.kernels import usable_device
    from etude.model.checkpoint import load
    from etude.model.mtp import FILE, load_mtp

    tokenizer = Tokenizer.load(checkpoint)
    if options.drafts and not (checkpoint / FILE).exists():
        raise InputError(
            f"--drafts {options.drafts}: {checkpoint} has no {FILE}, the MTP layers that draft; leave --drafts out"
        )
    model = load(checkpoint, dtype=dtype, device=usable_device(device))
    check_vocabulary(tokenizer, model.config.vocab_size, str(checkpoint))
    weight = model.head_weight
    mtp = load_mtp(checkpoint, model.config, weight.dtype, weight.device) if options.drafts else None
    return Engine(model, options, tokenizer=tokenizer, mtp=mtp)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    known = {None: None, "float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise InputError(f"--dtype {name}: expected float32 or bfloat16")
    return known[name]
