"""A policy that repeats the turns of a trace and checks every prompt token: runs that differ in a single one raise."""

from collections.abc import Sequence

import numpy as np

from etude.errors import EtudeError, InputError
from etude.harness.trace import Trace
from etude.inference.policy import PolicyBase, Weights
from etude.inference.request import Completion
from etude.inference.sampling import Sampling


class ReplayDiverged(EtudeError):
    """A replayed session diverged from its trace."""


class ReplayPolicy(PolicyBase):
    """Repeats the turns of a trace; raises ReplayDiverged if a prompt differs."""

    def __init__(self, trace: Trace) -> None:
        if not trace.exact:
            raise InputError(f"session {trace.id} has no token ids; it cannot be replayed")
        self._turns = iter([step for step in trace.steps if step.kind in ("turn", "summary")])
        self._trace = trace

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        step = next(self._turns, None)
        if step is None:
            raise ReplayDiverged(f"session {self._trace.id} has no more turns, but another one was requested")
        segment, (start, end) = self._trace.segments[step.segment], step.span
        prompt = segment.tokens[:start].tolist()
        if list(tokens) != prompt:
            position = next((i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b), "its end")
            raise ReplayDiverged(
                f"session {self._trace.id}, segment {step.segment}: the prompt differs at token {position}"
            )
        cut = slice(start, end)
        return [
            Completion(
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
        """Do nothing: there is nothing to close."""
