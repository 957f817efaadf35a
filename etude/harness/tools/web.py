"""The web, where the environment allows it and somebody provides it. Nothing of it runs in the pod."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from etude.harness.tools.context import Web, Workbench
from etude.harness.tools.tool import Outcome, Tool, ToolError
from etude.harness.toolserver.client import readable

FETCH_S = 60.0


def _provider(bench: Workbench) -> Web:
    if bench.web is None:
        raise ToolError("provider", "the web is not set up in this environment; go on without it")
    return bench.web


async def _in_time(work: Awaitable[str]) -> Outcome:
    try:
        async with asyncio.timeout(FETCH_S):
            return Outcome(readable(await work))
    except TimeoutError:
        raise ToolError("timeout", f"there was no answer within {FETCH_S:g} seconds") from None


async def _web_search(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    return await _in_time(_provider(bench).search(given["search_term"]))


async def _web_fetch(bench: Workbench, given: Mapping[str, Any]) -> Outcome:
    return await _in_time(_provider(bench).fetch(given["url"]))


WEB_SEARCH = Tool(
    "web_search",
    "Search the web.",
    {
        "type": "object",
        "properties": {
            "search_term": {"type": "string", "description": "What to look for."},
            "explanation": {"type": "string", "description": "One sentence: why."},
        },
        "required": ["search_term"],
    },
    _web_search,
    reads_only=True,
)

WEB_FETCH = Tool(
    "web_fetch",
    "Read a page of the web as text.",
    {
        "type": "object",
        "properties": {"url": {"type": "string", "description": "Its address, with http:// or https://."}},
        "required": ["url"],
    },
    _web_fetch,
    reads_only=True,
)
