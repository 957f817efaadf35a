"""`etude model ...`: adds the commands that evaluate a model or read text sources to those of `etude.model.cli`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.model.cli import AsJson, Device, Dtype, ModelDir, app, load_model
from etude.model.transformer import Transformer
from etude.runs.run import to_plain
from etude.system.progress import progress_line

__all__ = ["app"]


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
        int | None, typer.Option(help="Score at most this many files, evenly spread.", show_default=False)
    ] = None,
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Sum the negative log-likelihood of a codebase: files in alphabetical order, rolling window, every token once."""
    from etude.data.sources import sample_evenly, source_files
    from etude.evaluation.codebase_nll import codebase_nll

    files = sample_evenly(source_files(sources, tuple(suffix or (".py",))), max_files)
    network, tokenizer = load_model(model, dtype, device)
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
        print(json.dumps(to_plain(asdict(score))))
        return
    print(f"{score.nats:,.1f} nats summed over {score.tokens:,} tokens, {score.bytes:,} bytes, {score.files:,} files")
    print(f"{score.bits_per_byte:.4f} bits per byte, {score.nats_per_token:.4f} nats per token")


@app.command(epilog="Example:  etude model evaluate runs/smollm2-135m src --tasks 8 --changes 6")
def evaluate(
    model: ModelDir,
    source: Annotated[
        str,
        typer.Argument(
            metavar="DIR",
            help='Code to evaluate on: a git repository (real histories), a directory, or "stdlib".',
        ),
    ],
    tasks: Annotated[int, typer.Option(min=1, help="State-tracking tasks.")] = 8,
    changes: Annotated[int, typer.Option(min=1, help="Diffs per task.")] = 6,
    window: Annotated[int, typer.Option(help="Tokens the model sees at once for the codebase NLL.")] = 1024,
    max_files: Annotated[
        int | None, typer.Option(help="Score at most this many files, evenly spread.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random edits, without a git history.")] = 0,
    dtype: Dtype = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Evaluate a base model: NLL of a codebase, and reconstruction of files after many diffs (state tracking)."""
    from etude.data.sources import sample_evenly, source_files
    from etude.evaluation.codebase_nll import codebase_nll
    from etude.evaluation.state_tracking import tasks_from_files, tasks_from_git, track_state

    files = source_files([source])
    if (Path(source) / ".git").exists():
        tracked = tasks_from_git(Path(source), count=tasks, changes=changes)
    else:
        tracked = tasks_from_files(sample_evenly(files, 4 * tasks), count=tasks, changes=changes, seed=seed)
    network, vocabulary = load_model(model, dtype, device)
    with progress_line("nll") as report:
        scored = sample_evenly(files, max_files)
        score = codebase_nll(network, vocabulary, scored, window=window, stride=max(1, window // 2), progress=report)
    with progress_line("state tracking") as report:
        state = track_state(tracked, _completer(network, vocabulary), report)
    if as_json:
        print(json.dumps(to_plain({"nll": asdict(score), "state_tracking": asdict(state)})))
        return
    print(f"codebase NLL    {score.nats:,.1f} nats over {score.bytes:,} bytes, {score.bits_per_byte:.4f} bits per byte")
    print(
        f"state tracking  edit distance {state.distance:,.1f} over {state.tasks} tasks of {state.changes:g} changes "
        f"({state.unchanged:,.1f} for the unchanged file), {state.exact:.0%} exact"
    )


def _completer(network: Transformer, vocabulary: Tokenizer) -> Callable[[str, int], str]:
    """Return a function that continues a text greedily, up to the end marker or a number of characters."""
    from etude.evaluation.state_tracking import END
    from etude.model.generate import generate as stream
    from etude.model.generate import stream_text

    def complete(prompt: str, characters: int) -> str:
        ids = [*vocabulary.prefix, *vocabulary.encode(prompt)]
        room = network.config.max_length - len(ids)
        if room < 1:
            raise InputError(
                f"a task of {len(ids)} tokens does not fit the model's context of {network.config.max_length}"
            )
        text = ""
        tokens = stream(network, ids, max_tokens=min(room, characters), stop=vocabulary.stop_ids)
        for part in stream_text(tokens, vocabulary):
            text += part
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
    out: Annotated[Path, typer.Option(help="Directory to create.", show_default=False)],
    vocab_size: Annotated[int, typer.Option(help="Entries, including single bytes and special tokens.")] = 4096,
    suffix: Annotated[
        list[str] | None, typer.Option(help="File endings to read; .py by default.", show_default=False)
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer with the special tokens of a chat with tools."""
    from etude.chat.tokenizer import train_tokenizer
    from etude.data.sources import source_files
    from etude.model.checkpoint import new_directory

    files = source_files(sources, tuple(suffix or (".py",)))
    with new_directory(out) as directory:
        trained = train_tokenizer((file.read_text(encoding="utf-8") for file in files), vocab_size)
        trained.save(directory)
    print(f"tokenizer: {out}, {len(trained):,} entries from {len(files):,} files")
