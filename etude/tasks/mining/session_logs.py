"""Match logs of agent sessions (ATIF) to the changes that kept the lines they wrote: a request and its answer."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.errors import InputError
from etude.tasks.leaks import strings_in
from etude.tasks.mining.classify import ChangeParts, added_lines

MIN_KEPT = 0.7  # share of a change's lines that come from the session
MIN_LINES = 3  # of a change that can be matched
MIN_CHARACTERS = 6  # shorter lines (`else:`, `}`) are everywhere
MAX_LOG_BYTES = 64 << 20


@dataclass(frozen=True)
class SessionLog:
    """The request of a session and the lines that its tool calls wrote."""

    path: str
    request: str
    written: frozenset[str] = field(repr=False)


def read_session_logs(directory: Path) -> list[SessionLog]:
    """Read all ATIF logs (*.json) below a directory; InputError if there is none."""
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory; expected one with ATIF logs (*.json)")
    found = [log for path in sorted(directory.rglob("*.json")) for log in _read(path)]
    if not found:
        raise InputError(f"{directory}: no ATIF log with a user's request and tool calls below it")
    return found


def _read(path: Path) -> Iterator[SessionLog]:
    if path.stat().st_size > MAX_LOG_BYTES:
        return
    try:
        trajectory = json.loads(path.read_bytes())
    except ValueError:
        return
    if isinstance(trajectory, dict) and str(trajectory.get("schema_version", "")).startswith("ATIF"):
        log = session_log(trajectory, str(path))
        if log.request and log.written:
            yield log


def session_log(trajectory: Mapping[str, Any], path: str = "") -> SessionLog:
    """Return the first request of a trajectory, and the lines in its tool calls."""
    steps = [
        step for step in trajectory.get("steps", ()) if isinstance(step, dict) and not step.get("is_copied_context")
    ]
    requests = [_message(step) for step in steps if step.get("source") == "user"]
    written: set[str] = set()
    for step in steps:
        for call in step.get("tool_calls") or ():
            for text in strings_in(call.get("arguments", {})):
                written.update(normal_lines(text))
    return SessionLog(path, next((text for text in requests if text.strip()), "").strip(), frozenset(written))


def _message(step: Mapping[str, Any]) -> str:
    message = step.get("message", "")
    if isinstance(message, list):
        message = "\n".join(str(part.get("text", "")) for part in message if isinstance(part, dict))
    return re.sub(r"<(system[-_ ]\w+|environment\w*|user_info)>.*?</\1>", "", str(message), flags=re.S)


def normal_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text or of the added side of a patch, without white space."""
    for line in text.splitlines():
        for each in (line, line[1:]) if line.startswith("+") else (line,):
            squeezed = re.sub(r"\s+", "", each)
            if len(squeezed) >= MIN_CHARACTERS:
                yield squeezed


def session_of_change(parts: ChangeParts, sessions: Sequence[SessionLog]) -> str:
    """Return the request of the session whose lines a change kept, or ""."""
    lines = {each for line in added_lines(parts.source) for each in normal_lines(line)}
    if len(lines) < MIN_LINES:
        return ""
    shares = [(len(lines & session.written) / len(lines), session.request) for session in sessions]
    share, request = max(shares, default=(0.0, ""))
    return request if share >= MIN_KEPT else ""
