"""The interface of another project's server, as a sampler needs it.

Such a server reports one log-probability for each token: that of the distribution the token was sampled from (the
launch options of `launch.py` see to it). The model's own is known only where both are the same.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from etude.errors import InputError
from etude.inference.clients.transport import RetryPolicy, ServerError, Transport
from etude.inference.generate_protocol import InvalidResponse
from etude.inference.known_routing import Routing
from etude.inference.request import Completion, Ending
from etude.inference.sampling import Sampling
from etude.model.config import ModelConfig

HEALTH_S = 10.0  # for the answer to a health check
ENDINGS: dict[str, Ending] = {"stop": "stop", "length": "length"}
UNKNOWN_LOGPROB = -9999.0  # vLLM's word for NaN and minus infinity


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is, and the token it wants."""

    url: str
    token: str = ""
    unix_socket: str = ""


@dataclass(frozen=True)
class WeightsInUse:
    """What a request is sampled with: the version, and the adapter that holds it if the run trains adapters."""

    version: int  # -1: weights that are no version
    adapter: str = ""


class ServerClient(ABC):
    """A server of vLLM or SGLang that serves this model."""

    program: ClassVar[str]
    advice: ClassVar[str]  # how a server that we did not start has to be started

    def __init__(self, address: ServerAddress, config: ModelConfig, load_s: float = 600.0) -> None:
        self.url, self.config = address.url, config
        self.max_length = config.max_length  # tokens of a sequence; `check` finds out whether the server allows fewer

        def transport(policy: RetryPolicy) -> Transport:
            return Transport(address.token, policy, unix_socket=address.unix_socket)

        self._transport = transport(RetryPolicy(attempts=1))
        self._control = transport(RetryPolicy(attempts=1, timeout=load_s))
        self._health = transport(RetryPolicy(attempts=1, timeout=HEALTH_S))

    async def close(self) -> None:
        for transport in (self._transport, self._control, self._health):
            await transport.close()

    @abstractmethod
    async def check(self, precision: str) -> None:
        """Raise InputError if the server is not one that can sample for this model."""

    @abstractmethod
    async def complete(
        self, tokens: Sequence[int], sampling: Sampling, weights: WeightsInUse, cache_key: str, routing: bool
    ) -> list[Completion]:
        """Return completions. Cached keys and values are shared with requests of the same `cache_key` only."""

    @abstractmethod
    async def load(self, directory: Path, version: int, recompute: bool) -> None:
        """Replace the weights between two steps. Running requests go on; their caches are kept or recomputed."""

    @abstractmethod
    async def load_adapter(self, directory: Path, name: str) -> None:
        """Load an adapter beside those that it has."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no request uses."""

    @abstractmethod
    async def progress(self) -> tuple[float, ...]:
        """Return counters that change while the server samples; an error if it is not healthy."""

    async def is_ready(self) -> bool:
        """Return whether the server answers, once it has loaded its model."""
        try:
            await self._health.call("GET", "/health", lambda: self.url)
        except ServerError as error:
            return error.status < 500  # a refusal: `check` says why
        return True

    async def _counters(self, *names: str) -> tuple[float, ...]:
        """Return the sums of metrics in Prometheus' format by name."""
        await self._health.call("GET", "/health", lambda: self.url)
        text = await self._health.text("/metrics", lambda: self.url)
        sums = dict.fromkeys(names, 0.0)
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name in sums:
                sums[name] += float(value)
        return tuple(sums.values())

    def _completion(
        self,
        tokens: list[int],
        reported: Sequence[float],
        versions: list[int],
        ending: object,
        sampling: Sampling,
        routing: Routing | None,
        cached: int,
        where: str,
    ) -> Completion:
        if not isinstance(ending, str) or ending not in ENDINGS:
            raise InvalidResponse(f"{where}: the finish reason is {ending!r}; expected one of {', '.join(ENDINGS)}")
        size = self.config.vocab_size
        if bad := [token for token in tokens if not 0 <= token < size]:
            raise InvalidResponse(f"{where}: token {bad[0]} is not in the vocabulary of {size:,}")
        if bad_logprobs := [each for each in reported if not UNKNOWN_LOGPROB < each <= 1e-3]:
            raise InvalidResponse(f"{where}: a log-probability is {bad_logprobs[0]}, which no sampled token has")
        drawn, raw = both_logprobs(reported, sampling)
        return Completion(tokens, drawn, raw, versions, ENDINGS[ending], routing, cached)

    def _check_routing(self, array: npt.NDArray[Any], tokens: int, where: str) -> Routing:
        """Return experts in the smallest type, checked to be those of every token and MoE layer."""
        moe = self.config.moe
        assert moe is not None
        expected = (tokens, len(moe.layers), moe.per_token)
        if array.shape != expected or (array.size and not 0 <= array.min() <= array.max() < moe.experts):
            raise InvalidResponse(
                f"{where}: routed_experts is {list(array.shape)}; expected {list(expected)} of {moe.experts} experts"
            )
        return array.astype(np.uint8 if moe.experts <= 256 else np.uint16)


def both_logprobs(reported: Sequence[float], sampling: Sampling) -> tuple[list[float], list[float] | None]:
    """Return log-probabilities under the distribution sampled from, which the server reports, and the model's own."""
    found = [min(0.0, each) for each in reported]
    if sampling.temperature == 0.0:  # the chosen token had probability 1, and the model's own is reported
        return [0.0] * len(found), found
    return found, found if sampling.untruncated and sampling.temperature == 1.0 else None


def same_architecture(config: ModelConfig, other: ModelConfig, where: str) -> None:
    """Raise InputError if a server's model is not of this architecture and these sizes."""
    for name in ("family", "vocab_size", "hidden_size", "layers"):
        own, found = getattr(config, name), getattr(other, name)
        if own != found:
            raise InputError(f"{where}: it serves a model with {name} {found!r}; this run's model has {own!r}")
