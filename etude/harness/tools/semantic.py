"""Search by meaning. The index and its model are outside the pod and see only text files of the workspace."""

import asyncio
from collections.abc import Mapping
from typing import Any

from etude.harness.tools.context import Workbench
from etude.harness.tools.tool import Outcome, Tool, ToolError
from etude.harness.toolserver.client import readable

SEARCH_S = 300.0  # the first search of a large repository builds its index
RESULTS = 10


async def _codebase_search(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    if bench.searcher is None:
        raise ToolError("provider", "semantic search is not set up in this environment; search by words instead")
    directories = given.get("target_directories") or []
    try:
        async with asyncio.timeout(SEARCH_S):
            found = await bench.searcher.search(bench, given["query"], directories, RESULTS)
    except TimeoutError:
        raise ToolError("timeout", f"the search was not done after {SEARCH_S:g} seconds") from None
    return Outcome(readable(found))


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
    reads_only=True,
)
