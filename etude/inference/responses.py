"""Responses in OpenAI's schemas, complete or as server-sent events, from the same deltas of a completion.

Both forms feed a choice delta by delta, so that the events of a stream add up to the complete response.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError
from etude.inference.chat_format import ParsedToolCall, ToolCallParser
from etude.inference.generate_protocol import check_logprobs_finite
from etude.inference.incremental_text import IncrementalDetokenizer
from etude.inference.service import CompletionDelta, EngineBroken, Generation

DONE = b"data: [DONE]\n\n"


@dataclass
class ChoiceBuilder:
    """Collects the text, tool calls and log-probabilities of one completion."""

    index: int
    detokenizer: IncrementalDetokenizer
    tool_parser: ToolCallParser | None = None  # None: all text is content
    content: str = ""
    calls: list[ParsedToolCall] = field(default_factory=list)
    pending_logprobs: list[tuple[int, float]] = field(default_factory=list)  # tokens with theirs, not yet sent
    output_tokens: int = 0
    finish_reason: str | None = None

    def feed(self, delta: CompletionDelta) -> list[str | ParsedToolCall]:
        """Return new text and calls that later tokens cannot change; the last delta sets `finish_reason`."""
        check_logprobs_finite(delta.raw_logprobs)
        self.output_tokens += len(delta.tokens)
        pairs = zip(delta.tokens, delta.raw_logprobs, strict=True)
        hidden = self.detokenizer.hidden_ids
        self.pending_logprobs += [(token, logprob) for token, logprob in pairs if token not in hidden]
        text = self.detokenizer.feed(delta.tokens)
        if delta.ending is not None:
            text += self.detokenizer.finish()
        parts: list[str | ParsedToolCall] = [text] if text else []
        if self.tool_parser is not None:
            parts = self.tool_parser.feed(text) + (self.tool_parser.finish() if delta.ending is not None else [])
        for part in parts:
            if isinstance(part, ParsedToolCall):
                self.calls.append(part)
            else:
                self.content += part
        if delta.ending is not None:
            self.finish_reason = self._finish_reason(delta.ending)
        return parts

    def _finish_reason(self, ending: str) -> str:
        if ending == "cancelled":
            raise EngineBroken("the request was cancelled")
        if ending == "stop" or self.detokenizer.stopped:
            return "tool_calls" if self.calls else "stop"
        return "length"

    def take_logprobs(self) -> list[tuple[int, float]]:
        """Return the tokens and log-probabilities that were not sent yet."""
        taken, self.pending_logprobs = self.pending_logprobs, []
        return taken


@dataclass(frozen=True)
class ResponseSchema:
    """The differences between a chat response and a completion response."""

    model: str
    tokenizer: Tokenizer
    logprobs: bool
    prefix: str
    full_object: str
    chunk_object: str

    def full(self, choice: ChoiceBuilder) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, choice: ChoiceBuilder, part: str | ParsedToolCall) -> dict[str, Any]:
        raise NotImplementedError

    def first(self, index: int) -> dict[str, Any] | None:
        raise NotImplementedError

    def last(self, choice: ChoiceBuilder) -> dict[str, Any]:
        raise NotImplementedError


class ChatResponseSchema(ResponseSchema):
    """`/v1/chat/completions`."""

    def full(self, choice: ChoiceBuilder) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content or (None if choice.calls else "")}
        message["refusal"] = None
        if choice.calls:
            message["tool_calls"] = [call_to_json(call) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, choice: ChoiceBuilder, part: str | ParsedToolCall) -> dict[str, Any]:
        if isinstance(part, ParsedToolCall):
            delta: dict[str, Any] = {"tool_calls": [{"index": choice.calls.index(part), **call_to_json(part)}]}
        else:
            delta = {"content": part}
        return self._delta(choice.index, delta, self._logprobs(choice), None)

    def last(self, choice: ChoiceBuilder) -> dict[str, Any]:
        return self._delta(choice.index, {}, self._logprobs(choice), choice.finish_reason)

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, choice: ChoiceBuilder) -> dict[str, Any] | None:
        taken = choice.take_logprobs()
        if not self.logprobs or not taken:
            return None
        content = []
        for token, logprob in taken:
            text = self.tokenizer.decode([token])
            data = list(text.encode()) if "�" not in text else None  # part of a character
            content.append({"token": text, "logprob": logprob, "bytes": data, "top_logprobs": []})
        return {"content": content, "refusal": None}


class CompletionResponseSchema(ResponseSchema):
    """`/v1/completions`; full responses and chunks look alike."""

    def full(self, choice: ChoiceBuilder) -> dict[str, Any]:
        return self._choice(choice, choice.content, choice.finish_reason)

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, choice: ChoiceBuilder, part: str | ParsedToolCall) -> dict[str, Any]:
        assert isinstance(part, str)
        return self._choice(choice, part, None)

    def last(self, choice: ChoiceBuilder) -> dict[str, Any]:
        return self._choice(choice, "", choice.finish_reason)

    def _choice(self, choice: ChoiceBuilder, text: str, finish_reason: str | None) -> dict[str, Any]:
        taken = choice.take_logprobs()
        logprobs = None
        if self.logprobs and taken:
            texts = [self.tokenizer.decode([token]) for token, _ in taken]
            chosen = [logprob for _, logprob in taken]
            logprobs = {"tokens": texts, "token_logprobs": chosen, "top_logprobs": None, "text_offset": None}
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def call_to_json(call: ParsedToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ResponseBuilder:
    """Builds the response to a request from its generation, one `ChoiceBuilder` per completion."""

    def __init__(self, generation: Generation, schema: ResponseSchema, choices: list[ChoiceBuilder]) -> None:
        self.generation, self.schema, self.choices = generation, schema, choices
        self._common = {
            "id": f"{schema.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": schema.model,
            "system_fingerprint": None,
        }

    async def full(self) -> dict[str, Any]:
        """Return the complete response, when all completions have ended."""
        async with self.generation:
            async for delta in self.generation.deltas():
                self.choices[delta.index].feed(delta)
        choices = [self.schema.full(choice) for choice in self.choices]
        return {**self._common, "object": self.schema.full_object, "choices": choices, "usage": self.usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; an error after the start is the last event."""
        extra = {"usage": None} if include_usage else {}
        for choice in self.choices:
            if (first := self.schema.first(choice.index)) is not None:
                yield self._event([first], **extra)
        try:
            async with self.generation:
                async for delta in self.generation.deltas():
                    choice = self.choices[delta.index]
                    for part in choice.feed(delta):
                        yield self._event([self.schema.chunk(choice, part)], **extra)
                    if choice.finish_reason is not None:
                        yield self._event([self.schema.last(choice)], **extra)
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
        event = {**self._common, "object": self.schema.chunk_object, "choices": choices, **extra}
        return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


def chat_schema(model: str, tokenizer: Tokenizer, logprobs: bool) -> ChatResponseSchema:
    return ChatResponseSchema(model, tokenizer, logprobs, "chatcmpl", "chat.completion", "chat.completion.chunk")


def completion_schema(model: str, tokenizer: Tokenizer, logprobs: bool) -> CompletionResponseSchema:
    return CompletionResponseSchema(model, tokenizer, logprobs, "cmpl", "text_completion", "text_completion")
