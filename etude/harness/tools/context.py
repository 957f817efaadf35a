"""What the tools of one session act on: the pod through its tool server, the to-dos, and what lies outside the pod.

`Searcher` and `Web` are the doors to what is not in the pod. A searcher sees the workspace only through a `FileSource`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from etude.harness.search.source import FileEntry, FileSource
from etude.harness.tool_set import ToolSet
from etude.harness.tools.tool import Outcome, ToolError
from etude.harness.toolserver.client import ToolServer, readable

LIMIT_S = 30.0  # for what a tool does in the pod
MAX_FACT = 4096  # characters


class Searcher(Protocol):
    """Semantic search over a workspace, outside the pod."""

    async def search(self, files: FileSource, query: str, directories: Sequence[str], limit: int) -> str:
        """At most `limit` passages for the model to read, best first; `directories` (from the root) narrow it."""
        ...


class Web(Protocol):
    """The web as an environment lets its sessions see it."""

    async def search(self, query: str) -> str:
        """Results of a web search, as text."""
        ...

    async def fetch(self, url: str) -> str:
        """A page, as text."""
        ...


@dataclass(frozen=True)
class Todo:
    """One thing to do."""

    id: str
    content: str
    status: str  # pending, in_progress, completed, cancelled


@dataclass(eq=False)
class Workbench:
    """The state of one session's tools. What is in the pod survives a fork of it; what is here is in `state()`."""

    server: ToolServer
    environment: ToolSet
    names: Mapping[str, str] = field(default_factory=dict)  # tool -> the name the model knows it by
    searcher: Searcher | None = None
    web: Web | None = None
    todos: tuple[Todo, ...] = ()
    seen: set[str] = field(default_factory=set)  # files the model has read or written whole, by their real path

    def name(self, tool: str) -> str:
        """What the model calls a tool, for texts that send it there."""
        return self.names.get(tool, tool)

    def has(self, tool: str) -> bool:
        """Whether the model has this tool."""
        return tool in self.names

    async def ask(self, do: str, given: Mapping[str, Any], limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Have the tool server do something; its bare answer."""
        return await self.server.ask(do, given, limit_s)

    async def have_done(self, do: str, given: Mapping[str, Any], limit_s: float = LIMIT_S) -> Outcome:
        """Have the tool server do something that gives text for the model."""
        return outcome_of(await self.ask(do, given, limit_s))

    def note_seen(self, outcome: Outcome) -> None:
        """Remember that the model knows a file."""
        if path := outcome.facts.get("path"):
            self.seen.add(str(path))

    async def listing(self) -> list[FileEntry]:
        """The workspace as a `FileSource`: its text files that .gitignore does not name, up to a megabyte each."""
        found = await self.ask("listing", {}, 120.0)
        try:
            return [FileEntry(str(path), int(size), str(digest)) for path, size, digest in found["files"]]
        except (KeyError, TypeError, ValueError):
            raise ToolError("environment", "the tool server gave a list of files that cannot be read") from None

    async def contents(self, paths: Sequence[str]) -> dict[str, bytes]:
        """What is in some of them; one that is gone by now is left out."""
        return await self.server.contents(paths)

    def state(self) -> dict[str, Any]:
        """What is not in the pod, as JSON."""
        todos = [{"id": todo.id, "content": todo.content, "status": todo.status} for todo in self.todos]
        return {"todos": todos, "seen": sorted(self.seen)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        self.todos = tuple(Todo(**todo) for todo in state["todos"])
        seen: Iterable[str] = state["seen"]
        self.seen = set(seen)


def outcome_of(answer: Mapping[str, Any]) -> Outcome:
    """What the tool server gave, as far as it has the shape it should: a pod is not trusted to keep to it."""
    text, facts = answer.get("text"), answer.get("facts", {})
    if not isinstance(text, str) or not isinstance(facts, dict):
        raise ToolError("environment", "the tool server gave an answer that makes no sense")
    return Outcome(readable(text), facts={str(key): value for key, value in facts.items() if _is_plain(value)})


def _is_plain(value: object) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_FACT and readable(value) == value
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
