"""Any OpenAI-compatible chat API, for evaluation only: messages in, text and tool calls out.

It has no tokens, so nothing can be trained on what it says; the methods of a policy that would give samples say so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from etude.errors import InputError
from etude.inference.chat import ToolCall
from etude.inference.clients.transport import Patience, Transport
from etude.inference.policy import Weights
from etude.inference.sampling import Sampling
from etude.inference.wire import BadAnswer, member


@dataclass(frozen=True)
class Usage:
    """Tokens of one answer, as the server counts them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


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
    ) -> Reply:
        """The answer to a chat. What `sampling` says and the API cannot express is an error."""
        body = {"model": self.model, "messages": list(messages), **self._knobs(sampling or Sampling())}
        if tools:
            body["tools"] = list(tools)
        path = "/chat/completions"
        answer = await self._transport.call("POST", path, lambda: self.url, json=body)
        return read_reply(answer, f"{self.url}{path}")

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
    return Reply(
        message.get("content") or "",
        tuple(calls),
        Usage(member(usage, "prompt_tokens", int, where), member(usage, "completion_tokens", int, where), int(cached)),
        str(choices[0].get("finish_reason")),
        message,
    )
