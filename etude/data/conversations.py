"""Chats as training documents: the text a template renders, cut where the assistant starts and stops writing.

The cuts come from rendering, never from searching text for roles: the chat up to an assistant's turn, with the
generation prompt, is what the model would have seen; what the same chat with the turn has more is what it wrote, up to
and with the token that closed it. A row for which that does not hold is dropped with a reason, never guessed at.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.document_format import Piece
from etude.data.documents import ROWS, Limits
from etude.data.rows import read_rows, row_place, strings_of
from etude.errors import InputError

if TYPE_CHECKING:
    from etude.chat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chat:
    """One row: its place, and what was said; `messages` is None when the row was too large to read."""

    repository: str
    path: str
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    size: int


@dataclass(frozen=True)
class Segment:
    """Rendered text that one side wrote: the assistant when `written`, everybody else otherwise."""

    text: str
    written: bool


def read_chats(source: str, limits: Limits) -> Iterator[Chat]:
    path = Path(source)
    if not path.is_file() or not path.name.endswith(ROWS):
        raise InputError(f"source {source}: chats are read from files of rows ({', '.join(ROWS)})")
    for number, row, size in read_rows(path, limits):
        repository, inside, _ = row_place(path, number, row)
        if row is None:
            yield Chat(repository, inside, None, None, size)
            continue
        messages, tools = row.get("messages"), row.get("tools")
        if isinstance(tools, str):  # some tables hold a column of JSON text
            tools = _parse_tools(path, number, tools)
        if not _are_objects(messages) or not messages:
            raise InputError(f"{path}: row {number} has no list of objects under messages")
        if tools is not None and not _are_objects(tools):
            raise InputError(f"{path}: row {number}: tools is not a list of objects")
        yield Chat(repository, inside, messages, tools or None, size)


class ChatFormat:
    """How one tokenizer writes chats: its template, and the tokens that close a turn."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._closers = [tokenizer.decode([token]) for token in sorted(tokenizer.stop_ids)]

    def segments(self, chat: Chat) -> tuple[Segment, ...] | str:
        """The rendered chat in segments, or the code of the reason to drop it."""
        if chat.messages is None:
            return "too_large"
        if any(map(self._tokenizer.find_control_token, strings_of([chat.messages, chat.tools]))):
            return "control_token"
        if not any(message.get("role") == "assistant" and message.get("weight") != 0 for message in chat.messages):
            return "no_assistant"
        try:
            segments = self._cut(chat.messages, chat.tools)
            "".join(segments if isinstance(segments, str) else (part.text for part in segments)).encode()
        except InputError:
            return "template"
        except UnicodeEncodeError:  # JSON can spell half of a character
            return "not_utf8"
        return segments

    def _cut(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> tuple[Segment, ...] | str:
        segments: list[Segment] = []
        rendered = ""  # all text that is in a segment
        for turn, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            seen = self._tokenizer.render(messages[:turn], tools, add_generation_prompt=True)
            whole = self._tokenizer.render(messages[: turn + 1], tools, add_generation_prompt=False)
            if not seen.startswith(rendered) or not whole.startswith(seen):
                return "not_append_only"
            if (end := self._closed_at(whole, len(seen))) is None:
                return "open_turn"
            # weight 0: part of the conversation, but not to be learned, as a mistake that is corrected later
            taught = message.get("weight") != 0
            segments += [Segment(seen[len(rendered) :], False), Segment(whole[len(seen) : end], taught)]
            rendered = whole[:end]
        complete = self._tokenizer.render(messages, tools, add_generation_prompt=False)
        if not complete.startswith(rendered):
            return "not_append_only"
        return tuple(segment for segment in (*segments, Segment(complete[len(rendered) :], False)) if segment.text)

    def _closed_at(self, text: str, start: int) -> int | None:
        """Where the token that closes the turn ends; what a template adds behind it, the model did not write."""
        ends = [place + len(token) for token in self._closers if (place := text.rfind(token, start)) >= 0]
        return max(ends, default=None)


def chat_pieces(segments: Sequence[Segment], end_of_text: int) -> Iterator[Piece]:
    """Each segment is encoded by itself: a token never spans what the model saw and what it wrote."""
    for segment in segments:
        yield Piece(text=segment.text, written=segment.written, special=True)
    yield Piece(token=end_of_text, written=False)


def plain_text(chat: Chat) -> str:
    """What was said, without the system's part, which many chats share: the text that tells chats apart."""
    said = [message for message in chat.messages or () if message.get("role") != "system"]
    return "\n".join(strings_of([{**message, "role": None} for message in said]))


def dump_chat(plain: str, segments: Sequence[Segment]) -> str:
    return json.dumps({"plain": plain, "segments": [[part.text, part.written] for part in segments]})


def load_chat(text: str) -> tuple[str, tuple[Segment, ...]]:
    value = json.loads(text)
    return value["plain"], tuple(Segment(*part) for part in value["segments"])


def _parse_tools(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except ValueError as error:
        raise InputError(f"{path}: row {number}: tools is not JSON: {error}") from None


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
