"""Practice for a base model: small jobs in the very format of a session, over any code there is.

What a model of a few million parameters lacks is not knowledge but the crafts that every session takes: to find a file,
to copy from it exactly, to write arguments as JSON, to change just what was asked for, to read an error and do better.
An exercise is a request, a workspace and the turns that do it; `practise` plays it like any expert session. Exercises
have requests of their own and never a shape or fault that is kept for held-out tasks.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Call, Message
from etude_nano.code_snippets import Pool
from etude_nano.demonstrator import Edit, Turn, edits_between
from etude_nano.pod_sessions import oddity, taught_tokens
from etude_nano.simulated_sessions import play

SLIPS = 0.25  # of the sessions have a mistake in them, and the way out of it


@dataclass(frozen=True)
class Exercise:
    """A job and the turns that do it."""

    kind: str
    request: str
    repo: Mapping[str, str]
    turns: tuple[Turn, ...]


Draw = Callable[[Random, Pool], Exercise | None]


@dataclass(frozen=True)
class Practised:
    """One session of practice: its tokens, and which of them are to be learned."""

    kind: str
    tokens: npt.NDArray[np.uint32]
    learned: npt.NDArray[np.bool_]  # all but the mistakes


def draw_exercise(chance: Random, pool: Pool) -> Exercise:
    """An exercise of one of all kinds."""
    from etude_nano.exercises_code import CODE
    from etude_nano.exercises_files import FILES
    from etude_nano.exercises_programs import PROGRAMS

    kinds = (*CODE, *FILES, *PROGRAMS)
    while True:
        (draw,) = chance.choices([draw for draw, _ in kinds], [weight for _, weight in kinds])
        if (exercise := draw(chance, pool)) is not None:
            return exercise


async def practise(exercise: Exercise, dialect: Dialect, id: str = "practice") -> Practised | None:
    """The session of an exercise, token for token as a pod would have it; None if it does not go as meant."""
    trace = await play(id, exercise.request, exercise.repo, exercise.turns, dialect)
    if trace is None or trace.ending != "final" or oddity(exercise.turns, trace):
        return None
    taught = taught_tokens(exercise.turns, trace)
    segment = trace.segments[0]
    return Practised(exercise.kind, segment.tokens, ~segment.made | taught)


# ------------------------------------------------------------------------------------------- writing a session


class Desk:
    """The turns of one session as they are written. Whoever sits here reads only files it has come upon."""

    def __init__(self, chance: Random, request: str, repo: Mapping[str, str]) -> None:
        self.chance, self.request = chance, request
        self.given, self.repo = dict(repo), dict(repo)
        self.known = {path for path in repo if re.search(rf"(?<![\w.]){re.escape(path)}", request)}
        self.seen = request  # and what it has read since
        self.turns: list[Turn] = []
        self.slip = chance.random() < SLIPS  # a mistake is still to be made

    def done(self, kind: str, say: str) -> Exercise:
        self.turns.append(Turn(Message("assistant", say)))
        return Exercise(kind, self.request, self.given, tuple(self.turns))

    # -- looking

    def find(self, path: str, word: str = "") -> None:
        """Come upon a file: by a search for a word that stands in it, or by what there is."""
        if path in self.known:
            return
        word = word if re.fullmatch(r"\w+", word) and re.search(rf"\b{word}\b", self.seen) else ""
        if word and path.endswith(".py") and self.chance.random() < 0.6:
            defined = f"def {word}(" in self.repo[path] and self.chance.random() < 0.6
            what = f"def {word}" if defined else word
            self.grep(what)
        else:
            self.list_files()

    def list_files(self) -> None:
        self.known |= set(self.repo)
        self.act("run_terminal_cmd", command="ls")

    def grep(self, what: str) -> str:
        """Search the code; what is found."""
        quoted = what if re.fullmatch(r"\w+", what) else f"'{what}'"
        self.known |= {path for path, text in self.repo.items() if what in text and path.endswith(".py")}
        self.act("run_terminal_cmd", command=f"grep -n {quoted} *.py")
        return what

    def read(self, *paths: str, word: str = "") -> None:
        """Read files, in one turn or one after another."""
        for path in paths:
            self.find(path, word)
        self.seen += "".join(self.repo[path] for path in paths)
        first = paths[0]
        if self.slip and self.chance.random() < 0.25:
            self.slip = False
            wrong = self.chance.choice((f"src/{first}", f"lib/{first}", first.replace("_", ""), f"my_{first}"))
            if wrong not in self.repo:
                self.act("read_file", target_file=wrong, mistake=True)
                if self.chance.random() < 0.7:
                    self.list_files()
        if len(paths) > 1 and self.chance.random() < 0.5:
            self.together(*(Call("read_file", {"target_file": path}, "") for path in paths))
            return
        for path in paths:
            self.act("read_file", target_file=path)

    # -- changing

    def change(self, path: str, after: str) -> None:
        """Make a file what it should be, edit by edit."""
        for edit in edits_between(path, self.repo[path], after):
            if self.slip:
                self.slip = False
                self._slip(edit)
            self.replace(edit)
        self.repo[path] = after

    def replace(self, edit: Edit, *, mistake: bool = False) -> None:
        more = {"replace_all": True} if edit.everywhere else {}
        given: dict[str, Any] = {"file_path": edit.path, "old_string": edit.old, "new_string": edit.new, **more}
        self.act("search_replace", mistake=mistake, **given)

    def _slip(self, edit: Edit) -> None:
        """An edit that is refused; what it is told helps."""
        text = self.repo[edit.path]
        way = self.chance.choice(("torn", "torn", "torn", "words", "words", "same", "elsewhere"))
        if way == "same":
            wrong = replace(edit, new=edit.old)
        elif way == "elsewhere":
            wrong = replace(edit, path=f"src/{edit.path}")
        else:
            wrong = replace(edit, old=torn(edit.old, self.chance) if way == "torn" else reworded(edit.old, self.chance))
            if not wrong.old.strip() or wrong.old in text or wrong.old == wrong.new:
                return
        self.replace(wrong, mistake=True)
        if way != "same" and self.chance.random() < 0.4:
            self.act("read_file", target_file=edit.path)

    # -- running

    def run(self, command: str, exits: int = 0) -> None:
        """Run a script of the workspace, if need be after a look at what it is called."""
        script = command.removeprefix("python3 ")
        if script in self.repo and script not in self.known:
            if self.slip and self.chance.random() < 0.5 and "test.py" not in self.repo:
                self.slip = False
                self.act("run_terminal_cmd", command="python3 test.py", mistake=True)
            self.list_files()
        self.act("run_terminal_cmd", command=command, exits=exits)

    # -- turns

    def act(self, name: str, *, mistake: bool = False, exits: int | None = None, **arguments: Any) -> None:
        message = Message("assistant", "", "", (Call(name, arguments, ""),))
        self.turns.append(Turn(message, mistake, exits))

    def together(self, *calls: Call) -> None:
        self.turns.append(Turn(Message("assistant", "", "", calls)))


def torn(text: str, chance: Random) -> str:
    """The text with one character gone, doubled, or changed with the next."""
    at = chance.randrange(max(1, len(text) - 1))
    one, two = text[at : at + 1], text[at + 1 : at + 2]
    return chance.choice(
        (text[:at] + text[at + 1 :], text[:at] + one + text[at:], text[:at] + two + one + text[at + 2 :])
    )


def reworded(text: str, chance: Random) -> str:
    """The text with one word gone or another in its place: as somebody says it who did not look."""
    found = list(re.finditer(r"\w+", text))
    if not found:
        return torn(text, chance)
    word = chance.choice(found)
    return text[: word.start()] + chance.choice(("", "value", "x", word.group() + "s")) + text[word.end() :]


def pick(chance: Random, *texts: str) -> str:
    return chance.choice(texts)


def line_changed(text: str, number: int, line: str) -> str:
    """The text with another line of that number, counted from 1."""
    lines = text.split("\n")
    return "\n".join([*lines[: number - 1], line, *lines[number:]])


def lines_with(text: str, expression: str, accept: Callable[[str], bool] = bool) -> list[tuple[int, str]]:
    """Numbered lines in which something is found; no comments."""
    numbered: Sequence[tuple[int, str]] = list(enumerate(text.split("\n"), 1))
    return [
        (number, line)
        for number, line in numbered
        if re.search(expression, line) and not line.lstrip().startswith("#") and accept(line)
    ]
