"""The state of one session's tools: the tool server in the pod, the to-dos, and providers outside the pod.

`SearchProvider` and `WebProvider` run outside the pod. Search sees the workspace only through a `FileSource`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from etude.harness.search.source import FileEntry, FileSource
from etude.harness.tool_set import ToolSet
from etude.harness.tools.tool import ToolError, ToolOutcome
from etude.harness.toolserver.client import ToolServer, sanitize_text

LIMIT_S = 30.0  # of a request to the tool server
MAX_FACT = 4096  # characters of a fact


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

    async def request(self, operation: str, arguments: Mapping[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Send a request to the tool server; return its raw result."""
        return await self.server.request(operation, arguments, limit_s)

    async def call_tool_server(
        self, operation: str, arguments: Mapping[str, Any], limit_s: float = LIMIT_S
    ) -> ToolOutcome:
        """Send a request whose result is text for the model; return it as an outcome."""
        return outcome_of(await self.request(operation, arguments, limit_s))

    def mark_seen(self, outcome: ToolOutcome) -> None:
        """Remember that the model has seen the file of this outcome."""
        if path := outcome.facts.get("path"):
            self.seen.add(str(path))

    async def listing(self) -> list[FileEntry]:
        """Return the text files that .gitignore does not exclude, up to a megabyte each (`FileSource`)."""
        found = await self.request("listing", {}, 120.0)
        try:
            return [FileEntry(str(path), int(size), str(digest)) for path, size, digest in found["files"]]
        except (KeyError, TypeError, ValueError):
            raise ToolError("environment", "the tool server gave a list of files that cannot be read") from None

    async def contents(self, paths: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of files; files that no longer exist are left out (`FileSource`)."""
        return await self.server.contents(paths)

    def state(self) -> dict[str, Any]:
        """Return the state that is not in the pod, as JSON."""
        todos = [{"id": todo.id, "content": todo.content, "status": todo.status} for todo in self.todos]
        return {"todos": todos, "seen": sorted(self.seen)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self.todos = tuple(Todo(**todo) for todo in state["todos"])
        seen: Iterable[str] = state["seen"]
        self.seen = set(seen)


def outcome_of(result: Mapping[str, Any]) -> ToolOutcome:
    """Convert a result of the tool server to an outcome, validating its shape: a pod is not trusted."""
    text, facts = result.get("text"), result.get("facts", {})
    if not isinstance(text, str) or not isinstance(facts, dict):
        raise ToolError("environment", "the tool server gave an answer that makes no sense")
    return ToolOutcome(
        sanitize_text(text), facts={str(key): value for key, value in facts.items() if _is_storable(value)}
    )


def _is_storable(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_FACT and sanitize_text(value) == value
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
