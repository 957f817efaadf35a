"""A chat client that keeps the API key out of everything it returns or raises."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from etude.chat.messages import PartListener
from etude.errors import EtudeError
from etude.inference.chat_format import ParsedToolCall
from etude.inference.clients.openai import OpenAIChat, Reply
from etude.inference.clients.transport import RetryPolicy
from etude.inference.sampling import Sampling

REDACTED = "[key]"
MIN_SECRET_LENGTH = 16  # shorter keys, such as "EMPTY", are not redacted in answers: they may be ordinary words


class RedactingChat(OpenAIChat):
    """A chat client that removes the API key from answers and errors: some endpoints and proxies repeat it."""

    def __init__(
        self, url: str, key: str, *, model: str, limit: str = "max_tokens", retry: RetryPolicy | None = None
    ) -> None:
        super().__init__(url, key, model=model, limit=limit, retry=retry)
        self._key = key

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        sampling: Sampling | None = None,
        listen: PartListener | None = None,
    ) -> Reply:
        with self._redact_errors():
            reply = await super().chat(messages, tools, sampling, listen)
        if len(self._key) < MIN_SECRET_LENGTH:
            return reply
        calls = tuple(
            ParsedToolCall(*(self._redact(part) for part in (c.name, c.arguments, c.id))) for c in reply.tool_calls
        )
        return replace(reply, text=self._redact(reply.text), tool_calls=calls, message=self._redact(reply.message))

    async def models(self) -> list[Mapping[str, Any]]:
        with self._redact_errors():
            return await super().models()

    @contextmanager
    def _redact_errors(self) -> Iterator[None]:
        try:
            yield
        except EtudeError as error:
            error.args = tuple(self._redact(part) for part in error.args)
            raise

    def _redact(self, value: Any) -> Any:
        """Return a JSON value with the key replaced wherever it occurs."""
        if isinstance(value, str):
            return value.replace(self._key, REDACTED) if self._key else value
        if isinstance(value, Mapping):
            return {self._redact(name): self._redact(each) for name, each in value.items()}
        return [self._redact(part) for part in value] if isinstance(value, list | tuple) else value
