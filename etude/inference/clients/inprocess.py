"""A policy in this process: the engine's own service, without a wire in between."""

from collections.abc import Sequence

from etude.inference.policy import OneSample, Watch, Weights, check_single
from etude.inference.request import Sample
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService


class InProcess(OneSample):
    """Samples from a service that somebody else opened and will close."""

    def __init__(self, service: EngineService) -> None:
        self.service = service

    async def samples(self, tokens: Sequence[int], sampling: Sampling, *, session: str = "") -> list[Sample]:
        return await self.service.sample(tokens, sampling)

    async def watched(self, tokens: Sequence[int], sampling: Sampling, watch: Watch, *, session: str = "") -> Sample:
        check_single(sampling)
        async with await self.service.submit(tokens, sampling, streaming=True) as generation:
            async for piece in generation.pieces():
                watch(piece.tokens)
            (one,) = await generation.samples()
            return one

    async def load(self, weights: Weights, version: int) -> None:
        await self.service.load(weights, version)

    async def version(self) -> int:
        return self.service.version

    async def close(self) -> None:
        """The service is not ours to close."""
