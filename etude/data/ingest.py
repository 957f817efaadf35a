"""The first pass of a corpus: every file or chat of the sources, as a text that passed the filters or a reason why not.

`collect` spools the texts and keeps their places, in the order everything later follows: sources as given, then
repositories and files by name. `read_protected` reads the same kinds of source for text that must not be trained on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.conversations import Chat, ChatFormat, dump_chat, plain_text, read_chats
from etude.data.dedup import text_digest
from etude.data.documents import LIMITS, ROWS, Document, File, document_name, read_source
from etude.data.filters import LICENCE, Filters, examine, too_large, vendored, wrong_suffix
from etude.data.licences import UNKNOWN, guess_licence, is_licence
from etude.data.rows import read_protected_rows
from etude.data.staging import TEXTS, Entry, Workspace
from etude.data.worker_pool import ALONE, Crew
from etude.errors import InputError

if TYPE_CHECKING:  # the model room loads torch
    from etude.chat.tokenizer import Tokenizer


_CHAT_WEIGHT = 32  # a byte of a chat is rendered in the time of this many bytes that are filtered


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
        "entries": [list(vars(entry).values()) for entry in entries],
        "removed": sorted(removed, key=lambda one: str(one["document"])),
        "licences": {repository: licences[repository] for repository in sorted(licences)},
    }


def read_files(source: str, filters: Filters, crew: Crew = ALONE) -> Iterator[Found]:
    """What lies on disk is read by the crew; archives and git's objects come through one reader, here."""
    for anywhere, files in groupby(read_source(source), key=attrgetter("anywhere")):
        if anywhere:
            size = partial(_bytes_to_read, filters)
            for found in crew.map(partial(look_at, filters), files, size):
                yield from found
        else:
            for file in files:
                yield from look_at(filters, [file])


def look_at(filters: Filters, files: Sequence[File]) -> list[Found]:
    """Read the files that their names do not rule out, and filter what they hold."""
    found = []
    for file in files:
        examined = examine(file, filters)
        place = (file.repository, file.path, file.size)
        if isinstance(examined, Document):
            found.append(Found(*place, text=examined.text, digest=text_digest(examined.text)))
        elif examined == LICENCE:
            readable = file.size <= filters.max_bytes
            licence = guess_licence(file.read().decode(errors="replace")) if readable else UNKNOWN
            found.append(Found(*place, licence=licence))
        else:
            found.append(Found(*place, reason=examined))
    return found


def _bytes_to_read(filters: Filters, file: File) -> int:
    return file.size if file.size <= filters.max_bytes else 0


def read_rendered_chats(source: str, tokenizer: "Tokenizer", crew: Crew = ALONE) -> Iterator[Found]:
    def with_the_tokenizer() -> Callable[[list[Chat]], list[Found]]:
        tokenizer.save(crew.directory / "tokenizer")
        return partial(_render_elsewhere, str(crew.directory / "tokenizer"))

    chats = read_chats(source, LIMITS)
    here = partial(_render, ChatFormat(tokenizer))
    for found in crew.map(here, chats, _weight, elsewhere=with_the_tokenizer):
        yield from found


def _weight(chat: Chat) -> int:
    return _CHAT_WEIGHT * max(1000, chat.size)  # a row of Parquet has no size


def _render(form: ChatFormat, chats: Sequence[Chat]) -> list[Found]:
    found = []
    for chat in chats:
        segments = form.segments(chat)
        place = (chat.repository, chat.path, chat.size)
        if isinstance(segments, str):
            found.append(Found(*place, reason=segments))
        else:
            whole = "".join(segment.text for segment in segments)
            found.append(Found(*place, text=dump_chat(plain_text(chat), segments), digest=text_digest(whole)))
    return found


def _render_elsewhere(directory: str, chats: Sequence[Chat]) -> list[Found]:
    return _render(_open_form(directory), chats)


@lru_cache(maxsize=1)
def _open_form(directory: str) -> ChatFormat:
    from etude.data.encoder import open_tokenizer

    return ChatFormat(open_tokenizer(directory))


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
