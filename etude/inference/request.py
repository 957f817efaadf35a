"""What the engine is asked for and what it gives back: a prompt, its samples, each token with where it came from."""

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
class Sample:
    """One continuation. All lists are as long as `tokens`; nothing here was ever text in between."""

    tokens: list[int]
    logprobs: list[float]  # under the distribution they were drawn from
    raw_logprobs: list[float]  # under the model's own
    versions: list[int]  # of the weights that made each token
    ending: Ending
    # [prompt and new tokens but the last, moe layers, experts per token]; the last token was never read by the model,
    # and of a cancelled sample only what was read is there
    routing: npt.NDArray[np.unsignedinteger] | None = None
    cached: int = 0  # prompt tokens whose keys and values were there already
    preempted: int = 0  # times it lost its pages and was computed again


@dataclass(eq=False)
class Stream:
    """One sample while it is being made."""

    prompt: list[int]
    sampling: Sampling
    seed: int
    listener: Callable[["Stream", list[int]], None] | None = None  # called with new tokens; once, with [], at the end
    number: int = field(default_factory=lambda: next(_numbers))  # age: lower is older
    leader: "Stream | None" = None  # whose prompt it shares; it starts when that one's prompt is read

    made: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routing: list[npt.NDArray[np.unsignedinteger]] = field(default_factory=list)  # chunks, in order
    routed: int = 0  # tokens they cover

    pages: list[int] = field(default_factory=list)
    read: int = 0  # tokens whose keys and values are in the pages
    published: int = 0  # full pages that others can find
    root: int = 0  # what stands before its first page in the index: of which weights pages may be that it finds
    content: int = 0  # of the last published page
    cached: int = 0
    preempted: int = 0
    ending: Ending | None = None
    cancelled: bool = False

    @property
    def length(self) -> int:
        """Tokens it consists of now."""
        return len(self.prompt) + len(self.made)

    @property
    def unread(self) -> int:
        """Tokens the model has yet to read before it can write the next; 1 while decoding."""
        return self.length - self.read

    @property
    def decoding(self) -> bool:
        return self.unread == 1 and bool(self.made)

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens `start` to `end` of prompt and continuation together."""
        size = len(self.prompt)
        if end <= size:
            return self.prompt[start:end]
        if start >= size:
            return self.made[start - size : end - size]
        return self.prompt[start:] + self.made[: end - size]

    def result(self) -> Sample:
        assert self.ending is not None
        routing = np.concatenate(self.routing) if self.routing else None
        return Sample(
            self.made,
            self.logprobs,
            self.raw_logprobs,
            self.versions,
            self.ending,
            routing,
            self.cached,
            self.preempted,
        )


def streams_of(
    prompt: Sequence[int], sampling: Sampling, listener: Callable[[Stream, list[int]], None] | None = None
) -> list[Stream]:
    """The samples of one prompt: the first reads it, the others wait and share its pages."""
    first = Stream(list(prompt), sampling, sampling.seed, listener)
    others = range(1, sampling.samples)
    return [first, *(Stream(first.prompt, sampling, sampling.seed + i, listener, leader=first) for i in others)]
