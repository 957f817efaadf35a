"""A sampler with an engine in its own process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from starlette.applications import Starlette

from etude.inference import server
from etude.inference.backends.backend import SamplerBackend, SamplerService
from etude.inference.engine import open_engine
from etude.inference.service import EngineService
from etude.inference.settings import SamplerRunSettings
from etude.kernels import choose_gpu
from etude.weights.versions import Version, WeightState

LOAD_S = 120.0  # for the engine to take new weights between two steps
CLOSE_S = 5.0  # for connections to close at the end


class EngineBackend(SamplerBackend):
    """Our engine, with the model that the run started from until the first version replaces its weights."""

    waits_for, load_s, close_s = "the engine", LOAD_S, CLOSE_S

    def __init__(self, model: Path, settings: SamplerRunSettings, gpu: int) -> None:
        self.model, self.settings, self.gpu = model, settings, gpu

    def start(self) -> None:
        sampler = self.settings.sampler
        choose_gpu(sampler.device, self.gpu)
        if sampler.threads:
            torch.set_num_threads(sampler.threads)
        dtype = getattr(torch, self.settings.precision)
        self.engine = open_engine(self.model, sampler, dtype=dtype, device=sampler.device)

    def warm_up(self) -> Iterator[bool]:
        return self.engine.warm_up()

    @asynccontextmanager
    async def service(self, first: Version, state: WeightState) -> AsyncIterator[SamplerService]:
        self.engine.load(state, first.number)
        async with EngineService(self.engine) as service:
            yield service

    def application(self, service: SamplerService, name: str, access: server.Access) -> Starlette:
        assert isinstance(service, EngineService)
        return server.app(service, server.ServedModel.of(name, self.engine.tokenizer), access)

    def close(self) -> None:
        """Do nothing: the engine ends with the process."""
