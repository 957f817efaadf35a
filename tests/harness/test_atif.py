"""ATIF documents: valid for other tools, with every field in its place and the arrays of the segments."""

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from harness_traces import example, traces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from session_helpers import FakeTools, call, chatml, says, scripted_client

from etude.chat.messages import Message
from etude.errors import InputError
from etude.harness.atif import SURROGATES, to_atif
from etude.harness.prompt import SessionRequest
from etude.harness.scripted_policy import ScriptLine
from etude.harness.session import Session, SessionSpec
from etude.harness.summary import SummarySettings
from etude.harness.trace import Segment, Trace

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
def test_any_trace_exports_to_a_valid_document_of_strict_json(trace: Trace) -> None:
    document = to_atif(trace)
    assert valid(document)
    assert exchanged(document) == document
    assert [segment_of(form) for form in document["extra"]["etude"]["segments"]] == [
        {name: None if array is None else array.tobytes() for name, array in segment_arrays(segment).items()}
        for segment in trace.segments
    ]
    shown = [step["message"] for step in document["steps"]]
    assert shown == [SURROGATES.sub("\ufffd", step.message.content) for step in trace.steps]


def segment_arrays(segment: Segment) -> dict[str, Any]:
    names = ("tokens", "logprobs", "raw_logprobs", "versions", "routing")
    return {name: getattr(segment, name) for name in names} | {"made": segment.sampled}


def segment_of(form: Document) -> dict[str, bytes | None]:
    """Return the bytes of the arrays of an exported segment, read as another tool would."""
    inflate = zstandard.ZstdDecompressor().decompress
    arrays = {key: inflate(base64.b64decode(item["zstd"])) for key, item in form.items() if key != "kind"}
    return {"routing": None} | arrays


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
    assert "logprobs" not in to_atif(trace)["steps"][4]["metrics"]


def test_a_session_with_summaries_is_exported_with_its_token_counts() -> None:
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
    spent = [step["metrics"] for step in document["steps"] if "metrics" in step]
    assert sum(one["prompt_tokens"] for one in spent) == trace.cost.prompt
    assert sum(one["completion_tokens"] for one in spent) == trace.cost.sampled
    made = [int(token) for segment in trace.segments for token in segment.tokens[segment.sampled]]
    assert [token for one in spent for token in one["completion_token_ids"]] == made


def test_a_trace_without_steps_cannot_be_exported() -> None:
    with pytest.raises(InputError, match="trace s-1 has no steps"):
        to_atif(replace(example(), steps=()))


def test_a_deeply_nested_trace_raises_input_error() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    with pytest.raises(InputError, match="nested too deeply"):
        to_atif(replace(example(), facts=deep))


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
def test_the_reference_accepts_exported_documents_and_writes_the_same(harbor: Any) -> None:
    made = [to_atif(trace) for trace in [example(), *some(traces(), 300)]]
    for document, verdict in zip(made, harbor(made), strict=True):
        assert verdict == document
