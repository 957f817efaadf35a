"""Conversations as training documents: the rendered text, split into segments inside and outside of the loss.

The splits come from rendering, never from searching the text for roles. The chat before an assistant turn, rendered
with the generation prompt, is the model's input; the text that the same chat with the turn has beyond it, up to and
including the token that closes the turn, is in the loss. A row for which that does not hold is removed with a reason.

A row of a recorded session may also have its tokens, under `exact`: the digest of their tokenizer, and runs of ids that
are in the loss or not. A corpus with that tokenizer takes these tokens as they are.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.data.document_format import DocumentPart
from etude.data.documents import READ_LIMITS, ROWS, ReadLimits
from etude.data.rows import iter_strings, locate_row, read_rows
from etude.errors import InputError

if TYPE_CHECKING:
    from etude.chat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Chat:
    """One row: its name and messages; `messages` is None when the row was too large to read."""

    repository: str
    path: str
    messages: list[dict[str, Any]] | None
    tools: list[dict[str, Any]] | None
    size: int
    exact: "ExactTokens | None" = None


@dataclass(frozen=True)
class ExactTokens:
    """The tokens of a session in one tokenizer, in runs that are in the loss or not."""

    tokenizer: str  # digest
    runs: tuple[tuple[bool, tuple[int, ...]], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the value of the key `exact` of a row."""
        return {"tokenizer": self.tokenizer, "runs": [[in_loss, list(ids)] for in_loss, ids in self.runs]}


@dataclass(frozen=True)
class ConversationSegment:
    """Rendered text that is in the loss (an assistant turn) or not (everything else)."""

    text: str
    in_loss: bool
    tokens: tuple[int, ...] | None = None  # None: those of the text


def read_conversations(source: str, limits: ReadLimits = READ_LIMITS) -> Iterator[Chat]:
    """Yield the conversations of a file of rows (.jsonl or .parquet)."""
    path = Path(source)
    if not path.is_file() or not path.name.endswith(ROWS):
        raise InputError(f"source {source}: chats are read from files of rows ({', '.join(ROWS)})")
    for number, row, size in read_rows(path, limits):
        repository, inside, _ = locate_row(path, number, row)
        if row is None:
            yield Chat(repository, inside, None, None, size)
            continue
        messages, tools = row.get("messages"), row.get("tools")
        if isinstance(tools, str):  # some tables store this column as JSON text
            tools = _parse_tools(path, number, tools)
        if not _are_objects(messages) or not messages:
            raise InputError(f"{path}: row {number} has no list of objects under messages")
        if tools is not None and not _are_objects(tools):
            raise InputError(f"{path}: row {number}: tools is not a list of objects")
        yield Chat(repository, inside, messages, tools or None, size, _parse_exact(path, number, row.get("exact")))


class ChatFormat:
    """Splits conversations for one tokenizer: its chat template and the tokens that close a turn."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._end_tokens = [tokenizer.decode([token]) for token in sorted(tokenizer.stop_ids)]

    def segments(self, chat: Chat) -> tuple[ConversationSegment, ...] | str:
        """Return the rendered chat in segments, or the code of the reason to remove it."""
        if chat.messages is None:
            return "too_large"
        if chat.exact is not None and chat.exact.tokenizer == self._tokenizer.digest:
            runs = chat.exact.runs
            exact = tuple(ConversationSegment(self._tokenizer.decode(ids), in_loss, ids) for in_loss, ids in runs)
            return exact if any(segment.in_loss for segment in exact) else "no_assistant"
        if any(map(self._tokenizer.find_control_token, iter_strings([chat.messages, chat.tools]))):
            return "control_token"
        if not any(message.get("role") == "assistant" and message.get("weight") != 0 for message in chat.messages):
            return "no_assistant"
        try:
            segments = self._split(chat.messages, chat.tools)
            "".join(segments if isinstance(segments, str) else (segment.text for segment in segments)).encode()
        except InputError:
            return "template"
        except UnicodeEncodeError:  # JSON can contain a lone surrogate
            return "not_utf8"
        return segments

    def _split(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> tuple[ConversationSegment, ...] | str:
        segments: list[ConversationSegment] = []
        rendered = ""  # the text of all segments so far
        for turn, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self._tokenizer.render(messages[:turn], tools, add_generation_prompt=True)
            full = self._tokenizer.render(messages[: turn + 1], tools, add_generation_prompt=False)
            if not prompt.startswith(rendered) or not full.startswith(prompt):
                return "not_append_only"
            if (end := self._turn_end(full, len(prompt))) is None:
                return "open_turn"
            # Weight 0 keeps a turn in the conversation but out of the loss, such as a mistake that is corrected later.
            in_loss = message.get("weight") != 0
            segments.append(ConversationSegment(prompt[len(rendered) :], False))
            segments.append(ConversationSegment(full[len(prompt) : end], in_loss))
            rendered = full[:end]
        complete = self._tokenizer.render(messages, tools, add_generation_prompt=False)
        if not complete.startswith(rendered):
            return "not_append_only"
        return tuple(
            segment for segment in (*segments, ConversationSegment(complete[len(rendered) :], False)) if segment.text
        )

    def _turn_end(self, text: str, start: int) -> int | None:
        """Return the end of the token that closes the turn; text that the template adds after it is not the model's."""
        ends = [at + len(token) for token in self._end_tokens if (at := text.rfind(token, start)) >= 0]
        return max(ends, default=None)


def chat_parts(segments: Sequence[ConversationSegment], end_of_text: int) -> Iterator[DocumentPart]:
    """Yield the parts of a chat. Segments are encoded separately: no token spans input and output of the model."""
    for segment in segments:
        yield DocumentPart(text=segment.text, tokens=segment.tokens, in_loss=segment.in_loss, special=True)
    yield DocumentPart(token=end_of_text, in_loss=False)


def plain_text(chat: Chat) -> str:
    """Return the text that tells chats apart: all messages but the system prompt, which many chats share."""
    messages = [message for message in chat.messages or () if message.get("role") != "system"]
    return "\n".join(iter_strings([{**message, "role": None} for message in messages]))


def dump_chat(plain: str, segments: Sequence[ConversationSegment]) -> str:
    rows = [[segment.text, segment.in_loss, segment.tokens] for segment in segments]
    return json.dumps({"plain": plain, "segments": rows})


def load_chat(text: str) -> tuple[str, tuple[ConversationSegment, ...]]:
    value = json.loads(text)
    segments = ((text, in_loss, None if ids is None else tuple(ids)) for text, in_loss, ids in value["segments"])
    return value["plain"], tuple(ConversationSegment(*segment) for segment in segments)


def _parse_tools(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except ValueError as error:
        raise InputError(f"{path}: row {number}: tools is not JSON: {error}") from None


def _parse_exact(path: Path, number: int, value: object) -> ExactTokens | None:
    if value is None:
        return None
    try:
        runs = tuple((bool(in_loss), tuple(map(int, ids))) for in_loss, ids in value["runs"])  # type: ignore[index]
        return ExactTokens(str(value["tokenizer"]), runs)  # type: ignore[index]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{path}: row {number}: exact is not a tokenizer and runs of token ids ({error!r})") from None


def _are_objects(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
