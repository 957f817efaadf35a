"""Chats and completions with the official OpenAI client, and their parts: detokenizer, tool parser, prompts."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
import torch
from asking import TOOLS, USER, client_of
from openai.types.chat import ChatCompletionChunk
from random_chats import FAMILIES, dialect_of, tokenizer_of
from random_chats import TOOLS as CODING_TOOLS
from samplers import NAME, parrot, scripted, served, tiny_tokenizer

from etude.chat.dialects.streaming import TurnStreamer
from etude.chat.incremental_text import IncrementalDetokenizer, StopTextFilter
from etude.chat.messages import Message, ToolCall
from etude.inference.service import EngineService

CALL = ("<tool_call>", '\n{"name": "weather", ', '"arguments": {"city":"Zürich"}}\n', "</tool_call>")


class TestChat:
    def test_answers_with_text_and_usage(self, hello: str) -> None:
        client = client_of(hello)
        response = client.chat.completions.create(model=NAME, messages=USER)
        assert response.choices[0].message.content == "Hello, café!"
        assert response.choices[0].finish_reason == "stop"
        assert response.usage is not None
        assert response.usage.completion_tokens == 7  # with the token that ends the turn
        again = client.chat.completions.create(model=NAME, messages=USER)
        assert again.usage is not None
        assert again.usage.prompt_tokens_details is not None
        cached = again.usage.prompt_tokens_details.cached_tokens or 0
        assert 0 < cached < again.usage.prompt_tokens
        assert response.usage.total_tokens == response.usage.prompt_tokens + 7

    def test_streams_whole_characters_and_then_usage(self, hello: str) -> None:
        stream = client_of(hello).chat.completions.create(
            model=NAME, messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks: list[ChatCompletionChunk] = list(stream)
        texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        assert "".join(texts) == "Hello, café!"
        assert any("é" in text for text in texts)  # never half a character
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 7
        assert len({chunk.id for chunk in chunks}) == 1

    def test_gives_n_choices_in_both_ways(self, hello: str) -> None:
        client = client_of(hello)
        response = client.chat.completions.create(model=NAME, messages=USER, n=3)
        assert [choice.index for choice in response.choices] == [0, 1, 2]
        assert {choice.message.content for choice in response.choices} == {"Hello, café!"}
        texts = ["", "", ""]
        for chunk in client.chat.completions.create(model=NAME, messages=USER, n=3, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        assert texts == ["Hello, café!"] * 3

    @pytest.mark.parametrize("stop", ["caf", ["xyz", "o, c"], "é!"])
    def test_text_ends_before_a_stop_text(self, hello: str, stop: Any) -> None:
        client = client_of(hello)
        first = stop if isinstance(stop, str) else stop[-1]
        expected = "Hello, café!".split(first)[0]
        response = client.chat.completions.create(model=NAME, messages=USER, stop=stop)
        assert (response.choices[0].message.content, response.choices[0].finish_reason) == (expected, "stop")
        chunks = list(client.chat.completions.create(model=NAME, messages=USER, stop=stop, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected

    def test_length_is_a_reason_to_finish(self, hello: str) -> None:
        for name in ("max_tokens", "max_completion_tokens"):
            limit: Any = {name: 2}
            response = client_of(hello).chat.completions.create(model=NAME, messages=USER, **limit)
            assert response.choices[0].message.content == "Hello, "
            assert response.choices[0].finish_reason == "length"

    def test_log_probabilities_of_sampled_tokens(self, hello: str) -> None:
        client = client_of(hello)
        response = client.chat.completions.create(model=NAME, messages=USER, logprobs=True)
        assert response.choices[0].logprobs is not None
        content = response.choices[0].logprobs.content or []
        assert len(content) == 6
        assert content[0].token == "Hello"
        assert content[3].bytes is None  # half a character
        assert all(-0.01 < item.logprob <= 0 for item in content)
        chunks = client.chat.completions.create(model=NAME, messages=USER, logprobs=True, stream=True)
        streamed = [item for c in chunks if c.choices[0].logprobs for item in c.choices[0].logprobs.content or []]
        assert [item.token for item in streamed] == [item.token for item in content]

    def test_a_seed_repeats_and_no_seed_does_not(self, random_server: tuple[str, EngineService]) -> None:
        client = client_of(random_server[0])

        def ask(seed: int | None) -> str | None:
            options: dict[str, Any] = {} if seed is None else {"seed": seed}
            response = client.chat.completions.create(model=NAME, messages=USER, max_tokens=12, **options)
            return response.choices[0].message.content

        assert ask(-5) == ask(-5)
        assert ask(1) != ask(2)
        assert ask(None) != ask(None)

    def test_a_conversation_with_parts_roles_and_results_is_rendered(self, hello: str) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
        messages: list[Any] = [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
            {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        ]
        response = client_of(hello).chat.completions.create(model=NAME, messages=messages, tools=TOOLS, user="me")
        assert response.choices[0].message.content == "Hello, café!"


class TestTools:
    def test_a_call_is_returned_in_tool_calls_with_and_without_streaming(self) -> None:
        with served(parrot("Let me see.", " \n", *CALL)) as (url, _):
            client = client_of(url)
            response = client.chat.completions.create(model=NAME, messages=USER, tools=TOOLS)
            message = response.choices[0].message
            assert message.tool_calls is not None
            (call,) = message.tool_calls
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Zürich"}')
            assert response.choices[0].finish_reason == "tool_calls"
            assert message.content == "Let me see. "
            chunks = list(client.chat.completions.create(model=NAME, messages=USER, tools=TOOLS, stream=True))
            texts = [chunk.choices[0].delta.content or "" for chunk in chunks]
            assert "".join(texts) == "Let me see. "
            calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            assert [(c.index, c.function and c.function.arguments) for c in calls] == [(0, '{"city": "Zürich"}')]
            assert chunks[-1].choices[0].finish_reason == "tool_calls"
            # The message can be sent back unchanged.
            follow_up = [*USER, message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
            assert client.chat.completions.create(model=NAME, messages=follow_up, tools=TOOLS).choices

    @pytest.mark.parametrize("tools", [{}, {"tools": TOOLS, "tool_choice": "none"}])
    def test_without_usable_tools_a_call_is_text(self, tools: dict[str, Any]) -> None:
        with served(parrot(*CALL)) as (url, _):
            response = client_of(url).chat.completions.create(model=NAME, messages=USER, **tools)
            assert response.choices[0].message.content == "".join(CALL)
            assert response.choices[0].message.tool_calls is None
            assert response.choices[0].finish_reason == "stop"

    def test_what_is_not_a_call_stays_text(self) -> None:
        with served(parrot("<tool_call>", "not JSON", "</tool_call>", " and on")) as (url, _):
            client = client_of(url)
            expected = "<tool_call>not JSON</tool_call> and on"
            response = client.chat.completions.create(model=NAME, messages=USER, tools=TOOLS)
            assert (response.choices[0].message.content, response.choices[0].finish_reason) == (expected, "stop")
            chunks = list(client.chat.completions.create(model=NAME, messages=USER, tools=TOOLS, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected


class TestDialects:
    """Each family's own turn, served by its own dialect."""

    @pytest.mark.parametrize("family", FAMILIES)
    def test_thinking_text_and_calls_are_returned_with_and_without_streaming(self, family: str) -> None:
        tokenizer, dialect = tokenizer_of(family), dialect_of(family)
        calls = (
            ToolCall("grep", {"pattern": "é"}, "functions.grep:0"),
            ToolCall("write", {"file_path": "a.py", "contents": "1\n2"}, "functions.write:1"),
        )
        thinking = "Hm." if FAMILIES[family].thinks else ""
        script = dialect.write(Message("assistant", "Let me look.", thinking, calls))
        prompt = dialect.render([Message("user", USER[0]["content"])], CODING_TOOLS)
        with served(scripted(tokenizer, len(prompt), script)) as (url, _):
            client, asked = client_of(url), {"model": NAME, "tools": list(CODING_TOOLS)}
            choice = client.chat.completions.create(**asked, messages=USER).choices[0]
            message = choice.message
            assert (message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
            assert getattr(message, "reasoning_content", "") == thinking
            found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]  # type: ignore[union-attr]
            assert found == [(call.name, call.arguments) for call in calls]
            chunks = list(client.chat.completions.create(**asked, messages=USER, stream=True))
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert "".join(delta.content or "" for delta in deltas) == "Let me look."
            assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == thinking
            streamed = [call for delta in deltas for call in delta.tool_calls or ()]
            assert [(call.index, call.id) for call in streamed] == [
                (number, call.id) for number, call in enumerate(message.tool_calls or ())
            ]
            # The reply and its results can be sent back, and call ids go on counting.
            results = [{"role": "tool", "tool_call_id": call.id, "content": "ok"} for call in message.tool_calls or ()]
            again: Any = [*USER, message, *results, *USER]
            assert client.chat.completions.create(**asked, messages=again, max_tokens=1).choices

    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_reply_is_the_same_however_its_tokens_arrive(self, family: str) -> None:
        tokenizer, dialect = tokenizer_of(family), dialect_of(family)
        begin, end = dialect.layout.call
        call = dialect.write(
            Message("assistant", "A <b>.", "", (ToolCall("grep", {"pattern": "x"}, "functions.grep:0"),))
        )
        broken = tokenizer.encode(f"\n{begin}not a call{end}\nand on", special=True)
        for tokens in (call, [*call[:-1], *broken], broken, [*broken, *call], call[: len(call) // 2]):
            for tools in ((), CODING_TOOLS):
                whole = dialect.parse_reply(tokens, tools)
                parts: list[str] = []
                streamer = TurnStreamer(
                    lambda so_far, tools=tools: dialect.parse_reply(so_far, tools, partial=True),  # type: ignore[misc]
                    lambda part, text, parts=parts: parts.append(text if part == "text" else ""),  # type: ignore[misc]
                )
                for token in tokens:
                    TurnStreamer._parser_free_at = streamer._next_parse = 0.0
                    streamer.feed([token])
                streamer.finish(whole)
                assert "".join(parts) == whole.text
                assert bool(whole.calls) <= bool(tools)
        answer = dialect.parse_reply(broken, CODING_TOOLS)
        assert f"\n{begin}not a call{end}\nand on" in (answer.text, answer.thinking)

    def test_the_dialect_can_be_chosen(self) -> None:
        with served(parrot("Hi"), dialect="qwen3-coder") as (url, _):
            (model,) = client_of(url).models.list().data
            assert model.model_dump()["etude"]["dialect"] == "qwen3-coder"
        with served(parrot("Hi"), profile={"dialect": "qwen3"}) as (url, _):
            (model,) = client_of(url).models.list().data
            assert model.model_dump()["etude"] == {"profile": {"dialect": "qwen3"}, "dialect": "qwen3"}

    def test_without_a_fitting_dialect_there_are_no_chats_and_the_error_says_what_to_do(self) -> None:
        engine = parrot("Hi")
        assert engine.tokenizer is not None
        engine.tokenizer.chat_template = "{{ messages }}{{ tools }}"
        with served(engine) as (url, _):
            with pytest.raises(openai.BadRequestError, match="start the server with --dialect NAME"):
                client_of(url).chat.completions.create(model=NAME, messages=USER)
            assert client_of(url).completions.create(model=NAME, prompt="x", max_tokens=1).choices


class TestIncrementalDetokenizer:
    def test_any_bytes_add_up_to_the_decoded_tokens(self) -> None:
        tokenizer = tiny_tokenizer()
        generator = torch.Generator().manual_seed(0)
        for round_ in range(30):
            tokens = torch.randint(300, (80,), generator=generator).tolist()
            detokenizer = IncrementalDetokenizer(tokenizer)
            parts = [detokenizer.feed([token]) for token in tokens]
            assert "".join(parts) + detokenizer.feed((), last=True) == tokenizer.decode(tokens, skip_special=True), (
                round_
            )

    def test_shows_nothing_that_may_become_a_stop_text(self) -> None:
        stop = StopTextFilter(["return x"])
        assert "".join(map(stop.feed, "a return a return x b")) == "a return a "
        assert stop.stopped
        assert stop.feed("", last=True) == ""


# --------------------------------------------------------------------------------------------------- completions


class TestCompletions:
    @pytest.mark.parametrize("prompt", ["def add", [5, 6, 7], ["def add"], [[5, 6, 7]]])
    def test_continue_text_or_tokens(self, random_server: tuple[str, EngineService], prompt: Any) -> None:
        client = client_of(random_server[0])
        response = client.completions.create(model=NAME, prompt=prompt, n=2, seed=1, logprobs=0)
        assert [choice.index for choice in response.choices] == [0, 1]
        assert response.choices[0].logprobs is not None
        assert len(response.choices[0].logprobs.token_logprobs or []) <= 16
        assert response.usage is not None
        assert response.usage.completion_tokens <= 32
        chunks = list(client.completions.create(model=NAME, prompt=prompt, seed=1, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == response.choices[0].text

    def test_models_are_listed(self, hello: str) -> None:
        client = client_of(hello)
        assert [model.id for model in client.models.list()] == [NAME]
        assert client.models.retrieve(NAME).owned_by == "etude"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt-9")
