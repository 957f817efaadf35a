"""A scripted demonstrator for nano tasks: writes the turns of a session from the task's solution, varied at random.

The turns look like those of an agent without the solution: it opens only files whose paths it has seen, reads before it
edits, runs the check afterwards, and reports the truth. Some sessions contain a mistake and its correction; the loss
mask leaves the mistake out. It follows the task's own `solution/`, so it works for any nano task directory.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

from etude.chat.messages import Message, ToolCall
from etude.errors import InputError
from etude.harness.tool_set import ToolSet
from etude.tasks.settings import TaskSetSettings

# The smallest sufficient tool set, because every tool takes a tenth of a nano model's window. Files are listed by `ls`.
NANO_TOOL_SET = ToolSet(tools=("read_file", "search_replace", "run_terminal_cmd"), short_system_prompt=True)

OPERATORS = (("<=", ">=", "==", "!=", "<", ">"), ("+", "-", "*"))
OPERATOR_OR_NUMBER = re.compile(r"[<>=!]=|[<>+*-]|\d+")
MIGRATION_PATTERNS = {"migrate-fstring": "%\\|format", "migrate-none": "None", "migrate-type": "type("}


@dataclass(frozen=True)
class ScriptedTurn:
    """One scripted turn. If its command does not end with `exit_code`, the session deviates from the script."""

    message: Message
    mistake: bool = False
    exit_code: int | None = None


@dataclass(frozen=True)
class TextEdit:
    """A replacement of a text that occurs exactly once, or of every occurrence."""

    path: str
    old: str
    new: str
    everywhere: bool = False


@dataclass(frozen=True)
class DemonstratorStyle:
    """Probabilities of the optional behaviours of a demonstrator, and the tools it has."""

    thinking: float = 0.4  # thinks before an edit, from difficulty 3 on
    mistakes: float = 0.12  # errs before a session's only edit; a third as often in the path of a file
    tools: tuple[str, ...] = NANO_TOOL_SET.tools


def style_of(settings: TaskSetSettings) -> DemonstratorStyle:
    """Return the style that the settings of a task set ask for."""
    style = DemonstratorStyle()
    return style if settings.mistakes is None else replace(style, mistakes=settings.mistakes)


def read_files(directory: Path) -> dict[str, str]:
    """Return the files of a task directory in the form that `nano_task` returns."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8") for path in found}


def demonstration_turns(
    files: Mapping[str, str], seed: int = 0, style: DemonstratorStyle | None = None
) -> list[ScriptedTurn]:
    """Return the turns of a session that solves the task of these files; they vary with the seed."""
    if "solution/plan.json" not in files:
        raise InputError("there is no solution/plan.json; the demonstrator solves nano tasks only")
    demonstrator = Demonstrator(files, seed, style or DemonstratorStyle())
    turns = demonstrator.find_and_read()
    if demonstrator.solution:
        turns += demonstrator.edit_and_check()
    elif demonstrator.plan.get("command"):
        turns += demonstrator.run_check(demonstrator.plan["command"])
    thought = "" if demonstrator.solution else demonstrator.draw_thought()
    return [*turns, ScriptedTurn(Message("assistant", demonstrator.plan["say"], thought))]


class Demonstrator:
    """Writes the turns of one session in one task; `known` are the paths that the session has shown so far."""

    def __init__(self, files: Mapping[str, str], seed: int, style: DemonstratorStyle) -> None:
        self.plan: dict[str, Any] = json.loads(files["solution/plan.json"])
        self.request = files["instruction.md"].strip()
        self.repo = workspace_files(files)
        self.solution = _files_under(files, "solution/repo/")
        config = files["task.toml"]
        self.family = task_toml_value(config, "family")
        self.register, self.difficulty = task_toml_value(config, "register"), int(task_toml_value(config, "difficulty"))
        # "expert/" seeds the generator of every demonstration: another word would change them all.
        self.rng = Random(f"expert/{task_toml_value(config, 'split')}/{task_toml_value(config, 'seed')}/{seed}")
        self.style = style
        script = self.plan.get("command", "").removeprefix("python3 ")
        self.check = script if script in self.repo else ""
        self.known = {path for path in self.repo if path in self.request}

    # -- reading

    def find_and_read(self) -> list[ScriptedTurn]:
        """Find the relevant files and read them."""
        read = list(self.plan.get("read", ()))
        command = self.plan.get("command", "")
        if not read:  # one command gives the answer
            return []
        if self.family == "readme":
            self.known |= set(self.repo)  # the search shows all files
            both = [self.call("read_file", target_file="README.md"), self.call("run_terminal_cmd", command=command)]
            return [self.turn(*both)] if self.flip(0.5) else [self.turn(both[0]), self.turn(both[1])]
        if self.plan.get("named") and self.known.intersection(read):
            return self.read_named_files(read)
        if self.plan.get("rename"):
            names = "\\|".join(old for old, _ in self.plan["rename"])
            return [self.grep(names)]
        if self.family in MIGRATION_PATTERNS:
            return [self.grep(MIGRATION_PATTERNS[self.family]), self.turn(*self.read_calls(list(self.solution)))]
        return self.explore_files(read)

    def read_named_files(self, read: Sequence[str]) -> list[ScriptedTurn]:
        """Read the files that the request names, then those of the others whose paths are known by then."""
        named = [path for path in read if path in self.known]
        if len(read) == 1 and self.flip(self.style.mistakes / 3):
            wrong = self.turn(*self.read_calls([f"src/{read[0]}"]))
            return [replace(wrong, mistake=True), self.list_files(), self.turn(*self.read_calls(read))]
        if self.check in self.known and self.solution and self.flip(0.15):
            first = self.run(self.plan["command"], exit_code=None)
            return [first, self.turn(*self.read_calls(named))]
        turns = [self.turn(*self.read_calls(named))]
        return turns + [
            self.turn(*self.read_calls([path])) for path in read if path not in named and path in self.known
        ]

    def explore_files(self, read: Sequence[str]) -> list[ScriptedTurn]:
        """Find the relevant files in one of several ways, and read them."""
        turns: list[ScriptedTurn] = []
        check_named = bool(self.check) and self.check in self.request
        find = self.plan.get("find", "")
        if find and find in self.request:
            return [self.grep(find), self.turn(*self.read_calls(read))]
        unseen = self.register != "log" and self.family == "debugging"  # the request does not show the failure
        if check_named and (find or self.flip(0.7 if unseen else 0.1)):
            turns.append(self.run(self.plan["command"], exit_code=None))
            if find:  # the output names the file
                return [*turns, self.turn(*self.read_calls(read))]
        names = re.findall(r"\w+", self.request)
        named = next((name for name in names if f"def {name}(" in self.repo[read[0]]), "")
        ways = ["list"] + ["check"] * (check_named and not turns) + ["grep"] * bool(named)
        way = self.rng.choice(ways) if self.family != "config" else "list"  # no import leads to a configuration
        if way == "list":
            turns.append(self.list_files())
            if self.flip(0.7):
                return [*turns, self.turn(*self.read_calls(read))]
        elif way == "check":
            turns.append(self.turn(*self.read_calls([self.check])))
        else:
            turns.append(self.grep(f"def {named}"))
        return turns + [self.turn(*self.read_calls([path])) for path in read]

    def grep(self, pattern: str) -> ScriptedTurn:
        sought = pattern.split("\\|")
        self.known |= {path for path, text in self.repo.items() if any(word in text for word in sought)}
        quoted = pattern if re.fullmatch(r"\w+", pattern) else f"'{pattern}'"
        return self.turn(self.call("run_terminal_cmd", command=f"grep -n {quoted} *.py"))

    # -- editing

    def edit_and_check(self) -> list[ScriptedTurn]:
        """Make the edits, with a mistake now and then, and run the check."""
        edits = [edit for path in self.solution for edit in self.file_edits(path)]
        command = self.plan.get("command", "")
        if not command.startswith("python3"):
            command = ""
        thought = self.draw_thought()
        turns: list[ScriptedTurn] = []
        for number, edit in enumerate(edits):
            turns += self.mistaken_edit(edit, command) if number == 0 and len(edits) == 1 and not thought else ()
            if turns and turns[-1].exit_code == 1:  # the mistaken edit changed the file
                mistaken = next(turn for turn in reversed(turns) if turn.mistake).message.calls[0].arguments or {}
                edit = TextEdit(edit.path, str(mistaken["new_string"]), edit.new)
            turns.append(self.turn(self.edit_call(edit), thinking=thought if number == 0 else ""))
        return [*turns, *self.run_check(command)] if command else turns

    def file_edits(self, path: str) -> list[TextEdit]:
        """Return the edits that turn a file into its solution."""
        before, after = self.repo[path], self.solution[path]
        for old, new in self.plan.get("rename", ()):
            words = len(re.findall(rf"\b{re.escape(old)}\b", before))
            if words == before.count(old) > 1 and before.replace(old, new) == after:
                return [TextEdit(path, old, new, everywhere=True)]
        return edits_between(path, before, after)

    def mistaken_edit(self, edit: TextEdit, command: str) -> list[ScriptedTurn]:
        """Return, with the style's probability, an edit that is refused or one that the check shows to be wrong."""
        if edit.everywhere or not self.flip(self.style.mistakes):
            return []
        if command and self.family == "debugging" and (wrong_text := self.wrong_replacement(edit)):
            wrong = self.turn(self.edit_call(TextEdit(edit.path, edit.old, wrong_text)))
            listing = [] if self.check in self.known else [self.list_files()]
            return [replace(wrong, mistake=True), *listing, self.run(command, exit_code=1)]
        at = self.rng.randrange(len(edit.old))
        misquoted = edit.old[:at] + edit.old[at + 1 :]
        if not misquoted.strip() or misquoted in self.repo[edit.path]:
            return []
        return [replace(self.turn(self.edit_call(TextEdit(edit.path, misquoted, edit.new))), mistake=True)]

    def wrong_replacement(self, edit: TextEdit) -> str:
        """Return a wrong new text: with another operator where the edit differs, else the old text with another one."""
        match = SequenceMatcher(None, edit.old, edit.new, autojunk=False).get_opcodes()
        spans = [(low, high) for tag, _, _, low, high in match if tag != "equal"]
        operators = OPERATOR_OR_NUMBER.finditer(edit.new)
        near = (each for each in operators if any(a <= each.end() and each.start() <= b for a, b in spans))
        changed = (self.with_other_operator(edit.new, found) for found in near)
        others = (self.with_other_operator(edit.old, found) for found in OPERATOR_OR_NUMBER.finditer(edit.old))
        return next((text for text in chain(changed, others) if text not in (edit.old, edit.new)), "")

    def with_other_operator(self, text: str, found: re.Match[str]) -> str:
        part = found.group()
        others = [str(int(part) + 1)] if part.isdigit() else next(kind for kind in OPERATORS if part in kind)
        other = self.rng.choice([each for each in others if each != part])
        return text[: found.start()] + other + text[found.end() :]

    # -- turns

    def draw_thought(self) -> str:
        """Return the thought before an edit or an answer; often none."""
        return str(self.plan.get("think", "")) if self.difficulty >= 3 and self.flip(self.style.thinking) else ""

    def flip(self, probability: float) -> bool:
        return self.rng.random() < probability

    def call(self, name: str, **arguments: Any) -> ToolCall:
        return ToolCall(name, arguments, "")

    def read_calls(self, paths: Sequence[str]) -> list[ToolCall]:
        for path in paths:
            imported = re.findall(r"^(?:from|import) (\w+)", self.repo.get(path, ""), re.MULTILINE)
            self.known |= {path, *(f"{module}.py" for module in imported)}
        return [self.call("read_file", target_file=path) for path in paths]

    def edit_call(self, edit: TextEdit) -> ToolCall:
        more = {"replace_all": True} if edit.everywhere else {}
        return self.call("search_replace", file_path=edit.path, old_string=edit.old, new_string=edit.new, **more)

    def list_files(self) -> ScriptedTurn:
        self.known |= set(self.repo)
        if "list_dir" in self.style.tools and self.flip(0.75):
            return self.turn(self.call("list_dir", target_directory="."))
        return self.turn(self.call("run_terminal_cmd", command="ls"))

    def run_check(self, command: str) -> list[ScriptedTurn]:
        """Run the check; list the files first if its path is not known yet."""
        seen = not self.check or self.check in self.known
        return [self.run(command)] if seen else [self.list_files(), self.run(command)]

    def run(self, command: str, exit_code: int | None = 0) -> ScriptedTurn:
        return replace(self.turn(self.call("run_terminal_cmd", command=command)), exit_code=exit_code)

    def turn(self, *calls: ToolCall, thinking: str = "") -> ScriptedTurn:
        return ScriptedTurn(Message("assistant", "", thinking, calls))


def edits_between(path: str, before: str, after: str) -> list[TextEdit]:
    """Return exact replacements that turn one text into another, in order, one for each differing block of lines.

    They cover whole lines with their indentation, so that the model writes the same tokens that it read.
    """
    old, new = before.split("\n"), after.split("\n")
    edits: list[TextEdit] = []
    for tag, low, high, start, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        now = "\n".join(new[:start] + old[low:])  # the lines above are already replaced
        above = below = 0
        while True:
            removed = "\n".join(new[start - above : start] + old[low : high + below])
            added = new[start - above : end + below]
            if removed.strip() and added and _occurs_once(removed, now):
                break
            above, below = (above + 1, below) if above < start else (above, below + 1)  # more context makes it unique
        edits.append(TextEdit(path, removed, "\n".join(added)))
    return edits


def _occurs_once(part: str, text: str) -> bool:
    """Return whether a part occurs exactly once; occurrences may overlap."""
    return part in text and text.find(part) == text.rfind(part)


def workspace_files(files: Mapping[str, str]) -> dict[str, str]:
    """Return the files of the workspace."""
    return _files_under(files, "environment/repo/")


def _files_under(files: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {path[len(prefix) :]: text for path, text in sorted(files.items()) if path.startswith(prefix)}


def task_toml_value(config: str, key: str) -> str:
    """Return a value of a nano task.toml, which has one value per line."""
    found = re.search(rf'^{key} = "?([^"\n]*)"?$', config, re.MULTILINE)
    if found is None:
        raise InputError(f"task.toml has no {key}; the demonstrator solves nano tasks only")
    return found.group(1)
