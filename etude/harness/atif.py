"""Export of traces in the Agent Trajectory Interchange Format (ATIF) 1.8.

Messages, thinking, calls, results, token counts, and ids and log-probabilities of sampled tokens use the fields of the
format. Everything else is in its `extra` fields, and the segment arrays, compressed, in `extra.etude` of the document.
"""

import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from etude import __version__
from etude.chat.messages import Role
from etude.errors import InputError
from etude.harness.trace import Step, Trace
from etude.harness.trace_store import Array, deflate, to_json, write_segment

VERSION = "ATIF-v1.8"
FORMAT = 1  # version of the `extra.etude` object
AGENT = "etude"

SOURCES: dict[Role, str] = {"system": "system", "user": "user", "assistant": "agent", "tool": "system"}
SURROGATES = re.compile("[\ud800-\udfff]")  # lone surrogates: not valid in UTF-8


def to_atif(trace: Trace) -> dict[str, Any]:
    """Return the ATIF 1.8 document of a trace, as strict JSON.

    JSON in UTF-8 has no lone surrogates and no infinite numbers: U+FFFD and the text of the number stand for them.
    """
    if not trace.steps:
        raise InputError(f"trace {trace.id} has no steps, but an ATIF document needs at least one")
    name = f"trace {trace.id}"
    try:
        document: dict[str, Any] = _clean(_export(trace, name))
    except RecursionError:
        raise InputError(f"{name}: nested too deeply for a document") from None
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
        "steps": [_export_step(trace, i, f"{name}.steps[{i}]") for i in range(len(trace.steps))],
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


def _export_step(trace: Trace, index: int, where: str) -> dict[str, Any]:
    step = trace.steps[index]
    extra = to_json(step, where)
    message, outcomes = extra.pop("message"), extra.pop("outcomes")
    source = SOURCES[step.message.role]
    is_agent = source == "agent"
    calls = message["calls"] if is_agent else []
    extra_keys = {"call", "name"} if is_agent else {"call", "name", "thinking", "calls"}
    if message["role"] == "tool":
        extra_keys.add("role")
    if rest := {key: value for key, value in message.items() if key in extra_keys and value}:
        extra["message"] = rest
    results = [_export_outcome(outcome, calls[i : i + 1]) for i, outcome in enumerate(outcomes)]
    return _without_none(
        step_id=index + 1,
        source=source,
        message=message["content"],
        reasoning_content=message["thinking"] or None if is_agent else None,
        tool_calls=[_export_call(call) for call in calls] or None,
        observation={"results": results} if results else None,
        metrics=_metrics(trace, step) if _is_sampled(step) else None,
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


def _export_outcome(outcome: dict[str, Any], call: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    extra = {key: outcome[key] for key in ("error", "facts") if outcome[key]} | {"seconds": outcome["seconds"]}
    call_id = call[0]["id"] if call else None
    return _without_none(source_call_id=call_id, content=outcome["text"], extra=extra)


def _metrics(trace: Trace, step: Step) -> dict[str, Any] | None:
    start, end = step.span
    if not 0 <= start <= end:
        return None
    metrics: dict[str, Any] = {"prompt_tokens": start, "completion_tokens": end - start}
    segment = trace.segments[step.segment] if 0 <= step.segment < len(trace.segments) else None
    if not trace.exact or segment is None or end > len(segment):
        return metrics
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


def _clean(value: Any) -> Any:
    """Return the value as strict JSON."""
    if isinstance(value, str):
        return SURROGATES.sub("\ufffd", value)
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value
