"""The record of a session: the exact token ids, and the same as readable steps.

A trace is a chain of segments; a self-summary ends one and opens the next. A segment holds token ids and, for each
token, whether it was sampled, its log-probability at the sampler, the weight version and the routed experts. Steps
list messages and tool outcomes in order, each with its token range; they are for reading, training uses tokens only.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from etude.chat.messages import Message, ToolCall, ToolSchema
from etude.harness.tools.tool import ErrorClass, ToolOutcome

NO_VERSION = -1  # of tokens that were not sampled

# Why a session ended. An infrastructure failure is not an ending: it is raised, and leaves no trace to train on.
SessionEnding = Literal[
    "final",  # the model gave its final message
    "length",  # its final message was cut off
    "tokens",  # a budget is exhausted
    "turns",
    "time",
    "context",  # the window is full and no usable summary could be made
    "interrupted",
]
StepKind = Literal["prompt", "message", "turn", "summary-request", "summary"]
SegmentKind = Literal[
    "start", "summary", "compaction"
]  # how it was opened; a compaction segment only produces a summary


@dataclass(frozen=True)
class Segment:
    """An append-only run of tokens. All arrays have the length of `tokens`."""

    kind: SegmentKind
    tokens: npt.NDArray[np.uint32]
    sampled: npt.NDArray[np.bool_]  # produced by the model
    logprobs: npt.NDArray[np.float32]  # under the sampling distribution; 0 where not sampled
    raw_logprobs: npt.NDArray[np.float32]  # under the unmodified model distribution; NaN: the sampler did not say
    versions: npt.NDArray[np.int32]
    # [tokens processed by the model, MoE layers, experts per token]: all tokens, or all but the last few
    routing: npt.NDArray[np.unsignedinteger] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Step:
    """A message. `span` is its token range in its segment; `outcomes` are those of the message's calls, in order."""

    kind: StepKind
    message: Message
    segment: int
    span: tuple[int, int]
    outcomes: tuple[ToolOutcome, ...] = ()
    closed: bool = True  # the model ended the turn itself
    time: float = 0.0  # seconds since the start of the session
    copied: bool = False  # an earlier message, repeated after a summary

    @property
    def executed_calls(self) -> list[tuple[ToolCall, ToolOutcome]]:
        """The executed calls with their outcomes; empty for a summary, whose calls do not run."""
        return list(zip(self.message.calls, self.outcomes, strict=True)) if self.kind == "turn" else []

    def results(self) -> list[Message]:
        """Return the tool messages that answer the calls of this step."""
        return [Message("tool", outcome.text, call=call.id, name=call.name) for call, outcome in self.executed_calls]


@dataclass(frozen=True)
class Cost:
    """Tokens, calls and seconds of a session. Sampled tokens are thinking, call, commentary, final or summary."""

    thinking: int = 0
    call: int = 0
    commentary: int = 0  # text of turns that have calls
    final: int = 0
    summary: int = 0  # summaries, including their thinking
    output: int = 0  # tokens of tool results
    calls: int = 0
    turns: int = 0
    summaries: int = 0
    prompt: int = 0  # tokens sent to the model, over all turns
    cached: int = 0  # of those, found in the prefix cache
    model_s: float = 0.0
    pod_s: float = 0.0
    wall_s: float = 0.0

    @property
    def sampled(self) -> int:
        """Tokens the model produced."""
        return self.thinking + self.call + self.commentary + self.final + self.summary

    def plus(self, **more: float) -> "Cost":
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})


@dataclass(frozen=True)
class Trace:
    """The complete record of a session."""

    id: str
    task: str
    dialect: str
    model: str
    tools: Sequence[ToolSchema]
    segments: Sequence[Segment]
    steps: Sequence[Step]
    ending: SessionEnding
    cost: Cost = field(default_factory=Cost)
    exact: bool = True  # False: the endpoint returned no token ids, so the trace cannot be trained on
    facts: Mapping[str, Any] = field(default_factory=dict)  # added by the caller: tool set, seed, task set; JSON

    @property
    def final(self) -> str:
        """The model's final message; empty if it gave none."""
        last = self.steps[-1] if self.steps else None
        return last.message.content if last and last.kind == "turn" and not last.message.calls else ""

    @property
    def errors(self) -> Counter[ErrorClass]:
        """The number of failed calls by error class."""
        return Counter(outcome.error for step in self.steps for outcome in step.outcomes if outcome.error)

    def versions(self) -> tuple[int, int]:
        """Return the oldest and newest weight version of sampled tokens."""
        sampled = [segment.versions[segment.sampled] for segment in self.segments]
        found = np.concatenate(sampled) if sampled else np.zeros(0, np.int32)
        return (int(found.min()), int(found.max())) if len(found) else (NO_VERSION, NO_VERSION)


class SegmentBuilder:
    """A growing segment."""

    def __init__(self, kind: SegmentKind, tokens: Sequence[int]) -> None:
        self.kind = kind
        self.tokens: list[int] = []
        self._sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._raw: list[float] = []
        self._versions: list[int] = []
        self._routing: list[npt.NDArray[np.unsignedinteger]] = []
        self._routed = 0
        self.append_context(tokens)

    @classmethod
    def from_segment(cls, segment: Segment) -> "SegmentBuilder":
        """Return a builder that continues `segment`."""
        builder = cls(segment.kind, ())
        builder.tokens = segment.tokens.tolist()
        builder._sampled, builder._logprobs = segment.sampled.tolist(), segment.logprobs.tolist()
        builder._raw, builder._versions = segment.raw_logprobs.tolist(), segment.versions.tolist()
        builder.set_routing(segment.routing)
        return builder

    def __len__(self) -> int:
        return len(self.tokens)

    def append_context(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Append tokens that were not sampled; return their range."""
        return self._add(tokens, False, [0.0] * len(tokens), [0.0] * len(tokens), [NO_VERSION] * len(tokens))

    def append_sampled(
        self, tokens: Sequence[int], logprobs: Sequence[float], raw: Sequence[float] | None, versions: Sequence[int]
    ) -> tuple[int, int]:
        """Append sampled tokens; return their range."""
        return self._add(tokens, True, logprobs, [math.nan] * len(tokens) if raw is None else raw, versions)

    def set_routing(self, routing: npt.NDArray[np.unsignedinteger] | None) -> None:
        """Set the routed experts of all tokens processed so far.

        Known tokens keep theirs, which ran when they were sampled, unless the weights changed on the way: then the
        sampler may have recomputed its cache, and the newest tokens attended to the experts that it reports now.
        """
        if routing is not None and len(routing) > self._routed:
            if len({*self._versions} - {NO_VERSION}) > 1:
                self._routing, self._routed = [], 0
            self._routing.append(routing[self._routed :].copy())  # a view would keep the whole array of every turn
            self._routed = len(routing)

    def segment(self) -> Segment:
        return Segment(
            self.kind,
            np.array(self.tokens, np.uint32),
            np.array(self._sampled, np.bool_),
            np.array(self._logprobs, np.float32),
            np.array(self._raw, np.float32),
            np.array(self._versions, np.int32),
            np.concatenate(self._routing) if self._routing else None,
        )

    def _add(
        self,
        tokens: Sequence[int],
        sampled: bool,
        logprobs: Sequence[float],
        raw: Sequence[float],
        versions: Sequence[int],
    ) -> tuple[int, int]:
        assert len(tokens) == len(logprobs) == len(raw) == len(versions)
        start = len(self.tokens)
        self.tokens += tokens
        self._sampled += [sampled] * len(tokens)
        self._logprobs += logprobs
        self._raw += raw
        self._versions += versions
        return start, len(self.tokens)
