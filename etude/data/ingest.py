"""The first pass of a corpus build: read every file or chat of the sources and filter it.

`ingest` writes the texts that pass to the staging area and returns their order, which all later stages follow: sources
as given, then repositories and files by name. `read_protected` reads the same kinds of source as protected text.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.conversations import Chat, ChatFormat, dump_chat, plain_text, read_conversations
from etude.data.dedup import text_digest
from etude.data.documents import READ_LIMITS, ROWS, Document, File, document_name, read_source
from etude.data.filters import LICENCE, Filters, filter_file, too_large, vendored, wrong_suffix
from etude.data.licences import UNKNOWN, guess_licence, is_licence
from etude.data.rows import read_protected_rows
from etude.data.staging import TEXTS, StagedDocument, StagingArea
from etude.data.worker_pool import IN_PROCESS, WorkerPool
from etude.errors import InputError

if TYPE_CHECKING:
    from etude.chat.tokenizer import Tokenizer


_CHAT_WEIGHT = 32  # rendering a byte of chat takes as long as filtering this many bytes


@dataclass(frozen=True)
class IngestResult:
    """A file or row after the filters: a text, a licence, or the reason of its removal."""

    repository: str
    path: str
    size: int
    text: str | None = None
    digest: str = ""
    reason: str = ""
    licence: str | None = None


def ingest(
    staging: StagingArea,
    sources: Sequence[str],
    read: Callable[[str], Iterable[IngestResult]],
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Stage every document that passes the filters; return the staged documents, the removed ones and the licences."""
    documents: list[StagedDocument] = []
    removed: list[dict[str, Any]] = []
    licences: dict[str, dict[str, str]] = {}
    order: dict[str, int] = {}  # repository -> number of the first source that has it
    with (staging.path / TEXTS).open("wb") as texts:
        for number, source in enumerate(sources):
            item = None
            for item in read(source):
                order.setdefault(item.repository, number)
                if item.licence is not None:
                    licences.setdefault(item.repository, {})[item.path] = item.licence
                elif item.text is None:
                    name = document_name(item.repository, item.path)
                    removed.append({"document": name, "reason": item.reason, "bytes": item.size})
                else:
                    data = item.text.encode()
                    documents.append(StagedDocument(item.repository, item.path, texts.tell(), len(data), item.digest))
                    texts.write(data)
                    progress(len(documents))
            if item is None:
                raise InputError(f"source {source} holds no file; name one that does")
    if not documents:
        reasons = Counter(str(one["reason"]) for one in removed)
        counts = ", ".join(f"{count:,} for {reason}" for reason, count in sorted(reasons.items()))
        raise InputError(f"no document is left to train on; removed: {counts or 'none'}")
    documents.sort(key=lambda one: (order[one.repository], one.repository, one.path, one.offset))
    return {
        "entries": [list(vars(document).values()) for document in documents],
        "removed": sorted(removed, key=lambda one: str(one["document"])),
        "licences": {repository: licences[repository] for repository in sorted(licences)},
    }


def read_files(source: str, filters: Filters, pool: WorkerPool = IN_PROCESS) -> Iterator[IngestResult]:
    """Read and filter the files of a source. Workers read files on disk; archives and git objects are read here."""
    for reopenable, files in groupby(read_source(source), key=attrgetter("reopenable")):
        if reopenable:
            size = partial(_bytes_to_read, filters)
            for results in pool.map(partial(filter_files, filters), files, size):
                yield from results
        else:
            for file in files:
                yield from filter_files(filters, [file])


def filter_files(filters: Filters, files: Sequence[File]) -> list[IngestResult]:
    """Filter files by name, read the remaining ones and filter them by content."""
    results = []
    for file in files:
        filtered = filter_file(file, filters)
        name = (file.repository, file.path, file.size)
        if isinstance(filtered, Document):
            results.append(IngestResult(*name, text=filtered.text, digest=text_digest(filtered.text)))
        elif filtered == LICENCE:
            readable = file.size <= filters.max_bytes
            licence = guess_licence(file.read().decode(errors="replace")) if readable else UNKNOWN
            results.append(IngestResult(*name, licence=licence))
        else:
            results.append(IngestResult(*name, reason=filtered))
    return results


def _bytes_to_read(filters: Filters, file: File) -> int:
    return file.size if file.size <= filters.max_bytes else 0


def read_rendered_chats(source: str, tokenizer: "Tokenizer", pool: WorkerPool = IN_PROCESS) -> Iterator[IngestResult]:
    """Read the chats of a file of rows, render them and split them into segments."""

    def make_worker_function() -> Callable[[list[Chat]], list[IngestResult]]:
        tokenizer.save(pool.directory / "tokenizer")
        return partial(_render_in_worker, str(pool.directory / "tokenizer"))

    render = partial(_render, ChatFormat(tokenizer))
    chats = read_conversations(source, READ_LIMITS)
    for results in pool.map(render, chats, _weight, make_worker_function=make_worker_function):
        yield from results


def _weight(chat: Chat) -> int:
    return _CHAT_WEIGHT * max(1000, chat.size)  # the size of a Parquet row is unknown


def _render(chat_format: ChatFormat, chats: Sequence[Chat]) -> list[IngestResult]:
    results = []
    for chat in chats:
        segments = chat_format.segments(chat)
        name = (chat.repository, chat.path, chat.size)
        if isinstance(segments, str):
            results.append(IngestResult(*name, reason=segments))
        else:
            rendered = "".join(segment.text for segment in segments)
            text = dump_chat(plain_text(chat), segments)
            results.append(IngestResult(*name, text=text, digest=text_digest(rendered)))
    return results


def _render_in_worker(directory: str, chats: Sequence[Chat]) -> list[IngestResult]:
    return _render(_open_chat_format(directory), chats)


@lru_cache(maxsize=1)
def _open_chat_format(directory: str) -> ChatFormat:
    from etude.data.encoder import open_tokenizer

    return ChatFormat(open_tokenizer(directory))


def read_protected(sources: Sequence[str], filters: Filters) -> Iterator[tuple[str, str]]:
    """Yield names and texts to protect: every string of a row; of files, those that a corpus would read."""
    for source in sources:
        path = Path(source)
        rows = path.is_file() and path.name.endswith(ROWS)
        for file in read_protected_rows(path, READ_LIMITS) if rows else read_source(source):
            # A row has no suffix and may be large. Vendored code and licences occur everywhere and are not protected.
            if rows or not (
                is_licence(file.path) or any(f(file, filters) for f in (wrong_suffix, vendored, too_large))
            ):
                yield f"{source}: {document_name(file.repository, file.path)}", file.read().decode(errors="replace")
