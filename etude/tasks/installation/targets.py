"""Target commands: what the exploring session proposes, which of it can be a target, and which three are.

A proposal is a command with a description of what success looks like and a pattern that its output then matches.
Pure functions.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from etude.tasks.installation.reports import FRAMEWORKS
from etude.tasks.installation.script import masked_failure, masked_test_command

PROPOSALS, TARGETS = 10, 3
KINDS = ("test", "run", "import", "build", "lint", "setup")  # targets are chosen in this order
_TRIVIAL = re.compile(
    r"^\s*(ls|pwd|cat|head|tail|echo|printf|true|:|which|type|command|whoami|date|env|git|find|grep|sleep|test|\[)\b"
    r"|^\S+\s+(--version|-V|version|--help|-h|help)\s*$"
)
_MAX_TEXT = 2000


@dataclass(frozen=True)
class TargetCommand:
    """A command that works in an installed repository."""

    command: str
    kind: str
    description: str  # what success looks like
    pattern: str = ""  # regular expression that the output matches
    framework: str = ""  # of a test command: whose report is read

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def read_targets(text: str) -> tuple[list[TargetCommand], list[str]]:
    """Return the usable proposals in a text that contains a JSON list, and why others are left out."""
    rows = _json_list(text)
    found: dict[str, TargetCommand] = {}
    dropped: list[str] = []
    for row in rows[:PROPOSALS]:
        target = _target(row)
        why = "no object with command, kind and description" if target is None else unusable(target)
        if target is None or why:
            dropped.append(f"{str(row)[:80]}: {why}")
        elif target.command in found:
            dropped.append(f"{target.command}: proposed twice")
        else:
            found[target.command] = target
    return list(found.values()), dropped


def _json_list(text: str) -> list[Any]:
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\[", text):
        try:
            value, _ = decoder.raw_decode(text, match.start())
        except ValueError:
            continue
        if isinstance(value, list) and any(isinstance(each, dict) for each in value):
            return value
    return []


def _target(row: object) -> TargetCommand | None:
    if not isinstance(row, dict):
        return None
    texts = {key: str(row.get(key) or "")[:_MAX_TEXT].strip() for key in ("command", "kind", "description", "pattern")}
    if not texts["command"] or not texts["description"] or texts["kind"] not in KINDS:
        return None
    framework = str(row.get("framework") or "") or _framework(texts["command"])
    return TargetCommand(**texts, framework=framework if texts["kind"] == "test" else "")


def _framework(command: str) -> str:
    """Return the runner that a test command calls, for the reader of its report."""
    names = {
        r"\bpytest\b|\bpy\.test\b|\btox\b|\bnox\b": "pytest",
        r"\bunittest\b": "unittest",
        r"\bnode\b.*--test": "node",
        r"\bjest\b|\bvitest\b": "jest",
        r"\bmocha\b": "mocha",
        r"\bgo test\b": "go",
        r"\bcargo test\b": "cargo",
        r"--tap\b|\btape?\b": "tap",
    }
    return next((name for pattern, name in names.items() if re.search(pattern, command)), "")


def unusable(target: TargetCommand) -> str:
    """Return why a proposal cannot be a target; empty if it can."""
    if "\n" in target.command:
        return "it has more than one line"
    if _TRIVIAL.search(target.command):
        return "it works without any installation"
    masked = masked_test_command(target.command) if target.kind == "test" else masked_failure(target.command)
    if masked:
        return f"it hides failures: {masked}"
    if target.kind == "test" and target.framework not in FRAMEWORKS:
        return f"no known test runner; the framework is one of {', '.join(FRAMEWORKS)}"
    try:
        re.compile(target.pattern)
    except re.error as error:
        return f"its pattern is no regular expression ({error})"
    if target.kind != "test" and (not target.pattern or re.search(target.pattern, "")):
        return "its pattern matches an empty output, so it shows nothing"
    return ""


def choose_targets(targets: Sequence[TargetCommand], works_already: Mapping[str, bool]) -> list[TargetCommand]:
    """Return the three targets, of which the first is a test command; fewer if there are not enough.

    Commands that work before anything is installed are no targets.
    """
    left = [target for target in targets if not works_already.get(target.command)]
    tests = [target for target in left if target.kind == "test"]
    if not tests:
        return []
    rest = sorted((target for target in left if target is not tests[0]), key=lambda each: KINDS.index(each.kind))
    first_of_kinds = [
        each for number, each in enumerate(rest) if each.kind not in {other.kind for other in rest[:number]}
    ]
    others = [each for each in rest if each not in first_of_kinds]
    return [tests[0], *[*first_of_kinds, *others][: TARGETS - 1]]
