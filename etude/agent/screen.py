"""Terminal output: streamed text, thinking dimmed, one line per tool call, patches in colour.

Text from models, tools and files is untrusted: control characters that could move the cursor or hide something are
shown as visible symbols. Without a terminal there are no colours and no spinner.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from etude.agent.changes import count_changed_lines, describe_change, find_renames
from etude.chat.messages import StreamPart, ToolCall
from etude.harness.tools.tool import ToolOutcome
from etude.harness.trace import Cost, Step
from etude.pods.workspace import FileChange
from etude.system.terminal import Console, escape_control

DEFAULT_WIDTH = 160  # characters of a line without a terminal
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# The argument that best describes a call, under the names of all tool aliases; the first one present is shown.
MAIN_ARGUMENTS = (
    *("command", "target_file", "file_path", "glob_pattern", "pattern", "query", "search_term", "url", "job_id"),
    *("bash_id", "shell_id", "target_directory", "path", "paths"),
)


def call_title(call: ToolCall) -> str:
    """Return a call's main argument on one line."""
    given = call.arguments or {}
    value: Any = next((given[name] for name in MAIN_ARGUMENTS if given.get(name)), "")
    if not value:
        value = next((item for item in given.values() if isinstance(item, str)), "")
    text = value if isinstance(value, str) else " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return escape_control(" ".join(text.split()))


def outcome_summary(outcome: ToolOutcome) -> tuple[str, bool]:
    """Return the outcome of a call in a few words, and whether it succeeded."""
    facts = outcome.facts
    if outcome.error is not None:
        first = outcome.text.strip().splitlines() or [""]
        return f"{outcome.error.replace('_', ' ')}: {escape_control(first[0])}", False
    if facts.get("running"):
        return f"running as job {facts.get('job')}", True
    if isinstance(code := facts.get("exit_code"), int):
        return f"exit {code}", code == 0
    if "lines_added" in facts or "lines_removed" in facts:
        return f"+{facts.get('lines_added', 0)} -{facts.get('lines_removed', 0)}", True
    if isinstance(matches := facts.get("matches"), int):
        return f"{matches} match{'' if matches == 1 else 'es'}", True
    lines = outcome.text.count("\n") + bool(outcome.text)
    return f"{lines} line{'' if lines == 1 else 's'}", True


class Screen:
    """Writes to the console; safe to call from any thread."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lock = threading.RLock()
        self._part: StreamPart | None = None  # kind of text on the unfinished line
        self._activity, self._since = "", 0.0
        self._ticking = False

    @property
    def width(self) -> int:
        return self.console.width if self.console.is_terminal else DEFAULT_WIDTH

    # ------------------------------------------------------------------------------------------- the session

    def stream_text(self, part: StreamPart, text: str) -> None:
        """Print a part of the model's answer as it arrives."""
        with self._lock:
            if part == "call":
                self.end_line()
                self.set_activity(f"calling {escape_control(text)}" if text else "calling a tool")
                return
            if self._part != part:
                self.end_line()
                text = text.lstrip("\n")
            if text:
                self._part = part
                self._print(Text(escape_control(text), "dim italic" if part == "thinking" else ""), end="")

    def show_step(self, step: Step) -> None:
        """Print the tool calls and notes of a finished step."""
        with self._lock:
            if step.kind == "turn":
                self.end_line()
                for call, outcome in zip(step.message.calls, step.outcomes, strict=False):
                    self.show_call(call, outcome)
                if not step.closed and not step.message.calls:
                    self.note("(cut off: the answer reached its maximum length)")
            elif step.kind == "summary-request":
                self.note("(the context is full: the model writes a summary)")
            elif step.kind == "summary":
                self.end_line()
            self.set_activity("thinking")

    def show_call(self, call: ToolCall, outcome: ToolOutcome) -> None:
        """Print one line: the tool, its main argument, the outcome, and the time it took."""
        summary, succeeded = outcome_summary(outcome)
        took = f"{outcome.seconds:.1f} s" if outcome.seconds >= 0.05 else ""
        tail = "  ".join(filter(None, [summary, took]))
        tail = tail if len(tail) <= self.width // 2 else tail[: self.width // 2 - 1] + "…"
        name = escape_control(call.name) or "?"
        room = max(12, self.width - len(name) - len(tail) - 6)
        about = call_title(call)
        about = about if len(about) <= room else about[: room - 1] + "…"
        line = Text.assemble(("● ", "green" if succeeded else "red"), (name, "bold"), " ", about)
        line.append(f"  {tail}", "dim" if succeeded else "red")
        self._print(line)

    # ------------------------------------------------------------------------------------------- notes

    def note(self, text: str) -> None:
        self.print(text, "dim")

    def print(self, text: str, style: str = "") -> None:
        with self._lock:
            self.end_line()
            self._print(Text(escape_control(text), style))

    def error(self, text: str) -> None:
        self.print(text, "red")

    def show_changes(self, changes: Sequence[FileChange]) -> None:
        """Print one line per changed file."""
        moved = find_renames(changes)
        for change in changes:
            if change.path in moved.values():
                continue
            source = moved.get(change.path)
            verb = f"renamed from {source}" if source else describe_change(change)
            link = f" -> {change.after.target}" if change.after and change.after.kind == "symlink" else ""
            self.print(f"  {change.path}{link}  ({verb})", "bold")

    def show_patch(self, text: str, max_lines: int | None = None, more: str = "/diff shows all") -> None:
        """Print the first lines of a patch in colour; `more` tells the user how to see the rest."""
        lines = text.rstrip("\n").split("\n") if text else []
        with self._lock:
            self.end_line()
            for line in lines[:max_lines]:
                self._print(Text(escape_control(line), _style(line)))
            if max_lines is not None and len(lines) > max_lines:
                self.note(f"… {len(lines) - max_lines:,} more lines; {more}")
            if lines:
                self.note("+{:,} -{:,} lines".format(*count_changed_lines(text)))

    def show_cost(self, cost: Cost, exact: bool) -> None:
        """Print the tokens, calls and seconds of the session so far."""
        kinds = ("thinking", "call", "commentary", "final", "summary")
        by_kind = ", ".join(f"{name} {getattr(cost, name):,}" for name in kinds if getattr(cost, name))
        counted = "" if exact else ", as the endpoint counts"
        self.print(f"sampled {cost.sampled:,} tokens ({by_kind or 'none'}{counted}); tool output {cost.output:,}")
        self.print(f"{cost.turns} turns, {cost.calls} calls; prompts {cost.prompt:,}, of which cached {cost.cached:,}")
        self.print(f"model {cost.model_s:.1f} s, pod {cost.pod_s:.1f} s, total {cost.wall_s:.1f} s")

    # ------------------------------------------------------------------------------------------- activity line

    def set_activity(self, what: str) -> None:
        """Set the activity that `tick` shows while nothing is printed; "" for none."""
        with self._lock:
            self._clear()
            self._activity, self._since = what, time.monotonic()

    def tick(self) -> None:
        """Redraw the activity line, which the next printed line replaces."""
        with self._lock:
            if not self._activity or self._part is not None or not self.console.is_terminal:
                return
            took = time.monotonic() - self._since
            frame = SPINNER[int(took * 10) % len(SPINNER)]
            line = f"{frame} {self._activity}{f' {took:.0f} s' if took >= 1 else ''}"[: self.width - 1]
            self.console.file.write(f"\r\x1b[2K\x1b[2m{line}\x1b[0m")
            self.console.file.flush()
            self._ticking = True

    def end_line(self) -> None:
        """End the unfinished line, if any."""
        with self._lock:
            if self._part is not None:
                self._part = None
                self._print(Text(""))

    def _print(self, text: Text, end: str = "\n") -> None:
        self._clear()
        self.console.print(text, end=end, soft_wrap=True)
        self.console.file.flush()

    def _clear(self) -> None:
        if self._ticking:
            self._ticking = False
            self.console.file.write("\r\x1b[2K")
            self.console.file.flush()


def _style(line: str) -> str:
    if line.startswith(("diff --git", "+++ ", "--- ", "new file", "deleted file", "old mode", "new mode", "rename ")):
        return "bold"
    styles = {"+": "green", "-": "red", "@": "cyan"}
    return styles.get(line[:1], "yellow" if line.startswith(("Binary", "#")) else "")
