"""Diffs of a session's edits, reconstructed from its tool calls and their results.

A file's contents are known once it was written or read completely. An edit of a known file is shown with surrounding
lines, any other with only the replaced and the new text. Commands may change files unnoticed: if a call contradicts the
known contents, the call is trusted.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.chat.messages import ToolCall
from etude.harness.tools.tool import ToolOutcome

CONTEXT_LINES = 3
MAX_DIFF_LINES = 2000
_NUMBERED = re.compile(r"(\d+)\|(.*)", re.DOTALL)

DiffLine = tuple[str, str]  # " ", "+" or "-" and the text; "@" and the position of the following lines


@dataclass(frozen=True)
class EditDiff:
    """The change that one call made to a file."""

    path: str
    lines: tuple[DiffLine, ...]
    added: int
    removed: int
    known: bool  # whether the surrounding lines are known


@dataclass
class FileHistory:
    """The contents of files as far as a session has seen them. Calls must be applied in order."""

    texts: dict[str, str] = field(default_factory=dict)

    def apply_call(self, tool: str, call: ToolCall, outcome: ToolOutcome | None) -> EditDiff | None:
        """Apply a call and return the change it made, if any. `tool` is the tool's name without aliases."""
        if call.status != "ok" or call.arguments is None or outcome is None or outcome.error:
            return None
        given = call.arguments
        path = str(outcome.facts.get("path") or given.get("file_path") or given.get("target_file") or "")
        if not path:
            return None
        if tool == "read_file":
            self._record_read(path, outcome)
            return None
        before, after = self.texts.get(path), None
        if tool == "write":
            after = _text(given, "contents", "content")
        elif tool == "search_replace":
            old, new = _text(given, "old_string"), _text(given, "new_string")
            if old is None or new is None:
                return None
            after = new if old == "" else _replaced(before, old, new, bool(given.get("replace_all")))
            if after is None:
                self.texts.pop(path, None)
                return _diff(path, old, new, known=False)
        elif tool == "delete_file":
            self.texts.pop(path, None)
            return _diff(path, before or "", "", known=before is not None)
        if after is None:
            return None
        self.texts[path] = after
        is_new = before is None and not outcome.facts.get("lines_removed")
        return _diff(path, before or "", after, known=before is not None or is_new)

    def _record_read(self, path: str, outcome: ToolOutcome) -> None:
        """Record a file that was read from its first line to its last, with no line cut."""
        facts = outcome.facts
        total = facts.get("total")
        if total == 0:
            self.texts[path] = ""
        if not total or facts.get("first") != 1 or facts.get("last") != total:
            return
        found = [_NUMBERED.fullmatch(line) for line in outcome.text.split("\n")[:total]]
        if all(found) and "[cut: the line has" not in outcome.text:
            text = "\n".join(line[2] for line in found if line)
            # the result does not say whether the last line ends with a newline, but the size does
            self.texts[path] = text + ("\n" if facts.get("size", 0) > len(text.encode("utf-8", "replace")) else "")


def _text(given: Mapping[str, Any], *names: str) -> str | None:
    return next((given[name] for name in names if isinstance(given.get(name), str)), None)


def _replaced(before: str | None, old: str, new: str, replace_all: bool) -> str | None:
    """Return the file after a replacement; None if its contents are unknown or do not contain `old`."""
    if before is None or old not in before:
        return None
    return before.replace(old, new) if replace_all else before.replace(old, new, 1)


def _diff(path: str, old: str, new: str, *, known: bool) -> EditDiff:
    lines: list[DiffLine] = []
    added = removed = 0
    for group in _groups(old.splitlines(), new.splitlines()):
        lines.append(("@", group[0] if known else ""))
        lines += group[1]
        added += sum(mark == "+" for mark, _ in group[1])
        removed += sum(mark == "-" for mark, _ in group[1])
    if len(lines) > MAX_DIFF_LINES:
        lines = [*lines[:MAX_DIFF_LINES], ("@", f"{len(lines) - MAX_DIFF_LINES} more lines")]
    return EditDiff(path, tuple(lines), added, removed, known)


def _groups(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, list[DiffLine]]]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=len(old) + len(new) > 4000)
    found = []
    for group in matcher.get_grouped_opcodes(CONTEXT_LINES):
        lines: list[DiffLine] = []
        for kind, start, end, new_start, new_end in group:
            if kind == "equal":
                lines += [(" ", line) for line in old[start:end]]
            else:
                lines += [("-", line) for line in old[start:end]]
                lines += [("+", line) for line in new[new_start:new_end]]
        found.append((f"line {group[0][3] + 1}", lines))
    return found
