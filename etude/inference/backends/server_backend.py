"""A sampler whose engine is a server of vLLM or SGLang: one that it starts, or one at an address that it is given.

Such a server first gets random weights, then the first version, and is probed after both: it is refused unless its
log-probabilities are those of our forward. A tensor that an update does not reach is then found, even if the server had
nearly the right values before.
"""

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import torch
from starlette.applications import Starlette
from torch import Tensor

from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError, InputError
from etude.inference import server
from etude.inference.backends import probe
from etude.inference.backends.backend import SamplerBackend, SamplerService
from etude.inference.backends.child import ChildServer
from etude.inference.backends.client import ServerAddress, ServerClient, WeightsInUse
from etude.inference.backends.launch import PROGRAMS, Launch, ServerFailed
from etude.inference.backends.relay import Relay
from etude.inference.backends.sglang import SglangClient
from etude.inference.backends.vllm import VllmClient
from etude.inference.backends.weight_files import CONTROL, WeightFiles
from etude.inference.generate_protocol import InvalidResponse
from etude.inference.settings import SamplerRunSettings
from etude.kernels import consecutive_gpus
from etude.model.peft import read_lora_settings
from etude.weights.versions import Version, WeightState

CLIENTS: Mapping[str, type[ServerClient]] = {"vllm": VllmClient, "sglang": SglangClient}
TOKEN_VARIABLE = "ETUDE_SAMPLER_TOKEN"  # of the environment: what a server at a given address wants
LOOPBACK = "127.0.0.1"
POLL_S = 0.5
CLOSE_S = 15.0  # for connections to close, and then for a server to end
MAX_SOCKET_PATH = 100  # the kernel allows 107 bytes


class ServerBackend(SamplerBackend):
    """A server that this process starts or, with `url`, one that runs already. `routing`: MoE models return experts."""

    def __init__(
        self, model: Path, settings: SamplerRunSettings, gpu: int = 0, url: str = "", routing: bool = False
    ) -> None:
        self.model, self.settings, self.gpu, self.url, self.routing = model, settings, gpu, url, routing
        self.sampler = settings.sampler
        self.program = PROGRAMS[self.sampler.backend]
        self.load_s, self.waits_for = settings.stall_s, self.program.name + (f" at {url}" if url else "")
        self.close_s = CLOSE_S
        self.dtype = getattr(torch, settings.weights.dtype)
        self.child: ChildServer | None = None

    def start(self) -> None:
        if self.sampler.threads:
            torch.set_num_threads(self.sampler.threads)  # for the forward of the probe
        self.files = WeightFiles(self.model, self.sampler.weights_directory)
        control = self.files.write_control(self.dtype)
        if self.url:
            self.address = ServerAddress(self.url, os.environ.get(TOKEN_VARIABLE, ""))
            self.child = ChildServer(self.program.name, self.files.root, [], os.environ)  # removes the files at the end
            return
        self.address, options = self._own_address()
        adapted = self.files.adapters
        launch = Launch(
            self.files.base or control,
            self.model,
            self.settings.precision,
            options,
            self.routing and self.files.config.moe is not None,
            read_lora_settings(self.model).rank if adapted else None,
            self.files.adapted_modules() if adapted else (),
        )
        command = self.program.command(self.sampler.server_python or sys.executable, launch, self.sampler)
        gpus = consecutive_gpus(self.sampler.device, self.gpu, self.sampler.tensor_parallel)
        environment = self.program.full_environment(self.sampler, gpus)
        self.child = ChildServer(self.program.name, self.files.root, command, environment)

    def _own_address(self) -> tuple[ServerAddress, list[str]]:
        """Return where our server listens, and the options that say so to it."""
        if self.sampler.backend == "vllm":
            # A socket in our directory: vLLM's endpoints for weights know no token.
            path = str(self.files.root / "socket")
            if len(path) > MAX_SOCKET_PATH:
                raise InputError(f"{path}: too long for the name of a socket; give TMPDIR a shorter name")
            return ServerAddress("http://localhost", unix_socket=path), ["--uds", path]
        with socket.create_server((LOOPBACK, 0)) as free:
            port = free.getsockname()[1]
        return ServerAddress(f"http://{LOOPBACK}:{port}"), ["--host", LOOPBACK, "--port", str(port)]

    def warm_up(self) -> Iterator[bool]:
        return iter(())

    @asynccontextmanager
    async def service(self, first: Version, state: WeightState) -> AsyncIterator[SamplerService]:
        client = CLIENTS[self.sampler.backend](self.address, self.files.config, self.load_s)
        try:
            await self._until_ready(client)
            await client.check(self.settings.precision)
            async with Relay(client, self.files, self.sampler.on_swap, self.routing, self._problem) as relay:
                await self._load_first(relay, first.number, state)
                yield relay
        finally:
            await client.close()

    async def _until_ready(self, client: ServerClient) -> None:
        deadline, problem = time.monotonic() + self.settings.stall_s, "it does not answer"
        while time.monotonic() < deadline:
            if ended := self._problem():
                raise ServerFailed(f"{self.waits_for}: {ended}")
            try:
                if await client.is_ready():
                    return
            except EtudeError as error:
                problem = str(error)
            await asyncio.sleep(POLL_S)
        raise ServerFailed(f"{self.waits_for} was not ready after rl.stall_s = {self.settings.stall_s:g} s: {problem}")

    async def _load_first(self, relay: Relay, number: int, state: WeightState) -> None:
        """Load random weights, unless the server has started with them, and the first version; probe both."""
        if self.files.adapters:
            await self._load_control(relay.client.load_adapter(self.files.root / CONTROL, CONTROL))
        elif self.url:
            await self._load_control(relay.client.load(self.files.root / CONTROL, 0, recompute=True))
        control = WeightsInUse(-1, CONTROL if self.files.adapters else "")
        found = await self._probe(relay.client, self.files.control(self.dtype), control)
        self._check_agreement(found, "with random weights")
        await relay.load(state, number)
        found = await self._probe(relay.client, state, WeightsInUse(-1, relay.adapter))
        self._check_agreement(found, f"with the weights of version {number}")

    async def _load_control(self, loading: Coroutine[None, None, None]) -> None:
        try:
            await loading
        except EtudeError as error:
            advice = "it must serve this run's architecture and vocabulary, and read the same directory"
            raise InputError(f"{self.waits_for} does not load weights of this run's model: {error}; {advice}") from None

    def _check_agreement(self, found: probe.Agreement, when: str) -> None:
        if found.good:
            return
        if found.raw_difference <= found.limit:
            wrong = f"reports log-probabilities before temperature; {CLIENTS[self.sampler.backend].advice}"
        else:
            wrong = (
                f"{when} samples from something else: its log-probabilities differ from Etude's forward by "
                f"{found.difference:.3g} nats on average, over the limit of {found.limit:g}"
            )
        raise InputError(f"{self.waits_for} {wrong}")

    async def _probe(self, client: ServerClient, weights: Mapping[str, Tensor], used: WeightsInUse) -> probe.Agreement:
        prompt = Tokenizer.load(self.model).encode(probe.PROMPT)
        key = f"probe-{time.monotonic_ns()}"  # shares no cache
        try:
            (completion,) = await client.complete(prompt, probe.SAMPLING, used, key, self.routing)
        except InvalidResponse as error:
            experts = "; experts need its option --enable-return-routed-experts" if self.routing else ""
            raise InputError(f"{self.waits_for} cannot be used: {error}{experts}") from None
        read = self.files.reader(weights)
        return await asyncio.to_thread(
            probe.compare, self.files.config, read, prompt, completion, self.settings.precision
        )

    def _require(self, good: bool, found: probe.Agreement, when: str) -> None:
        raise NotImplementedError

    def _problem(self) -> str:
        return self.child.problem() if self.child is not None else ""

    def application(self, service: SamplerService, name: str, access: server.Access) -> Starlette:
        assert isinstance(service, Relay)
        return service.application(access)

    def close(self) -> None:
        if self.child is not None:
            self.child.stop()
