"""Responses in OpenAI's schemas, complete or as server-sent events, from the same deltas of a completion.

Both forms feed a choice delta by delta, so that the events of a stream add up to the complete response.
"""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeAlias

from etude.chat.dialects.json_calls import write_json
from etude.chat.dialects.streaming import TurnStreamer
from etude.chat.dialects.turns import TurnDialect
from etude.chat.incremental_text import IncrementalDetokenizer, StopTextFilter
from etude.chat.messages import ParsedTurn, StreamPart, ToolCall, ToolSchema
from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError
from etude.inference.generate_protocol import check_logprobs_finite
from etude.inference.service import CompletionDelta, EngineBroken, Generation

DONE = b"data: [DONE]\n\n"

ReplyPart: TypeAlias = tuple[StreamPart, str] | ToolCall


class Choice(ABC):
    """Collects one completion and writes it in OpenAI's schema. `stop` are the request's stop texts."""

    prefix: ClassVar[str]
    full_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str], logprobs: bool) -> None:
        self.index, self.tokenizer, self.logprobs = index, tokenizer, logprobs
        self.texts: dict[StreamPart, str] = {"text": "", "thinking": ""}
        self.calls: list[ToolCall] = []
        self.output_tokens = 0
        self.finish_reason: str | None = None
        self._filters = {part: StopTextFilter(stop) for part in self.texts}
        self._logprobs: list[tuple[int, float]] = []  # tokens with theirs, not yet sent

    def feed(self, delta: CompletionDelta) -> list[ReplyPart]:
        """Return new text and calls that later tokens cannot change; the last delta sets `finish_reason`."""
        check_logprobs_finite(delta.raw_logprobs)
        self.output_tokens += len(delta.tokens)
        hidden = self.tokenizer.stop_ids
        pairs = zip(delta.tokens, delta.raw_logprobs, strict=True)
        self._logprobs += [pair for pair in pairs if pair[0] not in hidden]
        last = delta.ending is not None
        parts: list[ReplyPart] = []
        for part in self._read(delta.tokens, last):
            if isinstance(part, ToolCall):
                parts.append(part)
                self.calls.append(part)
            elif text := self._filters[part[0]].feed(part[1]):
                parts.append((part[0], text))
        if last:
            parts += [(part, text) for part, each in self._filters.items() if (text := each.feed("", last=True))]
            self.finish_reason = self._finish_reason(str(delta.ending))
        for part in parts:
            if not isinstance(part, ToolCall):
                self.texts[part[0]] += part[1]
        return parts

    def _finish_reason(self, ending: str) -> str:
        if ending == "cancelled":
            raise EngineBroken("the request was cancelled")
        if ending == "stop" or any(each.stopped for each in self._filters.values()):
            return "tool_calls" if self.calls else "stop"
        return "length"

    def take_logprobs(self) -> list[tuple[int, float]]:
        """Return the tokens and log-probabilities that were not sent yet; none if they were not asked for."""
        taken, self._logprobs = self._logprobs, []
        return taken if self.logprobs else []

    @abstractmethod
    def _read(self, tokens: Sequence[int], last: bool) -> list[ReplyPart]:
        """Return what the tokens so far say that was not returned yet."""

    @abstractmethod
    def full(self) -> dict[str, Any]:
        """Return the choice of a complete response."""

    @abstractmethod
    def chunk(self, part: ReplyPart | None) -> dict[str, Any]:
        """Return the choice of an event: with a part, or the last one."""

    def first(self) -> dict[str, Any] | None:
        """Return the choice of the event before all others, if the schema has one."""
        return None


class ChatChoice(Choice):
    """A choice of `/v1/chat/completions`, parsed by the dialect. Calls are numbered from `first_call`."""

    prefix, full_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        index: int,
        dialect: TurnDialect,
        stop: Sequence[str],
        logprobs: bool,
        tools: Sequence[ToolSchema],
        first_call: int,
    ) -> None:
        super().__init__(index, dialect.tokenizer, stop, logprobs)
        self._parse: Callable[..., ParsedTurn] = partial(dialect.parse_reply, tools=tools, first_call=first_call)
        self._parts: list[ReplyPart] = []
        self._streamer = TurnStreamer(partial(self._parse, partial=True), self._take_text)
        self._calls_read = 0

    def _take_text(self, part: StreamPart, text: str) -> None:
        if part != "call":
            self._parts.append((part, text))

    def _read(self, tokens: Sequence[int], last: bool) -> list[ReplyPart]:
        if last:
            turn: ParsedTurn | None = self._parse([*self._streamer.tokens, *tokens])
            assert turn is not None
            self._streamer.finish(turn)
        else:
            turn = self._streamer.feed(tokens)
        parts, self._parts = self._parts, []
        if turn is not None:
            parts += turn.calls[self._calls_read :]
            self._calls_read = len(turn.calls)
        return parts

    def full(self) -> dict[str, Any]:
        content, thinking = self.texts["text"], self.texts["thinking"]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if self.calls else "")}
        message["refusal"] = None
        if thinking:
            message["reasoning_content"] = thinking
        if self.calls:
            message["tool_calls"] = [call_to_json(call) for call in self.calls]
        logprobs, finish_reason = self._logprobs_json(), self.finish_reason
        return {"index": self.index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}

    def first(self) -> dict[str, Any] | None:
        return self._delta({"role": "assistant", "content": ""}, None)

    def chunk(self, part: ReplyPart | None) -> dict[str, Any]:
        if part is None:
            return self._delta({}, self.finish_reason)
        if isinstance(part, ToolCall):
            return self._delta({"tool_calls": [{"index": self.calls.index(part), **call_to_json(part)}]}, None)
        return self._delta({"content" if part[0] == "text" else "reasoning_content": part[1]}, None)

    def _delta(self, delta: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs_json()
        return {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs_json(self) -> dict[str, Any] | None:
        content = []
        for token, logprob in self.take_logprobs():
            text = self.tokenizer.decode([token])
            data = list(text.encode()) if "�" not in text else None  # part of a character
            content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
        return {"content": content, "refusal": None} if content else None


class TextChoice(Choice):
    """A choice of `/v1/completions`; complete ones and those of events look alike."""

    prefix, full_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, index: int, tokenizer: Tokenizer, stop: Sequence[str], logprobs: bool) -> None:
        super().__init__(index, tokenizer, stop, logprobs)
        self._detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.stop_ids)

    def _read(self, tokens: Sequence[int], last: bool) -> list[ReplyPart]:
        return [("text", self._detokenizer.feed(tokens, last=last))]

    def full(self) -> dict[str, Any]:
        return self._choice(self.texts["text"], self.finish_reason)

    def chunk(self, part: ReplyPart | None) -> dict[str, Any]:
        assert not isinstance(part, ToolCall)
        return self._choice(part[1], None) if part is not None else self._choice("", self.finish_reason)

    def _choice(self, text: str, finish_reason: str | None) -> dict[str, Any]:
        logprobs = None
        if taken := self.take_logprobs():
            texts = [self.tokenizer.decode([token]) for token, _ in taken]
            chosen = [logprob for _, logprob in taken]
            logprobs = {"tokens": texts, "token_logprobs": chosen, "top_logprobs": None, "text_offset": None}
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def call_to_json(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": write_json(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


class ResponseBuilder:
    """Builds the response to a request from its generation, one `Choice` per completion."""

    def __init__(self, model: str, generation: Generation, choices: Sequence[Choice]) -> None:
        self.generation, self.choices = generation, choices
        self._common = {
            "id": f"{choices[0].prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }

    async def full(self) -> dict[str, Any]:
        """Return the complete response, when all completions have ended."""
        async with self.generation:
            async for delta in self.generation.deltas():
                self.choices[delta.index].feed(delta)
        choices = [choice.full() for choice in self.choices]
        return {**self._common, "object": self.choices[0].full_object, "choices": choices, "usage": self.usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; an error after the start is the last event."""
        extra = {"usage": None} if include_usage else {}
        for choice in self.choices:
            if (first := choice.first()) is not None:
                yield self._event([first], **extra)
        try:
            async with self.generation:
                async for delta in self.generation.deltas():
                    choice = self.choices[delta.index]
                    for part in choice.feed(delta):
                        yield self._event([choice.chunk(part)], **extra)
                    if choice.finish_reason is not None:
                        yield self._event([choice.chunk(None)], **extra)
        except EtudeError as error:
            problem = {"message": str(error), "type": "server_error", "param": None, "code": "engine_broken"}
            yield b"data: " + json.dumps({"error": problem}).encode() + b"\n\n"
            return
        if include_usage:
            yield self._event([], usage=self.usage())
        yield DONE

    def usage(self) -> dict[str, Any]:
        """Return token counts; the prompt counts once, however many completions it has, as it is computed once."""
        prompt, output = len(self.generation.prompt), sum(choice.output_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached},
        }

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        event = {**self._common, "object": self.choices[0].chunk_object, "choices": choices, **extra}
        return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
