"""Streamed answers equal whole ones: the text that is shown is the text in the trace."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import serving as serving_engine
from samplers import tiny_engine
from session_helpers import FakeTools, call, chatml, says, scripted_client
from stub_endpoint import StubEndpoint, StubTurn, serving
from stub_endpoint import call as stub_call

from etude.chat.dialects.streaming import TurnStreamer
from etude.errors import EtudeError, InputError
from etude.harness.model_client import ChatModelClient
from etude.harness.prompt import SessionRequest
from etude.harness.session import Session
from etude.harness.trace import Trace
from etude.inference.clients.http import HttpPolicy
from etude.inference.clients.inprocess import InProcessPolicy
from etude.inference.clients.openai import ChatEventParser, OpenAIChat, read_reply
from etude.inference.clients.transport import RetryPolicy, ServerError, ServerUnreachable
from etude.inference.generate_protocol import InvalidResponse
from etude.inference.sampling import Sampling
from etude.inference.service import EngineService

QUICK = RetryPolicy(timeout=20, attempts=2, first_delay=0.01, max_delay=0.05)
LINE = StubTurn(
    "Zürich \u2028 and 東京", [stub_call("grep", pattern="a b"), stub_call("read_file", target_file="x.py")], "Hm, hm."
)


class TextRecorder:
    """Records every streamed piece."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, str]] = []

    def __call__(self, part: str, text: str) -> None:
        self.parts.append((part, text))

    def said(self, part: str) -> str:
        return "".join(text for kind, text in self.parts if kind == part)


# ------------------------------------------------------------------------------------------------- chat APIs


def ask_both(stub: StubEndpoint) -> tuple[object, object, TextRecorder]:
    recorder = TextRecorder()

    async def work() -> tuple[object, object]:
        client = OpenAIChat(stub.url, model="stub", retry=QUICK)
        asked = [{"role": "user", "content": "x"}]
        try:
            return await client.chat(asked), await client.chat(asked, listen=recorder)
        finally:
            await client.close()

    with serving(stub):
        whole, streamed = asyncio.run(work())
    return whole, streamed, recorder


def test_a_streamed_answer_adds_up_to_the_whole_one() -> None:
    whole, streamed, recorder = ask_both(StubEndpoint([LINE]))
    assert streamed.turn.text == whole.turn.text == LINE.text == recorder.said("text")  # type: ignore[attr-defined]
    assert streamed.turn.calls == whole.turn.calls  # type: ignore[attr-defined]
    assert [each.arguments for each in streamed.turn.calls] == [dict(args) for _, args in LINE.calls]  # type: ignore[attr-defined]
    assert streamed.usage == whole.usage  # type: ignore[attr-defined]
    assert streamed.finish == "tool_calls"  # type: ignore[attr-defined]
    assert recorder.said("thinking") == LINE.thinking
    assert [text for part, text in recorder.parts if part == "call"] == ["grep", "read_file"]


def test_a_server_that_does_not_stream_is_shown_at_the_end() -> None:
    _, streamed, recorder = ask_both(StubEndpoint([LINE], streams=False))
    assert streamed.turn.text == recorder.said("text") == LINE.text  # type: ignore[attr-defined]
    assert len(streamed.turn.calls) == 2  # type: ignore[attr-defined]


def test_token_counts_without_usage_are_marked_as_estimates() -> None:
    _, streamed, _ = ask_both(StubEndpoint([LINE], usage=False))
    assert not streamed.usage.counted  # type: ignore[attr-defined]
    assert streamed.usage.completion_tokens > 0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("lines", "kind", "complaint"),
    [
        (["data: {"], InvalidResponse, "not JSON"),
        (["data: []"], InvalidResponse, "not an object"),
        (['data: {"error": {"message": "out of memory"}}'], ServerError, "out of memory"),
        (['data: {"choices": [{"delta": {"content": "half"}}]}'], ServerUnreachable, "broke off"),
        ([], ServerUnreachable, "broke off"),
        (["<html>"], InvalidResponse, "not JSON"),
        (['data: {"choices": [null]}'], InvalidResponse, "choices is not a list of objects"),
        (
            ['data: {"choices": [{"delta": {"tool_calls": ["x"]}}]}'],
            InvalidResponse,
            "tool_calls is not a list of objects",
        ),
        (
            ['data: {"choices": [{"delta": {"tool_calls": [{"function": {"name": "x", "arguments": {"a": 1}}}]}}]}'],
            InvalidResponse,
            "must be strings",
        ),
    ],
)
def test_a_malformed_stream_is_an_error_that_says_what_is_wrong(
    lines: list[str], kind: type[EtudeError], complaint: str
) -> None:
    def read() -> None:
        events = ChatEventParser("http://x", TextRecorder())
        for line in lines:
            events.feed(line.encode())
        read_reply(events.merged({"messages": []}), "http://x")

    with pytest.raises(kind, match=complaint):
        read()


def test_calls_without_numbers_are_told_apart_by_their_ids() -> None:
    events = ChatEventParser("http://x", TextRecorder())
    for id, name in (("a", "one"), ("b", "two")):
        delta = {"tool_calls": [{"id": id, "function": {"name": name, "arguments": "{}"}}]}
        events.feed(f"data: {json.dumps({'choices': [{'delta': delta}]})}".encode())
    events.feed(b"data: [DONE]")
    reply = read_reply(events.merged({"messages": []}), "http://x")
    assert [(each.id, each.name) for each in reply.turn.calls] == [("a", "one"), ("b", "two")]


def test_a_session_over_a_chat_api_has_no_tokens_and_is_not_exact() -> None:
    stub = StubEndpoint([StubTurn("Looking.", [stub_call("echo", text="hi")]), StubTurn("Done.")])
    recorder = TextRecorder()

    async def work() -> Trace:
        chat = OpenAIChat(stub.url, model="stub", retry=QUICK)
        client = ChatModelClient(chat, Sampling(), window=10_000)
        client.on_text = recorder  # type: ignore[assignment]
        try:
            return await Session(SessionRequest("Go."), client, FakeTools()).run()
        finally:
            await chat.close()

    with serving(stub):
        trace = asyncio.run(work())
    assert (trace.final, trace.exact, len(trace.segments[0])) == ("Done.", False, 0)
    assert recorder.said("text") == "Looking.Done."
    assert [message["role"] for message in stub.asked[1]["messages"]] == ["system", "user", "assistant", "tool"]


def test_lone_surrogates_from_an_endpoint_are_replaced() -> None:
    stub = StubEndpoint(
        [
            StubTurn("Half \ud800.", [stub_call("echo\udfff", text="hi"), stub_call("echo", text="\ud800")]),
            StubTurn("Done."),
        ]
    )

    async def work() -> Trace:
        chat = OpenAIChat(stub.url, model="stub", retry=QUICK)
        client = ChatModelClient(chat, Sampling(), window=10_000)
        client.on_text = TextRecorder()  # type: ignore[assignment]
        try:
            return await Session(SessionRequest("Go."), client, FakeTools()).run()
        finally:
            await chat.close()

    with serving(stub):
        trace = asyncio.run(work())
    first = next(step for step in trace.steps if step.kind == "turn")
    assert (trace.final, first.message.content) == ("Done.", "Half ?.")
    assert [each.status for each in first.message.calls] == ["unknown_tool", "bad_json"]


# ------------------------------------------------------------------------------------------------- tokens


def watch(
    text: str, *calls: object, thinking: str = "", pieces: Callable[[int], int] = lambda n: 1
) -> tuple[TextRecorder, str]:
    """Stream an answer in our dialect in pieces, parsing after each of them."""
    recorder, dialect = TextRecorder(), chatml()
    tokens = dialect.write(says(text, *calls, thinking=thinking))  # type: ignore[arg-type]
    live = TurnStreamer(dialect.parse, recorder)  # type: ignore[arg-type]
    at = 0
    while at < len(tokens):
        size = pieces(len(tokens))
        live._next_parse = TurnStreamer._parser_free_at = 0.0
        live.feed(tokens[at : at + size])
        at += size
    live.finish(dialect.parse(tokens))
    return recorder, dialect.tokenizer.decode(tokens)


def test_thinking_and_text_are_shown_without_markup() -> None:
    recorder, raw = watch("Here: naïve 東京.\n\n", call("echo", text="secret"), thinking="Let me think.\nTwice.")
    assert recorder.said("thinking") == "Let me think.\nTwice."
    assert recorder.said("text") == "Here: naïve 東京.\n\n"
    assert [text for part, text in recorder.parts if part == "call"] != []
    assert "<tool_call>" in raw
    shown = recorder.said("thinking") + recorder.said("text")
    assert not re.search(r"tool_call|<think|secret|\ufffd", shown)
    assert len([part for part, _ in recorder.parts if part == "text"]) > 3  # it was streamed


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.text(max_size=60), st.booleans(), st.integers(1, 7))
def test_the_streamed_pieces_add_up_to_the_whole_answer(thinking: str, text: str, calls: bool, size: int) -> None:
    try:
        recorder, _ = watch(
            text, *([call("echo", text=text)] if calls else []), thinking=thinking, pieces=lambda n: size
        )
    except InputError:
        return  # a text that the dialect cannot write as text
    answer = chatml().parse(
        chatml().write(says(text, *([call("echo", text=text)] if calls else []), thinking=thinking))
    )
    assert recorder.said("thinking") == answer.thinking
    assert recorder.said("text") == answer.text


def test_long_runs_of_whitespace_are_streamed_whole() -> None:
    for blank in (" ", "\n", "\ufffd"):
        recorder, _ = watch("x" + blank * 30_000 + "y", pieces=lambda n: n)
        assert recorder.said("text") == "x" + blank * 30_000 + "y"


def test_streaming_does_not_change_the_tokens() -> None:
    script = [says("Looking.", call("echo", text="x"), thinking="Where?"), says("Done.")]
    recorder = TextRecorder()
    client = scripted_client(script)
    client.on_text = recorder  # type: ignore[assignment]
    watched = asyncio.run(Session(SessionRequest("Go."), client, FakeTools()).run())
    alone = asyncio.run(Session(SessionRequest("Go."), scripted_client(script), FakeTools()).run())
    assert watched.segments[0].tokens.tolist() == alone.segments[0].tokens.tolist()
    assert recorder.said("text") == "Looking.Done."


def test_streamed_completions_are_the_same_in_process_and_over_http() -> None:
    sampling = Sampling(max_tokens=30, seed=5)

    async def work() -> None:
        async with EngineService(tiny_engine("qwen3_moe")) as service, serving_engine(service) as url:
            plain = await InProcessPolicy(service).complete([1, 2, 3], sampling)
            for policy in (InProcessPolicy(service), HttpPolicy(url, retry=QUICK)):
                told: list[list[int]] = []
                one = await policy.complete_streaming(
                    [1, 2, 3], sampling, lambda tokens, told=told: told.append(list(tokens))
                )  # type: ignore[misc]
                assert (one.tokens, one.logprobs, one.versions) == (plain.tokens, plain.logprobs, plain.versions)
                assert one.routing is not None
                assert plain.routing is not None
                assert one.routing.tolist() == plain.routing.tolist()
                assert [token for piece in told for token in piece] == one.tokens
                assert len(told) > 2
                with pytest.raises(InputError, match="one completion"):
                    await policy.complete_streaming([1], replace(sampling, samples=2), print)
            await policy.close()

    asyncio.run(work())
