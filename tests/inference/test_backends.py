"""Samplers behind servers of vLLM and SGLang: their interfaces as fakes speak them, weight updates, and every fault.

The fakes (`fake_servers.py`) sample with our engine from the weights that they are given, so what a sampler returns is
compared with a forward of the published weights. The real vLLM is in `test_real_vllm.py`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import io
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import patient_http
import pytest
import torch
from asking import fake
from fake_servers import FakeServer, fake_server
from pydantic import ValidationError
from samplers import config_of, running, tiny_model, tiny_tokenizer, until
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import Tensor

from etude.errors import EtudeError, InputError
from etude.inference import server
from etude.inference.backends import relay as relays
from etude.inference.backends.client import ServerAddress, ServerClient, WeightsInUse
from etude.inference.backends.launch import PROGRAMS, Launch, sampler_arguments
from etude.inference.backends.probe import reference_logits
from etude.inference.backends.relay import Relay
from etude.inference.backends.server_backend import CLIENTS, ServerBackend
from etude.inference.backends.weight_files import WeightFiles
from etude.inference.clients.http import HttpPolicy
from etude.inference.clients.transport import RetryPolicy
from etude.inference.generate_protocol import InvalidResponse
from etude.inference.policy import Completion
from etude.inference.sampling import Sampling
from etude.inference.service import EngineBroken
from etude.inference.settings import SamplerRunSettings, SamplerSettings
from etude.kernels import consecutive_gpus
from etude.model.adapters import add_adapters, published_views
from etude.model.checkpoint import checkpoint_views, load, save
from etude.model.config import ModelConfig
from etude.model.peft import write_adapter
from etude.model.settings import LoraSettings
from etude.model.transformer import Transformer
from etude.system.http import bind
from etude.weights.versions import Version

BOTH = pytest.mark.parametrize("program", ["vllm", "sglang"])
PROMPT = [5, 6, 7]
State = dict[str, Tensor]

# --------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"server_python": "/x/python"}, 'server_python would not be used: backend is "etude"'),
        ({"urls": ["http://127.0.0.1:8000"]}, 'urls would not be used: backend is "etude"'),
        ({"backend": "vllm", "drafts": 2}, "drafts would not be used"),
        ({"backend": "vllm", "kv_cache_tokens": 1}, "give its own option in server_arguments"),
        (
            {"backend": "vllm", "weights_directory": "/x"},
            "weights_directory would not be used: the servers are started",
        ),
        ({"backend": "vllm", "urls": ["127.0.0.1:8000"]}, "is not the address of a server"),
        (
            {"backend": "vllm", "urls": ["http://a:1"]},
            "weights_directory is needed: http://a:1 may be on another machine",
        ),
        (
            {"backend": "sglang", "urls": ["http://localhost:1"], "threads": 2},
            "threads would not be used: the servers at",
        ),
        ({"backend": "vllm", "urls": ["http://localhost:1"] * 2}, "names a server twice"),
        ({"backend": "vllm", "urls": ["http://localhost:1"], "count": 2}, "count = 2, but urls has 1"),
        ({"backend": "vllm", "tensor_parallel": 2, "device": "cpu"}, 'needs device = "auto", not "cpu"'),
        ({"backend": "vllm", "server_arguments": ["--gpu_memory_utilization=0.5"]}, "set memory_fraction"),
        ({"backend": "sglang", "server_arguments": ["--tp", "2"]}, "--tp is given by Etude; set tensor_parallel"),
        ({"backend": "vllm", "server_arguments": ["--logprobs-mode=raw_logprobs"]}, "leave it out"),
        ({"backend": "trt"}, "Input should be 'etude', 'vllm' or 'sglang'"),
    ],
)
def test_keys_that_another_kind_of_sampler_would_ignore_are_refused(keys: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValidationError, match=complaint):
        SamplerSettings(**keys)


def test_each_url_is_a_sampler() -> None:
    settings = SamplerSettings(backend="vllm", urls=["http://127.0.0.1:1/", "http://localhost:2"])  # type: ignore[arg-type]
    assert settings.count == 2
    assert sampler_arguments(settings, 1, 4) == ["--url", "http://localhost:2"]


def test_samplers_take_their_gpus_after_the_trainer_s_counted_round(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SamplerSettings(backend="vllm", count=3, tensor_parallel=2)
    assert [sampler_arguments(settings, number, 4)[1] for number in range(3)] == ["4", "6", "8"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert consecutive_gpus("cpu", 0, 1) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert consecutive_gpus("auto", 4, 2) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert consecutive_gpus("auto", 6, 2) == ["6", "7"]
    assert consecutive_gpus("auto", 8, 2) == ["0", "1"]
    assert consecutive_gpus("cuda:3", 6, 1) == ["3"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert consecutive_gpus("auto", 1, 2) == ["7", "5"]
    with pytest.raises(InputError, match="tensor_parallel = 4: a server needs 4 GPUs; this machine has 2"):
        consecutive_gpus("auto", 0, 4)


@BOTH
def test_a_server_is_started_with_the_recipe_s_settings(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"tensor_parallel": 2, "memory_fraction": 0.8, "threads": 3, "server_arguments": ("--extra", "1")}
    settings = SamplerSettings(backend=program, **keys)  # type: ignore[arg-type]
    launch = Launch(Path("/w"), Path("/t"), "bfloat16", ["--port", "1"], True, 12, ("q_proj", "v_proj"))
    command = PROGRAMS[program].command("/x/python", launch, settings)
    assert command[:2] == ["/x/python", "-m"]
    assert command[-2:] == ["--extra", "1"]
    options = dict(itertools.pairwise(command))
    expected = {
        "vllm": {"--tensor-parallel-size": "2", "--gpu-memory-utilization": "0.8", "--max-lora-rank": "16"},
        "sglang": {"--tp-size": "2", "--mem-fraction-static": "0.8", "--max-lora-rank": "12"},
    }
    assert options.items() >= {"--dtype": "bfloat16", "--port": "1", **expected[program]}.items()
    assert "--enable-return-routed-experts" in command
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = PROGRAMS[program].full_environment(settings, ["2", "3"])
    assert (environment["CUDA_VISIBLE_DEVICES"], environment["OMP_NUM_THREADS"]) == ("2,3", "3")


# --------------------------------------------------------------------------------------------------- reading responses

VLLM_CHOICE: dict[str, Any] = {
    "index": 0,
    "finish_reason": "stop",
    "token_ids": [11, 12, 13],
    "logprobs": {"content": [{"token_id": token, "logprob": -token / 10} for token in (11, 12, 13)]},
    "weight_versions": [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 3}],
    "routed_experts": None,
}
SGLANG_META: dict[str, Any] = {
    "finish_reason": {"type": "length", "length": 2},
    "cached_tokens": 1,
    "weight_version": "default",
    "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None]],
}


@contextlib.asynccontextmanager
async def scripted(program: str, response: Any, family: str = "llama") -> AsyncIterator[tuple[ServerClient, list[Any]]]:
    """Give a client of a server that answers every request alike, and what it was asked."""
    asked: list[Any] = []

    async def answer(request: Request) -> Response:
        asked.append(json.loads(await request.body() or b"null"))
        return JSONResponse(response)

    async with fake(answer) as url:
        client = CLIENTS[program](ServerAddress(url), config_of(family))
        try:
            yield client, asked
        finally:
            await client.close()


def completed(program: str, response: Any, sampling: Sampling = Sampling(), family: str = "llama") -> Completion:  # noqa: B008
    async def work() -> Completion:
        async with scripted(program, response, family) as (client, _):
            (found,) = await client.complete(PROMPT, sampling, WeightsInUse(3), "key", routing=True)
            return found

    return asyncio.run(work())


def vllm_answer(**changes: Any) -> Any:
    return {"choices": [{**VLLM_CHOICE, **changes}], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


def sglang_answer(**changes: Any) -> Any:
    return {"meta_info": {**SGLANG_META, **changes}}


def test_vllm_gets_every_parameter_and_labels_every_token() -> None:
    async def work() -> None:
        async with scripted("vllm", vllm_answer()) as (client, asked):
            sampling = Sampling(max_tokens=5, seed=4, temperature=0.5, stop=frozenset({2, 9}))
            (found,) = await client.complete(PROMPT, sampling, WeightsInUse(3), "key", routing=True)
            assert (found.tokens, found.versions, found.cached) == ([11, 12, 13], [3, 3, 4], 2)
            assert (found.logprobs, found.raw_logprobs) == ([-1.1, -1.2, -1.3], None)
            body = asked[-1]
            given = body["sampling_params"]
            assert (body["token_ids"], body["cache_salt"]) == (PROMPT, "key")
            assert (given["stop_token_ids"], given["seed"], given["top_k"], given["logprobs"]) == ([2, 9], 4, 0, 0)

    asyncio.run(work())


def test_sglang_gets_a_seed_for_each_completion() -> None:
    async def work() -> None:
        async with scripted("sglang", sglang_answer()) as (client, asked):
            sampling = Sampling(max_tokens=2, samples=3, seed=5, stop=frozenset({9}))
            found = await client.complete(PROMPT, sampling, WeightsInUse(3), "key", routing=True)
            assert [each.tokens for each in found] == [[11, 12]] * 3
            assert (found[0].logprobs, found[0].versions, found[0].ending) == ([-0.5, -1.5], [3, 3], "length")
            assert found[0].raw_logprobs == found[0].logprobs  # at temperature 1
            assert sorted(body["sampling_params"]["sampling_seed"] for body in asked) == [5, 6, 7]
            assert (asked[0]["input_ids"], asked[0]["extra_key"]) == (PROMPT, "key")
            assert (asked[0]["sampling_params"]["top_k"], asked[0]["sampling_params"]["ignore_eos"]) == (-1, False)
            with pytest.raises(InputError, match="cut by top_k, top_p or min_p"):
                await client.complete(PROMPT, Sampling(top_p=0.5), WeightsInUse(3), "key", routing=True)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("program", "response", "complaint"),
    [
        ("vllm", {}, "choices is missing"),
        ("vllm", vllm_answer(token_ids=None), "token_ids is None"),
        ("vllm", vllm_answer(token_ids=[11, 12]), "not those of the 2 tokens"),
        ("vllm", vllm_answer(logprobs=None), "logprobs is None"),
        ("vllm", vllm_answer(finish_reason="abort"), "finish reason is 'abort'"),
        ("vllm", vllm_answer(weight_versions=None), "weight_versions is None"),
        ("vllm", vllm_answer(weight_versions=[{"version": "default", "start": 0, "end": 3}]), "expected our version"),
        ("vllm", vllm_answer(weight_versions=[{"version": "3", "start": 0, "end": 2}]), "covers 2 of 3 tokens"),
        (
            "vllm",
            vllm_answer(logprobs={"content": [{"token_id": token, "logprob": -9999.0} for token in (11, 12, 13)]}),
            "a log-probability is -9999.0, which no sampled token has",
        ),
        ("sglang", sglang_answer(output_token_logprobs=None), "output_token_logprobs is None"),
        ("sglang", sglang_answer(output_token_logprobs=[[-1.0]]), r"contains \[-1.0\]"),
        ("sglang", sglang_answer(output_token_logprobs=[[None, 5, None]]), "log-probability of token 5 is None"),
        ("sglang", sglang_answer(output_token_logprobs=[[-1.0, 5000, None]]), "token 5000 is not in the vocabulary"),
        ("sglang", sglang_answer(finish_reason=None), "finish_reason is None"),
    ],
)
def test_what_is_missing_or_wrong_is_named(program: str, response: Any, complaint: str) -> None:
    with pytest.raises(InvalidResponse, match=complaint):
        completed(program, response)


def encoded(program: str, experts: np.ndarray[Any, Any]) -> str:
    file = io.BytesIO()
    np.save(file, experts.astype(np.int16))
    return base64.b64encode(file.getvalue() if program == "vllm" else experts.astype(np.int32).tobytes()).decode()


@BOTH
def test_routing_is_that_of_every_token_and_moe_layer_or_refused(program: str) -> None:
    moe = config_of("qwen3_moe").moe
    assert moe is not None
    tokens = 5 if program == "vllm" else 4  # prompt and output but the last
    experts = np.random.default_rng(0).integers(0, moe.experts, (tokens, len(moe.layers), moe.per_token))
    answer = vllm_answer if program == "vllm" else sglang_answer

    def routing(array: np.ndarray[Any, Any]) -> Any:
        return completed(program, answer(routed_experts=encoded(program, array)), family="qwen3_moe").routing

    found = routing(experts)
    assert found.dtype == np.uint8
    assert np.array_equal(found, experts)
    for wrong in (experts[:-1], experts + moe.experts):
        with pytest.raises(InvalidResponse, match="routed_experts is"):
            routing(wrong)
    with pytest.raises(InvalidResponse, match="routed_experts is None"):
        completed(program, answer(routed_experts=None), family="qwen3_moe")


# --------------------------------------------------------------------------------------------------- the probe


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "deepseek_v3"])
@torch.no_grad()
def test_the_reference_forward_is_the_model_s(family: str) -> None:
    model, tokens = tiny_model(family), torch.arange(20)
    found = reference_logits(model.config, checkpoint_views(model).__getitem__, tokens)
    assert torch.equal(found, model(tokens[None])[0])


# --------------------------------------------------------------------------------------------------- whole samplers


def tied_model(directory: Path, **changes: Any) -> Transformer:
    """Save a model whose embedding is its head, as a run would hand it to its samplers."""
    torch.manual_seed(0)
    model = Transformer(config_of("llama", tie_word_embeddings=True, **changes)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    save(model, directory)
    tiny_tokenizer().save(directory)
    return model


def published(model: Transformer, seed: int) -> State:
    """Return what a trainer publishes after a step that moves every matrix."""
    generator = torch.Generator().manual_seed(seed)
    views = published_views(model, torch.bfloat16)
    moved = {
        name: view + 0.1 * torch.randn(view.shape, generator=generator) if view.dim() > 1 else view
        for name, view in views.items()
    }
    return {name: tensor.bfloat16() for name, tensor in moved.items()}


def version(number: int) -> Version:
    return Version(number, None, "", ())


def settings_for(program: str, directory: Path, **sampler: Any) -> SamplerRunSettings:
    table = SamplerSettings(backend=program, weights_directory=directory / "files", **sampler)  # type: ignore[arg-type]
    return SamplerRunSettings(sampler=table, stall_s=20.0)


@dataclasses.dataclass
class Running:
    """A sampler's service on a fake server, and the model that both began with."""

    relay: Relay
    fake: FakeServer
    model: Transformer
    fault: Path

    def check(self, completion: Completion, state: State, sampling: Sampling, prompt: list[int] = PROMPT) -> None:
        """Check that the completion was sampled from these weights, at its temperature."""
        tokens = torch.tensor([*prompt, *completion.tokens])
        logits = reference_logits(self.model.config, state.__getitem__, tokens[:-1])[len(prompt) - 1 :]
        expected = (logits / sampling.temperature).log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-3)


@contextlib.asynccontextmanager
async def sampler(
    program: str, tmp_path: Path, first: State | None = None, served: Path | None = None, **options: Any
) -> AsyncIterator[Running]:
    """Run a sampler's service in front of a fake server, which serves an untied copy of the model."""
    model = tied_model(tmp_path / "model")
    if served is None:
        served = tmp_path / "served"
        save(tiny_model(), served)
    fault = tmp_path / "fault"
    fault.write_text(options.pop("fault", ""))
    fakes = {key: options.pop(key) for key in ("dtype", "logprobs_mode", "device") if key in options}
    async with fake_server(served, fault, **fakes) as (url, server):
        backend = ServerBackend(tmp_path / "model", settings_for(program, tmp_path, urls=[url], **options), 0, url)
        backend.start()
        try:
            async with backend.service(version(1), first or published(model, 1)) as relay:
                assert isinstance(relay, Relay)
                yield Running(relay, server, model, fault)
        finally:
            backend.close()
    assert not any((tmp_path / "files").iterdir()), "files are left"


@BOTH
def test_a_sampler_follows_new_weights_in_the_middle_of_requests(program: str, tmp_path: Path) -> None:
    async def work() -> None:
        async with sampler(program, tmp_path) as s:
            states = {number: published(s.model, number) for number in (1, 2, 3)}
            warm = Sampling(max_tokens=20, temperature=0.7, seed=3)
            (found,) = await s.relay.complete_many(PROMPT, warm)
            assert found.versions == [1] * 20
            s.check(found, states[1], warm)
            before = s.fake.service.stats().output_tokens
            long = asyncio.create_task(s.relay.complete_many(PROMPT, Sampling(max_tokens=300, samples=2)))
            await until(lambda: s.fake.service.stats().output_tokens > before + 20)
            swap = await s.relay.load(states[2], 2)
            assert swap.in_flight == 2
            (found,) = await s.relay.complete_many(PROMPT, warm)
            assert found.versions == [2] * 20
            s.check(found, states[2], warm)
            await s.relay.load(states[3], 3)
            for each in await long:  # nothing is lost, and no token is labelled too new
                assert len(each.tokens) == 300
                assert each.versions[0] == 1
                assert each.versions == sorted(each.versions)
                assert len(set(each.versions)) == (3 if program == "vllm" else 1)
            bad = {**states[3], "model.norm.weight": torch.full_like(states[3]["model.norm.weight"], torch.nan)}
            with pytest.raises(InputError, match="not finite"):
                await s.relay.load(bad, 4)
            (found,) = await s.relay.complete_many(PROMPT, warm)
            assert found.versions == [3] * 20
            assert s.relay.stats().swaps == 3
            assert [path.name for path in s.relay.files.root.iterdir()] == ["version-3"]

    asyncio.run(work())


@BOTH
@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
def test_caches_of_older_weights_are_kept_for_their_sessions_only(program: str, on_swap: str, tmp_path: Path) -> None:
    async def work() -> list[tuple[str, Any]]:
        async with sampler(program, tmp_path, on_swap=on_swap) as s:
            del s.fake.asked[:]
            await s.relay.load(published(s.model, 2), 2)
            for since in (None, 1, 9):
                await s.relay.complete_many(PROMPT, Sampling(max_tokens=1, since=since))
            return s.fake.asked

    asked = [each for each in asyncio.run(work()) if each[0] != "/health"]
    key = "cache_salt" if program == "vllm" else "extra_key"
    keys = [body[key] for path, body in asked if "generate" in path]
    assert keys == ["weights-2", "weights-1" if on_swap == "keep" else "weights-2", "weights-2"]
    updates = [path for path, _ in asked if "generate" not in path]
    if program == "vllm":
        cleared = str(on_swap == "recompute").lower()
        expected = ["/collective_rpc", "/update_weight_version", "/resume"]
        assert updates == [f"/pause?mode=keep&clear_cache={cleared}", *expected]
    else:
        assert updates == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
        assert asked[0][1] == {"mode": "in_place" if on_swap == "keep" else "retract"}
        assert asked[1][1]["flush_cache"] == (on_swap == "recompute")


@BOTH
def test_a_version_that_the_server_goes_back_to_finds_no_caches(program: str, tmp_path: Path) -> None:
    """They are kept by version, and a session that began with the version may have added pages of later weights."""

    async def work() -> list[bool]:
        cleared = []
        async with sampler(program, tmp_path, on_swap="keep") as s:
            for version in (2, 3, 2):
                del s.fake.asked[:]
                await s.relay.load(published(s.model, version), version)
                asked = [each for each in s.fake.asked if each[0] != "/health"]
                cleared.append("clear_cache=true" in asked[0][0] or asked[0][1] == {"mode": "retract"})
        return cleared

    assert asyncio.run(work()) == [False, False, True]


@BOTH
def test_versions_of_adapters_are_loaded_side_by_side(program: str, tmp_path: Path) -> None:
    async def work() -> None:
        base = tied_model(tmp_path / "base")
        adapted = add_adapters(base, LoraSettings(rank=4, alpha=8.0), seed=0)
        directory = tmp_path / "model"
        directory.mkdir()
        write_adapter(adapted, directory, "../base")
        tiny_tokenizer().save(directory)

        def adapters(seed: int) -> State:
            generator = torch.Generator().manual_seed(seed)
            views = published_views(adapted, torch.bfloat16)
            return {
                name: (0.2 * torch.randn(view.shape, generator=generator)).bfloat16() for name, view in views.items()
            }

        async with fake_server(tmp_path / "base") as (url, fake_):
            backend = ServerBackend(directory, settings_for(program, tmp_path, urls=[url]), 0, url)
            backend.start()
            start = published_views(adapted, torch.bfloat16)  # no update yet: the base model
            async with backend.service(version(0), start) as relay:
                assert isinstance(relay, Relay)
                warm, read = Sampling(max_tokens=20, temperature=0.7), backend.files.reader
                long = asyncio.create_task(relay.complete_many(PROMPT, Sampling(max_tokens=200)))
                await until(lambda: relay.open_sequences)
                for number in (1, 2):
                    await relay.load(adapters(number), number)
                assert set(fake_.adapters) == {"control", "policy-0", "policy-2"}
                (found,) = await relay.complete_many(PROMPT, warm)
                tokens = torch.tensor([*PROMPT, *found.tokens])
                logits = reference_logits(base.config, read(adapters(2)), tokens[:-1])[len(PROMPT) - 1 :]
                expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0]
                assert found.logprobs == pytest.approx(expected.tolist(), abs=1e-3)
                assert set(found.versions) == {2}
                (old,) = await long
                assert set(old.versions) == {0}, "a request keeps its adapter"
                await relay.load(adapters(3), 3)
                assert set(fake_.adapters) == {"control", "policy-3"}
            backend.close()

    asyncio.run(work())


def test_the_pool_s_client_sees_our_protocol(tmp_path: Path) -> None:
    async def work() -> None:
        async with sampler("vllm", tmp_path) as s:
            with bind("127.0.0.1", 0) as listener:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                async with running(s.relay.application(server.Access("a-token-for-tests")), listener):
                    policy = HttpPolicy(url, "a-token-for-tests", retry=RetryPolicy(timeout=60, attempts=1))
                    one = await policy.complete(PROMPT, Sampling(max_tokens=3, temperature=0.5), session="s")
                    assert (len(one.tokens), one.versions, one.raw_logprobs) == (3, [1, 1, 1], None)
                    assert await policy.version() == 1
                    with pytest.raises(EtudeError, match="whole completions only"):
                        await policy.complete_streaming(PROMPT, Sampling(max_tokens=3), lambda tokens: None)
                    with pytest.raises(EtudeError, match=r"400: .*maximum context length"):
                        await policy.complete(PROMPT, Sampling(max_tokens=5000))
                    async with patient_http.open_client() as client:
                        assert (await client.get(f"{url}/health")).json()["version"] == 1
                        assert (await client.get(f"{url}/weights")).status_code == 401
                    await policy.close()

    asyncio.run(work())


# --------------------------------------------------------------------------------------------------- faults


def refused(program: str, tmp_path: Path, **options: Any) -> str:
    """Return why a sampler refuses its server."""

    async def work() -> None:
        async with sampler(program, tmp_path, **options):
            raise AssertionError("it was not refused")

    with pytest.raises(InputError) as found:
        asyncio.run(work())
    assert "\n" not in str(found.value)
    return str(found.value)


@BOTH
def test_a_server_that_samples_from_other_weights_than_it_was_given_is_refused(program: str, tmp_path: Path) -> None:
    said = refused(program, tmp_path, fault="stale_head")
    assert "with random weights samples from something else: its log-probabilities differ" in said


@BOTH
def test_a_server_that_ignores_new_weights_is_refused_even_if_it_has_those_of_the_run(
    program: str, tmp_path: Path
) -> None:
    model = tied_model(tmp_path / "start")
    torch.manual_seed(3)
    served = Transformer(dataclasses.replace(model.config, tied=False, source={**model.config.source, **UNTIED})).eval()
    first = published(model, 1)
    views = checkpoint_views(served)
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(first["model.embed_tokens.weight" if name == "lm_head.weight" else name])
    save(served, tmp_path / "same")
    said = refused(program, tmp_path, first=first, served=tmp_path / "same", fault="takes_nothing")
    assert "with random weights samples from something else" in said


UNTIED = {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("program", "options", "complaint"),
    [
        ("vllm", {"fault": "raw_logprobs"}, "reports log-probabilities before temperature; start vLLM 0.32 or newer"),
        ("sglang", {"fault": "raw_logprobs"}, "reports log-probabilities before temperature"),
        ("vllm", {"logprobs_mode": "raw_logprobs"}, "start it with --logprobs-mode processed_logprobs"),
        ("vllm", {"dtype": "torch.bfloat16"}, "computes in bfloat16, but precision is float32"),
        ("sglang", {"dtype": "bfloat16"}, "computes in bfloat16, but precision is float32"),
        ("vllm", {"fault": "no_dev_mode"}, "VLLM_SERVER_DEV_MODE=1"),
        ("vllm", {"fault": "refuses"}, "does not load weights of this run's model: .*cannot be loaded"),
        ("sglang", {"fault": "refuses"}, "does not load weights of this run's model: .*cannot be loaded"),
    ],
)
def test_a_server_that_is_started_wrongly_is_refused_in_one_line(
    program: str, options: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    assert re.search(complaint, refused(program, tmp_path, **options))


@pytest.mark.parametrize(
    ("program", "changes", "complaint"),
    [
        ("vllm", {"vocab_size": 400}, "it serves a model with vocab_size 400; this run's model has 330"),
        ("sglang", {"vocab_size": 400}, "does not load weights of this run's model: .*shapes differ"),
    ],
)
def test_a_server_of_another_model_is_refused_in_one_line(
    program: str, changes: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    save(Transformer(config_of("llama", **changes)), tmp_path / "other")
    assert re.search(complaint, refused(program, tmp_path, served=tmp_path / "other"))


def test_a_server_of_another_architecture_is_refused(tmp_path: Path) -> None:
    save(tiny_model("qwen3"), tmp_path / "other")
    assert "family 'qwen3'; this run's model has 'llama'" in refused("vllm", tmp_path, served=tmp_path / "other")
    (tmp_path / "again").mkdir()
    said = refused("sglang", tmp_path / "again", served=tmp_path / "other")
    assert "it serves a model of type 'qwen3'" in said


def broken(tmp_path: Path, fault: str, act: Callable[[Running], Any], monkeypatch: pytest.MonkeyPatch) -> str:
    """Return how a sampler breaks when its server has a fault while it does something."""
    monkeypatch.setattr(relays, "WATCH_S", 0.05)

    async def work() -> str:
        async with sampler("vllm", tmp_path) as s:
            s.fault.write_text(fault)
            await act(s)
            async with asyncio.timeout(60):
                while s.relay.failure is None:
                    await asyncio.sleep(0.01)
            with pytest.raises(EngineBroken):
                await s.relay.complete_many(PROMPT, Sampling(max_tokens=1))
            s.fault.write_text("")
            return str(s.relay.failure)

    return asyncio.run(work())


def test_a_server_that_refuses_later_weights_breaks_the_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def update(s: Running) -> None:
        long = asyncio.create_task(s.relay.complete_many(PROMPT, Sampling(max_tokens=1900)))
        await until(lambda: s.relay.open_sequences)
        with pytest.raises(EngineBroken, match="did not take version 2"):
            await s.relay.load(published(s.model, 2), 2)
        with pytest.raises(EngineBroken):  # what runs fails at once, and is sent to another sampler
            await long

    assert "did not take version 2: " in broken(tmp_path, "refuses", update, monkeypatch)


def test_a_server_that_answers_nonsense_breaks_the_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(s: Running) -> None:
        for _ in range(relays.MAX_NONSENSE):
            with pytest.raises(InvalidResponse):
                await s.relay.complete_many(PROMPT, Sampling(max_tokens=1))

    assert "5 invalid responses in a row; the last: " in broken(tmp_path, "nonsense", ask, monkeypatch)


def test_tokens_of_a_version_that_was_not_loaded_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(s: Running) -> None:
        for _ in range(relays.MAX_NONSENSE):
            with pytest.raises(InvalidResponse, match="tokens of version 99, which was not loaded"):
                await s.relay.complete_many(PROMPT, Sampling(max_tokens=1))

    assert "tokens of version 99" in broken(tmp_path, "too_new", ask, monkeypatch)


def test_a_server_that_hangs_breaks_the_sampler_and_its_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.inference.backends.client.HEALTH_S", 0.2)

    async def ask(s: Running) -> None:
        with pytest.raises(EngineBroken, match="health checks failed"):
            await s.relay.complete_many(PROMPT, Sampling(max_tokens=1))

    assert f"{relays.MAX_MISSED} health checks failed: " in broken(tmp_path, "hangs", ask, monkeypatch)


def test_a_config_written_for_a_server_has_a_head_of_its_own(tmp_path: Path) -> None:
    model = tied_model(tmp_path / "model")
    files = WeightFiles(tmp_path / "model", tmp_path / "files")
    state = published(model, 1)
    copy = load(files.write("version-1", state), dtype=torch.float32)
    assert not ModelConfig.load(files.root / "version-1").tied
    tokens = torch.arange(20)
    with torch.no_grad():
        assert torch.equal(copy(tokens[None])[0], reference_logits(model.config, state.__getitem__, tokens))
    control = files.control(torch.bfloat16)
    assert {name: tensor.shape for name, tensor in control.items()} == {n: t.shape for n, t in state.items()}
