"""Demonstrations without pods, for the many that a small model needs to learn from.

The session, the dialect, the prompt and the code of the tools are the real ones. Only commands do not run in a shell:
the few that demonstrations use are simulated in this process, on programs from our own templates. Commands whose output
would differ in a pod (a traceback through the standard library) are not simulated. Never use it for a model's code.
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
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from etude.chat.dialects.dialect import Dialect
from etude.chat.messages import Message, ToolCall, ToolSchema
from etude.harness.model_client import TokenModelClient
from etude.harness.prompt import SessionRequest
from etude.harness.scripted_policy import ScriptedPolicy
from etude.harness.session import Session, SessionSpec
from etude.harness.tool_set import ToolSet
from etude.harness.tools.executor import exposed_tools
from etude.harness.tools.tool import ErrorClass, ToolOutcome
from etude.harness.toolserver.inside import editing, reading
from etude.harness.toolserver.inside.paths import Refusal, ToolWorkspace
from etude.harness.trace import Trace
from etude.inference.sampling import Sampling
from etude_nano.demonstrator import (
    NANO_TOOL_SET,
    DemonstratorStyle,
    ScriptedTurn,
    demonstration_turns,
    task_toml_value,
    workspace_files,
)
from etude_nano.pod_sessions import BUDGET, NO_SUMMARIES, WINDOW, Demonstration, demonstration_loss_mask, find_deviation
from etude_nano.task_writer import WORKSPACE

FILE_TOOLS = {
    "read_file": reading.read_file,
    "list_dir": reading.list_dir,
    "search_replace": editing.search_replace,
    "write": editing.write,
}
_INLINE = re.compile(r"""python3 -c (["'])(.*)\1""")
_GREP = re.compile(r"grep -n (?:'([^']*)'|(\w+)) \*\.py")


class CannotSimulate(Exception):
    """Raised for a command whose output in a pod is not known here, and for a call that was parsed incompletely."""


async def simulate_demonstration(
    files: Mapping[str, str],
    dialect: Dialect,
    *,
    tool_set: ToolSet = NANO_TOOL_SET,
    style: DemonstratorStyle | None = None,
    seed: int = 0,
) -> Demonstration | None:
    """Return the demonstration of the task of these files, token-exact as in a pod; None if it cannot be simulated."""
    turns = demonstration_turns(files, seed, style)
    config, repo = files["task.toml"], workspace_files(files)
    name = task_toml_value(config, "name")
    trace = await simulate_session(f"{name}-{seed}", files["instruction.md"], repo, turns, dialect, tool_set, name)
    if trace is None:
        return None
    metadata = {"family": task_toml_value(config, "family"), "difficulty": int(task_toml_value(config, "difficulty"))}
    mask, deviation = demonstration_loss_mask(turns, trace), find_deviation(turns, trace)
    return Demonstration(name, metadata, trace, mask, None, deviation)


async def simulate_session(
    id: str,
    request: str,
    repo: Mapping[str, str],
    turns: Sequence[ScriptedTurn],
    dialect: Dialect,
    tool_set: ToolSet = NANO_TOOL_SET,
    task: str = "",
) -> Trace | None:
    """Return the trace of a session with these turns and files; None if it cannot be simulated or is too long."""
    directory = tempfile.mkdtemp(prefix="nano-", dir=_memory_directory())
    try:
        tools = SimulatedToolExecutor(repo, tool_set, directory)
        policy = ScriptedPolicy(dialect, [turn.message for turn in turns])
        session = Session(
            SessionRequest(request, id=task or id),
            _NonCountingClient(policy, dialect, Sampling(), window=WINDOW, model="expert"),
            tools,
            SessionSpec(tool_set, BUDGET, NO_SUMMARIES, id=id),
        )
        trace = await session.run()
    except CannotSimulate:
        return None
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return trace if len(trace.segments[-1].tokens) <= WINDOW - BUDGET.max_turn_tokens else None


class _NonCountingClient(TokenModelClient):
    """Skips counting tokens in advance, which is half of the work; `simulate_session` checks the length at the end."""

    def count_tokens(self, messages: Sequence[Message]) -> int:
        return 0


def _memory_directory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class SimulatedToolExecutor:
    """Runs the file tools on a local directory, and simulates commands."""

    plan = ""
    pod_seconds = 0.0
    root = WORKSPACE

    def __init__(self, files: Mapping[str, str], tool_set: ToolSet, directory: str) -> None:
        self.directory = Path(directory) / "work"
        for path, text in files.items():
            target = self.directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        exposed = exposed_tools(tool_set)
        self.schemas: Sequence[ToolSchema] = [each.schema for each in exposed.values()]
        self.workspace = ToolWorkspace(str(self.directory), f"{directory}/state", {name: name for name in exposed})

    def interrupt(self) -> None:
        """Do nothing: no call takes long enough to interrupt."""

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolOutcome]:
        return [self._run(call) for call in calls]

    def _run(self, call: ToolCall) -> ToolOutcome:
        given = dict(call.arguments or {})
        functions = {each["function"]["name"]: each["function"] for each in self.schemas}
        required = functions[call.name]["parameters"].get("required", ())
        if missing := [name for name in required if name not in given]:  # a text contains the markup of tool calls
            raise CannotSimulate(f"{call.name} without {missing[0]}")
        if call.name == "run_terminal_cmd":
            output, code = self._command(given["command"])
            text = output if output.endswith("\n") or not output else output + "\n"
            return ToolOutcome(f"{text}[exit code {code}{'' if output else ', no output'}]", None, {"exit_code": code})
        try:
            result = FILE_TOOLS[call.name](self.workspace, given)
        except Refusal as error:
            return ToolOutcome(str(error), cast(ErrorClass, error.kind))
        return ToolOutcome(result["text"], None, result["facts"])

    def _command(self, command: str) -> tuple[str, int]:
        """Return the output of a command and its exit code."""
        if command == "ls":
            return "".join(f"{name}\n" for name in sorted(os.listdir(self.directory))), 0
        if found := _GREP.fullmatch(command):
            return self._grep(found.group(1) or found.group(2))
        if found := _INLINE.fullmatch(command):
            return run_python(self._sources(), found.group(2), "<string>")
        if command.startswith("python3 ") and (self.directory / command[8:]).is_file():
            sources = self._sources()
            return run_python(sources, sources[command[8:]], f"{WORKSPACE}/{command[8:]}")
        if re.fullmatch(r"python3 \w+\.py", command):
            return f"python3: can't open file '{WORKSPACE}/{command[8:]}': [Errno 2] No such file or directory\n", 2
        raise CannotSimulate(command)

    def _sources(self) -> dict[str, str]:
        return {path.name: path.read_text(encoding="utf-8") for path in self.directory.iterdir() if path.is_file()}

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
    """Return the output and the exit code of `python3` for a script of the workspace."""
    output = io.StringIO()
    code = 0
    with _importable(files) as importer, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        importer.register_source(path, source)
        try:
            exec(compile(source, path, "exec"), {"__name__": "__main__", "open": importer.open})
        except SystemExit as error:
            code = 0 if error.code is None else 1
            output.write(f"{error.code}\n" if isinstance(error.code, str) else "")
        except CannotSimulate:
            raise
        except Exception as error:
            code = 1
            output.write(_traceback(error, {*importer.registered, "<string>"}))
    return output.getvalue(), code


def _traceback(error: Exception, sources: set[str]) -> str:
    """Format a traceback as the interpreter would: without our frames and without those of the import machinery."""
    report = traceback.TracebackException.from_exception(error)
    last = report.stack[-1].filename
    if last not in sources and not last.startswith("<frozen importlib"):
        raise CannotSimulate(last)
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if frame.filename in sources])
    return "".join(report.format())


class _WorkspaceImporter(MetaPathFinder, Loader):
    """Imports modules from texts, as if they were files of the workspace."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self.registered: list[str] = []

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if f"{name}.py" not in self.files:
            return None
        return ModuleSpec(name, self, origin=f"{WORKSPACE}/{name}.py")

    def exec_module(self, module: ModuleType) -> None:
        file = f"{WORKSPACE}/{module.__name__}.py"
        source = self.files[f"{module.__name__}.py"]
        self.register_source(file, source)
        module.__file__ = file
        module.__dict__["open"] = self.open
        exec(compile(source, file, "exec"), module.__dict__)

    def open(self, name: str) -> io.StringIO:
        """Open a file of the workspace for reading."""
        if name not in self.files:
            raise CannotSimulate(name)
        return io.StringIO(self.files[name])

    def register_source(self, path: str, source: str) -> None:
        """Make the lines of a source available to tracebacks."""
        linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
        self.registered.append(path)


@contextlib.contextmanager
def _importable(files: Mapping[str, str]) -> Iterator[_WorkspaceImporter]:
    importer = _WorkspaceImporter(files)
    before = set(sys.modules)
    sys.meta_path.insert(0, importer)
    try:
        yield importer
    finally:
        sys.meta_path.remove(importer)
        for name in set(sys.modules) - before:
            if f"{name}.py" in files:
                del sys.modules[name]
        for path in importer.registered:
            linecache.cache.pop(path, None)
