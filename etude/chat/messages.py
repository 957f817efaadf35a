"""Messages, parsed model turns and tool calls as text, without token ids.

Token ids are kept in the trace and are never re-created from these messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Role = Literal["system", "user", "assistant", "tool"]
# Parse status of a tool call. Only `ok` calls run; all others are answered with an error and counted, never dropped.
CallStatus = Literal[
    "ok",
    "bad_json",  # not valid JSON
    "bad_structure",  # JSON or tags of the wrong shape: arguments that are not an object, a misplaced tag
    "missing_name",
    "unknown_tool",
    "unclosed",  # the turn ended inside the call
]

# Kinds of streamed output: reasoning, text, or the name of a tool that is being called.
StreamPart: TypeAlias = Literal["thinking", "text", "call"]
PartListener: TypeAlias = Callable[[StreamPart, str], None]


@dataclass(frozen=True)
class ToolCall:
    """A tool call as the model wrote it. `raw` is its text; `span` is its token range in the turn, marks included."""

    name: str
    arguments: Mapping[str, Any] | None
    id: str
    status: CallStatus = "ok"
    raw: str = ""
    span: tuple[int, int] = (0, 0)
    problem: str = ""  # error text shown to the model


@dataclass(frozen=True)
class Message:
    """One message. `calls` are the assistant's; `call` (an id) and `name` say which call a tool message answers."""

    role: Role
    content: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    call: str = ""
    name: str = ""


@dataclass(frozen=True)
class ParsedTurn:
    """The parsed tokens of one model turn. The three token counts add up to the length of the turn."""

    thinking: str
    text: str
    calls: tuple[ToolCall, ...]
    closed: bool  # the model ended the turn itself
    thinking_tokens: int = 0
    call_tokens: int = 0
    text_tokens: int = 0  # all other tokens, including the one that ends the turn

    def message(self) -> Message:
        return Message("assistant", self.text, self.thinking, self.calls)


ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


def tool_names(tools: Sequence[ToolSchema]) -> frozenset[str]:
    """Return the names of the tools in these schemas."""
    return frozenset(tool["function"]["name"] for tool in tools)
