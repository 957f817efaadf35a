"""The contract of a tool: its schema, its function and its error classes.

A tool is a name, a JSON schema and a function of a `ToolContext` and validated arguments that returns text for the
model. Expected failures are `ToolError`s with a class; any other exception is a bug in the tool and is logged in full.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from etude.config import Registry
from etude.errors import EtudeError

if TYPE_CHECKING:
    from etude.harness.tools.context import ToolContext

ErrorClass = Literal[
    "malformed_call",  # could not be parsed
    "unknown_tool",
    "bad_arguments",  # missing, unknown, of the wrong type, or out of range
    "environment",  # the pod is not as the call assumed: no such file, no match, permission denied
    "timeout",
    "denied",  # refused by the user or by policy
    "aborted",  # interrupted by the user
    "provider",  # something outside the pod failed: web search, the embedding model
    "bug",  # a defect in a tool; counted separately
]


class ToolError(EtudeError):
    """A failed call; the message tells the model what is wrong and what to do."""

    def __init__(self, kind: ErrorClass, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class ToolOutcome:
    """The outcome of a call: text for the model, an error class if it failed, and facts for the trace."""

    text: str
    error: ErrorClass | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # exit_code, path, lines_added, log, ...; JSON
    seconds: float = 0.0


ToolFunction = Callable[["ToolContext", Mapping[str, Any]], Awaitable[ToolOutcome]]


@dataclass(frozen=True)
class Tool:
    """One tool under its own name; aliases may show it under another."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    run: ToolFunction
    read_only: bool = False  # runs concurrently with other read-only calls; all others run alone, in order


TOOLS = Registry[Tool]("tool", modules=("etude.harness.tools.executor",))
tool = TOOLS.add
