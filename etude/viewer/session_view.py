"""A session as a page tells it: turn by turn, calls with what came of them, diffs, summaries; and token by token.

Everything here is text that a model or a program in a pod wrote: it is data, and the pages show it as nothing else.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from etude.chat.messages import Call
from etude.chat.tokenizer import Tokenizer
from etude.errors import EtudeError
from etude.harness.tools.tool import Outcome
from etude.harness.trace import Segment, Step, Trace
from etude.viewer.file_history import Workspace
from etude.viewer.run_reader import Facts

PAGE = 2000  # tokens told at once
HEADLINES = (  # the argument that says most of a call, in this order
    *("command", "file_path", "target_file", "target_directory", "path", "pattern", "glob_pattern"),
    *("query", "search_term", "url", "job_id", "bash_id"),
)


@dataclass(frozen=True)
class Cut:
    """How much of a text is told; 0 is all of it."""

    text: int = 0

    def __call__(self, text: str) -> str:
        if not self.text or len(text) <= self.text:
            return text
        half = self.text // 2
        return f"{text[:half]}\n[{len(text) - 2 * half:,} characters are left out here]\n{text[-half:]}"


def tell(trace: Trace, cut: Cut | None = None) -> Facts:
    """A whole session."""
    cut = cut or Cut()
    names = trace.facts.get("tool_names")
    own: dict[str, str] = {str(key): str(value) for key, value in names.items()} if isinstance(names, dict) else {}
    files = Workspace()
    steps: list[Facts] = []
    turn = 0
    before = 0.0
    for step in trace.steps:
        turn += step.kind == "turn"
        steps.append(_step(trace, step, turn, own, files, cut, before))
        before = max(before, step.time)
    return {
        "id": trace.id,
        "dialect": trace.dialect,
        "model": trace.model,
        "exact": trace.exact,
        "ending": trace.ending,
        "final": cut(trace.final),
        "cost": asdict(trace.cost) | {"made": trace.cost.made},
        "errors": dict(trace.errors),
        "versions": list(trace.versions()),
        "tools": [_tool_name(tool) for tool in trace.tools],
        "facts": {name: value for name, value in trace.facts.items() if name not in ("tool_names", "effort")},
        "segments": [
            {"kind": segment.kind, "tokens": len(segment), "made": int(segment.made.sum())}
            for segment in trace.segments
        ],
        "steps": steps,
        "strip": strip(trace),
    }


def _tool_name(tool: Any) -> str:
    try:
        return str(tool["function"]["name"])
    except (KeyError, TypeError):
        return "?"


def _step(trace: Trace, step: Step, turn: int, own: dict[str, str], files: Workspace, cut: Cut, before: float) -> Facts:
    message = step.message
    told: Facts = {
        "kind": step.kind,
        "role": message.role,
        "segment": step.segment,
        "time": round(step.time, 3),
        "text": cut(message.content),
    }
    if step.kind in ("turn", "summary"):
        tools_s = min(sum(outcome.seconds for outcome in step.outcomes), max(0.0, step.time - before))
        told |= {"model_s": round(max(0.0, step.time - before - tools_s), 3), "tools_s": round(tools_s, 3)}
        told |= _tokens_of(trace, step)
    if step.kind == "turn":
        told["turn"] = turn
    if message.thinking:
        told["thinking"] = cut(message.thinking)
    if not step.closed:
        told["unclosed"] = True
    if step.copied:
        told["copied"] = True
    if message.calls:
        outcomes: list[Outcome | None] = [*step.outcomes]
        outcomes += [None] * (len(message.calls) - len(outcomes))
        told["calls"] = [
            _call(call, outcome, own.get(call.name, call.name), files, cut)
            for call, outcome in zip(message.calls, outcomes, strict=False)
        ]
    return told


def _tokens_of(trace: Trace, step: Step) -> Facts:
    """How many tokens a turn has, how likely they were, and whose they are."""
    start, end = step.span
    if not 0 <= step.segment < len(trace.segments) or start < 0:
        return {}
    segment = trace.segments[step.segment]
    made = segment.made[start:end]
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


def _call(call: Call, outcome: Outcome | None, tool: str, files: Workspace, cut: Cut) -> Facts:
    told: Facts = {"name": call.name, "tool": tool, "headline": headline(call)}
    if call.status != "ok":
        told |= {"status": call.status, "problem": call.problem, "raw": cut(call.raw)}
    else:
        told["arguments"] = [
            [str(name), cut(value if isinstance(value, str) else _as_text(value))]
            for name, value in (call.arguments or {}).items()
        ]
    if outcome is None:
        return told
    told |= {"output": cut(outcome.text), "seconds": round(outcome.seconds, 4)}
    if outcome.error:
        told["error"] = outcome.error
    if (code := outcome.facts.get("exit_code")) is not None:
        told["exit_code"] = code
    for name in ("timed_out", "running", "killed"):
        if outcome.facts.get(name):
            told[name] = True
    if (diff := files.follow(tool, call, outcome)) is not None:
        told["diff"] = {
            "path": diff.path,
            "added": diff.added,
            "removed": diff.removed,
            "known": diff.known,
            "lines": [[mark, line if len(line) <= 2000 else f"{line[:2000]} ..."] for mark, line in diff.lines],
        }
    return told


def headline(call: Call) -> str:
    """What a call is about, in a line."""
    given = call.arguments or {}
    for name in (*HEADLINES, *given):
        if isinstance(value := given.get(name), str) and value.strip():
            line = value.strip().split("\n")[0]
            return line if len(line) <= 200 else f"{line[:200]}..."
    return ""


def _as_text(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, indent=1)
    except (TypeError, ValueError):
        return repr(value)


# ------------------------------------------------------------------------------------------- at a glance


def strip(trace: Trace) -> list[Facts]:
    """The session in one row of marks: a kind of call or message each, whether it failed, and how long it took."""
    names = trace.facts.get("tool_names")
    own = names if isinstance(names, dict) else {}
    marks: list[Facts] = []
    turn = 0
    for step in trace.steps:
        if step.kind == "turn":
            turn += 1
            outcomes: list[Outcome | None] = [*step.outcomes]
            outcomes += [None] * (len(step.message.calls) - len(outcomes))
            pairs = zip(step.message.calls, outcomes, strict=False)
            marks += [_mark(call, outcome, str(own.get(call.name, call.name)), turn) for call, outcome in pairs]
            if not step.message.calls:
                marks.append({"kind": "final", "turn": turn} | ({"bad": "cut off"} if not step.closed else {}))
        elif step.kind == "summary":
            marks.append({"kind": "summary", "turn": turn})
        elif step.kind == "message":
            marks.append({"kind": "message", "turn": turn})
    return marks


KINDS = {
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


def _mark(call: Call, outcome: Outcome | None, tool: str, turn: int) -> Facts:
    says = f"{call.name} {headline(call)}".strip()
    mark: Facts = {"kind": KINDS.get(tool, "other"), "turn": turn, "says": says[:120]}
    if call.status != "ok":
        mark["bad"] = call.status
    elif outcome is not None and outcome.error:
        mark["bad"] = outcome.error
    elif outcome is not None and outcome.facts.get("exit_code") not in (None, 0):
        mark["code"] = outcome.facts["exit_code"]
    return mark


# ------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class Spelling:
    """How token ids are written out; ids alone where the run's tokenizer cannot be read."""

    directory: Path

    def texts(self, ids: Sequence[int]) -> list[str]:
        tokenizer, _ = _load(self.directory)
        if tokenizer is None:
            return [f"⟨{id}⟩" for id in ids]
        return [_spell(self.directory, id) for id in ids]

    @property
    def problem(self) -> str:
        return _load(self.directory)[1]


@lru_cache(maxsize=8)
def _load(directory: Path) -> tuple[Tokenizer | None, str]:
    try:
        return Tokenizer.load(directory), ""
    except EtudeError as error:
        return None, f"the tokens cannot be spelled: {error}"


@lru_cache(maxsize=1 << 18)
def _spell(directory: Path, id: int) -> str:
    tokenizer, _ = _load(directory)
    assert tokenizer is not None
    return tokenizer.decode([id]) or f"⟨{id}⟩"


def tell_tokens(trace: Trace, segment: int, start: int, spelling: Spelling) -> Facts:
    """One page of a segment's tokens: text, log-probability, made by the model or not, version of the weights."""
    if not 0 <= segment < len(trace.segments):
        return {"segment": segment, "start": 0, "total": 0, "texts": [], "problem": "there is no such segment"}
    part = trace.segments[segment]
    start = max(0, min(start, len(part)))
    end = min(len(part), start + PAGE)
    ids = [int(id) for id in part.tokens[start:end]]
    return {
        "segment": segment,
        "kind": part.kind,
        "start": start,
        "total": len(part),
        "ids": ids,
        "texts": spelling.texts(ids),
        "made": _runs(part.made[start:end].astype(int).tolist()),
        "versions": _runs(part.versions[start:end].tolist()),
        "logprobs": _logprobs(part, start, end),
        "problem": spelling.problem,
    }


def _logprobs(part: Segment, start: int, end: int) -> list[float | None]:
    values = part.logprobs[start:end].tolist()
    return [round(value, 3) if math.isfinite(value) else None for value in values]


def _runs(values: Sequence[int]) -> list[list[int]]:
    """Equal neighbours together: [value, how many]."""
    found: list[list[int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1][1] += 1
        else:
            found.append([value, 1])
    return found
