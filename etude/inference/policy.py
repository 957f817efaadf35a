"""The `Policy` contract: token ids in, token ids out, from a model in this process or behind a server.

There is no text here, because nothing in training re-tokenizes what a model wrote. To write a new policy, subclass
`PolicyBase` and implement `complete_many`, `load`, `version` and `close`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias

from etude.errors import InputError
from etude.inference.request import Completion, Ending
from etude.inference.sampling import Sampling

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Completion", "Ending", "Policy", "PolicyBase", "Sampling", "TokenCallback", "Weights"]

# Tensors by name, or a checkpoint directory that the sampler can read.
Weights: TypeAlias = "Mapping[str, Tensor] | Path | str"
TokenCallback: TypeAlias = Callable[[Sequence[int]], None]  # called with new tokens as they are generated


class Policy(Protocol):
    """A model that completes prompts."""

    async def complete(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        """Return one completion. Calls with the same `session` go to the sampler that has its cache. Cancelling the
        task cancels the request."""
        ...

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        """Return `sampling.samples` completions of one prompt."""
        ...

    async def complete_streaming(
        self, tokens: Sequence[int], sampling: Sampling, on_tokens: TokenCallback, *, session: str = ""
    ) -> Completion:
        """Return one completion; `on_tokens` gets its tokens as they come, or at the end if they cannot be streamed."""
        ...

    async def load(self, weights: Weights, version: int) -> None:
        """Load weights; when this returns, new tokens are of `version`. Requests in flight go on."""
        ...

    async def version(self) -> int:
        """Return the version of the weights that produce new tokens; the oldest of several samplers."""
        ...

    async def close(self) -> None:
        """Close connections and cancel what runs."""
        ...


class PolicyBase:
    """`complete` and `complete_streaming` in terms of `complete_many`."""

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        raise NotImplementedError

    async def complete(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> Completion:
        check_single(sampling)
        (completion,) = await self.complete_many(tokens, sampling, session=session)
        return completion

    async def complete_streaming(
        self, tokens: Sequence[int], sampling: Sampling, on_tokens: TokenCallback, *, session: str = ""
    ) -> Completion:
        completion = await self.complete(tokens, sampling, session=session)
        on_tokens(completion.tokens)
        return completion


def check_single(sampling: Sampling) -> None:
    """Raise InputError if more than one completion is asked for."""
    if sampling.samples != 1:
        raise InputError(
            f"complete returns one completion, but sampling.samples is {sampling.samples}; call complete_many"
        )
