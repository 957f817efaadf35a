"""Etude's clients against Etude's server, and against invalid responses."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from asking import QUICK, TOKEN, fake
from samplers import NAME, parrot, serving, tiny_engine, tiny_model, until
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import etude
from etude.errors import EtudeError, InputError
from etude.inference.clients.http import HttpPolicy
from etude.inference.clients.inprocess import InProcessPolicy
from etude.inference.clients.openai import OpenAIChat
from etude.inference.clients.transport import ServerError, ServerUnreachable
from etude.inference.generate_protocol import InvalidResponse, routing_from_json
from etude.inference.policy import Policy
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService
from etude.model import save
from etude.model.checkpoint import checkpoint_views

# --------------------------------------------------------------------------------------------------- our own


def test_every_client_is_a_policy() -> None:
    def check(policy: Policy) -> Policy:
        return policy

    async def work() -> None:
        async with EngineService(tiny_engine()) as service:
            for policy in (check(InProcessPolicy(service)), check(HttpPolicy("http://x"))):
                await policy.close()

    asyncio.run(work())
    assert etude.inference.Completion is not None
    assert etude.inference.HttpPolicy is HttpPolicy


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_completion_over_http_is_the_one_in_process_bit_for_bit(family: str) -> None:
    async def work() -> None:
        sampling = Sampling(max_tokens=9, samples=2, seed=3, temperature=0.8, top_p=0.9, stop=frozenset({7}))
        async with EngineService(tiny_engine(family)) as service, serving(service, token=TOKEN) as url:
            here, there = InProcessPolicy(service), HttpPolicy(url, TOKEN, retry=QUICK)
            mine, theirs = await here.complete_many([1, 2, 3], sampling), await there.complete_many([1, 2, 3], sampling)
            for a, b in zip(mine, theirs, strict=True):
                assert (a.tokens, a.logprobs, a.raw_logprobs) == (b.tokens, b.logprobs, b.raw_logprobs)
                assert (a.versions, a.ending) == (b.versions, b.ending)
                assert (a.routing is None) == (b.routing is None) == (family == "llama")
                if a.routing is not None and b.routing is not None:
                    assert a.routing.dtype == b.routing.dtype
                    assert np.array_equal(a.routing, b.routing)
            one = await there.complete([1, 2, 3], Sampling(max_tokens=4), session="s")
            assert len(one.tokens) == 4
            with pytest.raises(InputError, match="call complete_many"):
                await there.complete([1], sampling)
            await there.close()

    asyncio.run(work())


@pytest.mark.parametrize("streaming", [False, True])
def test_the_routing_of_each_token_travels_once_until_new_weights_change_it(
    streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of a session over HTTP have the routing of the whole prefix, as in process; the wire has the new part."""
    sent: list[tuple[int, int]] = []  # tokens left out, tokens sent

    def counted(given: Any, where: str, known: Any) -> Any:
        sent.append((given["known"], given["shape"][0]))
        return routing_from_json(given, where, known)

    monkeypatch.setattr("etude.inference.generate_protocol.routing_from_json", counted)

    async def work() -> None:
        engine = tiny_engine("qwen3_moe", on_swap="recompute")
        async with EngineService(engine) as service, serving(service, token=TOKEN) as url:
            here, there = InProcessPolicy(service), HttpPolicy(url, TOKEN, retry=QUICK)
            tokens = list(range(1, 20))
            for turn in range(4):
                sampling = Sampling(max_tokens=5, seed=turn)
                if streaming:
                    theirs = await there.complete_streaming(tokens, sampling, lambda _: None, session="s")
                else:
                    theirs = await there.complete(tokens, sampling, session="s")
                mine = await here.complete(tokens, sampling)
                assert theirs.routing is not None
                assert mine.routing is not None
                assert np.array_equal(mine.routing, theirs.routing)
                assert len(theirs.routing) == len(tokens) + len(theirs.tokens) - 1
                tokens += [*theirs.tokens, 3, 4]
                if turn == 2:
                    await there.load(checkpoint_views(tiny_model("qwen3_moe", seed=9)), 1)
            await there.close()

    asyncio.run(work())
    assert sent == [(0, 23), (23, 7), (30, 7), (0, 44)]


def test_new_weights_over_http_by_path_and_as_tensors(tmp_path: Path) -> None:
    save(tiny_model(seed=6), tmp_path / "six")

    async def work() -> None:
        async with (
            EngineService(tiny_engine()) as one,
            EngineService(tiny_engine()) as two,
            serving(one) as first,
            serving(two) as second,
        ):
            policy = HttpPolicy([first, second], retry=QUICK)
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


def test_a_proxy_is_used_except_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with EngineService(tiny_engine()) as service, serving(service) as url:
            monkeypatch.setenv("http_proxy", url)  # our server responds 421: the request went to the proxy
            monkeypatch.setenv("no_proxy", "near.invalid")
            urls = "http://far.invalid", "http://near.invalid", url
            far, near, here = (HttpPolicy(each, retry=QUICK) for each in urls)
            asked = [1, 2, 3], Sampling(max_tokens=4, seed=1)
            with pytest.raises(ServerError, match=r"far\.invalid/generate: 421"):
                await far.complete_many(*asked)
            with pytest.raises(ServerUnreachable, match=r"near\.invalid/generate: no connection"):
                await near.complete_many(*asked)
            monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
            assert len((await here.complete_many(*asked))[0].tokens) == 4
            for policy in (far, near, here):
                await policy.close()

    asyncio.run(work())


def test_unreadable_certificates_are_an_etude_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        policy = HttpPolicy("https://127.0.0.1:9", retry=QUICK)
        with pytest.raises(ServerUnreachable, match=r"https://127\.0\.0\.1:9.*No such file"):
            await policy.complete_many([1], Sampling(max_tokens=1))
        await policy.close()

    monkeypatch.setenv("SSL_CERT_FILE", "nowhere.pem")
    asyncio.run(work())


def test_cancelling_an_http_request_frees_the_server() -> None:
    async def work() -> None:
        async with EngineService(parrot("la", " la-la", end=False)) as service, serving(service) as url:
            policy = HttpPolicy(url, retry=QUICK)
            asking = asyncio.create_task(policy.complete([1, 2], Sampling(max_tokens=2000)))
            await until(lambda: service.stats().output_tokens > 5)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until(lambda: service.open_sequences == 0)
            assert service.engine.pool.held == 0
            await policy.close()

    asyncio.run(work())


def test_sessions_stay_on_their_server_and_few_move_when_one_goes() -> None:
    urls = [f"http://host{n}:8000" for n in range(4)]
    policy = HttpPolicy(urls)
    sessions = [f"session-{n}" for n in range(400)]
    places = {session: policy.server_for(session) for session in sessions}
    other = HttpPolicy(urls[::-1])  # another process, other order
    assert places == {session: other.server_for(session) for session in sessions}
    assert min(Counter(places.values()).values()) > 60  # spread evenly
    fewer = HttpPolicy(urls[:3])
    moved = [session for session in sessions if fewer.server_for(session) != places[session]]
    assert all(places[session] == urls[3] for session in moved)


def test_a_dead_server_is_skipped_and_a_busy_one_is_retried() -> None:
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
            policy = HttpPolicy([dead, url], retry=QUICK, cooldown=60)
            for n in range(5):
                sample = await policy.complete([5], Sampling(max_tokens=1), session=f"s{n}")
                assert (sample.tokens, sample.versions, sample.raw_logprobs) == ([1], [4], [-0.25])
            assert policy.server_for("anything") == url  # the dead one is skipped
            assert asked["busy"] == 7
            await policy.close()

    asyncio.run(work())


def test_errors_name_the_server_and_the_problem() -> None:
    async def work() -> None:
        async with EngineService(tiny_engine()) as service, serving(service, token=TOKEN) as url:
            for policy, ask, error, complaint in (
                (HttpPolicy(url, "wrong", retry=QUICK), [1], ServerError, "401: the token is missing or wrong"),
                (HttpPolicy(url, TOKEN, retry=QUICK), [999], ServerError, "400: token id 999 is not in the vocabulary"),
                (
                    HttpPolicy("http://127.0.0.1:9", retry=QUICK),
                    [1],
                    ServerUnreachable,
                    "no connection: Connection refused",
                ),
            ):
                with pytest.raises(error, match=complaint) as caught:
                    await policy.complete(ask, Sampling(max_tokens=1))
                assert "/generate" in str(caught.value)
                await policy.close()
        with pytest.raises(InputError, match="no server"):
            HttpPolicy([])

    asyncio.run(work())


GOOD = {"tokens": [1, 2], "logprobs": [-1, -2.5], "raw_logprobs": [-1, -2], "versions": [0, 0], "ending": "stop"}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"tokens": None}, "tokens is None"),
        ({"logprobs": [-1.0]}, "logprobs has 1 entries for 2 tokens"),
        ({"versions": [0, "x"]}, "versions contains 'x'"),
        ({"ending": "bored"}, "ending is 'bored'"),
        ({"routing": {"dtype": "object", "shape": [1], "data": ""}}, "routing has dtype 'object'"),
        ({"routing": {"dtype": "uint8", "shape": [9], "data": "AAAA"}}, "routing cannot be read"),
    ],
)
def test_an_invalid_response_is_an_error_that_names_the_problem(change: dict[str, Any], complaint: str) -> None:
    async def answer(_: Request) -> Response:
        return JSONResponse({"samples": [{**GOOD, "cached": 0, "preempted": 0, **change}]})

    async def work() -> None:
        async with fake(answer) as url:
            policy = HttpPolicy(url, retry=QUICK)
            with pytest.raises(InvalidResponse, match=complaint):
                await policy.complete([1], Sampling(max_tokens=2))
            await policy.close()

    asyncio.run(work())


# --------------------------------------------------------------------------------------------------- chat APIs


TOOL = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


class TestOpenAIChat:
    def test_chats_with_our_server(self) -> None:
        engine = parrot("I will.", " \n", "<tool_call>", '{"name": "run", "arguments": {"x": 1}}', "</tool_call>")

        async def work() -> None:
            async with EngineService(engine) as service, serving(service, token=TOKEN) as url:
                chat = OpenAIChat(f"{url}/v1", TOKEN, model=NAME, retry=QUICK)
                sampling = Sampling(max_tokens=20, temperature=0.5, seed=2, stop_text=("xyz",))
                reply = await chat.chat([{"role": "user", "content": "Go"}], [TOOL], sampling)
                assert (reply.turn.text, reply.finish) == ("I will. ", "tool_calls")
                (call,) = reply.turn.calls
                assert (call.name, call.arguments) == ("run", {"x": 1})
                assert reply.usage.completion_tokens == 6
                result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
                again = await chat.chat([{"role": "user", "content": "Go"}, reply.message, result], [TOOL])
                assert again.usage.cached_tokens > 0
                await chat.close()

        asyncio.run(work())

    def test_refuses_sampling_that_a_chat_api_does_not_have(self) -> None:
        async def work() -> None:
            chat = OpenAIChat("http://x/v1", model="m")
            for unsupported in (
                Sampling(top_k=3),
                Sampling(min_p=0.1),
                Sampling(stop=frozenset({1})),
                Sampling(samples=2),
            ):
                with pytest.raises(InputError, match="sampling: "):
                    await chat.chat([], sampling=unsupported)
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
                chat = OpenAIChat(url, model="m", retry=QUICK)
                with pytest.raises(InvalidResponse, match=complaint):
                    await chat.chat([{"role": "user", "content": "x"}])
                await chat.close()

        asyncio.run(work())
