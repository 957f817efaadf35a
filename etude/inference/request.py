"""Requests inside the engine: a completion as it is returned, and a sequence while it is generated."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from etude.inference.sampling import Sampling

Ending = Literal["stop", "length", "cancelled"]
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Completion:
    """One completion of a prompt. All lists are as long as `tokens`; nothing was converted to text in between."""

    tokens: list[int]
    logprobs: list[float]  # under the distribution the tokens were sampled from
    raw_logprobs: list[float] | None  # under the model's own distribution; None: the sampler does not report them
    versions: list[int]  # weight version that produced each token
    ending: Ending
    # [prompt and output tokens but the last, moe layers, experts per token]; the last token never went through the
    # model, and a cancelled completion has only what was computed
    routing: npt.NDArray[np.unsignedinteger] | None = None
    cached: int = 0  # prompt tokens found in the prefix cache
    preempted: int = 0  # times it lost its pages and was computed again


@dataclass(eq=False)
class SequenceState:
    """One completion while it is generated."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    listener: Callable[["SequenceState", list[int]], None] | None = None  # gets new tokens, and [] once at the end
    number: int = field(default_factory=lambda: next(_numbers))  # arrival order: lower is older
    leader: "SequenceState | None" = None  # has the same prompt; this one starts when the leader's prompt is computed

    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routing: list[npt.NDArray[np.unsignedinteger]] = field(default_factory=list)  # arrays to concatenate, in order
    routed: int = 0  # tokens they cover
    loads: int = 0  # weights loaded by the scheduler before it last started

    pages: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose keys and values are in the pages
    published: int = 0  # full pages in the prefix index
    prefix_root: int = 0  # decides which weights the cached pages it finds may come from
    prefix_id: int = 0  # of the last published page
    cached: int = 0
    preempted: int = 0
    ending: Ending | None = None
    cancelled: bool = False

    @property
    def length(self) -> int:
        """Return the number of prompt and output tokens so far."""
        return len(self.prompt) + len(self.output)

    @property
    def uncomputed(self) -> int:
        """Return the number of tokens to compute before the next can be sampled; 1 while decoding."""
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        return self.uncomputed == 1 and bool(self.output)

    def tokens(self, start: int, end: int) -> list[int]:
        """Return tokens `start` to `end` of prompt and output together."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[start:end]
        if start >= size:
            return self.output[start - size : end - size]
        return self.prompt[start:] + self.output[: end - size]

    def result(self) -> Completion:
        assert self.ending is not None
        routing = np.concatenate(self.routing) if self.routing else None
        return Completion(
            self.output,
            self.logprobs,
            self.raw_logprobs,
            self.versions,
            self.ending,
            routing,
            self.cached,
            self.preempted,
        )


def make_sequences(
    prompt: Sequence[int], sampling: Sampling, listener: Callable[[SequenceState, list[int]], None] | None = None
) -> list[SequenceState]:
    """Return `sampling.samples` sequences of one prompt: the first computes it, the others wait and share its pages."""
    first = SequenceState(list(prompt), sampling, sampling.seed, listener)
    others = range(1, sampling.samples)
    return [first, *(SequenceState(first.prompt, sampling, sampling.seed + i, listener, leader=first) for i in others)]
