"""Model clients: they generate the next turn of a session, by token ids or through a chat API.

A client holds the context of the current segment. Appended messages are pending until `flush` adds them to the context.
`TokenModelClient` is for training and exact evaluation: sampled tokens are kept as they are and the context is only
appended to. `ChatModelClient` works with any OpenAI-compatible endpoint; its segments are empty and its trace is not
`exact`.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.chat.dialects.dialect import Dialect
from etude.chat.dialects.streaming import TurnStreamer
from etude.chat.messages import Message, ParsedTurn, PartListener, StreamPart, ToolSchema
from etude.errors import InputError
from etude.harness.trace import Segment, SegmentBuilder, SegmentKind, Trace
from etude.inference.clients.limiter import RequestTicket
from etude.inference.clients.openai import OpenAIChat
from etude.inference.policy import Completion, Policy
from etude.inference.sampling import Sampling

BYTES_PER_TOKEN = 4.0  # of text or code, for an endpoint that has not counted any tokens yet
SEED_LIMIT = 1 << 62  # exclusive upper bound of sampling seeds
MAX_BRIDGED = 4  # renderings that are kept


@dataclass(frozen=True)
class Turn:
    """One model turn with its token range in the segment, token counts and duration."""

    parsed: ParsedTurn
    span: tuple[int, int]
    prompt_tokens: int
    cached_tokens: int
    seconds: float


class ModelClient(ABC):
    """The model in one session."""

    name: str  # of the dialect
    model: str
    exact: bool  # the trace has token ids
    window: int  # context length in tokens
    on_text: PartListener  # called with parts of the turn while it is generated, for display

    @property
    def waited_s(self) -> float:
        """Seconds so far for which rate limits or a busy endpoint held requests back: not time of the session."""
        return 0.0

    @property
    @abstractmethod
    def size(self) -> int:
        """Tokens of the current segment, including pending messages."""

    @abstractmethod
    def begin_segment(
        self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[int, int]:
        """Open a segment; return the range of its first tokens. Pending messages are discarded."""

    @abstractmethod
    def append(self, messages: Sequence[Message]) -> None:
        """Add pending messages: results of the last turn's calls, in order, or user messages."""

    @abstractmethod
    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Return how many tokens the messages would add, up to the frame around them."""

    @abstractmethod
    def flush(self) -> tuple[int, int]:
        """Add the pending messages to the segment; return the range of their tokens."""

    @abstractmethod
    async def complete(self, max_tokens: int) -> Turn:
        """Generate the next turn. If cancelled, the context is unchanged."""

    @abstractmethod
    def segments(self) -> list[Segment]:
        """Return all segments so far, without pending messages."""

    @abstractmethod
    def restore(self, trace: Trace) -> bool:
        """Continue from the end of an earlier trace; return True if it ends with a model turn."""


class TokenModelClient(ModelClient):
    """A policy, sampled by token ids."""

    exact = True

    def __init__(
        self,
        policy: Policy,
        dialect: Dialect,
        sampling: Sampling,
        *,
        window: int,
        session: str = "",
        model: str = "",
    ) -> None:
        self.policy, self.dialect, self.sampling, self.session = policy, dialect, sampling, session
        self.name, self.window, self.model = dialect.name, window, model
        self.on_text: PartListener = _ignore_part
        self._builders: list[SegmentBuilder] = []
        self._tools: Sequence[ToolSchema] = ()
        self._last_turn: Sequence[int] = ()  # tokens of the turn that ends the segment; empty after a prompt
        self._pending: list[Message] = []
        self._bridged: list[tuple[tuple[Sequence[int], tuple[Message, ...]], tuple[int, ...]]] = []
        self._turns = self._calls = 0
        self._since: int | None = None  # weight version of the first token sampled here

    @property
    def size(self) -> int:
        return len(self._builder) + (self.count_tokens(self._pending) if self._pending else 0)

    @property
    def _builder(self) -> SegmentBuilder:
        return self._builders[-1]

    def begin_segment(
        self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[int, int]:
        self._tools, self._last_turn, self._pending = tools, (), []
        self._builders.append(SegmentBuilder(kind, self.dialect.render(messages, tools)))
        return 0, len(self._builder)

    def append(self, messages: Sequence[Message]) -> None:
        self._pending += messages

    def count_tokens(self, messages: Sequence[Message]) -> int:
        return len(self._bridge(messages))

    def _bridge(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return the tokens between the last turn and the next. The same messages are asked for several times between
        two turns, and a template takes long to render: the last answers are kept."""
        key = (self._last_turn, tuple(messages))
        found = next((tokens for known, tokens in self._bridged if known == key), None)
        if found is None:
            found = tuple(self.dialect.bridge(self._last_turn, messages))
            self._bridged = [(key, found), *self._bridged[: MAX_BRIDGED - 1]]
        return found

    async def complete(self, max_tokens: int) -> Turn:
        started, prompt_tokens = time.monotonic(), len(self._builder)
        sampling = replace(
            self.sampling,
            max_tokens=max_tokens,
            seed=turn_seed(self.sampling.seed, self._turns),
            stop=self.sampling.stop | self.dialect.stops,
            # Weights may change between turns as within one: the session keeps the KV cache of the older weights.
            since=self._since,
        )
        completion, streamer = await self._complete(sampling)
        span = self._builder.append_sampled(
            completion.tokens, completion.logprobs, completion.raw_logprobs, completion.versions
        )
        self._builder.set_routing(completion.routing)
        if self._since is None and completion.versions:
            self._since = completion.versions[0]
        self._last_turn = completion.tokens
        parsed = self.dialect.parse(completion.tokens, self._tools, first_call=self._calls)
        self._turns += 1
        self._calls += len(parsed.calls)
        if streamer is not None:
            streamer.finish(parsed)
        return Turn(parsed, span, prompt_tokens, completion.cached, time.monotonic() - started)

    async def _complete(self, sampling: Sampling) -> tuple[Completion, TurnStreamer | None]:
        tokens = self._builder.tokens
        if self.on_text is _ignore_part:
            return await self.policy.complete(tokens, sampling, session=self.session), None
        streamer = TurnStreamer(self.dialect.parse, self.on_text)

        def on_tokens(new: Sequence[int]) -> None:
            streamer.feed(new)

        return await self.policy.complete_streaming(tokens, sampling, on_tokens, session=self.session), streamer

    def flush(self) -> tuple[int, int]:
        pending, self._pending = self._pending, []
        span = self._builder.append_context(self._bridge(pending) if pending else ())
        self._last_turn = () if pending else self._last_turn
        return span

    def segments(self) -> list[Segment]:
        return [builder.segment() for builder in self._builders]

    def restore(self, trace: Trace) -> bool:
        if trace.dialect != self.name or not trace.exact:
            raise InputError(
                f"session {trace.id} used dialect {trace.dialect}, not {self.name}; it cannot be continued here"
            )
        self._builders = [SegmentBuilder.from_segment(segment) for segment in trace.segments]
        turns = [step for step in trace.steps if step.kind in ("turn", "summary")]
        self._turns, self._calls = len(turns), sum(len(step.message.calls) for step in turns)
        last = trace.segments[-1]
        self._tools, self._pending = trace.tools, []
        ends_with_turn = bool(len(last)) and bool(last.sampled[-1])
        self._last_turn = self._builder.tokens[slice(*turns[-1].span)] if ends_with_turn else ()
        return ends_with_turn


class ChatModelClient(ModelClient):
    """A model behind a chat API. Token counts are the endpoint's; between turns they are estimated from the text."""

    exact = False
    name = "chat"

    def __init__(self, client: OpenAIChat, sampling: Sampling, *, window: int) -> None:
        self.client, self.sampling, self.window, self.model = client, sampling, window, client.model
        self.on_text: PartListener = _ignore_part
        self._messages: list[Mapping[str, Any]] = []
        self._pending: list[Message] = []
        self._tools: Sequence[ToolSchema] = ()
        self._size = 0
        self._bytes_per_token = BYTES_PER_TOKEN
        self._kinds: list[SegmentKind] = []
        self._ticket, self._earlier_waited_s = RequestTicket(), 0.0

    @property
    def waited_s(self) -> float:
        return self._earlier_waited_s + self._ticket.waited_s

    @property
    def size(self) -> int:
        return self._size + self.count_tokens(self._pending)

    def begin_segment(
        self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[int, int]:
        self._messages, self._pending = [_to_chat(message) for message in messages], []
        self._tools = tools
        self._kinds.append(kind)
        self._size = self._estimate_tokens([*self._messages, *tools])
        return 0, self._size

    def append(self, messages: Sequence[Message]) -> None:
        self._pending += messages

    def count_tokens(self, messages: Sequence[Message]) -> int:
        return self._estimate_tokens([_to_chat(message) for message in messages])

    def _estimate_tokens(self, values: Sequence[Mapping[str, Any]]) -> int:
        """Estimate tokens that the endpoint has not counted yet, with as many bytes a token as in those it counted."""
        return int(_count_bytes(values) / self._bytes_per_token) + 4 * len(values)

    def flush(self) -> tuple[int, int]:
        start, self._size = self._size, self.size
        self._messages += [_to_chat(message) for message in self._pending]
        self._pending = []
        return start, self._size

    async def complete(self, max_tokens: int) -> Turn:
        started, self._earlier_waited_s, self._ticket = time.monotonic(), self.waited_s, RequestTicket()
        listener = None if self.on_text is _ignore_part else self.on_text
        sampling = replace(self.sampling, max_tokens=max_tokens)
        reply = await self.client.chat(self._messages, self._tools, sampling, listener, self._ticket)
        usage = reply.usage
        if usage.counted:
            size = _count_bytes([*self._messages, *self._tools])
            self._bytes_per_token = min(BYTES_PER_TOKEN, size / max(1, usage.prompt_tokens))
        self._messages.append(reply.message)
        self._size = usage.prompt_tokens + usage.completion_tokens
        span = usage.prompt_tokens, self._size
        seconds = time.monotonic() - started - self._ticket.waited_s
        return Turn(reply.turn, span, usage.prompt_tokens, usage.cached_tokens, seconds)

    def segments(self) -> list[Segment]:
        return [SegmentBuilder(kind, ()).segment() for kind in self._kinds]

    def restore(self, trace: Trace) -> bool:
        self._kinds = [segment.kind for segment in trace.segments]
        self._tools, self._pending = trace.tools, []
        last, messages = len(trace.segments) - 1, []
        steps = [step for step in trace.steps if step.segment == last]
        last_turn = max((index for index, step in enumerate(steps) if step.kind in ("turn", "summary")), default=-1)
        for index, step in enumerate(steps):
            if index <= last_turn or step.kind == "prompt":
                messages.append(step.message)
                messages += step.results() if index < last_turn else []
        self._messages = [_to_chat(message) for message in messages]
        self._size = self._estimate_tokens([*self._messages, *self._tools])
        return True


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn: sampling depends on (seed, position), and positions restart with every turn."""
    return (seed * 1_000_003 + turn) % SEED_LIMIT


def _ignore_part(part: StreamPart, text: str) -> None:
    """Default listener: does nothing."""


def _count_bytes(values: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(json.dumps(value, ensure_ascii=False).encode()) for value in values)


def _to_chat(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call, "content": message.content}
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
            for call in message.calls
        ]
    return out
