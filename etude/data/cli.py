"""`etude data ...`: one function per command. Results go to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from etude.data.corpus import TOKENIZER, CorpusOptions, CorpusReport, CorpusSize, build_corpus, read_report
from etude.data.filters import REASONS
from etude.data.shards import Shards, read_manifest
from etude.errors import InputError, Interrupted
from etude.system.progress import progress_line
from etude.system.terminal import Console

app = typer.Typer(no_args_is_help=True)

DEFAULTS = CorpusOptions()
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
CorpusDir = Annotated[
    Path, typer.Argument(metavar="CORPUS", help="A directory made by `etude data build`.", show_default=False)
]


@app.command(
    epilog="Examples:\n\n  etude data build stdlib --tokenizer runs/smollm2-135m --out runs/corpus\n\n"
    "  etude data build src vendor.tar.gz old@v1.2 --tokenizer T --out C --layout repository --against bench.jsonl"
)
def build(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help='Directories, git repositories (PATH@REVISION too), archives, .jsonl or .parquet rows, or "stdlib".',
            show_default=False,
        ),
    ],
    tokenizer: Annotated[Path, typer.Option(help="A directory with tokenizer.json.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The new corpus directory.", show_default=False)],
    held_out: Annotated[
        list[str] | None,
        typer.Option(help="Repository name or glob that is never trained on; repeatable.", show_default=False),
    ] = None,
    validation: Annotated[
        float, typer.Option(help="Share of the repositories in the validation split.")
    ] = DEFAULTS.validation,
    against: Annotated[
        list[str] | None,
        typer.Option(help="Source of protected text: remove documents that share passages with it; repeatable."),
    ] = None,
    layout: Annotated[str, typer.Option(help="One document per file or per repository.")] = DEFAULTS.layout,
    fim: Annotated[float, typer.Option(help="Share of files rearranged for fill-in-the-middle.")] = DEFAULTS.fim,
    suffix: Annotated[
        list[str] | None, typer.Option(help="File suffixes to read instead of the defaults.", show_default=False)
    ] = None,
    max_bytes: Annotated[int, typer.Option(help="Skip files with more bytes.")] = DEFAULTS.max_bytes,
    near: Annotated[
        float, typer.Option(help="Jaccard similarity from which documents are duplicates; 1: exact only.")
    ] = DEFAULTS.near,
    shingle: Annotated[int, typer.Option(help="Words per shingle, to find near duplicates.")] = DEFAULTS.shingle,
    ngram: Annotated[int, typer.Option(help="Words per n-gram, to find protected text.")] = DEFAULTS.ngram,
    leak: Annotated[float, typer.Option(help="Tolerated share of protected n-grams in a document.")] = DEFAULTS.leak,
    boilerplate: Annotated[
        int, typer.Option(help="Ignore n-grams that occur in more repositories than this.")
    ] = DEFAULTS.boilerplate,
    chat: Annotated[
        bool, typer.Option("--chat", help="Sources are rows of messages; the loss is on assistant turns only.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the validation split and fill-in-the-middle.")] = DEFAULTS.seed,
    shard_mib: Annotated[int, typer.Option(help="Size of a shard in MiB of tokens.")] = DEFAULTS.shard_bytes >> 20,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an interrupted build and start again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Turn code, text or chats into token shards: filtered, deduplicated, decontaminated, split by repository.

    An interrupted build resumes with the same command."""
    from etude.chat.tokenizer import Tokenizer

    options = CorpusOptions(
        layout=layout,
        chat=chat,
        fim=fim,
        suffixes=tuple(suffix or ()),
        max_bytes=max_bytes,
        validation=validation,
        held_out=tuple(held_out or ()),
        against=tuple(against or ()),
        near=near,
        shingle=shingle,
        ngram=ngram,
        leak=leak,
        boilerplate=boilerplate,
        seed=seed,
        shard_bytes=shard_mib << 20,
    )
    try:
        with progress_line("build") as report:
            built = build_corpus(sources, Tokenizer.load(tokenizer), out, options, report, restart=restart)
    except KeyboardInterrupt:
        raise Interrupted("stopped; run the same command again to resume") from None
    _print_report(built, as_json)


@app.command(epilog="Example:  etude data show runs/corpus")
def show(corpus: CorpusDir, as_json: AsJson = False) -> None:
    """Print the size of a corpus, the removed documents by reason, and the licences of its repositories."""
    read_manifest(corpus)
    _print_report(read_report(corpus), as_json)


@app.command(epilog="Example:  etude data peek runs/corpus --document 7")
def peek(
    corpus: CorpusDir,
    split: Annotated[str, typer.Option(help="train, validation or held_out.")] = "train",
    document: Annotated[int, typer.Option(help="Number of the document, from 0.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Print one document as the model reads it; in a corpus of chats, tokens in the loss are green."""
    from etude.chat.tokenizer import Tokenizer

    shards = Shards.open(corpus, split, verify=False)
    if not 0 <= document < len(shards):
        raise InputError(f"--document {document}: split {split} has documents 0 to {len(shards) - 1}")
    tokenizer = Tokenizer.load(corpus / TOKENIZER)
    ids, mask = shards.read(document).tolist(), shards.mask(document).tolist()
    if as_json:
        print(json.dumps({"name": shards.name(document), "tokens": ids, "mask": mask, "text": tokenizer.decode(ids)}))
        return
    console = Console()
    console.print(
        f"{shards.name(document)}: document {document:,} of {len(shards):,}, {len(ids):,} tokens", style="dim"
    )
    console.print(_coloured(tokenizer, ids, mask) if shards.has_mask else Text(tokenizer.decode(ids)), soft_wrap=True)


def _coloured(tokenizer: Any, ids: list[int], mask: list[bool]) -> Text:
    text = Text()
    start = 0
    for at in range(1, len(ids) + 1):
        if at == len(ids) or mask[at] != mask[start]:
            text.append(tokenizer.decode(ids[start:at]), style="green" if mask[start] else "dim")
            start = at
    return text


def _print_report(report: CorpusReport, as_json: bool) -> None:
    if as_json:
        sizes = {reason: asdict(size) for reason, size in report.removed.items()}
        splits = {split: asdict(size) for split, size in report.splits.items()}
        licences = report.details["licences"]
        summary = {"corpus": str(report.path), "read": asdict(report.read), "removed": sizes, "splits": splits}
        print(json.dumps({**summary, "licences": licences}))
        return
    console = Console()
    console.print(f"corpus: {escape(str(report.path))}", highlight=False)
    console.print(_split_table(report.splits))
    if report.removed:
        console.print(_removed_table(report.read, report.removed))
    counts = ", ".join(f"{name} {count:,}" for name, count in report.details["licences"].items())
    console.print(f"licences of repositories: {escape(counts)}", highlight=False)


def _split_table(splits: dict[str, CorpusSize]) -> Table:
    table = Table("split", box=None, header_style="bold")
    for column in ("documents", "tokens", "bytes", "bytes/token"):
        table.add_column(column, justify="right")
    for split, size in splits.items():
        ratio = f"{size.bytes / size.tokens:.2f}" if size.tokens else "-"
        table.add_row(split, f"{size.documents:,}", f"{size.tokens:,}", f"{size.bytes:,}", ratio)
    return table


def _removed_table(read: CorpusSize, removed: dict[str, CorpusSize]) -> Table:
    table = Table("removed", box=None, header_style="bold")
    for column in ("documents", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("why")
    for reason, size in removed.items():
        table.add_row(reason, f"{size.documents:,}", f"{size.bytes:,}", REASONS.get(reason, ""))
    table.add_row("of", f"{read.documents:,}", f"{read.bytes:,}", "read", style="dim")
    return table
