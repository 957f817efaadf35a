"""What the edits of a session did to its files, worked out from the calls and their answers alone.

A file is known once it was written, or read whole. An edit of a known file is shown with the lines around it; of any
other, the text that was put in place of another. Commands may change files unseen: what does not fit what is known is
believed over it.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.chat.messages import Call
from etude.harness.tools.tool import Outcome

AROUND = 3  # lines
MOST = 2000  # lines of a diff
_NUMBERED = re.compile(r"(\d+)\|(.*)", re.DOTALL)

Line = tuple[str, str]  # " ", "+", "-" and the text; "@" and where the lines begin


@dataclass(frozen=True)
class Diff:
    """What one call changed."""

    path: str
    lines: tuple[Line, ...]
    added: int
    removed: int
    known: bool  # whether the lines around it are


@dataclass
class Workspace:
    """The files as far as a session has seen them. Give it the calls in their order."""

    texts: dict[str, str] = field(default_factory=dict)

    def follow(self, tool: str, call: Call, outcome: Outcome | None) -> Diff | None:
        """Learn from a call; what it changed, if it did. `tool` is the tool's own name."""
        if call.status != "ok" or call.arguments is None or outcome is None or outcome.error:
            return None
        given = call.arguments
        path = str(outcome.facts.get("path") or given.get("file_path") or given.get("target_file") or "")
        if not path:
            return None
        if tool == "read_file":
            self._learn(path, outcome)
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

    def _learn(self, path: str, outcome: Outcome) -> None:
        """A file that was read from its first line to its last, none of them cut."""
        facts = outcome.facts
        total = facts.get("total")
        if total == 0:
            self.texts[path] = ""
        if not total or facts.get("first") != 1 or facts.get("last") != total:
            return
        found = [_NUMBERED.fullmatch(line) for line in outcome.text.split("\n")[:total]]
        if all(found) and "[cut: the line has" not in outcome.text:
            text = "\n".join(line[2] for line in found if line)
            # whether the last line had an end is not told; the size does
            self.texts[path] = text + ("\n" if facts.get("size", 0) > len(text.encode("utf-8", "replace")) else "")


def _text(given: Mapping[str, Any], *names: str) -> str | None:
    return next((given[name] for name in names if isinstance(given.get(name), str)), None)


def _replaced(before: str | None, old: str, new: str, everywhere: bool) -> str | None:
    """The file after a replacement; None when it is not known, or is not what it was."""
    if before is None or old not in before:
        return None
    return before.replace(old, new) if everywhere else before.replace(old, new, 1)


def _diff(path: str, old: str, new: str, *, known: bool) -> Diff:
    lines: list[Line] = []
    added = removed = 0
    for group in _groups(old.splitlines(), new.splitlines()):
        lines.append(("@", group[0] if known else ""))
        lines += group[1]
        added += sum(mark == "+" for mark, _ in group[1])
        removed += sum(mark == "-" for mark, _ in group[1])
    if len(lines) > MOST:
        lines = [*lines[:MOST], ("@", f"{len(lines) - MOST} more lines")]
    return Diff(path, tuple(lines), added, removed, known)


def _groups(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, list[Line]]]:
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=len(old) + len(new) > 4000)
    found = []
    for group in matcher.get_grouped_opcodes(AROUND):
        lines: list[Line] = []
        for kind, start, end, there, then in group:
            if kind == "equal":
                lines += [(" ", line) for line in old[start:end]]
            else:
                lines += [("-", line) for line in old[start:end]]
                lines += [("+", line) for line in new[there:then]]
        found.append((f"line {group[0][3] + 1}", lines))
    return found
