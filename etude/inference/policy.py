"""The contract between whoever samples and whoever needs samples: token ids in, token ids out.

A `Policy` is a model somewhere: in this process, behind our server, behind vLLM or SGLang. Nothing in training ever
re-tokenizes what a model wrote, so there is no text here. To write a new one, implement `samples`, `load` and
`version`, and take `sample` from `OneSample`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from etude.errors import InputError
from etude.inference.request import Ending, Sample
from etude.inference.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Ending", "OneSample", "Policy", "Sample", "Sampling", "Watch", "Weights"]

# Tensors by name, or a checkpoint directory that the sampler can read.
Weights: TypeAlias = "Mapping[str, Tensor] | Path | str"
Watch: TypeAlias = Callable[[Sequence[int]], None]  # told new tokens as they are made


class Policy(Protocol):
    """A model that continues prompts."""

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> Sample:
        """One continuation. Turns with the same `session` go where their cache is. Cancelling the task cancels it."""
        ...

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        """`sampling.samples` continuations of one prompt."""
        ...

    async def watched(self, tokens: Sequence[int], sampling: Sampling, watch: Watch, *, session: str = "") -> Sample:
        """`sample`, while somebody watches; where tokens cannot be had before the end, all of them are told then."""
        ...

    async def load(self, weights: Weights, version: int) -> None:
        """New weights; when it returns, new tokens are of `version`. Requests in flight go on."""
        ...

    async def version(self) -> int:
        """Of the weights that make new tokens; of several samplers, the oldest."""
        ...

    async def close(self) -> None:
        """Let go of connections; what runs is cancelled."""
        ...


class OneSample:
    """`sample` and `watched` by `samples`."""

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        raise NotImplementedError

    async def sample(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> Sample:
        check_single(sampling)
        (one,) = await self.samples(tokens, sampling, session=session)
        return one

    async def watched(self, tokens: Sequence[int], sampling: Sampling, watch: Watch, *, session: str = "") -> Sample:
        one = await self.sample(tokens, sampling, session=session)
        watch(one.tokens)
        return one


def check_single(sampling: Sampling) -> None:
    """Refuse to give one sample to who asks for several."""
    if sampling.samples != 1:
        raise InputError(f"sample gives one sample, but sampling.samples is {sampling.samples}; call samples")
