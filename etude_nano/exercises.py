"""Exercises for a base model: small jobs in the exact format of a session, over any code.

A model of a few million parameters lacks the skills that every session needs rather than knowledge: finding a file,
copying from it exactly, writing arguments as JSON, changing only what was asked for, recovering from an error. An
exercise is a request, a workspace and the turns that solve it; `simulate_exercise` runs it like a demonstration.
No exercise is of a kind that tasks have: requests say word for word what to do, and none describes a fault.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message, ToolCall
from etude_nano.code_snippets import SnippetPool
from etude_nano.demonstrator import ScriptedTurn, TextEdit, edits_between
from etude_nano.pod_sessions import demonstration_loss_mask, find_deviation
from etude_nano.simulated_sessions import simulate_session

MISTAKE_PROBABILITY = 0.25  # of a session with a mistake and its correction


@dataclass(frozen=True)
class Exercise:
    """A request, a workspace and the turns that solve it."""

    kind: str
    request: str
    repo: Mapping[str, str]
    turns: tuple[ScriptedTurn, ...]


DrawExercise = Callable[[Random, SnippetPool], Exercise | None]


@dataclass(frozen=True)
class SimulatedExercise:
    """The session of one exercise: its tokens, and where the loss applies."""

    kind: str
    tokens: npt.NDArray[np.uint32]
    loss_mask: npt.NDArray[np.bool_]  # all tokens but those of mistakes


def draw_exercise(rng: Random, pool: SnippetPool) -> Exercise:
    """Draw an exercise, its kind by weight."""
    from etude_nano.exercises_code import CODE_EXERCISES
    from etude_nano.exercises_files import FILE_EXERCISES
    from etude_nano.exercises_programs import PROGRAM_EXERCISES

    kinds = (*CODE_EXERCISES, *FILE_EXERCISES, *PROGRAM_EXERCISES)
    while True:
        (draw,) = rng.choices([draw for draw, _ in kinds], [weight for _, weight in kinds])
        if (exercise := draw(rng, pool)) is not None:
            return exercise


async def simulate_exercise(exercise: Exercise, dialect: Dialect, id: str = "practice") -> SimulatedExercise | None:
    """Return the session of an exercise, token-exact as in a pod; None if it deviates from the script."""
    trace = await simulate_session(id, exercise.request, exercise.repo, exercise.turns, dialect)
    if trace is None or trace.ending != "final" or find_deviation(exercise.turns, trace):
        return None
    demonstrated = demonstration_loss_mask(exercise.turns, trace)
    segment = trace.segments[0]
    return SimulatedExercise(exercise.kind, segment.tokens, ~segment.sampled | demonstrated)


# ------------------------------------------------------------------------------------------- building a session


class TranscriptBuilder:
    """Builds the turns of one session. It reads only files whose paths the session has shown so far."""

    def __init__(self, rng: Random, request: str, repo: Mapping[str, str]) -> None:
        self.rng, self.request = rng, request
        self.initial_repo, self.repo = dict(repo), dict(repo)
        self.known_paths = {path for path in repo if re.search(rf"(?<![\w.]){re.escape(path)}", request)}
        self.seen_text = request  # and every file read since
        self.turns: list[ScriptedTurn] = []
        self.mistake_due = rng.random() < MISTAKE_PROBABILITY

    def finish(self, kind: str, say: str) -> Exercise:
        self.turns.append(ScriptedTurn(Message("assistant", say)))
        return Exercise(kind, self.request, self.initial_repo, tuple(self.turns))

    # -- reading

    def discover(self, path: str, word: str = "") -> None:
        """Discover a file by searching for a word in it that has been mentioned, or by listing the files."""
        if path in self.known_paths:
            return
        word = word if re.fullmatch(r"\w+", word) and re.search(rf"\b{word}\b", self.seen_text) else ""
        if word and path.endswith(".py") and self.rng.random() < 0.6:
            defined = f"def {word}(" in self.repo[path] and self.rng.random() < 0.6
            self.grep(f"def {word}" if defined else word)
        else:
            self.list_files()

    def list_files(self) -> None:
        self.known_paths |= set(self.repo)
        self.call_tool("run_terminal_cmd", command="ls")

    def grep(self, pattern: str) -> str:
        """Search the code for a fixed string, and return it."""
        quoted = pattern if re.fullmatch(r"\w+", pattern) else f"'{pattern}'"
        self.known_paths |= {path for path, text in self.repo.items() if pattern in text and path.endswith(".py")}
        self.call_tool("run_terminal_cmd", command=f"grep -n {quoted} *.py")
        return pattern

    def read(self, *paths: str, word: str = "") -> None:
        """Read files, in one turn or one after another."""
        for path in paths:
            self.discover(path, word)
        self.seen_text += "".join(self.repo[path] for path in paths)
        first = paths[0]
        if self.mistake_due and self.rng.random() < 0.25:
            self.mistake_due = False
            wrong = self.rng.choice((f"src/{first}", f"lib/{first}", first.replace("_", ""), f"my_{first}"))
            if wrong not in self.repo:
                self.call_tool("read_file", target_file=wrong, mistake=True)
                if self.rng.random() < 0.7:
                    self.list_files()
        if len(paths) > 1 and self.rng.random() < 0.5:
            self.call_tools(*(ToolCall("read_file", {"target_file": path}, "") for path in paths))
            return
        for path in paths:
            self.call_tool("read_file", target_file=path)

    # -- editing

    def edit_file(self, path: str, after: str) -> None:
        """Edit a file until its text is `after`."""
        for edit in edits_between(path, self.repo[path], after):
            if self.mistake_due:
                self.mistake_due = False
                self._refused_edit(edit)
            self.apply_edit(edit)
        self.repo[path] = after

    def apply_edit(self, edit: TextEdit, *, mistake: bool = False) -> None:
        more = {"replace_all": True} if edit.everywhere else {}
        arguments: dict[str, Any] = {"file_path": edit.path, "old_string": edit.old, "new_string": edit.new, **more}
        self.call_tool("search_replace", mistake=mistake, **arguments)

    def _refused_edit(self, edit: TextEdit) -> None:
        """Try a wrong version of the edit that the tool refuses with a helpful error."""
        text = self.repo[edit.path]
        variant = self.rng.choice(("typo", "typo", "typo", "word", "word", "same", "elsewhere"))
        if variant == "same":
            wrong = replace(edit, new=edit.old)
        elif variant == "elsewhere":
            wrong = replace(edit, path=f"src/{edit.path}")
        else:
            distort = with_typo if variant == "typo" else with_wrong_word
            wrong = replace(edit, old=distort(edit.old, self.rng))
            if not wrong.old.strip() or wrong.old in text or wrong.old == wrong.new:
                return
        self.apply_edit(wrong, mistake=True)
        if variant != "same" and self.rng.random() < 0.4:
            self.call_tool("read_file", target_file=edit.path)

    # -- running

    def run(self, command: str, exit_code: int = 0) -> None:
        """Run a command; list the files first if it runs a script whose path is not known yet."""
        script = command.removeprefix("python3 ")
        if script in self.repo and script not in self.known_paths:
            if self.mistake_due and self.rng.random() < 0.5 and "test.py" not in self.repo:
                self.mistake_due = False
                self.call_tool("run_terminal_cmd", command="python3 test.py", mistake=True)
            self.list_files()
        self.call_tool("run_terminal_cmd", command=command, exit_code=exit_code)

    # -- turns

    def call_tool(self, name: str, *, mistake: bool = False, exit_code: int | None = None, **arguments: Any) -> None:
        message = Message("assistant", "", "", (ToolCall(name, arguments, ""),))
        self.turns.append(ScriptedTurn(message, mistake, exit_code))

    def call_tools(self, *calls: ToolCall) -> None:
        self.turns.append(ScriptedTurn(Message("assistant", "", "", calls)))


def with_typo(text: str, rng: Random) -> str:
    """Return the text with one character removed, doubled, or swapped with the next."""
    at = rng.randrange(max(1, len(text) - 1))
    one, two = text[at : at + 1], text[at + 1 : at + 2]
    return rng.choice((text[:at] + text[at + 1 :], text[:at] + one + text[at:], text[:at] + two + one + text[at + 2 :]))


def with_wrong_word(text: str, rng: Random) -> str:
    """Return the text with one word removed or replaced, as when quoted without looking."""
    found = list(re.finditer(r"\w+", text))
    if not found:
        return with_typo(text, rng)
    word = rng.choice(found)
    return text[: word.start()] + rng.choice(("", "value", "x", word.group() + "s")) + text[word.end() :]


def replace_line(text: str, number: int, line: str) -> str:
    """Return the text with the line of that number, counted from 1, replaced."""
    lines = text.split("\n")
    return "\n".join([*lines[: number - 1], line, *lines[number:]])


def find_lines(text: str, expression: str, accept: Callable[[str], bool] = bool) -> list[tuple[int, str]]:
    """Return the numbered lines that match an expression, without comments."""
    numbered: Sequence[tuple[int, str]] = list(enumerate(text.split("\n"), 1))
    return [
        (number, line)
        for number, line in numbered
        if re.search(expression, line) and not line.lstrip().startswith("#") and accept(line)
    ]
