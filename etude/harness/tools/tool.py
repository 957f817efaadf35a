"""The contract of a tool: what the model is told of it, what it acts on, and how it fails.

A tool is a name, a JSON schema and a function of a `Workbench` and checked arguments. It answers with text for the
model. What goes wrong has a class; an exception that has none is a bug of ours, and is loud.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from etude.errors import EtudeError

if TYPE_CHECKING:
    from etude.harness.tools.context import Workbench

ErrorClass = Literal[
    "malformed_call",  # could not be read as a call
    "unknown_tool",
    "bad_arguments",  # missing, unknown, of the wrong type, or out of range
    "environment",  # the world is not as the call assumed: no such file, no match, permission denied
    "timeout",
    "denied",  # a person, or the environment's policy, said no
    "aborted",  # interrupted by a person
    "provider",  # something outside the pod failed: web search, the embedding model
    "bug",  # ours: unexpected, and counted apart
]


class ToolError(EtudeError):
    """A tool could not do it; the message is for the model: what is wrong, and what to do."""

    def __init__(self, kind: ErrorClass, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Outcome:
    """What a call gave: the text the model reads, the class of its error if it failed, and facts for the record."""

    text: str
    error: ErrorClass | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)  # exit_code, path, lines_added, log, ...; JSON
    seconds: float = 0.0


Run = Callable[["Workbench", Mapping[str, Any]], Awaitable[Outcome]]


@dataclass(frozen=True)
class Tool:
    """One tool under its own name; an environment may show it under another."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # JSON schema of an object
    run: Run
    reads_only: bool = False  # may run beside others; the rest run alone, in the order of the calls
