"""The first pass of a corpus: every file or chat of the sources, as a text that passed the filters or a reason why not.

`collect` spools the texts and keeps their places, in the order everything later follows: sources as given, then
repositories and files by name. `read_protected` reads the same kinds of source for text that must not be trained on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.chat import ChatFormat, dump_chat, plain_text, read_chats
from etude.data.dedup import text_digest
from etude.data.documents import LIMITS, ROWS, Document, document_name, read_source
from etude.data.filters import LICENCE, Filters, examine, too_large, vendored, wrong_suffix
from etude.data.licences import UNKNOWN, guess_licence, is_licence
from etude.data.rows import read_protected_rows
from etude.data.spool import TEXTS, Entry, Workspace
from etude.errors import InputError

if TYPE_CHECKING:  # the model room loads torch
    from etude.model.tokenizer import Tokenizer


@dataclass(frozen=True)
class Found:
    """A file or a row after the filters: a text, a licence, or a reason."""

    repository: str
    path: str
    size: int
    text: str | None = None
    digest: str = ""
    reason: str = ""
    licence: str | None = None


def collect(
    work: Workspace,
    sources: Sequence[str],
    read: Callable[[str], Iterable[Found]],
    progress: Callable[[int], None] = lambda found: None,
) -> dict[str, Any]:
    """Spool every document that passes; return their places, the reasons of the rest, and licences."""
    entries: list[Entry] = []
    removed: list[dict[str, Any]] = []
    licences: dict[str, dict[str, str]] = {}
    order: dict[str, int] = {}  # of a repository: the place of the first source that has it
    with (work.path / TEXTS).open("wb") as texts:
        for place, source in enumerate(sources):
            found = None
            for found in read(source):
                order.setdefault(found.repository, place)
                if found.licence is not None:
                    licences.setdefault(found.repository, {})[found.path] = found.licence
                elif found.text is None:
                    name = document_name(found.repository, found.path)
                    removed.append({"document": name, "reason": found.reason, "bytes": found.size})
                else:
                    data = found.text.encode()
                    entries.append(Entry(found.repository, found.path, texts.tell(), len(data), found.digest))
                    texts.write(data)
                    progress(len(entries))
            if found is None:
                raise InputError(f"source {source} holds no file; name one that does")
    if not entries:
        reasons = Counter(str(one["reason"]) for one in removed)
        told = ", ".join(f"{count:,} for {reason}" for reason, count in sorted(reasons.items()))
        raise InputError(f"no document is left to train on; removed: {told or 'none'}")
    entries.sort(key=lambda entry: (order[entry.repository], entry.repository, entry.path, entry.offset))
    return {
        "entries": [list(asdict(entry).values()) for entry in entries],
        "removed": sorted(removed, key=lambda one: str(one["document"])),
        "licences": {repository: licences[repository] for repository in sorted(licences)},
    }


def read_files(source: str, filters: Filters) -> Iterator[Found]:
    for file in read_source(source):
        examined = examine(file, filters)
        if isinstance(examined, Document):
            digest = text_digest(examined.text)
            yield Found(file.repository, file.path, file.size, text=examined.text, digest=digest)
        elif examined == LICENCE:
            readable = file.size <= filters.max_bytes
            licence = guess_licence(file.read().decode(errors="replace")) if readable else UNKNOWN
            yield Found(file.repository, file.path, file.size, licence=licence)
        else:
            yield Found(file.repository, file.path, file.size, reason=examined)


def read_rendered_chats(source: str, tokenizer: "Tokenizer") -> Iterator[Found]:
    form = ChatFormat(tokenizer)
    for chat in read_chats(source, LIMITS):
        segments = form.segments(chat)
        if isinstance(segments, str):
            yield Found(chat.repository, chat.path, chat.size, reason=segments)
        else:
            whole = "".join(segment.text for segment in segments)
            text = dump_chat(plain_text(chat), segments)
            yield Found(chat.repository, chat.path, chat.size, text=text, digest=text_digest(whole))


def read_protected(sources: Sequence[str], filters: Filters) -> Iterator[tuple[str, str]]:
    """Names and texts to protect. Every string of a row counts; of files, all that could be in a corpus."""
    for source in sources:
        path = Path(source)
        rows = path.is_file() and path.name.endswith(ROWS)
        for file in read_protected_rows(path, LIMITS) if rows else read_source(source):
            # A row has no suffix and may be large; another project's code or licence is nobody's secret.
            if rows or not (
                is_licence(file.path) or any(f(file, filters) for f in (wrong_suffix, vendored, too_large))
            ):
                yield f"{source}: {document_name(file.repository, file.path)}", file.read().decode(errors="replace")
