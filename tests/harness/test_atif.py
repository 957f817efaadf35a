"""ATIF documents: valid for other tools, exact round trips, and errors with a place."""

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_traces import equal, example, traces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_helpers import FakeTools, call, chatml, says, scripted_client

from etude.chat.messages import Message
from etude.errors import InputError
from etude.harness.atif import from_atif, to_atif
from etude.harness.prompt import SessionRequest
from etude.harness.scripted_policy import ScriptLine
from etude.harness.session import Session, SessionSpec
from etude.harness.summary import SummarySettings
from etude.harness.trace import Cost, Trace
from etude.harness.trace_store import load_trace, save_trace

Document = dict[str, Any]


def exchanged(document: Document) -> Document:
    """Return the document as another program reads it: through strict JSON in UTF-8."""
    read: Document = json.loads(json.dumps(document, allow_nan=False, ensure_ascii=False).encode("utf-8"))
    return read


# ------------------------------------------------------------------------------------------- the rules of the format

KEYS = {
    "trajectory": "agent steps | schema_version session_id trajectory_id notes final_metrics continued_trajectory_ref "
    "subagent_trajectories extra",
    "agent": "name version | model_name tool_definitions extra",
    "step": "step_id source message | timestamp model_name reasoning_effort reasoning_content tool_calls observation "
    "metrics is_copied_context llm_call_count extra",
    "call": "tool_call_id function_name arguments | extra",
    "observation": "results |",
    "result": "| source_call_id content subagent_trajectory_ref extra",
    "metrics": "| prompt_tokens completion_tokens cached_tokens cost_usd prompt_token_ids completion_token_ids "
    "logprobs extra",
    "final": "| total_prompt_tokens total_completion_tokens total_cached_tokens total_cost_usd total_steps extra",
}
TEXTS = {"name", "version", "model_name", "session_id", "trajectory_id", "notes", "message", "content", "timestamp"}
TEXTS |= {"reasoning_content", "tool_call_id", "function_name", "source_call_id", "continued_trajectory_ref"}
COUNTS = {"step_id", "llm_call_count", "prompt_tokens", "completion_tokens", "cached_tokens"}
COUNTS |= {"total_prompt_tokens", "total_completion_tokens", "total_cached_tokens", "total_steps"}
OBJECTS, IDS = {"extra", "arguments"}, {"prompt_token_ids", "completion_token_ids"}
AGENTS_OWN = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def fits(name: str, value: Any) -> bool:
    """A value that is not an object of the format, and no list of such."""
    if name in ("message", "content") and isinstance(value, list):
        return is_list(value, lambda part: isinstance(part, dict) and part.keys() == {"type", "text"})
    if name in TEXTS:
        return isinstance(value, str)
    if name in COUNTS:
        least = {"step_id": 1, "llm_call_count": 0, "total_steps": 0}.get(name, value)
        return is_count(value) and value >= least
    if name in IDS:
        return is_list(value, is_count)
    if name == "logprobs":
        return is_list(value, is_number)
    if name == "tool_definitions":
        return is_list(value, lambda item: isinstance(item, dict))
    if name == "is_copied_context":
        return isinstance(value, bool)
    if name == "source":
        return value in ("system", "user", "agent")
    if name == "schema_version":
        return value in [f"ATIF-v1.{minor}" for minor in range(9)]
    return isinstance(value, dict) if name in OBJECTS else True


def sound(kind: str, value: Any) -> bool:
    """Whether this is an object of a kind, its own objects apart."""
    required, optional = (set(part.split()) for part in KEYS[kind].split("|"))
    if not isinstance(value, dict) or value.keys() - required - optional or required - value.keys():
        return False
    return all(name not in required if item is None else fits(name, item) for name, item in value.items())


def valid(document: Any) -> bool:
    """ATIF 1.8 as far as it concerns documents of text, without subagents."""
    if not sound("trajectory", document) or document.get("schema_version", "") is None:
        return False
    if not sound("agent", document["agent"]):
        return False
    if document.get("final_metrics") is not None and not sound("final", document["final_metrics"]):
        return False
    steps = document["steps"]
    return isinstance(steps, list) and len(steps) > 0 and all(valid_step(i + 1, step) for i, step in enumerate(steps))


def valid_step(number: int, step: Any) -> bool:
    if not sound("step", step) or step["step_id"] != number:
        return False
    calls, observation, metrics = step.get("tool_calls"), step.get("observation"), step.get("metrics")
    if calls is not None and not is_list(calls, lambda item: sound("call", item)):
        return False
    if metrics is not None and not sound("metrics", metrics):
        return False
    if step["source"] != "agent" and any(step.get(name) is not None for name in AGENTS_OWN):
        return False
    if step.get("llm_call_count") == 0 and any(step.get(name) is not None for name in ("metrics", "reasoning_content")):
        return False
    if observation is None:
        return True
    if not sound("observation", observation) or not is_list(observation["results"], lambda item: sound("result", item)):
        return False
    ids = {item["tool_call_id"] for item in calls or ()}
    named = [item.get("source_call_id") for item in observation["results"]]
    return all(name in ids for name in named if name is not None)


# ------------------------------------------------------------------------------------------- our documents


@settings(deadline=None, max_examples=60)
@given(traces())
def test_any_trace_exports_to_a_valid_document_and_round_trips(trace: Trace) -> None:
    document = to_atif(trace)
    assert valid(document)
    before = exchanged(document)
    assert equal(from_atif(document), trace)
    assert exchanged(document) == before  # reading changes nothing
    assert equal(from_atif(before), trace)


@settings(deadline=None, max_examples=30)
@given(traces(exact=True))
def test_prompts_and_timestamps_are_optional_and_change_nothing_else(trace: Trace) -> None:
    document = to_atif(trace, prompts=True, started=datetime(2026, 5, 1, tzinfo=UTC))
    assert valid(document)
    assert equal(from_atif(exchanged(document)), trace)
    for step, shown in zip(trace.steps, document["steps"], strict=True):
        assert datetime.fromisoformat(shown["timestamp"]).tzinfo is not None
        if "completion_token_ids" in shown.get("metrics", {}):
            tokens = trace.segments[step.segment].tokens.tolist()
            metrics = shown["metrics"]
            assert metrics["prompt_token_ids"] + metrics["completion_token_ids"] == tokens[: step.span[1]]


def test_every_field_is_exported_to_its_place() -> None:
    document = to_atif(example())
    sources = ["system", "user", "agent", "user", "agent", "user", "agent", "user", "agent", "user"]
    assert [step["source"] for step in document["steps"]] == sources
    assert document["schema_version"] == "ATIF-v1.8"
    assert document["session_id"] == "s-1"
    assert document["agent"] | {"version": ""} == {
        "name": "etude",
        "version": "",
        "model_name": "nano",
        "tool_definitions": [{"type": "function", "function": {"name": "grep"}}],
    }
    turn = document["steps"][4]
    assert (turn["message"], turn["reasoning_content"], turn["llm_call_count"]) == ("Looking.", "Where?", 1)
    assert turn["extra"]["time"] == 1.5
    assert turn["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "completion_token_ids": [4, 5],
        "logprobs": [-0.1, -0.7],
    }
    read, unread = turn["tool_calls"]
    assert read["arguments"] == {"pattern": "x"}
    assert unread == {
        "tool_call_id": "call_1",
        "function_name": "grep",
        "arguments": {},
        "extra": {
            "status": "bad_json",
            "raw": '{"pattern": ',
            "span": [1, 2],
            "problem": "the arguments are not JSON",
            "unread": True,
        },
    }
    assert turn["observation"]["results"][0] == {
        "source_call_id": "call_0",
        "content": "no match",
        "extra": {"error": "environment", "facts": {"exit_code": 1}, "seconds": 0.25},
    }
    # what an earlier session said, and what is shown again after a summary, is not to be trained on
    assert [step["step_id"] for step in document["steps"] if step.get("is_copied_context")] == [3, 8]
    assert [step["step_id"] for step in document["steps"] if "metrics" in step] == [5, 7, 9]
    final = document["final_metrics"]
    assert (final["total_prompt_tokens"], final["total_completion_tokens"], final["total_cached_tokens"]) == (11, 5, 8)
    assert final["total_steps"] == 10
    assert final["extra"]["summaries"] == 1
    assert document["extra"]["etude"]["ending"] == "final"


def test_logprobs_use_the_shortest_digits_and_are_left_out_if_not_finite() -> None:
    trace = example()
    (shown,) = [step["metrics"]["logprobs"] for step in to_atif(trace)["steps"] if step["step_id"] == 5]
    assert np.array_equal(np.array(shown, np.float32), trace.segments[0].logprobs[3:5])
    assert "-0.1," in json.dumps(shown)
    trace.segments[0].logprobs[4] = -np.inf
    document = to_atif(trace)
    assert "logprobs" not in document["steps"][4]["metrics"]
    assert equal(from_atif(exchanged(document)), trace)


def test_a_session_with_summaries_round_trips(tmp_path: Path) -> None:
    script: list[ScriptLine] = [
        chatml().tokenizer.encode("<tool_call>{]</tool_call><|im_end|>", special=True),
        says("Looking.", call("echo", text="x = 1 ", times=1000), call("fail"), thinking="Where is it?"),
        says("Found nothing so far."),
        says("", call("echo", text="done")),
        says("Fixed."),
    ]
    request = SessionRequest("Fix the bug.", past=(Message("user", "Hello."), Message("assistant", "Hi.")), id="bug-1")
    session = Session(
        request, scripted_client(script), FakeTools(), SessionSpec(summaries=SummarySettings(trigger=2500))
    )
    trace = replace(asyncio.run(session.run()), facts={"seed": 1})
    document = to_atif(trace)
    assert valid(document)
    assert trace.cost.summaries == 1
    assert trace.errors == {"environment": 1, "malformed_call": 1}
    assert equal(from_atif(exchanged(document)), trace)
    save_trace(from_atif(document), tmp_path / "s.trace")
    assert equal(load_trace(tmp_path / "s.trace"), trace)
    spent = [step["metrics"] for step in document["steps"] if "metrics" in step]
    assert sum(one["prompt_tokens"] for one in spent) == trace.cost.prompt
    assert sum(one["completion_tokens"] for one in spent) == trace.cost.sampled
    made = [int(token) for segment in trace.segments for token in segment.tokens[segment.sampled]]
    assert [token for one in spent for token in one["completion_token_ids"]] == made


def test_a_trace_without_steps_cannot_be_exported() -> None:
    with pytest.raises(InputError, match="trace s-1 has no steps"):
        to_atif(replace(example(), steps=()))


def test_unknown_keys_in_extras_are_ignored() -> None:
    document = to_atif(example())
    document["extra"]["grade"] = {"reward": 1}
    for step in document["steps"]:
        step["extra"]["seen"] = True
    document["notes"] = "graded"
    assert equal(from_atif(document), example())


# ------------------------------------------------------------------------------------------- documents of others


def without_ours(document: Document) -> Document:
    """Return the document as another tool would have written it."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key != "extra"}
        return [strip(item) for item in value] if isinstance(value, list) else value

    stripped: Document = strip(document)
    return stripped


@settings(deadline=None, max_examples=60)
@given(traces())
def test_any_valid_foreign_document_imports_as_a_conversation(trace: Trace) -> None:
    document = without_ours(exchanged(to_atif(trace)))
    read = from_atif(document)
    assert not read.exact
    assert sum(map(len, read.segments)) == 0
    told = iter([(step.message.role == "assistant", step.message.content) for step in read.steps])
    assert all((step["source"] == "agent", step["message"]) in told for step in document["steps"])  # in this order
    for step in read.steps:
        assert len(step.results()) == len(step.message.calls)
    assert equal(from_atif(exchanged(to_atif(read))), read)


def test_a_foreign_document_imports_like_a_chat_api_session() -> None:
    document: Document = {
        "schema_version": "ATIF-v1.6",
        "session_id": "run-7",
        "agent": {"name": "other", "version": "2.1", "model_name": "big-1", "tool_definitions": [{"type": "function"}]},
        "steps": [
            {"step_id": 1, "source": "system", "message": "Be good.", "timestamp": "2026-05-01T12:00:00Z"},
            {"step_id": 2, "source": "user", "message": [{"type": "text", "text": "Look:"}, IMAGE]},
            {
                "step_id": 3,
                "source": "agent",
                "timestamp": "2026-05-01T12:00:02.500Z",
                "message": "",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"tool_call_id": "a", "function_name": "ls", "arguments": {"path": "é"}},
                    {"tool_call_id": "b", "function_name": "pwd", "arguments": {}},
                    {"tool_call_id": "c", "function_name": "wait", "arguments": {}},
                ],
                "observation": {
                    "results": [
                        {"source_call_id": "b", "content": "/w"},
                        {"source_call_id": "a", "content": [{"type": "text", "text": "x.py"}], "extra": {"score": 1}},
                        {"source_call_id": "a", "content": "y.py"},
                        {"content": "The disk is nearly full."},
                    ]
                },
                "metrics": {"prompt_tokens": 100, "completion_tokens": 20, "cached_tokens": 60, "cost_usd": 0.01},
            },
            {"step_id": 4, "source": "user", "message": "Go on."},
            {"step_id": 5, "source": "agent", "message": "Done.", "metrics": {"completion_tokens": 5}},
        ],
        "final_metrics": {"total_cost_usd": 0.02},
    }
    trace = from_atif(document)
    assert (trace.id, trace.model, trace.dialect, trace.ending) == ("run-7", "big-1", "chat", "final")
    assert not trace.exact
    assert [(step.kind, step.message.role, step.message.content) for step in trace.steps] == [
        ("prompt", "system", "Be good."),
        ("prompt", "user", "Look:\n[image: shot.png]"),
        ("turn", "assistant", ""),
        ("message", "user", "The disk is nearly full."),
        ("message", "user", "Go on."),
        ("turn", "assistant", "Done."),
    ]
    turn = trace.steps[2]
    assert [outcome.text for outcome in turn.outcomes] == ["x.py\ny.py", "/w", ""]
    assert turn.outcomes[0].facts == {"score": 1}
    assert turn.message.thinking == "Hm."
    assert turn.message.calls[0].raw == '{"path": "é"}'
    assert (turn.span, turn.time) == ((100, 120), 2.5)
    assert trace.cost == Cost(call=20, final=5, calls=3, turns=2, prompt=100, cached=60, wall_s=2.5)
    assert trace.facts["agent"] == "other"
    assert trace.facts["final_metrics"]["total_cost_usd"] == 0.02
    assert trace.facts["started"] == "2026-05-01T12:00:00+00:00"
    assert trace.final == "Done."


IMAGE = {"type": "image", "source": {"media_type": "image/png", "path": "shot.png"}}


def test_copied_context_of_a_foreign_document_opens_a_segment_without_cost() -> None:
    said = {"source": "agent", "message": "Summary.", "metrics": {"completion_tokens": 3}}
    steps: list[Document] = [
        {"source": "user", "message": "Task."},
        said,
        {"source": "user", "message": "Task.", "is_copied_context": True},
        {**said, "is_copied_context": True},
        {"source": "agent", "message": "More."},
    ]
    numbered = [{"step_id": i + 1, **step} for i, step in enumerate(steps)]
    trace = from_atif({"agent": {"name": "o", "version": "1"}, "steps": numbered})
    assert [(step.segment, step.kind, step.copied) for step in trace.steps] == [
        (0, "prompt", False),
        (0, "turn", False),
        (1, "prompt", True),
        (1, "turn", True),
        (1, "turn", False),
    ]
    assert [segment.kind for segment in trace.segments] == ["start", "summary"]
    assert (trace.cost.sampled, trace.cost.turns) == (3, 2)


# ------------------------------------------------------------------------------------------- invalid documents


def at(*place: str | int, to: Any = None, gone: bool = False) -> Callable[[Document], None]:
    """A change of a document."""

    def change(document: Document) -> None:
        holder: Any = document
        for key in place[:-1]:
            holder = holder[key]
        if gone:
            del holder[place[-1]]
        else:
            holder[place[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (at("schema_version", to="ATIF-v2.0"), ": schema_version"),
        (at("agent", gone=True), ": agent is missing"),
        (at("agent", "name", to=3), ": agent.name must be a string, not 3"),
        (at("agent", "tool_definitions", to=[3]), ": agent.tool_definitions[0]"),
        (at("steps", to=[]), ": steps must not be empty"),
        (at("steps", to={}), ": steps must be a list"),
        (at("steps", 4, "source", to="robot"), ": steps[4].source"),
        (at("steps", 4, "message", gone=True), ": steps[4].message is missing"),
        (at("steps", 4, "message", to=None), ": steps[4].message"),
        (at("steps", 4, "message", to=[{"type": "text"}]), ": steps[4].message must be text, or a list of parts"),
        (at("steps", 4, "message", to=[{"type": "image", "text": ""}]), ": steps[4].message"),
        (at("steps", 4, "timestamp", to="yesterday"), ": steps[4].timestamp must be a time in ISO 8601"),
        (at("steps", 3, "metrics", to=[]), ": steps[3].metrics"),
        (at("steps", 3, "reasoning_content", to=1), ": steps[3].reasoning_content"),
        (at("steps", 3, "is_copied_context", to=1), ": steps[3].is_copied_context"),
        (at("steps", 4, "tool_calls", 1, "arguments", to=None), ": steps[4].tool_calls[1].arguments"),
        (at("steps", 4, "observation", "results", 0, "content", to=1), ": steps[4].observation.results[0].content"),
        (
            at("steps", 4, "observation", "results", 0, "subagent_trajectory_ref", to=["x"]),
            ": steps[4].observation.results[0].subagent_trajectory_ref[0]",
        ),
        (at("final_metrics", to="many"), ": final_metrics"),
        (at("extra", to=[]), ": extra"),
        (at("extra", "etude", to=3), ".extra.etude"),
        (at("extra", "etude", "format", to=2), ".extra.etude.format: 2; this program reads 1"),
        (at("extra", "etude", "ending", to="tired"), ".extra.etude.ending"),
        (at("extra", "etude", "segments", gone=True), ".extra.etude: segments is missing"),
        (at("extra", "etude", "segments", 1, "kind", to="end"), ".extra.etude.segments[1].kind"),
        (at("extra", "etude", "segments", 1, "tokens", "zstd", to="!"), ".extra.etude.segments[1].tokens: damaged"),
        (at("extra", "etude", "segments", 1, "tokens", "zstd", to="eA=="), ".extra.etude.segments[1].tokens: damaged"),
        (at("extra", "etude", "segments", 1, "tokens", "shape", to=[3]), ".extra.etude.segments[1].tokens: damaged"),
        (at("extra", "etude", "segments", 1, "tokens", "dtype", to="<i4"), ".extra.etude.segments[1].tokens: int32"),
        (at("extra", "etude", "segments", 1, "tokens", "dtype", to="?!"), ".extra.etude.segments[1].tokens: damaged"),
        (at("extra", "etude", "restore", to=[[["nowhere"], "MQ=="]]), ".extra.etude.restore[0]: damaged"),
        (at("extra", "etude", "restore", to=[[[], "MQ=="]]), ".extra.etude.restore[0]: damaged"),
        (at("extra", "etude", "restore", to=[[["session_id"], "MQ=="]]), ".session_id: 1 where text"),
        (at("steps", 4, "extra", gone=True), ".steps[4]: kind is missing"),
        (at("steps", 4, "extra", "kind", to="nap"), ".steps[4].kind: 'nap'"),
        (at("steps", 4, "extra", "message", to=3), ".steps[4].extra.message"),
        (at("steps", 4, "tool_calls", 0, "extra", "status", to="fine"), ".steps[4].message.calls[0].status: 'fine'"),
        (at("steps", 4, "observation", "results", 0, "extra", "error", to=1), ".steps[4].outcomes[0].error: 1"),
        (at("final_metrics", "extra", "calls", to="two"), ".final_metrics.extra.calls"),
    ],
)
def test_an_invalid_document_raises_with_its_place(change: Callable[[Document], None], place: str) -> None:
    document = to_atif(example())
    change(document)
    with pytest.raises(InputError) as error:
        from_atif(document, "t.json")
    assert str(error.value).startswith(f"t.json{place}"), str(error.value)


@pytest.mark.parametrize("document", [None, [], "text", 3, {}])
def test_anything_but_a_document_raises_input_error(document: Any) -> None:
    with pytest.raises(InputError, match="document: "):
        from_atif(document)


def test_a_deeply_nested_document_raises_input_error() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    document = without_ours(to_atif(example()))
    document["steps"][4]["tool_calls"][0]["arguments"] = deep
    with pytest.raises(InputError, match="nested too deeply"):
        from_atif(document)
    with pytest.raises(InputError, match="nested too deeply"):
        to_atif(replace(example(), facts=deep))


ODD = st.sampled_from([None, True, -7, 1.5, "word", "agent", [], ["x"], {}, {"x": 1}])


@st.composite
def changed(draw: st.DrawFn) -> Document:
    """Return a foreign document changed in one place."""
    document = without_ours(to_atif(example()))
    holder: Any = document
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw(st.sampled_from([*keys, "colour"] if isinstance(holder, dict) else keys))
        inner = holder.get(key) if isinstance(holder, dict) else holder[key]
        if not inner or not isinstance(inner, dict | list) or draw(st.integers(0, 3)) == 0:
            break
        holder = inner
    if key != "colour" and draw(st.booleans()):
        del holder[key]
    else:
        holder[key] = draw(ODD)
    return document


@settings(deadline=None, max_examples=150)
@given(changed())
def test_import_accepts_every_valid_document_and_raises_only_input_errors(document: Document) -> None:
    try:
        from_atif(document)
    except InputError:
        assert not valid(document)


# ------------------------------------------------------------------------------------------- the reference

JUDGE = """
import json, sys
from harbor.models.trajectories import Trajectory
for line in sys.stdin:
    try:
        read = Trajectory.model_validate_json(line, strict=True)
        assert read == Trajectory.model_validate(json.loads(line), strict=True)
        print(json.dumps(read.to_json_dict()))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture
def harbor() -> Callable[[list[Document]], list[Any]]:
    """What the reference implementation makes of documents: the document as it writes it, or what it objects to."""
    python = os.environ.get("ETUDE_HARBOR_PYTHON", "")
    if not python or subprocess.run([python, "-c", "import harbor"], capture_output=True).returncode:
        pytest.skip("set ETUDE_HARBOR_PYTHON to a Python (3.12 or later) in which `pip install harbor` was run")

    def judge(documents: list[Document]) -> list[Any]:
        lines = "".join(json.dumps(document, allow_nan=False) + "\n" for document in documents)
        done = subprocess.run([python, "-c", JUDGE], input=lines, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    return judge


def some(strategy: st.SearchStrategy[Any], count: int) -> list[Any]:
    """Examples, the same in every run."""
    found: list[Any] = []

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def collect(one: Any) -> None:
        found.append(one)

    collect()
    return found


@pytest.mark.slow
def test_the_reference_accepts_exported_documents_and_its_output_round_trips(harbor: Any) -> None:
    made = [example(), *some(traces(), 300)]
    for trace, verdict in zip(made, harbor([to_atif(trace, prompts=True) for trace in made]), strict=True):
        assert isinstance(verdict, dict), verdict
        assert equal(from_atif(verdict), trace)


@pytest.mark.slow
def test_the_reference_accepts_the_same_documents(harbor: Any) -> None:
    documents = some(changed(), 500)
    for document, verdict in zip(documents, harbor(documents), strict=True):
        assert isinstance(verdict, dict) == valid(document), (document, verdict)
