"""Chats to tokens and back: messages become a prompt, and a model's text becomes content and tool calls.

`ServerChatFormat` is the server's interface to a chat format. `HermesChatFormat` is that of Qwen and of our own
template: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. Text that is not a call is kept unchanged.
"""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from etude.chat.tokenizer import Tokenizer
from etude.inference.incremental_text import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Delimiters of a placeholder for text that must not be read as control tokens; from Unicode's private use area.
SIGN, END_SIGN = "\ue000", "\ue001"


@dataclass(frozen=True)
class ParsedToolCall:
    """A tool call as the model wrote it; `arguments` is a JSON object, unchanged."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class ToolCallParser(Protocol):
    """Splits streamed text into content and tool calls."""

    def feed(self, text: str) -> list[str | ParsedToolCall]:
        """Return the content and calls that are certain now."""
        ...

    def finish(self) -> list[str | ParsedToolCall]:
        """Return what was held back, after the last text."""
        ...


class ServerChatFormat(Protocol):
    """One chat format."""

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt of a chat."""
        ...

    def tool_parser(self) -> ToolCallParser:
        """Return a parser for one completion of a chat with tools."""
        ...


class HermesChatFormat:
    """The tokenizer's own chat template, and Hermes-style tool calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = ChatEncoder(tokenizer).encode

    def tool_parser(self) -> ToolCallParser:
        return HermesToolCallParser()


class HermesToolCallParser:
    """Drops one newline before a call and all whitespace between calls, which the template inserts by itself."""

    def __init__(self) -> None:
        self._text = ""
        self._inside = self._called = False

    def feed(self, text: str) -> list[str | ParsedToolCall]:
        self._text += text
        found: list[str | ParsedToolCall] = []
        while (at := self._text.find(CLOSE if self._inside else OPEN)) >= 0:
            before = self._text[:at]
            self._text = self._text[at + len(CLOSE if self._inside else OPEN) :]
            if self._inside:
                call = parse_call(before)
                self._called = self._called or call is not None
                found.append(call or f"{OPEN}{before}{CLOSE}")
            else:
                found.append("" if self._called and not before.strip() else before.removesuffix("\n"))
            self._inside = not self._inside
        if not self._inside:
            found.append(self._certain())
        return [part for part in found if part]

    def _certain(self) -> str:
        """Return the text that cannot belong to a call."""
        if self._called and not self._text.strip():
            return ""
        size = len(self._text) - max(overlap(self._text, OPEN), overlap(self._text, f"\n{OPEN}"))
        certain, self._text = self._text[:size], self._text[size:]
        return certain

    def finish(self) -> list[str | ParsedToolCall]:
        rest = f"{OPEN}{self._text}" if self._inside else self._text
        self._text = ""
        return [rest] if rest and not (self._called and not rest.strip()) else []


def parse_call(text: str) -> ParsedToolCall | None:
    """Return the call between two tags; None if it is not a valid one."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    if not isinstance(call.get("arguments"), dict):
        return None
    return ParsedToolCall(call["name"], _as_written(text, call["arguments"]))


def _as_written(text: str, arguments: dict[str, Any]) -> str:
    """Return the arguments in the model's own spelling, so that the next turn's prompt repeats them exactly."""
    for start in re.finditer(r'"arguments"\s*:\s*', text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start.end())
        except ValueError:
            continue
        if value == arguments:
            return text[start.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


class ChatEncoder:
    """Encodes chats with the chat template so that no text in a message becomes a control token.

    Text that spells one is replaced by a placeholder before rendering and encoded as plain text in its place. In the
    assistant's messages only special tokens are replaced: reasoning and call tags are meant to be control tokens there.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._control = _any_of(t.content for t in added if tokenizer.find_control_token(t.content))
        self._special = _any_of(t.content for t in added if t.special)

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        replaced: list[str] = []

        def placeholder(match: re.Match[str]) -> str:
            replaced.append(match[0])
            return f"{SIGN}{len(replaced) - 1}{END_SIGN}"

        def escape(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(placeholder, value)
            if isinstance(value, Mapping):
                return {key: escape(item, pattern) for key, item in value.items()}
            return [escape(item, pattern) for item in value] if isinstance(value, list | tuple) else value

        escaped = []
        for message in messages:
            own = {"content", "reasoning_content"} if message.get("role") == "assistant" else ()
            patterns = {key: self._special if key in own else self._control for key in message}
            escaped.append({key: escape(item, patterns[key]) for key, item in message.items()})
        text = self.tokenizer.render(escaped, [escape(tool, self._control) for tool in tools] or None)
        tokens: list[int] = []
        for index, part in enumerate(re.split(f"{SIGN}(\\d+){END_SIGN}", text)):
            tokens += self.tokenizer.encode(replaced[int(part)] if index % 2 else part, special=not index % 2)
        return tokens


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    # Our own delimiter is replaced too: a text that contains it must not look like a placeholder.
    return re.compile("|".join(map(re.escape, sorted((*tokens, SIGN), key=len, reverse=True))))
