"""What a sampler process needs of the thing that samples: our engine, or another project's server."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from starlette.applications import Starlette

from etude.inference.server import Access, Stoppable
from etude.inference.service import ServiceState, WeightSwap
from etude.weights.versions import Version, WeightState


class SamplerStats(Protocol):
    """Counters of a sampler, reported in its status."""

    @property
    def state(self) -> ServiceState: ...
    @property
    def version(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def swaps(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def preemptions(self) -> int: ...
    @property
    def busy_s(self) -> float: ...


class SamplerService(Stoppable, Protocol):
    """Completes requests, and takes new weights between two steps."""

    @property
    def steps(self) -> int: ...  # grows while it samples

    async def load(self, weights: WeightState, version: int) -> WeightSwap: ...

    def stats(self) -> SamplerStats: ...


class SamplerBackend(ABC):
    """Opens a service with the first weights that the sampler process has found."""

    model: Path  # the directory of the model that the run starts from
    waits_for: str  # while the service opens
    load_s: float  # for the service to take new weights
    close_s: float  # for everything to end

    @abstractmethod
    def start(self) -> None:
        """Load the model, or start the server, before there are weights."""

    @abstractmethod
    def warm_up(self) -> Iterator[bool]:
        """Do work that later steps need, a part for each item that the caller takes."""

    @abstractmethod
    def service(self, first: Version, state: WeightState) -> AbstractAsyncContextManager[SamplerService]:
        """Return a service that has the first weights, as a context manager."""

    @abstractmethod
    def application(self, service: SamplerService, name: str, access: Access) -> Starlette:
        """Return the HTTP application of the service."""

    @abstractmethod
    def close(self) -> None:
        """End what `start` has started."""
