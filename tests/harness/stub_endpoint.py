"""An OpenAI-compatible server with scripted replies: complete or streamed, with tool calls, with optional delays."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

NAME = "stub"


@dataclass(frozen=True)
class StubTurn:
    """One reply: thinking, text and calls; `pause` seconds between streamed pieces."""

    text: str = ""
    calls: Sequence[tuple[str, dict[str, Any]]] = ()
    thinking: str = ""
    pause: float = 0.0


def says(text: str = "", *calls: tuple[str, dict[str, Any]], thinking: str = "", pause: float = 0.0) -> StubTurn:
    return StubTurn(text, calls, thinking, pause)


def call(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return name, arguments


@dataclass
class StubEndpoint:
    """Scripted replies and recorded requests. The reply is chosen by the number of assistant messages in the chat."""

    lines: Sequence[StubTurn]
    key: str = ""
    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    usage: bool = True
    streams: bool = True
    prompt_tokens: int = 100  # of every request
    reasoning_tokens: int = 0  # of every reply, of its completion tokens
    on_ask: Callable[[int], None] = lambda said: None  # called with the number of each reply before it is sent

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": NAME, "object": "model", "owned_by": "stub"}]})

    async def chat(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization", ""))
        if self.key and self.keys[-1] != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "wrong key"}}, 401)
        body = await request.json()
        self.asked.append(body)
        said = sum(message["role"] == "assistant" for message in body["messages"])
        if said >= len(self.lines):
            return JSONResponse({"error": {"message": f"the script has no line {said}"}}, 400)
        self.on_ask(said)
        line = self.lines[said]
        if body.get("stream") and self.streams:
            return StreamingResponse(self.events(line, said), media_type="text/event-stream")
        message: dict[str, Any] = {"role": "assistant", "content": line.text}
        if line.calls:
            message["tool_calls"] = [_call(said, number, *each) for number, each in enumerate(line.calls)]
        finish = "tool_calls" if line.calls else "stop"
        return JSONResponse({"choices": [{"message": message, "finish_reason": finish}], "usage": self.counts(line)})

    def counts(self, line: StubTurn) -> dict[str, Any]:
        tokens = max(1, len(f"{line.thinking}{line.text}{line.calls}") // 4) + self.reasoning_tokens
        details = {"reasoning_tokens": self.reasoning_tokens}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "completion_tokens_details": details,
        }

    async def events(self, line: StubTurn, said: int) -> AsyncIterator[str]:
        for key, text in (("reasoning_content", line.thinking), ("content", line.text)):
            for number, word in enumerate(text.split(" ") if text else ()):
                yield _event({key: f" {word}" if number else word})
                await asyncio.sleep(line.pause)
        for number, each in enumerate(line.calls):
            whole = _call(said, number, *each)
            arguments = whole["function"].pop("arguments")
            yield _event({"tool_calls": [{"index": number, **whole}]})
            for at in range(0, len(arguments), 7):  # cut at arbitrary positions
                yield _event({"tool_calls": [{"index": number, "function": {"arguments": arguments[at : at + 7]}}]})
                await asyncio.sleep(line.pause)
        yield _event({}, finish="tool_calls" if line.calls else "stop")
        if self.usage:
            yield f"data: {json.dumps({'choices': [], 'usage': self.counts(line)})}\n\n"
        yield "data: [DONE]\n\n"


def _call(said: int, number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": f"call_{said}_{number}", "type": "function", "function": function}


def _event(delta: dict[str, Any], finish: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta, 'finish_reason': finish}]})}\n\n"


@contextlib.contextmanager
def serving(stub: StubEndpoint) -> Iterator[StubEndpoint]:
    """Serve the stub over HTTP in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    stub.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    routes = [
        Route("/v1/models", stub.models),
        Route("/v1/chat/completions", stub.chat, methods=["POST"]),
    ]
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
