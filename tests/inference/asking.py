"""OpenAI clients for tests of our server, and fake servers for tests of our clients."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import openai
from samplers import running
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from etude.inference.clients.transport import RetryPolicy

USER: list[Any] = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {"name": "weather", "description": "Of a city", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
TOKEN = "a-token-for-tests-0123456789"
QUICK = RetryPolicy(timeout=20, attempts=4, first_delay=0.01, max_delay=0.05)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """Return a client that keeps no connections, since tests do not close it."""
    headers = {"connection": "close"}
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30, default_headers=headers)


@contextlib.asynccontextmanager
async def fake(respond: Callable[[Request], Awaitable[Response]]) -> AsyncIterator[str]:
    """Run a server that handles every request with one function; yield its URL."""
    listener = socket.create_server(("127.0.0.1", 0))
    methods = ["GET", "POST"]
    async with running(Starlette(routes=[Route("/{path:path}", respond, methods=methods)]), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
