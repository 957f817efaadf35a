"""An expert for nano tasks: what an agent that knows the answer would do, turn by turn, in several ways.

It works as if it did not know: it reads only files it has come upon, looks before it changes, checks after, and says
what is true. Some of its sessions have a mistake in them and the way out of it; the mistake is shown to a model, but
not taught. It goes by the task's own `solution/`, so any nano task directory will do.
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

from etude.chat.messages import Call, Message
from etude.errors import InputError
from etude.harness.tool_set import ToolSet
from etude.recipe.sections import TaskBuild

# What a nano model is shown: as little as will do, for every tool is a tenth of its window. Files are listed by `ls`.
NANO_ENVIRONMENT = ToolSet(tools=("read_file", "search_replace", "run_terminal_cmd"), brief=True)

OPERATORS = (("<=", ">=", "==", "!=", "<", ">"), ("+", "-", "*"))
SIGNS = re.compile(r"[<>=!]=|[<>+*-]|\d+")
SEARCHES = {"migrate-fstring": "%\\|format", "migrate-none": "None", "migrate-type": "type("}
# What somebody says who stops before the work is done.
UNFINISHED = (
    "Done.",
    "It should work now.",
    "I have looked at it. Shall I change it?",
    "Which of the two do you want?",
    "I cannot see what is wrong.",
    "This needs more information. What should it do?",
    "Looks good to me.",
    "Fixed.",
)


@dataclass(frozen=True)
class Turn:
    """One answer of the expert. `exits` is how its command has to end for the session to make sense."""

    message: Message
    mistake: bool = False
    exits: int | None = None


@dataclass(frozen=True)
class Edit:
    """A replacement that fits exactly once, or everywhere."""

    path: str
    old: str
    new: str
    everywhere: bool = False


@dataclass(frozen=True)
class Manner:
    """How often an expert does what is not always done."""

    thinking: float = 0.4  # before a change, from difficulty 3 on
    mistakes: float = 0.12  # before a session's only change; a third as often in the name of a file
    unfinished: float = 0.0  # stops half-way, and says it is done, asks back, or gives up
    tools: tuple[str, ...] = NANO_ENVIRONMENT.tools


def manner_of(table: TaskBuild) -> Manner:
    """As a recipe asks for."""
    known = Manner(unfinished=table.unfinished)
    return known if table.mistakes is None else replace(known, mistakes=table.mistakes)


def read_files(directory: Path) -> dict[str, str]:
    """The files of a task directory, as `nano_task` gives them."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_text(encoding="utf-8") for path in found}


def expert(files: Mapping[str, str], seed: int = 0, manner: Manner | None = None) -> list[Turn]:
    """A session that solves the task of these files; another seed may go another way."""
    if "solution/plan.json" not in files:
        raise InputError("there is no solution/plan.json; the expert knows nano tasks only")
    case = _Case(files, seed, manner or Manner())
    turns = case.look()
    if manner and case.likely(manner.unfinished):
        seen = turns[: case.chance.randint(min(1, len(turns)), len(turns))]
        return [*seen, Turn(Message("assistant", case.chance.choice(UNFINISHED)))]
    if case.solved:
        turns += case.change()
    elif case.plan.get("command"):
        turns += case.run_check(case.plan["command"])
    thought = "" if case.solved else case.thought()
    return [*turns, Turn(Message("assistant", case.plan["say"], thought))]


class _Case:
    """One task, and the luck of one session."""

    def __init__(self, files: Mapping[str, str], seed: int, manner: Manner) -> None:
        self.plan: dict[str, Any] = json.loads(files["solution/plan.json"])
        self.request = files["instruction.md"].strip()
        self.repo = repository(files)
        self.solved = _below(files, "solution/repo/")
        facts = files["task.toml"]
        self.family = fact(facts, "family")
        self.register, self.difficulty = fact(facts, "register"), int(fact(facts, "difficulty"))
        self.chance = Random(f"expert/{fact(facts, 'split')}/{fact(facts, 'seed')}/{seed}")
        self.manner = manner
        script = self.plan.get("command", "").removeprefix("python3 ")
        self.check = script if script in self.repo else ""
        self.known = {path for path in self.repo if path in self.request}  # files it has come upon

    # -- looking

    def look(self) -> list[Turn]:
        """Come upon the files that matter and read them."""
        read = list(self.plan.get("read", ()))
        command = self.plan.get("command", "")
        if not read:  # one command tells all
            return []
        if self.family == "readme":
            self.known |= set(self.repo)  # the search shows what there is
            both = [self.call("read_file", target_file="README.md"), self.call("run_terminal_cmd", command=command)]
            return [self.turn(*both)] if self.likely(0.5) else [self.turn(both[0]), self.turn(both[1])]
        if self.plan.get("named") and self.known.intersection(read):
            return self.read_named(read)
        if self.plan.get("rename"):
            names = "\\|".join(old for old, _ in self.plan["rename"])
            return [self.grep(names)]
        if self.family in SEARCHES:
            return [self.grep(SEARCHES[self.family]), self.turn(*self.reads(list(self.solved)))]
        return self.explore(read)

    def read_named(self, read: Sequence[str]) -> list[Turn]:
        """Read what the request names, then what that leads to; what nobody has named is not needed."""
        named = [path for path in read if path in self.known]
        if len(read) == 1 and self.likely(self.manner.mistakes / 3):
            wrong = self.turn(*self.reads([f"src/{read[0]}"]))
            return [replace(wrong, mistake=True), self.list_files(), self.turn(*self.reads(read))]
        if self.check in self.known and self.solved and self.likely(0.15):
            first = self.run(self.plan["command"], exits=None)
            return [first, self.turn(*self.reads(named))]
        turns = [self.turn(*self.reads(named))]
        return turns + [self.turn(*self.reads([path])) for path in read if path not in named and path in self.known]

    def explore(self, read: Sequence[str]) -> list[Turn]:
        """Find out which files there are, by one of several ways, and read those that matter."""
        turns: list[Turn] = []
        told = bool(self.check) and self.check in self.request
        find = self.plan.get("find", "")
        if find and find in self.request:
            return [self.grep(find), self.turn(*self.reads(read))]
        unseen = self.register != "log" and self.family == "debugging"  # nobody has said yet what goes wrong
        if told and (find or self.likely(0.7 if unseen else 0.1)):
            turns.append(self.run(self.plan["command"], exits=None))
            if find:  # what it prints says where
                return [*turns, self.turn(*self.reads(read))]
        names = re.findall(r"\w+", self.request)
        named = next((name for name in names if f"def {name}(" in self.repo[read[0]]), "")
        ways = ["list"] + ["check"] * (told and not turns) + ["grep"] * bool(named)
        way = self.chance.choice(ways) if self.family != "config" else "list"  # no import leads to a configuration
        if way == "list":
            turns.append(self.list_files())
            if self.likely(0.7):
                return [*turns, self.turn(*self.reads(read))]
        elif way == "check":
            turns.append(self.turn(*self.reads([self.check])))
        else:
            turns.append(self.grep(f"def {named}"))
        return turns + [self.turn(*self.reads([path])) for path in read]

    def grep(self, what: str) -> Turn:
        sought = what.split("\\|")
        self.known |= {path for path, text in self.repo.items() if any(word in text for word in sought)}
        quoted = what if re.fullmatch(r"\w+", what) else f"'{what}'"
        return self.turn(self.call("run_terminal_cmd", command=f"grep -n {quoted} *.py"))

    # -- changing

    def change(self) -> list[Turn]:
        """Make the edits, check them, and mend what went wrong on the way."""
        edits = [edit for path in self.solved for edit in self.edits(path)]
        command = self.plan.get("command", "")
        if not command.startswith("python3"):
            command = ""
        thought = self.thought()
        turns: list[Turn] = []
        for place, edit in enumerate(edits):
            turns += self.mistaken(edit, command) if place == 0 and len(edits) == 1 and not thought else ()
            if turns and turns[-1].exits == 1:  # after a wrong change the file is another
                slipped = next(turn for turn in reversed(turns) if turn.mistake).message.calls[0].arguments or {}
                edit = Edit(edit.path, str(slipped["new_string"]), edit.new)
            turns.append(self.turn(self.edit_call(edit), thinking=thought if place == 0 else ""))
        return [*turns, *self.run_check(command)] if command else turns

    def edits(self, path: str) -> list[Edit]:
        """The edits that make a file what it should be."""
        before, after = self.repo[path], self.solved[path]
        for old, new in self.plan.get("rename", ()):
            everywhere = len(re.findall(rf"\b{re.escape(old)}\b", before))
            if everywhere == before.count(old) > 1 and before.replace(old, new) == after:
                return [Edit(path, old, new, everywhere=True)]
        return edits_between(path, before, after)

    def mistaken(self, edit: Edit, command: str) -> list[Turn]:
        """Now and then: an edit that does not fit, or one that does not help."""
        if edit.everywhere or not self.likely(self.manner.mistakes):
            return []
        if command and self.family == "debugging" and (slip := self.slip(edit)):
            wrong = self.turn(self.edit_call(Edit(edit.path, edit.old, slip)))
            look = [] if self.check in self.known else [self.list_files()]
            return [replace(wrong, mistake=True), *look, self.run(command, exits=1)]
        at = self.chance.randrange(len(edit.old))
        torn = edit.old[:at] + edit.old[at + 1 :]
        if not torn.strip() or torn in self.repo[edit.path]:
            return []
        return [replace(self.turn(self.edit_call(Edit(edit.path, torn, edit.new))), mistake=True)]

    def slip(self, edit: Edit) -> str:
        """A wrong version of the edit: another sign where it differs, else the old text with another sign."""
        match = SequenceMatcher(None, edit.old, edit.new, autojunk=False).get_opcodes()
        spans = [(low, high) for tag, _, _, low, high in match if tag != "equal"]
        signs = SIGNS.finditer(edit.new)
        near = (sign for sign in signs if any(a <= sign.end() and sign.start() <= b for a, b in spans))
        slips = (self.other_sign(edit.new, found) for found in near)
        others = (self.other_sign(edit.old, found) for found in SIGNS.finditer(edit.old))
        return next((slip for slip in chain(slips, others) if slip not in (edit.old, edit.new)), "")

    def other_sign(self, text: str, found: re.Match[str]) -> str:
        part = found.group()
        others = [str(int(part) + 1)] if part.isdigit() else next(kind for kind in OPERATORS if part in kind)
        other = self.chance.choice([sign for sign in others if sign != part])
        return text[: found.start()] + other + text[found.end() :]

    # -- turns

    def thought(self) -> str:
        """What it thinks before it acts or answers, if it does."""
        return str(self.plan.get("think", "")) if self.difficulty >= 3 and self.likely(self.manner.thinking) else ""

    def likely(self, chance: float) -> bool:
        return self.chance.random() < chance

    def call(self, name: str, **arguments: Any) -> Call:
        return Call(name, arguments, "")

    def reads(self, paths: Sequence[str]) -> list[Call]:
        for path in paths:
            imported = re.findall(r"^(?:from|import) (\w+)", self.repo.get(path, ""), re.MULTILINE)
            self.known |= {path, *(f"{module}.py" for module in imported)}
        return [self.call("read_file", target_file=path) for path in paths]

    def edit_call(self, edit: Edit) -> Call:
        more = {"replace_all": True} if edit.everywhere else {}
        return self.call("search_replace", file_path=edit.path, old_string=edit.old, new_string=edit.new, **more)

    def list_files(self) -> Turn:
        self.known |= set(self.repo)
        if "list_dir" in self.manner.tools and self.likely(0.75):
            return self.turn(self.call("list_dir", target_directory="."))
        return self.turn(self.call("run_terminal_cmd", command="ls"))

    def run_check(self, command: str) -> list[Turn]:
        """Run the check; look for it first if nobody has said what it is called."""
        seen = not self.check or self.check in self.known
        return [self.run(command)] if seen else [self.list_files(), self.run(command)]

    def run(self, command: str, exits: int | None = 0) -> Turn:
        return replace(self.turn(self.call("run_terminal_cmd", command=command)), exits=exits)

    def turn(self, *calls: Call, thinking: str = "") -> Turn:
        return Turn(Message("assistant", "", thinking, calls))


def edits_between(path: str, before: str, after: str) -> list[Edit]:
    """Exact replacements that make one text of another, in order, one for each stretch of lines that differ.

    Of whole lines, with their indentation: then what is written is what was read, token for token.
    """
    old, new = before.split("\n"), after.split("\n")
    edits: list[Edit] = []
    for tag, low, high, start, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        now = "\n".join(new[:start] + old[low:])  # what is above has been replaced by then
        above = below = 0
        while True:
            removed = "\n".join(new[start - above : start] + old[low : high + below])
            added = new[start - above : end + below]
            if removed.strip() and added and _once(removed, now):
                break
            above, below = (above + 1, below) if above < start else (above, below + 1)  # with more lines it is
        edits.append(Edit(path, removed, "\n".join(added)))
    return edits


def _once(part: str, text: str) -> bool:
    """Whether it stands in one place only; places may overlap."""
    return part in text and text.find(part) == text.rfind(part)


def repository(files: Mapping[str, str]) -> dict[str, str]:
    """The files of the workspace."""
    return _below(files, "environment/repo/")


def _below(files: Mapping[str, str], place: str) -> dict[str, str]:
    return {path[len(place) :]: text for path, text in sorted(files.items()) if path.startswith(place)}


def fact(config: str, key: str) -> str:
    """A value of a nano task.toml, where they are one to a line."""
    found = re.search(rf'^{key} = "?([^"\n]*)"?$', config, re.MULTILINE)
    if found is None:
        raise InputError(f"task.toml has no {key}; the expert knows nano tasks only")
    return found.group(1)
