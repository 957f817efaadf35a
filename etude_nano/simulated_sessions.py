"""Expert sessions without pods, for as many demonstrations as a small model takes to learn: a hundred times as fast.

The session, the dialect, the prompt and the code of the tools are the real ones. Only commands are not run by a shell:
the few that the expert uses are worked out here, in this process, on programs that came from our own books. What a pod
would print differently (a traceback through Python's own library) is not rehearsed. Never for code of a model.
"""

import contextlib
import io
import linecache
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Call, Message, ToolSchema
from etude.harness.model_client import TokenSpeaker
from etude.harness.prompt import Request
from etude.harness.scripted_policy import Scripted
from etude.harness.session import Session
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import shown_tools
from etude.harness.tools.tool import ErrorClass, Outcome
from etude.harness.toolserver.inside import editing, reading
from etude.harness.toolserver.inside.paths import Refusal, Workspace
from etude.harness.trace import Trace
from etude.inference.sampling import Sampling
from etude_nano.demonstrator import NANO_ENVIRONMENT, Manner, Turn, expert, fact, repository
from etude_nano.pod_sessions import BUDGET, NO_SUMMARIES, WINDOW, Demonstration, oddity, taught_tokens
from etude_nano.source import nano_tasks
from etude_nano.task_writer import WORKSPACE
from etude_nano.templates import Split

FILE_TOOLS = {
    "read_file": reading.read_file,
    "list_dir": reading.list_dir,
    "search_replace": editing.search_replace,
    "write": editing.write,
}
_INLINE = re.compile(r"""python3 -c (["'])(.*)\1""")
_GREP = re.compile(r"grep -n (?:'([^']*)'|(\w+)) \*\.py")


class NotRehearsed(Exception):
    """A command of which we cannot tell what a pod would print."""


async def rehearse(
    files: Mapping[str, str],
    dialect: Dialect,
    *,
    environment: ToolSet = NANO_ENVIRONMENT,
    manner: Manner | None = None,
    seed: int = 0,
) -> Demonstration | None:
    """The expert's session in the task of these files, token for token as in a pod; None where it cannot be told."""
    turns = expert(files, seed, manner)
    name = fact(files["task.toml"], "name")
    trace = await play(f"{name}-{seed}", files["instruction.md"], repository(files), turns, dialect, environment, name)
    if trace is None:
        return None
    facts = {"family": fact(files["task.toml"], "family"), "difficulty": int(fact(files["task.toml"], "difficulty"))}
    return Demonstration(name, facts, trace, taught_tokens(turns, trace), None, oddity(turns, trace))


async def play(
    id: str,
    request: str,
    repo: Mapping[str, str],
    turns: Sequence[Turn],
    dialect: Dialect,
    environment: ToolSet = NANO_ENVIRONMENT,
    task: str = "",
) -> Trace | None:
    """A session in which these turns are said about these files; None where a command cannot be told."""
    directory = tempfile.mkdtemp(prefix="nano-", dir=_memory())
    try:
        tools = RehearsedTools(repo, environment, directory)
        session = Session(
            Request(request, id=task or id),
            _Unmeasured(
                Scripted(dialect, [turn.message for turn in turns]), dialect, Sampling(), window=WINDOW, model="expert"
            ),
            tools,
            environment=environment,
            budget=BUDGET,
            summaries=NO_SUMMARIES,
            id=id,
        )
        trace = await session.run()
    except NotRehearsed:
        return None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return trace if len(trace.segments[-1].tokens) <= WINDOW - BUDGET.answer else None


class _Unmeasured(TokenSpeaker):
    """Does not count beforehand what it will be told, half of all the work; `play` sees whether there was room."""

    def measure(self, messages: Sequence[Message]) -> int:
        return 0


async def rehearsals(
    count: int, dialect: Dialect, *, split: Split = "train", seed: int = 0, manner: Manner | None = None
) -> AsyncIterator[Demonstration]:
    """Demonstrations for `count` distinct tasks, without those that cannot be told or did not go as they should."""
    for _, files in nano_tasks(count, split, seed):
        shown = await rehearse(files, dialect, manner=manner, seed=seed)
        if shown is not None and not shown.odd:
            yield shown


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class RehearsedTools:
    """Tools over a directory of ours."""

    plan = ""
    pod_seconds = 0.0
    root = WORKSPACE

    def __init__(self, files: Mapping[str, str], environment: ToolSet, directory: str) -> None:
        self.place = Path(directory) / "work"
        for path, text in files.items():
            target = self.place / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        shown = shown_tools(environment)
        self.schemas: Sequence[ToolSchema] = [each.schema for each in shown.values()]
        self.workspace = Workspace(str(self.place), f"{directory}/state", {name: name for name in shown})

    def interrupt(self) -> None:
        """Nothing here takes long enough."""

    async def run(self, calls: Sequence[Call]) -> list[Outcome]:
        return [self._run(call) for call in calls]

    def _run(self, call: Call) -> Outcome:
        given = dict(call.arguments or {})
        if call.name == "run_terminal_cmd":
            output, code = self._command(given["command"])
            text = output if output.endswith("\n") or not output else output + "\n"
            return Outcome(f"{text}[exit code {code}{'' if output else ', no output'}]", None, {"exit_code": code})
        try:
            result = FILE_TOOLS[call.name](self.workspace, given)
        except Refusal as error:
            return Outcome(str(error), cast(ErrorClass, error.kind))
        return Outcome(result["text"], None, result["facts"])

    def _command(self, command: str) -> tuple[str, int]:
        """What a command prints, and its exit code."""
        if command == "ls":
            return "".join(f"{name}\n" for name in sorted(os.listdir(self.place))), 0
        if found := _GREP.fullmatch(command):
            return self._grep(found.group(1) or found.group(2))
        if found := _INLINE.fullmatch(command):
            return run_python(self._sources(), found.group(2), "<string>")
        if command.startswith("python3 ") and (self.place / command[8:]).is_file():
            sources = self._sources()
            return run_python(sources, sources[command[8:]], f"{WORKSPACE}/{command[8:]}")
        if re.fullmatch(r"python3 \w+\.py", command):
            return f"python3: can't open file '{WORKSPACE}/{command[8:]}': [Errno 2] No such file or directory\n", 2
        raise NotRehearsed(command)

    def _sources(self) -> dict[str, str]:
        return {path.name: path.read_text(encoding="utf-8") for path in self.place.iterdir() if path.is_file()}

    def _grep(self, pattern: str) -> tuple[str, int]:
        expression = "|".join(map(re.escape, pattern.split("\\|")))
        found = [
            f"{name}:{number}:{line}\n"
            for name, text in sorted(self._sources().items())
            if name.endswith(".py")
            for number, line in enumerate(text.splitlines(), 1)
            if re.search(expression, line)
        ]
        return "".join(found), 0 if found else 1


# ------------------------------------------------------------------------------------------- Python in this process


def run_python(files: Mapping[str, str], source: str, path: str) -> tuple[str, int]:
    """What `python3` prints when it runs a script of the workspace, and its exit code."""
    output = io.StringIO()
    code = 0
    with _importable(files) as finder, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        finder.show(path, source)
        try:
            exec(compile(source, path, "exec"), {"__name__": "__main__", "open": finder.open})
        except SystemExit as error:
            code = 0 if error.code is None else 1
            output.write(f"{error.code}\n" if isinstance(error.code, str) else "")
        except NotRehearsed:
            raise
        except Exception as error:
            code = 1
            output.write(_traceback(error, {*finder.shown, "<string>"}))
    return output.getvalue(), code


def _traceback(error: Exception, theirs: set[str]) -> str:
    """As the interpreter would print it: without us, and without the machinery of imports."""
    report = traceback.TracebackException.from_exception(error)
    last = report.stack[-1].filename
    if last not in theirs and not last.startswith("<frozen importlib"):
        raise NotRehearsed(last)
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if frame.filename in theirs])
    return "".join(report.format())


class _Workspace(MetaPathFinder, Loader):
    """Modules out of texts, as if they lay in the workspace."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self.shown: list[str] = []

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if f"{name}.py" not in self.files:
            return None
        return ModuleSpec(name, self, origin=f"{WORKSPACE}/{name}.py")

    def exec_module(self, module: ModuleType) -> None:
        file = f"{WORKSPACE}/{module.__name__}.py"
        source = self.files[f"{module.__name__}.py"]
        self.show(file, source)
        module.__file__ = file
        module.__dict__["open"] = self.open
        exec(compile(source, file, "exec"), module.__dict__)

    def open(self, name: str) -> io.StringIO:
        """A file of the workspace, for reading."""
        if name not in self.files:
            raise NotRehearsed(name)
        return io.StringIO(self.files[name])

    def show(self, path: str, source: str) -> None:
        """Let tracebacks find the lines."""
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        self.shown.append(path)


@contextlib.contextmanager
def _importable(files: Mapping[str, str]) -> Iterator[_Workspace]:
    finder = _Workspace(files)
    before = set(sys.modules)
    sys.meta_path.insert(0, finder)
    try:
        yield finder
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if f"{name}.py" in files:
                del sys.modules[name]
        for path in finder.shown:
            linecache.cache.pop(path, None)
