"""What happened in a session: tokens as the model saw and made them, and the same in words.

A trace is a chain of segments; a self-summary ends one and opens the next. A segment is token ids with, for each token,
whether the model made it, its log-probability at the sampler, the version of the weights, and the experts it went to.
Beside them stand the steps, in the order they happened, each with the place of its tokens. Steps are for reading:
nothing in training is ever made from them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from etude.chat.messages import Call, Message, ToolSchema
from etude.harness.tools.tool import ErrorClass, Outcome

NO_VERSION = -1  # of tokens that no model made

# Why a session is over. A failure of the infrastructure is none of these: it is an exception, and no trace to train on.
SessionEnding = Literal[
    "final",  # the model gave its final message
    "length",  # its final message was cut off
    "tokens",  # a budget is spent
    "turns",
    "time",
    "context",  # the window is full, and no summary was to be had
    "interrupted",
]
StepKind = Literal["prompt", "message", "turn", "summary-request", "summary"]
SegmentKind = Literal["start", "summary", "compaction"]  # how it was opened; a compaction only writes a summary


@dataclass(frozen=True)
class Segment:
    """One run of tokens that grew at its end only. All arrays are as long as `tokens`."""

    kind: SegmentKind
    tokens: npt.NDArray[np.uint32]
    made: npt.NDArray[np.bool_]  # by the model
    logprobs: npt.NDArray[np.float32]  # under the distribution they were drawn from; 0 where not made
    raw_logprobs: npt.NDArray[np.float32]  # under the model's own
    versions: npt.NDArray[np.int32]
    # [tokens the model has read, moe layers, experts per token]: all tokens, or all but the last few
    routing: npt.NDArray[np.unsignedinteger] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Step:
    """Something said. `span` are its tokens in its segment; the outcomes are those of the message's calls, in order."""

    kind: StepKind
    message: Message
    segment: int
    span: tuple[int, int]
    outcomes: tuple[Outcome, ...] = ()
    closed: bool = True  # the model ended this turn itself
    time: float = 0.0  # seconds since the session began
    copied: bool = False  # said before, and shown again after a summary

    @property
    def acts(self) -> list[tuple[Call, Outcome]]:
        """The calls that were run and what came of them: those of a turn, not what a summary has of the kind."""
        return list(zip(self.message.calls, self.outcomes, strict=True)) if self.kind == "turn" else []

    def results(self) -> list[Message]:
        """What the model is told of its calls."""
        return [Message("tool", outcome.text, call=call.id, name=call.name) for call, outcome in self.acts]


@dataclass(frozen=True)
class Cost:
    """What a session took. Tokens the model made are thinking, call, commentary or final; output are the tools'."""

    thinking: int = 0
    call: int = 0
    commentary: int = 0  # text beside calls
    final: int = 0
    summary: int = 0  # summaries, their thinking included
    output: int = 0  # tokens of tool results
    calls: int = 0
    turns: int = 0
    summaries: int = 0
    prompt: int = 0  # tokens sent to be read, over all turns
    cached: int = 0  # of those, found in the sampler's cache
    model_s: float = 0.0
    pod_s: float = 0.0
    wall_s: float = 0.0

    @property
    def made(self) -> int:
        """Tokens the model made."""
        return self.thinking + self.call + self.commentary + self.final + self.summary

    def plus(self, **more: float) -> "Cost":
        return replace(self, **{name: getattr(self, name) + value for name, value in more.items()})


@dataclass(frozen=True)
class Trace:
    """A whole session."""

    id: str
    task: str
    dialect: str
    model: str
    tools: Sequence[ToolSchema]
    segments: Sequence[Segment]
    steps: Sequence[Step]
    ending: SessionEnding
    cost: Cost = field(default_factory=Cost)
    exact: bool = True  # False: the endpoint gave no token ids, and there is nothing to train on
    facts: Mapping[str, Any] = field(default_factory=dict)  # of whoever ran it: environment, seed, task set; JSON

    @property
    def final(self) -> str:
        """The last message, if the model got to give one."""
        last = self.steps[-1] if self.steps else None
        return last.message.content if last and last.kind == "turn" and not last.message.calls else ""

    @property
    def errors(self) -> Counter[ErrorClass]:
        """How many calls failed, by class."""
        return Counter(outcome.error for step in self.steps for outcome in step.outcomes if outcome.error)

    def versions(self) -> tuple[int, int]:
        """The oldest and the newest weights that made tokens here."""
        made = [segment.versions[segment.made] for segment in self.segments]
        found = np.concatenate(made) if made else np.zeros(0, np.int32)
        return (int(found.min()), int(found.max())) if len(found) else (NO_VERSION, NO_VERSION)


class Tape:
    """A segment while it grows."""

    def __init__(self, kind: SegmentKind, tokens: Sequence[int]) -> None:
        self.kind = kind
        self.tokens: list[int] = []
        self._made: list[bool] = []
        self._logprobs: list[float] = []
        self._raw: list[float] = []
        self._versions: list[int] = []
        self._routing: list[npt.NDArray[np.unsignedinteger]] = []
        self._routed = 0
        self.hear(tokens)

    @classmethod
    def of(cls, segment: Segment) -> "Tape":
        """A tape that goes on where a segment ends."""
        tape = cls(segment.kind, ())
        tape.tokens = segment.tokens.tolist()
        tape._made, tape._logprobs = segment.made.tolist(), segment.logprobs.tolist()
        tape._raw, tape._versions = segment.raw_logprobs.tolist(), segment.versions.tolist()
        tape.route(segment.routing)
        return tape

    def __len__(self) -> int:
        return len(self.tokens)

    def hear(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Tokens that the model did not make; where they lie."""
        return self._add(tokens, False, [0.0] * len(tokens), [0.0] * len(tokens), [NO_VERSION] * len(tokens))

    def make(
        self, tokens: Sequence[int], logprobs: Sequence[float], raw: Sequence[float], versions: Sequence[int]
    ) -> tuple[int, int]:
        """Tokens that it did."""
        return self._add(tokens, True, logprobs, raw, versions)

    def route(self, chosen: npt.NDArray[np.unsignedinteger] | None) -> None:
        """The experts of everything read so far. Of tokens known before, what was known stays: that is what ran."""
        if chosen is not None and len(chosen) > self._routed:
            self._routing.append(chosen[self._routed :])
            self._routed = len(chosen)

    def segment(self) -> Segment:
        return Segment(
            self.kind,
            np.array(self.tokens, np.uint32),
            np.array(self._made, np.bool_),
            np.array(self._logprobs, np.float32),
            np.array(self._raw, np.float32),
            np.array(self._versions, np.int32),
            np.concatenate(self._routing) if self._routing else None,
        )

    def _add(
        self,
        tokens: Sequence[int],
        made: bool,
        logprobs: Sequence[float],
        raw: Sequence[float],
        versions: Sequence[int],
    ) -> tuple[int, int]:
        assert len(tokens) == len(logprobs) == len(raw) == len(versions)
        start = len(self.tokens)
        self.tokens += tokens
        self._made += [made] * len(tokens)
        self._logprobs += logprobs
        self._raw += raw
        self._versions += versions
        return start, len(self.tokens)
