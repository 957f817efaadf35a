"""Web search and fetch, where the tool set allows them and a provider is given. They run outside the pod."""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

from etude.harness.tools.context import ToolContext, WebProvider
from etude.harness.tools.tool import Tool, ToolError, ToolOutcome
from etude.harness.toolserver.client import sanitize_text

FETCH_S = 60.0


def _provider(context: ToolContext) -> WebProvider:
    if context.web is None:
        raise ToolError("provider", "the web is not set up in this environment; go on without it")
    return context.web


async def _with_timeout(work: Awaitable[str]) -> ToolOutcome:
    try:
        async with asyncio.timeout(FETCH_S):
            return ToolOutcome(sanitize_text(await work))
    except TimeoutError:
        raise ToolError("timeout", f"there was no answer within {FETCH_S:g} seconds") from None


async def _web_search(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    return await _with_timeout(_provider(context).search(arguments["search_term"]))


async def _web_fetch(context: ToolContext, arguments: Mapping[str, Any]) -> ToolOutcome:
    return await _with_timeout(_provider(context).fetch(arguments["url"]))


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
    read_only=True,
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
    read_only=True,
)
