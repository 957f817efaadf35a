"""Export and import of traces in the Agent Trajectory Interchange Format (ATIF) 1.8.

Messages, thinking, calls, results, token counts, and ids and log-probabilities of sampled tokens use the fields of the
format. Everything else is in its `extra` fields, and the segment arrays, compressed, in `extra.etude` of the document:
`from_atif(to_atif(trace))` returns the identical trace. Documents of other tools have no such arrays: they give a
conversation that cannot be trained on.
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
from etude.harness.trace_store import DAMAGE, Array, deflate, from_json, inflate, read_segment, to_json, write_segment

VERSION = "ATIF-v1.8"
FORMAT = 1  # version of the `extra.etude` object
AGENT = "etude"

Json = Mapping[str, Any]
Lost = tuple[list[str | int], Any]  # path and value of something JSON cannot represent
SOURCES: dict[Role, str] = {"system": "system", "user": "user", "assistant": "agent", "tool": "system"}
ROLES: dict[str, Role] = {"system": "system", "user": "user", "agent": "assistant"}
SURROGATES = re.compile("[\ud800-\udfff]")  # lone surrogates: not valid in UTF-8


# ------------------------------------------------------------------------------------------- format


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


AGENT_ONLY = ("model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics")


def _check(document: Trajectory, where: str) -> None:
    """Check the rules that the types do not express; InputError names the place."""
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
            raise InputError(f"{place}.trajectory_id: {inner.trajectory_id!r}; expected a unique id")
        names.add(inner.trajectory_id)
        _check(inner, place)


def _check_step(step: TrajectoryStep, where: str) -> None:
    no_model = step.source == "agent" and step.llm_call_count == 0
    absent = ("reasoning_content", "metrics") if no_model else () if step.source == "agent" else AGENT_ONLY
    for name in absent:
        if getattr(step, name) is not None:
            why = "llm_call_count is 0" if no_model else f"source is {step.source}"
            raise InputError(f"{where}.{name}: is not allowed where {why}")
    if step.llm_call_count is not None and step.llm_call_count < 0:
        raise InputError(f"{where}.llm_call_count: {step.llm_call_count}; expected 0 or more")
    _timestamp(step, where)
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
        is_text = part.type == "text"
        if (part.text is not None) is not is_text or (part.source is not None) is is_text:
            expected = "text and no source" if is_text else "a source and no text"
            raise InputError(f"{where}[{index}]: a part of type {part.type} needs {expected}")


def _timestamp(step: TrajectoryStep, where: str) -> datetime | None:
    try:
        return None if step.timestamp is None else datetime.fromisoformat(step.timestamp)
    except ValueError:
        raise InputError(f"{where}.timestamp: {step.timestamp!r} is not ISO 8601") from None


# ------------------------------------------------------------------------------------------- export


def to_atif(trace: Trace, *, prompts: bool = False, started: datetime | None = None) -> dict[str, Any]:
    """Return the ATIF 1.8 document of a trace, as strict JSON.

    `prompts` adds the token ids of every prompt, which grow with the square of the session's length; `started` is the
    start time, for timestamps of steps.
    """
    if not trace.steps:
        raise InputError(f"trace {trace.id} has no steps, but an ATIF document needs at least one")
    name = f"trace {trace.id}"
    lost: list[Lost] = []
    try:
        document: dict[str, Any] = _clean(_export(trace, name), [], lost)
    except RecursionError:
        raise InputError(f"{name}: nested too deeply for a document") from None
    if lost:
        document["extra"][AGENT]["restore"] = [[path, _encode(value)] for path, value in lost]
    for step, exported in zip(trace.steps, document["steps"], strict=True):
        if _is_sampled(step) and (metrics := _metrics(trace, step, prompts)):
            exported["metrics"] = metrics
        if started is not None:
            exported["timestamp"] = (started + timedelta(seconds=step.time)).isoformat()
    return document


def _export(trace: Trace, name: str) -> dict[str, Any]:
    tools, cost, facts = (to_json(getattr(trace, key), f"{name}.{key}") for key in ("tools", "cost", "facts"))
    segments = [write_segment(part, _export_array, f"{name}.segments[{i}]") for i, part in enumerate(trace.segments)]
    return {
        "schema_version": VERSION,
        "session_id": trace.id,
        "agent": _without_none(
            name=AGENT, version=__version__, model_name=trace.model or None, tool_definitions=tools or None
        ),
        "steps": [_export_step(step, i + 1, f"{name}.steps[{i}]") for i, step in enumerate(trace.steps)],
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


def _is_sampled(step: Step) -> bool:
    """Return whether the model sampled this step in this session."""
    return step.kind in ("turn", "summary") and step.message.role == "assistant"


def _export_step(step: Step, number: int, where: str) -> dict[str, Any]:
    extra = to_json(step, where)
    message, outcomes = extra.pop("message"), extra.pop("outcomes")
    source = SOURCES[step.message.role]
    is_agent = source == "agent"
    calls = message["calls"] if is_agent else []
    extra_keys = {"call", "name"} if is_agent else {"call", "name", "thinking", "calls"}
    if message["role"] != ROLES[source]:
        extra_keys.add("role")
    if rest := {key: value for key, value in message.items() if key in extra_keys and value}:
        extra["message"] = rest
    results = [_export_outcome(outcome, calls[i : i + 1]) for i, outcome in enumerate(outcomes)]
    return _without_none(
        step_id=number,
        source=source,
        message=message["content"],
        reasoning_content=message["thinking"] or None if is_agent else None,
        tool_calls=[_export_call(call) for call in calls] or None,
        observation={"results": results} if results else None,
        # An assistant message of an earlier session is context, like messages repeated after a summary.
        is_copied_context=step.copied or (is_agent and not _is_sampled(step)) or None,
        llm_call_count=1 if _is_sampled(step) else None,
        extra=extra,
    )


def _export_call(call: dict[str, Any]) -> dict[str, Any]:
    """Export a call from its JSON form; a call that could not be parsed has no arguments and is marked `unread`."""
    extra = {key: call[key] for key in ("status", "raw", "span", "problem") if call[key]}
    if call["arguments"] is None:
        extra["unread"] = True
    return {
        "tool_call_id": call["id"],
        "function_name": call["name"],
        "arguments": call["arguments"] or {},
        "extra": extra,
    }


def _export_outcome(outcome: dict[str, Any], call: Sequence[Json]) -> dict[str, Any]:
    extra = {key: outcome[key] for key in ("error", "facts") if outcome[key]} | {"seconds": outcome["seconds"]}
    call_id = call[0]["id"] if call else None
    return _without_none(source_call_id=call_id, content=outcome["text"], extra=extra)


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
        # Not tolist: the extra float64 digits mean nothing and would be half of the text.
        metrics["logprobs"] = [float(str(value)) for value in logprobs]
    return metrics


def _without_none(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _export_array(array: Array) -> dict[str, Any]:
    data = base64.b64encode(deflate(array.tobytes())).decode()
    return {"dtype": array.dtype.str, "shape": list(array.shape), "zstd": data}


def _clean(value: Any, path: list[str | int], lost: list[Lost]) -> Any:
    """Return the value as strict JSON; append path and original of every changed value to `lost`."""
    if isinstance(value, str) and SURROGATES.search(value):
        lost.append((path, value))
        return SURROGATES.sub("\ufffd", value)
    if isinstance(value, float) and not math.isfinite(value):
        lost.append((path, value))
        return json.dumps(value)
    if isinstance(value, list):
        return [_clean(item, [*path, index], lost) for index, item in enumerate(value)]
    if isinstance(value, dict):
        if any(SURROGATES.search(key) for key in value):
            lost.append((path, value))
            return {SURROGATES.sub("\ufffd", key): _clean(item, [], []) for key, item in value.items()}
        return {key: _clean(item, [*path, key], lost) for key, item in value.items()}
    return value


def _encode(value: Any) -> str:
    return base64.b64encode(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")).decode()


# ------------------------------------------------------------------------------------------- import


@dataclass(frozen=True)
class EtudeExtra:
    """The object `extra.etude` of an exported document."""

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
    """An array in `extra.etude`."""

    dtype: str
    shape: tuple[int, ...]
    zstd: str


def from_atif(document: Mapping[str, Any], name: str = "document") -> Trace:
    """Return the trace of a document: the exported trace, or the conversation of another tool's document.

    InputError names the place, starting with `name`, where the document is invalid.
    """
    try:
        extra = document.get("extra") if isinstance(document, dict) else None
        etude = extra.get(AGENT) if isinstance(extra, dict) else None
        if etude is None:
            return _import_foreign(_read_document(document, name), name)
        place = f"{name}.extra.{AGENT}"
        if isinstance(etude, dict) and etude.get("format") != FORMAT:
            raise InputError(f"{place}.format: {etude.get('format')!r}; this program reads {FORMAT}")
        kept: EtudeExtra = from_json(EtudeExtra, etude, place)
        return _restore(_read_document(_restore_lost_values(document, kept, f"{place}.restore"), name), name)
    except (RecursionError, MemoryError):
        raise InputError(f"{name}: too large or nested too deeply to be read") from None


def _read_document(document: Any, name: str) -> Trajectory:
    trajectory: Trajectory = from_json(Trajectory, document, name)
    _check(trajectory, name)
    return trajectory


def _restore_lost_values(document: Any, kept: EtudeExtra, where: str) -> Any:
    """Return the document with the values that strict JSON could not represent."""
    if not kept.restore:
        return document
    document = copy.deepcopy(document)
    for index, (path, text) in enumerate(kept.restore):
        try:
            value = json.loads(base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass"))
            holder = document
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]], _ = value, holder[path[-1]]
        except DAMAGE as error:
            raise InputError(f"{where}[{index}]: damaged: {error}") from error
    return document


def _restore(document: Trajectory, name: str) -> Trace:
    """Return the trace of an exported document."""
    place = f"{name}.extra.{AGENT}"
    kept: EtudeExtra = from_json(EtudeExtra, (document.extra or {})[AGENT], place)
    spent = (document.final_metrics.extra if document.final_metrics else None) or {}
    return Trace(
        id=document.session_id or "",
        task=kept.task,
        dialect=kept.dialect,
        model=document.agent.model_name or "",
        tools=tuple(document.agent.tool_definitions or ()),
        segments=tuple(
            read_segment(part, _import_array, f"{place}.segments[{i}]") for i, part in enumerate(kept.segments)
        ),
        steps=tuple(_restore_step(step, f"{name}.steps[{i}]") for i, step in enumerate(document.steps)),
        ending=kept.ending,
        cost=from_json(Cost, spent, f"{name}.final_metrics.extra"),
        exact=kept.exact,
        facts=kept.facts,
    )


def _restore_step(step: TrajectoryStep, where: str) -> Step:
    extra = step.extra or {}
    rest = from_json(Mapping[str, Any], extra.get("message", {}), f"{where}.extra.message")
    calls = [
        {
            "id": call.tool_call_id,
            "name": call.function_name,
            "arguments": None if (call.extra or {}).get("unread") else call.arguments,
            **_select(call.extra, "status", "raw", "span", "problem"),
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
        **_select(extra, "kind", "segment", "span", "closed", "time", "copied"),
        "message": message | dict(rest),
        "outcomes": [
            {"text": _text(result.content), **_select(result.extra, "error", "facts", "seconds")} for result in results
        ],
    }
    restored: Step = from_json(Step, form, where)
    return restored


def _select(extra: Json | None, *names: str) -> dict[str, Any]:
    """Return the named keys of an `extra`; other tools may have added more."""
    return {name: extra[name] for name in names if name in extra} if extra else {}


def _import_array(form: Json) -> Array:
    packed: PackedArray = from_json(PackedArray, form, "array")
    data = inflate(base64.b64decode(packed.zstd, validate=True))
    return np.frombuffer(data, packed.dtype).reshape(packed.shape)


# ------------------------------------------------------------------------------------------- documents of other tools


def _import_foreign(document: Trajectory, name: str) -> Trace:
    """Convert a document of another tool to a trace, as if from a chat API."""
    timestamps = [_timestamp(step, name) for step in document.steps]
    started = next(filter(None, timestamps), None)
    steps: list[Step] = []
    cost, segment, replied, now = Cost(), 0, False, 0.0
    for step, timestamp in zip(document.steps, timestamps, strict=True):
        copied = bool(step.is_copied_context)
        if copied and steps and not steps[-1].copied:
            segment, replied = segment + 1, False
        now = _seconds(started, timestamp) if started and timestamp else now
        imported = _import_foreign_step(step, segment, now, replied)
        steps += imported
        replied = replied or step.source == "agent"
        if step.source == "agent" and not copied:
            cost = _with_step(cost, imported[0], step.metrics or Metrics())
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


def _import_foreign_step(step: TrajectoryStep, segment: int, now: float, replied: bool) -> list[Step]:
    """Convert a step; observations without a call become a separate user message."""
    copied, calls = bool(step.is_copied_context), step.tool_calls or ()
    found: list[list[AtifResult]] = [[] for _ in calls]
    loose = []
    for result in step.observation.results if step.observation else ():
        matching = [index for index, call in enumerate(calls) if call.tool_call_id == result.source_call_id]
        if matching:  # of calls with the same id, the first without a result
            found[next((index for index in matching if not found[index]), matching[-1])].append(result)
        else:
            loose.append(result)
    used = step.metrics or Metrics()
    start = used.prompt_tokens or 0
    message = Message(ROLES[step.source], _text(step.message), step.reasoning_content or "", tuple(map(_call, calls)))
    steps = [
        Step(
            kind="turn" if step.source == "agent" else "message" if replied else "prompt",
            message=message,
            segment=segment,
            span=(start, start + (used.completion_tokens or 0)),
            outcomes=tuple(map(_outcome, found)),
            time=now,
            copied=copied,
        )
    ]
    texts = [text for result in loose if (text := _text(result.content))]
    if texts:
        steps.append(Step("message", Message("user", "\n".join(texts)), segment, (0, 0), time=now, copied=copied))
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
    tokens = {kind: used.completion_tokens or 0}
    return cost.plus(turns=1, calls=calls, prompt=used.prompt_tokens or 0, cached=used.cached_tokens or 0, **tokens)


def _text(content: str | Sequence[AtifContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or f"[{part.type}: {part.source.path if part.source else ''}]" for part in content)


def _seconds(start: datetime, end: datetime) -> float:
    if (start.tzinfo is None) is not (end.tzinfo is None):  # one of them has no time zone
        start, end = start.replace(tzinfo=None), end.replace(tzinfo=None)
    return (end - start).total_seconds()
