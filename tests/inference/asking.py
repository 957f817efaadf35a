"""Who asks our server in tests, and servers for our clients to ask that answer whatever a test wants."""

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

from etude.inference.clients.transport import Patience

USER: list[Any] = [{"role": "user", "content": "What is the weather?"}]
WEATHER = {"name": "weather", "description": "Of a city", "parameters": {"type": "object", "properties": {}}}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}]
TOKEN = "a-token-for-tests-0123456789"
QUICK = Patience(timeout=20, attempts=4, first_pause=0.01, longest_pause=0.05)


def client_of(url: str, key: str = "none") -> openai.OpenAI:
    """A client that keeps no connection: nobody closes it."""
    alone = {"connection": "close"}
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30, default_headers=alone)


@contextlib.asynccontextmanager
async def fake(answer: Callable[[Request], Awaitable[Response]]) -> AsyncIterator[str]:
    """A server that answers everything with one function."""
    listener = socket.create_server(("127.0.0.1", 0))
    methods = ["GET", "POST"]
    async with running(Starlette(routes=[Route("/{path:path}", answer, methods=methods)]), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
