"""A policy in this process, around an `EngineService`."""

from collections.abc import Sequence

from etude.inference.policy import PolicyBase, TokenCallback, Weights, check_single
from etude.inference.request import Completion
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService


class InProcessPolicy(PolicyBase):
    """Completes with a service that the caller opens and closes."""

    def __init__(self, service: EngineService) -> None:
        self.service = service

    async def complete_many(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Completion]:
        return await self.service.complete_many(tokens, sampling)

    async def complete_streaming(
        self, tokens: Sequence[int], sampling: Sampling, on_tokens: TokenCallback, *, session: str = ""
    ) -> Completion:
        check_single(sampling)
        async with await self.service.submit(tokens, sampling, streaming=True) as generation:
            async for delta in generation.deltas():
                on_tokens(delta.tokens)
            (completion,) = await generation.completions()
            return completion

    async def load(self, weights: Weights, version: int) -> None:
        await self.service.load(weights, version)

    async def version(self) -> int:
        return self.service.version

    async def close(self) -> None:
        """Do nothing: the caller closes the service."""
