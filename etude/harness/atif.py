"""Traces in the AtifAgent Trajectory Interchange Format 1.8, for tools that are not ours; and such documents as traces.

Whatever the format has a place for stands there, where any reader finds it: messages, thoughts, calls and results,
counts of tokens, the ids and log-probabilities of what the model made. What it has no place for is in its `extra`
fields, and the arrays of the segments, compressed, in `extra.etude` of the document: `from_atif(to_atif(trace))` is the
trace, to the bit. A document of another tool has no such arrays: it gives the conversation, and nothing to train on.
"""

import base64
import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

import numpy as np

from etude import __version__
from etude.chat.messages import Message, Role, ToolCall
from etude.errors import InputError
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import Cost, SegmentBuilder, SessionEnding, Step, Trace
from etude.harness.trace_store import (
    DAMAGE,
    Array,
    compress_bytes,
    decompress_bytes,
    from_json,
    read_segment,
    to_json,
    write_segment,
)

VERSION = "ATIF-v1.8"
FORMAT = 1  # of what is ours in it
AGENT = "etude"

Json = Mapping[str, Any]
Lost = tuple[list[str | int], Any]  # the place of a value that JSON cannot hold, and the value
SOURCES: dict[Role, str] = {"system": "system", "user": "user", "assistant": "agent", "tool": "system"}
ROLES: dict[str, Role] = {"system": "system", "user": "user", "agent": "assistant"}
HALVES = re.compile("[\ud800-\udfff]")  # of surrogate pairs: no UTF-8 has them, so no document may


# ------------------------------------------------------------------------------------------- the format


@dataclass(frozen=True)
class Media:
    media_type: str
    path: str
    duration_sec: float | None = None


@dataclass(frozen=True)
class AtifContentPart:
    type: Literal["text", "image", "audio"]
    text: str | None = None
    source: Media | None = None


@dataclass(frozen=True)
class SubagentRef:
    trajectory_id: str | None = None
    session_id: str | None = None
    trajectory_path: str | None = None
    extra: Json | None = None


@dataclass(frozen=True)
class AtifResult:
    source_call_id: str | None = None
    content: str | Sequence[AtifContentPart] | None = None
    subagent_trajectory_ref: Sequence[SubagentRef] | None = None
    extra: Json | None = None


@dataclass(frozen=True)
class Observation:
    results: Sequence[AtifResult]


@dataclass(frozen=True)
class AtifToolCall:
    tool_call_id: str
    function_name: str
    arguments: Json
    extra: Json | None = None


@dataclass(frozen=True)
class Metrics:
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    cost_usd: float | None = None
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    logprobs: Sequence[float] | None = None
    extra: Json | None = None


@dataclass(frozen=True)
class FinalMetrics:
    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_cached_tokens: int | None = None
    total_cost_usd: float | None = None
    total_steps: int | None = None
    extra: Json | None = None


@dataclass(frozen=True)
class AtifAgent:
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: Sequence[Json] | None = None
    extra: Json | None = None


@dataclass(frozen=True)
class TrajectoryStep:
    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | Sequence[AtifContentPart]
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_effort: str | float | None = None
    reasoning_content: str | None = None
    tool_calls: Sequence[AtifToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None
    llm_call_count: int | None = None
    extra: Json | None = None


@dataclass(frozen=True)
class Trajectory:
    agent: AtifAgent
    steps: Sequence[TrajectoryStep]
    schema_version: str = VERSION
    session_id: str | None = None
    trajectory_id: str | None = None
    notes: str | None = None
    final_metrics: FinalMetrics | None = None
    continued_trajectory_ref: str | None = None
    extra: Json | None = None
    subagent_trajectories: "Sequence[Trajectory] | None" = None


AGENTS_OWN = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def _check(document: Trajectory, where: str) -> None:
    """What the types do not say; InputError names the place."""
    if not re.fullmatch(r"ATIF-v1\.[0-8]", document.schema_version):
        raise InputError(f"{where}.schema_version: {document.schema_version!r}; expected ATIF-v1.0 to {VERSION}")
    if not document.steps:
        raise InputError(f"{where}.steps: empty; expected at least one step")
    for index, step in enumerate(document.steps):
        place = f"{where}.steps[{index}]"
        if step.step_id != index + 1:
            raise InputError(f"{place}.step_id: {step.step_id}; expected {index + 1}, counting from 1")
        _check_step(step, place)
    final = document.final_metrics
    if final is not None and (final.total_steps or 0) < 0:
        raise InputError(f"{where}.final_metrics.total_steps: {final.total_steps}; expected 0 or more")
    names = set()
    for index, inner in enumerate(document.subagent_trajectories or ()):
        place = f"{where}.subagent_trajectories[{index}]"
        if inner.trajectory_id is None or inner.trajectory_id in names:
            raise InputError(f"{place}.trajectory_id: {inner.trajectory_id!r}; expected one that no other has")
        names.add(inner.trajectory_id)
        _check(inner, place)


def _check_step(step: TrajectoryStep, where: str) -> None:
    no_model = step.source == "agent" and step.llm_call_count == 0
    absent = ("reasoning_content", "metrics") if no_model else () if step.source == "agent" else AGENTS_OWN
    for name in absent:
        if getattr(step, name) is not None:
            why = "llm_call_count is 0" if no_model else f"source is {step.source}"
            raise InputError(f"{where}.{name}: has no place where {why}")
    if step.llm_call_count is not None and step.llm_call_count < 0:
        raise InputError(f"{where}.llm_call_count: {step.llm_call_count}; expected 0 or more")
    _moment(step, where)
    _check_parts(step.message, f"{where}.message")
    ids = {call.tool_call_id for call in step.tool_calls or ()}
    for index, result in enumerate(step.observation.results if step.observation else ()):
        place = f"{where}.observation.results[{index}]"
        if result.source_call_id is not None and result.source_call_id not in ids:
            raise InputError(f"{place}.source_call_id: no call of this step is {result.source_call_id!r}")
        for number, ref in enumerate(result.subagent_trajectory_ref or ()):
            if ref.trajectory_id is None and ref.trajectory_path is None:
                raise InputError(f"{place}.subagent_trajectory_ref[{number}]: needs trajectory_id or trajectory_path")
        _check_parts(result.content, f"{place}.content")


def _check_parts(content: str | Sequence[AtifContentPart] | None, where: str) -> None:
    for index, part in enumerate(() if content is None or isinstance(content, str) else content):
        written = part.type == "text"
        if (part.text is not None) is not written or (part.source is not None) is written:
            needed = "text and no source" if written else "a source and no text"
            raise InputError(f"{where}[{index}]: a part of type {part.type} needs {needed}")


def _moment(step: TrajectoryStep, where: str) -> datetime | None:
    try:
        return None if step.timestamp is None else datetime.fromisoformat(step.timestamp)
    except ValueError:
        raise InputError(f"{where}.timestamp: {step.timestamp!r} is not ISO 8601") from None


# ------------------------------------------------------------------------------------------- a trace as a document


def to_atif(trace: Trace, *, prompts: bool = False, started: datetime | None = None) -> dict[str, Any]:
    """The document of a trace: strict JSON, valid under ATIF 1.8.

    `prompts` adds the ids of every prompt, which take the square of the session's length; `started` is when it began,
    for steps with timestamps.
    """
    if not trace.steps:
        raise InputError(f"trace {trace.id} has no steps, and an ATIF document needs one")
    name = f"trace {trace.id}"
    lost: list[Lost] = []
    try:
        document: dict[str, Any] = _clean(_show(trace, name), [], lost)
    except RecursionError:
        raise InputError(f"{name}: nested too deeply for a document") from None
    if lost:
        document["extra"][AGENT]["restore"] = [[place, _encoded(value)] for place, value in lost]
    for step, shown in zip(trace.steps, document["steps"], strict=True):
        if _spoken(step) and (metrics := _metrics(trace, step, prompts)):
            shown["metrics"] = metrics
        if started is not None:
            shown["timestamp"] = (started + timedelta(seconds=step.time)).isoformat()
    return document


def _show(trace: Trace, name: str) -> dict[str, Any]:
    tools, cost, facts = (to_json(getattr(trace, key), f"{name}.{key}") for key in ("tools", "cost", "facts"))
    segments = [write_segment(part, _put, f"{name}.segments[{i}]") for i, part in enumerate(trace.segments)]
    return {
        "schema_version": VERSION,
        "session_id": trace.id,
        "agent": _given(
            name=AGENT, version=__version__, model_name=trace.model or None, tool_definitions=tools or None
        ),
        "steps": [_show_step(step, i + 1, f"{name}.steps[{i}]") for i, step in enumerate(trace.steps)],
        "final_metrics": {
            "total_prompt_tokens": trace.cost.prompt,
            "total_completion_tokens": trace.cost.sampled,
            "total_cached_tokens": trace.cost.cached,
            "total_steps": len(trace.steps),
            "extra": cost,
        },
        "extra": {
            AGENT: {
                "format": FORMAT,
                "task": trace.task,
                "dialect": trace.dialect,
                "ending": trace.ending,
                "exact": trace.exact,
                "facts": facts,
                "segments": segments,
            }
        },
    }


def _spoken(step: Step) -> bool:
    """The model said it, in this session."""
    return step.kind in ("turn", "summary") and step.message.role == "assistant"


def _show_step(step: Step, number: int, where: str) -> dict[str, Any]:
    extra = to_json(step, where)
    message, outcomes = extra.pop("message"), extra.pop("outcomes")
    source = SOURCES[step.message.role]
    agents = source == "agent"
    calls = message["calls"] if agents else []
    homeless = {"call", "name"} if agents else {"call", "name", "thinking", "calls"}
    if message["role"] != ROLES[source]:
        homeless.add("role")
    if unshown := {key: value for key, value in message.items() if key in homeless and value}:
        extra["message"] = unshown
    results = [_show_outcome(outcome, calls[i : i + 1]) for i, outcome in enumerate(outcomes)]
    return _given(
        step_id=number,
        source=source,
        message=message["content"],
        reasoning_content=message["thinking"] or None if agents else None,
        tool_calls=[_show_call(call) for call in calls] or None,
        observation={"results": results} if results else None,
        # What an assistant said in an earlier session is context here, as what stands before a summary is.
        is_copied_context=step.copied or (agents and not _spoken(step)) or None,
        llm_call_count=1 if _spoken(step) else None,
        extra=extra,
    )


def _show_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call in its JSON form as the format has it; one that could not be read has no arguments, and says so."""
    extra = {key: call[key] for key in ("status", "raw", "span", "problem") if call[key]}
    if call["arguments"] is None:
        extra["unread"] = True
    return {
        "tool_call_id": call["id"],
        "function_name": call["name"],
        "arguments": call["arguments"] or {},
        "extra": extra,
    }


def _show_outcome(outcome: dict[str, Any], call: Sequence[Json]) -> dict[str, Any]:
    extra = {key: outcome[key] for key in ("error", "facts") if outcome[key]} | {"seconds": outcome["seconds"]}
    answered = call[0]["id"] if call else None
    return _given(source_call_id=answered, content=outcome["text"], extra=extra)


def _metrics(trace: Trace, step: Step, prompts: bool) -> dict[str, Any]:
    start, end = step.span
    if not 0 <= start <= end:
        return {}
    metrics: dict[str, Any] = {"prompt_tokens": start, "completion_tokens": end - start}
    segment = trace.segments[step.segment] if 0 <= step.segment < len(trace.segments) else None
    if not trace.exact or segment is None or end > len(segment):
        return metrics
    if prompts:
        metrics["prompt_token_ids"] = segment.tokens[:start].tolist()
    metrics["completion_token_ids"] = segment.tokens[start:end].tolist()
    logprobs = segment.logprobs[start:end]
    if np.isfinite(logprobs).all():
        # Not by tolist: the digits that tell a float64 from its neighbours mean nothing here, and are half of the text.
        metrics["logprobs"] = [float(str(value)) for value in logprobs]
    return metrics


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _put(array: Array) -> dict[str, Any]:
    data = base64.b64encode(compress_bytes(array.tobytes())).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "zstd": data}


def _clean(value: Any, place: list[str | int], lost: list[Lost]) -> Any:
    """The value as any reader of JSON takes it; `lost` gets the place and the value of what had to be changed."""
    if isinstance(value, str) and HALVES.search(value):
        lost.append((place, value))
        return HALVES.sub("\ufffd", value)
    if isinstance(value, float) and not math.isfinite(value):
        lost.append((place, value))
        return json.dumps(value)
    if isinstance(value, list):
        return [_clean(item, [*place, index], lost) for index, item in enumerate(value)]
    if isinstance(value, dict):
        if any(HALVES.search(key) for key in value):
            lost.append((place, value))
            return {HALVES.sub("\ufffd", key): _clean(item, [], []) for key, item in value.items()}
        return {key: _clean(item, [*place, key], lost) for key, item in value.items()}
    return value


def _encoded(value: Any) -> str:
    return base64.b64encode(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")).decode()


# ------------------------------------------------------------------------------------------- a document as a trace


@dataclass(frozen=True)
class EtudeExtra:
    """What a document of ours keeps in `extra.etude`."""

    format: int
    task: str
    dialect: str
    ending: SessionEnding
    exact: bool
    facts: Json
    segments: Sequence[Json]
    restore: Sequence[tuple[Sequence[Any], str]] = ()


@dataclass(frozen=True)
class PackedArray:
    """An array there."""

    dtype: str
    shape: tuple[int, ...]
    zstd: str


def from_atif(document: Mapping[str, Any], name: str = "document") -> Trace:
    """The trace of a document: exactly what was exported, or, of another tool's, the conversation.

    InputError names the place, beginning with `name`, where the document is not valid.
    """
    try:
        extra = document.get("extra") if isinstance(document, dict) else None
        ours = extra.get(AGENT) if isinstance(extra, dict) else None
        if ours is None:
            return _adopt(_read_document(document, name), name)
        place = f"{name}.extra.{AGENT}"
        if isinstance(ours, dict) and ours.get("format") != FORMAT:
            raise InputError(f"{place}.format: {ours.get('format')!r}; this program reads {FORMAT}")
        kept: EtudeExtra = from_json(EtudeExtra, ours, place)
        return _restore(_read_document(_with_lost(document, kept, f"{place}.restore"), name), name)
    except (RecursionError, MemoryError):
        raise InputError(f"{name}: too large or nested too deeply to be read") from None


def _read_document(document: Any, name: str) -> Trajectory:
    trajectory: Trajectory = from_json(Trajectory, document, name)
    _check(trajectory, name)
    return trajectory


def _with_lost(document: Any, kept: EtudeExtra, where: str) -> Any:
    """The document with the values that could not be shown in it."""
    if not kept.restore:
        return document
    document = copy.deepcopy(document)
    for index, (place, text) in enumerate(kept.restore):
        try:
            value = json.loads(base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"))
            holder = document
            for key in place[:-1]:
                holder = holder[key]
            holder[place[-1]], _ = value, holder[place[-1]]
        except DAMAGE as error:
            raise InputError(f"{where}[{index}]: damaged: {error}") from error
    return document


def _restore(document: Trajectory, name: str) -> Trace:
    """A document of ours."""
    place = f"{name}.extra.{AGENT}"
    kept: EtudeExtra = from_json(EtudeExtra, (document.extra or {})[AGENT], place)
    spent = (document.final_metrics.extra if document.final_metrics else None) or {}
    return Trace(
        id=document.session_id or "",
        task=kept.task,
        dialect=kept.dialect,
        model=document.agent.model_name or "",
        tools=tuple(document.agent.tool_definitions or ()),
        segments=tuple(read_segment(part, _take, f"{place}.segments[{i}]") for i, part in enumerate(kept.segments)),
        steps=tuple(_restore_step(step, f"{name}.steps[{i}]") for i, step in enumerate(document.steps)),
        ending=kept.ending,
        cost=from_json(Cost, spent, f"{name}.final_metrics.extra"),
        exact=kept.exact,
        facts=kept.facts,
    )


def _restore_step(step: TrajectoryStep, where: str) -> Step:
    extra = step.extra or {}
    unshown = from_json(Mapping[str, Any], extra.get("message", {}), f"{where}.extra.message")
    calls = [
        {
            "id": call.tool_call_id,
            "name": call.function_name,
            "arguments": None if (call.extra or {}).get("unread") else call.arguments,
            **_chosen(call.extra, "status", "raw", "span", "problem"),
        }
        for call in step.tool_calls or ()
    ]
    results = step.observation.results if step.observation else ()
    message = {
        "role": ROLES[step.source],
        "content": _text(step.message),
        "thinking": step.reasoning_content or "",
        "calls": calls,
    }
    form = {
        **_chosen(extra, "kind", "segment", "span", "closed", "time", "copied"),
        "message": message | dict(unshown),
        "outcomes": [
            {"text": _text(result.content), **_chosen(result.extra, "error", "facts", "seconds")} for result in results
        ],
    }
    restored: Step = from_json(Step, form, where)
    return restored


def _chosen(extra: Json | None, *names: str) -> dict[str, Any]:
    """What is ours in an `extra`, to which others may have added."""
    return {name: extra[name] for name in names if name in extra} if extra else {}


def _take(form: Json) -> Array:
    packed: PackedArray = from_json(PackedArray, form, "array")
    data = decompress_bytes(base64.b64decode(packed.zstd, validate=True))
    return np.frombuffer(data, packed.dtype).reshape(packed.shape)


# ------------------------------------------------------------------------------------------- another tool's


def _adopt(document: Trajectory, name: str) -> Trace:
    """A document of another tool, as if it had been a session at a chat API."""
    moments = [_moment(step, name) for step in document.steps]
    started = next(filter(None, moments), None)
    steps: list[Step] = []
    cost, segment, spoke, now = Cost(), 0, False, 0.0
    for step, moment in zip(document.steps, moments, strict=True):
        copied = bool(step.is_copied_context)
        if copied and steps and not steps[-1].copied:
            segment, spoke = segment + 1, False
        now = _seconds(started, moment) if started and moment else now
        adopted = _adopt_step(step, segment, now, spoke)
        steps += adopted
        spoke = spoke or step.source == "agent"
        if step.source == "agent" and not copied:
            cost = _with_step(cost, adopted[0], step.metrics or Metrics())
    last = steps[-1]
    final, facts = document.final_metrics, {"agent": document.agent.name, "agent_version": document.agent.version}
    if final is not None:
        facts["final_metrics"] = to_json(final, f"{name}.final_metrics")
    if started is not None:
        facts["started"] = started.isoformat()
    return Trace(
        id=document.session_id or document.trajectory_id or "",
        task="",
        dialect="chat",
        model=document.agent.model_name or "",
        tools=tuple(document.agent.tool_definitions or ()),
        segments=tuple(SegmentBuilder("summary" if index else "start", ()).segment() for index in range(segment + 1)),
        steps=tuple(steps),
        ending="final" if last.kind == "turn" and not last.message.calls else "interrupted",
        cost=cost.plus(wall_s=now),
        exact=False,
        facts=facts,
    )


def _adopt_step(step: TrajectoryStep, segment: int, now: float, spoke: bool) -> list[Step]:
    """The step; then what was observed without having been called for, which is somebody else's message."""
    copied, calls = bool(step.is_copied_context), step.tool_calls or ()
    found: list[list[AtifResult]] = [[] for _ in calls]
    loose = []
    for result in step.observation.results if step.observation else ():
        fitting = [index for index, call in enumerate(calls) if call.tool_call_id == result.source_call_id]
        if fitting:  # of calls with one id, the first that has no result yet
            found[next((index for index in fitting if not found[index]), fitting[-1])].append(result)
        else:
            loose.append(result)
    used = step.metrics or Metrics()
    start = used.prompt_tokens or 0
    message = Message(ROLES[step.source], _text(step.message), step.reasoning_content or "", tuple(map(_call, calls)))
    steps = [
        Step(
            kind="turn" if step.source == "agent" else "message" if spoke else "prompt",
            message=message,
            segment=segment,
            span=(start, start + (used.completion_tokens or 0)),
            outcomes=tuple(map(_outcome, found)),
            time=now,
            copied=copied,
        )
    ]
    told = [text for result in loose if (text := _text(result.content))]
    if told:
        steps.append(Step("message", Message("user", "\n".join(told)), segment, (0, 0), time=now, copied=copied))
    return steps


def _call(call: AtifToolCall) -> ToolCall:
    raw = json.dumps(call.arguments, ensure_ascii=False)
    return ToolCall(call.function_name, call.arguments, call.tool_call_id, raw=raw)


def _outcome(results: Sequence[AtifResult]) -> ToolOutcome:
    facts: dict[str, Any] = {}
    for result in results:
        facts |= result.extra or {}
        if result.subagent_trajectory_ref:
            facts["subagents"] = to_json(result.subagent_trajectory_ref, "subagent_trajectory_ref")
    return ToolOutcome("\n".join(_text(result.content) for result in results), facts=facts)


def _with_step(cost: Cost, step: Step, used: Metrics) -> Cost:
    calls = len(step.message.calls)
    kind = "call" if calls else "final"
    made = {kind: used.completion_tokens or 0}
    return cost.plus(turns=1, calls=calls, prompt=used.prompt_tokens or 0, cached=used.cached_tokens or 0, **made)


def _text(content: str | Sequence[AtifContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or f"[{part.type}: {part.source.path if part.source else ''}]" for part in content)


def _seconds(start: datetime, end: datetime) -> float:
    if (start.tzinfo is None) is not (end.tzinfo is None):  # one of them does not say where it was that late
        start, end = start.replace(tzinfo=None), end.replace(tzinfo=None)
    return (end - start).total_seconds()
