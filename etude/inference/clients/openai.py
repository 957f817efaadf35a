"""Any OpenAI-compatible chat API, for evaluation only: messages in, text and tool calls out.

It has no tokens, so nothing can be trained on what it says; the methods of a policy that would give samples say so.
With somebody who listens the answer is asked for as a stream; what its events add up to is read as a whole one is.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

from etude.errors import InputError
from etude.inference.chat_format import Listener, Part, ToolCall
from etude.inference.clients.transport import Patience, ServerError, Transport, Unreachable
from etude.inference.generate_protocol import BadAnswer, member
from etude.inference.policy import Weights
from etude.inference.sampling import Sampling


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer, as the server counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    counted: bool = True  # False: the server did not say, and these are a guess from the size of the text


@dataclass(frozen=True)
class Reply:
    """What the model answered. `message` is the answer as it came, to be sent back in the next turn."""

    text: str
    tool_calls: tuple[ToolCall, ...]
    usage: Usage
    finish: str
    message: Mapping[str, Any]


class OpenAIChat:
    """The chat API at `url` (with its `/v1`). Newer models of OpenAI's want `limit="max_completion_tokens"`."""

    def __init__(
        self, url: str, key: str = "", *, model: str, limit: str = "max_tokens", patience: Patience | None = None
    ) -> None:
        self.url, self.model, self.limit = url.rstrip("/"), model, limit
        self._transport = Transport(key, patience)

    async def close(self) -> None:
        await self._transport.close()

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling | None = None,
        listen: Listener | None = None,
    ) -> Reply:
        """The answer to a chat; `listen` hears it as it comes. What `sampling` says and the API cannot is an error."""
        body = {"model": self.model, "messages": list(messages), **self._knobs(sampling or Sampling())}
        if tools:
            body["tools"] = list(tools)
        path = "/chat/completions"
        where = f"{self.url}{path}"
        if listen is None:
            return read_reply(await self._transport.call("POST", path, lambda: self.url, json=body), where)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events = Events(where, listen)
        async with aclosing(self._transport.lines(path, lambda: self.url, json=body)) as lines:
            async for line in lines:
                events.feed(line)
        return read_reply(events.whole(body), where)

    async def models(self) -> list[Mapping[str, Any]]:
        """What is served there."""
        path = "/models"
        answer = await self._transport.call("GET", path, lambda: self.url)
        found: list[Mapping[str, Any]] = member(answer, "data", list, f"{self.url}{path}")
        return found

    def _knobs(self, sampling: Sampling) -> dict[str, Any]:
        default = Sampling()
        unknown = [name for name in ("top_k", "min_p", "stop") if getattr(sampling, name) != getattr(default, name)]
        if unknown:
            raise InputError(f"sampling: {unknown[0]} cannot be said to a chat API; leave it out")
        if sampling.samples != 1:
            raise InputError(f"sampling: samples is {sampling.samples}; a chat gives one answer at a time")
        knobs: dict[str, Any] = {self.limit: sampling.max_tokens, "temperature": sampling.temperature}
        # Some models refuse even the default of what they do not have.
        if sampling.top_p != default.top_p:
            knobs["top_p"] = sampling.top_p
        if sampling.seed != default.seed:
            knobs["seed"] = sampling.seed
        if sampling.stop_text:
            knobs["stop"] = list(sampling.stop_text)
        return knobs

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> NoReturn:
        raise InputError(f"{self.url}: a chat API gives no token ids or log-probabilities; it can be evaluated only")

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> NoReturn:
        await self.sample(tokens, sampling, session=session)
        raise AssertionError

    async def load(self, weights: Weights, version: int) -> NoReturn:
        raise InputError(f"{self.url}: the weights behind a chat API are not ours to change")

    async def version(self) -> NoReturn:
        raise InputError(f"{self.url}: a chat API does not tell the version of its weights")


def read_reply(answer: Any, where: str) -> Reply:
    """The first choice of a chat completion."""
    choices = member(answer, "choices", list, where)
    if not choices:
        raise BadAnswer(f"{where}: choices is empty")
    message = member(choices[0], "message", dict, where)
    calls = []
    for call in message.get("tool_calls") or ():
        function = member(call, "function", dict, where)
        name, arguments = (member(function, part, str, where) for part in ("name", "arguments"))
        calls.append(ToolCall(name, arguments, member(call, "id", str, where)))
    usage = member(answer, "usage", dict, where)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    asked, made = (member(usage, part, int, where) for part in ("prompt_tokens", "completion_tokens"))
    counted = not usage.get("guessed")
    return Reply(
        message.get("content") or "",
        tuple(calls),
        Usage(asked, made, int(cached), int(thought), counted),
        str(choices[0].get("finish_reason")),
        message,
    )


class Events:
    """A streamed answer, line by line, and what it adds up to."""

    def __init__(self, where: str, listen: Listener) -> None:
        self.where, self.listen = where, listen
        self._message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._calls: dict[int, dict[str, Any]] = {}
        self._usage: Mapping[str, Any] | None = None
        self._finish: str | None = None
        self._done = False
        self._plain = b""  # an answer that is no stream, though one was asked for

    def feed(self, line: bytes) -> None:
        line = line.strip()
        if line.startswith(b"data:"):
            data = line[len(b"data:") :].strip()
            self._done = self._done or data == b"[DONE]"
            if data and not self._done:
                self._take(self._read(data))
        elif line and not line.startswith((b":", b"event:", b"id:", b"retry:")):
            self._plain += line

    def _read(self, data: bytes) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except ValueError:
            raise BadAnswer(f"{self.where}: an event is not JSON: {data[:200]!r}") from None
        if not isinstance(event, dict):
            raise BadAnswer(f"{self.where}: an event is not an object: {data[:200]!r}")
        if error := event.get("error"):
            said = error.get("message") if isinstance(error, dict) else error
            raise ServerError(f"{self.where}: {said}", 200)
        return event

    def _take(self, event: dict[str, Any]) -> None:
        self._usage = event.get("usage") or self._usage
        for choice in _objects(event.get("choices"), f"{self.where}: choices")[:1]:
            self._finish = choice.get("finish_reason") or self._finish
            delta = choice.get("delta") or {}
            for key, part in SPOKEN.items():
                if isinstance(text := delta.get(key), str) and text:
                    self._message[key] = self._message.get(key, "") + text
                    self.listen(part, text)
            for call in _objects(delta.get("tool_calls"), f"{self.where}: tool_calls"):
                self._take_call(call)

    def _take_call(self, delta: Mapping[str, Any]) -> None:
        # Some servers leave out the number, and send each call in one piece.
        number = delta.get("index")
        if not isinstance(number, int):
            number = len(self._calls) if delta.get("id") else max(0, len(self._calls) - 1)
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = self._calls.setdefault(number, empty)
        call["id"] = delta.get("id") or call["id"]
        function = delta.get("function") or {}
        name, arguments = (function.get(key) or "" for key in ("name", "arguments"))
        if not isinstance(name, str) or not isinstance(arguments, str):
            raise BadAnswer(f"{self.where}: the name and the arguments of a call must be text: {function!r:.200}")
        if name:
            call["function"]["name"] += name
            self.listen("call", call["function"]["name"])
        call["function"]["arguments"] += arguments

    def whole(self, asked: Mapping[str, Any]) -> Any:
        """The answer as it would have come in one piece to what was `asked`."""
        if self._plain and not self._done and self._finish is None:
            answer = self._read(self._plain)
            reply = read_reply(answer, self.where)
            self.listen("text", reply.text)
            return answer
        if self._finish is None and not self._done:
            raise Unreachable(f"{self.where}: the answer broke off before its end")
        if self._calls:
            self._message["tool_calls"] = [self._calls[number] for number in sorted(self._calls)]
        usage = self._usage
        if usage is None:  # a token is about four bytes of text or code
            sizes = {"prompt_tokens": asked["messages"], "completion_tokens": self._message}
            usage = {name: len(json.dumps(of).encode()) // 4 for name, of in sizes.items()} | {"guessed": True}
        finish = self._finish or ("tool_calls" if self._calls else "stop")
        return {"choices": [{"message": self._message, "finish_reason": finish}], "usage": usage}


# Where servers put what a model says; two of them put its thoughts under another name.
SPOKEN: Mapping[str, Part] = {"content": "text", "reasoning_content": "thinking", "reasoning": "thinking"}


def _objects(value: Any, where: str) -> list[dict[str, Any]]:
    """A list of objects, or nothing."""
    if not isinstance(value or [], list) or not all(isinstance(item, dict) for item in value or []):
        raise BadAnswer(f"{where} is not a list of objects: {value!r:.200}")
    return list(value or [])
