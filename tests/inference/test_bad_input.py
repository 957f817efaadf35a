"""An invalid request gets a 4xx that names the problem, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import patient_http
import pytest
from asking import TOKEN, USER, client_of
from samplers import NAME, parrot, served, tiny_engine, until


def nested(depth: int) -> dict[str, Any]:
    return {"properties": nested(depth - 1)} if depth else {}


CHAT: dict[str, Any] = {"messages": USER, "max_tokens": 4}
BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "unknown field 'temprature'; did you mean temperature?"),
    ({"frequency_penalty": 0.5}, "frequency_penalty is 0.5, which this server does not support"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"tool_choice": "required"}, "tool_choice is 'required'"),
    ({"top_logprobs": 2, "logprobs": True}, "top_logprobs: this server returns those of sampled tokens only"),
    ({"n": 0}, "n: "),
    ({"n": 100_000}, "n: "),
    ({"n": True}, "n: "),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"temperature": -1}, "temperature is -1"),
    ({"temperature": True}, "temperature: Input should be a valid number"),
    ({"temperature": "1"}, "temperature: Input should be a valid number"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_k": 10**30}, "top_k is 1000"),
    ({"stop": ""}, "stop"),
    ({"stop": ["x"] * 65}, "stop: List should have at most 64 items"),
    ({"stop": "x" * 1025}, "stop: String should have at most 1024 characters"),
    ({"stream_options": {"include_usage": True}}, "stream_options requires stream: true"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "content is missing"),
    ({"messages": [{"role": "user", "content": "x", "colour": "red"}]}, "unknown field 'colour'"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "lone surrogate"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": nested(600)}}]}, "nested too deeply"),
    ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "strict"),
]


class TestBadInput:
    @pytest.mark.parametrize(("change", "complaint"), BAD_CHATS, ids=lambda value: str(value)[:40])
    def test_of_a_chat_is_named(self, hello: str, change: dict[str, Any], complaint: str) -> None:
        body = json.dumps({**CHAT, **change})
        response = patient_http.post(
            f"{hello}/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert complaint in error["message"]
        assert error["type"] == "invalid_request_error"

    @pytest.mark.parametrize(
        "neutral",
        [
            {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": None},
            {"response_format": {"type": "text"}, "parallel_tool_calls": True, "store": False},
            {"stop": None, "seed": None, "tools": None, "user": "me"},
            {"parallel_tool_calls": False, "metadata": {"a": "b"}, "store": True, "prompt_cache_key": "x"},
            {"tools": [{"type": "function", "function": {"name": "a", "strict": False}}], "service_tier": "flex"},
            {"messages": [{"role": "user", "name": "Ada", "content": [{"type": "text", "text": "Hi"}]}]},
        ],
    )
    def test_neutral_and_ignored_values_are_accepted(self, hello: str, neutral: dict[str, Any]) -> None:
        assert patient_http.post(f"{hello}/v1/chat/completions", json={**CHAT, **neutral}).status_code == 200

    @pytest.mark.parametrize("body", [b"", b"{", b"[1,2", b"\xff\xfe", b"null", b"[]", b"[" * 100_000])
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate", "/weights"])
    def test_that_is_not_json_is_a_400(self, hello: str, path: str, body: bytes) -> None:
        response = patient_http.post(f"{hello}{path}", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]

    @pytest.mark.parametrize(
        ("body", "complaint"),
        [
            ({"tokens": []}, "the prompt is empty"),
            ({"tokens": [1, 999_999]}, "token id 999999 is not in the vocabulary"),
            ({"tokens": [-1]}, "token id -1"),
            ({"tokens": [1.5]}, "tokens.0"),
            ({"tokens": ["a"]}, "tokens.0"),
            ({"tokens": [1], "sampling": {"samples": 5000}}, "samples is 5000"),
            ({"tokens": [1], "sampling": {"samples": 200}}, "200 completions of one prompt"),
            ({"tokens": [1], "sampling": {"seed": -1}}, "seed is -1"),
            ({"tokens": [1], "sampling": {"seed": 2**64}}, "seed is 18446744073709551616"),
            ({"tokens": [1], "sampling": {"stop": [999_999]}}, "stop token id 999999 is not in the vocabulary"),
            ({"tokens": [1], "sampling": {"stop": [-5]}}, "stop token id -5"),
            ({"tokens": [1], "sampling": {"colour": 1}}, "unknown field 'colour'"),
            ({"tokens": [1], "sampling": {"stop_text": [""]}}, "a stop text is empty"),
            ({"tokens": [1], "sampling": {"stop_text": ["x"] * 65}}, "at most 64 items"),
            ({"tokens": [1], "sampling": {"temperature": 1e999}}, "temperature"),
            ({"tokens": [1], "extra": 1}, "unknown field 'extra'"),
            ({}, "tokens"),
        ],
        ids=str,
    )
    def test_of_generate_is_named(self, hello: str, body: dict[str, Any], complaint: str) -> None:
        response = patient_http.post(
            f"{hello}/generate", content=json.dumps(body), headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        assert complaint in response.json()["error"]["message"]

    def test_too_long_prompts_have_openai_s_code(self, hello: str) -> None:
        client = client_of(hello)
        long: list[Any] = [{"role": "user", "content": "Zürich " * 2000}]
        for ask in ({"messages": long}, {"messages": USER, "max_tokens": 100_000}):
            options: Any = ask
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model=NAME, **options)
            assert caught.value.code == "context_length_exceeded"
            # litellm recognises the error by these words.
            assert "This model's maximum context length is 2048 tokens" in caught.value.message
        response = patient_http.post(f"{hello}/generate", json={"tokens": [1] * 3000})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")

    def test_other_models_paths_methods_and_types(self, hello: str) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client_of(hello).chat.completions.create(model="gpt-9", messages=USER)
        assert caught.value.code == "model_not_found"
        assert patient_http.get(f"{hello}/v2/nothing").status_code == 404
        assert patient_http.get(f"{hello}/generate").status_code == 405
        for path, allowed in (("/generate", {"POST"}), ("/health", {"GET", "HEAD"}), ("/metrics", {"GET", "HEAD"})):
            for method in ("OPTIONS", "PUT", "DELETE", "PATCH"):
                response = patient_http.request(method, f"{hello}{path}")
                assert (response.status_code, set(response.headers["allow"].split(", "))) == (405, allowed)
                assert response.json()["error"]["code"] == "method_not_allowed"
        assert (patient_http.head(f"{hello}/health").status_code, patient_http.head(f"{hello}/health").content) == (
            200,
            b"",
        )
        assert (patient_http.head(f"{hello}/generate").status_code, patient_http.head(f"{hello}/generate").content) == (
            405,
            b"",
        )
        text = patient_http.post(f"{hello}/generate", content=b'{"tokens":[1]}', headers={"content-type": "text/plain"})
        assert text.status_code == 415
        assert "application/json" in text.json()["error"]["message"]

    def test_several_prompts_in_one_request(self, hello: str) -> None:
        with pytest.raises(openai.BadRequestError, match="2 prompts; this server takes one"):
            client_of(hello).completions.create(model=NAME, prompt=["a", "b"])

    def test_no_pages_are_held_afterwards(self, hello: str) -> None:
        assert patient_http.get(f"{hello}/health").json()["open"] == 0
        assert "etude_inference_pages_held 0\n" in patient_http.get(f"{hello}/metrics").text


def test_a_body_over_the_limit_is_refused() -> None:
    with served(tiny_engine(), max_body=1000) as (url, _):
        whole = {"tokens": [1] * 1000}

        def in_chunks() -> Iterator[bytes]:
            yield from (json.dumps(whole).encode(), b" " * 1000)

        kind = {"content-type": "application/json"}
        for response in (
            patient_http.post(f"{url}/generate", json=whole),
            patient_http.post(f"{url}/generate", content=in_chunks(), headers=kind),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
        with socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=10) as line:
            # a declared length over the limit is refused before the body arrives
            line.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            line.sendall(b"Content-Length: 99999999999999\r\n\r\n")
            assert line.recv(1000).startswith(b"HTTP/1.1 413 ")
        assert (
            patient_http.post(f"{url}/generate", json={"tokens": [1], "sampling": {"max_tokens": 1}}).status_code == 200
        )


def test_without_the_token_only_health_is_served() -> None:
    with served(parrot("Hi"), token=TOKEN) as (url, _):
        for wrong in ("none", TOKEN[:-1], TOKEN + "x", "ä"):
            header = {"authorization": f"Bearer {wrong}".encode()}
            assert patient_http.post(f"{url}/generate", json={"tokens": [1]}, headers=header).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            client_of(url, "wrong").chat.completions.create(model=NAME, messages=USER)
        assert patient_http.get(f"{url}/health").status_code == 200
        assert client_of(url, TOKEN).chat.completions.create(model=NAME, messages=USER).choices


def test_a_full_queue_is_a_429_with_retry_after() -> None:
    with served(tiny_engine(max_sequences=1), max_waiting=1) as (url, service):
        patient_http.post(f"{url}/pause")

        async def fill() -> httpx.Response:
            async with patient_http.open_client() as web:
                body = {"tokens": [1], "sampling": {"max_tokens": 2}}
                tasks = [asyncio.create_task(web.post(f"{url}/generate", json=body)) for _ in range(2)]
                await until(lambda: service.open_sequences == 2)
                refused = await web.post(f"{url}/generate", json=body)
                await web.post(f"{url}/resume")
                assert [response.status_code for response in await asyncio.gather(*tasks)] == [200, 200]
                return refused

        refused = asyncio.run(fill())
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert float(refused.headers["retry-after"]) > 0
