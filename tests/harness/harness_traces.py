"""Traces for tests: a realistic one, random ones, and exact comparison."""

from dataclasses import replace
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st

from etude.chat.messages import CallStatus, Message, Role, ToolCall
from etude.harness.tools.tool import ErrorClass, ToolOutcome
from etude.harness.trace import Cost, Segment, SegmentBuilder, SegmentKind, SessionEnding, Step, StepKind, Trace

NASTY = st.sampled_from('\0\r\n\u2028\ufffd\ud83d\ude00\udfff\U0001f600\U0010ffff"\\<')
TEXTS = st.text(st.characters() | NASTY, max_size=8)
NUMBERS = st.integers() | st.sampled_from([2**63, -(2**64), 10**400]) | st.floats()
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(TEXTS, VALUES, max_size=3)
COUNTS = st.integers(0, 10**15)
SECONDS = st.floats(0, 1e9)


def equal(one: Trace, other: Trace) -> bool:
    """Return whether two traces are bitwise equal: -0.0 is not 0.0, 1 is not 1.0, and a NaN equals itself."""

    def words(trace: Trace) -> str:
        return repr(replace(trace, segments=(), steps=tuple(trace.steps), tools=tuple(trace.tools)))

    def bits(trace: Trace) -> list[Any]:
        names = ("tokens", "sampled", "logprobs", "raw_logprobs", "versions", "routing")
        arrays = [[getattr(segment, name) for name in names] for segment in trace.segments]
        flat = [
            [None if array is None else (array.dtype, array.shape, array.tobytes()) for array in row] for row in arrays
        ]
        return [(segment.kind, row) for segment, row in zip(trace.segments, flat, strict=True)]

    return words(one) == words(other) and bits(one) == bits(other)


def example() -> Trace:
    """Return a trace of two segments with a summary between them, an unparsable call and a failed call."""
    first, second = SegmentBuilder("start", [1, 2, 3]), SegmentBuilder("summary", [1, 9])
    first.append_sampled([4, 5], [-0.1, -0.7], [-0.2, -0.8], [7, 8])
    first.append_context([6])
    first.append_sampled([10], [-2.0], [-2.0], [8])
    second.append_sampled([11, 12], [-0.5, -0.25], [-0.5, -0.25], [9, 9])
    second.set_routing(np.arange(6, dtype=np.uint16).reshape(3, 2, 1))
    calls = (
        ToolCall("grep", {"pattern": "x"}, "call_0", raw='{"pattern": "x"}', span=(0, 1)),
        ToolCall("grep", None, "call_1", "bad_json", '{"pattern": ', (1, 2), "the arguments are not JSON"),
    )
    outcomes = (
        ToolOutcome("no match", "environment", {"exit_code": 1}, 0.25),
        ToolOutcome("error: the arguments are not JSON", "malformed_call"),
    )
    steps = (
        Step("prompt", Message("system", "You are an agent."), 0, (0, 3)),
        Step("prompt", Message("user", "Earlier."), 0, (0, 3)),
        Step("prompt", Message("assistant", "Yes."), 0, (0, 3)),
        Step("prompt", Message("user", "Fix it."), 0, (0, 3)),
        Step("turn", Message("assistant", "Looking.", "Where?", calls), 0, (3, 5), outcomes, time=1.5),
        Step("summary-request", Message("user", "Please summarize."), 0, (5, 6), time=2.0),
        Step("summary", Message("assistant", "Nothing yet."), 0, (6, 7), time=3.0),
        Step("prompt", Message("user", "Fix it. Nothing yet."), 1, (0, 2), time=3.0, copied=True),
        Step("turn", Message("assistant", "Done."), 1, (2, 4), time=4.0),
        Step("message", Message("user", "Thanks."), 1, (-1, -1), time=5.0),
    )
    cost = Cost(call=2, summary=1, final=2, calls=2, turns=2, summaries=1, prompt=11, cached=8, pod_s=0.5, wall_s=5.0)
    tools = [{"type": "function", "function": {"name": "grep"}}]
    parts = [first.segment(), second.segment()]
    return Trace("s-1", "t-1", "chatml", "nano", tools, parts, steps, "final", cost, facts={"seed": 3})


@st.composite
def segments(draw: st.DrawFn, max_size: int = 12) -> Segment:
    size, rng = draw(st.integers(0, max_size)), np.random.default_rng(draw(st.integers(0, 2**32)))

    def array(kind: str, *shape: int) -> Any:  # any bits at all
        data = rng.bytes(int(np.prod(shape)) * np.dtype(kind).itemsize)
        return np.frombuffer(data, kind).reshape(shape).copy()

    def floats() -> Any:
        return array("f4", size) if draw(st.booleans()) else rng.normal(size=size).astype(np.float32)

    shape = (draw(st.integers(0, size)), draw(st.integers(0, 3)), draw(st.integers(0, 3)))
    routing = array(draw(st.sampled_from(["u1", "u2"])), *shape) if draw(st.booleans()) else None
    kind = draw(st.sampled_from(get_args(SegmentKind)))
    sampled = rng.integers(0, 2, size).astype(bool)
    return Segment(kind, array("u4", size), sampled, floats(), floats(), array("i4", size), routing)


CALLS = st.builds(
    ToolCall,
    name=TEXTS,
    arguments=st.none() | OBJECTS,
    id=TEXTS,
    status=st.sampled_from(get_args(CallStatus)),
    raw=TEXTS,
    span=st.tuples(COUNTS, COUNTS),
    problem=TEXTS,
)
OUTCOMES = st.builds(
    ToolOutcome, text=TEXTS, error=st.none() | st.sampled_from(get_args(ErrorClass)), facts=OBJECTS, seconds=SECONDS
)


@st.composite
def steps(draw: st.DrawFn, lengths: list[int]) -> Step:
    kind = draw(st.sampled_from(get_args(StepKind)))
    is_turn = kind in ("turn", "summary")
    role: Role = "assistant" if is_turn else draw(st.sampled_from(get_args(Role)))
    calls = tuple(draw(st.lists(CALLS, max_size=3))) if is_turn or draw(st.booleans()) else ()
    segment = draw(st.integers(0, len(lengths) - 1))
    position = st.integers(0, lengths[segment])
    spans = st.tuples(position, position).map(lambda ends: (min(ends), max(ends)))
    return Step(
        kind=kind,
        message=Message(role, draw(TEXTS), draw(TEXTS), calls, draw(TEXTS), draw(TEXTS)),
        segment=segment,
        span=draw(spans | st.sampled_from([(-1, -1), (5, 10**9)])),
        outcomes=tuple(draw(OUTCOMES) for _ in calls) if draw(st.booleans()) else (),
        closed=draw(st.booleans()),
        time=draw(SECONDS),
        copied=draw(st.booleans()),
    )


@st.composite
def traces(draw: st.DrawFn, exact: bool | None = None) -> Trace:
    exact = draw(st.booleans()) if exact is None else exact
    parts = draw(st.lists(segments(12 if exact else 0), min_size=1, max_size=3))
    said = draw(st.lists(steps([len(part) for part in parts]), min_size=1, max_size=4))
    return Trace(
        id=draw(TEXTS),
        task=draw(TEXTS),
        dialect=draw(TEXTS),
        model=draw(TEXTS),
        tools=draw(st.lists(OBJECTS, max_size=2)),
        segments=parts,
        steps=said,
        ending=draw(st.sampled_from(get_args(SessionEnding))),
        cost=draw(st.builds(Cost, thinking=COUNTS, final=COUNTS, prompt=COUNTS, cached=COUNTS, wall_s=SECONDS)),
        exact=exact,
        facts=draw(OBJECTS),
    )
