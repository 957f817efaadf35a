"""What a person sees: text as it comes, thoughts dimmed, one line for each tool call, changes in colour.

Whatever a model, a tool or a file says is text: a control character that could move the cursor or hide something is
shown, not obeyed. Without a terminal there are no colours and nothing moves.
"""

import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from etude.agent.diff import Change, counts, renames
from etude.chat.messages import Call
from etude.harness.tools.tool import Outcome
from etude.harness.trace import Cost, Step
from etude.inference.chat_format import Part

WIDE = 160  # characters of a line where there is no terminal
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
# The argument that says what a call is about, under any of the names that tools are shown by.
MAIN = (
    *("command", "target_file", "file_path", "glob_pattern", "pattern", "query", "search_term", "url", "job_id"),
    *("bash_id", "shell_id", "target_directory", "path", "paths"),
)
# C0 and C1 but for newline and tab; what reorders a line of text; halves of surrogate pairs.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """Text with every control character as a sign."""
    return UNSAFE.sub(_sign, text.replace("\r\n", "\n"))


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else "\ufffd" if 0xD800 <= code < 0xE000 else f"\\u{code:04x}"


def title(call: Call) -> str:
    """A call in a few words: its main argument, on one line."""
    given = call.arguments or {}
    value: Any = next((given[name] for name in MAIN if given.get(name)), "")
    if not value:
        value = next((item for item in given.values() if isinstance(item, str)), "")
    text = value if isinstance(value, str) else " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return visible(" ".join(text.split()))


def result(outcome: Outcome) -> tuple[str, bool]:
    """What came of a call in a few words, and whether it is good."""
    facts = outcome.facts
    if outcome.error is not None:
        first = outcome.text.strip().splitlines() or [""]
        return f"{outcome.error.replace('_', ' ')}: {visible(first[0])}", False
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
    """One place to write to, from any thread."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._lock = threading.RLock()
        self._part: Part | None = None  # of the line that is being written
        self._activity, self._since = "", 0.0
        self._ticking = False

    @property
    def width(self) -> int:
        return self.console.width if self.console.is_terminal else WIDE

    # ------------------------------------------------------------------------------------------- the session

    def heard(self, part: Part, text: str) -> None:
        """What the model writes, as it comes."""
        with self._lock:
            if part == "call":
                self.end_line()
                self.doing(f"calling {visible(text)}" if text else "calling a tool")
                return
            if self._part != part:
                self.end_line()
                text = text.lstrip("\n")
            if text:
                self._part = part
                self._print(Text(visible(text), "dim italic" if part == "thinking" else ""), end="")

    def step(self, step: Step) -> None:
        """Something was said, or done."""
        with self._lock:
            if step.kind == "turn":
                self.end_line()
                for call, outcome in zip(step.message.calls, step.outcomes, strict=False):
                    self.call(call, outcome)
                if not step.closed and not step.message.calls:
                    self.note("(cut off here: the answer reached its longest)")
            elif step.kind == "summary-request":
                self.note("(the context is full: the model sums up)")
            elif step.kind == "summary":
                self.end_line()
            self.doing("thinking")

    def call(self, call: Call, outcome: Outcome) -> None:
        """One line: the tool, what about, what came of it, how long it took."""
        said, good = result(outcome)
        took = f"{outcome.seconds:.1f} s" if outcome.seconds >= 0.05 else ""
        tail = "  ".join(filter(None, [said, took]))
        tail = tail if len(tail) <= self.width // 2 else tail[: self.width // 2 - 1] + "…"
        name = visible(call.name) or "?"
        room = max(12, self.width - len(name) - len(tail) - 6)
        about = title(call)
        about = about if len(about) <= room else about[: room - 1] + "…"
        line = Text.assemble(("● ", "green" if good else "red"), (name, "bold"), " ", about)
        line.append(f"  {tail}", "dim" if good else "red")
        self._print(line)

    # ------------------------------------------------------------------------------------------- the program

    def note(self, text: str) -> None:
        with self._lock:
            self.end_line()
            self._print(Text(visible(text), "dim"))

    def say(self, text: str, style: str = "") -> None:
        with self._lock:
            self.end_line()
            self._print(Text(visible(text), style))

    def error(self, text: str) -> None:
        self.say(text, "red")

    def changes(self, changes: Sequence[Change]) -> None:
        """One line for each changed file."""
        moved = renames(changes)
        for change in changes:
            if change.path in moved.values():
                continue
            source = moved.get(change.path)
            verb = f"renamed from {source}" if source else change.verb
            link = f" -> {change.after.digest}" if change.after and change.after.kind == "link" else ""
            self.say(f"  {change.path}{link}  ({verb})", "bold")

    def patch(self, text: str, most: int | None = None, more: str = "/diff shows all") -> None:
        """A patch in colours, its first `most` lines; `more` says where the rest is."""
        lines = text.rstrip("\n").split("\n") if text else []
        with self._lock:
            self.end_line()
            for line in lines[:most]:
                self._print(Text(visible(line), _style(line)))
            if most is not None and len(lines) > most:
                self.note(f"… {len(lines) - most:,} lines more; {more}")
            if lines:
                self.note("+{:,} -{:,} lines".format(*counts(text)))

    def cost(self, cost: Cost, exact: bool) -> None:
        """What the session took so far."""
        kinds = ("thinking", "call", "commentary", "final", "summary")
        made = ", ".join(f"{name} {getattr(cost, name):,}" for name in kinds if getattr(cost, name))
        counted = "" if exact else ", as the endpoint counts"
        self.say(f"made {cost.made:,} tokens ({made or 'none'}{counted}); tools gave {cost.output:,}")
        self.say(f"{cost.turns} turns, {cost.calls} calls; prompts {cost.prompt:,}, of which cached {cost.cached:,}")
        self.say(f"model {cost.model_s:.1f} s, pod {cost.pod_s:.1f} s, all {cost.wall_s:.1f} s")

    # ------------------------------------------------------------------------------------------- what goes on

    def doing(self, what: str) -> None:
        """What is going on while nothing is written; shown by `tick`."""
        with self._lock:
            self._clear()
            self._activity, self._since = what, time.monotonic()

    def tick(self) -> None:
        """Show what is going on, on a line that the next one takes over."""
        with self._lock:
            if not self._activity or self._part is not None or not self.console.is_terminal:
                return
            took = time.monotonic() - self._since
            frame = FRAMES[int(took * 10) % len(FRAMES)]
            line = f"{frame} {self._activity}{f' {took:.0f} s' if took >= 1 else ''}"[: self.width - 1]
            self.console.file.write(f"\r\x1b[2K\x1b[2m{line}\x1b[0m")
            self.console.file.flush()
            self._ticking = True

    def end_line(self) -> None:
        """Be at the beginning of a line."""
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
