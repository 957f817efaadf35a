"""Who speaks in a session: a model behind token ids, or one behind a chat API. The session cannot tell them apart.

A speaker holds the context of the running segment. It begins one from messages, answers at its end, and is told what
came of the answer; what it was told joins the context when it listens. `TokenSpeaker` is for training and exact
evaluation: what the model made is kept token for token and only ever appended to. `ChatSpeaker` works with any
OpenAI-compatible endpoint; its segments are empty, and the trace says so.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from etude.chat.dialects.dialect import Dialect
from etude.chat.dialects.json_calls import MalformedCall, read_arguments
from etude.chat.dialects.streaming import TurnStreamer
from etude.chat.messages import ParsedTurn, Call, CallStatus, Message, ToolSchema, tool_names
from etude.errors import InputError
from etude.harness.trace import Segment, SegmentKind, Tape, Trace
from etude.inference.chat_format import PartListener, StreamPart, ParsedToolCall
from etude.inference.clients.openai import OpenAIChat, Reply
from etude.inference.policy import Policy, Completion
from etude.inference.sampling import Sampling

SEEDS = 1 << 62  # a sampling's seed is below this


@dataclass(frozen=True)
class Spoken:
    """An answer, the place of its tokens in the segment, and what it took."""

    answer: ParsedTurn
    span: tuple[int, int]
    prompt: int
    cached: int
    seconds: float


class Speaker(ABC):
    """One model's side of one session."""

    name: str  # of the dialect
    model: str
    exact: bool  # token ids are kept
    window: int  # tokens that fit
    on_text: PartListener  # told what the model writes as it comes, for a person to watch

    @property
    @abstractmethod
    def size(self) -> int:
        """Tokens in the running segment, with what it was told."""

    @abstractmethod
    def begin(self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[int, int]:
        """Open a segment; the place of its first tokens. What it was told and has not answered is forgotten."""

    @abstractmethod
    def tell(self, messages: Sequence[Message]) -> None:
        """Results of the last answer's calls, in their order, or what a user says."""

    @abstractmethod
    def measure(self, messages: Sequence[Message]) -> int:
        """Tokens that telling it this would add, give or take the frame around them."""

    @abstractmethod
    def listen(self) -> tuple[int, int]:
        """Add what it was told to the segment; the place of its tokens."""

    @abstractmethod
    async def answer(self, max_tokens: int) -> Spoken:
        """Let the model speak. Cancelled, it has said nothing."""

    @abstractmethod
    def segments(self) -> list[Segment]:
        """All segments up to now, without what was told since the last answer."""

    @abstractmethod
    def restore(self, trace: Trace) -> bool:
        """Be where the trace of an earlier run ends; True when that is the last answer, and nothing was heard since."""


class TokenSpeaker(Speaker):
    """A model by its tokens."""

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
        self.on_text: PartListener = _unheard
        self._tapes: list[Tape] = []
        self._tools: Sequence[ToolSchema] = ()
        self._last: Sequence[int] = ()  # the answer at the end of the tape; none where the model is about to write
        self._told: list[Message] = []
        self._answers = self._calls = 0

    @property
    def size(self) -> int:
        return len(self._tape) + (self.measure(self._told) if self._told else 0)

    @property
    def _tape(self) -> Tape:
        return self._tapes[-1]

    def begin(self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[int, int]:
        self._tools, self._last, self._told = tools, (), []
        self._tapes.append(Tape(kind, self.dialect.render(messages, tools)))
        return 0, len(self._tape)

    def tell(self, messages: Sequence[Message]) -> None:
        self._told += messages

    def measure(self, messages: Sequence[Message]) -> int:
        return len(self.dialect.bridge(self._last, messages))

    async def answer(self, max_tokens: int) -> Spoken:
        started, prompt = time.monotonic(), len(self._tape)
        sampling = replace(
            self.sampling,
            max_tokens=max_tokens,
            seed=turn_seed(self.sampling.seed, self._answers),
            stop=self.sampling.stop | self.dialect.stops,
        )
        sample, live = await self._sample(sampling)
        span = self._tape.make(sample.tokens, sample.logprobs, sample.raw_logprobs, sample.versions)
        self._tape.route(sample.routing)
        self._last = sample.tokens
        answer = self.dialect.parse(sample.tokens, self._tools, first_call=self._calls)
        self._answers += 1
        self._calls += len(answer.calls)
        if live is not None:
            live.finish(answer)
        return Spoken(answer, span, prompt, sample.cached, time.monotonic() - started)

    async def _sample(self, sampling: Sampling) -> tuple[Completion, TurnStreamer | None]:
        tokens = self._tape.tokens
        if self.on_text is _unheard:
            return await self.policy.complete(tokens, sampling, session=self.session), None
        live = TurnStreamer(self.dialect, self.on_text)
        return await self.policy.complete_streaming(tokens, sampling, live.feed, session=self.session), live

    def listen(self) -> tuple[int, int]:
        told, self._told = self._told, []
        heard = self._tape.hear(self.dialect.bridge(self._last, told) if told else ())
        self._last = () if told else self._last
        return heard

    def segments(self) -> list[Segment]:
        return [tape.segment() for tape in self._tapes]

    def restore(self, trace: Trace) -> bool:
        if trace.dialect != self.name or not trace.exact:
            raise InputError(
                f"session {trace.id} was in dialect {trace.dialect}, not {self.name}; it cannot go on here"
            )
        self._tapes = [Tape.of(segment) for segment in trace.segments]
        spoken = [step for step in trace.steps if step.kind in ("turn", "summary")]
        self._answers, self._calls = len(spoken), sum(len(step.message.calls) for step in spoken)
        last = trace.segments[-1]
        self._tools, self._told = trace.tools, []
        ends_with_answer = bool(len(last)) and bool(last.made[-1])
        self._last = self._tape.tokens[slice(*spoken[-1].span)] if ends_with_answer else ()
        return ends_with_answer


class ChatSpeaker(Speaker):
    """A model behind a chat API. Tokens are as the endpoint counts them; between answers, as a guess from the text."""

    exact = False
    name = "chat"

    def __init__(self, client: OpenAIChat, sampling: Sampling, *, window: int) -> None:
        self.client, self.sampling, self.window, self.model = client, sampling, window, client.model
        self.on_text: PartListener = _unheard
        self._messages: list[Mapping[str, Any]] = []
        self._told: list[Message] = []
        self._tools: Sequence[ToolSchema] = ()
        self._size = 0
        self._kinds: list[SegmentKind] = []

    @property
    def size(self) -> int:
        return self._size + self.measure(self._told)

    def begin(self, kind: SegmentKind, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> tuple[int, int]:
        self._messages, self._told = [_as_chat(message) for message in messages], []
        self._tools = tools
        self._kinds.append(kind)
        self._size = _guess([*self._messages, *tools])
        return 0, self._size

    def tell(self, messages: Sequence[Message]) -> None:
        self._told += messages

    def measure(self, messages: Sequence[Message]) -> int:
        return _guess([_as_chat(message) for message in messages])

    def listen(self) -> tuple[int, int]:
        start, self._size = self._size, self.size
        self._messages += [_as_chat(message) for message in self._told]
        self._told = []
        return start, self._size

    async def answer(self, max_tokens: int) -> Spoken:
        started = time.monotonic()
        listen = None if self.on_text is _unheard else self.on_text
        sampling = replace(self.sampling, max_tokens=max_tokens)
        reply = _whole_characters(await self.client.chat(self._messages, self._tools, sampling, listen))
        self._messages.append(reply.message)
        answer = _read(reply, self._tools)
        used = reply.usage
        self._size = used.prompt_tokens + used.completion_tokens
        span = used.prompt_tokens, self._size
        return Spoken(answer, span, used.prompt_tokens, used.cached_tokens, time.monotonic() - started)

    def segments(self) -> list[Segment]:
        return [Tape(kind, ()).segment() for kind in self._kinds]

    def restore(self, trace: Trace) -> bool:
        self._kinds = [segment.kind for segment in trace.segments]
        self._tools, self._told = trace.tools, []
        last, messages = len(trace.segments) - 1, []
        here = [step for step in trace.steps if step.segment == last]
        spoken = max((index for index, step in enumerate(here) if step.kind in ("turn", "summary")), default=-1)
        for index, step in enumerate(here):
            if index <= spoken or step.kind == "prompt":
                messages.append(step.message)
                messages += step.results() if index < spoken else []
        self._messages = [_as_chat(message) for message in messages]
        self._size = _guess([*self._messages, *self._tools])
        return True


def turn_seed(seed: int, turn: int) -> int:
    """Luck is a function of seed and place, and places begin anew with every answer: so must the seed."""
    return (seed * 1_000_003 + turn) % SEEDS


def _unheard(part: StreamPart, text: str) -> None:
    """Nobody watches."""


def _guess(things: Sequence[Mapping[str, Any]]) -> int:
    """Tokens of what an endpoint has not counted yet: a token is about four bytes of text or code."""
    return sum(len(json.dumps(thing, ensure_ascii=False).encode()) // 4 + 4 for thing in things)


def _as_chat(message: Message) -> dict[str, Any]:
    if message.role == "tool":
        return {"role": "tool", "tool_call_id": message.call, "content": message.content}
    out: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.calls:
        out["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.raw}}
            for call in message.calls
        ]
    return out


def _whole_characters(reply: Reply) -> Reply:
    """The reply without halves of surrogate pairs: JSON can write them, but they can be neither kept nor sent back."""
    calls = [[call.name, call.arguments, call.id] for call in reply.tool_calls]
    written = json.dumps([reply.text, reply.message, calls], ensure_ascii=False)
    text, message, calls = json.loads(written.encode("utf-8", "replace"))
    return replace(reply, text=text, message=message, tool_calls=tuple(ParsedToolCall(*call) for call in calls))


def _read(reply: Reply, tools: Sequence[ToolSchema]) -> ParsedTurn:
    """An endpoint's answer in our terms; it counts its tokens by kind for its thinking at most."""
    known, calls = tool_names(tools), []
    for call in reply.tool_calls:
        status: CallStatus = "ok"
        arguments, problem = None, ""
        try:
            arguments = read_arguments(call.arguments or "{}", call.name)
        except MalformedCall as error:
            status, problem = error.status, error.problem
        else:
            if call.name not in known:
                status, problem = "unknown_tool", f"there is no tool {call.name}"
        calls.append(Call(call.name, arguments, call.id, status, call.arguments, problem=problem))
    thinking = reply.message.get("reasoning_content") or reply.message.get("reasoning") or ""
    made, thought = reply.usage.completion_tokens, min(reply.usage.reasoning_tokens, reply.usage.completion_tokens)
    rest = made - thought
    return ParsedTurn(
        thinking=str(thinking),
        text=reply.text,
        calls=tuple(calls),
        closed=reply.finish != "length",
        thinking_tokens=thought,
        call_tokens=rest if calls else 0,
        text_tokens=0 if calls else rest,
    )
