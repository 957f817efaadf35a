"""Policies that know what to say: for expert demonstrations, tests, and running a trace again.

A script is a function of the turn that gives the assistant's message; it is written in the dialect's own tokens, so a
demonstration is exactly what a model would have had to sample. `Recorded` says again what a trace says, and checks that
it is asked the same: two runs that differ in a single prompt token do not pass unnoticed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message
from etude.errors import EtudeError, InputError
from etude.harness.trace import Trace
from etude.inference.policy import OneSample, Weights
from etude.inference.request import Sample
from etude.inference.sampling import Sampling

Line = Message | Sequence[int]  # words, or tokens as they are


class Scripted(OneSample):
    """Says its lines in order. A function instead of lines is given the prompt's tokens, turn by turn."""

    def __init__(self, dialect: Dialect, lines: Iterable[Line] | Callable[[Sequence[int]], Line]) -> None:
        self.dialect = dialect
        self._lines: Iterator[Line] | Callable[[Sequence[int]], Line] = lines if callable(lines) else iter(lines)
        self.prompts: list[list[int]] = []

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        self.prompts.append(list(tokens))
        line = self._lines(tokens) if callable(self._lines) else next(self._lines, None)
        if line is None:
            raise EtudeError(f"the script is at its end, but was asked for answer {len(self.prompts)}")
        return [said(self.dialect.write(line) if isinstance(line, Message) else line, sampling)] * sampling.samples

    async def load(self, weights: Weights, version: int) -> None:
        raise InputError("a script has no weights")

    async def version(self) -> int:
        return 0

    async def close(self) -> None:
        """Nothing is open."""


class Diverged(EtudeError):
    """A session that is run again went another way."""


class Recorded(OneSample):
    """Answers as a trace says; Diverged when it is asked something else than then."""

    def __init__(self, trace: Trace) -> None:
        if not trace.exact:
            raise InputError(f"session {trace.id} has no token ids; it cannot be run again token by token")
        self._turns = iter([step for step in trace.steps if step.kind in ("turn", "summary")])
        self._trace = trace

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        step = next(self._turns, None)
        if step is None:
            raise Diverged(f"session {self._trace.id} is at its end, but was asked for one more answer")
        segment, (start, end) = self._trace.segments[step.segment], step.span
        before = segment.tokens[:start].tolist()
        if list(tokens) != before:
            place = next((i for i, (a, b) in enumerate(zip(tokens, before, strict=False)) if a != b), "its end")
            raise Diverged(f"session {self._trace.id}, segment {step.segment}: the prompt differs at token {place}")
        cut = slice(start, end)
        return [
            Sample(
                segment.tokens[cut].tolist(),
                segment.logprobs[cut].tolist(),
                segment.raw_logprobs[cut].tolist(),
                segment.versions[cut].tolist(),
                "stop" if step.closed else "length",
                None if segment.routing is None else np.ascontiguousarray(segment.routing[: max(0, end - 1)]),
            )
        ]

    async def load(self, weights: Weights, version: int) -> None:
        raise InputError("a recorded session has no weights")

    async def version(self) -> int:
        return self._trace.versions()[1]

    async def close(self) -> None:
        """Nothing is open."""


def said(tokens: Sequence[int], sampling: Sampling) -> Sample:
    """Tokens as a certain sample of version 0, cut where the sampler would have stopped."""
    kept: list[int] = []
    for token in tokens[: sampling.max_tokens]:
        kept.append(token)
        if token in sampling.stop:
            break
    ending = "stop" if kept and kept[-1] in sampling.stop else "length"
    certain = [0.0] * len(kept)
    return Sample(kept, certain, list(certain), [0] * len(kept), ending)  # type: ignore[arg-type]
