"""What is said in a session, as people read it: messages, what a model answered, the calls in it. No tokens in here.

The tokens are in the trace, and are never made from these again: a message is what a run of tokens means.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
# What a call is worth. Only an `ok` one is run; every other is answered with an error and counted, never dropped.
CallStatus = Literal[
    "ok",
    "bad_json",  # what should be JSON is not
    "bad_structure",  # JSON, or tags, of the wrong shape: arguments that are no object, a tag that does not belong
    "missing_name",
    "unknown_tool",
    "unclosed",  # the answer ended inside it
]


@dataclass(frozen=True)
class Call:
    """A tool call as the model wrote it. `raw` is its text; `span` its tokens in the answer, marks included."""

    name: str
    arguments: Mapping[str, Any] | None
    id: str
    status: CallStatus = "ok"
    raw: str = ""
    span: tuple[int, int] = (0, 0)
    problem: str = ""  # what is wrong with it, for the model to read


@dataclass(frozen=True)
class Message:
    """One message. `calls` are an assistant's; `call` and `name` say which call a tool's message answers."""

    role: Role
    content: str = ""
    thinking: str = ""
    calls: tuple[Call, ...] = ()
    call: str = ""
    name: str = ""


@dataclass(frozen=True)
class Answer:
    """What a model's tokens mean. Its token counts add up to the tokens of the answer."""

    thinking: str
    text: str
    calls: tuple[Call, ...]
    closed: bool  # the model ended its turn itself
    thinking_tokens: int = 0
    call_tokens: int = 0
    text_tokens: int = 0  # everything else, the token that ends the turn included

    def message(self) -> Message:
        return Message("assistant", self.text, self.thinking, self.calls)


ToolSchema = Mapping[str, Any]  # {"type": "function", "function": {"name", "description", "parameters"}}


def names_of(tools: Sequence[ToolSchema]) -> frozenset[str]:
    """The names of the tools a model is shown."""
    return frozenset(tool["function"]["name"] for tool in tools)
