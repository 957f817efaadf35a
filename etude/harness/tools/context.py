"""The state of one session's tools: the tool server in the pod, the to-dos, and providers outside the pod.

`SearchProvider` and `WebProvider` run outside the pod. Search sees the workspace only through a `FileSource`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from etude.harness.search.source import FileSource
from etude.harness.tool_set import ToolSet
from etude.harness.tools.tool import ToolFunction, ToolOutcome
from etude.harness.toolserver.client import LIMIT_S, ToolServer


class SearchProvider(Protocol):
    """Semantic search over a workspace, outside the pod."""

    async def search(self, files: FileSource, query: str, directories: Sequence[str], limit: int) -> str:
        """Return at most `limit` passages as text, best first, within `directories` (relative to the root) if given."""
        ...


class WebProvider(Protocol):
    """Web access outside the pod."""

    async def search(self, query: str) -> str:
        """Return the results of a web search as text."""
        ...

    async def fetch(self, url: str) -> str:
        """Return a page as text."""
        ...


@dataclass(frozen=True)
class Todo:
    """One entry of the to-do list."""

    id: str
    content: str
    status: str  # pending, in_progress, completed, cancelled


@dataclass(eq=False)
class ToolContext:
    """Services and state that tools use. State in the pod survives a fork of the pod; `state()` returns the rest."""

    server: ToolServer
    tool_set: ToolSet
    names: Mapping[str, str] = field(default_factory=dict)  # tool -> name shown to the model
    searcher: SearchProvider | None = None
    web: WebProvider | None = None
    todos: tuple[Todo, ...] = ()
    seen: set[str] = field(default_factory=set)  # real paths of files the model has read or written

    def name(self, tool: str) -> str:
        """Return the name shown to the model, for texts that refer to a tool."""
        return self.names.get(tool, tool)

    def has(self, tool: str) -> bool:
        """Return whether the model has this tool."""
        return tool in self.names

    def mark_seen(self, outcome: ToolOutcome) -> None:
        """Remember that the model has seen the file of this outcome."""
        if path := outcome.facts.get("path"):
            self.seen.add(str(path))

    def state(self) -> dict[str, Any]:
        """Return the state that is not in the pod, as JSON."""
        todos = [{"id": todo.id, "content": todo.content, "status": todo.status} for todo in self.todos]
        return {"todos": todos, "seen": sorted(self.seen)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.todos = tuple(Todo(**todo) for todo in state["todos"])
        seen: Iterable[str] = state["seen"]
        self.seen = set(seen)


def server_tool(operation: str, limit_s: float = LIMIT_S) -> ToolFunction:
    """Return the function of a tool that the tool server does alone."""
    return lambda context, arguments: context.server.call(operation, arguments, limit_s)
