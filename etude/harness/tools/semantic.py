"""Semantic search. The index and the embedding model are outside the pod and see only text files of the workspace."""

import asyncio
from collections.abc import Mapping
from typing import Any

from etude.harness.tools.context import ToolContext
from etude.harness.tools.tool import Tool, ToolError, ToolOutcome
from etude.harness.toolserver.client import sanitize_text

SEARCH_S = 300.0  # the first search of a large repository builds its index
MAX_RESULTS = 10


async def _codebase_search(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    if context.searcher is None:
        raise ToolError("provider", "semantic search is not set up in this environment; search by words instead")
    directories = arguments.get("target_directories") or []
    try:
        async with asyncio.timeout(SEARCH_S):
            found = await context.searcher.search(context.server, arguments["query"], directories, MAX_RESULTS)
    except TimeoutError:
        raise ToolError("timeout", f"the search was not done after {SEARCH_S:g} seconds") from None
    return ToolOutcome(sanitize_text(found))


CODEBASE_SEARCH = Tool(
    "codebase_search",
    "Search the code by meaning rather than by exact words. Ask a whole question, as of a colleague.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "A question, such as: Where are user roles checked?"},
            "target_directories": {
                "type": "array",
                "items": {"type": "string"},
                "description": "Directories to search in; empty for all.",
            },
            "explanation": {"type": "string", "description": "One sentence: why."},
        },
        "required": ["query"],
    },
    _codebase_search,
    read_only=True,
)
