"""Export and import of traces in the Agent Trajectory Interchange Format (ATIF) 1.8.

Messages, thinking, calls, results, token counts, and ids and log-probabilities of sampled tokens use the fields of the
format. Everything else is in its `extra` fields, and the segment arrays, compressed, in `extra.etude` of the document:
`from_atif(to_atif(trace))` returns the identical trace. Documents of other tools have no such arrays: they give a
conversation that cannot be trained on. Import checks the fields that it reads and ignores the others.
"""

import base64
import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from etude import __version__
from etude.chat.messages import Message, Role, ToolCall
from etude.config import Settings, make_settings
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


def _join_parts(content: Any) -> Any:
    """Return a list of text, image and audio parts as text; other values are returned unchanged."""
    if not isinstance(content, list):
        return content
    try:
        return "\n".join(
            str(part["text"] if part["type"] == "text" else f"[{part['type']}: {part['source']['path']}]")
            for part in content
        )
    except (LookupError, TypeError):
        raise ValueError("must be text, or a list of parts that have a type and a text or a source") from None


def _parse_time(value: Any) -> Any:
    try:
        return datetime.fromisoformat(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError(f"must be a time in ISO 8601, not {value!r}") from None


class AtifObject(Settings, extra="ignore"):
    """The fields that import reads of an object of the format."""


class AtifToolCall(AtifObject):
    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]


class AtifResult(AtifObject):
    source_call_id: str | None = None
    content: Annotated[str | None, BeforeValidator(_join_parts)] = None
    subagent_trajectory_ref: list[dict[str, Any]] | None = None
    extra: dict[str, Any] | None = None


class Observation(AtifObject):
    results: list[AtifResult] = Field(default_factory=list)


class Metrics(AtifObject):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


class TrajectoryStep(AtifObject):
    source: Literal["system", "user", "agent"]
    message: Annotated[str, BeforeValidator(_join_parts)]
    timestamp: Annotated[datetime | None, BeforeValidator(_parse_time)] = None
    reasoning_content: str | None = None
    tool_calls: list[AtifToolCall] | None = None
    observation: Observation | None = None
    metrics: Metrics | None = None
    is_copied_context: bool | None = None


class AtifAgent(AtifObject):
    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class Trajectory(AtifObject):
    schema_version: Annotated[str, Field(pattern=r"^ATIF-v1\.[0-8]$")] = VERSION
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: Annotated[list[TrajectoryStep], Field(min_length=1)]
    final_metrics: dict[str, Any] | None = None
    extra: dict[str, Any] | None = None


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
    if not isinstance(document, dict):
        raise InputError(f"{name}: expected an object")
    try:
        trajectory = make_settings(Trajectory, name, **document)
        etude = (trajectory.extra or {}).get(AGENT)
        if etude is None:
            return _import_foreign(trajectory)
        place = f"{name}.extra.{AGENT}"
        if isinstance(etude, dict) and etude.get("format") != FORMAT:
            raise InputError(f"{place}.format: {etude.get('format')!r}; this program reads {FORMAT}")
        kept: EtudeExtra = from_json(EtudeExtra, etude, place)
        return _restore(_restore_lost_values(document, kept, f"{place}.restore"), name)
    except (RecursionError, MemoryError):
        raise InputError(f"{name}: too large or nested too deeply to be read") from None


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


def _restore(document: Json, name: str) -> Trace:
    """Return the trace of an exported document."""
    place = f"{name}.extra.{AGENT}"
    kept: EtudeExtra = from_json(EtudeExtra, document["extra"][AGENT], place)
    agent, final = document["agent"], document.get("final_metrics") or {}
    tools, where = agent.get("tool_definitions") or [], f"{name}.agent.tool_definitions"
    return Trace(
        id=from_json(str, document.get("session_id") or "", f"{name}.session_id"),
        task=kept.task,
        dialect=kept.dialect,
        model=from_json(str, agent.get("model_name") or "", f"{name}.agent.model_name"),
        tools=from_json(Sequence[Mapping[str, Any]], tools, where),
        segments=tuple(
            read_segment(part, _import_array, f"{place}.segments[{i}]") for i, part in enumerate(kept.segments)
        ),
        steps=tuple(_restore_step(step, f"{name}.steps[{i}]") for i, step in enumerate(document["steps"])),
        ending=kept.ending,
        cost=from_json(Cost, final.get("extra") or {}, f"{name}.final_metrics.extra"),
        exact=kept.exact,
        facts=kept.facts,
    )


def _restore_step(step: Json, where: str) -> Step:
    extra = step.get("extra") or {}
    rest = from_json(Mapping[str, Any], extra.get("message", {}), f"{where}.extra.message")
    try:
        calls = [
            {
                "id": call["tool_call_id"],
                "name": call["function_name"],
                "arguments": None if (call.get("extra") or {}).get("unread") else call["arguments"],
                **_select(call.get("extra"), "status", "raw", "span", "problem"),
            }
            for call in step.get("tool_calls") or ()
        ]
        message = {
            "role": ROLES[step["source"]],
            "content": step["message"],
            "thinking": step.get("reasoning_content") or "",
            "calls": calls,
        }
        outcomes = [
            {"text": result.get("content") or "", **_select(result.get("extra"), "error", "facts", "seconds")}
            for result in (step.get("observation") or {}).get("results", ())
        ]
    except DAMAGE as error:
        raise InputError(f"{where}: damaged: {error}") from error
    form = {
        **_select(extra, "kind", "segment", "span", "closed", "time", "copied"),
        "message": message | dict(rest),
        "outcomes": outcomes,
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


def _import_foreign(document: Trajectory) -> Trace:
    """Convert a document of another tool to a trace, as if from a chat API."""
    started = next((step.timestamp for step in document.steps if step.timestamp), None)
    steps: list[Step] = []
    cost, segment, replied, now = Cost(), 0, False, 0.0
    for step in document.steps:
        copied = bool(step.is_copied_context)
        if copied and steps and not steps[-1].copied:
            segment, replied = segment + 1, False
        now = _seconds(started, step.timestamp) if started and step.timestamp else now
        imported = _import_foreign_step(step, segment, now, replied)
        steps += imported
        replied = replied or step.source == "agent"
        if step.source == "agent" and not copied:
            cost = _with_step(cost, imported[0], step.metrics or Metrics())
    last = steps[-1]
    facts: dict[str, Any] = {"agent": document.agent.name, "agent_version": document.agent.version}
    if document.final_metrics is not None:
        facts["final_metrics"] = document.final_metrics
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
    message = Message(ROLES[step.source], step.message, step.reasoning_content or "", tuple(map(_call, calls)))
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
    texts = [text for result in loose if (text := result.content)]
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
            facts["subagents"] = result.subagent_trajectory_ref
    return ToolOutcome("\n".join(result.content or "" for result in results), facts=facts)


def _with_step(cost: Cost, step: Step, used: Metrics) -> Cost:
    calls = len(step.message.calls)
    kind = "call" if calls else "final"
    tokens = {kind: used.completion_tokens or 0}
    return cost.plus(turns=1, calls=calls, prompt=used.prompt_tokens or 0, cached=used.cached_tokens or 0, **tokens)


def _seconds(start: datetime, end: datetime) -> float:
    if (start.tzinfo is None) is not (end.tzinfo is None):  # one of them has no time zone
        start, end = start.replace(tzinfo=None), end.replace(tzinfo=None)
    return (end - start).total_seconds()
