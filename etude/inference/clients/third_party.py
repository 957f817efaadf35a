"""Common parts of the vLLM and SGLang clients: the meaning of reported log-probabilities, weight paths, endings.

Those servers report one log-probability for each token. Whether it belongs to the distribution sampled from or to the
model's own depends on the server; the unknown one is NaN, so that a loss that uses it fails visibly. They also
do not report which weights produced a token: a completion that spans a weight swap gets the older version.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from etude.errors import InputError
from etude.inference.clients.transport import RetryPolicy, Transport
from etude.inference.generate_protocol import InvalidResponse
from etude.inference.policy import PolicyBase, Weights
from etude.inference.request import Ending
from etude.inference.sampling import Sampling
from etude.inference.settings import CachePolicy

LogprobMeaning = Literal["raw", "drawn"]


class ThirdPartyPolicy(PolicyBase):
    """A policy behind the server of another project, which loads weights from a directory."""

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        version: int = 0,
        on_swap: CachePolicy = "keep",
        retry: RetryPolicy | None = None,
    ) -> None:
        self.url, self.on_swap = url.rstrip("/"), on_swap
        self._version = version
        self._transport = Transport(token, retry)

    async def close(self) -> None:
        await self._transport.close()

    async def version(self) -> int:
        return self._version

    async def _call(self, method: str, path: str, **options: Any) -> Any:
        return await self._transport.call(method, path, lambda: self.url, **options)


def both_logprobs(
    reported: Sequence[float], meaning: LogprobMeaning, sampling: Sampling
) -> tuple[list[float], list[float]]:
    """Return log-probabilities under the sampled and under the raw distribution, NaN where unknown."""
    unknown = [math.nan] * len(reported)
    own = sampling.untruncated and sampling.temperature == 1.0  # then both are the same
    if meaning == "raw":
        if sampling.temperature == 0.0:  # the chosen token had probability 1
            return [0.0] * len(reported), list(reported)
        return (list(reported) if own else unknown), list(reported)
    return list(reported), (list(reported) if own else unknown)


def checkpoint_path(weights: Weights, server: str) -> str:
    if not isinstance(weights, str | Path):
        raise InputError(f"{server} loads weights from a checkpoint directory it can read; give a path, not tensors")
    return str(Path(weights).absolute())


def ending_of(reason: Any, where: str) -> Ending:
    endings: dict[str, Ending] = {"stop": "stop", "length": "length", "abort": "cancelled"}
    if reason not in endings:
        raise InvalidResponse(f"{where}: the finish reason is {reason!r}; expected one of {', '.join(endings)}")
    return endings[reason]
