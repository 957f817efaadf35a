"""A session as JSON for its page: turns, tool calls with results, diffs and summaries; and token by token.

All text was written by a model or a program in a pod. It is data, and the pages show it only as text.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from etude.chat.messages import ToolCall
from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import Segment, Step, Trace
from etude.viewer.file_history import FileHistory
from etude.viewer.run_reader import JsonObject

PAGE_TOKENS = 2000  # tokens per response
MAIN_ARGUMENTS = (  # the first one present is a call's headline
    *("command", "file_path", "target_file", "target_directory", "path", "pattern", "glob_pattern"),
    *("query", "search_term", "url", "job_id", "bash_id"),
)


@dataclass(frozen=True)
class TextLimit:
    """Shortens long texts in the middle; 0 means no limit."""

    characters: int = 0

    def __call__(self, text: str) -> str:
        if not self.characters or len(text) <= self.characters:
            return text
        half = self.characters // 2
        return f"{text[:half]}\n[{len(text) - 2 * half:,} characters are left out here]\n{text[-half:]}"


def describe_session(trace: Trace, text_limit: TextLimit | None = None) -> JsonObject:
    """Return a session as JSON."""
    text_limit = text_limit or TextLimit()
    names = trace.facts.get("tool_names")
    tool_names: dict[str, str] = (
        {str(key): str(value) for key, value in names.items()} if isinstance(names, dict) else {}
    )
    files = FileHistory()
    steps: list[JsonObject] = []
    turn = 0
    previous_time = 0.0
    for step in trace.steps:
        turn += step.kind == "turn"
        steps.append(_step(trace, step, turn, tool_names, files, text_limit, previous_time))
        previous_time = max(previous_time, step.time)
    return {
        "id": trace.id,
        "dialect": trace.dialect,
        "model": trace.model,
        "exact": trace.exact,
        "ending": trace.ending,
        "final": text_limit(trace.final),
        "cost": asdict(trace.cost) | {"made": trace.cost.sampled},
        "errors": dict(trace.errors),
        "versions": list(trace.versions()),
        "tools": [_tool_name(tool) for tool in trace.tools],
        "facts": {name: value for name, value in trace.facts.items() if name not in ("tool_names", "effort")},
        "segments": [
            {"kind": segment.kind, "tokens": len(segment), "made": int(segment.sampled.sum())}
            for segment in trace.segments
        ],
        "steps": steps,
        "strip": activity_strip(trace),
    }


def _tool_name(tool: Any) -> str:
    try:
        return str(tool["function"]["name"])
    except (KeyError, TypeError):
        return "?"


def _step(
    trace: Trace,
    step: Step,
    turn: int,
    tool_names: dict[str, str],
    files: FileHistory,
    text_limit: TextLimit,
    previous_time: float,
) -> JsonObject:
    message = step.message
    view: JsonObject = {
        "kind": step.kind,
        "role": message.role,
        "segment": step.segment,
        "time": round(step.time, 3),
        "text": text_limit(message.content),
    }
    if step.kind in ("turn", "summary"):
        tools_s = min(sum(outcome.seconds for outcome in step.outcomes), max(0.0, step.time - previous_time))
        view |= {"model_s": round(max(0.0, step.time - previous_time - tools_s), 3), "tools_s": round(tools_s, 3)}
        view |= _token_facts(trace, step)
    if step.kind == "turn":
        view["turn"] = turn
    if message.thinking:
        view["thinking"] = text_limit(message.thinking)
    if not step.closed:
        view["unclosed"] = True
    if step.copied:
        view["copied"] = True
    if message.calls:
        outcomes: list[ToolOutcome | None] = [*step.outcomes]
        outcomes += [None] * (len(message.calls) - len(outcomes))
        view["calls"] = [
            _call(call, outcome, tool_names.get(call.name, call.name), files, text_limit)
            for call, outcome in zip(message.calls, outcomes, strict=False)
        ]
    return view


def _token_facts(trace: Trace, step: Step) -> JsonObject:
    """Return a turn's sampled tokens, their mean log-probability, and the weight versions that sampled them."""
    start, end = step.span
    if not 0 <= step.segment < len(trace.segments) or start < 0:
        return {}
    segment = trace.segments[step.segment]
    made = segment.sampled[start:end]
    if not made.any():
        return {"span": [start, end], "tokens": 0}
    logprobs = segment.logprobs[start:end][made]
    versions = segment.versions[start:end][made]
    mean = float(np.mean(logprobs, dtype=np.float64))
    return {
        "span": [start, end],
        "tokens": int(made.sum()),
        "logprob": round(mean, 4) if math.isfinite(mean) else None,
        "versions": [int(versions.min()), int(versions.max())],
    }


def _call(
    call: ToolCall, outcome: ToolOutcome | None, tool: str, files: FileHistory, text_limit: TextLimit
) -> JsonObject:
    view: JsonObject = {"name": call.name, "tool": tool, "headline": headline(call)}
    if call.status != "ok":
        view |= {"status": call.status, "problem": call.problem, "raw": text_limit(call.raw)}
    else:
        view["arguments"] = [
            [str(name), text_limit(value if isinstance(value, str) else _as_text(value))]
            for name, value in (call.arguments or {}).items()
        ]
    if outcome is None:
        return view
    view |= {"output": text_limit(outcome.text), "seconds": round(outcome.seconds, 4)}
    if outcome.error:
        view["error"] = outcome.error
    if (code := outcome.facts.get("exit_code")) is not None:
        view["exit_code"] = code
    for name in ("timed_out", "running", "killed"):
        if outcome.facts.get(name):
            view[name] = True
    if (diff := files.apply_call(tool, call, outcome)) is not None:
        view["diff"] = {
            "path": diff.path,
            "added": diff.added,
            "removed": diff.removed,
            "known": diff.known,
            "lines": [[mark, line if len(line) <= 2000 else f"{line[:2000]} ..."] for mark, line in diff.lines],
        }
    return view


def headline(call: ToolCall) -> str:
    """Return the main argument of a call on one line."""
    given = call.arguments or {}
    for name in (*MAIN_ARGUMENTS, *given):
        if isinstance(value := given.get(name), str) and value.strip():
            line = value.strip().split("\n")[0]
            return line if len(line) <= 200 else f"{line[:200]}..."
    return ""


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=1)
    except (TypeError, ValueError):
        return repr(value)


# ------------------------------------------------------------------------------------------- activity strip


def activity_strip(trace: Trace) -> list[JsonObject]:
    """Return the session as a row of marks, one per call or message, with its kind and whether it failed."""
    names = trace.facts.get("tool_names")
    tool_names = names if isinstance(names, dict) else {}
    marks: list[JsonObject] = []
    turn = 0
    for step in trace.steps:
        if step.kind == "turn":
            turn += 1
            outcomes: list[ToolOutcome | None] = [*step.outcomes]
            outcomes += [None] * (len(step.message.calls) - len(outcomes))
            pairs = zip(step.message.calls, outcomes, strict=False)
            marks += [_mark(call, outcome, str(tool_names.get(call.name, call.name)), turn) for call, outcome in pairs]
            if not step.message.calls:
                marks.append({"kind": "final", "turn": turn} | ({"bad": "cut off"} if not step.closed else {}))
        elif step.kind == "summary":
            marks.append({"kind": "summary", "turn": turn})
        elif step.kind == "message":
            marks.append({"kind": "message", "turn": turn})
    return marks


TOOL_KINDS = {
    "read_file": "look",
    "list_dir": "look",
    "glob_file_search": "look",
    "grep": "look",
    "codebase_search": "look",
    "read_lints": "look",
    "web_search": "look",
    "web_fetch": "look",
    "search_replace": "edit",
    "write": "edit",
    "delete_file": "edit",
    "run_terminal_cmd": "run",
    "await": "run",
    "kill": "run",
    "todo_write": "plan",
}


def _mark(call: ToolCall, outcome: ToolOutcome | None, tool: str, turn: int) -> JsonObject:
    text = f"{call.name} {headline(call)}".strip()
    mark: JsonObject = {"kind": TOOL_KINDS.get(tool, "other"), "turn": turn, "text": text[:120]}
    if call.status != "ok":
        mark["bad"] = call.status
    elif outcome is not None and outcome.error:
        mark["bad"] = outcome.error
    elif outcome is not None and outcome.facts.get("exit_code") not in (None, 0):
        mark["code"] = outcome.facts["exit_code"]
    return mark


# ------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class TokenTexts:
    """Decodes single tokens with the run's tokenizer; shows ids if it cannot be read."""

    directory: Path

    def texts(self, ids: Sequence[int]) -> list[str]:
        tokenizer, _ = _load_tokenizer(self.directory)
        if tokenizer is None:
            return [f"⟨{id}⟩" for id in ids]
        return [_decode(self.directory, id) for id in ids]

    @property
    def problem(self) -> str:
        return _load_tokenizer(self.directory)[1]


@lru_cache(maxsize=8)
def _load_tokenizer(directory: Path) -> tuple[Tokenizer | None, str]:
    try:
        return Tokenizer.load(directory), ""
    except EtudeError as error:
        return None, f"the tokens cannot be decoded: {error}"


@lru_cache(maxsize=1 << 18)
def _decode(directory: Path, id: int) -> str:
    tokenizer, _ = _load_tokenizer(directory)
    assert tokenizer is not None
    return tokenizer.decode([id]) or f"⟨{id}⟩"


def describe_tokens(trace: Trace, segment: int, start: int, token_texts: TokenTexts) -> JsonObject:
    """Return one page of a segment's tokens: text, log-probability, whether sampled, and weight version."""
    if not 0 <= segment < len(trace.segments):
        return {"segment": segment, "start": 0, "total": 0, "texts": [], "problem": "no such segment"}
    part = trace.segments[segment]
    start = max(0, min(start, len(part)))
    end = min(len(part), start + PAGE_TOKENS)
    ids = [int(id) for id in part.tokens[start:end]]
    return {
        "segment": segment,
        "kind": part.kind,
        "start": start,
        "total": len(part),
        "ids": ids,
        "texts": token_texts.texts(ids),
        "made": _run_lengths(part.sampled[start:end].astype(int).tolist()),
        "versions": _run_lengths(part.versions[start:end].tolist()),
        "logprobs": _logprobs(part, start, end),
        "problem": token_texts.problem,
    }


def _logprobs(part: Segment, start: int, end: int) -> list[float | None]:
    values = part.logprobs[start:end].tolist()
    return [round(value, 3) if math.isfinite(value) else None for value in values]


def _run_lengths(values: Sequence[int]) -> list[list[int]]:
    """Run-length encode: [value, count] pairs."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found
