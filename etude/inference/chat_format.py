"""Chats to tokens and back: how messages become a prompt, and how a model's text becomes content and tool calls.

A `ServerChatFormat` is all that a server needs to know of a chat format. `HermesChatFormat` is the one of Qwen and of our own template:
`<tool_call>{"name": ..., "arguments": ...}</tool_call>`. Text that is not a call stays text, to the letter.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from etude.chat.tokenizer import Tokenizer
from etude.inference.incremental_text import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Around the number of a piece of text that must not be read as control tokens; from Unicode's private use area.
SIGN, END_SIGN = "\ue000", "\ue001"

# What a model writes, as it comes: thoughts, text, or that it calls a tool and which.
StreamPart: TypeAlias = Literal["thinking", "text", "call"]
PartListener: TypeAlias = Callable[[StreamPart, str], None]


@dataclass(frozen=True)
class ParsedToolCall:
    """A call as the model wrote it; `arguments` is a JSON object, unchanged."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


class ToolCallParser(Protocol):
    """Text as it comes, taken apart."""

    def feed(self, text: str) -> list[str | ParsedToolCall]:
        """Content and calls that are certain now."""
        ...

    def finish(self) -> list[str | ParsedToolCall]:
        """What was held back, when no more text comes."""
        ...


class ServerChatFormat(Protocol):
    """One chat format."""

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """The prompt of a chat that the model continues."""
        ...

    def reader(self) -> ToolCallParser:
        """For one answer to a chat with tools."""
        ...


class HermesChatFormat:
    """The tokenizer's own chat template, and HermesChatFormat-style tool calls."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.encode = ChatEncoder(tokenizer).encode

    def reader(self) -> ToolCallParser:
        return HermesToolCallParser()


class HermesToolCallParser:
    """Takes one newline before a call and all blank between calls for the template's, as it puts them there itself."""

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
        """Text that cannot belong to a call any more."""
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
    """A call from what stood between the marks; None when it is not one."""
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
    """The arguments in the model's own spelling, so that the next turn's prompt repeats what the model wrote."""
    for start in re.finditer(r'"arguments"\s*:\s*', text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, start.end())
        except ValueError:
            continue
        if value == arguments:
            return text[start.end() : end]
    return json.dumps(arguments, ensure_ascii=False)


class ChatEncoder:
    """Prompts of chats by the chat template; no text in them becomes a control token, whatever it spells.

    Text that spells one is set aside before the template sees it and encoded as plain text where it belongs. Of what
    the assistant wrote only the frame is set aside: its thoughts and calls are meant to be read as such.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.backend.get_added_tokens_decoder().values()
        self._control = _any_of(t.content for t in added if tokenizer.find_control_token(t.content))
        self._frame = _any_of(t.content for t in added if t.special)

    def encode(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        aside: list[str] = []

        def sign(match: re.Match[str]) -> str:
            aside.append(match[0])
            return f"{SIGN}{len(aside) - 1}{END_SIGN}"

        def guard(value: Any, pattern: re.Pattern[str]) -> Any:
            if isinstance(value, str):
                return pattern.sub(sign, value)
            if isinstance(value, Mapping):
                return {key: guard(item, pattern) for key, item in value.items()}
            return [guard(item, pattern) for item in value] if isinstance(value, list | tuple) else value

        guarded = []
        for message in messages:
            own = {"content", "reasoning_content"} if message.get("role") == "assistant" else ()
            patterns = {key: self._frame if key in own else self._control for key in message}
            guarded.append({key: guard(item, patterns[key]) for key, item in message.items()})
        text = self.tokenizer.render(guarded, [guard(tool, self._control) for tool in tools] or None)
        tokens: list[int] = []
        for place, part in enumerate(re.split(f"{SIGN}(\\d+){END_SIGN}", text)):
            tokens += self.tokenizer.encode(aside[int(part)] if place % 2 else part, special=not place % 2)
        return tokens


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    # With our own sign: a text that brings it along must not be taken for one of ours.
    return re.compile("|".join(map(re.escape, sorted((*tokens, SIGN), key=len, reverse=True))))
