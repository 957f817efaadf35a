"""Answers in OpenAI's shapes, whole or as server-sent events, from one reading of a sample's pieces.

A choice is read piece by piece in both cases, so that what a stream adds up to is what the whole answer says.
"""

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError
from etude.inference.chat_format import Reader, ToolCall
from etude.inference.generate_protocol import check_numbers
from etude.inference.incremental_text import Text
from etude.inference.service import EngineBroken, Generation, Piece

DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One sample being read: its text, its tool calls, its log-probabilities."""

    index: int
    text: Text
    reader: Reader | None = None  # None: all text is content
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    tokens: list[tuple[int, float]] = field(default_factory=list)  # with their log-probabilities, not given out yet
    made: int = 0
    finish: str | None = None

    def feed(self, piece: Piece) -> list[str | ToolCall]:
        """What is new and certain; `finish` is set with the last piece."""
        check_numbers(piece.raw_logprobs)
        self.made += len(piece.tokens)
        pairs = zip(piece.tokens, piece.raw_logprobs, strict=True)
        self.tokens += [(token, logprob) for token, logprob in pairs if token not in self.text.silent]
        text = self.text.feed(piece.tokens)
        if piece.ending is not None:
            text += self.text.finish()
        parts: list[str | ToolCall] = [text] if text else []
        if self.reader is not None:
            parts = self.reader.feed(text) + (self.reader.finish() if piece.ending is not None else [])
        for part in parts:
            if isinstance(part, ToolCall):
                self.calls.append(part)
            else:
                self.content += part
        if piece.ending is not None:
            self.finish = self._finish(piece.ending)
        return parts

    def _finish(self, ending: str) -> str:
        if ending == "cancelled":
            raise EngineBroken("the request was cancelled")
        if ending == "stop" or self.text.stopped:
            return "tool_calls" if self.calls else "stop"
        return "length"

    def take_tokens(self) -> list[tuple[int, float]]:
        """Tokens whose log-probabilities were not given out yet."""
        taken, self.tokens = self.tokens, []
        return taken


@dataclass(frozen=True)
class Shape:
    """What differs between a chat and a completion."""

    model: str
    tokenizer: Tokenizer
    logprobs: bool
    prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, choice: Choice, part: str | ToolCall) -> dict[str, Any]:
        raise NotImplementedError

    def first(self, index: int) -> dict[str, Any] | None:
        raise NotImplementedError

    def last(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError


class ChatShape(Shape):
    """`/v1/chat/completions`."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content or (None if choice.calls else "")}
        message["refusal"] = None
        if choice.calls:
            message["tool_calls"] = [call_to_json(call) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish,
        }

    def first(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def chunk(self, choice: Choice, part: str | ToolCall) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            delta: dict[str, Any] = {"tool_calls": [{"index": choice.calls.index(part), **call_to_json(part)}]}
        else:
            delta = {"content": part}
        return self._delta(choice.index, delta, self._logprobs(choice), None)

    def last(self, choice: Choice) -> dict[str, Any]:
        return self._delta(choice.index, {}, self._logprobs(choice), choice.finish)

    def _delta(self, index: int, delta: dict[str, Any], logprobs: Any, finish: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        taken = choice.take_tokens()
        if not self.logprobs or not taken:
            return None
        content = []
        for token, logprob in taken:
            text = self.tokenizer.decode([token])
            whole = list(text.encode()) if "�" not in text else None  # part of a character
            content.append({"token": text, "logprob": logprob, "bytes": whole, "top_logprobs": []})
        return {"content": content, "refusal": None}


class CompletionShape(Shape):
    """`/v1/completions`; whole answers and chunks look alike."""

    def whole(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, choice.content, choice.finish)

    def first(self, index: int) -> dict[str, Any] | None:
        return None

    def chunk(self, choice: Choice, part: str | ToolCall) -> dict[str, Any]:
        assert isinstance(part, str)
        return self._choice(choice, part, None)

    def last(self, choice: Choice) -> dict[str, Any]:
        return self._choice(choice, "", choice.finish)

    def _choice(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        taken = choice.take_tokens()
        logprobs = None
        if self.logprobs and taken:
            texts = [self.tokenizer.decode([token]) for token, _ in taken]
            chosen = [logprob for _, logprob in taken]
            logprobs = {"tokens": texts, "token_logprobs": chosen, "top_logprobs": None, "text_offset": None}
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def call_to_json(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class Answer:
    """An answer in the making: a generation and how each of its samples is read."""

    def __init__(self, generation: Generation, shape: Shape, choices: list[Choice]) -> None:
        self.generation, self.shape, self.choices = generation, shape, choices
        self._frame = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": shape.model,
            "system_fingerprint": None,
        }

    async def whole(self) -> dict[str, Any]:
        """The answer when everything has ended."""
        async with self.generation:
            async for piece in self.generation.pieces():
                self.choices[piece.index].feed(piece)
        choices = [self.shape.whole(choice) for choice in self.choices]
        return {**self._frame, "object": self.shape.whole_object, "choices": choices, "usage": self.usage()}

    async def events(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as it comes; an error after the beginning is its last event."""
        extra = {"usage": None} if include_usage else {}
        for choice in self.choices:
            if (first := self.shape.first(choice.index)) is not None:
                yield self._event([first], **extra)
        try:
            async with self.generation:
                async for piece in self.generation.pieces():
                    choice = self.choices[piece.index]
                    for part in choice.feed(piece):
                        yield self._event([self.shape.chunk(choice, part)], **extra)
                    if choice.finish is not None:
                        yield self._event([self.shape.last(choice)], **extra)
        except EtudeError as error:
            problem = {"message": str(error), "type": "server_error", "param": None, "code": "engine_broken"}
            yield b"data: " + json.dumps({"error": problem}).encode() + b"\n\n"
            return
        if include_usage:
            yield self._event([], usage=self.usage())
        yield DONE

    def usage(self) -> dict[str, Any]:
        """The prompt counts once however many samples it has, as it is read once."""
        prompt, made = len(self.generation.prompt), sum(choice.made for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": self.generation.cached},
        }

    def _event(self, choices: list[dict[str, Any]], **extra: Any) -> bytes:
        event = {**self._frame, "object": self.shape.chunk_object, "choices": choices, **extra}
        return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


def chat_shape(model: str, tokenizer: Tokenizer, logprobs: bool) -> ChatShape:
    return ChatShape(model, tokenizer, logprobs, "chatcmpl", "chat.completion", "chat.completion.chunk")


def completion_shape(model: str, tokenizer: Tokenizer, logprobs: bool) -> CompletionShape:
    return CompletionShape(model, tokenizer, logprobs, "cmpl", "text_completion", "text_completion")
