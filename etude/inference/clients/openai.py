"""Client for any OpenAI-compatible chat API, for evaluation only: messages in, text and tool calls out.

It gives no token ids, so it is no `Policy` and nothing can be trained on its output. With a listener the response is
streamed, and its events are merged and parsed like a complete response. The API key is removed from replies and errors:
some endpoints and proxies repeat it.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from etude.chat.dialects.json_calls import MalformedCall, read_arguments
from etude.chat.messages import CallStatus, ParsedTurn, PartListener, StreamPart, ToolCall, ToolSchema, tool_names
from etude.errors import EtudeError, InputError
from etude.inference.clients.limiter import RequestLimiter, RequestTicket
from etude.inference.clients.transport import RetryPolicy, ServerError, ServerUnreachable, Transport
from etude.inference.generate_protocol import InvalidResponse, member
from etude.inference.sampling import Sampling

REDACTED = "[key]"
TOKENS_PER_BYTE = 1 / 3  # of a request to a model that has not answered yet; a token of code is three bytes or more
MIN_SECRET_LENGTH = 16  # shorter keys, such as "EMPTY", are not redacted in answers: they may be ordinary words


# How a thinking budget is sent: the chat API of OpenAI has none, and every host has its own field.
THINKING_FORMATS: Mapping[str, Callable[[int], dict[str, Any]]] = {
    "anthropic": lambda tokens: {"thinking": {"type": "enabled", "budget_tokens": tokens}},
    "openrouter": lambda tokens: {"reasoning": {"max_tokens": tokens}},
    "gemini": lambda tokens: {"extra_body": {"google": {"thinking_config": {"thinking_budget": tokens}}}},
    "qwen": lambda tokens: {"enable_thinking": True, "thinking_budget": tokens},
    "vllm": lambda tokens: {"thinking_token_budget": tokens},
}
THINKING_HOSTS = {
    "openrouter.ai": "openrouter",
    "generativelanguage.googleapis.com": "gemini",
    "dashscope.aliyuncs.com": "qwen",
    "dashscope-intl.aliyuncs.com": "qwen",
}


def thinking_fields(url: str, tokens: int, format: str = "") -> dict[str, Any]:
    """Return the fields of a request that limit its thinking; without a format, those of the URL's host."""
    name = format or THINKING_HOSTS.get(urlsplit(url).hostname or "", "anthropic")
    return THINKING_FORMATS[name](tokens)


@dataclass(frozen=True)
class ChatUsage:
    """Token counts of one reply, as the server reports them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    counted: bool = True  # False: the server reported none, and these are estimated from the size of the text


@dataclass(frozen=True)
class Reply:
    """The model's reply. `message` is the unchanged assistant message, to be sent back in the next turn."""

    turn: ParsedTurn
    usage: ChatUsage
    finish: str
    message: Mapping[str, Any]


class RequestMeter:
    """Watches the tokens of requests; this one does nothing."""

    def begin(self, size: int, max_tokens: int) -> float:
        """Return what a request of `size` bytes reserves; raise an EtudeError to refuse it."""
        return 0.0

    def end(self, reserved: float, size: int, usage: ChatUsage | None) -> None:
        """Replace what a request has reserved by the usage of its reply; None if there is none."""


NO_METER = RequestMeter()


class OpenAIChat:
    """The chat API at `url` (including `/v1`). `extra` are further fields of every request.

    The meter is asked before every request and told the usage of every reply.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        model: str,
        retry: RetryPolicy | None = None,
        limiter: RequestLimiter | None = None,
        meter: RequestMeter = NO_METER,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.url, self.model, self._key = url.rstrip("/"), model, key
        self.meter, self.extra = meter, extra or {}
        self._tokens_per_byte = TOKENS_PER_BYTE
        # OpenAI's newer models refuse the older name.
        self.limit = "max_completion_tokens" if urlsplit(url).hostname == "api.openai.com" else "max_tokens"
        self._transport = Transport(key, retry, limiter)

    async def close(self) -> None:
        await self._transport.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema] = (),
        sampling: Sampling | None = None,
        listen: PartListener | None = None,
        ticket: RequestTicket | None = None,
    ) -> Reply:
        """Return the reply to a chat; `listen` gets its parts as they arrive. Unsupported `sampling` is an error.

        The ticket records how long the request is held back.
        """
        sampling = sampling or Sampling()
        body = {"model": self.model, "messages": list(messages), **self._parameters(sampling), **self.extra}
        if tools:
            body["tools"] = list(tools)
        size, usage = len(json.dumps(body, ensure_ascii=False).encode()), None
        ticket = ticket or RequestTicket()
        ticket.tokens = round(size * self._tokens_per_byte)
        reserved = self.meter.begin(size, sampling.max_tokens)
        try:
            reply = await self._reply(body, tools, ticket, listen)
            usage = reply.usage
            ticket.tokens = usage.prompt_tokens + usage.completion_tokens
            self._tokens_per_byte = ticket.tokens / size
        finally:
            self.meter.end(reserved, size, usage)
        return reply

    async def _reply(
        self, body: dict[str, Any], tools: Sequence[ToolSchema], ticket: RequestTicket, listen: PartListener | None
    ) -> Reply:
        path = "/chat/completions"
        where = f"{self.url}{path}"
        with self._redact_errors():
            if listen is None:
                response = await self._transport.call("POST", path, lambda: self.url, json=body, ticket=ticket)
                return read_reply(self._clean(response), where, tools)
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            events = ChatEventParser(where, listen)
            async with aclosing(self._transport.lines(path, lambda: self.url, json=body, ticket=ticket)) as lines:
                async for line in lines:
                    events.feed(line)
            return read_reply(self._clean(events.merged(body)), where, tools)

    async def models(self) -> list[Mapping[str, Any]]:
        """Return the models that are served there."""
        path = "/models"
        with self._redact_errors():
            response = await self._transport.call("GET", path, lambda: self.url)
        found: list[Mapping[str, Any]] = member(response, "data", list, f"{self.url}{path}")
        return found

    def _parameters(self, sampling: Sampling) -> dict[str, Any]:
        default = Sampling()
        unsupported = [name for name in ("top_k", "min_p", "stop") if getattr(sampling, name) != getattr(default, name)]
        if unsupported:
            raise InputError(f"sampling: a chat API has no {unsupported[0]}; leave it out")
        if sampling.samples != 1:
            raise InputError(f"sampling: samples is {sampling.samples}; a chat gives one reply at a time")
        parameters: dict[str, Any] = {self.limit: sampling.max_tokens, "temperature": sampling.temperature}
        # Some models refuse even the default value of parameters they do not have.
        if sampling.top_p != default.top_p:
            parameters["top_p"] = sampling.top_p
        if sampling.seed != default.seed:
            parameters["seed"] = sampling.seed
        if sampling.stop_text:
            parameters["stop"] = list(sampling.stop_text)
        return parameters

    @contextmanager
    def _redact_errors(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            if self._key:
                error.args = tuple(str(part).replace(self._key, REDACTED) for part in error.args)
            raise

    def _clean(self, response: Any) -> Any:
        """Return a response without the key and without lone surrogates, which can be neither stored nor sent back."""
        text = json.dumps(response, ensure_ascii=False)
        if len(self._key) >= MIN_SECRET_LENGTH:
            text = text.replace(json.dumps(self._key, ensure_ascii=False)[1:-1], REDACTED)
        return json.loads(text.encode("utf-8", "replace"))


def read_reply(response: Any, where: str, tools: Sequence[ToolSchema] = ()) -> Reply:
    """Return the first choice of a chat completion."""
    choices = member(response, "choices", list, where)
    if not choices:
        raise InvalidResponse(f"{where}: choices is empty")
    message = member(choices[0], "message", dict, where)
    calls = tuple(_read_call(call, tools, where) for call in message.get("tool_calls") or ())
    usage = member(response, "usage", dict, where)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    prompt, completion = (member(usage, part, int, where) for part in ("prompt_tokens", "completion_tokens"))
    counts = ChatUsage(prompt, completion, int(cached), int(reasoning), counted=not usage.get("guessed"))
    finish = str(choices[0].get("finish_reason"))
    # Of the kinds of tokens, an endpoint counts at most those of thinking.
    thinking_tokens = min(counts.reasoning_tokens, completion)
    turn = ParsedTurn(
        thinking=str(message.get("reasoning_content") or message.get("reasoning") or ""),
        text=message.get("content") or "",
        calls=calls,
        closed=finish != "length",
        thinking_tokens=thinking_tokens,
        call_tokens=completion - thinking_tokens if calls else 0,
        text_tokens=0 if calls else completion - thinking_tokens,
    )
    return Reply(turn, counts, finish, message)


def _read_call(given: Any, tools: Sequence[ToolSchema], where: str) -> ToolCall:
    function = member(given, "function", dict, where)
    name, text = (member(function, part, str, where) for part in ("name", "arguments"))
    status: CallStatus = "ok"
    arguments, problem = None, ""
    try:
        arguments = read_arguments(text or "{}", name)
    except MalformedCall as error:
        status, problem = error.status, error.problem
    else:
        if name not in tool_names(tools):
            status, problem = "unknown_tool", f"there is no tool {name}"
    return ToolCall(name, arguments, member(given, "id", str, where), status, text, problem=problem)


class ChatEventParser:
    """Merges the events of a streamed response into a complete one."""

    def __init__(self, where: str, listen: PartListener) -> None:
        self.where, self.listen = where, listen
        self._message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._calls: dict[int, dict[str, Any]] = {}
        self._usage: Mapping[str, Any] | None = None
        self._finish: str | None = None
        self._done = False
        self._unstreamed = b""  # a response that is no stream, though one was requested

    def feed(self, line: bytes) -> None:
        line = line.strip()
        if line.startswith(b"data:"):
            data = line[len(b"data:") :].strip()
            self._done = self._done or data == b"[DONE]"
            if data and not self._done:
                self._take(self._read(data))
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            self._unstreamed += line

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            raise InvalidResponse(f"{self.where}: an event is not JSON: {data[:200]!r}") from None
        if not isinstance(event, dict):
            raise InvalidResponse(f"{self.where}: an event is not an object: {data[:200]!r}")
        if error := event.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise ServerError(f"{self.where}: {message}", 200)
        return event

    def _take(self, event: dict[str, Any]) -> None:
        self._usage = event.get("usage") or self._usage
        for choice in _objects(event.get("choices"), f"{self.where}: choices")[:1]:
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            for key, part in TEXT_FIELDS.items():
                if isinstance(text := delta.get(key), str) and text:
                    self._message[key] = self._message.get(key, "") + text
                    self.listen(part, text)
            for call in _objects(delta.get("tool_calls"), f"{self.where}: tool_calls"):
                self._take_call(call)

    def _take_call(self, delta: Mapping[str, Any]) -> None:
        # Some servers leave out the index and send each call in one event.
        number = delta.get("index")
        if not isinstance(number, int):
            number = len(self._calls) if delta.get("id") else max(0, len(self._calls) - 1)
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(number, empty)
        call["id"] = delta.get("id") or call["id"]
        function = delta.get("function") or {}
        name, arguments = (function.get(key) or "" for key in ("name", "arguments"))
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise InvalidResponse(f"{self.where}: the name and arguments of a call must be strings: {function!r:.200}")
        if name:
            call["function"]["name"] += name
            self.listen("call", call["function"]["name"])
        call["function"]["arguments"] += arguments

    def merged(self, request: Mapping[str, Any]) -> Any:
        """Return the complete response to a request."""
        if self._unstreamed and not self._done and self._finish is None:
            response = self._read(self._unstreamed)
            reply = read_reply(response, self.where)
            self.listen("text", reply.turn.text)
            return response
        if self._finish is None and not self._done:
            raise ServerUnreachable(f"{self.where}: the response broke off before its end")
        if self._calls:
            self._message["tool_calls"] = [self._calls[number] for number in sorted(self._calls)]
        usage = self._usage
        if usage is None:  # a token is about four bytes of text or code
            sizes = {"prompt_tokens": request["messages"], "completion_tokens": self._message}
            usage = {name: len(json.dumps(of).encode()) // 4 for name, of in sizes.items()} | {"guessed": True}
        finish = self._finish or ("tool_calls" if self._calls else "stop")
        return {"choices": [{"message": self._message, "finish_reason": finish}], "usage": usage}


# Fields of a delta with text; servers use two different names for reasoning.
TEXT_FIELDS: Mapping[str, StreamPart] = {"content": "text", "reasoning_content": "thinking", "reasoning": "thinking"}


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    """Return a list of objects, empty if there is none."""
    if not isinstance(value or [], list) or not all(isinstance(item, dict) for item in value or []):
        raise InvalidResponse(f"{where} is not a list of objects: {value!r:.200}")
    return list(value or [])
